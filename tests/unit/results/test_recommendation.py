"""Properties of the outcome of random runs: front, comparisons and recommendation come from one set of points."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from objectives.metrics import METRICS, Measurement
from objectives.pareto import dominates
from objectives.sla import Sla, Verdict
from optimizer.config.problem import Problem
from optimizer.config.search_space import SearchSpace
from optimizer.confirmation.choice import RATIO_TO_ITSELF
from optimizer.confirmation.verdicts import judge_confirmations
from optimizer.core.candidate import Candidate
from optimizer.core.trial import ConfirmationWindow, LoadPoint, Trial, latest_points
from optimizer.measure.load_search import MIN_RATE
from optimizer.results import outcome_values
from optimizer.results.recommendation import FRONT_METRICS, assess

CANDIDATES = [Candidate(64, True, delay, instance_count=count) for delay in (0, 500, 2000) for count in (1, 2)]
BASELINE, PLAIN = CANDIDATES[:2]
PROBLEM = Problem("drawn", SearchSpace((64,)), 1, 64, sla=Sla.from_bounds({"p95": 20.0}))
SEEDS = range(40)


def window(served: float, p95_ms: float, requests: int, *, stable: bool = True) -> Measurement:
    return Measurement(
        served,
        latency_p50_ms=0.6 * p95_ms,
        latency_p90_ms=0.9 * p95_ms,
        latency_p95_ms=p95_ms,
        latency_p99_ms=1.2 * p95_ms,
        requests=requests,
        stable=stable,
    )


def drawn(random: np.random.Generator, load: LoadPoint, requests: int) -> Measurement:
    """Return a window at ``load``; few of them are unstable."""
    served, p95_ms = load.concurrency * np.array([100.0, 0.8]) * random.lognormal(0, 0.2, 2)
    return window(float(served), float(p95_ms), requests, stable=bool(random.random() > 0.03))


def drawn_trials(seed: int) -> list[Trial]:
    """Return a search of all candidates at some loads; up to three of them were confirmed, each at two loads."""
    random = np.random.default_rng(seed)
    trials = []
    for number, candidate in enumerate(CANDIDATES):
        loads = [LoadPoint(1, int(size)) for size in random.choice(np.arange(4, 40, 4), 4)]
        trials.append(Trial(number, candidate, tuple((load, drawn(random, load, 2000)) for load in loads)))
    for number in random.choice(len(trials), random.integers(0, 4), replace=False):
        for load, error in ((LoadPoint(1, int(random.choice([8, 13, 20, 26]))), 0.0), (LoadPoint(1, 16), 0.005)):
            for server in range(1, int(random.integers(1, 6)) + 1):
                for _ in range(4):
                    confirmation = ConfirmationWindow(server, load, drawn(random, load, 800), error)
                    trials[number] = trials[number].with_confirmation(confirmation)
    return trials


@pytest.mark.parametrize("seed", SEEDS)
def test_front_comparisons_and_recommendation_are_of_one_set_of_points(seed: int) -> None:
    trials = drawn_trials(seed)
    outcome = assess(trials, PROBLEM, BASELINE, PLAIN)
    judged_cells = {
        (judgement.point.candidate, judgement.point.load) for judgement in judge_confirmations(trials, PROBLEM)
    }
    for point in latest_points(trials):
        assert point in outcome.points or (point.candidate, point.load) in judged_cells, "no measurement is dropped"
    assert len({(point.trial, point.load) for point in outcome.points}) == len(outcome.points)
    assert outcome.dynamic_batching is not None
    compared = outcome.baseline.point, outcome.dynamic_batching.point
    for shown in (outcome.recommended, *compared, *outcome.front.points):
        assert shown is None or any(shown is point for point in outcome.points)
    for point in outcome.front.points:
        assert not any(dominates(other, point, FRONT_METRICS) for other in outcome.points)
    best = outcome.recommended
    if best is None:
        assert outcome.no_recommendation_reason
    else:
        assert any(point is best for point in outcome.front.points) is (outcome_values.front_remark(outcome) == "")
        assert outcome.front.dominating is None or dominates(outcome.front.dominating, best, FRONT_METRICS)


@pytest.mark.parametrize("seed", SEEDS)
def test_a_gain_needs_fresh_servers_that_met_the_sla_on_both_sides(seed: int) -> None:
    outcome = assess(drawn_trials(seed), PROBLEM, BASELINE, PLAIN)
    assert outcome.dynamic_batching is not None
    for compared in (outcome.baseline, outcome.dynamic_batching):
        other, gain = compared.point, compared.gain
        both = [outcome.confirmation_of(point) for point in (outcome.recommended, other)]
        if other is not None and other is outcome.recommended:
            assert gain is not None
            assert gain.ratio == RATIO_TO_ITSELF
        elif all(judgement is not None and judgement.meets_sla for judgement in both):
            assert gain is not None
            assert gain.ratio is not None
            assert gain.ratio.interval.low < gain.ratio.estimate < gain.ratio.interval.high
        else:
            assert gain is None


def on_servers(measurement: Measurement, servers: int, error: float = 0.005) -> tuple[ConfirmationWindow, ...]:
    """Return eight windows like ``measurement`` on each of ``servers`` fresh servers."""
    numbers = range(1, servers + 1)
    return tuple(ConfirmationWindow(n, LoadPoint(1, 16), measurement, error) for n in numbers for _ in range(8))


@pytest.mark.parametrize(
    ("error", "served", "part"),
    [
        (0.0, 1700.0, "but it was measured there for comparison only"),
        (0.005, 1700.0, "but its test at this load ended UNDECIDED"),
        (None, 1700.0, "but it was measured in the search only, which overestimates its best configurations"),
        (0.0, 1500.0, ""),
    ],
)
def test_a_recommendation_off_the_front_has_a_reason(error: float | None, served: float, part: str) -> None:
    better = window(served, 9.0, 4000)
    other = Trial(1, BASELINE, ((LoadPoint(1, 16), better),))
    if error is not None:
        other = replace(other, confirmations=on_servers(better, 2, error))
    passed = Trial(0, PLAIN, confirmations=on_servers(window(1600.0, 10.0, 4000), 4))
    outcome = assess([passed, other], PROBLEM, BASELINE, PLAIN)
    assert outcome.recommended is not None
    assert outcome.recommended.trial == 0
    remark = outcome_values.front_remark(outcome)
    assert part in remark
    assert (outcome.recommended in outcome.front.points) is (remark == "")


def test_a_recommendation_that_is_off_the_front_as_unstable_says_so() -> None:
    measured = replace(window(1600.0, 10.0, 4000), stable=False, other_cpu_share=0.6)
    outcome = assess([Trial(0, PLAIN, ((LoadPoint(1, 16), measured),))], PROBLEM, BASELINE, PLAIN)
    assert outcome.recommended is not None
    remark = "The recommendation is not on the front: its measurement was unstable or disturbed."
    assert outcome_values.front_remark(outcome) == remark


@pytest.mark.parametrize(
    ("objective", "other_cpu_share", "why"),
    [
        ("latency-p95", 0.0, "its p95 is higher, and that is the objective"),
        ("throughput", 0.9, "it ranks lower after the correction for disturbances and the speed of the machine"),
    ],
)
def test_more_throughput_in_the_search_alone_has_its_own_reason(
    objective: str, other_cpu_share: float, why: str
) -> None:
    quiet, better = (window(1600.0, 10.0, 4000), replace(window(1700.0, 12.0, 4000), other_cpu_share=other_cpu_share))
    trials = [Trial(n, c, ((LoadPoint(1, 16), m),)) for n, (c, m) in enumerate(((PLAIN, quiet), (BASELINE, better)))]
    outcome = assess(trials, replace(PROBLEM, objectives=(METRICS[objective],)), BASELINE, PLAIN)
    assert outcome.recommended is not None
    assert outcome.recommended.trial == 0
    assert outcome_values.why_not_recommended(outcome, latest_points(trials)[1]) == why


def test_a_wider_bound_admits_no_less_than_a_disturbed_recommendation() -> None:
    disturbed = replace(window(1600.0, 10.0, 4000), stable=False, other_cpu_share=0.3)
    trial = Trial(0, PLAIN, ((LoadPoint(1, 16), disturbed), (LoadPoint(1, 12), window(1500.0, 9.0, 4000))))
    outcome = assess([trial], PROBLEM, BASELINE, PLAIN)
    assert outcome.recommended is not None
    assert outcome.recommended.measurement == disturbed
    assert outcome.best_within(Sla.from_bounds({"p95": 40.0})) is outcome.recommended


def test_a_pass_is_off_the_front_if_the_search_saw_a_better_load() -> None:
    passed = window(1600.0, 10.0, 4000)
    better = replace(passed, throughput_infer_per_sec=1700.0, latency_p95_ms=9.0)
    searched = ((LoadPoint(1, 16), better), (LoadPoint(1, 15), better))
    trial = Trial(0, PLAIN, searched, confirmations=on_servers(passed, 4))
    outcome = assess([trial], PROBLEM, BASELINE, PLAIN)
    assert outcome.confirmed is not None
    assert outcome.confirmed.judged.verdict is Verdict.PASS
    assert [point.load.concurrency for point in outcome.front.points] == [15], (
        "the confirmation replaces the search at 16"
    )
    remark = outcome_values.front_remark(outcome)
    assert "it was measured in the search only; fresh servers of this configuration were measured" in remark


def test_windows_that_do_not_count_are_not_in_the_shown_figures() -> None:
    passed, disturbed = window(1600.0, 10.0, 4000), window(100.0, 90.0, 4000, stable=False)
    windows = list(on_servers(passed, 4))
    windows[3] = replace(windows[3], measurement=disturbed)
    outcome = assess([Trial(0, PLAIN, confirmations=tuple(windows))], PROBLEM, BASELINE, PLAIN)
    assert outcome.recommended is not None
    assert outcome.recommended.measurement.stable
    assert outcome.recommended.measurement.latency_p95_ms == 10.0
    assert outcome.recommended in outcome.front.points


def test_a_missed_throughput_is_given_without_an_exponent() -> None:
    trial = Trial(0, BASELINE, ((LoadPoint(1, 16), window(11_890.0, 10.0, 2000)),))
    problem = replace(PROBLEM, sla=Sla.from_bounds({"throughput": 20_000.0}))
    outcome = assess([trial], problem, BASELINE, PLAIN)
    assert (
        outcome.no_recommendation_reason
        == "throughput is 11,890 infer/s, but the SLA asks for throughput >= 20,000 infer/s"
    )


def test_a_bound_that_the_lowest_rate_misses_says_that_no_lower_one_was_tried() -> None:
    rates = [(1.0, 9000.0), (MIN_RATE, 3000.0)]
    trial = Trial(0, BASELINE, tuple((LoadPoint(1, request_rate=r), window(r, ms, 40)) for r, ms in rates))
    problem = replace(PROBLEM, open_loop=True)
    outcome = assess([trial], problem, BASELINE, PLAIN)
    assert outcome.no_recommendation_reason.endswith(f"; a run tries no rate below {MIN_RATE:g} requests/s")
    higher = replace(trial, measurements=trial.measurements[:1])
    assert "no rate below" not in assess([higher], problem, BASELINE, PLAIN).no_recommendation_reason


def test_a_disturbed_point_of_the_baseline_counts_as_in_the_choice_of_the_recommendation() -> None:
    """Otherwise the baseline would be shown at a far lower load, and the gain would be several times too large."""
    low, high = window(890.0, 4.9, 2000), replace(window(4600.0, 15.9, 2000, stable=False), other_cpu_share=0.4)
    best = window(5000.0, 15.0, 2000)
    trials = [
        Trial(0, BASELINE, ((LoadPoint(1, 4), low), (LoadPoint(1, 29), high))),
        Trial(1, PLAIN, ((LoadPoint(1, 29), best),)),
    ]
    outcome = assess(trials, PROBLEM, BASELINE, PLAIN)
    assert outcome.baseline.point is not None
    assert outcome.baseline.point.load.concurrency == 29
