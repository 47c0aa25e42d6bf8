"""``tune verify RUN``."""

from __future__ import annotations

import argparse
from dataclasses import dataclass

from optimizer.arguments.run import checked_options
from optimizer.arguments.values import Parser
from optimizer.options import RunOptions
from optimizer.store.run_folder import RunFolder

VERIFY_EPILOG = """\
The recommendation and the two next best configurations are deployed on fresh
servers, in turn, three times each, and measured for as long as a verdict with
the run's confidence takes. The recommendation holds where it passes, and where
neither of the others now serves more within the bounds, beyond chance.

exit codes: 0 it holds, 1 it does not, 2 bad input, 3 environment, 130 interrupted

example:
  tune verify results/dlrm/20261120-231154
"""


@dataclass(frozen=True)
class VerifyArguments:
    run: RunFolder
    options: RunOptions
    as_json: bool


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
    parser.add_argument("--target", default="embedded", choices=("embedded",), help="where it is served (embedded)")
    parser.add_argument("--out", default="results", metavar="DIR", help="folder in which RUN may lie (results)")
    parser.add_argument("--json", action="store_true", help="one JSON document on standard output")
    given = parser.parse_args(words)
    run = RunFolder.find(given.run, given.out, "RUN")
    return VerifyArguments(run, checked_options(run), given.json)
