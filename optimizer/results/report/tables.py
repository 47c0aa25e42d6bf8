"""Tables of a report, and the series of values that its plots draw."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

from objectives import batch_stats, response_times
from objectives.metrics import METRICS, Measurement, Metric
from objectives.sla import Verdict, costs
from optimizer.config.problem import Problem
from optimizer.core.candidate import Candidate
from optimizer.core.trial import Point, Trial, latest_points
from optimizer.results import configuration_text, formatting, outcome_values
from optimizer.results.finished_run import FinishedRun
from optimizer.results.recommendation import BestLoad, Outcome
from optimizer.results.report.parameter_effects import Neighbour, label
from optimizer.results.request_steps import HEADERS, limit_sentence, step_rows, step_times
from optimizer.simulator.speed_correction import NO_CORRECTION

MAX_LOADS = 16  # points of a curve, or bars
STREAMED = (
    "throughput",
    "output-throughput",
    "latency-p95",
    "ttft-p50",
    "ttft-p95",
    "ttft-p99",
    "itl-p50",
    "itl-p95",
)


def compared_candidates(run: FinishedRun) -> dict[Candidate, str]:
    """Return the role of each candidate that is shown in detail; the recommendation is first."""
    outcome = run.measured
    roles: dict[Candidate, str] = {}
    if outcome.shown is not None:
        roles[outcome.shown.candidate] = "recommended" if outcome.recommended else "closest"
    if outcome.baseline.is_tried:
        roles.setdefault(run.baseline, "baseline")
    if outcome.dynamic_batching is not None and outcome.dynamic_batching.is_tried:
        roles.setdefault(run.dynamic_batching, "dynamic_batching {}")
    return roles


def at_loads(run: FinishedRun, candidate: Candidate) -> list[Point]:
    """Return the points of ``candidate`` by ascending load, at most MAX_LOADS including both ends.

    A confirmation replaces the search's measurement at its load.
    """
    points = {point.load: point for point in run.measured.points if point.candidate == candidate}
    measured = [p for _, p in sorted(points.items()) if p.measurement.has_values]
    return list(outcome_values.evenly_spread(measured, MAX_LOADS))


def stage_names(run: FinishedRun) -> dict[str, str]:
    """Return the name of each stage of a request in their order, by its field.

    If a point lacks the times of the other models, the network is a part of these everywhere.
    """
    if not run.has_other_models:
        return outcome_values.STAGES
    counted = [point.measurement for point in run.measured.points if point.measurement.queue_ms is not None]
    if all(measurement.step_stats for measurement in counted):
        return {**outcome_values.STAGES, outcome_values.OTHER_MODELS: "other models"}
    names = {**outcome_values.STAGES, outcome_values.OTHER_MODELS: "other models and network"}
    return {stage: name for stage, name in names.items() if stage != "network_ms"}


def stages_ms(run: FinishedRun, point: Point) -> dict[str, float] | None:
    """Return the mean milliseconds in each stage by its name, in their order; None if none is known.

    Those of a model that streams are unknown: Triton ends the last stage when the backend's execution returns, which
    may be before the first response.
    """
    if point.measurement.is_streamed:
        return None
    names = stage_names(run)
    times_ms = outcome_values.stage_times_ms(
        point, has_other_models=run.has_other_models, tuned_model=run.tuned_model
    )
    if "network_ms" not in names and outcome_values.OTHER_MODELS in times_ms:
        times_ms[outcome_values.OTHER_MODELS] += times_ms.pop("network_ms", 0.0)
    return {name: max(times_ms.get(stage, 0.0), 0.0) for stage, name in names.items()} if times_ms else None


def executions(run: FinishedRun, point: Point) -> dict[int, int]:
    """Return the number of executed batches by size in samples, over all measurements at this load."""
    fresh, searched = _measurements_at(run, point)
    counted = batch_stats.sum_by_size(
        batch_stats.from_text(measurement.batch_stats) for measurement in fresh + searched
    )
    return {size: count for size, count, _ in counted}


def _measurements_at(run: FinishedRun, point: Point) -> tuple[list[Measurement], list[Measurement]]:
    """Return the measurements of the candidate of ``point`` at its load: those on fresh servers, and the others."""
    deployments = [trial for trial in run.trials if trial.candidate == point.candidate]
    fresh = [window.measurement for trial in deployments for window in trial.windows_at(point.load)]
    searched = [
        measurement for trial in deployments for load, measurement in trial.measurements if load == point.load
    ]
    return fresh, searched


@dataclass(frozen=True)
class SearchProgress:
    """The progress of a search.

    Attributes:
        objective: The first objective.
        met: Each measurement that meets the SLA, with the time at which it ended and its objective.
        ends: The time of the last measurement.
        unit: The unit of the times.
    """

    objective: Metric
    met: tuple[tuple[Point, float, float], ...]
    ends: float
    unit: str

    def best(self) -> list[tuple[float, float]]:
        """Return (time, best objective so far) of each improvement."""
        best: Point | None = None
        improvements: list[tuple[float, float]] = []
        for point, at, value in self.met:
            if best is None or self.objective.is_better(point.measurement, best.measurement):
                best = point
                improvements.append((at, value))
        return improvements


def progress(run: FinishedRun) -> SearchProgress:
    """Return the progress of the search over the seconds spent on deploying and measuring.

    Without such times in the table, progress is over the number of measurements.
    """
    timed = any(m.measure_seconds for trial in run.trials for _, m in trial.measurements)
    at = ends = 0.0
    met, objective = [], run.problem.objectives[0]
    for trial in run.trials:
        at += (trial.deploy_seconds or 0.0) if timed else 0.0
        for load, measurement in trial.measurements:
            at = ends = at + ((measurement.measure_seconds or 0.0) if timed else 1.0)
            value = objective.value(measurement)
            if value is not None and measurement.stable and run.problem.sla.is_met(measurement):
                met.append((trial.point(load, measurement), at, value))
    unit = "seconds of deploying and measuring" if timed else "measurements"
    return SearchProgress(objective, tuple(met), ends, unit)


def axis_of_loads(run: FinishedRun) -> str:
    """Return the label of a load axis."""
    return "request rate (req/s)" if run.problem.open_loop else "concurrency (requests in flight)"


def load_value(point: Point) -> float:
    """Return the position of ``point`` on a load axis."""
    return point.load.request_rate or float(point.load.concurrency)


def drawable(point: Point, metric: Metric) -> float | None:
    """Return the value of ``metric`` if it is positive and finite, otherwise None."""
    value = metric.value(point.measurement)
    return value if value is not None and math.isfinite(value) and value > 0 else None


MAX_TRIALS = 200  # rows of the report; trials.csv has all
MAX_FRONT_POINTS = 100
SAME = 0.005  # share of the throughput; a smaller difference counts as none


@dataclass(frozen=True)
class ReportTable:
    """A table of a report. Columns whose header begins with ``>`` hold numbers; ``best`` is the recommended row."""

    headers: tuple[str, ...]
    rows: Sequence[tuple[str, ...]]
    caption: str = ""
    best: int | None = None


def front(outcome: Outcome) -> ReportTable:
    """Return the Pareto front."""
    kept = outcome_values.shown_front(outcome, MAX_FRONT_POINTS)
    caption = "No other point has more throughput at less latency; measured on fresh servers, or in the search only"
    if len(kept) < len(outcome.front.points):
        caption += f"; {len(kept)} of {len(outcome.front.points):,}"
    best = next((i for i, point in enumerate(kept) if point is outcome.recommended), None)
    headers = outcome_values.front_headers(outcome)
    rows = outcome_values.front_rows(outcome, kept)
    reasons = [_why_not_taken(point, outcome) for point in kept]
    if any(reasons):
        headers = (*headers, "why not recommended")
        rows = [(*row, reason) for row, reason in zip(rows, reasons, strict=True)]
    return ReportTable(headers, rows, caption, best)


def _why_not_taken(point: Point, outcome: Outcome) -> str:
    """Return why ``point`` of the front is not recommended.

    The text is empty if it has neither more throughput nor a better objective than the recommendation.
    """
    best = outcome.recommended
    is_better = best is not None and outcome.objective.is_better(point.measurement, best.measurement)
    if best is None or (not is_better and point.throughput_infer_per_sec <= best.throughput_infer_per_sec):
        return ""
    return outcome_values.why_not_recommended(outcome, point)


def stages(run: FinishedRun) -> ReportTable:
    """Return the mean time in each stage of a request, of the compared candidates at each load."""
    rows = []
    for candidate, role in compared_candidates(run).items():
        for point in at_loads(run, candidate):
            values = stages_ms(run, point)
            if values is not None:
                cells = [f"{value:,.2f}" for value in values.values()]
                rows.append((role, formatting.load(point.load), formatting.value_of(point, "throughput"), *cells))
    headers = ("configuration", ">load", ">throughput", *(f">{name}" for name in stage_names(run).values()))
    return ReportTable(headers, rows, "Mean milliseconds of a request in each stage")


def steps(run: FinishedRun) -> ReportTable:
    """Return how the time of a request divides among several models, at the recommended or closest point."""
    times = step_times(run.shown) if run.shown else ()
    return ReportTable(HEADERS, step_rows(times), limit_sentence(times))


def streaming(run: FinishedRun) -> ReportTable:
    """Return output and times of the requests of a model that streams, of the compared candidates at each load."""
    rows = []
    for candidate, role in compared_candidates(run).items():
        for point in at_loads(run, candidate):
            if point.measurement.is_streamed:
                values = (METRICS[metric].value(point.measurement) for metric in STREAMED)
                rows.append((role, formatting.load(point.load), *map(formatting.number, values)))
    headers = ("configuration", ">load", *(f">{outcome_values.header(metric)}" for metric in STREAMED))
    return ReportTable(headers, rows, "Output, and times of the requests whose responses are streamed")


def timeline(run: FinishedRun) -> tuple[Point, tuple[float, ...]] | None:
    """Return when the responses to one request arrived, in ms after it was sent, at the recommended or closest point.

    It is the request with the median latency in the median window, on fresh servers if it was measured there. None if
    no window has such a request.
    """
    point = run.shown
    if point is None:
        return None
    for measurements in _measurements_at(run, point):
        recorded = sorted(
            (measurement for measurement in measurements if measurement.response_times_ms),
            key=lambda measurement: measurement.latency_p50_ms or 0.0,
        )
        if recorded:
            median = recorded[(len(recorded) - 1) // 2]
            return point, response_times.from_text(median.response_times_ms)
    return None


def sensitivity(run: FinishedRun, neighbours: Sequence[Neighbour]) -> ReportTable:
    """Return the change of the first objective within the SLA for each step, the most costly first."""
    objective = run.problem.objectives[0]
    goal, sign = formatting.metric_label(objective.name), 1 if objective.better == "lower" else -1
    rows = [
        (
            label(step.parameter),
            f"{step.chosen} to {step.other}",
            _change(step.measured, sign),
            _change(step.expected, sign),
        )
        for step in sorted(neighbours, key=lambda step: -(step.cost or 0.0))
    ]
    headers = ("parameter", "one step", ">measured", ">expected")
    within = " within the SLA" if run.problem.sla else ""
    return ReportTable(headers, rows, f"{goal[0].upper()}{goal[1:]}{within} after changing one parameter by one step")


def sensitivity_sentence(run: FinishedRun, neighbours: Sequence[Neighbour]) -> str:
    """Return the most costly step as a sentence; empty if no cost is known."""
    costs = [(step.cost, step) for step in neighbours if step.cost is not None]
    if not costs:
        return ""
    cost, worst = max(costs, key=lambda entry: entry[0])
    objective = run.problem.objectives[0]
    goal = formatting.goal_label(objective.name)
    if cost <= SAME:
        return f"The {goal} is no worse after changing any single parameter by one step."
    source = "measured" if worst.measured is not None else "expected"
    effect = f"{'lowers' if objective.better == 'higher' else 'raises'} the {goal}"
    return (
        f"Changing one parameter by one step {effect} by up to {formatting.percent(cost)} ({source}): "
        f"{label(worst.parameter)} {worst.other} instead of {worst.chosen}."
    )


def _change(cost: float | None, sign: int) -> str:
    """Return the change of an objective that is worse by the share ``cost``; ``sign`` is 1 if lower is better."""
    if cost is None:
        return "–"
    return "no difference" if abs(cost) <= SAME else f"{100 * sign * cost:+.1f} %".replace("-", "−")


def confirmations(run: FinishedRun, outcome: Outcome) -> ReportTable:
    """Return the verdicts and intervals of all confirmations."""
    roles, rows = compared_candidates(run), []
    for confirmed in outcome.confirmed_loads:
        latencies = [(metric, confirmed.interval(metric)) for metric in run.problem.sla.bounded_latencies]
        texts = (
            f"{formatting.short_metric(metric)} "
            + (
                formatting.interval(METRICS[metric], interval)
                if interval and not interval.is_unknown
                else formatting.UNKNOWN
            )
            for metric, interval in latencies
        )
        rows.append(
            (
                roles.get(confirmed.point.candidate, f"trial {confirmed.point.trial}"),
                formatting.load(confirmed.point.load),
                confirmed.judged.verdict.value if confirmed.error else "compared only",
                formatting.interval(METRICS["throughput"], confirmed.throughput),
                ", ".join(texts),
                f"{confirmed.windows} on {formatting.count(confirmed.servers, 'server')}",
                f"{confirmed.judged.effective_requests:,.0f}",
            )
        )
    headers = ("configuration", ">load", "verdict", "throughput", "latency", ">windows", ">effective requests")
    return ReportTable(headers, rows, f"Intervals at {formatting.confidence(run.problem.confidence)}")


def trials(run: FinishedRun, outcome: Outcome) -> ReportTable:
    """Return the trials: by the objectives within the SLA, then those that miss it, then those without results."""
    points: dict[int, list[Point]] = {trial.number: [] for trial in run.trials}
    for point in outcome.points:
        points[point.trial].append(point)
    best_loads = (_best_shown_load(trial, points[trial.number], outcome, run.problem) for trial in run.trials)
    ranked = sorted(best_loads, key=partial(_rank, objectives=run.problem.objectives))
    shown = ranked[:MAX_TRIALS]
    metrics = outcome_values.compared_metrics(outcome, run.problem)
    goal = formatting.bounds(run.problem.sla)
    rows = [_trial_row(best, metrics, _trial_remark(best, run.problem, outcome)) for best in shown]
    recommended = outcome.recommended.trial if outcome.recommended else None
    headers = (
        ">trial",
        "configuration (batch: max_batch_size)",
        *(f">{outcome_values.header(metric)}" for metric in metrics),
        ">load",
        ">loads",
    )
    configurations = formatting.count(outcome.trials, "configuration")
    caption = f"{configurations}, {formatting.count(outcome.measurements, 'measurement')}; "
    if len(shown) < len(ranked):
        caption += f"the best {len(shown)} are shown, trials.csv has all; "
    caption += f"each at its best load{f' within {goal}' if goal else ''}, on fresh servers if it was measured there"
    recommended_row = next((i for i, best in enumerate(shown) if best.trial.number == recommended), None)
    return ReportTable((*headers, "remark"), rows, caption, recommended_row)


def _rank(best: BestLoad, objectives: Sequence[Metric]) -> tuple[float, ...]:
    """Return the sort key of a trial in the table of trials; the first row has the smallest."""
    return best.point is None, not best.meets_sla, *(costs(best.point, objectives) if best.point else ())


def _best_shown_load(trial: Trial, points: Sequence[Point], outcome: Outcome, problem: Problem) -> BestLoad:
    """Return the best load of ``trial``, which has ``points``; those on fresh servers come first."""
    fresh = [point for point in points if outcome.confirmation_of(point)]
    if any(point is outcome.recommended for point in fresh):
        return BestLoad(trial, outcome.recommended, meets_sla=True)
    best = problem.best_point(fresh, unstable=True) if fresh else NO_CORRECTION.best_point(points, problem)
    return BestLoad(trial, best or problem.sla.closest_point(fresh or points), best is not None)


def _trial_row(best: BestLoad, metrics: Sequence[str], remark: str) -> tuple[str, ...]:
    """Return the cells of a trial in the table of trials."""
    trial, point = best.trial, best.point
    loads = str(len({load for load, _ in trial.measurements}))
    configuration = configuration_text.configuration(trial.candidate)
    if point is None:
        return str(trial.number), configuration, *("–" for _ in metrics), "–", loads, remark
    values = (
        formatting.value_of(point, metric)
        if METRICS[metric].unit == "bytes"
        else formatting.number(METRICS[metric].value(point.measurement))
        for metric in metrics
    )
    return str(trial.number), configuration, *values, formatting.load(point.load), loads, remark


def _trial_remark(best: BestLoad, problem: Problem, outcome: Outcome) -> str:
    """Return why a trial has no values, or where it was measured and why it is not recommended."""
    trial, point = best.trial, best.point
    reasons = [trial.reason, *(measurement.reason for _, measurement in trial.measurements)]
    if trial.status == "failed" or point is None:
        return next(filter(None, reasons), "no stable measurement")
    confirmed = outcome.confirmation_of(point)
    verdict = f": {confirmed.judged.verdict.value}" if confirmed and confirmed.error else ""
    fresh = f"on fresh servers{verdict}" if confirmed else ""
    closest = "" if best.meets_sla or outcome.recommended is None else "no load meets the SLA; the closest is shown"
    return "; ".join(filter(None, (fresh, closest, _relation_to_recommendation(trial, problem, outcome))))


def _relation_to_recommendation(trial: Trial, problem: Problem, outcome: Outcome) -> str:
    """Return that a trial has the recommended configuration, or why one with a better objective lost; else empty.

    The objective is that of the trial in the search, and is compared with that of the recommendation.

    Several trials may have one configuration, such as controls. Its test on fresh servers belongs to one of them.
    """
    best, objective = outcome.recommended, outcome.objective
    if best is None or trial.number == best.trial:
        return ""
    if trial.candidate == best.candidate:
        return f"the recommended configuration, see trial {best.trial}"
    searched = NO_CORRECTION.best_point(latest_points([trial]), problem)
    if searched is None or not objective.is_better(searched.measurement, best.measurement):
        return ""
    entries = [entry for entry in outcome.confirmed_loads if entry.point.candidate == trial.candidate]
    missed = [entry for entry in entries if entry.error and entry.judged.verdict is not Verdict.PASS]
    if not entries:
        why = "but it was not tested on fresh servers, and the search overestimates its best configurations"
    elif missed:
        why = f"but its test ended {missed[-1].judged.verdict.value}"
    elif all(objective.is_better(best.measurement, entry.point.measurement) for entry in entries):
        why = f"but {'less' if objective.name == 'throughput' else 'worse'} on fresh servers"
    else:
        why = "but it was measured on fresh servers for comparison only"
    value = formatting.value_of(searched, objective.name)
    if objective.name == "throughput":
        value = f"{formatting.approximate(searched.throughput_infer_per_sec)} {objective.unit}"
    return f"{value} in the search, {why}"
