"""How often `tune plan` is right about the number of replicas, on made-up servers of which it sees noisy trials only.

    python benchmarks/planning_errors.py [--servers 126] [--several 20] > benchmarks/planning_errors.md

Each server is drawn at random: how long batches take (straight, bent, in steps), how much instances slow each other
down, the configuration, the bound. No two deployments are equally fast: each takes its own factor on all service
times. The plan sees what `tune` would have measured: a search's deployment of the recommended configuration and of a
runner-up, then both on three fresh servers, in windows that differ too. The truth is the smallest number of replicas
that meets the bound in a simulation three times as long, with other arrivals and the server as it is without noise.
"""

from __future__ import annotations

import argparse
import math
import multiprocessing
import os
import shlex
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
from simulated_tables import CURVES, REQUEST_BATCH_SIZE, Server

from objectives.metrics import Measurement
from objectives.sla import Constraint
from optimizer.batcher.simulator import OpenLoop, Overheads, lognormal_jitter, simulate
from optimizer.machine import hardware
from optimizer.open_loop import arrivals
from optimizer.planning.evidence import Evidence, collect
from optimizer.planning.fleet import Fleet, bisected
from optimizer.planning.replica import replica
from optimizer.planning.sizing import sized
from optimizer.planning.traffic import Balancer, Poisson
from optimizer.problem import Problem
from optimizer.space import Space
from optimizer.trial import Candidate, Confirmation, LoadPoint, Trial

MOST_REPLICAS = 40
POLICIES: tuple[Balancer, ...] = ("round-robin", "random")
RATES = 4  # of each server and policy
TRUE_REQUESTS = 120_000
WINDOWS, WINDOW_NOISE = 4, 0.02  # on each fresh server
LOADS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128)
COUNTS = ((1, 1), (2, 4), (5, 9), (10, 19), (20, MOST_REPLICAS + 1))

NOISES = (0.03, 0.10)  # relative standard deviations between deployments
INTRODUCTION = """\
Each server was made up, and what the plan saw of it measured by deployments that differ by 3 to 10 % (relative
standard deviation; each server has its own). Traffic is Poisson, the load balancer as stated; a server is asked
about several rates, so that its cases are not independent of each other. **Safe** is the number that `tune plan`
recommends, **likely** its best guess, the **interval** goes from `low` to safe. *Right* is equal to the true number,
which is the smallest that meets the bound in a long simulation of the server without noise.

With what deployments differ by, the speed of a server is known to 2 or 3 % after a run: nobody can tell 20 replicas
from 21. A number that is hardly ever too few is then one or two too many."""

TRIED = """\
Too few are the plans for a few servers, each asked eight times: their latency hardly changes with the rate where the
bound lies, and their service times bend or step between the batch sizes that the closed loop formed, so that the
simulation is wrong by more than its recorded error.

1. Only deployments of that configuration, not of others that compute alike: fewer, so that plans are larger.
2. Several runs of one machine read together: the interval narrows, and with eight of them the likely number is right
   more often. To be right in 95 % at 20 replicas would take the speed to be known to about 0.1 %: more than a
   thousand deployments, and a simulation that good.
3. A wider margin where the batch sizes that a rate forms had not been seen: all plans grew, and the same servers
   stayed wrong. Not kept."""


@dataclass(frozen=True)
class Hidden:
    """A server, what runs on it, and the bound: all that decides how many replicas it takes."""

    server: Server
    candidate: Candidate
    runner_up: Candidate
    concurrency: int
    bound: Constraint

    @property
    def problem(self) -> Problem:
        space = Space(
            tuple(sorted({one.max_batch_size for one in (self.candidate, self.runner_up)})),
            (0, 200, 1000),
            ("none", "max/2"),
            (self.candidate.instance_count,),
            request_batch_size=REQUEST_BATCH_SIZE,
        )
        return Problem("hidden", space, REQUEST_BATCH_SIZE, 128, constraints=(self.bound,))


@dataclass(frozen=True)
class Case:
    """One question, answered: counts of replicas. ``noise``: how much deployments differ."""

    way: str
    policy: Balancer
    noise: float
    true: int
    low: int
    likely: int
    safe: int


def drawn(rng: np.random.Generator) -> Hidden:
    server = Server(
        "hidden",
        fixed_s=10 ** rng.uniform(-3.7, -2.6),
        per_sample_s=10 ** rng.uniform(-5.0, -4.2),
        contention=rng.uniform(0.1, 0.6),  # so much that further instances still pay: it is what a search recommends
        way_s=10 ** rng.uniform(-4.0, -3.2),
        jitter=rng.uniform(0.05, 0.25),
        seed=int(rng.integers(2**31)),
        curve=str(rng.choice(list(CURVES))),
    )
    size, instances = int(2 ** rng.integers(3, 8)), int(rng.integers(1, 4))
    preferred = (size // 2,) if rng.random() < 0.3 else ()
    candidate = Candidate(size, True, int(rng.choice([0, 200, 1000])), preferred, instances)
    runner_up = replace(candidate, max_queue_delay_us=0 if candidate.max_queue_delay_us else 200)
    found = server.measure([(candidate, load) for load in LOADS])
    latencies_ms = [one.latency_p95_ms or math.inf for one in found]
    bound_ms = float(f"{latencies_ms[0] * 10 ** rng.uniform(math.log10(3), 1):.2g}")
    concurrency = max(load for load, latency_ms in zip(LOADS, latencies_ms, strict=True) if latency_ms <= bound_ms)
    return Hidden(server, candidate, runner_up, concurrency, Constraint("latency-p95", bound_ms))


def run_on(hidden: Hidden, noise: float, rng: np.random.Generator) -> list[Trial]:
    """What a run would have recorded."""
    load = hidden.concurrency
    lower = sorted({max(1, load // 4), max(1, load // 2), load})
    return [
        _trial(0, hidden, hidden.candidate, [*lower, math.ceil(1.3 * load)], noise, rng),
        _trial(1, hidden, hidden.runner_up, lower[1:], noise, rng),
    ]


def _trial(
    number: int, hidden: Hidden, candidate: Candidate, loads: Sequence[int], noise: float, rng: np.random.Generator
) -> Trial:
    def point(concurrency: int) -> LoadPoint:
        return LoadPoint(REQUEST_BATCH_SIZE, concurrency)

    found = _deployed(hidden.server, noise, rng).measure([(candidate, one) for one in loads])
    trial = Trial(number, candidate, tuple((point(c), _window(m, rng)) for c, m in zip(loads, found, strict=True)))
    for server in (1, 2, 3):
        (found_again,) = _deployed(hidden.server, noise, rng).measure([(candidate, hidden.concurrency)])
        for _ in range(WINDOWS):
            again = Confirmation(server, point(hidden.concurrency), _window(found_again, rng))
            trial = trial.confirmed_by(again)
    return trial


def _deployed(server: Server, noise: float, rng: np.random.Generator) -> Server:
    factor = math.exp(rng.normal(0, noise))
    seed = int(rng.integers(2**31))
    return replace(server, fixed_s=factor * server.fixed_s, per_sample_s=factor * server.per_sample_s, seed=seed)


def _window(measured: Measurement, rng: np.random.Generator) -> Measurement:
    """A closed loop that is slower by some is so in latency and throughput alike."""
    factor = math.exp(rng.normal(0, WINDOW_NOISE))
    slower = {
        name: getattr(measured, name) * factor
        for name in ("latency_avg_ms", "latency_p50_ms", "latency_p90_ms", "latency_p95_ms", "latency_p99_ms")
    }
    assert measured.throughput_infer_per_sec, "a closed loop has a throughput"
    return replace(measured, throughput_infer_per_sec=measured.throughput_infer_per_sec / factor, **slower)


@dataclass(frozen=True)
class Truth:
    """The server without noise, watched for long."""

    hidden: Hidden
    policy: Balancer

    def meets(self, rate: float, replicas: int, requests: int = TRUE_REQUESTS) -> bool:
        server, candidate = self.hidden.server, self.hidden.candidate
        load = OpenLoop(Poisson().of_replica(rate, replicas, self.policy, requests, seed=77))
        found = simulate(
            candidate,
            load,
            server._service(candidate.max_batch_size, candidate.instance_count, 1),
            Overheads(server.way_s / 2, server.way_s / 2, wake_s=2e-5, dispatch_s=2e-5),
            request_batch_size=REQUEST_BATCH_SIZE,
            jitter=lognormal_jitter(server.jitter, 99),
        )
        return not found.overloaded and 1e3 * found.latency_p95_s <= self.hidden.bound.bound

    def smallest(self, rate: float, guess: int) -> int:
        """Found from a guess, in both directions."""
        step, met = 1, guess
        while not self.meets(rate, met):
            met, step = met + step, 2 * step
        failed, step = met - 1, 1
        while failed > 0 and self.meets(rate, failed):
            met, failed, step = failed, max(0, failed - step), 2 * step
        return bisected(failed, met, lambda count: self.meets(rate, count))

    def rate_of_one(self, guess: float) -> float:
        low, high = 0.3 * guess, 1.5 * guess
        while high > 1.01 * low:
            middle = (low + high) / 2
            low, high = (middle, high) if self.meets(middle, 1, 40_000) else (low, middle)
        return low


def cases(number: int, seed: int, ways: Mapping[str, Way]) -> list[Case]:
    """Of one server: every policy and rate, answered in each of ``ways``."""
    rng = np.random.default_rng((seed, number))
    hidden = drawn(rng)
    noise = rng.uniform(*NOISES)
    runs = [run_on(hidden, noise, rng) for _ in range(max(way.runs for way in ways.values()))]
    replicas = {name: replica(way.evidence(hidden, runs), [hidden.bound]) for name, way in ways.items()}
    found = []
    for policy in POLICIES:
        truth = Truth(hidden, policy)
        alone = truth.rate_of_one(next(iter(replicas.values())).capacity(1.0))
        for _ in range(RATES):
            rate = alone * rng.uniform(0.3, MOST_REPLICAS)
            true = 0
            for name, one in replicas.items():
                count = sized(Fleet(one, Poisson(), policy), rate)
                if count is not None:
                    true = true or truth.smallest(rate, count.likely)
                    found.append(Case(name, policy, noise, true, count.low, count.likely, count.safe))
    return found


@dataclass(frozen=True)
class Way:
    """What a plan is made from: so many runs, and of them what was measured of the configuration alone, or of all
    that compute alike."""

    runs: int
    alone: bool = False

    def evidence(self, hidden: Hidden, runs: Sequence[Sequence[Trial]]) -> Evidence:
        used = [[trial for trial in run if not self.alone or trial.number == 0] for run in runs[: self.runs]]
        return collect(hidden.candidate, hidden.problem, used, arrivals.Poisson())


SINGLE = {"one run": Way(1)}
SEVERAL = {
    "that configuration alone": Way(1, alone=True),
    "all that compute alike": Way(1),
    "8 runs together": Way(8),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--servers", type=int, default=126, metavar="N", help="planned from one run each (126)")
    parser.add_argument("--several", type=int, default=20, metavar="N", help="planned from several runs (20)")
    parser.add_argument("--seed", type=int, default=0, metavar="N")
    parser.add_argument("--processes", type=int, default=os.cpu_count() or 1, metavar="N")
    given = parser.parse_args()
    started = time.monotonic()
    single = _all_cases(given.servers, given.seed, SINGLE, given.processes)
    several = _all_cases(given.several, given.seed + 1, SEVERAL, given.processes)
    print("# How often a plan's number of replicas is right, as last measured\n")
    print(f"`{shlex.join(['python', 'benchmarks/planning_errors.py', *sys.argv[1:]])}`\n")
    print(INTRODUCTION)
    print(f"\n## {len(single):,} cases, {given.servers:,} servers\n")
    _print_table(_groups(single))
    print(f"\n## What was tried to come nearer: {given.several:,} other servers\n")
    _print_table({name: [case for case in several if case.way == name] for name in SEVERAL})
    print(f"\n{TRIED}")
    print("\n## Targets\n")
    print(_targets(single))
    machine = hardware.detect()
    seconds = time.monotonic() - started
    print(f"\n{machine.cpu}, {machine.cpu_count} cores; {seconds:.0f} s; {time.strftime('%Y-%m-%d')}")


def _all_cases(servers: int, seed: int, ways: Mapping[str, Way], processes: int) -> list[Case]:
    found: list[Case] = []
    with ProcessPoolExecutor(processes, multiprocessing.get_context("spawn")) as pool:
        for number, own in enumerate(pool.map(partial(cases, seed=seed, ways=ways), range(servers)), 1):
            found += own
            print(f"{number} of {servers}", file=sys.stderr, flush=True)
    return found


def _targets(found: Sequence[Case]) -> str:
    sure = [case for case in found if case.low == case.safe]
    told = []
    for name, most, share in (
        ("too few in at most 0.1 %", 0.001, np.mean([_too_few(case) for case in found])),
        ("other than the true count in at most 5 %", 0.05, np.mean([not _exact(case) for case in found])),
        ("outside of the interval in at most 5 %", 0.05, np.mean([not _covered(case) for case in found])),
        ("other than it in at most 5 % where the plan has one answer", 0.05, np.mean([not _exact(c) for c in sure])),
    ):
        told.append(f"- {name}: {share:.2%}, {'met' if share <= most else '**missed**'}")
    return "\n".join(told)


def _groups(found: Sequence[Case]) -> dict[str, list[Case]]:
    groups = {"all": list(found)}
    for low, high in COUNTS:
        name = f"{low}" if low == high else f"{low} to {high}"
        groups[f"true count {name}"] = [case for case in found if low <= case.true <= high]
    for policy in POLICIES:
        groups[policy] = [case for case in found if case.policy == policy]
    for low_noise, high_noise in ((0.03, 0.05), (0.05, 0.075), (0.075, 0.10)):
        name = f"deployments differ by {low_noise:.1%} to {high_noise:.1%}"
        groups[name] = [case for case in found if low_noise <= case.noise < high_noise]
    groups["the plan has one answer"] = [case for case in found if case.low == case.safe]
    return groups


def _print_table(groups: dict[str, list[Case]]) -> None:
    print("| | cases | safe is right | likely is right | within the interval | safe is too few | safe / true |")
    print("| --- | --: | --: | --: | --: | --: | --: |")
    for name, found in groups.items():
        if not found:
            continue
        ratio = float(np.mean([case.safe / case.true for case in found]))
        shares = " | ".join(_share(found, one) for one in (_exact, _likely, _covered, _too_few))
        print(f"| {name} | {len(found):,} | {shares} | {ratio:.2f} |")


def _share(found: Sequence[Case], is_so: Callable[[Case], bool]) -> str:
    count = sum(map(is_so, found))
    return f"{count / len(found):.1%}"


def _exact(case: Case) -> bool:
    return case.safe == case.true


def _likely(case: Case) -> bool:
    return case.likely == case.true


def _covered(case: Case) -> bool:
    return case.low <= case.true <= case.safe


def _too_few(case: Case) -> bool:
    return case.safe < case.true


if __name__ == "__main__":
    main()
