"""The preview of a batch: its entries, and whether their time is enough for verdicts. Nothing is measured."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from rich.console import Console
from rich.text import Text

from optimizer.core.budget import CONFIRM_SHARE
from optimizer.core.errors import TuneError
from optimizer.core.safe_text import one_line
from optimizer.results import formatting
from optimizer.results.terminal_output import plain_table, print_indented, print_line, print_table
from optimizer.study.batch.batch_runner import search_seconds
from optimizer.study.batch.suite import Suite, SuiteEntry
from optimizer.study.run_preview import SERVER_MB, RunPreview, preview

VERDICT_SECONDS = 90.0  # typical time of the tests of one entry until a verdict; docs/batch.md names it


@dataclass(frozen=True)
class EntryPreview:
    """The preview of the run of an entry, or the ``error`` with which it would fail."""

    entry: SuiteEntry
    run: RunPreview | None
    error: TuneError | None


@dataclass(frozen=True)
class BatchPreview:
    """The preview of a batch that shares ``budget_seconds``."""

    suite: Suite
    budget_seconds: float
    entries: tuple[EntryPreview, ...]

    @property
    def share_seconds(self) -> float:
        """The equal share of the budget of each entry; a promising search gets more, and others then less."""
        return self.budget_seconds / len(self.entries)

    @property
    def test_seconds(self) -> float:
        """The part of that share for the tests on fresh servers."""
        return CONFIRM_SHARE * self.share_seconds

    @property
    def is_sufficient(self) -> bool:
        """Whether each entry has the time that a verdict typically needs."""
        return self.test_seconds >= VERDICT_SECONDS

    @property
    def sufficient_budget_seconds(self) -> float:
        """The smallest budget that is sufficient."""
        return len(self.entries) * VERDICT_SECONDS / CONFIRM_SHARE

    @property
    def exit_code(self) -> int:
        """The smallest exit code of the errors, so 2 for bad input; 0 without an error."""
        return min((entry.error.exit_code for entry in self.entries if entry.error), default=0)

    def document(self) -> dict[str, Any]:
        """Return the document of ``--dry-run --json``; ``run`` is that of ``tune --dry-run --json``."""
        return {
            "suite": self.suite.name,
            "budget_seconds": self.budget_seconds,
            "search_seconds": search_seconds(self.budget_seconds),
            "share_seconds": self.share_seconds,
            "test_seconds": self.test_seconds,
            "sufficient_for_verdicts": self.is_sufficient,
            "sufficient_budget_seconds": self.sufficient_budget_seconds,
            "entries": [
                {
                    "entry": one.entry.label,
                    "model": one.entry.options.model,
                    "sla": one.entry.sla,
                    "target": one.entry.options.target,
                    "error": str(one.error) if one.error else None,
                    "run": one.run.document() if one.run else None,
                }
                for one in self.entries
            ],
        }


def preview_batch(suite: Suite, budget_seconds: float, out: str, on_progress: Callable[[str], None]) -> BatchPreview:
    """Return the preview of a batch whose results would be in ``out``. ``on_progress`` is as in ``preview``."""
    share_seconds = budget_seconds / len(suite.entries)
    entries = []
    for entry in suite.entries:
        try:
            run = preview(replace(entry.options, budget_seconds=share_seconds, out=out), on_progress)
            entries.append(EntryPreview(entry, run, None))
        except TuneError as error:
            entries.append(EntryPreview(entry, None, error))
    return BatchPreview(suite, budget_seconds, tuple(entries))


def print_batch_preview(console: Console, batch: BatchPreview) -> None:
    """Print the preview of a batch for people."""
    runs = formatting.count(len(batch.entries), "run")
    print_line(
        console, f"{one_line(batch.suite.name)}: {runs} in {formatting.duration(batch.budget_seconds)}", "bold"
    )
    print_line(console)
    table = plain_table("model", "bound", "target", ">configurations")
    table.columns[1].no_wrap = True
    for one in batch.entries:
        bound, count = one.entry.sla, "cannot run"
        if one.run is not None:
            bound, count = formatting.bounds(one.run.task.problem.sla), f"{len(one.run.task.problem.space):,}"
        target = one.entry.target or one.entry.options.target
        cells = [one_line(cell) for cell in (one.entry.model, bound, target, count)]
        cells[1] = cells[1].replace(" and ", "\nand ")
        style = "red" if one.error else ""
        table.add_row(*(Text(cell, style, overflow="fold") for cell in cells))
    print_table(console, table)
    print_line(console)
    for label, text in (("budget", _budget_words(batch)), *_remarks(batch)):
        print_indented(console, f"{label}: {one_line(text)}", indent="  ")
    started = "A server was started to read the inputs" if _has_started(batch) else "No server was started"
    print_line(console, f"{started}, and nothing was measured.")


def _budget_words(batch: BatchPreview) -> str:
    """Return the share of each entry, and whether it is enough for a verdict."""
    share, tests, typical = map(formatting.duration, (batch.share_seconds, batch.test_seconds, VERDICT_SECONDS))
    text = f"an equal share is {share} for each run, of which {tests} are for tests on fresh servers"
    if batch.is_sufficient:
        return f"{text}: enough for the {typical} that a verdict typically takes"
    minutes = math.ceil(batch.sufficient_budget_seconds / 60)
    typical = f"less than the {typical} that a verdict typically takes"
    return f"{text}: {typical}, so runs may stay UNDECIDED; --budget {minutes}m is enough"


def _has_started(batch: BatchPreview) -> bool:
    return any(one.run.started_server for one in batch.entries if one.run)


def _remarks(batch: BatchPreview) -> list[tuple[str, str]]:
    """Return the errors, and each note once, with the entry that it is about unless it is about all."""
    previews = [(one.entry.label, one.run) for one in batch.entries if one.run]
    remarks = [(one.entry.label, f"cannot run: {one.error}") for one in batch.entries if one.error]
    for note in dict.fromkeys(note for _, run in previews for note in run.notes):
        labels = [label for label, run in previews if note in run.notes]
        remarks += [("note", note)] if len(labels) == len(previews) else [(label, note) for label in labels]
    if not all(run.has_server for _, run in previews):
        remarks.append(("before", f"the download of the server ({SERVER_MB} MB, once)"))
    return remarks
