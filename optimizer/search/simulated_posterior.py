"""The posterior of throughput and latency of every configuration, for one model of the server."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from objectives.arrays import FloatArray
from optimizer.config.problem import Problem
from optimizer.core.candidate import Candidate
from optimizer.core.trial import Point, Trial
from optimizer.search.acquisition import (
    Posterior,
    expected_improvement,
    expected_incumbent,
    probability_within_bounds,
)
from optimizer.search.simulation_error import (
    SimulationErrorModel,
    SimulationResiduals,
    SourceResiduals,
    compute_residuals,
    features,
)
from optimizer.search.transfer import SourceMachine
from optimizer.simulator.compilation import SIMULATION_THREADS
from optimizer.simulator.performance_model import PerformanceModel
from optimizer.simulator.predicted_metrics import (
    ConfigurationLoad,
    Performance,
    ShareWithinBounds,
    as_tail_ratios,
    latency_bounds_s,
    log_loads,
    log_predictions,
)
from optimizer.simulator.speed_correction import SpeedCorrection, is_comparable


@dataclass(frozen=True)
class SurrogateInputs:
    """The inputs of a surrogate other than the measured points.

    ``latencies`` are the predicted latency metrics, see ``predicted_latencies``; ``speed`` is the correction that was
    applied to the points.
    """

    problem: Problem
    trials: Sequence[Trial]
    latencies: tuple[str, ...]
    seed: int
    source: SourceMachine | None
    speed: SpeedCorrection


@dataclass(frozen=True, eq=False)
class Incumbent:
    """The best objective value of the feasible measurements so far, under one component of a posterior.

    The objective value is the throughput, or the goodput.

    Attributes:
        value: Log of the objective value with which a confirmation is expected to end. The highest measured one is
            biased by noise, and its configuration may miss the bound on another server.
        log_values: Expected log of the objective value of each candidate at its best feasible load.
    """

    value: float
    log_values: Mapping[Candidate, float]

    @classmethod
    def from_measured(
        cls, loads: Sequence[ConfigurationLoad], posterior: Posterior, bounds_s: FloatArray
    ) -> Incumbent:
        """Return the incumbent among the measured ``loads``, which met the bounds."""
        values: dict[Candidate, float] = {}
        for (candidate, _), value in zip(loads, posterior.log_values.tolist(), strict=True):
            values[candidate] = max(value, values.get(candidate, -math.inf))
        return cls(expected_incumbent(posterior, bounds_s), values)

    def improvements(
        self, loads: Sequence[ConfigurationLoad], posterior: Posterior, bounds_s: FloatArray
    ) -> FloatArray:
        """Return the expected gain in log throughput, or log goodput, [loads] of a measurement.

        The confirmation tests a candidate that met the bounds anyway. So it is of use to measure it again only at a
        load with a higher objective value, and the errors of the prediction are the same at both loads.
        """
        best_values = np.array([self.log_values.get(candidate, -math.inf) for candidate, _ in loads])
        higher = np.maximum(0.0, posterior.log_values - np.maximum(best_values, self.value))
        again = probability_within_bounds(posterior, bounds_s) * higher
        return np.where(np.isinf(best_values), expected_improvement(posterior, bounds_s, self.value), again)


class SimulatedPosterior:
    """The posterior of throughput and latencies for one model of the server. Its predictions are cached.

    It is a mixture with one component for each similarity of the source machine, if there is one.
    """

    def __init__(self, inputs: SurrogateInputs, measured: Sequence[Point], model: PerformanceModel) -> None:
        """Fit the error model of ``model``'s predictions to ``measured``, points that are complete."""
        self._problem, self._latencies = inputs.problem, inputs.latencies
        self._bounds_s = latency_bounds_s(inputs.problem, inputs.latencies)
        self._share_within_bounds = ShareWithinBounds.from_problem(inputs.problem, inputs.latencies)
        self._model = model
        self._cache: dict[ConfigurationLoad, tuple[Performance, list[float]]] = {}  # results and their features
        self._feature_rows: list[tuple[Sequence[ConfigurationLoad], FloatArray]] = []  # of each list of loads
        errors = compute_residuals(model, measured, self._problem, self._latencies, inputs.speed)
        self._longer_tail = errors.longer_tail
        self._transfer_prior = inputs.source.prior(measured) if inputs.source else None
        source = None
        if inputs.source and self._transfer_prior:
            expected = self._transfer_prior(errors.loads)
            source = SourceResiduals(inputs.source.error_model, expected)
        self.error_model = SimulationErrorModel(errors.residuals, model.errors, source)
        feasible = [index for index, point in enumerate(measured) if is_feasible(point, self._problem)]
        self._incumbents = self._find_incumbents(errors, feasible, source.expected if source else None)

    def _find_incumbents(
        self, errors: SimulationResiduals, feasible: Sequence[int], expected: FloatArray | None
    ) -> list[Incumbent]:
        """Return the incumbent of each component; none if no point is feasible.

        ``feasible`` are the indices of the feasible points. ``expected`` is as in ``SourceResiduals``.
        """
        if not feasible:
            return []
        indices = list({errors.loads[index]: index for index in feasible}.values())  # each load once
        loads = [errors.loads[index] for index in indices]
        simulated, in_flight = (errors.simulated + self._longer_tail)[indices], self._log_loads(loads)
        incumbents = []
        for mean, std in self.error_model.predict(errors.residuals.inputs, expected):
            posterior = Posterior(mean[indices] + simulated, std[indices], in_flight, self._share_within_bounds)
            incumbents.append(Incumbent.from_measured(loads, posterior, self._bounds_s))
        return incumbents

    def with_running(self, running: Sequence[ConfigurationLoad]) -> SimulatedPosterior:
        """Return the posterior as if ``running`` had been measured with their predictions."""
        other, rows = copy.copy(self), self._simulate(running)[1]
        other.error_model = self.error_model.with_fantasies(rows)
        posteriors = self.posteriors(running)
        feasible = (posteriors[self.likeliest].log_latencies <= np.log(self._bounds_s)).all(axis=1)
        if feasible.any():
            incumbents = self._incumbents or [Incumbent(-math.inf, {})] * len(posteriors)
            other._incumbents = [
                Incumbent(max(before.value, float(max(posterior.log_values[feasible]))), before.log_values)
                for before, posterior in zip(incumbents, posteriors, strict=True)
            ]
        return other

    def simulated(self, loads: Sequence[ConfigurationLoad]) -> FloatArray:
        """Return predicted log throughput and log latencies [loads, 1 + latencies], without correction or cache."""
        return log_predictions(self._model.simulate(loads, SIMULATION_THREADS), self._latencies)

    def improvements(self, loads: Sequence[ConfigurationLoad]) -> FloatArray:
        """Return the acquisition function [loads] without the probability of other failures; see ``Surrogate``."""
        posteriors = self.posteriors(loads)
        if self._incumbents:
            return self._average(
                incumbent.improvements(loads, posterior, self._bounds_s)
                for posterior, incumbent in zip(posteriors, self._incumbents, strict=True)
            )
        return self._average(
            probability_within_bounds(posterior, self._bounds_s) * np.exp(posterior.log_values)
            for posterior in posteriors
        )

    def probability_within_bounds(self, loads: Sequence[ConfigurationLoad]) -> FloatArray:
        """Return the probability [loads] that all latency bounds are met."""
        return self._average(
            probability_within_bounds(posterior, self._bounds_s) for posterior in self.posteriors(loads)
        )

    @property
    def log_likelihood(self) -> float:
        """The log likelihood of the measurements."""
        return self.error_model.log_likelihood

    @property
    def likeliest(self) -> int:
        """The index of the most probable component."""
        return int(np.argmax(self.error_model.probabilities))

    def posteriors(self, loads: Sequence[ConfigurationLoad]) -> list[Posterior]:
        """Return one posterior for each component of the error model."""
        simulated, rows = self._simulate(loads)
        in_flight = self._log_loads(loads)
        expected = self._transfer_prior(loads) if self._transfer_prior else None
        return [
            Posterior(mean + simulated, std, in_flight, self._share_within_bounds)
            for mean, std in self.error_model.predict(rows, expected)
        ]

    def samples(self, loads: Sequence[ConfigurationLoad], count: int, rng: np.random.Generator) -> FloatArray:
        """Return ``count`` joint samples [count, loads, 1 + latencies] of log throughput and log latencies."""
        simulated, rows = self._simulate(loads)
        sampled = simulated + self.error_model.samples(rows, count, rng)
        sampled[..., 1:] += self._log_loads(loads)[:, None] - sampled[..., :1]
        return sampled

    def _average(self, values: Iterable[FloatArray]) -> FloatArray:
        """Return the mean over the components of the posterior."""
        return np.asarray(sum(p * value for p, value in zip(self.error_model.probabilities, values, strict=True)))

    def _log_loads(self, loads: Sequence[ConfigurationLoad]) -> FloatArray:
        return log_loads(loads, self._problem.space.request_batch_size)

    def _simulate(self, loads: Sequence[ConfigurationLoad]) -> tuple[FloatArray, FloatArray]:
        """Return log throughput and log tail ratios [loads, 1 + latencies] by the model, and the features.

        Each load is simulated once. The same list gives the same array, by which predictions are cached.
        """
        new = [load for load in dict.fromkeys(loads) if load not in self._cache]
        for load, result in zip(new, self._model.simulate(new, SIMULATION_THREADS), strict=True):
            self._cache[load] = result, features(self._problem.space, *load, result)
        cached = [self._cache[load] for load in loads]
        rows = next((array for cached_loads, array in self._feature_rows if cached_loads is loads), None)
        if rows is None:
            rows = np.array([features for _, features in cached])
            self._feature_rows.append((loads, rows))
        metrics = log_predictions([result for result, _ in cached], self._latencies)
        return as_tail_ratios(metrics, loads, self._problem.space.request_batch_size) + self._longer_tail, rows


def is_feasible(point: Point, problem: Problem) -> bool:
    """Return whether a measurement meets all bounds and was made on a machine of comparable speed."""
    return is_comparable(point.measurement) and problem.sla.is_met(point.measurement)
