"""Warm start: the study of another machine (the source), and the residuals to expect on this one."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TypeAlias

import numpy as np

from objectives.arrays import FloatArray
from objectives.metrics import Measurement
from optimizer.config.problem import Problem
from optimizer.core.candidate import Candidate
from optimizer.core.trial import Point, Trial, latest_points
from optimizer.search.optuna_encoding import TrialScore, score_trial
from optimizer.search.simulation_error import SimulationErrorModel, compute_residuals
from optimizer.simulator.compilation import SIMULATION_THREADS
from optimizer.simulator.performance_model import PerformanceModel, fit_simulator
from optimizer.simulator.predicted_metrics import (
    ConfigurationLoad,
    as_tail_ratios,
    configuration_loads,
    is_complete,
    log_predictions,
    with_concurrency,
)
from optimizer.simulator.speed_correction import NO_CORRECTION, fit_speed_correction

# Returns the residuals [loads, 1 + latencies] to expect on this machine if both machines are alike.
TransferPrior: TypeAlias = Callable[[Sequence[ConfigurationLoad]], FloatArray]
MAX_POINTS = 160  # limit for the source's points: the time of a decision grows with their square


@dataclass(frozen=True)
class TransferredStudy:
    """The trials of the same model on another machine with ``cpu_count`` cores (None: unknown).

    Their candidates are written as in the space of this study. They are not trials of the study that uses them.
    """

    trials: tuple[Trial, ...]
    cpu_count: int | None = None

    def best(self, problem: Problem) -> list[Candidate]:
        """Return its candidates that are in the space, those that meet the bounds first, each group best first."""
        ranked: list[tuple[bool, float, Candidate]] = []
        for trial in self.trials:
            score = score_trial(trial, problem)
            if isinstance(score, TrialScore) and problem.space.parameter_values(trial.candidate) is not None:
                violation = max(score.constraints.values(), default=0.0)
                value = score.values[0] if problem.objectives[0].better == "lower" else -score.values[0]
                ranked.append((violation > 0, violation if violation > 0 else value, trial.candidate))
        return list(dict.fromkeys(candidate for *_, candidate in sorted(ranked, key=lambda entry: entry[:2])))

    def machine(self, problem: Problem, latencies: tuple[str, ...], seed: int) -> SourceMachine | None:
        """Return a model of the machine, or None if it has no complete measurement."""
        source_problem = replace(problem, cpu_count=self.cpu_count)
        points = fit_speed_correction(self.trials, source_problem).correct_points(latest_points(self.trials))
        if any(not point.load.concurrency for point in points):
            points = with_concurrency(points, problem)
        points = [point for point in points if is_complete(point, *latencies)]
        points = random.Random(seed).sample(points, min(len(points), MAX_POINTS))
        return SourceMachine(points, source_problem, latencies, seed) if points else None


class SourceMachine:
    """The other machine, simulated with all its measurements, so that any candidate and load can be predicted.

    ``error_model`` has learned the errors of that simulation.
    """

    def __init__(self, points: Sequence[Point], problem: Problem, latencies: tuple[str, ...], seed: int) -> None:
        self._problem, self._latencies, self._seed = problem, latencies, seed
        self._model = fit_simulator(points, problem, latencies[0], seed)
        residuals = compute_residuals(self._model, points, problem, latencies, NO_CORRECTION).residuals
        self.error_model = SimulationErrorModel(residuals, self._model.errors)
        self._cache: dict[ConfigurationLoad, FloatArray] = {}

    def prior(self, measured: Sequence[Point]) -> TransferPrior:
        """Return the prior after ``measured`` points on this machine.

        It is the error of a second model of the source, fitted to simulated measurements at the same points only.
        """
        measurements = self._model.measure(configuration_loads(measured, self._problem.space))
        points = [
            replace(point, measurement=simulated) for point, simulated in zip(measured, measurements, strict=True)
        ]
        if not any(point.measurement.compute_infer_ms for point in measured):
            points = [replace(point, measurement=_without_server_statistics(point.measurement)) for point in points]
        reduced = fit_simulator(points, self._problem, self._latencies[0], self._seed)
        return lambda loads: self._simulate(loads) - self._simulate_with(reduced, loads)

    def _simulate(self, loads: Sequence[ConfigurationLoad]) -> FloatArray:
        """Return log throughput and log tail ratios [loads, 1 + latencies]. Cached per load."""
        missing = [load for load in dict.fromkeys(loads) if load not in self._cache]
        self._cache.update(zip(missing, self._simulate_with(self._model, missing), strict=True))
        return np.array([self._cache[load] for load in loads]).reshape(-1, 1 + len(self._latencies))

    def _simulate_with(self, model: PerformanceModel, loads: Sequence[ConfigurationLoad]) -> FloatArray:
        """Return log throughput and log tail ratios [loads, 1 + latencies] according to ``model``."""
        metrics = log_predictions(model.simulate(loads, SIMULATION_THREADS), self._latencies)
        return as_tail_ratios(metrics, loads, self._problem.space.request_batch_size)


def _without_server_statistics(measurement: Measurement) -> Measurement:
    return replace(measurement, queue_ms=None, compute_infer_ms=None, batch_stats="")
