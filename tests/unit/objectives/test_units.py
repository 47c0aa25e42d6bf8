"""Tests of the parsers of durations, sizes and rates."""

from __future__ import annotations

import contextlib
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from objectives.units import parse_bytes, parse_duration_ms, parse_rate

INVALID_DURATIONS = [
    "", " ", "ms", ".ms", "-20ms", "+20ms", "0ms", "0.0s", "nan", "nanms", "inf", "infs", "1e3ms", "0x14ms",
    "1,5ms", "20 m s", "20Ms", "20ms20ms", "20ms;", "20d", "٢٠ms", "２０ms", "20ｍs",
    "9" * 400 + "s", f"0.{'0' * 400}1us",
]  # fmt: skip


@pytest.mark.parametrize(
    ("text", "milliseconds"),
    [("20ms", 20), ("0.02s", 20), ("500us", 0.5), (".5ms", 0.5), ("5.ms", 5), ("020ms", 20), ("  20 ms ", 20),
     ("5m", 300_000), ("5min", 300_000), ("1h", 3_600_000)],
)  # fmt: skip
def test_a_duration_is_read_in_each_unit(text: str, milliseconds: float) -> None:
    assert parse_duration_ms(text) == pytest.approx(milliseconds)


@pytest.mark.parametrize("text", INVALID_DURATIONS)
def test_an_invalid_duration_is_refused_with_an_example(text: str) -> None:
    with pytest.raises(ValueError, match=r"20ms"):
        parse_duration_ms(text)


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        (" ", "the time is missing"),
        ("-20ms", "a time is never negative"),
        ("20d", "the unit is none of us, ms, s, m, min, h"),
        ("20Ms", "the unit is none of us, ms, s, m, min, h"),
        ("1,5ms", "this is not a number with a unit of time"),
    ],
)
def test_the_fault_of_a_duration_is_named(text: str, fault: str) -> None:
    with pytest.raises(ValueError, match=f"^{fault}; write a positive time such as 20ms"):
        parse_duration_ms(text)


@pytest.mark.parametrize("text", ["20", " 20 ", "0.02"])
def test_a_missing_unit_is_named(text: str) -> None:
    with pytest.raises(ValueError, match=rf"^a unit is missing: {text.strip()}ms\?$"):
        parse_duration_ms(text)


@pytest.mark.parametrize(
    ("text", "size"),
    [("4GiB", 4 * 2**30), ("500MB", 500e6), ("1 KiB", 1024), ("1.5KB", 1500), ("7B", 7), ("2MiB", 2 * 2**20)],
)
def test_a_size_is_read_in_each_unit(text: str, size: float) -> None:
    assert parse_bytes(text) == size


@pytest.mark.parametrize("text", ["", "4", "-1GB", "0B", "4gib", "4GiBs", "nanGB", "٤GB", "9" * 400 + "B"])
def test_an_invalid_size_is_refused_with_an_example(text: str) -> None:
    with pytest.raises(ValueError, match=r"4GiB"):
        parse_bytes(text)


@pytest.mark.parametrize(
    ("text", "rate"),
    [("4000", 4000), ("4000/s", 4000), ("4000infer/s", 4000), ("500req/s", 8000), ("0.5 req/s", 8)],
)
def test_rates_count_inferences(text: str, rate: float) -> None:
    assert parse_rate(text, request_batch_size=16) == rate


@pytest.mark.parametrize("text", ["", "-1", "0", "0req/s", "4000/m", "4000reqs", "nan", "1e9", "9" * 400])
def test_an_invalid_rate_is_refused_with_an_example(text: str) -> None:
    with pytest.raises(ValueError, match=r"4000/s"):
        parse_rate(text, request_batch_size=16)


@given(st.text(alphabet="0123456789.٣ usmhinGKMB/re-+\n\x00", max_size=12))
def test_a_parsed_bound_is_positive_and_finite(text: str) -> None:
    for parse in (parse_duration_ms, parse_bytes, lambda text: parse_rate(text, 16)):
        with contextlib.suppress(ValueError):
            assert 0 < parse(text) < math.inf
