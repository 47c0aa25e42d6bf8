"""Runs of the whole ``tune`` beside each other, on a disk that fills up, and gone on with from elsewhere."""

from __future__ import annotations

import csv
import json
import signal
from pathlib import Path

import pytest

from tests.command_fixtures import Ended, Playground, eventually, run_tune
from tests.stack.test_kill import (
    a_load_is_measured,
    a_row_is_written,
    info,
    rows,
    run_folder,
    steady,
)
from tests.storage_fixtures import SmallDisk, small_disk

__all__ = ["small_disk", "steady"]

END_SECONDS = 120.0
SHORT = ("--sla-p95", "500ms", "--budget", "7s", "--max-trials", "1")


def test_two_runs_at_once(steady: Playground) -> None:
    """Of one folder the second run is refused, in folders of their own neither harms the other."""
    first = steady.start(*SHORT, "steady.yaml")
    a_load_is_measured(steady, first)
    folder = run_folder(steady)
    refused = run_tune(steady, "--resume", folder)
    assert refused.code == 3
    (complaint,) = refused.complaints
    assert complaint.startswith(f"tune: {folder}: process {first.pid} on ")
    second = steady.start(*SHORT, "steady.yaml")
    for process in (first, second):
        _, stderr = process.communicate(timeout=END_SECONDS)
        assert process.returncode in (0, 1)  # together they may be too slow for a verdict
        assert stderr == ""
        assert steady.shared_memory(process.pid) == []
    folders = list((steady.here / "results").glob("*/*"))
    assert len(folders) == 2
    for folder in folders:
        assert json.loads((folder / "run.json").read_text())["status"] in ("found", "none")
        measured = csv.DictReader((folder / "trials.csv").read_text().splitlines())
        assert {row["status"] for row in measured} == {"ok"}
        assert not list(folder.glob(".*"))


@pytest.mark.alone
def test_a_run_is_gone_on_with_from_another_folder(steady: Playground) -> None:
    storage = ("--storage", "sqlite:///study.db")
    process = steady.start(*SHORT, *storage, "steady.yaml")
    a_row_is_written(steady, process)
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=5)
    measured = rows(steady)
    elsewhere = steady.root / "elsewhere"
    elsewhere.mkdir()
    ended = run_tune(steady, "--resume", run_folder(steady), cwd=elsewhere)
    assert (ended.code, ended.stderr) == (0, "")
    assert rows(steady)[: len(measured)] == measured
    assert info(steady)["status"] == "found"
    assert list(elsewhere.iterdir()) == []  # no database of its own


@pytest.mark.alone
def test_a_disk_that_fills_up(steady: Playground, small_disk: SmallDisk) -> None:
    def on_the_disk(*arguments: str | Path) -> Ended:
        process = steady.start(*arguments, under=small_disk.under)
        stdout, stderr = process.communicate(timeout=END_SECONDS)
        return Ended(process.returncode, stdout, stderr, process.pid)

    process = steady.start(*SHORT, "steady.yaml", under=small_disk.under)
    assert eventually(lambda: list(small_disk.inside.glob("*/*/trials.csv")), END_SECONDS)
    small_disk.fill()
    _, stderr = process.communicate(timeout=END_SECONDS)
    assert process.returncode == 3
    (complaint,) = Ended(3, "", stderr, process.pid).complaints
    assert "results/sleeper/" in complaint
    assert ": No space left on device; " in complaint
    assert steady.processes() == []
    (folder,) = small_disk.inside.glob("*/*")
    measured = (folder / "trials.csv").read_bytes()
    assert json.loads((folder / "run.json").read_text())["status"] in (
        "running",
        "failed",
    )
    assert not list(folder.glob(".*"))
    small_disk.free()
    ended = on_the_disk("--resume", Path("results", folder.parent.name, folder.name))
    assert (ended.code, ended.stderr) == (0, "")
    whole = measured[: measured.rfind(b"\n") + 1]
    assert (folder / "trials.csv").read_bytes().startswith(whole)
