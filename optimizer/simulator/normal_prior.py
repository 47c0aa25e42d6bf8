"""The fit of parameters with a normal prior to measured points, and samples of their posterior.

A vector of parameters is in standard deviations of the prior from its medians, so the prior is standard normal. The
posterior is approximated by a normal distribution around its mode (Laplace's approximation).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from objectives.arrays import FloatArray
from optimizer.simulator.predicted_metrics import ConfigurationLoad

POINT_ERROR = 0.15  # standard deviation of the log of a measurement around the model
MAX_INDEPENDENT = 2  # points of one candidate share the model's error, so more of them count as this many
ROBUST = 2.0  # standard deviations beyond which an error counts linearly


def point_weights(loads: Sequence[ConfigurationLoad]) -> FloatArray:
    """Return the weight [loads, 1] of each measured point, by which its errors are multiplied."""
    counts = Counter(candidate for candidate, _ in loads)
    shares = np.array([min(1.0, MAX_INDEPENDENT / counts[candidate]) for candidate, _ in loads])
    return np.asarray(shares[:, None] ** 0.5 / POINT_ERROR)


def fit_vector(
    residuals: Callable[[FloatArray], FloatArray], size: int, **options: Any
) -> tuple[FloatArray, FloatArray]:
    """Return the mode of the posterior, and a square root of its covariance.

    Args:
        residuals: Returns the weighted errors of a vector [size], followed by the vector itself, for the prior.
        size: The number of parameters.
        options: Further arguments of ``scipy.optimize.least_squares``.
    """
    from scipy.optimize import least_squares

    solution = least_squares(residuals, np.zeros(size), loss="soft_l1", f_scale=ROBUST, **options)
    precision = solution.jac.T @ solution.jac
    return solution.x, np.linalg.inv(np.linalg.cholesky(precision)).T


def sample_vectors(mode: FloatArray, root: FloatArray, count: int, seed: int) -> list[FloatArray]:
    """Return ``count`` samples of the posterior with this mode and this square root of its covariance."""
    draws = np.random.default_rng(seed).standard_normal((count, len(mode)))
    return [mode + root @ draw for draw in draws]
