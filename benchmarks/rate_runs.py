"""Count the recommendations of simulated runs near the capacity of a server that miss the bound.

    python benchmarks/rate_runs.py [--capacities 100 400] [--use 0.8 0.9] [--distribution poisson] [--bound avg]

Searches simulated servers with Poisson arrivals, or those of ``--distribution``, and confirms the best configurations
with the functions of a real run, by a virtual clock. The servers are those of disturbed_runs.py without its
disturbances, and ``unbatched``, which executes one request at a time, with service times whose standard deviation is
their mean. All service times are multiplied so that the fastest configuration has a capacity of ``--capacities``
requests per second. The bound is the p95 of that configuration at a rate whose peak is ``--use`` times its capacity,
or its mean latency with ``--bound avg``. Servers differ in speed by ``--server-noise`` (standard deviation of the
log).

The truth is a long simulation of the recommended configuration at the recommended rate. Prints Markdown; progress
goes to standard error.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import os
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import lru_cache
from pathlib import Path

import numpy as np

from lib.output import command, measured_on, print_head, row
from lib.process_pool import run_jobs
from lib.simulated_stack import DEPLOY_SECONDS, MAX_CONCURRENCY, PROBE_NOISE, PROBE_SECONDS, SERVERS
from lib.simulated_tables import REQUEST_BATCH_SIZE, SimulatedServer, hidden_server
from objectives import batch_stats
from objectives.arrays import FloatArray
from objectives.metrics import LATENCY, Measurement
from objectives.sla import Sla, Verdict
from optimizer.config.problem import Problem
from optimizer.config.search_space import SearchSpace
from optimizer.confirmation.confirmer import Confirmer, model_fitter
from optimizer.confirmation.server_plan import START_SECONDS
from optimizer.confirmation.verdicts import judge_confirmations
from optimizer.core.budget import Budget
from optimizer.core.candidate import Candidate
from optimizer.core.endpoint import Endpoint
from optimizer.core.load_shapes import is_load_shape, parse_load_shape
from optimizer.core.measurement_windows import MAX_SPREAD
from optimizer.core.resource_usage import ResourceUsage
from optimizer.core.stopwatch import Stopwatch
from optimizer.core.trial import LoadPoint
from optimizer.measure.load_client.arrivals import parse_arrivals
from optimizer.measure.load_client.client import WATCH_SECONDS
from optimizer.measure.load_client.client_files import NEVER, SendRecord
from optimizer.measure.load_client.generators import OpenLoopGenerator
from optimizer.measure.load_client.measured_requests import LEAD_IN_SECONDS, PlannedLoad
from optimizer.measure.load_client.open_loop import summarize_open_loop
from optimizer.measure.load_client.overload import OverloadDetector
from optimizer.measure.measurer import Measurer
from optimizer.options.run_options import RunOptions
from optimizer.replay.replay import DiscardingRecord
from optimizer.results.progress_observers import QuietObserver
from optimizer.search import make_searcher
from optimizer.store.recording import baselines
from optimizer.study.scheduler import Scheduler
from optimizer.study.trial_runner import run_trials

UNBATCHED = "unbatched"
POISSON = "poisson"
ALLOWED = 0.05  # p95
P95, AVERAGE = "p95", "avg"  # the bounded latency
PERMITTED = {P95: ALLOWED, AVERAGE: 1.0}  # highest ``excess_ratio`` with which the bound is met
TRUE_REQUESTS = 2_000_000  # requests of the simulation that decides whether the bound is met
BEST_REQUESTS = 200_000  # of each simulation that searches the best rate
ALONE_REQUESTS, ALONE_SECONDS = 3, 1e3  # requests that are sent alone, and the time between them
BEST_STEPS = 7  # halvings of the interval of the best rate
BATCHED_SPACE = SearchSpace((4, 32), ("off", 0, 2000), ("none",), (1, 2), request_batch_size=REQUEST_BATCH_SIZE)
LARGEST_EXCESS = {P95: "largest share over the bound %", AVERAGE: "largest mean latency, % of the bound"}


@dataclass(frozen=True)
class RateRunJob:
    server: str
    capacity: float
    use: float
    server_noise: float
    budget_seconds: float
    distribution: str
    metric: str
    seed: int


@lru_cache
def rate_server(name: str, capacity: float) -> tuple[SimulatedServer, Candidate]:
    """Return the server ``name`` with this capacity in requests per second, and its fastest configuration."""
    if name == UNBATCHED:
        space = SearchSpace((REQUEST_BATCH_SIZE,), ("off", 0), ("none",), (1,), request_batch_size=REQUEST_BATCH_SIZE)
        server = SimulatedServer(UNBATCHED, 1 / capacity, 1e-9, 0.0, 1e-4, jitter=1.0, seed=0, space=space)
    else:
        server = replace(hidden_server(name), space=BATCHED_SPACE)
    cells = [(candidate, 4 * MAX_CONCURRENCY) for candidate in server.space.candidates()]
    for _ in range(3):  # times outside queue and computation do not change, so one step may not suffice
        rates = [(one.throughput_infer_per_sec or 0.0) / REQUEST_BATCH_SIZE for one in server.measure(cells)]
        factor = max(rates) / capacity
        server = replace(server, fixed_s=factor * server.fixed_s, per_sample_s=factor * server.per_sample_s)
    return server, cells[rates.index(max(rates))][0]


def simulated_latencies(
    server: SimulatedServer, candidate: Candidate, arrivals_s: FloatArray, slowness: float, seed: int
) -> tuple[FloatArray, list[batch_stats.BatchStatistic]]:
    """Return the latency of each request in seconds, and the executions by size."""
    executed = server.open_loop(candidate, arrivals_s, slowness, seed)
    end_s = executed.end_s[executed.execution] + server.network_s / 2
    durations_s = executed.end_s - executed.start_s
    sizes, counts = np.unique(executed.samples, return_counts=True)
    seconds = [float(durations_s[executed.samples == size].sum()) for size in sizes]
    executions = [
        batch_stats.BatchStatistic(int(size), int(count), round(1e9 * duration))
        for size, count, duration in zip(sizes, counts, seconds, strict=True)
    ]
    return end_s - executed.sent_s, executions


def make_arrivals(distribution: str, rate: float, requests: int, seed: int) -> FloatArray:
    """Return about this number of send times in seconds, from 0."""
    if distribution == POISSON:  # without the variance of the number of requests that ``plan`` leaves out
        arrivals_s = np.cumsum(np.random.default_rng(seed).exponential(1 / rate, requests))
    else:
        arrivals_s = parse_arrivals(distribution).plan(rate, requests / rate, seed)
    return np.asarray(arrivals_s - arrivals_s[0], dtype=np.float64)


def excess_ratio(latencies_s: FloatArray, metric: str, bound_ms: float) -> float:
    """Return the share of requests over a bound on p95, or the mean latency over its bound."""
    return float(np.mean(1e3 * latencies_s > bound_ms) if metric == P95 else np.mean(1e3 * latencies_s) / bound_ms)


def true_excess(job: RateRunJob, candidate: Candidate, rate: float, bound_ms: float, requests: int) -> float:
    """Return the expected ``excess_ratio`` on a fresh server, from a long simulation."""
    server, _ = rate_server(job.server, job.capacity)
    nodes, weights = np.polynomial.hermite_e.hermegauss(5 if job.server_noise else 1)
    ratios = []
    for number, node in enumerate(nodes):
        arrivals_s = make_arrivals(job.distribution, rate, requests // len(nodes), number)
        slowness = math.exp(job.server_noise * node)
        latencies_s, _ = simulated_latencies(server, candidate, arrivals_s, slowness, number)
        ratios.append(excess_ratio(latencies_s, job.metric, bound_ms))
    return float(np.average(ratios, weights=weights))


@lru_cache
def bound_and_best(job: RateRunJob) -> tuple[float, float]:
    """Return the bound in ms, and the highest rate of all configurations that meets it; ``job`` has the seed 0."""
    server, fastest = rate_server(job.server, job.capacity)
    peak = parse_load_shape(job.distribution).peak if is_load_shape(job.distribution) else 1.0
    arrivals_s = make_arrivals(job.distribution, job.use * job.capacity / peak, TRUE_REQUESTS, 0)
    latencies_s, _ = simulated_latencies(server, fastest, arrivals_s, 1.0, 0)
    bounded_s = np.quantile(latencies_s, 1 - ALLOWED) if job.metric == P95 else latencies_s.mean()
    bound_ms = float(f"{1e3 * bounded_s:.3g}")
    permitted, best = PERMITTED[job.metric], 0.0
    for candidate in server.space.candidates():
        low, high = 0.2 * job.capacity / peak, job.capacity
        if best and true_excess(job, candidate, best, bound_ms, BEST_REQUESTS) > permitted:
            continue
        for _ in range(BEST_STEPS):
            rate = (low + high) / 2
            meets = true_excess(job, candidate, rate, bound_ms, BEST_REQUESTS) <= permitted
            low, high = (rate, high) if meets else (low, rate)
        best = max(best, low)
    return bound_ms, best


@dataclass
class RateServer:
    """A simulated server at request rates: target, load generator, telemetry, probe and clock."""

    server: SimulatedServer
    sla: Sla
    noise: float
    distribution: str
    seed: int
    seconds: float = 0.0
    slowness: float = 1.0  # of the current deployment
    planner: OpenLoopGenerator = field(init=False)

    def __post_init__(self) -> None:
        self.random = np.random.default_rng(self.seed)
        self.planner = OpenLoopGenerator(
            log=Path(os.devnull),
            input_data=Path(os.devnull),
            sla=self.sla,
            arrivals=parse_arrivals(self.distribution),
        )

    def clock(self) -> float:
        return self.seconds

    def probe(self) -> float:
        return PROBE_SECONDS * math.exp(self.random.normal(0, PROBE_NOISE))

    @contextlib.contextmanager
    def deploy(self, candidate: Candidate, *, fresh: bool = False) -> Iterator[Endpoint]:
        self.seconds += START_SECONDS if fresh else DEPLOY_SECONDS
        self.slowness = math.exp(self.random.normal(0, self.noise))
        yield Endpoint(self.server.name, candidate)

    def close(self) -> None: ...

    def warm_up(self, endpoint: Endpoint, load: LoadPoint) -> Measurement | None:
        """Return the throughput with one request in flight; None at a request rate."""
        if load.request_rate:
            return None
        arrivals_s = ALONE_SECONDS * np.arange(ALONE_REQUESTS, dtype=np.float64)
        latencies_s, _ = simulated_latencies(
            self.server, endpoint.candidate, arrivals_s, self.slowness, int(self.random.integers(2**31))
        )
        self.seconds += float(latencies_s.sum())
        return Measurement(REQUEST_BATCH_SIZE / float(latencies_s.mean()))

    def measure(self, endpoint: Endpoint, load: LoadPoint, seconds: float | None = None) -> Measurement:
        spread_limit = MAX_SPREAD if seconds is None else math.inf
        return self._measure(endpoint, load, seconds or self.planner.default_seconds(load), spread_limit, 1)[0]

    def measure_windows(self, endpoint: Endpoint, load: LoadPoint, seconds: float, count: int) -> list[Measurement]:
        return self._measure(endpoint, load, seconds * count, math.inf, count)

    def _measure(
        self, endpoint: Endpoint, load: LoadPoint, seconds: float, spread_limit: float, parts: int
    ) -> list[Measurement]:
        times = self.planner.arrivals.times
        period_seconds = times.period_at(load.request_rate)
        lead_in_seconds = max(LEAD_IN_SECONDS, times.lead_in_at(load.request_rate))
        total = lead_in_seconds + parts * times.whole_periods(seconds / parts, load.request_rate)
        seed = int(self.random.integers(2**31))
        arrivals_s = self.planner.arrivals.plan(load.request_rate, total, seed)
        latencies_s, executions = simulated_latencies(
            self.server, endpoint.candidate, arrivals_s - arrivals_s[0], self.slowness, seed
        )
        record = self._record(arrivals_s, arrivals_s + latencies_s, total, period_seconds)
        sizes = np.array([REQUEST_BATCH_SIZE])
        planned = PlannedLoad(load, total, sizes, lead_in_seconds=lead_in_seconds, sla=self.sla)
        measured = summarize_open_loop(record, planned, spread_limit, parts)
        self.seconds += record.ended_ns / 1e9
        compute_ms = sum(ns for *_, ns in executions) / 1e6 / sum(count for _, count, _ in executions)
        samples = sum(size * count for size, count, _ in executions) / sum(count for _, count, _ in executions)
        return [
            replace(
                one,
                network_ms=1e3 * self.server.network_s,
                queue_ms=max(0.0, (one.latency_avg_ms or 0.0) - compute_ms - 1e3 * self.server.network_s),
                compute_infer_ms=compute_ms,
                compute_input_ms=0.0,
                compute_output_ms=0.0,
                mean_batch_size=samples,
                batch_stats=batch_stats.to_text(executions),
                measure_seconds=record.ended_ns / 1e9 / len(measured),
            )
            for one in measured
        ]

    def _record(self, sent_s: FloatArray, answered_s: FloatArray, total: float, period_seconds: float) -> SendRecord:
        """Return the record of the client, which stops when the server is overloaded."""
        answers_s = np.sort(answered_s)
        detector = OverloadDetector(max(self.sla.bounds_ms(LATENCY)) / 1e3, period_seconds)
        ended, overload = float(max(total, answers_s[-1])), ""
        for now in np.arange(WATCH_SECONDS, ended, WATCH_SECONDS):
            sent, answered = int(np.searchsorted(sent_s, now)), int(np.searchsorted(answers_s, now))
            waiting = sent_s[:sent][answered_s[:sent] > now]
            if overload := detector.reason(now, sent, answered, float(now - waiting[0]) if len(waiting) else 0.0):
                ended = float(now)
                break
        answered_ns = np.where(answered_s <= ended, np.rint(1e9 * answered_s), NEVER).astype(np.int64)
        sent_ns = np.rint(1e9 * sent_s).astype(np.int64)
        return SendRecord(
            sent_ns, np.where(sent_s <= ended, sent_ns, NEVER), answered_ns, round(1e9 * ended), overload
        )

    @contextlib.contextmanager
    def record(self, endpoint: Endpoint) -> Iterator[ResourceUsage]:
        yield ResourceUsage()


@dataclass(frozen=True)
class RateRunResult:
    """How a run ended.

    Attributes:
        passed: Whether a configuration passed.
        excess: The true ``excess_ratio`` of the one with the highest rate; nan without a PASS.
        throughput: Its rate over the best one.
        search_seconds: The duration of the search.
        confirm_seconds: The duration of the confirmation.
        tests: Trial, rate, fresh servers, verdict and true ``excess_ratio`` of each tested load.
    """

    passed: bool
    excess: float
    throughput: float
    search_seconds: float
    confirm_seconds: float
    tests: tuple[tuple[int, float, int, str, float], ...] = ()


def run(job: RateRunJob) -> RateRunResult:
    """Return how one run ended."""
    simulated, _ = rate_server(job.server, job.capacity)
    bound_ms, best = bound_and_best(replace(job, seed=0))
    problem = Problem(
        job.server,
        simulated.space,
        REQUEST_BATCH_SIZE,
        MAX_CONCURRENCY,
        sla=Sla.from_bounds({job.metric: bound_ms}),
        open_loop=True,
        request_times=parse_arrivals(job.distribution).times,
    )
    server = RateServer(simulated, problem.sla, job.server_noise, job.distribution, job.seed)
    measurer = Measurer(server, server, DiscardingRecord(), QuietObserver(), speed_probe=server.probe)
    budget = Budget(job.budget_seconds, clock=server.clock)
    comparisons = baselines(problem.space)
    scheduler = Scheduler(problem, make_searcher("simulated", problem, job.seed), budget, Stopwatch(), comparisons)
    searched = run_trials(scheduler, server, measurer)
    begin = server.seconds
    options = RunOptions(job.server, {job.metric: bound_ms}, seed=job.seed, load="rate")
    confirmer = Confirmer(problem, server, measurer, budget, list(searched), model_fitter(problem, options))
    trials = confirmer.run([candidate for _, candidate in comparisons])
    tests = [
        (
            entry.point.trial,
            entry.point.load.request_rate,
            entry.servers,
            entry.judged.verdict.value,
            true_excess(
                job,
                entry.point.candidate,
                entry.point.load.request_rate,
                bound_ms,
                TRUE_REQUESTS if entry.judged.verdict is Verdict.PASS else BEST_REQUESTS,
            ),
        )
        for entry in judge_confirmations(trials, problem)
        if entry.error
    ]
    passed = [test for test in tests if test[3] == Verdict.PASS.value]
    _, rate, _, _, excess = max(passed, key=lambda test: test[1], default=(0, math.nan, 0, "", math.nan))
    return RateRunResult(bool(passed), excess, rate / best, begin, server.seconds - begin, tuple(tests))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=8, metavar="N", help="the number of seeds (8)")
    parser.add_argument("--first-seed", type=int, default=0, metavar="N", help="the first seed (0)")
    parser.add_argument("--servers", nargs="+", default=[UNBATCHED, *SERVERS], help="the simulated servers")
    parser.add_argument(
        "--capacities", type=float, nargs="+", default=[100, 400, 2000], help="in requests per second"
    )
    parser.add_argument("--use", type=float, nargs="+", default=[0.8, 0.9, 0.95], help="shares of the capacity")
    parser.add_argument("--server-noise", type=float, default=0.02, help="how much servers differ (0.02)")
    parser.add_argument("--budget", type=float, default=180.0, metavar="SECONDS", help="of each run (180)")
    parser.add_argument("--distribution", default=POISSON, help="as tune's --request-distribution (poisson)")
    parser.add_argument("--bound", default=P95, choices=tuple(PERMITTED), help="the bounded latency (p95)")
    parser.add_argument("--rows", type=Path, metavar="FILE", help="write each run to FILE")
    parser.add_argument("--processes", type=int, default=os.cpu_count() or 1, metavar="N")
    arguments = parser.parse_args()
    kinds = [
        (server, capacity, use)
        for server in arguments.servers
        for capacity in arguments.capacities
        for use in arguments.use
    ]
    jobs = [
        RateRunJob(
            *kind,
            arguments.server_noise,
            arguments.budget,
            arguments.distribution,
            arguments.bound,
            seed,
        )
        for kind in kinds
        for seed in range(arguments.first_seed, arguments.first_seed + arguments.seeds)
    ]
    results = list(run_jobs(run, jobs, arguments.processes))
    if arguments.rows:
        rows = (asdict(job) | asdict(result) for job, result in zip(jobs, results, strict=True))
        arguments.rows.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    print(f"{command()}\n")
    columns = ("server", "capacity, req/s", "use", "PASS", "false PASS", LARGEST_EXCESS[arguments.bound])
    print_head(*columns, "median %", "mean %")
    for kind in kinds:
        own = [
            result for job, result in zip(jobs, results, strict=True) if (job.server, job.capacity, job.use) == kind
        ]
        print(row(kind[0], f"{kind[1]:g}", f"{kind[2]:g}", *_cells(own, arguments.bound)))
    for server in arguments.servers:
        own = [result for job, result in zip(jobs, results, strict=True) if job.server == server]
        print(row(server, "all", "all", *_cells(own, arguments.bound)))
    print(row("all", "all", "all", *_cells(results, arguments.bound)))
    print(f"\n{measured_on(f'{arguments.seeds} runs a row')}")


def _cells(results: Sequence[RateRunResult], metric: str) -> list[str]:
    """Return PASSes, false ones, the largest excess in percent, and the throughput over the best.

    The throughput is the median of the PASSes and the mean of all runs, in percent. In the mean a run counts as 0 if
    it has no PASS or a false one.
    """
    passed = [result for result in results if result.passed]
    true = [result.throughput for result in passed if result.excess <= PERMITTED[metric]]
    return [
        f"{len(passed)} of {len(results)}",
        f"{len(passed) - len(true)}",
        f"{100 * max((result.excess for result in passed), default=math.nan):.1f}",
        f"{100 * statistics.median([result.throughput for result in passed] or [math.nan]):.1f}",
        f"{100 * sum(true) / len(results):.1f}",
    ]


if __name__ == "__main__":
    main()
