"""Two small plots for notebooks, with matplotlib (``pip install 'tritune[notebook]'``)."""

from __future__ import annotations

import io
from collections.abc import Sequence
from typing import Any

from matplotlib.figure import Figure

from objectives.metrics import METRICS
from optimizer.report import words
from optimizer.store.finished import FinishedRun
from optimizer.trial import Candidate, Point, latest_points

SIZE_INCHES = (7.0, 4.0)
MOST_CURVES = 8


class Plot(Figure):
    """A figure without pyplot, so that nothing is to be closed; notebooks show it, ``%matplotlib`` or not."""

    def _repr_png_(self) -> bytes:
        image = io.BytesIO()
        self.savefig(image, format="png")
        return image.getvalue()


def pareto(run: FinishedRun) -> Plot:
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
    axes.set_ylim(bottom=0)
    axes.legend()
    return figure


def latency_against_load(run: FinishedRun) -> Plot:
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
    axes.set_ylim(bottom=0)
    figure.legend(loc="outside lower center", fontsize="x-small")
    return figure


def _of(run: FinishedRun, candidate: Candidate) -> list[Point]:
    """At each load; what fresh servers say goes over what the search saw."""
    again = [one.point for one in run.outcome.again] if run.outcome else []
    own = [point for point in [*latest_points(run.trials), *again] if point.candidate == candidate]
    return list({point.load: point for point in own if point.measurement.throughput_infer_per_sec}.values())


def _places(points: Sequence[Point], latency: str) -> tuple[list[float], list[float]]:
    known = [
        (late, point.throughput_infer_per_sec)
        for point in points
        if (late := METRICS[latency].value(point.measurement)) is not None and point.throughput_infer_per_sec
    ]
    return [late for late, _ in known], [throughput for _, throughput in known]


def _axes(x: str, y: str) -> tuple[Plot, Any]:
    figure = Plot(figsize=SIZE_INCHES, layout="constrained")
    axes = figure.subplots()
    axes.set_xlabel(x)
    axes.set_ylabel(y)
    return figure, axes
