"""What the simulator gets wrong: Gaussian processes on log(measured / simulated) over the parameters.

In a closed loop throughput times mean latency is the concurrency (Little's law), so two processes say all: one
for throughput, one for the tail (the judged latency over the mean latency).
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from optimizer.space import Space
from optimizer.trial import Candidate, Point

Array = npt.NDArray[np.float64]

# Relative errors of the simulation: what a server does with several instances and other fields, which the
# simulator is told little of; what it gets wrong of the tail. What it gets wrong of the batching it says itself.
SPEED_ERROR, TAIL_ERROR = 0.25, 0.1
SPEED_LENGTH, BATCHING_LENGTH = 0.7, 0.6  # in units of a parameter's range
# A machine is slower in one minute than in the next: that is in all measurements of a deployment alike. To it
# comes the noise of each measurement of USUAL_REQUESTS.
MOMENT_NOISE, THROUGHPUT_NOISE, TAIL_NOISE = 0.05, 0.03, 0.08
USUAL_REQUESTS = 500
UNSTABLE = 3.0  # times the noise
BATCHING_FEATURES = 5


class Correction:
    """Learns from residuals [points, 2] (log throughput, log tail) at ``inputs`` [points, features].

    ``deployments`` [points]: the number of the trial in which each was measured; ``noise`` [points]: relative to
    that of a usual measurement; ``batching_error``: of the simulated throughput, relative. All hyperparameters are
    given: a handful of points says little of them. So the regression is two lines of linear algebra (Rasmussen and
    Williams 2006, algorithm 2.1), where scikit-learn's would cost more memory than all else that a run imports.
    """

    def __init__(
        self, inputs: Array, residuals: Array, deployments: Sequence[int], noise: Array, batching_error: float
    ) -> None:
        from scipy.linalg import cho_factor

        self._inputs, self._residuals, self._batching_error = inputs, residuals, batching_error
        same = np.equal.outer(deployments, deployments) * MOMENT_NOISE**2
        covariances = self._throughput_covariance(inputs), self._tail_covariance(inputs)
        self._factors = [
            cho_factor(covariance + same + np.diag((usual * noise) ** 2))
            for covariance, usual in zip(covariances, (THROUGHPUT_NOISE, TAIL_NOISE), strict=True)
        ]

    def predict(self, inputs: Array) -> tuple[Array, Array]:
        """Mean and standard deviation [cells, 2] of the residuals, without any noise."""
        from scipy.linalg import cho_solve

        crosses = self._throughput_covariance(inputs), self._tail_covariance(inputs)
        priors = SPEED_ERROR**2 + self._batching_error**2, TAIL_ERROR**2
        means, deviations = [], []
        for factor, cross, prior, learned in zip(self._factors, crosses, priors, self._residuals.T, strict=True):
            means.append(cross.T @ cho_solve(factor, learned))
            variance = prior - np.einsum("ij,ij->j", cross, cho_solve(factor, cross))
            deviations.append(np.sqrt(np.maximum(variance, 1e-12)))
        return np.stack(means, 1), np.stack(deviations, 1)

    def _throughput_covariance(self, inputs: Array) -> Array:
        known = self._inputs
        speed = _matern(known[:, :-BATCHING_FEATURES], inputs[:, :-BATCHING_FEATURES], SPEED_LENGTH)
        return SPEED_ERROR**2 * speed + self._batching_error**2 * _matern(known, inputs, BATCHING_LENGTH)

    def _tail_covariance(self, inputs: Array) -> Array:
        return TAIL_ERROR**2 * _matern(self._inputs, inputs, BATCHING_LENGTH)


def _matern(a: Array, b: Array, length: float) -> Array:
    """Matérn's kernel with nu = 5/2."""
    from scipy.spatial.distance import cdist

    distance = math.sqrt(5) * cdist(a, b) / length
    return np.asarray((1 + distance + distance**2 / 3) * np.exp(-distance))


def features(space: Space, candidate: Candidate, concurrency: int) -> list[float]:
    """Settings and load on comparable scales: about one unit for a parameter's whole range. The last
    ``BATCHING_FEATURES`` are what batching depends on, those before what the speed of the server does."""
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


def noise_of(point: Point) -> float:
    """How noisy a measurement is, relative to the usual one: by its requests, and whether its windows agreed."""
    requests = point.measurement.requests or USUAL_REQUESTS
    return max(0.7, math.sqrt(USUAL_REQUESTS / requests)) * (1.0 if point.measurement.stable else UNSTABLE)
