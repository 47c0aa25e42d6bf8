"""Simulate one search by 1, 8, 32 and 100 parallel workers: its quality, and the time that workers wait.

    python benchmarks/many_workers.py [--seeds 3] [--processes 2] [--json FILE] > benchmarks/many_workers.md

Each search is that of `tune`, on a simulated server with a virtual clock (virtual_workers.py). The CPU time of each
suggestion is measured and delays the workers that wait for it.
"""

from __future__ import annotations

import argparse
import math
import os
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import lru_cache
from pathlib import Path

from lib.output import head, measured_on, print_title, row
from lib.process_pool import run_missing_jobs
from lib.simulated_stack import CONCURRENCIES, SPACES, SimulatedStack
from lib.simulated_tables import SERVERS, SimulatedServer, hidden_server
from lib.virtual_workers import BOUND_MS, DEPLOY_SECONDS, MEASURE_SECONDS, WORKERS, History, problem_of, search
from objectives.metrics import METRICS
from optimizer.search import MIN_GAIN
from optimizer.search.candidate_tracker import CandidateTracker
from optimizer.search.optuna_samplers import sampler_for
from optimizer.search.simulated import SimulationGuidedSearcher
from optimizer.store.optuna_study import open_study

SPACE = "large"
CLOSE = (0.05, 0.01)  # tolerated shortfalls from the best throughput, as shares of it
FINALISTS = 2000  # cells that rank first in a short simulation; among them the best is determined exactly
INTRODUCTION = f"""\
N workers share one search in a space of {len(SPACES[SPACE]):,} configurations, p95 <= {BOUND_MS:g} ms, on simulated
servers without noise. A deployment takes {DEPLOY_SECONDS:g} s and a measurement {MEASURE_SECONDS:g} s.
Suggestions are made one at a time, and each takes its real CPU time. Values are medians over servers and seeds;
regrets have the maximum too.

- **within 5 %**, **within 1 %**: time until a measured throughput was this close to the server's best
- **ended**: time until the search ended by itself
- **one worker**: regret of a single worker after the same number of trials
- **repeated**: trials of a candidate that another trial had already
- **suggestion**: median / p95 of the CPU time of a suggestion
- **wait: suggestion**, **wait: trials**: shares of the workers' time spent on waiting for a suggestion, and for other
  trials to end because no further trial seemed worthwhile before
"""


@dataclass(frozen=True)
class WorkerSearch:
    """One search of the benchmark.

    ``kind`` is `together` or `one by one`. ``most`` limits the number of trials; without it the search ends by
    itself.
    """

    space: str
    server: str
    seed: int
    workers: int
    kind: str = "together"
    most: int | None = None


@dataclass(frozen=True)
class SearchOutcome:
    """The outcome of one search, with times in virtual seconds, or None if a level was never reached.

    ``regrets`` are those after each trial. ``searching`` and ``waiting`` are the shares of the workers' time spent on
    suggestions and on waiting for other trials to end.
    """

    trials: int
    duplicates: int
    until_s: tuple[float | None, ...]
    ended_s: float
    regrets: tuple[float, ...]
    suggestion_s: tuple[float, ...]
    searching: float
    waiting: float

    @property
    def regret(self) -> float:
        return self.regrets[-1]

    def regret_after(self, trials: int) -> float:
        return self.regrets[min(trials, len(self.regrets)) - 1]


def searched(job: WorkerSearch, stack: SimulatedStack, best: float) -> SearchOutcome:
    """Run one search. ``best`` is the throughput (infer/s) of the server's best configuration."""
    problem = problem_of(job.space)
    study = open_study(None, "many", problem, sampler_for("random", job.seed))
    gain = MIN_GAIN if job.most is None else 0.0
    searcher = SimulationGuidedSearcher(CandidateTracker(problem, study), gain, job.seed)
    found_it = best if job.kind == "one by one" else math.inf
    return _outcome(search(problem, searcher, stack, job.workers, job.seed, job.most, found_it), best)


def _outcome(history: History, best: float) -> SearchOutcome:
    workers_s = history.workers * history.ended_s
    return SearchOutcome(
        trials=len(history.trials),
        duplicates=history.duplicates,
        until_s=tuple(history.until_s((1 - share) * best) for share in CLOSE),
        ended_s=history.ended_s,
        regrets=tuple(1 - throughput / best for throughput in history.best_after),
        suggestion_s=tuple(history.suggestion_s),
        searching=history.searching_s / workers_s,
        waiting=history.waiting_s / workers_s,
    )


def best_of(server: SimulatedServer, space: str) -> float:
    """Return the throughput (infer/s) of the best configuration and load within the bound."""
    cells = [(one, load) for one in SPACES[space].candidates() for load in CONCURRENCIES]
    quick = server.glance(cells, os.cpu_count() or 1)
    near = [i for i, (_, latency_ms) in enumerate(quick) if latency_ms <= 1.1 * BOUND_MS]
    finalists = [cells[i] for i in sorted(near, key=lambda i: -quick[i][0])[:FINALISTS]]
    p95 = METRICS["latency-p95"].value
    measured = server.measure(finalists, os.cpu_count() or 1)
    return max(m.throughput_infer_per_sec or 0.0 for m in measured if (p95(m) or math.inf) <= BOUND_MS)


# -- all searches -----------------------------------------------------------------------------------------------


def main() -> None:
    arguments = _arguments()
    each = [(one, seed) for one in arguments.servers for seed in range(arguments.seeds)]
    outcomes = _run(
        [WorkerSearch(SPACE, one, seed, count) for count in arguments.workers for one, seed in each], arguments
    )
    most = dict.fromkeys(each, 0)  # trials of the longest search
    for job, outcome in outcomes.items():
        most[job.server, job.seed] = max(most[job.server, job.seed], outcome.trials)
    outcomes |= _run([WorkerSearch(SPACE, *one, 1, "one by one", most[one]) for one in each], arguments)
    print_title("A search by many workers: latest measurement")
    print(INTRODUCTION)
    print(_table(outcomes))
    print(measured_on(f"load {os.getloadavg()[2]:.1f}"))


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=3, metavar="N", help="use seeds 0 to N-1 for each server (3)")
    parser.add_argument(
        "--servers", nargs="+", choices=SERVERS, default=list(SERVERS), help="simulated servers (all)"
    )
    parser.add_argument(
        "--workers", type=int, nargs="+", default=list(WORKERS), choices=WORKERS, help="numbers of workers (all)"
    )
    parser.add_argument("--processes", type=int, default=2, metavar="N", help="number of processes (2)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="file of finished searches, which are not repeated")
    return parser.parse_args()


def _run(jobs: Sequence[WorkerSearch], arguments: argparse.Namespace) -> dict[WorkerSearch, SearchOutcome]:
    return run_missing_jobs(
        _search, jobs, arguments.processes, arguments.json, SearchOutcome, asdict, lambda job, _: str(job)
    )


def _search(job: WorkerSearch) -> SearchOutcome:
    return searched(job, SimulatedStack(hidden_server(job.server)), _best(job.server))


@lru_cache
def _best(server: str) -> float:
    return best_of(hidden_server(server), SPACE)


# -- output -----------------------------------------------------------------------------------------------------


def _table(outcomes: dict[WorkerSearch, SearchOutcome]) -> str:
    lines = head(*COLUMNS, text=0)
    for workers in WORKERS:
        jobs = [job for job in outcomes if (job.workers, job.kind) == (workers, "together")]
        if not jobs:
            continue
        own = [outcomes[job] for job in jobs]
        alone = [
            other.regret_after(outcomes[job].trials)
            for job in jobs
            for one, other in outcomes.items()
            if (one.server, one.seed, one.kind) == (job.server, job.seed, "one by one")
        ]
        suggestions = [took for one in own for took in one.suggestion_s]
        cells = [
            str(workers),
            f"{statistics.median(one.trials for one in own):g}",
            *(_seconds([one.until_s[i] for one in own]) for i in range(len(CLOSE))),
            _seconds([one.ended_s for one in own]),
            _regrets([one.regret for one in own]),
            _regrets(alone),
            str(sum(one.duplicates for one in own)),
            f"{statistics.median(suggestions):.2f} / {statistics.quantiles(suggestions, n=20)[-1]:.2f}",
            f"{statistics.median(one.searching for one in own):.0%}",
            f"{statistics.median(one.waiting for one in own):.0%}",
        ]
        lines.append(row(*cells))
    return "\n".join(lines) + "\n"


def _seconds(values: Sequence[float | None]) -> str:
    """Return the median time; levels that were never reached count as later than all others."""
    middle = statistics.median(math.inf if one is None else one for one in values)
    return f"{middle:.0f}" if math.isfinite(middle) else "never"


def _regrets(values: Sequence[float]) -> str:
    return f"{statistics.median(values):.1%} / {max(values):.1%}" if values else ""


COLUMNS = (
    "workers",
    "trials",
    *(f"within {share:.0%}, s" for share in CLOSE),
    "ended, s",
    "regret",
    "one worker",
    "repeated",
    "suggestion, CPU s",
    "wait: suggestion",
    "wait: trials",
)

if __name__ == "__main__":
    main()
