"""``tune runs``: list the runs in a folder of results, or delete some."""

from __future__ import annotations

import argparse
import contextlib
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from optimizer.cli.commands import add_run
from optimizer.cli.output import confirm_deletion, print_json
from optimizer.core.errors import BadInputError
from optimizer.core.safe_text import is_folder, one_line, quote, show_path
from optimizer.options.command_line import Parser, add_json, add_results
from optimizer.options.run_options import DEFAULTS
from optimizer.store.run_folder import ENDED
from optimizer.store.run_lookup import DELETE_FLAG, ListedRun, delete_run, find_deletable, list_runs

if TYPE_CHECKING:
    from rich.console import Console

BATCHES = "batches"  # the folder of results that holds batches
PIPED_WIDTH = 500  # columns of a table that is not printed on a terminal, so that each run is one line
DECLINED = 1
EPILOG = """\
A run is named by its folder or by <model>/<run>. All commands that take a RUN
also take a model, for its newest run, and latest, for the newest run of all:
tune verify latest, tune report dlrm, tune --resume latest.

The column result has the verdict of the run, or one of
  running      a process measures something for the run now
  killed       its process ended without a result; --resume continues it
  interrupted  it was stopped; --resume continues it
  failed       an error ended it; run.json has the reason
  left         other workers continue its shared study
  sweep        `tune sweep` measured it
  damaged      its record cannot be read

The measurements of `tune verify --fresh` are part of their run. The runs of a
batch are listed with --results results/batches/SUITE/BATCH, and those of all
batches of a suite with --results results/batches/SUITE.

exit codes: 0 done, 1 the deletion was declined, 2 bad input, 3 a run is in use
or cannot be deleted

examples:
  tune runs
  tune runs dlrm --json
  tune runs --delete dlrm/20261120-231154 dlrm/20261121-072139
"""


def main(argv: list[str]) -> int:
    """Run ``tune runs`` and return its exit code. Raises TuneError."""
    arguments = build_parser().read(argv)
    if arguments.delete is not None:
        return _delete(arguments)
    if arguments.yes:
        raise BadInputError(f"--yes: works only with {DELETE_FLAG}; give that too, or leave it out")
    if arguments.results != DEFAULTS.out and not is_folder(Path(arguments.results)):
        raise BadInputError(f"--results {quote(arguments.results)}: no such folder; give one with runs")
    runs = list_runs(arguments.results, arguments.model)
    if not runs:  # perhaps the folder of a model or of a batch
        folder = Path(arguments.results).absolute()
        with contextlib.suppress(BadInputError):
            runs = list_runs(show_path(folder.parent), folder.name)
    if arguments.json:
        print_json([run.document() for run in runs])
    elif runs:
        from rich.console import Console

        console = Console()
        _print_runs(console if console.is_terminal else Console(width=PIPED_WIDTH), runs)
    else:
        print(f"no runs in {one_line(arguments.results)}; `tune models` lists what can be tuned")
    batches = Path(arguments.results) / BATCHES
    if arguments.model is None and not arguments.json and is_folder(batches):
        print(f"batches are in {show_path(batches)}; --results {show_path(batches)}/SUITE lists their runs")
    return 0


def build_parser() -> Parser:
    """Return the parser of the command line."""
    parser = Parser(
        prog="tune runs",
        usage=f"[options] [MODEL | {DELETE_FLAG} RUN ...]",
        description="List the runs in a folder of results, the newest first, or delete some of them.",
        epilog=EPILOG,
    )
    parser.add_argument("model", metavar="MODEL", nargs="?", help="List only the runs of this model")
    text = "Delete these runs: folders, <model>/<run> in --results, or latest"
    add_run(parser, DELETE_FLAG, text=text, nargs="+")
    parser.add_argument("--yes", action="store_true", help="Delete without a question; needed without a terminal")
    add_results(parser)
    add_json(parser)
    return parser


def _print_runs(console: Console, runs: Sequence[ListedRun]) -> None:
    from rich.text import Text

    from optimizer.results import formatting
    from optimizer.results.terminal_output import plain_table, print_table

    table = plain_table("model", "run", "result", ">infer/s", "bound", ">size")
    for column in table.columns:
        column.no_wrap = True  # names can be copied
    for run in runs:
        throughput = run.throughput_infer_per_sec
        cells = (
            run.model,
            run.name,
            _result_text(run),
            "" if throughput is None else formatting.estimate(throughput, run.throughput_interval),
            (",\n" if console.is_terminal else ", ").join(run.bounds),
            formatting.size(run.size_bytes),
        )
        table.add_row(*map(Text, cells))
    print_table(console, table)
    for run in runs:
        if run.fault:
            print(run.fault)


def _result_text(run: ListedRun) -> str:
    """Return the verdict of a run that ended by itself, otherwise its status."""
    if run.kind == "sweep":
        return "sweep" if run.status == "done" else f"sweep, {run.status}"
    return run.verdict if run.status in ENDED and run.verdict else run.status


def _delete(arguments: argparse.Namespace) -> int:
    if arguments.model is not None:
        raise BadInputError(f"{quote(arguments.model)}: write the runs to delete after {DELETE_FLAG}, and no model")
    named_runs = [find_deletable(run, arguments.results) for run in arguments.delete]
    runs = list({run.folder.path.resolve(): run for run in named_runs}.values())
    question = f"delete {_folders_and_size(runs)}?"
    if not confirm_deletion(question, DELETE_FLAG, is_confirmed=arguments.yes):
        print("nothing was deleted")
        return DECLINED
    for run in runs:
        delete_run(run.folder)
        if not arguments.json:
            print(f"deleted {_folders_and_size([run])}")
    if arguments.json:
        print_json([run.document() for run in runs])
    return 0


def _folders_and_size(runs: Sequence[ListedRun]) -> str:
    """Return the folders of ``runs`` and their size."""
    from optimizer.results import formatting

    folders = ", ".join(show_path(run.folder.path) for run in runs)
    return f"{folders} ({formatting.size(sum(run.size_bytes for run in runs))})"
