"""Forecasts of changes to a configuration by the simulator of the dynamic batcher, fitted to a run."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

import numpy as np

from objectives.arrays import FloatArray
from objectives.metrics import LATENCY, METRICS
from objectives.sla import Sla
from optimizer.config.search_space import Problem
from optimizer.core.trial import Candidate, Point, Trial
from optimizer.explain.bottleneck import StageBreakdown
from optimizer.explain.forecaster import ChangeKind, Forecast, Remedy, compute_gain, is_beyond_failures, median_errors
from optimizer.results import configuration_text
from optimizer.simulator.dynamic_batching_model import DynamicBatchingModel, fit
from optimizer.simulator.fitted_parameters import MIN_TIME_S, ExecutionSettings
from optimizer.simulator.predicted_metrics import (
    ConfigurationLoad,
    as_closed_loop,
    as_tail_ratios,
    binding_latency,
    is_complete,
    log_loads,
    log_measurements,
    log_predictions,
)
from optimizer.simulator.scenario import ServiceTimes

LOADS, FINER = 20, 12  # simulated concurrencies of each configuration, and around its best one
MAX_POINTS = 500  # points of other candidates to which the simulation is fitted
LARGER = 4  # largest forecast batches, times the largest max_batch_size of the space


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
        complete = [point for point in _closed(measured, problem) if is_complete(point, self.latency)]
        points = _thinned(complete, subject)
        bounded = [name for name in problem.sla.bounded_latencies if METRICS[name].timing is LATENCY]
        measured_names = [name for name in bounded if all(is_complete(point, name) for point in points)]
        self.latencies = tuple(dict.fromkeys([self.latency, *measured_names]))
        space = problem.space
        larger = LARGER * max(*space.max_batch_size, subject.candidate.max_batch_size)
        wider = replace(space, max_batch_size=(*space.max_batch_size, larger)) if larger else space
        self._batch = space.request_batch_size
        self._model = fit(points, replace(problem, space=wider), self.latency, seed)
        self._max_concurrency = max(problem.max_concurrency, *(point.load.concurrency for point in points))
        anchors = [point for point in _closed([subject], problem) if is_complete(point, *self.latencies)]
        self._ratios = self._corrections(
            [point for point in points if point.candidate != subject.candidate] + anchors
        )
        self._default_ratios = self._ratios.get(subject.candidate, np.zeros(1 + len(self.latencies)))
        cells = [(point.candidate, point.load.concurrency) for point in points]
        simulated = self._simulated(self._model, cells)
        simulated[:, 1:] += (log_loads(cells, self._batch) - simulated[:, 0])[:, None]
        self.errors = median_errors(simulated, log_measurements(points, self.latencies))
        self.measurement_count = len(points)

    @property
    def model_name(self) -> str:
        """The name of the kind of model."""
        return self._model.name

    def best(
        self,
        candidates: Sequence[Candidate],
        sla: Sla,
        *,
        time_share: float = 1.0,
        network_share: float = 1.0,
    ) -> Forecast | None:
        """Return the best of ``candidates`` at its best load within the bounds; None if none meets them.

        ``time_share`` is a factor on the time of a batch, ``network_share`` on the time between client and server.
        """
        model = self._changed(time_share, network_share)
        steps = dict.fromkeys(round(step) for step in np.geomspace(1, self._max_concurrency, LOADS).tolist())
        best = self._within(model, [(candidate, load) for candidate in candidates for load in steps], sla)
        if best is None:
            return None
        grid = list(steps)
        place = grid.index(best.concurrency)
        low, high = grid[max(place - 1, 0)], grid[min(place + 1, len(grid) - 1)]
        finer = dict.fromkeys(round(load) for load in np.linspace(low, high, FINER).tolist())
        return self._within(model, [(best.candidate, load) for load in finer], sla)

    def lowest_latencies_ms(self, candidates: Sequence[Candidate]) -> Mapping[str, float]:
        """Return the lowest latency of any of ``candidates`` at any load."""
        cells = [(candidate, 1) for candidate in candidates]
        forecasts = self._forecasts(self._model, cells)
        return {name: min(forecast.latencies_ms[name] for forecast in forecasts) for name in self.latencies}

    def _within(self, model: DynamicBatchingModel, cells: Sequence[ConfigurationLoad], sla: Sla) -> Forecast | None:
        bounds_ms = {name: sla.latency_bound_ms(name) for name in self.latencies}
        met = [
            forecast
            for forecast in self._forecasts(model, cells)
            if all(latency_ms <= bounds_ms[name] for name, latency_ms in forecast.latencies_ms.items())
        ]
        return max(met, key=lambda forecast: forecast.throughput_infer_per_sec, default=None)

    def _forecasts(self, model: DynamicBatchingModel, cells: Sequence[ConfigurationLoad]) -> list[Forecast]:
        ratios = np.array([self._ratios.get(candidate, self._default_ratios) for candidate, _ in cells])
        logs = self._simulated(model, cells) + ratios
        mean = log_loads(cells, self._batch) - logs[:, 0]
        latencies_ms = 1e3 * np.exp(logs[:, 1:] + mean[:, None])
        return [
            Forecast(candidate, load, float(math.exp(log_throughput)), dict(zip(self.latencies, row, strict=True)))
            for (candidate, load), log_throughput, row in zip(cells, logs[:, 0], latencies_ms.tolist(), strict=True)
        ]

    def _simulated(self, model: DynamicBatchingModel, cells: Sequence[ConfigurationLoad]) -> FloatArray:
        """Return log throughput and log tail ratios, each a latency divided by the mean, [cells, 1 + latencies]."""
        results = model.simulate(cells, threads=max(1, min(4, os.cpu_count() or 1)))
        logs = log_predictions(results, self.latencies)
        return as_tail_ratios(logs, cells, self._batch)

    def _residuals(self, points: Sequence[Point]) -> FloatArray:
        cells = [(point.candidate, point.load.concurrency) for point in points]
        logs = log_measurements(points, self.latencies)
        return as_tail_ratios(logs, cells, self._batch) - self._simulated(self._model, cells)

    def _corrections(self, points: Sequence[Point]) -> dict[Candidate, FloatArray]:
        by_candidate: dict[Candidate, list[FloatArray]] = {}
        for point, residual in zip(points, self._residuals(points) if points else (), strict=True):
            by_candidate.setdefault(point.candidate, []).append(residual)
        return {candidate: np.median(residuals, axis=0) for candidate, residuals in by_candidate.items()}

    def _changed(self, time_share: float, network_share: float) -> DynamicBatchingModel:
        unscaled, overheads = self._model.times, self._model.overheads

        def times(group: ExecutionSettings) -> ServiceTimes:
            service = unscaled(group)
            return ServiceTimes(time_share * service.seconds, service.step)

        network_s, gap_s = (max(MIN_TIME_S, network_share * part) for part in (overheads.network_s, overheads.gap_s))
        return replace(self._model, times=times, overheads=replace(overheads, network_s=network_s, gap_s=gap_s))


def _thinned(points: Sequence[Point], subject: Point) -> list[Point]:
    """Return the points of ``subject``'s candidate, and at most MAX_POINTS others from the whole run."""
    step = max(1, math.ceil(len(points) / MAX_POINTS))
    return [point for i, point in enumerate(points) if i % step == 0 or point.candidate == subject.candidate]


def _closed(points: Sequence[Point], problem: Problem) -> list[Point]:
    return as_closed_loop(points, problem) if problem.open_loop else list(points)


FP16_FACTOR = 0.5  # assumed factor on inference time; a run of another precision cannot measure it
MAX_INSTANCES = 64  # limits the service times that are kept for each number of instances


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
    ``trials`` are left out.
    """
    subject, copied_share = stages.point.candidate, stages.copied_share
    changes: list[tuple[ChangeKind, str, Forecast | None]] = []
    if counts := [other for other in _more_instances(subject) if not is_beyond_failures(other, subject, trials)]:
        more = forecaster.best(counts, sla)
        changes.append(("more_instances", _instances(more, subject), more))
    if fp16_factor is not None:
        assumed = f"assumption: inference takes {fp16_factor:g} of its time"
        faster = forecaster.best([subject], sla, time_share=copied_share + fp16_factor * (1 - copied_share))
        changes.append(("fp16", assumed if on_gpu else f"{assumed}; CPUs often gain nothing", faster))
    if larger := [other for other in _larger_batches(subject) if not is_beyond_failures(other, subject, trials)]:
        batched = forecaster.best(larger, sla)
        change = configuration_text.configuration(batched.candidate if batched else larger[0])
        changes.append(("larger_batches", change, batched))
    near = forecaster.best([subject], sla, network_share=0.0)
    changes.append(("faster_network", "no time between client and server", near))
    if copied_share:
        without_copies = forecaster.best([subject], sla, time_share=1 - copied_share)
        changes.append(("no_copying", "shared memory, without copies; --measure measures it", without_copies))
    unchanged = forecaster.best([subject], sla)
    return [Remedy(kind, change, forecast, compute_gain(forecast, unchanged)) for kind, change, forecast in changes]


def _more_instances(subject: Candidate) -> Iterator[Candidate]:
    counts = {subject.instance_count + 1, 2 * subject.instance_count}
    for count in sorted(count for count in counts if count <= MAX_INSTANCES) or [subject.instance_count + 1]:
        yield replace(subject, instance_count=count)


def _instances(more: Forecast | None, subject: Candidate) -> str:
    count = more.candidate.instance_count if more else subject.instance_count + 1
    return f"{count} instances instead of {subject.instance_count}"


def _larger_batches(subject: Candidate) -> Iterator[Candidate]:
    """Yield larger batches with dynamic batching, each with Triton's defaults and with half of it preferred."""
    if subject.max_batch_size < 1:
        return
    batched = replace(subject, dynamic_batching=True, preferred_batch_sizes=())
    sizes = (2 * subject.max_batch_size, 4 * subject.max_batch_size)
    for size in sizes if subject.dynamic_batching else (subject.max_batch_size, *sizes):
        yield replace(batched, max_batch_size=size)
        yield replace(batched, max_batch_size=size, preferred_batch_sizes=(size // 2,))
