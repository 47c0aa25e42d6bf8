"""The value of the measurements so far, expected improvements over it, and the expected time of a trial."""

from __future__ import annotations

import math

import numpy as np
import pytest

from objectives.metrics import METRICS, Measurement
from objectives.sla import Sla
from optimizer.config.problem import ModelKind, Problem
from optimizer.config.search_space import SearchSpace
from optimizer.core.candidate import SERVER_PROCESSES, Candidate
from optimizer.core.trial import LoadPoint, Trial
from optimizer.search.acquisition import (
    Posterior,
    TrialCosts,
    expected_improvement,
    expected_incumbent,
    probability_within_bounds,
)
from optimizer.simulator.predicted_metrics import ShareWithinBounds, predicted_latencies


def posterior(*cells: tuple[float, float]) -> Posterior:
    """Return the posterior of cells with these throughputs and median latencies in s, at a load of 1."""
    throughputs, latencies_s = np.array(cells).T
    tails = np.log(latencies_s) + np.log(throughputs)
    return Posterior(
        np.stack([np.log(throughputs), tails], axis=1), np.full((len(cells), 2), 0.05), np.zeros(len(cells))
    )


def value(*cells: tuple[float, float]) -> float:
    return math.exp(expected_incumbent(posterior(*cells), bounds_s=np.array([0.02])))


@pytest.mark.parametrize(
    ("cells", "expected"),
    [
        ([(500.0, 0.01)], 500.0),
        ([(500.0, 0.02)], 250.0),
        ([(500.0, 0.02), (400.0, 0.01)], 250.0 + 0.5 * 400.0),
        ([(400.0, 0.01), (500.0, 0.02)], 450.0),
        ([(500.0, 0.01), (400.0, 0.01)], 500.0),
    ],
    ids=["certain", "at the bound", "next one if the first misses", "whatever the order", "first one is certain"],
)
def test_a_cell_counts_by_the_chance_that_it_is_the_best_within_the_bound(
    cells: list[tuple[float, float]], expected: float
) -> None:
    assert value(*cells) == pytest.approx(expected)


def test_hopeless_cells_have_a_finite_value() -> None:
    assert math.isfinite(expected_incumbent(posterior((500.0, 5.0)), bounds_s=np.array([0.02])))


def test_bounds_that_bind_in_different_configurations_are_met_together() -> None:
    """The first cell is limited by the time to the first response, the second one by the inter-token latency."""
    latencies_s = np.array([[0.02, 0.001], [0.001, 0.02], [0.02, 0.02]])
    mean = np.concatenate([np.zeros((3, 1)), np.log(latencies_s)], axis=1)
    cells = Posterior(mean, np.full((3, 3), 0.05), np.zeros(3))
    probabilities = probability_within_bounds(cells, np.array([0.02, 0.02]))
    assert probabilities[:2] == pytest.approx([0.5, 0.5], abs=0.01)
    # a slower server has longer latencies of both kinds, so both are met more often than by independent chance
    assert probabilities[2] == pytest.approx(1 / 3, abs=0.01)


def test_one_bound_has_the_same_probability_as_two_of_which_one_is_loose() -> None:
    cells_with_one_bound = posterior((500.0, 0.02), (400.0, 0.019))
    cells_with_two_bounds = Posterior(
        np.repeat(cells_with_one_bound.mean, (1, 2), axis=1),
        np.repeat(cells_with_one_bound.std, (1, 2), axis=1),
        cells_with_one_bound.log_loads,
    )
    alone = probability_within_bounds(cells_with_one_bound, np.array([0.02]))
    assert probability_within_bounds(cells_with_two_bounds, np.array([0.02, 9.0])) == pytest.approx(alone, abs=0.01)
    gains = [
        expected_improvement(posterior_of_cells, bounds, best=math.log(300.0))
        for posterior_of_cells, bounds in (
            (cells_with_one_bound, np.array([0.02])),
            (cells_with_two_bounds, np.array([0.02, 9.0])),
        )
    ]
    assert gains[1] == pytest.approx(gains[0])


def test_a_cell_below_the_best_value_improves_nothing() -> None:
    gains = expected_improvement(posterior((300.0, 0.01), (600.0, 0.01)), np.array([0.02]), best=math.log(500.0))
    assert gains == pytest.approx([0.0, math.log(600.0 / 500.0)], abs=1e-4)


QUANTILES = ("latency-p50", "latency-p90", "latency-p95", "latency-p99")
GOODPUT = Problem(
    "m", SearchSpace((8,)), 1, 64, (METRICS["goodput"],), Sla.from_bounds({"p50": 20.0}), kind=ModelKind.BATCHED
)


def in_time(*latencies_ms: tuple[float, float, float, float]) -> list[float]:
    """Return the predicted shares of requests within 20 ms for p50, p90, p95 and p99."""
    share = ShareWithinBounds.from_problem(GOODPUT, QUANTILES)
    assert share is not None
    shares: list[float] = np.exp(share.logarithm(np.log(np.array(latencies_ms) / 1e3))).tolist()
    return shares


def test_the_share_in_time_follows_from_the_quantiles() -> None:
    assert in_time((20, 40, 50, 80), (10, 20, 25, 40), (5, 10, 15, 20)) == pytest.approx([0.5, 0.9, 0.99])
    fast, slow, equal = in_time((1, 2, 3, 4), (100, 200, 300, 400), (10, 10, 10, 10))
    assert fast > 0.999
    assert slow < 0.02
    assert equal > 0.999


def test_the_share_in_time_is_that_of_the_worst_bounded_time() -> None:
    sla = Sla.from_bounds({"ttft-p95": 20.0, "p99": 100.0})
    streaming = Problem("m", SearchSpace((8,)), 1, 64, (METRICS["goodput"],), sla, kind=ModelKind.STREAMING)
    latencies = predicted_latencies(streaming, [])
    share = ShareWithinBounds.from_problem(streaming, latencies)
    assert share is not None
    values = {"latency-p50": 50.0, "latency-p90": 60.0, "latency-p95": 70.0, "latency-p99": 90.0}
    values |= {"ttft-p50": 10.0, "ttft-p90": 20.0, "ttft-p95": 25.0, "ttft-p99": 40.0}
    seconds = np.array([[values[name] / 1e3 for name in latencies]])
    assert np.exp(share.logarithm(np.log(seconds))) == pytest.approx([0.9])


def test_a_load_whose_requests_are_late_improves_the_throughput_and_not_the_goodput() -> None:
    """The second cell serves 20 % more requests, a third of them after the deadline."""
    throughputs, p50_s = np.array([1000.0, 1200.0]), np.array([0.01, 0.017])
    latencies_s = p50_s[:, None] * np.array([1.0, 1.5, 1.8, 2.5])
    mean = np.log(np.concatenate([throughputs[:, None], latencies_s * throughputs[:, None]], axis=1))
    cells = Posterior(mean, np.full((2, 5), 0.02), np.zeros(2), ShareWithinBounds.from_problem(GOODPUT, QUANTILES))
    bounds_s = np.array([0.02, *[math.inf] * 3])
    assert np.exp(cells.log_values) == pytest.approx([986, 835], rel=0.03)
    low, high = expected_improvement(cells, bounds_s, math.log(900.0))
    assert low > 0.05 > 0.01 > high
    plain = Posterior(cells.mean, cells.std, cells.log_loads)
    assert np.argmax(expected_improvement(plain, bounds_s, math.log(900.0))) == 1


# -- the time of a trial -------------------------------------------------------------------------------------------


def trial(number: int, instances: int, deploy_seconds: float | None, *measure_seconds: float | None) -> Trial:
    measured = tuple(
        (LoadPoint(1, 2**place), Measurement(100.0, measure_seconds=seconds))
        for place, seconds in enumerate(measure_seconds)
    )
    return Trial(number, Candidate(8, True, instance_count=instances), measured, deploy_seconds=deploy_seconds)


TRIALS = [trial(0, 1, 2.0, 0.5, 0.5), trial(1, 4, 8.0, 1.0), trial(2, 1, 3.0, 0.6, 0.4, 0.5)]


def test_the_deployment_is_that_of_the_closest_number_of_instances() -> None:
    costs = TrialCosts(TRIALS)
    assert costs.seconds(Candidate(16, instance_count=1)) == pytest.approx(2.5 + 1.0)
    assert costs.seconds(Candidate(16, instance_count=6)) == pytest.approx(8.0 + 1.0)


def test_the_instances_of_all_server_processes_count() -> None:
    assert TrialCosts(TRIALS).seconds(Candidate(16, instance_count=2, fields=((SERVER_PROCESSES, 2),))) == (
        pytest.approx(8.0 + 1.0)
    )


def test_an_average_trial_has_the_relative_time_one() -> None:
    costs = TrialCosts(TRIALS)
    relative = [costs.relative(trial_of_study.candidate) for trial_of_study in TRIALS]
    assert sum(relative) / len(relative) == pytest.approx(1.0)
    assert relative[1] > 2 * relative[0]


@pytest.mark.parametrize("trials", [[], [trial(0, 1, None, None)]])
def test_without_times_all_trials_take_the_same_time(trials: list[Trial]) -> None:
    costs = TrialCosts(trials)
    assert {costs.relative(Candidate(8, instance_count=count)) for count in (1, 2, 8)} == {1.0}
