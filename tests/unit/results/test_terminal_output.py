"""Lines for a terminal keep a number with its unit, and a bound or a setting in one piece. Tables break no word."""

from __future__ import annotations

import re

import pytest
from rich.console import Console
from rich.table import Table

from optimizer.results.terminal_output import plain_table, print_line, print_table, wrap

WHOLE = re.compile(
    r"(?:TTFT |inter-token )?p[0-9.]+ [<>]= [0-9,]+ ms|[0-9,.]+ (?:± [0-9,.]+ )?(?:infer/s|ms|µs|%)"
    r"|batch [0-9]+|[0-9]+ instances?|concurrency [0-9]+|trial [0-9]+|in the search"
)
TEXTS = (
    "p95 <= 20 ms and p99 <= 45 ms and TTFT p95 <= 200 ms and inter-token p95 <= 30 ms",
    "18,400 ± 2,000 infer/s, p95 18.3 ± 1.1 ms, concurrency 46; trial 7, in the search",
    "trial 4: batch 64 · 4 instances · delay 5,000 µs · preferred 32, 64 · intra_op_thread_count=1, 30 % of the CPUs",
)


@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize("width", [24, 27, 36, 80])
def test_a_bound_a_value_and_a_setting_stay_on_one_line(text: str, width: int) -> None:
    lines = wrap(text, width)
    assert " ".join(lines) == text
    assert max(map(len, lines)) <= max(width, len("intra_op_thread_count=1"))
    for piece in WHOLE.findall(text):
        assert any(piece in line for line in lines), piece


def test_a_part_that_is_too_long_is_broken_at_a_blank() -> None:
    assert wrap("throughput >= 4,000 infer/s", 20) == ["throughput >= 4,000", "infer/s"]
    assert wrap("to throughput >= 4,000 infer/s", 20, first_indent="  ", indent="    ") == [
        "  to",
        "    throughput >=",
        "    4,000 infer/s",
    ]


def printed(table: Table, width: int) -> list[str]:
    """Return the lines of ``table`` on a terminal of ``width`` columns."""
    console = Console(width=width)
    with console.capture() as captured:
        print_table(console, table)
    return captured.get().splitlines()


def printed_table(width: int) -> list[str]:
    """Return the lines of a table with a long name on a terminal of ``width`` columns."""
    table = plain_table("model", ">infer/s", "bound")
    table.columns[0].no_wrap = True
    table.add_row("text_recognition-small", "540 ± 110", "p95 <= 20 ms")
    table.add_row("mlp", "", "p99 <= 5 ms")
    return printed(table, width)


def test_a_table_is_printed_without_trailing_blanks() -> None:
    assert printed_table(60) == [
        "model                     infer/s  bound",
        "text_recognition-small  540 ± 110  p95 <= 20 ms",
        "mlp                                p99 <= 5 ms",
    ]


def test_a_table_that_does_not_fit_has_a_line_for_each_cell() -> None:
    assert printed_table(38) == [
        "model    text_recognition-small",
        "infer/s  540 ± 110",
        "bound    p95 <= 20 ms",
        "",
        "model    mlp",
        "infer/s",
        "bound    p99 <= 5 ms",
    ]


def test_a_broken_line_is_printed_without_trailing_blanks() -> None:
    console = Console(width=24)
    with console.capture() as captured:
        print_line(console, "note: the names [b]model[/b] and the bounds stay\n\nsecond")
        print_line(console)
    assert captured.get().splitlines() == [
        "note: the names",
        "[b]model[/b] and the",
        "bounds stay",
        "",
        "second",
        "",
    ]


def test_the_gaps_of_a_table_count_with_their_own_width() -> None:
    table = Table(box=None, padding=(0, 1, 0, 0), pad_edge=False)
    for header in ("\nsearch", "within 5 %\ndeployed", "\nmeasured"):
        table.add_column(header)
    table.add_row("tpe", "10", "21")
    assert printed(table, 24) == [
        "       within 5",
        "       %",
        "search deployed measured",
        "tpe    10       21",
    ]


def test_the_columns_of_a_table_break_no_word() -> None:
    table = plain_table("model", "verdict", "bound")
    table.add_row("./models/scaler", "none found", "p95 <= 20 ms and p99 <= 40 ms")
    assert printed(table, 40) == [
        "model            verdict     bound",
        "./models/scaler  none found  p95 <= 20",
        "                             ms and p99",
        "                             <= 40 ms",
    ]


def test_a_long_word_of_a_table_is_broken_only_without_room() -> None:
    table = plain_table("setting", "choices")
    table.add_row("parameters.intra_op_threads", "one, two, three")
    assert printed(table, 36) == [
        "setting                      choices",
        "parameters.intra_op_threads  one,",
        "                             two,",
        "                             three",
    ]
