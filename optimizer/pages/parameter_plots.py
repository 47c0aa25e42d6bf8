"""The plots about parameters: how much each matters, and the throughput at each of its choices."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from optimizer.pages.axes import dot_size, fit, legend_above, thousands
from optimizer.pages.parameters import Sample, label, varied
from optimizer.pages.style import LIGHT, Drawing, new_figure
from optimizer.report import words
from optimizer.untrusted import one_line

if TYPE_CHECKING:
    from optimizer.store.finished import FinishedRun

COLUMNS = 3
MOST_PANELS = 12
LONGEST_LABEL = 34
LONGEST_CHOICE = 9
JITTER = 0.28
MOST_DOTS = 800  # in a panel
MOST_LETTERS = 32  # below a panel, in letters of full size
MOST_CHOICES = 10  # that are named below a panel


def importance(shares: Mapping[str, float], trials: int) -> Drawing | None:
    """``shares`` by parameter, largest first, together 1; ``trials`` they are drawn from."""
    if not shares:
        return None
    names = [one_line(label(name), LONGEST_LABEL) for name in shares]
    figure = new_figure(0.75 + 0.34 * len(names))
    axes = figure.subplots()
    places = np.arange(len(names))[::-1]
    axes.barh(places, [100 * share for share in shares.values()], height=0.62, color=LIGHT["front"])
    for place, share in zip(places.tolist(), shares.values(), strict=True):
        axes.annotate(f"{100 * share:.0f} %", (100 * share, place), (5, -4), textcoords="offset points", fontsize=10)
    axes.set_yticks(places, names)
    axes.set_xlim(0, 1.08 * max(100 * share for share in shares.values()))
    axes.grid(visible=False)
    axes.set_xlabel("importance (%)")
    width, height = figure.get_size_inches()
    figure.subplots_adjust(left=2.9 / width, right=0.97, bottom=0.55 / height, top=1 - 0.08 / height)
    told = ", ".join(f"{name} {100 * share:.0f} %" for name, share in zip(names, shares.values(), strict=True))
    return Drawing("importance", "Importance of the parameters", f"From {trials:,} configurations: {told}.", figure)


def slices(run: FinishedRun, found: Sequence[Sample]) -> Drawing | None:
    """A panel for each parameter: the throughput within the bounds of every configuration, by its choice."""
    found = [sample for sample in found if sample.meets]
    parameters = list(varied(run.problem).items())[:MOST_PANELS]
    if not found or not parameters:
        return None
    best = run.outcome.recommended if run.outcome else None
    space = run.problem.space
    chosen = space.values_of(space.canonical(best.candidate)) if best else None
    rows = math.ceil(len(parameters) / COLUMNS)
    figure = new_figure(0.75 + 2.1 * rows)
    panels = figure.subplots(rows, COLUMNS, squeeze=False, sharey=True)
    shift = np.random.default_rng(0).uniform(-JITTER, JITTER, len(found))
    step = math.ceil(len(found) / MOST_DOTS)
    highest = 0.0
    for axes, (name, choices) in zip(panels.flat, parameters, strict=False):
        at = np.array([choices.index(sample.values[name]) for sample in found])
        values = np.array([sample.throughput for sample in found])
        highest = max(highest, values.max())
        alike = np.array([_alike(sample, chosen, name) for sample in found])
        rest = np.flatnonzero(~alike)[::step]
        axes.scatter(
            at[rest] + shift[rest],
            values[rest],
            c=LIGHT["dot"],
            s=0.7 * dot_size(len(found)),
            label="any configuration",
        )
        tops = {place: values[at == place].max() for place in np.unique(at).tolist()}
        axes.plot(list(tops), list(tops.values()), color=LIGHT["front"], linewidth=1.5, label="best of each choice")
        look: dict[str, Any] = {"c": LIGHT["good"], "s": 44, "zorder": 4, "label": "all else as recommended"}
        axes.scatter(at[alike], values[alike], **look)
        axes.set_title(one_line(label(name), LONGEST_LABEL))
        every = max(1, math.ceil(len(choices) / MOST_CHOICES))
        ticks = range(0, len(choices), every)
        told = [one_line(_told(choices[tick]), LONGEST_CHOICE) for tick in ticks]
        axes.set_xticks(ticks, told, fontsize=10 if len("  ".join(told)) <= MOST_LETTERS else 8)
        axes.set_xlim(-0.6, len(choices) - 0.4)
        axes.grid(visible=False, axis="x")
        thousands(axes, x=False)
    for axes in panels.flat[len(parameters) :]:
        axes.set_visible(False)
    panels.flat[0].set_ylim(0, 1.08 * highest)
    figure.supylabel("throughput within the bounds (infer/s)", fontsize=11, color=LIGHT["quiet"])
    fit(figure, legend_above(figure, panels.flat[0]))
    figure.subplots_adjust(wspace=0.08, bottom=0.35 / figure.get_figheight())
    described = f"{len(found):,} configurations that meet the bounds. Best choices: "
    described += ", ".join(f"{label(name)} {_told(_best(found, name))}" for name, _ in parameters)
    return Drawing("slices", "Throughput at each choice of each parameter", f"{described}.", figure)


def _alike(sample: Sample, chosen: Mapping[str, object] | None, name: str) -> bool:
    return chosen is not None and all(sample.values[other] == chosen[other] for other in chosen if other != name)


def _best(found: Sequence[Sample], name: str) -> object:
    return max(found, key=lambda sample: sample.throughput).values[name]


def _told(value: object) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    return words.exact(value).replace(",", "") if isinstance(value, (int, float)) else one_line(str(value))
