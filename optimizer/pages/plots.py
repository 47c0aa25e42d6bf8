"""The plots of the search: the front, the loads, the progress. None where a run has nothing for one to show."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from objectives.metrics import METRICS
from optimizer.outcome import FRONT_METRICS
from optimizer.pages import measured
from optimizer.pages.axes import bound_line, dot_size, fit, legend_above, log_latency, placed, thousands
from optimizer.pages.measured import drawable
from optimizer.pages.style import LIGHT, ROLE_COLOURS, Drawing, new_figure
from optimizer.report import words
from optimizer.trial import Point, latest_points

if TYPE_CHECKING:
    from optimizer.store.finished import FinishedRun

OTHERS = (LIGHT["stage-1"], LIGHT["stage-6"])  # the next best
MARKERS = "osD^v"


def pareto(run: FinishedRun) -> Drawing | None:
    """Throughput against p95 latency, every measured point."""
    assert run.outcome is not None, "something was measured"
    throughput, latency = FRONT_METRICS
    outcome, front = run.outcome, set(run.outcome.front)
    points = dict.fromkeys([*latest_points(run.trials), *outcome.front])
    dots = [(p, x, y) for p in points if (x := drawable(p, latency)) and (y := drawable(p, throughput))]
    if not dots:
        return None
    figure = new_figure(5.4)
    axes = figure.subplots()
    log_latency(axes, [x for _, x, _ in dots])
    groups = {
        "other": [d for d in dots if d[0] not in front and d[0].measurement.stable],
        "unstable": [d for d in dots if d[0] not in front and not d[0].measurement.stable],
        "front": sorted((d for d in dots if d[0] in front), key=lambda d: d[1]),
    }
    looks: dict[str, dict[str, Any]] = {
        "other": {"c": LIGHT["dot"], "s": dot_size(len(points)), "label": "measured"},
        "unstable": {"facecolors": "none", "edgecolors": LIGHT["dot"], "s": 22, "label": "unstable, not counted"},
        "front": {"c": LIGHT["front"], "s": 40, "label": "Pareto front", "zorder": 4},
    }
    axes.set_ylim(0, 1.08 * max(y for *_, y in dots))
    labels = {}
    for name, group in groups.items():
        kept = placed(axes, group)
        if kept:
            axes.scatter([x for _, x, _ in kept], [y for *_, y in kept], gid=name, **looks[name])
            labels[name] = [_said(point) for point, *_ in kept]
    axes.step(
        [x for _, x, _ in groups["front"]], [y for *_, y in groups["front"]], where="post", color=LIGHT["front"]
    )
    for role, point in {"recommended": outcome.recommended, "baseline": outcome.baseline}.items():
        if point is not None and (x := drawable(point, latency)) and (y := drawable(point, throughput)):
            ring: dict[str, Any] = {
                "s": 190,
                "facecolors": "none",
                "edgecolors": ROLE_COLOURS[role],
                "linewidths": 2.2,
                "zorder": 5,
            }
            axes.scatter([x], [y], label=role, **ring)
    for constraint in run.problem.constraints:
        if constraint.metric in (latency.name, throughput.name):
            bound_line(axes, constraint.bound, words.bound(constraint), vertical=constraint.metric == latency.name)
    axes.set_xlabel("p95 latency of a request (ms)")
    axes.set_ylabel("throughput (infer/s)")
    thousands(axes)
    fit(figure, legend_above(figure, axes))
    told = f"{len(dots):,} measured points, {len(front):,} of them on the Pareto front: no other has more throughput"
    told += " at less latency."
    if outcome.recommended is not None:
        told += f" Recommended: {words.performance(outcome.recommended, latency.name)}."
    return Drawing("pareto", "Throughput against p95 latency of every measured point", told, figure, labels)


def load(run: FinishedRun) -> Drawing | None:
    """Throughput and the judged latency over the load, of the compared configurations and the next best."""
    metric = METRICS[measured.latency(run)]
    lines = {role: measured.at_loads(run, candidate) for role, candidate in measured.compared(run).items()}
    known = set(measured.compared(run).values())
    points = sorted(latest_points(run.trials), key=lambda p: -p.throughput_infer_per_sec)
    others = list(dict.fromkeys(p.candidate for p in points if p.measurement.stable and p.candidate not in known))
    trials = {trial.candidate: trial.number for trial in run.trials}
    lines |= {f"trial {trials[other]}": measured.at_loads(run, other) for other in others[: len(OTHERS)]}
    lines = {role: kept for role, line in lines.items() if (kept := [p for p in line if drawable(p, metric)])}
    if not lines:
        return None
    figure = new_figure()
    left, right = figure.subplots(1, 2)
    spare = iter(OTHERS)
    for place, (role, line) in enumerate(lines.items()):
        colour = ROLE_COLOURS.get(role) or next(spare)
        look: dict[str, Any] = {
            "color": colour,
            "marker": MARKERS[place % len(MARKERS)],
            "markersize": 6,
            "label": role,
        }
        loads = [measured.load_value(point) for point in line]
        left.plot(loads, [metric.value(point.measurement) for point in line], **look)
        right.plot(loads, [point.throughput_infer_per_sec for point in line], **look)
    for constraint in run.problem.constraints:
        if constraint.metric == metric.name:
            bound_line(left, constraint.bound, words.bound(constraint), vertical=False)
    for axes, told in ((left, f"{words.short(metric.name)} latency (ms)"), (right, "throughput (infer/s)")):
        axes.set_title(told)
        axes.set_xlabel(measured.axis_of_loads(run))
        axes.set_xlim(left=0)
        axes.set_ylim(bottom=0)
        thousands(axes)
    fit(figure, legend_above(figure, left))
    described = "; ".join(f"{role}: {_ends(line, metric.name)}" for role, line in lines.items())
    return Drawing("load", "Latency and throughput against load", f"{described}.", figure)


def progress(run: FinishedRun) -> Drawing | None:
    """The best throughput within the bounds as the search went on."""
    found = measured.progress(run)
    rising = found.best()
    if not rising:
        return None
    figure = new_figure(3.9)
    axes = figure.subplots()
    axes.set_xlim(0, 1.03 * found.ends)
    axes.set_ylim(0, 1.1 * rising[-1][1])
    met = placed(axes, [(step.point, step.at, step.value) for step in found.steps if step.value is not None])
    axes.scatter(
        [x for _, x, _ in met],
        [y for *_, y in met],
        c=LIGHT["dot"],
        s=dot_size(len(met)),
        label="within the bounds",
        gid="met",
    )
    times, values = [0.0, *(at for at, _ in rising), found.ends], [0.0, *(v for _, v in rising), rising[-1][1]]
    axes.step(times, values, where="post", color=LIGHT["good"], linewidth=2, label="best so far")
    axes.set_xlabel(found.unit)
    axes.set_ylabel("throughput (infer/s)")
    thousands(axes)
    fit(figure, legend_above(figure, axes))
    when = f"{words.number(rising[-1][0])} of {words.number(found.ends)} {found.unit}"
    told = f"The best of the search, {words.number(rising[-1][1])} infer/s, came after {when}"
    told += ", before the confirmation on fresh servers." if run.outcome and run.outcome.again else "."
    labels = {"met": [_said(point) for point, *_ in met]}
    return Drawing("progress", "Search progress", told, figure, labels)


def _said(point: Point) -> str:
    return f"trial {point.trial}: {words.performance(point, 'latency-p95')} · {words.configuration(point.candidate)}"


def _ends(line: Sequence[Point], metric: str) -> str:
    shown = [line[0]] if len(line) == 1 else [line[0], line[-1]]
    return " to ".join(words.performance(point, metric) for point in shown)
