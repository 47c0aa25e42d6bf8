"""Samples of the service times that agree with the server's statistics, which show how uncertain a forecast is.

The prior covers backends and devices: a batch may take the same time for any size or more than in proportion to it,
with a bend at some size, and instances may share a device fully or not at all. Samples of the prior are conditioned
on all measured batches by an ensemble smoother (Evensen and van Leeuwen 1996) with perturbed observations (Burgers,
van Leeuwen and Evensen 1998).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from optimizer.config.search_space import Problem
from optimizer.simulator.calibration import Observation
from optimizer.simulator.fitted_parameters import (
    USUAL_CONTENTION,
    Contention,
    ExecutionSettings,
    GroupServiceTimes,
    Occupancy,
    occupancy,
    scaled_to_groups,
)
from optimizer.simulator.scenario import Array

MEMBERS = 300  # samples of the prior; covariances are estimated from them
# Prior of the time of a batch of b requests, relative to one request: fixed + (1 - fixed) * b ** power, and from a
# random size on another slope. BEND is the standard deviation of its logarithm, ROUGHNESS that of each doubling.
FIXED_SHARE = 0.8  # both parameters of a beta distribution
POWER, POWER_SPREAD = 1.0, 0.15
BENT_SHARE, BEND, ROUGHNESS = 0.5, 0.5, 0.05
LEVEL_SPREAD = 3.0  # of the logarithm of the time of one request
CONTENTION_SPREAD, EXPONENT_SPREAD, GAIN_SPREAD, SPINNING_SPREAD = 1.0, 0.5, 0.45, 0.4
MOST_GAIN = 1.25  # more than 1, because threads also have more cache
GUESS_IS_RIGHT, MOST_SPARE = 0.5, 8.0  # probability that a guessed number of cores is right; otherwise a larger one
# Standard deviations of the logarithm of a measured mean: common to all batches of an execution setting, common to
# all of one size in it, and of a single execution.
SETTING_ERROR, SIZE_ERROR, EXECUTION_ERROR = 0.15, 0.04, 0.3
NUGGET = 1e-6


@dataclass(frozen=True, eq=False)
class _Ensemble:
    """Samples of the log times [samples, knots] of batches of ``knots`` requests, and of the contention."""

    knots: Array
    log_seconds: Array
    contention: Array  # [samples, 6], as in _contention

    @classmethod
    def of_prior(cls, largest: int, rng: np.random.Generator) -> _Ensemble:
        knots = np.unique(np.append(2.0 ** np.arange(math.ceil(math.log2(largest)) if largest > 1 else 1), largest))
        columns = (MEMBERS, 1)
        fixed = rng.beta(FIXED_SHARE, FIXED_SHARE, columns)
        power = np.clip(rng.normal(POWER, POWER_SPREAD, columns), 0.3, 1.5)
        bend_at = largest ** rng.uniform(0, 1, columns)
        bent = (rng.uniform(size=columns) < BENT_SHARE) * np.expm1(rng.normal(0, BEND, columns))
        growth = knots**power + bent * np.maximum(knots - bend_at, 0.0)
        times = fixed + (1 - fixed) * np.maximum.accumulate(np.maximum(growth, 1e-3), axis=1)
        rough = np.cumsum(rng.normal(0, ROUGHNESS, (MEMBERS, len(knots))), axis=1)
        level = rng.normal(0, LEVEL_SPREAD, columns)
        usual = USUAL_CONTENTION
        contention = np.stack(
            [
                usual.slowdown * rng.normal(1, CONTENTION_SPREAD, MEMBERS),
                rng.normal(usual.oversubscription, EXPONENT_SPREAD, MEMBERS),
                rng.normal(usual.threads_gain, GAIN_SPREAD, MEMBERS),
                usual.unknown * rng.normal(1, CONTENTION_SPREAD, MEMBERS),
                rng.normal(usual.spinning, SPINNING_SPREAD, MEMBERS),
                rng.uniform(0, math.log(MOST_SPARE), MEMBERS) * (rng.uniform(size=MEMBERS) > GUESS_IS_RIGHT),
            ],
            axis=1,
        )
        return cls(knots, level + np.log(times) + rough, contention)

    @property
    def state(self) -> Array:
        return np.hstack([self.log_seconds, self.contention])

    def with_state(self, state: Array) -> _Ensemble:
        return _Ensemble(self.knots, state[:, : len(self.knots)], state[:, len(self.knots) :])

    def log_times(self, sizes: Array) -> Array:
        """Return the log times [samples, sizes] of batches of ``sizes`` requests, between knots by interpolation."""
        places, knots = np.log2(sizes), np.log2(self.knots)
        return np.array([np.interp(places, knots, row) for row in self.log_seconds])

    def spread_out(self, most: Occupancy, count: int) -> list[int]:
        """Return ``count`` samples that are spread over the times of the largest batch at the occupancy ``most``.

        They are in the order of these times.
        """
        slowest = self.log_seconds[:, -1] + np.log(_contention(self.contention).relative_duration(most))
        order = np.argsort(slowest, kind="stable")
        places = ((np.arange(count) + 0.5) / count * len(order)).astype(int)
        return [int(member) for member in order[places]]


def _contention(values: Array) -> Contention:
    """Return the contention of one sample [6], or of all [samples, 6]."""
    slowdown, oversubscription, gain, unknown, spinning, spare = values.T
    return Contention(
        slowdown=np.maximum(slowdown, 0.0),
        oversubscription=np.maximum(oversubscription, 1.0),
        threads_gain=np.clip(gain, 0.0, MOST_GAIN),
        spinning=np.clip(spinning, 0.0, 1.0),
        unknown=np.maximum(unknown, 0.0),
        spare=np.exp(np.maximum(spare, 0.0)),
    )


@dataclass(frozen=True, eq=False)
class _MeasuredBatches:
    """The mean times of all measured batch sizes.

    ``sizes`` [batches] are in requests. ``settings`` numbers the execution settings.
    """

    sizes: Array
    log_seconds: Array
    executions: Array
    occupancies: list[Occupancy]
    settings: Array

    def noise(self) -> Array:
        """Return the covariance [batches, batches] of the errors."""
        same_settings = np.equal.outer(self.settings, self.settings)
        same_sizes = same_settings & np.equal.outer(self.sizes, self.sizes)
        shared = SETTING_ERROR**2 * same_settings + SIZE_ERROR**2 * same_sizes
        return np.asarray(shared + np.diag(EXECUTION_ERROR**2 / self.executions + NUGGET))

    def predicted(self, ensemble: _Ensemble) -> Array:
        """Return the log times [samples, batches] of ``ensemble``."""
        contention = _contention(ensemble.contention)
        slower = [np.log(contention.relative_duration(place)) for place in self.occupancies]
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
    rng = np.random.default_rng(seed)
    step = problem.space.request_batch_size
    measured = _measured_batches(groups, problem)
    prior = _Ensemble.of_prior(max(1, largest // step), rng)
    posterior = _conditioned(prior, measured, rng)
    most = max(problem.space.instance_count)
    chosen = posterior.spread_out(occupancy((most, next(iter(groups))[1]), most, problem), count)
    sizes = np.arange(1, max(1, largest // step) + 1, dtype=np.float64)
    shapes = np.exp(np.maximum.accumulate(posterior.log_times(sizes), axis=1))
    return [
        scaled_to_groups(shapes[member], groups, problem, _contention(posterior.contention[member]))
        for member in chosen
    ]


def _measured_batches(
    groups: Mapping[ExecutionSettings, Sequence[Observation]], problem: Problem
) -> _MeasuredBatches:
    step = problem.space.request_batch_size
    rows = [
        (batch.batch_size / step, batch.compute_ns / 1e9 / batch.executions, batch.executions, place, number)
        for number, (settings, observed) in enumerate(groups.items())
        for seen in observed
        for batch in seen.batches
        for place in [occupancy(settings, seen.busy, problem)]
    ]
    sizes, seconds, executions, occupancies, settings = zip(*rows, strict=True)
    numbers = (np.array(column, dtype=np.float64) for column in (sizes, np.log(seconds), executions, settings))
    of_sizes, log_seconds, of_executions, of_settings = numbers
    return _MeasuredBatches(np.maximum(of_sizes, 1.0), log_seconds, of_executions, list(occupancies), of_settings)


def _conditioned(prior: _Ensemble, measured: _MeasuredBatches, rng: np.random.Generator) -> _Ensemble:
    """Return the samples of ``prior`` after an update with perturbed observations."""
    state, predicted, noise = prior.state, measured.predicted(prior), measured.noise()
    states, predictions = state - state.mean(axis=0), predicted - predicted.mean(axis=0)
    covariance = predictions.T @ predictions / (MEMBERS - 1) + noise
    gain = np.linalg.solve(covariance, predictions.T @ states / (MEMBERS - 1))
    perturbations = rng.standard_normal(predicted.shape) @ np.linalg.cholesky(noise).T
    return prior.with_state(state + (measured.log_seconds + perturbations - predicted) @ gain)
