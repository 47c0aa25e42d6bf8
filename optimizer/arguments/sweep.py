"""``tune sweep MODEL``."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeVar

from objectives.sla import parse_duration_ms
from optimizer.arguments import ranges
from optimizer.arguments.run import read_run_arguments
from optimizer.arguments.values import LARGEST_INT32, Parser, shown, whole, with_negative_values
from optimizer.batching import parse_policy
from optimizer.errors import BadInputError
from optimizer.headers import hidden_in
from optimizer.options import RunOptions
from optimizer.profile.safe_paths import is_folder
from optimizer.store.run_folder import RunFolder
from optimizer.sweeping.document import FILE, read_words
from optimizer.sweeping.plan import Asked, Choices
from optimizer.trial import FieldValue

T = TypeVar("T")

PAGE = "tune sweep --help"
DEFAULT_CONCURRENCY = "1,2,4,8,16"
MOST_CONCURRENCY = 2**16
MOST_REPEATS = 100
MOST_INSTANCES = 1024
OF_A_SEARCH = {  # options of `tune run` that mean nothing here
    "sla_ms": "--sla-…",
    "objectives": "--objective",
    "min_throughput": "--min-throughput",
    "max_memory_bytes": "--max-memory",
    "min_score": "--min-score",
    "confidence": "--confidence",
    "output_check": "--no-output-check",
    "budget_seconds": "--budget",
    "max_trials": "--max-trials",
    "search": "--search",
    "storage": "--storage",
}
EPILOG = """\
A LIST is 1,2,4 or perf_analyzer's start:end:step (2:16:2) or doubled (1..256).
Every configuration of the product of the lists is deployed and measured at
every load; a setting that is not listed is as the model's own configuration has
it. One that fails is a row with its reason. What is measured is in
results/MODEL/RUN/: trials.csv (with several request batch sizes one table for
each, trials-b8.csv; `tune replay` reads them) and sweep.json.

MODEL is found as in `tune run`, and as there (see `tune --help`) are
  --model-repository, --protocol, --measurement-interval, --arrivals, --seed,
  --server-cpus, --client-cpus, --out, --json, and --target with what belongs to it

exit codes: 0 measured, 1 nothing could be measured, 2 bad input, 3 environment,
130 interrupted (what there is is printed; --resume goes on)

examples:
  static against dynamic batching, one instance against two:
    tune sweep --max-queue-delay off,0 --instances 1,2 --concurrency 2:16:2 dlrm
  throughput by request batch size:
    tune sweep --max-batch-size 4096 --request-batch-size 1,8,64,512 \\
      --concurrency 1 dlrm
  settings of ONNX Runtime side by side:
    tune sweep --config parameters.intra_op_thread_count.string_value=1,2 mlp
"""


@dataclass(frozen=True)
class SweepArguments:
    """``resumed``: the folder of the sweep that is continued."""

    options: RunOptions
    asked: Asked
    resumed: RunFolder | None
    csv: Path | None
    as_json: bool


def read_sweep_arguments(words: list[str]) -> SweepArguments:
    """As ``read_run_arguments``, which reads what both commands have."""
    given, rest = _parser().parse_known_args(with_negative_values(words))
    csv = None if given.csv is None else _csv(given.csv)
    if given.resume is None:
        return _read(given, rest, tuple(words), csv)
    if others := [word for word in rest if word != "--json"]:
        raise BadInputError(f"--resume {shown(given.resume)} goes on with what it began with; leave {others[0]} out")
    folder = Path(given.resume)
    if not is_folder(folder):
        raise BadInputError(f"--resume {shown(given.resume)}: no such folder; give that of a sweep, with {FILE}")
    began = read_words(folder)
    before, others = _parser().parse_known_args(with_negative_values(began))
    if before.resume is not None:
        raise BadInputError(f"{folder / FILE}: not the record of a sweep")
    found = _read(before, others, tuple(began), csv)
    return replace(found, resumed=RunFolder(folder), as_json="--json" in rest)


def _parser() -> argparse.ArgumentParser:
    parser = Parser(
        prog="tune sweep",
        usage="tune sweep [options] MODEL",
        description="Measure given configurations at given loads on a real server, without a search: throughput,\n"
        "average and percentile latencies, and where the time of a request goes.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.page = PAGE
    configurations = parser.add_argument_group("configurations")
    configurations.add_argument("--max-batch-size", metavar="LIST", help="of the model's configuration: 1,8")
    configurations.add_argument(
        "--max-queue-delay", metavar="LIST", help="of dynamic batching, in µs or as 5ms; off: without it (off,0,5ms)"
    )
    configurations.add_argument(
        "--preferred-batch-size", metavar="LIST", help="of dynamic batching: none, 8, 4+8, max/2 (none,4+8)"
    )
    configurations.add_argument("--instances", metavar="LIST", help="count of the instance group: 1,4")
    configurations.add_argument(
        "--config",
        metavar="PATH=V,V",
        action="append",
        default=[],
        help="any other field of ModelConfig, by its path; may be repeated",
    )
    loads = parser.add_argument_group("loads")
    loads.add_argument(
        "--concurrency",
        "--concurrency-range",
        metavar="LIST",
        help=f"requests in flight ({DEFAULT_CONCURRENCY})",
    )
    loads.add_argument(
        "--rates",
        "--request-rate-range",
        metavar="LIST",
        help="requests per second instead, sent whatever is answered: 100,200",
    )
    loads.add_argument(
        "-b", "--request-batch-size", metavar="LIST", help="samples in each request: 1,8 (1*9|8: a mix)"
    )
    loads.add_argument("--repeat", default="1", metavar="N", help="measurements of each, the median is told (1)")
    results = parser.add_argument_group("results")
    results.add_argument("--csv", metavar="FILE", help="every cell as a row")
    results.add_argument("--resume", metavar="RUN", help="measure what is missing of the sweep in this folder")
    return parser


def _read(given: argparse.Namespace, rest: list[str], words: tuple[str, ...], csv: Path | None) -> SweepArguments:
    if given.rates is not None and given.concurrency is not None:
        raise BadInputError("--concurrency and --rates are two kinds of load; give one of them")
    passed = [] if given.rates is None else ["--load", "rate"]
    if not set(given.request_batch_size or "").isdisjoint("*|"):  # a mix is no list; 1..8 is one here
        passed += ["--request-batch-size", given.request_batch_size]
        given.request_batch_size = None
    try:
        run = read_run_arguments([*passed, *rest])
    except BadInputError as error:
        raise BadInputError(str(error).replace(f"`{Parser.page}`", f"`{PAGE}`")) from None
    default = RunOptions(run.options.model)
    for name, flag in OF_A_SEARCH.items():
        if getattr(run.options, name) != getattr(default, name):
            raise BadInputError(f"{flag} is about a search; `tune sweep` measures what is listed: leave it out")
    rates = () if given.rates is None else ranges.rates("--rates", given.rates)
    concurrency = given.concurrency or DEFAULT_CONCURRENCY
    asked = Asked(
        choices=_choices(given),
        concurrency=() if rates else ranges.whole_numbers("--concurrency", concurrency, 1, MOST_CONCURRENCY),
        request_rate=rates,
        request_batch_size=_wholes("--request-batch-size", given.request_batch_size, 1),
        repeat=whole("--repeat", given.repeat, 1, MOST_REPEATS),
        words=tuple(hidden_in(words)),
    )
    return SweepArguments(replace(run.options, output_check=False), asked, None, csv, run.as_json)


def _choices(given: argparse.Namespace) -> Choices:
    found = Choices(
        max_batch_size=_wholes("--max-batch-size", given.max_batch_size, 0),
        max_queue_delay_us=_listed("--max-queue-delay", given.max_queue_delay, _delay),
        preferred_batch_size=_listed("--preferred-batch-size", given.preferred_batch_size, _policy),
        instance_count=_wholes("--instances", given.instances, 1, MOST_INSTANCES),
        fields=dict(_field(text) for text in given.config),
    )
    found.check()
    return found


def _wholes(flag: str, text: str | None, least: int, most: int = LARGEST_INT32) -> tuple[int, ...]:
    return () if text is None else ranges.whole_numbers(flag, text, least, most)


def _listed(flag: str, text: str | None, parse: Callable[[str], T]) -> tuple[T, ...]:
    if text is None:
        return ()
    try:
        return tuple(parse(word) for word in ranges.words(flag, text))
    except ValueError as error:
        raise BadInputError(f"{flag} {shown(text)}: {error}") from None


def _delay(text: str) -> int | None:
    if text == "off":
        return None
    microseconds = float(text) if text.isdecimal() and len(text) < 20 else 1000 * parse_duration_ms(text, "5ms")
    if microseconds > LARGEST_INT32:
        raise ValueError("longer than Triton can wait")
    return round(microseconds)


def _policy(text: str) -> str:
    return parse_policy(text.split("+"))


def _field(text: str) -> tuple[str, tuple[FieldValue, ...]]:
    path, equals, values = text.partition("=")
    if not equals or not path:
        raise BadInputError(f"--config {shown(text)}: write a path and its values, PATH=V1,V2")
    return path, ranges.words(f"--config {path}", values)


def _csv(text: str) -> Path:
    path = Path(text)
    if is_folder(path) or not is_folder(path.parent):
        raise BadInputError(f"--csv {shown(text)}: write the name of a file in a folder that exists")
    return path
