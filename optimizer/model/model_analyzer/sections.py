"""Import the constraints, objectives, requests, load and composing models of a Model Analyzer file.

The functions raise BadInputError for values that they cannot read.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Final, TypeAlias

from objectives.metrics import plain_number
from objectives.sla import metric_name
from optimizer.core.measurement_windows import MAX_WINDOW_MS, MIN_WINDOW_MS
from optimizer.core.safe_text import one_line
from optimizer.core.yaml_lines import LocatedValue
from optimizer.model.model_analyzer.keys import (
    COMPOSING_MODEL,
    CONSTRAINTS,
    LATENCIES,
    OBJECTIVES,
    PARAMETERS,
    PERF_ANALYZER_FLAGS,
    TOKEN_LATENCIES,
    ignored,
    unsupported,
)
from optimizer.model.model_analyzer.settings import (
    BLS_MODELS,
    COMPOSING_MODELS,
    CPU_ONLY_MODELS,
    PROFILE_CONCURRENTLY,
    SEARCH_DISABLED,
    DimensionChoices,
    ImportedSettings,
    ModelSettings,
    ValueReader,
)
from optimizer.model.model_analyzer.sweeps import KIND, KIND_CPU, read_choices
from optimizer.options.run_options import GENERATED_DATA

LocatedValues: TypeAlias = Mapping[str, LocatedValue]

SLA_KEYS: Final = {  # constraint of Model Analyzer -> key of the profile's sla section
    **LATENCIES,
    **{name: metric.name.replace("-", "_") for name, metric in TOKEN_LATENCIES.items()},
}
METRICS: Final = {  # objective of Model Analyzer -> tune's
    "perf_throughput": "throughput",
    "output_token_throughput": "output-throughput",
    **{name: metric_name(short.replace("_", "-")) for name, short in SLA_KEYS.items()},
    "gpu_used_memory": "memory",
    "cpu_used_ram": "memory",
}
SHORT_FORMS: Final = {  # key at the top of the file -> constraints that it replaces
    "latency_budget": ("perf_latency_p99", "perf_latency"),
    "min_throughput": ("perf_throughput",),
}
RATE_LIMITS: Final = ("run_config_search_min_request_rate", "run_config_search_max_request_rate")
RATE_FLAGS: Final = ("request-rate-range", "request-intervals")
CONCURRENCY_LIMIT: Final = "run_config_search_max_concurrency"
ARRIVALS: Final = ("constant", "poisson")  # the first is perf_analyzer's default
BLS_FLAG: Final = "bls-composing-models"


def import_goals(settings: ModelSettings, result: ImportedSettings) -> None:
    """Import the constraints as SLA and options, the objectives as an option."""
    bounds = _bounds(settings)
    for name, short in reversed(SLA_KEYS.items()):  # perf_latency_p99 overrides its older name perf_latency
        if name in bounds:
            number, where = bounds[name]
            result.sections["sla", short] = replace(where, value=f"{plain_number(number, 6)}ms")
    if "perf_throughput" in bounds:
        result.options["min-throughput"] = f"{plain_number(bounds['perf_throughput'][0], 6)}/s"
    if "gpu_used_memory" in bounds:
        result.options["max-memory"] = f"{plain_number(bounds['gpu_used_memory'][0], 6)}MB"
    if objectives := _objectives(settings):
        result.options["objective"] = ",".join(objectives)


def _bounds(settings: ModelSettings) -> dict[str, tuple[float, LocatedValue]]:
    """Return each constraint's bound and its place in the file."""
    constraints = settings.section("constraints", CONSTRAINTS)
    bounds: dict[str, tuple[float, LocatedValue]] = {}
    for name, where in constraints.items():
        side = "min" if "throughput" in name else "max"
        sides = settings.reader.mapping(where, (side,))
        if side not in sides:
            raise settings.reader.fault(where, f"has no {side}")
        bounds[name] = settings.reader.positive(sides[side]), where
    for short, replaced in SHORT_FORMS.items():
        if short not in settings.file_keys:
            continue
        for name in constraints.keys() & set(replaced):
            settings.reader.note(bounds.pop(name)[1], ignored(f"{short} replaces it"))
        bounds[replaced[0]] = settings.reader.positive(settings.file_keys[short]), settings.file_keys[short]
    return bounds


def _objectives(settings: ModelSettings) -> list[str]:
    """Return tune's objectives, the one with the largest weight first."""
    where = settings.find("objectives")
    if where is None:
        return []
    weights = _weights(settings, where)
    if len(set(weights.values())) > 1:
        settings.reader.note(
            where, unsupported("weights; the heaviest objective comes first, and the Pareto front covers all")
        )
    ordered = sorted(weights, key=lambda name: -weights[name])
    return list(dict.fromkeys(METRICS[name] for name in ordered if name in METRICS))


def _weights(settings: ModelSettings, where: LocatedValue) -> Mapping[str, float]:
    if isinstance(where.value, dict):
        weights = settings.reader.section(where, OBJECTIVES)
        return {name: settings.reader.positive(weight) for name, weight in weights.items()}
    names = {settings.reader.one_of(name, list(OBJECTIVES)): name for name in settings.reader.names(where)}
    for name, location in names.items():  # a path for each, because all may be on one line
        settings.reader.note(replace(location, keys=(*location.keys, name)), OBJECTIVES[name])
    return dict.fromkeys(names, 1.0)


def import_requests(settings: ModelSettings, result: ImportedSettings) -> None:
    """Import the requests, the load and how they are sent, from ``parameters`` and ``perf_analyzer_flags``."""
    flags = settings.section("perf_analyzer_flags", PERF_ANALYZER_FLAGS)
    parameters = settings.parameters(PARAMETERS)
    if {"concurrency", "request_rate"} <= parameters.keys():
        raise settings.reader.fault(
            parameters["request_rate"], "is given together with concurrency; leave one of them out"
        )
    result.sections.update(_request(settings, flags, parameters))
    if _at_a_rate(settings, flags, parameters):
        result.options.update(_rate(settings, flags))
    elif limit := _max_concurrency(settings, flags, parameters):
        result.sections["load", "max_concurrency"] = limit
    result.options.update(_window(settings, flags))
    result.options.update(_protocol(settings, flags, at_a_rate="load" in result.options))
    result.options.update(_shared_memory(settings, flags, at_a_rate="load" in result.options))


def _request(
    settings: ModelSettings, flags: LocatedValues, parameters: LocatedValues
) -> dict[tuple[str, str], LocatedValue]:
    reader = settings.reader
    request: dict[tuple[str, str], LocatedValue] = {}
    if (where := flags.get("batch-size", parameters.get("batch_sizes"))) is not None:
        first, *other_sizes = dict.fromkeys(reader.numbers(where))
        request["request", "batch_size"] = replace(where, value=first)
        if other_sizes:
            sizes = one_line(", ".join(map(str, other_sizes)), 60)
            reason = f"several request sizes in one run; this one takes {first}: --request-batch-size for {sizes}"
            settings.reader.note(where, unsupported(reason))
    if (where := flags.get("shape")) is not None:
        request["request", "shapes"] = replace(
            where, value=dict(_shape(item, reader) for item in _items(where, reader))
        )
    for flag, read in (
        ("string-data", reader.text),
        ("string-length", reader.whole),
        ("sequence-length", reader.whole),
    ):
        if (where := flags.get(flag)) is not None:
            request["request", flag.replace("-", "_")] = replace(where, value=read(where))
    if (where := flags.get("input-data")) is not None:
        first_data = _items(where, reader)[0]
        if (text := reader.text(first_data)) not in GENERATED_DATA:
            text = str(reader.path(first_data).absolute())
        request["request", "input_data"] = replace(first_data, value=text)
    return request


def _items(where: LocatedValue, reader: ValueReader) -> tuple[LocatedValue, ...]:
    if where.value == ():
        raise reader.fault(where, "is empty; give at least one value")
    return where.value if isinstance(where.value, tuple) else (where,)


def _shape(where: LocatedValue, reader: ValueReader) -> tuple[str, LocatedValue]:
    name, _, dims = reader.text(where).rpartition(":")
    if not name:
        raise reader.fault(where, "is not NAME:D1,D2, such as INPUT0:16,4")
    numbers = reader.numbers(replace(where, value=dims))
    return name, replace(where, value=tuple(replace(where, value=number) for number in numbers))


def _at_a_rate(settings: ModelSettings, flags: LocatedValues, parameters: LocatedValues) -> bool:
    return (
        "request_rate" in parameters
        or settings.is_true("request_rate_search_enable")
        or any(name in settings.file_keys for name in RATE_LIMITS)
        or any(name in flags for name in RATE_FLAGS)
    )


def _rate(settings: ModelSettings, flags: LocatedValues) -> dict[str, str]:
    timing = {"request-distribution": ARRIVALS[0]}
    if "request-distribution" in flags:
        timing = {"request-distribution": settings.reader.one_of(flags["request-distribution"], ARRIVALS)}
    if "request-intervals" in flags:
        timing = {"request-intervals": str(settings.reader.path(flags["request-intervals"]))}
    for where in (settings.file_keys.get(CONCURRENCY_LIMIT), flags.get("concurrency-range")):
        if where is not None:
            settings.reader.note(where, ignored("requests are sent at a rate"))
    return {"load": "rate", **timing}


def _max_concurrency(settings: ModelSettings, flags: LocatedValues, parameters: LocatedValues) -> LocatedValue | None:
    reader, limit = settings.reader, settings.file_keys.get(CONCURRENCY_LIMIT)
    chosen = None if limit is None else replace(limit, value=reader.whole(limit))
    if settings.is_true(SEARCH_DISABLED):
        chosen = replace(settings.file_keys[SEARCH_DISABLED], value=1)
    if (listed := parameters.get("concurrency")) is not None:
        chosen = replace(listed, value=max(reader.numbers(listed)))
    if (range_ := flags.get("concurrency-range")) is not None:  # START:END:STEP
        end = reader.text(range_).split(":")[:2][-1]
        chosen = replace(range_, value=reader.whole(replace(range_, value=end)))
    if limit is not None and chosen is not None and chosen.keys != limit.keys:
        settings.reader.note(limit, ignored("another key gives the load"))
    if "request-distribution" in flags:
        settings.reader.note(flags["request-distribution"], ignored("requests are not sent at a rate"))
    return chosen


def _window(settings: ModelSettings, flags: LocatedValues) -> dict[str, str]:
    where = flags.get("measurement-interval")
    if where is None:
        return {}
    milliseconds = settings.reader.whole(where)
    if MIN_WINDOW_MS <= milliseconds <= MAX_WINDOW_MS:
        return {"measurement-interval": f"{milliseconds}ms"}
    bounds = f"{MIN_WINDOW_MS:g} to {MAX_WINDOW_MS:g} ms"
    settings.reader.note(where, unsupported(f"windows other than {bounds}; tune's default is used"))
    return {}


def _protocol(settings: ModelSettings, flags: LocatedValues, *, at_a_rate: bool) -> dict[str, str]:
    where = flags.get("protocol", settings.file_keys.get("client_protocol"))
    if where is None:
        return {}
    protocol = settings.reader.one_of(replace(where, value=settings.reader.text(where).lower()), ("http", "grpc"))
    if protocol == "http" and at_a_rate:
        settings.reader.note(where, unsupported("requests at a rate are sent by gRPC"))
        return {}
    return {"protocol": protocol}


def _shared_memory(settings: ModelSettings, flags: LocatedValues, *, at_a_rate: bool) -> dict[str, str]:
    where, size = flags.get("shared-memory"), flags.get("output-shared-memory-size")
    kind = "none" if where is None else settings.reader.one_of(where, ("none", "system", "cuda"))
    if where is not None and kind == "cuda" and at_a_rate:
        settings.reader.note(where, unsupported("requests at a rate use system shared memory only"))
        kind = "none"
    if kind == "none":
        if size is not None:
            settings.reader.note(size, ignored("no shared memory is used"))
        return {} if where is None else {"shared-memory": kind}
    return {"shared-memory": kind} | (
        {} if size is None else {"output-shared-memory-size": f"{settings.reader.whole(size)}B"}
    )


def import_other_models(
    settings: ModelSettings, other_models: Sequence[LocatedValue], result: ImportedSettings
) -> None:
    """Import the composing and concurrent models. ``other_models`` are names of the file's other models."""
    for key in COMPOSING_MODELS:
        if (where := settings.file_keys.get(key)) is None:
            continue
        names = _composing_models(settings, where, result)
        if key == BLS_MODELS and names:  # an ensemble's are read from its config.pbtxt
            result.sections["model", key] = replace(where, value=tuple(names))
    if (where := settings.file_keys.get(CPU_ONLY_MODELS)) is not None:
        for name in _composing_models(settings, where, result):
            choices = result.composing.setdefault(settings.reader.name(name), {})
            choices.setdefault(KIND, DimensionChoices((KIND_CPU,), name))
    section = settings.section("perf_analyzer_flags", PERF_ANALYZER_FLAGS)
    if (where := section.get(BLS_FLAG)) is not None and ("model", BLS_MODELS) not in result.sections:
        result.sections["model", BLS_MODELS] = replace(where, value=tuple(settings.reader.names(where)))
    if settings.is_true(PROFILE_CONCURRENTLY) and other_models:
        result.sections["model", "concurrent_models"] = replace(
            settings.file_keys[PROFILE_CONCURRENTLY], value=tuple(other_models)
        )


def _composing_models(settings: ModelSettings, where: LocatedValue, result: ImportedSettings) -> list[LocatedValue]:
    """Return the names in a mapping by name, a list, or a list of such mappings; import the choices of each."""
    if isinstance(where.value, dict):
        for name, child in where.value.items():
            settings.reader.name(replace(child, value=name))
            if choices := read_choices(settings.reader.section(child, COMPOSING_MODEL), settings.reader):
                result.composing[name] = choices
        return [replace(child, value=name) for name, child in where.value.items()]
    if isinstance(where.value, tuple):
        return [name for item in where.value for name in _composing_models(settings, item, result)]
    return settings.reader.names(where)
