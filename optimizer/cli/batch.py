"""``tune batch SUITE.yaml``: tune several models within one budget and compare with an earlier batch."""

from __future__ import annotations

import argparse
import contextlib
import shlex
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from objectives.sla import Verdict
from optimizer.cli.exit_codes import EXIT_CODES
from optimizer.cli.output import INTERRUPTED, fail, print_json, progress_on_terminal
from optimizer.core.budget import RunMode
from optimizer.core.errors import BadInputError, EnvironmentFault
from optimizer.core.safe_text import named_file, one_line
from optimizer.options.command_line import Parser, add_json
from optimizer.options.values import parse_budget_seconds, parse_optional, parse_regression
from optimizer.store.run_folder import RunFolder
from optimizer.store.run_lookup import runs_in
from optimizer.study.batch.record import (
    FILE,
    RECORD,
    BatchFolder,
    BatchRecord,
    EntryRecord,
    new_record,
    resumed_record,
)
from optimizer.study.batch.suite import Suite, read_suite

if TYPE_CHECKING:
    from optimizer.results.progress_observers import Progress
    from optimizer.study.batch.batch_runner import RunEntry


WORST_FIRST = (
    EnvironmentFault.exit_code,
    *(EXIT_CODES[verdict] for verdict in (Verdict.FAIL, Verdict.UNDECIDED, Verdict.PASS)),
)
NEWEST = ""  # the value of --resume without a batch
EPILOG = """\
SUITE.yaml lists models, SLAs, targets and options of `tune run` (see
docs/batch.md). Each combination is a run in results/batches/SUITE/BATCH/. That
folder also has index.html, index.md, junit.xml and batch.json.

exit codes: 0 each run ended with PASS, 1 a run found no configuration that
meets its SLA, or regressed, 2 bad input, 3 a run failed (the others were
completed), 4 a run is UNDECIDED, 130 interrupted. If several apply, it is the
first of 130, 3, 1 and 4.

examples:
  tune batch nightly.yaml --budget 1h --fail-on-regression 5%
  tune batch nightly.yaml --resume
"""


def main(argv: list[str]) -> int:
    """Run ``tune batch`` and return its exit code. Raises TuneError."""
    arguments = build_parser().read(argv)
    budget = parse_optional("--budget", arguments.budget, parse_budget_seconds)
    regression = parse_optional("--fail-on-regression", arguments.fail_on_regression, parse_regression)
    suite = read_suite(named_file("suite", arguments.suite, "a YAML file such as the one in docs/batch.md"))
    previous = None if arguments.against is None else BatchFolder.find(arguments.against, "--against")
    if previous is not None:
        previous.read()
    folder, record = _open_batch(suite, arguments.resume, arguments.out, budget)
    from rich.console import Console

    from optimizer.results.formatting import count
    from optimizer.study.batch.batch_runner import BatchRunner
    from optimizer.study.batch.reports import print_batch

    progress = progress_on_terminal(with_time=True)
    with folder.locked():
        batch = BatchRunner(suite, folder, record, _run_entry(progress), progress.on_progress).run()
        earlier = [previous] if previous else _earlier_batches(folder, arguments.out, suite)
        batch = _finish(batch, folder, earlier, regression)
    if arguments.json:
        print_json(RECORD.dump_python(batch, mode="json"))
    else:
        print_batch(Console(), batch, folder)
        if batch.status == "interrupted":
            print(f"continue  tune batch {arguments.suite} --resume {folder.path}")
    failed = sum(entry.state == "failed" for entry in batch.entries)
    if failed:
        again = shlex.join(["tune", "batch", arguments.suite, "--resume", str(folder.path)])
        reasons = f"{folder.path}/batch.json has the reasons, and `{again}` repeats what failed"
        fail(f"{failed} of {count(len(batch.entries), 'run')} failed; {reasons}", 0)
    return exit_code(batch)


def exit_code(batch: BatchRecord) -> int:
    """Return the exit code of a batch: the worst of its entries."""
    if batch.status == "interrupted":
        return INTERRUPTED
    codes = {_entry_exit_code(entry) for entry in batch.entries}
    return next(code for code in WORST_FIRST if code in codes)


def _entry_exit_code(entry: EntryRecord) -> int:
    if entry.state == "failed" or not entry.is_done:
        return EnvironmentFault.exit_code
    if entry.has_missed or entry.regressed:
        return EXIT_CODES[Verdict.FAIL]
    return EXIT_CODES[Verdict.UNDECIDED if entry.is_undecided else Verdict.PASS]


def build_parser() -> Parser:
    """Return the parser of the command line."""
    parser = Parser(
        prog="tune batch",
        usage="SUITE.yaml [options]",
        description="Tune several models for their SLAs and targets within one budget.",
        epilog=EPILOG,
    )
    parser.add_argument("suite", metavar="SUITE.yaml", help="The runs of the batch")
    parser.add_argument(
        "--budget",
        metavar="TIME",
        help="Wall time of all runs together: 20m, 2h (default: that of the suite, else 3m per run)",
    )
    parser.add_argument(
        "--resume",
        nargs="?",
        const=NEWEST,
        metavar="BATCH",
        help="Continue this batch (default: the newest unfinished one)",
    )
    parser.add_argument(
        "--against", metavar="BATCH", help="Compare with this batch (default: the last finished one of the suite)"
    )
    parser.add_argument(
        "--fail-on-regression",
        metavar="SHARE",
        help="Return exit code 1 if the throughput of a run fell by this share: 5%%",
    )
    parser.add_argument("--out", default="results", metavar="DIR", help="Folder of the results (default: results)")
    for flag in ("--resume", "--against"):
        parser.set_completer(flag, _complete_batch)
    add_json(parser)
    return parser


def _complete_batch(prefix: str, parsed_args: argparse.Namespace, **_: object) -> list[str]:
    """Return the words that BATCH may be: the folders of batches in ``--out``, and other folders."""
    from argcomplete.completers import DirectoriesCompleter

    batches = runs_in(f"{parsed_args.out}/batches", record=FILE)
    return [*(f"{batch.path}/" for batch in batches), *DirectoriesCompleter()(prefix)]


def _open_batch(suite: Suite, resume: str | None, out: str, budget: float | None) -> tuple[BatchFolder, BatchRecord]:
    """Return a new batch, or the one to continue. Raises BadInputError."""
    if resume is None:
        folder = BatchFolder.create(out, suite.name)
        return folder, new_record(suite, budget or suite.budget_seconds)
    if resume == NEWEST:
        unfinished = [batch for batch in _readable_batches(out, suite) if batch[1].status != "finished"]
        if not unfinished:
            raise BadInputError(
                f"--resume: no unfinished batch of {suite.name} in {one_line(out)}; leave --resume out"
            )
        folder, record = unfinished[0]
    else:
        folder = BatchFolder.find(resume, "--resume")
        record = folder.read()
    for path in (folder.path, *(folder.path / entry.folder for entry in record.entries)):
        RunFolder(path).refuse_links()
    return folder, resumed_record(record, suite, budget)


def _readable_batches(out: str, suite: Suite) -> list[tuple[BatchFolder, BatchRecord]]:
    batches = []
    for folder in BatchFolder.all_of(out, suite.name):
        with contextlib.suppress(BadInputError):
            batches.append((folder, folder.read()))
    return batches


def _earlier_batches(folder: BatchFolder, out: str, suite: Suite) -> list[BatchFolder]:
    """Return the finished batches of ``suite`` that started before the one in ``folder``, the newest first."""
    began = folder.read().started
    finished = ((other, record) for other, record in _readable_batches(out, suite) if record.status == "finished")
    return [other for other, record in finished if record.started < began]


def _finish(
    batch: BatchRecord, folder: BatchFolder, earlier: Sequence[BatchFolder], regression: float | None
) -> BatchRecord:
    """Return the batch with the comparison, and write its files."""
    from optimizer.core.files import write_atomically
    from optimizer.study.batch.changes import compare_batches
    from optimizer.study.batch.reports import junit, markdown, write_index

    if earlier:
        compared = compare_batches(batch, [other.read() for other in earlier], regression)
        batch = replace(compared, previous=str(earlier[0].path))
    folder.write(batch)
    write_index(folder, batch)
    write_atomically(folder.markdown, markdown(batch))
    write_atomically(folder.junit, junit(batch))
    return batch


def _run_entry(progress: Progress) -> RunEntry:
    from optimizer.options.run_options import RunOptions
    from optimizer.study.tuning_run import tune

    def run_slice(options: RunOptions, folder: RunFolder, mode: RunMode, seconds: float) -> str:
        is_last = mode is RunMode.CONFIRM  # only the last session of a run writes its page
        with tune(options, folder, progress, mode, report=is_last, session_seconds=seconds) as result:
            return result.status

    return run_slice
