"""Plots of the server: stages and batches of requests, streamed responses, windows of the confirmation.

As in ``plots``, a function returns None if its plot would be empty.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from objectives.metrics import ITL, METRICS, TTFT, Metric, Timing
from objectives.response_times import MAX_RESPONSES
from optimizer.core.trial import ConfirmationWindow, Point, trial_of
from optimizer.results import formatting
from optimizer.results.report import tables
from optimizer.results.report.figure_style import (
    LIGHT,
    ROLE_COLOURS,
    STAGE_COLOURS,
    Drawing,
    draw_bars,
    draw_bounds,
    draw_dots,
    format_thousands,
    legend_above,
    new_figure,
    set_margins,
)
from optimizer.results.report.plots import draw_lines, load_lines

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from objectives.intervals import ConfidenceInterval
    from optimizer.results.finished_run import FinishedRun


MAX_SIZES = 64  # bars of batch sizes
MAX_LETTERS = 18  # limit for horizontal load labels below a panel


def stages(run: FinishedRun) -> Drawing | None:
    """Draw the time of a request in each stage, and the throughput, over the load of each compared candidate."""
    panels = {
        role: [p for p in tables.at_loads(run, candidate) if tables.stages_ms(run, p) is not None]
        for candidate, role in tables.compared_candidates(run).items()
    }
    panels = {role: points for role, points in panels.items() if points}
    if not panels:
        return None
    figure = new_figure()
    widths = [2 + len(points) for points in panels.values()]
    row = figure.subplots(1, len(panels), squeeze=False, gridspec_kw={"width_ratios": widths})[0]
    bars = [tables.stages_ms(run, point) or {} for points in panels.values() for point in points]
    highest_bar = 1.08 * max(sum(bar.values()) for bar in bars)
    highest_throughput = 1.08 * max(p.throughput_infer_per_sec for points in panels.values() for p in points)
    labels: dict[str, list[str]] = {}
    for panel, (axes, (role, points)) in enumerate(zip(row, panels.items(), strict=True)):
        labels |= _stack(run, axes, points, panel)
        axes.set_title(role)
        axes.set_ylim(0, highest_bar)
        line = _draw_throughput(axes, points)
        line.set_ylim(0, highest_throughput)
        format_thousands(axes, x=False)
        if panel:
            axes.tick_params(labelleft=False)
        if panel < len(panels) - 1:
            line.tick_params(right=False, labelright=False)
        else:
            line.spines["right"].set_visible(True)
            line.set_ylabel("throughput (infer/s)", color=LIGHT["front"])
    row[0].set_ylabel("mean time of a request (ms)")
    figure.supxlabel(tables.axis_of_loads(run), fontsize=11, color=LIGHT["quiet"])
    set_margins(figure, legend_above(figure, row[0], line, columns=4), right=0.95)
    described = "; ".join(f"{role} {_longest_stages(run, points[-1])}" for role, points in panels.items())
    return Drawing("stages", "Where the time of a request goes", f"At the highest load: {described}.", figure, labels)


def _draw_throughput(axes: Axes, points: Sequence[Point]) -> Axes:
    """Draw the throughput of ``points`` over the bars of ``axes``. Return its axes, whose scale is on the right."""
    line = axes.twinx()
    throughputs = [point.throughput_infer_per_sec for point in points]
    line.plot(throughputs, color=LIGHT["page"], linewidth=4)
    look: dict[str, Any] = {"color": LIGHT["front"], "marker": "o", "markeredgecolor": LIGHT["page"]}
    line.plot(throughputs, linewidth=2, label="throughput (right)", **look)
    line.grid(visible=False)
    format_thousands(line, x=False)
    return line


def _stack(run: FinishedRun, axes: Axes, points: Sequence[Point], panel: int) -> dict[str, list[str]]:
    """Draw a bar of stages for each point, and return the tooltips of its parts by gid."""
    labels: dict[str, list[str]] = {}
    bottoms = np.zeros(len(points))
    bars = [tables.stages_ms(run, point) or {} for point in points]
    for name, colour in zip(bars[0], STAGE_COLOURS, strict=False):
        values = np.array([bar[name] for bar in bars])
        tops = bottoms + values
        places = zip(range(len(points)), bottoms.tolist(), tops.tolist(), strict=True)
        gid = f"stage-{panel}-{name.replace(' ', '-')}"
        draw_bars(axes, [(x - 0.36, low, x + 0.36, high) for x, low, high in places], colour, gid, name)
        labels[gid] = [
            f"{name} at {formatting.load(point.load)}: {formatting.number(ms)} ms"
            for point, ms in zip(points, values.tolist(), strict=True)
        ]
        bottoms = tops
    axes.set_xlim(-0.6, len(points) - 0.4)
    loads = [formatting.number(tables.load_value(point), digits=1) for point in points]
    crowded = len("".join(loads)) > MAX_LETTERS
    axes.set_xticks(range(len(points)), loads, rotation=90 if crowded else 0, fontsize=8 if crowded else 10)
    axes.grid(visible=False, axis="x")
    return labels


def batches(run: FinishedRun) -> Drawing | None:
    """Draw the sizes of the batches that the server formed, of the compared candidates at their best loads."""
    outcome, dynamic = run.measured, run.measured.dynamic_batching
    compared = (dynamic.point if dynamic else None, outcome.baseline.point, outcome.shown)
    points = {point.candidate: point for point in compared if point is not None}
    panels = {
        role: (points[candidate], counted)
        for candidate, role in tables.compared_candidates(run).items()
        if candidate in points and (counted := tables.executions(run, points[candidate]))
    }
    if not panels:
        return None
    figure = new_figure(1.2 + 1.35 * len(panels))
    column = figure.subplots(len(panels), 1, squeeze=False, sharex=True)[:, 0]
    largest = max(max(counted) for _, counted in panels.values())
    unit = math.gcd(*(size for _, counted in panels.values() for size in counted))
    width = unit * math.ceil(largest / unit / MAX_SIZES)
    described, labels = list[str](), dict[str, list[str]]()
    for panel, (axes, (role, (point, counted))) in enumerate(zip(column, panels.items(), strict=True)):
        labels[f"batches-{panel}"] = _draw_batch_sizes(axes, counted, width, unit, role, f"batches-{panel}")
        executions = sum(counted.values())
        mean = sum(size * count for size, count in counted.items()) / executions
        title = f"{role}, {formatting.at_load(point.load)}: mean {formatting.number(mean)} samples"
        axes.set_title(title)
        axes.set_xlim(0, largest + width)
        likeliest = max(counted, key=lambda size: counted[size])
        described.append(f"{title}, most often {likeliest:,} ({formatting.percent(counted[likeliest] / executions)})")
    column[-1].set_xlabel("batch size (samples)" + (f", {width // unit} sizes to a bar" if width > unit else ""))
    figure.supylabel("share of executions (%)", x=0.005, fontsize=11, color=LIGHT["quiet"])
    set_margins(figure)
    return Drawing("batches", "Batches that the server formed", f"{'; '.join(described)}.", figure, labels)


def _draw_batch_sizes(
    axes: Axes, counted: Mapping[int, int], width: int, unit: int, role: str, gid: str
) -> list[str]:
    """Draw the share of the executions with each batch size, and return the tooltips of the bars.

    Args:
        axes: The panel.
        counted: Number of executions by size.
        width: Number of sizes that a bar counts.
        unit: The smallest difference of two sizes.
        role: Role of the configuration.
        gid: The group of the bars.
    """
    executions = sum(counted.values())
    shares: dict[int, float] = {}  # in percent, by bar
    for size, count in counted.items():
        bar = (size - 1) // width
        shares[bar] = shares.get(bar, 0.0) + 100 * count / executions
    shapes = [
        (bar * width + unit / 2, 0.0, (bar + 1) * width + unit / 2, share) for bar, share in sorted(shares.items())
    ]
    draw_bars(axes, shapes, ROLE_COLOURS[role], gid, role)
    axes.set_ylim(0, 1.05 * max(shares.values()))
    return [_batch_label(bar, width, unit, share) for bar, share in sorted(shares.items())]


def _batch_label(bar: int, width: int, unit: int, share: float) -> str:
    """Return the tooltip of a bar that counts ``width`` sizes, of which every ``unit``-th occurs."""
    first, last = bar * width + unit, (bar + 1) * width
    sizes = f"{last:,} samples" if first == last else f"{first:,} to {last:,} samples"
    return f"{sizes}: {share:.1f} % of the executions"


def noise(run: FinishedRun) -> Drawing | None:
    """Draw all windows of the confirmation and the confidence intervals from them."""
    roles = tables.compared_candidates(run)
    confirmations = [confirmed for confirmed in run.measured.confirmed_loads if confirmed.windows > 1]
    if not confirmations:
        return None
    figure = new_figure(4.2)
    panels = figure.subplots(1, 2)
    names, described, labels = list[str](), list[str](), dict[str, list[str]]()
    for place, confirmed in enumerate(confirmations):
        role = roles.get(confirmed.point.candidate, f"trial {confirmed.point.trial}")
        at_load = f"at {formatting.load(confirmed.point.load)}"
        names.append(role.replace("_batching", "_\nbatching") + f"\n{at_load}")
        described.append(f"{role} {at_load}: {formatting.interval(METRICS['throughput'], confirmed.throughput)}")
        windows = _measured_windows(run, confirmed.point)
        for axes, metric, interval in (
            (panels[0], METRICS["throughput"], confirmed.throughput),
            (panels[1], METRICS[confirmed.latency], confirmed.latency_ms),
        ):
            values = [(window.server, v) for window in windows if (v := metric.value(window.measurement)) is not None]
            gid = f"windows-{metric.name}-{place}"
            _draw_windows(axes, place, values, interval, confirmed.servers, gid)
            labels[gid] = [
                f"{role} {at_load}, server {server}: {formatting.quantity(metric, value)}" for server, value in values
            ]
    latency = confirmations[0].latency
    titles = {"throughput": "throughput (infer/s)", latency: f"{formatting.latency_label(latency)} (ms)"}
    for axes, (metric_name, title) in zip(panels, titles.items(), strict=True):
        draw_bounds(axes, run.problem.sla, metric_name)
        axes.set_title(title)
        axes.set_xticks(range(len(confirmations)), names)
        axes.set_xlim(-0.6, len(confirmations) - 0.4)
        axes.grid(visible=False, axis="x")
        format_thousands(axes, x=False)
    set_margins(figure, legend_above(figure, *panels))
    description = f"{'; '.join(described)}."
    return Drawing("noise", "Windows of the confirmation on fresh servers", description, figure, labels)


def _measured_windows(run: FinishedRun, point: Point) -> list[ConfirmationWindow]:
    """Return the windows of the confirmation of ``point``, without those that were lost."""
    return [window for window in trial_of(point, run.trials).windows_at(point.load) if not window.is_lost]


def _draw_windows(
    axes: Axes,
    place: int,
    values: Sequence[tuple[int, float]],
    interval: ConfidenceInterval,
    servers: int,
    gid: str,
) -> None:
    """Draw (server, value) of the windows of a confirmation around x = ``place``, side by side by server.

    The ``interval`` is a vertical line, which is left out if one of its ends is unknown.
    """
    offsets = np.linspace(-0.26, 0.26, max(servers, 2))
    numbers = {server: number for number, server in enumerate(dict.fromkeys(server for server, _ in values))}
    places = [(place + offsets[numbers[server] % len(offsets)], value) for server, value in values]
    is_first = place == 0  # the legend has one entry for all
    draw_dots(axes, places, c=LIGHT["dot"], s=18, gid=gid, label="window, by server" if is_first else None)
    if not interval.is_unknown and math.isfinite(interval.high):
        look: dict[str, Any] = {"color": LIGHT["good"], "linewidth": 5, "solid_capstyle": "butt"}
        ends = [interval.low, interval.high]
        axes.plot([place, place], ends, label="interval" if is_first else None, **look)


def _longest_stages(run: FinishedRun, point: Point) -> str:
    """Return the two longest stages of a request at ``point``, in words."""
    values = tables.stages_ms(run, point) or {}
    longest = sorted(values.items(), key=lambda stage: stage[1], reverse=True)[:2]
    stages = " and ".join(f"{formatting.number(ms)} ms {name}" for name, ms in longest)
    return f"({formatting.load(point.load)}) {stages}"


MAX_BOUNDS = 4  # top of an axis relative to the bound: longer times would squeeze those near it


def response_times(run: FinishedRun) -> Drawing | None:
    """Draw time to first response and inter-token latency over the load, as ``plots.load`` draws the latency."""
    metrics = [_shown_metric(run, timing) for timing in (TTFT, ITL)]
    lines_by_metric = {
        metric.name: points_by_role for metric in metrics if (points_by_role := load_lines(run, metric))
    }
    if not lines_by_metric:
        return None
    figure = new_figure()
    panels = figure.subplots(1, len(lines_by_metric), squeeze=False)[0]
    labels: dict[str, list[str]] = {}
    described = []
    for axes, (name, points_by_role) in zip(panels, lines_by_metric.items(), strict=True):
        labels |= draw_lines(run, axes, points_by_role, METRICS[name], name)
        axes.set_ylim(0, min(axes.get_ylim()[1], MAX_BOUNDS * run.problem.sla.latency_bound_ms(name)))
        described += [f"{role}: {_ends(line, METRICS[name])}" for role, line in points_by_role.items()]
    set_margins(figure, legend_above(figure, *panels))
    title = "Times of a streamed request against load"
    return Drawing("response-times", title, f"{'; '.join(described)}.", figure, labels)


def _shown_metric(run: FinishedRun, timing: Timing) -> Metric:
    """Return the bounded metric of ``timing``, or its p95."""
    bounded = (bound.metric for bound in run.problem.sla.latencies if METRICS[bound.metric].timing is timing)
    return METRICS[next(bounded, timing.metric("p95"))]


def _ends(line: Sequence[Point], metric: Metric) -> str:
    """Return the values of ``metric`` at the lowest and at the highest load of a line, with these loads."""
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
    look: dict[str, Any] = {"c": LIGHT["front"], "s": 16, "zorder": 4}
    draw_dots(left, zip(times_ms, numbers, strict=True), gid="responses", label="response", **look)
    left.set_xlim(0, 1.06 * max(times_ms[-1], 1e-6))
    left.set_ylim(0, 1.08 * len(times_ms))
    draw_bounds(left, run.problem.sla, _shown_metric(run, TTFT).name, vertical=True)
    left.set_title("responses received")
    left.set_xlabel("ms after the request was sent")
    texts = (f"response {number}: {formatting.number(ms)} ms" for number, ms in zip(numbers, times_ms, strict=True))
    labels = {"responses": list(texts)}
    description = f"One request, {_load_words(run, point)}: {_count_words(len(times_ms))}, "
    description += f"the first after {formatting.number(times_ms[0])} ms"
    if len(gaps_ms):
        mean_ms = float(gaps_ms.mean())
        text = "time since the previous response"
        draw_dots(right, zip(numbers[1:], gaps_ms, strict=True), gid="gaps", label=text, **look)
        right.axhline(mean_ms, color=LIGHT["good"], linewidth=2, label="its mean, the inter-token latency")
        right.set_ylim(0, 1.15 * max(gaps_ms.max(), 1e-6))
        draw_bounds(right, run.problem.sla, _shown_metric(run, ITL).name)
        labels["gaps"] = [
            f"{formatting.number(ms)} ms before response {n}" for n, ms in zip(numbers[1:], gaps_ms, strict=True)
        ]
        description += f", then one each {formatting.number(mean_ms)} ms on average"
    right.set_title("time between responses (ms)")
    right.set_xlabel("number of the response")
    for axes in (left, right):
        format_thousands(axes)
    set_margins(figure, legend_above(figure, left, right, columns=3))
    return Drawing("timeline", "Timeline of one request", f"{description}.", figure, labels)


def _load_words(run: FinishedRun, point: Point) -> str:
    where = "on a fresh server" if run.outcome and run.outcome.confirmation_of(point) else "in the search"
    load = formatting.load(point.load)
    return f"{'at' if run.problem.open_loop else 'at concurrency'} {load} {where}, with the median latency"


def _count_words(responses: int) -> str:
    most = "the first " if responses == MAX_RESPONSES else ""
    return f"{most}{formatting.count(responses, 'response')}"
