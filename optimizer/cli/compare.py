"""``tune compare A B``: whether one recommendation of two runs is better than the other, and what else differs."""

from __future__ import annotations

from objectives.sla import Verdict
from optimizer.cli.commands import add_run
from optimizer.cli.exit_codes import EXIT_CODES
from optimizer.cli.output import open_console, print_json
from optimizer.options.command_line import Parser, add_json, add_results
from optimizer.options.values import parse_optional, parse_regression

EPILOG = """\
The first line is the answer: the ratio of the throughputs, or of another first
objective of both runs, with its confidence interval, no measurable difference,
or why the two cannot be compared.

exit codes: 0 compared, 1 B regressed (--fail-on-regression), 2 bad input

examples:
  tune compare results/dlrm/20261121-072139 latest
  tune compare dlrm/20261121-072139 dlrm/20261122-091502 \\
      --fail-on-regression 5%
"""


def build_parser() -> Parser:
    """Return the parser of the command line."""
    parser = Parser(
        prog="tune compare",
        usage="[options] A B",
        description="Compare the recommendation of run B with that of run A: throughput, latency,\n"
        "configuration, machine, server, versions, model and requests. Reads the\n"
        "folders and starts no server.",
        epilog=EPILOG,
    )
    add_run(parser, "a", "A")
    add_run(parser, "b", "B", "The run that is compared with A, in one of the same forms")
    parser.add_argument(
        "--fail-on-regression",
        metavar="SHARE",
        help="Return exit code 1 if the throughput, or another first objective, is worse by this share or more in B: "
        "5%%",
    )
    add_results(parser)
    add_json(parser)
    return parser


def main(argv: list[str]) -> int:
    """Run ``tune compare`` and return its exit code. Raises BadInputError if a run cannot be compared."""
    arguments = build_parser().read(argv)
    limit = parse_optional("--fail-on-regression", arguments.fail_on_regression, parse_regression)
    from optimizer.results.comparison import compare_runs, document
    from optimizer.results.finished_run import read_run

    comparison = compare_runs(read_run(arguments.a, arguments.results), read_run(arguments.b, arguments.results))
    if arguments.json:
        print_json(document(comparison, limit))
    else:
        from optimizer.results.terminal_comparison import print_comparison

        print_comparison(open_console(), comparison, limit)
    has_regressed = limit is not None and comparison.has_regressed(limit)
    return EXIT_CODES[Verdict.FAIL] if has_regressed else EXIT_CODES[Verdict.PASS]
