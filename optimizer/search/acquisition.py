"""The surrogate's posterior of every configuration, and expected improvement under a latency bound."""

from __future__ import annotations

import copy
import functools
import math
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np

from objectives.metrics import Measurement
from optimizer.config.search_space import Problem
from optimizer.core.trial import Point, Trial
from optimizer.search.correction import Correction, SourceResiduals, compute_residuals, features
from optimizer.search.feasibility import Feasibility
from optimizer.search.transfer import SourceMachine
from optimizer.simulator.metrics import LATENCY_FIELDS, ConfigurationLoad, log_loads, log_simulated, with_tails
from optimizer.simulator.scenario import Array, SimulationResult
from optimizer.simulator.server_model import ServerModel, fit, sample_models
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
SAMPLES = 8  # of the service times
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


class SimulatedPosterior:
    """The posterior of throughput and latency for one server model. Simulations are cached.

    It is a mixture with one component for each similarity of the source machine, if there is one.
    """

    def __init__(self, state: SearchState, measured: Sequence[Point], model: ServerModel) -> None:
        """Fit the correction of ``model``'s simulation to ``measured``, points that are complete."""
        self._problem, self._latency = state.problem, state.latency
        self._bound_s = state.problem.sla.latency_bound_ms(state.latency) / 1e3
        self._model = model
        self._cache: dict[ConfigurationLoad, tuple[SimulationResult, list[float]]] = {}  # with the features
        self._inputs: list[tuple[Sequence[ConfigurationLoad], Array]] = []
        learned = compute_residuals(model, measured, self._problem, self._latency, THREADS, state.speed)
        self._longer_tail = learned.longer_tail
        self._transfer_prior = state.source.prior(measured) if state.source else None
        source = None
        if state.source and self._transfer_prior:
            expected = self._transfer_prior.expected(learned.cells, THREADS)
            source = SourceResiduals(state.source.correction, expected)
        self.correction = Correction(learned.residuals, model.error, source)
        feasible = [i for i, point in enumerate(measured) if is_feasible(point, self._problem)]
        # The best throughput so far is that of the posterior, one for each component: the highest measured one is
        # biased upwards by noise.
        predictions = self.correction.predict(learned.residuals.inputs, source.expected if source else None)
        self._best = (
            [float(max((mean + learned.simulated)[feasible, 0])) for mean, _ in predictions] if feasible else None
        )

    def with_running(self, running: Sequence[ConfigurationLoad]) -> SimulatedPosterior:
        """Return the posterior as if ``running`` had been measured with their predictions."""
        other, inputs = copy.copy(self), self._simulate(running)[1]
        other.correction = self.correction.with_fantasies(inputs)
        posteriors = self.posteriors(running)
        throughput, tail = posteriors[self.likeliest].mean.T
        loads = log_loads(running, self._problem.space.request_batch_size)
        feasible = tail - throughput + loads <= math.log(self._bound_s)
        if feasible.any():
            best = self._best or [-math.inf] * len(posteriors)
            other._best = [
                max(before, float(max(posterior.mean[feasible, 0])))
                for before, posterior in zip(best, posteriors, strict=True)
            ]
        return other

    def simulated(self, cells: Sequence[ConfigurationLoad]) -> Array:
        """Return simulated log throughput and log latency [cells, 2], without correction or cache."""
        return self._log_metrics(self._model.simulate(cells, THREADS))

    def improvements(self, cells: Sequence[ConfigurationLoad]) -> Array:
        """Return the acquisition function [cells] without the probability of other failures; see ``Surrogate``."""
        posteriors = self.posteriors(cells)
        if self._best is not None:
            return self._average(
                expected_improvement(posterior, self._bound_s, best)
                for posterior, best in zip(posteriors, self._best, strict=True)
            )
        return self._average(
            probability_within_bound(posterior, self._bound_s) * np.exp(posterior.mean[:, 0])
            for posterior in posteriors
        )

    def probability_within_bound(self, cells: Sequence[ConfigurationLoad]) -> Array:
        """Return the probability [cells] that the latency bound is met."""
        return self._average(
            probability_within_bound(posterior, self._bound_s) for posterior in self.posteriors(cells)
        )

    @property
    def likeliest(self) -> int:
        """The index of the most probable component."""
        return int(np.argmax(self.correction.probabilities))

    def posteriors(self, cells: Sequence[ConfigurationLoad]) -> list[Posterior]:
        """Return one posterior for each component of the correction."""
        results, inputs = self._simulate(cells)
        batch = self._problem.space.request_batch_size
        simulated = with_tails(self._log_metrics(results), cells, batch) + self._longer_tail
        loads = log_loads(cells, batch)
        expected = self._transfer_prior.expected(cells, THREADS) if self._transfer_prior else None
        return [
            Posterior(mean + simulated, deviation, loads)
            for mean, deviation in self.correction.predict(inputs, expected)
        ]

    def _average(self, values: Iterable[Array]) -> Array:
        """Return the mean over the components of the posterior."""
        return np.asarray(sum(p * value for p, value in zip(self.correction.probabilities, values, strict=True)))

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


class Surrogate:
    """The posterior of throughput and latency after some measurements.

    ``improvements`` and ``forecast`` use the server model that is closest to the measurements. The ``sampled_``
    functions average over samples of the service times as well, which takes several times as long.
    """

    def __init__(self, state: SearchState, measured: Sequence[Point]) -> None:
        """Fit the simulation and its correction to ``measured``, points that are complete."""
        self._state, self._measured = state, measured
        self.followed_cells: list[ConfigurationLoad] | None = None  # kept by the selector between decisions
        self.bound_s = state.problem.sla.latency_bound_ms(state.latency) / 1e3
        self.has_feasible = any(is_feasible(point, state.problem) for point in measured)
        self._model = fit(measured, state.problem, state.latency, state.seed)
        self._usual = SimulatedPosterior(state, measured, self._model)
        bounds = state.problem.sla.without(*LATENCY_FIELDS, "throughput")
        self._feasibility = Feasibility(state.trials, state.problem.space, bounds)

    def missing_trials(self, state: SearchState) -> float:
        """Return how many trials of ``state`` this surrogate lacks; infinity if it is not an earlier state of it."""
        own, others = ({(t.number, t.candidate) for t in each.trials} for each in (self._state, state))
        is_earlier = state.latency == self._state.latency and own <= others
        return len(others) - len(own) if is_earlier else math.inf

    def missing_cells(self, measured: Sequence[Point]) -> list[ConfigurationLoad]:
        """Return the cells of ``measured`` that this surrogate was not fitted to."""
        own, space = {(point.trial, point.candidate) for point in self._measured}, self._state.problem.space
        missing = [point for point in measured if (point.trial, point.candidate) not in own]
        return [(space.canonical(point.candidate), point.load.concurrency) for point in missing]

    def with_running(self, running: Sequence[ConfigurationLoad]) -> Surrogate:
        """Return the surrogate as if ``running`` had been measured with their predictions.

        So candidates that are similar to running ones have a lower expected improvement.
        """
        if not running:
            return self
        surrogate = copy.copy(self)
        surrogate._usual = self._usual.with_running(running)
        surrogate.__dict__["_samples"] = [posterior.with_running(running) for posterior in self._samples]
        return surrogate

    @property
    def latency(self) -> str:
        """The binding latency metric, which is predicted."""
        return self._state.latency

    @property
    def noise_scale(self) -> float:
        """The estimated noise of measurements relative to the usual one."""
        return self._usual.correction.noise_scale

    def after_first(self, deployments: int) -> Surrogate:
        """Return the surrogate after the first ``deployments``, which does not change with further ones."""
        first = sorted({point.trial for point in self._measured})[:deployments]
        return Surrogate(self._state, [point for point in self._measured if point.trial in first])

    def simulated(self, cells: Sequence[ConfigurationLoad]) -> Array:
        """Return simulated log throughput and log latency [cells, 2], without correction or cache."""
        return self._usual.simulated(cells)

    def improvements(self, cells: Sequence[ConfigurationLoad]) -> Array:
        """Return the acquisition function [cells].

        It is the expected gain in log throughput over the best feasible one. While nothing is feasible, it is the
        expected throughput within the bounds, on a scale of its own.
        """
        return self._success(cells) * self._usual.improvements(cells) if cells else np.zeros(0)

    def sampled_improvements(self, cells: Sequence[ConfigurationLoad], samples: int | None = None) -> Array:
        """Return ``improvements`` as the mean over the first ``samples`` of the service times, or over all."""
        if not cells:
            return np.zeros(0)
        posteriors = self._samples[:samples] or [self._usual]
        improvements = np.mean([posterior.improvements(cells) for posterior in posteriors], axis=0)
        return np.asarray(self._success(cells) * improvements)

    def forecast(self, cells: Sequence[ConfigurationLoad]) -> tuple[Array, Array]:
        """Return throughput (infer/s) and latency (s), each [cells], of the most probable component."""
        posterior = self._usual.posteriors(cells)[self._usual.likeliest]
        throughput, tail = posterior.mean.T
        return np.exp(throughput), np.exp(tail - throughput + posterior.log_loads)

    def measurement_quantiles(
        self, cells: Sequence[ConfigurationLoad], levels: Sequence[float], speed_probe_ms: float | None = None
    ) -> tuple[Array, Array]:
        """Return quantiles of measurements of throughput (infer/s) and latency (s), each [levels, cells].

        They include the noise of a deployment and of a measurement. ``speed_probe_ms`` is the speed probe of that
        deployment; None for the median speed of the run.
        """
        sources = self._samples or [self._usual]
        posteriors = [posterior for source in sources for posterior in source.posteriors(cells)]
        noise = np.concatenate([source.correction.measurement_noise() for source in sources])
        weights = np.concatenate([source.correction.probabilities for source in sources]) / len(sources)
        speed = self._state.speed
        slowness = speed.log_slowness(Measurement(speed_probe_ms=speed_probe_ms))
        means = np.array([posterior.mean for posterior in posteriors])  # [components, cells, 2]
        throughput = means[:, :, 0] - speed.slope * slowness
        spread, tail_spread = np.moveaxis(np.array([posterior.deviation for posterior in posteriors]), 2, 0)
        spread = np.sqrt(spread**2 + noise[:, :1] ** 2 + (speed.error * slowness) ** 2)
        latency = means[:, :, 1] - throughput + posteriors[0].log_loads
        latency_spread = np.sqrt(spread**2 + tail_spread**2 + noise[:, 1:] ** 2)
        return (
            np.exp(mixture_quantiles(weights, throughput, spread, levels)),
            np.exp(mixture_quantiles(weights, latency, latency_spread, levels)),
        )

    def sampled_probability_within_bound(self, cells: Sequence[ConfigurationLoad]) -> Array:
        """Return the probability [cells] that the latency bound is met."""
        posteriors = self._samples or [self._usual]
        return np.asarray(np.mean([posterior.probability_within_bound(cells) for posterior in posteriors], axis=0))

    @functools.cached_property
    def _samples(self) -> list[SimulatedPosterior]:
        """The posterior of each sample; none if another study was transferred, whose residuals are of one model."""
        if self._state.source:
            return []
        models = sample_models(self._model, self._measured, self._state.problem, SAMPLES)
        return [SimulatedPosterior(self._state, self._measured, model) for model in models]

    def _success(self, cells: Sequence[ConfigurationLoad]) -> Array:
        """Return the probability [cells] that the deployment succeeds and meets the bounds that are not simulated."""
        return self._feasibility.probabilities([candidate for candidate, _ in cells])


def is_feasible(point: Point, problem: Problem) -> bool:
    """Return whether a measurement meets all bounds and was made on a machine of comparable speed."""
    return is_comparable(point.measurement) and problem.sla.is_met(point.measurement)
