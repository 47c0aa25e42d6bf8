"""``tune serve RUN``: start the server of a recommendation, for clients on this machine."""

from __future__ import annotations

import argparse
import shlex
from functools import partial
from typing import TYPE_CHECKING

from optimizer.cli import output
from optimizer.cli.commands import add_run
from optimizer.cli.output import check_decided, open_console, print_json, print_message, progress_on_terminal
from optimizer.core import interrupts
from optimizer.core.errors import BadInputError
from optimizer.core.safe_text import show_path
from optimizer.deploy.target_settings import (
    GRPC_PORT,
    HTTP_PORT,
    METRICS_PORT,
    PORT_STEP,
    ServerPorts,
    choose_ports,
)
from optimizer.options.addresses import MAX_PORT
from optimizer.options.command_line import Parser, add_json, add_model_of_run, add_results, values_of
from optimizer.options.option_reader import EXTERNAL, changed_options
from optimizer.options.run_options import RunOptions
from optimizer.options.values import parse_budget_seconds, parse_optional, parse_value, whole_number

if TYPE_CHECKING:
    from collections.abc import Callable

    from rich.console import Console

    from optimizer.core.endpoint import Endpoint
    from optimizer.results.finished_run import FinishedRun
    from optimizer.store.run_folder import RunFolder
    from optimizer.study.recommendation_server import RecommendedServer

EXIT_TIMEOUT = "30s"  # the default of tritonserver
PORTS = {"http": ("HTTP", HTTP_PORT), "grpc": ("gRPC", GRPC_PORT), "metrics": ("the metrics", METRICS_PORT)}
EPILOG = f"""\
It starts the tritonserver of the run, embedded or --target local, with the
recommended configuration, server options, CPUs and number of processes. The
server listens on 127.0.0.1 only, because Triton does not authenticate
clients.

Ctrl-C or SIGTERM stops it: new requests are refused, and those in flight are
completed, for up to --exit-timeout. A second Ctrl-C stops it at once. Each
further server process has ports that are {PORT_STEP} higher.

exit codes: 0 stopped by Ctrl-C or SIGTERM, 2 bad input, such as a run without
a recommendation, 3 the server did not start or has died, 130 interrupted
before it was ready

examples:
  tune serve latest
  tune serve results/dlrm/20261120-231154 --grpc-port 9001
  tune watch results/dlrm/20261120-231154 --url 127.0.0.1:8002
"""


def build_parser() -> Parser:
    """Return the parser of the command line."""
    parser = Parser(
        prog="tune serve",
        usage="[options] RUN [MODEL]",
        description="Start the server that the recommendation of a run names, and serve until Ctrl-C.",
        epilog=EPILOG,
    )
    add_run(parser)
    add_model_of_run(parser)
    for name, (title, default) in PORTS.items():
        text = f"Port of {title} (default: {default} if it is free, otherwise a free one)"
        parser.add_argument(f"--{name}-port", metavar="PORT", help=text)
    parser.add_argument(
        "--exit-timeout",
        default=EXIT_TIMEOUT,
        metavar="TIME",
        help=f"Longest time for the requests in flight at the end (default: {EXIT_TIMEOUT})",
    )
    parser.add_argument(
        "--latency-quantiles",
        action="store_true",
        help="Export the percentiles that the SLA bounds for tune watch, even if this reduces the throughput "
        "noticeably (default: only if it does not)",
    )
    parser.add_argument("--force", action="store_true", help="Serve also an UNDECIDED recommendation")
    add_results(parser)
    parser.add_options((), hidden=EXTERNAL)
    add_json(parser, " when the server is ready")
    return parser


def main(argv: list[str]) -> int:
    """Run ``tune serve`` and return its exit code. Raises TuneError."""
    arguments = build_parser().read(argv)
    user_ports = _user_ports(arguments)
    exit_seconds = parse_value("--exit-timeout", arguments.exit_timeout, parse_budget_seconds)
    from optimizer.emit.recommended import read_recommendation
    from optimizer.results.finished_run import read_run
    from optimizer.study.environment import Environment
    from optimizer.study.recommendation_server import check_can_be_served, recommended_server, wait_for_failure

    run = read_run(arguments.run, arguments.results)
    recommendation = read_recommendation(run, "serve")
    check_decided(recommendation, "serves", force=arguments.force)
    if arguments.latency_quantiles and recommendation.no_quantiles_reason:
        raise BadInputError(f"--latency-quantiles: {recommendation.no_quantiles_reason}; leave it out")
    check_can_be_served(run.folder, run.options, recommendation.server_processes)
    options = _read_options(run.folder, arguments)
    if options.server_cpus != run.options.server_cpus:
        print_message(
            f"note: --server-cpus {run.options.server_cpus} of the run is left out: this machine does not have these "
            "CPUs"
        )
    choose = partial(choose_ports, recommendation.server_processes, user_ports)
    choose()  # refuses an unusable port before the model is built
    on_progress, _ = progress_on_terminal()
    on_progress(f"starting the server of {show_path(run.folder.path)}")
    candidate = recommendation.point.candidate
    quantiles = recommendation.quantiles if arguments.latency_quantiles else recommendation.affordable_quantiles
    environment = Environment.detect(options, on_progress)
    with recommended_server(run, candidate, recommendation.configs, environment, choose, quantiles) as server:
        try:
            _show_server(run, server, as_json=arguments.json)
            on_progress("serving until Ctrl-C")
            wait_for_failure(server.endpoint)
        except KeyboardInterrupt:
            is_complete = _complete_requests(server, exit_seconds, on_progress)
    on_progress("stopped" if is_complete else "stopped; requests and streams that were still open have failed")
    return 0


def _complete_requests(server: RecommendedServer, exit_seconds: float, on_progress: Callable[[str], None]) -> bool:
    """Complete the requests in flight after the first Ctrl-C; return whether all were completed."""
    from optimizer.study.recommendation_server import complete_requests

    try:
        interrupts.acknowledge_first()
        with interrupts.deferred():  # an interrupted rich prints the line again
            on_progress(f"completing the requests in flight for up to {exit_seconds:g} s; Ctrl-C again stops at once")
        return complete_requests(server, exit_seconds)
    except KeyboardInterrupt:
        return False
    finally:
        interrupts.acknowledge()


def _user_ports(arguments: argparse.Namespace) -> dict[str, int]:
    """Return the ports of the command line by their field of ServerPorts. Raises BadInputError."""
    parse = whole_number(1, MAX_PORT)
    ports = {
        name: parse_optional(f"--{name}-port", getattr(arguments, f"{name}_port"), parse)
        for name in vars(ServerPorts())
    }
    return {name: port for name, port in ports.items() if port is not None}


def _read_options(run: RunFolder, arguments: argparse.Namespace) -> RunOptions:
    """Return the options of the run, without lists of CPUs that this machine does not have.

    Raises BadInputError if the run names code that the user did not name.
    """
    from optimizer.study.run_request import read_stored_options, refuse_foreign_values

    run.refuse_links()
    options, values = read_stored_options(run, other_machine=True), values_of(arguments)
    about = f"serve {show_path(run.path)}"
    if changed := changed_options(options, values):
        raise BadInputError(f"{about}: the run has its own model and server; leave --{changed[0]} out")
    refuse_foreign_values(run, options, options, about, arguments.model, values)
    return options


def addresses(endpoint: Endpoint) -> list[dict[str, str | None]]:
    """Return the addresses of each server of ``endpoint``, as the keys ``grpc``, ``http`` and ``metrics``.

    That of HTTP is None if this version of tritonserver cannot protect it.
    """
    return [
        {
            "grpc": server.grpc,
            "http": f"http://{server.http}" if server.http else None,
            "metrics": f"http://{server.metrics}/metrics" if server.metrics else None,
        }
        for server in endpoint.servers
    ]


def _show_server(run: FinishedRun, server: RecommendedServer, *, as_json: bool) -> None:
    """Print the addresses, the verdict on the recommendation, and the command that watches the server."""
    if as_json:
        print_json(document(run, server))
    else:
        print_server(open_console(), run, server)
    output.flush()


def document(run: FinishedRun, server: RecommendedServer) -> dict[str, object]:
    """Return the document of ``--json``."""
    from optimizer.results import result_document

    assert run.recommended is not None, "only a run with a recommendation is served"
    return {
        "model": server.endpoint.model,
        "servers": addresses(server.endpoint),
        "sla": [str(bound) for bound in run.problem.sla],
        "verdict": run.measured.verdict.value,
        "recommended": result_document.entry(run.recommended),
        "run": str(run.folder.path),
        "logs": str(server.folder.server_log.parent),
    }


def print_server(console: Console, run: FinishedRun, server: RecommendedServer) -> None:
    """Print the same for people."""
    from optimizer.core.notes import SeveralModelsLoaded
    from optimizer.results import summary
    from optimizer.results.configuration_text import configuration
    from optimizer.results.terminal_output import print_unwrapped, print_wrapped

    print_wrapped(console, "recommended", summary.headline(run.measured, run.problem))
    print_wrapped(console, "", configuration(server.endpoint.candidate))
    if run.concurrent_models:
        print_wrapped(
            console, "note", str(SeveralModelsLoaded(run.problem.model, tuple(run.concurrent_models.items())))
        )
    all_addresses = addresses(server.endpoint)
    for label, name in (("gRPC", "grpc"), ("HTTP", "http"), ("metrics", "metrics")):
        for i, each in enumerate(all_addresses):
            print_unwrapped(console, "" if i else label, each[name] or "off in this version of Triton")
    print_unwrapped(console, "logs", str(server.folder.server_log.parent))
    urls = [f"--url {each['metrics']}" for each in all_addresses if each["metrics"]]
    if len(urls) == len(all_addresses):
        path = shlex.quote(show_path(run.folder.path))
        print_unwrapped(console, "watch", " ".join(["tune watch", path, *urls]))
