"""Two small plots for notebooks, with matplotlib (``pip install 'tritune[notebook]'``)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from objectives.metrics import METRICS
from optimizer.errors import EnvironmentFault
from optimizer.report import words
from optimizer.trial import Candidate, Point, latest_points

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from optimizer.store.finished import FinishedRun

SIZE_INCHES = (7.0, 4.0)
MOST_CURVES = 8


def pareto(run: FinishedRun) -> Figure:
    """Throughput against the judged latency: every measured point, the front, the recommendation, the bound."""
    latency = words.judged_latency(run.problem.constraints)
    figure, axes = _axes(f"{words.short(latency)} latency (ms)", "throughput (infer/s)")
    axes.plot(*_places(latest_points(run.trials), latency), ".", color="0.6", label="measured")
    if run.outcome is not None:
        axes.plot(*_places(run.outcome.front, latency), "o-", color="tab:green", label="Pareto front")
        if run.outcome.recommended is not None:
            place = _places([run.outcome.recommended], latency)
            axes.plot(*place, "*", color="tab:red", markersize=14, label="recommended")
    for bound in run.problem.constraints:
        if bound.metric == latency:
            axes.axvline(bound.bound, color="tab:orange", linestyle="--", label=words.bound(bound))
    axes.set_title(f"{run.problem.model}: throughput against latency")
    axes.legend()
    return figure


def latency_against_load(run: FinishedRun) -> Figure:
    """The judged latency of the configurations on the front at each load at which they were measured."""
    latency = words.judged_latency(run.problem.constraints)
    load = "rate (req/s)" if run.problem.open_loop else "concurrency (requests in flight)"
    figure, axes = _axes(load, f"{words.short(latency)} latency (ms)")
    outcome = run.outcome
    shown = [*([outcome.recommended] if outcome and outcome.recommended else []), *(outcome.front if outcome else ())]
    for candidate in list(dict.fromkeys(point.candidate for point in shown))[:MOST_CURVES]:
        points = sorted(_of(run, candidate), key=lambda point: point.load)
        loads = [point.load.request_rate or point.load.concurrency for point in points]
        late = [METRICS[latency].value(point.measurement) for point in points]
        axes.plot(loads, late, "o-", label=words.configuration(candidate))
    for bound in run.problem.constraints:
        if bound.metric == latency:
            axes.axhline(bound.bound, color="tab:orange", linestyle="--", label=words.bound(bound))
    axes.set_title(f"{run.problem.model}: latency against load")
    if axes.lines:
        axes.legend(fontsize="x-small")
    return figure


def _of(run: FinishedRun, candidate: Candidate) -> list[Point]:
    again = [one.point for one in run.outcome.again] if run.outcome else []
    own = [point for point in [*latest_points(run.trials), *again] if point.candidate == candidate]
    return [point for point in own if point.measurement.throughput_infer_per_sec]


def _places(points: list[Point] | tuple[Point, ...], latency: str) -> tuple[list[float], list[float]]:
    known = [
        (late, point.throughput_infer_per_sec)
        for point in points
        if (late := METRICS[latency].value(point.measurement)) is not None and point.throughput_infer_per_sec
    ]
    return [late for late, _ in known], [throughput for _, throughput in known]


def _axes(x: str, y: str) -> tuple[Figure, Any]:
    """Without pyplot: no state of its own, and nothing to close.

    Raises EnvironmentFault where matplotlib is not installed.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise EnvironmentFault("plots need matplotlib: pip install 'tritune[notebook]'") from None
    figure = Figure(figsize=SIZE_INCHES, layout="constrained")
    axes = figure.subplots()
    axes.set_xlabel(x)
    axes.set_ylabel(y)
    axes.set_ylim(bottom=0)
    return figure, axes
