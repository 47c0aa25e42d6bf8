"""Compare search methods on recorded and on simulated tables: regret, deployments and seconds.

    python benchmarks/search_methods.py --noise --runs FILE --plots benchmarks/plots
    python benchmarks/search_methods.py --only goodput --methods simulated,tpe,random
    python benchmarks/search_methods.py --only execution --methods simulated

Replays each tables/*.csv (see record_tables.py) and tables of simulated servers (simulated_tables.py) as
`tune replay` does, under three bounds, by each method with each seed. Prints Markdown; the latest tables are in
search_methods.md. Progress goes to standard error. A method whose packages are missing is left out: see
other_searchers/requirements.txt. With --noise measurements differ from the recorded ones as repeated recordings do.
With --runs a killed comparison is continued.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from collections import Counter
from collections.abc import Mapping
from pathlib import Path

from lib.bounded_tables import KINDS, BoundedTable, bounded_tables
from lib.measurement_noise import TYPICAL_NOISE, Noise
from lib.output import measured_on, print_title
from lib.recordings import TABLES, recorded_noise
from lib.search_plots import write_plot
from lib.search_report import (
    INTRODUCTION,
    MAX_TRIALS,
    NOISE,
    OWN,
    TARGETS,
    WITHOUT_NOISE,
    print_restricted_means,
    print_settings,
    print_tables,
    print_targets,
)
from lib.search_runs import ReplayJob, run_all
from optimizer.results import formatting
from other_searchers import METHODS, REQUIREMENTS, Method

WHOLE_TABLE = 10_000  # more configurations than a table has


def main() -> None:
    arguments = _arguments()
    seeds = {method: arguments.methods[method] for method in installed(tuple(arguments.methods))}
    methods = tuple(seeds)
    with tempfile.TemporaryDirectory() as scratch:
        cases = list(bounded_tables(TABLES, Path(scratch), frozenset(arguments.only)))
        noise = {case.table: _noise(case) if arguments.noise else None for case in cases}
        jobs = [
            ReplayJob(case, method, seed, _limit(method), noise[case.table])
            for method in methods
            for case in cases
            if case.kind == "test" or not METHODS[method].is_slow
            for seed in range(seeds[method])
        ]
        runs = run_all(jobs, arguments.processes, arguments.runs)
    if not runs:
        sys.exit("nothing to compare: none of these methods is installed, or those are too slow for these tables")
    print_title("Search methods: latest measurement")
    print(INTRODUCTION)
    print(f"\n{NOISE if arguments.noise else WITHOUT_NOISE}")
    for kind, title in KINDS.items():
        own = [case for case in cases if case.kind == kind]
        if own:
            print(f"\n## {title}\n")
            if arguments.plots:
                plot = arguments.plots / f"search_methods_{kind}.svg"
                plotted = [job.method for job in runs if job.case in own and not METHODS[job.method].is_exhaustive]
                write_plot(plot, own, list(dict.fromkeys(plotted)), runs)
                print(f"![Mean regret]({os.path.relpath(plot, Path(__file__).parent)})\n")
            if kind == "execution":
                print_settings(own, methods, runs)
            else:
                print_tables(own, methods, runs)
    if compared := [case for case in cases if case.kind != "execution"]:
        print("\n## Deployments until within 5 %\n")
        print_restricted_means(compared, methods, runs)
    if OWN in methods and {case.kind for case in cases} & {target.kind for target in TARGETS}:
        print(f"\n## Targets of `{OWN}`\n")
        print_targets(cases, runs)
    print(f"\n{measured_on(_seeds(seeds))}")


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=20, metavar="N", help="use seeds 0 to N-1 for each method (20)")
    parser.add_argument(
        "--methods",
        default=",".join(METHODS),
        metavar="S[:N][,...]",
        help=f"methods, and their number of seeds if it is not --seeds ({','.join(METHODS)})",
    )
    parser.add_argument("--only", choices=tuple(KINDS), nargs="+", default=tuple(KINDS), help="kinds of tables (all)")
    parser.add_argument("--noise", action="store_true", help="add the noise of the recordings to each measurement")
    parser.add_argument("--processes", type=int, default=os.cpu_count() or 1, metavar="N")
    parser.add_argument("--runs", type=Path, metavar="FILE", help="keep every run in it, and continue from there")
    parser.add_argument("--plots", type=Path, metavar="DIR", help="write the plots (*.svg) to it")
    arguments = parser.parse_args()
    seeds = dict[str, int]()
    for given in arguments.methods.split(","):
        method, _, own = given.partition(":")
        if method not in METHODS or not (own or "1").isdecimal():
            parser.error(f"--methods {given}: give some of {', '.join(METHODS)}, such as smac:2 for two seeds")
        seeds[method] = int(own or arguments.seeds)
    arguments.methods = seeds
    if min(*seeds.values(), arguments.seeds, arguments.processes) < 1:
        parser.error("numbers of seeds and --processes are at least 1")
    return arguments


def _seeds(seeds: Mapping[str, int]) -> str:
    """Return the numbers of seeds as text, such as "20 seeds; smac: 2 seeds"."""
    usual = Counter(seeds.values()).most_common(1)[0][0]
    others = [f"{method}: {formatting.count(own, 'seed')}" for method, own in seeds.items() if own != usual]
    return "; ".join([formatting.count(usual, "seed"), *others])


def _limit(method: str) -> int:
    """Return the largest number of trials of a method."""
    return WHOLE_TABLE if METHODS[method].is_exhaustive else MAX_TRIALS


def _noise(case: BoundedTable) -> Noise | None:
    """Return the noise of a table's recordings; None if it has none, as a simulated table."""
    if case.kind == "simulated":
        return TYPICAL_NOISE
    recordings = TABLES / "recordings" / case.table.name
    return recorded_noise(case.table.stem) if case.table.parent == TABLES and recordings.exists() else None


def installed(methods: tuple[str, ...], known: Mapping[str, Method] = METHODS) -> tuple[str, ...]:
    """Return those of ``methods`` whose packages are installed, and name the packages that the others need."""
    for method in methods:
        if missing := known[method].missing_packages():
            packages = ", ".join(missing)
            print(f"{method} is left out: it needs {packages}; pip install -r {REQUIREMENTS}", file=sys.stderr)
    return tuple(method for method in methods if not known[method].missing_packages())


if __name__ == "__main__":
    main()
