"""Tests of the marks of measuring runs: which runs another process sees, and when they end."""

from __future__ import annotations

import os
import socket
from pathlib import Path

import pytest

from optimizer.core.measuring_runs import mark_measuring, other_runs
from optimizer.core.notes import OtherRun
from optimizer.core.process_owner import this_process
from tests.measuring_process import measuring

NOBODY = 65534


def folder_of(pid: int, study: str = "") -> str | None:
    """Return the folder that the process measures for, as another run sees it; None if it does not see it."""
    return next((run.folder for run in other_runs(study) if run.pid == pid), None)


def test_the_run_of_another_process_is_seen_until_the_process_is_killed() -> None:
    with measuring("/results/dlrm/20261130-081015") as pid:
        assert folder_of(pid) == "/results/dlrm/20261130-081015"
    assert folder_of(pid) is None


@pytest.mark.skipif(os.getuid() != 0, reason="only root can start the process of another user")
def test_the_run_of_another_user_is_seen() -> None:
    with measuring("/home/other/results", user=NOBODY) as pid:
        assert folder_of(pid) == "/home/other/results"


def test_of_a_long_path_the_end_is_seen_on_one_line() -> None:
    with measuring(f"/{100 * 'long/'}é\n/dlrm/20261130-081015") as pid:
        folder = folder_of(pid)
    assert folder is not None
    assert folder.startswith("...")
    assert folder.endswith(r"long/\xe9\n/dlrm/20261130-081015")


def test_workers_of_one_shared_study_are_not_other_runs() -> None:
    with measuring("/results/dlrm/20261130-081015", "dlrm in study.db") as pid:
        assert folder_of(pid, "dlrm in study.db") is None
        assert folder_of(pid, "dlrm in other.db")
        assert folder_of(pid)


def test_a_process_does_not_see_its_own_run(tmp_path: Path) -> None:
    with mark_measuring(tmp_path), mark_measuring(tmp_path):
        assert folder_of(os.getpid()) is None


def test_a_run_in_another_container_is_not_seen() -> None:
    other = OtherRun(4194305, f"/results/{os.getpid()}")  # no process has this number
    for namespace, is_seen in ((this_process().namespace + 1, False), (this_process().namespace, True)):
        with socket.socket(socket.AF_UNIX) as mark:
            mark.bind(f"\0tritune {other.pid} {namespace} 0 {other.folder}".encode())
            assert (other in other_runs()) is is_seen
