"""Disk and database failures end a run with one line; no measurement is lost, and the run can be resumed.

The runs use a recorded table instead of a server.
"""

from __future__ import annotations

import contextlib
import os
import sqlite3
from functools import partial
from pathlib import Path

import pytest

from tests import recorded_process
from tests.command_fixtures import Ended, Sandbox, eventually
from tests.recorded_fixtures import (
    RecordedProcess,
    RecordedRuns,
    hold,
    is_held,
    quick_runs,
    recorded_runs,
    release,
    rows,
    start,
    started,
)
from tests.storage_fixtures import PostgreSQL, SmallDisk, postgresql, small_disk

__all__ = ["postgresql", "quick_runs", "recorded_runs", "small_disk"]

START_SECONDS = 600.0
PASSWORD = "geheim"


@pytest.fixture
def folder(sandbox: Sandbox) -> Path:
    """Return a folder with a unique name, which is also the study's name, because tests share a database."""
    folder = sandbox.working_folder / sandbox.root.name
    folder.mkdir()
    return folder


def begun(folder: Path, runs: RecordedRuns, storage: str | None = None) -> RecordedProcess:
    """Start a run and return it after its first measurement; the next one waits for ``release``."""
    hold(folder, 1)
    process = start(folder, runs, storage)
    assert eventually(lambda: is_held(folder) or not process.is_running, START_SECONDS)
    return process


def only_line(ended: Ended, code: int) -> str:
    assert ended.code == code, ended.stderr
    (complaint,) = ended.stderr_lines
    return complaint


# -- the disk ---------------------------------------------------------------------------------------------------


def on(disk: SmallDisk, runs: RecordedRuns) -> RecordedProcess:
    """Start or resume a run whose folder is on ``disk``."""
    words = [str(runs.table), str(disk.mount), runs.search]
    return started(partial(disk.run, recorded_process.main), words, disk.mount.parent)


def begun_on(disk: SmallDisk, runs: RecordedRuns) -> RecordedProcess:
    """Start a run on ``disk`` and return it after its first measurement; the next one waits for ``release``."""
    hold(disk.mount, 1)
    process = on(disk, runs)
    assert eventually(lambda: is_held(disk.mount) or not process.is_running, START_SECONDS)
    return process


def test_a_full_disk_ends_the_run_which_continues_once_there_is_space(
    small_disk: SmallDisk, quick_runs: RecordedRuns
) -> None:
    process = begun_on(small_disk, quick_runs)
    small_disk.fill()
    release(small_disk.mount)
    complaint = only_line(process.finish(), code=3)
    measured = rows(small_disk.path)
    again = only_line(on(small_disk, quick_runs).finish(), code=3)  # the disk is still full
    for line in (complaint, again):
        assert line.startswith("tune: ")
        assert str(small_disk.mount) in line
        assert ": No space left on device; " in line
        assert line.endswith("continue with `tune --resume`")
    assert rows(small_disk.path)[: len(measured)] == measured == quick_runs.undisturbed[: len(measured)]
    small_disk.free()
    assert on(small_disk, quick_runs).finish().stderr == ""
    quick_runs.assert_complete(small_disk.path)


@pytest.mark.parametrize(
    ("free_bytes", "advice"), [(0, "run the command again"), (20480, "continue with `tune --resume`")]
)
def test_a_disk_that_is_full_from_the_start_is_named_with_its_fix(
    free_bytes: int, advice: str, small_disk: SmallDisk, quick_runs: RecordedRuns
) -> None:
    """A run that could not write any file has nothing to resume."""
    small_disk.fill()
    filler = small_disk.path / "filler"
    os.truncate(filler, filler.stat().st_size - free_bytes)
    complaint = only_line(on(small_disk, quick_runs).finish(), code=3)
    assert complaint.startswith("tune: ")
    assert str(small_disk.mount) in complaint
    assert complaint.endswith(f": No space left on device; free space there, then {advice}")


def test_a_disk_that_became_read_only_is_reported_and_unchanged(
    small_disk: SmallDisk, quick_runs: RecordedRuns
) -> None:
    process = begun_on(small_disk, quick_runs)
    process.terminate()
    assert process.finish().code == 130
    release(small_disk.mount)
    before = {path: path.read_bytes() for path in small_disk.path.iterdir()}
    small_disk.remount("ro")
    complaint = only_line(on(small_disk, quick_runs).finish(), code=3)
    assert complaint.startswith(f"tune: cannot write {small_disk.mount}/")
    assert "Read-only file system; make that file system writable" in complaint
    assert {path: path.read_bytes() for path in small_disk.path.iterdir()} == before
    small_disk.remount("rw")
    assert on(small_disk, quick_runs).finish().stderr == ""
    quick_runs.assert_complete(small_disk.path)


# -- the study: its journal, SQLite -----------------------------------------------------------------------------


def test_a_database_that_stays_locked_ends_the_run(folder: Path, quick_runs: RecordedRuns) -> None:
    database = folder.with_name("study.db")
    storage = f"sqlite:///{database}?timeout=1"
    process = begun(folder, quick_runs, storage)
    with contextlib.closing(sqlite3.connect(database)) as other:
        other.execute("BEGIN EXCLUSIVE")
        release(folder)
        complaint = only_line(process.finish(), code=3)
    assert complaint == (
        f"tune: {storage}: the study cannot be stored: database is locked; "
        "fix that, then continue with `tune --resume`"
    )
    assert start(folder, quick_runs, storage).finish().stderr == ""
    quick_runs.assert_complete(folder)


def test_a_truncated_database_is_filled_again_from_the_table(folder: Path, recorded_runs: RecordedRuns) -> None:
    database = folder.with_name("study.db")
    storage = f"sqlite:///{database}"
    process = begun(folder, recorded_runs, storage)
    os.truncate(database, database.stat().st_size // 2)
    release(folder)
    complaint = only_line(process.finish(), code=3)
    refused = only_line(start(folder, recorded_runs, storage).finish(), code=2)
    assert complaint.startswith(f"tune: {storage}: the study cannot be stored: ")
    assert complaint.endswith("; fix that, then continue with `tune --resume`")
    assert refused.startswith(f"tune: {storage}: is not an intact study: ")
    assert refused.endswith("; move it away: a resumed run creates a new one")
    database.unlink()
    assert start(folder, recorded_runs, storage).finish().stderr == ""
    recorded_runs.assert_complete(folder)


def test_a_journal_truncated_during_a_run_is_repaired(folder: Path, recorded_runs: RecordedRuns) -> None:
    process = begun(folder, recorded_runs)
    journal = folder / "study.journal"
    os.truncate(journal, journal.stat().st_size // 2)
    release(folder)
    complaint = only_line(process.finish(), code=3)
    assert complaint.startswith(f"tune: {journal}: the study cannot be stored: ")
    assert start(folder, recorded_runs).finish().stderr == ""
    recorded_runs.assert_complete(folder)


def test_a_folder_moved_during_a_run_is_named_and_continued_after_it_is_moved_back(
    folder: Path, quick_runs: RecordedRuns
) -> None:
    process = begun(folder, quick_runs)
    moved = folder.rename(folder.with_name("moved"))
    release(folder)
    complaint = only_line(process.finish(), code=3)
    assert complaint == (
        f"tune: cannot write {folder / 'trials.csv'}: No such file or directory; "
        "move its folder back, which was moved or removed, then continue with `tune --resume`"
    )
    moved.rename(folder)
    assert start(folder, quick_runs).finish().stderr == ""
    quick_runs.assert_complete(folder)


# -- the study: PostgreSQL --------------------------------------------------------------------------------------


def test_a_lost_database_server_ends_the_run(folder: Path, quick_runs: RecordedRuns, postgresql: PostgreSQL) -> None:
    storage = postgresql.url(PASSWORD)
    shown = storage.replace(PASSWORD, "***")
    process = begun(folder, quick_runs, storage)
    postgresql.stop()
    release(folder)
    complaint = only_line(process.finish(), code=3)
    refused = only_line(start(folder, quick_runs, storage).finish(), code=2)
    postgresql.start()
    assert complaint.startswith(f"tune: {shown}: the study cannot be stored: ")
    assert complaint.endswith("fix that, then continue with `tune --resume`")
    assert refused.startswith(f"tune: {shown}: the study cannot be opened: ")
    assert "Connection refused" in refused
    assert PASSWORD not in complaint + refused
    assert start(folder, quick_runs, storage).finish().stderr == ""
    quick_runs.assert_complete(folder)
