"""Test the arrival processes: mean rate, distribution of the intervals, and recordings."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from scipy import stats

from optimizer.core.errors import BadInputError
from optimizer.measure.load_client.arrivals import (
    LONGEST_US,
    Arrivals,
    ConstantArrivals,
    PoissonArrivals,
    RecordedArrivals,
    parse_arrivals,
)


def recording(folder: Path, content: str | bytes) -> Path:
    path = folder / "intervals.txt"
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return path


@pytest.mark.parametrize(
    "kind", [ConstantArrivals(), PoissonArrivals(), RecordedArrivals(np.array([300.0, 100.0, 500.0, 900.0]))]
)
@pytest.mark.parametrize("rate", [0.4, 7.0, 3000.0])
def test_the_mean_rate_is_the_given_rate(kind: Arrivals, rate: float) -> None:
    seconds = 30.0
    times = kind.plan(rate, seconds, seed=1)
    assert times.dtype == np.float64
    assert np.all(np.diff(times) >= 0)
    assert times[0] >= 0
    assert times[-1] < seconds
    assert len(times) == pytest.approx(rate * seconds, abs=2)


def test_even_the_lowest_rate_plans_one_request() -> None:
    assert [
        len(kind.plan(0.001, 1.0, seed=0))
        for kind in (ConstantArrivals(), PoissonArrivals(), RecordedArrivals(np.ones(1)))
    ] == [1, 1, 1]


def test_constant_intervals_are_equal() -> None:
    assert ConstantArrivals().plan(4.0, 1.0, seed=0).tolist() == [0.0, 0.25, 0.5, 0.75]


def test_poisson_intervals_are_exponential_and_depend_on_the_seed() -> None:
    times = PoissonArrivals().plan(1000.0, 5.0, seed=3)
    assert stats.kstest(np.diff(times), "expon", args=(0, 1 / 1000)).pvalue > 0.01
    assert np.array_equal(times, PoissonArrivals().plan(1000.0, 5.0, seed=3))
    assert not np.array_equal(times, PoissonArrivals().plan(1000.0, 5.0, seed=4))


def test_a_recording_is_scaled_and_repeated(tmp_path: Path) -> None:
    recorded = RecordedArrivals.read(recording(tmp_path, "100\n300\r\n 200 \n"))
    times = recorded.plan(10.0, 0.65, seed=0)  # a mean of 200 µs, scaled to 100 ms
    assert times == pytest.approx([0, 0.1, 0.15, 0.3, 0.4, 0.45, 0.6])  # starts at the third interval


def test_measurements_start_at_different_parts_of_a_recording(tmp_path: Path) -> None:
    """Some of them contain the burst at its end, although each has only a tenth of its length."""
    recorded = RecordedArrivals(np.array([1000.0] * 900 + [10.0] * 100))
    rate = 1e6 / recorded.intervals.mean()
    plans = [recorded.plan(rate, 0.09, seed) for seed in range(30)]
    assert any(np.diff(plan).min() < 5e-5 for plan in plans)
    assert any(np.diff(plan).min() > 5e-4 for plan in plans)
    assert np.array_equal(plans[3], recorded.plan(rate, 0.09, 3))


def test_a_recording_longer_than_the_run_is_cut(tmp_path: Path) -> None:
    recorded = RecordedArrivals.read(recording(tmp_path, "1\n" * 50 + "3\n" * 50))
    assert len(recorded.plan(100.0, 0.5, seed=0)) == 50 + 17  # 5 ms apart, then 15 ms


def test_arrivals_are_selected_by_name(tmp_path: Path) -> None:
    assert parse_arrivals("constant") == ConstantArrivals()
    assert parse_arrivals("poisson") == PoissonArrivals()
    read = parse_arrivals(str(recording(tmp_path, "5\n7")))
    assert isinstance(read, RecordedArrivals)
    assert read.intervals.tolist() == [5, 7]


@pytest.mark.parametrize(
    ("content", "where", "reason"),
    [
        ("5\n\n7\n", ":2: ", "''"),
        ("5\n-7\n", ":2: ", "'-7'"),
        ("5\n7\n1.5\n", ":3: ", "'1.5'"),
        ("abc\x1b[2J\n", ":1: ", r"'abc\x1b[2J'"),
        (b"\xff\xfe\n", ":1: ", "whole number"),
        (f"{LONGEST_US + 1}\n", ":1: ", "whole number"),
        ("9" * 5000, ":1: ", "whole number"),
        ("", ": ", "no interval is above 0"),
        ("0\n0\n", ": ", "no interval is above 0"),
    ],
)
def test_an_invalid_recording_is_reported_with_its_line(
    tmp_path: Path, content: str | bytes, where: str, reason: str
) -> None:
    path = recording(tmp_path, content)
    with pytest.raises(BadInputError) as caught:
        RecordedArrivals.read(path)
    assert str(caught.value).startswith(f"{path}{where}")
    assert reason in str(caught.value)
    assert str(caught.value).isprintable()


def test_a_missing_recording_is_refused(tmp_path: Path) -> None:
    with pytest.raises(BadInputError, match="cannot be read"):
        parse_arrivals(str(tmp_path / "missing.txt"))
