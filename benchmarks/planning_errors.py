"""Measure how often `tune plan` finds the right number of replicas, on simulated servers with noisy trials.

    python benchmarks/planning_errors.py [--servers 1000] [--several 100] > benchmarks/planning_errors.md

Each server is random: the shape of its batch times (linear, bent or in steps), the contention of instances, the
configuration and the bound. Each deployment has a random factor on all service times. The plan gets the
measurements of a run of `tune`: deployments of the recommended configuration and of a runner-up in the search, and
both on three fresh servers, in windows that differ too. The truth is the smallest number of replicas that meets the
bound in a simulation that is three times as long, with other arrivals and no noise. A second call with the same
options continues an interrupted one.
"""

from __future__ import annotations

import argparse
import math
import os
import tempfile
from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from lib.output import judged, measured_on, print_head, print_title, row
from lib.process_pool import run_missing_jobs
from lib.simulated_tables import CURVES, REQUEST_BATCH_SIZE, SimulatedServer
from objectives import batch_stats
from objectives.confidence import clopper_pearson_bounds
from objectives.metrics import STATISTICS, Measurement
from objectives.sla import Sla
from optimizer.config.problem import Problem
from optimizer.config.search_space import SearchSpace
from optimizer.core.candidate import Candidate
from optimizer.core.trial import ConfirmationWindow, LoadPoint, Trial
from optimizer.measure.load_client import arrivals
from optimizer.plan.evidence import Evidence, collect_evidence
from optimizer.plan.fleet import Fleet, estimate_replicas
from optimizer.plan.replica import fit_replica
from optimizer.plan.slowness import SAFE, Slowdown
from optimizer.plan.traffic import Balancer, PoissonTraffic
from optimizer.simulator.scenario import OpenLoopLoad
from optimizer.simulator.simulate import lognormal_jitter, simulate_many

MOST_REPLICAS = 40
POLICIES: tuple[Balancer, ...] = ("round-robin", "random")
# The constants of `tune plan` were chosen on servers of CHOOSING_SEEDS. The table must be of others.
CHOOSING_SEEDS, REPORTED_SEED = (1000, 2000, 3000, 4000), 5000
QUANTILES = (0.9, 0.95, 0.975, 0.99, 0.995, 0.998, 0.999)
ERROR = 0.05  # of an upper confidence bound
WORK = Path(tempfile.gettempdir(), "tritune_planning_errors")
TRUE_REQUESTS = 120_000
SLOWER = (*(f"latency_{name}_ms" for name in STATISTICS), "network_ms", "queue_ms", "compute_infer_ms")
WINDOWS, WINDOW_NOISE = 4, 0.02  # windows on each fresh server, and their relative standard deviation
LOADS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128)
COUNTS = ((1, 1), (2, 4), (5, 9), (10, 19), (20, MOST_REPLICAS + 1))
COLUMNS = (
    *("", "cases", "safe is right", "likely is right", "within the interval"),
    *("safe is too low", "upper bound", "safe / true"),
)
NOISES = (0.03, 0.10)  # relative standard deviations between deployments
INTRODUCTION = f"""\
Each server is simulated. The plan sees measurements of deployments that differ by 3 to 10 % (relative standard
deviation; each server has its own). Traffic is Poisson; the policy of the load balancer and the rate are random.
Each server is planned once, so the cases are independent of each other. No constant of `tune plan` was chosen on
these servers, but on those of the seeds {", ".join(map(str, CHOOSING_SEEDS))}. **Safe** is the number that
`tune plan` recommends, **likely** its best estimate, and the **interval** goes from `low` to safe. A number is
*right* if it equals the true number, which is the smallest that meets the bound in a long simulation of the server
without noise.

Because deployments differ, the speed of a server is known to 2 or 3 % after a run. That does not distinguish 20
replicas from 21, so a number that is hardly ever too low is then one or two too high."""

CURVE = f"""\
The recommended number is the one at the quantile {SAFE:g} of the slowness. Other quantiles give other numbers from
the same measurements: a lower one needs fewer replicas and is too low more often. The upper bound on the share of
plans that are too low is the exact one of Clopper and Pearson (one-sided, {1 - ERROR:.0%} confidence)."""

SEVERAL_TEXT = """\
With several runs of one machine the interval narrows. `tune plan` estimates from the differences between deployments
by how much further measurements narrow it."""


@dataclass(frozen=True)
class Hidden:
    """A server, its configuration and the bound: everything that determines the number of replicas."""

    server: SimulatedServer
    candidate: Candidate
    runner_up: Candidate
    concurrency: int
    bound_ms: float

    @property
    def sla(self) -> Sla:
        return Sla.from_bounds({"p95": self.bound_ms})

    @property
    def problem(self) -> Problem:
        space = SearchSpace(
            tuple(sorted({one.max_batch_size for one in (self.candidate, self.runner_up)})),
            (0, 200, 1000),
            ("none", "max/2"),
            (self.candidate.instance_count,),
            request_batch_size=REQUEST_BATCH_SIZE,
        )
        return Problem("hidden", space, REQUEST_BATCH_SIZE, 128, sla=self.sla)


@dataclass(frozen=True)
class PlanningCase:
    """One planning question with its answers, numbers of replicas.

    ``noise`` is the variation between deployments. ``at_quantiles`` has the number at each of QUANTILES.
    """

    way: str
    policy: Balancer
    noise: float
    true: int
    low: int
    likely: int
    safe: int
    at_quantiles: tuple[int, ...] = ()


def drawn(rng: np.random.Generator) -> Hidden:
    server = SimulatedServer(
        "hidden",
        fixed_s=10 ** rng.uniform(-3.7, -2.6),
        per_sample_s=10 ** rng.uniform(-5.0, -4.2),
        contention=rng.uniform(0.1, 0.6),  # low enough that more instances are useful, as in recommendations
        network_s=10 ** rng.uniform(-4.0, -3.2),
        jitter=rng.uniform(0.05, 0.25),
        seed=int(rng.integers(2**31)),
        curve=str(rng.choice(list(CURVES))),
    )
    size, instances = int(2 ** rng.integers(3, 8)), int(rng.integers(1, 4))
    preferred = (size // 2,) if rng.random() < 0.3 else ()
    candidate = Candidate(size, True, int(rng.choice([0, 200, 1000])), preferred, instances)
    runner_up = replace(candidate, max_queue_delay_us=0 if candidate.max_queue_delay_us else 200)
    measurements = server.measure([(candidate, load) for load in LOADS])
    latencies_ms = [one.latency_p95_ms or math.inf for one in measurements]
    bound_ms = float(f"{latencies_ms[0] * 10 ** rng.uniform(math.log10(3), 1):.2g}")
    concurrency = max(load for load, latency_ms in zip(LOADS, latencies_ms, strict=True) if latency_ms <= bound_ms)
    return Hidden(server, candidate, runner_up, concurrency, bound_ms)


def run_on(hidden: Hidden, noise: float, rng: np.random.Generator) -> list[Trial]:
    """Return the measurements of a run on a server."""
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

    measurements = _deployed(hidden.server, noise, rng).measure([(candidate, one) for one in loads])
    trial = Trial(
        number, candidate, tuple((point(c), _window(m, rng)) for c, m in zip(loads, measurements, strict=True))
    )
    for server in (1, 2, 3):
        (found_again,) = _deployed(hidden.server, noise, rng).measure([(candidate, hidden.concurrency)])
        for _ in range(WINDOWS):
            again = ConfirmationWindow(server, point(hidden.concurrency), _window(found_again, rng))
            trial = trial.with_confirmation(again)
    return trial


def _deployed(server: SimulatedServer, noise: float, rng: np.random.Generator) -> SimulatedServer:
    factor = math.exp(rng.normal(0, noise))
    seed = int(rng.integers(2**31))
    return replace(server, fixed_s=factor * server.fixed_s, per_sample_s=factor * server.per_sample_s, seed=seed)


def _window(measured: Measurement, rng: np.random.Generator) -> Measurement:
    """Return a window of a closed loop, in which a slower server takes longer for everything."""
    factor = math.exp(rng.normal(0, WINDOW_NOISE))
    slower: dict[str, Any] = {name: getattr(measured, name) * factor for name in SLOWER}
    counted = batch_stats.from_text(measured.batch_stats)
    longer = (one._replace(compute_ns=round(factor * one.compute_ns)) for one in counted)
    assert measured.throughput_infer_per_sec, "a closed loop has a throughput"
    throughput = measured.throughput_infer_per_sec / factor
    return replace(measured, throughput_infer_per_sec=throughput, batch_stats=batch_stats.to_text(longer), **slower)


@dataclass(frozen=True)
class Truth:
    """The server without noise in a long simulation."""

    hidden: Hidden
    policy: Balancer

    def meets(self, rate: float, replicas: int, requests: int = TRUE_REQUESTS) -> bool:
        server, candidate = self.hidden.server, self.hidden.candidate
        load = OpenLoopLoad(PoissonTraffic().replica_arrivals_s(rate, replicas, self.policy, requests, seed=77))
        (result,) = simulate_many([server.scenario(candidate, load)], jitter=lognormal_jitter(server.jitter, 99))
        return not result.overloaded and 1e3 * result.latency_p95_s <= self.hidden.bound_ms

    def smallest(self, rate: float, guess: int) -> int:
        """Return the smallest number of replicas, searched from a guess in both directions."""
        step, met = 1, guess
        while not self.meets(rate, met):
            met, step = met + step, 2 * step
        failed, step = met - 1, 1
        while failed > 0 and self.meets(rate, failed):
            met, failed, step = failed, max(0, failed - step), 2 * step
        fewer = range(failed + 1, met)
        return fewer.start + bisect_left(fewer, True, key=lambda count: self.meets(rate, count))

    def rate_of_one(self, guess: float) -> float:
        low, high = 0.3 * guess, 1.5 * guess
        while high > 1.01 * low:
            middle = (low + high) / 2
            low, high = (middle, high) if self.meets(middle, 1, 40_000) else (low, middle)
        return low


def cases(number: int, seed: int, ways: Mapping[str, Way]) -> tuple[PlanningCase, ...]:
    """Return the cases of one server: a random policy and rate, answered in each of ``ways``."""
    rng = np.random.default_rng((seed, number))
    hidden = drawn(rng)
    noise = rng.uniform(*NOISES)
    runs = [run_on(hidden, noise, rng) for _ in range(max(way.runs for way in ways.values()))]
    replicas = {name: fit_replica(way.evidence(hidden, runs), hidden.sla) for name, way in ways.items()}
    policy = POLICIES[int(rng.integers(len(POLICIES)))]
    truth = Truth(hidden, policy)
    rate = truth.rate_of_one(next(iter(replicas.values())).capacity(Slowdown())) * rng.uniform(0.3, MOST_REPLICAS)
    results = []
    true = 0
    for name, one in replicas.items():
        fleet = Fleet(one, PoissonTraffic(), policy)
        count = estimate_replicas(fleet, rate)
        if count is None:
            continue
        true = true or truth.smallest(rate, count.likely)
        at_quantiles = [count.safe]
        for quantile in reversed(QUANTILES):
            enough = at_quantiles[0] if quantile <= SAFE else None
            at_quantiles.insert(0, fleet.fewest_replicas_at_quantile(rate, quantile, enough) or at_quantiles[0])
        results.append(
            PlanningCase(name, policy, noise, true, count.low, count.likely, count.safe, tuple(at_quantiles[:-1]))
        )
    return tuple(results)


@dataclass(frozen=True)
class Way:
    """The basis of a plan: how many runs, and whether other configurations with equal computation count."""

    runs: int
    alone: bool = False

    def evidence(self, hidden: Hidden, runs: Sequence[Sequence[Trial]]) -> Evidence:
        used = [[trial for trial in run if not self.alone or trial.number == 0] for run in runs[: self.runs]]
        return collect_evidence(hidden.candidate, hidden.problem, used, arrivals.PoissonArrivals())


SINGLE = {"one run": Way(1)}
SEVERAL = {
    "the same configuration only": Way(1, alone=True),
    "all configurations with equal computation": Way(1),
    "8 runs combined": Way(8),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--servers", type=int, default=1000, metavar="N", help="number of servers planned from one run each (1000)"
    )
    parser.add_argument(
        "--several", type=int, default=100, metavar="N", help="number of servers planned from several runs (100)"
    )
    parser.add_argument(
        "--seed", type=int, default=REPORTED_SEED, metavar="N", help=f"seed of the servers ({REPORTED_SEED})"
    )
    parser.add_argument("--processes", type=int, default=os.cpu_count() or 1, metavar="N")
    parser.add_argument(
        "--work",
        type=Path,
        default=WORK,
        help=f"folder of the finished servers; delete it after a change of the code ({WORK})",
    )
    arguments = parser.parse_args()
    single = _all_cases(arguments, arguments.servers, arguments.seed, "single", SINGLE)
    several = _all_cases(arguments, arguments.several, arguments.seed + 1, "several", SEVERAL)
    print_title("How often a plan's number of replicas is right: latest measurement")
    print(INTRODUCTION)
    print(f"\n## {len(single):,} cases, {arguments.servers:,} servers\n")
    _print_table(_groups(single))
    print(f"\n## Too few replicas against overhead\n\n{CURVE}\n")
    _print_curve(single)
    print(f"\n## Several runs: {arguments.several:,} other servers\n\n{SEVERAL_TEXT}\n")
    _print_table({name: [case for case in several if case.way == name] for name in SEVERAL})
    print("\n## Targets\n")
    print(_targets(single))
    print(f"\n{measured_on()}")


def _all_cases(
    arguments: argparse.Namespace, servers: int, seed: int, name: str, ways: Mapping[str, Way]
) -> list[PlanningCase]:
    """Return the cases of all servers; those that an earlier call has finished are read from its file."""
    by_server = run_missing_jobs(
        partial(cases, seed=seed, ways=ways),
        range(servers),
        arguments.processes,
        arguments.work / f"{name}.jsonl",
        tuple[PlanningCase, ...],
        key=lambda number: [seed, number],
        describe=lambda *_: name,
    )
    return [case for own in by_server.values() for case in own]


def _targets(cases: Sequence[PlanningCase]) -> str:
    few = sum(map(_too_few, cases))
    ratio = float(np.mean([case.safe / case.true for case in cases]))
    covered = float(np.mean([_covered(case) for case in cases]))
    return "\n".join(
        f"- {name}: {value}, {judged(is_met)}"
        for name, value, is_met in (
            (
                "safe is too low in at most 0.5 %",
                f"{few / len(cases):.2%}, upper bound {too_few_bound(few, len(cases)):.2%}",
                few <= 0.005 * len(cases),
            ),
            ("safe is at most 1.14 times the true number on average", f"{ratio:.3f}", ratio <= 1.14),
            ("the true number is within the interval in at least 95 %", f"{covered:.1%}", covered >= 0.95),
        )
    )


def too_few_bound(few: int, cases: int) -> float:
    """Return an upper confidence bound on the share of plans that are too low; the cases are independent."""
    return clopper_pearson_bounds(few / cases, cases, math.inf, ERROR)[1]


def _print_curve(cases: Sequence[PlanningCase]) -> None:
    print_head("quantile", "safe is too low", "upper bound", "safe / true", text=0)
    for number, quantile in enumerate(QUANTILES):
        few = sum(case.at_quantiles[number] < case.true for case in cases)
        ratio = float(np.mean([case.at_quantiles[number] / case.true for case in cases]))
        bound = too_few_bound(few, len(cases))
        print(row(f"{quantile:g}", f"{few / len(cases):.2%}", f"{bound:.2%}", f"{ratio:.3f}"))


def _groups(cases: Sequence[PlanningCase]) -> dict[str, list[PlanningCase]]:
    groups = {"all": list(cases)}
    for low, high in COUNTS:
        name = f"{low}" if low == high else f"{low} to {high}"
        groups[f"true count {name}"] = [case for case in cases if low <= case.true <= high]
    for policy in POLICIES:
        groups[policy] = [case for case in cases if case.policy == policy]
    for low_noise, high_noise in ((0.03, 0.05), (0.05, 0.075), (0.075, 0.10)):
        name = f"deployments differ by {low_noise:.1%} to {high_noise:.1%}"
        groups[name] = [case for case in cases if low_noise <= case.noise < high_noise]
    groups["the interval is one number"] = [case for case in cases if case.low == case.safe]
    return groups


def _print_table(groups: dict[str, list[PlanningCase]]) -> None:
    print_head(*COLUMNS)
    for name, members in groups.items():
        if not members:
            continue
        ratio = float(np.mean([case.safe / case.true for case in members]))
        shares = [_share(members, one) for one in (_exact, _likely, _covered, _too_few)]
        bound = too_few_bound(sum(map(_too_few, members)), len(members))
        print(row(name, f"{len(members):,}", *shares, f"{bound:.1%}", f"{ratio:.2f}"))


def _share(cases: Sequence[PlanningCase], is_so: Callable[[PlanningCase], bool]) -> str:
    count = sum(map(is_so, cases))
    return f"{count / len(cases):.1%}"


def _exact(case: PlanningCase) -> bool:
    return case.safe == case.true


def _likely(case: PlanningCase) -> bool:
    return case.likely == case.true


def _covered(case: PlanningCase) -> bool:
    return case.low <= case.true <= case.safe


def _too_few(case: PlanningCase) -> bool:
    return case.safe < case.true


if __name__ == "__main__":
    main()
