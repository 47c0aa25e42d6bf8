"""What a run is kept on fails: it ends with one line, loses nothing that was measured, and can be gone on with.

The runs are on a recorded table: what is tried here is the disk and the database, not the server.
"""

from __future__ import annotations

import contextlib
import os
import sqlite3
import subprocess
import sys
from pathlib import Path

import pytest

from tests.command_fixtures import Ended, Playground, eventually
from tests.recorded_fixtures import RecordedProcess, RecordedRuns, recorded_runs, rows, start
from tests.storage_fixtures import PostgreSQL, SmallDisk, postgresql, small_disk

__all__ = ["postgresql", "recorded_runs", "small_disk"]

ROOT = Path(__file__).parents[2]
START_SECONDS = 30.0
PASSWORD = "geheim"


@pytest.fixture
def folder(playground: Playground) -> Path:
    """Of a name of its own, which is the study's as well: tests share a database."""
    folder = playground.here / playground.root.name
    folder.mkdir()
    return folder


def begun(folder: Path, runs: RecordedRuns, storage: str | None = None) -> RecordedProcess:
    """A run that has measured something."""
    process = start(folder, runs.table, storage)
    assert eventually(lambda: rows(folder) or not process.is_running, START_SECONDS)
    return process


def only_line(ended: Ended, code: int) -> str:
    assert ended.code == code, ended.stderr
    (complaint,) = ended.complaints
    return complaint


# -- the disk ---------------------------------------------------------------------------------------------------


def on(disk: SmallDisk, runs: RecordedRuns) -> subprocess.Popen[str]:
    """A run, or the rest of it, whose folder is that disk."""
    command = [*disk.under, sys.executable, "-m", "tests.recorded_run", runs.table, disk.mount]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path])}
    return subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True)


def ended(process: subprocess.Popen[str]) -> Ended:
    _, stderr = process.communicate(timeout=60)
    return Ended(process.returncode, "", stderr, process.pid)


def test_a_full_disk_ends_the_run_and_it_goes_on_once_there_is_room(
    small_disk: SmallDisk, recorded_runs: RecordedRuns
) -> None:
    process = on(small_disk, recorded_runs)
    assert eventually(lambda: rows(small_disk.inside), START_SECONDS)
    small_disk.fill()
    complaint = only_line(ended(process), code=3)
    measured = rows(small_disk.inside)
    again = only_line(ended(on(small_disk, recorded_runs)), code=3)  # as long as nothing is done about it
    for line in (complaint, again):
        assert line.startswith("tune: ")
        assert str(small_disk.mount) in line
        assert ": No space left on device; " in line
        assert line.endswith("`tune --resume` goes on")
    assert rows(small_disk.inside)[: len(measured)] == measured == recorded_runs.undisturbed[: len(measured)]
    small_disk.free()
    assert ended(on(small_disk, recorded_runs)).stderr == ""
    recorded_runs.assert_complete(small_disk.inside)


def test_a_disk_that_has_become_read_only_is_named_and_left_as_it_is(
    small_disk: SmallDisk, recorded_runs: RecordedRuns
) -> None:
    process = on(small_disk, recorded_runs)
    assert eventually(lambda: rows(small_disk.inside), START_SECONDS)
    process.terminate()
    assert ended(process).code == 130
    before = {path: path.read_bytes() for path in small_disk.inside.iterdir()}
    small_disk.remount("ro")
    complaint = only_line(ended(on(small_disk, recorded_runs)), code=3)
    assert complaint.startswith(f"tune: cannot write {small_disk.mount}/")
    assert "Read-only file system; make that file system writable" in complaint
    assert {path: path.read_bytes() for path in small_disk.inside.iterdir()} == before
    small_disk.remount("rw")
    assert ended(on(small_disk, recorded_runs)).stderr == ""
    recorded_runs.assert_complete(small_disk.inside)


# -- the study: its journal, SQLite -----------------------------------------------------------------------------


def test_a_database_that_stays_locked_ends_the_run(folder: Path, recorded_runs: RecordedRuns) -> None:
    database = folder.with_name("study.db")
    storage = f"sqlite:///{database}?timeout=1"
    process = begun(folder, recorded_runs, storage)
    with contextlib.closing(sqlite3.connect(database)) as other:
        other.execute("BEGIN EXCLUSIVE")
        complaint = only_line(process.finish(), code=3)
    assert complaint == (
        f"tune: {storage}: the study cannot be kept: database is locked; once that is mended, `tune --resume` goes on"
    )
    assert start(folder, recorded_runs.table, storage).finish().stderr == ""
    recorded_runs.assert_complete(folder)


def test_a_truncated_database_is_filled_again_from_the_table(folder: Path, recorded_runs: RecordedRuns) -> None:
    database = folder.with_name("study.db")
    storage = f"sqlite:///{database}"
    process = begun(folder, recorded_runs, storage)
    os.truncate(database, database.stat().st_size // 2)
    complaint = only_line(process.finish(), code=3)
    refused = only_line(start(folder, recorded_runs.table, storage).finish(), code=2)
    assert complaint.startswith(f"tune: {storage}: the study cannot be kept: ")
    assert complaint.endswith("; once that is mended, `tune --resume` goes on")
    assert refused.startswith(f"tune: {storage}: is not an intact study: ")
    assert refused.endswith("; move it away: a run that is resumed fills a new one")
    database.unlink()
    assert start(folder, recorded_runs.table, storage).finish().stderr == ""
    recorded_runs.assert_complete(folder)


def test_a_journal_truncated_meanwhile_heals(folder: Path, recorded_runs: RecordedRuns) -> None:
    process = begun(folder, recorded_runs)
    journal = folder / "study.journal"
    os.truncate(journal, journal.stat().st_size // 2)
    complaint = only_line(process.finish(), code=3)
    assert complaint.startswith(f"tune: {journal}: the study cannot be kept: ")
    assert start(folder, recorded_runs.table).finish().stderr == ""
    recorded_runs.assert_complete(folder)


def test_a_journal_truncated_between_two_runs_heals(folder: Path, recorded_runs: RecordedRuns) -> None:
    process = begun(folder, recorded_runs)
    process.kill()
    assert process.finish().code < 0
    journal = folder / "study.journal"
    os.truncate(journal, journal.stat().st_size * 2 // 3)
    assert start(folder, recorded_runs.table).finish().stderr == ""
    recorded_runs.assert_complete(folder)


# -- the study: PostgreSQL --------------------------------------------------------------------------------------


def test_a_lost_database_server_ends_the_run(
    folder: Path, recorded_runs: RecordedRuns, postgresql: PostgreSQL
) -> None:
    storage = postgresql.url(PASSWORD)
    shown = storage.replace(PASSWORD, "***")
    process = begun(folder, recorded_runs, storage)
    postgresql.stop()
    complaint = only_line(process.finish(), code=3)
    refused = only_line(start(folder, recorded_runs.table, storage).finish(), code=2)
    postgresql.start()
    assert complaint.startswith(f"tune: {shown}: the study cannot be kept: ")
    assert complaint.endswith("once that is mended, `tune --resume` goes on")
    assert refused.startswith(f"tune: {shown}: the study cannot be opened: ")
    assert "Connection refused" in refused
    assert PASSWORD not in complaint + refused
    assert start(folder, recorded_runs.table, storage).finish().stderr == ""
    recorded_runs.assert_complete(folder)


def test_a_lost_connection_is_made_anew(folder: Path, recorded_runs: RecordedRuns, postgresql: PostgreSQL) -> None:
    """As after a restart of the server between two measurements: the run does not notice."""
    process = begun(folder, recorded_runs, postgresql.url(PASSWORD))
    assert postgresql.drop_connections() > 0
    assert process.finish().stderr == ""
    recorded_runs.assert_complete(folder)
