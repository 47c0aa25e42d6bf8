"""What there is to say about an outcome, wherever it is shown: headline, figures, comparisons."""

from __future__ import annotations

from typing import TYPE_CHECKING

from objectives import pareto
from objectives.confidence import Verdict
from objectives.metrics import METRICS, Measurement
from objectives.sla import worst_violation
from optimizer.report import words
from optimizer.trial import latest_points

if TYPE_CHECKING:
    from optimizer.outcome import Outcome
    from optimizer.problem import Problem
    from optimizer.trial import Point, Trial

_PERCENTILES = ("latency-p50", "latency-p90", "latency-p95", "latency-p99")
_ALWAYS_TOLD = {"throughput", *_PERCENTILES}


def headline(outcome: Outcome, problem: Problem) -> str:
    """The answer in one sentence: the throughput, or that nothing meets the bounds and what holds it back."""
    goal = words.bounds(problem.constraints)
    if outcome.recommended is not None:
        within = f" within {goal}" if goal else ""
        return f"{problem.model}: {words.of(outcome.recommended, 'throughput')}{within}"
    failing = f"no configuration meets {goal}" if goal else "no configuration could be measured"
    because = f": {outcome.holds_back.rstrip('.')}" if outcome.holds_back else ""
    return f"{problem.model}: {failing}{because}"


def figures(point: Point, problem: Problem) -> list[tuple[str, str]]:
    """(label, figures with units) of one measured point; what was asked for is there, known or not."""
    load, measurement = point.load, point.measurement
    throughput = words.of(point, "throughput")
    batch = load.request_batch_size
    if batch > 1 and measurement.throughput_infer_per_sec is not None:
        requests = words.number(measurement.throughput_infer_per_sec / batch)
        size = f"{batch:,} samples each" if problem.request_mix is None else f"{batch:,.4g} samples on average"
        throughput += f" = {requests} req/s of {size}"
    served = f"concurrency {words.load(load)} (requests in flight)"
    if load.request_rate:
        served = f"{words.load(load)}, sent whatever was answered"
    if measurement.mean_batch_size is not None:
        served += f", mean batch {words.number(measurement.mean_batch_size)} samples"
    told = [
        ("throughput", throughput),
        ("latency", " · ".join(f"{words.short(name)} {words.of(point, name)}" for name in _PERCENTILES)),
        ("load", served),
    ]
    asked = [*(metric.name for metric in problem.objectives), *(c.metric for c in problem.constraints)]
    asked += [name for name in (memory_of(measurement), "energy") if METRICS[name].value(measurement) is not None]
    rest = [name for name in dict.fromkeys(asked) if name not in _ALWAYS_TOLD]
    told += [(words.spoken(name), words.of(point, name)) for name in rest]
    gpu = words.gpu(measurement)
    return [*told, ("GPU", gpu)] if gpu else told


def memory_of(measurement: Measurement) -> str:
    """The metric of what was in use: the GPU's memory where it is known."""
    return "memory" if measurement.gpu_memory_bytes is None else "gpu-memory"


def verdict(outcome: Outcome) -> str:
    """What the confirmation on fresh servers says of the recommendation, or that there was none."""
    found = outcome.confirmed
    if found is None:
        tried = [one for one in outcome.again if one.point is not outcome.baseline]
        why = "what was measured again did not pass" if tried else "the time had run out"
        return f"UNDECIDED: not measured again on fresh servers, {why}"
    judged = found.judged
    latency = METRICS[found.latency]
    figures = [words.interval(METRICS["throughput"], found.throughput)]
    if not found.latency_ms.is_unknown:
        figures.append(f"{words.short(latency.name)} {words.interval(latency, found.latency_ms)}")
    measured = f"{words.count(found.windows, 'measurement')} on {words.count(found.servers, 'fresh server')}"
    because = "" if judged.verdict is Verdict.PASS else f": {judged.reason}"
    return f"{words.verdict(judged)}{because} ({', '.join(figures)}; {measured})"


def comparisons(outcome: Outcome, problem: Problem) -> list[tuple[str, str, str]]:
    """(configuration, its figures at its best load, gain of the recommendation over it)."""
    latency = words.judged_latency(problem.constraints)
    goal = words.bounds(problem.constraints)
    missed = f"no measured load meets {goal}" if goal else "not measured"

    def row(name: str, point: Point | None, gain: float | None, role: str = "") -> tuple[str, str, str]:
        missing = "the run ended before it" if role in outcome.untried else missed
        told = words.performance(point, latency) if point else missing
        if point and worst_violation(problem.constraints, point.measurement) > 0:
            told += f", misses {goal} on fresh servers"
        return name, told, f"{gain:.2f}x" if gain else ""

    return [
        row("recommended", outcome.recommended, None),
        row("baseline, as given", outcome.baseline, outcome.speedup, "baseline"),
        row(
            "dynamic_batching {}",
            outcome.dynamic_batching,
            outcome.speedup_over_dynamic_batching,
            "dynamic_batching",
        ),
    ]


def best_load(trial: Trial, problem: Problem) -> tuple[Point | None, bool]:
    """The point that stands for a trial, and whether it meets the bounds; the closest one where none does."""
    measured = latest_points([trial])
    best = pareto.best(measured, problem.objectives, problem.constraints)
    return best or pareto.closest(measured, problem.constraints), best is not None
