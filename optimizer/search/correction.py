"""What the simulator gets wrong: Gaussian processes on log(measured / simulated) over the parameters.

In a closed loop throughput times mean latency is the concurrency (Little's law), so two processes say all: one
for throughput, one for the tail (the judged latency over the mean latency).
"""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from optimizer.batcher.simulator import Simulated
from optimizer.search.believer import Believer
from optimizer.search.process import Likeness, Process
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
# The correlation of the errors on two machines, and how likely each is before anything is measured here. The first
# is that of a study which tells nothing.
LIKENESSES = {0.0: 0.2, 0.8: 0.4, 0.95: 0.4}
NEGLIGIBLE = 0.05  # odds of one of them
BATCHING_FEATURES = 7
# What the batcher does (the size of its batches, how busy the instances are) says more of an error than how that is
# spelled in a configuration
BATCH, BUSY, SPELLING = 0.25, 0.5, 0.45


@dataclass(frozen=True, eq=False)
class Residuals:
    """What a simulation got wrong: ``values`` [points, 2] (log throughput, tail) at ``inputs`` [points, features].

    ``deployments`` [points]: the number of the trial in which each was measured; ``noise`` [points]: relative to
    that of a usual measurement.
    """

    inputs: Array
    values: Array
    deployments: Sequence[int]
    noise: Array


@dataclass(frozen=True, eq=False)
class There:
    """A machine elsewhere: what its simulation gets wrong, and ``expected`` [points, 2], the residuals that the one
    here would have if the two were alike."""

    correction: Correction
    expected: Array


class Correction:
    """Learns from ``residuals``; ``batching_error`` is that of the simulated throughput, relative.

    How alike the machine ``there`` is, is not known: each of LIKENESSES is a belief of its own, as likely as the
    residuals make it.
    """

    def __init__(self, residuals: Residuals, batching_error: float, there: There | None = None) -> None:
        def of_throughput(a: Array, b: Array) -> Array:
            speed = _matern(a[:, :-BATCHING_FEATURES], b[:, :-BATCHING_FEATURES], SPEED_LENGTH)
            return SPEED_ERROR**2 * speed + batching_error**2 * _matern(a, b, BATCHING_LENGTH)

        def of_tail(a: Array, b: Array) -> Array:
            return TAIL_ERROR**2 * _matern(a, b, BATCHING_LENGTH)

        def process(i: int, likeness: float) -> Process:
            kernel, noise = (of_throughput, of_tail)[i], _noise(residuals)[i]
            own = kernel, residuals.inputs, noise, residuals.values[:, i]
            if there is None or not likeness:
                return Process(*own)
            return Process(*own, Likeness(likeness, there.correction._alone[i]), there.expected[:, i])

        likely = LIKENESSES if there else {0.0: 1.0}
        pairs = [(process(0, likeness), process(1, likeness)) for likeness in likely]
        densities = np.array([sum(one.usual_density for one in pair) for pair in pairs])
        odds = np.array(list(likely.values())) * np.exp(densities - densities.max())
        odds[odds < NEGLIGIBLE * odds.sum()] = 0.0  # what is not believed has no say, however much it promises
        self._alone = pairs[0]
        self._processes = [pair for pair, own in zip(pairs, odds, strict=True) if own]
        self._believed: Sequence[tuple[Process | Believer, Process | Believer]] = self._processes
        self.odds: list[float] = (odds[odds > 0] / odds.sum()).tolist()

    def believing(self, inputs: Array) -> Correction:
        """As if what it predicts at ``inputs`` [cells, features] had been measured, each in a deployment of its own.
        How large errors and noise are, only what was really measured tells."""
        count, other = len(inputs), copy.copy(self)
        speed, tail = _noise(Residuals(inputs, np.zeros((count, 2)), range(count), np.ones(count)))
        other._believed = [
            (Believer(one, inputs, speed), Believer(another, inputs, tail)) for one, another in self._processes
        ]
        return other

    @property
    def noise_scale(self) -> float:
        """The noise of the throughput as a multiple of the usual, whatever is known of elsewhere."""
        return self._alone[0].noise_scale

    def predict(self, inputs: Array, expected: Array | None = None) -> list[tuple[Array, Array]]:
        """Of each belief, as likely as ``odds``: mean and standard deviation [cells, 2] of the residuals, without any
        noise. ``expected`` [cells, 2] as in ``There``."""
        columns = (None, None) if expected is None else tuple(expected.T)
        found = []
        for pair in self._believed:
            (mean, spread), (tail, tail_spread) = (
                process.predict(inputs, own) for process, own in zip(pair, columns, strict=True)
            )
            found.append((np.stack([mean, tail], 1), np.stack([spread, tail_spread], 1)))
        return found


def _noise(residuals: Residuals) -> tuple[Array, Array]:
    """Covariances [points, points] of the noise of throughput and tail."""
    same = np.equal.outer(residuals.deployments, residuals.deployments) * MOMENT_NOISE**2
    return same + np.diag((THROUGHPUT_NOISE * residuals.noise) ** 2), np.diag((TAIL_NOISE * residuals.noise) ** 2)


def _matern(a: Array, b: Array, length: float) -> Array:
    """Matérn's kernel with nu = 5/2."""
    from scipy.spatial.distance import cdist

    distance = math.sqrt(5) * cdist(a, b) / length
    return np.asarray((1 + distance + distance**2 / 3) * np.exp(-distance))


def features(space: Space, candidate: Candidate, concurrency: int, simulated: Simulated) -> list[float]:
    """Settings and load on comparable scales: about one unit for a parameter's whole range. The last
    ``BATCHING_FEATURES`` are what batching depends on, those before what the speed of the server does."""
    return [
        *settings(space, candidate, concurrency),
        BATCH * math.log2(simulated.mean_batch_size),
        BUSY * simulated.utilization,
    ]


def settings(space: Space, candidate: Candidate, concurrency: int) -> list[float]:
    """The features that need no simulation."""
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
    ]


def noise_of(point: Point) -> float:
    """How noisy a measurement is, relative to the usual one: by its requests, and whether its windows agreed."""
    requests = point.measurement.requests or USUAL_REQUESTS
    return max(0.7, math.sqrt(USUAL_REQUESTS / requests)) * (1.0 if point.measurement.stable else UNSTABLE)
