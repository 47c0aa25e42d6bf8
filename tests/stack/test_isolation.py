"""Tests for CPU pinning and for the detection of other busy processes, with the real server."""

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

import psutil
import pytest

from objectives.metrics import Measurement
from optimizer.config.model_source import ModelSource
from optimizer.core.candidate import SERVER_CPUS, Candidate
from optimizer.core.process import SupervisedProcess, run_command
from optimizer.core.trial import LoadPoint
from optimizer.deploy import runtime
from optimizer.deploy.embedded_target import EmbeddedTarget
from optimizer.deploy.target_settings import TargetSettings
from optimizer.machine.cpu_usage import DISTURBANCE_LIMIT, describe_disturbance, process_tree
from optimizer.machine.process_telemetry import ProcessTelemetry
from optimizer.measure.perf_analyzer import PerfAnalyzer
from optimizer.options.values import format_cpus, usable_cpus
from tests.stack_fixtures import embedded, mlp, perf_analyzer

__all__ = ["embedded", "mlp", "perf_analyzer"]
CANDIDATE = Candidate(64, dynamic_batching=True)
LOAD = LoadPoint(1, 16)
THREADS = "parameters.intra_op_thread_count.string_value"
ONE = frozenset({min(usable_cpus())})
PRINT_AFFINITY = """
import json, os, subprocess, sys, threading
masks = [sorted(os.sched_getaffinity(0))]
thread = threading.Thread(target=lambda: masks.append(sorted(os.sched_getaffinity(0))))
thread.start()
thread.join()
child = [sys.executable, "-c", "import json, os; print(json.dumps(sorted(os.sched_getaffinity(0))))"]
masks.append(json.loads(subprocess.run(child, stdout=subprocess.PIPE).stdout))
print(json.dumps(masks))
"""


@contextlib.contextmanager
def neighbours() -> Iterator[None]:
    """Start a busy process for each CPU, none of them a child of this one."""
    busy = "setsid timeout 300 sh -c 'while :; do :; done' >/dev/null 2>&1 & echo $!;"
    started = subprocess.run(["sh", "-c", busy * len(usable_cpus())], stdout=subprocess.PIPE, check=True)
    pids = [int(pid) for pid in started.stdout.split()]
    try:
        assert not process_tree(os.getpid()) & set(pids)
        yield
    finally:
        for pid in pids:
            os.killpg(pid, signal.SIGKILL)


# -- pinned processes ---------------------------------------------------------------------------------------------


def test_a_command_and_its_children_run_on_its_cpus(tmp_path: Path) -> None:
    done = run_command([sys.executable, "-c", PRINT_AFFINITY], timeout_seconds=30, log=tmp_path / "log", cpus=ONE)
    assert json.loads(done.output) == 3 * [sorted(ONE)]


def test_without_a_choice_all_usable_cpus_are_used(tmp_path: Path) -> None:
    done = run_command([sys.executable, "-c", PRINT_AFFINITY], timeout_seconds=30, log=tmp_path / "log")
    assert json.loads(done.output) == 3 * [sorted(usable_cpus())]


def test_cpus_that_the_machine_lacks_are_one_clear_line(tmp_path: Path) -> None:
    done = run_command(["true"], timeout_seconds=30, log=tmp_path / "log", cpus=frozenset({8191}))
    assert done.exit_code == 127
    assert done.output == "cannot run on CPUs 8191: Invalid argument\n"


def test_every_thread_of_a_pinned_load_generator_stays(
    embedded: EmbeddedTarget, perf_analyzer: PerfAnalyzer, tmp_path: Path
) -> None:
    with embedded.deploy(CANDIDATE) as endpoint:
        command = perf_analyzer.command(endpoint, LOAD, 5000)
        libraries = str(runtime.ensure(print).perf_analyzer_libraries)
        environment = {**os.environ, "LD_LIBRARY_PATH": libraries}
        with SupervisedProcess(command, log=tmp_path / "log", cwd=tmp_path, env=environment, cpus=ONE) as process:
            deadline = time.monotonic() + 60
            while len(masks := affinities(process.pid)) < 5:  # supervisor, perf_analyzer and its threads
                assert time.monotonic() < deadline, (tmp_path / "log").read_text()
                time.sleep(0.02)
    assert set(masks) == {ONE}


@pytest.mark.parametrize("threads", ["0", "1", "2"])  # 0 is ONNX Runtime's default, which pins its threads
def test_every_thread_of_a_pinned_server_stays(mlp: ModelSource, tmp_path: Path, threads: str) -> None:
    candidate = replace(CANDIDATE, instance_count=2, fields=((THREADS, threads),))
    with (
        contextlib.closing(EmbeddedTarget(mlp, TargetSettings(tmp_path / "tritonserver.log", cpus=ONE))) as target,
        target.deploy(candidate) as endpoint,
    ):
        assert endpoint.server_pid is not None
        masks = affinities(endpoint.server_pid)
    assert len(masks) > 10
    assert set(masks) == {ONE}


@pytest.mark.skipif(len(usable_cpus()) < 2, reason="one CPU")
def test_a_candidate_chooses_the_cpus_of_its_server(embedded: EmbeddedTarget) -> None:
    chosen = [ONE, usable_cpus(), None]
    seen = []
    for fresh in (False, True):
        for cpus in chosen:
            cpu_fields = () if cpus is None else ((SERVER_CPUS, format_cpus(cpus)),)
            candidate = replace(CANDIDATE, fields=((THREADS, "1"), *cpu_fields))
            with embedded.deploy(candidate, fresh=fresh) as endpoint:
                assert endpoint.server_pid is not None
                seen.append(set(affinities(endpoint.server_pid)))
    assert seen == 2 * [{cpus or usable_cpus()} for cpus in chosen]


def affinities(pid: int) -> list[frozenset[int]]:
    """Return the CPU mask of every thread of the process and its children."""
    masks = []
    for process in process_tree(pid):
        for task in Path("/proc", str(process), "task").glob("*"):
            with contextlib.suppress(ProcessLookupError):  # the thread has ended meanwhile
                masks.append(frozenset(os.sched_getaffinity(int(task.name))))
    return masks


# -- other processes ----------------------------------------------------------------------------------------------


def own_cpu_seconds(server_pid: int) -> float:
    """Return the CPU seconds of this process, of its children that have ended and of the server."""
    root = psutil.Process(server_pid)
    server = [process.cpu_times() for process in (root, *root.children(recursive=True))]
    return sum(os.times()[:4]) + sum(times.user + times.system for times in server)


@pytest.mark.alone  # it would disturb other tests
def test_a_noisy_neighbour_is_noticed(embedded: EmbeddedTarget, perf_analyzer: PerfAnalyzer) -> None:
    """The neighbours leave no CPU idle. Their share is the rest of that of the server and the load generator."""
    cpus, rounding_seconds = len(usable_cpus()), 0.05  # the kernel counts ticks of 10 ms
    with neighbours(), embedded.deploy(CANDIDATE) as endpoint:
        assert endpoint.server_pid is not None
        began = time.monotonic()
        with ProcessTelemetry().record(endpoint) as samples:
            before = own_cpu_seconds(endpoint.server_pid)
            replace(perf_analyzer, repeat=False).measure(endpoint, LOAD)
            own_seconds = own_cpu_seconds(endpoint.server_pid) - before - rounding_seconds
        cpu_seconds = cpus * (time.monotonic() - began)
    measurement = Measurement(other_cpu_share=samples.other_cpu_share)
    assert measurement.other_cpu_share is not None
    assert measurement.other_cpu_share > DISTURBANCE_LIMIT
    assert "took" in describe_disturbance(measurement)
    assert own_seconds > 0
    assert measurement.other_cpu_share <= 1 - own_seconds / cpu_seconds, "neither of them is a neighbour"
