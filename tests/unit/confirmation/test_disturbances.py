from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest

from objectives.latency_sketch import sketch_latencies
from objectives.metrics import Measurement
from objectives.sla import Sla
from optimizer.confirmation.disturbances import (
    SLOWDOWN,
    TAIL,
    disturbance_limit,
    expected_slowdown,
    slowed_points,
    was_search_disturbed,
)
from optimizer.confirmation.plan import plan_tests
from optimizer.core.trial import LoadPoint, Trial, latest_points
from tests.drawn_server import BOUND_MS, FAST, FASTER, drawn_problem

PROBLEM = replace(drawn_problem(), cpu_count=2)
HALF = 0.5  # CPU share of other processes
SLOWER = SLOWDOWN * math.log(2)  # log of latency next to them


def trial(*shares: float | None, p95_ms: float = 10.0) -> Trial:
    """Return a trial with a measurement for each CPU share of other processes."""
    return Trial(
        0,
        FAST,
        tuple(
            (LoadPoint(1, load), Measurement(100.0 * load, latency_p95_ms=p95_ms, stable=True, other_cpu_share=share))
            for load, share in enumerate(shares, 1)
        ),
    )


@pytest.mark.parametrize(("shares", "limit"), [((None,), 0.1), ((0.0, 0.2, 0.2), 0.3)])
def test_the_limit_of_disturbances_follows_what_was_usual_in_the_search(
    shares: Sequence[float | None], limit: float
) -> None:
    assert disturbance_limit([trial(*shares)]) == pytest.approx(limit)


@pytest.mark.parametrize("shares", [(), (None, None), (0.0, 0.05, 0.09), (0.0, 0.0, 0.0, 0.0, HALF)])
def test_a_search_that_was_seldom_disturbed_lets_expect_nothing(shares: Sequence[float | None]) -> None:
    trials = [trial(*shares)]
    assert not was_search_disturbed(trials)
    assert expected_slowdown(trials, PROBLEM) == 0.0
    points = latest_points(trials)
    assert slowed_points(points, trials, PROBLEM) == points


def test_a_machine_that_is_always_shared_is_in_its_usual_state() -> None:
    assert expected_slowdown([trial(HALF, HALF, HALF)], PROBLEM) == pytest.approx(0.0)


@pytest.mark.parametrize("disturbed", [3, 4])
def test_the_expected_slowdown_is_that_of_the_percentile_over_all_states(disturbed: int) -> None:
    """The tail of the drawn latencies falls as the docstring says; slow requests are those of the slow state."""
    quiet = 10 - disturbed
    trials = [trial(*[0.0] * quiet, *[HALF] * disturbed)]
    draws = np.exp(TAIL * np.random.default_rng(7).standard_exponential((10, 200_000)))
    draws[quiet:] *= math.exp(SLOWER)
    of_usual, of_all = np.quantile(draws[:quiet], 0.99), np.quantile(draws, 0.99)
    assert expected_slowdown(trials, PROBLEM) == pytest.approx(math.log(of_all / of_usual), abs=0.01)


def test_percentiles_rise_to_what_is_expected_and_do_not_fall() -> None:
    sketch = sketch_latencies(np.full(100, 10.0))
    trials = [trial(0.0, 0.0, HALF)]
    expected = math.exp(expected_slowdown(trials, PROBLEM))
    points = [
        replace(point, measurement=replace(point.measurement, latency_avg_ms=5.0, latency_sketch=sketch))
        for point in latest_points(trials)
    ]
    first, second, disturbed = slowed_points(points, trials, PROBLEM)
    assert first.measurement.latency_p95_ms == second.measurement.latency_p95_ms == pytest.approx(10 * expected)
    assert first.measurement.latency_avg_ms == 5.0, "bursts change the average by less"
    share = Sla.from_bounds({"p97": 20.0}).share_of_bound
    assert share(first.measurement) == pytest.approx(expected * share(points[0].measurement), rel=0.03)
    assert disturbed == points[2], "it was measured in the slow state"


def test_a_server_on_a_gpu_is_not_expected_to_be_slower() -> None:
    trials = [trial(0.0, 0.0, HALF)]
    assert expected_slowdown(trials, PROBLEM) > 0
    assert expected_slowdown(trials, replace(PROBLEM, cpu_count=None)) == 0.0


def test_candidates_are_ranked_with_the_latency_that_is_expected() -> None:
    faster = replace(trial(0.0, 0.0, 0.0, p95_ms=0.9 * BOUND_MS), candidate=FASTER)
    safer = replace(trial(0.0, 0.0, p95_ms=0.5 * BOUND_MS), number=1)
    over = replace(trial(HALF, HALF, p95_ms=2 * BOUND_MS), number=2)
    for trials, ranked in (([faster, safer], (0, 1)), ([faster, safer, over], (1,))):
        assert plan_tests(None, trials, latest_points(trials), PROBLEM).finalists == ranked


def test_candidates_that_would_all_miss_the_bound_are_ranked_as_measured() -> None:
    trials = [trial(0.0, 0.0, p95_ms=0.9 * BOUND_MS), replace(trial(HALF, p95_ms=2 * BOUND_MS), number=1)]
    assert plan_tests(None, trials, latest_points(trials), PROBLEM).finalists == (0,)
