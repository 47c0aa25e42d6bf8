"""``tune batch SUITE.yaml``: tune several models within one budget and compare with an earlier batch."""

from __future__ import annotations

import argparse
import shlex
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from objectives.sla import Verdict
from optimizer.cli.exit_codes import EXIT_CODES
from optimizer.cli.output import INTERRUPTED, open_console, print_json, print_message, progress_on_terminal
from optimizer.core.budget import RunMode
from optimizer.core.errors import BadInputError, EnvironmentFault
from optimizer.core.safe_text import is_file, named_file, one_line, quote, show_path
from optimizer.options.command_line import Parser, add_json
from optimizer.options.values import parse_budget_seconds, parse_optional, parse_regression
from optimizer.store.run_folder import BATCH_FILE, RunFolder
from optimizer.store.run_lookup import BATCHES, runs_in
from optimizer.study.batch.record import (
    RECORD,
    BatchFolder,
    BatchRecord,
    EntryRecord,
    StoredBatch,
    new_record,
    read_record,
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
AGAINST = "--against"
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
  tune batch nightly.yaml --dry-run
  tune batch nightly.yaml --budget 1h --fail-on-regression 5%
  tune batch nightly.yaml --resume
"""


def main(argv: list[str]) -> int:
    """Run ``tune batch`` and return its exit code. Raises TuneError."""
    arguments = build_parser().read(argv)
    budget = parse_optional("--budget", arguments.budget, parse_budget_seconds)
    regression = parse_optional("--fail-on-regression", arguments.fail_on_regression, parse_regression)
    suite = read_suite(named_file("suite", arguments.suite, "a YAML file such as the one in docs/batch.md"))
    against = None if arguments.against is None else _find_earlier(arguments.against, arguments.out, suite)
    if arguments.dry_run:
        if arguments.resume is not None:
            raise BadInputError("--dry-run: shows a new batch, which --resume does not begin; leave one out")
        return _preview(suite, budget or suite.budget_seconds, arguments.out, as_json=arguments.json)
    folder, record = _open_batch(suite, arguments.resume, arguments.out, budget)
    record = replace(record, regression_share=regression)
    from optimizer.results.formatting import count
    from optimizer.study.batch.batch_runner import BatchRunner
    from optimizer.study.batch.finished_batch import finish
    from optimizer.study.batch.reports import print_batch

    progress = progress_on_terminal(with_time=True)
    with folder.locked():
        batch = BatchRunner(suite, folder, record, _run_entry(progress), progress.on_progress).run()
        batch = finish(folder, batch, against)
    if arguments.json:
        print_json(RECORD.dump_python(batch, mode="json"))
    else:
        print_batch(open_console(), batch, folder)
        if batch.status == "interrupted":
            print(f"continue  tune batch {arguments.suite} --resume {folder.path}")
    failed = sum(entry.state == "failed" for entry in batch.entries)
    if failed:
        again = shlex.join(["tune", "batch", arguments.suite, "--resume", str(folder.path)])
        reasons = f"{folder.path}/batch.json has the reasons, and `{again}` repeats what failed"
        print_message(f"{failed} of {count(len(batch.entries), 'run')} failed; {reasons}")
    return exit_code(batch)


def _preview(suite: Suite, budget_seconds: float, out: str, *, as_json: bool) -> int:
    """Print the preview of a batch and return the exit code: 2 or 3 if an entry cannot run."""
    from optimizer.study.batch.preview import preview_batch, print_batch_preview

    shown = preview_batch(suite, budget_seconds, out, progress_on_terminal(with_time=True).on_progress)
    if as_json:
        print_json(shown.document())
    else:
        print_batch_preview(open_console(), shown)
    return shown.exit_code


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
        AGAINST,
        metavar="BATCH",
        help="Compare with this batch: its folder or batch.json, or a folder of batches for the newest one (default: "
        "the last finished one of the suite)",
    )
    parser.add_argument(
        "--fail-on-regression",
        metavar="SHARE",
        help="Return exit code 1 if the throughput, or another first objective, of a run got worse by this share: "
        "5%%",
    )
    parser.add_argument(
        "--dry-run",
        action="store_true",
        help="Check the suite, show each run and whether the budget is enough for verdicts, and measure nothing",
    )
    parser.add_argument("--out", default="results", metavar="DIR", help="Folder of the results (default: results)")
    for flag in ("--resume", AGAINST):
        parser.set_completer(flag, _complete_batch)
    add_json(parser)
    return parser


def _complete_batch(prefix: str, parsed_args: argparse.Namespace, **_: object) -> list[str]:
    """Return the words that BATCH may be: the folders of batches in ``--out``, and other folders."""
    from argcomplete.completers import DirectoriesCompleter

    batches = runs_in(f"{parsed_args.out}/{BATCHES}", record=BATCH_FILE)
    return [*(f"{batch.path}/" for batch in batches), *DirectoriesCompleter()(prefix)]


def _open_batch(suite: Suite, resume: str | None, out: str, budget: float | None) -> tuple[BatchFolder, BatchRecord]:
    """Return a new batch, or the one to continue. Raises BadInputError."""
    if resume is None:
        folder = BatchFolder.create(out, suite.name)
        return folder, new_record(suite, budget or suite.budget_seconds)
    if resume == NEWEST:
        stored = BatchFolder.readable_in(Path(out) / BATCHES / suite.name)
        unfinished = [batch for batch in stored if batch.record.status != "finished"]
        if not unfinished:
            raise BadInputError(
                f"--resume: no unfinished batch of {suite.name} in {one_line(out)}; leave --resume out"
            )
        folder, record = BatchFolder(unfinished[0].path.parent), unfinished[0].record
    else:
        folder = BatchFolder.find(resume, out, "--resume")
        record = folder.read()
    for path in (folder.path, *(folder.path / entry.folder for entry in record.entries)):
        RunFolder(path).refuse_links()
    return folder, resumed_record(record, suite, budget)


def _find_earlier(against: str, out: str, suite: Suite) -> StoredBatch:
    """Return the batch that ``--against`` names. Raises BadInputError if it is no batch of ``suite``."""
    path = Path(against)
    if not is_file(path):
        path = BatchFolder.find(against, out, AGAINST).record
    try:
        earlier = read_record(path)
    except BadInputError as error:
        raise BadInputError(f"{AGAINST}: give a batch.json, or the folder of a batch; {error}") from None
    if not {entry.label for entry in earlier.entries} & {entry.label for entry in suite.entries}:
        raise BadInputError(
            f"{AGAINST} {quote(against)}: is a batch of {one_line(earlier.suite)} and has no entry of "
            f"{show_path(suite.path)}; give a batch of this suite"
        )
    return StoredBatch(path, earlier)


def _run_entry(progress: Progress) -> RunEntry:
    from optimizer.options.run_options import RunOptions
    from optimizer.study.tuning_run import tune

    def run_slice(options: RunOptions, folder: RunFolder, mode: RunMode, seconds: float) -> str:
        is_last = mode is RunMode.CONFIRM  # only the last session of a run writes its page
        with tune(options, folder, progress, mode, report=is_last, session_seconds=seconds) as result:
            return result.status

    return run_slice
