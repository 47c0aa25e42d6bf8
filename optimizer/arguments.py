"""The command lines of ``tune run`` and ``tune replay``: flags, and the values that they take."""

from __future__ import annotations

import argparse
import re
import shlex
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, NoReturn

from objectives.metrics import METRICS
from objectives.sla import parse_bytes, parse_duration_ms, parse_rate
from optimizer.errors import BadInputError
from optimizer.options import SLA_METRICS, RunOptions, default_search
from optimizer.perf_analyzer import FIRST_WINDOW_MS, LONGEST_WINDOW_MS, SHORTEST_WINDOW_MS
from optimizer.search import SEARCHERS

if TYPE_CHECKING:
    from optimizer.run_folder import RunFolder

LARGEST_SEED = 2**32 - 1  # numpy's
LARGEST_INT32 = 2**31 - 1  # Triton's sizes
EPILOG = """\
commands:
  tune [run] MODEL    find the best configuration (this page)
  tune replay TABLE   the same search on a recorded table, without a server
  tune models         the models that come with tune
  tune setup          fetch the embedded server now rather than at the first run
  tune doctor         what this machine has and what it lacks

exit codes: 0 found, 1 none meets the SLA, 2 bad input, 3 environment, 130 interrupted

examples:
  tune --sla-p95 20ms dlrm
  tune --sla-p99 50ms --model-repository ./models my_model
  tune --resume results/dlrm/20261120-231154
"""
REPLAY_TRIALS = "30"
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
class RunArguments:
    """``resumed``: the run that is continued; its own options, with what was given anew."""

    resumed: RunFolder | None
    options: RunOptions
    as_json: bool


@dataclass(frozen=True)
class ReplayArguments:
    """``sla_ms`` by ``p95`` and the like."""

    table: str
    sla_ms: dict[str, float]
    seeds: int
    max_trials: int
    methods: tuple[str, ...]
    as_json: bool


def read_run_arguments(words: list[str]) -> RunArguments:
    """Parse once, at the edge. Raises BadInputError naming flag, value and what would be right."""
    given = _run_parser().parse_args(_with_negative_values(words))
    resumed, options = _options(given)
    return RunArguments(resumed, options, given.json)


def read_replay_arguments(words: list[str]) -> ReplayArguments:
    """As ``read_run_arguments``."""
    given = _replay_parser().parse_args(_with_negative_values(words))
    return ReplayArguments(
        given.table,
        _slas(given),
        _whole("--seeds", given.seeds, 1, LARGEST_SEED),
        _whole("--max-trials", given.max_trials, 1),
        _methods(given.search),
        given.json,
    )


class Parser(argparse.ArgumentParser):
    """argparse, with errors in one line."""

    page = "tune --help"

    def error(self, message: str) -> NoReturn:
        raise BadInputError(f"{message}; `{self.page}` shows the options")


def _run_parser() -> argparse.ArgumentParser:
    parser = Parser(
        prog="tune",
        usage="tune [run] [options] MODEL",
        description="Find the Triton Inference Server configuration that serves the most requests within a "
        "latency bound: try configurations on a real server, measure each with perf_analyzer.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument(
        "model",
        metavar="MODEL",
        nargs="?",
        help="a name from `tune models`, a profile.yaml, or a Triton model folder",
    )
    bounds = parser.add_argument_group("what must hold")
    _add_slas(bounds)
    bounds.add_argument("--min-throughput", metavar="RATE", help="such as 4000/s (inferences) or 500req/s")
    bounds.add_argument("--max-memory", metavar="SIZE", help="such as 4GiB: of the GPU, else of the server")
    bounds.add_argument(
        "--objective",
        default="throughput",
        metavar="NAME[,NAME]",
        help=f"{', '.join(METRICS)} (throughput)",
    )
    tuned = parser.add_argument_group("what is tuned")
    tuned.add_argument("--model-repository", metavar="DIR", help="a Triton repository of your own; MODEL is in it")
    tuned.add_argument("--target", default="embedded", choices=("embedded",), help="where trials run (embedded)")
    tuned.add_argument("--protocol", default="grpc", choices=("grpc", "http"), help="of the load (grpc)")
    tuned.add_argument("--request-batch-size", metavar="N", help="samples in each request")
    tuned.add_argument(
        "--measurement-interval", metavar="TIME", help=f"of perf_analyzer, three a measurement ({FIRST_WINDOW_MS}ms)"
    )
    search = parser.add_argument_group("how long and how")
    search.add_argument("--budget", metavar="TIME", help="wall time of the whole search: 5m, 90s (4m)")
    search.add_argument("--max-trials", metavar="N", help="configurations to try, the baselines included")
    search.add_argument("--search", choices=SEARCHERS, help="search method (simulated; tpe for other objectives)")
    search.add_argument("--seed", default="0", metavar="N", help="of the search (0)")
    results = parser.add_argument_group("results")
    results.add_argument("--out", default="results", metavar="DIR", help="folder of the results (results)")
    results.add_argument("--resume", metavar="RUN", help="continue the run in this folder")
    results.add_argument("--storage", metavar="URL", help="Optuna storage (a file in the run's folder)")
    results.add_argument("--json", action="store_true", help="one JSON document on standard output")
    return parser


def _with_negative_values(arguments: list[str]) -> list[str]:
    """``--budget -5m`` as ``--budget=-5m``: argparse takes -5m for a flag, and the value would go unnamed."""
    joined: list[str] = []
    for word in arguments:
        if joined and re.match(r"-\.?[0-9]", word) and re.fullmatch("--[a-z][a-z0-9-]*", joined[-1]):
            joined[-1] += f"={word}"
        else:
            joined.append(word)
    return joined


def _options(given: argparse.Namespace) -> tuple[RunFolder | None, RunOptions]:
    """Parse once, at the edge. Raises BadInputError naming flag, value and what would be right."""
    budget = None if given.budget is None else _parsed("--budget", given.budget, _budget_ms) / 1000
    trials = None if given.max_trials is None else _whole("--max-trials", given.max_trials, 1)
    if given.resume is not None:
        return _resumed(given, budget, trials)
    if given.model is None:
        raise BadInputError("which model? `tune models` lists those that come with tune; or give a profile or folder")
    slas = _slas(given)
    objectives = tuple(given.objective.split(","))
    for name in objectives:
        if name not in METRICS or objectives.count(name) > 1:
            raise BadInputError(
                f"--objective {_shown(given.objective)}: give one or more of {', '.join(METRICS)}, each once"
            )
    search = given.search or default_search(objectives)
    if search == "simulated" and objectives[0] != "throughput":
        raise BadInputError(
            f"--search simulated ranks by throughput; with --objective {given.objective} "
            "take tpe, nsga2, random or grid"
        )
    if given.min_throughput is not None:
        _parsed("--min-throughput", given.min_throughput, lambda text: parse_rate(text, 1))
    memory = given.max_memory
    batch, interval = given.request_batch_size, given.measurement_interval
    default = RunOptions(given.model)
    return None, RunOptions(
        model=given.model,
        sla_ms=slas,
        model_repository=given.model_repository,
        target=given.target,
        objectives=objectives,
        min_throughput=given.min_throughput,
        max_memory_bytes=None if memory is None else _parsed("--max-memory", memory, parse_bytes),
        budget_seconds=default.budget_seconds if budget is None else budget,
        max_trials=trials,
        search=search,
        seed=_whole("--seed", given.seed, 0, LARGEST_SEED),
        protocol=given.protocol,
        measurement_interval_ms=None
        if interval is None
        else _parsed("--measurement-interval", interval, _interval_ms),
        request_batch_size=None if batch is None else _whole("--request-batch-size", batch, 1, LARGEST_INT32),
        storage=given.storage,
        out=given.out,
    )


def _resumed(given: argparse.Namespace, budget: float | None, trials: int | None) -> tuple[RunFolder, RunOptions]:
    """The options of the run that is continued; budget, trials and storage may be given anew."""
    from optimizer.command_line import HIDDEN, command_line
    from optimizer.run_folder import RunFolder

    if given.model is not None:
        raise BadInputError(f"--resume {given.resume} has its own model; leave {given.model!r} out")
    folder = RunFolder.find(given.resume, given.out)
    options = folder.read_options()
    try:  # a run.json may come from anywhere: its values are held to what the command line's are
        read_run_arguments(shlex.split(command_line(options))[1:])
    except BadInputError as error:
        raise BadInputError(f"{folder.info}: {error}") from None
    options = replace(
        options,
        budget_seconds=options.budget_seconds if budget is None else budget,
        max_trials=options.max_trials if trials is None else trials,
        storage=given.storage or options.storage,
    )
    if options.storage and HIDDEN in options.storage:
        raise BadInputError(f"--resume {given.resume}: its storage has a password, which is not kept; give --storage")
    return folder, options


# -- tune replay ------------------------------------------------------------------------------------------------


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
    _add_slas(parser)
    parser.add_argument("--search", metavar="S[,S...]", help=f"of {', '.join(SEARCHERS)} (all that are installed)")
    parser.add_argument("--seeds", default="1", metavar="N", help="searches by each method, of seeds 0 to N-1 (1)")
    parser.add_argument("--max-trials", default=REPLAY_TRIALS, metavar="N", help=f"for each search ({REPLAY_TRIALS})")
    parser.add_argument("--json", action="store_true", help="one JSON document on standard output")
    return parser


def _methods(text: str | None) -> tuple[str, ...]:
    if text is None:
        from optimizer.search import installed

        return installed()
    names = tuple(text.split(","))
    if any(name not in SEARCHERS or names.count(name) > 1 for name in names):
        raise BadInputError(f"--search {_shown(text)}: give one or more of {', '.join(SEARCHERS)}, each once")
    return names


# -- values -----------------------------------------------------------------------------------------------------


def _add_slas(parser: argparse._ActionsContainer) -> None:
    for name in SLA_METRICS:
        what = "average latency" if name == "avg" else f"{name} latency"
        parser.add_argument(f"--sla-{name}", metavar="TIME", help=f"upper bound on the {what}: 20ms, 0.02s, 500us")


def _slas(given: argparse.Namespace) -> dict[str, float]:
    """The bounds in ms by ``p95`` and the like."""
    return {
        name: _parsed(f"--sla-{name}", text, parse_duration_ms)
        for name in SLA_METRICS
        if (text := getattr(given, f"sla_{name}")) is not None
    }


def _interval_ms(text: str) -> float:
    milliseconds = parse_duration_ms(text, example="600ms")
    if not SHORTEST_WINDOW_MS <= milliseconds <= LONGEST_WINDOW_MS:
        raise ValueError(f"write a time from {SHORTEST_WINDOW_MS}ms to {LONGEST_WINDOW_MS / 1000:g}s")
    return milliseconds


def _budget_ms(text: str) -> float:
    return parse_duration_ms(text, example="5m")


def _parsed(flag: str, text: str, parse: Callable[[str], float]) -> float:
    try:
        return parse(text)
    except ValueError as error:
        raise BadInputError(f"{flag} {_shown(text)}: {error}") from None


def _whole(flag: str, text: str, least: int, most: int | None = None) -> int:
    try:
        if len(text) > 20:
            raise ValueError
        number = int(text)
        if number < least or (most is not None and number > most):
            raise ValueError
        return number
    except ValueError:
        bounds = f"of {least} or more" if most is None else f"from {least} to {most}"
        raise BadInputError(f"{flag} {_shown(text)}: write a whole number {bounds}") from None


def _shown(text: str) -> str:
    """A value on one line, also an empty one."""
    return text if text.strip() and text.isprintable() else ascii(text)
