"""Estimates of the simulator's parameters: service times by execution settings, and overheads."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from objectives.arrays import FloatArray
from optimizer.config.batching import is_batcher_field
from optimizer.config.ort_settings import SPINNING
from optimizer.config.problem import Problem
from optimizer.config.queue_policy import Fields
from optimizer.core.candidate import INSTANCE_GPUS, SERVER_CPUS, Candidate, FieldValue, server_processes
from optimizer.core.trial import Point
from optimizer.options.values import parse_cpus
from optimizer.simulator.calibration import Observation, service_times
from optimizer.simulator.predicted_metrics import (
    ConfigurationLoad,
    as_tail_ratios,
    configuration_loads,
    log_loads,
    log_measurements,
    log_predictions,
)
from optimizer.simulator.scenario import Overheads, ServiceTimes, SimulationResult

INTRA_OP_THREAD_COUNT = "intra_op_thread_count"  # ONNX Runtime's parameter: the number of threads of an instance
MIN_EXECUTIONS = 4  # executions for a reliable mean
SLOWDOWN = 0.25  # share of the uncontended time that each further busy instance adds
SLOWDOWNS = ("slowdown", "slowdown_if_cores_unknown")  # fields of Contention
SLOWDOWN_SHARES = (1.0, 0.5, 0.25, 0.0, 2.0)  # shares of the expected slowdown by further busy instances
MIN_TIME_ERROR = 0.02  # least standard deviation of the logarithm of measured batch times
FITTED_POINTS = 24  # the latest points: enough for a few parameters, few enough to fit within a second
MIN_TIME_S = 1e-6  # least fitted time, because parameters are compared by their logarithms
# The clients of a batch receive their responses and send their next requests one after another, DEFAULT_GAP_S apart
# on average (134 µs in benchmarks/simulator_proof.md); the highest measured rate limits it. DEFAULT_WAKE_S is the
# time to wake the batcher or an instance.
DEFAULT_GAP_S, DEFAULT_WAKE_S, DEFAULT_JITTER = 1e-4, 1e-4, 0.1
GAP_SHARE = 0.95  # share of the time between two requests at the highest measured rate
JITTERS = (0.02, 0.05, 0.1, 0.2, 0.3, 0.45)
GAPS_S = (MIN_TIME_S, 1e-5, 3e-5, 1e-4, 2e-4)
WAKES_S = (MIN_TIME_S, 2e-5, 5e-5, 1e-4, 2e-4)
NETWORK_SHARES = (1.0, 0.75, 0.5)  # shares of the measured network time, which includes gaps
NETWORK_QUANTILE = 0.2  # quantile of the measured network times
DEFAULTS = {"gap_s": DEFAULT_GAP_S, "wake_s": DEFAULT_WAKE_S}
PRIOR_WEIGHT = 0.002  # penalty in squared errors of a value that differs from its default by a factor of e
OUTLIER = 0.15  # errors beyond it count linearly


class ExecutionSettings(NamedTuple):
    """The settings that determine how fast a server computes batches, which the simulator cannot derive.

    ``instances`` are those of one server process. ``fields`` are all fields except the batcher's.
    """

    instances: int
    fields: Fields = ()


@dataclass(frozen=True, slots=True)
class Occupancy:
    """How busy a device is: instances that compute, threads of each, and its cores; None if unknown.

    The threads of the ``idle`` instances may spin while they wait for their next batch; the others do not count.
    """

    busy: float
    idle: float
    threads: float | None
    cores: float | None
    cores_are_guessed: bool


@dataclass(frozen=True, eq=False)
class Contention:
    """How busy instances slow each other down. Each field is a number, or an array [samples] of a posterior.

    Attributes:
        slowdown: Share of the uncontended time that each further busy instance adds while there are cores for all.
        oversubscription: With twice as many threads as cores a batch takes 2 to this power times as long, because
            threads spin and displace each other.
        thread_speedup_exponent: Twice the threads of a single instance divide its time by 2 to this power.
        idle_spin_share: Share of the cores that the threads of an idle instance use compared with a busy one, because
            they spin. An instance of one thread has none that could.
        slowdown_if_cores_unknown: Share of the uncontended time that each further busy instance adds if the number
            of threads or cores is unknown.
        core_count_factor: Factor on the number of cores, if that is only a guess.
    """

    slowdown: float | FloatArray = SLOWDOWN
    oversubscription: float | FloatArray = 1.6
    thread_speedup_exponent: float | FloatArray = 0.5
    idle_spin_share: float | FloatArray = 0.4
    slowdown_if_cores_unknown: float | FloatArray = 0.5
    core_count_factor: float | FloatArray = 1.0

    def relative_duration(self, occupancy: Occupancy) -> float | FloatArray:
        """Return the time of a batch relative to one instance of one thread."""
        busy, threads = occupancy.busy, occupancy.threads
        if threads is None or occupancy.cores is None:
            return 1 + self.slowdown_if_cores_unknown * (busy - 1)
        cores = occupancy.cores * (self.core_count_factor if occupancy.cores_are_guessed else 1.0)
        active = busy + (self.idle_spin_share * occupancy.idle if threads > 1 else 0.0)
        oversubscribed = (active * threads / cores) ** self.oversubscription
        single = threads**-self.thread_speedup_exponent
        return single * np.maximum(1 + self.slowdown * (busy - 1), oversubscribed)


PRIOR_CONTENTION = Contention()


def execution_settings(candidate: Candidate) -> ExecutionSettings:
    """Return the execution settings of ``candidate``."""
    fields = tuple((path, value) for path, value in candidate.fields if not is_batcher_field(path))
    return ExecutionSettings(candidate.instances, fields)


@dataclass(frozen=True, eq=False)
class GroupServiceTimes:
    """Service times of all execution settings, derived from those that were measured.

    ``shape`` [sizes] has the seconds of batches of 1, 2, ... requests in the settings with the most statistics, for
    a ``relative_duration`` of 1. ``scales`` has, for each measured setting, the ratio of its times to ``shape``
    times its relative duration.
    """

    shape: FloatArray
    scales: dict[ExecutionSettings, float]
    problem: Problem
    contention: Contention = PRIOR_CONTENTION

    def times(self, settings: ExecutionSettings) -> ServiceTimes:
        """Return the service times of ``settings``, with the scale of the nearest measured settings."""
        scale = self.scales[min(self.scales, key=lambda other: _distance(settings, other))]
        counts = range(1, settings.instances + 1)
        busy = [relative_duration(settings, k, self.problem, self.contention) for k in counts]
        return ServiceTimes(np.outer(self.shape * scale, busy), step=self.problem.space.request_batch_size)


def fit_service_times(
    groups: dict[ExecutionSettings, list[Observation]], problem: Problem, largest: int
) -> GroupServiceTimes:
    """Return service times for batches of up to ``largest`` samples, from the statistics of each setting."""
    base = max(
        groups,
        key=lambda settings: (_doublings(groups[settings]), _size_count(groups[settings]), -settings.instances),
    )
    seconds = service_times(
        groups[base], largest, base.instances, step=problem.space.request_batch_size, contention=SLOWDOWN
    ).seconds
    shape = seconds[:, base.instances - 1] / relative_duration(base, base.instances, problem)
    return scaled_to_groups(shape, groups, problem)


def scaled_to_groups(
    shape: FloatArray,
    groups: Mapping[ExecutionSettings, Sequence[Observation]],
    problem: Problem,
    contention: Contention = PRIOR_CONTENTION,
) -> GroupServiceTimes:
    """Return the service times of ``shape`` [sizes], scaled to the measured ones of each setting."""
    scales = {
        settings: _scale(shape, settings, observations, problem, contention)
        for settings, observations in groups.items()
    }
    return GroupServiceTimes(shape, scales, problem, contention)


def with_fitted_slowdown(
    times: GroupServiceTimes, groups: Mapping[ExecutionSettings, Sequence[Observation]]
) -> GroupServiceTimes:
    """Return ``times`` with the share of the expected slowdown by further busy instances that fits ``groups`` best.

    The times of a setting differ between its observations by their number of busy instances, and by noise of unknown
    size. So the best share has the least logarithm of the mean squared error, and a penalty for its distance from 1.
    """

    def with_share(share: float) -> GroupServiceTimes:
        slowdowns = {name: share * getattr(PRIOR_CONTENTION, name) for name in SLOWDOWNS}
        return scaled_to_groups(times.shape, groups, times.problem, replace(PRIOR_CONTENTION, **slowdowns))

    def misfit(share: float) -> float:
        tried = with_share(share)
        errors = [
            math.log(_scale(times.shape, settings, [seen], times.problem, tried.contention) / tried.scales[settings])
            for settings, observations in groups.items()
            for seen in observations
        ]
        return len(errors) * math.log(float(np.square(errors).mean()) + MIN_TIME_ERROR**2) + (share - 1) ** 2

    return with_share(min(SLOWDOWN_SHARES, key=misfit))


def _size_count(observations: Sequence[Observation]) -> int:
    return len({batch.batch_size for observation in observations for batch in observation.batches})


def _doublings(observations: Sequence[Observation]) -> int:
    """Return how often the smallest batch size with enough executions doubles to the largest one."""
    executions_by_size = Counter[int]()
    for observation in observations:
        executions_by_size.update({batch.batch_size: batch.executions for batch in observation.batches})
    sizes = [size for size, executions in executions_by_size.items() if executions >= MIN_EXECUTIONS]
    return round(math.log2(max(sizes) / min(sizes))) if sizes else 0


def relative_duration(
    settings: ExecutionSettings, busy: float, problem: Problem, contention: Contention = PRIOR_CONTENTION
) -> float:
    """Return how long a batch takes with ``busy`` instances, relative to one instance of one thread.

    Instances on different GPUs do not slow each other down. When all cores are in use, further instances only take
    time from the others. Several server processes are assumed to have the same number of busy instances each.
    """
    return float(contention.relative_duration(occupancy(settings, busy, problem)))


def occupancy(settings: ExecutionSettings, busy: float, problem: Problem) -> Occupancy:
    """Return the occupancy of a device by ``busy`` instances of those of ``settings``.

    If the number of cores is unknown, the guess is the largest number of threads that the space offers for one
    instance.
    """
    instances, fields = settings
    reported_cores = _cpu_count(fields) or problem.cpu_count
    cores = reported_cores or _most_threads(problem)
    threads, processes = _threads(fields, problem), server_processes(fields)
    gpus = _gpu_count(fields)
    active = max(1.0, busy / gpus)
    idle = 0.0 if str(dict(fields).get(SPINNING)) == "0" else max(0.0, instances / gpus - active)
    if threads == 0 and cores is not None:  # the processes divide the cores
        threads = max(1.0, cores / processes)
    return Occupancy(processes * active, processes * idle, threads or None, cores, not reported_cores)


def _scale(
    shape: FloatArray,
    settings: ExecutionSettings,
    observations: Sequence[Observation],
    problem: Problem,
    contention: Contention,
) -> float:
    """Return the geometric mean of the ratios of measured to expected times, weighted by the executions."""
    log_ratios, weights = [], []
    for observation in observations:
        for batch in observation.batches:
            row = min(max(round(batch.batch_size / problem.space.request_batch_size), 1), len(shape)) - 1
            expected_s = shape[row] * relative_duration(settings, observation.busy, problem, contention)
            log_ratios.append(math.log(batch.compute_ns / 1e9 / batch.executions / expected_s))
            weights.append(batch.executions)
    return math.exp(float(np.average(log_ratios, weights=weights)))


def _threads(fields: Fields, problem: Problem) -> float | None:
    """Return the threads of an instance; 0 means one for each core, None that they are unknown.

    ONNX Runtime, whose parameter the space offers, uses a thread for each core if it is not set.
    """
    chosen = next((_number(value) for path, value in fields if INTRA_OP_THREAD_COUNT in path), None)
    is_offered = any(INTRA_OP_THREAD_COUNT in path for path in problem.space.fields)
    return 0.0 if chosen is None and is_offered else chosen


def _cpu_count(fields: Fields) -> float | None:
    chosen = dict(fields).get(SERVER_CPUS)
    return None if chosen is None else len(parse_cpus(str(chosen)))


def _gpu_count(fields: Fields) -> int:
    return str(dict(fields).get(INSTANCE_GPUS, "")).count(",") + 1


def _most_threads(problem: Problem) -> float | None:
    """Return the largest choice of threads; None if there is only one, which does not describe the machine."""
    for path, values in problem.space.fields.items():
        if INTRA_OP_THREAD_COUNT in path and len(values) > 1:
            return max(_number(value) or 0 for value in values) or None
    return None


def _number(value: FieldValue) -> float | None:
    try:
        number = float(value)
    except ValueError:
        return None
    return number if 0 <= number < math.inf else None


def _distance(settings: ExecutionSettings, other: ExecutionSettings) -> tuple[int, float]:
    """Return the number of differing fields and the distance of the instance counts in doublings."""
    fields, other_fields = dict(settings.fields), dict(other.fields)
    paths = fields.keys() | other_fields.keys()
    differing_count = sum(fields.get(path) != other_fields.get(path) for path in paths)
    return differing_count, abs(math.log2(settings.instances / other.instances))


@dataclass(frozen=True, slots=True)
class FittedOverheads:
    """The overheads that are fitted to measurements, and the variation of service times.

    Attributes:
        network_s: Time that each request spends outside queue and computation.
        gap_s: Mean time between two arrivals of the same batch's clients.
        wake_s: Time until the batcher or an instance wakes.
        jitter: Relative standard deviation of service times.
    """

    network_s: float
    gap_s: float = DEFAULT_GAP_S
    wake_s: float = DEFAULT_WAKE_S
    jitter: float = DEFAULT_JITTER

    def to_overheads(self) -> Overheads:
        """Return the overheads of the simulator, with the network time split between request and response."""
        return Overheads(
            send_s=self.network_s / 2, receive_s=self.network_s / 2, wake_s=self.wake_s, dispatch_s=self.wake_s
        )


def estimate_network_s(points: Sequence[Point], quantile: float = NETWORK_QUANTILE) -> float | None:
    """Return the network time of a request in seconds, or None if no point has the server's statistics.

    It is a low quantile, because in slower points requests wait for each other on the network, which gaps model. At
    random arrivals they hardly do, and ``quantile`` is 0.5.
    """
    times_s = [network_s for point in points if (network_s := _network_s(point)) is not None]
    return float(np.quantile(times_s, quantile)) if times_s else None


def longest_gap_s(points: Sequence[Point]) -> float:
    """Return the longest mean gap that is possible at the highest measured request rate."""
    rates = [(p.measurement.throughput_infer_per_sec or 0) / p.load.request_batch_size for p in points]
    return GAP_SHARE / max(*rates, 1e-9)


def fit_overheads(
    simulate: Callable[[FittedOverheads, Sequence[ConfigurationLoad]], Sequence[SimulationResult]],
    first: FittedOverheads,
    points: Sequence[Point],
    latency: str,
) -> FittedOverheads:
    """Return the overheads whose simulation is closest to ``points``.

    Errors in throughput, in the tail of ``latency``, in batch size and in queue time count. The search is a grid:
    first over the jitter, then over network time, gap and wake time, then over the jitter again.
    """
    latest = list(points)[-FITTED_POINTS:]
    loads = configuration_loads(latest)
    batch = latest[0].load.request_batch_size
    measured = as_tail_ratios(log_measurements(latest, [latency]), loads, batch)
    sizes = np.array([point.measurement.mean_batch_size or math.nan for point in latest])
    queues_ms = np.array([point.measurement.queue_ms for point in latest], np.float64)  # NaN for None
    means_ms = 1e3 * np.exp(log_loads(loads, batch) - measured[:, 0])  # Little's law

    def misfit(overheads: FittedOverheads) -> float:
        results = simulate(overheads, loads)
        simulated = as_tail_ratios(log_predictions(results, [latency]), loads, batch)
        errors = np.stack(
            [
                simulated[:, 0] - measured[:, 0],
                simulated[:, 1] - measured[:, 1],
                0.5 * np.log(np.array([result.mean_batch_size for result in results]) / sizes),
                0.5 * (np.array([1e3 * result.queue_avg_s for result in results]) - queues_ms) / means_ms,
            ]
        )
        magnitude = np.abs(np.nan_to_num(errors))
        losses = np.where(magnitude < OUTLIER, magnitude**2, 2 * OUTLIER * magnitude - OUTLIER**2)
        log_ratios = [math.log(getattr(overheads, name) / default) for name, default in DEFAULTS.items()]
        return float(losses.sum()) + PRIOR_WEIGHT * sum(ratio**2 for ratio in log_ratios)

    limit_s = max(longest_gap_s(points), MIN_TIME_S)
    best = min((replace(first, jitter=jitter) for jitter in JITTERS), key=misfit)
    gaps_s = [gap for gap in GAPS_S if gap <= limit_s]
    choices = itertools.product([share * first.network_s for share in NETWORK_SHARES], gaps_s, WAKES_S)
    best = min((FittedOverheads(*choice, jitter=best.jitter) for choice in choices), key=misfit)
    return min((replace(best, jitter=jitter) for jitter in JITTERS), key=misfit)


def _network_s(point: Point) -> float | None:
    """Return the latency minus queue and computation; without a mean latency it is load / throughput."""
    m, load = point.measurement, point.load
    inside = [part for part in (m.queue_ms, m.compute_input_ms, m.compute_infer_ms, m.compute_output_ms) if part]
    if m.queue_ms is None or m.compute_infer_ms is None or not m.throughput_infer_per_sec:
        return None
    latency_s = load.concurrency * load.request_batch_size / m.throughput_infer_per_sec
    if m.latency_avg_ms is not None:
        latency_s = m.latency_avg_ms / 1e3
    return max(MIN_TIME_S, latency_s - sum(inside) / 1e3)
