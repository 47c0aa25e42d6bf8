"""The value of the measurements so far, and expected improvements over it."""

from __future__ import annotations

import math

import numpy as np
import pytest

from optimizer.search.acquisition import Posterior, confirmed_throughput


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
