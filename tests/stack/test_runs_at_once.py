"""Tests of runs that measure on one machine at the same time: each says so, and records it."""

from __future__ import annotations

import json
import signal
from pathlib import Path
from typing import Any

import pytest

from tests.command_fixtures import HANG_SECONDS, RunningTune, Sandbox, eventually, run_tune
from tests.repositories import skip_without_python_models, write_sleeper

RUN = ("--no-confirmation", "--sla-p95", "500ms", "--budget", "10m", "--measurement-interval", "100ms")


@pytest.fixture(autouse=True)
def model(sandbox: Sandbox) -> None:
    skip_without_python_models()
    write_sleeper(sandbox.working_folder / "models", milliseconds=8)


def start(sandbox: Sandbox, out: str, *arguments: str) -> tuple[RunningTune, Path]:
    """Start a run, wait until it has measured, and return it with its folder."""
    process = sandbox.fork(*RUN, *arguments, "--out", out, "models/sleeper")
    tables = (sandbox.working_folder / out).glob
    assert eventually(lambda: any(table.stat().st_size for table in tables("*/*/trials.csv")), HANG_SECONDS)
    assert process.poll() is None, process.communicate()
    (folder,) = tables("*/*/")
    return process, folder


def end(process: RunningTune, folder: Path) -> dict[str, Any]:
    """Interrupt a run and return its run.json."""
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=HANG_SECONDS)
    info = json.loads((folder / "run.json").read_text())
    assert isinstance(info, dict)
    return info


def test_each_run_and_doctor_name_the_other(sandbox: Sandbox) -> None:
    first, first_folder = start(sandbox, "first")
    second, second_folder = start(sandbox, "second")
    shown = "".join(run_tune(sandbox, "doctor").stdout.split())
    assert all(f"process{run.pid}measuresfor" in shown for run in (first, second))
    infos = end(first, first_folder), end(second, second_folder)
    for info, other, folder in zip(infos, (second, first), (second_folder, first_folder), strict=True):
        (noted,) = [run for run in info["other_runs"] if run["pid"] == other.pid]
        assert str(folder).endswith(noted["folder"].removeprefix("..."))
        sentence = f"another tune run measures on this machine (process {other.pid}, {noted['folder']})"
        assert any(note.startswith(sentence) for note in info["notes"])
    assert f"process{first.pid}" not in "".join(run_tune(sandbox, "doctor").stdout.split())


def test_a_sweep_warns_of_a_run_before_it_measures(sandbox: Sandbox) -> None:
    run, folder = start(sandbox, "first")
    swept = run_tune(sandbox, "sweep", "--concurrency", "1", "--measurement-interval", "100ms", "models/sleeper")
    end(run, folder)
    lines, warning = swept.stderr_lines, f"WARNING: another tune run measures on this machine (process {run.pid}, "
    (warned,) = [number for number, line in enumerate(lines) if line.startswith(warning)]
    assert warned < next(number for number, line in enumerate(lines) if line.startswith("1/1 "))
    (record,) = sandbox.working_folder.glob("results/*/*/sweep.json")
    assert any(f"process {run.pid}" in note for note in json.loads(record.read_text())["notes"])


def test_workers_of_one_study_are_no_other_runs(sandbox: Sandbox) -> None:
    shared = ("--storage", "sqlite:///study.db", "--study-name", "dlrm")
    first, first_folder = start(sandbox, "first", *shared)
    second, second_folder = start(sandbox, "second", *shared)
    infos = end(first, first_folder), end(second, second_folder)
    assert not {run["pid"] for info in infos for run in info["other_runs"]} & {first.pid, second.pid}
