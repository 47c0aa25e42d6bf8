"""Measure the cost of the `simulated` search: time to rank a space, time of a suggestion, memory and deployments.

    python benchmarks/ranking_cost.py [--seeds 3] [--part cost|growth] > benchmarks/ranking_cost.md

The search runs as in `tune` (baselines, suggestions, load sweeps) on a server of simulated_tables.py. Only the time
in ``suggest`` counts. Each search has its own process.
"""

from __future__ import annotations

import argparse
import math
import statistics
import time
from dataclasses import dataclass

from lib.output import measured_on, print_head, print_progress, print_title, row
from lib.process_pool import run_in_own_process
from lib.simulated_stack import CONCURRENCIES, SPACES, SimulatedStack
from lib.simulated_tables import REQUEST_BATCH_SIZE, SERVERS, hidden_server
from objectives.metrics import Forecast
from objectives.sla import Sla
from optimizer.config.problem import Problem
from optimizer.config.search_space import SearchSpace
from optimizer.core.budget import Budget
from optimizer.core.candidate import Candidate
from optimizer.core.endpoint import Endpoint
from optimizer.core.interfaces import Searcher
from optimizer.core.stopwatch import Stopwatch, peak_memory_bytes
from optimizer.core.trial import LoadPoint, Trial
from optimizer.measure.measurer import Measurer
from optimizer.model.profile import load_profile
from optimizer.model.profile_lookup import find_profile
from optimizer.replay.replay import DiscardingRecord
from optimizer.results import formatting
from optimizer.results.progress_observers import QuietObserver
from optimizer.search import make_searcher
from optimizer.store.recording import baselines
from optimizer.study.scheduler import Scheduler
from optimizer.study.trial_runner import run_trials

MOST_RANKING_S, MOST_LARGE_RANKING_S, MOST_SUGGESTION_S = 5.0, 60.0, 1.0
MOST_MEMORY_BYTES = 1e9
MOST_GROWTH = 1.5
SUGGESTIONS = 8  # timed suggestions after the first one, which ranks the space
MAX_TRIALS = 40
BOUND_MS = 20.0
COST_SERVER = "threads"
COST_COLUMNS = ("space", "configurations", "ranking s", "next: median s", "next: slowest s", "peak MB")


@dataclass(frozen=True)
class SearchCost:
    """The cost of one search. ``suggestion_s`` has the time of each suggestion; the first one ranks the space."""

    configurations: int
    making_s: float
    suggestion_s: tuple[float, ...]
    deployments: int
    throughput_infer_per_sec: float
    peak_memory_bytes: int


def main() -> None:
    arguments = _arguments()
    print_title("The cost of the simulated search: latest measurement")
    if arguments.part in ("cost", "both"):
        _print_cost()
    if arguments.part in ("growth", "both"):
        _print_growth(arguments.seeds)
    print(measured_on())


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--part", choices=("cost", "growth", "both"), default="both")
    parser.add_argument("--seeds", type=int, default=1, metavar="N", help="use seeds 0 to N-1 for the growth (1)")
    return parser.parse_args()


# -- output -----------------------------------------------------------------------------------------------------


def _print_cost() -> None:
    print("## Time and memory\n")
    print("**Ranking** is the creation of the searcher and its first suggestion after the two baselines. It")
    print(
        "simulates the whole space. **Next** are the following suggestions. **Peak memory** is that of the process.\n"
    )
    print_head(*COST_COLUMNS)
    for name, most_s in (("dlrm", MOST_RANKING_S), ("large", MOST_LARGE_RANKING_S)):
        result = _in_own_process(name, COST_SERVER, 0, 2 + 1 + SUGGESTIONS)
        ranking_s, later_s = result.making_s + result.suggestion_s[0], result.suggestion_s[1:] or (math.nan,)
        judged = (
            (ranking_s, most_s, "{:.1f}"),
            (max(later_s), MOST_SUGGESTION_S, "{:.2f}"),
            (result.peak_memory_bytes / 1e6, MOST_MEMORY_BYTES / 1e6, "{:.0f}"),
        )
        ranking, slowest, memory = (_judged(*figure) for figure in judged)
        median = f"{statistics.median(later_s):.2f}"
        print(row(LABELS[name], f"{result.configurations:,}", ranking, median, slowest, memory), flush=True)
    print()


def _print_growth(seeds: int) -> None:
    """Print the deployments in a space and in one ten times as large that contains it."""
    print("## Deployments in a space that is ten times larger\n")
    print(
        f"Deployments until the search stopped, including the baselines; p95 <= {BOUND_MS:g} ms, "
        f"{formatting.count(seeds, 'seed')}.\n"
    )
    print_head("server", "small space", "large space", "ratio", "infer/s small", "infer/s large")
    totals: dict[str, list[int]] = {"small": [], "tenfold": []}
    for server in SERVERS:
        runs = {name: [_in_own_process(name, server, seed, MAX_TRIALS) for seed in range(seeds)] for name in totals}
        counts = {name: [run.deployments for run in own] for name, own in runs.items()}
        for name, own in counts.items():
            totals[name] += own
        small, large = (statistics.median(own) for own in counts.values())
        best = [statistics.median(run.throughput_infer_per_sec for run in own) for own in runs.values()]
        cells = [f"{small:g}", f"{large:g}", f"{large / small:.2f}", *(f"{value:,.0f}" for value in best)]
        print(row(server, *cells), flush=True)
    small, large = (statistics.median(own) for own in totals.values())
    growth = large / small
    print(row("**median**", f"{small:g}", f"{large:g}", f"{growth:.2f}", "", ""))
    sizes = [f"{len(SPACES[name]):,}" for name in totals]
    print(
        f"\n{sizes[1]} configurations take {growth:.2f} times the deployments of {sizes[0]} configurations ", end=""
    )
    print(f"(at most {MOST_GROWTH:g}: **{_verdict(growth, MOST_GROWTH)}**).\n")


def _judged(figure: float, most: float, form: str) -> str:
    return f"{form.format(figure)} (at most {most:g}: {_verdict(figure, most)})"


def _verdict(figure: float, most: float) -> str:
    return "met" if figure <= most else "missed"


# -- one search -------------------------------------------------------------------------------------------------


def _in_own_process(space: str, server: str, seed: int, max_trials: int) -> SearchCost:
    print_progress(f"{space}, {server}, seed {seed}")
    return run_in_own_process(_search, space, server, seed, max_trials)


def _search(space: str, server: str, seed: int, max_trials: int) -> SearchCost:
    problem = _problem(space)
    stack = SimulatedStack(hidden_server(server))
    stack.measure(Endpoint("", Candidate(REQUEST_BATCH_SIZE)), LoadPoint(REQUEST_BATCH_SIZE, 1))  # compiles
    started = time.perf_counter()
    searcher = _Timed(make_searcher("simulated", problem, seed))
    making_s = time.perf_counter() - started
    budget = Budget(math.inf, max_trials)
    scheduler = Scheduler(problem, searcher, budget, Stopwatch(), baselines(problem.space))
    trials = run_trials(scheduler, stack, Measurer(stack, stack, DiscardingRecord(), QuietObserver()))
    best, peak_bytes = scheduler.best(), peak_memory_bytes()
    assert peak_bytes is not None, "Linux has it"
    return SearchCost(
        configurations=len(problem.space),
        making_s=making_s,
        suggestion_s=tuple(searcher.took_s),
        deployments=len(trials),
        throughput_infer_per_sec=(best.measurement.throughput_infer_per_sec or 0.0) if best else 0.0,
        peak_memory_bytes=peak_bytes,
    )


def _problem(space: str) -> Problem:
    if space not in SPACES:
        return _problem_of_profile(space)
    sla = Sla.from_bounds({"p95": BOUND_MS})
    return Problem(space, SPACES[space], REQUEST_BATCH_SIZE, CONCURRENCIES[-1], sla=sla)


def _problem_of_profile(name: str) -> Problem:
    """Return the problem of a profile as `tune` creates it, without building the model."""
    profile = load_profile(find_profile(name))
    section = profile.space
    assert profile.request.batch_size == REQUEST_BATCH_SIZE, "of the simulated servers"
    assert section is not None, "the profile names its choices"
    space = SearchSpace(
        max_batch_size=section.max_batch_size or (),
        max_queue_delay_us=section.max_queue_delay_microseconds or (),
        preferred_batch_sizes=section.preferred_batch_size or (),
        instance_count=section.instance_group_count or (),
        fields=section.config,
        request_batch_size=REQUEST_BATCH_SIZE,
    )
    sla = Sla.from_bounds(profile.sla.latency_bounds_ms())
    return Problem(name, space, REQUEST_BATCH_SIZE, profile.load.max_concurrency, sla=sla)


class _Timed:
    """A Searcher that measures the time of each suggestion, including observations since the last one."""

    is_exhaustive = False

    def __init__(self, searcher: Searcher) -> None:
        self._searcher = searcher
        self._observing_s = 0.0
        self.took_s: list[float] = []

    def suggest(self) -> Candidate | None:
        started = time.perf_counter()
        candidate = self._searcher.suggest()
        self.took_s.append(time.perf_counter() - started + self._observing_s)
        self._observing_s = 0.0
        return candidate

    def forecast(self, candidate: Candidate, load: LoadPoint, speed_probe_ms: float | None) -> Forecast | None:
        return self._searcher.forecast(candidate, load, speed_probe_ms)

    def expected_load(self, candidate: Candidate) -> int | None:
        return self._searcher.expected_load(candidate)

    def observe(self, trial: Trial) -> None:
        started = time.perf_counter()
        self._searcher.observe(trial)
        self._observing_s += time.perf_counter() - started


LABELS = {
    "dlrm": "`configs/dlrm.yaml` as it is",
    "large": f"{len(CONCURRENCIES)} loads",
}

if __name__ == "__main__":
    main()
