"""Lines for a terminal keep a number with its unit, and a bound or a setting in one piece."""

from __future__ import annotations

import re

import pytest

from optimizer.results.line_breaks import wrap

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
