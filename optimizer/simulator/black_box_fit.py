"""Parameters of a server without statistics, fitted to throughput and latency, and samples of them.

The parameters are:

- the time of one request alone
- the share of it that does not depend on the batch size
- the contention between instances, a factor on PRIOR_CONTENTION
- the network time of a request
- the jitter

A vector has the logarithm of each parameter, and the log-odds of the share, so that its prior can be normal.

The samples are of the posterior, by randomized maximum likelihood (Oliver, He and Reynolds 1996). Each is the vector
closest to a sample of the prior and to the measurements with a sample of their errors added. It is found by
Gauss-Newton steps. The Jacobian of finite differences at the fitted parameters is updated by Broyden's rank-one
formula (1965), so that a step costs one simulation of the measured points.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, replace
from typing import TypeAlias

import numpy as np

from objectives.arrays import FloatArray
from optimizer.config.problem import Problem
from optimizer.simulator.fitted_parameters import (
    MIN_TIME_S,
    PRIOR_CONTENTION,
    ExecutionSettings,
    GroupServiceTimes,
)

# from a vector [5] of parameters to log throughput and log latency of the measured points [points, 2]
Simulation: TypeAlias = Callable[[FloatArray], FloatArray]

# The prior covers backends and devices. Measurements determine the time of one request, whatever its prior. A batch
# may take the same time for any size, or in proportion to it: the log-odds of the share have a standard deviation of
# 2.1, as those of the beta distribution of service_time_samples. Instances may share a device fully or hardly at all.
# Requests may take longer on the network than on the server. Service times may vary by 5 % to 80 %. The median of the
# network time is relative to a request.
FIXED_SHARE, CONTENTION, NETWORK_SHARE, JITTER = 0.5, 1.0, 0.25, 0.2
DEVIATIONS = np.array([1.5, 2.1, 1.0, 1.5, 0.7])
MIN_VECTOR = np.array([math.log(MIN_TIME_S), -7.0, math.log(2e-3), math.log(MIN_TIME_S), math.log(0.01)])
MAX_VECTOR = np.array([math.log(10.0), 7.0, math.log(6.0), 0.0, 0.0])
MAX_EVALUATIONS = 120
ROBUST = 0.3  # log ratios beyond it count linearly: one noisy measurement must not distort the fit
# Standard deviations of the errors of log throughput and log tail ratio at the true parameters. They include what
# five parameters cannot describe, such as steps of the service times. SETTING_ERROR is common to an execution
# setting, as in service_time_samples.
THROUGHPUT_ERROR, TAIL_ERROR, SETTING_ERROR = 0.12, 0.13, 0.15
PRIOR_WEIGHT = 0.02  # weight of the prior in the fit: the variance of an error
DIFFERENCE = 0.2  # standard deviations of the prior, larger in effect than the random error of a simulation
MAX_DISTANCE = 2.0  # standard deviations of the prior from its median, where the samples begin
MIN_STEP = 0.01  # standard deviations of the prior, at which a sample has converged
MAX_STEPS = 6  # steps for each sample; with the Jacobian 8 samples take 54 simulations


@dataclass(frozen=True, slots=True)
class BlackBoxParameters:
    """The parameters of a server.

    ``request_s`` is the time on one instance of one thread. ``contention`` is a factor on the slowdown by further
    instances in PRIOR_CONTENTION.
    """

    request_s: float
    fixed_share: float
    contention: float
    network_s: float
    jitter: float

    @classmethod
    def from_vector(cls, vector: FloatArray) -> BlackBoxParameters:
        """Return the parameters of a ``vector`` [5], each within MIN_VECTOR and MAX_VECTOR."""
        request, odds, contention, network, jitter = np.clip(vector, MIN_VECTOR, MAX_VECTOR).tolist()
        return cls(*map(math.exp, (request, -math.log1p(math.exp(-odds)), contention, network, jitter)))

    def service_times(self, largest: int, problem: Problem) -> GroupServiceTimes:
        """Return the service times of batches of up to ``largest`` requests."""
        shape = self.request_s * (self.fixed_share + (1 - self.fixed_share) * np.arange(1.0, largest + 1))
        prior, factor = PRIOR_CONTENTION, self.contention
        contention = replace(
            prior,
            slowdown=factor * prior.slowdown,
            slowdown_if_cores_unknown=factor * prior.slowdown_if_cores_unknown,
        )
        return GroupServiceTimes(shape, {ExecutionSettings(1): 1.0}, problem, contention)


def prior_medians(request_s: float) -> FloatArray:
    """Return the medians [5] of the prior, where a request takes about ``request_s``."""
    odds = math.log(FIXED_SHARE / (1 - FIXED_SHARE))
    network_s = NETWORK_SHARE * request_s
    return np.array([math.log(request_s), odds, math.log(CONTENTION), math.log(network_s), math.log(JITTER)])


def fit_parameters(simulate: Simulation, measured: FloatArray, medians: FloatArray) -> FloatArray:
    """Return the vector [5] closest to ``measured`` [points, 2] (Nelder-Mead, robust loss, weak prior)."""
    from scipy.optimize import minimize

    def misfit(vector: FloatArray) -> float:
        errors = np.abs(simulate(vector) - measured)
        losses = np.where(errors < ROBUST, errors**2, 2 * ROBUST * errors - ROBUST**2)
        return float(losses.sum()) + PRIOR_WEIGHT * _squared((vector - medians) / DEVIATIONS)

    simplex = np.vstack([medians, medians + 0.7 * np.eye(len(medians))])
    options = {"maxfev": MAX_EVALUATIONS, "initial_simplex": simplex, "xatol": 0.02, "fatol": 1e-4}
    return np.asarray(minimize(misfit, medians, method="Nelder-Mead", options=options).x)


def sample_parameters(
    simulate: Simulation,
    measured: FloatArray,
    settings: Sequence[Hashable],
    fitted: FloatArray,
    medians: FloatArray,
    count: int,
    seed: int,
) -> list[FloatArray]:
    """Return ``count`` samples of the posterior, each a vector [5].

    Args:
        simulate: The simulation of the measured points.
        measured: Log throughput and log latency [points, 2].
        settings: The execution settings [points], which share an error.
        fitted: The vector [5] closest to ``measured``.
        medians: The medians [5] of the prior.
        count: The number of samples.
        seed: Seed of the random numbers. The same arguments give the same samples.
    """
    rng = np.random.default_rng(seed)
    errors = _error_covariance(settings)
    whiten = np.linalg.inv(np.linalg.cholesky(errors))

    def residuals(standardized: FloatArray) -> FloatArray:
        """Return the residuals [2 points] in standard deviations.

        ``standardized`` [5] are the parameters in standard deviations of the prior from its medians.
        """
        throughput_errors, latency_errors = (simulate(medians + DEVIATIONS * standardized) - measured).T
        return np.asarray(whiten @ np.concatenate([throughput_errors, throughput_errors + latency_errors]))

    start = np.clip((fitted - medians) / DEVIATIONS, -MAX_DISTANCE, MAX_DISTANCE)
    values = residuals(start)
    steps = DIFFERENCE * np.eye(len(start))
    jacobian = np.stack([(residuals(start + step) - values) / DIFFERENCE for step in steps], axis=1)
    # where the simulation cannot agree with the measurements, its errors are larger than the prior expects
    scale = max(1.0, float(np.sqrt(np.mean(values**2))))
    begin = start, values / scale, jacobian / scale
    samples = [
        _closest(lambda sample: residuals(sample) / scale, begin, prior, rng.standard_normal(len(values)))
        for prior in _latin_hypercube(count, len(start), rng)
    ]
    return [medians + DEVIATIONS * sample for sample in samples]


def _latin_hypercube(count: int, dimensions: int, rng: np.random.Generator) -> FloatArray:
    """Return standard normal numbers [count, dimensions], one in each of ``count`` equal strata of a dimension.

    Few samples cover the prior so (McKay, Beckman and Conover 1979).
    """
    from scipy.special import ndtri

    strata = rng.permuted(np.tile(np.arange(count), (dimensions, 1)), axis=1).T
    return np.asarray(ndtri((strata + rng.uniform(size=strata.shape)) / count))


def _closest(
    residuals: Callable[[FloatArray], FloatArray],
    begin: tuple[FloatArray, FloatArray, FloatArray],
    prior: FloatArray,
    errors: FloatArray,
) -> FloatArray:
    """Return the parameters with the least squared distances from ``prior`` and of their residuals from ``errors``.

    They are standardized, as those of ``prior``. ``begin`` has parameters, their residuals and the Jacobian of these.
    A step that increases the distance is halved.
    """
    vector, values, jacobian = begin
    distance = _squared(vector - prior) + _squared(values - errors)
    shrink = 1.0
    for _ in range(MAX_STEPS):
        gradient = vector - prior + jacobian.T @ (values - errors)
        newton = np.linalg.solve(np.eye(len(vector)) + jacobian.T @ jacobian, gradient)
        step = np.asarray(-shrink * newton, dtype=np.float64)
        if _squared(step) < MIN_STEP**2:
            break
        next_values = residuals(vector + step)
        jacobian = jacobian + np.outer(next_values - values - jacobian @ step, step) / _squared(step)
        next_distance = _squared(vector + step - prior) + _squared(next_values - errors)
        if next_distance < distance:
            vector, values, distance, shrink = vector + step, next_values, next_distance, 1.0
        else:
            shrink /= 2
    return vector


def _squared(vector: FloatArray) -> float:
    return float(vector @ vector)


def _error_covariance(settings: Sequence[Hashable]) -> FloatArray:
    """Return the covariance [2 points, 2 points] of the errors of log throughput, then of log tail ratio."""
    count = len(settings)
    numbers = np.array([list(dict.fromkeys(settings)).index(setting) for setting in settings])
    covariance = np.diag(np.repeat([THROUGHPUT_ERROR**2, TAIL_ERROR**2], count))
    covariance[:count, :count] += SETTING_ERROR**2 * np.equal.outer(numbers, numbers)
    return covariance
