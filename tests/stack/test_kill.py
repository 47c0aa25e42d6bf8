"""Tests for killed and interrupted runs: no process is left, no measurement is lost, and the run can be resumed."""

from __future__ import annotations

import contextlib
import csv
import json
import signal
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

from optimizer.config.model_source import ModelSource
from optimizer.core.candidate import Candidate
from optimizer.deploy.embedded_target import EmbeddedTarget
from optimizer.deploy.server_process import remove_environment_folders
from optimizer.deploy.target_settings import TargetSettings
from optimizer.results.finished_run import read_run, why_unfinished
from tests.command_fixtures import (
    FINISHED,
    HANG_SECONDS,
    RUN_SECONDS,
    Ended,
    RunningTune,
    Sandbox,
    assert_search_ended,
    eventually,
    run_tune,
)
from tests.programs import write_program
from tests.repositories import skip_without_python_models, write_sleeper
from tests.run_folders import change_info

PROFILE = """\
model: {repository: models, name: sleeper}
load: {max_concurrency: 2}
space:
  max_queue_delay_microseconds: [off, 0, 1000]
  instance_group_count: [1]
"""
STUDY = ("--sla-p95", "500ms", "--budget", "3m", "--max-trials", "3", "--no-confirmation")
SHORT = ("--max-trials", "1", "--measurement-interval", "100ms")
MORE_TRIALS = ("--max-trials", "100")  # a study that is still running whenever a signal comes


@pytest.fixture
def steady(sandbox: Sandbox) -> Sandbox:
    """Return a sandbox with the profile ``steady.yaml`` of a model whose batches all take 8 ms."""
    skip_without_python_models()
    write_sleeper(sandbox.working_folder / "models", milliseconds=8)
    (sandbox.working_folder / "steady.yaml").write_text(PROFILE)
    return sandbox


# -- state of a run ----------------------------------------------------------------------------------


def run_folder(sandbox: Sandbox) -> Path:
    (folder,) = (sandbox.working_folder / "results").glob("*/*")
    return folder


def content(sandbox: Sandbox, name: str) -> bytes:
    """Return the content of a file in the run's folder; empty if it does not exist."""
    contents = [path.read_bytes() for path in (sandbox.working_folder / "results").glob(f"*/*/{name}")]
    return contents[0] if contents else b""


def rows(sandbox: Sandbox) -> list[dict[str, str]]:
    return list(csv.DictReader(content(sandbox, "trials.csv").decode().splitlines()))


def info(sandbox: Sandbox) -> dict[str, Any]:
    document = json.loads(content(sandbox, "run.json"))
    assert isinstance(document, dict)
    return document


def named(sandbox: Sandbox, name: str) -> list[psutil.Process]:
    """Return the processes of the run whose program has this name.

    ``Process.exe()`` is not used: it keeps the program that a process had before its ``exec``.
    """
    processes = []
    for process in sandbox.processes():
        with contextlib.suppress(FileNotFoundError, PermissionError, ProcessLookupError):
            if Path(f"/proc/{process.pid}/exe").readlink().name == name:
                processes.append(process)
    return processes


def wait_for(condition: Callable[[], object], process: RunningTune) -> None:
    """Wait until ``condition`` is true; fail if ``process`` ends before."""
    assert eventually(lambda: condition() or process.poll() is not None, HANG_SECONDS)
    if process.poll() is not None:
        pytest.fail(f"it has ended: {process.communicate()}")


def kill_9(processes: list[psutil.Process]) -> None:
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()


# -- kill -9 of tune --------------------------------------------------------------------------------------------

Moment = Callable[[Sandbox, RunningTune], None]


def server_starts(sandbox: Sandbox, process: RunningTune) -> None:
    wait_for(lambda: named(sandbox, "tritonserver"), process)


def model_loads(sandbox: Sandbox, process: RunningTune) -> None:
    before = content(sandbox, "logs/tritonserver.log").count(b"loading: sleeper")
    wait_for(lambda: content(sandbox, "logs/tritonserver.log").count(b"loading: sleeper") > before, process)


def a_load_is_measured(sandbox: Sandbox, process: RunningTune) -> None:
    wait_for(lambda: named(sandbox, "perf_analyzer"), process)


def a_row_is_written(sandbox: Sandbox, process: RunningTune) -> None:
    before = len(content(sandbox, "trials.csv"))
    wait_for(lambda: len(content(sandbox, "trials.csv")) > before, process)


MOMENTS: dict[str, Moment] = {
    "the server starts": server_starts,
    "the model loads": model_loads,
    "a load is measured": a_load_is_measured,
    "a row is written": a_row_is_written,
}


def test_a_run_killed_at_any_moment_leaves_nothing_and_is_resumed(steady: Sandbox) -> None:
    """One study, killed at every moment in turn and resumed each time, comes to its end."""
    killed: list[int] = []
    for name, moment in MOMENTS.items():
        arguments = (*STUDY, "--max-trials", "2", "steady.yaml") if not killed else ("--resume", run_folder(steady))
        before = content(steady, "trials.csv")
        process = steady.fork(*arguments)
        moment(steady, process)
        # folders of killed runs are removed before a server starts
        assert [folder.name.split("-")[1] for folder in steady.temporary.iterdir()] == [str(process.pid)], name
        process.kill()
        process.communicate()
        killed.append(process.pid)
        assert eventually(lambda: steady.processes() == [], HANG_SECONDS), f"{name}: {steady.processes()}"
        assert not any(steady.shared_memory(pid) for pid in killed), name
        assert content(steady, "trials.csv").startswith(before[: before.rfind(b"\n") + 1]), name
    before = content(steady, "trials.csv")
    ended = run_tune(steady, "--resume", run_folder(steady), "--max-trials", "3", "--json")
    assert content(steady, "trials.csv").startswith(before[: before.rfind(b"\n") + 1])
    assert_complete(steady, ended)


def assert_complete(sandbox: Sandbox, ended: Ended) -> None:
    """Assert that the study has all trials, and a recommendation if a load was steady."""
    document, table = json.loads(ended.stdout), rows(sandbox)
    assert document["trials"] == len({row["trial"] for row in table}) == 3
    assert document["measurements"] + document["confirmations"] == len(table)
    assert (document["recommended"] is not None) is assert_search_ended(ended, run_folder(sandbox))


def test_the_next_run_cleans_up_after_all_processes_were_killed_at_once(steady: Sandbox) -> None:
    """No process is left to remove the shared memory: the next run does."""
    process = steady.fork(*STUDY, *MORE_TRIALS, "steady.yaml")
    a_load_is_measured(steady, process)
    tune = psutil.Process(process.pid)
    tune.suspend()  # it stops no server and loads no model now
    regions = steady.shared_memory(process.pid)
    assert regions
    everything = [tune, *steady.processes()]
    for running in everything:
        with contextlib.suppress(psutil.NoSuchProcess):
            running.suspend()  # so that none can clean up after another
    kill_9(everything)
    process.communicate()
    assert eventually(lambda: steady.processes() == [], HANG_SECONDS), steady.processes()
    assert steady.shared_memory(process.pid) == regions
    assert list(steady.temporary.iterdir())
    resumed = steady.fork("--resume", run_folder(steady))
    server_starts(steady, resumed)
    assert steady.shared_memory(process.pid) == []
    assert not list(steady.temporary.glob(f"tritune-{process.pid}-*"))
    resumed.send_signal(signal.SIGTERM)
    assert resumed.wait(timeout=HANG_SECONDS) == 130


# -- signals ----------------------------------------------------------------------------------------------------


def interrupted(sandbox: Sandbox, moment: Moment, *signals: signal.Signals, json: bool = False) -> Ended:
    """Run a study that gets ``signals`` at ``moment``; assert that it leaves nothing behind."""
    process = sandbox.fork(*STUDY, *MORE_TRIALS, *(["--json"] if json else []), "steady.yaml")
    moment(sandbox, process)
    for signum in signals:
        process.send_signal(signum)
        time.sleep(0.1)  # between two presses of Ctrl-C
    stdout, stderr = process.communicate(timeout=HANG_SECONDS)
    assert sandbox.processes() == []
    assert sandbox.shared_memory(process.pid) == []
    assert list(sandbox.temporary.iterdir()) == []
    return Ended(process.returncode, stdout, stderr, process.pid)


def has_best(sandbox: Sandbox) -> bool:
    """Return whether the run so far has a best measurement."""
    if not content(sandbox, "trials.csv"):
        return False
    outcome = read_run(str(run_folder(sandbox)), str(sandbox.working_folder / "results")).outcome
    return outcome is not None and outcome.recommended is not None


def test_ctrl_c_twice_ends_with_the_best_so_far(steady: Sandbox) -> None:
    def measured_and_measuring(sandbox: Sandbox, process: RunningTune) -> None:
        wait_for(lambda: has_best(sandbox), process)  # an unstable measurement is none, if it was not disturbed
        wait_for(lambda: named(sandbox, "perf_analyzer"), process)

    ended = interrupted(steady, measured_and_measuring, signal.SIGINT, signal.SIGINT)
    assert (ended.code, ended.stderr) == (130, "")
    measured = [float(row["throughput_infer_per_sec"] or 0) for row in rows(steady)]
    (line,) = (line for line in ended.stdout.splitlines() if line.startswith("best so far"))
    best = float(line.split()[3].replace(",", ""))
    assert any(best == pytest.approx(throughput, rel=0.01) for throughput in measured), (
        "a disturbed one may be higher"
    )
    (line,) = (line for line in ended.stdout.splitlines() if line.startswith("continue"))
    assert line.split()[-3:-1] == ["tune", "--resume"]
    assert steady.working_folder / line.split()[-1] == run_folder(steady)
    assert info(steady)["status"] == "interrupted"
    assert info(steady)["result"]["measurements"] == len(rows(steady))


@pytest.mark.parametrize(("signum", "moment"), [(signal.SIGTERM, server_starts), (signal.SIGHUP, model_loads)])
def test_signals_end_it_at_once(signum: signal.Signals, moment: Moment, steady: Sandbox) -> None:
    ended = interrupted(steady, moment, signum, json=True)
    assert (ended.code, ended.stderr) == (130, "")
    document = json.loads(ended.stdout)
    assert document["status"] == "interrupted"
    assert document["measurements"] == len(rows(steady))
    assert info(steady)["status"] == "interrupted"


def test_a_continued_test_that_does_not_end_leaves_the_search_ended(steady: Sandbox) -> None:
    if not assert_search_ended(run_tune(steady, *STUDY, *SHORT, "steady.yaml"), run_folder(steady)):
        pytest.skip("no load was steady on this busy machine")
    assert info(steady)["status"] == "found"
    reference = run_folder(steady) / "reference.npz"
    outputs = reference.read_bytes()
    reference.write_bytes(outputs[:10])
    failed = run_tune(steady, "verify", "--budget", "2m", run_folder(steady))
    assert failed.code == 2, failed
    assert "reference.npz" in failed.errors[0]
    assert (info(steady)["status"], info(steady)["reason"]) == ("found", "")
    reference.write_bytes(outputs)
    before = info(steady)
    killed = steady.fork("verify", "--budget", "2m", run_folder(steady))
    a_row_is_written(steady, killed)
    killed.kill()
    killed.communicate()
    assert eventually(lambda: steady.processes() == [], HANG_SECONDS), steady.processes()
    after = info(steady)
    assert after["confirmation_plan"] is not None
    for key in ("status", "verdict", "reason", "notes", "result"):
        assert after[key] == before[key]
    assert why_unfinished(read_run(run_folder(steady))) == ""
    change_info(run_folder(steady), confirmation_complete=True)
    process = steady.fork("verify", "--budget", "2m", run_folder(steady))
    server_starts(steady, process)
    process.send_signal(signal.SIGINT)
    stdout, stderr = process.communicate(timeout=HANG_SECONDS)
    assert process.returncode == 130, stderr
    (line,) = (line for line in stdout.splitlines() if line.startswith("continue"))
    assert line.split()[-3:-1] == ["tune", "verify"]
    assert (info(steady)["status"], info(steady)["confirmation_complete"]) == ("found", True)


def test_signals_that_nohup_ignores_stay_ignored(steady: Sandbox) -> None:
    """The run continues after a hang-up."""
    process = steady.start(*STUDY, *MORE_TRIALS, "steady.yaml", under=["nohup"])
    a_load_is_measured(steady, process)
    process.send_signal(signal.SIGHUP)
    a_row_is_written(steady, process)
    a_load_is_measured(steady, process)
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=HANG_SECONDS)
    assert process.returncode == 130


def test_a_run_is_resumed_from_another_folder(steady: Sandbox) -> None:
    storage = ("--storage", "sqlite:///study.db")
    process = steady.fork(*STUDY, *SHORT, *storage, "steady.yaml")
    a_row_is_written(steady, process)
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=RUN_SECONDS)
    measured = rows(steady)
    other = steady.root / "other"
    other.mkdir()
    refused = run_tune(steady, "--resume", run_folder(steady), cwd=other)  # the folder may come from anywhere
    database = f"sqlite:///{steady.working_folder}/study.db"
    assert (refused.code, refused.stderr_lines[0].endswith(f"give --storage {database}")) == (2, True), refused
    first_seconds = json.loads((run_folder(steady) / "run.json").read_text())["times"]["wall_seconds"]
    assert first_seconds > 0
    ended = run_tune(steady, "--resume", run_folder(steady), "--storage", database, cwd=other)
    assert_search_ended(ended, run_folder(steady))
    assert rows(steady)[: len(measured)] == measured
    info = json.loads((run_folder(steady) / "run.json").read_text())
    second_seconds = sum(float(row["measure_seconds"]) for row in rows(steady)[len(measured) :])
    assert info["result"]["wall_seconds"] > first_seconds + second_seconds, "of both sessions"
    assert list(other.iterdir()) == []  # no database of its own


# -- kill -9 of servers ----------------------------------------------------------------------------------


def test_a_server_that_is_killed_costs_one_measurement(steady: Sandbox) -> None:
    """The server of the baseline is killed; the baseline is deployed again."""
    process = steady.fork(
        "--sla-p95", "500ms", "--budget", "3m", "--max-trials", "2", "--no-confirmation", "--json", "steady.yaml"
    )
    a_load_is_measured(steady, process)
    kill_9(named(steady, "tritonserver"))
    stdout, stderr = process.communicate(timeout=RUN_SECONDS)
    assert (process.returncode in FINISHED, stderr) == (True, ""), stdout  # on a busy machine no load may be steady
    document = json.loads(stdout)
    assert document["trials"] == 2
    assert {row["trial"] for row in rows(steady) if row["status"] == "ok"} == {"0", "1"}
    failed = [row for row in rows(steady) if row["status"] == "failed"]
    assert {row["trial"] for row in failed} <= {"0"}  # none if it was killed before its first measurement
    assert all(row["reason"].endswith("the server no longer answers") for row in failed)


DIES_AT_ONCE = """\
#!/bin/sh
if [ "$1" = --help ]; then
    echo "  --model-repository <string>"
    echo "  --model-control-mode <string>"
else
    kill -KILL $$
fi
"""


def test_a_server_that_never_comes_up_is_an_error(steady: Sandbox) -> None:
    program = write_program(steady.working_folder / "tritonserver", DIES_AT_ONCE)
    (steady.working_folder / "backends" / "python").mkdir(parents=True)
    (steady.working_folder / "backends" / "python" / "libtriton_python.so").touch()
    local = ("--target", "local", "--tritonserver", str(program), "--backend-directory", "backends")
    process = steady.fork(*STUDY, *local, "--log", "plain", "steady.yaml")
    stdout, stderr = process.communicate(timeout=HANG_SECONDS)
    assert process.returncode == 3
    assert stdout == ""
    # other tests may measure at the same time
    others = "WARNING: another tune run measures on this machine "
    began, complaint, where = (line for line in stderr.splitlines() if not line.startswith(others))
    assert began.startswith("tuning sleeper on the tritonserver of this machine, for at most ")
    assert began.endswith(f"; results in {run_folder(steady).relative_to(steady.working_folder)}")
    assert complaint.startswith("tune: tritonserver did not start: ")
    assert (
        steady.working_folder / where.removeprefix("tune: log: ") == run_folder(steady) / "logs" / "tritonserver.log"
    )
    assert info(steady)["status"] == "failed"


@pytest.fixture
def target(mlp: ModelSource, tmp_path: Path) -> EmbeddedTarget:
    return EmbeddedTarget(mlp, TargetSettings(tmp_path / "tritonserver.log"))


def processes_of(target: EmbeddedTarget) -> list[psutil.Process]:
    """Return the supervisor, server and stubs of a deployed target."""
    with target.deploy(Candidate(8, instance_count=2)) as endpoint:
        supervisor = psutil.Process(endpoint.server_pid)
        below = supervisor.children(recursive=True)
        assert sorted(process.name()[:14] for process in below) == [
            "triton_python_",
            "triton_python_",
            "tritonserver",
        ]
        return [supervisor, *below]


@pytest.mark.parametrize("victim", ["supervisor", "tritonserver"])
def test_no_process_of_a_killed_server_is_left_and_another_is_started(victim: str, target: EmbeddedTarget) -> None:
    with contextlib.closing(target):
        before = processes_of(target)
        before[0 if victim == "supervisor" else 1].kill()
        _, alive = psutil.wait_procs(before, timeout=HANG_SECONDS)
        assert [process.name() for process in alive if process.status() != psutil.STATUS_ZOMBIE] == []
        after = processes_of(target)
        assert {process.pid for process in after}.isdisjoint(process.pid for process in before)
    assert not any(process.is_running() for process in after)


@pytest.mark.alone  # no other server may run
def test_folders_of_triton_in_tmp_are_removed_once_no_server_runs(target: EmbeddedTarget) -> None:
    ours = Path(tempfile.mkdtemp(prefix="python_env_", dir="/tmp"))
    with contextlib.closing(target):
        processes_of(target)
        remove_environment_folders()
        assert ours.exists()

    def gone() -> bool:
        remove_environment_folders()
        return not ours.exists()

    assert eventually(gone, HANG_SECONDS)


def test_a_killed_stub_does_not_stop_the_target(target: EmbeddedTarget) -> None:
    """Triton starts another stub or reports an error; the target serves the next candidate in any case."""
    with contextlib.closing(target):
        before = processes_of(target)
        kill_9(before[2:])
        with target.deploy(Candidate(16)) as endpoint:
            assert endpoint.candidate == Candidate(16)
