"""``tune batch SUITE.yaml``: many runs, one budget, one index, and the difference to the batch before."""

from __future__ import annotations

import argparse
import contextlib
import json
import time
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from optimizer.arguments.values import Parser, budget_ms, parsed, with_negative_values
from optimizer.batches.folder import BatchFolder
from optimizer.batches.record import RECORD, BatchRecord, begun, gone_on
from optimizer.batches.suite import Suite, read_suite
from optimizer.errors import BadInputError
from optimizer.untrusted import one_line

if TYPE_CHECKING:
    from collections.abc import Callable

    from rich.console import Console

    from optimizer.batches.batch import GoOn

NEWEST = ""  # of --resume without a value
INTERRUPTED = 130
EPILOG = """\
SUITE.yaml lists models, SLAs, targets and options of `tune run`: docs/batch.md. Each
combination is a run in results/batches/SUITE/BATCH/, beside index.html, junit.xml and
batch.json.

exit codes: 0 each run found a configuration, 1 one found none or regressed, 2 bad
input, 3 one failed by a fault (the others went on), 130 interrupted

examples:
  tune batch nightly.yaml --budget 1h --fail-on-regression 5%
  tune batch nightly.yaml --resume
"""


def main(arguments: list[str]) -> int:
    """Raises TuneError."""
    given = _parser().parse_args(with_negative_values(arguments))
    budget = None if given.budget is None else parsed("--budget", given.budget, budget_ms) / 1000
    regression = (
        None if given.fail_on_regression is None else parsed("--fail-on-regression", given.fail_on_regression, _share)
    )
    suite = read_suite(Path(given.suite))
    before = None if given.against is None else BatchFolder.find(given.against, "--against")
    if before is not None:
        before.read()
    folder, record = _opened(suite, given.resume, given.out, budget)
    from rich.console import Console

    from optimizer.batches.batch import Batch
    from optimizer.batches.console import print_batch

    terminal = Console(stderr=True)
    say = _sayer(terminal)
    with folder.locked():
        batch = Batch(suite, folder, record, _runs_on(terminal), say).run()
        batch = _finished(batch, folder, before or _newest_before(folder, given.out, suite), regression)
    if given.json:
        print(json.dumps(RECORD.dump_python(batch, mode="json"), indent=2))
    else:
        print_batch(Console(), batch, folder)
        if batch.status == "interrupted":
            print(f"go on   tune batch {given.suite} --resume {folder.path}")
    return exit_code(batch)


def exit_code(batch: BatchRecord) -> int:
    if batch.status == "interrupted":
        return INTERRUPTED
    if any(entry.state == "failed" for entry in batch.entries):
        return 3
    return 1 if any(entry.state == "none" or entry.regressed for entry in batch.entries) else 0


def _parser() -> argparse.ArgumentParser:
    parser = Parser(
        prog="tune batch",
        usage="tune batch SUITE.yaml [options]",
        description="Tune many models, each for its SLAs on its targets, within one budget.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.page = "tune batch --help"
    parser.add_argument("suite", metavar="SUITE.yaml", help="what is tuned")
    parser.add_argument("--budget", metavar="TIME", help="of all runs together: 20m, 2h (the suite's; 4m a run)")
    parser.add_argument(
        "--resume", nargs="?", const=NEWEST, metavar="BATCH", help="go on with this batch; the newest unfinished one"
    )
    parser.add_argument("--against", metavar="BATCH", help="compare with this batch (the suite's last finished one)")
    parser.add_argument("--fail-on-regression", metavar="SHARE", help="exit code 1 where a run lost so much: 5%%")
    parser.add_argument("--out", default="results", metavar="DIR", help="folder of the results (results)")
    parser.add_argument("--json", action="store_true", help="one JSON document on standard output")
    return parser


def _share(text: str) -> float:
    try:
        share = float(text.removesuffix("%")) / (100 if text.endswith("%") else 1)
    except ValueError:
        share = -1.0
    if not 0 < share < 1:
        raise ValueError("write a share such as 5%")
    return share


def _opened(suite: Suite, resume: str | None, out: str, budget: float | None) -> tuple[BatchFolder, BatchRecord]:
    """A new batch, or the one to go on with."""
    if resume is None:
        folder = BatchFolder.create(out, suite.name)
        return folder, begun(suite, budget or suite.budget_seconds)
    if resume == NEWEST:
        unfinished = [one for one in _readable(out, suite) if one[1].status != "finished"]
        if not unfinished:
            raise BadInputError(
                f"--resume: no unfinished batch of {suite.name} in {one_line(out)}; leave --resume out"
            )
        folder, record = unfinished[0]
    else:
        folder = BatchFolder.find(resume, "--resume")
        record = folder.read()
    return folder, gone_on(record, suite, budget)


def _readable(out: str, suite: Suite) -> list[tuple[BatchFolder, BatchRecord]]:
    found = []
    for folder in BatchFolder.all_of(out, suite.name):
        with contextlib.suppress(BadInputError):
            found.append((folder, folder.read()))
    return found


def _newest_before(folder: BatchFolder, out: str, suite: Suite) -> BatchFolder | None:
    began = folder.read().started
    earlier = [
        one
        for one, record in _readable(out, suite)
        if record.status == "finished" and record.started < began and one.path.resolve() != folder.path.resolve()
    ]
    return earlier[0] if earlier else None


def _finished(
    batch: BatchRecord, folder: BatchFolder, before: BatchFolder | None, regression: float | None
) -> BatchRecord:
    """With the difference, and all that a batch leaves written."""
    from optimizer.batches.difference import compared
    from optimizer.batches.index import write_index
    from optimizer.batches.junit import junit
    from optimizer.store.disk import write_whole

    if before is not None:
        batch = replace(compared(batch, before.read(), regression), previous=str(before.path))
    folder.write(batch)
    write_index(folder, batch)
    write_whole(folder.junit, junit(batch))
    return batch


def _sayer(terminal: Console) -> Callable[[str], None]:
    """On a terminal above the display of the run; else a plain line with the time."""

    def say(line: str) -> None:
        stamp = "" if terminal.is_terminal else f"{time.strftime('%H:%M:%S')} "
        for part in line.splitlines():
            terminal.print(f"{stamp}{one_line(part)}", highlight=False, markup=False, soft_wrap=True)

    return say


def _runs_on(terminal: Console) -> GoOn:
    from optimizer.commands.terminal import shown_on
    from optimizer.options import RunOptions
    from optimizer.session import tune
    from optimizer.store.run_folder import RunFolder

    _, watch = shown_on(terminal)

    def go_on(options: RunOptions, folder: RunFolder, confirm_share: float) -> str:
        return tune(options, folder, _sayer(terminal), watch, confirm_share, report=confirm_share > 0).status

    return go_on
