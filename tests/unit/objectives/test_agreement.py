"""Test the comparison of perf_analyzer with tune's own client: false alarms, power, direction, unusable pairs."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest

from objectives.agreement import ALLOWED_DIFFERENCE, MIN_PAIRS, Agreement, ServerPair, compare_load_generators
from objectives.metrics import Measurement
from objectives.sequential import LOOKS
from objectives.sla import Sla

SLA = Sla.from_bounds({"avg": 11.0})
ERROR = 0.01
RUNS = 400
SERVER_DEVIATION = 0.1  # differences between servers, which both load generators see


def measured(throughput: float, latency_ms: float, **more: object) -> Measurement:
    quantiles = {f"latency_p{p}_ms": latency_ms for p in (50, 90, 95, 99)}
    return replace(
        Measurement(throughput, latency_ms, requests=1000, stable=True),
        **quantiles,  # type: ignore[arg-type]
        **more,  # type: ignore[arg-type]
    )


def pair(throughput_ratio: float = 1.0, latency_ratio: float = 1.0, **other: object) -> ServerPair:
    theirs = measured(1000 * throughput_ratio, 10 * latency_ratio, **other)
    return ServerPair((measured(1000, 10), measured(1000, 10)), theirs)


def drawn(random: np.random.Generator, servers: int, deviation: float, difference: float) -> list[ServerPair]:
    """Return pairs whose latency differs by ``difference`` (log) and noise; throughput falls as latency rises."""
    pairs = []
    for speed, noise in zip(
        random.normal(0, SERVER_DEVIATION, servers), random.normal(difference, deviation, servers), strict=True
    ):
        client_measurement = measured(1000 * math.exp(-speed), 10 * math.exp(speed))
        pairs.append(
            ServerPair((client_measurement,), measured(1000 * math.exp(-speed - noise), 10 * math.exp(speed + noise)))
        )
    return pairs


def alarm_share(
    deviation: float, difference: float, is_alarm: Callable[[list[ServerPair]], bool], runs: int = RUNS
) -> float:
    alarms = 0
    for seed in range(runs):
        pairs = drawn(np.random.default_rng(seed), LOOKS[-1], deviation, difference)
        alarms += is_alarm(pairs)
    return alarms / runs


def disagrees_at_a_look(pairs: list[ServerPair]) -> bool:
    return any(compare_load_generators(pairs[:look], SLA, ERROR).disagreement for look in LOOKS)


@pytest.mark.parametrize("deviation", [0.02, 0.2])
def test_equal_load_generators_disagree_less_often_than_stated(deviation: float) -> None:
    assert alarm_share(deviation, 0.0, disagrees_at_a_look, runs=200) <= ERROR


def test_a_difference_of_the_allowed_size_is_declared_as_often_as_stated_at_most() -> None:
    most = ERROR + 3 * math.sqrt(ERROR / RUNS)  # three standard deviations of the count
    assert alarm_share(0.05, ALLOWED_DIFFERENCE, disagrees_at_a_look) <= most


@pytest.mark.parametrize(("servers", "least"), [(4, 0.15), (9, 0.85)])
def test_a_difference_of_15_percent_is_noticed(servers: int, least: float) -> None:
    def disagrees(pairs: list[ServerPair]) -> bool:
        return bool(compare_load_generators(pairs[:servers], SLA, ERROR).disagreement)

    assert alarm_share(0.05, math.log(1.15), disagrees, runs=200) >= least


def compared(*pairs: ServerPair, shares_cpus: bool = False) -> Agreement:
    sla = Sla.from_bounds({"p95": 12.0, "throughput": 900.0})
    return compare_load_generators(pairs, sla, ERROR, shares_cpus=shares_cpus)


def test_ratios_are_those_of_the_pooled_values() -> None:
    agreement = compared(*[pair(1.02, 0.98)] * 6)
    throughput, latency = agreement.ratios
    assert (throughput.metric, latency.metric) == ("throughput", "latency-p95")
    assert throughput.ratio == pytest.approx(1.02)
    assert latency.ratio == pytest.approx(0.98, rel=0.01)
    assert throughput.interval.low < 1.02 < throughput.interval.high
    assert (agreement.servers, agreement.pairs, agreement.disagreement) == (6, 6, "")


@pytest.mark.parametrize(
    ("throughput_ratio", "latency_ratio", "disagreement", "allowed", "is_expected"),
    [
        (1.0, 1.3, "30 % more p95 latency than tune's own client: 13 ms", 12, False),
        (1.0, 1.15, "15 % more p95 latency than tune's own client: 11.5 ms", None, True),
        (1.0, 0.7, "30 % less p95 latency than tune's own client: 7 ms", None, False),
        (0.8, 1.0, "20 % less throughput than tune's own client: 800 infer/s", 900, False),
        (0.91, 1.0, "9 % less throughput than tune's own client: 910 infer/s", None, True),
        (1.3, 1.0, "30 % more throughput than tune's own client: 1,300 infer/s", None, False),
        (13.0, 1.0, "1200 % more throughput than tune's own client: 13,000 infer/s", None, False),
    ],
)
def test_a_disagreement_contradicts_a_pass_unless_shared_cpus_explain_it(
    throughput_ratio: float, latency_ratio: float, disagreement: str, allowed: float | None, is_expected: bool
) -> None:
    pairs = [pair(throughput_ratio, latency_ratio)] * LOOKS[-1]
    missed = "" if allowed is None else f" (allowed: {allowed})"
    for shares_cpus in (False, True):
        agreement = compared(*pairs, shares_cpus=shares_cpus)
        assert agreement.disagreement == f"perf_analyzer measured {disagreement}"
        is_excused = shares_cpus and is_expected
        assert agreement.contradicts_pass is not is_excused
        assert agreement.contradiction == ("" if is_excused else f"perf_analyzer measured {disagreement}{missed}")
        assert (agreement.excess > 0) is bool(missed)


def test_every_bounded_latency_is_compared() -> None:
    agreement = compare_load_generators([pair()] * 4, Sla.from_bounds({"p50": 9.0, "p99": 30.0}), ERROR)
    assert [ratio.metric for ratio in agreement.ratios] == ["throughput", "latency-p50", "latency-p99"]


def test_a_value_over_its_bound_without_a_clear_difference_contradicts_nothing() -> None:
    agreement = compare_load_generators([pair(latency_ratio=1.04)] * 9, Sla.from_bounds({"p95": 10.2}), ERROR)
    assert agreement.ratios[1].value > 10.2
    assert agreement.disagreement == agreement.contradiction == ""
    assert agreement.excess == 0


@pytest.mark.parametrize(
    ("throughput_ratio", "latency_ratio", "bounds", "excess"),
    [
        (1.0, 1.3, {"p95": 12.0}, math.log(13 / 12)),
        (0.8, 1.0, {"throughput": 900.0}, math.log(900 / 800)),
        (0.8, 1.3, {"throughput": 900.0, "p95": 12.0}, math.log(900 / 800)),
        (0.8, 1.3, {"p95": 14.0}, 0.0),
        (1.3, 0.7, {"throughput": 1400.0, "p95": 6.0}, 0.0),  # perf_analyzer's values are the better ones
    ],
)
def test_the_excess_is_the_distance_of_worse_values_to_their_bounds(
    throughput_ratio: float, latency_ratio: float, bounds: dict[str, float], excess: float
) -> None:
    pairs = [pair(throughput_ratio, latency_ratio)] * LOOKS[-1]
    agreement = compare_load_generators(pairs, Sla.from_bounds(bounds), ERROR)
    assert agreement.disagreement
    assert agreement.excess == pytest.approx(excess)


def test_the_own_value_is_that_of_all_windows_together() -> None:
    windows = (measured(100, 10), measured(100, 10), replace(measured(400, 30), requests=8000))
    agreement = compare_load_generators([ServerPair(windows, measured(200, 26))] * MIN_PAIRS, SLA, ERROR)
    assert [ratio.ratio for ratio in agreement.ratios] == pytest.approx([1.0, 1.0])


def test_a_metric_that_perf_analyzer_does_not_report_has_no_ratio() -> None:
    pairs = [pair(latency_avg_ms=None)] * 4
    assert [ratio.metric for ratio in compare_load_generators(pairs, SLA, ERROR).ratios] == ["throughput"]


def test_disturbed_and_lost_measurements_have_no_pair() -> None:
    disturbed = replace(pair().windows[0], stable=False, latency_p95_ms=90.0)
    partly = ServerPair((pair().windows[0], disturbed), pair().perf_analyzer)
    wholly = ServerPair((disturbed,), pair().perf_analyzer)
    lost = ServerPair(pair().windows, Measurement(reason="perf_analyzer timed out"))
    agreement = compared(partly, pair(), wholly, lost, pair(stable=False, reason="others took 60 % of the CPUs"))
    assert (agreement.servers, agreement.pairs) == (5, 2)
    assert agreement.ratios[1].ratio == pytest.approx(1.0, rel=0.01)
    assert agreement.reason == "its windows were disturbed"


@pytest.mark.parametrize("pairs", range(MIN_PAIRS))
def test_too_few_pairs_have_no_ratio(pairs: int) -> None:
    lost = ServerPair(pair().windows, Measurement(reason="perf_analyzer timed out"))
    agreement = compared(lost, *[pair(latency_ratio=2.0)] * pairs)
    assert agreement.ratios == ()
    assert agreement.disagreement == agreement.contradiction == ""
    assert agreement.reason == "perf_analyzer timed out"
    assert agreement.excess == 0
