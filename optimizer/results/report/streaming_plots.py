"""Plots of a model that streams: times of its responses over the load, and one request. As in ``plots``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from objectives.metrics import ITL, METRICS, TTFT, Metric, Timing
from objectives.response_times import MOST_RESPONSES
from optimizer.core.trial import Point
from optimizer.results import formatting
from optimizer.results.report import tables
from optimizer.results.report.figure_style import (
    LIGHT,
    Drawing,
    bound_lines,
    fit,
    legend_above,
    new_figure,
    thousands,
)
from optimizer.results.report.plots import draw_lines, load_lines

if TYPE_CHECKING:
    from optimizer.results.finished_run import FinishedRun

MOST_BOUNDS = 4  # top of an axis relative to the bound: longer times would squeeze those near it


def response_times(run: FinishedRun) -> Drawing | None:
    """Draw time to first response and inter-token latency over the load, as ``plots.load`` draws the latency."""
    metrics = [_shown_metric(run, timing) for timing in (TTFT, ITL)]
    lines = {metric.name: own for metric in metrics if (own := load_lines(run, metric))}
    if not lines:
        return None
    figure = new_figure()
    panels = figure.subplots(1, len(lines), squeeze=False)[0]
    labels: dict[str, list[str]] = {}
    described = []
    for axes, (name, own) in zip(panels, lines.items(), strict=True):
        labels |= draw_lines(run, axes, own, METRICS[name], name)
        axes.set_ylim(0, min(axes.get_ylim()[1], MOST_BOUNDS * run.problem.sla.latency_bound_ms(name)))
        described += [f"{role}: {_ends(line, METRICS[name])}" for role, line in own.items()]
    fit(figure, legend_above(figure, *panels))
    title = "Times of a streamed request against load"
    return Drawing("response-times", title, f"{'; '.join(described)}.", figure, labels)


def _shown_metric(run: FinishedRun, timing: Timing) -> Metric:
    """Return the bounded metric of ``timing``, or its p95."""
    bounded = (bound.metric for bound in run.problem.sla.latencies if METRICS[bound.metric].timing is timing)
    return METRICS[next(bounded, timing.metric("p95"))]


def _ends(line: Sequence[Point], metric: Metric) -> str:
    ends = line[:1] if len(line) == 1 else (line[0], line[-1])
    values = " to ".join(formatting.value_of(point, metric.name) for point in ends)
    return f"{formatting.short_metric(metric.name)} {values} (load {formatting.load(ends[0].load)}" + (
        ")" if len(ends) == 1 else f" to {formatting.load(ends[-1].load)})"
    )


def timeline(run: FinishedRun) -> Drawing | None:
    """Draw when the responses of one request of the recommendation arrived, and the time between them."""
    shown = tables.timeline(run)
    if shown is None:
        return None
    point, times_ms = shown
    gaps_ms = np.diff(times_ms)
    figure = new_figure(3.9)
    left, right = figure.subplots(1, 2)
    numbers = list(range(1, len(times_ms) + 1))
    left.plot([0, times_ms[0]], [1, 1], color=LIGHT["stage-3"], linewidth=3, label="time to first response")
    look: dict[str, Any] = {"c": LIGHT["front"], "s": 16, "zorder": 4, "gid": "responses", "label": "response"}
    left.scatter(times_ms, numbers, **look)
    left.set_xlim(0, 1.06 * max(times_ms[-1], 1e-6))
    left.set_ylim(0, 1.08 * len(times_ms))
    bound_lines(left, run.problem.sla, _shown_metric(run, TTFT).name, vertical=True)
    left.set_title("responses received")
    left.set_xlabel("ms after the request was sent")
    texts = (f"response {number}: {formatting.number(ms)} ms" for number, ms in zip(numbers, times_ms, strict=True))
    labels = {"responses": list(texts)}
    description = f"One request, {_load_words(run, point)}: {_count_words(len(times_ms))}, "
    description += f"the first after {formatting.number(times_ms[0])} ms"
    if len(gaps_ms):
        mean_ms = float(gaps_ms.mean())
        look |= {"gid": "gaps", "label": "time since the previous response"}
        right.scatter(numbers[1:], gaps_ms, **look)
        right.axhline(mean_ms, color=LIGHT["good"], linewidth=2, label="its mean, the inter-token latency")
        right.set_ylim(0, 1.15 * max(gaps_ms.max(), 1e-6))
        bound_lines(right, run.problem.sla, _shown_metric(run, ITL).name)
        labels["gaps"] = [
            f"{formatting.number(ms)} ms before response {n}" for n, ms in zip(numbers[1:], gaps_ms, strict=True)
        ]
        description += f", then one each {formatting.number(mean_ms)} ms on average"
    right.set_title("time between responses (ms)")
    right.set_xlabel("number of the response")
    for axes in (left, right):
        thousands(axes)
    fit(figure, legend_above(figure, left, right, columns=3))
    return Drawing("timeline", "Timeline of one request", f"{description}.", figure, labels)


def _load_words(run: FinishedRun, point: Point) -> str:
    where = "on a fresh server" if run.outcome and run.outcome.confirmation_of(point) else "in the search"
    load = formatting.load(point.load)
    return f"{'at' if run.problem.open_loop else 'at concurrency'} {load} {where}, with the median latency"


def _count_words(responses: int) -> str:
    most = "the first " if responses == MOST_RESPONSES else ""
    return f"{most}{formatting.count(responses, 'response')}"
