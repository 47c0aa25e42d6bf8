"""Search on a machine whose speed changes, with and without the correction for it: regret and number of trials.

    python benchmarks/search_drift.py [--seeds 4] [--only steps] > benchmarks/search_drift.md

Searches simulated servers (simulated_tables.py) as `tune` does, on machines that drift by a virtual clock: their
speed changes in steps, or other processes take CPUs. Prints Markdown; progress goes to standard error.
"""

from __future__ import annotations

import argparse
import contextlib
import math
import os
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache

import numpy as np

from lib.output import measured_on, print_title, row
from lib.process_pool import run_jobs
from lib.simulated_stack import (
    DEPLOY_SECONDS,
    MAX_CONCURRENCY,
    PROBE_NOISE,
    PROBE_SECONDS,
    SERVERS,
    SimulatedStack,
    feasible_bound_ms,
    highest_throughput,
    slowed,
    true_measurements,
)
from lib.simulated_tables import REQUEST_BATCH_SIZE, hidden_server
from objectives.metrics import Measurement
from objectives.sla import Sla
from optimizer.config.problem import Problem
from optimizer.confirmation.plan import finalists
from optimizer.core.budget import Budget
from optimizer.core.candidate import Candidate
from optimizer.core.endpoint import Endpoint
from optimizer.core.resource_usage import ResourceUsage
from optimizer.core.stopwatch import Stopwatch
from optimizer.core.trial import LoadPoint, latest_points
from optimizer.measure.measurer import Measurer
from optimizer.replay.replay import DiscardingRecord
from optimizer.results import formatting
from optimizer.results.progress_observers import QuietObserver
from optimizer.search import make_searcher
from optimizer.simulator.speed_correction import fit_speed_correction
from optimizer.store.recording import baselines
from optimizer.study.scheduler import MAX_CONTROLS, Scheduler
from optimizer.study.trial_runner import run_trials

EPOCH_SECONDS = (20.0, 60.0)  # time between two changes
STEP_FACTORS = (1.3, 1.7)
MEASURE_SECONDS = 1.4
SEARCH_SECONDS = 72.0  # 60 % of two minutes
DEPLOYMENT_NOISE, MEASUREMENT_NOISE = 0.05, 0.03  # standard deviations of logs
UNSTEADY_PROBE_NOISE = 0.22
OTHERS_SHARE = 0.46  # share of the CPUs that other processes take every other epoch
MOST_SLOWED = 0.5  # largest log by which they slow a measurement
LARGE_REGRET = 0.05
FEASIBLE_SHARE = 0.4  # share of all configurations and loads within the bound
COLUMNS = (
    *("machine", "slope", "search sees", "regret", "difference", "90th percentile", f"above {LARGE_REGRET:.0%}"),
    *("choice", "tried", "controls"),
)

INTRODUCTION = f"""\
Each machine changes every {EPOCH_SECONDS[0]:g} to {EPOCH_SECONDS[1]:g} s: its speed by a factor of
{STEP_FACTORS[0]:g} to {STEP_FACTORS[1]:g}, or other processes come that take {OTHERS_SHARE:.0%} of the CPUs, and go
again. *Slope* is the true one, by how much the log of latency rises with the log of the speed probe: 1 for a model
that computes on the CPUs, 0 for one that the probe says nothing about. The search has {SEARCH_SECONDS:g} s:
{DEPLOY_SECONDS:g} s for a deployment and {MEASURE_SECONDS:g} s for a measurement.

**Regret** is what the configuration that would be confirmed first serves less than the best one, each at its highest
load within the bound, at the median speed of the machine during the search. *Choice* is the same among the
configurations that were tried. *Difference* is the one to the same searches with *hidden*, in percentage points, with
its standard error. *Hidden* means that the search does not see the probe, or the CPU share of other
processes; the other rows are what `tune` does, without and with up to {MAX_CONTROLS} control measurements."""


@dataclass(frozen=True)
class Machine:
    """A kind of machine.

    ``slope`` is the effect of its speed on the model, ``cpu_count`` None is a GPU's, ``probe_noise`` is the standard
    deviation of the log of a probe at constant speed.
    """

    name: str
    has_steps: bool = False
    slope: float = 1.0
    is_shared: bool = False
    cpu_count: int | None = 2
    probe_noise: float = PROBE_NOISE


@dataclass(frozen=True)
class Method:
    """A search: the measurements of the machine that it reads, and its number of control measurements."""

    name: str
    sees_probe: bool = True
    sees_others: bool = True
    max_controls: int = MAX_CONTROLS


HIDDEN = Method("hidden", sees_probe=False, sees_others=False)
PROBE = Method("probe", max_controls=0)
CONTROLS = Method("probe and controls")
METHODS = (HIDDEN, PROBE, CONTROLS)
MACHINES = {
    "quiet": (Machine("quiet"), (HIDDEN, CONTROLS)),
    "steps": (Machine("speed steps", has_steps=True), METHODS),
    "half": (Machine("speed steps, half the effect", has_steps=True, slope=0.5), METHODS),
    "none": (Machine("speed steps without effect", has_steps=True, slope=0.0), METHODS),
    "gpu": (Machine("speed steps without effect, GPU", has_steps=True, slope=0.0, cpu_count=None), METHODS),
    "unsteady": (Machine("unsteady probe", probe_noise=UNSTEADY_PROBE_NOISE), METHODS),
    "both": (
        Machine("speed steps, unsteady probe", has_steps=True, probe_noise=UNSTEADY_PROBE_NOISE),
        METHODS,
    ),
    "shared": (Machine("other processes", is_shared=True), (HIDDEN, CONTROLS)),
}


@dataclass
class DriftingServer:
    """A simulated server on a drifting machine: target, load generator, telemetry, speed probe and clock."""

    stack: SimulatedStack
    machine: Machine
    seed: int
    shows_others: bool
    seconds: float = 0.0
    deployment: float = 0.0  # log slowness of the current deployment
    slowness: list[float] = field(default_factory=list)  # log slowness of the machine at each deployment
    steps: list[tuple[float, float]] = field(default_factory=list)  # (end in s, log slowness), alternating

    def __post_init__(self) -> None:
        steps, self.noise, self.probe_noise = (np.random.default_rng((self.seed, part)) for part in range(3))
        end, sign = -float(steps.uniform(0, EPOCH_SECONDS[0])), int(steps.choice([-1, 1]))
        while end < 10 * SEARCH_SECONDS:
            end += float(steps.uniform(*EPOCH_SECONDS))
            self.steps.append((end, sign * math.log(steps.uniform(*STEP_FACTORS)) / 2))
            sign = -sign

    def clock(self) -> float:
        return self.seconds

    def _step(self) -> float:
        """Return the step of the current epoch, as the log slowness of a machine with speed steps."""
        return next(step for end, step in self.steps if self.seconds < end)

    def probe(self) -> float:
        slowness = self._step() if self.machine.has_steps else 0.0
        return PROBE_SECONDS * math.exp(slowness + self.probe_noise.normal(0, self.machine.probe_noise))

    @contextlib.contextmanager
    def deploy(self, candidate: Candidate, *, fresh: bool = False) -> Iterator[Endpoint]:
        with self.stack.deploy(candidate) as endpoint:
            self.seconds += DEPLOY_SECONDS
            self.deployment = self.noise.normal(0, DEPLOYMENT_NOISE)
            self.slowness.append(self.machine.slope * self._step() if self.machine.has_steps else 0.0)
            yield endpoint

    def close(self) -> None: ...

    def warm_up(self, endpoint: Endpoint, load: LoadPoint) -> None: ...

    def measure(self, endpoint: Endpoint, load: LoadPoint, seconds: float | None = None) -> Measurement:
        usual = self.stack.measure(endpoint, load)
        self.seconds += MEASURE_SECONDS
        slowness = self.deployment + self.noise.normal(0, MEASUREMENT_NOISE)
        stable = usual.stable
        if self.machine.has_steps:
            slowness += self.machine.slope * self._step()
        if self._is_disturbed():
            slowness += self.noise.uniform(0, MOST_SLOWED)
            stable = stable and self.noise.random() < 0.5
        reason = "" if stable else "unstable"
        return replace(slowed(usual, slowness), stable=stable, reason=reason, measure_seconds=MEASURE_SECONDS)

    def measure_windows(self, endpoint: Endpoint, load: LoadPoint, seconds: float, count: int) -> list[Measurement]:
        return [self.measure(endpoint, load)]

    def _is_disturbed(self) -> bool:
        return self.machine.is_shared and self._step() > 0

    @contextlib.contextmanager
    def record(self, endpoint: Endpoint) -> Iterator[ResourceUsage]:
        usage = ResourceUsage()
        yield usage
        if self.shows_others:
            usage.other_cpu_share = OTHERS_SHARE if self._is_disturbed() else 0.01


@dataclass(frozen=True)
class DriftJob:
    machine: Machine
    method: Method
    server: str
    seed: int


@dataclass(frozen=True)
class DriftResult:
    regret: float
    choice: float  # regret among the configurations that were tried
    trials: int
    controls: int


def search(job: DriftJob) -> DriftResult:
    bound = feasible_bound_ms(job.server, FEASIBLE_SHARE)
    stack = SimulatedStack(hidden_server(job.server))
    problem = Problem(
        job.server,
        stack.server.space,
        REQUEST_BATCH_SIZE,
        MAX_CONCURRENCY,
        sla=Sla.from_bounds({"p95": bound}),
        cpu_count=job.machine.cpu_count,
    )
    server = DriftingServer(stack, job.machine, job.seed, job.method.sees_others)
    probe = server.probe if job.method.sees_probe else None
    measurer = Measurer(server, server, DiscardingRecord(), QuietObserver(), speed_probe=probe)
    budget = Budget(SEARCH_SECONDS, confirm_share=0.0, clock=server.clock)
    searcher = make_searcher("simulated", problem, job.seed)
    comparisons = baselines(problem.space)
    scheduler = Scheduler(problem, searcher, budget, Stopwatch(), comparisons, max_controls=job.method.max_controls)
    trials = run_trials(scheduler, server, measurer)
    points = fit_speed_correction(trials, problem).correct_points(latest_points(trials))
    chosen = next(iter(finalists(points, problem, 1)), None)
    tried = {problem.space.canonical(trial.candidate) for trial in trials}
    served = _highest_throughputs(job.server, round(bound / math.exp(statistics.median(server.slowness)), 3))
    own = served[problem.space.canonical(chosen.candidate)] if chosen else 0.0
    best, best_tried = max(served.values()), max(served[candidate] for candidate in tried)
    return DriftResult(1 - own / best, 1 - own / best_tried, len(tried), len(trials) - len(tried))


@lru_cache
def _highest_throughputs(server: str, bound_ms: float) -> dict[Candidate, float]:
    """Return the highest throughput of each candidate within ``bound_ms`` (p95), interpolated between loads."""
    curves = {
        candidate: [(one.latency_p95_ms or math.inf, one.throughput_infer_per_sec or 0.0) for one in measured]
        for candidate, measured in true_measurements(server).items()
    }
    return {candidate: highest_throughput(curve, bound_ms) for candidate, curve in curves.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=4, metavar="N", help="use seeds 0 to N-1 (4)")
    parser.add_argument("--only", choices=MACHINES, help="use one machine only")
    parser.add_argument("--processes", type=int, default=os.cpu_count() or 1, metavar="N")
    arguments = parser.parse_args()
    cases = [
        (machine, method)
        for name, (machine, methods) in MACHINES.items()
        if arguments.only in (None, name)
        for method in methods
    ]
    jobs = [
        DriftJob(machine, method, server, seed)
        for machine, method in cases
        for server in SERVERS
        for seed in range(arguments.seeds)
    ]
    by_case: dict[tuple[Machine, Method], list[DriftResult]] = {}
    for job, result in zip(jobs, run_jobs(search, jobs, arguments.processes, _describe), strict=True):
        by_case.setdefault((job.machine, job.method), []).append(result)
    print_title("Search on a drifting machine: latest measurement")
    print(INTRODUCTION)
    print(f"\n{row(*COLUMNS)}")
    print(row("---", "--:", "---", *["--:"] * (len(COLUMNS) - 3)))
    for machine, method in cases:
        hidden = by_case[machine, HIDDEN]
        print(row(machine.name, f"{machine.slope:g}", method.name, *_cells(by_case[machine, method], hidden)))
    searches = formatting.count(len(SERVERS), "server") + ", " + formatting.count(arguments.seeds, "seed")
    print(f"\n{measured_on(searches)}")


def _describe(job: DriftJob, result: DriftResult) -> str:
    return f"{job.machine.name}, {job.method.name}, {job.server}, {job.seed}: {result}"


def _cells(results: Sequence[DriftResult], hidden: Sequence[DriftResult]) -> list[str]:
    regrets = sorted(result.regret for result in results)
    gains = [own.regret - other.regret for own, other in zip(results, hidden, strict=True)]
    error = statistics.stdev(gains) / math.sqrt(len(gains))
    large = statistics.fmean(regret > LARGE_REGRET for regret in regrets)
    return [
        f"{statistics.fmean(regrets):.1%}",
        f"{100 * statistics.fmean(gains):+.1f} ± {100 * error:.1f}" if any(gains) else "",
        f"{regrets[-(-9 * len(regrets) // 10) - 1]:.1%}",
        f"{large:.0%}",
        f"{statistics.fmean(result.choice for result in results):.1%}",
        f"{statistics.fmean(result.trials for result in results):.1f}",
        f"{statistics.fmean(result.controls for result in results):.1f}",
    ]


if __name__ == "__main__":
    main()
