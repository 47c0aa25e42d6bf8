"""``tune watch RUN --url URL``: whether the recommendation of a run still fits a server in production."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from objectives.units import parse_duration_ms
from optimizer.cli.commands import add_run
from optimizer.cli.exit_codes import EXIT_CODES
from optimizer.cli.output import open_console, print_json, print_message
from optimizer.core.errors import BadInputError
from optimizer.options.addresses import parse_metrics_url
from optimizer.options.command_line import Parser, add_json, add_results
from optimizer.options.values import parse_optional, parse_text, parse_value, whole_number

if TYPE_CHECKING:
    from optimizer.core.interfaces import Clock

DEFAULT_INTERVAL, DEFAULT_INTERVALS = "5s", 12
MIN_INTERVAL_SECONDS, MAX_INTERVAL_SECONDS = 0.2, 86400.0
MIN_INTERVALS, MAX_INTERVALS = 2, 1000
MAX_SERVERS = 1000
EPILOG = """\
It reads the metrics of Triton and never changes anything. The first line is
the answer. docs/watch.md states each check with its threshold.

exit codes: 0 the recommendation fits, 1 it no longer fits, 2 bad input, such
as a server without this model, 3 a server cannot be read, 4 undecided, such
as too few requests, 130 interrupted

examples:
  tune watch dlrm --url http://triton:8002/metrics
  tune watch results/dlrm/20261121-072139 --url a:8002 --url b:8002 \\
      --interval 60s
  tune watch two_processes --url triton:8002 --url triton:8012
  tune watch dlrm --url triton:8002 --follow --json
"""


def build_parser() -> Parser:
    """Return the parser of the command line."""
    parser = Parser(
        prog="tune watch",
        usage="[options] RUN --url URL",
        description="Compare load, batch sizes, times and failures of servers in production with\n"
        "those of a run, and say whether its recommendation still fits.",
        epilog=EPILOG,
    )
    add_run(parser)
    servers = parser.add_argument_group("Servers")
    servers.add_argument(
        "--url",
        action="append",
        metavar="URL",
        help="Triton's page of metrics: http://host:8002/metrics, or host:8002; repeatable: replicas, and the server "
        "processes of each, whose load is summed",
    )
    servers.add_argument("--model", metavar="NAME", help="Name of the model there (default: that of the run)")
    observation = parser.add_argument_group("Observation")
    observation.add_argument(
        "--interval",
        default=DEFAULT_INTERVAL,
        metavar="TIME",
        help=f"Time between two readings (default: {DEFAULT_INTERVAL})",
    )
    observation.add_argument(
        "--intervals",
        default=str(DEFAULT_INTERVALS),
        metavar="N",
        help=f"Number of intervals that are judged together, {MIN_INTERVALS} or more (default: {DEFAULT_INTERVALS})",
    )
    observation.add_argument(
        "--follow",
        action="store_true",
        help="Continue until Ctrl-C: judge the newest intervals after each one, in one line each",
    )
    add_results(parser)
    add_json(parser, "; one a line with --follow")
    return parser


def main(argv: list[str], clock: Clock = time) -> int:
    """Run ``tune watch`` with intervals by ``clock`` and return its exit code. Raises TuneError."""
    arguments = build_parser().read(argv)
    if not arguments.url:
        raise BadInputError("nothing to watch: give --url with the metrics of the server, such as triton:8002")
    urls = list(dict.fromkeys(parse_value("--url", url, parse_metrics_url) for url in arguments.url))
    if len(urls) > MAX_SERVERS:
        raise BadInputError(f"--url: given {len(urls):,} times; give at most {MAX_SERVERS:,}")
    interval_seconds = parse_value("--interval", arguments.interval, _parse_interval)
    count = parse_value("--intervals", arguments.intervals, whole_number(MIN_INTERVALS, MAX_INTERVALS))
    given_model = parse_optional("--model", arguments.model, parse_text)
    from optimizer.results import formatting
    from optimizer.results.finished_run import read_run
    from optimizer.simulator.simulate import compile_simulator
    from optimizer.watch.expectation import check_server_count, derive_expectation
    from optimizer.watch.fit_check import Judgement
    from optimizer.watch.server_metrics import observe_loads
    from optimizer.watch.watch_report import document, follow_line, print_judgement

    compile_simulator(print_message)
    expectation = derive_expectation(read_run(arguments.run, arguments.results))
    check_server_count(expectation, len(urls))

    def announce() -> None:
        if not arguments.json:
            servers = formatting.count(len(urls), "server")
            print_message(
                f"reading the metrics of {servers} every {interval_seconds:g} s: {count * interval_seconds:,g} s"
            )

    model = given_model or expectation.model
    observations = observe_loads(urls, model, interval_seconds, count, clock, announce, expectation.steps)
    while True:
        observed = next(observations)
        judgement = Judgement(expectation, observed.loads, len(urls), observed.lost_intervals)
        if arguments.json:
            print_json(document(judgement, urls), None if arguments.follow else 2)
        elif arguments.follow:
            print(follow_line(judgement, time.strftime("%H:%M:%S")), flush=True)
        else:
            print_judgement(open_console(), judgement)
        if not arguments.follow:
            return EXIT_CODES[judgement.verdict]


def _parse_interval(text: str) -> float:
    seconds = parse_duration_ms(text, example="5s") / 1e3
    if not MIN_INTERVAL_SECONDS <= seconds <= MAX_INTERVAL_SECONDS:
        raise ValueError(f"write a time from {MIN_INTERVAL_SECONDS * 1000:g}ms to {MAX_INTERVAL_SECONDS / 3600:g}h")
    return seconds
