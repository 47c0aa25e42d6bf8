"""What the simulator gets wrong: Gaussian processes on log(measured / simulated) over the parameters.

In a closed loop throughput times mean latency is the concurrency (Little's law), so two processes say all: one
for throughput, one for the tail (the judged latency over the mean latency).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt

from optimizer.batcher.simulator import Simulated
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
# All of these are usual values: how much larger or smaller they are on this server is told by the measurements
ERROR_SCALES, NOISE_SCALES = (0.6, 1.0), (0.1, 0.3, 1.0, 2.0)
SCALE_SPREAD = 0.8  # of the logarithm of either scale, before anything is measured
BATCHING_FEATURES = 7
# What the batcher does (the size of its batches, how busy the instances are) says more of an error than how that is
# spelled in a configuration
BATCH, BUSY, SPELLING = 0.25, 0.5, 0.45


class Correction:
    """Learns from residuals [points, 2] (log throughput, log tail) at ``inputs`` [points, features].

    ``deployments`` [points]: the number of the trial in which each was measured; ``noise`` [points]: relative to
    that of a usual measurement; ``batching_error``: of the simulated throughput, relative.
    """

    def __init__(
        self, inputs: Array, residuals: Array, deployments: Sequence[int], noise: Array, batching_error: float
    ) -> None:
        def of_throughput(a: Array, b: Array) -> Array:
            speed = _matern(a[:, :-BATCHING_FEATURES], b[:, :-BATCHING_FEATURES], SPEED_LENGTH)
            return SPEED_ERROR**2 * speed + batching_error**2 * _matern(a, b, BATCHING_LENGTH)

        def of_tail(a: Array, b: Array) -> Array:
            return TAIL_ERROR**2 * _matern(a, b, BATCHING_LENGTH)

        same = np.equal.outer(deployments, deployments) * MOMENT_NOISE**2
        self._processes = (
            _Process(of_throughput, inputs, same + np.diag((THROUGHPUT_NOISE * noise) ** 2), residuals[:, 0]),
            _Process(of_tail, inputs, np.diag((TAIL_NOISE * noise) ** 2), residuals[:, 1]),
        )

    @property
    def noise_scale(self) -> float:
        """The noise of the throughput as a multiple of the usual."""
        return self._processes[0].noise_scale

    def predict(self, inputs: Array) -> tuple[Array, Array]:
        """Mean and standard deviation [cells, 2] of the residuals, without any noise."""
        found = [process.predict(inputs) for process in self._processes]
        return np.stack([mean for mean, _ in found], 1), np.stack([deviation for _, deviation in found], 1)


class _Process:
    """A Gaussian process whose covariances are known but for how large the errors are, and how large the noise.

    Both scales are those of the highest posterior density among a few: a handful of points says little of more
    hyperparameters. So the regression is some lines of linear algebra (Rasmussen and Williams 2006, algorithm 2.1),
    where scikit-learn's would cost more memory than all else that a run imports.
    """

    def __init__(
        self, covariance: Callable[[Array, Array], Array], inputs: Array, noise: Array, learned: Array
    ) -> None:
        from scipy.linalg import cho_factor, cho_solve

        self._covariance, self._inputs = covariance, inputs
        errors, best = covariance(inputs, inputs), -math.inf
        for error_scale in ERROR_SCALES:
            for noise_scale in NOISE_SCALES:
                factor = cho_factor(error_scale**2 * errors + noise_scale**2 * noise, lower=True)
                weights = cho_solve(factor, learned)
                density = -0.5 * float(learned @ weights) - float(np.log(np.diag(factor[0])).sum())
                density -= 0.5 * (math.log(error_scale) ** 2 + math.log(noise_scale) ** 2) / SCALE_SPREAD**2
                if density > best:
                    best, self._scale, self._factor, self._weights = density, error_scale**2, factor, weights
                    self.noise_scale = noise_scale

    def predict(self, inputs: Array) -> tuple[Array, Array]:
        """Mean and standard deviation [cells]."""
        from scipy.linalg import cho_solve

        cross = self._scale * self._covariance(self._inputs, inputs)
        prior = self._scale * float(self._covariance(inputs[:1], inputs[:1])[0, 0])
        variance = prior - np.einsum("ij,ij->j", cross, cho_solve(self._factor, cross))
        return cross.T @ self._weights, np.sqrt(np.maximum(variance, 1e-12))


def _matern(a: Array, b: Array, length: float) -> Array:
    """Matérn's kernel with nu = 5/2."""
    from scipy.spatial.distance import cdist

    distance = math.sqrt(5) * cdist(a, b) / length
    return np.asarray((1 + distance + distance**2 / 3) * np.exp(-distance))


def features(space: Space, candidate: Candidate, concurrency: int, simulated: Simulated) -> list[float]:
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
        SPELLING * math.log2(max(candidate.max_batch_size, 1)) / 8,
        SPELLING * float(candidate.dynamic_batching),
        SPELLING * math.log1p(candidate.max_queue_delay_us) / 8,
        SPELLING * math.log2(preferred / max(candidate.max_batch_size, 1)) if preferred else 0.0,
        math.log2(concurrency) / 6,
        BATCH * math.log2(simulated.mean_batch_size),
        BUSY * simulated.utilization,
    ]


def noise_of(point: Point) -> float:
    """How noisy a measurement is, relative to the usual one: by its requests, and whether its windows agreed."""
    requests = point.measurement.requests or USUAL_REQUESTS
    return max(0.7, math.sqrt(USUAL_REQUESTS / requests)) * (1.0 if point.measurement.stable else UNSTABLE)
