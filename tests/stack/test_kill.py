"""Whatever ends a run, and whenever: nothing of it runs on, nothing measured is lost, and it can be resumed."""

from __future__ import annotations

import contextlib
import csv
import json
import random
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

from optimizer import runtime
from optimizer.deploy.embedded import EmbeddedTarget
from optimizer.deploy.leftovers import remove_environment_folders
from optimizer.model_source import ModelSource
from optimizer.trial import Candidate
from tests.command_fixtures import Ended, Playground, eventually, run_tune
from tests.repositories import write_sleeper

PROFILE = """\
model: {repository: models, name: sleeper}
load: {max_concurrency: 2}
space:
  max_queue_delay_microseconds: [off, 0, 1000]
  instance_group_count: [1]
"""
STUDY = ("--sla-p95", "500ms", "--budget", "24s", "--max-trials", "3")
GONE_SECONDS = 5.0
STUB_NOTICES_SECONDS = 15.0  # that its server is gone, where nobody is left to kill it
START_SECONDS = 60.0

Popen = subprocess.Popen[str]


@pytest.fixture
def steady(playground: Playground) -> Playground:
    """With the profile ``steady.yaml`` of a model whose batches all take 8 ms."""
    if runtime.running_python() not in runtime.NUMPY_WHEELS:
        pytest.skip("the server serves no models in Python here")
    write_sleeper(playground.here / "models", milliseconds=8)
    (playground.here / "steady.yaml").write_text(PROFILE)
    return playground


# -- what can be seen of a run ----------------------------------------------------------------------------------


def run_folder(playground: Playground) -> Path:
    (folder,) = (playground.here / "results").glob("*/*")
    return folder


def content(playground: Playground, name: str) -> bytes:
    """Of a file of the run's folder; empty before there is one."""
    found = [path.read_bytes() for path in (playground.here / "results").glob(f"*/*/{name}")]
    return found[0] if found else b""


def rows(playground: Playground) -> list[dict[str, str]]:
    return list(csv.DictReader(content(playground, "trials.csv").decode().splitlines()))


def info(playground: Playground) -> dict[str, Any]:
    found = json.loads(content(playground, "run.json"))
    assert isinstance(found, dict)
    return found


def named(playground: Playground, name: str) -> list[psutil.Process]:
    """Processes of the run whose program has this name."""
    found = []
    for process in playground.processes():
        with contextlib.suppress(psutil.Error):
            if Path(process.exe()).name == name:
                found.append(process)
    return found


def supervisors(playground: Playground) -> list[psutil.Process]:
    found = []
    for process in playground.processes():
        with contextlib.suppress(psutil.Error):
            if any(word.endswith("supervisor.py") for word in process.cmdline()):
                found.append(process)
    return found


def wait_for(condition: Callable[[], object], process: Popen) -> None:
    """Until ``condition`` holds of the running ``process``."""
    assert eventually(lambda: condition() or process.poll() is not None, START_SECONDS)
    if process.poll() is not None:
        pytest.fail(f"it has ended: {process.communicate()}")


def kill_9(processes: list[psutil.Process]) -> None:
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()


# -- kill -9 of tune --------------------------------------------------------------------------------------------

Moment = Callable[[Playground, Popen], None]


def server_starts(playground: Playground, process: Popen) -> None:
    wait_for(lambda: named(playground, "tritonserver"), process)


def model_loads(playground: Playground, process: Popen) -> None:
    before = content(playground, "logs/tritonserver.log").count(b"loading: sleeper")
    wait_for(lambda: content(playground, "logs/tritonserver.log").count(b"loading: sleeper") > before, process)


def a_load_is_measured(playground: Playground, process: Popen) -> None:
    wait_for(lambda: named(playground, "perf_analyzer"), process)


def a_row_is_written(playground: Playground, process: Popen) -> None:
    before = len(content(playground, "trials.csv"))
    wait_for(lambda: len(content(playground, "trials.csv")) > before, process)


def after(seconds: float) -> Moment:
    return lambda playground, process: time.sleep(seconds)


SPREAD = random.Random(20)
SERVER_IS_UP = (server_starts, model_loads, a_load_is_measured, a_row_is_written)
MOMENTS: dict[str, Moment] = {
    "the server starts": server_starts,
    "the model loads": model_loads,
    "a load is measured": a_load_is_measured,
    "early": after(SPREAD.uniform(0.5, 2)),
    "a row is written": a_row_is_written,
    "later": after(SPREAD.uniform(2, 5)),
}


@pytest.mark.alone
def test_kill_9_at_any_moment(steady: Playground) -> None:
    """One study, killed at every moment in turn and resumed each time, comes to its end."""
    killed: list[int] = []
    for name, moment in MOMENTS.items():
        arguments = (*STUDY[:-1], "2", "steady.yaml") if not killed else ("--resume", run_folder(steady))
        before = content(steady, "trials.csv")
        process = steady.start(*arguments)
        moment(steady, process)
        if moment in SERVER_IS_UP:  # what the dead left is removed before a server starts
            assert [folder.name.split("-")[1] for folder in steady.temporary.iterdir()] == [str(process.pid)], name
        process.kill()
        process.communicate()
        killed.append(process.pid)
        assert eventually(lambda: steady.processes() == [], GONE_SECONDS), f"{name}: {steady.processes()}"
        assert not any(steady.shared_memory(pid) for pid in killed), name
        assert content(steady, "trials.csv").startswith(before[: before.rfind(b"\n") + 1]), name
    before = content(steady, "trials.csv")
    ended = run_tune(steady, "--resume", run_folder(steady), "--max-trials", "3", "--json")
    assert content(steady, "trials.csv").startswith(before[: before.rfind(b"\n") + 1])
    assert_complete(steady, ended)


def assert_complete(playground: Playground, ended: Ended) -> None:
    """The study has come to its end: as many trials as asked for, and a recommendation."""
    assert (ended.code, ended.stderr) == (0, "")
    document = json.loads(ended.stdout)
    table = rows(playground)
    assert document["trials"] == len({row["trial"] for row in table}) == 3
    assert document["measurements"] + document["confirmations"] == len(table)
    assert document["recommended"] is not None
    assert info(playground)["status"] == "found"


def test_a_kill_of_everything_at_once(steady: Playground) -> None:
    """Then nobody is left to remove the shared memory: the next start does."""
    process = steady.start(*STUDY, "steady.yaml")
    a_load_is_measured(steady, process)
    regions = steady.shared_memory(process.pid)
    assert regions
    everything = [psutil.Process(process.pid), *steady.processes()]
    for one in everything:
        with contextlib.suppress(psutil.NoSuchProcess):
            one.suspend()  # so that none has time to clean up after another
    kill_9(everything)
    process.communicate()
    assert eventually(lambda: steady.processes() == [], GONE_SECONDS), steady.processes()
    assert steady.shared_memory(process.pid) == regions
    assert list(steady.temporary.iterdir())
    resumed = steady.start("--resume", run_folder(steady))
    server_starts(steady, resumed)
    assert steady.shared_memory(process.pid) == []
    assert not list(steady.temporary.glob(f"tritune-{process.pid}-*"))
    resumed.send_signal(signal.SIGTERM)
    assert resumed.wait(timeout=5) == 130


# -- signals ----------------------------------------------------------------------------------------------------


def interrupted(playground: Playground, moment: Moment, *signals: signal.Signals, json: bool = False) -> Ended:
    """A study that gets these signals at that moment, and must be over soon after."""
    process = playground.start(*STUDY, *(["--json"] if json else []), "steady.yaml")
    moment(playground, process)
    for signum in signals:
        process.send_signal(signum)
        time.sleep(0.1)  # to the next press of Ctrl-C
    stdout, stderr = process.communicate(timeout=5 - 0.1 * len(signals))
    assert playground.processes() == []
    assert playground.shared_memory(process.pid) == []
    assert list(playground.temporary.iterdir()) == []
    return Ended(process.returncode, stdout, stderr, process.pid)


def test_ctrl_c_twice_ends_with_the_best_so_far(steady: Playground) -> None:
    def measured_and_measuring(playground: Playground, process: Popen) -> None:
        wait_for(lambda: any(row["stable"] == "true" for row in rows(playground)), process)
        wait_for(lambda: named(playground, "perf_analyzer"), process)

    ended = interrupted(steady, measured_and_measuring, signal.SIGINT, signal.SIGINT)
    assert (ended.code, ended.stderr) == (130, "")
    best = max(float(row["throughput_infer_per_sec"]) for row in rows(steady) if row["stable"] == "true")
    (line,) = (line for line in ended.stdout.splitlines() if line.startswith("best so far"))
    assert float(line.split()[3].replace(",", "")) == pytest.approx(best, rel=0.01)
    (line,) = (line for line in ended.stdout.splitlines() if line.startswith("go on"))
    assert line.split()[-3:-1] == ["tune", "--resume"]
    assert steady.here / line.split()[-1] == run_folder(steady)
    assert info(steady)["status"] == "interrupted"
    assert info(steady)["result"]["measurements"] == len(rows(steady))


@pytest.mark.parametrize(
    ("signum", "moment"),
    [(signal.SIGINT, server_starts), (signal.SIGHUP, model_loads), (signal.SIGTERM, a_load_is_measured)],
)
def test_signals_end_it_at_once(signum: signal.Signals, moment: Moment, steady: Playground) -> None:
    ended = interrupted(steady, moment, signum, json=True)
    assert (ended.code, ended.stderr) == (130, "")
    document = json.loads(ended.stdout)
    assert document["status"] == "interrupted"
    assert document["measurements"] == len(rows(steady))
    assert info(steady)["status"] == "interrupted"


def test_what_nohup_ignores_stays_ignored(steady: Playground) -> None:
    """The run goes on after a hang-up."""
    process = steady.start(*STUDY, "steady.yaml", under=["nohup"])
    a_load_is_measured(steady, process)
    process.send_signal(signal.SIGHUP)
    a_row_is_written(steady, process)
    a_load_is_measured(steady, process)
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=5)
    assert process.returncode == 130


# -- kill -9 of what tune runs ----------------------------------------------------------------------------------


@pytest.mark.alone
def test_a_server_that_is_killed_costs_one_measurement(steady: Playground) -> None:
    """Killed under the baseline, which all else is compared with: it is deployed again."""
    process = steady.start(*STUDY[:-1], "2", "--json", "steady.yaml")
    a_load_is_measured(steady, process)
    kill_9(named(steady, "tritonserver"))
    stdout, stderr = process.communicate(timeout=100)
    assert (process.returncode, stderr) == (0, "")
    document = json.loads(stdout)
    assert document["trials"] == 2
    assert document["baseline"] is not None
    failed = [row for row in rows(steady) if row["status"] == "failed"]
    assert {row["trial"] for row in failed} <= {"0"}  # none where it was killed before its first measurement
    assert all(row["reason"].endswith("the server no longer answers") for row in failed)


def test_a_server_that_never_comes_up_is_an_error(steady: Playground) -> None:
    process = steady.start(*STUDY, "steady.yaml")
    while process.poll() is None:
        kill_9(named(steady, "tritonserver"))
    stdout, stderr = process.communicate()
    assert process.returncode == 3
    assert stdout == ""
    complaint, where = stderr.splitlines()
    assert complaint.startswith("tune: tritonserver ")
    assert steady.here / where.removeprefix("tune: the log: ") == run_folder(steady) / "logs" / "tritonserver.log"
    assert info(steady)["status"] == "failed"


@pytest.fixture
def target(mlp: ModelSource, tmp_path: Path) -> EmbeddedTarget:
    return EmbeddedTarget(mlp, log=tmp_path / "tritonserver.log", say=print)


def family(target: EmbeddedTarget) -> list[psutil.Process]:
    """Supervisor, server and stubs of a deployed target."""
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
def test_nothing_of_a_killed_server_survives_and_another_takes_its_place(victim: str, target: EmbeddedTarget) -> None:
    with contextlib.closing(target):
        before = family(target)
        before[0 if victim == "supervisor" else 1].kill()
        _, alive = psutil.wait_procs(before, timeout=STUB_NOTICES_SECONDS)
        assert [process.name() for process in alive if process.status() != psutil.STATUS_ZOMBIE] == []
        after = family(target)
        assert {process.pid for process in after}.isdisjoint(process.pid for process in before)
    assert not any(process.is_running() for process in after)


@pytest.mark.alone  # no other server may run
def test_the_folders_that_triton_makes_in_tmp_go_once_no_server_runs(target: EmbeddedTarget) -> None:
    ours = Path(tempfile.mkdtemp(prefix="python_env_", dir="/tmp"))
    with contextlib.closing(target):
        family(target)
        remove_environment_folders()
        assert ours.exists()

    def gone() -> bool:
        remove_environment_folders()
        return not ours.exists()

    assert eventually(gone, START_SECONDS)


def test_nothing_of_a_killed_stub_survives(target: EmbeddedTarget) -> None:
    """Triton starts another one, or tells; the target serves the next candidate in any case."""
    with contextlib.closing(target):
        before = family(target)
        kill_9(before[2:])
        with target.deploy(Candidate(16)) as endpoint:
            assert endpoint.candidate == Candidate(16)
