"""Tests of the recordings of traffic that ``tune plan --trace`` reads: timestamps, gaps and useless files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from optimizer.core.errors import BadInputError
from optimizer.plan.traffic import read_trace
from tests.csv_tables import write_timestamps


@pytest.mark.parametrize("unit", [1.0, 1e3, 1e6, 1e9])
def test_timestamps_are_read_in_any_unit(tmp_path: Path, unit: float) -> None:
    times = [f"{(1_763_000_000 + 0.5 * i) * unit:.0f}" for i in range(0, 400, 2)]
    assert read_trace(write_timestamps(tmp_path / "t.csv", times)).rate == pytest.approx(1.0, rel=1e-3)


def test_dates_without_a_header_are_read(tmp_path: Path) -> None:
    path = tmp_path / "t.csv"
    path.write_text("".join(f"2026-11-21T10:{i // 60:02}:{i % 60:02}.250Z\n" for i in range(300)))
    trace = read_trace(path)
    assert trace.rate == pytest.approx(1.0)
    assert trace.note == ""


def test_the_column_of_timestamps_is_found_by_its_name(tmp_path: Path) -> None:
    """A log may end with rows of empty cells. The smallest number of timestamps is 100."""
    path = tmp_path / "t.csv"
    path.write_text("latency_ms, Timestamp\n" + "".join(f"{i % 7},{i / 4}\n" for i in range(100)) + ",\n,\n")
    trace = read_trace(path)
    assert trace.rate == pytest.approx(4.0)
    assert trace.note == ""


def test_gaps_are_reported_and_left_out(tmp_path: Path) -> None:
    times: list[Any] = [0.01 * i + (600 if i > 500 else 0) for i in range(1000)]
    times[7] = ""
    times[9] = "broken"
    trace = read_trace(write_timestamps(tmp_path / "t.csv", times))
    assert "2 rows without a timestamp, the first in line 9" in trace.note
    assert "1 gaps of 600 s in total in 610 s left out" in trace.note
    assert trace.rate == pytest.approx(100, rel=0.01)


def test_the_line_of_a_row_without_a_timestamp_counts_line_breaks_in_cells(tmp_path: Path) -> None:
    path = tmp_path / "t.csv"
    rows = [f'{0.01 * i},"agent" x {i}\n' for i in range(300)]
    path.write_text("".join(['timestamp,agent\n0,"two\nlines"\n\n', *rows, "broken,\n"]))
    assert "1 rows without a timestamp, the first in line 305" in read_trace(path).note


def test_a_recording_that_is_no_utf8_text_is_refused_with_its_line(tmp_path: Path) -> None:
    path = tmp_path / "t.csv"
    path.write_bytes(b"timestamp\n1\n\xe9\n")
    with pytest.raises(BadInputError, match=r"t\.csv:3: byte 0xe9 is not UTF-8 text; save the file as UTF-8$"):
        read_trace(path)


def test_bursts_keep_the_idle_times_between_them(tmp_path: Path) -> None:
    """200 requests within 20 ms are followed by an idle second, which is 1,000 times the median interval."""
    times = [second + 1e-4 * i for second in range(60) for i in range(200)]
    trace = read_trace(write_timestamps(tmp_path / "t.csv", times))
    assert trace.note == ""
    assert trace.rate == pytest.approx(200, rel=0.02)


def test_several_gaps_are_left_out(tmp_path: Path) -> None:
    gaps = np.random.default_rng(0).exponential(0.01, 5000)
    gaps[[1000, 2000, 2001, 4000]] = [50.0, 3600.0, 3000.0, 60.0]
    trace = read_trace(write_timestamps(tmp_path / "t.csv", np.cumsum(gaps)))
    assert "4 gaps of 6,710 s" in trace.note
    assert trace.rate == pytest.approx(100, rel=0.05)


def test_requests_of_the_same_second_are_spread_over_it(tmp_path: Path) -> None:
    trace = read_trace(write_timestamps(tmp_path / "t.csv", [1_763_000_000 + i // 300 for i in range(18_000)]))
    assert trace.note.endswith("17,940 requests with the timestamp of another one were spread over 1 s")
    assert trace.rate == pytest.approx(300, rel=0.02)
    assert trace.intervals_s.std() == pytest.approx(1 / 300, rel=0.05), "as independent requests"
    pairs = read_trace(
        write_timestamps(tmp_path / "pairs.csv", [i // 2 * 3 + i % 2 for i in range(200) for _ in range(2)])
    )
    assert pairs.note.endswith("200 requests with the timestamp of another one were spread over 1 s")
    assert pairs.intervals_s.min() > 0


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "empty; give a timestamp in each row"),
        ("timestamp\n1\n2\n", "has 2 readable timestamps in 2 rows; give at least 100"),
        ("a,b\n" * 500, "has 0 readable timestamps"),
        ("1\n", "has 1 readable timestamp in 1 row; give at least 100"),
        ("5\n" * 500, "all timestamps are equal"),
        ("\x00\xff", "readable timestamps"),
    ],
)
def test_a_useless_recording_is_refused(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "t.csv"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(BadInputError, match=message) as caught:
        read_trace(path)
    assert "\n" not in str(caught.value)


def test_a_trace_of_requests_is_a_recording_of_traffic(tmp_path: Path) -> None:
    rows = "".join(f"{i / 50},{1 + i % 3},{i % 2}\n" for i in range(200))
    path = tmp_path / "trace.csv"
    path.write_text(f"time_s,batch_size,priority\n{rows}")
    trace = read_trace(path)
    assert trace.rate == pytest.approx(50)
    assert trace.note == ""
