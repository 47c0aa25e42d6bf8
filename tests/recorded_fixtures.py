"""Runs on a recorded table, each a process that can be killed, and what an undisturbed one leaves."""

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
from optimizer.space import Space
from optimizer.store.trials_table import TrialsTable
from optimizer.trial import Candidate, LoadPoint, Trial
from tests import recorded_run
from tests.command_fixtures import FORKS, Ended, playing_in
from tests.conftest import known_server, measurement

LOADS = (1, 2, 4, 6, 8, 12, 16, 20, 24, 28, 32, 36, 40, 44, 48, 56, 64)
SPACE = Space(max_batch_size=(1, 4, 16, 64), max_queue_delay_us=("off", 0, 1000), instance_count=(1, 2))


@dataclass(frozen=True)
class RecordedRuns:
    """``table`` is what they run on, ``undisturbed`` the rows of one that nothing has disturbed."""

    table: Path
    undisturbed: list[dict[str, str]]
    recommended: dict[str, object]

    def assert_complete(self, folder: Path) -> None:
        """All that the undisturbed run measured, in its order and once, and what it recommends."""
        assert rows(folder) == self.undisturbed
        assert recommended(folder) == self.recommended
        left = {path.name for path in folder.iterdir()} - {"study.journal"}
        assert left == {"trials.csv", recorded_run.RESULT}


@pytest.fixture(scope="session")
def recorded_runs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RecordedRuns]:
    with playing_in(tmp_path_factory.mktemp("recorded")) as playground:
        table, folder = playground.root / "recorded.csv", playground.here / "run"
        record(table)
        folder.mkdir()
        ended = start(folder, table).finish()
        assert ended.code == 0, ended.stderr
        yield RecordedRuns(table, rows(folder), recommended(folder))


def record(path: Path, space: Space = SPACE, loads: Sequence[int] = LOADS) -> None:
    """A server that is better or worse at some configurations than any simulation can tell."""
    table = TrialsTable(path, "known", {})
    chance = random.Random(1)
    for number, candidate in enumerate(space.candidates()):
        luck = chance.uniform(0.6, 1.4)
        for concurrency in loads:
            found = _lucky(candidate, concurrency, luck)
            table.append(Trial(number, candidate), LoadPoint(1, concurrency), found)


def _lucky(candidate: Candidate, concurrency: int, luck: float) -> Measurement:
    usual = known_server(candidate, concurrency, 1)
    assert usual.throughput_infer_per_sec is not None
    assert usual.latency_p95_ms is not None
    return measurement(luck * usual.throughput_infer_per_sec, usual.latency_p95_ms / luck)


@dataclass(frozen=True)
class RecordedProcess:
    """A run's process; ``complaints`` is its standard error."""

    process: ForkServerProcess
    complaints: Path

    @property
    def pid(self) -> int:
        assert self.process.pid is not None
        return self.process.pid

    @property
    def is_running(self) -> bool:
        return self.process.exitcode is None

    def kill(self) -> None:
        self.process.kill()

    def finish(self, seconds: float = 60) -> Ended:
        """Its end; a signal's number is negative."""
        self.process.join(seconds)
        assert self.process.exitcode is not None, "still running"
        stderr = self.complaints.read_text()
        self.complaints.unlink()
        return Ended(self.process.exitcode, "", stderr, self.pid)


def start(folder: Path, table: Path, storage: str | None = None) -> RecordedProcess:
    """A process that begins the run in ``folder``, or goes on with it."""
    return started(recorded_run.main, [str(table), str(folder), *([storage] if storage else [])], folder.parent)


def started(main: Callable[[list[str]], NoReturn], words: list[str], place: Path) -> RecordedProcess:
    """A process that is a command; its standard error is kept in the folder ``place``."""
    descriptor, complaints = tempfile.mkstemp(prefix="stderr-", dir=place)
    os.close(descriptor)
    process = FORKS.Process(target=_command, args=(main, words, complaints))
    process.start()
    return RecordedProcess(process, Path(complaints))


def rows(folder: Path) -> list[dict[str, str]]:
    """What is on disk of the table, in whole lines, but for the time that each deployment took."""
    path = folder / "trials.csv"
    text = path.read_text() if path.exists() else ""
    found = list(csv.DictReader(text[: text.rfind("\n") + 1].splitlines()))
    for row in found:
        del row["deploy_seconds"]
    return found


def recommended(folder: Path) -> dict[str, object]:
    found = json.loads((folder / recorded_run.RESULT).read_text())
    assert isinstance(found, dict)
    return found


def _command(main: Callable[[list[str]], NoReturn], words: list[str], complaints: str) -> None:
    os.dup2(os.open(complaints, os.O_WRONLY), 2)
    main(words)
