"""Tests of the CPU time that others take, the processes of a run, and the speed probe."""

from __future__ import annotations

import math
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import psutil
import pytest

from objectives.metrics import Measurement
from optimizer.core.candidate import Candidate
from optimizer.core.endpoint import Endpoint
from optimizer.core.notes import SpeedVaried
from optimizer.core.resource_usage import CpuInterval, ResourceUsage
from optimizer.machine.cpu_usage import (
    DISTURBANCE_LIMIT,
    CpuUsage,
    describe_disturbance,
    process_tree,
    tree_by_children,
    tree_by_parents,
)
from optimizer.machine.process_telemetry import (
    CPU_INTERVAL_SECONDS,
    ProcessTelemetry,
    cpu_intervals,
    port_forwarders,
    tree_memory_bytes,
)
from optimizer.machine.speed_probe import SpeedProbe, probe_speed, speed_note
from tests.command_fixtures import eventually
from tests.conftest import not_none
from tests.programs import write_program

ENDPOINT = Endpoint("model", Candidate(1), server_pid=os.getpid())
BUSY = f"while kill -0 {os.getpid()}; do :; done"  # shell command that ends with the tests, also if they are killed


@pytest.fixture
def parent_and_child() -> Iterator[tuple[int, int]]:
    """Yield a process and its child, and kill them at the end."""
    script = "sleep 600 & echo $!; wait"
    with subprocess.Popen(["sh", "-c", script], stdout=subprocess.PIPE, text=True, process_group=0) as parent:
        child = int(not_none(parent.stdout).readline())
        assert eventually(lambda: Path(f"/proc/{child}/comm").read_text() == "sleep\n", 60)
        yield parent.pid, child
        os.killpg(parent.pid, signal.SIGKILL)


# -- CPU time of others ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("busy_seconds", "run_seconds", "expected"),
    [
        (6.0, 4.0, 0.2),  # in 10 s
        (4.0, 4.0, 0.0),
        (4.0, 4.1, 0.0),  # the two clocks differ by rounding
        (10.0, 0.0, 1.0),
    ],
)
def test_the_share_of_others_is_the_time_that_the_run_did_not_use(
    busy_seconds: float, run_seconds: float, expected: float
) -> None:
    before = CpuUsage(total_seconds=1000.0, busy_seconds=600.0, run_seconds=7.0)
    after = CpuUsage(total_seconds=1010.0, busy_seconds=600.0 + busy_seconds, run_seconds=7.0 + run_seconds)
    assert after.others_since(before) == pytest.approx(expected)


def test_without_cpu_times_the_share_of_other_processes_is_unknown() -> None:
    assert math.isnan(CpuUsage(0.0, 0.0, 2.0).others_since(CpuUsage(0.0, 0.0, 1.0)))


def test_only_the_selected_cpus_are_counted() -> None:
    all_cpus = CpuUsage.now()
    first_cpu = CpuUsage.now([min(os.sched_getaffinity(0))])
    assert 0 < first_cpu.busy_seconds <= first_cpu.total_seconds
    assert first_cpu.total_seconds == pytest.approx(all_cpus.total_seconds / len(os.sched_getaffinity(0)), rel=0.2)
    assert CpuUsage.now([8191]).total_seconds == 0


def test_the_processes_of_a_run_are_its_process_and_all_descendants(parent_and_child: tuple[int, int]) -> None:
    assert {os.getpid(), *parent_and_child} <= process_tree(os.getpid())


@pytest.mark.parametrize("tree", [tree_by_children, tree_by_parents])
def test_a_process_tree_follows_children_and_parents(
    tree: Callable[[Iterable[int]], set[int]], parent_and_child: tuple[int, int]
) -> None:
    parent, child = parent_and_child
    assert tree([parent]) == tree([child, parent]) == {parent, child}
    assert tree([child]) == {child}
    assert tree([]) == set()


@pytest.mark.parametrize("tree", [tree_by_children, tree_by_parents])
def test_an_ended_process_has_no_tree(tree: Callable[[Iterable[int]], set[int]]) -> None:
    with subprocess.Popen(["true"]) as ended:
        pass
    assert tree([ended.pid]) == {ended.pid}


def test_the_time_of_ended_processes_counts_for_the_run() -> None:
    """The CPU time of an ended child, such as perf_analyzer, counts for its parent."""
    times = [os.times()]
    before = CpuUsage.now().run_seconds
    times.append(os.times())
    subprocess.run(["sh", "-c", "i=0; while [ $i -lt 200000 ]; do i=$((i+1)); done"], check=True)
    times.append(os.times())
    run_seconds = CpuUsage.now().run_seconds - before
    times.append(os.times())
    earliest, early, late, latest = (sum(counted[:4]) for counted in times)  # CPU seconds of this process and others
    child = times[2].children_user - times[1].children_user
    rounding = 0.05  # the kernel counts ticks of 10 ms
    assert late - early - rounding <= run_seconds <= latest - earliest + rounding
    assert run_seconds > child / 2 > 0


def test_a_server_that_is_no_child_is_the_runs_too() -> None:
    started = subprocess.run(
        ["sh", "-c", f"sh -c '{BUSY}' >/dev/null 2>&1 & echo $!"],
        stdout=subprocess.PIPE,
        check=True,
        process_group=0,
    )
    server = int(started.stdout)
    try:
        assert server not in process_tree(os.getpid())
        before = CpuUsage.now(None, server).run_seconds - CpuUsage.now().run_seconds
        deadline = time.monotonic() + 60
        while (spent := CpuUsage.now(None, server).run_seconds - CpuUsage.now().run_seconds - before) < 0.05:
            assert time.monotonic() < deadline, spent
            time.sleep(0.02)
    finally:
        os.kill(server, signal.SIGKILL)


def test_the_memory_of_a_process_tree_includes_its_children(parent_and_child: tuple[int, int]) -> None:
    tree_bytes, child_bytes = tree_memory_bytes(parent_and_child[0]), tree_memory_bytes(parent_and_child[1])
    assert not_none(tree_bytes) > not_none(child_bytes) > 0


def test_memory_of_a_process_that_has_ended_is_unknown() -> None:
    with subprocess.Popen(["true"]) as ended:
        pass
    assert tree_memory_bytes(ended.pid) is None


def test_a_recording_has_the_cpu_share_of_other_processes() -> None:
    with ProcessTelemetry().record(ENDPOINT) as usage:
        assert usage.other_cpu_share is None
        subprocess.run(["sleep", "0.05"], check=True)
    assert 0 <= not_none(usage.other_cpu_share) <= 1
    assert usage.server_memory_bytes


def test_the_cpu_time_of_a_process_that_ends_meanwhile_is_not_lost() -> None:
    """Children that take 0.05 s of CPU time end one after the other. Their time is that of this process then."""
    spend = "import time\nwhile time.process_time() < 0.05: pass"
    has_ended = threading.Event()

    def run_children() -> None:
        end = time.monotonic() + 3
        while time.monotonic() < end:
            subprocess.run([sys.executable, "-S", "-c", spend], check=True)
        has_ended.set()

    children = threading.Thread(target=run_children)
    children.start()
    usages = [CpuUsage.now()]
    while not has_ended.is_set():
        usages.append(CpuUsage.now())
    children.join()
    steps = [after.run_seconds - before.run_seconds for before, after in pairwise(usages)]
    assert min(steps) > -0.03, "the counters rise in steps of 0.01 s"


def test_the_cpu_time_of_a_recording_is_divided_into_intervals() -> None:
    begin = time.time()
    with ProcessTelemetry().record(ENDPOINT) as usage:
        subprocess.run(["sleep", str(2 * CPU_INTERVAL_SECONDS)], check=True)
    intervals = usage.cpu_intervals
    assert begin <= intervals[0].begin_unix_seconds
    assert intervals[-1].end_unix_seconds <= time.time()
    for before, after in pairwise(intervals):
        assert before.end_unix_seconds == after.begin_unix_seconds
    total_seconds = sum(interval.total_seconds for interval in intervals)
    other_seconds = sum(interval.other_seconds for interval in intervals)
    assert usage.other_cpu_share == pytest.approx(min(1.0, max(0.0, other_seconds / total_seconds)), abs=1e-4)


def test_intervals_are_those_between_the_samples() -> None:
    """The clock was set back by a second between the third sample and the fourth one."""
    usages = [
        CpuUsage(total_seconds, 0.75 * total_seconds, 0.25 * total_seconds) for total_seconds in (2, 4, 6, 8, 10)
    ]
    assert cpu_intervals(list(zip([10.0, 11.0, 12.0, 11.0, 12.0], usages, strict=True))) == [
        CpuInterval(10.0, 11.0, 2.0, 1.0),
        CpuInterval(11.0, 12.0, 2.0, 1.0),
        CpuInterval(11.0, 12.0, 2.0, 1.0),
    ]


@pytest.mark.parametrize(
    ("begin", "end", "share"),
    [
        (10.0, 11.0, 0.0),  # a negative time is an error of the counters
        (11.0, 13.0, 0.5),
        (11.5, 12.5, 0.5),
        (10.5, 12.5, 0.3688),  # (-0.05 * 0.5 + 2.0 * 0.75) / (2.0 * 0.5 + 4.0 * 0.75)
        (12.0, 20.0, 0.5),
        (13.0, 14.0, 0.3),  # it has no interval
        (20.0, 21.0, 0.3),  # a counter of the kernel has fallen
        (None, None, 0.3),
    ],
)
def test_a_window_has_the_cpu_share_of_its_own_time(begin: float | None, end: float | None, share: float) -> None:
    intervals = [
        CpuInterval(10.0, 11.0, 2.0, -0.05),
        CpuInterval(11.0, 13.0, 4.0, 2.0),
        CpuInterval(20.0, 21.0, -0.01, 0.02),
    ]
    usage = ResourceUsage(server_memory_bytes=1e6, other_cpu_share=0.3, cpu_intervals=intervals)
    window = Measurement(100.0, begin_unix_seconds=begin, end_unix_seconds=end)
    assert usage.added_to(window) == replace(window, server_memory_bytes=1e6, other_cpu_share=share)


def test_a_load_generator_in_a_container_does_not_count_as_another_program() -> None:
    with ProcessTelemetry(load_in_container=True).record(ENDPOINT) as usage:
        subprocess.run(["sleep", "0.05"], check=True)
    assert usage.other_cpu_share is None
    assert usage.cpu_intervals == ()
    assert usage.server_memory_bytes


@pytest.fixture
def docker_proxy(tmp_path: Path) -> Iterator[int]:
    """Yield a busy process with the name and arguments of the proxy of port 40001, which is no child of the tests."""
    program = write_program(tmp_path / "docker-proxy", f"#!/bin/sh\n{BUSY}\n")
    command = f"{program} -proto tcp -host-ip 127.0.0.1 -host-port 40001 -container-port 8001"
    started = subprocess.run(["sh", "-c", f"{command} >&- 2>&- & echo $!"], stdout=subprocess.PIPE, check=True)
    pid = int(started.stdout)
    try:
        assert eventually(lambda: Path(f"/proc/{pid}/comm").read_text() == "docker-proxy\n", 60)
        yield pid
    finally:
        os.kill(pid, signal.SIGKILL)


def test_the_proxy_of_a_container_does_not_count_as_another_program(docker_proxy: int) -> None:
    def cpu_seconds() -> float:
        times = psutil.Process(docker_proxy).cpu_times()
        return times.user + times.system

    published, unpublished = replace(ENDPOINT, grpc="127.0.0.1:40001"), replace(ENDPOINT, grpc="127.0.0.1:4000")
    telemetry, start_seconds = ProcessTelemetry(), cpu_seconds()
    with telemetry.record(unpublished) as with_proxy, telemetry.record(published) as without_proxy:
        assert eventually(lambda: cpu_seconds() > start_seconds + 0.3, 60)
    assert not_none(without_proxy.other_cpu_share) < not_none(with_proxy.other_cpu_share)


ROOTLESS_FORWARDER = f"""#!{sys.executable}
import socket, sys
sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(2)]
print(*(each.getsockname()[1] for each in sockets), flush=True)
sys.stdin.read()
"""


@pytest.mark.parametrize("name", ["rootlessport", "pasta.avx2"])
def test_a_rootless_forwarder_belongs_to_a_run_that_uses_all_of_its_ports(name: str, tmp_path: Path) -> None:
    program = write_program(tmp_path / name, ROOTLESS_FORWARDER)
    with subprocess.Popen([program], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as forwarder:
        grpc, http = (f"127.0.0.1:{port}" for port in not_none(forwarder.stdout).readline().split())
        assert port_forwarders(replace(ENDPOINT, grpc=grpc, http=http)) == {forwarder.pid}
        assert port_forwarders(replace(ENDPOINT, grpc=grpc)) == set()


def test_the_resources_of_some_of_the_servers_do_not_pass_as_those_of_all() -> None:
    with ProcessTelemetry().record(replace(ENDPOINT, replicas=(replace(ENDPOINT, server_pid=None),))) as samples:
        pass
    assert samples == ResourceUsage()


def test_the_engine_of_a_container_gives_the_memory_that_its_process_does_not_show() -> None:
    in_container = replace(ENDPOINT, server_pid=None, memory_bytes=lambda: 5.0)
    unreadable = replace(ENDPOINT, server_pid=None, memory_bytes=lambda: None)
    two_servers = replace(in_container, replicas=(in_container,))
    for endpoint, expected_bytes in ((in_container, 5.0), (unreadable, None), (two_servers, 10.0)):
        with ProcessTelemetry().record(endpoint) as usage:
            pass
        assert usage.server_memory_bytes == expected_bytes
    with ProcessTelemetry().record(replace(ENDPOINT, memory_bytes=lambda: 5.0)) as usage:
        pass
    assert (usage.server_memory_bytes or 0) > 2**20, "the process of the server is known"


def test_the_resources_of_a_remote_server_are_unknown() -> None:
    with ProcessTelemetry().record(replace(ENDPOINT, server_pid=None)) as samples:
        pass
    assert samples == ResourceUsage()


# -- notes to the user ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("share", [None, 0.0, DISTURBANCE_LIMIT])
def test_an_unknown_or_small_share_is_no_disturbance(share: float | None) -> None:
    assert describe_disturbance(Measurement(other_cpu_share=share)) == ""


def test_a_disturbance_is_described_with_its_share() -> None:
    message = describe_disturbance(Measurement(other_cpu_share=0.338))
    assert message == "other processes or machines took 34 % of the CPUs while this was measured"


# -- speed probe ------------------------------------------------------------------------------------------------


def test_a_short_disturbance_of_a_probe_does_not_count() -> None:
    probes = iter([0.040, 0.900])
    assert probe_speed(probes.__next__) == 0.040


@pytest.mark.parametrize(
    ("probes_ms", "note"),
    [
        ([], None),
        ([None, 40.0], None),
        ([40.0, 47.0, None], None),
        ([64.0, 40.0, 50.0], SpeedVaried(1.6)),
    ],
)
def test_a_note_says_that_the_speed_varied(probes_ms: list[float | None], note: SpeedVaried | None) -> None:
    assert speed_note(Measurement(speed_probe_ms=probe_ms) for probe_ms in probes_ms) == note


def test_each_node_of_a_cluster_is_compared_with_itself() -> None:
    measured = [("slow", 64.0), ("fast", 32.0), ("slow", 60.0), ("fast", 33.0)]
    measurements = [Measurement(speed_probe_ms=probe_ms, node=node) for node, probe_ms in measured]
    assert speed_note(measurements) is None
    assert speed_note([*measurements, Measurement(speed_probe_ms=48.0, node="fast")]) == SpeedVaried(1.5)


def test_a_probe_works_on_every_cpu() -> None:
    probe = SpeedProbe()
    before, wall = os.times(), sum(probe.seconds() for _ in range(5))
    after = os.times()
    busy = after.user + after.system - before.user - before.system
    assert wall > 0
    assert busy > 0.01
