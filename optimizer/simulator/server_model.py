"""A model of a measured server: the simulator with fitted service times, overheads and jitter."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from objectives.metrics import Measurement
from optimizer.config.search_space import Problem
from optimizer.core.trial import Point
from optimizer.simulator.calibration import Observation, observe_point
from optimizer.simulator.fitted_parameters import (
    FITTED_POINTS,
    SMALLEST_S,
    USUAL_GAP_S,
    ExecutionSettings,
    FittedOverheads,
    estimate_network_s,
    execution_settings,
    fit_overheads,
    fit_service_times,
    longest_gap_s,
)
from optimizer.simulator.metrics import ConfigurationLoad, log_measured, log_simulated, simulated_measurement
from optimizer.simulator.scenario import (
    Array,
    ClosedLoopLoad,
    MeasurementInterval,
    Scenario,
    ServiceTimes,
    SimulationResult,
)
from optimizer.simulator.service_time_samples import sample_service_times
from optimizer.simulator.simulate import exponential_gaps, lognormal_jitter, simulate_many, trace

# how many requests a simulation measures, by concurrency: enough batches for a small statistical error
INTERVALS = (
    (24, MeasurementInterval(warm_up_requests=150, requests=700)),
    (80, MeasurementInterval(warm_up_requests=300, requests=2400)),
    (math.inf, MeasurementInterval()),
)


@dataclass(frozen=True, eq=False)
class ServerModel:
    """The parameters of a simulated server, which refuses no request, because a measurement with a failure is void.

    ``times`` returns the service times of an execution setting. ``error`` is the expected relative error of the
    simulated throughput.
    """

    times: Callable[[ExecutionSettings], ServiceTimes]
    request_batch_size: int
    overheads: FittedOverheads
    seed: int = 0
    error: float = 0.1
    fixed_shapes: bool = True

    def simulate(self, cells: Sequence[ConfigurationLoad], threads: int = 1) -> list[SimulationResult]:
        """Return the simulated performance of each (candidate, concurrency)."""
        scenarios = self._scenarios(cells)
        jitter, gaps_s = self._random_rings()
        results: dict[int, SimulationResult] = {}
        above = 0.0
        for up_to, interval in INTERVALS:
            chosen = [i for i, (_, load) in enumerate(cells) if above < load <= up_to]
            simulated = simulate_many(
                [scenarios[i] for i in chosen], jitter=jitter, gaps_s=gaps_s, window=interval, threads=threads
            )
            results.update(zip(chosen, simulated, strict=True))
            above = up_to
        return [results[i] for i in range(len(cells))]

    def measure(self, cells: Sequence[ConfigurationLoad]) -> list[Measurement]:
        """Return what a load generator and the server's statistics would report of each (candidate, concurrency)."""
        jitter, gaps_s = self._random_rings()
        traces = [trace(scenario, jitter=jitter, gaps_s=gaps_s) for scenario in self._scenarios(cells)]
        return [
            simulated_measurement(result, executions, self.overheads.network_s)
            for result, executions in zip(self.simulate(cells), traces, strict=True)
        ]

    def _random_rings(self) -> tuple[Array, Array]:
        return (
            lognormal_jitter(self.overheads.jitter, self.seed),
            exponential_gaps(self.overheads.gap_s, self.seed),
        )

    def _scenarios(self, cells: Sequence[ConfigurationLoad]) -> list[Scenario]:
        times = {group: self.times(group) for group in {execution_settings(candidate) for candidate, _ in cells}}
        overheads = self.overheads.to_overheads()
        return [
            Scenario(
                candidate,
                ClosedLoopLoad(load),
                times[execution_settings(candidate)],
                overheads,
                self.request_batch_size,
                self.fixed_shapes,
                refuses=False,
            )
            for candidate, load in cells
        ]


def fit(points: Sequence[Point], problem: Problem, latency: str, seed: int = 0) -> ServerModel:
    """Return the server model that is closest to the measured ``points``.

    It is fitted to the server's own statistics where these were measured, otherwise to throughput and latency alone.

    Args:
        points: Complete measured points.
        problem: The search problem, which defines the request batch size.
        latency: The latency metric whose tail is fitted.
        seed: Seed of the simulation's random numbers.

    Raises:
        ValueError: ``points`` is empty.
    """
    if not points:
        raise ValueError("no measured points to fit the simulator to")
    groups = _observations(points, problem)
    network_s = estimate_network_s([point for point in points if observe_point(point)])
    if network_s is None:
        return fit_without_statistics(points, problem, latency, seed)
    times = functools.cache(fit_service_times(groups, problem, largest_batch(points, problem)).times)
    model = ServerModel(
        times, problem.space.request_batch_size, FittedOverheads(network_s), seed, fixed_shapes=problem.fixed_shapes
    )
    overheads = fit_overheads(
        lambda trial, cells: replace(model, overheads=trial).simulate(cells), model.overheads, points, latency
    )
    return replace(model, overheads=overheads)


def sample_models(model: ServerModel, points: Sequence[Point], problem: Problem, count: int) -> list[ServerModel]:
    """Return ``count`` server models that differ from ``model`` in their service times.

    ``model`` was fitted to ``points``. The service times are samples of their posterior; without the server's
    statistics there are no samples.
    """
    groups = _observations(points, problem)
    if not groups:
        return []
    samples = sample_service_times(groups, problem, largest_batch(points, problem), count, model.seed)
    return [replace(model, times=functools.cache(sample.times)) for sample in samples]


def _observations(points: Sequence[Point], problem: Problem) -> dict[ExecutionSettings, list[Observation]]:
    """Return the server's statistics at ``points`` by execution settings."""
    groups: dict[ExecutionSettings, list[Observation]] = {}
    for point in points:
        if (seen := observe_point(point)) is not None:
            groups.setdefault(execution_settings(problem.space.canonical(point.candidate)), []).append(seen)
    return groups


def largest_batch(points: Sequence[Point], problem: Problem) -> int:
    """Return the samples of the largest batch that the space or ``points`` can form, limited by the load."""
    batch = problem.space.request_batch_size
    size = max(*problem.space.max_batch_size, *(point.candidate.max_batch_size for point in points))
    load = max(problem.max_concurrency, *(point.load.concurrency for point in points))
    return batch * max(1, min(size // batch, load))


EVALUATIONS = 120
ERROR = 0.2  # error of the throughput: twice that of a model with known service times
CONTENTION, JITTER = 0.5, 0.2  # prior medians
ROBUST = 0.3  # log ratios beyond it count linearly: one noisy measurement must not distort the fit


def fit_without_statistics(points: Sequence[Point], problem: Problem, latency: str, seed: int) -> ServerModel:
    """Return the model of five parameters that is closest in throughput and latency (Nelder-Mead, robust loss)."""
    from scipy.optimize import minimize

    used = list(points)[-FITTED_POINTS:]
    largest = largest_batch(points, problem)
    gap = min(USUAL_GAP_S, longest_gap_s(points))
    cells = [(point.candidate, point.load.concurrency) for point in used]
    measured = np.array([log_measured(point, latency) for point in used])
    start = _start(used, latency)

    def misfit(vector: Array) -> float:
        model = _to_model(vector, problem, largest, gap, seed)
        simulated = np.array([log_simulated(result, latency) for result in model.simulate(cells)])
        errors = np.abs(simulated - measured)
        losses = np.where(errors < ROBUST, errors**2, 2 * ROBUST * errors - ROBUST**2)
        return float(losses.sum()) + _prior_penalty(vector)

    simplex = np.vstack([start, start + 0.7 * np.eye(len(start))])
    options = {"maxfev": EVALUATIONS, "initial_simplex": simplex, "xatol": 0.02, "fatol": 1e-4}
    vector = minimize(misfit, start, method="Nelder-Mead", options=options).x
    return _to_model(vector, problem, largest, gap, seed)


def _to_model(vector: Array, problem: Problem, largest: int, gap: float, seed: int) -> ServerModel:
    """Return the model of the logarithms of (fixed_s, per_sample_s, contention, network_s, jitter).

    A batch of b samples takes ``fixed_s + per_sample_s * b``; each further busy instance adds ``contention`` of it.
    """
    low = np.log([SMALLEST_S, 1e-9, 1e-3, SMALLEST_S, 0.01])
    high = np.log([10.0, 1.0, 3.0, 1.0, 1.0])
    fixed_s, per_sample_s, contention, network_s, jitter = np.exp(np.clip(vector, low, high)).tolist()
    batch = problem.space.request_batch_size
    uncontended = fixed_s + per_sample_s * np.arange(batch, largest + batch, batch, dtype=np.float64)

    def times(settings: ExecutionSettings) -> ServiceTimes:
        return ServiceTimes(np.outer(uncontended, 1 + contention * np.arange(settings[0])), step=batch)

    overheads = FittedOverheads(network_s, gap_s=gap, jitter=jitter)
    return ServerModel(times, batch, overheads, seed, ERROR, problem.fixed_shapes)


def _prior_penalty(vector: Array) -> float:
    """Return the penalty of a weak prior on contention and jitter, which few points determine."""
    contention, jitter = float(vector[2]), float(vector[4])
    return 0.02 * (contention - math.log(CONTENTION)) ** 2 + 0.02 * (jitter - math.log(JITTER)) ** 2


def _start(points: Sequence[Point], latency: str) -> Array:
    """Return the initial vector, from the shortest latency and the highest throughput."""
    samples_per_s = max(math.exp(log_measured(point, latency)[0]) for point in points)
    single_s = min(math.exp(log_measured(point, latency)[1]) / point.load.concurrency for point in points)
    return np.log([single_s / 2, 0.7 / samples_per_s, CONTENTION, single_s / 4 + SMALLEST_S, JITTER])
