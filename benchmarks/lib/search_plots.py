"""The plots of ``search_methods.py``: mean regret against deployments and against seconds."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from lib.bounded_tables import BoundedTable
from lib.search_report import MAX_TRIALS, OWN, runs_of
from lib.search_runs import Runs
from optimizer.replay.replay import ReplayResult
from optimizer.results.report.figure_style import (
    LIGHT,
    STAGE_COLOURS,
    Drawing,
    legend_above,
    new_figure,
    report_style,
    set_margins,
    svg,
)

SMALLEST = 1e-3  # a smaller regret is drawn as this one, because the axis is logarithmic
TICKS = (0.001, 0.01, 0.1, 1.0)
TIMES = 80  # points of a curve over seconds


def write_plot(path: Path, cases: Sequence[BoundedTable], methods: Sequence[str], runs: Runs) -> None:
    """Write the plot of all runs on these tables as an SVG file."""
    own = {method: runs_of(runs, method, cases) for method in methods}
    with report_style():
        figure = new_figure()
        left, right = figure.subplots(1, 2, sharey=True)
        colours = iter([*STAGE_COLOURS[:6], LIGHT["bad"], LIGHT["ink"], LIGHT["dot"]])
        times = np.linspace(0, max(median_seconds(one) for one in own.values()), TIMES).tolist()
        for method, searches in own.items():
            look = {"color": LIGHT["front"], "linewidth": 2.6} if method == OWN else {"color": next(colours)}
            look |= {"label": method, "drawstyle": "steps-post", "gid": method}
            counts = range(1, MAX_TRIALS + 1)
            left.plot(counts, mean_regrets([[run.regret_after(n) for n in counts] for run in searches]), **look)
            right.plot(times, mean_regrets([[regret_at(run, at) for at in times] for run in searches]), **look)
        left.set_yscale("log")
        left.set_yticks(TICKS, [f"{tick:.1%}".replace(".0%", "%") for tick in TICKS])
        left.minorticks_off()
        left.set_title("mean regret")
        left.set_xlabel("deployments")
        right.set_xlabel("seconds of deploying and measuring")
        set_margins(figure, legend_above(figure, left, columns=9))
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(svg(Drawing(path.stem, "mean regret", "", figure)))


def mean_regrets(regrets: Sequence[Sequence[float]]) -> list[float]:
    """Return the mean over the runs at each point of the axis, at least SMALLEST."""
    return [max(statistics.mean(column), SMALLEST) for column in zip(*regrets, strict=True)]


def regret_at(run: ReplayResult, seconds: float) -> float:
    """Return the regret of the deployments that have ended by ``seconds``; 1 if there are none."""
    ended = sum(end <= seconds for end in run.seconds)
    return run.regrets[ended - 1] if ended else 1.0


def median_seconds(runs: Sequence[ReplayResult]) -> float:
    """Return the median time at which the runs ended."""
    return statistics.median(run.seconds[-1] for run in runs)
