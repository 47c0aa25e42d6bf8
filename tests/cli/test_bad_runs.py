"""Runs that cannot be written, continued or verified, and a missing server, give one line."""

from __future__ import annotations

import json
import subprocess
from dataclasses import asdict
from pathlib import Path

import pytest

from optimizer.machine import hardware
from optimizer.options.run_options import RunOptions
from optimizer.store.run_folder import SCHEMA_VERSION
from tests.bad_input import (
    CONFIG,
    LONG,
    assert_says,
    entries,
    tune_without_server,
    without_server,
)
from tests.command_fixtures import TUNE, Ended, Sandbox, Tune
from tests.repositories import doubler, write_model


def test_a_read_only_results_folder_is_reported(called_tune: Tune, sandbox: Sandbox) -> None:
    """Permissions do not stop root, so the folder is a read-only mount in a separate mount namespace."""
    (sandbox.working_folder / "results").mkdir()
    mount = "mount --bind results results && mount -o remount,bind,ro results"
    space = ["unshare", "--map-root-user", "--mount", "sh", "-c"]
    if subprocess.run([*space, mount], cwd=sandbox.working_folder, capture_output=True, check=False).returncode:
        pytest.skip("mounting is not possible here")
    command = [*space, f'{mount} && exec "$0" "$@"', str(TUNE), "--sla-p95", "20ms", "mlp"]
    done = subprocess.run(command, cwd=sandbox.working_folder, capture_output=True, text=True, check=False)
    assert_says(
        Ended(done.returncode, done.stdout, done.stderr, 0), ("folder results: ", "Read-only file system", "--out")
    )
    assert entries(sandbox.working_folder / "results") == set()


def write_run(folder: Path, text: str) -> None:
    folder.mkdir(parents=True)
    (folder / "run.json").write_text(text)


def record(**options: object) -> str:
    kept = {**asdict(RunOptions("mlp", {"p95": 10.0})), **options}
    return json.dumps({"schema_version": SCHEMA_VERSION, "options": kept})


def test_resuming_a_folder_without_run_json_is_refused(called_tune: Tune, sandbox: Sandbox) -> None:
    (sandbox.working_folder / "empty").mkdir()
    for run in ("nowhere", "empty", LONG):
        ended = tune_without_server(called_tune, sandbox, "--resume", run)
        assert_says(ended, (f"--resume {run[:100]}", "run.json", "give a run's folder"))


REFUSED_RUNS = {
    "a model argument": (
        record(),
        "--resume run mlp",
        ("--resume run: the run has its own model; leave 'mlp' out",),
    ),
    "different settings": (
        record(),
        "--resume run --sla-p95 5ms --seed 3 --budget 5m",
        ("--resume run", "leave --sla-p95, --seed out"),
    ),
    "an invalid objective": (record(objectives=["speed"]), "verify run", ("run/run.json: ", "--objective speed")),
    "a storage that was not given": (
        record(storage="sqlite:///other.db"),
        "--resume run",
        ("--resume run: ", "outside its folder", "give --storage sqlite:///other.db"),
    ),
    "a storage behind the folder": (
        record(storage="run/../other.journal"),
        "verify run",
        ("verify run: ", "outside its folder", "give --storage run/../other.journal"),
    ),
    "a database server": (
        record(storage="postgresql://me@host/db"),
        "--resume run",
        ("--resume run: ", "outside its folder", "give --storage postgresql://me@host/db"),
    ),
    "a model named like a flag": (record(model="--help"), "--resume run", ("no model '--help'",)),
    "another file of options": (
        record(),
        "--resume run --from-model-analyzer f",
        ("--resume run keeps the options of the run; leave --from-model-analyzer out",),
    ),
    "a program that was not given": (
        record(target="local", tritonserver="./evil"),
        "--resume run",
        ("--resume run: run.json was not written by your tune", "add --target local --tritonserver ./evil"),
    ),
    "an address that was not given": (
        record(target="remote", url="h:1", headers=["a:$SECRET"]),
        "verify run --target remote",
        ("verify run: run.json was not written by your tune", "add --url h:1 --header 'a:$SECRET'"),
    ),
    "a repository that was not given": (
        record(model="m", model_repository="models"),
        "--resume run --budget 5m",
        ("--resume run: run.json was not written by your tune", "add --model-repository models"),
    ),
    "a model in the folder of the run": (
        record(model="run"),
        "--resume run",
        ("--resume run: run.json was not written by your tune", "add run"),
    ),
    "another model for a test": (
        record(),
        "verify run mlp",
        ("verify run: the run has its own model; leave 'mlp' out",),
    ),
    "a redacted password": (
        record(storage="postgresql://u:***@host/db"),
        "--resume run",
        ("--resume run: ", "password", "--storage"),
    ),
}


@pytest.mark.parametrize("case", REFUSED_RUNS)
def test_a_run_that_cannot_be_continued_or_verified_is_refused(
    case: str, called_tune: Tune, sandbox: Sandbox
) -> None:
    text, arguments, words = REFUSED_RUNS[case]
    write_run(sandbox.working_folder / "run", text)
    assert_says(tune_without_server(called_tune, sandbox, *arguments.split()), words)


@pytest.mark.parametrize("name", ["trials.csv", "study.journal", "logs", "logs/commands.log"])
def test_a_run_whose_file_is_a_link_is_not_continued(name: str, called_tune: Tune, sandbox: Sandbox) -> None:
    write_run(sandbox.working_folder / "run", record())
    path = sandbox.working_folder / "run" / name
    path.parent.mkdir(exist_ok=True)
    path.symlink_to(sandbox.working_folder)
    for words in (("--resume", "run"), ("verify", "--fresh", "run")):
        assert_says(
            tune_without_server(called_tune, sandbox, *words),
            (f"run/{name}: is a link", "replace it by that file"),
        )


BROKEN_RECORDS = {
    "": ("line 1 column 1",),
    '{"schema_version": 1}': ("no 'options'",),
    '{"schema_version": 2, "options": {}}': ("schema_version 2", f"reads {SCHEMA_VERSION}", "begin a new run"),
    '{"schema_version": 1, "options": {}}': ("options.model",),
    record(model=5): ("options.model",),
    record(budget_seconds="long"): ("options.budget_seconds",),
    record(objectives=5): ("options.objectives",),
    record(sla_ms={"p95": "20ms"}): ("options.sla_ms.p95",),
    record(colour="red"): ("'colour'",),
    record(budget_seconds=-1.0): ("--budget -1s",),
    record(max_trials=0): ("--max-trials 0",),
    record(sla_ms={"p100": 20.0}): ("'p100' is not a metric",),
    record(objectives=["speed"]): ("--objective speed",),
    record(search="best"): ("--search best: ", "tpe"),
    record(objectives=["memory"]): (
        "--search simulated ranks by throughput or goodput; with --objective memory take tpe",
    ),
    record(min_throughput="much"): ("--min-throughput much",),
}


@pytest.mark.parametrize("text", BROKEN_RECORDS)
def test_resume_reports_an_invalid_run_json(text: str, called_tune: Tune, sandbox: Sandbox) -> None:
    write_run(sandbox.working_folder / "run", text)
    ended = tune_without_server(called_tune, sandbox, "--resume", "run")
    assert_says(ended, ("run/run.json: ", *BROKEN_RECORDS[text]))


# -- the environment --------------------------------------------------------------------------------------------


@pytest.mark.skipif(bool(hardware.gpu_names()), reason="needs a machine without a GPU")
def test_the_energy_objective_without_a_gpu_ends_with_exit_code_3(called_tune: Tune, sandbox: Sandbox) -> None:
    ended = tune_without_server(called_tune, sandbox, "--objective", "energy", "mlp")
    assert_says(ended, ("--objective energy: ", "NVIDIA GPU", "throughput, latency-p95 or memory"), code=3)


def test_a_server_that_cannot_be_downloaded_ends_with_exit_code_3(tune: Tune, sandbox: Sandbox) -> None:
    """Valid input gets as far as the server, which pip then tries to download; the tests above rely on that."""
    write_model(sandbox.working_folder / "models", "m", CONFIG, doubler())
    arguments = ["--sla-p95", "20ms", "--model-repository", "models", "m"]
    ended = tune(*arguments, env=without_server(sandbox))
    assert_says(ended, ("pip could not fetch the server: ", "nvidia-pytriton==0.7.0", "pip config list"), code=3)
    assert ended.stdout == ""
    assert not (sandbox.working_folder / "results").exists()
