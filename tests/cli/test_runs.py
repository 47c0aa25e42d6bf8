"""``tune runs``, ``tune cache`` and ``tune --version``: output, questions and refusals."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Sequence
from dataclasses import replace
from importlib import metadata
from pathlib import Path

import pytest

from optimizer.cli.commands import version_line
from optimizer.core.locks import LOCK_FILE, file_lock
from optimizer.study.batch.record import BatchFolder, BatchRecord, EntryRecord
from tests.command_fixtures import REPORT, RUN_SECONDS, TUNE, Sandbox, Tune
from tests.run_folders import write_run

RUNS = ("20261120-072139", "20261121-072139", "20261122-091502")


@pytest.fixture
def results(sandbox: Sandbox) -> Path:
    """Return the folder of results, with three runs of a model."""
    for name in RUNS:
        run = write_run(sandbox.working_folder / "results" / "doubler")
        run.rename(run.with_name(name))
    return sandbox.working_folder / "results"


def refuse(holder: str) -> None:
    raise AssertionError(f"held by {holder}")


def answered(sandbox: Sandbox, answer: str, words: Sequence[str]) -> tuple[int, str, str]:
    """Run ``tune`` on a terminal, type ``answer``, and return exit code, standard output and the terminal's text."""
    keyboard, terminal = os.openpty()
    try:
        os.write(keyboard, answer.encode())
        cache = {"TRITUNE_CACHE": str(sandbox.root / "cache"), "TMPDIR": str(sandbox.temporary)}
        done = subprocess.run(
            [TUNE, *words],
            cwd=sandbox.working_folder,
            env={**os.environ, **cache},
            stdin=terminal,
            stdout=subprocess.PIPE,
            stderr=terminal,
            text=True,
            timeout=RUN_SECONDS,
            check=False,
        )
        return done.returncode, done.stdout, os.read(keyboard, 10_000).decode()
    finally:
        os.close(keyboard)
        os.close(terminal)


# -- version ------------------------------------------------------------------------------------------------------


def test_the_version_is_printed(tune: Tune) -> None:
    shown = tune("--version", REPORT)
    assert (shown.code, shown.stdout, shown.stderr) == (0, f"tritune {metadata.version('tritune')}\n", "")


def test_the_version_of_a_package_that_is_not_installed_is_unknown() -> None:
    line = "no-such-package of an unknown version: the package is not installed (pip install .)"
    assert version_line("no-such-package") == line


# -- runs ---------------------------------------------------------------------------------------------------------


def test_runs_are_listed_the_newest_first(called_tune: Tune, sandbox: Sandbox, results: Path) -> None:
    damaged = results / "mlp" / "20261123-010000"
    damaged.mkdir(parents=True)
    (damaged / "run.json").write_text("{")
    listed = called_tune("runs")
    assert (listed.code, listed.stderr) == (0, "")
    header, *lines = listed.stdout.splitlines()
    assert header.split() == ["model", "run", "result", "infer/s", "bound", "size"]
    assert [line.split()[:3] for line in lines[:-1]] == [
        ["mlp", "20261123-010000", "damaged"],
        *(["doubler", name, "found"] for name in reversed(RUNS)),
    ]
    assert lines[1].rstrip().endswith("B")
    assert "p95 <= 20 ms" in lines[1]
    assert lines[-1].startswith("results/mlp/20261123-010000/run.json: not the record of a run (")
    document = json.loads(called_tune("runs", "--json", "doubler").stdout)
    assert [run["run"] for run in document] == list(reversed(RUNS))


def test_an_empty_folder_of_results_and_batches_are_named(called_tune: Tune, sandbox: Sandbox) -> None:
    assert called_tune("runs").stdout == "no runs in results; `tune models` lists what can be tuned\n"
    assert called_tune("runs", "--json").stdout == "[]\n"
    batch = write_batch(sandbox, ["doubler", "nothing"])
    lines = called_tune("runs").stdout.splitlines()
    assert lines[0].split() == ["suite", "batch", "result", "size"]
    assert lines[1].startswith("nightly  20261130-020000  1 of 2 runs passed, 1 failed  ")
    assert lines[2:] == ["batches are in results/batches; --results results/batches/SUITE lists their runs"]
    (document,) = json.loads(called_tune("runs", "--json").stdout)
    assert [document[key] for key in ("kind", "model", "suite", "run", "status")] == [
        "batch",
        None,
        "nightly",
        "20261130-020000",
        "finished",
    ]
    entries = [[entry[key] for key in ("entry", "model", "status", "fault")] for entry in document["entries"]]
    assert entries == [["first", "doubler", "found", None], ["nothing", "nothing", "failed", "no such model"]]
    shown = called_tune("runs", "--results", batch.parent).stdout.splitlines()[1]
    assert shown.split()[:2] == ["doubler", "20261130-020000/first"]
    assert called_tune("runs", "--delete", "nightly/20261130-020000", "--yes").code == 0
    assert not batch.exists()


def test_a_damaged_batch_is_listed(called_tune: Tune, sandbox: Sandbox) -> None:
    batch = write_batch(sandbox, ["doubler"])
    (batch / "batch.json").write_text("{}")
    lines = called_tune("runs").stdout.splitlines()
    assert lines[1].split()[:3] == ["nightly", "20261130-020000", "damaged"]
    fault = "results/batches/nightly/20261130-020000/batch.json: not the record of a batch (no 'entries')"
    assert lines[2].startswith(fault)
    (document,) = json.loads(called_tune("runs", "--json").stdout)
    assert (document["status"], document["entries"]) == ("damaged", [])


def write_batch(sandbox: Sandbox, models: Sequence[str]) -> Path:
    """Write a finished batch, whose second entry failed without a run, and return its folder."""
    folder = BatchFolder(sandbox.working_folder / "results" / "batches" / "nightly" / "20261130-020000")
    names = ("first", "second")[: len(models)]
    entries = [EntryRecord(name, "", "", "tune", name, state="found", verdict="PASS") for name in names]
    write_run(folder.path / "run").rename(folder.path / "first")
    (folder.path / "run").rmdir()
    if len(models) > 1:
        entries[1] = replace(entries[1], model=models[1], state="failed", verdict="", reason="no such model")
    folder.write(BatchRecord("nightly", "2026-11-30T02:00:00+0000", 60.0, tuple(entries), "finished"))
    return folder.path


def test_the_folder_of_a_model_or_a_batch_is_listed_too(called_tune: Tune, sandbox: Sandbox, results: Path) -> None:
    batch = sandbox.working_folder / "results" / "batches" / "nightly" / "20261130-020000"
    batch.parent.mkdir(parents=True)
    (results / "doubler").rename(batch)
    listed = [called_tune("runs", "--json", "--results", folder) for folder in (batch.parent, batch)]
    assert [[run["run"] for run in json.loads(ended.stdout)] for ended in listed] == [list(reversed(RUNS))] * 2


def test_commands_take_the_newest_run_by_name(called_tune: Tune, sandbox: Sandbox, results: Path) -> None:
    newest = results / "doubler" / RUNS[-1]
    for name in ("latest", "doubler", f"doubler/{RUNS[-1]}"):
        written = called_tune("report", name, "--format", "csv")
        assert (written.code, written.stdout) == (0, f"results/doubler/{RUNS[-1]}/measurements.csv\n")
        (newest / "measurements.csv").unlink()
        assert called_tune("explain", name, "--json").code == 0
        assert called_tune("emit", name).code == 0


def test_a_run_that_is_not_there_is_reported_with_the_command_that_lists_runs(
    called_tune: Tune, sandbox: Sandbox
) -> None:
    for words in (["verify", "latest"], ["explain", "dlrm"], ["emit", "latest"], ["plan", "latest", "--gpus", "2"]):
        ended = called_tune(*words)
        (line,) = ended.stderr_lines
        assert (ended.code, ended.stdout) == (2, "")
        assert line.endswith("(`tune runs` lists runs)")
    (line,) = called_tune("sweep", "--resume", "latest").stderr_lines
    assert line.endswith("(`tune runs` lists sweeps)")
    for words in (["report", "nightly"], ["runs", "--delete", "nightly", "--yes"]):
        (line,) = called_tune(*words).stderr_lines
        assert line.endswith("latest or <suite>/<batch> (`tune runs` lists runs and batches)")


def test_runs_are_deleted_together_or_not_at_all(called_tune: Tune, sandbox: Sandbox, results: Path) -> None:
    names = [f"doubler/{name}" for name in RUNS]
    for words in ([names[0], "nowhere"], [names[0], "doubler"], [names[0], ""]):
        ended = called_tune("runs", "--yes", "--delete", *words)
        assert (ended.code, len(ended.stderr_lines), ended.stdout) == (2, 1, "")
    with file_lock(results / names[1] / LOCK_FILE, refuse):
        ended = called_tune("runs", "--yes", "--delete", *names)
        assert (ended.code, len(ended.stderr_lines), ended.stdout) == (3, 1, "")
    assert sorted(path.name for path in (results / "doubler").iterdir()) == sorted(RUNS)
    ended = called_tune("runs", "--delete", names[0], names[1], f"results/{names[0]}", "--yes")
    assert (ended.code, ended.stderr) == (0, "")
    lines = ended.stdout.splitlines()
    assert [line.rpartition(" (")[0] for line in lines] == [f"deleted results/{name}" for name in names[:2]]
    assert [path.name for path in (results / "doubler").iterdir()] == [RUNS[2]]
    (entry,) = json.loads(called_tune("runs", "--delete", "latest", "--yes", "--json").stdout)
    assert entry["run"] == RUNS[2]
    assert list((results / "doubler").iterdir()) == []


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("runs doubler --delete latest", "tune: doubler: write the runs to delete after --delete, and no model"),
        ("runs --yes", "tune: --yes: works only with --delete; give that too, or leave it out"),
        ("runs --delete", "tune: argument --delete: expected at least one argument; `tune runs --help` shows"),
        ("runs nowhere", "tune: nowhere: no run of this model; results has runs of doubler"),
        ("cache --clean everything", "tune: --clean everything: write one or more of server, numpy, openvino"),
        ("cache --clean remote", "tune: --clean remote: write one or more of server, numpy, openvino"),
        ("cache --yes", "tune: --yes: works only with --clean; give that too, or leave it out"),
    ],
)
def test_bad_input_deletes_nothing(
    words: str, message: str, called_tune: Tune, sandbox: Sandbox, results: Path
) -> None:
    cached = sandbox.root / "cache" / "models"
    cached.mkdir(parents=True)
    ended = called_tune(*words.split(), env={"TRITUNE_CACHE": cached.parent})
    (line,) = ended.stderr_lines
    assert (ended.code, ended.stdout) == (2, "")
    assert line.startswith(message)
    assert len(list((results / "doubler").iterdir())) == len(RUNS)
    assert cached.exists()


@pytest.mark.parametrize("words", ["runs --delete latest", "cache --clean"])
def test_nothing_is_deleted_without_a_terminal_to_ask_on(
    words: str, tune: Tune, sandbox: Sandbox, results: Path
) -> None:
    cached = sandbox.root / "cache" / "models"
    cached.mkdir(parents=True)
    ended = tune(*words.split(), env={"TRITUNE_CACHE": cached.parent})
    (line,) = ended.stderr_lines
    flag = words.split()[1]
    assert (ended.code, ended.stdout) == (2, "")
    assert line == f"tune: {flag}: there is no terminal to ask on; give --yes to delete without a question"
    assert len(list((results / "doubler").iterdir())) == len(RUNS)
    assert cached.exists()


@pytest.mark.parametrize(("answer", "code"), [("y\n", 0), ("\x04", 1)])
def test_a_deletion_is_asked_for_on_a_terminal(answer: str, code: int, sandbox: Sandbox, results: Path) -> None:
    cached = sandbox.root / "cache" / "models"
    cached.mkdir(parents=True)
    ended, stdout, shown = answered(sandbox, answer, ["runs", "--delete", "latest"])
    assert (ended, stdout.startswith("deleted " if code == 0 else "nothing was deleted\n")) == (code, True)
    assert f"delete results/doubler/{RUNS[2]} (" in shown
    assert (results / "doubler" / RUNS[2]).exists() == bool(code)
    ended, stdout, shown = answered(sandbox, answer, ["cache", "--clean", "models"])
    assert (ended, stdout) == (code, "nothing was removed\n" if code else "removed models (0 bytes)\n")
    assert "remove models (0 bytes) from " in shown
    assert cached.exists() == bool(code)


# -- cache --------------------------------------------------------------------------------------------------------


def test_the_cache_is_shown_and_removed(called_tune: Tune, sandbox: Sandbox) -> None:
    cache = sandbox.root / "cache"
    env = {"TRITUNE_CACHE": cache}
    (cache / "models" / "mlp").mkdir(parents=True)
    (cache / "models" / "mlp" / "model.onnx").write_bytes(bytes(2000))
    (cache / "remote").mkdir()
    shown = called_tune("cache", env=env)
    assert (shown.code, shown.stderr) == (0, "")
    first, header, *lines = shown.stdout.splitlines()
    assert first == f"2.00 kB in {cache}"
    assert header.split() == ["kind", "size", "in", "the", "folder", "what", "it", "is"]
    assert [line.split()[0] for line in lines] == [
        *("server", "numpy", "openvino", "models", "onnx", "requests", "simulator", "remote"),
    ]
    document = json.loads(called_tune("cache", "--json", env=env).stdout)
    assert (document["folder"], document["size_bytes"]) == (str(cache), 2000)
    assert {
        "kind": "models",
        "description": "built models",
        "removable": True,
        "paths": [str(cache / "models")],
        "size_bytes": 2000,
    } in document["kinds"]
    removed = called_tune("cache", "--clean", "--yes", env=env)
    assert (removed.code, removed.stdout, removed.stderr) == (0, "removed models (2.00 kB)\n", "")
    assert [path.name for path in cache.iterdir()] == ["remote"]
    again = called_tune("cache", "--clean", "--yes", env=env)
    assert (again.code, again.stdout) == (0, f"nothing to remove in {cache}\n")
