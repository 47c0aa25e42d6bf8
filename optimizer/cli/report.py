"""``tune report RUN…``: write runs as an HTML page, as Markdown, as tables and as plots."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import TYPE_CHECKING

from optimizer.cli.commands import add_run
from optimizer.cli.output import busy, print_message
from optimizer.core.errors import BadInputError
from optimizer.core.safe_text import one_line, quote, show_path
from optimizer.options.command_line import Parser, add_results
from optimizer.store.run_lookup import find_recorded, find_run

if TYPE_CHECKING:
    from optimizer.results.finished_run import FinishedRun
    from optimizer.study.batch.record import BatchFolder


EPILOG = """\
Several runs are compared on one page. A batch is given by its folder, by
<suite>/<batch>, or by its suite for the newest one: batch.json, index.html,
index.md and junit.xml in its folder are written as its runs are now, for
example after `tune verify` of one. With --out, only the formats are written.

exit codes: 0 written, 2 bad input, such as runs without measurements

examples:
  tune report latest
  tune report --format markdown,csv results/dlrm/20261120-231154
  tune report nightly/20261123-010000
  tune report --out comparison dlrm/20261121-072139 dlrm/20261122-091502
"""
FORMATS = ("html", "markdown", "csv", "parquet", "png", "svg")
MAX_RUNS = 200


def build_parser() -> Parser:
    """Return the parser of the command line."""
    parser = Parser(
        prog="tune report",
        usage="[options] RUN [RUN ...] | BATCH",
        description="Write runs or a batch as one HTML page, as Markdown, as tables and as plots.",
        epilog=EPILOG,
    )
    add_run(parser, "runs", nargs="+", batches=True)
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
    if (batch := _find_batch(arguments.runs, arguments.results)) is not None:
        return _report_batch(batch, formats, arguments.out)
    runs = _read_runs(arguments.runs, arguments.results)
    if not runs:
        return BadInputError.exit_code
    models = sorted({run.problem.model for run in runs})
    if len(models) > 1:
        print_message(f"note: runs of different models ({', '.join(models)}): each has a section of its own")
    from optimizer.results.report.writer import write

    output = Path(arguments.out) if arguments.out else runs[0].folder.path if len(runs) == 1 else Path()
    with busy(f"writing {', '.join(formats)}"):
        paths = write(runs, formats, output)
    for path in paths:
        print(show_path(path))
    return 0


def _find_batch(names: list[str], results: str) -> BatchFolder | None:
    """Return the batch that the only one of ``names`` stands for; None for runs, which take precedence.

    Raises BadInputError for a batch among several names.
    """
    from optimizer.study.batch.record import BatchFolder

    for name in names:
        if find_recorded(name, results) is None and (batch := BatchFolder.named(name, results)) is not None:
            if len(names) > 1:
                raise BadInputError(
                    f"{quote(name)}: is a batch, which has a page of its own; give it alone, or its runs: "
                    f"{show_path(batch.path)}/*/"
                )
            return batch
    return None


def _report_batch(folder: BatchFolder, formats: list[str], out: str | None) -> int:
    """Write a batch as its runs are now, and return the exit code. Raises TuneError.

    Without ``out`` it is written to its folder, with its record. The tables and plots are those of its runs.
    """
    from optimizer.results.report import writer
    from optimizer.study.batch.finished_batch import refresh
    from optimizer.study.batch.reports import html, markdown, write_batch

    output = folder.path if out is None else Path(out)
    paths = writer.file_paths(formats, output, "index")
    with contextlib.nullcontext() if out else folder.locked():
        batch = refresh(folder, print_message)
        if out is None:
            write_batch(folder, batch)
            written = [folder.record, folder.index, folder.markdown, folder.junit]
        else:
            written = []
            if "html" in formats:
                written.append(writer.write_file(paths["html"], html(folder, batch, paths["html"].parent)))
            if "markdown" in formats:
                written.append(writer.write_file(paths["markdown"], markdown(batch)))
    if others := [name for name in formats if name not in ("html", "markdown")]:
        runs = _read_runs([str(folder.path / entry.folder) for entry in batch.entries], "")
        with busy(f"writing {', '.join(others)}"):
            written += writer.write(runs, others, output) if runs else []
    for path in written:
        print(show_path(path))
    return 0 if written else BadInputError.exit_code


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
            run = read_run(find_run(name, out, "run", or_batch=True).path)
        except BadInputError as error:
            print_message(str(error))
            continue
        if run.outcome is None or run.outcome.measurements == 0:
            cause = why_unfinished(run) or (run.outcome.no_recommendation_reason if run.outcome else "")
            print_message(f"{name}: nothing was measured{f': {cause}' if cause else ''}")
            continue
        if text := remark(run):
            print_message(f"note: {name}: {text}")
        runs[run.folder.path.resolve()] = run
    return list(runs.values())
