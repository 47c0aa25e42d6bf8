"""Compare recommendations of runs next to programs that take CPU time irregularly with the best possible ones.

    python benchmarks/disturbed_runs.py [--disturbed 0 0.1 0.25 0.5] [--slowness 1.5] [--background] [--verify]

Searches simulated servers (simulated_tables.py) and confirms the best configurations with the functions of a real
run, by a virtual clock, with the default budget. Other programs take one of two cores in bursts of 1 to 8 s;
everything takes ``--slowness`` times as long then, the speed probe too. With ``--background`` others also take all
CPU time that the server leaves idle, which slows nothing. ``--start-seconds`` is the time of the start of a fresh
server, as in containers or on a busy machine. Servers differ by ``--server-noise`` (standard deviation of the log),
and windows by 5 %.

With ``--verify``, the runs are those of ``tune verify --fresh``, with the functions that test and judge. Three
configurations served the same in the search, so that a false alarm is as likely as it can be. Since then the
recommendation, or everything, takes longer, or nothing has changed. The p95 of the search is inside its bound by the
margin of a first load, or by far.

Prints Markdown; progress goes to standard error.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import math
import os
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from lib.disturbance import BURST_FACTOR, BURST_SECONDS
from lib.output import command, measured_on, print_head, row
from lib.process_pool import run_jobs
from lib.simulated_stack import (
    DEPLOY_SECONDS,
    MAX_CONCURRENCY,
    PROBE_NOISE,
    PROBE_SECONDS,
    SERVERS,
    TRUE_LOADS,
    SimulatedStack,
    feasible_bound_ms,
    highest_throughput,
    slowed,
    true_measurements,
)
from lib.simulated_tables import REQUEST_BATCH_SIZE, hidden_server
from objectives import batch_stats
from objectives.load_sequence import MARGIN
from objectives.metrics import Measurement
from objectives.pooled_windows import pool_measurements, pooled_quantile_ms
from objectives.sla import Sla, Verdict
from optimizer.config.problem import Problem
from optimizer.config.search_space import SearchSpace
from optimizer.confirmation.confirmer import Confirmer, model_fitter
from optimizer.confirmation.server_plan import START_SECONDS
from optimizer.confirmation.verdicts import judge_confirmations
from optimizer.core.budget import Budget
from optimizer.core.candidate import Candidate
from optimizer.core.endpoint import Endpoint
from optimizer.core.resource_usage import CpuInterval, ResourceUsage
from optimizer.core.stopwatch import Stopwatch
from optimizer.core.trial import LoadPoint, Trial
from optimizer.measure.measurer import Measurer
from optimizer.options.run_options import RunOptions
from optimizer.replay.replay import DiscardingRecord
from optimizer.results.progress_observers import QuietObserver
from optimizer.results.verification import Verification, judge_verification, verification_candidates
from optimizer.search import make_searcher
from optimizer.store.recording import baselines
from optimizer.study.fresh_verification import TIME_FACTOR, expected_seconds
from optimizer.study.scheduler import Scheduler
from optimizer.study.trial_runner import run_trials

BUDGET_SECONDS = 180.0
WINDOW_SECONDS = 0.5
SEARCH_WINDOWS = 3  # windows of a measurement of the search
WINDOW_NOISE, SERVER_NOISE = 0.05, 0.05  # standard deviations of logs
FEASIBLE_SHARE = 0.7  # of all configurations and loads within the bound
CPUS = 2
CORE_SHARE = 0.5  # of the CPUs, which a burst takes
DISTURBED = (0.0, 0.1, 0.25, 0.5)
STATES = 20  # the share of disturbed time is rounded to this part of 1
COLUMNS = (
    "disturbed",
    "PASS",
    "throughput of PASS over the best, median",
    "10th percentile",
    "mean, 0 without a PASS",
    "mean, 0 also if the bound is missed",
    "best searched configuration over the best",
    "recommended configuration over the best searched",
    "recommended load over the highest one",
    "below 70 %",
    "p95 over the bound",
    "first load passes",
    "configurations",
    "search s",
    "confirmation s",
)
VERIFIED = tuple(Candidate(64, dynamic_batching=True, instance_count=count) for count in (1, 2, 3))
VERIFIED_LOAD, VERIFIED_PER_SECOND, VERIFIED_SIGMA = LoadPoint(1, 16), 4000.0, 0.3
FAR_INSIDE = 0.5  # log of the bound over the p95 with which a slower recommendation still meets the bound
CHANGES = (  # what takes longer since the search, and which share of the throughput is lost
    ("nothing", (), 0.0),
    *(
        (name, slower, loss)
        for name, slower in (("recommendation", VERIFIED[:1]), ("all", VERIFIED))
        for loss in (0.1, 0.2)
    ),
)
VERIFY_COLUMNS = ("slower", "loss", "inside", "disturbed", "holds", "UNDECIDED", "does not hold", "by the ranking")


@dataclass(frozen=True)
class VerifiedStack:
    """A stack whose configurations have lognormal latencies, and serve the same except for ``factors``.

    A factor is the time that everything takes in a configuration over that in the search.
    """

    factors: dict[Candidate, float] = field(default_factory=dict)

    def deploy(self, candidate: Candidate) -> contextlib.AbstractContextManager[Endpoint]:
        return contextlib.nullcontext(Endpoint("verified", candidate))

    def measure(self, endpoint: Endpoint, load: LoadPoint) -> Measurement:
        mean_ms = 1e3 * load.concurrency / VERIFIED_PER_SECOND
        sigmas = {"p50": 0.0, "p90": 1.2816, "p95": 1.6449, "p99": 2.3263}
        values: Any = {f"latency_{name}_ms": mean_ms * math.exp(VERIFIED_SIGMA * z) for name, z in sigmas.items()}
        measured = Measurement(VERIFIED_PER_SECOND, mean_ms, **values, stable=True)
        return slowed(measured, math.log(self.factors.get(endpoint.candidate, 1.0)))


@dataclass(frozen=True)
class DisturbedMachine:
    """A machine that other programs disturb for the share ``disturbed`` of the time; options of the command."""

    disturbed: float
    slowness: float
    background: bool
    start_seconds: float
    server_noise: float


@dataclass
class DisturbedServer:
    """A simulated server that other programs disturb: target, load generator, telemetry, probe and clock."""

    stack: SimulatedStack | VerifiedStack
    machine: DisturbedMachine
    seed: int
    seconds: float = 0.0
    cpu_intervals: list[CpuInterval] = field(default_factory=list)  # of each window
    server: float = 0.0  # log slowness of the current deployment
    bursts: list[tuple[float, float]] = field(default_factory=list)  # begin and end

    def __post_init__(self) -> None:
        times, self.noise, self.probe_noise = (np.random.default_rng((self.seed, part)) for part in range(3))
        end = -float(times.uniform(0, BURST_SECONDS[1]))
        while self.machine.disturbed and end < 4 * BUDGET_SECONDS:
            begin = end + float(times.uniform(*BURST_SECONDS)) * (1 / self.machine.disturbed - 1)
            end = begin + float(times.uniform(*BURST_SECONDS))
            self.bursts.append((begin, end))

    def clock(self) -> float:
        return self.seconds

    def disturbed_share(self, begin: float, end: float) -> float:
        """Return the share of this time that bursts fill."""
        filled = sum(max(0.0, min(end, last) - max(begin, first)) for first, last in self.bursts)
        return filled / (end - begin) if end > begin else 0.0

    def probe(self) -> float:
        slowness = math.log(self.machine.slowness) * self.disturbed_share(self.seconds - PROBE_SECONDS, self.seconds)
        return PROBE_SECONDS * math.exp(slowness + self.probe_noise.normal(0, PROBE_NOISE))

    @contextlib.contextmanager
    def deploy(self, candidate: Candidate, *, fresh: bool = False) -> Iterator[Endpoint]:
        with self.stack.deploy(candidate) as endpoint:
            self.seconds += self.machine.start_seconds if fresh else DEPLOY_SECONDS
            self.server = self.noise.normal(0, self.machine.server_noise)
            yield endpoint

    def close(self) -> None: ...

    def warm_up(self, endpoint: Endpoint, load: LoadPoint) -> None: ...

    def measure(self, endpoint: Endpoint, load: LoadPoint, seconds: float | None = None) -> Measurement:
        count = SEARCH_WINDOWS if seconds is None else max(1, round(seconds / WINDOW_SECONDS))
        begin = self.seconds
        windows = self.measure_windows(endpoint, load, WINDOW_SECONDS, count)
        served = statistics.fmean(window.throughput_infer_per_sec or 0.0 for window in windows)
        stable = self.disturbed_share(begin, self.seconds) in (0.0, 1.0)
        reason = "" if stable else "unstable"
        return replace(
            pool_measurements(windows),
            throughput_infer_per_sec=served,
            stable=stable,
            reason=reason,
            measure_seconds=self.seconds - begin,
        )

    def measure_windows(self, endpoint: Endpoint, load: LoadPoint, seconds: float, count: int) -> list[Measurement]:
        return [self._window(endpoint, load, seconds) for _ in range(count)]

    def _window(self, endpoint: Endpoint, load: LoadPoint, seconds: float) -> Measurement:
        begin, self.seconds = self.seconds, self.seconds + seconds
        slowness = self.server + self.noise.normal(0, WINDOW_NOISE)
        slowness += math.log(self.machine.slowness) * self.disturbed_share(begin, self.seconds)
        measured = self.stack.measure(endpoint, load)
        other_share = CORE_SHARE * self.disturbed_share(begin, self.seconds)
        if self.machine.background:
            other_share += (1 - other_share) * (1 - _used_share(measured))
        cpu_seconds = CPUS * seconds
        self.cpu_intervals.append(CpuInterval(begin, self.seconds, cpu_seconds, other_share * cpu_seconds))
        window = slowed(measured, slowness)
        requests = round((window.throughput_infer_per_sec or 0.0) * seconds / load.request_batch_size)
        return replace(
            window,
            requests=max(1, requests),
            measure_seconds=seconds,
            begin_unix_seconds=begin,
            end_unix_seconds=self.seconds,
        )

    @contextlib.contextmanager
    def record(self, endpoint: Endpoint) -> Iterator[ResourceUsage]:
        usage, before = ResourceUsage(), len(self.cpu_intervals)
        yield usage
        usage.cpu_intervals = self.cpu_intervals[before:]


@dataclass(frozen=True)
class DisturbedRunJob:
    machine: DisturbedMachine
    server: str
    seed: int


@dataclass(frozen=True)
class DisturbedRunResult:
    """How a run ended.

    Attributes:
        passed: Whether a configuration passed.
        share: The throughput of the best one that passed over the highest that is possible within the bound, under
            the states of the machine during the confirmation; nan without a PASS.
        over: Its p95 over the bound under these states.
        searched: The highest throughput that a configuration of the search reaches within the bound, over the highest
            that is possible.
        recommended: The same of the configuration of ``share``; nan without a PASS, and 0 if it meets the bound at no
            load.
        configurations: The number of configurations that the search measured.
        trials: The number of trials of the search.
        search_seconds: The duration of the search.
        confirm_seconds: The duration of the confirmation.
        tests: Trial, load, fresh servers and verdict of each tested load.
    """

    passed: bool
    share: float
    over: float
    searched: float
    recommended: float
    configurations: int
    trials: int
    search_seconds: float
    confirm_seconds: float
    tests: tuple[tuple[int, int, int, str], ...] = ()


def run(job: DisturbedRunJob) -> DisturbedRunResult:
    """Return how one run ended."""
    stack = SimulatedStack(hidden_server(job.server))
    bound_ms = feasible_bound_ms(job.server, FEASIBLE_SHARE)
    problem = Problem(
        job.server,
        stack.server.space,
        REQUEST_BATCH_SIZE,
        MAX_CONCURRENCY,
        sla=Sla.from_bounds({"p95": bound_ms}),
        cpu_count=CPUS,
    )
    server = DisturbedServer(stack, job.machine, job.seed)
    measurer = Measurer(
        server, server, DiscardingRecord(), QuietObserver(), cross_checking=server, speed_probe=server.probe
    )
    budget = Budget(BUDGET_SECONDS, clock=server.clock)
    comparisons = baselines(problem.space)
    scheduler = Scheduler(problem, make_searcher("simulated", problem, job.seed), budget, Stopwatch(), comparisons)
    searched = run_trials(scheduler, server, measurer)
    begin = server.seconds
    options = RunOptions(job.server, {"p95": bound_ms}, seed=job.seed)
    confirmer = Confirmer(problem, server, measurer, budget, list(searched), model_fitter(problem, options))
    trials = confirmer.run([candidate for _, candidate in comparisons])
    judged = [entry for entry in judge_confirmations(trials, problem) if entry.error]
    state = round(STATES * server.disturbed_share(begin, server.seconds)) / STATES
    passed = [entry.point for entry in judged if entry.judged.verdict is Verdict.PASS]
    curves = _curves(job.server, state, job.machine.slowness)
    highest = {candidate: highest_throughput(curve, bound_ms) for candidate, curve in curves.items()}
    best = max(highest.values())
    served = [
        (*_served(curves[candidate], point.load.concurrency), highest[candidate])
        for point in passed
        if (candidate := problem.space.canonical(point.candidate))
    ]
    throughput, p95_ms, recommended = max(served, default=(math.nan, math.nan, math.nan))
    return DisturbedRunResult(
        bool(served),
        throughput / best,
        p95_ms / bound_ms,
        max((highest[problem.space.canonical(trial.candidate)] for trial in searched), default=0.0) / best,
        recommended / best,
        len({problem.space.canonical(trial.candidate) for trial in searched}),
        len(searched),
        begin,
        server.seconds - begin,
        tuple(
            (entry.point.trial, entry.point.load.concurrency, entry.servers, entry.judged.verdict.value)
            for entry in judged
        ),
    )


@dataclass(frozen=True)
class VerifyJob:
    """A verification; ``inside`` is the log of the bound over the p95 of the search."""

    slower: tuple[Candidate, ...]
    loss: float
    inside: float
    machine: DisturbedMachine
    seed: int


def verify(job: VerifyJob) -> Verification:
    """Return how one verification ended."""
    searched = VerifiedStack()
    p95_ms = searched.measure(Endpoint("verified", VERIFIED[0]), VERIFIED_LOAD).latency_p95_ms or math.nan
    space = SearchSpace(max_batch_size=(64,), instance_count=(1, 2, 3))
    sla = Sla.from_bounds({"p95": p95_ms * math.exp(job.inside)})
    problem = Problem("verified", space, 1, MAX_CONCURRENCY, sla=sla, cpu_count=CPUS)
    trials = [
        Trial(number, candidate, ((VERIFIED_LOAD, searched.measure(Endpoint("verified", candidate), VERIFIED_LOAD)),))
        for number, candidate in enumerate(VERIFIED)
    ]
    stack = VerifiedStack(dict.fromkeys(job.slower, 1 / (1 - job.loss)))
    server = DisturbedServer(stack, job.machine, job.seed)
    measurer = Measurer(
        server, server, DiscardingRecord(), QuietObserver(), cross_checking=server, speed_probe=server.probe
    )
    recommended = trials[0].point(*trials[0].measurements[0])
    plans = verification_candidates(recommended, trials, problem, is_cross_checked=True)
    budget = Budget(TIME_FACTOR * expected_seconds(plans), clock=server.clock)
    measured = Confirmer(problem, server, measurer, budget, trials).test_recommendation(recommended, plans[1:])
    return judge_verification(measured, plans, problem)


def _used_share(measurement: Measurement) -> float:
    """Return the share of the CPU time that executions use, each of them one CPU."""
    executions = batch_stats.from_text(measurement.batch_stats)
    samples = sum(size * count for size, count, _ in executions)
    cpus = sum(ns for *_, ns in executions) / 1e9 * (measurement.throughput_infer_per_sec or 0.0) / max(samples, 1)
    return min(1.0, cpus / CPUS)


@lru_cache
def _curves(server: str, disturbed: float, slowness: float) -> dict[Candidate, list[tuple[float, float]]]:
    """Return the p95 in ms and the undisturbed throughput of each candidate at TRUE_LOADS."""

    def p95_ms(one: Measurement) -> float:
        parts = [replace(one, requests=round(1e4 * (1 - disturbed))), slowed(one, math.log(slowness))]
        parts[1] = replace(parts[1], requests=round(1e4 * disturbed / slowness))
        return pooled_quantile_ms([part for part in parts if part.requests], 0.95)

    return {
        candidate: [(p95_ms(one), one.throughput_infer_per_sec or 0.0) for one in measured]
        for candidate, measured in true_measurements(server).items()
    }


def _served(curve: Sequence[tuple[float, float]], concurrency: int) -> tuple[float, float]:
    """Return the undisturbed throughput at a load, and the p95 in ms."""
    p95_ms, throughput = zip(*curve, strict=True)
    loads, load = np.log(TRUE_LOADS), math.log(concurrency)
    return float(np.interp(load, loads, throughput)), math.exp(float(np.interp(load, loads, np.log(p95_ms))))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=8, metavar="N", help="the number of seeds (8)")
    parser.add_argument("--first-seed", type=int, default=0, metavar="N", help="the first seed (0)")
    parser.add_argument("--disturbed", type=float, nargs="+", default=DISTURBED, metavar="SHARE", help="of the time")
    parser.add_argument(
        "--slowness",
        type=float,
        default=BURST_FACTOR,
        metavar="FACTOR",
        help=f"how many times as long everything takes in a burst ({BURST_FACTOR})",
    )
    parser.add_argument("--background", action="store_true", help="others take all CPU time that the server leaves")
    parser.add_argument(
        "--start-seconds",
        type=float,
        default=START_SECONDS,
        metavar="SECONDS",
        help=f"the time of the start of a fresh server ({START_SECONDS:g})",
    )
    parser.add_argument(
        "--server-noise", type=float, default=SERVER_NOISE, help=f"how much servers differ ({SERVER_NOISE})"
    )
    parser.add_argument("--verify", action="store_true", help="simulate tune verify --fresh instead of whole runs")
    parser.add_argument("--rows", type=Path, metavar="FILE", help="write each run to FILE")
    parser.add_argument("--processes", type=int, default=os.cpu_count() or 1, metavar="N")
    arguments = parser.parse_args()
    if arguments.verify:
        if arguments.rows:
            parser.error("--rows writes whole runs, which --verify does not simulate")
        _print_verifications(arguments)
        return
    machines = _machines(arguments)
    jobs = [
        DisturbedRunJob(machine, server, seed)
        for machine in machines
        for seed in range(arguments.first_seed, arguments.first_seed + arguments.seeds)
        for server in SERVERS
    ]
    results = list(run_jobs(run, jobs, arguments.processes))
    if arguments.rows:
        rows = (asdict(job) | asdict(result) for job, result in zip(jobs, results, strict=True))
        arguments.rows.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    print(f"{command()}\n")
    print_head(*COLUMNS, text=0)
    for machine in machines:
        own = [result for job, result in zip(jobs, results, strict=True) if job.machine == machine]
        print(row(f"{machine.disturbed:.0%}", *_cells(own)))
    print(f"\n{measured_on(f'{len(SERVERS) * arguments.seeds} runs a row')}")


def _machines(arguments: argparse.Namespace) -> list[DisturbedMachine]:
    others = arguments.slowness, arguments.background, arguments.start_seconds, arguments.server_noise
    return [DisturbedMachine(disturbed, *others) for disturbed in arguments.disturbed]


def _print_verifications(arguments: argparse.Namespace) -> None:
    print(f"{command()}\n")
    print_head(*VERIFY_COLUMNS)
    seeds = range(arguments.first_seed, arguments.first_seed + arguments.seeds)
    cells = itertools.product(CHANGES, (MARGIN, FAR_INSIDE), _machines(arguments))
    kinds = [
        (name, inside, VerifyJob(slower, loss, inside, machine, 0)) for (name, slower, loss), inside, machine in cells
    ]
    jobs = [replace(job, seed=seed) for *_, job in kinds for seed in seeds]
    results = list(run_jobs(verify, jobs, arguments.processes, lambda job, ended: ended.verdict.value))
    for number, (name, inside, job) in enumerate(kinds):
        own = results[number * len(seeds) : (number + 1) * len(seeds)]
        counts = [
            sum(ended.verdict is verdict for ended in own)
            for verdict in (Verdict.PASS, Verdict.UNDECIDED, Verdict.FAIL)
        ]
        counts.append(sum(ended.ranking_holds is False for ended in own))
        shares = [f"{count / len(own):.1%}" for count in counts]
        print(row(name, f"{job.loss:.0%}", f"{inside:g}", f"{job.machine.disturbed:.0%}", *shares))
    print(f"\n{measured_on(f'{len(seeds)} verifications a row')}")


def _cells(results: Sequence[DisturbedRunResult]) -> list[str]:
    passed = [result for result in results if result.passed]
    shares = sorted(result.share for result in passed) or [math.nan]
    return [
        f"{len(passed)} of {len(results)}",
        f"{statistics.median(shares):.1%}",
        f"{shares[len(shares) // 10]:.1%}",
        f"{sum(result.share for result in passed) / len(results):.1%}",
        f"{sum(result.share for result in passed if result.over <= 1) / len(results):.1%}",
        f"{statistics.fmean(result.searched for result in results):.1%}",
        _mean_share([result.recommended / result.searched for result in passed]),
        _mean_share([result.share / result.recommended for result in passed if result.recommended]),
        f"{sum(share < 0.7 for share in shares)}",
        f"{sum(result.over > 1 for result in passed)}",
        f"{sum(result.tests[0][-1] == Verdict.PASS.value for result in passed)}",
        f"{statistics.fmean(result.configurations for result in results):.1f}",
        f"{statistics.median(result.search_seconds for result in results):.0f}",
        f"{statistics.median(result.confirm_seconds for result in results):.0f}",
    ]


def _mean_share(shares: Sequence[float]) -> str:
    return f"{statistics.fmean(shares):.1%}" if shares else "-"


if __name__ == "__main__":
    main()
