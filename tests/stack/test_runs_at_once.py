"""Tests of runs that measure on one machine at the same time: each says so, and records it."""

from __future__ import annotations

import json
import signal
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from optimizer.core.measuring_runs import other_runs
from tests.command_fixtures import HANG_SECONDS, Ended, RunningTune, Sandbox, eventually, open_sandbox, run_tune
from tests.repositories import skip_without_python_models, sleeper_program, write_python_model, write_sleeper

RUN = ("--no-confirmation", "--sla-p95", "500ms", "--budget", "10m")
SHARED = ("--storage", "sqlite:///study.db", "--study-name", "dlrm")


def start(sandbox: Sandbox, out: str, *arguments: str) -> tuple[RunningTune, Path]:
    """Start a run, wait until it is seen as one that measures, and return it with its folder."""
    process = sandbox.fork(*RUN, *arguments, "--out", out, "models/slow")
    assert eventually(lambda: process.pid in {run.pid for run in other_runs()}, HANG_SECONDS)
    (folder,) = (sandbox.working_folder / out).glob("*/*/")
    return process, folder


def end(process: RunningTune, folder: Path) -> dict[str, Any]:
    """Interrupt a run and return its run.json."""
    assert process.poll() is None, "it measured next to all others"
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=HANG_SECONDS)
    info = json.loads((folder / "run.json").read_text())
    assert isinstance(info, dict)
    return info


@dataclass(frozen=True)
class Runs:
    """Three runs at the same time, and the commands next to them. Their model loads until they are interrupted.

    The first has a study of its own, and the other two are the workers of another study. ``pids``, ``folders`` and
    ``infos`` have the process, the folder and the run.json of each.
    """

    pids: tuple[int, ...]
    folders: tuple[Path, ...]
    infos: tuple[dict[str, Any], ...]
    doctor: Ended
    sweep: Ended
    sweep_record: dict[str, Any]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Runs]:
    skip_without_python_models()
    with open_sandbox(tmp_path_factory.mktemp("runs")) as sandbox:
        models = sandbox.working_folder / "models"
        write_python_model(models, "slow", sleeper_program(milliseconds=8, loading_seconds=HANG_SECONDS))
        write_sleeper(models, milliseconds=8)
        options: dict[str, tuple[str, ...]] = {"first": (), "second": SHARED, "third": SHARED}
        started = [start(sandbox, out, *arguments) for out, arguments in options.items()]
        doctor = run_tune(sandbox, "doctor")
        sweep = run_tune(sandbox, "sweep", "--concurrency", "1", "--measurement-interval", "100ms", "models/sleeper")
        (record,) = sandbox.working_folder.glob("results/*/*/sweep.json")
        processes, folders = zip(*started, strict=True)
        infos = tuple(end(process, folder) for process, folder in started)
        yield Runs(
            tuple(process.pid for process in processes), folders, infos, doctor, sweep, json.loads(record.read_text())
        )


def test_each_run_and_doctor_name_the_others(runs: Runs) -> None:
    shown = "".join(runs.doctor.stdout.split())
    assert all(f"process{pid}measuresfor" in shown for pid in runs.pids)
    for reader, other in ((0, 1), (0, 2), (1, 0), (2, 0)):
        info, pid, folder = runs.infos[reader], runs.pids[other], runs.folders[other]
        (noted,) = [run for run in info["other_runs"] if run["pid"] == pid]
        assert str(folder).endswith(noted["folder"].removeprefix("..."))
        sentence = f"another tune run measures on this machine (process {pid}, {noted['folder']})"
        assert any(note.startswith(sentence) for note in info["notes"])
    assert not {run.pid for run in other_runs()} & {*runs.pids}, "they have ended"


def test_a_sweep_warns_of_a_run_before_it_measures(runs: Runs) -> None:
    lines = runs.sweep.stderr_lines
    for pid in runs.pids:
        warning = f"WARNING: another tune run measures on this machine (process {pid}, "
        (warned,) = [number for number, line in enumerate(lines) if line.startswith(warning)]
        assert warned < next(number for number, line in enumerate(lines) if line.startswith("1/1 "))
        assert any(f"process {pid}" in note for note in runs.sweep_record["notes"])


def test_workers_of_one_study_are_no_other_runs(runs: Runs) -> None:
    workers = set(runs.pids[1:])
    assert not {run["pid"] for info in runs.infos[1:] for run in info["other_runs"]} & workers
