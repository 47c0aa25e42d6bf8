"""Print the comparison of two runs on a terminal."""

from __future__ import annotations

import itertools
import operator
from collections.abc import Iterator, Sequence

from rich.console import Console
from rich.text import Text

from optimizer.core.candidate import short_path
from optimizer.core.safe_text import one_line
from optimizer.core.trial import Point
from optimizer.results import formatting, outcome_values
from optimizer.results.comparison import (
    COMPARED_VERSIONS,
    Aspect,
    ComparedRun,
    Comparison,
    answer,
    difference_warning,
    different_settings,
    gain_sentence,
    regression_sentence,
)
from optimizer.results.recommendation import Outcome
from optimizer.results.terminal_output import (
    plain_table,
    print_line,
    print_table,
    print_unwrapped,
    print_wrapped,
    wrap,
)

NO_VALUE = "none"
NOTHING_SERVED = "no request was served"
SEE_ABOVE = "see above"  # of an objective that has a row of its own
COLUMN_GAP = 2  # columns between two columns of the table


def print_comparison(console: Console, comparison: Comparison, limit: float | None = None) -> None:
    """Print ``comparison``, with the answer on the first line. ``limit`` is that of ``--fail-on-regression``."""
    headline, ratio = answer(comparison), gain_sentence(comparison)
    for line in wrap(headline, console.width):
        print_line(console, line, "bold")
    if not comparison.mismatch and ratio != headline:
        print_wrapped(console, "ratio", ratio)
    if differences := difference_warning(comparison):
        print_wrapped(console, "warning", differences)
    for side in comparison.runs:
        if side.run.next_command:
            print_unwrapped(console, f"next for {side.label}", side.run.next_command)
    print_line(console)
    for side in comparison.runs:
        print_unwrapped(console, side.label, str(side.run.folder.path))
    print_line(console)
    _print_values(console, list(_rows(comparison)))
    print_line(console)
    for aspect in comparison.aspects:
        print_wrapped(console, aspect.name, _aspect_text(aspect))
    if limit is not None:
        print_line(console)
        print_wrapped(console, "regression", regression_sentence(comparison, limit))


def _print_values(console: Console, rows: Sequence[tuple[str, str, str]]) -> None:
    """Print (name, value of A, value of B) as a table; below it those with a word that is too long for a column."""
    names = max((len(name) for name, *_ in rows if len(name) <= console.width // 2), default=0)
    room = console.width - names - 2 * COLUMN_GAP  # columns of both values
    is_short = [
        len(name) <= names and all(_longest_word(cell) <= room // 2 for cell in cells) for name, *cells in rows
    ]
    widths = _column_widths([cells for _, *cells in itertools.compress(rows, is_short)], room)
    table = plain_table("", "A", "B")
    table.columns[0].no_wrap = True
    for cells in itertools.compress(rows, is_short):
        name, *values = cells
        table.add_row(name, *(Text("\n".join(wrap(*cell))) for cell in zip(values, widths, strict=True)))
    print_table(console, table)
    for name, a, b in itertools.compress(rows, map(operator.not_, is_short)):  # they can be copied
        print_unwrapped(console, f"{name}: A  ", a)
        print_unwrapped(console, f"{name}: B  ", b)


def _column_widths(rows: Sequence[Sequence[str]], room: int) -> tuple[int, int]:
    """Return the widths of the two columns of values. A column that needs less than half of ``room`` gets no more."""
    a, b = (max(map(len, column), default=0) for column in zip(*rows, strict=True)) if rows else (0, 0)
    if a <= room // 2:
        return a, room - a
    return room - min(b, room // 2), min(b, room // 2)


def _longest_word(text: str) -> int:
    return max(map(len, text.split()), default=0)


def _rows(comparison: Comparison) -> Iterator[tuple[str, str, str]]:
    """Yield (name, value of A, value of B), without values that are unknown, or shown above, in both runs."""
    candidates = [side.recommended.candidate for side in comparison.runs]
    fields = dict.fromkeys(name for candidate in candidates for name, _ in candidate.fields)
    different = [name for name in fields if name in different_settings(comparison)]
    for (name, a), (_, b) in zip(*(_column(side, different) for side in comparison.runs), strict=True):
        if {a, b} not in ({formatting.UNKNOWN}, {SEE_ABOVE}):
            yield name, a, b


def _column(side: ComparedRun, fields: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Yield (name, value) of one run, with the fields of its candidate that are named in ``fields``."""
    outcome, point, confirmed = side.outcome, side.recommended, side.confirmed
    latency, objective = outcome.sla.judged_latency, outcome.objective.name
    bounded = outcome.sla.bounded_latencies
    yield "verdict", outcome.verdict.value
    yield "model", side.run.problem.model
    yield "bound", formatting.bounds(outcome.sla) or NO_VALUE
    searched = "" if confirmed else ", in the search"
    yield "throughput", _value_text(outcome, point, "throughput") + searched
    yield "output", outcome_values.estimate(outcome, point, formatting.OUTPUT_THROUGHPUT)
    yield "latency", _metric_text(outcome, point, latency)
    other_latencies = (_metric_text(outcome, point, name) for name in bounded if name != latency)
    is_shown = objective in ("throughput", formatting.OUTPUT_THROUGHPUT, *bounded)
    yield "objective", SEE_ABOVE if is_shown else _metric_text(outcome, point, objective)
    yield "other bounds", ", ".join(other_latencies) or formatting.UNKNOWN
    yield "load", formatting.named_load(point.load)
    probe_ms = point.measurement.speed_probe_ms if confirmed else None
    yield "speed probe", formatting.UNKNOWN if probe_ms is None else f"{formatting.number(probe_ms)} ms"
    candidate = point.candidate
    yield "max_batch_size", f"{candidate.max_batch_size:,}"
    delay = f"{candidate.max_queue_delay_us:,} µs"
    yield "queue delay", delay if candidate.dynamic_batching else "no dynamic batching"
    yield "preferred sizes", ", ".join(map(str, candidate.preferred_batch_sizes)) or NO_VALUE
    yield "instances", f"{candidate.instance_count:,}"
    chosen = dict(candidate.fields)
    for name in fields:
        yield short_path(name), one_line(str(chosen[name])) if name in chosen else "not set"
    baseline = outcome.baseline.point
    if baseline is None:
        yield "baseline", "not measured"
    else:
        missed = "" if outcome.sla.is_met(baseline.measurement) else ", misses the bound"
        name = "" if objective == "throughput" else f"{formatting.goal_label(objective)} "
        yield "baseline", name + _value_text(outcome, baseline, objective) + missed
    yield "gain over it", "the same" if baseline is point else outcome_values.gain_over(outcome, outcome.baseline)


def _value_text(outcome: Outcome, point: Point, metric: str) -> str:
    return outcome_values.estimate(outcome, point, metric) if point.throughput_infer_per_sec else NOTHING_SERVED


def _metric_text(outcome: Outcome, point: Point, metric: str) -> str:
    return f"{formatting.goal_label(metric)} {outcome_values.estimate(outcome, point, metric)}"


def _aspect_text(aspect: Aspect) -> str:
    """Return what differs, or that nothing does with the values that both runs have."""
    if different := aspect.differences:
        pairs = (f"{name} {a or NO_VALUE} (A), {b or NO_VALUE} (B)" for name, (a, b) in different.items())
        return f"differs: {'; '.join(pairs)}"
    names = COMPARED_VERSIONS if aspect.name == "versions" else tuple(aspect.a)
    values = [f"{name} {value}" for name in names if (value := aspect.a.get(name)) and aspect.b.get(name) is not None]
    state = "same" if aspect.is_same else f"unknown, because the {aspect.required} is not recorded in both runs"
    return f"{state}: {', '.join(values)}" if values else state
