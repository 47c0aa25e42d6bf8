"""What several deployments of one configuration say of its speed: no two of them are equally fast."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from scipy import optimize, special

Array = npt.NDArray[np.float64]

# Deployments of one configuration on one machine differ by 3 to 10 % (relative standard deviation), so this much
# within a factor of USUAL_FACTOR is expected before any was seen. Student's t, which expects nothing, would ask for
# margins of 40 % from the handful of deployments that a run has.
USUAL_DEVIATION, USUAL_FACTOR = 0.055, 1.5
# of the simulator, relative: mean absolute errors of 1.0 % and 3.2 % in benchmarks/simulator_proof.md
THROUGHPUT_ERROR, LATENCY_ERROR = 0.0125, 0.04
DEVIATIONS = USUAL_DEVIATION * USUAL_FACTOR ** np.linspace(-3, 3, 31)


@dataclass(frozen=True, slots=True)
class Pace:
    """Batches take ``slowness`` times as long as in the simulation; what latencies are on top of what follows from
    that is ``lateness``, a factor too."""

    slowness: float = 1.0
    lateness: float = 1.0


@dataclass(frozen=True, eq=False)
class Belief:
    """Of the logarithm of the slowness: by how much longer a batch takes than in the simulation.

    A mixture of normal distributions around ``mean``: one of each of ``errors``, as likely as ``weights``.
    """

    mean: float
    errors: Array
    weights: Array
    deployments: int

    def pace(self, probability: float) -> Pace:
        """The pace that replicas are no slower than, with this probability.

        Near saturation slowness alone decides what can be served. Where there is room, latency is as uncertain as
        slowness and the simulation's error of latencies are together: the lateness is what that comes to.
        """
        slowness = self._quantile(probability, self.errors)
        together = self._quantile(probability, np.hypot(self.errors, LATENCY_ERROR))
        return Pace(math.exp(self.mean + slowness), math.exp(together - slowness))

    def _quantile(self, probability: float, errors: Array) -> float:
        if probability == 0.5:
            return 0.0
        widest = 10 * float(errors[-1])

        def excess(value: float) -> float:
            return float(self.weights @ special.ndtr(value / errors)) - probability

        return float(optimize.brentq(excess, -widest, widest))


def belief(log_slowness: Sequence[float]) -> Belief:
    """From one figure a deployment, of which there is one at least: their mean is as good as known, how much they
    differ is learned from them and from what is usual."""
    seen = np.asarray(log_slowness, np.float64)
    count, squares = len(seen), float(((seen - seen.mean()) ** 2).sum())
    prior = -0.5 * (np.log(DEVIATIONS / USUAL_DEVIATION) / math.log(USUAL_FACTOR)) ** 2
    density = prior - (count - 1) * np.log(DEVIATIONS) - squares / (2 * DEVIATIONS**2)
    weights = np.exp(density - density.max())
    errors = np.sqrt(DEVIATIONS**2 / count + THROUGHPUT_ERROR**2)
    return Belief(float(seen.mean()), errors, weights / weights.sum(), count)
