"""Test the memory of a queue: how far it reduces the independent requests of a test at a request rate."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
from scipy import signal, special

from objectives.arrays import FloatArray
from objectives.confidence import (
    SEEN_MARGIN,
    UNSEEN_GAP_ERROR,
    MissCounts,
    SequentialTest,
    fewest_requests,
    judge_share,
    overdispersion,
)
from objectives.metrics import Measurement
from objectives.periodic_queue import LoadPeriod
from objectives.queue_memory import (
    MIN_HEADROOM,
    QueuedLoad,
    exponential_tail_ms,
    mean_overdispersion,
    seen_share,
)
from objectives.sequential import LOOKS
from objectives.server_spread import ServerSpread
from objectives.sla import Sla, Verdict
from objectives.verdict import MAX_SLOPE, SLOPE_LEVELS, judge_sla
from optimizer.core.load_shapes import RequestTimes
from optimizer.measure.load_client.arrivals import parse_arrivals

ALLOWED = 0.05
SPREAD = ServerSpread(0.03**2, 9.0)
WINDOWS, WINDOW_SECONDS, LEAD_IN_SECONDS = 8, 0.5, 0.2
PERIOD_SECONDS = 1.0


def arrivals_and_latencies(
    rate: float, capacity: float, seconds: float, random: np.random.Generator, shape: str = ""
) -> tuple[FloatArray, FloatArray]:
    """Return the arrivals and latencies in seconds of a queue with one server that is empty at time 0.

    Arrivals are a Poisson process, or those of ``shape``, and service times are exponential. The departures are the
    recursion of Lindley (1952), written as a running maximum.
    """
    if shape:
        arrivals = np.asarray(parse_arrivals(shape).plan(rate, seconds, int(random.integers(2**31))))
    else:
        arrivals = np.sort(random.uniform(0, seconds, random.poisson(rate * seconds)))
    served = np.cumsum(random.exponential(1 / capacity, len(arrivals)))
    before = np.concatenate([[0.0], served[:-1]])
    return arrivals, served + np.maximum.accumulate(arrivals - before) - arrivals


def bound_s(rate: float, capacity: float) -> float:
    """Return the quantile of the latency of that queue, whose distribution is exponential."""
    return math.log(1 / ALLOWED) / (capacity - rate)


@pytest.mark.parametrize(("rate", "capacity"), [(280.0, 400.0), (320.0, 400.0), (90.0, 100.0)])
def test_the_share_of_slow_requests_varies_as_the_memory_of_the_queue_predicts(rate: float, capacity: float) -> None:
    load, tail_ms, blocks = QueuedLoad(rate, capacity), 1e3 / (capacity - rate), 2000
    block_seconds = 20 * load.memory_seconds(tail_ms)
    arrivals, latencies = arrivals_and_latencies(rate, capacity, blocks * block_seconds, np.random.default_rng(0))
    edges = np.arange(blocks + 1) * block_seconds
    requests, _ = np.histogram(arrivals, edges)
    slow, _ = np.histogram(arrivals[latencies > bound_s(rate, capacity)], edges)
    variance = float(np.mean(np.square(slow - ALLOWED * requests)))
    measured = variance / (ALLOWED * (1 - ALLOWED) * float(requests.mean()))
    assert load.overdispersion(ALLOWED, tail_ms) == pytest.approx(measured, rel=0.2)


def test_the_memory_falls_with_the_square_of_the_capacity_that_is_left() -> None:
    """The latency of such a queue is in inverse proportion to it as well."""
    near, far = (QueuedLoad(rate, 100.0).memory_seconds(1e3 / (100.0 - rate)) for rate in (90.0, 80.0))
    assert near == pytest.approx(4 * far)
    assert near == pytest.approx(1 / (100 * (1 - math.sqrt(0.9)) ** 2), rel=0.1)  # exact relaxation time of M/M/1


@pytest.mark.parametrize("capacity", [0.0, 50.0, 100.0])
def test_a_rate_above_all_that_were_answered_leaves_the_least_capacity(capacity: float) -> None:
    assert QueuedLoad(100.0, capacity).headroom == MIN_HEADROOM


def counts_of(
    rate: float, capacity: float, bound: float, random: np.random.Generator, *, knows: bool, shape: str = ""
) -> MissCounts:
    """Return the counts of LOOKS[0] servers; ``knows`` is whether they have the memory of the queue.

    With a load shape, whose period takes a second, a window is a period, and the lead-in too.
    """
    windows = []
    window_seconds, lead_in_seconds = (PERIOD_SECONDS,) * 2 if shape else (WINDOW_SECONDS, LEAD_IN_SECONDS)
    for _ in range(LOOKS[0]):
        seconds = lead_in_seconds + WINDOWS * window_seconds
        arrivals, latencies = arrivals_and_latencies(rate, capacity, seconds, random, shape)
        edges = np.searchsorted(arrivals, lead_in_seconds + window_seconds * np.arange(WINDOWS + 1))
        windows.append([latencies[begin:end] for begin, end in pairwise(edges)])
    together = np.concatenate([window for server in windows for window in server])
    shares = ALLOWED * SLOPE_LEVELS, ALLOWED / SLOPE_LEVELS
    median, quantile, low, high = np.quantile(together, [0.5, 1 - ALLOWED, 1 - shares[0], 1 - shares[1]])

    period = LoadPeriod(RequestTimes(shape).shares, PERIOD_SECONDS) if shape else None
    load = QueuedLoad(rate, capacity, period, PERIOD_SECONDS)
    tail_ms = load.constant_tail_ms(exponential_tail_ms(1e3 * median, 1e3 * quantile, 1 - ALLOWED), 1 - ALLOWED)

    def above(limit: float) -> list[FloatArray]:
        return [np.array([float(np.sum(window > limit)) for window in server]) for server in windows]

    return MissCounts(
        above(-1.0),
        above(bound),
        above(float(quantile)),
        min(float(np.subtract(*special.ndtri(shares))) / math.log(high / low), MAX_SLOPE),
        math.log(bound / quantile),
        queue_overdispersion=load.overdispersion(ALLOWED, tail_ms) if knows else 1.0,
        seen_share=float(seen_share(window_seconds, load.memory_seconds(tail_ms))),
    )


def passes(rate: float, capacity: float, bound: float, tests: int, *, knows: bool = True, shape: str = "") -> float:
    """Return the share of tests at the first look that pass."""
    random, test, passed = np.random.default_rng(1), SequentialTest(0.005, LOOKS[0]), 0
    for _ in range(tests):
        counts = counts_of(rate, capacity, bound, random, knows=knows, shape=shape)
        passed += judge_share(counts, ALLOWED, SPREAD, test).verdict is Verdict.PASS
    return passed / tests


def mean_passes(rate: float, capacity: float, log_distance: float, tests: int, *, knows: bool = True) -> float:
    """Return the share of tests at the first look that pass with a bound on the mean latency.

    The log of the bound is ``log_distance`` above that of the mean in the long run.
    """
    bound_ms = 1e3 * math.exp(log_distance) / (capacity - rate)
    sla, spreads = Sla.from_bounds({"avg": bound_ms}), {"latency-avg": SPREAD}
    queued = QueuedLoad(rate, capacity) if knows else None
    random, test, passed = np.random.default_rng(1), SequentialTest(0.005, LOOKS[0]), 0
    for _ in range(tests):
        servers = [mean_windows(rate, capacity, random) for _ in range(LOOKS[0])]
        passed += judge_sla(servers, sla, spreads, test, queued=queued).verdict is Verdict.PASS
    return passed / tests


def mean_windows(rate: float, capacity: float, random: np.random.Generator) -> list[Measurement]:
    """Return the windows of one server, without the sketches, which would take ten times as long."""
    seconds = LEAD_IN_SECONDS + WINDOWS * WINDOW_SECONDS
    arrivals, latencies = arrivals_and_latencies(rate, capacity, seconds, random)
    edges = np.searchsorted(arrivals, LEAD_IN_SECONDS + WINDOW_SECONDS * np.arange(WINDOWS + 1))
    windows = []
    for begin, end in pairwise(edges):
        window_ms = 1e3 * latencies[begin:end]
        median_ms, p90_ms, p95_ms = np.quantile(window_ms, [0.5, 0.9, 0.95]).tolist()
        windows.append(
            Measurement(
                rate,
                latency_avg_ms=float(window_ms.mean()),
                latency_p50_ms=median_ms,
                latency_p90_ms=p90_ms,
                latency_p95_ms=p95_ms,
                requests=int(end - begin),
                stable=True,
            )
        )
    return windows


def test_the_mean_latency_varies_as_the_memory_of_the_queue_predicts() -> None:
    rate, capacity, blocks = 320.0, 400.0, 2000
    tail_ms = 1e3 / (capacity - rate)
    load = QueuedLoad(rate, capacity)
    block_seconds = 20 * load.memory_seconds(tail_ms)
    arrivals, latencies = arrivals_and_latencies(rate, capacity, blocks * block_seconds, np.random.default_rng(0))
    edges = np.searchsorted(arrivals, np.arange(blocks + 1) * block_seconds)
    means_ms = np.array([1e3 * latencies[begin:end].mean() for begin, end in pairwise(edges)])
    predicted = float(mean_overdispersion(rate, load.memory_seconds(tail_ms))) / float(np.diff(edges).mean())
    assert predicted == pytest.approx(float(means_ms.var()) / tail_ms**2, rel=0.2)


@pytest.mark.parametrize(("rate", "capacity"), [(360.0, 400.0), (90.0, 100.0)])
def test_at_a_bound_on_the_mean_a_pass_is_rare_although_the_queue_changes_slowly(
    rate: float, capacity: float
) -> None:
    assert mean_passes(rate, capacity, 0.0, 150) <= 0.015
    assert mean_passes(rate, capacity, 0.0, 150, knows=False) > 0.04


def test_a_mean_inside_the_bound_passes_where_the_memory_is_short() -> None:
    assert mean_passes(1200.0, 2000.0, 0.4, 50) >= 0.95


SPIKE = LoadPeriod(RequestTimes("spike:4x:10%:1s").shares, PERIOD_SECONDS)


@pytest.mark.parametrize(
    ("period", "overloaded", "counts"), [(None, False, True), (None, True, False), (SPIKE, False, False)]
)
def test_the_memory_counts_for_a_mean_unless_the_server_is_overloaded_or_the_rate_changes(
    period: LoadPeriod | None, overloaded: bool, counts: bool
) -> None:
    random, test = np.random.default_rng(1), SequentialTest(0.005, LOOKS[0])
    sla, spreads = Sla.from_bounds({"avg": 30.0}), {"latency-avg": SPREAD}
    servers = [
        [replace(window, overloaded=overloaded) for window in mean_windows(360.0, 400.0, random)]
        for _ in range(LOOKS[0])
    ]
    queued = QueuedLoad(360.0, 400.0, period, PERIOD_SECONDS)
    with_memory, without = (judge_sla(servers, sla, spreads, test, queued=load) for load in (queued, None))
    assert (with_memory != without) is counts


@pytest.mark.parametrize(("rate", "capacity"), [(320.0, 400.0), (360.0, 400.0), (90.0, 100.0)])
def test_at_the_bound_a_pass_is_rare_although_the_queue_changes_slowly(rate: float, capacity: float) -> None:
    tests = 200
    assert passes(rate, capacity, bound_s(rate, capacity), tests) <= 0.01
    if rate / capacity == 0.9:
        assert passes(rate, capacity, bound_s(rate, capacity), tests, knows=False) > 0.05


def test_a_load_shape_near_the_capacity_has_the_memory_of_the_mean_rate() -> None:
    """Periods are alike there, so their differences hide most of the variance. Far below, they show all of it."""
    shape, near, far, tests = "diurnal:1.5x:1s", (90.0, 100.0), (1600.0, 2000.0), 60
    bounds = []
    for rate, capacity in (near, far):
        arrivals, latencies = arrivals_and_latencies(rate, capacity, 5e5 / rate, np.random.default_rng(0), shape)
        bounds.append(float(np.quantile(latencies[arrivals > 0.1 * arrivals[-1]], 1 - ALLOWED)))
    assert passes(*near, bounds[0], tests, shape=shape) == 0
    assert passes(*near, bounds[0], tests, knows=False, shape=shape) > 0.1
    assert passes(*far, 1.5 * bounds[1], tests, shape=shape) > 0.7


@pytest.mark.parametrize(("shape", "rate"), [("diurnal:1.5x:1s", 240.0), ("spike:4x:10%:1s", 120.0)])
def test_the_share_of_independent_periods_varies_as_a_load_shape_predicts(shape: str, rate: float) -> None:
    """A few periods often show less: without this, 1.4 and 0.5 % of 1,000 and 400 tests passed at the bound."""
    capacity, periods = 400.0, 3000
    arrivals, latencies = arrivals_and_latencies(rate, capacity, periods, np.random.default_rng(0), shape)
    median, quantile = np.quantile(latencies, [0.5, 1 - ALLOWED])
    requests, _ = np.histogram(arrivals, np.arange(periods + 1))
    slow, _ = np.histogram(arrivals[latencies > quantile], np.arange(periods + 1))
    variance = float(np.mean(np.square(slow - ALLOWED * requests)))
    measured = variance / (ALLOWED * (1 - ALLOWED) * float(requests.mean()))
    load = QueuedLoad(rate, capacity, LoadPeriod(RequestTimes(shape).shares, PERIOD_SECONDS), PERIOD_SECONDS)
    tail_ms = load.constant_tail_ms(exponential_tail_ms(1e3 * median, 1e3 * quantile, 1 - ALLOWED), 1 - ALLOWED)
    assert load.overdispersion(ALLOWED, tail_ms) == pytest.approx(measured, rel=0.35)


def test_a_load_inside_the_bound_passes_where_the_memory_is_short() -> None:
    assert passes(1200.0, 2000.0, 1.5 * bound_s(1200.0, 2000.0), 50) >= 0.95


def test_a_load_whose_queue_has_a_long_memory_is_given_up_before_the_first_look() -> None:
    random = np.random.default_rng(0)
    counts = counts_of(300.0, 400.0, 2 * bound_s(300.0, 400.0), random, knows=False)
    first = MissCounts(counts.requests[:1], counts.misses[:1], counts.tail[:1], counts.slope, counts.distance)
    fewest = fewest_requests(ALLOWED, UNSEEN_GAP_ERROR)
    for factor, is_promising in ((0.9, True), (1.1, False)):
        remembering = replace(first, queue_overdispersion=factor * LOOKS[0] * float(first.requests[0].sum()) / fewest)
        judged = judge_share(remembering, ALLOWED, SPREAD, SequentialTest(0.005, LOOKS[0]))
        assert judged.is_promising is is_promising


def test_without_a_queue_few_requests_do_not_end_a_test() -> None:
    windows = [np.full(WINDOWS, 2.0)]
    few = MissCounts(windows, [0.0 * windows[0]], [0.05 * windows[0]], 3.0, 2.0)
    assert LOOKS[0] * windows[0].sum() < fewest_requests(ALLOWED, UNSEEN_GAP_ERROR)
    test = SequentialTest(0.005, LOOKS[0])
    assert judge_share(few, ALLOWED, SPREAD, test).is_promising
    assert not judge_share(replace(few, queue_overdispersion=1.1), ALLOWED, SPREAD, test).is_promising


@pytest.mark.parametrize("length", [0.2, 1.0, 4.0])
def test_neighboring_windows_show_the_expected_share_of_a_slow_variance(length: float) -> None:
    """The windows are those of an autoregressive process of unit variance with a memory of 100 steps."""
    memory, windows, random = 100, 20_000, np.random.default_rng(0)
    steps = round(length * memory)
    decay = math.exp(-1 / memory)
    noise = math.sqrt(1 - decay**2) * random.normal(size=windows * steps)
    means = signal.lfilter([1.0], [1.0, -decay], noise).reshape(windows, steps).mean(axis=1)
    shown = float(np.mean(np.square(np.diff(means)))) / 2
    assert seen_share(steps, memory) == pytest.approx(shown * steps / (2 * memory), rel=0.1)


def test_the_memory_counts_no_more_than_neighboring_windows_can_have_hidden() -> None:
    """The prediction is too high where most of the wait is for a running batch."""
    windows = [np.full(WINDOWS, 100.0) for _ in range(LOOKS[0])]
    tail = [5 + np.resize([5.0, -5.0], WINDOWS) for _ in range(LOOKS[0])]
    shown = overdispersion(windows, tail)
    counts = MissCounts(windows, tail, tail, 3.0, 1.0, queue_overdispersion=100.0)
    for share, expected in ((0.0, 100.0), (0.5 * SEEN_MARGIN * shown / 100, 100.0), (0.8, SEEN_MARGIN * shown / 0.8)):
        assert replace(counts, seen_share=share).overdispersion == pytest.approx(expected)
    assert replace(counts, seen_share=0.8, queue_overdispersion=1.1).overdispersion == pytest.approx(shown)
