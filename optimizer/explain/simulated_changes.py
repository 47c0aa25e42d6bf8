"""Forecasts of changes to a configuration by the simulator of the dynamic batcher, fitted to a run."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

import numpy as np

from objectives.arrays import FloatArray
from objectives.metrics import LATENCY, METRICS
from objectives.sla import Sla
from optimizer.config.problem import Problem
from optimizer.core.candidate import Candidate
from optimizer.core.trial import Point, Trial
from optimizer.explain.bottleneck import StageBreakdown
from optimizer.explain.forecaster import (
    CandidateForecast,
    ChangeKind,
    Remedy,
    compute_gain,
    is_beyond_failures,
    median_errors,
)
from optimizer.results import configuration_text
from optimizer.results.outcome_values import OTHER_MODELS
from optimizer.simulator.compilation import SIMULATION_THREADS
from optimizer.simulator.performance_model import PerformanceModel, fit_simulator
from optimizer.simulator.predicted_metrics import (
    ConfigurationLoad,
    as_closed_loop,
    as_tail_ratios,
    binding_latency,
    configuration_loads,
    is_complete,
    log_loads,
    log_measurements,
    log_predictions,
)

LOADS, FINE_LOADS = 20, 12  # simulated concurrencies of each configuration, and around its best one
MAX_POINTS = 500  # points of other candidates to which the simulation is fitted
BATCH_FACTOR = 4  # largest forecast batches, relative to the largest max_batch_size of the space
FP16_FACTOR = 0.5  # assumed factor on inference time; a run of another precision cannot measure it
MAX_INSTANCES = 64  # limits the service times that are kept for each number of instances


class SimulatedForecaster:
    """Forecasts the throughput within the latency bounds, of ``subject`` and of other candidates.

    The model is fitted to ``latency``, the binding one. ``latencies`` are also the other bounded ones, which the same
    simulation has, unless a measurement lacks them.

    The simulation of a measured candidate is corrected by the median ratio of measured to simulated values. A
    candidate without measurements gets the correction of ``subject``, so that gains over it are ratios of two
    simulations. ``errors`` are those before this correction.
    """

    def __init__(self, measured: Sequence[Point], subject: Point, problem: Problem, seed: int = 0) -> None:
        """Fit to ``measured``, the search's points. Raises ValueError if none has a throughput and a latency."""
        self.latency = binding_latency(problem, measured)
        complete = [point for point in as_closed_loop(measured, problem) if is_complete(point, self.latency)]
        points = _thinned(complete, subject)
        bounded = [name for name in problem.sla.bounded_latencies if METRICS[name].timing is LATENCY]
        measured_names = [name for name in bounded if all(is_complete(point, name) for point in points)]
        self.latencies = tuple(dict.fromkeys([self.latency, *measured_names]))
        self.measurement_count = len(points)
        self._request_batch_size = problem.space.request_batch_size
        self._max_concurrency = max(problem.max_concurrency, *(point.load.concurrency for point in points))
        self._model = fit_simulator(points, _with_larger_batches(problem, subject.candidate), self.latency, seed)
        self.model_name = self._model.name
        loads = configuration_loads(points)
        simulated = log_predictions(self._model.simulate(loads, SIMULATION_THREADS), self.latencies)
        self.errors = median_errors(simulated, log_measurements(points, self.latencies))
        anchors = [point for point in as_closed_loop([subject], problem) if is_complete(point, *self.latencies)]
        others = [point for point in points if point.candidate != subject.candidate]
        self._corrections = self._median_residuals([*others, *anchors])
        no_correction = np.zeros(1 + len(self.latencies))
        self._default_correction = self._corrections.get(subject.candidate, no_correction)

    def best(
        self, candidates: Sequence[Candidate], sla: Sla, *, time_share: float = 1.0, network_share: float = 1.0
    ) -> CandidateForecast | None:
        """Return the best of ``candidates`` at its best load within the bounds; None if none meets them.

        ``time_share`` is a factor on the time of a batch, ``network_share`` on the time between client and server.
        """
        model = self._model.at_speed(time_share, network_share)
        concurrencies = np.geomspace(1, self._max_concurrency, LOADS)
        grid = list(dict.fromkeys(round(concurrency) for concurrency in concurrencies.tolist()))
        loads = [(candidate, concurrency) for candidate in candidates for concurrency in grid]
        best = self._best_within(model, loads, sla)
        if best is None:
            return None
        index = grid.index(best.concurrency)
        low, high = grid[max(index - 1, 0)], grid[min(index + 1, len(grid) - 1)]
        finer = dict.fromkeys(round(concurrency) for concurrency in np.linspace(low, high, FINE_LOADS).tolist())
        return self._best_within(model, [(best.candidate, concurrency) for concurrency in finer], sla)

    def lowest_latencies_ms(self, candidates: Sequence[Candidate]) -> Mapping[str, float]:
        """Return the lowest value of each latency of any of ``candidates``, with one request in flight."""
        forecasts = self._forecasts(self._model, [(candidate, 1) for candidate in candidates])
        return {name: min(forecast.latencies_ms[name] for forecast in forecasts) for name in self.latencies}

    def _best_within(
        self, model: PerformanceModel, loads: Sequence[ConfigurationLoad], sla: Sla
    ) -> CandidateForecast | None:
        """Return the forecast of ``loads`` with the most throughput within the bounds; None if none meets them."""
        bounds_ms = {name: sla.latency_bound_ms(name) for name in self.latencies}
        met = [
            forecast
            for forecast in self._forecasts(model, loads)
            if all(latency_ms <= bounds_ms[name] for name, latency_ms in forecast.latencies_ms.items())
        ]
        return max(met, key=lambda forecast: forecast.throughput_infer_per_sec, default=None)

    def _forecasts(self, model: PerformanceModel, loads: Sequence[ConfigurationLoad]) -> list[CandidateForecast]:
        """Return the simulation of each of ``loads`` by ``model``, corrected by the measurements."""
        corrections = [self._corrections.get(candidate, self._default_correction) for candidate, _ in loads]
        logs = self._simulate(model, loads) + np.array(corrections)
        log_means = log_loads(loads, self._request_batch_size) - logs[:, 0]
        latencies_ms = 1e3 * np.exp(logs[:, 1:] + log_means[:, None])
        return [
            CandidateForecast(
                candidate, load, float(math.exp(log_throughput)), dict(zip(self.latencies, row, strict=True))
            )
            for (candidate, load), log_throughput, row in zip(loads, logs[:, 0], latencies_ms.tolist(), strict=True)
        ]

    def _simulate(self, model: PerformanceModel, loads: Sequence[ConfigurationLoad]) -> FloatArray:
        """Return log throughput and log tail ratios [loads, 1 + latencies]."""
        logs = log_predictions(model.simulate(loads, SIMULATION_THREADS), self.latencies)
        return as_tail_ratios(logs, loads, self._request_batch_size)

    def _median_residuals(self, points: Sequence[Point]) -> dict[Candidate, FloatArray]:
        """Return the median of log(measured / simulated) [1 + latencies] of throughput and tail ratios."""
        if not points:
            return {}
        loads = configuration_loads(points)
        measured = as_tail_ratios(log_measurements(points, self.latencies), loads, self._request_batch_size)
        by_candidate: dict[Candidate, list[FloatArray]] = {}
        for (candidate, _), residual in zip(loads, measured - self._simulate(self._model, loads), strict=True):
            by_candidate.setdefault(candidate, []).append(residual)
        return {candidate: np.median(residuals, axis=0) for candidate, residuals in by_candidate.items()}


def _with_larger_batches(problem: Problem, subject: Candidate) -> Problem:
    """Return ``problem`` with BATCH_FACTOR times the largest batch, so that the model covers larger batches."""
    sizes = problem.space.max_batch_size
    largest = BATCH_FACTOR * max(*sizes, subject.max_batch_size)
    if not largest:  # a model without batches
        return problem
    return replace(problem, space=replace(problem.space, max_batch_size=(*sizes, largest)))


def _thinned(points: Sequence[Point], subject: Point) -> list[Point]:
    """Return the points of ``subject``'s candidate, and at most MAX_POINTS others from the whole run."""
    step = max(1, math.ceil(len(points) / MAX_POINTS))
    return [point for i, point in enumerate(points) if i % step == 0 or point.candidate == subject.candidate]


def simulate_changes(
    forecaster: SimulatedForecaster,
    stages: StageBreakdown,
    sla: Sla,
    fp16_factor: float | None,
    trials: Sequence[Trial],
    *,
    on_gpu: bool,
) -> list[Remedy]:
    """Return the forecast of each change alone.

    ``fp16_factor`` is None if the model has no conversion to FP16. Batch sizes and instance counts that failed in
    ``trials`` are left out. So is a faster network if other models serve a part of the request: the simulation has
    their time in that of the network.
    """
    subject, copied_share = stages.point.candidate, stages.copied_share
    changes: list[tuple[ChangeKind, str, CandidateForecast | None]] = []
    if more := [other for other in _more_instances(subject) if not is_beyond_failures(other, subject, trials)]:
        parallel = forecaster.best(more, sla)
        count = parallel.candidate.instance_count if parallel else subject.instance_count + 1
        change = f"{count} instances instead of {subject.instance_count}"
        changes.append(("more_instances", change, parallel))
    if fp16_factor is not None:
        assumption = f"assumption: inference takes {fp16_factor:g} of its time"
        faster = forecaster.best([subject], sla, time_share=copied_share + fp16_factor * (1 - copied_share))
        changes.append(("fp16", assumption if on_gpu else f"{assumption}; CPUs often gain nothing", faster))
    if larger := [other for other in _larger_batches(subject) if not is_beyond_failures(other, subject, trials)]:
        batched = forecaster.best(larger, sla)
        change = configuration_text.configuration(batched.candidate if batched else larger[0])
        changes.append(("larger_batches", change, batched))
    if OTHER_MODELS not in stages.stages_ms:
        local = forecaster.best([subject], sla, network_share=0.0)
        changes.append(("faster_network", "no time between client and server", local))
    if copied_share:
        without_copies = forecaster.best([subject], sla, time_share=1 - copied_share)
        changes.append(("no_copying", "shared memory, without copies; --measure measures it", without_copies))
    unchanged = forecaster.best([subject], sla)
    return [Remedy(kind, change, forecast, compute_gain(forecast, unchanged)) for kind, change, forecast in changes]


def _more_instances(subject: Candidate) -> Iterator[Candidate]:
    """Yield one more instance, and twice as many if they are at most MAX_INSTANCES."""
    one_more, twice = subject.instance_count + 1, 2 * subject.instance_count
    for count in [one_more, twice] if one_more < twice <= MAX_INSTANCES else [one_more]:
        yield replace(subject, instance_count=count)


def _larger_batches(subject: Candidate) -> Iterator[Candidate]:
    """Yield larger batches with dynamic batching, each with Triton's defaults and with half of it preferred."""
    if subject.max_batch_size < 1:
        return
    batched = replace(subject, dynamic_batching=True, preferred_batch_sizes=())
    sizes = (2 * subject.max_batch_size, 4 * subject.max_batch_size)
    for size in (
        sizes if subject.dynamic_batching or subject.max_batch_size == 1 else (subject.max_batch_size, *sizes)
    ):
        yield replace(batched, max_batch_size=size)
        yield replace(batched, max_batch_size=size, preferred_batch_sizes=(size // 2,))
