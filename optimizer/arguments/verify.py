"""``tune verify RUN``."""

from __future__ import annotations

import argparse
from dataclasses import dataclass, replace

from optimizer.arguments.run import checked_options
from optimizer.arguments.target import add_target, address, target
from optimizer.arguments.values import Parser
from optimizer.errors import BadInputError
from optimizer.options import RunOptions
from optimizer.store.run_folder import RunFolder

VERIFY_EPILOG = """\
The recommendation and the two next best configurations are deployed on fresh
servers, in turn, three times each, and measured for as long as a verdict with
the run's confidence takes. The recommendation holds where it passes, and where
neither of the others now serves more within the bounds, beyond chance.

With --target remote that happens on a server that runs already, as before a
release on the one that will serve: the model is loaded afresh each time, with
what is tuned in it changed, and put back as it was at the end. It must run with
--model-control-mode=explicit and get no other requests meanwhile.

exit codes: 0 it holds, 1 it does not, 2 bad input, 3 environment, 130 interrupted

examples:
  tune verify results/dlrm/20261120-231154
  tune verify --target remote --url triton:8001 results/dlrm/20261120-231154
"""


@dataclass(frozen=True)
class VerifyArguments:
    run: RunFolder
    options: RunOptions
    as_json: bool


def read_verify_arguments(words: list[str]) -> VerifyArguments:
    """As ``read_run_arguments``. ``options`` are the run's, on the target that is given."""
    parser = Parser(
        prog="tune verify",
        usage="tune verify [options] RUN",
        description="Measure what a run recommends again, on fresh servers: does it still hold?",
        epilog=VERIFY_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.page = "tune verify --help"
    parser.add_argument("run", metavar="RUN", help="the folder of a run, such as results/dlrm/20261120-231154")
    add_target(parser, usual="that of the run")
    parser.add_argument("--out", default="results", metavar="DIR", help="folder in which RUN may lie (results)")
    parser.add_argument("--json", action="store_true", help="one JSON document on standard output")
    given = parser.parse_args(words)
    run = RunFolder.find(given.run, given.out, "RUN")
    options = checked_options(run)
    options = replace(options, **target(given, options))
    if options.target == "remote":
        over = address(options.url).protocol
        if options.protocol != over:
            other = "http://host:port" if over == "grpc" else "host:port of its gRPC"
            raise BadInputError(f"{run.path} was measured over {options.protocol}: give --url {other}")
        options = replace(options, server_cpus=None)
    return VerifyArguments(run, options, given.json)
