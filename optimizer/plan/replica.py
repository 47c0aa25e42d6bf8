"""One replica: the simulated server, fitted to measurements, with the uncertainty of its speed.

A closed loop near its knee forms few batch sizes, and no small ones. Traffic from many users forms them all. A curve
through the measured sizes can bend or step between them, so a plan has to know how far (``plausible_times``).
"""

from __future__ import annotations

import math
import statistics
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from objectives import batch_stats
from objectives.arrays import FloatArray
from objectives.metrics import METRICS, STATISTICS
from objectives.sla import Sla
from optimizer.config.problem import Problem
from optimizer.config.queue_policy import with_queue
from optimizer.core.candidate import SERVER_PROCESSES, Candidate
from optimizer.core.trial import MAX_CONCURRENCY, LoadPoint, Point
from optimizer.plan.evidence import Evidence, MeasuredServer
from optimizer.plan.slowness import ForecastErrors, Slowdown, SlownessEstimate, estimate_slowness, forecast_errors
from optimizer.search.refusals import RefusalForecast
from optimizer.simulator.calibration import Observation, observe_point, service_times
from optimizer.simulator.dynamic_batching_model import DynamicBatchingModel, fit
from optimizer.simulator.fitted_parameters import (
    MIN_EXECUTIONS,
    FittedOverheads,
    estimate_network_s,
    execution_settings,
    fit_overheads,
)
from optimizer.simulator.predicted_metrics import as_closed_loop
from optimizer.simulator.scenario import (
    ClosedLoopLoad,
    MeasurementInterval,
    OpenLoopLoad,
    Scenario,
    ServiceTimes,
    SimulatedLoad,
    SimulationResult,
    concurrency_of_process,
)
from optimizer.simulator.simulate import exponential_gaps, lognormal_jitter, simulate_many

FIXED_SHARE = 0.3  # assumed time that does not depend on the batch size, as a share of the smallest measured batch's


@dataclass(frozen=True, eq=False)
class PlausibleTimes:
    """Service times in seconds [batch sizes, busy instances], for sizes of ``step`` samples, 2 ``step``, ..."""

    shortest: FloatArray
    expected: FloatArray
    longest: FloatArray
    step: int

    def at(self, position: float) -> ServiceTimes:
        """Return the shortest times for -1, the expected ones for 0, the longest for 1, and times in between."""
        bound = self.longest if position > 0 else self.shortest
        return ServiceTimes(self.expected + abs(position) * (bound - self.expected), self.step)


def plausible_times(fitted: ServiceTimes, observed: Sequence[Observation]) -> PlausibleTimes:
    """Return the plausible times around the ``fitted`` ones.

    Larger batches take no less time. So the time of a size between two measured ones is between theirs. A smaller
    batch than all measured ones takes at least its share of the smallest one's time. A larger one than all measured
    ones takes at most as long per sample as the largest one.
    """
    times, step = fitted.seconds, fitted.step
    executions = Counter[int]()
    for observation in observed:
        executions.update({batch.batch_size: batch.executions for batch in observation.batches})
    required = min(MIN_EXECUTIONS, max(executions.values()))
    sizes = [size for size, count in executions.items() if count >= required]
    rows = np.arange(len(times))  # row i has the times of batches of (i + 1) * step samples
    measured = np.unique(np.clip(np.rint(np.array(sizes) / step).astype(int) - 1, 0, len(times) - 1))
    next_smaller = measured[np.maximum(np.searchsorted(measured, rows, "right") - 1, 0)]
    next_larger = measured[np.minimum(np.searchsorted(measured, rows), len(measured) - 1)]
    shortest, expected, longest = times[next_smaller], times.copy(), times[next_larger]
    first, last = measured[0], measured[-1]
    shares_of_first = ((rows[:first] + 1) / (first + 1))[:, np.newaxis]
    expected[:first] = np.maximum(times[:first], times[first] * (FIXED_SHARE + (1 - FIXED_SHARE) * shares_of_first))
    shortest[:first] = times[first] * shares_of_first
    longest[last + 1 :] = times[last] * ((rows[last + 1 :] + 1) / (last + 1))[:, np.newaxis]
    return PlausibleTimes(np.minimum(shortest, expected), expected, np.maximum(longest, expected), step)


SIMULATED_SLOWNESSES = np.geomspace(0.6, 1.7, 13)
# possible slownesses of a deployment; its loads are interpolated between the simulated ones
SLOWNESSES = np.geomspace(SIMULATED_SLOWNESSES[0], SIMULATED_SLOWNESSES[-1], 401)
CLOSED_LOOP_INTERVAL = MeasurementInterval(warm_up_requests=400, requests=4000)
RATE_REQUESTS = 20_000  # number of requests in a simulation of a load at a rate
SEED = 0  # seed of the simulated jitter
MIN_PERIODS = 6  # periods of a load shape, because an overload is judged by the last third of the requests
FITTED_POINTS = 12  # points of one configuration to which overheads are fitted; more change nothing
SATURATING_BATCHES = 4  # batches in flight per instance; more do not raise the throughput
FITS = 2  # the second one scales all deployments to the mean speed that the first one has estimated
LATENCIES = tuple(f"latency_{name}_ms" for name in STATISTICS)
SERVER_TIMES = ("queue_ms", "compute_input_ms", "compute_infer_ms", "compute_output_ms")
MAX_REFUSED_SHARE = 0.99  # share of the requests
MAX_LATENCY_RATIO = 1.5  # a larger factor between measured and simulated latency is an outlier


@dataclass(frozen=True, eq=False)
class Replica:
    """A simulated server of one configuration: all server processes, if it has several.

    ``request_batch_size`` is the average number of samples of a request. ``sla`` has the latency bounds.
    ``latency_ratio`` is the ratio of measured to simulated judged latency at equal throughput. ``times`` are the
    plausible service times; without them those of the model are taken as known. ``refusals`` forecasts the requests
    that a limited queue refuses; None if it refuses none, or if that is not simulated.
    """

    candidate: Candidate
    model: DynamicBatchingModel
    request_batch_size: float
    sla: Sla
    slowness_estimate: SlownessEstimate
    latency_ratio: float = 1.0
    times: PlausibleTimes | None = None
    refusals: RefusalForecast | None = None

    def serve(self, arrivals_s: FloatArray, slowdown: Slowdown) -> SimulationResult:
        """Return the simulated behaviour of a slower server, without ``latency_ratio`` and ``latency_factor``.

        Its times are those of a queue that refuses nothing. ``rejected`` are the requests that its own queue is
        expected to refuse, for any reason.
        """
        load = OpenLoopLoad(arrivals_s)
        result = self._simulate(load, slowdown)
        if self.refusals is None:
            return result
        refusing = self._simulate(load, slowdown, self.refusals)
        simulated = np.nan_to_num([refusing.rejected_share + refusing.timed_out_share])
        share = min(float(self.refusals.corrected(simulated)[0]), MAX_REFUSED_SHARE)
        return replace(result, rejected=round(result.requests * share / (1 - share)))

    def server_process(self) -> Replica:
        """Return one of the server processes, as fast as next to the others, with a queue that refuses nothing."""
        times = self.model.times(execution_settings(self.candidate))
        fields = tuple(pair for pair in self.candidate.fields if pair[0] != SERVER_PROCESSES)
        candidate, model = replace(self.candidate, fields=fields), replace(self.model, times=lambda _: times)
        return replace(self, candidate=candidate, model=model, refusals=None)

    def serve_closed_loop(self, concurrency: int, slowdown: Slowdown) -> SimulationResult:
        """Return the simulated behaviour in a closed loop; ``concurrency`` counts requests of the space's size."""
        return self._simulate(ClosedLoopLoad(concurrency), slowdown)

    @property
    def saturating_concurrency(self) -> int:
        """The concurrency beyond which the throughput does not rise."""
        samples = self.candidate.total_instances * max(1, self.candidate.max_batch_size)
        return max(1, min(SATURATING_BATCHES * samples // self.model.request_batch_size, 4096))

    def latency_ms(self, simulated: SimulationResult, metric: str, latency_factor: float = 1.0) -> float:
        """Return the latency ``metric`` of ``simulated`` in ms, with ``latency_ratio`` and ``latency_factor``."""
        return 1e3 * self.latency_ratio * latency_factor * simulated.latency_s(metric)

    def meets(self, simulated: SimulationResult, latency_factor: float = 1.0) -> bool:
        """Return True if ``simulated`` meets all bounds."""
        if self.refusals is not None and simulated.rejected_share > self.refusals.permitted:
            return False
        return all(self.latency_ms(simulated, bound.metric, latency_factor) <= bound.bound for bound in self.sla)

    def capacity(self, slowdown: Slowdown) -> float:
        """Return the highest throughput in requests per second, regardless of latency."""
        full = self.serve_closed_loop(self.saturating_concurrency, slowdown)
        return full.throughput_infer_per_sec / self.request_batch_size

    def _simulate(
        self, load: SimulatedLoad, slowdown: Slowdown, refusals: RefusalForecast | None = None
    ) -> SimulationResult:
        model = self.model
        if self.times is not None:
            times = self.times.at(slowdown.unmeasured)
            model = replace(model, times=lambda _: times)
        samples_per_request = self.request_batch_size / model.request_batch_size
        return _simulate_jobs(model, [(self.candidate, load)], slowdown.slowness, samples_per_request, refusals)[0]


def as_samples(arrivals_s: FloatArray, samples_per_request: float) -> FloatArray:
    """Return the arrival times of single samples.

    The simulator treats each sample of a request of mixed sizes as a request.
    """
    if samples_per_request == 1:
        return arrivals_s
    return np.repeat(arrivals_s, np.diff(np.floor(samples_per_request * np.arange(len(arrivals_s) + 1))).astype(int))


def fit_replica(evidence: Evidence, sla: Sla) -> Replica:
    """Return a replica fitted to ``evidence``, and to the latency metric of the first bound of ``sla``.

    Raises ValueError if no measurement determines service times.
    """
    problem, candidate = evidence.problem, evidence.candidate
    size = problem.space.request_batch_size
    highest = max(problem.max_concurrency, *(p.candidate.max_batch_size // size + 1 for p in evidence.points), 1)
    problem = replace(problem, max_concurrency=min(highest, MAX_CONCURRENCY))
    latency = sla.judged_latency
    log_slowness = [0.0] * len(evidence.deployments)
    for _ in range(FITS):
        mean = float(np.mean(log_slowness))
        measured = [
            _at_mean_speed(point, math.exp(server_log - mean))
            for server, server_log in zip(evidence.deployments, log_slowness, strict=True)
            for point in server
        ]
        model, times = _fit_model(as_closed_loop(measured, problem), candidate, problem, latency)
        simulated = _SimulatedDeployments(model, evidence, latency)
        log_slowness = [simulated.log_slowness(server) for server in evidence.deployments]
    latency_ratio, errors = simulated.ratio_and_errors()
    return Replica(
        candidate=candidate,
        model=model,
        request_batch_size=problem.request_batch_size,
        sla=sla,
        slowness_estimate=estimate_slowness(log_slowness, errors),
        latency_ratio=latency_ratio,
        times=times,
        refusals=_forecast_refusals(model, measured, candidate, problem),
    )


def _forecast_refusals(
    model: DynamicBatchingModel, measured: Sequence[Point], candidate: Candidate, problem: Problem
) -> RefusalForecast | None:
    """Return the forecast of the requests that the queue of ``candidate`` refuses; None if it is not simulated."""
    if problem.request_batch_size != model.request_batch_size:  # the queue of a mix would count samples
        return None
    closed_loops = measured if problem.open_loop else [point for point in measured if point.load.concurrency]
    refusals = RefusalForecast(model, closed_loops, problem)
    return refusals if refusals.applies_to(problem.space.canonical(candidate)) else None


def _at_mean_speed(point: Point, slowness: float) -> Point:
    """Return the measurement that is expected at the mean speed of all servers.

    ``slowness`` is that of the server of ``point``, relative to the mean. Queue and computation take ``slowness``
    times as long on the measured server, the network does not. The clients of a closed loop send their next requests
    earlier when responses come earlier.
    """
    m = point.measurement
    assert m.latency_avg_ms, "evidence has only usable measurements"
    assert m.throughput_infer_per_sec, "evidence has only usable measurements"
    in_server_ms = sum(getattr(m, name) or 0.0 for name in SERVER_TIMES)
    in_server_ms = min(in_server_ms or m.latency_avg_ms, m.latency_avg_ms)
    factor = 1 - (1 - 1 / slowness) * in_server_ms / m.latency_avg_ms
    factors = {**dict.fromkeys(LATENCIES, factor), **dict.fromkeys(SERVER_TIMES, 1 / slowness)}
    scaled: dict[str, Any] = {
        name: None if (value := getattr(m, name)) is None else value * scale for name, scale in factors.items()
    }
    if point.load.concurrency:
        scaled["throughput_infer_per_sec"] = m.throughput_infer_per_sec / factor
    batches = (
        batch._replace(compute_ns=round(batch.compute_ns / slowness))
        for batch in batch_stats.from_text(m.batch_stats)
    )
    return replace(point, measurement=replace(m, batch_stats=batch_stats.to_text(batches), **scaled))


def _fit_model(
    measured: Sequence[Point], candidate: Candidate, problem: Problem, latency: str
) -> tuple[DynamicBatchingModel, PlausibleTimes | None]:
    """Return the server model fitted to one combination of instances and fields only, and its plausible times.

    Only points with the metric ``latency`` count. The overheads are fitted to those of ``candidate``, and to others
    up to FITTED_POINTS. Without the server's own statistics the times are None. The search fits one model to all
    combinations, and has to assume how much instances slow each other down.
    """
    measured = [point for point in measured if METRICS[latency].value(point.measurement)]
    of_candidate_last = sorted(measured, key=lambda point: point.candidate == candidate)
    fitted_points = of_candidate_last[-max(FITTED_POINTS, sum(p.candidate == candidate for p in measured)) :]
    observed = [observation for point in measured if (observation := observe_point(point)) is not None]
    network_s = estimate_network_s(measured)
    if network_s is None or not observed:
        return fit(fitted_points, problem, latency, SEED), None
    size = problem.space.request_batch_size
    # no load fills a larger batch, and a table of its service times would exceed the memory
    largest = min(max(size, *(point.candidate.max_batch_size for point in measured)), size * MAX_CONCURRENCY)
    instances = measured[0].candidate.instances
    plausible = plausible_times(service_times(observed, largest - largest % size, instances, step=size), observed)
    times = plausible.at(0.0)
    first = DynamicBatchingModel(
        lambda _: times,
        size,
        FittedOverheads(network_s),
        SEED,
        fixed_shapes=problem.fixed_shapes,
        queue=problem.queue,
    )
    overheads = fit_overheads(
        lambda overheads, cells: replace(first, overheads=overheads).simulate(cells),
        first.overheads,
        fitted_points,
        latency,
    )
    return replace(first, overheads=overheads), plausible


class _SimulatedDeployments:
    """The simulated loads of all deployments at SIMULATED_SLOWNESSES, compared with the measurements.

    Throughput is compared in a closed loop, latency in an open loop, where throughput does not depend on speed.
    """

    def __init__(self, model: DynamicBatchingModel, evidence: Evidence, latency: str) -> None:
        self._evidence, self._latency = evidence, latency
        samples_per_request = evidence.problem.request_batch_size / model.request_batch_size
        cells = list(dict.fromkeys((point.candidate, point.load) for point in evidence.points))
        jobs = [(candidate, self._simulated_load(load)) for candidate, load in cells]
        by_slowness = [
            _simulate_jobs(model, jobs, slowness, samples_per_request) for slowness in SIMULATED_SLOWNESSES.tolist()
        ]
        self._results = {cell: [row[i] for row in by_slowness] for i, cell in enumerate(cells)}

    def log_slowness(self, deployment: MeasuredServer) -> float:
        """Return the logarithm of the slowness whose simulation is closest to the measurements of ``deployment``."""
        misfit = sum((self._log_ratios(point) ** 2 for point in deployment), np.zeros(len(SLOWNESSES)))
        return math.log(SLOWNESSES[int(np.argmin(misfit))])

    def ratio_and_errors(self) -> tuple[float, ForecastErrors]:
        """Return the median ratio of measured to simulated latency, and the errors of the simulation with this ratio.

        The ratio is 1 without measurements of the configuration. Each deployment is simulated with its own slowness.
        The errors of the deployments are averaged at each load, because their differences are not the simulation's.
        """
        throughput, latency = defaultdict[LoadPoint, list[float]](list), defaultdict[LoadPoint, list[float]](list)
        for server in self._evidence.deployments:
            log_slowness = self.log_slowness(server)
            index = int(np.argmin(np.abs(np.log(SLOWNESSES) - log_slowness)))
            for point in server:
                if point.candidate != self._evidence.candidate:
                    continue
                if point.load.concurrency:
                    throughput[point.load].append(float(self._log_ratios(point)[index]))
                if measured_ms := METRICS[self._latency].value(point.measurement):
                    simulated_ms = self._latency_ms(point, self._latency, math.exp(log_slowness))
                    latency[point.load].append(math.log(measured_ms / float(simulated_ms)))
        logs = [log for at_load in latency.values() for log in at_load]
        limit = math.log(MAX_LATENCY_RATIO)
        log_ratio = min(max(float(np.median(logs or [0.0])), -limit), limit)
        errors = forecast_errors(
            [statistics.fmean(at_load) for at_load in throughput.values()],
            [statistics.fmean(at_load) - log_ratio for at_load in latency.values()],
        )
        return math.exp(log_ratio), errors

    def _log_ratios(self, point: Point) -> FloatArray:
        """Return log(measured / simulated) at each of SLOWNESSES: of the throughput, or of the mean latency."""
        measured = point.measurement
        if point.load.concurrency:
            assert measured.throughput_infer_per_sec, "evidence has only usable measurements"
            throughputs = [result.throughput_infer_per_sec for result in self._results[point.candidate, point.load]]
            simulated = np.interp(SLOWNESSES, SIMULATED_SLOWNESSES, np.array(throughputs))
            return np.asarray(np.log(measured.throughput_infer_per_sec / simulated))
        assert measured.latency_avg_ms, "evidence has only usable measurements"
        return np.asarray(np.log(measured.latency_avg_ms / self._latency_ms(point, "latency-avg", SLOWNESSES)))

    def _latency_ms(self, point: Point, latency: str, slowness: float | FloatArray) -> FloatArray:
        """Return the simulated metric ``latency`` at the load of ``point``, of the shape of ``slowness``."""
        latencies_s = np.array([result.latency_s(latency) for result in self._results[point.candidate, point.load]])
        return np.asarray(1e3 * np.interp(slowness, SIMULATED_SLOWNESSES, latencies_s))

    def _simulated_load(self, load: LoadPoint) -> SimulatedLoad:
        if load.concurrency:
            return ClosedLoopLoad(load.concurrency)
        arrivals, rate = self._evidence.arrivals, load.request_rate
        seconds = max(RATE_REQUESTS / rate, MIN_PERIODS * arrivals.times.period_at(rate))
        return OpenLoopLoad(arrivals.plan(rate, arrivals.times.whole_periods(seconds, rate), seed=0))


def _simulate_jobs(
    model: DynamicBatchingModel,
    jobs: Sequence[tuple[Candidate, SimulatedLoad]],
    slowness: float,
    samples_per_request: float,
    refusals: RefusalForecast | None = None,
) -> list[SimulationResult]:
    """Return the results of ``jobs``.

    ``samples_per_request`` is the number of simulated requests for each request of an open loop. With ``refusals``
    the queues refuse requests.
    """
    service = {}
    for candidate, _ in jobs:
        group = execution_settings(candidate)
        if group not in service:
            times = model.times(group)
            service[group] = ServiceTimes(times.seconds * slowness, times.step)
    fitted, size = model.overheads, model.request_batch_size
    overheads = fitted.to_overheads()
    jitter, gaps_s = lognormal_jitter(fitted.jitter, model.seed), exponential_gaps(fitted.gap_s, model.seed)
    results: list[SimulationResult] = []
    for candidate, load in jobs:
        interval = CLOSED_LOOP_INTERVAL if isinstance(load, ClosedLoopLoad) else MeasurementInterval()
        times = service[execution_settings(candidate)]
        process_load, servers = _process_load(candidate, load, samples_per_request)
        configured = with_queue(candidate, model.queue)
        job = Scenario(configured, process_load, times, overheads, size, model.fixed_shapes, refuses=False)
        if refusals is not None:
            missed, priorities = refusals.missed_share, refusals.priorities
            job = replace(job, refuses=True, missed_share=missed, priorities=priorities)
        (result,) = simulate_many([job], jitter=jitter, gaps_s=gaps_s, interval=interval)
        results.append(result.scaled_to_servers(servers))
    return results


def _process_load(
    candidate: Candidate, load: SimulatedLoad, samples_per_request: float
) -> tuple[SimulatedLoad, float]:
    """Return the simulated load of one of the server processes, and how many times as much they serve together."""
    if isinstance(load, ClosedLoopLoad):
        concurrency = concurrency_of_process(candidate, load.concurrency)
        return ClosedLoopLoad(concurrency), load.concurrency / concurrency
    arrivals_s = load.arrivals_s[:: candidate.server_processes]  # whole requests, in turn
    return OpenLoopLoad(as_samples(arrivals_s, samples_per_request)), len(load.arrivals_s) / len(arrivals_s)
