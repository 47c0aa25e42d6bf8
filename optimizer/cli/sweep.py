"""``tune sweep MODEL``: measure given configurations at given loads."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TypeVar

from objectives.units import parse_duration_ms
from optimizer.cli.commands import add_model, complete_run
from optimizer.cli.output import INTERRUPTED, open_console, print_json, progress_on_terminal
from optimizer.config.batching import parse_preferred_sizes
from optimizer.core.candidate import SERVER_PROCESSES, FieldChoices, FieldValue
from optimizer.core.errors import BadInputError
from optimizer.core.safe_text import is_folder, quote, show_path
from optimizer.core.signature import is_signed
from optimizer.core.trial import MAX_CONCURRENCY
from optimizer.options.addresses import redact_header
from optimizer.options.command_line import Parser, value_of, values_of
from optimizer.options.option_reader import external_names, external_values, resume_options
from optimizer.options.run_options import DEFAULTS, RunOptions
from optimizer.options.table import LOAD, OPTIONS, OPTIONS_BY_NAME, OUTPUT, REQUEST_TIME_OPTIONS
from optimizer.options.values import (
    MAX_INT32,
    parse_optional,
    parse_path,
    parse_rates,
    parse_value,
    parse_whole_numbers,
    parse_words,
    whole_number,
)
from optimizer.store.run_folder import SWEEP_FILE, RunFolder
from optimizer.store.run_lookup import find_sweep
from optimizer.study.run_request import read_run_request
from optimizer.study.sweep_output import read_document
from optimizer.study.sweep_plan import BUDGET_SECONDS, MODEL, GivenOptions, SweepChoices, SweepRequest

T = TypeVar("T")

SWEEP_OPTIONS = (
    *("max-batch-size", "max-queue-delay", "preferred-batch-size", "instance-count", "config"),
    *("concurrency", "request-rate", "repeat"),
)
SIZES = "request-batch-size"
HEADER = "header"  # its value is not stored, so a resume takes it
DEFAULT_CONCURRENCY = "1,2,4,8,16"
MAX_REPEATS = 100
MAX_INSTANCES = 1024
EPILOG = """\
A LIST is 1,2,4 or perf_analyzer's start:end:step (2:16:2) or doubled (1..256).
Every combination of the listed values is deployed and measured at every load.
A setting that is not listed keeps the value of the model's own configuration.
A failed configuration is a row with its reason. The results are in
results/MODEL/RUN/: sweep.json and trials.csv (with several request batch sizes
one table each, such as trials-b8.csv). `tune replay` reads these tables if the
loads are numbers of requests in flight.

exit codes: 0 measured, 1 nothing could be measured, 2 bad input, 3
environment, 130 interrupted (the measurements so far are printed; --resume
continues)

examples:
  static against dynamic batching, one instance against two:
    tune sweep --max-queue-delay off,0 --instance-count 1,2 \\
      --concurrency 2:16:2 dlrm
  throughput by request batch size:
    tune sweep --max-batch-size 4096 --request-batch-size 1,8,64,512 \\
      --concurrency 1 dlrm
  settings of ONNX Runtime:
    tune sweep --config parameters.intra_op_thread_count.string_value=1,2 mlp
"""


@dataclass(frozen=True)
class SweepArguments:
    """The command line of ``tune sweep``; ``resumed`` is the folder of the sweep to continue."""

    options: RunOptions
    request: SweepRequest
    resumed: RunFolder | None
    csv: Path | None
    as_json: bool


def read_sweep_arguments(argv: list[str]) -> SweepArguments:
    """Return the parsed command line. Raises BadInputError naming the flag, its value and the allowed values."""
    arguments = build_parser().read(argv)
    csv = None if arguments.csv is None else _check_csv(arguments.csv)
    as_json = arguments.json is True
    given = _given_options(arguments)
    resume = parse_optional("--resume", arguments.resume, parse_path)
    if resume is None:
        options, request = _read_request(given)
        return SweepArguments(options, request, None, csv, as_json)
    folder, options, request = _read_resumed(resume, given)
    return SweepArguments(options, request, folder, csv, as_json)


def _read_resumed(resume: str, given: GivenOptions) -> tuple[RunFolder, RunOptions, SweepRequest]:
    """Return the sweep to continue, which keeps its options; only a header may be ``given``. Raises BadInputError."""
    about = f"--resume {quote(resume)}"
    for name, value in given.items():
        if name != HEADER:
            refused = value if name == MODEL else f"--{name}"
            raise BadInputError(f"{about} keeps the options of the sweep; leave {refused} out")
    folder = find_sweep(resume, DEFAULTS.out)
    folder.refuse_links()
    stored = read_document(folder.path)
    try:
        options, request = _read_request(stored["options"])
    except BadInputError as error:
        raise BadInputError(f"{show_path(folder.path / SWEEP_FILE)}: {error}") from None
    if external_names(options) and not is_signed(external_values(options), stored.get("signature")):
        raise BadInputError(
            f"{about}: {SWEEP_FILE} was not written by your tune in this folder, and names code, addresses or data; "
            f"if you trust them, begin it again: {quote(request.command)}"
        )
    if HEADER in given:
        options = resume_options(options, given)
        request = replace(request, given={**request.given, HEADER: _without_secrets(HEADER, given[HEADER])})
    return folder, options, request


def _given_options(arguments: argparse.Namespace) -> dict[str, str | list[str] | bool]:
    """Return the options of the sweep that are given, and the model."""
    sweep_values = {name: value_of(arguments, name) for name in SWEEP_OPTIONS}
    values = {name: value for name, value in values_of(arguments).items() if name not in ("json", "resume")}
    given = sweep_values | values | {MODEL: arguments.model}
    return {name: value for name, value in given.items() if value is not None}


def build_parser() -> Parser:
    """Return the parser of the command line."""
    parser = Parser(
        prog="tune sweep",
        usage="[options] MODEL",
        description="Measure given configurations at given loads on a real server, without a search:\n"
        "throughput, average and percentile latencies, and the time that a request\n"
        "spends in each stage.",
        epilog=EPILOG,
    )
    add_model(parser, "The model, as in `tune run`", "?")
    configurations = parser.add_argument_group("Configurations")
    configurations.add_argument("--max-batch-size", metavar="LIST", help="Values of max_batch_size: 1,8")
    configurations.add_argument(
        "--max-queue-delay",
        metavar="LIST",
        help="Queue delays of dynamic batching in µs or as 5ms; off: no dynamic batching (off,0,5ms)",
    )
    configurations.add_argument(
        "--preferred-batch-size",
        metavar="LIST",
        help="Preferred batch sizes of dynamic batching: none, 8, 4+8, max/2 (none,4+8)",
    )
    configurations.add_argument("--instance-count", metavar="LIST", help="Counts of the instance group: 1,4")
    configurations.add_argument(
        "--config",
        metavar="PATH=V,V",
        action="append",
        help="Values of any other field of ModelConfig, by its path; repeatable",
    )
    _add_loads(parser)
    shared = {option.name for option in OPTIONS if "sweep" in option.taken_by} - {SIZES}
    groups = parser.add_options(shared, hidden=OPTIONS_BY_NAME.keys() - shared - {SIZES})
    parser.set_completer("--resume", partial(complete_run, sweeps=True))
    groups[OUTPUT].add_argument("--csv", metavar="FILE", help="Write every cell as a row of this file")
    return parser


def _add_loads(parser: Parser) -> None:
    """Add the options for the loads, and for the number of measurements of each."""
    loads = parser.add_argument_group(LOAD)
    loads.add_argument(
        "--concurrency",
        "--concurrency-range",
        metavar="LIST",
        help=f"Numbers of requests in flight (default: {DEFAULT_CONCURRENCY})",
    )
    loads.add_argument(
        "--request-rate",
        "--request-rate-range",
        metavar="LIST",
        help="Request rates per second, in place of --concurrency: 100,200",
    )
    loads.add_argument(
        "-b", "--request-batch-size", metavar="LIST", help="Samples in each request: 1,8 ('1*9|8': a mix)"
    )
    loads.add_argument("--repeat", metavar="N", help="Measurements of each cell, whose median is shown (default: 1)")


def _read_request(given: GivenOptions) -> tuple[RunOptions, SweepRequest]:
    """Return the options of the environment and the request of the sweep. Raises BadInputError."""
    texts = {name: _text_value(given, name) for name in (*SWEEP_OPTIONS, SIZES, MODEL) if name != "config"}
    if texts["request-rate"] is not None and texts["concurrency"] is not None:
        raise BadInputError("--concurrency and --request-rate are two kinds of load; give one of them")
    values: dict[str, object] = {
        name: value for name, value in given.items() if name not in (*SWEEP_OPTIONS, SIZES, MODEL)
    }
    _check_run_options(values, is_at_rate=texts["request-rate"] is not None)
    sizes = texts[SIZES]
    if not set(sizes or "").isdisjoint("*|"):  # a mix of sizes; 1..8 is a list here
        values[SIZES], sizes = sizes, None
    # Model Analyzer's file may have another kind of load
    values["load"] = "concurrency" if texts["request-rate"] is None else "rate"
    options = read_run_request(texts[MODEL], values).options
    rates = parse_optional("--request-rate", texts["request-rate"], parse_rates, ())
    concurrency = DEFAULT_CONCURRENCY if texts["concurrency"] is None else texts["concurrency"]
    choices = SweepChoices(
        max_batch_size=_parse_numbers("--max-batch-size", texts["max-batch-size"], 0),
        max_queue_delay_us=_parse_list("--max-queue-delay", texts["max-queue-delay"], _parse_delay_us),
        preferred_batch_size=_parse_list("--preferred-batch-size", texts["preferred-batch-size"], _parse_policy),
        instance_count=_parse_numbers("--instance-count", texts["instance-count"], 1, MAX_INSTANCES),
        fields=_parse_fields(_list_value(given, "config")),
    ).normalized()
    request = SweepRequest(
        choices=choices,
        concurrency=() if rates else _parse_numbers("--concurrency", concurrency, 1, MAX_CONCURRENCY),
        request_rate=rates,
        request_batch_size=_parse_numbers("--request-batch-size", sizes, 1),
        repeat=parse_optional("--repeat", texts["repeat"], whole_number(1, MAX_REPEATS), 1),
        given={name: _without_secrets(name, value) for name, value in given.items()},
    )
    return replace(options, output_check=False, budget_seconds=BUDGET_SECONDS), request


def _check_run_options(names: Iterable[str], *, is_at_rate: bool) -> None:
    """Raise BadInputError if a sweep does not take an option of `tune run`, or only with --request-rate."""
    for name in names:
        if name in REQUEST_TIME_OPTIONS and not is_at_rate:
            raise BadInputError(f"--{name}: works only with --request-rate; give the rates, or leave --{name} out")
        if name in OPTIONS_BY_NAME and "sweep" not in OPTIONS_BY_NAME[name].taken_by:
            raise BadInputError(
                f"--{name}: `tune sweep` measures only the listed cells and does not take it; leave it out"
            )


def _without_secrets(name: str, value: str | list[str] | bool) -> str | list[str] | bool:
    return [redact_header(text) for text in value] if name == HEADER and isinstance(value, list) else value


def _text_value(given: GivenOptions, name: str) -> str | None:
    value = given.get(name)
    if isinstance(value, (bool, list)):
        raise BadInputError(f"not the record of a sweep: {name} is not text; begin it again without --resume")
    return value


def _list_value(given: GivenOptions, name: str) -> list[str]:
    value = given.get(name, [])
    if not isinstance(value, list):
        raise BadInputError(f"not the record of a sweep: {name} is not a list; begin it again without --resume")
    return value


def _parse_numbers(flag: str, text: str | None, least: int, most: int = MAX_INT32) -> tuple[int, ...]:
    return parse_optional(flag, text, lambda list_: parse_whole_numbers(list_, least, most), ())


def _parse_list(flag: str, text: str | None, parse: Callable[[str], T]) -> tuple[T, ...]:
    return parse_optional(flag, text, lambda list_: tuple(parse(word) for word in parse_words(list_)), ())


def _parse_delay_us(text: str) -> int | None:
    """Return a queue delay in microseconds; None for ``off``. Raises ValueError."""
    if text == "off":
        return None
    microseconds = float(text) if text.isdecimal() and len(text) < 20 else 1000 * parse_duration_ms(text, "5ms")
    if microseconds > MAX_INT32:
        raise ValueError(f"write at most {MAX_INT32 // 1_000_000}s ({MAX_INT32} µs), Triton's maximum")
    return round(microseconds)


def _parse_policy(text: str) -> str:
    return parse_preferred_sizes(text.split("+"))


def _parse_field(text: str) -> tuple[str, tuple[FieldValue, ...]]:
    """Return the path and the values of ``PATH=V1,V2``. Raises BadInputError."""
    path, equals, values = text.partition("=")
    if not equals or not path:
        raise BadInputError(f"--config {quote(text)}: write the path of a field and its values, PATH=V1,V2")
    if path == SERVER_PROCESSES:
        return path, _parse_numbers(f"--config {path}", values, 1)
    return path, parse_value(f"--config {path}", values, parse_words)


def _parse_fields(texts: list[str]) -> FieldChoices:
    """Return the values of each path, joined if it is given several times. Raises BadInputError."""
    fields: dict[str, tuple[FieldValue, ...]] = {}
    for path, values in map(_parse_field, texts):
        fields[path] = tuple(dict.fromkeys((*fields.get(path, ()), *values)))
    return fields


def _check_csv(text: str) -> Path:
    path = Path(text)
    if is_folder(path) or not is_folder(path.parent):
        raise BadInputError(f"--csv {quote(text)}: write the name of a file in a folder that exists")
    return path


def main(argv: list[str]) -> int:
    """Run ``tune sweep`` and return its exit code. Raises TuneError."""
    arguments = read_sweep_arguments(argv)
    from optimizer.study.sweep_output import print_sweep, write_csv
    from optimizer.study.sweeper import sweep

    on_progress, _ = progress_on_terminal()
    result = sweep(arguments.options, arguments.request, arguments.resumed, on_progress)
    if arguments.csv is not None:
        write_csv(arguments.csv, result.cells)
    if arguments.as_json:
        print_json(result.document)
    else:
        print_sweep(open_console(), result.cells, result.document)
    if result.status == "interrupted":
        return INTERRUPTED
    return 0 if any(cell.measurement.has_values for cell in result.cells) else 1
