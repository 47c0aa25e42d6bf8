"""``tune explain RUN``: the bottleneck of a run, the effect of changes, and why the runner-up was not recommended."""

from __future__ import annotations

from optimizer.cli.commands import add_run
from optimizer.cli.output import busy, open_console, print_json, progress_on_terminal
from optimizer.options.command_line import Parser, add_json, add_results
from optimizer.options.values import number_where, parse_optional

ROUNDS, MEASUREMENT_SECONDS = 10, 1.0  # of --measure: measurements without and with shared memory, and their length
SHARE = number_where(lambda value: 0 < value <= 1, "write a share above 0 and up to 1, such as 0.5")
EPILOG = """\
exit codes: 0 explained, 2 bad input, such as a run without measurements, 3
environment (--measure), 130 interrupted

examples:
  tune explain latest
  tune explain results/dlrm/20261120-231154 --measure
"""


def build_parser() -> Parser:
    """Return the parser of the command line."""
    parser = Parser(
        prog="tune explain",
        usage="[options] RUN",
        description="Explain what limits the throughput of a run, which bound prevents more,\n"
        "which changes would help, and why the runner-up was not recommended. Reads\n"
        "the folder of the run, and starts a server only with --measure.",
        epilog=EPILOG,
    )
    add_run(parser)
    add_results(parser)
    parser.add_argument(
        "--fp16-factor",
        metavar="SHARE",
        help="Assumed compute time in FP16, as a share of the measured one (default: 0.5)",
    )
    parser.add_argument(
        "--measure",
        action="store_true",
        help="Measure on this machine, for about a minute, what shared memory between client and server changes",
    )
    add_json(parser)
    return parser


def main(argv: list[str], rounds: int = ROUNDS, seconds: float = MEASUREMENT_SECONDS) -> int:
    """Run ``tune explain`` and return its exit code.

    With --measure, it measures without and with shared memory for ``seconds`` each in each of the ``rounds``.

    Raises BadInputError if the run has no measurements; with --measure TuneError as a run.
    """
    arguments = build_parser().read(argv)
    from optimizer.explain.explain_report import print_explanation
    from optimizer.explain.explanation import explain
    from optimizer.explain.explanation_document import document
    from optimizer.explain.simulated_changes import FP16_FACTOR
    from optimizer.results.finished_run import read_run

    factor = parse_optional("--fp16-factor", arguments.fp16_factor, SHARE, FP16_FACTOR)
    run = read_run(arguments.run, arguments.results)
    if arguments.measure:
        from optimizer.study.shared_memory_measurement import measure_shared_memory

        on_progress, _ = progress_on_terminal()
        measure_shared_memory(run, on_progress, rounds, seconds)
    with busy("simulating changes"):
        explanation = explain(run, factor)
    if arguments.json:
        print_json(document(explanation))
    else:
        print_explanation(open_console(), explanation)
    return 0
