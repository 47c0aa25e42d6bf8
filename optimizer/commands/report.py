"""``tune report RUN…``: runs as a page, as Markdown, as tables and as plots."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

from optimizer.arguments.values import Parser
from optimizer.errors import BadInputError
from optimizer.untrusted import one_line

if TYPE_CHECKING:
    from optimizer.store.finished import FinishedRun

FORMATS = ("html", "markdown", "csv", "parquet", "png", "svg")
NOTHING = 2  # could be shown
MOST_RUNS = 200


def main(arguments: list[str]) -> int:
    """Exit code 0 where any of the runs could be shown; what could not is told in a line each."""
    parser = Parser(prog="tune report", description="Runs as one HTML page, as Markdown, as tables and as plots.")
    parser.page = "tune report --help"
    parser.add_argument("runs", metavar="RUN", nargs="+", help="a run's folder, or <model>/<run> in --out")
    parser.add_argument(
        "--format",
        action="append",
        metavar="FORMAT",
        help=f"{', '.join(FORMATS)}; several separated by commas (default: html)",
    )
    parser.add_argument(
        "--output", metavar="DIR|FILE", help="default: the run's folder; of several runs, the current folder"
    )
    parser.add_argument("--out", default="results", metavar="DIR", help="the results folder (default: results)")
    given = parser.parse_args(arguments)
    formats = _formats(given.format or ["html"])
    if len(given.runs) > MOST_RUNS:
        raise BadInputError(f"{len(given.runs):,} runs are too many for one page; give up to {MOST_RUNS}")
    runs = _readable(given.runs, given.out)
    if not runs:
        return NOTHING
    from optimizer.pages.write import write

    output = Path(given.output) if given.output else runs[0].folder.path if len(runs) == 1 else Path()
    for path in write(runs, formats, output):
        print(one_line(str(path)))
    return 0


def _formats(texts: list[str]) -> list[str]:
    names = [name.strip() for text in texts for name in text.split(",")]
    unknown = next((name for name in names if name not in FORMATS), None)
    if unknown is not None:
        raise BadInputError(f"--format {one_line(unknown, 100) or ascii(unknown)}: write one of {', '.join(FORMATS)}")
    return names


def _readable(names: list[str], out: str) -> list[FinishedRun]:
    """The runs that measured something, each once; of the others, and of those that did not end, a line."""
    from optimizer.pages.content import remark
    from optimizer.store.finished import read_run

    found: dict[Path, FinishedRun] = {}
    for name in names:
        try:
            run = read_run(name, out)
        except BadInputError as error:
            _say(str(error))
            continue
        if run.outcome is None or run.outcome.measurements == 0:
            _say(f"{name}: nothing was measured: {run.info.get('reason') or run.status}")
            continue
        if told := remark(run):
            _say(f"{name}: {told}")
        found[run.folder.path.resolve()] = run
    models = sorted({run.problem.model for run in found.values()})
    if len(models) > 1:
        _say(f"runs of different models ({', '.join(models)}): each is told by itself")
    return list(found.values())


def _say(line: str) -> None:
    print(f"tune: {one_line(line, 600)}", file=sys.stderr)
