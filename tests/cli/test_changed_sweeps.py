"""``tune sweep --resume`` keeps ``sweep.json`` if it refuses a sweep that has changed, or its server is at fault."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from optimizer.cli.sweep import read_sweep_arguments
from optimizer.core.files import write_json
from optimizer.core.signature import sign
from optimizer.core.trial import LoadPoint, Trial
from optimizer.options.option_reader import external_values
from optimizer.store.run_folder import SWEEP_FILE, RunFolder
from optimizer.store.trials_table import TrialsTable
from optimizer.study import sweep_output
from optimizer.study.environment import Environment
from optimizer.study.sweep_plan import SweepPlan, sweep_cells
from optimizer.study.sweeper import SweepTables
from tests.bad_input import assert_says
from tests.command_fixtures import Sandbox, Tune
from tests.conftest import measurement
from tests.repositories import doubler, serialized

SERVER = """\
#!/bin/sh
[ "$1" = --help ] || exit 1
echo "  --model-repository"
echo "  --model-control-mode"
"""
BEGAN = "2026-11-21T07:21:39+0000"
LOADS = (LoadPoint(1, 1), LoadPoint(1, 4))
OPTIONS = ("--concurrency", "1,4", "--target", "local", "--tritonserver", "./server", "./net.onnx")


@pytest.fixture
def finished(sandbox: Sandbox, monkeypatch: pytest.MonkeyPatch) -> RunFolder:
    """Return the folder of a finished sweep of net.onnx, on a server program that answers only --help."""
    here = sandbox.working_folder
    monkeypatch.chdir(here)
    (here / "net.onnx").write_bytes(serialized(doubler()))
    (here / "backends" / "onnxruntime").mkdir(parents=True)
    (here / "server").write_text(SERVER)
    (here / "server").chmod(0o700)
    arguments = read_sweep_arguments([*OPTIONS, "--backend-directory", "./backends"])
    environment = Environment.detect(arguments.options, print)
    task = environment.make_task(swept={})
    fingerprint = environment.fingerprint(task)
    plan = SweepPlan((task.baseline,), LOADS)
    folder = RunFolder.create("results", task.source.name)
    problem = task.problem
    table = SweepTables(
        folder, plan, lambda file: TrialsTable(file, problem.model, {}, fingerprint.id, problem.cpu_count)
    )
    for load in LOADS:
        table.append(Trial(0, task.baseline), load, measurement(100.0 * load.concurrency, 10))
    facts = {
        "options": arguments.request.given,
        "signature": sign(external_values(arguments.options)),
        "model": {"name": task.source.name, **task.source.facts},
        "began": BEGAN,
    }
    cells = sweep_cells(plan, table.read())
    document = sweep_output.sweep_document("done", facts, cells, (), {"wall_seconds": 1000.0})
    write_json(folder.path / SWEEP_FILE, document)
    return RunFolder(here / folder.path)


def record(folder: RunFolder) -> dict[str, Any]:
    document = json.loads((folder.path / SWEEP_FILE).read_text())
    assert isinstance(document, dict)
    return document


def throughputs(document: dict[str, Any]) -> list[float | None]:
    return [cell["throughput_infer_per_sec"] for cell in document["cells"]]


def assert_refused(tune: Tune, folder: RunFolder, *words: str) -> None:
    before = (folder.path / SWEEP_FILE).read_bytes()
    assert_says(tune("sweep", "--resume", folder.path), words)
    assert (folder.path / SWEEP_FILE).read_bytes() == before
    assert throughputs(record(folder)) == [100.0, 400.0]


def test_another_device_or_server_is_refused(finished: RunFolder, called_tune: Tune) -> None:
    server = Path("server")
    server.write_text(f"{server.read_text()}# another version\n")
    assert_refused(called_tune, finished, "trials.csv:2: was measured with another device, server or perf_analyzer")


def test_another_plan_is_refused(finished: RunFolder, called_tune: Tune) -> None:
    document = record(finished)
    document["options"]["max-batch-size"] = "2,4"
    write_json(finished.path / SWEEP_FILE, document)
    assert_refused(called_tune, finished, "trials.csv: trial 0 belongs to another sweep; start a new one")


def test_another_model_file_is_refused(finished: RunFolder, called_tune: Tune) -> None:
    other = doubler()
    other.producer_name = "another"
    Path("net.onnx").write_bytes(serialized(other))
    changed = ": the files of the model have changed since the sweep began (SHA-256 "
    assert_refused(called_tune, finished, changed, "restore the files, or begin a new sweep")


def test_a_server_without_the_backend_keeps_the_cells(finished: RunFolder, called_tune: Tune) -> None:
    Path("backends", "onnxruntime").rmdir()
    ended = called_tune("sweep", "--resume", finished.path)
    assert ended.code == 3, ended
    assert ended.errors[0].startswith("tune: net: backend 'onnxruntime' is not in "), ended
    after = record(finished)
    assert (after["status"], throughputs(after)) == ("failed", [100.0, 400.0])
    assert after["began"] == BEGAN
    assert after["wall_seconds"] > 1000.0
