"""A model of a measured server: the simulator with fitted service times, overheads and jitter."""

from __future__ import annotations

import functools
import math
from collections import Counter
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, TypeAlias

import numpy as np

from objectives import batch_stats
from objectives.arrays import FloatArray
from objectives.metrics import STATISTICS, Measurement
from optimizer.config.batching import is_batcher_field
from optimizer.config.problem import Problem
from optimizer.config.queue_policy import Fields, with_queue
from optimizer.core.candidate import Candidate
from optimizer.core.request_sizes import SizeDistribution
from optimizer.core.trial import Point
from optimizer.simulator.black_box_fit import (
    BlackBoxParameters,
    fit_parameters,
    prior_medians,
    sample_parameters,
)
from optimizer.simulator.calibration import Observation, observe_point
from optimizer.simulator.fitted_parameters import (
    DEFAULT_GAP_S,
    FITTED_POINTS,
    MIN_TIME_S,
    NETWORK_QUANTILE,
    ExecutionSettings,
    FittedOverheads,
    estimate_network_s,
    execution_settings,
    fit_overheads,
    fit_service_times,
    longest_gap_s,
    with_fitted_slowdown,
)
from optimizer.simulator.predicted_metrics import (
    ConfigurationLoad,
    ModelErrors,
    configuration_loads,
    log_measurements,
    log_predictions,
    six_digits,
)
from optimizer.simulator.scenario import (
    ClosedLoopLoad,
    MeasurementInterval,
    OpenLoopLoad,
    Scenario,
    ServiceTimes,
    SimulatedLoad,
    SimulationResult,
    SimulationTrace,
    concurrency_of_process,
)
from optimizer.simulator.service_time_samples import sample_service_times
from optimizer.simulator.simulate import exponential_gaps, lognormal_jitter, simulate_many, trace

# how many requests a simulation measures, by concurrency: enough batches for a small statistical error
INTERVALS = (
    (24, MeasurementInterval(warm_up_requests=150, requests=700)),
    (80, MeasurementInterval(warm_up_requests=300, requests=2400)),
    (math.inf, MeasurementInterval()),
)
ARRIVALS = 2000  # requests of an open loop
MISSED_SHARE = 0.4  # the mean of 20 configurations and loads; docs/queues.md explains the cause
CandidateRate: TypeAlias = tuple[Candidate, float]  # a candidate and the requests per second of an open loop
ERRORS = ModelErrors(throughput=0.1, tail=0.1)
BLACK_BOX_ERRORS = ModelErrors(throughput=0.2, tail=0.1)  # without the server's statistics


@dataclass(frozen=True, eq=False)
class DynamicBatchingModel:
    """The parameters of a simulated server. Throughput and latency are those of a server that refuses no request.

    Attributes:
        times: Returns the service times of an execution setting.
        errors: Expected relative errors of the simulation.
        black_box: The vector of ``black_box_fit`` if the server has no statistics.
        queue: Settings of the queue that candidates have in addition to their own.
    """

    times: Callable[[ExecutionSettings], ServiceTimes]
    request_batch_size: int
    overheads: FittedOverheads
    seed: int = 0
    errors: ModelErrors = ERRORS
    fixed_shapes: bool = True
    black_box: FloatArray | None = None
    queue: Fields = ()
    name: ClassVar[str] = "simulator of the dynamic batcher"

    def simulate(self, loads: Sequence[ConfigurationLoad], threads: int = 1) -> list[SimulationResult]:
        """Return the simulated performance of each (candidate, concurrency).

        Of several server processes one is simulated, with its share of the load. Equal scenarios are simulated once,
        such as those of candidates that differ only in the settings of another model.
        """
        concurrencies = [concurrency_of_process(candidate, n) for candidate, n in loads]
        scenarios = self._scenarios(loads)
        keys = [_scenario_key(scenario) for scenario in scenarios]
        distinct = {key: (scenario, n) for key, scenario, n in zip(keys, scenarios, concurrencies, strict=True)}
        jitter, gaps_s = self._random_rings()
        results: dict[Hashable, SimulationResult] = {}
        above = 0.0
        for up_to, interval in INTERVALS:
            chosen = {key: scenario for key, (scenario, n) in distinct.items() if above < n <= up_to}
            simulated = simulate_many(
                list(chosen.values()), jitter=jitter, gaps_s=gaps_s, interval=interval, threads=threads
            )
            results.update(zip(chosen, simulated, strict=True))
            above = up_to
        servers = [n / in_flight for (_, n), in_flight in zip(loads, concurrencies, strict=True)]
        return [results[key].scaled_to_servers(count) for key, count in zip(keys, servers, strict=True)]

    def simulate_rates(self, loads: Sequence[CandidateRate], threads: int = 1) -> list[SimulationResult]:
        """Return the simulated performance of each (candidate, requests per second) of a Poisson process.

        Of several server processes one is simulated, with its share of the rate. Equal scenarios are simulated once.
        """
        scenarios = self._scenarios([(candidate, 1) for candidate, _ in loads], self._open_loops(loads))
        keys = [(_scenario_key(scenario), rate) for scenario, (_, rate) in zip(scenarios, loads, strict=True)]
        distinct = dict(zip(keys, scenarios, strict=True))
        jitter, gaps_s = self._random_rings()
        simulated = simulate_many(list(distinct.values()), jitter=jitter, gaps_s=gaps_s, threads=threads)
        results = dict(zip(distinct, simulated, strict=True))
        return [
            results[key].scaled_to_servers(candidate.server_processes)
            for key, (candidate, _) in zip(keys, loads, strict=True)
        ]

    def refused_shares(
        self,
        loads: Sequence[ConfigurationLoad],
        rates: Sequence[float] | None = None,
        priorities: SizeDistribution | None = None,
        missed_share: float = MISSED_SHARE,
    ) -> FloatArray:
        """Return the share [loads] of requests that the candidate's queue rejects or lets expire.

        ``rates`` are the requests per second of a Poisson process; None keeps the concurrency of each load in flight.
        ``priorities`` are the shares of the priorities of the requests; for ``missed_share`` see ``Scenario``.
        Of several server processes one is simulated, with its share of the load.
        """
        open_loops = None
        if rates is not None:
            open_loops = self._open_loops([(one, rate) for (one, _), rate in zip(loads, rates, strict=True)])
        scenarios = [
            replace(scenario, refuses=True, missed_share=missed_share, priorities=priorities)
            for scenario in self._scenarios(loads, open_loops)
        ]
        jitter, gaps_s = self._random_rings()
        results = simulate_many(scenarios, jitter=jitter, gaps_s=gaps_s)
        shares = [result.rejected_share + result.timed_out_share for result in results]
        return np.asarray(np.nan_to_num(np.array(shares)))

    def measure(self, loads: Sequence[ConfigurationLoad]) -> list[Measurement]:
        """Return the simulated report of a load generator and of the server for each (candidate, concurrency)."""
        jitter, gaps_s = self._random_rings()
        traces = [trace(scenario, jitter=jitter, gaps_s=gaps_s) for scenario in self._scenarios(loads)]
        return [
            simulated_measurement(result, executions, self.overheads.network_s)
            for result, executions in zip(self.simulate(loads), traces, strict=True)
        ]

    def at_speed(self, time_share: float, network_share: float) -> DynamicBatchingModel:
        """Return the model with its batch times and the times outside the server multiplied by the shares."""
        times, overheads = self.times, self.overheads

        def scaled_times(settings: ExecutionSettings) -> ServiceTimes:
            unscaled = times(settings)
            return replace(unscaled, seconds=time_share * unscaled.seconds)

        scaled_overheads = replace(
            overheads,
            network_s=max(MIN_TIME_S, network_share * overheads.network_s),
            gap_s=max(MIN_TIME_S, network_share * overheads.gap_s),
        )
        return replace(self, times=scaled_times, overheads=scaled_overheads)

    def _open_loops(self, loads: Sequence[CandidateRate]) -> list[SimulatedLoad]:
        """Return a Poisson process with the rate of one server process for each of ``loads``."""
        arrivals = np.cumsum(np.random.default_rng(self.seed).exponential(1.0, ARRIVALS))
        shares = [rate / candidate.server_processes for candidate, rate in loads]
        return [OpenLoopLoad((arrivals - arrivals[0]) / share) for share in shares]

    def _random_rings(self) -> tuple[FloatArray, FloatArray]:
        return (
            lognormal_jitter(self.overheads.jitter, self.seed),
            exponential_gaps(self.overheads.gap_s, self.seed),
        )

    def _scenarios(
        self, loads: Sequence[ConfigurationLoad], simulated: Sequence[SimulatedLoad] | None = None
    ) -> list[Scenario]:
        """Return the scenarios of ``loads``: closed loops, or under the ``simulated`` loads if these are given.

        The service times are extended to the largest batch that can occur: a candidate may be outside the space, or
        an open loop may have more requests in flight than the closed loops that the model was fitted to. Settings
        with equal times share one object, see ``_scenario_key``.
        """
        simulated = simulated or [ClosedLoopLoad(concurrency_of_process(candidate, n)) for candidate, n in loads]
        settings = [execution_settings(candidate) for candidate, _ in loads]
        largest = Counter[ExecutionSettings]()
        for (candidate, _), group, load in zip(loads, settings, simulated, strict=True):
            batched = candidate.max_batch_size if candidate.dynamic_batching else 1
            largest[group] = max(largest[group], min(batched, load.max_in_flight * self.request_batch_size))
        distinct_times: dict[Hashable, ServiceTimes] = {}
        times = {}
        for group, samples in largest.items():
            service = self.times(group).up_to(samples)
            times[group] = distinct_times.setdefault((service.seconds.shape, service.seconds.tobytes()), service)
        overheads = self.overheads.to_overheads()
        return [
            Scenario(
                with_queue(candidate, self.queue) if self.queue else candidate,
                load,
                times[group],
                overheads,
                self.request_batch_size,
                self.fixed_shapes,
                refuses=False,
            )
            for (candidate, _), group, load in zip(loads, settings, simulated, strict=True)
        ]


def _scenario_key(scenario: Scenario) -> Hashable:
    """Return equal keys for scenarios of a model that differ at most in fields that the simulator does not read."""
    fields = tuple(field for field in scenario.candidate.fields if is_batcher_field(field[0]))
    candidate = replace(scenario.candidate, instance_count=scenario.candidate.instances, fields=fields)
    return candidate, scenario.load.max_in_flight, id(scenario.service)


def fit(
    points: Sequence[Point], problem: Problem, latency: str, seed: int = 0, *, open_loop: bool = False
) -> DynamicBatchingModel:
    """Return the server model that is closest to the measured ``points``.

    It is fitted to the server's own statistics where these were measured, otherwise to throughput and latency alone.

    Args:
        points: Complete measured points.
        problem: The search problem, which defines the request batch size.
        latency: The latency metric whose tail is fitted.
        seed: Seed of the simulation's random numbers.
        open_loop: Whether ``points`` are simulated with random arrivals at their throughput, instead of as closed
            loops. Their number of busy instances varies, so the slowdown by these is fitted too.

    Raises:
        ValueError: ``points`` is empty.
    """
    if not points:
        raise ValueError("no measured points to fit the simulator to")
    groups = _observations(points, problem, open_loop=open_loop)
    reported = [point for point in points if observe_point(point)]
    network_s = estimate_network_s(reported, 0.5 if open_loop else NETWORK_QUANTILE)
    if network_s is None:
        return _BlackBox(points, problem, latency, seed).fit()
    service = fit_service_times(groups, problem, largest_batch(points, problem))
    times = functools.cache((with_fitted_slowdown(service, groups) if open_loop else service).times)
    model = DynamicBatchingModel(
        times,
        problem.space.request_batch_size,
        FittedOverheads(network_s),
        seed,
        fixed_shapes=problem.fixed_shapes,
        queue=problem.queue,
    )
    if open_loop:
        points = list(points)[-FITTED_POINTS:]
        batch = problem.space.request_batch_size
        rates = [(point.candidate, point.throughput_infer_per_sec / batch) for point in points]
        points = [_at_mean_latency(point) for point in points]

    def simulate(overheads: FittedOverheads, loads: Sequence[ConfigurationLoad]) -> list[SimulationResult]:
        trial = replace(model, overheads=overheads)
        if not open_loop:
            return trial.simulate(loads)
        results = trial.simulate_rates(rates)
        return [
            replace(result, throughput_infer_per_sec=batch * n / result.latency_avg_s)
            for result, (_, n) in zip(results, loads, strict=True)
        ]

    return replace(model, overheads=fit_overheads(simulate, model.overheads, points, latency))


def _at_mean_latency(point: Point) -> Point:
    """Return ``point`` with the throughput of its concurrency at its mean latency (Little's law)."""
    samples = point.load.concurrency * point.load.request_batch_size
    throughput = 1e3 * samples / (point.measurement.latency_avg_ms or math.nan)
    return replace(point, measurement=replace(point.measurement, throughput_infer_per_sec=throughput))


def sample_models(
    model: DynamicBatchingModel,
    points: Sequence[Point],
    problem: Problem,
    latency: str,
    count: int,
    *,
    open_loop: bool = False,
) -> list[DynamicBatchingModel]:
    """Return ``count`` samples of the posterior of ``model``, which was fitted to ``points`` and ``latency``.

    They differ in their service times. Without the server's statistics they also differ in their overheads.
    """
    if model.black_box is not None:
        return _BlackBox(points, problem, latency, model.seed).sample(model.black_box, count)
    groups = _observations(points, problem, open_loop=open_loop)
    samples = sample_service_times(groups, problem, largest_batch(points, problem), count, model.seed)
    return [replace(model, times=functools.cache(sample.times)) for sample in samples]


def _observations(
    points: Sequence[Point], problem: Problem, *, open_loop: bool
) -> dict[ExecutionSettings, list[Observation]]:
    """Return the server's statistics at ``points`` by execution settings.

    In an open loop all instances can be busy, although few requests are in flight on average.
    """
    groups: dict[ExecutionSettings, list[Observation]] = {}
    for point in points:
        if (observation := observe_point(point)) is not None:
            if open_loop:
                observation = replace(observation, concurrency=problem.max_concurrency)
            groups.setdefault(execution_settings(problem.space.canonical(point.candidate)), []).append(observation)
    return groups


def largest_batch(points: Sequence[Point], problem: Problem) -> int:
    """Return the samples of the largest batch that the space or ``points`` can form, limited by the load."""
    batch = problem.space.request_batch_size
    size = max(*problem.space.max_batch_size, *(point.candidate.max_batch_size for point in points))
    load = max(problem.max_concurrency, *(point.load.concurrency for point in points))
    return batch * max(1, min(size // batch, load))


@dataclass(frozen=True, eq=False)
class _BlackBox:
    """The simulation of measured points by the vectors of ``black_box_fit``."""

    points: Sequence[Point]
    problem: Problem
    latency: str
    seed: int

    def fit(self) -> DynamicBatchingModel:
        """Return the model that is closest in throughput and latency."""
        return self.model(fit_parameters(self._simulate, self._measured(), self._medians()))

    def sample(self, fitted: FloatArray, count: int) -> list[DynamicBatchingModel]:
        """Return ``count`` samples of the posterior."""
        settings = [execution_settings(self.problem.space.canonical(point.candidate)) for point in self._used]
        arguments = self._measured(), settings, fitted, self._medians(), count, self.seed
        return [self.model(vector) for vector in sample_parameters(self._simulate, *arguments)]

    def model(self, vector: FloatArray) -> DynamicBatchingModel:
        """Return the model of a vector of parameters."""
        parameters, batch = BlackBoxParameters.from_vector(vector), self.problem.space.request_batch_size
        largest = largest_batch(self.points, self.problem) // batch
        times = functools.cache(parameters.service_times(largest, self.problem).times)
        gap_s = min(DEFAULT_GAP_S, longest_gap_s(self.points))
        overheads = FittedOverheads(parameters.network_s, gap_s=gap_s, jitter=parameters.jitter)
        errors, queue = BLACK_BOX_ERRORS, self.problem.queue
        return DynamicBatchingModel(
            times, batch, overheads, self.seed, errors, self.problem.fixed_shapes, vector, queue
        )

    @property
    def _used(self) -> list[Point]:
        return list(self.points)[-FITTED_POINTS:]

    def _measured(self) -> FloatArray:
        return log_measurements(self._used, [self.latency])

    def _simulate(self, vector: FloatArray) -> FloatArray:
        return log_predictions(self.model(vector).simulate(configuration_loads(self._used)), [self.latency])

    def _medians(self) -> FloatArray:
        """Return the medians of the prior, for the shortest latency of a request."""
        latencies_s = np.exp(self._measured()[:, 1])
        return prior_medians(float((latencies_s / [point.load.concurrency for point in self._used]).min()))


def simulated_measurement(result: SimulationResult, executions: SimulationTrace, network_s: float) -> Measurement:
    """Return the measurement that a load generator and the server's statistics would report for a simulation.

    ``executions`` is a trace of the same scenario; each request spends ``network_s`` outside queue and computation.
    """
    compute_s = result.latency_avg_s - result.queue_avg_s - network_s
    metrics = {
        "throughput_infer_per_sec": result.throughput_infer_per_sec,
        **{f"latency_{name}_ms": 1e3 * getattr(result, f"latency_{name}_s") for name in STATISTICS},
        "network_ms": 1e3 * network_s,
        "queue_ms": 1e3 * result.queue_avg_s,
        "compute_infer_ms": 1e3 * max(compute_s, 0.0),
        "mean_batch_size": result.mean_batch_size,
    }
    rounded: dict[str, Any] = {name: six_digits(value) for name, value in metrics.items()}
    return Measurement(
        **rounded,
        compute_input_ms=0.0,
        compute_output_ms=0.0,
        batch_stats=batch_stats.to_text(_executions_by_size(executions)),
        requests=result.requests,
        stable=True,
    )


def _executions_by_size(executions: SimulationTrace) -> list[batch_stats.BatchStatistic]:
    ended = np.isfinite(executions.end_s)
    sizes, durations_s = executions.samples[ended], (executions.end_s - executions.start_s)[ended]
    entries = []
    for size in np.unique(sizes):
        seconds = durations_s[sizes == size]
        entries.append(batch_stats.BatchStatistic(int(size), len(seconds), round(1e9 * float(seconds.sum()))))
    return entries
