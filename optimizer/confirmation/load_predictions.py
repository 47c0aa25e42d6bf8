"""The loads at which a candidate can be confirmed, with the predicted latency and throughput at each."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from objectives.arrays import FloatArray
from objectives.load_sequence import MARGIN, OTHER_MARGIN, first_load
from objectives.metrics import METRICS, Measurement
from objectives.queue_memory import QueuedLoad
from optimizer.config.problem import Problem
from optimizer.confirmation.rate_forecast import forecast_rates
from optimizer.confirmation.server_plan import COMPARED_SERVERS
from optimizer.confirmation.verdicts import ConfirmedLoad, estimate_capacity
from optimizer.core.trial import LoadPoint, Point
from optimizer.simulator.performance_model import PerformanceModel
from optimizer.simulator.predicted_metrics import ConfigurationLoad, Performance, configuration_loads

LOAD_STEP, RATE_STEP = 1.06, 1.03  # ratio of neighboring loads; latency rises steeply with a request rate
MIN_LOAD_FACTOR, MAX_LOAD_FACTOR = 0.3, 1.4  # tested loads, relative to the best one that the search measured
# log of latency, added to the predictions for a model that streams. Requests that run together have similar times, so
# the search estimates them less well, and a test on few servers passes only well inside the bound.
STREAM_CAUTION = 0.2
NO_BOUND = -1e3  # log of the latency over its bound if there is none
# highest load at which the test of a compared candidate begins, relative to the load of its comparison
MAX_RIVAL_LOAD_FACTOR = 1.5
ROUNDING = 1e-9  # a smaller difference between a prediction and a measurement is a rounding error
THROUGHPUT_MARGIN_FACTOR = 1.05  # margin above the throughput bound; a load that serves less can hardly pass
COMPARED_LOADS = 3  # most loads of a candidate that is measured for comparison


@dataclass(frozen=True, slots=True)
class LoadPredictions:
    """The loads of one candidate that can be tested, ascending, with the predicted latency and throughput.

    Attributes:
        loads: At least one load.
        log_latency_ratios: The log of the latency over its bound; NO_BOUND if no latency is bounded.
        throughput_infer_per_sec: The throughput at each load.
        highest_first: Index of the highest load at which the tests may begin; None if all may be the first.
    """

    loads: tuple[LoadPoint, ...]
    log_latency_ratios: tuple[float, ...]
    throughput_infer_per_sec: tuple[float, ...]
    highest_first: int | None = None

    @property
    def first_compared_load(self) -> LoadPoint:
        """The load at which the tests of the best candidate would begin."""
        return self.loads[self._first_index(MARGIN)]

    def slower(self, log_factor: float) -> LoadPredictions:
        """Return the predictions with latencies whose log is higher by ``log_factor``."""
        return replace(self, log_latency_ratios=tuple(ratio + log_factor for ratio in self.log_latency_ratios))

    def for_single_load(self) -> LoadPredictions:
        """Return the predictions for a test without time for a second load.

        Such a test begins at a load that is likelier to pass.
        """
        return replace(self, highest_first=self._first_index(OTHER_MARGIN))

    def corrected(self, measured: Point, problem: Problem) -> LoadPredictions | None:
        """Return the predictions shifted by the difference of ``measured``, a point at one of the loads.

        The result is None if the difference is unknown.
        """
        throughput = measured.throughput_infer_per_sec
        log_ratio = _log_latency_ratio(measured.measurement, problem)
        is_unknown = log_ratio == NO_BOUND and bool(problem.sla.latencies)
        if measured.load not in self.loads or is_unknown or throughput <= 0:
            return None
        index = self.loads.index(measured.load)
        shift, factor = log_ratio - self.log_latency_ratios[index], throughput / self.throughput_infer_per_sec[index]
        if math.isclose(shift, 0, abs_tol=ROUNDING) and math.isclose(factor, 1, rel_tol=ROUNDING):
            return replace(self, highest_first=None)  # they were corrected before
        return LoadPredictions(
            self.loads,
            tuple(ratio + shift for ratio in self.log_latency_ratios),
            tuple(factor * predicted for predicted in self.throughput_infer_per_sec),
        )

    def for_rival(self, measured: Point, problem: Problem) -> LoadPredictions | None:
        """Return the predictions for the test of a compared candidate, corrected by its measurement ``measured``.

        The result is None if the correction is unknown. The test begins at most at MAX_RIVAL_LOAD_FACTOR times the
        measured load.
        """
        corrected = self.corrected(measured, problem)
        if corrected is None:
            return None
        farthest = _log_size(measured.load) + math.log(MAX_RIVAL_LOAD_FACTOR)
        return replace(corrected, highest_first=sum(_log_size(load) <= farthest for load in self.loads) - 1)

    def next_compared_load(self, measured: Sequence[ConfirmedLoad], problem: Problem) -> LoadPoint | None:
        """Return the load at which the candidate is measured next for comparison; None if it needs no more servers.

        A candidate whose last load missed the SLA, or was inside it by more than twice MARGIN, gets another one: the
        first load is expected to be inside it by MARGIN. Then the predictions are shifted by the measured difference,
        and the highest load at which a test would be likely to pass is next.

        Args:
            measured: The candidate's confirmations, in the order of measuring.
            problem: The search problem.
        """
        if not measured:
            return self.first_compared_load
        last = measured[-1]
        if last.servers < COMPARED_SERVERS:
            return last.point.load
        compared = [entry.point.load for entry in measured]
        if len(compared) >= COMPARED_LOADS:
            return None
        problem = replace(problem, sla=last.judged_sla)
        corrected = self.corrected(last.point, problem)
        is_close = _log_latency_ratio(last.point.measurement, problem) > -2 * MARGIN
        if corrected is None or (last.meets_sla and is_close):
            return None
        chosen = corrected.first_compared_load
        return None if chosen in compared else chosen

    def _first_index(self, margin: float) -> int:
        """Return the index of the load at which the tests begin."""
        end = len(self.loads) if self.highest_first is None else self.highest_first + 1
        return first_load(self.log_latency_ratios[:end], self.throughput_infer_per_sec, margin)


def predict_loads(
    point: Point,
    points: Sequence[Point],
    problem: Problem,
    model: PerformanceModel | None,
    *,
    every_load: bool = False,
) -> LoadPredictions:
    """Return the loads around that of ``point`` with the predicted latency and throughput of its candidate.

    Latency is not monotonic in the load: with a queue delay, fewer requests in flight fill batches worse. It rises
    steeply once requests wait for a place in a running batch. So ``model`` predicts it, and the candidate's own
    measurements correct the predictions. The simulator of the dynamic batcher is corrected by the median error, and
    other models, whose errors depend more on the load, by the interpolated one. Without a model, or where it predicts
    nothing, the measurements are interpolated. At request rates a queue is fitted to them (``forecast_rates``).
    Measurements without a latency that is bounded do not count.

    Loads that are predicted to miss the bound on the throughput, or to meet it by little, are left out, unless the
    load of ``point`` serves no more.

    Args:
        point: The candidate at its best load.
        points: The search's points of all candidates.
        problem: The search problem.
        model: The performance model that was fitted to the search's points; None if there is none.
        every_load: Whether the loads cover all concurrencies, for a candidate of which the search tried few loads.
    """
    loads = _possible_loads(point, problem, every_load=every_load)
    measured = [other for other in points if other.candidate == point.candidate and has_all_latencies(other, problem)]
    measured = measured or [point]
    expected = None if model is None or problem.open_loop else _predict_by_model(model, measured, loads, problem)
    if expected is None:
        expected = _extrapolate(measured, loads, problem)
    if point.measurement.is_streamed:
        expected[:, 0] += STREAM_CAUTION
    if (forecast := forecast_rates(measured, problem)) is not None:
        expected[:, 0] = forecast.log_latency_ratios(loads, problem)
    throughput = np.exp(expected[:, 1])
    least = min(THROUGHPUT_MARGIN_FACTOR * problem.sla.throughput_floor, throughput[loads.index(point.load)])
    indices = np.flatnonzero(throughput >= least).tolist()
    return LoadPredictions(
        tuple(loads[load] for load in indices),
        tuple(expected[indices, 0].tolist()),
        tuple(throughput[indices].tolist()),
    )


def _predict_by_model(
    model: PerformanceModel, measured: Sequence[Point], loads: Sequence[LoadPoint], problem: Problem
) -> FloatArray | None:
    """Return ``_log_metrics`` at ``loads`` [loads, 2] by ``model``; None where it predicts nothing.

    The errors at ``measured``, the points of one candidate, correct the predictions.
    """
    measured_loads = [point.load for point in measured]
    simulated_loads = [(measured[0].candidate, load.concurrency) for load in (*loads, *measured_loads)]
    if (log_metrics := _simulate(model, simulated_loads, problem)) is None:
        return None
    errors = _measured_log_metrics(measured, problem) - log_metrics[len(loads) :]
    correction = (
        np.median(errors, axis=0) if problem.is_simulated else _interpolate(loads, measured_loads, errors, _log_size)
    )
    predicted: FloatArray = log_metrics[: len(loads)] + correction
    return predicted


def prediction_errors(model: PerformanceModel, points: Sequence[Point], problem: Problem) -> FloatArray | None:
    """Return the log of measured over predicted latency and throughput [points, 2]; None if one is not predicted."""
    log_metrics = _simulate(model, configuration_loads(points), problem)
    return None if log_metrics is None else _measured_log_metrics(points, problem) - log_metrics


def _simulate(model: PerformanceModel, loads: Sequence[ConfigurationLoad], problem: Problem) -> FloatArray | None:
    """Return ``_log_metrics`` [loads, 2] as ``model`` predicts them; None if one of them is missing."""
    log_metrics = np.array([_predicted_log_metrics(performance, problem) for performance in model.simulate(loads)])
    return log_metrics if np.isfinite(log_metrics).all() else None


def _extrapolate(measured: Sequence[Point], loads: Sequence[LoadPoint], problem: Problem) -> FloatArray:
    """Return ``_log_metrics`` at ``loads`` [loads, 2], interpolated between the ``measured`` points of one candidate.

    Beyond them, latency is proportional to the load, and throughput no higher. In an open loop, latency is in
    inverse proportion to the capacity that is left.
    """
    measured_loads, log_metrics = [point.load for point in measured], _measured_log_metrics(measured, problem)

    def extrapolate(position: Callable[[LoadPoint], float]) -> FloatArray:
        positions, ends = np.array(list(map(position, loads))), list(map(position, measured_loads))
        beyond = positions - np.clip(positions, min(ends), max(ends))
        inside = _interpolate(loads, measured_loads, log_metrics, position)
        extrapolated: FloatArray = inside + np.stack([beyond, np.minimum(beyond, 0.0)], axis=1)
        return extrapolated

    by_size = extrapolate(_log_size)
    if problem.open_loop:
        capacity = estimate_capacity(measured)
        by_headroom = extrapolate(lambda load: -math.log(QueuedLoad(load.request_rate, capacity).headroom))
        by_size[:, 0] = by_headroom[:, 0]
    return by_size


def _measured_log_metrics(points: Sequence[Point], problem: Problem) -> FloatArray:
    """Return ``_log_metrics`` of points [points, 2]."""
    return np.array([_log_metrics(point.measurement, problem) for point in points])


def has_all_latencies(point: Point, problem: Problem) -> bool:
    """Return whether throughput and all latencies that are bounded were measured."""
    return point.throughput_infer_per_sec > 0 and problem.sla.share_of_bound(point.measurement) < math.inf


def _interpolate(
    loads: Sequence[LoadPoint],
    measured_loads: Sequence[LoadPoint],
    values: FloatArray,
    position: Callable[[LoadPoint], float],
) -> FloatArray:
    """Return ``values`` [measured loads, columns] interpolated at the ``position`` of each of ``loads``.

    Values at the same position are averaged.
    """
    distinct, indices = np.unique(list(map(position, measured_loads)), return_inverse=True)
    averages = [np.bincount(indices, column) / np.bincount(indices) for column in values.T]
    positions = list(map(position, loads))
    return np.stack([np.interp(positions, distinct, average) for average in averages], axis=1)


def _possible_loads(point: Point, problem: Problem, *, every_load: bool) -> list[LoadPoint]:
    """Return the loads at which the candidate of ``point`` can be tested, ascending; that of ``point`` is one."""
    load = point.load
    if not problem.sla.latencies or problem.keeps_best_load:
        return [load]
    loads = _rates_around(load) if load.request_rate else _concurrencies(point, problem, every_load=every_load)
    if problem.sla.permitted_failures or METRICS["goodput"] in problem.objectives:
        # only the search's measurements show at which load too many requests fail, or the goodput falls again
        return [other for other in loads if other <= load]
    return loads


def _rates_around(load: LoadPoint) -> list[LoadPoint]:
    rates = {float(f"{load.request_rate * factor:.3g}") for factor in _load_factors(RATE_STEP)} | {load.request_rate}
    return [replace(load, request_rate=rate) for rate in sorted(rates)]


def _concurrencies(point: Point, problem: Problem, *, every_load: bool) -> list[LoadPoint]:
    load, allowed = point.load, problem.space.allowed_concurrencies(point.candidate)
    if allowed is None and every_load:
        steps = range(math.ceil(math.log(problem.max_concurrency, LOAD_STEP)))
        allowed = (*(round(LOAD_STEP**step) for step in steps), problem.max_concurrency)
    elif allowed is None:
        allowed = tuple(round(load.concurrency * factor) for factor in _load_factors(LOAD_STEP))
    concurrencies = {size for size in allowed if 1 <= size <= problem.max_concurrency} | {load.concurrency}
    return [replace(load, concurrency=size) for size in sorted(concurrencies)]


def _load_factors(step: float) -> list[float]:
    """Return the powers of ``step`` from MIN_LOAD_FACTOR to MAX_LOAD_FACTOR, ascending."""
    lowest, highest = math.ceil(math.log(MIN_LOAD_FACTOR, step)), math.floor(math.log(MAX_LOAD_FACTOR, step))
    return [step**power for power in range(lowest, highest + 1)]


def _log_size(load: LoadPoint) -> float:
    return math.log(load.request_rate or load.concurrency)


def _log_metrics(measurement: Measurement, problem: Problem) -> tuple[float, float]:
    """Return the log of the latency over its bound and of the throughput."""
    return _log_latency_ratio(measurement, problem), math.log(measurement.throughput_infer_per_sec or 1.0)


def _log_latency_ratio(measurement: Measurement, problem: Problem) -> float:
    """Return the log of the latency over its bound; NO_BOUND if no latency is bounded, or one is unknown."""
    ratio = problem.sla.share_of_bound(measurement) if problem.sla.latencies else 0.0
    return math.log(ratio) if 0 < ratio < math.inf else NO_BOUND


def _predicted_log_metrics(performance: Performance, problem: Problem) -> tuple[float, float]:
    """Return what ``_log_metrics`` returns of a measurement."""
    shares = [1e3 * performance.latency_s(bound.metric) / bound.bound for bound in problem.sla.latencies]
    return math.log(max(shares)) if shares else NO_BOUND, math.log(performance.throughput_infer_per_sec)
