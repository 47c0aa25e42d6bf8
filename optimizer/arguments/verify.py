"""``tune verify RUN``."""

from __future__ import annotations

import argparse
import re
from dataclasses import dataclass

from optimizer.arguments.run import checked_options
from optimizer.arguments.values import Parser, shown
from optimizer.errors import BadInputError
from optimizer.options import RunOptions
from optimizer.store.run_folder import RunFolder

DEFAULT_URL = "localhost:8001"
LARGEST_PORT = 65535
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
    remote: str | None  # host:port of a server that runs already


def read_verify_arguments(words: list[str]) -> VerifyArguments:
    """As ``read_run_arguments``."""
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
    parser.add_argument(
        "--target", default="embedded", choices=("embedded", "remote"), help="where it is served (embedded)"
    )
    parser.add_argument("--url", metavar="HOST:PORT", help=f"of the remote server's gRPC ({DEFAULT_URL})")
    parser.add_argument("--out", default="results", metavar="DIR", help="folder in which RUN may lie (results)")
    parser.add_argument("--json", action="store_true", help="one JSON document on standard output")
    given = parser.parse_args(words)
    remote = _address(given.target, given.url)
    run = RunFolder.find(given.run, given.out, "RUN")
    options = checked_options(run)
    if remote is not None and options.protocol != "grpc":
        raise BadInputError(f"--target remote speaks gRPC; {run.path} was measured over {options.protocol.upper()}")
    return VerifyArguments(run, options, given.json, remote)


def _address(target: str, url: str | None) -> str | None:
    if target != "remote":
        if url is not None:
            raise BadInputError(f"--url {shown(url)}: only --target remote has an address")
        return None
    found = re.fullmatch(r"(?:grpc://)?((?:[A-Za-z0-9._-]+|\[[0-9A-Fa-f:.]+\]):([0-9]{1,5}))", url or DEFAULT_URL)
    if found is None or not 0 < int(found[2]) <= LARGEST_PORT:
        raise BadInputError(f"--url {shown(url or '')}: write host:port of the server's gRPC, such as {DEFAULT_URL}")
    return found[1]
