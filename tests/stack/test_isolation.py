"""Who runs where, and what others take meanwhile: on real processes and the real server."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from objectives.metrics import Measurement
from optimizer.deploy.embedded import EmbeddedTarget
from optimizer.load.perf_analyzer import PerfAnalyzer
from optimizer.machine import cpus
from optimizer.machine.cpu_time import process_tree
from optimizer.machine.telemetry import DISTURBED, ProcessTelemetry, disturbance
from optimizer.model_source import ModelSource
from optimizer.process import SupervisedProcess, run
from optimizer.trial import SERVER_CPUS, Candidate, LoadPoint
from tests.stack_fixtures import embedded, mlp, perf_analyzer

__all__ = ["embedded", "mlp", "perf_analyzer"]
CANDIDATE = Candidate(64, dynamic_batching=True)
LOAD = LoadPoint(1, 16)
THREADS = "parameters.intra_op_thread_count.string_value"
ONE = frozenset({min(cpus.available())})
TELL = """
import json, os, subprocess, sys, threading
found = [sorted(os.sched_getaffinity(0))]
thread = threading.Thread(target=lambda: found.append(sorted(os.sched_getaffinity(0))))
thread.start()
thread.join()
child = [sys.executable, "-c", "import json, os; print(json.dumps(sorted(os.sched_getaffinity(0))))"]
found.append(json.loads(subprocess.run(child, stdout=subprocess.PIPE).stdout))
print(json.dumps(found))
"""


@contextlib.contextmanager
def neighbours() -> Iterator[None]:
    """A busy process for each CPU, none of them below this one."""
    busy = "setsid timeout 60 sh -c 'while :; do :; done' >/dev/null 2>&1 & echo $!;"
    started = subprocess.run(["sh", "-c", busy * len(cpus.available())], stdout=subprocess.PIPE, check=True)
    pids = [int(pid) for pid in started.stdout.split()]
    try:
        assert not process_tree(os.getpid()) & set(pids)
        yield
    finally:
        for pid in pids:
            os.killpg(pid, signal.SIGKILL)


def measure(target: EmbeddedTarget, load_generator: PerfAnalyzer) -> Measurement:
    with target.deploy(CANDIDATE) as endpoint, ProcessTelemetry().record(endpoint) as samples:
        replace(load_generator, patience=False).measure(endpoint, LOAD)
    return Measurement(other_cpu_share=samples.other_cpu_share)


# -- only there -------------------------------------------------------------------------------------------------


def test_a_command_and_what_it_starts_run_on_its_cpus_only(tmp_path: Path) -> None:
    done = run([sys.executable, "-c", TELL], timeout_seconds=30, log=tmp_path / "log", cpus=ONE)
    assert json.loads(done.output) == 3 * [sorted(ONE)]


def test_without_cpus_it_runs_where_this_process_may(tmp_path: Path) -> None:
    done = run([sys.executable, "-c", TELL], timeout_seconds=30, log=tmp_path / "log")
    assert json.loads(done.output) == 3 * [sorted(cpus.available())]


def test_cpus_that_the_machine_lacks_are_one_clear_line(tmp_path: Path) -> None:
    done = run(["true"], timeout_seconds=30, log=tmp_path / "log", cpus=frozenset({8191}))
    assert done.exit_code == 127
    assert done.output == "cannot run on CPUs 8191: Invalid argument\n"


def test_every_thread_of_a_pinned_load_generator_stays(
    embedded: EmbeddedTarget, perf_analyzer: PerfAnalyzer, tmp_path: Path
) -> None:
    with embedded.deploy(CANDIDATE) as endpoint:
        command = perf_analyzer.command(endpoint, LOAD, 5000)
        environment = {**os.environ, "LD_LIBRARY_PATH": str(perf_analyzer.libraries)}
        with SupervisedProcess(command, log=tmp_path / "log", cwd=tmp_path, env=environment, cpus=ONE) as process:
            deadline = time.monotonic() + 20
            while len(masks := affinities(process.pid)) < 5:  # supervisor, perf_analyzer and its threads
                assert time.monotonic() < deadline, (tmp_path / "log").read_text()
                time.sleep(0.02)
    assert set(masks) == {ONE}


@pytest.mark.parametrize("threads", ["0", "1", "2"])  # 0 is ONNX Runtime's default, which pins its threads
def test_every_thread_of_a_pinned_server_stays(mlp: ModelSource, tmp_path: Path, threads: str) -> None:
    candidate = replace(CANDIDATE, instance_count=2, fields=((THREADS, threads),))
    with (
        contextlib.closing(EmbeddedTarget(mlp, log=tmp_path / "tritonserver.log", say=print, cpus=ONE)) as target,
        target.deploy(candidate) as endpoint,
    ):
        assert endpoint.server_pid is not None
        masks = affinities(endpoint.server_pid)
    assert len(masks) > 10
    assert set(masks) == {ONE}


@pytest.mark.skipif(len(cpus.available()) < 2, reason="one CPU")
def test_a_candidate_brings_its_cpus(embedded: EmbeddedTarget) -> None:
    chosen = [ONE, cpus.available(), None]
    seen = []
    for deploy in (embedded.deploy, embedded.deploy_as_written):
        for some in chosen:
            own = () if some is None else ((SERVER_CPUS, cpus.show(some)),)
            with deploy(replace(CANDIDATE, fields=((THREADS, "1"), *own))) as endpoint:
                assert endpoint.server_pid is not None
                seen.append(set(affinities(endpoint.server_pid)))
    assert seen == 2 * [{some or cpus.available()} for some in chosen]


def affinities(pid: int) -> list[frozenset[int]]:
    """Of every thread of the process and of all below it."""
    masks = []
    for each in process_tree(pid):
        with contextlib.suppress(OSError):
            masks += [
                frozenset(os.sched_getaffinity(int(task.name))) for task in Path(f"/proc/{each}/task").iterdir()
            ]
    return masks


# -- what others take -------------------------------------------------------------------------------------------


@pytest.mark.alone
def test_the_load_itself_is_no_neighbour(embedded: EmbeddedTarget, perf_analyzer: PerfAnalyzer) -> None:
    share = measure(embedded, perf_analyzer).other_cpu_share
    assert share is not None
    assert share < 0.5  # server and load generator take nearly all; on a shared machine others some of it


@pytest.mark.alone
def test_a_noisy_neighbour_is_noticed(embedded: EmbeddedTarget, perf_analyzer: PerfAnalyzer) -> None:
    with neighbours():
        measurement = measure(embedded, perf_analyzer)
    assert measurement.other_cpu_share is not None
    assert measurement.other_cpu_share > DISTURBED
    assert "took" in disturbance(measurement)
