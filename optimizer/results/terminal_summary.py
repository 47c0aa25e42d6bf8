"""The terminal summary of a run: its outcome, or the best so far after an interruption."""

from __future__ import annotations

import shlex
import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console
from rich.text import Text

from optimizer.core.notes import Note
from optimizer.core.safe_text import one_line
from optimizer.results import formatting, summary
from optimizer.results.formatting import plain_table, print_line, print_table

if TYPE_CHECKING:
    from optimizer.config.search_space import Problem
    from optimizer.results.recommendation import Outcome

MOST_FRONT_ROWS = 10
_LABEL_WIDTH = 14
_GAIN_WIDTH = 14  # characters; a longer gain is wrapped


def print_outcome(
    console: Console,
    outcome: Outcome,
    problem: Problem,
    *,
    hardware: str,
    notes: Sequence[Note],
    facts: Mapping[str, object],
    results_dir: Path,
    command: str,
    config_path: Path | None,
) -> None:
    """Print the result of a finished run."""
    _print_answer(console, outcome, problem, results_dir)
    if outcome.recommended is not None:
        _print_comparisons(console, outcome, problem)
    _print_front(console, outcome)
    if facts:
        print_wrapped(console, "model", formatting.facts_line(facts))
    if hardware:
        print_wrapped(console, "hardware", hardware)
    tried = [formatting.count(outcome.trials, "configuration"), formatting.count(outcome.measurements, "measurement")]
    if outcome.confirmations:
        tried.append(f"{outcome.confirmations:,} more on fresh servers")
    print_wrapped(console, "tried", ", ".join(tried))
    for note in notes:
        print_wrapped(console, "note", str(note))
    print_line(console)
    print_unwrapped(console, "results", str(results_dir))
    if config_path is not None:
        print_unwrapped(console, "config", str(config_path))
    print_unwrapped(console, "reproduce", command)


def print_best_so_far(console: Console, outcome: Outcome, problem: Problem, *, results_dir: Path) -> None:
    """Print the best result of an interrupted run, and the command that continues it."""
    measured = formatting.count(outcome.measurements, "measurement")
    print_line(
        console, f"Interrupted after {measured} of {formatting.count(outcome.trials, 'configuration')}.", "bold"
    )
    best = outcome.recommended
    goal = formatting.bounds(problem.sla)
    if best is not None:
        figures = formatting.performance(best, problem.sla.judged_latency)
        print_wrapped(console, "best so far", figures)
        print_wrapped(console, "", formatting.configuration(best.candidate))
    else:
        nothing = f"no measurement meets {goal}" if goal else "nothing was measured"
        print_wrapped(console, "best so far", nothing)
    print_unwrapped(console, "results", str(results_dir))
    print_unwrapped(console, "continue", f"tune --resume {shlex.quote(str(results_dir))}")


def _print_answer(console: Console, outcome: Outcome, problem: Problem, results_dir: Path) -> None:
    recommended = outcome.recommended is not None
    for line in textwrap.wrap(summary.headline(outcome, problem), console.width):
        print_line(console, line, formatting.VERDICT_STYLES[outcome.verdict])
    if command := summary.next_command(outcome, results_dir):
        print_unwrapped(console, "next", command)
    point = outcome.recommended or outcome.closest
    if point is not None:
        print_line(console, "" if recommended else "\nThe measured configuration that comes closest:\n")
        for line in formatting.triton_lines(point.candidate):
            print_line(console, f"  {line}", "bold")
        print_line(console)
        for label, text in summary.figures(point, problem):
            print_wrapped(console, label, text)
    for label, text in summary.verdict_lines(outcome):
        print_wrapped(console, label, text)
    print_line(console)


def _print_comparisons(console: Console, outcome: Outcome, problem: Problem) -> None:
    table = plain_table("", "each at its best load", "gain")
    for name, figures, gain in summary.comparisons(outcome, problem):
        table.add_row(Text(name), Text(figures), Text(gain.replace(" (", "\n("), "bold"))
    table.columns[-1].max_width = _GAIN_WIDTH
    print_table(console, table)
    print_line(console)


def _print_front(console: Console, outcome: Outcome) -> None:
    if not outcome.front:
        return
    print_line(console, "Pareto front: throughput against p95 latency", "bold")
    table = plain_table(*summary.FRONT_HEADERS)
    for *figures, configuration in summary.front_rows(outcome, summary.shown_front(outcome, MOST_FRONT_ROWS)):
        table.add_row(*figures, Text(configuration, overflow="fold"))
    print_table(console, table)
    if len(outcome.front) > MOST_FRONT_ROWS:
        print_line(console, f"{len(outcome.front) - MOST_FRONT_ROWS:,} more in pareto.csv", "dim")
    if remark := summary.front_remark(outcome):
        print_line(console, textwrap.fill(remark, console.width))
    print_line(console)


def print_wrapped(console: Console, label: str, text: str) -> None:
    """Print ``text`` after ``label``, wrapped and indented."""
    room = max(_LABEL_WIDTH, console.width - _LABEL_WIDTH)
    for i, line in enumerate(textwrap.wrap(text, room) or [""]):
        console.print(Text.assemble(((label if i == 0 else "").ljust(_LABEL_WIDTH), "dim"), line))


def print_unwrapped(console: Console, label: str, text: str) -> None:
    """Print ``text`` after ``label`` without line breaks, so that a path or command can be copied."""
    console.print(Text.assemble((label.ljust(_LABEL_WIDTH), "dim"), one_line(text)), soft_wrap=True)
