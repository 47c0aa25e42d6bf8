"""The surrogate's posterior of every configuration, and expected improvement under a latency bound."""

from __future__ import annotations

import copy
import math
import os
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np

from objectives.metrics import Measurement
from optimizer.config.search_space import Problem
from optimizer.core.trial import Point, Trial
from optimizer.search.correction import Correction, SourceResiduals, compute_residuals, features
from optimizer.search.transfer import SourceMachine
from optimizer.simulator.fitted_parameters import execution_settings
from optimizer.simulator.metrics import LATENCY_FIELDS, ConfigurationLoad, log_loads, log_simulated, with_tails
from optimizer.simulator.scenario import Array, SimulationResult
from optimizer.simulator.server_model import fit
from optimizer.simulator.speed_correction import SpeedCorrection, is_comparable

NODES, WEIGHTS = np.polynomial.hermite_e.hermegauss(15)


@dataclass(frozen=True, eq=False)
class Posterior:
    """The posterior of log throughput and log tail ratio.

    ``mean`` and ``deviation`` are [cells, 2]; ``log_loads`` [cells] are the logarithms of the samples in flight.
    """

    mean: Array
    deviation: Array
    log_loads: Array


def probability_within_bound(posterior: Posterior, bound_s: float) -> Array:
    """Return the probability [cells] that the latency is within the bound."""
    latency = posterior.mean[:, 1] - posterior.mean[:, 0] + posterior.log_loads
    return _normal_cdf((math.log(bound_s) - latency) / np.hypot(*posterior.deviation.T))


def expected_improvement(posterior: Posterior, bound_s: float, best: float) -> Array:
    """Return E[max(0, log throughput - best); latency within the bound], [cells].

    The expectation is a Gauss-Hermite quadrature over the throughput: more throughput at a load also means less
    latency, so improvement and probability are not independent factors.
    """
    (throughput, tail), (spread, tail_spread) = posterior.mean.T, posterior.deviation.T
    gains = np.zeros(len(throughput))
    for node, weight in zip(NODES, WEIGHTS / WEIGHTS.sum(), strict=True):
        reached = throughput + node * spread
        slack = math.log(bound_s) - (tail - reached + posterior.log_loads)
        gains += weight * np.maximum(0.0, reached - best) * _normal_cdf(slack / np.maximum(tail_spread, 1e-9))
    return gains


def mixture_quantiles(probabilities: Array, means: Array, deviations: Array, levels: Sequence[float]) -> Array:
    """Return the quantiles [levels, cells] of mixtures of normal distributions.

    ``probabilities`` [components] are those of the components, whose ``means`` and ``deviations`` are
    [components, cells]. A quantile lies between the smallest and the largest one of the components; it is found
    there by bisection.
    """
    from scipy.special import ndtri

    wanted = np.array(levels)[:, None]
    of_components = means[:, None, :] + deviations[:, None, :] * ndtri(wanted)  # [components, levels, cells]
    low, high = of_components.min(axis=0), of_components.max(axis=0)
    for _ in range(BISECTIONS):
        middle = (low + high) / 2
        below = _normal_cdf((middle - means[:, None, :]) / deviations[:, None, :])
        is_lower = np.tensordot(probabilities, below, axes=1) < wanted
        low, high = np.where(is_lower, middle, low), np.where(is_lower, high, middle)
    return np.asarray((low + high) / 2)


def _normal_cdf(z: Array) -> Array:
    from scipy.special import ndtr

    return np.asarray(ndtr(z))


BISECTIONS = 50  # they halve the distance of the components' quantiles to below the precision of a double
FAILURE_WEIGHT = 3  # one failure of an execution setting counts as many successes
THREADS = max(1, min(4, os.cpu_count() or 1))


@dataclass(frozen=True)
class SearchState:
    """The inputs of a surrogate other than the measured points.

    ``latency`` is the binding latency metric; ``speed`` is the correction that was applied to the points.
    """

    problem: Problem
    trials: Sequence[Trial]
    latency: str
    seed: int
    source: SourceMachine | None
    speed: SpeedCorrection = field(default_factory=SpeedCorrection)


class Surrogate:
    """The posterior of throughput and latency after some measurements. Simulations are cached."""

    def __init__(self, state: SearchState, measured: Sequence[Point]) -> None:
        """Fit the simulation and its correction to ``measured``, points that are complete."""
        self._state, self._measured = state, measured
        self._cache: dict[ConfigurationLoad, tuple[SimulationResult, list[float]]] = {}  # with the features
        self.followed_cells: list[ConfigurationLoad] | None = None  # kept by the selector between decisions
        self._inputs: list[tuple[Sequence[ConfigurationLoad], Array]] = []
        self._problem, self._latency = state.problem, state.latency
        self.bound_s = self._problem.sla.latency_bound_ms(self._latency) / 1e3
        self._model = fit(measured, self._problem, self._latency, state.seed)
        learned = compute_residuals(self._model, measured, self._problem, self._latency, THREADS, state.speed)
        self._longer_tail = learned.longer_tail
        self._transfer_prior = state.source.prior(measured) if state.source else None
        source = None
        if state.source and self._transfer_prior:
            expected = self._transfer_prior.expected(learned.cells, THREADS)
            source = SourceResiduals(state.source.correction, expected)
        self._correction = Correction(learned.residuals, self._model.error, source)
        feasible = [i for i, point in enumerate(measured) if self._is_feasible(point)]
        self.has_feasible = bool(feasible)
        # The best throughput so far is that of the posterior, one for each component: the highest measured one is
        # biased upwards by noise.
        predictions = self._correction.predict(learned.residuals.inputs, source.expected if source else None)
        self._best = (
            [float(max((mean + learned.simulated)[feasible, 0])) for mean, _ in predictions] if feasible else None
        )

    def missing_trials(self, state: SearchState) -> float:
        """Return how many trials of ``state`` this surrogate lacks; infinity if it is not an earlier state of it."""
        own, others = ({(t.number, t.candidate) for t in each.trials} for each in (self._state, state))
        is_earlier = state.latency == self._state.latency and own <= others
        return len(others) - len(own) if is_earlier else math.inf

    def missing_cells(self, measured: Sequence[Point]) -> list[ConfigurationLoad]:
        """Return the cells of ``measured`` that this surrogate was not fitted to."""
        own, space = {(point.trial, point.candidate) for point in self._measured}, self._problem.space
        missing = [point for point in measured if (point.trial, point.candidate) not in own]
        return [(space.canonical(point.candidate), point.load.concurrency) for point in missing]

    def with_running(self, running: Sequence[ConfigurationLoad]) -> Surrogate:
        """Return the surrogate as if ``running`` had been measured with their predictions.

        So candidates that are similar to running ones have a lower expected improvement.
        """
        if not running:
            return self
        surrogate, inputs = copy.copy(self), self._simulate(running)[1]
        surrogate._correction = self._correction.with_fantasies(inputs)
        posteriors = self._posteriors(running)
        throughput, tail = posteriors[self._likeliest].mean.T
        loads = log_loads(running, self._problem.space.request_batch_size)
        feasible = tail - throughput + loads <= math.log(self.bound_s)
        if feasible.any():
            best = self._best or [-math.inf] * len(posteriors)
            surrogate._best = [
                max(before, float(max(posterior.mean[feasible, 0])))
                for before, posterior in zip(best, posteriors, strict=True)
            ]
        return surrogate

    @property
    def latency(self) -> str:
        """The binding latency metric, which is predicted."""
        return self._latency

    @property
    def noise_scale(self) -> float:
        """The estimated noise of measurements relative to the usual one."""
        return self._correction.noise_scale

    def after_first(self, deployments: int) -> Surrogate:
        """Return the surrogate after the first ``deployments``, which does not change with further ones."""
        first = sorted({point.trial for point in self._measured})[:deployments]
        return Surrogate(self._state, [point for point in self._measured if point.trial in first])

    def simulated(self, cells: Sequence[ConfigurationLoad]) -> Array:
        """Return simulated log throughput and log latency [cells, 2], without correction or cache."""
        return self._log_metrics(self._model.simulate(cells, THREADS))

    def _simulate(self, cells: Sequence[ConfigurationLoad]) -> tuple[list[SimulationResult], Array]:
        """Return the simulation results and features [cells, features].

        Each cell is simulated once, and the same list of cells gives the same array, which predictions are cached by.
        """
        new = [cell for cell in dict.fromkeys(cells) if cell not in self._cache]
        for cell, result in zip(new, self._model.simulate(new, THREADS), strict=True):
            self._cache[cell] = result, features(self._problem.space, *cell, result)
        cached = [self._cache[cell] for cell in cells]
        inputs = next((array for known, array in self._inputs if known is cells), None)
        if inputs is None:
            inputs = np.array([row for _, row in cached])
            self._inputs.append((cells, inputs))
        return [result for result, _ in cached], inputs

    def _log_metrics(self, results: Sequence[SimulationResult]) -> Array:
        return np.array([log_simulated(result, self._latency) for result in results]).reshape(-1, 2)

    def improvements(self, cells: Sequence[ConfigurationLoad]) -> Array:
        """Return the acquisition function [cells].

        It is the expected gain in log throughput over the best feasible one. While nothing is feasible, it is the
        expected throughput within the bounds, on a scale of its own.
        """
        if not cells:
            return np.zeros(0)
        reliability, posteriors = self._reliability(cells), self._posteriors(cells)
        if self._best is not None:
            improvements = (
                expected_improvement(posterior, self.bound_s, best)
                for posterior, best in zip(posteriors, self._best, strict=True)
            )
        else:
            improvements = (
                probability_within_bound(posterior, self.bound_s) * np.exp(posterior.mean[:, 0])
                for posterior in posteriors
            )
        return reliability * self._average(improvements)

    def forecast(self, cells: Sequence[ConfigurationLoad]) -> tuple[Array, Array]:
        """Return throughput (infer/s) and latency (s), each [cells], of the most probable component."""
        posterior = self._posteriors(cells)[self._likeliest]
        throughput, tail = posterior.mean.T
        return np.exp(throughput), np.exp(tail - throughput + posterior.log_loads)

    def measurement_quantiles(
        self, cells: Sequence[ConfigurationLoad], levels: Sequence[float], speed_probe_ms: float | None = None
    ) -> tuple[Array, Array]:
        """Return quantiles of measurements of throughput (infer/s) and latency (s), each [levels, cells].

        They include the noise of a deployment and of a measurement. ``speed_probe_ms`` is the speed probe of that
        deployment; None for the median speed of the run.
        """
        posteriors, noise = self._posteriors(cells), self._correction.measurement_noise()
        speed = self._state.speed
        slowness = speed.log_slowness(Measurement(speed_probe_ms=speed_probe_ms))
        means = np.array([posterior.mean for posterior in posteriors])  # [components, cells, 2]
        throughput = means[:, :, 0] - speed.slope * slowness
        spread, tail_spread = np.moveaxis(np.array([posterior.deviation for posterior in posteriors]), 2, 0)
        spread = np.sqrt(spread**2 + noise[:, :1] ** 2 + (speed.error * slowness) ** 2)
        latency = means[:, :, 1] - throughput + posteriors[0].log_loads
        latency_spread = np.sqrt(spread**2 + tail_spread**2 + noise[:, 1:] ** 2)
        weights = np.array(self._correction.probabilities)
        return (
            np.exp(mixture_quantiles(weights, throughput, spread, levels)),
            np.exp(mixture_quantiles(weights, latency, latency_spread, levels)),
        )

    def probability_within_bound(self, cells: Sequence[ConfigurationLoad]) -> Array:
        """Return the probability [cells] that the latency bound is met."""
        return self._average(
            probability_within_bound(posterior, self.bound_s) for posterior in self._posteriors(cells)
        )

    @property
    def _likeliest(self) -> int:
        return int(np.argmax(self._correction.probabilities))

    def _average(self, values: Iterable[Array]) -> Array:
        """Return the mean over the components of the posterior."""
        return np.asarray(sum(p * value for p, value in zip(self._correction.probabilities, values, strict=True)))

    def _posteriors(self, cells: Sequence[ConfigurationLoad]) -> list[Posterior]:
        """Return one posterior for each component of the correction."""
        results, inputs = self._simulate(cells)
        batch = self._problem.space.request_batch_size
        simulated = with_tails(self._log_metrics(results), cells, batch) + self._longer_tail
        loads = log_loads(cells, batch)
        expected = self._transfer_prior.expected(cells, THREADS) if self._transfer_prior else None
        return [
            Posterior(mean + simulated, deviation, loads)
            for mean, deviation in self._correction.predict(inputs, expected)
        ]

    def _reliability(self, cells: Sequence[ConfigurationLoad]) -> Array:
        """Return the share of trials with the same execution settings that deploy and meet all other bounds."""
        others = self._problem.sla.without(*LATENCY_FIELDS, "throughput")
        good: Counter[object] = Counter()
        bad: Counter[object] = Counter()
        for trial in self._state.trials:
            measured = [m for _, m in trial.measurements if m.throughput_infer_per_sec is not None]
            is_good = any(map(others.is_met, measured))
            (good if is_good else bad)[execution_settings(self._problem.space.canonical(trial.candidate))] += 1
        groups = [execution_settings(candidate) for candidate, _ in cells]
        return np.array([(good[g] + 1) / (good[g] + FAILURE_WEIGHT * bad[g] + 1) for g in groups])

    def _is_feasible(self, point: Point) -> bool:
        return is_comparable(point.measurement) and self._problem.sla.is_met(point.measurement)
