"""What 100 GPUs make of a search, and it of them: one search by 1, 8, 32 and 100 workers at once, simulated.

    python benchmarks/many_workers.py [--seeds 3] [--processes 2] [--json FILE] > benchmarks/many_workers.md

Each search is that of `tune`, on a made-up server and a clock that is counted (virtual_workers.py). What a suggestion
takes is measured, in seconds of a CPU, and holds up the workers that wait for one.
"""

from __future__ import annotations

import argparse
import json
import math
import multiprocessing
import os
import shlex
import statistics
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from made_up_stack import CONCURRENCIES, SPACES, Stack
from simulated_tables import REQUEST_BATCH_SIZE, SERVERS, Server, hidden_server
from virtual_workers import History, Pace, search

from objectives.metrics import METRICS
from objectives.sla import Constraint
from optimizer.machine import hardware
from optimizer.problem import Problem
from optimizer.search import SMALLEST_GAIN
from optimizer.search.ledger import Ledger
from optimizer.search.optuna import sampler_for
from optimizer.search.simulated import SimulatedSearcher
from optimizer.store.study import open_study
from optimizer.trial import Candidate

WORKERS = (1, 8, 32, 100)
SPACE = "large"
BOUND_MS = 20.0
CLOSE = (0.05, 0.01)  # shares of the best by which what was found may fall short of it
FINALISTS = 2000  # cells that a short simulation puts first, of which the best is found exactly
PACE = Pace(charged=True)
INTRODUCTION = f"""\
N workers share one search in a space of {len(SPACES[SPACE]):,} configurations, p95 <= {BOUND_MS:g} ms, on made-up
servers that are not noisy. A deployment takes {PACE.deploy_s:g} s, a measurement {PACE.measure_s:g} s; a suggestion
takes the seconds of a CPU that it really took, one after another. Medians over servers and seeds; of **regrets** the
largest too.

**Within 5 %**, **1 %**: until something that near to the server's best was measured. **Ended**: the search, by
itself. **One by one**: the regret of as many trials by one worker. **Heedless**: of as many by the same workers,
where what runs is only not repeated. **Twice**: trials that repeat another. **Suggestion**: median / p95, in seconds
of a CPU. **For it**, **for others**: the share of the workers' time that they wait for a suggestion, and for others'
trials to end, after which more may be worth trying.
"""


@dataclass(frozen=True)
class Job:
    """``kind``: `together`; `heedless`, which does not know what runs; `one by one`. Where ``most`` is given, the
    search ends after so many trials, not by itself."""

    space: str
    server: str
    seed: int
    workers: int
    kind: str = "together"
    most: int | None = None


@dataclass(frozen=True)
class Outcome:
    """Of one search, times in virtual seconds; None where it was never reached. ``regrets``: after each trial.

    ``searching`` and ``waiting``: shares of the workers' time, for a suggestion and for another trial to end.
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


class HeedlessLedger(Ledger):
    """Repeats nothing, but tells of what runs only while nothing was measured."""

    def running(self) -> list[tuple[Candidate, int]]:
        return [] if self._observed else super().running()


def problem_of(space: str) -> Problem:
    bound = Constraint("latency-p95", BOUND_MS)
    return Problem("m", SPACES[space], REQUEST_BATCH_SIZE, CONCURRENCIES[-1], constraints=(bound,))


def searched(job: Job, stack: Stack, best: float) -> Outcome:
    """``best``: infer/s of the server's best configuration."""
    problem = problem_of(job.space)
    study = open_study(None, "many", problem, sampler_for("random", job.seed))
    searcher = SimulatedSearcher(problem, study, SMALLEST_GAIN if job.most is None else 0.0, job.seed)
    if job.kind == "heedless":
        searcher._ledger = HeedlessLedger(problem, study)
    found_it = best if job.kind == "one by one" else math.inf
    return _outcome(search(problem, searcher, stack, job.workers, PACE, job.seed, job.most, found_it), best)


def _outcome(history: History, best: float) -> Outcome:
    workers_s = history.workers * history.ended_s
    return Outcome(
        trials=len(history.trials),
        duplicates=history.duplicates,
        until_s=tuple(history.until_s((1 - share) * best) for share in CLOSE),
        ended_s=history.ended_s,
        regrets=tuple(1 - found / best for found in history.best_after),
        suggestion_s=tuple(one.took_s for one in history.asked),
        searching=history.searching_s / workers_s,
        waiting=history.waiting_s / workers_s,
    )


def best_of(server: Server, space: str) -> float:
    """Infer/s of the best configuration and load within the bound."""
    cells = [(one, load) for one in SPACES[space].candidates() for load in CONCURRENCIES]
    quick = server.glance(cells, os.cpu_count() or 1)
    near = [i for i, (_, latency_ms) in enumerate(quick) if latency_ms <= 1.1 * BOUND_MS]
    finalists = [cells[i] for i in sorted(near, key=lambda i: -quick[i][0])[:FINALISTS]]
    p95 = METRICS["latency-p95"].value
    measured = server.measure(finalists, os.cpu_count() or 1)
    return max(m.throughput_infer_per_sec or 0.0 for m in measured if (p95(m) or math.inf) <= BOUND_MS)


# -- all searches -----------------------------------------------------------------------------------------------


def main() -> None:
    given = _arguments()
    for name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
        os.environ.setdefault(name, "1")  # seconds of a CPU are counted: none that only wait for one another
    kept = Kept(given.json)
    with ProcessPoolExecutor(given.processes, multiprocessing.get_context("spawn")) as pool:
        each = [(one, seed) for one in given.servers for seed in range(given.seeds)]
        together = [Job(SPACE, one, seed, count) for count in given.workers for one, seed in each]
        kept.add(pool, together)
        most = {(one, seed): kept.most(one, seed) for one, seed in each}
        kept.add(pool, [Job(SPACE, *one, 1, "one by one", most[one]) for one in each])
        if given.heedless:
            told = [replace(one, kind="heedless", most=kept.outcomes[one].trials) for one in together]
            kept.add(pool, [one for one in told if one.workers > 1])
    print("# A search by many workers, as last measured\n")
    print(f"`{shlex.join(['python', 'benchmarks/many_workers.py', *sys.argv[1:]])}`\n")
    print(INTRODUCTION)
    print(_table(kept.outcomes))
    machine = hardware.detect()
    print(f"{machine.cpu}, {machine.cpu_count} cores, load {os.getloadavg()[2]:.1f}; {time.strftime('%Y-%m-%d')}")


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=3, metavar="N", help="of each server: 0 to N-1 (3)")
    parser.add_argument("--servers", nargs="+", choices=SERVERS, default=list(SERVERS), help="(all)")
    parser.add_argument("--workers", type=int, nargs="+", default=list(WORKERS), choices=WORKERS, help="(all)")
    parser.add_argument("--heedless", action="store_true", help="also without knowing what runs")
    parser.add_argument("--processes", type=int, default=2, metavar="N", help="(2)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="keeps what was searched; what it has is not again")
    return parser.parse_args()


class Kept:
    """What was searched, in ``path`` too, a line each."""

    def __init__(self, path: Path | None) -> None:
        self._path = path
        self.bests: dict[str, float] = {}
        self.outcomes: dict[Job, Outcome] = {}
        for line in path.read_text().splitlines() if path and path.exists() else []:
            document = json.loads(line)
            values: dict[str, Any] = document["outcome"]
            values = {name: tuple(one) if isinstance(one, list) else one for name, one in values.items()}
            self.outcomes[Job(**document["job"])] = Outcome(**values)

    def most(self, server: str, seed: int) -> int:
        """Trials of the search that took the most."""
        return max(
            outcome.trials
            for job, outcome in self.outcomes.items()
            if (job.server, job.seed, job.kind) == (server, seed, "together")
        )

    def add(self, pool: ProcessPoolExecutor, jobs: Sequence[Job]) -> None:
        servers = {job.server for job in jobs if job not in self.outcomes} - self.bests.keys()
        self.bests.update(pool.map(_best, servers))
        running = {pool.submit(_search, job, self.bests[job.server]): job for job in jobs if job not in self.outcomes}
        for future in as_completed(running):
            job = running[future]
            self.outcomes[job] = future.result()
            print(f"{time.strftime('%H:%M:%S')} {job}", file=sys.stderr, flush=True)
            if self._path:
                with self._path.open("a") as file:
                    file.write(json.dumps({"job": asdict(job), "outcome": asdict(self.outcomes[job])}) + "\n")


def _best(server: str) -> tuple[str, float]:
    return server, best_of(hidden_server(server), SPACE)


def _search(job: Job, best: float) -> Outcome:
    return searched(job, Stack(hidden_server(job.server)), best)


# -- what is printed --------------------------------------------------------------------------------------------


def _table(outcomes: dict[Job, Outcome]) -> str:
    lines = [_line(COLUMNS), _line(["--:"] * len(COLUMNS))]
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
        heedless = [
            other.regret for one, other in outcomes.items() if (one.workers, one.kind) == (workers, "heedless")
        ]
        suggestions = [took for one in own for took in one.suggestion_s]
        cells = [
            str(workers),
            f"{statistics.median(one.trials for one in own):g}",
            *(_seconds([one.until_s[i] for one in own]) for i in range(len(CLOSE))),
            _seconds([one.ended_s for one in own]),
            _regrets([one.regret for one in own]),
            _regrets(alone),
            _regrets(heedless),
            str(sum(one.duplicates for one in own)),
            f"{statistics.median(suggestions):.2f} / {statistics.quantiles(suggestions, n=20)[-1]:.2f}",
            f"{statistics.median(one.searching for one in own):.0%}",
            f"{statistics.median(one.waiting for one in own):.0%}",
        ]
        lines.append(_line(cells))
    return "\n".join(lines) + "\n"


def _seconds(values: Sequence[float | None]) -> str:
    """The median; what was never reached is later than all."""
    middle = statistics.median(math.inf if one is None else one for one in values)
    return f"{middle:.0f}" if math.isfinite(middle) else "never"


def _regrets(values: Sequence[float]) -> str:
    return f"{statistics.median(values):.1%} / {max(values):.1%}" if values else ""


def _line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


COLUMNS = (
    "workers",
    "trials",
    *(f"within {share:.0%}, s" for share in CLOSE),
    "ended, s",
    "regret",
    "one by one",
    "heedless",
    "twice",
    "suggestion, CPU s",
    "for it",
    "for others",
)

if __name__ == "__main__":
    main()
