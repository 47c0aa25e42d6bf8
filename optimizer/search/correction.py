"""What the simulator gets wrong: Gaussian processes on log(measured / simulated) over the parameters."""

from __future__ import annotations

import math
import warnings

import numpy as np
import numpy.typing as npt
from sklearn.exceptions import ConvergenceWarning
from sklearn.gaussian_process import GaussianProcessRegressor
from sklearn.gaussian_process.kernels import ConstantKernel, Matern, WhiteKernel

from optimizer.space import Space
from optimizer.trial import Candidate

Array = npt.NDArray[np.float64]

LEARNING_POINTS = 12  # below, the prior below is better than what so few points say of it
MODEL_ERROR, NOISE, LENGTH = 0.3, 0.08, 0.7  # relative, relative, in units of a parameter's whole range


class Correction:
    """``inputs`` [points, features], ``residuals`` [points, 2]: of log throughput and of log latency."""

    def __init__(self, inputs: Array, residuals: Array) -> None:
        self._regressors = [_regressor(inputs, column) for column in residuals.T]
        self._means = residuals.mean(axis=0)
        for regressor, column, mean in zip(self._regressors, residuals.T, self._means, strict=True):
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", ConvergenceWarning)
                regressor.fit(inputs, column - mean)

    def predict(self, inputs: Array) -> tuple[Array, Array]:
        """Mean and standard deviation [cells, 2] of the residuals."""
        predicted = [regressor.predict(inputs, return_std=True) for regressor in self._regressors]
        means = np.stack([mean for mean, _ in predicted], axis=1) + self._means
        return means, np.stack([deviation for _, deviation in predicted], axis=1)


def features(space: Space, candidate: Candidate, concurrency: int) -> list[float]:
    """Settings and load on comparable scales: about one unit for a parameter's whole range."""
    preferred = max(candidate.preferred_batch_sizes, default=candidate.max_batch_size)
    choices = space.parameters()
    values = dict(candidate.fields)
    return [
        math.log2(max(candidate.max_batch_size, 1)) / 8,
        float(candidate.dynamic_batching),
        math.log1p(candidate.max_queue_delay_us) / 8,
        math.log2(preferred / max(candidate.max_batch_size, 1)) if preferred else 0.0,
        math.log2(candidate.instance_count) / 2,
        math.log2(concurrency) / 6,
        *(
            choices[path].index(values[path]) / max(len(choices[path]) - 1, 1) if path in values else -0.5
            for path in space.fields
        ),
    ]


def _regressor(inputs: Array, residuals: Array) -> GaussianProcessRegressor:
    kernel = ConstantKernel(MODEL_ERROR**2, (0.05**2, 0.8**2)) * Matern(
        [LENGTH] * inputs.shape[1], (0.2, 5.0), nu=2.5
    ) + WhiteKernel(NOISE**2, (0.02**2, 0.25**2))
    learns = len(residuals) >= LEARNING_POINTS
    return GaussianProcessRegressor(kernel, optimizer="fmin_l_bfgs_b" if learns else None)
