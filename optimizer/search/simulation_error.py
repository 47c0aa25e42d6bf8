"""A model of the simulation's errors: Gaussian processes on log(measured / simulated) over the parameters.

In a closed loop throughput times mean latency is the concurrency (Little's law). So there is one process for the
throughput, and one for the tail ratio (the latency divided by the mean latency) of each predicted latency.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np

from objectives.arrays import FloatArray
from optimizer.config.problem import Problem
from optimizer.config.search_space import SearchSpace
from optimizer.core.candidate import Candidate
from optimizer.core.trial import Point
from optimizer.search.gaussian_process import FantasyProcess, Prediction, ResidualProcess, SourceCorrelation
from optimizer.simulator.compilation import SIMULATION_THREADS
from optimizer.simulator.performance_model import PerformanceModel
from optimizer.simulator.predicted_metrics import (
    ConfigurationLoad,
    ModelErrors,
    Performance,
    as_tail_ratios,
    configuration_loads,
    log_measurements,
    log_predictions,
)
from optimizer.simulator.speed_correction import SpeedCorrection, disturbance_noise

# Prior standard deviation of the simulation's relative error in the speed with several instances and other fields,
# which the simulator cannot derive. The errors of the batching and of the tail ratios are those of the model.
SPEED_ERROR = 0.25
SPEED_LENGTH, BATCHING_LENGTH = 0.7, 0.6  # length scales, in units of a parameter's range
# Deployments of one configuration differ in speed, which affects all measurements of a deployment alike
# (MOMENT_NOISE). Each measurement of REFERENCE_REQUESTS has noise of its own.
MOMENT_NOISE, THROUGHPUT_NOISE, TAIL_NOISE = 0.05, 0.03, 0.08
REFERENCE_REQUESTS = 500
UNSTABLE = 3.0  # factor on the noise of an unstable measurement
# Prior probabilities of the correlation between the residuals of two machines. A correlation of 0 ignores the source.
CORRELATIONS = {0.0: 0.2, 0.8: 0.4, 0.95: 0.4}
NEGLIGIBLE = 0.05  # posterior probability below which a correlation is ignored
BATCHING_FEATURES = 7
# scales of features: mean batch size and utilization predict errors better than the settings that cause them
BATCH_SCALE, BUSY_SCALE, BATCHER_SCALE = 0.25, 0.5, 0.45


@dataclass(frozen=True, eq=False)
class Residuals:
    """The errors of a simulation: log(measured / simulated) of throughput and tail ratios.

    Attributes:
        inputs: [points, features].
        values: [points, 1 + latencies].
        deployments: [points], the number of the trial in which each point was measured.
        noise: [points], the standard deviation of the noise relative to a measurement of REFERENCE_REQUESTS.
        speed_error: [points], the error of the correction for the machine's speed, in log throughput. All points
            share its cause, so errors of equal sign are correlated.
    """

    inputs: FloatArray
    values: FloatArray
    deployments: Sequence[int]
    noise: FloatArray
    speed_error: FloatArray


@dataclass(frozen=True, eq=False)
class SourceResiduals:
    """The residuals on another machine (the source of a transfer).

    ``error_model`` has learned the errors of the source's simulation. ``expected`` [points, 1 + latencies] are the
    residuals that this machine would have if both were alike.
    """

    error_model: SimulationErrorModel
    expected: FloatArray


class SimulationErrorModel:
    """The posterior of the simulation's errors, given ``residuals``.

    ``prior`` has the expected errors of the model of the server. The similarity of the machine of ``source`` is
    unknown, so the posterior is a mixture with one component for each of CORRELATIONS.

    Attributes:
        probabilities: The probability of each component.
        untransferred: The processes of throughput and tail ratios without the source.
    """

    def __init__(self, residuals: Residuals, prior: ModelErrors, source: SourceResiduals | None = None) -> None:
        priors = CORRELATIONS if source else {0.0: 1.0}
        groups = [_processes(residuals, prior, source, correlation) for correlation in priors]
        likelihoods = np.array([sum(process.unscaled_log_likelihood for process in group) for group in groups])
        weights = np.array(list(priors.values())) * np.exp(likelihoods - likelihoods.max())
        # an improbable component must not decide by promising a large improvement
        weights[weights < NEGLIGIBLE * weights.sum()] = 0.0
        self.untransferred = groups[0]
        self._median_noise = float(np.median(residuals.noise))
        self._processes = [group for group, weight in zip(groups, weights, strict=True) if weight]
        self._components: Sequence[tuple[ResidualProcess | FantasyProcess, ...]] = self._processes
        self.probabilities: list[float] = (weights[weights > 0] / weights.sum()).tolist()

    def with_fantasies(self, inputs: FloatArray) -> SimulationErrorModel:
        """Return the error model as if its predictions at ``inputs`` [inputs, features] had been measured.

        Each counts as a deployment of its own. The scales of errors and noise stay those of real measurements.
        """
        count, other = len(inputs), copy.copy(self)
        noises = _noise_covariances(range(count), np.ones(count), np.zeros(count), len(self.untransferred))
        other._components = [
            tuple(FantasyProcess(process, inputs, noise) for process, noise in zip(group, noises, strict=True))
            for group in self._processes
        ]
        return other

    @property
    def noise_scale(self) -> float:
        """The noise of the throughput relative to the prior, estimated without transfer."""
        return self.untransferred[0].noise_scale

    @property
    def log_likelihood(self) -> float:
        """The log marginal likelihood of the residuals under the best scales, without transfer, up to a constant."""
        return sum(process.log_likelihood for process in self.untransferred)

    def measurement_noise(self) -> FloatArray:
        """Return the standard deviations [components, 1 + latencies] of a measurement of a new deployment.

        The measurement has the median noise of those so far.
        """
        noises = _noise_covariances([0], np.array([self._median_noise]), np.zeros(1), len(self.untransferred))
        deviations = [math.sqrt(noise[0, 0]) for noise in noises]
        scales = [[process.noise_scale for process in group] for group in self._processes]
        return np.asarray(np.array(scales) * np.array(deviations))

    def predict(self, inputs: FloatArray, expected: FloatArray | None = None) -> list[Prediction]:
        """Return (mean, standard deviation), each [inputs, 1 + latencies], of the residuals for each component.

        ``expected`` [inputs, 1 + latencies] is as in ``SourceResiduals``.
        """
        predictions = []
        for group in self._components:
            columns = [None] * len(group) if expected is None else expected.T
            means, deviations = zip(
                *(process.predict(inputs, column) for process, column in zip(group, columns, strict=True)),
                strict=True,
            )
            predictions.append((np.stack(means, 1), np.stack(deviations, 1)))
        return predictions

    def samples(self, inputs: FloatArray, count: int, rng: np.random.Generator) -> FloatArray:
        """Return ``count`` joint samples [count, inputs, 1 + latencies] of the residuals; see ``ResidualProcess``."""
        return np.stack([process.samples(inputs, count, rng) for process in self.untransferred], axis=2)


def _processes(
    residuals: Residuals, prior: ModelErrors, source: SourceResiduals | None, correlation: float
) -> tuple[ResidualProcess, ...]:
    """Return the processes of throughput and of each tail ratio, for a correlation with those of ``source``."""
    count = residuals.values.shape[1]
    covariances = [partial(_throughput_covariance, prior), *[partial(_tail_covariance, prior)] * (count - 1)]
    noises = _noise_covariances(residuals.deployments, residuals.noise, residuals.speed_error, count)
    processes = []
    for column, (covariance, noise) in enumerate(zip(covariances, noises, strict=True)):
        transfer = expected = None
        if source is not None and correlation:
            transfer = SourceCorrelation(correlation, source.error_model.untransferred[column])
            expected = source.expected[:, column]
        values = residuals.values[:, column]
        processes.append(ResidualProcess(covariance, residuals.inputs, noise, values, transfer, expected))
    return tuple(processes)


def _throughput_covariance(prior: ModelErrors, a: FloatArray, b: FloatArray) -> FloatArray:
    """Return the covariance [inputs of a, inputs of b] of the errors of log throughput."""
    speed = _matern(a[:, :-BATCHING_FEATURES], b[:, :-BATCHING_FEATURES], SPEED_LENGTH)
    return SPEED_ERROR**2 * speed + prior.throughput**2 * _matern(a, b, BATCHING_LENGTH)


def _tail_covariance(prior: ModelErrors, a: FloatArray, b: FloatArray) -> FloatArray:
    """Return the covariance [inputs of a, inputs of b] of the errors of a log tail ratio."""
    return prior.tail**2 * _matern(a, b, BATCHING_LENGTH)


def _noise_covariances(
    deployments: Sequence[int], noise: FloatArray, speed_error: FloatArray, count: int
) -> list[FloatArray]:
    """Return ``count`` noise covariances [points, points]: that of throughput, then those of the tail ratios.

    The arguments [points] are as in ``Residuals``.
    """
    shared = np.equal.outer(deployments, deployments) * MOMENT_NOISE**2
    shared = shared + np.multiply.outer(speed_error, speed_error)
    throughput = shared + np.diag((THROUGHPUT_NOISE * noise) ** 2)
    return [throughput, *[np.diag((TAIL_NOISE * noise) ** 2)] * (count - 1)]


def _matern(a: FloatArray, b: FloatArray, length: float) -> FloatArray:
    """Return the Matérn kernel with nu = 5/2."""
    distance = math.sqrt(5) * distances(a, b) / length
    return np.asarray((1 + distance + distance**2 / 3) * np.exp(-distance))


def distances(a: FloatArray, b: FloatArray) -> FloatArray:
    """Return the Euclidean distances [rows of a, rows of b]. The modules of SciPy's ``cdist`` take 5 MB."""
    squares = sum(np.subtract.outer(x, y) ** 2 for x, y in zip(a.T, b.T, strict=True))
    return np.asarray(np.sqrt(squares))


def features(space: SearchSpace, candidate: Candidate, concurrency: int, simulated: Performance) -> list[float]:
    """Return settings, load and simulated batching on comparable scales.

    A parameter's whole range is about one unit. The last BATCHING_FEATURES affect the batching, those before them
    the speed of the server.
    """
    return [
        *setting_features(space, candidate, concurrency),
        BATCH_SCALE * math.log2(simulated.mean_batch_size),
        BUSY_SCALE * simulated.utilization,
    ]


def setting_features(space: SearchSpace, candidate: Candidate, concurrency: int) -> list[float]:
    """Return the features that need no simulation: those of the settings and the load."""
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
        BATCHER_SCALE * math.log2(max(candidate.max_batch_size, 1)) / 8,
        BATCHER_SCALE * float(candidate.dynamic_batching),
        BATCHER_SCALE * math.log1p(candidate.max_queue_delay_us) / 8,
        BATCHER_SCALE * math.log2(preferred / max(candidate.max_batch_size, 1)) if preferred else 0.0,
        math.log2(concurrency) / 6,
    ]


def relative_noise(point: Point) -> float:
    """Return the noise of a measurement relative to one of REFERENCE_REQUESTS.

    It grows with fewer requests, with an unstable throughput, and with a disturbance by other processes.
    """
    requests = point.measurement.requests or REFERENCE_REQUESTS
    noise = max(0.7, math.sqrt(REFERENCE_REQUESTS / requests)) * (1.0 if point.measurement.stable else UNSTABLE)
    disturbance = disturbance_noise(point.measurement) / THROUGHPUT_NOISE
    return math.hypot(noise, disturbance) if disturbance else noise


@dataclass(frozen=True, eq=False)
class SimulationResiduals:
    """The residuals of a simulation, and the simulation itself.

    Attributes:
        loads: [points].
        simulated: [points, 1 + latencies], log throughput and log tail ratios.
        residuals: Without ``longer_tail``.
        longer_tail: [1 + latencies], the part of the residuals that all points share.
    """

    loads: list[ConfigurationLoad]
    simulated: FloatArray
    residuals: Residuals
    longer_tail: FloatArray


def compute_residuals(
    model: PerformanceModel,
    points: Sequence[Point],
    problem: Problem,
    latencies: Sequence[str],
    speed: SpeedCorrection,
) -> SimulationResiduals:
    """Return the errors of ``model`` at ``points``.

    The points are complete for the metrics ``latencies`` and were corrected by ``speed``.
    """
    space, batch = problem.space, problem.space.request_batch_size
    loads = configuration_loads(points, space)
    results = model.simulate(loads, SIMULATION_THREADS)
    simulated = as_tail_ratios(log_predictions(results, latencies), loads, batch)
    errors = as_tail_ratios(log_measurements(points, latencies), loads, batch) - simulated
    longer_tail = np.zeros(1 + len(latencies))
    if problem.open_loop:  # random arrivals have a longer tail than the simulated closed loop, for any candidate
        longer_tail[1:] = np.median(errors[:, 1:], axis=0)
    residuals = Residuals(
        np.array([features(space, *load, result) for load, result in zip(loads, results, strict=True)]),
        errors - longer_tail,
        [point.trial for point in points],
        np.array([relative_noise(point) for point in points]),
        np.array([speed.error_of(point.measurement) for point in points]),
    )
    return SimulationResiduals(loads, simulated, residuals, longer_tail)
