"""The result as text: the answer first, what it is compared with, the front, and where all of it lies."""

from __future__ import annotations

import shlex
import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console
from rich.text import Text

from optimizer.report import summary, words
from optimizer.report.live import LiveWatcher, QuietWatcher
from optimizer.report.plain import PlainWatcher
from optimizer.report.plain_tables import plain_table, print_table
from optimizer.untrusted import one_line

if TYPE_CHECKING:
    from optimizer.budget import Budget
    from optimizer.outcome import Outcome
    from optimizer.problem import Problem
    from optimizer.trial import Point

__all__ = ["LiveWatcher", "PlainWatcher", "QuietWatcher", "print_best_so_far", "print_outcome", "watcher"]

MOST_FRONT_ROWS = 10
_LABEL_WIDTH = 14


def watcher(
    log: str | None, terminal: Console, problem: Problem, budget: Budget, hardware: str
) -> LiveWatcher | PlainWatcher | QuietWatcher:
    """``log``: one of ``report.LOGS``; None is the live display on a terminal, and nothing in a pipe, where each
    line is a complaint."""
    log = log or ("live" if terminal.is_terminal else "none")
    if log == "plain":
        return PlainWatcher(terminal, problem, budget)
    return LiveWatcher(terminal, problem, budget, hardware=hardware) if log == "live" else QuietWatcher()


def print_outcome(
    console: Console,
    outcome: Outcome,
    problem: Problem,
    *,
    hardware: str,
    notes: Sequence[str],
    facts: Mapping[str, object],
    results_dir: Path,
    command: str,
    config_path: Path | None,
) -> None:
    """Everything that a finished run has to say."""
    _print_answer(console, outcome, problem)
    if outcome.recommended is not None:
        _print_comparisons(console, outcome, problem)
    _print_front(console, outcome.front)
    if facts:
        _print_labelled(console, "model", words.facts_line(facts))
    if hardware:
        _print_labelled(console, "hardware", hardware)
    tried = [words.count(outcome.trials, "configuration"), words.count(outcome.measurements, "measurement")]
    if outcome.confirmations:
        tried.append(f"{outcome.confirmations:,} more on fresh servers")
    _print_labelled(console, "tried", ", ".join(tried))
    for note in notes:
        _print_labelled(console, "note", note)
    _say(console)
    _print_whole(console, "results", str(results_dir))
    if config_path is not None:
        _print_whole(console, "config", str(config_path))
    _print_whole(console, "reproduce", command)


def print_best_so_far(console: Console, outcome: Outcome, problem: Problem, *, results_dir: Path) -> None:
    """What an interrupted run leaves: the best so far, and how to go on."""
    measured = words.count(outcome.measurements, "measurement")
    _say(console, f"Interrupted after {measured} of {words.count(outcome.trials, 'configuration')}.", "bold")
    best = outcome.recommended
    goal = words.bounds(problem.constraints)
    if best is not None:
        figures = words.performance(best, words.judged_latency(problem.constraints))
        _print_labelled(console, "best so far", figures)
        _print_labelled(console, "", words.configuration(best.candidate))
    else:
        nothing = f"nothing measured meets {goal}" if goal else "nothing was measured"
        _print_labelled(console, "best so far", nothing)
    _print_whole(console, "results", str(results_dir))
    _print_whole(console, "go on", f"tune --resume {shlex.quote(str(results_dir))}")


def _print_answer(console: Console, outcome: Outcome, problem: Problem) -> None:
    found = outcome.recommended is not None
    _say(console, summary.headline(outcome, problem), "bold green" if found else "bold red")
    point = outcome.recommended or outcome.closest
    if point is not None:
        _say(console, "" if found else "\nThe closest one measured:\n")
        for line in words.triton_lines(point.candidate):
            _say(console, f"  {line}", "bold")
        _say(console)
        for label, text in summary.figures(point, problem):
            _print_labelled(console, label, text)
    if found:
        _print_labelled(console, "verdict", summary.verdict(outcome))
    _say(console)


def _print_comparisons(console: Console, outcome: Outcome, problem: Problem) -> None:
    table = plain_table("each at its best load", "", "gain")
    for name, figures, gain in summary.comparisons(outcome, problem):
        table.add_row(Text(name), Text(figures), Text(gain, "bold"))
    print_table(console, table)
    _say(console)


def _print_front(console: Console, front: Sequence[Point]) -> None:
    if not front:
        return
    _say(console, "Pareto front: throughput against p95 latency", "bold")
    table = plain_table(">infer/s", ">p95 ms", ">load", ">trial", "configuration (batch: max_batch_size)")
    for point in _spread(front, MOST_FRONT_ROWS):
        measurement = point.measurement
        table.add_row(
            words.number(measurement.throughput_infer_per_sec),
            words.number(measurement.latency_p95_ms),
            words.load(point.load),
            str(point.trial),
            Text(words.configuration(point.candidate), overflow="fold"),
        )
    print_table(console, table)
    if len(front) > MOST_FRONT_ROWS:
        _say(console, f"{len(front) - MOST_FRONT_ROWS:,} more in pareto.csv", "dim")
    _say(console)


def _spread(front: Sequence[Point], most: int) -> Sequence[Point]:
    """``most`` points over the whole of the front, both ends included."""
    if len(front) <= most:
        return front
    return [front[round(i * (len(front) - 1) / (most - 1))] for i in range(most)]


def _say(console: Console, text: str = "", style: str = "") -> None:
    """As it is: names of models and of files are no markup."""
    console.print(Text(text, style))


def _print_labelled(console: Console, label: str, text: str) -> None:
    """Wrapped, the following lines under the first."""
    room = max(_LABEL_WIDTH, console.width - _LABEL_WIDTH)
    for i, line in enumerate(textwrap.wrap(text, room) or [""]):
        console.print(Text.assemble(((label if i == 0 else "").ljust(_LABEL_WIDTH), "dim"), line))


def _print_whole(console: Console, label: str, text: str) -> None:
    """Without line breaks of ours: a path or a command is to be copied."""
    console.print(Text.assemble((label.ljust(_LABEL_WIDTH), "dim"), one_line(text)), soft_wrap=True)
