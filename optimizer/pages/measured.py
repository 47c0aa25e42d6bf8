"""Series of figures out of the trials of a run: loads, stages of a request, batches, progress."""

from __future__ import annotations

import math
from dataclasses import dataclass

from objectives.metrics import METRICS, Metric
from objectives.sla import worst_violation
from optimizer import batch_stats
from optimizer.report import summary, words
from optimizer.store.finished import FinishedRun
from optimizer.trial import Candidate, LoadPoint, Point, Trial, latest_points

# of a request, in their order; names are perf_analyzer's
STAGES = {
    "client_send_ms": "client send",
    "network_ms": "network",
    "queue_ms": "server queue",
    "compute_input_ms": "compute input",
    "compute_infer_ms": "compute infer",
    "compute_output_ms": "compute output",
    "client_recv_ms": "client receive",
}
MOST_LOADS = 16  # that a curve or a row of bars is shown at


def name(run: FinishedRun) -> str:
    """``<model>/<run>``, whatever folder it lies in."""
    return f"{run.problem.model}/{run.folder.path.resolve().name}"


def compared(run: FinishedRun) -> dict[str, Candidate]:
    """The configurations that are told of in full, by role, each once: what is recommended comes first."""
    outcome = run.outcome
    assert outcome is not None, "something was measured"
    chosen = outcome.recommended or outcome.closest
    roles: dict[str, Candidate] = {}
    if chosen is not None:
        roles["recommended" if outcome.recommended else "closest"] = chosen.candidate
    if "baseline" not in outcome.untried:
        roles["baseline"] = run.baseline
    if "dynamic_batching" not in outcome.untried:
        roles["dynamic_batching {}"] = run.dynamic_batching
    first: dict[Candidate, str] = {}
    for role, candidate in roles.items():
        first.setdefault(candidate, role)
    return {role: candidate for candidate, role in first.items()}


def best_loads(run: FinishedRun) -> list[tuple[Trial, Point | None, bool]]:
    """Each trial, its best load within the bounds, else the closest, and whether that meets them."""
    return [(trial, *summary.best_load(trial, run.problem)) for trial in run.trials]


def at_loads(run: FinishedRun, candidate: Candidate) -> list[Point]:
    """What is known of ``candidate``, by load ascending; at most MOST_LOADS of them, both ends included.

    Where fresh servers confirmed it, their figures stand for that load.
    """
    assert run.outcome is not None, "something was measured"
    points: dict[LoadPoint, Point] = {}
    for trial in run.trials:
        if trial.candidate == candidate:
            points.update((point.load, point) for point in latest_points([trial]))
    for one in run.outcome.again:
        if one.point.candidate == candidate:
            points[one.point.load] = one.point
    measured = [p for _, p in sorted(points.items()) if p.measurement.throughput_infer_per_sec is not None]
    if len(measured) <= MOST_LOADS:
        return measured
    return [measured[round(i * (len(measured) - 1) / (MOST_LOADS - 1))] for i in range(MOST_LOADS)]


def stages_ms(point: Point) -> list[float] | None:
    """Mean milliseconds in each of STAGES; None where none is known."""
    values = [getattr(point.measurement, name) for name in STAGES]
    return None if all(value is None for value in values) else [max(value or 0.0, 0.0) for value in values]


def executions(run: FinishedRun, point: Point) -> dict[int, int]:
    """Batches executed by their size in samples, over all measurements of ``point``'s configuration at its load."""
    texts = []
    for trial in run.trials:
        if trial.candidate == point.candidate:
            texts += [m.batch_stats for load, m in trial.measurements if load == point.load]
            texts += [one.measurement.batch_stats for one in trial.confirmations if one.load == point.load]
    counted = batch_stats.total(batch_stats.from_text(text) for text in texts)
    return {size: count for size, count, _ in counted}


@dataclass(frozen=True)
class Step:
    """One measurement of the search. ``at`` is when it ended; ``value`` is None where it misses a bound."""

    at: float
    value: float | None
    point: Point


@dataclass(frozen=True)
class Progress:
    """``steps`` in the order of measuring; ``unit`` says what ``at`` counts. ``ends`` is when the search ended."""

    steps: tuple[Step, ...]
    unit: str

    @property
    def ends(self) -> float:
        return self.steps[-1].at if self.steps else 0.0

    def best(self) -> list[tuple[float, float]]:
        """(at, best value so far), one a step up."""
        found: list[tuple[float, float]] = []
        for step in self.steps:
            if step.value is not None and (not found or step.value > found[-1][1]):
                found.append((step.at, step.value))
        return found


def progress(run: FinishedRun) -> Progress:
    """By the seconds that were spent on deploying and measuring, as the table keeps no other clock; by the number of
    the measurement where it keeps none."""
    timed = any(m.measure_seconds for trial in run.trials for _, m in trial.measurements)
    at, steps = 0.0, []
    for trial in run.trials:
        at += (trial.deploy_seconds or 0.0) if timed else 0.0
        for load, measurement in trial.measurements:
            at += (measurement.measure_seconds or 0.0) if timed else 1.0
            meets = measurement.stable and worst_violation(run.problem.constraints, measurement) <= 0
            value = METRICS["throughput"].value(measurement) if meets else None
            steps.append(Step(at, value, Point(trial.number, trial.candidate, load, measurement)))
    return Progress(tuple(steps), "seconds of deploying and measuring" if timed else "measurements")


def axis_of_loads(run: FinishedRun) -> str:
    return "request rate (req/s)" if run.problem.open_loop else "concurrency (requests in flight)"


def load_value(point: Point) -> float:
    return point.load.request_rate or float(point.load.concurrency)


def latency(run: FinishedRun) -> str:
    """The metric that the first bound on a latency is about; p95 where there is none."""
    return words.judged_latency(run.problem.constraints)


def drawable(point: Point, metric: Metric) -> float | None:
    """The value of ``metric`` where it is one that a plot can have."""
    value = metric.value(point.measurement)
    return value if value is not None and math.isfinite(value) and value > 0 else None
