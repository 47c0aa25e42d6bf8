"""A run that is stopped at any moment, again and again, and gone on with: as if nothing had happened.

Each measurement is on disk before the next begins, so that a ``kill -9`` costs the one in flight and no more.
"""

from __future__ import annotations

import os
import random
import signal
import time
from pathlib import Path

from tests.command_fixtures import Playground, eventually
from tests.recorded_fixtures import RecordedRuns, recorded_runs, rows, start
from tests.recorded_run import MEASURE_SECONDS

__all__ = ["recorded_runs"]

KILLS = 20
THOUGHT_SECONDS = 0.3  # about what the search takes for its next proposal
START_SECONDS = 30.0


def moments(runs: RecordedRuns, count: int) -> list[tuple[int, float]]:
    """So many rows of the table, and so many seconds later: half of them in the search, half while confirming."""
    chance = random.Random(20)
    searched = sum(not row["confirmation"] for row in runs.undisturbed)
    last = len(runs.undisturbed) - 2
    places = [chance.randint(0, searched) for _ in range(count // 2)]
    places += [chance.randint(searched, last) for _ in range(count - count // 2)]
    longest = {place: THOUGHT_SECONDS if place <= searched else MEASURE_SECONDS for place in places}
    return [(place, chance.uniform(0, longest[place])) for place in sorted(places)]


def wait_for_rows(folder: Path, count: int) -> None:
    assert eventually(lambda: len(rows(folder)) >= count, START_SECONDS)


def test_kill_9_at_20_random_moments(playground: Playground, recorded_runs: RecordedRuns) -> None:
    folder = playground.here / "run"
    folder.mkdir()
    for place, seconds in moments(recorded_runs, KILLS):
        before = rows(folder)
        process = start(folder, recorded_runs.table)
        wait_for_rows(folder, place)
        time.sleep(seconds)
        process.kill()
        assert process.finish().code == -signal.SIGKILL
        after = rows(folder)
        assert after[: len(before)] == before
        assert after == recorded_runs.undisturbed[: len(after)]
    ended = start(folder, recorded_runs.table).finish()
    assert (ended.code, ended.stderr) == (0, "")
    recorded_runs.assert_complete(folder)


def test_signals_at_random_moments(playground: Playground, recorded_runs: RecordedRuns) -> None:
    folder = playground.here / "run"
    folder.mkdir()
    signals = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGTERM)
    for signum, (place, seconds) in zip(signals, moments(recorded_runs, len(signals)), strict=True):
        there = len(rows(folder))
        process = start(folder, recorded_runs.table)
        wait_for_rows(folder, max(place, there + 1))  # so that it is at work, and listens
        time.sleep(seconds)
        os.kill(process.pid, signum)
        ended = process.finish(seconds=5)
        assert (ended.code, ended.stderr) == (130, "")
        assert rows(folder) == recorded_runs.undisturbed[: len(rows(folder))]
    assert start(folder, recorded_runs.table).finish().code == 0
    recorded_runs.assert_complete(folder)


def test_one_run_at_a_time_in_a_folder(playground: Playground, recorded_runs: RecordedRuns) -> None:
    """The second is told whose it is; the first does not notice."""
    folder, other = playground.here / "run", playground.here / "other"
    folder.mkdir()
    other.mkdir()
    first = start(folder, recorded_runs.table)
    wait_for_rows(folder, 1)
    beside = start(other, recorded_runs.table)  # in a folder of its own nobody is in its way
    ended = start(folder, recorded_runs.table).finish()
    assert ended.code == 3
    (complaint,) = ended.complaints
    assert complaint.startswith(f"tune: {folder}: process {first.pid} on ")
    assert complaint.endswith(" is at work on this run; wait for its end, or end it")
    for process, its in ((first, folder), (beside, other)):
        assert process.finish().code == 0
        recorded_runs.assert_complete(its)


def test_a_lock_goes_with_its_killed_holder(playground: Playground, recorded_runs: RecordedRuns) -> None:
    folder = playground.here / "run"
    folder.mkdir()
    process = start(folder, recorded_runs.table)
    wait_for_rows(folder, 1)
    process.kill()
    process.finish()
    assert (folder / ".lock").exists()
    assert start(folder, recorded_runs.table).finish().code == 0
    recorded_runs.assert_complete(folder)
