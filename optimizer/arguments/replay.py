"""``tune replay TABLE.csv``."""

from __future__ import annotations

import argparse
from dataclasses import dataclass

from optimizer.arguments.values import LARGEST_SEED, Parser, add_slas, shown, slas, whole, with_negative_values
from optimizer.errors import BadInputError
from optimizer.search import SEARCHERS

REPLAY_TRIALS = "30"
GRID = "grid"
REPLAY_EPILOG = """\
A table has a row for each configuration and load, with the columns
max_batch_size, instance_count, concurrency, throughput_infer_per_sec and
latency_p95_ms. Others of trials.csv are understood; any further column that
varies is one more parameter. Only what was recorded is tried. tpe, nsga2,
random, grid and gp have no stopping rule of their own: they go on until the
table is exhausted or --max-trials configurations were tried. A deployment is
one load of one configuration, the two baselines included where the table has
them; the confirmation at the end is not counted.

exit codes: 0 done, 1 no row meets the SLA, 2 bad input, 130 interrupted

example:
  tune replay --sla-p95 20ms --seeds 20 results/dlrm/RUN/trials.csv
"""


@dataclass(frozen=True)
class ReplayArguments:
    """``sla_ms`` by ``p95`` and the like."""

    table: str
    sla_ms: dict[str, float]
    seeds: int
    max_trials: int
    methods: tuple[str, ...]
    as_json: bool
    warm_start: str | None


def read_replay_arguments(words: list[str]) -> ReplayArguments:
    """As ``read_run_arguments``."""
    given = _replay_parser().parse_args(with_negative_values(words))
    return ReplayArguments(
        given.table,
        slas(given),
        whole("--seeds", given.seeds, 1, LARGEST_SEED),
        whole("--max-trials", given.max_trials, 1),
        _methods(given.search, given.warm_start),
        given.json,
        given.warm_start,
    )


def _replay_parser() -> argparse.ArgumentParser:
    parser = Parser(
        prog="tune replay",
        usage="tune replay [options] TABLE.csv",
        description="Search a recorded table as `tune run` searches a server, and tell how soon each\n"
        "method came within 5 % and 1 % of the table's best under the SLA, and how far\n"
        "short of it its recommendation falls (regret).",
        epilog=REPLAY_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.page = "tune replay --help"
    parser.add_argument("table", metavar="TABLE.csv", help="such as the trials.csv of `tune run --search grid`")
    add_slas(parser)
    parser.add_argument("--search", metavar="S[,S...]", help=f"of {', '.join(SEARCHERS)} (all that are installed)")
    parser.add_argument("--seeds", default="1", metavar="N", help="searches by each method, of seeds 0 to N-1 (1)")
    parser.add_argument("--max-trials", default=REPLAY_TRIALS, metavar="N", help=f"for each search ({REPLAY_TRIALS})")
    parser.add_argument(
        "--warm-start", metavar="RUN", help="search again, begun with a run or table of another machine"
    )
    parser.add_argument("--json", action="store_true", help="one JSON document on standard output")
    return parser


def _methods(text: str | None, warm_start: str | None) -> tuple[str, ...]:
    if text is None:
        from optimizer.search import installed

        return tuple(name for name in installed() if warm_start is None or name != GRID)
    names = tuple(text.split(","))
    if any(name not in SEARCHERS or names.count(name) > 1 for name in names):
        raise BadInputError(f"--search {shown(text)}: give one or more of {', '.join(SEARCHERS)}, each once")
    if warm_start is not None and GRID in names:
        raise BadInputError(f"--warm-start: --search {GRID} measures every configuration anyway; leave one out")
    return names
