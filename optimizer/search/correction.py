"""What the simulator gets wrong: Gaussian processes on log(measured / simulated) over the parameters.

In a closed loop throughput times mean latency is the concurrency (Little's law), so two processes say all: one
for throughput, one for the tail (the judged latency over the mean latency).
"""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt
from sklearn.gaussian_process import GaussianProcessRegressor
from sklearn.gaussian_process.kernels import ConstantKernel, Kernel, Matern

from optimizer.space import Space
from optimizer.trial import Candidate, Point

Array = npt.NDArray[np.float64]

# relative errors of the simulation: what a server does with several instances and other fields, which the
# simulator is told nothing of, and what it gets wrong of the batching
SPEED_ERROR, BATCHING_ERROR, TAIL_ERROR = 0.35, 0.12, 0.15
SPEED_LENGTH, BATCHING_LENGTH = 0.7, 0.6  # in units of a parameter's range
THROUGHPUT_NOISE, TAIL_NOISE = 0.05, 0.08  # of a measurement of USUAL_REQUESTS, relative
USUAL_REQUESTS = 500
UNSTABLE = 3.0  # times the noise
ELSEWHERE = 1e3  # a length so long that a feature does not matter


class Correction:
    """Learns from residuals [points, 2] (log throughput, log tail) at ``inputs`` [points, features].

    ``noise`` [points] is that of each measurement, relative to the usual.
    """

    def __init__(self, inputs: Array, residuals: Array, noise: Array) -> None:
        kernels = (_throughput_kernel(inputs.shape[1]), _tail_kernel(inputs.shape[1]))
        self._regressors = [
            GaussianProcessRegressor(kernel, alpha=(usual * noise) ** 2, optimizer=None).fit(inputs, column)
            for kernel, usual, column in zip(kernels, (THROUGHPUT_NOISE, TAIL_NOISE), residuals.T, strict=True)
        ]

    def predict(self, inputs: Array) -> tuple[Array, Array]:
        """Mean and standard deviation [cells, 2] of the residuals, without the noise of a measurement."""
        predicted = [regressor.predict(inputs, return_std=True) for regressor in self._regressors]
        return np.stack([mean for mean, _ in predicted], 1), np.stack([deviation for _, deviation in predicted], 1)


def features(space: Space, candidate: Candidate, concurrency: int) -> list[float]:
    """Settings and load on comparable scales: about one unit for a parameter's whole range. The first
    ``len(space.fields) + 1`` are what the speed of the server depends on, the rest what batching does."""
    preferred = max(candidate.preferred_batch_sizes, default=candidate.max_batch_size)
    choices = space.parameters()
    values = dict(candidate.fields)
    return [
        math.log2(candidate.instance_count) / 2,
        *(
            choices[path].index(values[path]) / max(len(choices[path]) - 1, 1)
            if path in values and values[path] in choices[path]
            else -0.5
            for path in space.fields
        ),
        math.log2(max(candidate.max_batch_size, 1)) / 8,
        float(candidate.dynamic_batching),
        math.log1p(candidate.max_queue_delay_us) / 8,
        math.log2(preferred / max(candidate.max_batch_size, 1)) if preferred else 0.0,
        math.log2(concurrency) / 6,
    ]


BATCHING_FEATURES = 5


def noise_of(point: Point) -> float:
    """How noisy a measurement is, relative to the usual one: by its requests, and whether its windows agreed."""
    requests = point.measurement.requests or USUAL_REQUESTS
    return max(0.7, math.sqrt(USUAL_REQUESTS / requests)) * (1.0 if point.measurement.stable else UNSTABLE)


def _throughput_kernel(features: int) -> Kernel:
    speed = [SPEED_LENGTH] * (features - BATCHING_FEATURES) + [ELSEWHERE] * BATCHING_FEATURES
    return _kernel(SPEED_ERROR, speed) + _kernel(BATCHING_ERROR, [BATCHING_LENGTH] * features)


def _tail_kernel(features: int) -> Kernel:
    return _kernel(TAIL_ERROR, [BATCHING_LENGTH] * features)


def _kernel(deviation: float, lengths: list[float]) -> Kernel:
    return ConstantKernel(deviation**2, "fixed") * Matern(lengths, "fixed", nu=2.5)
