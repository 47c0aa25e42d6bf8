"""Planned send times: the rate that is asked for, in the manner that is asked for."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from scipy import stats

from optimizer.errors import BadInputError
from optimizer.open_loop.arrivals import LONGEST_US, Arrivals, Constant, Poisson, Recorded, arrivals


def recording(folder: Path, content: str | bytes) -> Path:
    path = folder / "intervals.txt"
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return path


@pytest.mark.parametrize("kind", [Constant(), Poisson(), Recorded(np.array([300.0, 100.0, 500.0, 900.0]))])
@pytest.mark.parametrize("rate", [0.4, 7.0, 3000.0])
def test_the_mean_rate_is_the_one_asked_for(kind: Arrivals, rate: float) -> None:
    seconds = 30.0
    times = kind.plan(rate, seconds, seed=1)
    assert times.dtype == np.float64
    assert np.all(np.diff(times) >= 0)
    assert times[0] >= 0
    assert times[-1] < seconds
    assert len(times) == pytest.approx(rate * seconds, abs=2)


def test_there_is_a_request_however_low_the_rate() -> None:
    assert [len(kind.plan(0.001, 1.0, seed=0)) for kind in (Constant(), Poisson(), Recorded(np.ones(1)))] == [1, 1, 1]


def test_constant_intervals_are_equal() -> None:
    assert Constant().plan(4.0, 1.0, seed=0).tolist() == [0.0, 0.25, 0.5, 0.75]


def test_poisson_intervals_are_exponential_and_of_the_seed() -> None:
    times = Poisson().plan(1000.0, 5.0, seed=3)
    assert stats.kstest(np.diff(times), "expon", args=(0, 1 / 1000)).pvalue > 0.01
    assert np.array_equal(times, Poisson().plan(1000.0, 5.0, seed=3))
    assert not np.array_equal(times, Poisson().plan(1000.0, 5.0, seed=4))


def test_a_recording_is_stretched_and_repeated(tmp_path: Path) -> None:
    recorded = Recorded.read(recording(tmp_path, "100\n300\r\n 200 \n"))
    times = recorded.plan(10.0, 0.65, seed=0)  # 200 µs on average, stretched to 100 ms
    assert times == pytest.approx([0, 0.1, 0.15, 0.3, 0.4, 0.45, 0.6])  # from the third on


def test_each_measurement_sees_another_part_of_a_recording(tmp_path: Path) -> None:
    """A burst at its end is in some of them, although each is but a tenth as long."""
    recorded = Recorded(np.array([1000.0] * 900 + [10.0] * 100))
    rate = 1e6 / recorded.intervals.mean()
    plans = [recorded.plan(rate, 0.09, seed) for seed in range(30)]
    assert any(np.diff(plan).min() < 5e-5 for plan in plans)
    assert any(np.diff(plan).min() > 5e-4 for plan in plans)
    assert np.array_equal(plans[3], recorded.plan(rate, 0.09, 3))


def test_a_recording_longer_than_the_run_gives_its_beginning(tmp_path: Path) -> None:
    recorded = Recorded.read(recording(tmp_path, "1\n" * 50 + "3\n" * 50))
    assert len(recorded.plan(100.0, 0.5, seed=0)) == 50 + 17  # 5 ms apart, then 15 ms


def test_kinds_by_name(tmp_path: Path) -> None:
    assert arrivals("constant") == Constant()
    assert arrivals("poisson") == Poisson()
    read = arrivals(str(recording(tmp_path, "5\n7")))
    assert isinstance(read, Recorded)
    assert read.intervals.tolist() == [5, 7]


@pytest.mark.parametrize(
    ("content", "where", "what"),
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
def test_a_bad_recording_is_told_by_line(tmp_path: Path, content: str | bytes, where: str, what: str) -> None:
    path = recording(tmp_path, content)
    with pytest.raises(BadInputError) as caught:
        Recorded.read(path)
    assert str(caught.value).startswith(f"{path}{where}")
    assert what in str(caught.value)
    assert str(caught.value).isprintable()


def test_a_recording_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(BadInputError, match="cannot be read"):
        arrivals(str(tmp_path / "missing.txt"))
