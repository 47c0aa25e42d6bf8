"""The probability that a limited queue refuses few enough requests, from the simulator and the measurements."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np

from objectives.arrays import FloatArray
from objectives.metrics import METRICS
from optimizer.config.problem import Problem
from optimizer.config.queue_policy import may_refuse, with_queue
from optimizer.core.candidate import Candidate
from optimizer.core.request_sizes import SizeDistribution
from optimizer.core.trial import Point
from optimizer.simulator.dynamic_batching_model import MISSED_SHARE, DynamicBatchingModel
from optimizer.simulator.performance_model import PerformanceModel
from optimizer.simulator.predicted_metrics import ConfigurationLoad, configuration_loads

MIN_COMPARED = 4  # measurements before the simulation may be judged wrong
TRUSTED_SHARE = 2 / 3  # share of the measurements on whose side of the bound the simulation has to be
SOFTENING = 0.1  # share of the permitted failures that is added to each share before its logarithm is taken
# Shares of the notifications that the batcher may miss (see ``Scenario``), and the prior standard deviation around
# MISSED_SHARE. The operating system decides about each of them, so the share depends on the machine and its load.
MISSED_SHARES, MISSED_STD = (0.0, 0.2, 0.4, 0.7, 1.0), 0.3
PRIOR_VARIANCE = 1.0  # variance of the logarithm of a measured share over a simulated one, at a single load


class RefusalForecast:
    """Forecasts for each configuration and load whether failed requests stay within the bounds.

    The simulator predicts the share of requests that a full queue or a timeout refuses. log(measured / simulated
    share) has a mean and a variance that the measurements determine, with one prior measurement. The share of the
    notifications that the batcher misses is the one that explains the measurements best. If the simulation is on the
    wrong side of the bound for more than a third of the measurements, it is not used.

    Attributes:
        permitted: Share of the requests that may fail.
        missed_share: Share of the notifications that the batcher misses.
        compared: Measurements of configurations that may refuse requests.
        agreed: Those of them for which the simulation is on the right side of the bound.
    """

    def __init__(self, model: PerformanceModel, measured: Sequence[Point], problem: Problem) -> None:
        """Compare the refusals that ``model`` simulates with those of ``measured``, as closed loops."""
        self._problem = problem
        self._model = model if isinstance(model, DynamicBatchingModel) else None
        self.permitted = permitted_share(problem)
        self._bias, self._std = 0.0, math.sqrt(2 * PRIOR_VARIANCE)
        self.missed_share = MISSED_SHARE
        self.compared = self.agreed = 0
        if self.applies:
            self._learn([point for point in measured if _is_compared(point, problem)])

    @property
    def applies(self) -> bool:
        """Whether the simulator describes the model, the bounds permit failures, and a queue may refuse requests.

        It is False for a mix of request sizes, because the simulator uses single samples and a queue counts requests.
        """
        is_described = self._model is not None and self._problem.request_mix is None
        return is_described and self.permitted > 0 and self._problem.may_refuse

    @property
    def is_trusted(self) -> bool:
        """Whether the simulation agrees with the measurements, or too few were compared to tell."""
        return self.compared < MIN_COMPARED or self.agreed >= TRUSTED_SHARE * self.compared

    @property
    def priorities(self) -> SizeDistribution | None:
        """The shares of the priorities of the simulated requests."""
        return self._problem.priorities

    def applies_to(self, candidate: Candidate) -> bool:
        """Return whether the refusals of ``candidate`` are predicted."""
        return self.applies and self.is_trusted and _refuses(candidate, self._problem)

    def corrected(self, shares: FloatArray) -> FloatArray:
        """Return the expected shares of refused requests for the simulated ``shares``; 0 where none are simulated."""
        return np.clip(shares * math.exp(self._bias), 0.0, 1.0)

    def probabilities(self, loads: Sequence[ConfigurationLoad], throughputs: Callable[[], FloatArray]) -> FloatArray:
        """Return the probability [loads] that the share of failed requests is within the bounds.

        ``throughputs`` returns the expected throughputs [loads] in infer/s.
        """
        indices = [i for i, (candidate, _) in enumerate(loads) if self.applies_to(candidate)]
        result = np.ones(len(loads))
        if not indices:
            return result
        from scipy.special import ndtr  # slow to import

        rates = throughputs()[indices] / self._problem.request_batch_size
        shares = self._simulated([loads[i] for i in indices], rates, self.missed_share)
        slack = self._log(np.array([self.permitted])) - self._log(shares) - self._bias
        result[indices] = ndtr(slack / self._std)
        return result

    def _learn(self, points: Sequence[Point]) -> None:
        loads = configuration_loads(points, self._problem.space)
        if not loads:
            return
        shares = np.array([_failed_share(point) for point in points])
        served = np.array([point.throughput_infer_per_sec for point in points]) / self._problem.request_batch_size
        rates = served / np.maximum(1 - shares, 1e-3)
        fits: list[tuple[float, float, FloatArray]] = []
        for missed in MISSED_SHARES:
            simulated = self._simulated(loads, rates, missed)
            squares = float(((self._log(shares) - self._log(simulated)) ** 2).sum())
            fits.append((squares + ((missed - MISSED_SHARE) / MISSED_STD) ** 2, missed, simulated))
        _, self.missed_share, simulated = min(fits, key=lambda fit: fit[0])
        errors = self._log(shares) - self._log(simulated)
        count = len(loads) + 1  # the prior counts as one measurement, whose error is 0
        self._bias = float(errors.sum()) / count
        squares = float(((errors - self._bias) ** 2).sum()) + self._bias**2
        variance = (PRIOR_VARIANCE + squares) / count
        self._std = math.sqrt(variance * (1 + 1 / count))
        self.compared = len(loads)
        self.agreed = int(np.count_nonzero((shares <= self.permitted) == (simulated <= self.permitted)))

    def _simulated(self, loads: Sequence[ConfigurationLoad], rates: FloatArray, missed_share: float) -> FloatArray:
        """Return the simulated shares [loads] of refused requests; ``rates`` are those of an open loop."""
        assert self._model is not None, "the forecast applies"
        open_loop_rates = rates.tolist() if self._problem.open_loop else None
        return self._model.refused_shares(loads, open_loop_rates, self._problem.priorities, missed_share)

    def _log(self, shares: FloatArray) -> FloatArray:
        return np.asarray(np.log(shares + SOFTENING * self.permitted))


def permitted_share(problem: Problem) -> float:
    """Return the share of requests that may fail; 0 if the run has no bound on the error rate.

    A failed request misses each bound on a percentile too.
    """
    shares = problem.sla.permitted_failures
    if not shares:
        return 0.0
    levels = [METRICS[bound.metric].quantile for bound in problem.sla]
    return min(*shares, *(1 - level for level in levels if level is not None), 1.0)


def _refuses(candidate: Candidate, problem: Problem) -> bool:
    fields = with_queue(candidate, problem.queue).fields
    return candidate.dynamic_batching and may_refuse({path: (value,) for path, value in fields})


def _is_compared(point: Point, problem: Problem) -> bool:
    """Return whether the measurement has counted failures of a configuration that may refuse requests."""
    measurement = point.measurement
    is_known = measurement.errors is not None and not measurement.overloaded
    return is_known and _refuses(problem.space.canonical(point.candidate), problem)


def _failed_share(point: Point) -> float:
    errors = point.measurement.errors or 0
    return errors / max(errors + (point.measurement.requests or 0), 1)
