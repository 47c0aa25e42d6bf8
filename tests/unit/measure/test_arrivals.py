"""Test the arrival processes: mean rate, distribution of the intervals, load shapes, recordings and traces."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from scipy import stats

from optimizer.core.errors import BadInputError
from optimizer.core.load_shapes import DEFAULTS, STEPS, RequestTimes
from optimizer.measure.load_client.arrivals import (
    MAX_INTERVAL_US,
    Arrivals,
    ConstantArrivals,
    PoissonArrivals,
    RecordedArrivals,
    ShapedArrivals,
    option_arrivals,
    parse_arrivals,
)
from tests.conftest import not_none


def write_recording(folder: Path, content: str | bytes) -> Path:
    path = folder / "intervals.txt"
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return path


ARRIVALS: dict[str, tuple[Arrivals, int]] = {  # with the largest difference of the number of requests
    "constant": (ConstantArrivals(), 2),
    "poisson": (PoissonArrivals(), 2),
    "recorded": (RecordedArrivals(np.array([300.0, 100.0, 500.0, 900.0])), 2),
    **{name: (parse_arrivals(name), 1) for name in DEFAULTS},
}


@pytest.mark.parametrize(("arrivals", "difference"), ARRIVALS.values(), ids=ARRIVALS)
@pytest.mark.parametrize("rate", [0.4, 7.0, 3000.0])
def test_the_mean_rate_is_the_given_rate(arrivals: Arrivals, difference: int, rate: float) -> None:
    """The time has whole periods of a load shape."""
    seconds = 30.0
    times = arrivals.plan(rate, seconds, seed=1)
    assert times.dtype == np.float64
    assert np.all(np.diff(times) >= 0)
    assert times[0] >= 0
    assert times[-1] < seconds
    assert len(times) == pytest.approx(rate * seconds, abs=difference)


@pytest.mark.parametrize("arrivals", [arrivals for arrivals, _ in ARRIVALS.values()], ids=ARRIVALS)
def test_the_lowest_rate_plans_one_request_even_in_a_short_time(arrivals: Arrivals) -> None:
    assert len(arrivals.plan(0.001, 0.1, seed=0)) == 1


def test_constant_intervals_are_equal() -> None:
    assert ConstantArrivals().plan(4.0, 1.0, seed=0).tolist() == [0.0, 0.25, 0.5, 0.75]


def test_poisson_intervals_are_exponential_and_depend_on_the_seed() -> None:
    times = PoissonArrivals().plan(1000.0, 5.0, seed=3)
    assert stats.kstest(np.diff(times), "expon", args=(0, 1 / 1000)).pvalue > 0.01
    assert np.array_equal(times, PoissonArrivals().plan(1000.0, 5.0, seed=3))
    assert not np.array_equal(times, PoissonArrivals().plan(1000.0, 5.0, seed=4))


def test_a_recording_is_scaled_and_repeated(tmp_path: Path) -> None:
    recorded = RecordedArrivals.read(write_recording(tmp_path, "100\n300\r\n 200 \n"))
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
    recorded = RecordedArrivals.read(write_recording(tmp_path, "1\n" * 50 + "3\n" * 50))
    assert len(recorded.plan(100.0, 0.5, seed=0)) == 50 + 17  # 5 ms apart, then 15 ms


def test_arrivals_are_selected_by_name(tmp_path: Path) -> None:
    assert parse_arrivals("constant") == ConstantArrivals()
    assert parse_arrivals("poisson") == PoissonArrivals()
    recorded = parse_arrivals(str(write_recording(tmp_path, "5\n7")))
    assert isinstance(recorded, RecordedArrivals)
    assert recorded.intervals.tolist() == [5, 7]


@pytest.mark.parametrize(
    ("content", "where", "reason"),
    [
        ("5\n\n7\n", ":2: ", "''"),
        ("5\n-7\n", ":2: ", "'-7'"),
        ("5\n7\n1.5\n", ":3: ", "'1.5'"),
        ("abc\x1b[2J\n", ":1: ", r"'abc\x1b[2J'"),
        (b"\xff\xfe\n", ":1: ", "whole number"),
        (f"{MAX_INTERVAL_US + 1}\n", ":1: ", "whole number"),
        ("9" * 5000, ":1: ", "whole number"),
        ("", ": ", "no interval is above 0"),
        ("0\n0\n", ": ", "no interval is above 0"),
    ],
)
def test_an_invalid_recording_is_reported_with_its_line(
    tmp_path: Path, content: str | bytes, where: str, reason: str
) -> None:
    path = write_recording(tmp_path, content)
    with pytest.raises(BadInputError) as caught:
        RecordedArrivals.read(path)
    assert str(caught.value).startswith(f"{path}{where}")
    assert reason in str(caught.value)
    assert str(caught.value).isprintable()


@pytest.mark.parametrize(
    ("name", "flag", "wanted"),
    [
        ("missing.txt", "--request-intervals", "a file of intervals in microseconds"),
        ("missing.csv", "--request-trace", "a CSV file with a column time_s"),
    ],
)
def test_a_missing_recording_is_refused(tmp_path: Path, name: str, flag: str, wanted: str) -> None:
    path = tmp_path / name
    with pytest.raises(BadInputError, match=rf"^{flag} {path}: no such file; give {wanted}$"):
        option_arrivals(str(path))
    with pytest.raises(BadInputError, match=rf"^{path}: no such file; check the path$"):
        parse_arrivals(str(path))


def shaped_arrivals(text: str) -> ShapedArrivals:
    arrivals = parse_arrivals(text)
    assert isinstance(arrivals, ShapedArrivals)
    return arrivals


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize(("factor", "percent"), [(2, 50), (4, 10), (10, 1), (100, 1)])
def test_a_burst_has_its_share_of_the_requests(seed: int, factor: float, percent: float) -> None:
    times = shaped_arrivals(f"spike:{factor}x:{percent}%:2s").plan(2000.0, 20.0, seed)
    share = percent / 100
    in_burst = np.abs(times % 2.0 - 1.0) <= share
    expected = factor * share / (factor * share + 1 - share)
    assert in_burst.mean() == pytest.approx(expected, abs=4 * (expected * (1 - expected) / len(times)) ** 0.5)


@pytest.mark.parametrize("name", DEFAULTS)
def test_arrivals_within_a_shape_are_a_poisson_process(name: str) -> None:
    """The cumulative rate turns the times into those of a homogeneous process."""
    arrivals = shaped_arrivals(name)
    times = arrivals.plan(1000.0, 10.0, seed=3)
    periods = np.floor(times / arrivals.shape.seconds)
    within = times / arrivals.shape.seconds - periods
    unit = 1000 * arrivals.shape.seconds * (periods + np.interp(within, arrivals.shape.edges, arrivals.shape.shares))
    assert stats.kstest(np.diff(unit), "expon").pvalue > 0.01
    assert np.array_equal(times, arrivals.plan(1000.0, 10.0, seed=3))
    assert not np.array_equal(times, arrivals.plan(1000.0, 10.0, seed=4))


@pytest.mark.parametrize("lead_in", [0.0, 0.2, 0.5, 1.0, 1.7])
def test_a_lead_in_is_the_end_of_a_period(lead_in: float) -> None:
    """Any whole period after it has the same burst, half a period after its beginning."""
    times = shaped_arrivals("spike:50x:10%:1s").plan(2000.0, 3 + lead_in, seed=0) - lead_in
    in_burst = np.abs(times % 1.0 - 0.5) <= 0.05
    assert in_burst[times >= 0].mean() == pytest.approx(5 / 5.9, abs=0.02)
    if lead_in in (0.2, 0.5):  # without a whole burst
        assert (times < 0).sum() == pytest.approx(2000 * (0.2 / 5.9 if lead_in == 0.2 else 2.95 / 5.9), rel=0.3)


def test_arrivals_describe_their_request_times() -> None:
    assert parse_arrivals("poisson").times == RequestTimes()
    assert parse_arrivals("constant").times == RequestTimes("constant")
    assert parse_arrivals("ramp:1..2:3s").times == RequestTimes("ramp:1..2:3s", period_seconds=3.0)
    recorded = RecordedArrivals(np.ones(STEPS // 2), name="i.txt").times
    assert recorded == RequestTimes("i.txt", 0.0, STEPS // 2, (2 / STEPS, 0.0) * (STEPS // 2))


def write_trace(folder: Path, content: str) -> Path:
    path = folder / "trace.csv"
    path.write_text(content)
    return path


def test_a_trace_has_times_sizes_and_priorities(tmp_path: Path) -> None:
    path = write_trace(tmp_path, "\ufeffpriority, time_s ,batch_size\r\n2,10.0,1\r\n1,10.1,8\r\n\r\n2,10.4,1\r\n")
    arrivals = parse_arrivals(str(path))
    assert isinstance(arrivals, RecordedArrivals)
    assert arrivals.intervals == pytest.approx([0.1, 0.3, 0.2])  # the last one is the mean
    classes = not_none(arrivals.classes)
    assert classes.classes == ((1, 2), (8, 1))
    assert classes.first_lines == (2, 3)
    assert classes.counts.tolist() == [2, 1]
    assert str(classes.sizes) == "1*2|8*1"
    assert replace(arrivals.times, recorded_shares=()) == RequestTimes(str(path), recorded_requests=3)


def test_each_planned_request_has_the_kind_of_its_row(tmp_path: Path) -> None:
    arrivals = parse_arrivals(str(write_trace(tmp_path, "time_s,batch_size\n0,1\n1,2\n3,3\n")))
    assert isinstance(arrivals, RecordedArrivals)
    starts = set()
    for seed in range(30):
        times, classes = arrivals.plan(3.0, 4.0, seed), arrivals.classes_of(12, seed)
        sizes = [not_none(arrivals.classes).classes[number][0] for number in classes]
        intervals = {1: 1.0, 2: 2.0, 3: 1.5}
        expected = np.array([intervals[size] for size in sizes[:-1]]) / 4.5
        assert np.diff(times)[:11] == pytest.approx(expected)
        starts.add(sizes[0])
    assert starts == {1, 2, 3}


def test_a_trace_of_times_alone_has_no_kinds(tmp_path: Path) -> None:
    arrivals = parse_arrivals(str(write_trace(tmp_path, "time_s\n5\n6\n8\n")))
    assert isinstance(arrivals, RecordedArrivals)
    assert arrivals.classes is None


def test_a_trace_of_priorities_has_no_sizes(tmp_path: Path) -> None:
    arrivals = parse_arrivals(str(write_trace(tmp_path, "time_s,priority\n5,1\n6,0\n")))
    assert isinstance(arrivals, RecordedArrivals)
    classes = not_none(arrivals.classes)
    assert classes.classes == ((0, 1), (0, 0))
    assert classes.sizes is None


@pytest.mark.parametrize(
    ("content", "where", "reason"),
    [
        ("", ":1: ", "time_s is needed"),
        ("1.0\n2.0\n", ":1: ", "'1.0' is not a header"),
        ("time_s,size\n1,2\n2,2\n", ":1: ", "time_s, batch_size, priority"),
        ("time_s,time_s\n1,2\n2,2\n", ":1: ", "is not a header"),
        ("batch_size\n1\n", ":1: ", "time_s is needed"),
        ("time_s\n1\n", ": ", "no two requests"),
        ("time_s\n1\n1\n", ": ", "no two requests"),
        ("time_s\n1\n3\n2\n4\n", ":4: ", "sort the rows"),
        ("time_s\n1\nx\n", ":3: ", "'x' is not a number of seconds"),
        ("time_s\n1\nnan\n", ":3: ", "'nan' is not a number of seconds"),
        ("time_s\n1\n1e400\n", ":3: ", "is not a number of seconds"),
        ("time_s,batch_size\n1,1\n2,0\n", ":3: ", "batch_size '0' is not a whole number from 1"),
        ("time_s,batch_size\n1,1\n2,1.5\n", ":3: ", "batch_size '1.5'"),
        ("time_s,batch_size\n1,1\n2,\n", ":3: ", "batch_size ''"),
        ("time_s,batch_size\n1,1\n2\n", ":3: ", "has 1 cells"),
        ("time_s,priority\n1,1\n2,-1\n", ":3: ", "priority '-1' is not a whole number from 0"),
        ("time_s,priority\n1,1\n2," + "9" * 5000 + "\n", ":3: ", "priority"),
        ("time_s,batch_size\n" + "".join(f"{i},{i + 1}\n" for i in range(65)), ": ", "65 different sizes"),
        (
            "time_s,batch_size,priority\n" + "".join(f"{i},{1 + i % 64},{i // 64}\n" for i in range(129)),
            ": ",
            "129 combinations of a size and a priority; round the sizes until at most 128 remain",
        ),
    ],
)
def test_an_invalid_trace_is_reported_with_its_line(tmp_path: Path, content: str, where: str, reason: str) -> None:
    path = write_trace(tmp_path, content)
    with pytest.raises(BadInputError) as caught:
        parse_arrivals(str(path))
    assert str(caught.value).startswith(f"{path}{where}")
    assert reason in str(caught.value)
    assert str(caught.value).isprintable()


def test_a_trace_that_is_no_text_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "trace.csv"
    path.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(BadInputError, match=r"trace\.csv:1: byte 0xff is not UTF-8 text; save the file as UTF-8"):
        parse_arrivals(str(path))
