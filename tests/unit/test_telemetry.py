"""What others took of the CPUs, what belongs to the run itself, and how fast the machine is."""

from __future__ import annotations

import math
import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace

import pytest

from objectives.metrics import Measurement
from optimizer.interfaces import Endpoint, Samples
from optimizer.machine.cpu_time import Usage, process_tree, tree_by_children, tree_by_parents
from optimizer.machine.speed import SpeedLog, SpeedProbe
from optimizer.machine.telemetry import DISTURBED, ProcessTelemetry, disturbance, tree_memory_bytes
from optimizer.trial import Candidate

HERE = Endpoint("model", Candidate(1), server_pid=os.getpid())


@pytest.fixture
def family() -> Iterator[tuple[int, int]]:
    """A process and its child, until they are killed."""
    script = "sleep 600 & echo $!; wait"
    with subprocess.Popen(["sh", "-c", script], stdout=subprocess.PIPE, text=True, process_group=0) as parent:
        assert parent.stdout is not None
        yield parent.pid, int(parent.stdout.readline())
        os.killpg(parent.pid, signal.SIGKILL)


# -- who took the CPUs' time ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("taken", "own", "expected"),
    [
        (6.0, 4.0, 0.2),  # of 10 s
        (4.0, 4.0, 0.0),
        (4.0, 4.1, 0.0),  # ticks are counted, processes are timed
        (10.0, 0.0, 1.0),
    ],
)
def test_others_are_what_the_run_did_not_take(taken: float, own: float, expected: float) -> None:
    before = Usage(total=1000.0, taken=600.0, own=7.0)
    after = Usage(total=1010.0, taken=600.0 + taken, own=7.0 + own)
    assert after.others_since(before) == pytest.approx(expected)


def test_a_kernel_that_counts_nothing_is_unknown() -> None:
    assert math.isnan(Usage(0.0, 0.0, 2.0).others_since(Usage(0.0, 0.0, 1.0)))


def test_only_the_cpus_asked_for_count() -> None:
    every = Usage.now()
    one = Usage.now([min(os.sched_getaffinity(0))])
    assert 0 < one.taken <= one.total
    assert one.total == pytest.approx(every.total / len(os.sched_getaffinity(0)), rel=0.2)
    assert Usage.now([8191]).total == 0


def test_the_run_is_its_process_and_all_below(family: tuple[int, int]) -> None:
    assert {os.getpid(), *family} <= process_tree(os.getpid())


@pytest.mark.parametrize("tree", [tree_by_children, tree_by_parents])
def test_a_tree_is_told_by_children_and_by_parents(
    tree: Callable[[Iterable[int]], set[int]], family: tuple[int, int]
) -> None:
    parent, child = family
    assert tree([parent]) == tree([child, parent]) == {parent, child}
    assert tree([child]) == {child}
    assert tree([]) == set()


@pytest.mark.parametrize("tree", [tree_by_children, tree_by_parents])
def test_what_has_ended_has_no_tree(tree: Callable[[Iterable[int]], set[int]]) -> None:
    with subprocess.Popen(["true"]) as ended:
        pass
    assert tree([ended.pid]) == {ended.pid}


def test_what_has_ended_is_still_the_runs() -> None:
    """As a perf_analyzer: its time is its parent's once it was waited for."""
    before = Usage.now().own
    subprocess.run(["sh", "-c", "i=0; while [ $i -lt 200000 ]; do i=$((i+1)); done"], check=True)
    assert Usage.now().own - before > 0.05


def test_a_server_that_is_no_child_is_the_runs_too() -> None:
    started = subprocess.run(
        ["sh", "-c", "timeout 60 sh -c 'while :; do :; done' >/dev/null & echo $!"],
        stdout=subprocess.PIPE,
        check=True,
        process_group=0,
    )
    server = int(started.stdout)
    try:
        assert server not in process_tree(os.getpid())
        before = Usage.now(server_pid=server).own - Usage.now().own
        deadline = time.monotonic() + 10
        while (spent := Usage.now(server_pid=server).own - Usage.now().own - before) < 0.05:
            assert time.monotonic() < deadline, spent
            time.sleep(0.02)
    finally:
        os.kill(server, signal.SIGTERM)  # which ``timeout`` hands on


def test_memory_of_a_tree(family: tuple[int, int]) -> None:
    both, child = tree_memory_bytes(family[0]), tree_memory_bytes(family[1])
    assert both is not None
    assert child is not None
    assert both > child > 0
    assert tree_memory_bytes(None) is None


def test_memory_of_a_process_that_has_ended_is_unknown() -> None:
    with subprocess.Popen(["true"]) as ended:
        pass
    assert tree_memory_bytes(ended.pid) is None


def test_a_recording_tells_the_share() -> None:
    with ProcessTelemetry().record(HERE) as samples:
        assert samples.other_cpu_share is None
        subprocess.run(["sleep", "0.05"], check=True)
    assert samples.other_cpu_share is not None
    assert 0 <= samples.other_cpu_share <= 1
    assert samples.server_memory_bytes


def test_of_a_server_elsewhere_nothing_is_known() -> None:
    with ProcessTelemetry().record(replace(HERE, server_pid=None)) as samples:
        pass
    assert samples == Samples()


# -- what is told of it -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("share", [None, 0.0, DISTURBED])
def test_what_is_unknown_or_small_is_no_disturbance(share: float | None) -> None:
    assert disturbance(Measurement(other_cpu_share=share)) == ""


def test_a_disturbance_is_told_with_its_figure() -> None:
    told = disturbance(Measurement(other_cpu_share=0.338))
    assert told == "other processes or machines took 34 % of the CPUs while this was measured"


# -- how fast the machine is ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("seconds", "note"),
    [
        ([0.040, 0.040], ""),
        ([0.040, 0.040, 0.048, 0.047], ""),
        ([0.040, 0.041, 0.040, 0.900], ""),  # something woke for a moment
        ([0.064, 0.070, 0.040, 0.040], "the machine's speed varied by a factor 1.6 during the confirmation"),
    ],
)
def test_speed_that_varied_is_told(seconds: list[float], note: str) -> None:
    given = iter(seconds)
    log = SpeedLog(given.__next__)
    for _ in range(len(seconds) // 2):
        log.probe()
    assert log.note() == note


def test_nothing_was_asked_for() -> None:
    log = SpeedLog(lambda: 1.0)
    assert log.variation() == 1.0
    assert log.note() == ""


def test_a_probe_works_on_every_cpu() -> None:
    probe = SpeedProbe()
    before, wall = os.times(), probe.seconds()
    after = os.times()
    busy = after.user + after.system - before.user - before.system
    assert 0.005 < wall < 5
    assert busy > 0.01
