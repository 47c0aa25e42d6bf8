"""The expectations of a finished run for its recommendation in production: highest rate, and times at a rate.

A replica is one server, or all server processes of a device if the run has several. A rate is that of a replica.

How requests arrive in production is unknown. So the values at a rate lie between those of two kinds of traffic:
requests that arrive independently of each other (Poisson), and a closed loop, whose clients wait for each answer. The
simulator that the run has fitted computes both, for a fast and for a slow server.
"""

from __future__ import annotations

import math
import statistics
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from enum import Enum

import numpy as np
from scipy import special

from objectives.metrics import LATENCY, METRICS, Measurement
from objectives.model_stats import throughput_of
from objectives.server_spread import ServerSpread, pool_server_spread
from objectives.sla import Sla
from optimizer.confirmation.windows import confirmed_spreads, windows_of
from optimizer.core.candidate import Candidate
from optimizer.core.errors import BadInputError
from optimizer.core.safe_text import show_path
from optimizer.core.trial import LoadPoint, Point
from optimizer.deploy.target_settings import METRICS_PORT, PORT_STEP
from optimizer.plan.evidence import choose_configurations
from optimizer.plan.fleet import Fleet, estimate_rate
from optimizer.plan.measured_capacity import derive_capacity
from optimizer.plan.replica import RATE_REQUESTS, Replica, fit_replica
from optimizer.plan.slowness import DEVIATIONS, EXPECTED, Slowdown, SlownessEstimate, forecast_errors
from optimizer.plan.traffic import PoissonTraffic
from optimizer.results import formatting
from optimizer.results.finished_run import FinishedRun, how_to_finish, nothing_recommended, why_unfinished
from optimizer.simulator.fitted_parameters import execution_settings
from optimizer.simulator.scenario import SimulationResult

SEED = 1
LARGEST_LOG = 300.0  # limit for a value that a damaged table could hold


class WhyNotSimulated(Enum):
    """Why the recommendation of a run cannot be simulated; the value says it in a clause."""

    PIPELINE = "the run has the batches of a step of the ensemble, which the metrics of the ensemble do not show"
    CONCURRENT = "the run measured several models together, and the simulator describes one"
    SHAPED = "the load of the run had a shape, and the simulator has steady traffic only"
    KIND = "the simulator does not describe models that stream or keep state"
    NO_BATCH_TIMES = "the run did not measure how long batches take"


@dataclass(frozen=True, slots=True)
class Range:
    """The values of a metric that are expected, from ``low`` to ``high``."""

    low: float
    high: float

    @classmethod
    def around(cls, values: Sequence[float], factor: float) -> Range:
        """Return the range of ``values``, with both ends further out by ``factor``."""
        return cls(min(values) / factor, max(values) * factor)

    def joined(self, other: Range) -> Range:
        """Return the range with the values of both."""
        return Range(min(self.low, other.low), max(self.high, other.high))


@dataclass(frozen=True, slots=True)
class ExpectedAtRate:
    """The expected values of a replica at a rate: samples per execution, and mean times of a request in ms.

    ``meets_sla`` says whether a slow replica with independent requests meets the SLA there.
    """

    mean_batch_size: Range
    queue_ms: Range
    compute_ms: Range
    meets_sla: bool

    def joined(self, other: ExpectedAtRate) -> ExpectedAtRate:
        """Return the expectation for a load with the rates of both; the SLA is met if it is at both."""
        return ExpectedAtRate(
            self.mean_batch_size.joined(other.mean_batch_size),
            self.queue_ms.joined(other.queue_ms),
            self.compute_ms.joined(other.compute_ms),
            self.meets_sla and other.meets_sla,
        )


@dataclass(frozen=True, slots=True)
class ServerValues:
    """A value of the confirmed load on each fresh server (its log), with the variance between servers."""

    logs: tuple[float, ...]
    spread: ServerSpread

    def interval(self, error: float) -> Range | None:
        """Return the confidence interval of the mean on a fresh server; each end is wrong with ``error``."""
        return self._around_mean(1 / len(self.logs), error) if self.logs else None

    def predicted(self, servers: int, error: float) -> Range | None:
        """Return the prediction interval of the mean over ``servers`` further ones; each end is wrong with ``error``.

        It is Student's t interval. None without a measurement.
        """
        return self._around_mean(1 / len(self.logs) + 1 / servers, error) if self.logs else None

    def _around_mean(self, variance_factor: float, error: float) -> Range:
        quantile = -float(special.stdtrit(self.spread.degrees_of_freedom, error))
        half_width = quantile * math.sqrt(self.spread.variance * variance_factor)
        mean = float(np.mean(self.logs))
        low, high = (min(max(end, -LARGEST_LOG), LARGEST_LOG) for end in (mean - half_width, mean + half_width))
        return Range(math.exp(low), math.exp(high))


@dataclass(frozen=True, eq=False)
class Expectation:
    """The expectations of ``run`` for its recommendation.

    Attributes:
        run: The run.
        point: The recommended configuration at its confirmed load.
        model: Name of the model that clients send requests to.
        confirmed_rate: Requests per second of a replica at that load.
        queue_ms: Mean time of a request in the queue at that load.
        time_in_server_ms: Mean time in the queue and in the execution.
        served_requests: Requests that the fresh servers served.
        safe_rate: Highest rate of a replica at which independent requests safely meet the SLA; None if it is unknown.
        simulation: The simulated replica, or the reason why the recommendation cannot be simulated.
        batch_size_error: Relative error of the simulated batch size on the run; 0 without a simulation.
        failed_requests: Requests that failed on the fresh servers.
    """

    run: FinishedRun
    point: Point
    model: str
    confirmed_rate: ServerValues
    queue_ms: ServerValues
    time_in_server_ms: ServerValues
    served_requests: int
    safe_rate: float | None
    simulation: Replica | WhyNotSimulated
    batch_size_error: float
    failed_requests: int

    @property
    def sla(self) -> Sla:
        """The SLA of the run."""
        return self.run.problem.sla

    @property
    def request_samples(self) -> float:
        """The mean number of samples of a request in the run."""
        return self.run.problem.request_batch_size

    @property
    def largest_batch(self) -> float:
        """The largest batch in samples."""
        return max(1.0, float(self.point.candidate.max_batch_size))

    @property
    def is_streamed(self) -> bool:
        """Whether the model streams its responses: Triton's duration of a request then ends before the last one."""
        return self.point.measurement.is_streamed

    @property
    def steps(self) -> tuple[str, ...]:
        """The models that the model calls; empty unless it is an ensemble or a BLS model."""
        if not is_pipeline(self.run):
            return ()
        names = {path.parent.name for path in self.run.folder.best.glob("*/config.pbtxt")}
        return tuple(sorted(names - {self.model, *self.run.concurrent_models}))

    @property
    def server_processes(self) -> int:
        """The number of servers of a replica."""
        return self.point.candidate.server_processes

    @property
    def replica_name(self) -> str:
        """The word for a replica: a run with one server process has servers."""
        return "server" if self.server_processes == 1 else "replica"

    @property
    def longest_latency_ms(self) -> float | None:
        """The largest latency that the run permits or measured; None if it has none."""
        bounds = [bound.bound for bound in self.sla.latencies if METRICS[bound.metric].timing is LATENCY]
        measured = self.point.measurement
        return max(filter(None, [*bounds, measured.latency_p99_ms, measured.latency_p95_ms]), default=None)

    @property
    def overlap_factor(self) -> int:
        """The factor by which executions can have slowed each other in the run.

        Executions of several instances overlap, and a load generator on the server's CPUs takes time from them. At a
        lower load this happens less often, so that executions are faster by up to this factor.
        """
        return self.point.candidate.total_instances * (2 if self.run.problem.client_shares_cpus else 1)

    def at(self, rate: float, replicas: int, error: float) -> ExpectedAtRate | None:
        """Return the expectation for the mean of ``replicas`` that get ``rate`` requests per second each.

        Each end of a range is wrong with about ``error``. None without a simulation or a rate.
        """
        simulated = self.simulation
        if not isinstance(simulated, Replica) or rate <= 0:
            return None
        estimate = predict_slowness(simulated.slowness_estimate, replicas)
        slow, fast = estimate.quantile(1 - error), estimate.quantile(error)
        closed_loops = [
            result for slowdown in (fast, slow) for result in simulate_closed_loops(simulated, rate, slowdown)
        ]
        independent = [simulate_poisson(simulated, rate, slowdown) for slowdown in (fast, slow)]
        results = [*closed_loops, *independent]
        z_score = -float(special.ndtri(error))
        batch_size_factor = math.exp(z_score * self.batch_size_error)
        time_factor = math.exp(z_score * estimate.forecast.latency)
        batch_size = Range.around([result.mean_batch_size for result in results], batch_size_factor)
        smallest_batch = min(self.request_samples, self.largest_batch)
        is_overloaded = any(result.overloaded for result in independent)
        longest_queue_ms = max(1e3 * result.queue_avg_s for result in results) * time_factor
        execution_ms = Range.around([1e3 * result.compute_avg_s for result in results], time_factor)
        longest_execution_ms = _longest_execution_ms(simulated, self.largest_batch, slow) * time_factor
        return ExpectedAtRate(
            mean_batch_size=Range(
                min(max(batch_size.low, smallest_batch), self.largest_batch), min(batch_size.high, self.largest_batch)
            ),
            queue_ms=Range(0.0, math.inf if is_overloaded else longest_queue_ms),
            compute_ms=Range(execution_ms.low / self.overlap_factor, min(execution_ms.high, longest_execution_ms)),
            meets_sla=simulated.meets(independent[-1], slow.latency_factor) and not independent[-1].overloaded,
        )


def _longest_execution_ms(replica: Replica, largest_batch: float, slowdown: Slowdown) -> float:
    """Return the mean time of an execution of the slowest batch size up to ``largest_batch`` samples.

    It bounds the range of an overloaded server, which has no steady state to simulate.
    """
    times = replica.model.times(execution_settings(replica.candidate))
    rows = math.ceil(largest_batch / times.step)
    return 1e3 * float(times.seconds[:rows].max()) * slowdown.slowness


def predict_slowness(estimate: SlownessEstimate, replicas: int) -> SlownessEstimate:
    """Return the distribution of the mean slowness of further ``replicas``, which differ from those of the run."""
    variance = DEVIATIONS**2 * (1 / replicas + 1 / estimate.deployments)
    return replace(estimate, errors=np.sqrt(variance + estimate.forecast.throughput**2))


def simulate_poisson(replica: Replica, rate: float, slowdown: Slowdown) -> SimulationResult:
    """Return the simulated behaviour for requests that arrive independently."""
    return replica.serve(PoissonTraffic().replica_arrivals_s(rate, 1, "random", RATE_REQUESTS, SEED), slowdown)


def simulate_closed_loops(replica: Replica, rate: float, slowdown: Slowdown) -> list[SimulationResult]:
    """Return the simulated behaviour with the two concurrencies whose throughputs enclose ``rate``.

    It is that of a single client if this sends more, and that of the fullest closed loop if this serves less.
    """
    simulated: dict[int, SimulationResult] = {}

    def serves(concurrency: int) -> bool:
        simulated[concurrency] = replica.serve_closed_loop(concurrency, slowdown)
        return simulated[concurrency].throughput_infer_per_sec >= rate * replica.request_batch_size

    fullest = replica.saturating_concurrency
    if not serves(fullest):
        return [simulated[fullest]]
    lowest = 1 + bisect_left(range(1, fullest), True, key=serves)
    return [simulated[concurrency] for concurrency in (lowest - 1, lowest) if concurrency in simulated]


def derive_expectation(run: FinishedRun) -> Expectation:
    """Return the metrics to expect from production servers that run the recommendation of ``run``.

    Raises BadInputError, in one line, if it has not ended, or recommends nothing.
    """
    path = show_path(run.folder.path)
    if reason := why_unfinished(run):
        raise BadInputError(f"{path}: {reason} and has no recommendation to watch; {how_to_finish(run)}")
    outcome = run.outcome
    if outcome is None or outcome.recommended is None:
        raise nothing_recommended(run, "watch")
    point, confirmed = outcome.recommended, outcome.confirmed
    fresh_servers = windows_of(confirmed.point, run.trials) if confirmed else []
    servers = fresh_servers or [[point.measurement]]
    timed_servers = [] if is_pipeline(run) else servers  # a pipeline has the times of one step only
    fresh_windows = [window for windows in fresh_servers for window in windows]
    counted = fresh_windows if any(window.requests for window in fresh_windows) else [point.measurement]
    spread = confirmed_spreads(run.trials, run.problem, fresh_servers)["throughput"]
    size, model = run.problem.request_batch_size, point.candidate.served_model(run.problem.model)
    simulation = _simulate_replica(run)
    return Expectation(
        run=run,
        point=point,
        model=model,
        confirmed_rate=_server_values(servers, lambda m: _per_size(throughput_of(model, m), size), spread),
        queue_ms=_server_values(timed_servers, lambda m: m.queue_ms),
        time_in_server_ms=_server_values(timed_servers, time_in_server_ms),
        served_requests=sum(window.requests or 0 for window in counted),
        failed_requests=sum(window.errors or 0 for window in counted),
        safe_rate=_safe_rate(run, simulation),
        simulation=simulation,
        batch_size_error=(
            _batch_size_error(simulation, point.candidate, run) if isinstance(simulation, Replica) else 0.0
        ),
    )


def check_server_count(expectation: Expectation, count: int) -> None:
    """Raise BadInputError, in one line, if ``count`` servers are no whole number of replicas."""
    processes = expectation.server_processes
    if count % processes:
        raise BadInputError(
            f"--url: names {formatting.count(count, 'server')}, but {show_path(expectation.run.folder.path)} "
            f"recommends {processes} server processes; give the metrics of each process, such as "
            f"{example_urls(processes)}, and those of each further replica"
        )


def example_urls(processes: int) -> str:
    """Return the options for a replica on the ports of `tune emit --format compose`."""
    urls = [f"--url host:{METRICS_PORT + PORT_STEP * process}" for process in range(min(processes, 3))]
    return " ".join(urls) + (" …" if processes > len(urls) else "")


def is_pipeline(run: FinishedRun) -> bool:
    """Return whether the model of ``run`` calls others: best/ then has a configuration for each of them."""
    return len(list(run.folder.best.glob("*/config.pbtxt"))) > 1 + len(run.concurrent_models)


def time_in_server_ms(measured: Measurement) -> float | None:
    """Return the mean time of a request in the queue and in the execution; None if it is unknown."""
    executed = execution_ms(measured)
    return None if measured.queue_ms is None or executed is None else measured.queue_ms + executed


def execution_ms(measured: Measurement) -> float | None:
    """Return the mean time of the execution that a request was part of; None if it is unknown."""
    if measured.compute_infer_ms is None:
        return None
    return (measured.compute_input_ms or 0.0) + measured.compute_infer_ms + (measured.compute_output_ms or 0.0)


def _server_values(
    servers: Sequence[Sequence[Measurement]],
    value: Callable[[Measurement], float | None],
    spread: ServerSpread | None = None,
) -> ServerValues:
    """Return the mean of a value on each of ``servers``; windows in which it is zero count.

    ``spread`` is the variance between servers; without one it is estimated from these servers, without such windows.
    """
    of_servers = (
        np.array([number for window in windows if (number := value(window)) is not None and 0 <= number < math.inf])
        for windows in servers
    )
    positive = [values for values in of_servers if values.any()]
    logs = tuple(math.log(float(values.mean())) for values in positive)
    return ServerValues(logs, spread or pool_server_spread([[np.log(values[values > 0]) for values in positive]]))


def _per_size(throughput: float | None, size: float) -> float | None:
    return None if throughput is None else throughput / size


def _simulate_replica(run: FinishedRun) -> Replica | WhyNotSimulated:
    """Return the simulated replica of the recommendation, or why there is none."""
    if not run.problem.is_simulated:
        return WhyNotSimulated.KIND
    if is_pipeline(run):
        return WhyNotSimulated.PIPELINE
    if run.concurrent_models:
        return WhyNotSimulated.CONCURRENT
    if run.problem.has_load_shape:
        return WhyNotSimulated.SHAPED
    latencies = run.problem.sla.latencies or Sla.from_bounds({"p95": math.inf})
    configuration = choose_configurations([run], latencies)[0][0]
    try:
        return fit_replica(configuration.evidence, latencies)
    except ValueError:
        return WhyNotSimulated.NO_BATCH_TIMES


def _safe_rate(run: FinishedRun, simulation: Replica | WhyNotSimulated) -> float | None:
    """Return the rate of one replica that `tune plan` calls safe; None if it is unknown."""
    if not run.problem.sla.latencies or run.problem.has_load_shape:
        return None
    if isinstance(simulation, Replica):
        return estimate_rate(Fleet(simulation, PoissonTraffic(), "random"), 1).safe
    if run.problem.is_simulated:
        return None
    try:
        return derive_capacity(run).safe
    except BadInputError:
        return None


def _batch_size_error(replica: Replica, candidate: Candidate, run: FinishedRun) -> float:
    """Return the relative error of the simulated batch size at the loads of the run.

    Its prior is that of a simulated latency, see ``forecast_errors``.
    """
    slowdown = replica.slowness_estimate.quantile(EXPECTED)
    simulated_per_request = replica.request_batch_size / replica.model.request_batch_size
    logs_by_load = defaultdict[LoadPoint, list[float]](list)
    for measured, load in _steady_measurements(candidate, run):
        size = measured.mean_batch_size
        if size is not None and 0 < size < math.inf:
            logs_by_load[load].append(math.log(size))
    log_errors = []
    for load, measured_logs in logs_by_load.items():
        if load.concurrency:
            concurrency = max(1, round(load.concurrency * simulated_per_request))
            result = replica.serve_closed_loop(concurrency, slowdown)
        else:
            result = simulate_poisson(replica, load.request_rate, slowdown)
        log_errors.append(statistics.fmean(measured_logs) - math.log(result.mean_batch_size))
    return forecast_errors([], log_errors).latency


def _steady_measurements(candidate: Candidate, run: FinishedRun) -> Iterable[tuple[Measurement, LoadPoint]]:
    """Yield the measurements of ``candidate`` that are not overloaded or lost, with their loads."""
    for trial in run.trials:
        if trial.candidate != candidate:
            continue
        for load, measured in trial.measurements:
            if measured.throughput_infer_per_sec and not measured.overloaded:
                yield measured, load
        for window in trial.confirmations:
            if not window.is_lost and not window.measurement.overloaded:
                yield window.measurement, window.load
