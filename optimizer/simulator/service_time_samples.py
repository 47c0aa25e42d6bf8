"""Samples of the service times that agree with the server's statistics, which show how uncertain a forecast is.

The prior covers backends and devices. A batch may take the same time for any size, or more than in proportion to it,
with a bend at some size. Instances may share a device fully or not at all. Samples of the prior are conditioned
on all measured batches by an ensemble smoother (Evensen and van Leeuwen 1996) with perturbed observations (Burgers,
van Leeuwen and Evensen 1998). The times of some servers have steps, as when a GPU computes whole tiles. So one prior
has smooth times and another one rough times. Their samples are mixed by the likelihood of the measured times
(Bayesian model averaging, Hoeting et al. 1999).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from objectives.arrays import FloatArray
from optimizer.config.problem import Problem
from optimizer.simulator.calibration import Observation
from optimizer.simulator.fitted_parameters import (
    PRIOR_CONTENTION,
    Contention,
    ExecutionSettings,
    GroupServiceTimes,
    Occupancy,
    occupancy,
    scaled_to_groups,
)

MEMBERS = 300  # samples of the prior; covariances are estimated from them
# Prior of the time of a batch of b requests, relative to one request: fixed + (1 - fixed) * b ** power, and from a
# random size on another slope. BEND is the standard deviation of its logarithm.
FIXED_SHARE = 0.8  # both parameters of a beta distribution
POWER, POWER_STD = 1.0, 0.15
BENT_SHARE, BEND = 0.5, 0.5
# Prior probability of each roughness. It is the standard deviation of the departure of the log time from this shape
# with each doubling of the size. The larger one permits steps.
ROUGHNESS = {0.05: 0.8, 0.4: 0.2}
LOG_TIME_STD = 3.0  # standard deviation of the logarithm of the time of one request
CONTENTION_STD, EXPONENT_STD, GAIN_STD, SPINNING_STD = 1.0, 0.5, 0.45, 0.4
MAX_THREAD_EXPONENT = 1.25  # more than 1, because threads also have more cache
GUESS_IS_RIGHT = 0.5  # probability that a guessed number of cores is right; otherwise it is too small
MAX_CORE_FACTOR = 8.0  # largest ratio of the right number of cores to the guessed one
# Standard deviations of the logarithm of a measured mean: common to all batches of an execution setting, common to
# all of one size in it, and of a single execution.
SETTING_ERROR, SIZE_ERROR, EXECUTION_ERROR = 0.15, 0.04, 0.3
NUGGET = 1e-6


@dataclass(frozen=True, eq=False)
class _Ensemble:
    """Samples of the log times [samples, sizes] of batches of 1, 2, ... requests, and of the contention."""

    log_seconds: FloatArray
    contention: FloatArray  # [samples, 6], as in _contention

    @classmethod
    def from_prior(cls, largest: int, roughness: float, rng: np.random.Generator) -> _Ensemble:
        sizes = np.arange(1, largest + 1, dtype=np.float64)
        columns = (MEMBERS, 1)
        fixed = rng.beta(FIXED_SHARE, FIXED_SHARE, columns)
        power = np.clip(rng.normal(POWER, POWER_STD, columns), 0.3, 1.5)
        bend_at = largest ** rng.uniform(0, 1, columns)
        bent = (rng.uniform(size=columns) < BENT_SHARE) * np.expm1(rng.normal(0, BEND, columns))
        growth = sizes**power + bent * np.maximum(sizes - bend_at, 0.0)
        times = fixed + (1 - fixed) * np.maximum.accumulate(np.maximum(growth, 1e-3), axis=1)
        doublings = np.diff(np.log2(sizes), prepend=-1.0)  # since the previous size; the first varies all sizes
        rough = np.cumsum(rng.normal(0, roughness * np.sqrt(doublings), (MEMBERS, largest)), axis=1)
        log_time = rng.normal(0, LOG_TIME_STD, columns)
        prior = PRIOR_CONTENTION
        contention = np.stack(
            [
                prior.slowdown * rng.normal(1, CONTENTION_STD, MEMBERS),
                rng.normal(prior.oversubscription, EXPONENT_STD, MEMBERS),
                rng.normal(prior.thread_speedup_exponent, GAIN_STD, MEMBERS),
                prior.slowdown_if_cores_unknown * rng.normal(1, CONTENTION_STD, MEMBERS),
                rng.normal(prior.idle_spin_share, SPINNING_STD, MEMBERS),
                rng.uniform(0, math.log(MAX_CORE_FACTOR), MEMBERS) * (rng.uniform(size=MEMBERS) > GUESS_IS_RIGHT),
            ],
            axis=1,
        )
        return cls(log_time + np.log(times) + rough, contention)

    @property
    def state(self) -> FloatArray:
        return np.hstack([self.log_seconds, self.contention])

    def with_state(self, state: FloatArray) -> _Ensemble:
        count = self.log_seconds.shape[1]
        return _Ensemble(state[:, :count], state[:, count:])

    def log_times(self, sizes: FloatArray) -> FloatArray:
        """Return the log times [samples, sizes] of batches of ``sizes`` requests, which may be fractions."""
        known = np.log2(np.arange(1, self.log_seconds.shape[1] + 1))
        return np.array([np.interp(np.log2(sizes), known, row) for row in self.log_seconds])

    def spread_out(self, most: Occupancy, count: int) -> list[int]:
        """Return ``count`` samples that are spread over the times of the largest batch at the occupancy ``most``.

        They are in the order of these times.
        """
        slowest = self.log_seconds[:, -1] + np.log(_contention(self.contention).relative_duration(most))
        order = np.argsort(slowest, kind="stable")
        ranks = ((np.arange(count) + 0.5) / count * len(order)).astype(int)
        return [int(member) for member in order[ranks]]


def _contention(values: FloatArray) -> Contention:
    """Return the contention of one sample [6], or of all [samples, 6]."""
    slowdown, oversubscription, speedup, unknown, spinning, cores = values.T
    return Contention(
        slowdown=np.maximum(slowdown, 0.0),
        oversubscription=np.maximum(oversubscription, 1.0),
        thread_speedup_exponent=np.clip(speedup, 0.0, MAX_THREAD_EXPONENT),
        idle_spin_share=np.clip(spinning, 0.0, 1.0),
        slowdown_if_cores_unknown=np.maximum(unknown, 0.0),
        core_count_factor=np.exp(np.maximum(cores, 0.0)),
    )


@dataclass(frozen=True, eq=False)
class _MeasuredBatches:
    """The mean times of all measured batch sizes.

    ``sizes`` [batches] are in requests. ``settings`` numbers the execution settings.
    """

    sizes: FloatArray
    log_seconds: FloatArray
    executions: FloatArray
    occupancies: list[Occupancy]
    settings: FloatArray

    def noise(self) -> FloatArray:
        """Return the covariance [batches, batches] of the errors."""
        same_settings = np.equal.outer(self.settings, self.settings)
        same_sizes = same_settings & np.equal.outer(self.sizes, self.sizes)
        shared = SETTING_ERROR**2 * same_settings + SIZE_ERROR**2 * same_sizes
        return np.asarray(shared + np.diag(EXECUTION_ERROR**2 / self.executions + NUGGET))

    def predicted(self, ensemble: _Ensemble) -> FloatArray:
        """Return the log times [samples, batches] of ``ensemble``."""
        contention = _contention(ensemble.contention)
        slower = [np.log(contention.relative_duration(occupied)) for occupied in self.occupancies]
        return np.asarray(ensemble.log_times(self.sizes) + np.stack(slower, axis=1))


def sample_service_times(
    groups: Mapping[ExecutionSettings, Sequence[Observation]], problem: Problem, largest: int, count: int, seed: int
) -> list[GroupServiceTimes]:
    """Return ``count`` samples of the service times of batches of up to ``largest`` samples.

    Args:
        groups: The server's statistics by execution settings.
        problem: The search problem, which defines the request batch size and the cores.
        largest: The samples of the largest batch.
        count: At most MEMBERS.
        seed: Seed of the random numbers. The same statistics and seed give the same samples.
    """
    sizes = max(1, largest // problem.space.request_batch_size)
    posterior = _posterior(_measured_batches(groups, problem), sizes, seed)
    most = max(problem.space.instance_count)
    busiest = ExecutionSettings(most, next(iter(groups)).fields)
    chosen = posterior.spread_out(occupancy(busiest, most, problem), count)
    shapes = np.exp(np.maximum.accumulate(posterior.log_seconds, axis=1))
    return [
        scaled_to_groups(shapes[member], groups, problem, _contention(posterior.contention[member]))
        for member in chosen
    ]


def _measured_batches(
    groups: Mapping[ExecutionSettings, Sequence[Observation]], problem: Problem
) -> _MeasuredBatches:
    step = problem.space.request_batch_size
    rows = [
        (batch.batch_size / step, batch.compute_ns / 1e9 / batch.executions, batch.executions, occupied, number)
        for number, (settings, observed) in enumerate(groups.items())
        for seen in observed
        for batch in seen.batches
        for occupied in [occupancy(settings, seen.busy, problem)]
    ]
    sizes, seconds, executions, occupancies, settings = zip(*rows, strict=True)
    return _MeasuredBatches(
        np.maximum(np.array(sizes, np.float64), 1.0),
        np.log(np.array(seconds, np.float64)),
        np.array(executions, np.float64),
        list(occupancies),
        np.array(settings, np.float64),
    )


def _posterior(measured: _MeasuredBatches, largest: int, seed: int) -> _Ensemble:
    """Return samples of the posterior for batches of up to ``largest`` requests, a mixture over ROUGHNESS."""
    states, log_weights = list[FloatArray](), list[float]()
    for roughness, probability in ROUGHNESS.items():
        rng = np.random.default_rng(seed)  # the same for each roughness, so that they differ in nothing else
        prior = _Ensemble.from_prior(largest, roughness, rng)
        state, log_likelihood = _conditioned(prior, measured, rng)
        states.append(state)
        log_weights.append(math.log(probability) + log_likelihood)
    weights = np.cumsum(np.exp(np.array(log_weights) - max(log_weights)))
    shares = rng.permutation((np.arange(MEMBERS) + 0.5) / MEMBERS)
    chosen = np.searchsorted(weights / weights[-1], shares)
    return prior.with_state(np.array(states)[chosen, np.arange(MEMBERS)])


def _conditioned(prior: _Ensemble, measured: _MeasuredBatches, rng: np.random.Generator) -> tuple[FloatArray, float]:
    """Return the state of the samples after an update with perturbed observations, and the prior's log likelihood.

    The likelihood is that of a normal distribution, without a constant factor.
    """
    state, predicted, noise = prior.state, measured.predicted(prior), measured.noise()
    states, predictions = state - state.mean(axis=0), predicted - predicted.mean(axis=0)
    covariance = predictions.T @ predictions / (MEMBERS - 1) + noise
    gain = np.linalg.solve(covariance, predictions.T @ states / (MEMBERS - 1))
    perturbations = rng.standard_normal(predicted.shape) @ np.linalg.cholesky(noise).T
    root = np.linalg.cholesky(covariance)
    errors = np.linalg.solve(root, measured.log_seconds - predicted.mean(axis=0))
    log_likelihood = float(-0.5 * errors @ errors - np.log(np.diag(root)).sum())
    return state + (measured.log_seconds + perturbations - predicted) @ gain, log_likelihood
