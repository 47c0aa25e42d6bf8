"""What a search gains from a study on another machine, and what it loses to a misleading one.

    python benchmarks/warm_start.py [--seeds 10] [--runs FILE] [dlrm mlp wide] > benchmarks/warm_start.md

Replays each recorded table under three bounds by the simulated search: begun with nothing, with what a search on
another machine measured (`run`), and with all that could be measured there (`table`). The tables are the second
and third recordings in tables/recordings/; of the first other_machines.py makes the other machines, so that no cell
owes its figures here and there to the same moment. The contrary machine misleads as much as a table can. Prints
Markdown; progress goes to standard error. With --runs it can be interrupted: what FILE has is not searched again.
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
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from functools import lru_cache
from pathlib import Path

from other_machines import CONTRARY, RELATED, SOURCES, recorded_on, write_recordings
from search_methods import FEASIBLE_SHARES, TABLES, bound_ms

from objectives.sla import Constraint
from optimizer.budget import Budget
from optimizer.machine import hardware
from optimizer.measuring import Measuring
from optimizer.problem import Problem
from optimizer.replay.baselines import baselines
from optimizer.replay.comparison import Spread
from optimizer.replay.engine import Replayed, replay
from optimizer.replay.recording import Recording, read_recording
from optimizer.replay.source import elsewhere_of
from optimizer.report import words
from optimizer.report.live import QuietWatcher
from optimizer.search import make_searcher
from optimizer.store.trials_table import TrialsTable
from optimizer.tuner import Tuner

MAX_TRIALS = 30
FEWER, NO_MORE = 0.25, 1.3  # deployments with a related study, and with a misleading one
NOTHING = "nothing"
BEGUN_WITH = (NOTHING, *(f"{name} {kind}" for kind in ("run", "table") for name in SOURCES))
COLUMNS = ("table", "p95 within", "begun with", "deployed until it stopped", "until within 5 %", "until within 1 %")
INTRODUCTION = f"""\
Each cell: median / p90 over the seeds (mean). **Deployed** counts model loads until the search stopped, the baselines
included; **until within 5 %** how many of them it took until something that good had been measured; **regret** is the
share of the table's best throughput under the bound that the recommendation lacks.

**Begun with** a `run` is what a search on that machine had measured when it stopped, with a `table` every
configuration at every load there. {" and ".join(f"`{name}`" for name in RELATED)} are related machines: their service
times are so many times as long, and their contention, gain from threads, overheads, variation and the shape of their
service times are others too (other_machines.py has the figures). `{CONTRARY}` is none: each configuration has the
figures of the one that is furthest from it. The tables are the means of the second and third
recordings in tables/recordings/, the other machines are made of the first."""


@dataclass(frozen=True)
class Job:
    """One search of ``table`` under one bound. ``source`` holds the study it begins with."""

    table: Path
    sla: str
    begun_with: str
    source: Path | None
    seed: int


@dataclass(frozen=True)
class Found:
    """Of one search: model loads until it stopped, and until something within 5 % and 1 % of the best had been
    measured (inf: never)."""

    deployments: float
    within_5: float
    within_1: float
    regret: float

    @classmethod
    def of(cls, run: Replayed) -> Found:
        return cls(run.effort.deployments, run.until[0.05].deployments, run.until[0.01].deployments, run.regret)


Runs = dict[Job, Found]


def main() -> None:
    given = _arguments()
    with tempfile.TemporaryDirectory() as scratch:
        jobs = list(_jobs(given.names, Path(scratch), given.seeds))
        kept = _read(given.runs)
        runs = {job: kept[_key(job)] for job in jobs if _key(job) in kept}
        missing = [job for job in jobs if job not in runs]
        for job, found in zip(missing, _searched(missing, given.processes), strict=True):
            runs[job] = found
            _keep(given.runs, job, found)
        _print(runs, given)


def _print(runs: Runs, given: argparse.Namespace) -> None:
    words_given = [word for word in sys.argv[1:] if not word.startswith("--runs") and word != str(given.runs)]
    print("# Begun with another machine's study, as last measured\n")
    print(f"`{shlex.join(['python', 'benchmarks/warm_start.py', *words_given])}`\n")
    print(INTRODUCTION, end="\n\n")
    _print_table(runs)
    print("\n## Targets\n")
    _print_targets(runs)
    machine = hardware.detect()
    print(
        f"\n{words.count(given.seeds, 'seed')}; {machine.cpu}, {machine.cpu_count} cores; {time.strftime('%Y-%m-%d')}"
    )


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    known = sorted(path.stem for path in TABLES.glob("*.csv"))
    parser.add_argument("--seeds", type=int, default=10, metavar="N", help="of each search: 0 to N-1 (10)")
    parser.add_argument("--processes", type=int, default=os.cpu_count() or 1, metavar="N")
    parser.add_argument("--runs", type=Path, metavar="FILE", help="keep searches in it, and take those that it has")
    parser.add_argument("names", nargs="*", metavar="NAME", default=known, help=f"of {', '.join(known)} (all)")
    given = parser.parse_args()
    if unknown := set(given.names) - set(known):
        parser.error(f"no table is called {min(unknown)}: give some of {', '.join(known)}")
    if min(given.seeds, given.processes) < 1:
        parser.error("--seeds and --processes are at least 1")
    return given


# -- the other machines' studies ---------------------------------------------------------------------------------


def _jobs(names: Sequence[str], scratch: Path, seeds: int) -> Iterator[Job]:
    for name in names:
        path, other = scratch / f"{name}.csv", scratch / f"{name} of another moment.csv"
        write_recordings(name, (1, 2), path)
        write_recordings(name, (0,), other)
        for source in SOURCES:
            _write_table(read_recording(other), source, scratch / f"{name} {source} table.csv")
        for sla, share in FEASIBLE_SHARES.items():
            for begun_with in BEGUN_WITH:
                study = None if begun_with == NOTHING else scratch / f"{name} {begun_with}.csv"
                if study is not None and begun_with.endswith("run"):
                    every = study.with_name(f"{name} {begun_with.removesuffix('run')}table.csv")
                    study = study.with_name(f"{name} {sla} {begun_with}.csv")
                    _write_run(read_recording(every), share, study)
                for seed in range(seeds):
                    yield Job(path, sla, begun_with, study, seed)


def _write_table(recording: Recording, source: str, path: Path) -> None:
    table = TrialsTable(path, source, recording.space.fields)
    for trial in recorded_on(source, recording, recording.problem([])):
        for load, measurement in trial.measurements:
            table.append(trial, load, measurement)


def _write_run(recording: Recording, share: float, path: Path) -> None:
    """What a search there measured, under the bound that as large a share of the rows meets there as here."""
    problem = recording.problem([Constraint("latency-p95", bound_ms(recording, share))])
    table = TrialsTable(path, recording.name, problem.space.fields)
    measuring = Measuring(recording.server, recording.server, table, QuietWatcher())
    searcher = make_searcher("simulated", problem)
    Tuner(problem, searcher, recording.server, measuring, Budget(math.inf)).run(baselines(problem.space))


# -- searching ---------------------------------------------------------------------------------------------------


def _searched(jobs: Sequence[Job], processes: int) -> Iterator[Found]:
    """Each job's outcome, in order. Processes rather than threads: a search is mostly Python."""
    for name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
        os.environ.setdefault(name, "1")  # the processes fill the cores
    started = time.monotonic()
    with ProcessPoolExecutor(processes, multiprocessing.get_context("spawn")) as pool:
        for number, (job, run) in enumerate(zip(jobs, pool.map(_run, jobs), strict=True), 1):
            took = f"{number} of {len(jobs)}, {time.monotonic() - started:.0f} s"
            print(f"{took}: {job.table.stem} {job.sla}, {job.begun_with}, {job.seed}", file=sys.stderr, flush=True)
            yield run


def _run(job: Job) -> Found:
    recording, problem = _problem(job.table, FEASIBLE_SHARES[job.sla])
    best = recording.best(problem)
    assert best is not None, "bound_ms sees to it"
    elsewhere, _ = elsewhere_of(str(job.source) if job.source else None, problem)
    return Found.of(replay(recording, problem, best, "simulated", job.seed, MAX_TRIALS, elsewhere))


@lru_cache
def _problem(path: Path, share: float) -> tuple[Recording, Problem]:
    recording = read_recording(path)
    return recording, recording.problem([Constraint("latency-p95", bound_ms(recording, share))])


def _key(job: Job) -> tuple[str, str, str, int]:
    return job.table.stem, job.sla, job.begun_with, job.seed


def _keep(file: Path | None, job: Job, found: Found) -> None:
    if file is not None:
        with file.open("a") as opened:
            opened.write(json.dumps([_key(job), asdict(found)]) + "\n")


def _read(file: Path | None) -> dict[tuple[str, str, str, int], Found]:
    if file is None or not file.exists():
        return {}
    entries = map(json.loads, file.read_text().splitlines())
    return {(table, sla, begun, seed): Found(**found) for (table, sla, begun, seed), found in entries}


# -- what is printed ---------------------------------------------------------------------------------------------


def _print_table(runs: Runs) -> None:
    print(_line([*COLUMNS, "regret"]))
    print(_line(["---", "---", "---", *["--:"] * 4]))
    cases = dict.fromkeys((job.table, job.sla) for job in runs)
    for table, sla in cases:
        recording, _ = _problem(table, FEASIBLE_SHARES[sla])
        bound = f"{bound_ms(recording, FEASIBLE_SHARES[sla]):g} ms ({sla})"
        for begun_with in BEGUN_WITH:
            own = [
                run for job, run in runs.items() if (job.table, job.sla, job.begun_with) == (table, sla, begun_with)
            ]
            print(_line([table.stem, bound, begun_with, *_cells(own)]))
    for begun_with in BEGUN_WITH:
        print(_line(["**all**", "", f"**{begun_with}**", *_cells(_begun(runs, begun_with))]))


def _cells(runs: Sequence[Found]) -> list[str]:
    return [
        _three([run.deployments for run in runs], _count),
        _three([run.within_5 for run in runs], _count),
        _three([run.within_1 for run in runs], _count),
        _three([run.regret for run in runs], _share),
    ]


def _print_targets(runs: Runs) -> None:
    print(_line(["begun with", "deployments, median", "mean", "target", "regret, median", "p90", "mean", ""]))
    print(_line(["---", "--:", "--:", "--:", "--:", "--:", "--:", "---"]))
    cold = _begun(runs, NOTHING)
    for begun_with in BEGUN_WITH:
        own = _begun(runs, begun_with)
        deployed, before = ([run.deployments for run in of] for of in (own, cold))
        most = (NO_MORE if begun_with.startswith(CONTRARY) else 1 - FEWER) * statistics.median(before)
        regret, regret_before = ([run.regret for run in of] for of in (own, cold))
        met = statistics.median(deployed) <= most and statistics.mean(regret) <= statistics.mean(regret_before)
        print(
            _line(
                [
                    begun_with,
                    _count(statistics.median(deployed)),
                    f"{statistics.mean(deployed):.2f}",
                    "" if begun_with == NOTHING else f"at most {most:.2f}",
                    _share(statistics.median(regret)),
                    _share(Spread.of(regret).p90),
                    f"{statistics.mean(regret):.2%}",
                    "" if begun_with == NOTHING else "met" if met else "missed",
                ]
            )
        )


def _begun(runs: Runs, begun_with: str) -> list[Found]:
    return [run for job, run in runs.items() if job.begun_with == begun_with]


def _three(values: Sequence[float], show: Callable[[float], str]) -> str:
    spread = Spread.of(values)
    mean = "" if math.inf in values else f" ({show(statistics.mean(values))})"
    return f"{show(spread.median)} / {show(spread.p90)}{mean}"


def _share(value: float) -> str:
    return f"{value:.1%}"


def _count(value: float) -> str:
    return "never" if math.isinf(value) else f"{value:.1f}".removesuffix(".0")


def _line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


if __name__ == "__main__":
    main()
