"""The posterior of throughput and latency of every configuration, for one model of the server."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from objectives.arrays import FloatArray
from optimizer.config.search_space import Problem
from optimizer.core.trial import Candidate, Point, Trial
from optimizer.search.acquisition import (
    Posterior,
    confirmed_value,
    expected_improvement,
    probability_within_bounds,
)
from optimizer.search.correction import THREADS, Correction, SourceResiduals, compute_residuals, features
from optimizer.search.transfer import SourceMachine
from optimizer.simulator.metrics import (
    ConfigurationLoad,
    Performance,
    ShareInTime,
    latency_bounds_s,
    log_loads,
    log_simulated,
    with_tails,
)
from optimizer.simulator.performance_model import PerformanceModel
from optimizer.simulator.speed_correction import SpeedCorrection, is_comparable


@dataclass(frozen=True)
class SearchState:
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
class Achieved:
    """The objective value that the feasible measurements so far achieve, under one component of a posterior.

    The objective value is the throughput, or the goodput.

    Attributes:
        value: Log of the objective value with which a confirmation is expected to end. The highest measured one is
            biased by noise, and its configuration may miss the bound on another server.
        log_values: Expected log of the objective value of each candidate at its best feasible load.
    """

    value: float
    log_values: Mapping[Candidate, float]

    @classmethod
    def of(cls, cells: Sequence[ConfigurationLoad], posterior: Posterior, bounds_s: FloatArray) -> Achieved:
        """Return the objective values that the measured ``cells``, which met the bounds, achieve."""
        values: dict[Candidate, float] = {}
        for (candidate, _), value in zip(cells, posterior.log_values.tolist(), strict=True):
            values[candidate] = max(value, values.get(candidate, -math.inf))
        return cls(confirmed_value(posterior, bounds_s), values)

    def improvements(
        self, cells: Sequence[ConfigurationLoad], posterior: Posterior, bounds_s: FloatArray
    ) -> FloatArray:
        """Return the expected gain in log throughput, or log goodput, [cells] of a measurement.

        The confirmation tests a candidate that met the bounds anyway. So it is of use to measure it again only at a
        load with a higher objective value, and the errors of the prediction are the same at both loads.
        """
        own = np.array([self.log_values.get(candidate, -math.inf) for candidate, _ in cells])
        higher = np.maximum(0.0, posterior.log_values - np.maximum(own, self.value))
        again = probability_within_bounds(posterior, bounds_s) * higher
        return np.where(np.isinf(own), expected_improvement(posterior, bounds_s, self.value), again)


class SimulatedPosterior:
    """The posterior of throughput and latencies for one model of the server. Its predictions are cached.

    It is a mixture with one component for each similarity of the source machine, if there is one.
    """

    def __init__(self, state: SearchState, measured: Sequence[Point], model: PerformanceModel) -> None:
        """Fit the correction of ``model``'s predictions to ``measured``, points that are complete."""
        self._problem, self._latencies = state.problem, state.latencies
        self._bounds_s = latency_bounds_s(state.problem, state.latencies)
        self._share = ShareInTime.of(state.problem, state.latencies)
        self._model = model
        self._cache: dict[ConfigurationLoad, tuple[Performance, list[float]]] = {}  # with the features
        self._inputs: list[tuple[Sequence[ConfigurationLoad], FloatArray]] = []
        learned = compute_residuals(model, measured, self._problem, self._latencies, state.speed)
        self._longer_tail = learned.longer_tail
        self._transfer_prior = state.source.prior(measured) if state.source else None
        source = None
        if state.source and self._transfer_prior:
            expected = self._transfer_prior(learned.cells)
            source = SourceResiduals(state.source.correction, expected)
        self.correction = Correction(learned.residuals, model.errors, source)
        feasible = [i for i, point in enumerate(measured) if is_feasible(point, self._problem)]
        places = list({learned.cells[i]: i for i in feasible}.values())
        cells, loads = [learned.cells[i] for i in places], self._log_loads(learned.cells)
        simulated = learned.simulated + self._longer_tail
        self._achieved = [
            Achieved.of(
                cells,
                Posterior((mean + simulated)[places], deviation[places], loads[places], self._share),
                self._bounds_s,
            )
            for mean, deviation in self.correction.predict(
                learned.residuals.inputs, source.expected if source else None
            )
            if cells
        ]

    def with_running(self, running: Sequence[ConfigurationLoad]) -> SimulatedPosterior:
        """Return the posterior as if ``running`` had been measured with their predictions."""
        other, inputs = copy.copy(self), self._simulate(running)[1]
        other.correction = self.correction.with_fantasies(inputs)
        posteriors = self.posteriors(running)
        feasible = (posteriors[self.likeliest].log_latencies <= np.log(self._bounds_s)).all(axis=1)
        if feasible.any():
            achieved = self._achieved or [Achieved(-math.inf, {})] * len(posteriors)
            other._achieved = [
                Achieved(max(before.value, float(max(posterior.log_values[feasible]))), before.log_values)
                for before, posterior in zip(achieved, posteriors, strict=True)
            ]
        return other

    def simulated(self, cells: Sequence[ConfigurationLoad]) -> FloatArray:
        """Return predicted log throughput and log latencies [cells, 1 + latencies], without correction or cache."""
        return self._log_metrics(self._model.simulate(cells, THREADS))

    def improvements(self, cells: Sequence[ConfigurationLoad]) -> FloatArray:
        """Return the acquisition function [cells] without the probability of other failures; see ``Surrogate``."""
        posteriors = self.posteriors(cells)
        if self._achieved:
            return self._average(
                achieved.improvements(cells, posterior, self._bounds_s)
                for posterior, achieved in zip(posteriors, self._achieved, strict=True)
            )
        return self._average(
            probability_within_bounds(posterior, self._bounds_s) * np.exp(posterior.log_values)
            for posterior in posteriors
        )

    def probability_within_bounds(self, cells: Sequence[ConfigurationLoad]) -> FloatArray:
        """Return the probability [cells] that all latency bounds are met."""
        return self._average(
            probability_within_bounds(posterior, self._bounds_s) for posterior in self.posteriors(cells)
        )

    @property
    def log_likelihood(self) -> float:
        """The log likelihood of the measurements."""
        return self.correction.log_likelihood

    @property
    def likeliest(self) -> int:
        """The index of the most probable component."""
        return int(np.argmax(self.correction.probabilities))

    def posteriors(self, cells: Sequence[ConfigurationLoad]) -> list[Posterior]:
        """Return one posterior for each component of the correction."""
        simulated, inputs = self._simulate(cells)
        loads = self._log_loads(cells)
        expected = self._transfer_prior(cells) if self._transfer_prior else None
        return [
            Posterior(mean + simulated, deviation, loads, self._share)
            for mean, deviation in self.correction.predict(inputs, expected)
        ]

    def samples(self, cells: Sequence[ConfigurationLoad], count: int, rng: np.random.Generator) -> FloatArray:
        """Return ``count`` joint samples [count, cells, 1 + latencies] of log throughput and log latencies."""
        simulated, inputs = self._simulate(cells)
        sampled = simulated + self.correction.samples(inputs, count, rng)
        sampled[..., 1:] += self._log_loads(cells)[:, None] - sampled[..., :1]
        return sampled

    def _average(self, values: Iterable[FloatArray]) -> FloatArray:
        """Return the mean over the components of the posterior."""
        return np.asarray(sum(p * value for p, value in zip(self.correction.probabilities, values, strict=True)))

    def _log_loads(self, cells: Sequence[ConfigurationLoad]) -> FloatArray:
        return log_loads(cells, self._problem.space.request_batch_size)

    def _simulate(self, cells: Sequence[ConfigurationLoad]) -> tuple[FloatArray, FloatArray]:
        """Return log throughput and log tail ratios [cells, 1 + latencies] by the model, and the features.

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
        metrics = self._log_metrics([result for result, _ in cached])
        return with_tails(metrics, cells, self._problem.space.request_batch_size) + self._longer_tail, inputs

    def _log_metrics(self, results: Sequence[Performance]) -> FloatArray:
        logs = [log_simulated(result, *self._latencies) for result in results]
        return np.array(logs).reshape(-1, 1 + len(self._latencies))


def is_feasible(point: Point, problem: Problem) -> bool:
    """Return whether a measurement meets all bounds and was made on a machine of comparable speed."""
    return is_comparable(point.measurement) and problem.sla.is_met(point.measurement)
