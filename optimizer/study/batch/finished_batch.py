"""A batch whose runs have ended: its state from that of its runs, its comparison, and its files."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from optimizer.core.errors import BadInputError
from optimizer.results.finished_run import read_run
from optimizer.store.run_folder import WRITTEN_FORMAT
from optimizer.study.batch.batch_runner import describe_entry
from optimizer.study.batch.changes import compare_batches
from optimizer.study.batch.record import BatchFolder, BatchRecord, EntryRecord, StoredBatch, read_record
from optimizer.study.batch.reports import write_batch


def finish(folder: BatchFolder, batch: BatchRecord, against: StoredBatch | None) -> BatchRecord:
    """Compare ``batch`` with an earlier one, write its files, and return it.

    Without ``against`` the earlier one is the newest finished batch of the suite. Raises EnvironmentFault if the disk
    refuses the files.
    """
    batch = _compare(folder, batch, [against] if against else _earlier_batches(folder, batch))
    write_batch(folder, batch)
    return batch


def refresh(folder: BatchFolder, on_message: Callable[[str], None]) -> BatchRecord:
    """Return the record of a batch with the present results of its runs, such as those of a later `tune verify`.

    An entry that failed or has not begun stays as it is. So does one whose run cannot be read; ``on_message`` gets a
    line for it. Raises BadInputError if batch.json cannot be read.
    """
    batch = stored = folder.read()
    batch = replace(batch, entries=tuple(_refresh_entry(folder, entry, on_message) for entry in batch.entries))
    earlier, previous = _earlier_batches(folder, batch), folder.path / batch.previous
    if batch.previous and not (earlier and _path_from(folder, earlier[0].path) == batch.previous):
        earlier = []
        with contextlib.suppress(BadInputError):  # it may have been deleted
            earlier = [StoredBatch(previous, read_record(previous))]
    compared = _compare(folder, batch, earlier)
    return compared if compared == stored else replace(compared, written=time.strftime(WRITTEN_FORMAT))


def _earlier_batches(folder: BatchFolder, batch: BatchRecord) -> list[StoredBatch]:
    """Return the finished batches next to ``folder`` that started before ``batch``, the newest first."""
    stored = folder.readable_in(folder.path.absolute().parent)
    return [other for other in stored if other.record.status == "finished" and other.record.started < batch.started]


def _compare(folder: BatchFolder, batch: BatchRecord, earlier: Sequence[StoredBatch]) -> BatchRecord:
    """Return ``batch`` with its changes since ``earlier``, the newest first; without any they stay as they are."""
    if not earlier:
        return batch
    compared = compare_batches(batch, [other.record for other in earlier], batch.regression_share)
    return replace(compared, previous=_path_from(folder, earlier[0].path))


def _path_from(folder: BatchFolder, path: Path) -> str:
    return os.path.relpath(path, folder.path)


def _refresh_entry(folder: BatchFolder, entry: EntryRecord, on_message: Callable[[str], None]) -> EntryRecord:
    if entry.state in ("waiting", "failed"):
        return entry
    try:
        current = describe_entry(entry, read_run(folder.path / entry.folder))
    except BadInputError as error:
        on_message(f"{entry.label}: shown as in batch.json: {error}")
        return entry
    if entry.is_done:
        current = replace(current, state="found" if current.recommended else "none")
    return entry if current == entry else replace(current, change=None, regressed=False)
