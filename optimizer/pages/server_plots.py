"""The plots of the server at work: stages of a request, batches, windows of the confirmation. As in ``plots``."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from objectives.metrics import METRICS
from optimizer.pages import measured
from optimizer.pages.axes import bound_line, fit, legend_above, no_marks, thousands
from optimizer.pages.style import LIGHT, ROLE_COLOURS, STAGE_COLOURS, Drawing, new_figure
from optimizer.report import words
from optimizer.trial import Point

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from optimizer.store.finished import FinishedRun

MOST_SIZES = 64  # of batches, each a bar
MOST_LETTERS = 18  # of the loads below a panel, side by side


def stages(run: FinishedRun) -> Drawing | None:
    """Where the time of a request goes at each load, and the throughput: a panel for each compared configuration."""
    panels = {
        role: [p for p in measured.at_loads(run, candidate) if measured.stages_ms(p) is not None]
        for role, candidate in measured.compared(run).items()
    }
    panels = {role: points for role, points in panels.items() if points}
    if not panels:
        return None
    figure = new_figure()
    widths = [2 + len(points) for points in panels.values()]
    row = figure.subplots(1, len(panels), squeeze=False, gridspec_kw={"width_ratios": widths})[0]
    tallest = 1.08 * max(sum(measured.stages_ms(p) or []) for points in panels.values() for p in points)
    most = 1.08 * max(p.throughput_infer_per_sec for points in panels.values() for p in points)
    for place, (axes, (role, points)) in enumerate(zip(row, panels.items(), strict=True)):
        _stack(axes, points)
        axes.set_title(role)
        axes.set_ylim(0, tallest)
        line = axes.twinx()
        places = np.arange(len(points))
        line.plot(places, [p.throughput_infer_per_sec for p in points], color=LIGHT["page"], linewidth=4)
        line.plot(
            places,
            [p.throughput_infer_per_sec for p in points],
            color=LIGHT["front"],
            marker="o",
            markeredgecolor=LIGHT["page"],
            linewidth=2,
            label="throughput (right)",
        )
        line.set_ylim(0, most)
        line.grid(visible=False)
        thousands(line, x=False)
        thousands(axes, x=False)
        if place:
            axes.tick_params(labelleft=False)
        if place < len(panels) - 1:
            no_marks(line)
        else:
            line.spines["right"].set_visible(True)
            line.set_ylabel("throughput (infer/s)", color=LIGHT["front"])
    row[0].set_ylabel("mean time of a request (ms)")
    figure.supxlabel(measured.axis_of_loads(run), fontsize=11, color=LIGHT["quiet"])
    fit(figure, legend_above(figure, row[0], line, columns=4), right=0.95)
    described = "; ".join(f"{role} {_stage_words(points[-1])}" for role, points in panels.items())
    return Drawing("stages", "Where the time of a request goes", f"At the highest load: {described}.", figure)


def _stack(axes: Axes, points: Sequence[Point]) -> None:
    from matplotlib.collections import PolyCollection

    bottoms = np.zeros(len(points))
    for (name, colour), values in zip(
        zip(measured.STAGES.values(), STAGE_COLOURS, strict=True),
        np.array([measured.stages_ms(point) for point in points]).T,
        strict=True,
    ):
        corners = [
            [(x - 0.36, low), (x - 0.36, low + high), (x + 0.36, low + high), (x + 0.36, low)]
            for x, low, high in zip(range(len(points)), bottoms.tolist(), values.tolist(), strict=True)
        ]
        look: dict[str, Any] = {"facecolors": colour, "edgecolors": LIGHT["page"], "linewidths": 0.5}
        axes.add_collection(PolyCollection(corners, label=name, **look))
        bottoms = bottoms + values
    axes.set_xlim(-0.6, len(points) - 0.4)
    loads = [words.number(measured.load_value(point), digits=1) for point in points]
    crowded = len("".join(loads)) > MOST_LETTERS
    axes.set_xticks(range(len(points)), loads, rotation=90 if crowded else 0, fontsize=8 if crowded else 10)
    axes.grid(visible=False, axis="x")


def batches(run: FinishedRun) -> Drawing | None:
    """Which batches the server formed, of the compared configurations at their best loads."""
    assert run.outcome is not None, "something was measured"
    best = {
        "recommended": run.outcome.recommended,
        "closest": run.outcome.closest,
        "baseline": run.outcome.baseline,
        "dynamic_batching {}": run.outcome.dynamic_batching,
    }
    panels = {
        role: (point, counted)
        for role in measured.compared(run)
        if (point := best[role]) is not None and (counted := measured.executions(run, point))
    }
    if not panels:
        return None
    figure = new_figure(1.2 + 1.35 * len(panels))
    column = figure.subplots(len(panels), 1, squeeze=False, sharex=True)[:, 0]
    largest = max(max(counted) for _, counted in panels.values())
    unit = math.gcd(*(size for _, counted in panels.values() for size in counted))
    width = unit * math.ceil(largest / unit / MOST_SIZES)
    described = []
    for axes, (role, (point, counted)) in zip(column, panels.items(), strict=True):
        shares: dict[int, float] = {}
        for size, count in counted.items():
            place = (size - 1) // width
            shares[place] = shares.get(place, 0.0) + 100 * count / sum(counted.values())
        edges = np.arange((largest - 1) // width + 2) * width + unit / 2
        heights = [shares.get(place, 0.0) for place in range(len(edges) - 1)]
        axes.stairs(heights, edges, fill=True, color=ROLE_COLOURS[role])
        mean = sum(size * count for size, count in counted.items()) / sum(counted.values())
        told = f"{role}, concurrency {words.load(point.load)}: mean {words.number(mean)} samples"
        axes.set_title(told.replace("concurrency ", "at " if run.problem.open_loop else "concurrency "))
        axes.set_ylim(bottom=0)
        axes.set_xlim(0, largest + width)
        likeliest = max(counted, key=lambda size: counted[size])
        described.append(
            f"{told}, most often {likeliest:,} ({100 * counted[likeliest] / sum(counted.values()):.0f} %)"
        )
    column[-1].set_xlabel("batch size (samples)" + (f", {width // unit} sizes to a bar" if width > unit else ""))
    figure.supylabel("share of executions (%)", fontsize=11, color=LIGHT["quiet"])
    fit(figure)
    return Drawing("batches", "Batches that the server formed", f"{'; '.join(described)}.", figure)


def noise(run: FinishedRun) -> Drawing | None:
    """Every window on the fresh servers, and the intervals that they give."""
    assert run.outcome is not None, "something was measured"
    roles = {candidate: role for role, candidate in measured.compared(run).items()}
    again = [one for one in run.outcome.again if one.windows > 1]
    if not again:
        return None
    figure = new_figure(4.2)
    panels = figure.subplots(1, 2)
    names = []
    for place, one in enumerate(again):
        role = roles.get(one.point.candidate, f"trial {one.point.trial}")
        names.append(role.replace(" {}", "\n{}") + f"\n{words.load(one.point.load)}")
        windows = [
            (confirmation.server, confirmation.measurement)
            for trial in run.trials
            if trial.number == one.point.trial
            for confirmation in trial.confirmations
            if confirmation.load == one.point.load and not confirmation.is_lost
        ]
        spread = np.linspace(-0.26, 0.26, max(one.servers, 2))
        for axes, metric, interval in (
            (panels[0], METRICS["throughput"], one.throughput),
            (panels[1], METRICS[one.latency], one.latency_ms),
        ):
            values = [(server, v) for server, m in windows if (v := metric.value(m)) is not None]
            at = [place + spread[(server - 1) % len(spread)] for server, _ in values]
            look: dict[str, Any] = {"c": LIGHT["dot"], "s": 18, "label": "window, by server" if not place else None}
            axes.scatter(at, [value for _, value in values], **look)
            if not interval.is_unknown and math.isfinite(interval.high):
                bar = ([place, place], [interval.low, interval.high])
                axes.plot(
                    *bar, color=LIGHT["good"], linewidth=5, solid_capstyle="butt", label=None if place else "interval"
                )
    for constraint in run.problem.constraints:
        for axes, name in zip(panels, ("throughput", again[0].latency), strict=True):
            if constraint.metric == name:
                bound_line(axes, constraint.bound, words.bound(constraint), vertical=False)
    for axes, told in (
        (panels[0], "throughput (infer/s)"),
        (panels[1], f"{words.short(again[0].latency)} latency (ms)"),
    ):
        axes.set_title(told)
        axes.set_xticks(range(len(again)), names)
        axes.set_xlim(-0.6, len(again) - 0.4)
        axes.grid(visible=False, axis="x")
        thousands(axes, x=False)
    fit(figure, legend_above(figure, *panels))
    described = "; ".join(
        f"{name.splitlines()[0]}: {words.interval(METRICS['throughput'], one.throughput)}"
        for name, one in zip(names, again, strict=True)
    )
    return Drawing("noise", "Windows of the confirmation on fresh servers", f"{described}.", figure)


def _stage_words(point: Point) -> str:
    values = measured.stages_ms(point) or []
    told = sorted(zip(values, measured.STAGES.values(), strict=True), reverse=True)[:2]
    return f"({words.load(point.load)}) {' and '.join(f'{words.number(ms)} ms {name}' for ms, name in told)}"
