"""Tests for two runs at once, for a resume from another folder, and for a disk that fills up."""

from __future__ import annotations

import csv
import json
import signal
from pathlib import Path

from tests.command_fixtures import (
    RUN_SECONDS,
    UNDECIDED,
    Ended,
    Playground,
    assert_search_ended,
    eventually,
    run_tune,
)
from tests.stack.test_kill import (
    a_load_is_measured,
    a_row_is_written,
    rows,
    run_folder,
    steady,
)
from tests.storage_fixtures import SmallDisk, small_disk

__all__ = ["small_disk", "steady"]

SHORT = (
    "--sla-p95",
    "500ms",
    "--budget",
    "3m",
    "--max-trials",
    "1",
    "--no-confirmation",
    "--measurement-interval",
    "100ms",
)


def test_two_runs_at_once(steady: Playground) -> None:
    """A second run in the same folder is refused; runs in two folders do not affect each other."""
    first = steady.fork(*SHORT, "steady.yaml")
    a_load_is_measured(steady, first)
    folder = run_folder(steady)
    first.send_signal(signal.SIGSTOP)  # the second command may take longer than the rest of the first run
    refused = run_tune(steady, "--resume", folder)
    first.send_signal(signal.SIGCONT)
    assert refused.code == 3
    (complaint,) = refused.complaints
    assert complaint.startswith(f"tune: {folder}: process {first.pid} on ")
    second = steady.fork(*SHORT, "steady.yaml")
    for process in (first, second):
        _, stderr = process.communicate(timeout=RUN_SECONDS)
        assert process.returncode in (UNDECIDED, 1)  # together they may be too slow for a stable measurement
        assert stderr == ""
        assert steady.shared_memory(process.pid) == []
    folders = list((steady.working_folder / "results").glob("*/*"))
    assert len(folders) == 2
    for folder in folders:
        assert json.loads((folder / "run.json").read_text())["status"] in ("found", "none")
        measured = csv.DictReader((folder / "trials.csv").read_text().splitlines())
        assert {row["status"] for row in measured} == {"ok"}
        assert not list(folder.glob(".*"))


def test_a_run_is_resumed_from_another_folder(steady: Playground) -> None:
    storage = ("--storage", "sqlite:///study.db")
    process = steady.fork(*SHORT, *storage, "steady.yaml")
    a_row_is_written(steady, process)
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=RUN_SECONDS)
    measured = rows(steady)
    other = steady.root / "other"
    other.mkdir()
    refused = run_tune(steady, "--resume", run_folder(steady), cwd=other)  # the folder may come from anywhere
    database = f"sqlite:///{steady.working_folder}/study.db"
    assert (refused.code, refused.complaints[0].endswith(f"give --storage {database}")) == (2, True), refused
    first_seconds = json.loads((run_folder(steady) / "run.json").read_text())["times"]["wall_seconds"]
    assert first_seconds > 0
    ended = run_tune(steady, "--resume", run_folder(steady), "--storage", database, cwd=other)
    assert_search_ended(ended, run_folder(steady))
    assert rows(steady)[: len(measured)] == measured
    info = json.loads((run_folder(steady) / "run.json").read_text())
    second_seconds = sum(float(row["measure_seconds"]) for row in rows(steady)[len(measured) :])
    assert info["result"]["wall_seconds"] > first_seconds + second_seconds, "of both sessions"
    assert list(other.iterdir()) == []  # no database of its own


def test_a_disk_that_fills_up(steady: Playground, small_disk: SmallDisk) -> None:
    def on_the_disk(*arguments: str | Path) -> Ended:
        process = steady.start(*arguments, under=small_disk.command_prefix)
        stdout, stderr = process.communicate(timeout=RUN_SECONDS)
        return Ended(process.returncode, stdout, stderr, process.pid)

    process = steady.start(*SHORT, "steady.yaml", under=small_disk.command_prefix)
    assert eventually(lambda: list(small_disk.path.glob("*/*/trials.csv")), RUN_SECONDS)

    def has_ended_on_a_full_disk() -> bool:
        small_disk.fill()  # again and again, because the run removes temporary files
        return process.poll() is not None

    assert eventually(has_ended_on_a_full_disk, RUN_SECONDS)
    _, stderr = process.communicate(timeout=RUN_SECONDS)
    assert process.returncode == 3
    (complaint,) = Ended(3, "", stderr, process.pid).complaints
    assert "results/sleeper/" in complaint
    assert ": No space left on device; " in complaint
    assert steady.processes() == []
    (folder,) = small_disk.path.glob("*/*")
    measured = (folder / "trials.csv").read_bytes()
    assert json.loads((folder / "run.json").read_text())["status"] in (
        "running",
        "failed",
    )
    assert not list(folder.glob(".*"))
    small_disk.free()
    ended = on_the_disk("--resume", Path("results", folder.parent.name, folder.name))
    assert_search_ended(ended, folder)
    whole = measured[: measured.rfind(b"\n") + 1]
    assert (folder / "trials.csv").read_bytes().startswith(whole)
