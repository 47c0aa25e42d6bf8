"""A run that is stopped at arbitrary moments and resumed gives the same result as an uninterrupted one.

Each measurement is on disk before the next begins, so that a ``kill -9`` costs the one in flight and no more.
"""

from __future__ import annotations

import os
import random
import signal
import time
from pathlib import Path

from tests.command_fixtures import Sandbox, eventually
from tests.recorded_fixtures import RecordedRuns, hold, is_held, quick_runs, recorded_runs, release, rows, start
from tests.recorded_process import MEASURE_SECONDS

__all__ = ["quick_runs", "recorded_runs"]

KILLS = 6
THOUGHT_SECONDS = 0.3  # estimated: the time that the search takes for its next proposal
START_SECONDS = 600.0
AHEAD = 10  # rows that a run may be ahead of the moment at which it is killed; then it waits for that


def moments(runs: RecordedRuns, count: int) -> list[tuple[int, float]]:
    """Return moments as (rows of the table, seconds after the last row): half in the search, half in confirmation."""
    chance = random.Random(20)
    searched = sum(not row["confirmation"] for row in runs.undisturbed)
    last = len(runs.undisturbed) - 2
    places = [chance.randint(0, searched) for _ in range(count // 2)]
    places += [chance.randint(searched, last) for _ in range(count - count // 2)]
    longest = {place: THOUGHT_SECONDS if place <= searched else MEASURE_SECONDS for place in places}
    return [(place, chance.uniform(0, longest[place])) for place in sorted(places)]


def wait_for_rows(folder: Path, count: int) -> None:
    assert eventually(lambda: len(rows(folder)) >= count, START_SECONDS)


def test_a_run_killed_at_random_moments_gives_the_same_result(sandbox: Sandbox, recorded_runs: RecordedRuns) -> None:
    folder = sandbox.working_folder / "run"
    folder.mkdir()
    for place, seconds in moments(recorded_runs, KILLS):
        before = rows(folder)
        hold(folder, min(place + AHEAD, len(recorded_runs.undisturbed) - 1))  # it cannot end before it is killed
        process = start(folder, recorded_runs)
        wait_for_rows(folder, place)
        time.sleep(seconds)
        process.kill()
        assert process.finish().code == -signal.SIGKILL
        after = rows(folder)
        assert after[: len(before)] == before
        assert after == recorded_runs.undisturbed[: len(after)]
    release(folder)
    ended = start(folder, recorded_runs).finish()
    assert (ended.code, ended.stderr) == (0, "")
    recorded_runs.assert_complete(folder)


def test_a_run_interrupted_at_random_moments_gives_the_same_result(
    sandbox: Sandbox, recorded_runs: RecordedRuns
) -> None:
    folder = sandbox.working_folder / "run"
    folder.mkdir()
    signals = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGTERM)
    for left, signum, (place, seconds) in zip(
        range(len(signals), 0, -1), signals, moments(recorded_runs, len(signals)), strict=True
    ):
        # a row more than there are, so that it is at work, and listens; two rows are left for each further signal
        count = min(max(place, len(rows(folder)) + 1), len(recorded_runs.undisturbed) - 2 * left)
        hold(folder, count + 1)
        process = start(folder, recorded_runs)
        wait_for_rows(folder, count)
        time.sleep(seconds)
        os.kill(process.pid, signum)
        ended = process.finish(seconds=START_SECONDS)
        assert (ended.code, ended.stderr) == (130, "")
        assert rows(folder) == recorded_runs.undisturbed[: len(rows(folder))]
    release(folder)
    assert start(folder, recorded_runs).finish().code == 0
    recorded_runs.assert_complete(folder)


def test_a_second_run_in_the_same_folder_is_refused(sandbox: Sandbox, quick_runs: RecordedRuns) -> None:
    """The second process is refused and names the first one, which is not disturbed."""
    folder, other = sandbox.working_folder / "run", sandbox.working_folder / "other"
    folder.mkdir()
    other.mkdir()
    hold(folder, 1)
    first = start(folder, quick_runs)
    assert eventually(lambda: is_held(folder), START_SECONDS)
    beside = start(other, quick_runs)  # no other run uses its folder
    ended = start(folder, quick_runs).finish()
    assert ended.code == 3
    (complaint,) = ended.stderr_lines
    assert complaint.startswith(f"tune: {folder}: process {first.pid} on ")
    assert complaint.endswith(" uses this run; wait until it ends, or stop it")
    release(folder)
    for process, its in ((first, folder), (beside, other)):
        assert process.finish().code == 0
        quick_runs.assert_complete(its)
