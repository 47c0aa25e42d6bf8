"""Tests of locks between processes: one holder at a time, named, and released when it ends."""

from __future__ import annotations

import contextlib
import errno
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from optimizer.core.errors import EnvironmentFault
from optimizer.core.files import stored_bytes, write_error
from optimizer.core.locks import file_lock, lock_holder
from optimizer.store.optuna_study import JournalLock
from optimizer.store.run_folder import RunFolder

HOLD_PROGRAM = """\
import sys
from pathlib import Path
from optimizer.core.locks import file_lock

with file_lock(Path(sys.argv[1]), lambda holder: print("waiting for", holder, flush=True)):
    print("held", flush=True)
    sys.stdin.read()
"""
HOLD_JOURNAL_PROGRAM = """\
import sys
from pathlib import Path
from optimizer.store.optuna_study import JournalLock

lock = JournalLock(Path(sys.argv[1]), 5)
lock.acquire()
print("held", flush=True)
sys.stdin.read()
"""
COUNT_PROGRAM = """\
import sys
from pathlib import Path
from optimizer.core.locks import file_lock

lock, counter = Path(sys.argv[1]), Path(sys.argv[2])
for _ in range(50):
    with file_lock(lock, lambda holder: None):
        counter.write_text(str(int(counter.read_text()) + 1))
"""


@contextlib.contextmanager
def run_python(program: str, *arguments: Path) -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, "-c", program, *map(str, arguments)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        try:
            yield process
        finally:
            process.kill()


def next_line(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline().rstrip()


def test_a_lock_leaves_no_file(tmp_path: Path) -> None:
    with file_lock(tmp_path / "lock", pytest.fail):
        assert (tmp_path / "lock").exists()
    assert list(tmp_path.iterdir()) == []


def test_a_holder_is_named_and_waited_for(tmp_path: Path) -> None:
    lock = tmp_path / "lock"
    with run_python(HOLD_PROGRAM, lock) as first:
        assert next_line(first) == "held"
        with run_python(HOLD_PROGRAM, lock) as second:
            assert next_line(second).startswith(f"waiting for process {first.pid} on ")
            first.communicate()  # ends it
            assert next_line(second) == "held"
            assert lock.exists()
            second.communicate()
    assert list(tmp_path.iterdir()) == []


def test_a_lock_can_be_tried_without_waiting(tmp_path: Path) -> None:
    with run_python(HOLD_PROGRAM, tmp_path / "lock") as holder:
        assert next_line(holder) == "held"
        with (
            pytest.raises(pytest.fail.Exception, match=f"^process {holder.pid} on "),
            file_lock(tmp_path / "lock", pytest.fail),
        ):
            pass
        assert (tmp_path / "lock").exists()


def test_a_killed_holder_holds_nothing(tmp_path: Path) -> None:
    lock = tmp_path / "lock"
    with run_python(HOLD_PROGRAM, lock) as holder:
        assert next_line(holder) == "held"
        holder.kill()
        holder.wait()
        with file_lock(lock, pytest.fail):
            assert f"process {holder.pid} " not in lock.read_text()
    assert not lock.exists()


def test_a_lock_never_has_two_holders(tmp_path: Path) -> None:
    """Four processes that increment one counter lose no increment, although the lock file is removed each time."""
    lock, counter = tmp_path / "lock", tmp_path / "counter"
    counter.write_text("0")
    with contextlib.ExitStack() as running:
        for process in [running.enter_context(run_python(COUNT_PROGRAM, lock, counter)) for _ in range(4)]:
            assert process.wait() == 0
    assert counter.read_text() == "200"


def test_a_locked_run_is_refused_on_one_line(tmp_path: Path) -> None:
    with run_python(HOLD_PROGRAM, tmp_path / ".lock") as holder:
        assert next_line(holder) == "held"
        with pytest.raises(EnvironmentFault) as caught, RunFolder(tmp_path).locked():
            pass
    assert str(caught.value).startswith(f"{tmp_path}: process {holder.pid} on ")
    assert "\n" not in str(caught.value)


def test_a_run_that_cannot_be_locked_is_reported_on_one_line(tmp_path: Path) -> None:
    with (
        pytest.raises(EnvironmentFault, match=r"cannot write .*nowhere/\.lock: No such file"),
        RunFolder(tmp_path / "nowhere").locked(),
    ):
        pass


def test_a_file_system_without_locks_has_a_remedy() -> None:
    fault = write_error(Path("r/.lock"), OSError(errno.ENOLCK, os.strerror(errno.ENOLCK)), "run the command again")
    assert str(fault) == (
        "cannot write r/.lock: No locks available; use a folder whose file system has locks, then run the command "
        "again"
    )


# -- Optuna's journal ------------------------------------------------------------------------------------------


def test_a_journal_that_stays_locked_is_not_waited_for_without_end(tmp_path: Path) -> None:
    journal = tmp_path / "study.journal"
    journal.touch()
    with run_python(HOLD_JOURNAL_PROGRAM, journal) as holder:
        assert next_line(holder) == "held"
        with pytest.raises(TimeoutError, match=r"another process keeps it locked for more than 0\.1 s"):
            JournalLock(journal, 0.1).acquire()
        holder.kill()
        holder.wait()
        lock = JournalLock(journal, 0.0)
        assert lock.acquire()
        lock.release()


ENTRY = b'{"op_code": 0}\n'


@pytest.mark.parametrize(
    ("content", "expected"), [(b"", b""), (ENTRY, ENTRY), (ENTRY + b"{", ENTRY), (ENTRY[:9], b"")]
)
def test_an_incomplete_last_line_is_removed_before_a_journal_is_written(
    content: bytes, expected: bytes, tmp_path: Path
) -> None:
    journal = tmp_path / "study.journal"
    journal.write_bytes(content)
    lock = JournalLock(journal, 0.0)
    lock.acquire()
    lock.release()
    assert journal.read_bytes() == expected


# -- holders that are only read, and sizes of folders -----------------------------------------------------------


def test_the_holder_of_a_lock_is_seen_without_taking_it(tmp_path: Path) -> None:
    lock = tmp_path / "lock"
    assert lock_holder(lock) is None
    with run_python(HOLD_PROGRAM, lock) as holder:
        assert next_line(holder) == "held"
        for _ in range(2):
            assert (lock_holder(lock) or "").startswith(f"process {holder.pid} on ")
        holder.kill()
        holder.wait()
    assert lock_holder(lock) is None
    assert lock.exists()


def test_a_link_in_place_of_a_lock_is_not_followed(tmp_path: Path) -> None:
    (tmp_path / "mine").write_text("keep")
    (tmp_path / ".lock").symlink_to(tmp_path / "mine")
    with pytest.raises(EnvironmentFault, match=r"cannot write .*/.lock: "), RunFolder(tmp_path).locked():
        pass
    assert (tmp_path / "mine").read_text() == "keep"


def test_a_pipe_in_place_of_a_lock_does_not_block(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "lock")
    assert lock_holder(tmp_path / "lock") is None


def test_each_file_counts_once_and_no_link_is_followed(tmp_path: Path) -> None:
    folder, other = tmp_path / "folder", tmp_path / "other"
    (folder / "inner").mkdir(parents=True)
    other.write_bytes(bytes(500))
    (folder / "a").write_bytes(bytes(1000))
    (folder / "inner" / "b").hardlink_to(folder / "a")
    assert stored_bytes(folder) == stored_bytes(folder, folder) == 1000
    assert stored_bytes(folder, other) == 1500
    assert stored_bytes(tmp_path / "nowhere") == 0
    (tmp_path / "link").symlink_to(folder)
    assert stored_bytes(tmp_path / "link") == (tmp_path / "link").lstat().st_size
