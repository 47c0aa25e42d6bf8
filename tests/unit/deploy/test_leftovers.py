"""Tests of the removal of leftovers: those of killed runs are removed, those of running processes are kept."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from optimizer.cli.doctor import check_other_runs
from optimizer.core.process_owner import Owner, is_alive, this_process
from optimizer.deploy.server_process import new_folder, orphans, remove_leftovers, shared_memory_prefix
from tests.command_fixtures import eventually
from tests.measuring_process import measuring


@pytest.fixture(autouse=True)
def temporary_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path


@pytest.fixture
def ended_process() -> Owner:
    """Return a process that has ended."""
    process = subprocess.Popen(["true"])
    process.wait()
    return replace(this_process(), pid=process.pid)


@pytest.fixture
def process_with_reused_id() -> Owner:
    """Return a process whose id has been reused."""
    return replace(this_process(), start=this_process().start - 1)


@pytest.fixture
def other_container(ended_process: Owner) -> Owner:
    """Return a process in another container, of which nothing is known."""
    return replace(ended_process, namespace=ended_process.namespace + 1)


@pytest.fixture
def other_host(ended_process: Owner) -> Owner:
    """Return a process of another host, whose first PID namespace has the inode of this one."""
    return replace(ended_process, namespace=Path("/proc/self/ns/pid").stat().st_ino)


@pytest.fixture
def created_paths(temporary_folder: Path) -> Iterator[list[Path]]:
    paths: list[Path] = []
    yield paths
    for path in paths:
        if path.parent != temporary_folder:
            path.unlink(missing_ok=True)


def create_leftovers(created_paths: list[Path], temporary_folder: Path, owner: object) -> list[Path]:
    """Create a shared-memory region and a folder with a file, named after ``owner``."""
    folder = temporary_folder / f"tritune-{owner}-te_st"
    folder.mkdir()
    (folder / "config.pbtxt").touch()
    region = Path("/dev/shm", f"{shared_memory_prefix(folder)}region")
    region.touch()
    created_paths += [folder, region]
    return [folder, region]


@pytest.mark.parametrize("owner", ["ended_process", "process_with_reused_id"])
def test_leftovers_of_an_ended_process_are_removed(
    owner: str, temporary_folder: Path, created_paths: list[Path], request: pytest.FixtureRequest
) -> None:
    paths = create_leftovers(created_paths, temporary_folder, request.getfixturevalue(owner))
    remove_leftovers()
    assert [path for path in paths if path.exists()] == []


def test_files_of_a_running_process_are_kept(temporary_folder: Path, created_paths: list[Path]) -> None:
    paths = create_leftovers(created_paths, temporary_folder, this_process())
    remove_leftovers()
    assert all(path.exists() for path in paths)


@pytest.fixture
def processes_in(temporary_folder: Path) -> Iterator[Callable[[Owner], tuple[int, int]]]:
    """Yield a function that starts a shell and its child in a folder of an owner, and returns both ids."""
    with contextlib.ExitStack() as stack:

        def start(owner: Owner) -> tuple[int, int]:
            folder = temporary_folder / f"tritune-{owner}-te_st"
            folder.mkdir()
            command, out = ["sh", "-c", "sleep 600 & echo $!; wait"], subprocess.PIPE
            shell = subprocess.Popen(command, cwd=folder, stdout=out, text=True, start_new_session=True)
            assert shell.stdout is not None
            stack.callback(shell.communicate)
            stack.callback(os.killpg, shell.pid, signal.SIGKILL)
            return shell.pid, int(shell.stdout.readline())

        yield start


def test_processes_are_ended_whose_tune_and_supervisor_were_killed(
    processes_in: Callable[[Owner], tuple[int, int]], ended_process: Owner
) -> None:
    supervisor, stub = processes_in(ended_process)
    remove_leftovers()
    assert stub not in orphans()
    assert is_alive(stub), "a shell in the folder is no leftover"
    os.kill(supervisor, signal.SIGKILL)
    assert eventually(lambda: stub in orphans(), 60)
    with measuring("/results/dlrm/20261130-081015") as running:
        finding = check_other_runs()  # it names those of other tests that run now, too
    assert finding.state == "warn"
    assert f"process {running} measures for /results/dlrm/20261130-081015" in finding.detail
    wait, _, kill = finding.fix.partition("; ")
    assert wait.startswith("wait until they end")
    assert re.fullmatch(rf"kill -9 (\d+ )*{stub} (\d+ )*\(the next run does it too\)", kill), finding.fix
    remove_leftovers()
    assert eventually(lambda: not is_alive(stub), 60)
    assert stub not in orphans()


def test_processes_of_a_running_tune_are_kept(processes_in: Callable[[Owner], tuple[int, int]]) -> None:
    supervisor, stub = processes_in(this_process())
    os.kill(supervisor, signal.SIGKILL)
    assert eventually(lambda: not is_alive(supervisor), 60)
    assert stub not in orphans()
    remove_leftovers()
    assert is_alive(stub)


@pytest.mark.parametrize("owner", ["other_container", "other_host"])
def test_files_of_another_container_or_host_are_kept(
    owner: str, temporary_folder: Path, created_paths: list[Path], request: pytest.FixtureRequest
) -> None:
    paths = create_leftovers(created_paths, temporary_folder, request.getfixturevalue(owner))
    remove_leftovers()
    assert all(path.exists() for path in paths)


@pytest.mark.parametrize("name", ["", "1", "999999999-x", "999999999-1-x", "-1-1-1", "a-b-c"])
def test_files_without_an_owner_are_kept(name: str, temporary_folder: Path, created_paths: list[Path]) -> None:
    paths = create_leftovers(created_paths, temporary_folder, name)
    remove_leftovers()
    assert all(path.exists() for path in paths)


def test_a_killed_process_has_ended_although_its_parent_has_not_waited() -> None:
    process = subprocess.Popen(["sleep", "600"])
    start = int(Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()[19])
    owner = replace(this_process(), pid=process.pid, start=start)
    assert not owner.has_ended()
    process.kill()
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
    assert owner.has_ended()
    process.wait()


def test_a_new_folder_is_private_and_kept(temporary_folder: Path) -> None:
    folder = new_folder()
    assert folder.parent == temporary_folder
    assert folder.stat().st_mode & 0o777 == 0o700
    remove_leftovers()
    assert folder.exists()
