"""Compare search methods on recorded and on simulated tables: regret and number of deployments.

    python benchmarks/search_methods.py [--seeds 20] [--json FILE] > benchmarks/search_methods.md

Replays each tables/*.csv (real measurements, see record_tables.py) and each server of simulated_tables.py (without
noise) as `tune replay` does, under three bounds, by each method with each seed. Prints Markdown; progress goes to
standard error.
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
from typing import Any, Literal

from simulated_tables import SERVERS, hidden_server, write

from objectives.metrics import METRICS
from optimizer.core.trial import Candidate
from optimizer.machine import hardware
from optimizer.options.run_options import SEARCHERS
from optimizer.replay.engine import ReplayResult, Spread, recorded_problem, replay
from optimizer.results import formatting
from optimizer.store.recording import Recording, read_recording

TABLES = Path(__file__).with_name("tables")
METHODS = ("simulated", "tpe", "random", "nsga2")
MAX_TRIALS = 30  # limit for the methods without a stopping rule
SHOWN_AFTER = (6, 10, 30)  # deployments
FEASIBLE_SHARES = {"tight": 0.15, "middle": 0.40, "loose": 0.75}
FEASIBLE_CONFIGURATIONS = 3
COLUMNS = (
    "table",
    "p95 within",
    "search",
    "regret",
    *(f"after {count}" for count in SHOWN_AFTER),
    "deployed until it stopped",
    "until within 5 %",
    "measured",
    "until within 1 %",
    "measured",
    "loads a deployment",
)
INTRODUCTION = f"""\
Each cell has median / p90 over the seeds. **Regret** is how far the recommendation is below the table's best
throughput under the bound, as a share of that throughput; *after 6* is the regret after 6 deployments. **Deployed**
counts model loads until the search stopped, including the baselines, without the confirmation. **Until within 5 %**
is the number of deployments (and of **measured** loads) until a measurement was that close to the best. *Loads a
deployment* is the median. Only `simulated` has a stopping rule; the others continue to {MAX_TRIALS} deployments.

The bounds come from each table. A bound is the p95 that
{", ".join(f"{share:.0%}" for share in FEASIBLE_SHARES.values())} of its rows
(configuration and load) do not exceed, rounded up to two digits. At least {FEASIBLE_CONFIGURATIONS}
configurations meet it."""

Kind = Literal["recorded", "simulated"]


@dataclass(frozen=True)
class BoundedTable:
    """One table under one bound."""

    kind: Kind
    table: Path
    sla: str
    bound_ms: float


@dataclass(frozen=True)
class ReplayJob:
    case: BoundedTable
    method: str
    seed: int
    max_trials: int


@dataclass(frozen=True)
class BenchmarkTarget:
    """A target of ``simulated`` on tables of one kind: ``figure`` of all its runs is at most ``most``."""

    kind: Kind
    name: str
    most: float
    figure: Callable[[Sequence[ReplayResult]], float]
    show: Callable[[float], str]


def main() -> None:
    arguments = _arguments()
    with tempfile.TemporaryDirectory() as scratch:
        cases = list(_cases(arguments.tables, Path(scratch), arguments.only))
        jobs = [
            ReplayJob(case, method, seed, arguments.max_trials)
            for method in arguments.methods
            for case in cases
            for seed in range(arguments.seeds)
        ]
        runs = dict(zip(jobs, _replayed(jobs, arguments.processes), strict=True))
    print("# Search methods: latest measurement\n")
    print(f"`{shlex.join(['python', 'benchmarks/search_methods.py', *sys.argv[1:]])}`\n")
    print(INTRODUCTION)
    for kind, title in (("recorded", "Recorded tables"), ("simulated", "Simulated tables, without noise")):
        if any(case.kind == kind for case in cases):
            print(f"\n## {title}\n")
            _print_tables([case for case in cases if case.kind == kind], arguments.methods, runs)
    if "simulated" in arguments.methods:
        print("\n## Targets of `simulated`\n")
        _print_targets(cases, runs)
    machine = hardware.detect()
    print(
        f"\n{formatting.count(arguments.seeds, 'seed')}; {machine.cpu}, {machine.cpu_count} cores; "
        f"{time.strftime('%Y-%m-%d')}"
    )
    if arguments.json:
        arguments.json.write_text(json.dumps(_document(runs), indent=1) + "\n")


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=20, metavar="N", help="use seeds 0 to N-1 for each method (20)")
    parser.add_argument(
        "--methods", default=",".join(METHODS), metavar="S[,S...]", help=f"methods ({','.join(METHODS)})"
    )
    parser.add_argument(
        "--max-trials", type=int, default=MAX_TRIALS, metavar="N", help=f"maximum number of trials ({MAX_TRIALS})"
    )
    parser.add_argument(
        "--tables", type=Path, default=TABLES, metavar="DIR", help="folder of the recorded *.csv (tables)"
    )
    parser.add_argument("--only", choices=("recorded", "simulated"), help="use only tables of one kind")
    parser.add_argument("--processes", type=int, default=os.cpu_count() or 1, metavar="N")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write every run to it")
    arguments = parser.parse_args()
    arguments.methods = tuple(arguments.methods.split(","))
    for method in arguments.methods:
        if method not in SEARCHERS:
            parser.error(f"--methods {method}: give some of {', '.join(SEARCHERS)}")
    if min(arguments.seeds, arguments.max_trials, arguments.processes) < 1:
        parser.error("--seeds, --max-trials and --processes are at least 1")
    return arguments


# -- searches ---------------------------------------------------------------------------------------------------


def _cases(tables: Path, scratch: Path, only: Kind | None) -> Iterator[BoundedTable]:
    if only != "simulated":
        result = sorted(tables.glob("*.csv"))
        if not result:
            _say(f"no recorded tables in {tables}")
        for path in result:
            yield from _bounded("recorded", path)
    if only != "recorded":
        for name in SERVERS:
            path = scratch / f"{name}.csv"
            write(hidden_server(name), path)
            yield from _bounded("simulated", path)


def _bounded(kind: Kind, path: Path) -> Iterator[BoundedTable]:
    recording = read_recording(path)
    for sla, share in FEASIBLE_SHARES.items():
        yield BoundedTable(kind, path, sla, bound_ms(recording, share))


def bound_ms(recording: Recording, share: float) -> float:
    """Return the p95 bound that ``share`` of the rows and at least FEASIBLE_CONFIGURATIONS candidates meet."""
    quickest: dict[Candidate, float] = {}
    latencies = []
    for row in recording.rows:
        latency = METRICS["latency-p95"].value(row.measurement)
        if row.load is None or latency is None or not row.measurement.stable:
            continue
        latencies.append(latency)
        candidate = recording.space.canonical(row.candidate)
        quickest[candidate] = min(latency, quickest.get(candidate, math.inf))
    of_rows = sorted(latencies)[math.ceil(share * len(latencies)) - 1]
    of_candidates = sorted(quickest.values())[:FEASIBLE_CONFIGURATIONS][-1]
    return _rounded_up(max(of_rows, of_candidates))


def _rounded_up(value: float) -> float:
    """Return ``value`` rounded up to two digits."""
    unit = 10.0 ** (math.floor(math.log10(value)) - 1)
    return float(f"{math.ceil(round(value / unit, 6)) * unit:.2g}")


# -- searching --------------------------------------------------------------------------------------------------


def _replayed(jobs: Sequence[ReplayJob], processes: int) -> Iterator[ReplayResult]:
    """Return each job's outcome, in order. Uses processes, because a search is mostly Python."""
    for name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
        os.environ.setdefault(name, "1")  # the processes fill the cores
    started = time.monotonic()
    with ProcessPoolExecutor(processes, multiprocessing.get_context("spawn")) as pool:
        for number, (job, run) in enumerate(zip(jobs, pool.map(_run, jobs), strict=True), 1):
            case = f"{job.case.table.stem} {job.case.sla}"
            _say(f"{number} of {len(jobs)}, {time.monotonic() - started:.0f} s: {job.method}, {case}, {job.seed}")
            yield run


def _run(job: ReplayJob) -> ReplayResult:
    recording = _recording(job.case.table)
    problem = recorded_problem(recording, {"p95": job.case.bound_ms})
    best = recording.best(problem)
    assert best is not None, "bound_ms sees to it"
    return replay(recording, problem, best, job.method, job.seed, job.max_trials)


@lru_cache
def _recording(path: Path) -> Recording:
    return read_recording(path)


# -- output -----------------------------------------------------------------------------------------------------


def _print_tables(cases: Sequence[BoundedTable], methods: Sequence[str], runs: dict[ReplayJob, ReplayResult]) -> None:
    print(_line(COLUMNS))
    print(_line(["---", "---", "---", *["--:"] * (len(COLUMNS) - 3)]))
    for case in cases:
        for method in methods:
            bound = f"{case.bound_ms:g} ms ({case.sla})"
            print(_line([case.table.stem, bound, method, *_cells(_of(runs, method, [case]))]))
    for method in methods:
        print(_line(["**all**", "", f"**{method}**", *_cells(_of(runs, method, cases))]))


def _cells(runs: Sequence[ReplayResult]) -> list[str]:
    untils = []
    for tolerance in (0.05, 0.01):
        untils.append(_both([run.until[tolerance].deployments for run in runs], _count))
        untils.append(_both([run.until[tolerance].measurements for run in runs], _count))
    return [
        _both([run.regret for run in runs], _share),
        *(_both([run.regret_after(count) for run in runs], _share) for count in SHOWN_AFTER),
        _both([run.effort.deployments for run in runs], _count),
        *untils,
        f"{statistics.median(run.effort.measurements / run.effort.deployments for run in runs):.1f}",
    ]


def _print_targets(cases: Sequence[BoundedTable], runs: dict[ReplayJob, ReplayResult]) -> None:
    """Print the targets for each table and bound alone, as a user has only one: the worst decides."""
    print(_line(["tables", "target", "at most", "worst of one table and bound", "", "all together"]))
    print(_line(["---", "---", "--:", "---", "---", "--:"]))
    for target in TARGETS:
        own = [case for case in cases if case.kind == target.kind]
        if not own:
            continue
        result = target.figure(_of(runs, "simulated", own))
        worst, case = max(
            ((target.figure(_of(runs, "simulated", [case])), case) for case in own), key=lambda item: item[0]
        )
        verdict = "met" if worst <= target.most else "missed"
        where = f"{target.show(worst)} ({case.table.stem}, {case.sla})"
        print(_line([target.kind, target.name, target.show(target.most), where, verdict, target.show(result)]))


def _document(runs: dict[ReplayJob, ReplayResult]) -> list[dict[str, Any]]:
    """Return all runs as JSON; levels that were never reached are null."""
    return [
        {
            "tables": job.case.kind,
            "table": job.case.table.stem,
            "sla": job.case.sla,
            "sla_p95_ms": job.case.bound_ms,
            "search": job.method,
            "seed": job.seed,
            "regret": run.regret,
            **asdict(run.effort),
            "until": {
                f"{tolerance:g}": {name: value if math.isfinite(value) else None for name, value in asdict(e).items()}
                for tolerance, e in run.until.items()
            },
            "regrets": run.regrets,
            "recommended_line": run.recommended.line if run.recommended else None,
        }
        for job, run in runs.items()
    ]


def _of(runs: dict[ReplayJob, ReplayResult], method: str, cases: Sequence[BoundedTable]) -> list[ReplayResult]:
    return [run for job, run in runs.items() if job.method == method and job.case in cases]


def _both(values: Sequence[float], show: Callable[[float], str]) -> str:
    spread = Spread.of(values)
    return f"{show(spread.median)} / {show(spread.p90)}"


def _share(value: float) -> str:
    return f"{value:.1%}"


def _count(value: float) -> str:
    return "never" if math.isinf(value) else f"{value:.1f}".removesuffix(".0")


def _line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def _median_regret(runs: Sequence[ReplayResult]) -> float:
    return Spread.of([run.regret for run in runs]).median


def _p90_regret(runs: Sequence[ReplayResult]) -> float:
    return Spread.of([run.regret for run in runs]).p90


def _median_deployments(runs: Sequence[ReplayResult]) -> float:
    return Spread.of([run.effort.deployments for run in runs]).median


def _p90_deployments(runs: Sequence[ReplayResult]) -> float:
    return Spread.of([run.effort.deployments for run in runs]).p90


TARGETS = (
    BenchmarkTarget("recorded", "regret, median", 0.03, _median_regret, _share),
    BenchmarkTarget("recorded", "regret, p90", 0.08, _p90_regret, _share),
    BenchmarkTarget("recorded", "deployments, median", 6, _median_deployments, _count),
    BenchmarkTarget("recorded", "deployments, p90", 10, _p90_deployments, _count),
    BenchmarkTarget("simulated", "regret, median", 0.01, _median_regret, _share),
    BenchmarkTarget("simulated", "regret, p90", 0.01, _p90_regret, _share),
)

if __name__ == "__main__":
    main()
