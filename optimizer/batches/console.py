"""A batch on the terminal: a table of its entries, what is wrong with them, and the difference to the one before."""

from __future__ import annotations

from rich.console import Console
from rich.text import Text

from optimizer.batches.folder import BatchFolder
from optimizer.batches.record import BatchRecord, EntryRecord
from optimizer.batches.show import change_words, figure_words, state_words, title, totals
from optimizer.report.plain_tables import plain_table, print_table
from optimizer.untrusted import one_line

STYLES = {"found": "", "none": "red", "failed": "red"}


def print_batch(console: Console, batch: BatchRecord, folder: BatchFolder) -> None:
    _say(console, title(batch), "bold")
    _say(console, totals(batch))
    _say(console)
    table = plain_table("model", "bound", ">best", ">gain", "verdict", "before")
    for entry in batch.entries:
        style = "red" if entry.regressed else STYLES.get(entry.state, "dim")
        cells = (
            " ".join(filter(None, (entry.model, entry.target))),
            entry.sla,
            figure_words(entry),
            f"{entry.speedup:.2f}x" if entry.speedup and entry.figure else "",
            state_words(entry),
            change_words(entry),
        )
        table.add_row(*(Text(one_line(cell), style, overflow="fold") for cell in cells))
    print_table(console, table)
    remarks = [(entry, line) for entry in batch.entries for line in _remarks(entry)]
    if remarks or batch.gone:
        _say(console)
    for entry, line in remarks:
        _say(console, f"{entry.label}: {line}", "red" if entry.regressed or entry.state != "found" else "")
    for label in batch.gone:
        _say(console, f"{label}: in the batch before, and no longer in the suite")
    _say(console)
    console.print(Text(f"index   {one_line(str(folder.index))}"), soft_wrap=True)


def _remarks(entry: EntryRecord) -> list[str]:
    told = [entry.reason, entry.headline if entry.state == "none" else ""]
    if entry.change is not None and entry.change.kind not in ("new", "noise", "same"):
        told.append(entry.change.told)
    return [line for line in told if line]


def _say(console: Console, text: str = "", style: str = "") -> None:
    """As it is: names of models and of files are no markup."""
    console.print(Text(one_line(text), style))
