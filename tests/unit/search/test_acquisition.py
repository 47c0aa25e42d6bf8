"""The value of the measurements so far, and expected improvements over it."""

from __future__ import annotations

import math

import numpy as np
import pytest

from optimizer.search.acquisition import (
    Posterior,
    confirmed_throughput,
    expected_improvement,
    probability_within_bounds,
)


def posterior(*cells: tuple[float, float]) -> Posterior:
    """Return the posterior of cells with these throughputs and median latencies in s, at a load of 1."""
    throughputs, latencies_s = np.array(cells).T
    tails = np.log(latencies_s) + np.log(throughputs)
    return Posterior(
        np.stack([np.log(throughputs), tails], axis=1), np.full((len(cells), 2), 0.05), np.zeros(len(cells))
    )


def value(*cells: tuple[float, float]) -> float:
    return math.exp(confirmed_throughput(posterior(*cells), bounds_s=np.array([0.02])))


def test_a_certain_cell_counts_fully() -> None:
    assert value((500.0, 0.01)) == pytest.approx(500.0)


def test_a_cell_at_the_bound_counts_half() -> None:
    assert value((500.0, 0.02)) == pytest.approx(250.0)


def test_the_next_cell_counts_if_the_first_misses_the_bound() -> None:
    assert value((500.0, 0.02), (400.0, 0.01)) == pytest.approx(250.0 + 0.5 * 400.0)
    assert value((400.0, 0.01), (500.0, 0.02)) == pytest.approx(450.0), "whatever their order"


def test_slower_cells_count_nothing_if_the_first_is_certain() -> None:
    assert value((500.0, 0.01), (400.0, 0.01)) == pytest.approx(500.0)


def test_hopeless_cells_have_a_finite_value() -> None:
    assert math.isfinite(confirmed_throughput(posterior((500.0, 5.0)), bounds_s=np.array([0.02])))


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
    cells = posterior((500.0, 0.02), (400.0, 0.019))
    two = Posterior(
        np.repeat(cells.mean, (1, 2), axis=1), np.repeat(cells.deviation, (1, 2), axis=1), cells.log_loads
    )
    alone = probability_within_bounds(cells, np.array([0.02]))
    assert probability_within_bounds(two, np.array([0.02, 9.0])) == pytest.approx(alone, abs=0.01)
    gains = [
        expected_improvement(one, bounds, best=math.log(300.0))
        for one, bounds in ((cells, np.array([0.02])), (two, np.array([0.02, 9.0])))
    ]
    assert gains[1] == pytest.approx(gains[0])
