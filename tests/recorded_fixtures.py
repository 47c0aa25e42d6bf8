"""Runs on a recorded table, each in a process that a test can kill, and the result of an undisturbed run."""

from __future__ import annotations

import csv
import json
import os
import random
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import NoReturn

import pytest

from objectives.metrics import Measurement
from optimizer.config.search_space import SearchSpace
from optimizer.core.candidate import Candidate
from optimizer.core.files import write_atomically
from optimizer.core.trial import LoadPoint, Trial
from optimizer.store.trials_table import TrialsTable
from tests import recorded_process
from tests.command_fixtures import Ended, Sandbox, open_sandbox
from tests.conftest import measure_known_server, measurement
from tests.forked_tune import FORKS

LOADS = (1, 2, 4, 6, 8, 12, 16, 20, 24, 28, 32, 36, 40, 44, 48, 56, 64)
SPACE = SearchSpace(max_batch_size=(1, 4, 64), max_queue_delay_us=("off", 0, 1000), instance_count=(1, 2))
QUICK_SPACE = SearchSpace(max_batch_size=(1, 64), max_queue_delay_us=("off", 0), instance_count=(1, 2))


@dataclass(frozen=True)
class RecordedRuns:
    """The ``table`` and the method ``search`` of runs, and the rows of one that nothing disturbed."""

    table: Path
    search: str
    undisturbed: list[dict[str, str]]
    recommended: dict[str, object]

    def assert_complete(self, folder: Path) -> None:
        """Check that the run measured the same as the undisturbed one, in order and once, and recommends the same."""
        assert rows(folder) == self.undisturbed
        assert recommended(folder) == self.recommended
        left = {path.name for path in folder.iterdir()} - {"study.journal"}
        assert left == {"trials.csv", recorded_process.RESULT, recorded_process.PLAN}


@pytest.fixture(scope="session")
def recorded_runs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RecordedRuns]:
    """Runs of the default search method, whose next decision depends on all measurements in the study."""
    with open_sandbox(tmp_path_factory.mktemp("recorded")) as sandbox:
        yield undisturbed_run(sandbox, "simulated", SPACE)


@pytest.fixture(scope="session")
def quick_runs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RecordedRuns]:
    """Runs of a search method that needs no time, for faults of a disk or database during the first trial."""
    with open_sandbox(tmp_path_factory.mktemp("quick")) as sandbox:
        yield undisturbed_run(sandbox, "random", QUICK_SPACE)


def undisturbed_run(sandbox: Sandbox, search: str, space: SearchSpace) -> RecordedRuns:
    table, folder = sandbox.root / "recorded.csv", sandbox.working_folder / "run"
    record(table, space)
    folder.mkdir()
    ended = start(folder, RecordedRuns(table, search, [], {})).finish()
    assert ended.code == 0, ended.stderr
    return RecordedRuns(table, search, rows(folder), recommended(folder))


def record(path: Path, space: SearchSpace, loads: Sequence[int] = LOADS) -> None:
    """Write the table of a server whose configurations are 0.6 to 1.4 times as fast as the known server."""
    table = TrialsTable(path, "known", {})
    random_source = random.Random(1)
    for number, candidate in enumerate(space.candidates()):
        speed = random_source.uniform(0.6, 1.4)
        for concurrency in loads:
            result = _with_speed(candidate, concurrency, speed)
            table.append(Trial(number, candidate), LoadPoint(1, concurrency), result)


def _with_speed(candidate: Candidate, concurrency: int, speed: float) -> Measurement:
    measured = measure_known_server(candidate, concurrency, 1)
    assert measured.throughput_infer_per_sec is not None
    assert measured.latency_p95_ms is not None
    return measurement(speed * measured.throughput_infer_per_sec, measured.latency_p95_ms / speed)


@dataclass(frozen=True)
class RecordedProcess:
    """The process of a run. ``stderr_path`` is the file of its standard error."""

    process: ForkServerProcess
    stderr_path: Path

    @property
    def pid(self) -> int:
        assert self.process.pid is not None
        return self.process.pid

    @property
    def is_running(self) -> bool:
        return self.process.exitcode is None

    def kill(self) -> None:
        self.process.kill()

    def terminate(self) -> None:
        self.process.terminate()

    def finish(self, seconds: float = 600.0) -> Ended:
        """Wait for the end; return the exit code, which is negative for a signal, and standard error."""
        self.process.join(seconds)
        assert self.process.exitcode is not None, "still running"
        stderr = self.stderr_path.read_text()
        self.stderr_path.unlink()
        return Ended(self.process.exitcode, "", stderr, self.pid)


def start(folder: Path, runs: RecordedRuns, storage: str | None = None) -> RecordedProcess:
    """Start a process that begins or resumes the run in ``folder``."""
    words = [str(runs.table), str(folder), runs.search, *([storage] if storage else [])]
    return started(recorded_process.main, words, folder.parent)


def started(main: Callable[[list[str]], NoReturn], words: list[str], place: Path) -> RecordedProcess:
    """Start a command; its standard error goes to a file in the folder ``place``."""
    descriptor, stderr_path = tempfile.mkstemp(prefix="stderr-", dir=place)
    os.close(descriptor)
    process = FORKS.Process(target=_command, args=(main, words, stderr_path))
    process.start()
    return RecordedProcess(process, Path(stderr_path))


def hold(folder: Path, count: int) -> None:
    """Let a run in ``folder`` that has ``count`` rows measure nothing more until ``release``."""
    folder.with_name(folder.name + recorded_process.HELD).unlink(missing_ok=True)
    write_atomically(folder.with_name(folder.name + recorded_process.HOLD), str(count))


def release(folder: Path) -> None:
    folder.with_name(folder.name + recorded_process.HOLD).unlink()


def is_held(folder: Path) -> bool:
    """Return whether the run has come to the row at which ``hold`` stops it."""
    return folder.with_name(folder.name + recorded_process.HELD).exists()


def rows(folder: Path) -> list[dict[str, str]]:
    """Return the complete lines of the table on disk, without the deployment times."""
    path = folder / "trials.csv"
    text = path.read_text() if path.exists() else ""
    lines = list(csv.DictReader(text[: text.rfind("\n") + 1].splitlines()))
    for row in lines:
        del row["deploy_seconds"]
    return lines


def recommended(folder: Path) -> dict[str, object]:
    result = json.loads((folder / recorded_process.RESULT).read_text())
    assert isinstance(result, dict)
    return result


def _command(main: Callable[[list[str]], NoReturn], words: list[str], stderr_path: str) -> None:
    os.dup2(os.open(stderr_path, os.O_WRONLY), 2)
    main(words)
