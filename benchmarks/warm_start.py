"""Measure the benefit of a warm start from another machine, and the loss from a misleading one.

    python benchmarks/warm_start.py [--seeds 10] [--runs FILE] [dlrm mlp wide] > benchmarks/warm_start.md

Replays each recorded table under three bounds by the simulated search: without a warm start, with the measurements
of a search on another machine (`run`), and with all measurements possible there (`table`). The tables are the
second and third recordings in tables/recordings/; derived_tables.py derives the other machines from the first one,
so that no cell has noise in common on both. The contrary machine misleads as much as a table can. Prints Markdown;
progress goes to standard error. With --runs it can be interrupted: searches in FILE are not repeated.
"""

from __future__ import annotations

import argparse
import math
import os
import statistics
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from lib.bounded_tables import bound_ms, feasible_shares
from lib.derived_tables import CONTRARY, RELATED, SOURCES, recorded_on, write_recordings
from lib.output import measured_on, print_head, print_title, row
from lib.process_pool import run_missing_jobs
from lib.recordings import TABLES
from lib.search_report import as_count, as_percent
from optimizer.config.problem import Problem
from optimizer.core.budget import Budget
from optimizer.core.stopwatch import Stopwatch
from optimizer.measure.measurer import Measurer
from optimizer.replay.replay import ReplayResult, Spread, recorded_problem, replay
from optimizer.results import formatting
from optimizer.results.progress_observers import QuietObserver
from optimizer.search import make_searcher
from optimizer.store.recording import Recording, baselines, read_recording
from optimizer.store.trials_table import TrialsTable
from optimizer.study.scheduler import Scheduler
from optimizer.study.trial_runner import run_trials
from optimizer.study.warm_start import load_for_recording

MAX_TRIALS = 30
FEWER, NO_MORE = 0.25, 1.3  # deployments with a related study, and with a misleading one
NOTHING = "nothing"
BEGUN_WITH = (NOTHING, *(f"{name} {kind}" for kind in ("run", "table") for name in SOURCES))
COLUMNS = (
    "table",
    "p95 within",
    "warm start from",
    "deployed until it stopped",
    "until within 5 %",
    "until within 1 %",
)
INTRODUCTION = f"""\
Each cell has median / p90 over the seeds (mean). **Deployed** counts model loads until the search stopped, including
the baselines; **until within 5 %** counts those until a measurement was that close to the best. **Regret** is how
far the recommendation is below the table's best throughput under the bound, as a share of that throughput.

A **warm start from** a `run` has the measurements of a search on the other machine until it stopped. One from a
`table` has every configuration at every load there.
{" and ".join(f"`{name}`" for name in RELATED)} are related machines: their service
times are longer by this factor, and their contention, gain from threads, overheads, variation and the shape of their
service times differ too (derived_tables.py has the values). `{CONTRARY}` is not a real machine: each configuration
has the measurements of the one that is furthest from it. The tables are the means of the second and third
recordings in tables/recordings/. The other machines are derived from the first."""


@dataclass(frozen=True)
class TransferJob:
    """One search of ``table`` under one bound. ``source`` holds the study of its warm start."""

    table: Path
    sla: str
    begun_with: str
    source: Path | None
    seed: int


@dataclass(frozen=True)
class DeploymentCounts:
    """The model loads of one search until it ended, and until 5 % and 1 % of the best were reached (inf: never)."""

    deployments: float
    within_5: float
    within_1: float
    regret: float

    @classmethod
    def of(cls, run: ReplayResult) -> DeploymentCounts:
        return cls(run.effort.deployments, run.until[0.05].deployments, run.until[0.01].deployments, run.regret)


Runs = dict[TransferJob, DeploymentCounts]


def main() -> None:
    arguments = _arguments()
    with tempfile.TemporaryDirectory() as scratch:
        jobs = list(_jobs(arguments.names, Path(scratch), arguments.seeds))
        runs = run_missing_jobs(_run, jobs, arguments.processes, arguments.runs, DeploymentCounts, _key, _describe)
        _print(runs, arguments)


def _print(runs: Runs, arguments: argparse.Namespace) -> None:
    print_title("Warm start from another machine's study: latest measurement")
    print(INTRODUCTION, end="\n\n")
    _print_table(runs)
    print("\n## Targets\n")
    _print_targets(runs)
    print(f"\n{measured_on(formatting.count(arguments.seeds, 'seed'))}")


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    known = sorted(path.stem for path in TABLES.glob("*.csv"))
    parser.add_argument("--seeds", type=int, default=10, metavar="N", help="use seeds 0 to N-1 for each search (10)")
    parser.add_argument("--processes", type=int, default=os.cpu_count() or 1, metavar="N")
    parser.add_argument("--runs", type=Path, metavar="FILE", help="file of finished searches, which are not repeated")
    parser.add_argument("names", nargs="*", metavar="NAME", default=known, help=f"tables: {', '.join(known)} (all)")
    arguments = parser.parse_args()
    if unknown := set(arguments.names) - set(known):
        parser.error(f"no table is called {min(unknown)}: give some of {', '.join(known)}")
    if min(arguments.seeds, arguments.processes) < 1:
        parser.error("--seeds and --processes are at least 1")
    return arguments


# -- the other machines' studies ---------------------------------------------------------------------------------


def _jobs(names: Sequence[str], scratch: Path, seeds: int) -> Iterator[TransferJob]:
    for name in names:
        path, other = scratch / f"{name}.csv", scratch / f"{name} of another moment.csv"
        write_recordings(name, (1, 2), path)
        write_recordings(name, (0,), other)
        for source in SOURCES:
            _write_table(read_recording(other), source, scratch / f"{name} {source} table.csv")
        for sla, share in feasible_shares(name).items():
            for begun_with in BEGUN_WITH:
                study = None if begun_with == NOTHING else scratch / f"{name} {begun_with}.csv"
                if study is not None and begun_with.endswith("run"):
                    every = study.with_name(f"{name} {begun_with.removesuffix('run')}table.csv")
                    study = study.with_name(f"{name} {sla} {begun_with}.csv")
                    _write_run(read_recording(every), share, study)
                for seed in range(seeds):
                    yield TransferJob(path, sla, begun_with, study, seed)


def _write_table(recording: Recording, source: str, path: Path) -> None:
    table = TrialsTable(path, source, recording.space.fields, cpu_count=recording.cpu_count)
    for trial in recorded_on(source, recording, recorded_problem(recording, {})):
        for load, measurement in trial.measurements:
            table.append(trial, load, measurement)


def _write_run(recording: Recording, share: float, path: Path) -> None:
    """Write the measurements of a search on the other machine, under a bound that the same share of rows meets."""
    problem = recorded_problem(recording, {"p95": bound_ms(recording, share)})
    table = TrialsTable(path, recording.name, problem.space.fields, cpu_count=problem.cpu_count)
    measuring = Measurer(recording.server, recording.server, table, QuietObserver())
    searcher = make_searcher("simulated", problem)
    scheduler = Scheduler(problem, searcher, Budget(math.inf), Stopwatch(), baselines(problem.space))
    run_trials(scheduler, recording.server, measuring)


# -- searching ---------------------------------------------------------------------------------------------------


def _describe(job: TransferJob, _: DeploymentCounts) -> str:
    return f"{job.table.stem} {job.sla}, {job.begun_with}, {job.seed}"


def _run(job: TransferJob) -> DeploymentCounts:
    recording, problem = _problem(job.table, feasible_shares(job.table.stem)[job.sla])
    transferred, _ = load_for_recording(str(job.source) if job.source else None, problem)
    return DeploymentCounts.of(replay(recording, problem, "simulated", job.seed, MAX_TRIALS, transferred=transferred))


@lru_cache
def _problem(path: Path, share: float) -> tuple[Recording, Problem]:
    recording = read_recording(path)
    return recording, recorded_problem(recording, {"p95": bound_ms(recording, share)})


def _key(job: TransferJob) -> tuple[str, str, str, int]:
    return job.table.stem, job.sla, job.begun_with, job.seed


# -- output ------------------------------------------------------------------------------------------------------


def _print_table(runs: Runs) -> None:
    print_head(*COLUMNS, "regret", text=3)
    cases = dict.fromkeys((job.table, job.sla) for job in runs)
    for table, sla in cases:
        recording, _ = _problem(table, feasible_shares(table.stem)[sla])
        bound = f"{bound_ms(recording, feasible_shares(table.stem)[sla]):g} ms ({sla})"
        for begun_with in BEGUN_WITH:
            own = [
                run for job, run in runs.items() if (job.table, job.sla, job.begun_with) == (table, sla, begun_with)
            ]
            print(row(table.stem, bound, begun_with, *_cells(own)))
    for begun_with in BEGUN_WITH:
        print(row("**all**", "", f"**{begun_with}**", *_cells(_begun(runs, begun_with))))


def _cells(runs: Sequence[DeploymentCounts]) -> list[str]:
    return [
        _three([run.deployments for run in runs], as_count),
        _three([run.within_5 for run in runs], as_count),
        _three([run.within_1 for run in runs], as_count),
        _three([run.regret for run in runs], as_percent),
    ]


def _print_targets(runs: Runs) -> None:
    print(row("warm start from", "deployments, median", "mean", "target", "regret, median", "p90", "mean", ""))
    print(row("---", "--:", "--:", "--:", "--:", "--:", "--:", "---"))
    cold = _begun(runs, NOTHING)
    for begun_with in BEGUN_WITH:
        own = _begun(runs, begun_with)
        deployed, before = ([run.deployments for run in of] for of in (own, cold))
        most = (NO_MORE if begun_with.startswith(CONTRARY) else 1 - FEWER) * statistics.median(before)
        regret, regret_before = ([run.regret for run in of] for of in (own, cold))
        met = statistics.median(deployed) <= most and statistics.mean(regret) <= statistics.mean(regret_before)
        print(
            row(
                begun_with,
                as_count(statistics.median(deployed)),
                f"{statistics.mean(deployed):.2f}",
                "" if begun_with == NOTHING else f"at most {most:.2f}",
                as_percent(statistics.median(regret)),
                as_percent(Spread.of(regret).p90),
                f"{statistics.mean(regret):.2%}",
                "" if begun_with == NOTHING else "met" if met else "missed",
            )
        )


def _begun(runs: Runs, begun_with: str) -> list[DeploymentCounts]:
    return [run for job, run in runs.items() if job.begun_with == begun_with]


def _three(values: Sequence[float], show: Callable[[float], str]) -> str:
    spread = Spread.of(values)
    mean = "" if math.inf in values else f" ({show(statistics.mean(values))})"
    return f"{show(spread.median)} / {show(spread.p90)}{mean}"


if __name__ == "__main__":
    main()
