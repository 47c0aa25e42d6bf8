"""A comparison as text: a table that fits 80 columns, and the best that the recording has."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from rich.console import Console
from rich.table import Table
from rich.text import Text

from optimizer.problem import Problem
from optimizer.replay.comparison import Comparison, Spread
from optimizer.replay.engine import TOLERANCES, Replayed
from optimizer.replay.recording import Recording
from optimizer.replay.rows import Row
from optimizer.report import words


def print_comparison(console: Console, comparison: Comparison) -> None:
    """What was searched, a row (over seeds two: median and p90) for each method, the table's best."""
    several = any(len(runs) > 1 for runs in comparison.runs.values())
    _say(console, _headline(comparison), "bold")
    table = Table(box=None, padding=(0, 1, 0, 0), pad_edge=False, header_style="dim")
    table.add_column("\nsearch")
    if several:
        table.add_column()
    for tolerance in TOLERANCES:
        table.add_column(f"within {tolerance * 100:g} %\ndeployed", justify="right")
        table.add_column("\nmeasured", justify="right")
    table.add_column("stopped\ndeployed", justify="right")
    table.add_column("\nregret", justify="right")
    for method, runs in comparison.runs.items():
        if several:
            table.add_row(method, "median", *_cells(runs, lambda spread: spread.median))
            table.add_row("", "p90", *_cells(runs, lambda spread: spread.p90))
        else:
            table.add_row(method, *_cells(runs, lambda spread: spread.median))
    console.print(table)
    _say(console)
    _say(console, "best in the table", "bold")
    _say(console, f"  {described(comparison.best, comparison.problem)}")
    _say(console, f"  {words.configuration(comparison.best.candidate)}")


def closest(recording: Recording, problem: Problem) -> str:
    """In one line, that no row meets the constraints, and which one comes closest."""
    goal = words.bounds(problem.constraints)
    lacking = f"{recording.name}: no row meets {goal}" if goal else f"{recording.name}: no row is stable"
    row = recording.closest(problem)
    if row is None:
        return f"{lacking}: no stable measurement in it"
    return f"{lacking}; the closest: {words.configuration(row.candidate)}: {described(row, problem)}"


def described(row: Row, problem: Problem) -> str:
    """``12,345 infer/s, p95 18.2 ms, concurrency 24 (line 17)``."""
    return f"{words.performance(row.point, words.judged_latency(problem.constraints))} (line {row.line})"


def _headline(comparison: Comparison) -> str:
    recording = comparison.recording
    loads = {row.load.concurrency for row in recording.rows if row.load}
    seeds = max(len(runs) for runs in comparison.runs.values())
    return (
        f"{recording.name}: {words.count(len(recording.space), 'configuration')}, {words.count(len(loads), 'load')}; "
        f"{words.bounds(comparison.problem.constraints) or 'no bound'}; {words.count(seeds, 'seed')}"
    )


def _cells(runs: Sequence[Replayed], pick: Callable[[Spread], float]) -> list[str]:
    counts: list[list[float]] = []
    for tolerance in TOLERANCES:
        counts.append([run.until[tolerance].deployments for run in runs])
        counts.append([run.until[tolerance].measurements for run in runs])
    counts.append([run.effort.deployments for run in runs])
    regret = pick(Spread.of([run.regret for run in runs]))
    return [*(_count(pick(Spread.of(column))) for column in counts), f"{regret:.1%}"]


def _count(value: float) -> str:
    return "never" if math.isinf(value) else f"{value:,.1f}".removesuffix(".0")


def _say(console: Console, text: str = "", style: str = "") -> None:
    """As it is: names of files are no markup."""
    console.print(Text(text, style))
