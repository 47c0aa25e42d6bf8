"""Tests of supervised processes: logs, timeouts, exit codes, and the end of all descendants."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import psutil

from optimizer.core.process import SupervisedProcess, run_command
from tests.command_fixtures import eventually


def test_a_command_returns_its_output_and_exit_code(tmp_path: Path) -> None:
    done = run_command(["sh", "-c", "echo out; echo err >&2; exit 7"], timeout_seconds=60, log=tmp_path / "log")
    assert done.exit_code == 7
    assert sorted(done.output.split()) == ["err", "out"]


def test_a_signal_is_128_plus_its_number(tmp_path: Path) -> None:
    assert run_command(["sh", "-c", "kill -ABRT $$"], timeout_seconds=60, log=tmp_path / "log").exit_code == 128 + 6


def test_a_command_that_does_not_exist_has_exit_code_127(tmp_path: Path) -> None:
    done = run_command(["/no/such/binary"], timeout_seconds=60, log=tmp_path / "log")
    assert done.exit_code == 127
    assert "No such file" in done.output


def test_timeout_kills_a_command_that_ignores_signals(tmp_path: Path) -> None:
    script = "trap '' TERM INT HUP; echo here; while :; do sleep 0.1; done"
    done = run_command(["sh", "-c", script], timeout_seconds=5, log=tmp_path / "log")  # long enough for its start
    assert done.exit_code is None
    assert done.output.strip() == "here"


def test_stop_kills_descendants_in_other_sessions_too(tmp_path: Path) -> None:
    pids = tmp_path / "pids"
    script = f"setsid sh -c 'echo $$ >> {pids}; sleep 600' & echo $$ >> {pids}; sleep 600"
    process = SupervisedProcess(["sh", "-c", script], log=tmp_path / "log")
    assert eventually(lambda: pids.exists() and len(pids.read_text().split()) == 2, 60)
    process.stop()
    assert not any(psutil.pid_exists(int(pid)) for pid in pids.read_text().split())


def test_orphans_of_a_killed_command_do_not_survive(tmp_path: Path) -> None:
    """Orphans, such as the stubs of a crashed tritonserver, end too."""
    pids = tmp_path / "pids"
    orphan = f"setsid sh -c 'echo $$ > {pids}; exec sleep 600'"
    script = f"{orphan} & until [ -s {pids} ]; do sleep 0.01; done; kill -9 $$"
    process = SupervisedProcess(["sh", "-c", script], log=tmp_path / "log")
    assert process.wait(60) == 128 + signal.SIGKILL
    assert not psutil.pid_exists(int(pids.read_text()))


def test_shared_memory_is_removed_by_prefix(tmp_path: Path) -> None:
    prefix = f"tritune_test_{os.getpid()}_"
    other = Path(f"/dev/shm/other_{os.getpid()}")
    other.touch()
    try:
        process = SupervisedProcess(
            ["sh", "-c", f"touch /dev/shm/{prefix}a; sleep 600"], log=tmp_path / "log", shm_patterns=[f"{prefix}*"]
        )
        assert eventually(Path(f"/dev/shm/{prefix}a").exists, 60)
        process.stop()
        assert not Path(f"/dev/shm/{prefix}a").exists()
        assert other.exists()
    finally:
        other.unlink()


def test_stop_removes_what_a_killed_supervisor_left(tmp_path: Path) -> None:
    """A stub of Triton may wait forever for a lock in shared memory that its killed server held."""
    orphan, region = tmp_path / "orphan", Path(f"/dev/shm/tritune_test_{os.getpid()}_left")
    script = f"touch {region}; sleep 600 & echo $! > {orphan}; sleep 600"
    process = SupervisedProcess(["sh", "-c", script], log=tmp_path / "log", shm_patterns=[region.name])
    assert eventually(lambda: orphan.exists() and orphan.read_text().endswith("\n"), 60)
    left = psutil.Process(int(orphan.read_text()))
    os.kill(process.pid, signal.SIGKILL)
    assert process.wait(60) == -signal.SIGKILL
    assert left.is_running()
    assert region.exists()
    process.stop()
    psutil.wait_procs([left], timeout=60)
    assert not left.is_running() or left.status() == psutil.STATUS_ZOMBIE
    assert not region.exists()


def test_sigkill_of_the_parent_ends_its_processes(tmp_path: Path) -> None:
    pids = tmp_path / "pids"
    program = textwrap.dedent(
        f"""
        import time
        from pathlib import Path
        from optimizer.core.process import SupervisedProcess
        SupervisedProcess(["sh", "-c", "trap '' TERM HUP; echo $$ > {pids}; while :; do sleep 0.1; done"],
                          log=Path({str(tmp_path / "log")!r}))
        time.sleep(600)
        """
    )
    parent = subprocess.Popen([sys.executable, "-c", program])
    assert eventually(lambda: pids.exists() and bool(pids.read_text().strip()), 60)
    child = int(pids.read_text())
    assert psutil.pid_exists(child)
    parent.kill()
    parent.wait()
    assert eventually(lambda: not psutil.pid_exists(child), 60)
