"""``tune report RUN…``: write runs as an HTML page, as Markdown, as tables and as plots."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from optimizer.cli.commands import add_run
from optimizer.cli.output import busy, print_message
from optimizer.core.errors import BadInputError
from optimizer.core.safe_text import one_line, show_path
from optimizer.options.command_line import Parser, add_results

if TYPE_CHECKING:
    from optimizer.results.finished_run import FinishedRun


EPILOG = """\
Several runs are compared on one page.

exit codes: 0 written, 2 bad input, such as runs without measurements

examples:
  tune report latest
  tune report --format markdown,csv results/dlrm/20261120-231154
  tune report --out comparison dlrm/20261121-072139 dlrm/20261122-091502
"""
FORMATS = ("html", "markdown", "csv", "parquet", "png", "svg")
MAX_RUNS = 200


def build_parser() -> Parser:
    """Return the parser of the command line."""
    parser = Parser(
        prog="tune report",
        usage="[options] RUN [RUN ...]",
        description="Write runs as one HTML page, as Markdown, as tables and as plots.",
        epilog=EPILOG,
    )
    add_run(parser, "runs", nargs="+")
    parser.add_argument(
        "--format",
        action="append",
        metavar="FORMAT",
        help=f"{', '.join(FORMATS)}; several separated by commas, or repeated (default: html)",
    )
    parser.add_argument(
        "--out",
        metavar="DIR|FILE",
        help="Folder or file to write (default: the folder of the run; the current one for several)",
    )
    add_results(parser)
    return parser


def main(argv: list[str]) -> int:
    """Run ``tune report`` and return its exit code: 0 if any run has measurements. A line reports each other run."""
    arguments = build_parser().read(argv)
    formats = _parse_formats(arguments.format or ["html"])
    if len(arguments.runs) > MAX_RUNS:
        raise BadInputError(f"{len(arguments.runs):,} runs are too many for one page; give up to {MAX_RUNS}")
    runs = _read_runs(arguments.runs, arguments.results)
    if not runs:
        return BadInputError.exit_code
    from optimizer.results.report.writer import write

    output = Path(arguments.out) if arguments.out else runs[0].folder.path if len(runs) == 1 else Path()
    with busy(f"writing {', '.join(formats)}"):
        paths = write(runs, formats, output)
    for path in paths:
        print(show_path(path))
    return 0


def _parse_formats(texts: list[str]) -> list[str]:
    names = [name.strip() for text in texts for name in text.split(",")]
    unknown = next((name for name in names if name not in FORMATS), None)
    if unknown is not None:
        raise BadInputError(f"--format {one_line(unknown, 100) or ascii(unknown)}: write one of {', '.join(FORMATS)}")
    return names


def _read_runs(names: list[str], out: str) -> list[FinishedRun]:
    """Return the runs that have measurements, each once. Print a line for each other run and each unfinished run."""
    from optimizer.results.finished_run import read_run, remark, why_unfinished

    runs: dict[Path, FinishedRun] = {}
    for name in names:
        try:
            run = read_run(name, out)
        except BadInputError as error:
            print_message(str(error))
            continue
        if run.outcome is None or run.outcome.measurements == 0:
            cause = why_unfinished(run) or (run.outcome.no_recommendation_reason if run.outcome else "")
            print_message(f"{name}: nothing was measured{f': {cause}' if cause else ''}")
            continue
        if text := remark(run):
            print_message(f"{name}: {text}")
        runs[run.folder.path.resolve()] = run
    models = sorted({run.problem.model for run in runs.values()})
    if len(models) > 1:
        print_message(f"runs of different models ({', '.join(models)}): each has a section of its own")
    return list(runs.values())
