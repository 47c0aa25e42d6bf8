"""The surrogate of the search: the posterior of every configuration, averaged over samples of the server model."""

from __future__ import annotations

import copy
import functools
import math
from collections import Counter
from collections.abc import Sequence

import numpy as np

from objectives.arrays import FloatArray
from objectives.metrics import Measurement
from optimizer.core.trial import Point
from optimizer.search.acquisition import mixture_quantiles
from optimizer.search.feasibility import Feasibility
from optimizer.search.refusals import RefusalForecast
from optimizer.search.simulated_posterior import SimulatedPosterior, SurrogateInputs, is_feasible
from optimizer.simulator.performance_model import fit_model, sample_models
from optimizer.simulator.predicted_metrics import ConfigurationLoad, configuration_loads, latency_bounds_s

DRAWN_SAMPLES = 24  # samples of the server model
SAMPLES = 8  # samples that are resampled from them by their probability; the forecasts are made with these
TEMPER = 0.5  # exponent of the likelihood by which samples are resampled


class Surrogate:
    """The posterior of throughput and latencies after some measurements.

    It is a mixture over samples of the server model. ``simulated`` and ``forecast`` use only the server model that
    is closest to the measurements.
    """

    def __init__(self, inputs: SurrogateInputs, measured: Sequence[Point]) -> None:
        """Fit the simulation and its error model to ``measured``, points that are complete."""
        self._inputs, self._measured = inputs, measured
        self.bounds_s = latency_bounds_s(inputs.problem, inputs.latencies)
        self.has_feasible = any(is_feasible(point, inputs.problem) for point in measured)
        self._model = fit_model(measured, inputs.problem, inputs.latencies, inputs.seed)
        self._best_fit = SimulatedPosterior(inputs, measured, self._model)
        sla = inputs.problem.sla
        bounds = sla.without(*(constraint.metric for constraint in sla.latencies), "throughput")
        self._feasibility = Feasibility(inputs.trials, inputs.problem.space, bounds)
        self.refusals = RefusalForecast(self._model, measured, inputs.problem)

    def missing_trials(self, inputs: SurrogateInputs) -> float:
        """Return how many trials of ``inputs`` this surrogate lacks; infinity if it was fitted to others."""
        fitted = {(trial.number, trial.candidate) for trial in self._inputs.trials}
        current = {(trial.number, trial.candidate) for trial in inputs.trials}
        if inputs.latencies != self._inputs.latencies or not fitted <= current:
            return math.inf
        return len(current) - len(fitted)

    def missing_loads(self, measured: Sequence[Point]) -> list[ConfigurationLoad]:
        """Return the candidates and loads of ``measured`` that this surrogate was not fitted to."""
        fitted = {(point.trial, point.candidate) for point in self._measured}
        missing = [point for point in measured if (point.trial, point.candidate) not in fitted]
        return configuration_loads(missing, self._inputs.problem.space)

    def with_running(self, running: Sequence[ConfigurationLoad]) -> Surrogate:
        """Return the surrogate as if ``running`` had been measured with their predictions.

        So candidates that are similar to running ones have a lower expected improvement.
        """
        if not running:
            return self
        surrogate = copy.copy(self)
        surrogate.weighted_posteriors = [
            (weight, posterior.with_running(running)) for weight, posterior in self.weighted_posteriors
        ]
        return surrogate

    @property
    def model_name(self) -> str:
        """The name of the kind of the server model."""
        return self._model.name

    @property
    def latencies(self) -> tuple[str, ...]:
        """The predicted latency metrics, the binding one first."""
        return self._inputs.latencies

    @property
    def latency(self) -> str:
        """The binding latency metric, whose forecasts are shown."""
        return self.latencies[0]

    @property
    def measured(self) -> Sequence[Point]:
        """The points that it was fitted to."""
        return self._measured

    @property
    def noise_scale(self) -> float:
        """The estimated noise of measurements relative to the prior."""
        return self._best_fit.error_model.noise_scale

    def after_first(self, deployments: int) -> Surrogate:
        """Return the surrogate after the first ``deployments``, which does not change with further ones."""
        first = sorted({point.trial for point in self._measured})[:deployments]
        return Surrogate(self._inputs, [point for point in self._measured if point.trial in first])

    def simulated(self, loads: Sequence[ConfigurationLoad]) -> FloatArray:
        """Return predicted log throughput and log latencies [loads, 1 + latencies], without correction or cache."""
        return self._best_fit.simulated(loads)

    def improvements(self, loads: Sequence[ConfigurationLoad], samples: int | None = None) -> FloatArray:
        """Return the acquisition function [loads], the mean over the first ``samples`` samples (None: over all).

        It is the expected gain in log throughput over the incumbent. While nothing is feasible, it is the
        expected throughput within the bounds, on a scale of its own.
        """
        if not loads:
            return np.zeros(0)
        weights, posteriors = zip(*self.weighted_posteriors[:samples], strict=True)
        improvements = [posterior.improvements(loads) for posterior in posteriors]
        return np.asarray(self._success_probabilities(loads) * np.average(improvements, axis=0, weights=weights))

    def forecast(self, loads: Sequence[ConfigurationLoad]) -> tuple[FloatArray, FloatArray]:
        """Return throughput (infer/s) and binding latency (s), each [loads], of the most probable component."""
        posterior = self._best_fit.posteriors(loads)[self._best_fit.likeliest]
        return np.exp(posterior.mean[:, 0]), np.exp(posterior.log_latencies[:, 0])

    def measurement_quantiles(
        self,
        loads: Sequence[ConfigurationLoad],
        levels: Sequence[float],
        speed_probe_ms: float | None = None,
        log_noise: tuple[float, float] | None = None,
    ) -> tuple[FloatArray, FloatArray]:
        """Return quantiles of measurements of throughput (infer/s) and binding latency (s), each [levels, loads].

        They include the noise of a deployment and of a measurement. ``speed_probe_ms`` is the speed probe of that
        deployment; None for the median speed of the run. ``log_noise`` are the standard deviations of the logarithms
        of throughput and of the ratio between binding and mean latency; None estimates them.
        """
        components = [component for _, model in self.weighted_posteriors for component in model.posteriors(loads)]
        weights = np.concatenate(
            [weight * np.array(model.error_model.probabilities) for weight, model in self.weighted_posteriors]
        )
        noise = np.concatenate([model.error_model.measurement_noise() for _, model in self.weighted_posteriors])
        if log_noise is not None:
            noise = np.broadcast_to(np.array(log_noise), (len(noise), 2))
        speed = self._inputs.speed
        slowness = speed.log_slowness(Measurement(speed_probe_ms=speed_probe_ms))
        # each [components, loads]: log throughput, and the log tail ratio of the binding latency
        throughput, tail = np.moveaxis(np.array([component.mean[:, :2] for component in components]), 2, 0)
        throughput_std, tail_std = np.moveaxis(np.array([component.std[:, :2] for component in components]), 2, 0)
        throughput = throughput - speed.slope * slowness
        throughput_std = np.sqrt(throughput_std**2 + noise[:, :1] ** 2 + (speed.error * slowness) ** 2)
        latency = tail - throughput + components[0].log_loads
        latency_std = np.sqrt(throughput_std**2 + tail_std**2 + noise[:, 1:2] ** 2)
        return (
            np.exp(mixture_quantiles(weights, throughput, throughput_std, levels)),
            np.exp(mixture_quantiles(weights, latency, latency_std, levels)),
        )

    def samples(self, loads: Sequence[ConfigurationLoad], for_each: int) -> FloatArray:
        """Return SAMPLES * ``for_each`` joint samples [samples, loads, 1 + latencies] of the posterior.

        They are log throughput and log latencies without the noise of measurements, and their mean is that of the
        posterior. ``for_each`` is even.
        """
        rng = np.random.default_rng(self._inputs.seed)
        return np.concatenate(
            [
                posterior.samples(loads, for_each * round(weight * SAMPLES), rng)
                for weight, posterior in self.weighted_posteriors
            ]
        )

    def probability_within_bounds(self, loads: Sequence[ConfigurationLoad]) -> FloatArray:
        """Return the probability [loads] that all latency bounds are met."""
        return np.asarray(
            sum(weight * posterior.probability_within_bounds(loads) for weight, posterior in self.weighted_posteriors)
        )

    @functools.cached_property
    def weighted_posteriors(self) -> list[tuple[float, SimulatedPosterior]]:
        """The probability and the posterior of each sample, the most probable one first.

        Samples of the server model are resampled by the likelihood of the measurements (systematic resampling,
        Kitagawa 1996). It is tempered, because the samples were conditioned on the same measurements or the server's
        statistics of them.

        There is only the closest model if another study was transferred, because its residuals are of one model.
        """
        inputs = self._inputs
        if inputs.source:
            return [(1.0, self._best_fit)]
        models = sample_models(self._model, self._measured, inputs.problem, inputs.latencies, DRAWN_SAMPLES)
        posteriors = [SimulatedPosterior(inputs, self._measured, model) for model in models]
        likelihoods = TEMPER * np.array([posterior.log_likelihood for posterior in posteriors])
        weights = np.cumsum(np.exp(likelihoods - likelihoods.max()))
        indices = np.searchsorted(weights / weights[-1], (np.arange(SAMPLES) + 0.5) / SAMPLES)
        return [(count / SAMPLES, posteriors[index]) for index, count in Counter(indices.tolist()).most_common()]

    def _success_probabilities(self, loads: Sequence[ConfigurationLoad]) -> FloatArray:
        """Return the probability [loads] that the deployment succeeds and meets the bounds that are not simulated."""
        succeeds = self._feasibility.probabilities([candidate for candidate, _ in loads])
        return succeeds * self.refusals.probabilities(loads, lambda: self.forecast(loads)[0])
