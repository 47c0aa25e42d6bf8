"""Test pooled latency quantiles and misses against numpy on the latencies of all requests."""

from __future__ import annotations

import base64
import math
import zlib
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
from ddsketch.pb import ddsketch_pb2
from scipy import special

from objectives import latency_sketch
from objectives.arrays import FloatArray
from objectives.intervals import latency_interval_ms
from objectives.latency_sketch import MIN_LATENCY_MS, RELATIVE_ACCURACY, count_over, parse_counts, sketch_latencies
from objectives.metrics import LATENCY, QUANTILES, Measurement
from objectives.pooled_windows import misses_over, pool_measurements, pooled_quantile_ms
from objectives.server_spread import ServerSpread
from objectives.sla import DEFAULT_CONFIDENCE
from objectives.verdict import count_misses

LEVELS = (0.5, 0.9, 0.95, 0.99)
BOUND_MS = 20.0
# largest relative error if only four quantiles per window are known; nothing is known below the median of a window
WITH_QUANTILES_ONLY = {0.5: 0.15, 0.9: 0.05, 0.95: 0.05, 0.99: 0.05}


def draw_windows(seed: int) -> list[FloatArray]:
    """Return the latencies of windows that differ in size by 20 and in speed by 3."""
    rng = np.random.default_rng(seed)
    sizes = (200, 4000, 900, 2500, 1200, 400)
    speeds = (1.0, 0.7, 1.6, 1.1, 0.9, 2.1)
    return [rng.gamma(9.0, speed, size) for size, speed in zip(sizes, speeds, strict=True)]


def measured(latencies_ms: FloatArray, *, sketched: bool) -> Measurement:
    p50_ms, p90_ms, p95_ms, p99_ms = np.quantile(latencies_ms, LEVELS, method="inverted_cdf").tolist()
    mean_ms, requests = float(latencies_ms.mean()), len(latencies_ms)
    window = Measurement(100.0, mean_ms, p50_ms, p90_ms, p95_ms, p99_ms, requests=requests, stable=True)
    if not sketched:
        return window
    counts = count_over(latencies_ms, [BOUND_MS])
    return replace(window, latency_sketch=sketch_latencies(latencies_ms), requests_over_ms=counts)


def pooled_errors(latencies_of_windows: Sequence[FloatArray], *, sketched: bool, method: str) -> list[float]:
    windows = [measured(latencies_ms, sketched=sketched) for latencies_ms in latencies_of_windows]
    true_ms = np.quantile(np.concatenate(latencies_of_windows), LEVELS, method=method)  # type: ignore[call-overload]
    return [abs(pooled_quantile_ms(windows, level) / ms - 1) for level, ms in zip(LEVELS, true_ms, strict=True)]


@pytest.mark.parametrize("seed", range(5))
def test_sketches_give_the_quantiles_of_all_requests(seed: int) -> None:
    errors = pooled_errors(draw_windows(seed), sketched=True, method="lower")
    assert max(errors) <= RELATIVE_ACCURACY + 1e-9


@pytest.mark.parametrize("seed", range(5))
def test_quantiles_alone_estimate_those_of_all_requests(seed: int) -> None:
    errors = pooled_errors(draw_windows(seed), sketched=False, method="inverted_cdf")
    for level, error in zip(LEVELS, errors, strict=True):
        assert error <= WITH_QUANTILES_ONLY[level], f"p{100 * level:g}"


def test_one_slow_window_does_not_set_the_pooled_p99() -> None:
    """A window with 1 % of all requests moves the pooled p99 a little, not to its own p99."""
    rng = np.random.default_rng(1)
    latencies_of_windows = [*(rng.gamma(16.0, 0.5, 2000) for _ in range(10)), rng.gamma(16.0, 4.0, 200)]
    true_ms = float(np.quantile(np.concatenate(latencies_of_windows), 0.99))
    windows = [measured(latencies_ms, sketched=False) for latencies_ms in latencies_of_windows]
    largest_ms = max(window.latency_p99_ms or 0.0 for window in windows)
    assert largest_ms > 3 * true_ms
    assert pooled_quantile_ms(windows, 0.99) < 0.75 * largest_ms
    sketched = [measured(latencies_ms, sketched=True) for latencies_ms in latencies_of_windows]
    assert pool_measurements(sketched).latency_p99_ms == pytest.approx(true_ms, rel=0.05)


def test_windows_of_one_speed_keep_their_quantiles() -> None:
    window = measured(np.random.default_rng(2).gamma(9.0, 1.0, 3000), sketched=False)
    quantiles_ms = (window.latency_p50_ms, window.latency_p90_ms, window.latency_p95_ms, window.latency_p99_ms)
    pooled = [pooled_quantile_ms([window] * 4, level) for level in LEVELS]
    assert pooled == pytest.approx(quantiles_ms)


def test_a_level_above_the_highest_quantile_needs_sketches() -> None:
    latencies_of_windows = draw_windows(1)
    all_ms = np.concatenate(latencies_of_windows)
    sketched = [measured(latencies_ms, sketched=True) for latencies_ms in latencies_of_windows]
    exact_ms = np.quantile(all_ms, 0.998, method="lower")
    assert pooled_quantile_ms(sketched, 0.998) == pytest.approx(exact_ms, rel=RELATIVE_ACCURACY)
    one_without = [replace(sketched[0], latency_sketch=""), *sketched[1:]]
    assert pooled_quantile_ms(one_without, 0.998) == float("inf")


def test_an_interval_of_p95_lies_around_the_quantile_of_all_requests() -> None:
    latencies_of_windows = draw_windows(3)
    servers = [[measured(ms, sketched=True)] for ms in latencies_of_windows]
    interval = latency_interval_ms(servers, "latency-p95", 2000.0, ServerSpread(0.0, 9.0), DEFAULT_CONFIDENCE)
    assert interval.low < np.quantile(np.concatenate(latencies_of_windows), 0.95) < interval.high < float("inf")


@pytest.mark.parametrize("sketched", [True, False])
@pytest.mark.parametrize("effective", [1.0, 89.0])
def test_too_few_requests_for_order_statistics_have_the_interval_of_one_server(
    effective: float, sketched: bool
) -> None:
    """The largest of 89 independent latencies is below the true p95 with a probability of 0.95 ** 89 > 1 %."""
    latencies_of_windows = draw_windows(3)
    servers = [[measured(ms, sketched=sketched)] for ms in latencies_of_windows]
    spread = ServerSpread(0.05**2, 9.0)
    interval = latency_interval_ms(servers, "latency-p95", effective, spread, DEFAULT_CONFIDENCE)
    quantile_ms = float(np.quantile(np.concatenate(latencies_of_windows), 0.95))
    factor = math.exp(2.821 * 0.05)  # Student's t with 9 degrees of freedom at 99 %
    assert (interval.low, interval.high) == pytest.approx((quantile_ms / factor, quantile_ms * factor), rel=0.03)


@pytest.mark.parametrize(("between", "within"), [(0.02, 0.005), (0.05, 0.02), (0.1, 0.05), (0.2, 0.1)])
def test_the_interval_of_one_server_has_the_p95_of_servers_that_differ_more_than_their_requests(
    between: float, within: float
) -> None:
    random, runs = np.random.default_rng(0), 200
    true_log = float(special.ndtri(0.95)) * math.hypot(between, within)
    contained = 0
    for _ in range(runs):
        logs = random.normal(0, between, (4, 1, 1)) + random.normal(0, within, (4, 2, 200))
        servers = [[measured(np.exp(window), sketched=True) for window in server] for server in logs]
        interval = latency_interval_ms(
            servers, "latency-p95", 20.0, ServerSpread(between**2, 9.0), DEFAULT_CONFIDENCE
        )
        contained += interval.low <= math.exp(true_log) <= interval.high
    assert contained / runs >= 0.97, "99 % are planned"


def exponential(mean_ms: float, levels: Sequence[str]) -> Measurement:
    """Return a window with exponential latencies, of which only the quantiles ``levels`` are known."""
    quantiles_ms = {f"latency_{name}_ms": -mean_ms * math.log(1 - QUANTILES[name]) for name in levels}
    return Measurement(100.0, requests=1000, stable=True, **quantiles_ms)  # type: ignore[arg-type]


@pytest.mark.parametrize("levels", [("p50",), ("p50", "p90"), ("p50", "p90", "p95", "p99")])
@pytest.mark.parametrize("level", [0.6, 0.9, 0.97, 0.99])
def test_the_quantiles_of_exponential_latencies_are_exact_between_and_beyond_the_known_ones(
    levels: Sequence[str], level: float
) -> None:
    fast, slow = exponential(1.0, levels), exponential(3.0, levels)
    quantile_ms = pooled_quantile_ms([fast, slow], level)
    assert 500 * (math.exp(-quantile_ms) + math.exp(-quantile_ms / 3)) == pytest.approx(1000 * (1 - level), rel=5e-3)
    misses = [misses_over(window, quantile_ms, LATENCY) for window in (fast, slow)]
    assert misses == pytest.approx([1000 * math.exp(-quantile_ms), 1000 * math.exp(-quantile_ms / 3)])


def test_pooled_windows_are_stable_if_all_are_and_overloaded_disturbed_or_crashed_if_one_is() -> None:
    one = replace(exponential(1.0, ("p50",)), begin_unix_seconds=10.0, end_unix_seconds=11.0)
    later = replace(one, begin_unix_seconds=11.5, end_unix_seconds=12.5)
    pooled = pool_measurements([later, one])
    assert (pooled.begin_unix_seconds, pooled.end_unix_seconds) == (10.0, 12.5)
    assert (pooled.stable, pooled.overloaded, pooled.disturbed) == (True, False, False)
    assert (pooled.server_crashed, pooled.errors) == (False, None)
    assert not pool_measurements([one, replace(later, stable=False)]).stable
    assert not pool_measurements([one, Measurement(stable=True)]).stable, "a lost window has no throughput"
    assert pool_measurements([one, replace(later, overloaded=True)]).overloaded
    assert pool_measurements([one, replace(later, disturbed=True)]).disturbed
    assert pool_measurements([one, replace(later, server_crashed=True)]).server_crashed


def test_misses_are_exact_where_they_were_counted() -> None:
    latencies_of_windows = draw_windows(4)
    windows = [measured(latencies_ms, sketched=True) for latencies_ms in latencies_of_windows]
    all_ms = np.concatenate(latencies_of_windows)
    assert count_misses([windows], BOUND_MS, 0.95).misses[0].sum() == np.sum(all_ms > BOUND_MS)
    at_another_bound = count_misses([windows], 15.0, 0.95).misses[0].sum() / len(all_ms)
    assert np.mean(all_ms > 15.0 * (1 + RELATIVE_ACCURACY)) <= at_another_bound
    assert at_another_bound <= np.mean(all_ms > 15.0 * (1 - RELATIVE_ACCURACY))


# -- the texts in the trials table ----------


def test_counts_are_read_back() -> None:
    text = count_over(np.array([5.0, 10.0, 10.5, 25.0]), [20.0, 10.0, 0.25, 20.0])
    assert text == "20:1 10:2 0.25:4"
    assert latency_sketch.requests_over(text, 10.0) == 2
    assert latency_sketch.requests_over(text, 11.0) is None
    assert latency_sketch.requests_over("", 10.0) is None


@pytest.mark.parametrize("text", ["20", "20:", ":3", "20:-1", "-20:3", "nan:3", "inf:3", "20:1.5", "20:99999999999"])
def test_counts_of_another_form_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match="such as 20:13 10:155"):
        parse_counts(text)


def test_the_share_over_a_bound_falls_from_1_to_0() -> None:
    sketch = sketch_latencies(np.random.default_rng(0).lognormal(np.log(8.0), 0.6, 500))
    shares = [latency_sketch.share_over(sketch, bound_ms) for bound_ms in (0.0, 1e-3, *np.linspace(4, 20, 9), 1e3)]
    assert shares == sorted(shares, reverse=True)
    assert (shares[0], shares[1], shares[-1]) == (1, 1, 0)


def test_a_sketch_of_many_requests_is_small() -> None:
    latencies_ms = np.random.default_rng(0).lognormal(np.log(8.0), 0.6, 50_000)
    assert len(sketch_latencies(latencies_ms)) < 1500
    assert sketch_latencies(np.array([])) == ""


def test_latencies_of_zero_and_of_hours_are_counted() -> None:
    text = sketch_latencies(np.array([0.0, 1e7]))
    assert latency_sketch.pooled_quantile_ms([text], 0.0) == pytest.approx(MIN_LATENCY_MS, rel=RELATIVE_ACCURACY)
    assert latency_sketch.pooled_quantile_ms([text], 1.0) == pytest.approx(1e7, rel=RELATIVE_ACCURACY)


def forge(**changes: object) -> str:
    """Return a sketch with other fields than those that tune writes."""
    message = ddsketch_pb2.DDSketch()
    message.ParseFromString(zlib.decompress(base64.b64decode(sketch_latencies(np.array([3.0, 4.0])))))
    for path, value in changes.items():
        owner, _, name = path.rpartition("__")
        target = getattr(message, owner) if owner else message
        if name == "contiguousBinCounts":
            del target.contiguousBinCounts[:]
            target.contiguousBinCounts.extend(value)
        else:
            setattr(target, name, value)
    return base64.b64encode(zlib.compress(message.SerializeToString())).decode()


@pytest.mark.parametrize(
    "text",
    [
        "not base64!",
        base64.b64encode(b"not compressed").decode(),
        base64.b64encode(zlib.compress(b"\xff\xff")).decode(),
        base64.b64encode(zlib.compress(bytes(10**7))).decode(),
        forge(mapping__gamma=1.5),
        forge(mapping__indexOffset=3.0),
        forge(positiveValues__contiguousBinCounts=[]),
        forge(positiveValues__contiguousBinCounts=[1.0, -1.0]),
        forge(positiveValues__contiguousBinCounts=[float("nan")]),
        forge(positiveValues__contiguousBinCounts=[1e300]),
        forge(positiveValues__contiguousBinIndexOffset=10**6),
        forge(zeroCount=4.0),
        f"!{forge()}",
        "A" * 100_000,
    ],
)
def test_a_text_that_is_no_sketch_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="not a latency sketch that tune wrote"):
        latency_sketch.check_sketch(text)


def test_forged_sketches_differ_only_in_the_changed_field() -> None:
    latency_sketch.check_sketch(forge())
    latency_sketch.check_sketch("")
