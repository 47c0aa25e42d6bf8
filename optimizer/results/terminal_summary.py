"""The terminal summary of a run: its outcome, or the best so far after an interruption."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console
from rich.text import Text

from optimizer.core.notes import DETAILS, Note
from optimizer.results import configuration_text, formatting, outcome_values, summary
from optimizer.results.outcome_values import part_lines, point_lines
from optimizer.results.terminal_output import (
    plain_table,
    print_line,
    print_table,
    print_unwrapped,
    print_wrapped,
    wrap,
)

if TYPE_CHECKING:
    from optimizer.config.problem import Problem
    from optimizer.core.candidate import Candidate
    from optimizer.core.trial import Point
    from optimizer.results.recommendation import Outcome

MAX_FRONT_ROWS = 10
MAX_COLUMNS = 5  # columns of the comparisons; more are one row each
MIN_GAIN_WIDTH = 12  # width of the last column of the comparisons, whose texts are broken into lines


@dataclass(frozen=True, slots=True, kw_only=True)
class RunDetails:
    """The facts of a finished run that the terminal shows in addition to its outcome.

    Attributes:
        baseline: The current configuration, to which the change is made.
        hardware: The machine.
        notes: The notes of the run; without ``verbose`` those that are details are left out.
        facts: Facts about the model.
        results_dir: The folder of the run.
        command: The command that reproduces the run.
        longer_command: The same with a larger budget.
        tuned_part: The model that the change belongs to; empty for the model of the requests.
        config_path: The recommended configuration; None if there is none.
        report_path: The report page; None if none was written.
        can_serve: Whether ``tune serve`` can start the measured server.
        remaining_tests: The tests on fresh servers that are left.
    """

    baseline: Candidate
    hardware: str = ""
    notes: Sequence[Note] = ()
    facts: Mapping[str, object] = field(default_factory=dict)
    results_dir: Path
    command: str = ""
    longer_command: str = ""
    tuned_part: str = ""
    config_path: Path | None = None
    report_path: Path | None = None
    can_serve: bool = False
    remaining_tests: summary.RemainingTests = summary.UNKNOWN_TESTS


def print_outcome(
    console: Console, outcome: Outcome, problem: Problem, run: RunDetails, *, verbose: bool = False
) -> None:
    """Print the answer of a finished run: verdict, change to make, comparisons, files and the next step.

    With ``verbose``, print all metrics, the Pareto front, model, hardware and the extent of the search too.
    """
    _print_answer(console, outcome, problem)
    if outcome.recommended is not None:
        _print_change(console, outcome, run, outcome.recommended.candidate)
        _print_comparisons(console, outcome, problem)
        if not verbose and (lines := part_lines(outcome.recommended.measurement)):  # else in the details
            for label, text in lines:
                print_wrapped(console, label, text)
            print_line(console)
    elif outcome.closest is not None:
        _print_closest(console, outcome.closest, problem)
    if verbose:
        _print_details(console, outcome, problem, run)
    _print_notes(console, run.notes, verbose=verbose)
    if verbose:
        print_unwrapped(console, "results", str(run.results_dir))
    for label, path in (("config", run.config_path), ("report", run.report_path)):
        if path is not None:
            print_unwrapped(console, label, str(path))
    if verbose:
        print_unwrapped(console, "reproduce", run.command)
    step = summary.next_step(
        outcome,
        run.results_dir,
        run.command,
        run.longer_command,
        tests=run.remaining_tests,
        can_serve=run.can_serve,
    )
    print_next_step(console, step)


def print_next_step(console: Console, step: summary.NextStep, label: str = "next") -> None:
    """Print ``step`` and its alternative."""
    print_wrapped(console, label, f"{step.advice}:")
    print_unwrapped(console, "", step.command)
    if step.alternative is not None:
        print_next_step(console, step.alternative, label="")


def print_best_so_far(
    console: Console, outcome: Outcome, problem: Problem, *, results_dir: Path, command: str
) -> None:
    """Print the best result of an interrupted run, and the ``command`` that continues it."""
    measured = formatting.count(outcome.measurements, "measurement")
    print_line(
        console, f"Interrupted after {measured} of {formatting.count(outcome.trials, 'configuration')}.", "bold"
    )
    best = outcome.best_so_far
    goal = formatting.bounds(problem.sla)
    if best is not None:
        performance = formatting.performance(best, *outcome_values.shown_metrics(problem))
        print_wrapped(console, "best so far", performance)
        print_wrapped(console, "", configuration_text.configuration(best.candidate))
    else:
        nothing = f"no measurement meets {goal}" if goal and outcome.measurements else "nothing was measured"
        print_wrapped(console, "best so far", nothing)
    print_unwrapped(console, "results", str(results_dir))
    print_unwrapped(console, "continue", command)


def _print_answer(console: Console, outcome: Outcome, problem: Problem) -> None:
    for line in wrap(summary.answer(outcome, problem), console.width):
        print_line(console, line, formatting.VERDICT_STYLES[outcome.verdict])
    if cause := summary.cause(outcome):
        print_wrapped(console, "cause", cause)
    print_line(console)


def _print_closest(console: Console, closest: Point, problem: Problem) -> None:
    performance = formatting.performance(closest, *outcome_values.shown_metrics(problem))
    print_wrapped(console, "closest", f"{performance} (trial {closest.trial})")
    print_wrapped(console, "", configuration_text.configuration(closest.candidate))
    print_line(console)


def _print_notes(console: Console, notes: Sequence[Note], *, verbose: bool) -> None:
    shown = [note for note in notes if verbose or not isinstance(note, DETAILS)]
    for note in shown:
        print_wrapped(console, "note", str(note))
    if shown:
        print_line(console)


def _print_change(console: Console, outcome: Outcome, run: RunDetails, recommended: Candidate) -> None:
    lines = configuration_text.change_lines(run.baseline, recommended)
    file = Path(run.tuned_part, "config.pbtxt")
    print_line(console, f"Change in {file}:" if lines else summary.no_change(outcome))
    for line in lines:
        for part in configuration_text.wrap_change(line, console.width):
            print_line(console, part, "green" if line.startswith("+") else "red")
    print_line(console)


def _print_comparisons(console: Console, outcome: Outcome, problem: Problem) -> None:
    """Print the recommendation next to the baselines, with one row for each metric if the columns do not fit."""
    headers, rows = outcome_values.comparison_headers(outcome, problem), outcome_values.comparisons(outcome, problem)
    *unbroken, _ = zip(headers, *rows, strict=True)
    width = sum(max(map(len, column)) + 2 for column in unbroken) + MIN_GAIN_WIDTH
    if len(headers) > MAX_COLUMNS or width > console.width:  # more metrics than fit side by side: one row for each
        headers, *rows = zip((name.removeprefix(">") for name in headers), *rows, strict=True)
    table = plain_table(*headers)
    table.columns[0].no_wrap = True
    for cells in rows:
        table.add_row(*map(Text, cells))
    print_table(console, table)
    loads = f"{outcome_values.compared_loads(problem)} " if problem.keeps_best_load else ""
    print_line(console, "\n".join(wrap(loads + summary.evidence(outcome), console.width)), "dim")
    print_line(console)


def _print_details(console: Console, outcome: Outcome, problem: Problem, run: RunDetails) -> None:
    """Print all metrics, the verdict, the Pareto front, the model, the machine and the extent of the search."""
    point = outcome.shown
    if point is not None:
        for label, text in (*point_lines(outcome, point, problem), *summary.verdict_lines(outcome)):
            print_wrapped(console, label, text)
        print_line(console)
    _print_front(console, outcome)
    if run.facts:
        print_wrapped(console, "model", formatting.facts_line(run.facts))
    if run.hardware:
        print_wrapped(console, "hardware", run.hardware)
    tried = [formatting.count(outcome.trials, "configuration"), formatting.count(outcome.measurements, "measurement")]
    if outcome.confirmations:
        tried.append(f"{outcome.confirmations:,} more on fresh servers")
    print_wrapped(console, "tried", ", ".join(tried))


def _print_front(console: Console, outcome: Outcome) -> None:
    if not outcome.front.points:
        return
    title = outcome_values.front_title(outcome)
    print_line(console, f"Pareto front: {title[0].lower()}{title[1:]}", "bold")
    table = plain_table(*outcome_values.front_headers(outcome))
    shown = outcome_values.shown_front(outcome, MAX_FRONT_ROWS)
    for *values, configuration in outcome_values.front_rows(outcome, shown):
        table.add_row(*values, Text(configuration, overflow="fold"))
    print_table(console, table)
    if len(outcome.front.points) > MAX_FRONT_ROWS:
        print_line(console, f"{len(outcome.front.points) - MAX_FRONT_ROWS:,} more in pareto.csv", "dim")
    if remark := outcome_values.front_remark(outcome):
        print_line(console, "\n".join(wrap(remark, console.width)))
    print_line(console)
