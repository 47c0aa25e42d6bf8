"""Plots of the search: Pareto front, loads, progress and parameters. Each returns None if it would be empty."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from objectives.metrics import LATENCY, METRICS, Metric
from objectives.sla import costs
from optimizer.core.candidate import FieldValue
from optimizer.core.safe_text import one_line, scalar_text
from optimizer.core.trial import Point, latest_points
from optimizer.results import configuration_text, formatting, outcome_values
from optimizer.results.forecast_accuracy import CheckedForecast, ForecastChecks
from optimizer.results.recommendation import FRONT_METRICS
from optimizer.results.report import tables
from optimizer.results.report.figure_style import (
    LIGHT,
    ROLE_COLOURS,
    Drawing,
    PlacedPoint,
    dot_size,
    draw_bars,
    draw_bounds,
    draw_dots,
    format_thousands,
    legend_above,
    mark_whole_numbers,
    new_figure,
    place_labels,
    set_latency_axis,
    set_margins,
    visible_dots,
)
from optimizer.results.report.parameter_effects import ParameterSample, label, varied
from optimizer.results.report.tables import drawable

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from optimizer.results.finished_run import FinishedRun


RUNNER_UP_COLOURS = (LIGHT["stage-1"], LIGHT["stage-6"])
MARKERS = "osD^v"  # markers of the lines, which a reader may not distinguish by colour
MAX_FORECASTS = 100  # intervals in a panel


def pareto(run: FinishedRun) -> Drawing | None:
    """Draw throughput against latency of all measured points, by the metrics of the Pareto front."""
    outcome, points, front = run.measured, run.measured.points, set(run.measured.front.points)
    throughput, latency = outcome.front.metrics
    dots = [(p, x, y) for p in points if (x := drawable(p, latency)) and (y := drawable(p, throughput))]
    if not dots:
        return None
    figure = new_figure(5.4)
    axes = figure.subplots()
    set_latency_axis(axes, [x for _, x, _ in dots])
    axes.set_ylim(0, 1.08 * max(y for *_, y in dots))
    labels = _draw_point_groups(axes, dots, front, latency.name, dot_size(len(points)))
    fresh = visible_dots(axes, [dot for dot in dots if outcome.confirmation_of(dot[0])])
    if fresh:
        ring = {"facecolors": "none", "edgecolors": LIGHT["front"]}
        draw_dots(axes, [(x, y) for _, x, y in fresh], s=85, marker="s", label="on fresh servers", **ring)
    for role, point in {"recommended": outcome.recommended, "baseline": outcome.baseline.point}.items():
        if point is not None and (x := drawable(point, latency)) and (y := drawable(point, throughput)):
            ring = {"facecolors": "none", "edgecolors": ROLE_COLOURS[role]}
            draw_dots(axes, [(x, y)], s=190, linewidths=2.2, zorder=5, label=role, **ring)
    draw_bounds(axes, run.problem.sla, latency.name, vertical=True)
    draw_bounds(axes, run.problem.sla, throughput.name)
    axes.set_xlabel(f"{formatting.latency_label(latency.name)} of a request (ms)")
    axes.set_ylabel(f"{formatting.metric_label(throughput.name)} ({throughput.unit})")
    format_thousands(axes)
    set_margins(figure, legend_above(figure, axes))
    description = formatting.count(len(dots), "measured point")
    if front:
        description += f", {len(front):,} on the Pareto front: no other has more throughput at less latency"
    description += "."
    if outcome.recommended is not None:
        description += f" Recommended: {formatting.performance(outcome.recommended, latency.name)}."
    title = f"{outcome_values.front_title(outcome)} of all measured points"
    return Drawing("pareto", title, description, figure, labels)


def _draw_point_groups(
    axes: Axes, dots: Sequence[PlacedPoint], front: Collection[Point], latency: str, size: float
) -> dict[str, list[str]]:
    """Draw the points of the front with a line, the unstable ones and the others. Return the tooltips by gid."""
    groups = {
        "other": [dot for dot in dots if dot[0] not in front and dot[0].measurement.stable],
        "unstable": [dot for dot in dots if dot[0] not in front and not dot[0].measurement.stable],
        "front": sorted((dot for dot in dots if dot[0] in front), key=lambda dot: dot[1]),
    }
    looks: dict[str, dict[str, Any]] = {
        "other": {"c": LIGHT["dot"], "s": size, "label": "measured"},
        "unstable": {"facecolors": "none", "edgecolors": LIGHT["dot"], "s": 22, "label": "unstable or disturbed"},
        "front": {"c": LIGHT["front"], "s": 40, "label": "Pareto front", "zorder": 4},
    }
    labels = {}
    for name, group in groups.items():
        if kept := visible_dots(axes, group):
            draw_dots(axes, [(x, y) for _, x, y in kept], gid=name, **looks[name])
            labels[name] = [_tooltip(point, latency) for point, *_ in kept]
    line = groups["front"]
    axes.step([x for _, x, _ in line], [y for *_, y in line], where="post", color=LIGHT["front"])
    return labels


def load(run: FinishedRun) -> Drawing | None:
    """Draw throughput and judged latency over the load, of the compared candidates and the runners-up.

    For a model that streams it is the latency of a request; ``server_plots`` draws its other times.
    """
    throughput = run.measured.front.metrics.throughput
    judged = run.problem.sla.judged_latency
    metric = METRICS[judged if METRICS[judged].timing is LATENCY else FRONT_METRICS.latency.name]
    lines = load_lines(run, metric)
    if not lines:
        return None
    figure = new_figure()
    left, right = figure.subplots(1, 2)
    labels = draw_lines(run, left, lines, metric, "latency")
    labels |= draw_lines(run, right, lines, throughput, "throughput")
    set_margins(figure, legend_above(figure, left))
    described = "; ".join(f"{role}: {_ends(line, metric.name)}" for role, line in lines.items())
    return Drawing("load", "Latency and throughput against load", f"{described}.", figure, labels)


def load_lines(run: FinishedRun, metric: Metric) -> dict[str, list[Point]]:
    """Return the points by load of the compared candidates and the runners-up, by role, if ``metric`` is known."""
    roles = tables.compared_candidates(run)
    lines = {role: tables.at_loads(run, candidate) for candidate, role in roles.items()}
    points = sorted(latest_points(run.trials), key=lambda point: costs(point, run.problem.objectives))
    runners_up = list(dict.fromkeys(p.candidate for p in points if p.measurement.stable and p.candidate not in roles))
    trials = {trial.candidate: trial.number for trial in run.trials}
    lines |= {
        f"trial {trials[candidate]}": tables.at_loads(run, candidate)
        for candidate in runners_up[: len(RUNNER_UP_COLOURS)]
    }
    return {role: kept for role, line in lines.items() if (kept := [p for p in line if drawable(p, metric)])}


def draw_lines(
    run: FinishedRun, axes: Axes, lines: Mapping[str, Sequence[Point]], metric: Metric, prefix: str
) -> dict[str, list[str]]:
    """Draw ``metric`` of each of ``load_lines`` over the load with its bounds; return the tooltips by gid."""
    spare, labels = iter(RUNNER_UP_COLOURS), dict[str, list[str]]()
    latency = metric.name if metric.timing else run.problem.sla.judged_latency
    for index, (role, line) in enumerate(lines.items()):
        colour = ROLE_COLOURS.get(role) or next(spare)
        marker = MARKERS[index % len(MARKERS)]
        look: dict[str, Any] = {"color": colour, "marker": marker, "markersize": 6, "label": role}
        loads = [tables.load_value(point) for point in line]
        values = [math.nan if (value := metric.value(p.measurement)) is None else value for p in line]
        axes.plot(loads, values, gid=f"{prefix}-{index}", **look)
        labels[f"{prefix}-{index}"] = [f"{role}: {formatting.performance(point, latency)}" for point in line]
    if metric.timing:
        draw_bounds(axes, run.problem.sla, metric.name)
    name = formatting.latency_label(metric.name) if metric.timing else formatting.metric_label(metric.name)
    axes.set_title(f"{name} ({metric.unit})")
    axes.set_xlabel(tables.axis_of_loads(run))
    if not run.problem.open_loop:
        mark_whole_numbers(axes)
    axes.set_xlim(left=0)
    axes.set_ylim(bottom=0)
    format_thousands(axes)
    return labels


def progress(run: FinishedRun) -> Drawing | None:
    """Draw the best objective within the SLA over the course of the search."""
    search = tables.progress(run)
    best, objective = search.best(), search.objective
    if not best:
        return None
    figure = new_figure(3.9)
    axes = figure.subplots()
    axes.set_xlim(0, 1.03 * search.ends)
    values = [value for *_, value in search.met]  # a score may be negative, and all error rates are usually 0
    low, high = min(0.0, *values), max(0.0, *values)
    axes.set_ylim(1.1 * low, 1.1 * high if high > low else 1.0)
    met = visible_dots(axes, search.met)
    legend = "within the SLA" if run.problem.sla else "measured"
    draw_dots(axes, [(x, y) for _, x, y in met], c=LIGHT["dot"], s=dot_size(len(met)), label=legend, gid="met")
    begin = [(0.0, 0.0)] if objective.better == "higher" and objective.has_ratio else []
    steps = [*begin, *best, (search.ends, best[-1][1])]
    axes.step(*zip(*steps, strict=True), where="post", color=LIGHT["good"], linewidth=2, label="best so far")
    axes.set_xlabel(search.unit)
    name = formatting.metric_label(objective.name)
    axes.set_ylabel(f"{name} ({objective.unit})" if objective.unit else name)
    format_thousands(axes)
    set_margins(figure, legend_above(figure, axes))
    when = f"{formatting.number(best[-1][0])} of {formatting.number(search.ends)} {search.unit}"
    description = f"The search found its best {name}, {formatting.quantity(objective, best[-1][1])}, after {when}"
    description += (
        ", before the confirmation on fresh servers." if run.outcome and run.outcome.confirmed_loads else "."
    )
    labels = {"met": [_tooltip(point) for point, *_ in met]}
    return Drawing("progress", "Search progress", description, figure, labels)


def forecasts(checks: ForecastChecks) -> Drawing | None:
    """Draw the measured throughputs and latencies relative to their forecasts, with the 95 % intervals."""
    if not checks.throughput:
        return None
    figure = new_figure(3.9)
    labels: dict[str, list[str]] = {}
    panels = figure.subplots(1, 2)
    for axes, metric_checks in zip(panels, (checks.throughput, checks.latency), strict=True):
        step = math.ceil(len(metric_checks) / MAX_FORECASTS)
        name, shown = metric_checks[0].metric.name, list(enumerate(metric_checks, start=1))[::step]
        half = 0.3 * step
        corners = [
            (x - half, check.low / check.expected, x + half, check.high / check.expected) for x, check in shown
        ]
        draw_bars(axes, corners, LIGHT["rule"], f"forecast-{name}", "95 % interval of the forecast")
        for is_inside, colour, place in ((True, "good", "inside"), (False, "bad", "outside")):
            group = [(x, check) for x, check in shown if check.is_inside is is_inside]
            gid, text = f"{name}-{place}", f"measured, {place}"
            places = [(x, check.measured / check.expected) for x, check in group]
            draw_dots(axes, places, c=LIGHT[colour], s=dot_size(len(shown)), label=text, gid=gid, zorder=4)
            labels[gid] = [_forecast_tooltip(check) for _, check in group]
        axes.axhline(1, color=LIGHT["quiet"], linewidth=1)
        axes.set_title(f"{formatting.metric_label(name)}, relative to the forecast")
        axes.set_xlabel("measurements with a forecast, in their order")
        axes.set_xlim(0, len(metric_checks) + 1)
        mark_whole_numbers(axes)
        axes.set_ylim(0, 1.08 * max(max(check.high, check.measured) / check.expected for _, check in shown))
        format_thousands(axes)
    set_margins(figure, legend_above(figure, *panels))
    return Drawing("forecasts", "Forecasts of the search and its measurements", str(checks), figure, labels)


def _forecast_tooltip(check: CheckedForecast) -> str:
    low, high = formatting.number(check.low), formatting.number(check.high)
    return f"{_tooltip(check.point)}; forecast: {formatting.quantity(check.metric, check.expected)} ({low} to {high})"


def _tooltip(point: Point, latency: str = "latency-p95") -> str:
    performance = formatting.performance(point, latency)
    return f"trial {point.trial}: {performance} · {configuration_text.configuration(point.candidate)}"


def _ends(line: Sequence[Point], metric: str) -> str:
    """Return the performance at the lowest and at the highest load of a line."""
    shown = [line[0]] if len(line) == 1 else [line[0], line[-1]]
    return " to ".join(formatting.performance(point, metric) for point in shown)


COLUMNS = 3  # panels in a row of `slices`
MAX_PANELS = 12  # panels of `slices`, one for each parameter
MAX_LABEL_LENGTH = 34  # characters of a parameter's name
MAX_CHOICE_LENGTH = 9  # characters of a choice below a panel
JITTER = 0.28  # largest shift of a dot to the side, which shows equal choices side by side; choices differ by 1
MAX_DOTS = 800  # per panel
MAX_LETTERS = 32  # limit for tick labels below a panel at full font size
MAX_CHOICES = 10  # tick labels below a panel


def importance(shares: Mapping[str, float], trials: int) -> Drawing | None:
    """Draw the importance of the parameters. ``shares`` have the sum 1; ``trials`` is the number behind them."""
    if not shares:
        return None
    texts = [
        f"{one_line(label(name), MAX_LABEL_LENGTH)} {formatting.percent(share)}" for name, share in shares.items()
    ]
    figure = new_figure(0.75 + 0.34 * len(texts))
    axes = figure.subplots()
    places = np.arange(len(texts))[::-1]
    axes.barh(places, [100 * share for share in shares.values()], height=0.62, color=LIGHT["front"])
    axes.set_yticks(places, texts)
    axes.grid(visible=False)
    axes.set_xlabel("importance (%)")
    width, height = figure.get_size_inches()
    figure.subplots_adjust(left=3.25 / width, right=0.97, bottom=0.55 / height, top=1 - 0.08 / height)
    place_labels(figure)
    description = f"From {trials:,} configurations: {', '.join(texts)}."
    return Drawing("importance", "Importance of the parameters", description, figure)


def slices(run: FinishedRun, samples: Sequence[ParameterSample]) -> Drawing | None:
    """Draw a panel for each parameter: the first objective within the SLA of all configurations by its value."""
    objective = run.problem.objectives[0]
    meeting = [sample for sample in samples if sample.value is not None]
    parameters = list(varied(run.problem).items())[:MAX_PANELS]
    if not meeting or not parameters:
        return None
    best, space = run.recommended, run.problem.space
    chosen = space.parameter_values(space.canonical(best.candidate)) if best else None
    rows = math.ceil(len(parameters) / COLUMNS)
    figure = new_figure(0.75 + 2.1 * rows)
    panels = figure.subplots(rows, COLUMNS, squeeze=False, sharey=True)
    labels = {
        f"slice-{panel}": _draw_slice(axes, f"slice-{panel}", name, choices, meeting, chosen)
        for panel, (axes, (name, choices)) in enumerate(zip(panels.flat, parameters, strict=False))
    }
    for axes in panels.flat[len(parameters) :]:
        axes.set_visible(False)
    values = [sample.value or 0.0 for sample in meeting]  # a score may be negative, and all error rates may be 0
    low, high = min(0.0, *values), max(0.0, *values)
    panels.flat[0].set_ylim(1.08 * low, 1.08 * high if high > low else 1.0)
    has_bounds, goal = bool(run.problem.sla), formatting.metric_label(objective.name)
    unit = f" ({objective.unit})" if objective.unit else ""
    figure.supylabel(
        f"{goal}{' within the SLA' if has_bounds else ''}{unit}", x=0.005, fontsize=11, color=LIGHT["quiet"]
    )
    set_margins(figure, legend_above(figure, panels.flat[0]))
    figure.subplots_adjust(wspace=0.08, bottom=0.35 / figure.get_figheight())
    described = formatting.count(len(meeting), "configuration")
    if has_bounds:
        described += f" that {'meets' if len(meeting) == 1 else 'meet'} the SLA"
    described += ". Best values: "
    described += ", ".join(f"{label(name)} {_choice_text(_best_value(meeting, name))}" for name, _ in parameters)
    title = f"{goal[0].upper()}{goal[1:]} at each value of each parameter"
    return Drawing("slices", title, f"{described}.", figure, labels)


def _draw_slice(
    axes: Axes,
    gid: str,
    name: str,
    choices: Sequence[FieldValue],
    samples: Sequence[ParameterSample],
    chosen: Mapping[str, object] | None,
) -> list[str]:
    """Draw the objective of ``samples`` by the value of one parameter. Return the tooltips of the group ``gid``.

    The group has the samples that differ from the recommendation, which has the values ``chosen``, in this parameter
    only.
    """
    at = np.array([choices.index(sample.values[name]) for sample in samples])
    values = np.array([sample.value for sample in samples], np.float64)
    best = np.max if samples[0].objective.better == "higher" else np.min
    neighbours = np.array([_differs_only_in(sample, chosen, name) for sample in samples])
    shift = np.random.default_rng(0).uniform(-JITTER, JITTER, len(samples))
    others = np.flatnonzero(~neighbours)[:: math.ceil(len(samples) / MAX_DOTS)]
    places = zip(at[others] + shift[others], values[others], strict=True)
    draw_dots(axes, places, c=LIGHT["dot"], s=0.7 * dot_size(len(samples)), label="any configuration")
    tops = {place: best(values[at == place]) for place in np.unique(at).tolist()}
    axes.plot(list(tops), list(tops.values()), color=LIGHT["front"], linewidth=1.5, label="best of each value")
    places, text = zip(at[neighbours], values[neighbours], strict=True), "other parameters as recommended"
    draw_dots(axes, places, c=LIGHT["good"], s=44, zorder=4, label=text, gid=gid)
    axes.set_title(one_line(label(name), MAX_LABEL_LENGTH))
    ticks = range(0, len(choices), max(1, math.ceil(len(choices) / MAX_CHOICES)))
    names = [one_line(_choice_text(choices[tick]), MAX_CHOICE_LENGTH) for tick in ticks]
    axes.set_xticks(ticks, names, fontsize=10 if len("  ".join(names)) <= MAX_LETTERS else 8)
    axes.set_xlim(-0.6, len(choices) - 0.4)
    axes.grid(visible=False, axis="x")
    format_thousands(axes, x=False)
    return [_tooltip(samples[index].point) for index in np.flatnonzero(neighbours).tolist()]


def _differs_only_in(sample: ParameterSample, chosen: Mapping[str, object] | None, name: str) -> bool:
    """Return whether ``sample`` has the values ``chosen`` of all parameters but ``name``; False if these are None."""
    return chosen is not None and all(sample.values[other] == chosen[other] for other in chosen if other != name)


def _best_value(samples: Sequence[ParameterSample], name: str) -> object:
    """Return the value of the parameter ``name`` in the best sample."""
    return min(samples, key=lambda sample: sample.cost).values[name]


def _choice_text(value: object) -> str:
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        return formatting.exact(value).replace(",", "")
    return one_line(scalar_text(value))
