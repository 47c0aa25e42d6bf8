"""``constraints`` and ``objectives``: what must hold, and what is best."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Final

from optimizer.model_analyzer.keys import CONSTRAINTS, OBJECTIVES, ignored, unsupported
from optimizer.model_analyzer.source import Part, Source
from optimizer.profile.yaml_lines import Located

LATENCIES: Final = {  # as Model Analyzer calls them -> as tune's SLA does
    "perf_latency_avg": "avg",
    "perf_latency_p90": "p90",
    "perf_latency_p95": "p95",
    "perf_latency_p99": "p99",
    "perf_latency": "p99",
}
METRICS: Final = {
    "perf_throughput": "throughput",
    **{name: f"latency-{short}" for name, short in LATENCIES.items()},
    "gpu_used_memory": "memory",
    "cpu_used_ram": "memory",
}
SHORT_FORMS: Final = {  # at the top of a file -> the constraints that they take the place of
    "latency_budget": ("perf_latency_p99", "perf_latency"),
    "min_throughput": ("perf_throughput",),
}


def goals(source: Source) -> Part:
    """Raises BadInputError."""
    part = Part()
    bounds = _bounds(source)
    for name, short in reversed(
        LATENCIES.items()
    ):  # perf_latency is the older name: the other is the one that counts
        if name in bounds:
            number, where = bounds[name]
            part.sections["sla", short] = replace(where, value=f"{_plain(number)}ms")
    if "perf_throughput" in bounds:
        part.flags.append(f"--min-throughput={_plain(bounds['perf_throughput'][0])}/s")
    if "gpu_used_memory" in bounds:
        part.flags.append(f"--max-memory={_plain(bounds['gpu_used_memory'][0])}MB")
    if wanted := _objectives(source):
        part.flags.append(f"--objective={','.join(wanted)}")
    return part


def _bounds(source: Source) -> dict[str, tuple[float, Located]]:
    """By the name of the constraint: the bound and where it stands."""
    given = source.section("constraints", CONSTRAINTS)
    found: dict[str, tuple[float, Located]] = {}
    for name, where in given.items():
        side = "min" if "throughput" in name else "max"
        sides = source.values.mapping(where, (side,))
        if side not in sides:
            raise source.values.fault(where, f"gives no {side}")
        found[name] = source.values.positive(sides[side]), where
    for short, replaced in SHORT_FORMS.items():
        if short not in source.given:
            continue
        for name in given.keys() & set(replaced):
            source.notes.say(found.pop(name)[1], ignored(f"{short} takes its place"))
        found[replaced[0]] = source.values.positive(source.given[short]), source.given[short]
    return found


def _objectives(source: Source) -> list[str]:
    """As tune calls them. In Model Analyzer they are weighted: here the heaviest counts most."""
    where = source.find("objectives")
    if where is None:
        return []
    weights = _weights(source, where)
    if len(set(weights.values())) > 1:
        source.notes.say(where, unsupported("weights; the heaviest comes first, and the Pareto front has all"))
    ordered = sorted(weights, key=lambda name: -weights[name])
    return list(dict.fromkeys(METRICS[name] for name in ordered if name in METRICS))


def _weights(source: Source, where: Located) -> Mapping[str, float]:
    if isinstance(where.value, dict):
        given = source.values.mapping(where, list(OBJECTIVES))
        source.notes.say_each(given, OBJECTIVES)
        return {name: source.values.positive(weight) for name, weight in given.items()}
    names = {source.values.one_of(name, list(OBJECTIVES)): name for name in source.values.names(where)}
    for name, at in names.items():  # each under a path of its own: they may stand on one line
        source.notes.say(replace(at, keys=(*at.keys, name)), OBJECTIVES[name])
    return dict.fromkeys(names, 1.0)


def _plain(number: float) -> str:
    return f"{number:.6f}".rstrip("0").rstrip(".")
