"""The tables of an outcome: the comparison with the baselines, and the Pareto front."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from objectives.metrics import METRICS
from optimizer.results import configuration_text, formatting
from optimizer.results.point_values import header, interval

if TYPE_CHECKING:
    from optimizer.config.search_space import Problem
    from optimizer.core.trial import Point
    from optimizer.results.recommendation import BaselineResult, Outcome


def _compared_metrics(outcome: Outcome, problem: Problem) -> list[str]:
    """Return the metrics in ``comparisons``: all bounded latencies and, for a model that streams, output tokens."""
    goals = [*(metric.name for metric in problem.objectives), *(bound.metric for bound in problem.sla)]
    counted = [name for name in ("goodput", "error-rate") if name in goals]
    tokens = [formatting.OUTPUT_THROUGHPUT] if outcome.is_streamed else []
    return ["throughput", *counted, *tokens, *problem.sla.bounded_latencies]


def comparison_headers(outcome: Outcome, problem: Problem) -> tuple[str, ...]:
    """Return the headers of ``comparisons``; those of numbers begin with ``>``."""
    metrics = _compared_metrics(outcome, problem)
    return "configuration", *(f">{header(metric)}" for metric in metrics), ">load", "gain"


def comparisons(outcome: Outcome, problem: Problem) -> list[tuple[str, ...]]:
    """Return the cells below ``comparison_headers`` of the recommendation, the baseline and plain dynamic batching.

    Each is at its best load; the gain is that of the recommendation over it.
    """
    goal, metrics = formatting.bounds(problem.sla), _compared_metrics(outcome, problem)
    missed = f"no measured load meets {goal}" if goal else "not measured"

    def row(name: str, point: Point | None, gain: str, *, is_tried: bool = True) -> tuple[str, ...]:
        if point is None:
            why = missed if is_tried else "not reached before the run ended"
            return name, *("–" for _ in metrics), "–", why
        values = [
            formatting.estimate(METRICS[metric].value(point.measurement), interval(outcome, point, metric))
            for metric in metrics
        ]
        if not problem.sla.is_met(point.measurement):
            where = " on fresh servers" if outcome.confirmation_of(point) else ""
            gain = ", ".join(filter(None, (gain, f"misses {goal}{where}")))
        return name, *values, formatting.load(point.load), gain

    def row_of(name: str, compared: BaselineResult) -> tuple[str, ...]:
        gain = "same" if compared.point is outcome.recommended else formatting.gain(compared.gain)
        return row(name, compared.point, gain, is_tried=compared.is_tried)

    rows = [row("recommended", outcome.recommended, ""), row_of("current (baseline)", outcome.baseline)]
    return (
        rows if outcome.dynamic_batching is None else [*rows, row_of("dynamic_batching {}", outcome.dynamic_batching)]
    )


def front_title(outcome: Outcome) -> str:
    """Return the axes of the Pareto front: ``Throughput against p95 latency``."""
    throughput, latency = (metric.name for metric in outcome.front.metrics)
    return f"{formatting.metric_label(throughput).capitalize()} against {formatting.latency_label(latency)}"


def front_headers(outcome: Outcome) -> tuple[str, ...]:
    """Return the headers of ``front_rows``; those of numbers begin with ``>``."""
    figures = (f">{header(metric.name)}" for metric in outcome.front.metrics)
    return *figures, ">load", "measured", ">trial", "configuration (batch: max_batch_size)"


def front_rows(outcome: Outcome, points: Sequence[Point]) -> list[tuple[str, ...]]:
    """Return the cells below ``front_headers`` of points of the Pareto front."""
    return [
        (
            *(formatting.number(metric.value(point.measurement)) for metric in outcome.front.metrics),
            formatting.load(point.load),
            "fresh" if outcome.confirmation_of(point) else "search",
            str(point.trial),
            configuration_text.configuration(point.candidate),
        )
        for point in points
    ]


def shown_front(outcome: Outcome, most: int) -> list[Point]:
    """Return at most ``most`` points, evenly spread over the Pareto front, with the recommendation if it is on it."""
    shown = list(evenly_spread(outcome.front.points, most))
    best = next((place for place, point in enumerate(outcome.front.points) if point is outcome.recommended), None)
    if best is not None and not any(point is outcome.recommended for point in shown):
        shown[round(best * (len(shown) - 1) / (len(outcome.front.points) - 1))] = outcome.front.points[best]
    return shown


def front_remark(outcome: Outcome) -> str:
    """Return why the recommendation is not on the Pareto front; empty if it is on it or there is none."""
    best, better = outcome.recommended, outcome.front.dominating
    if best is None or any(point is best for point in outcome.front.points):
        return ""
    if better is None:
        latency = formatting.latency_label(outcome.front.metrics[1].name)
        is_stable = best.measurement.stable
        cause = f"its {latency} is unknown" if is_stable else "its measurement was unstable or disturbed"
        return f"The recommendation is not on the front: {cause}."
    why = why_not_recommended(outcome, better)
    seen = formatting.performance(better, outcome.front.metrics[1].name)
    return f"The recommendation is not on the front: trial {better.trial} had {seen}, but {why}."


def why_not_recommended(outcome: Outcome, point: Point) -> str:
    """Return why ``point`` is not recommended although its throughput is higher, in a clause."""
    confirmed = outcome.confirmation_of(point)
    if confirmed is not None and confirmed.error:
        reason = confirmed.judged.reason
        return f"its test at this load ended {confirmed.judged.verdict.value}{f': {reason}' if reason else ''}"
    if confirmed is not None:
        return "it was measured there for comparison only"
    if missed := outcome.sla.missed(point.measurement):
        return f"it misses {formatting.bounds(missed)}"
    if not point.measurement.stable:
        return "its windows disagreed"
    if any(entry.point.candidate == point.candidate for entry in outcome.confirmed_loads):
        return "it was measured in the search only; fresh servers of this configuration were measured at another load"
    return "it was measured in the search only, which overestimates its best configurations"


def evenly_spread(points: Sequence[Point], most: int) -> Sequence[Point]:
    """Return at most ``most`` of ``points`` in even steps, including both ends."""
    if len(points) <= most:
        return points
    return [points[round(i * (len(points) - 1) / (most - 1))] for i in range(most)]
