"""``tune runs``: list the runs and batches in a folder of results, or delete some."""

from __future__ import annotations

import argparse
import contextlib
import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from optimizer.cli.commands import add_run
from optimizer.cli.output import confirm_deletion, print_json
from optimizer.core.errors import BadInputError
from optimizer.core.safe_text import is_file, is_folder, one_line, quote, show_path
from optimizer.options.command_line import Parser, add_json, add_results
from optimizer.options.run_options import DEFAULTS
from optimizer.store.run_folder import ENDED
from optimizer.store.run_lookup import (
    BATCHES,
    DELETE_FLAG,
    ListedRun,
    delete_run,
    describe_run,
    find_deletable,
    list_batches,
    list_runs,
)

if TYPE_CHECKING:
    from rich.console import Console

    from optimizer.study.batch.record import BatchRecord, EntryRecord

PIPED_WIDTH = 500  # columns of a table that is not printed on a terminal, so that each run is one line
DECLINED = 1
EPILOG = """\
Commands take a RUN as its folder, as <model>/<run>, as a model for its newest
run, or as latest for the newest run of all.

The column result has the verdict of the run, or one of
  running      a process measures something for the run now
  killed       its process ended without a result; --resume continues it
  interrupted  it was stopped; --resume continues it
  failed       an error ended it; run.json has the reason
  left         other workers continue its shared study
  sweep        `tune sweep` measured it
  damaged      its record cannot be read

Batches are listed below the runs. --results results/batches/SUITE/BATCH lists
the runs of a batch, and --results results/batches/SUITE those of all batches
of a suite.

exit codes: 0 done, 1 the deletion was declined, 2 bad input, 3 a run is in use
or cannot be deleted

examples:
  tune runs
  tune runs dlrm --json
  tune runs --delete dlrm/20261120-231154 dlrm/20261121-072139
  tune runs --delete nightly/20261123-010000
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
    batches = list_batches(arguments.results) if arguments.model is None else []
    if arguments.json:
        print_json([*(run.document() for run in runs), *map(_batch_document, batches)])
    elif runs or batches:
        from rich.console import Console

        console = Console()
        console = console if console.is_terminal else Console(width=PIPED_WIDTH)
        if runs:
            _print_runs(console, runs, Path(arguments.results))
        if runs and batches:
            print()
        if batches:
            _print_batches(console, batches)
    else:
        print(f"no runs in {one_line(arguments.results)}; `tune models` lists what can be tuned")
    if batches and not arguments.json:
        suites = show_path(Path(arguments.results) / BATCHES)
        print(f"batches are in {suites}; --results {suites}/SUITE lists their runs")
    return 0


def build_parser() -> Parser:
    """Return the parser of the command line."""
    parser = Parser(
        prog="tune runs",
        usage=f"[options] [MODEL | {DELETE_FLAG} RUN ...]",
        description="List the runs and batches in a folder of results, or delete some of them.",
        epilog=EPILOG,
    )
    parser.add_argument("model", metavar="MODEL", nargs="?", help="List only the runs of this model")
    text = "Delete these runs and batches: folders, <model>/<run> or <suite>/<batch> in --results, or latest"
    add_run(parser, DELETE_FLAG, text=text, nargs="+", batches=True)
    parser.add_argument("--yes", action="store_true", help="Delete without a question; needed without a terminal")
    add_results(parser)
    add_json(parser)
    return parser


def _print_runs(console: Console, runs: Sequence[ListedRun], results: Path) -> None:
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
            one_line(os.path.relpath(run.folder.path, results)) if run.batch else run.name,
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


def _print_batches(console: Console, batches: Sequence[ListedRun]) -> None:
    from rich.text import Text

    from optimizer.results import formatting
    from optimizer.results.terminal_output import plain_table, print_table

    table = plain_table("suite", "batch", "result", ">size")
    for column in table.columns[:2]:
        column.no_wrap = True  # names can be copied
    for batch in batches:
        result = batch.status
        with contextlib.suppress(BadInputError):
            if result not in ("running", "killed"):
                result = _read_batch(batch).result
        table.add_row(*map(Text, (batch.model, batch.name, result, formatting.size(batch.size_bytes))))
    print_table(console, table)
    for batch in batches:
        if batch.fault:
            print(batch.fault)


def _read_batch(batch: ListedRun) -> BatchRecord:
    from optimizer.study.batch.record import BatchFolder

    return BatchFolder(batch.folder.path).read()


def _batch_document(batch: ListedRun) -> dict[str, object]:
    """Return the entry of ``--json`` for a batch, with those of its runs as ``entries``."""
    document = {**batch.document(), "suite": batch.model}
    try:
        record = _read_batch(batch)
    except BadInputError as error:
        return {**document, "status": "damaged", "fault": str(error), "entries": []}
    entries = [_entry_document(batch, entry) for entry in record.entries]
    return {**document, "result": record.result, "entries": entries}


def _entry_document(batch: ListedRun, entry: EntryRecord) -> dict[str, object]:
    """Return the entry of ``--json`` for a run of a batch; one that failed has its reason as ``fault``."""
    run = describe_run(batch.folder.path / entry.folder)
    document = {"entry": entry.label, **run.document(), "model": run.model or entry.model}
    if entry.state == "failed" or (run.fault and not is_file(run.folder.info)):
        document |= {"status": entry.state, "fault": entry.reason or None}
    return document


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
