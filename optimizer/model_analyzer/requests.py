"""``parameters`` and ``perf_analyzer_flags``: one request, and how many of them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Final

from optimizer.load.windows import LONGEST_WINDOW_MS, SHORTEST_WINDOW_MS
from optimizer.model_analyzer.keys import PARAMETERS, PERF_ANALYZER_FLAGS, ignored, unsupported
from optimizer.model_analyzer.source import Part, Source
from optimizer.model_analyzer.values import Values
from optimizer.profile.yaml_lines import Located
from optimizer.untrusted import one_line

RATE_LIMITS: Final = ("run_config_search_min_request_rate", "run_config_search_max_request_rate")
RATE_FLAGS: Final = ("request-rate-range", "request-intervals")
CONCURRENCY_LIMIT: Final = "run_config_search_max_concurrency"
DISABLED: Final = "run_config_search_disable"
ARRIVALS: Final = ("constant", "poisson")  # the first is perf_analyzer's default

Given = Mapping[str, Located]


def requests(source: Source) -> Part:
    """Raises BadInputError."""
    flags = source.section("perf_analyzer_flags", PERF_ANALYZER_FLAGS)
    parameters = source.parameters(PARAMETERS)
    if {"concurrency", "request_rate"} <= parameters.keys():
        raise source.values.fault(parameters["request_rate"], "stands beside concurrency; leave one of them out")
    part = Part()
    part.sections.update(_request(source, flags, parameters))
    if _at_a_rate(source, flags, parameters):
        part.flags.extend(_rate(source, flags))
    elif most := _max_concurrency(source, flags, parameters):
        part.sections["load", "max_concurrency"] = most
    part.flags.extend(_window(source, flags))
    part.flags.extend(_protocol(source, flags, at_a_rate="--load=rate" in part.flags))
    return part


def _request(source: Source, flags: Given, parameters: Given) -> dict[tuple[str, str], Located]:
    values = source.values
    found: dict[tuple[str, str], Located] = {}
    if (where := flags.get("batch-size", parameters.get("batch_sizes"))) is not None:
        first, *others = dict.fromkeys(values.numbers(where))
        found["request", "batch_size"] = replace(where, value=first)
        if others:
            named = one_line(", ".join(map(str, others)), 60)
            told = f"several request sizes in one run; this one takes {first}: --request-batch-size for {named}"
            source.notes.say(where, unsupported(told))
    if (where := flags.get("shape")) is not None:
        found["request", "shapes"] = replace(where, value=dict(_shape(one, values) for one in _each(where, values)))
    if (where := flags.get("string-data")) is not None:
        found["request", "string_data"] = replace(where, value=values.text(where))
    if (where := flags.get("string-length")) is not None:
        found["request", "string_length"] = replace(where, value=values.whole(where))
    if (where := flags.get("input-data")) is not None:
        first_data = _each(where, values)[0]
        if (text := values.text(first_data)) not in ("random", "zero"):
            text = str(values.path(first_data).absolute())
        found["request", "input_data"] = replace(first_data, value=text)
    return found


def _each(where: Located, values: Values) -> tuple[Located, ...]:
    if where.value == ():
        raise values.fault(where, "is empty; give at least one value")
    return where.value if isinstance(where.value, tuple) else (where,)


def _shape(where: Located, values: Values) -> tuple[str, Located]:
    name, _, dims = values.text(where).rpartition(":")
    if not name:
        raise values.fault(where, "is not NAME:D1,D2, such as INPUT0:16,4")
    numbers = values.numbers(replace(where, value=dims))
    return name, replace(where, value=tuple(replace(where, value=number) for number in numbers))


def _at_a_rate(source: Source, flags: Given, parameters: Given) -> bool:
    return (
        "request_rate" in parameters
        or source.is_true("request_rate_search_enable")
        or any(name in source.given for name in RATE_LIMITS)
        or any(name in flags for name in RATE_FLAGS)
    )


def _rate(source: Source, flags: Given) -> list[str]:
    arrivals = ARRIVALS[0]
    if "request-distribution" in flags:
        arrivals = source.values.one_of(flags["request-distribution"], ARRIVALS)
    if "request-intervals" in flags:
        arrivals = str(source.values.path(flags["request-intervals"]))
    for where in (source.given.get(CONCURRENCY_LIMIT), flags.get("concurrency-range")):
        if where is not None:
            source.notes.say(where, ignored("requests are sent at a rate"))
    return ["--load=rate", f"--arrivals={arrivals}"]


def _max_concurrency(source: Source, flags: Given, parameters: Given) -> Located | None:
    values, limit = source.values, source.given.get(CONCURRENCY_LIMIT)
    found = None if limit is None else replace(limit, value=values.whole(limit))
    if source.is_true(DISABLED):
        found = replace(source.given[DISABLED], value=1)
    if (listed := parameters.get("concurrency")) is not None:
        found = replace(listed, value=max(values.numbers(listed)))
    if (range_ := flags.get("concurrency-range")) is not None:  # START:END:STEP
        end = values.text(range_).split(":")[:2][-1]
        found = replace(range_, value=values.whole(replace(range_, value=end)))
    if limit is not None and found is not None and found.keys != limit.keys:
        source.notes.say(limit, ignored("the load is given otherwise"))
    if "request-distribution" in flags:
        source.notes.say(flags["request-distribution"], ignored("requests are not sent at a rate"))
    return found


def _window(source: Source, flags: Given) -> list[str]:
    where = flags.get("measurement-interval")
    if where is None:
        return []
    milliseconds = source.values.whole(where)
    if SHORTEST_WINDOW_MS <= milliseconds <= LONGEST_WINDOW_MS:
        return [f"--measurement-interval={milliseconds}ms"]
    bounds = f"{SHORTEST_WINDOW_MS:g} to {LONGEST_WINDOW_MS:g} ms"
    source.notes.say(where, unsupported(f"windows other than {bounds}; tune's own are taken"))
    return []


def _protocol(source: Source, flags: Given, *, at_a_rate: bool) -> list[str]:
    where = flags.get("protocol", source.given.get("client_protocol"))
    if where is None:
        return []
    protocol = source.values.one_of(replace(where, value=source.values.text(where).lower()), ("http", "grpc"))
    if protocol == "http" and at_a_rate:
        source.notes.say(where, unsupported("requests at a rate are sent by gRPC"))
        return []
    return [f"--protocol={protocol}"]
