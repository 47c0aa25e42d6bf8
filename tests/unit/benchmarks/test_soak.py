"""The pure parts of ``benchmarks/soak.py``: the order of its rounds, what it notices, and its tables."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[3] / "benchmarks"))

import soak
from records import Records
from soak import KINDS, SoakRound, count_lost, part_of, planned, read_rows, report, targets, wrong_end
from study_worker import StudyWorker, Usage

from optimizer.core.process import SUPERVISOR
from optimizer.measure.load_client.launcher import CLIENT
from tests.command_fixtures import Ended, Playground, playground

__all__ = ["playground"]

MACHINE = "a CPU, 2 cores"
RIGHT = SoakRound(
    number=0,
    seed=0,
    machine=MACHINE,
    started="2026-11-23T09:00:00+0000",
    operation="run",
    event="kill tritonserver",
    has_happened=True,
    means="",
    exit_codes=(4, 4),
    seconds=30.0,
    rows=12,
    lost_rows=0,
    leaks=(),
    faults=(),
    process="",
    usages=(),
)


def study(*usages: Usage) -> SoakRound:
    return replace(RIGHT, operation="study", process="7 of 09:00", usages=usages)


def test_each_kind_of_round_comes_once_before_the_next_order() -> None:
    first = [planned(0, number) for number in range(len(KINDS))]
    assert sorted(first) == sorted(KINDS)
    assert first == [planned(0, number) for number in range(len(KINDS))]
    second = [planned(0, len(KINDS) + number) for number in range(len(KINDS))]
    assert sorted(second) == sorted(first) != second != first
    assert [planned(1, number) for number in range(len(KINDS))] != first
    assert ("study", soak.KILL_TUNE) not in KINDS


@pytest.mark.parametrize(
    ("words", "part"),
    [
        (["/cache/bin/tritonserver", "--id=x"], "tritonserver"),
        (["/tmp/backends/python/triton_python_backend_stub", "model.py"], "stub"),
        (["/cache/bin/perf_analyzer", "-m", "mlp"], "load generator"),
        ([sys.executable, "-P", "-m", CLIENT, "folder"], "load generator"),
        ([sys.executable, "-I", "-S", str(SUPERVISOR), "", "", "tritonserver"], "supervisor"),
        ([sys.executable, "-I", "-S", str(SUPERVISOR), "", "", sys.executable, "-m", CLIENT], "supervisor"),
        (["bash", "-c", "exec triton_python_backend_stub"], ""),
        ([], ""),
    ],
)
def test_the_parts_of_tune_are_known_by_their_command_lines(words: list[str], part: str) -> None:
    assert part_of(words) == part


def test_rows_may_be_added_but_not_lost(tmp_path: Path) -> None:
    run = tmp_path / "mlp" / "20261123-090000"
    run.mkdir(parents=True)
    (run / "trials.csv").write_text("a,b\n1,2\n3,")
    before = read_rows(tmp_path)
    assert before == {"mlp/20261123-090000/trials.csv": [b"a,b", b"1,2"]}
    (run / "trials.csv").write_text("a,b\n1,2\n3,4\n")
    after = read_rows(tmp_path)
    assert count_lost(before, after) == 0
    assert count_lost(after, before) == 1
    assert count_lost(after, {}) == 3
    (run / "trials.csv").write_text("a,b\n3,4\n")
    assert count_lost(before, read_rows(tmp_path)) == 1


@pytest.mark.parametrize(
    ("code", "stderr", "allowed", "is_right"),
    [
        (0, "", {0}, True),
        (3, "trial 1\ntune: no server\ntune: log: a.log\n", {0, 3}, True),
        (-signal.SIGKILL, "trial 1\n", {-signal.SIGKILL}, True),
        (2, "tune: no such model\n", {0, 3}, False),
        (3, "", {0, 3}, False),
        (3, "Traceback (most recent call last):\ntune: this is a bug in tune\n", {3}, False),
        (3, "tune: one\ntune: two\n", {3}, False),
        (-signal.SIGKILL, "Traceback (most recent call last):\n", {-signal.SIGKILL}, False),
    ],
)
def test_a_wrong_end_is_noticed(code: int, stderr: str, allowed: set[int], is_right: bool) -> None:
    faults = wrong_end(Ended(code, "", stderr, 1), allowed)
    assert (faults == []) is is_right
    assert all(f"exit code {code}" in fault for fault in faults)


def test_the_tables_count_what_was_wrong() -> None:
    rounds = [
        RIGHT,
        replace(RIGHT, number=1, exit_codes=(3, 4), leaks=("/dev/shm/tritune_1_2_3_x",)),
        replace(RIGHT, number=2, event="kill tune", exit_codes=(-9, 1), lost_rows=2, faults=("exit code -9: a\nb",)),
        replace(RIGHT, number=3, event="full disk", means="tmpfs of 16 MiB", exit_codes=(3,)),
    ]
    lines = report(rounds)
    assert "| kill tritonserver | 2 | 2 | 3: 1, 4: 1 | 4: 2 | 1 | 0 | 0 |" in lines
    assert "| kill tune | 1 | 1 | -9: 1 | 1: 1 | 0 | 2 | 1 |" in lines
    assert "| **all** | 4 | 4 | -9: 1, 3: 2, 4: 1 | 1: 1, 4: 2 | 1 | 2 | 1 |" in lines
    assert "- full disk: tmpfs of 16 MiB" in lines
    assert lines[-5:] == ["", "Round 2 (run, kill tune):", "", "- 2 rows lost", "- exit code -9: a b"]
    assert list(targets(rounds).values()) == [False, False, False]
    assert all(targets([RIGHT]).values())


def test_growth_counts_from_the_second_study() -> None:
    steady = [
        study(Usage(10, 100_000_000), Usage(12, 200_000_000)),
        study(Usage(12, 300_000_000), Usage(12, 209_000_000)),
    ]
    assert all(targets(steady).values())
    assert "| 7 of 09:00 | 4 | 12 | 12 | +0.0% | 200 | 209 | +4.5% |" in report(steady)
    grown = [*steady, study(Usage(13, 211_000_000))]
    assert [text.partition(":")[0] for text, is_met in targets(grown).items() if not is_met] == [
        "growth of file handles",
        "growth of memory",
    ]
    assert "| 7 of 09:00 | 2 | – | – | – | – | – | – |" in report(steady[:1])


def test_rounds_are_read_back(tmp_path: Path) -> None:
    records = Records(tmp_path / "rounds.jsonl", SoakRound)
    rounds = [RIGHT, study(Usage(10, 1))]
    for one in rounds:
        records.append(one)
    assert records.read(MACHINE) == rounds


@pytest.fixture
def worker(playground: Playground) -> Iterator[StudyWorker]:
    instance = StudyWorker(playground.working_folder, os.environ, playground.root / "studies.log")
    yield instance
    instance.stop()


def test_studies_follow_one_another_in_one_process(worker: StudyWorker) -> None:
    worker.start({"model": "no-such-model", "sla_p95": "20ms"})
    first, pid = worker.read_end(), worker.pid
    worker.start({"model": "mlp", "sla_p95": "20"})
    second = worker.read_end()
    assert first is not None
    assert second is not None
    assert (first.exit_code, second.exit_code, worker.pid) == (2, 2, pid)
    assert "no-such-model" in first.error
    assert min(first.usage.file_handles, first.usage.memory_bytes) > 0
    assert worker.errors() == ""


def test_a_process_of_studies_that_died_is_noticed_and_replaced(worker: StudyWorker) -> None:
    worker.start({"model": "no-such-model"})
    assert worker.pid is not None
    os.kill(worker.pid, signal.SIGKILL)  # while it imports its modules
    assert worker.read_end() is None
    worker.start({"model": "no-such-model"})
    assert worker.read_end() is not None
