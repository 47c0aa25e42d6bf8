"""``tune replay TABLE.csv``: run the search on a recorded table."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING

from optimizer.cli.commands import complete_run
from optimizer.cli.output import open_console, print_json, print_message
from optimizer.core.errors import BadInputError
from optimizer.core.safe_text import named_file, one_line
from optimizer.options.command_line import Parser, add_json, values_of
from optimizer.options.option_reader import latency_bounds_ms
from optimizer.options.run_options import EXHAUSTIVE_SEARCHES, SEARCHERS
from optimizer.options.table import SLA_OPTIONS
from optimizer.options.values import MAX_SEED, names_among, parse_value, whole_number

if TYPE_CHECKING:
    from optimizer.replay.replay import MethodComparison
    from optimizer.store.recording import Recording

DEFAULT_MAX_TRIALS = "30"
EPILOG = """\
A table has a row for each configuration and load, with the columns
max_batch_size, instance_count, concurrency, throughput_infer_per_sec and
latency_p95_ms. The other columns of trials.csv are optional. Without
cpu_count, the number of CPUs of a server without GPUs, the search guesses that
number. Any further column that varies is a parameter. The search tries only
recorded configurations. Only the method simulated has a stopping rule: the
others end when the table is exhausted or after --max-trials configurations. A
deployment is one load of one configuration. The two baselines count if the
table has them; there is no confirmation.

exit codes: 0 done, 1 no row meets the SLA, 2 bad input, 130 interrupted

example:
  tune replay --sla-p95 20ms --seeds 20 results/dlrm/RUN/trials.csv
"""


def build_parser() -> Parser:
    """Return the parser of the command line."""
    parser = Parser(
        prog="tune replay",
        usage="[options] TABLE.csv",
        description="Search a recorded table as `tune run` searches a server. Show how many\n"
        "deployments each method needs to come within 5 % and 1 % of the best\n"
        "configuration that meets the SLA, and the regret of its recommendation.",
        epilog=EPILOG,
    )
    parser.add_argument(
        "table", metavar="TABLE.csv", help="Table, such as the trials.csv of `tune run --search grid`"
    )
    parser.add_options(SLA_OPTIONS)
    parser.add_argument(
        "--search", metavar="S[,S...]", help=f"Search methods: {', '.join(SEARCHERS)} (default: all installed)"
    )
    parser.add_argument(
        "--seeds", default="1", metavar="N", help="Searches per method, with seeds 0 to N-1 (default: 1)"
    )
    parser.add_argument(
        "--max-trials",
        default=DEFAULT_MAX_TRIALS,
        metavar="N",
        help=f"Configurations per search (default: {DEFAULT_MAX_TRIALS})",
    )
    parser.add_argument("--warm-start", metavar="RUN", help="Learn from a run or a table of another machine")
    parser.set_completer("--warm-start", partial(complete_run, with_files=True))  # a table is one
    add_json(parser)
    return parser


def _parse_methods(text: str | None, warm_start: str | None) -> tuple[str, ...]:
    """Return the search methods, by default all installed ones that can use ``warm_start``. Raises BadInputError."""
    if text is None:
        from optimizer.search import installed_methods

        return tuple(name for name in installed_methods() if warm_start is None or name not in EXHAUSTIVE_SEARCHES)
    names = parse_value("--search", text, names_among(SEARCHERS))
    for name in names if warm_start is not None else ():
        if name in EXHAUSTIVE_SEARCHES:
            raise BadInputError(
                f"--warm-start: --search {name} measures every configuration anyway; leave one of the two out"
            )
    return names


def main(argv: list[str]) -> int:
    """Run ``tune replay`` and return its exit code. Raises TuneError."""
    arguments = build_parser().read(argv)
    sla = values_of(arguments, SLA_OPTIONS)
    bounds_ms = latency_bounds_ms(sla)
    seeds = parse_value("--seeds", arguments.seeds, whole_number(1, MAX_SEED))
    max_trials = parse_value("--max-trials", arguments.max_trials, whole_number(1))
    methods = _parse_methods(arguments.search, arguments.warm_start)

    from optimizer.replay.replay import document, print_comparison
    from optimizer.store.recording import read_recordings

    recordings = read_recordings(named_file("table", arguments.table, "a CSV file such as the trials.csv of a run"))
    if len(recordings) > 1:
        several = f"measured on {len(recordings)} devices or servers, which are searched separately"
        print_message(f"note: {one_line(arguments.table)}: {several}")
    comparisons: dict[str, MethodComparison] = {}
    for recording in recordings:
        comparison = _compare_methods(recording, bounds_ms, methods, seeds, max_trials, arguments.warm_start)
        if comparison is not None:
            comparisons[recording.fingerprint] = comparison
    if arguments.json and comparisons:
        documents = {fingerprint: document(comparison) for fingerprint, comparison in comparisons.items()}
        print_json(documents if len(recordings) > 1 else next(iter(documents.values())))
    elif comparisons:
        for comparison in comparisons.values():
            print_comparison(open_console(), comparison)
    return 0 if comparisons else 1


def _compare_methods(
    recording: Recording,
    bounds_ms: Mapping[str, float],
    methods: Sequence[str],
    seeds: int,
    max_trials: int,
    warm_start: str | None,
) -> MethodComparison | None:
    """Return the comparison of the search methods; None, and print the closest row, if no row meets the bounds."""
    from optimizer.replay.replay import compare, describe_closest_row, describe_unstable_rows, recorded_problem
    from optimizer.study.warm_start import load_for_recording

    problem = recorded_problem(recording, bounds_ms)
    if recording.best(problem) is None:
        print_message(describe_closest_row(recording, problem))
        return None
    transferred, notes = load_for_recording(warm_start, problem)
    for note in filter(None, (*map(str, notes), describe_unstable_rows(recording, problem))):
        print_message(f"note: {note}")
    with open_console(stderr=True).status("") as status:
        return compare(
            recording,
            problem,
            methods,
            seeds=range(seeds),
            max_trials=max_trials,
            transferred=transferred,
            on_progress=status.update,
        )
