"""The batch as one HTML page that needs no network and no script; each run's own report is a link away."""

from __future__ import annotations

from pathlib import Path

from optimizer.batches.folder import BatchFolder
from optimizer.batches.record import BatchRecord, EntryRecord
from optimizer.batches.show import change_words, figure_words, interval_words, state_words, title, totals
from optimizer.profile.safe_paths import is_file
from optimizer.report.templates import environment
from optimizer.store.disk import write_whole
from optimizer.store.run_folder import RunFolder

TEMPLATE = "index.html.j2"


def write_index(folder: BatchFolder, batch: BatchRecord) -> None:
    """Raises EnvironmentFault where the disk refuses it."""
    templates = environment(Path(__file__).parent, html=True)
    page = templates.get_template(TEMPLATE).render(
        title=title(batch),
        good=all(entry.state == "found" and not entry.regressed for entry in batch.entries),
        totals=totals(batch),
        batch=batch,
        rows=[_row(folder, entry) for entry in batch.entries],
        hardware=sorted({entry.conditions["hardware"] for entry in batch.entries if "hardware" in entry.conditions}),
    )
    write_whole(folder.index, page)


def _row(folder: BatchFolder, entry: EntryRecord) -> dict[str, object]:
    change = entry.change
    bad = entry.state in ("none", "failed") or entry.regressed
    return {
        "model": entry.model,
        "bound": entry.sla,
        "target": entry.target,
        "report": f"{entry.folder}/report.html" if is_file(RunFolder(folder.path / entry.folder).report) else "",
        "figure": figure_words(entry),
        "interval": interval_words(entry),
        "speedup": f"{entry.speedup:.2f}x" if entry.speedup and entry.figure else "",
        "state": state_words(entry),
        "bad": bad,
        "change": change_words(entry),
        "told": change.told if change is not None and change.kind != "new" else "",
        "configuration": entry.configuration if entry.figure else entry.reason or entry.headline,
    }
