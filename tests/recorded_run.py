"""A run on a recorded table, as a process: kept, and gone on with, as ``tune`` does it, but without a server.

    python -m tests.recorded_run TABLE FOLDER [STORAGE]

The recorded answers take MEASURE_SECONDS each, so that a run can be stopped at any moment of a measurement.
"""

from __future__ import annotations

import json
import math
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from objectives.metrics import Measurement
from objectives.sla import Constraint
from optimizer import interrupts
from optimizer.budget import Budget
from optimizer.confirm.confirmer import Confirmer
from optimizer.deploy.recorded import RecordedTable
from optimizer.errors import TuneError
from optimizer.interfaces import Endpoint
from optimizer.measuring import Measuring
from optimizer.outcome import assess
from optimizer.replay.baselines import baselines
from optimizer.replay.recording import read_recording
from optimizer.report.export import entry
from optimizer.search import make_searcher
from optimizer.store.disk import write_whole
from optimizer.store.run_folder import RunFolder
from optimizer.store.trials_table import TrialsTable
from optimizer.trial import LoadPoint
from optimizer.tuner import Tuner

MEASURE_SECONDS = 0.01
BOUND = Constraint("latency-p95", 5.0)
RESULT = "recommended.json"


@dataclass(frozen=True)
class SlowLoad:
    """A LoadGenerator whose measurements take their time."""

    table: RecordedTable

    def measure(self, endpoint: Endpoint, load: LoadPoint, seconds: float | None = None) -> Measurement:
        time.sleep(MEASURE_SECONDS)
        return self.table.measure(endpoint, load, seconds)

    def windows(self, endpoint: Endpoint, load: LoadPoint, seconds: float, count: int) -> list[Measurement]:
        return [self.measure(endpoint, load, seconds)]

    def warm_up(self, endpoint: Endpoint, load: LoadPoint) -> None:
        self.table.warm_up(endpoint, load)


class Unwatched:
    def trial_started(self, *_: object) -> None: ...
    def measured(self, *_: object) -> None: ...
    def trial_finished(self, *_: object) -> None: ...


def run(table: Path, folder: Path, storage: str | None = None) -> None:
    """Start the run in ``folder``, or go on with it; what it recommends is in RESULT in the end."""
    recording = read_recording(table)
    problem = recording.problem([BOUND])
    kept = RunFolder(folder)
    with kept.locked():
        trials_table = TrialsTable(kept.trials, problem.model, problem.space.fields)
        searcher = make_searcher("simulated", problem, 0, storage or str(kept.study), kept.study_name)
        measuring = Measuring(SlowLoad(recording.server), recording.server, trials_table, Unwatched())
        budget = Budget(math.inf)
        compared = baselines(problem.space)
        (_, baseline), (_, plain) = compared
        trials = Tuner(problem, searcher, recording.server, measuring, budget).run(compared)
        trials = Confirmer(problem, recording.server, measuring, budget, trials).run(baseline)
        recommended = assess(trials, problem, baseline, plain).recommended
        assert recommended is not None
        write_whole(folder / RESULT, json.dumps(entry(recommended), indent=2))


def ending_as_tune(work: Callable[[], None]) -> NoReturn:
    """An error is one line and its exit code."""
    interrupts.install()
    try:
        work()
    except KeyboardInterrupt:
        interrupts.acknowledge()
        sys.exit(130)
    except TuneError as error:
        print(f"tune: {error}", file=sys.stderr)
        sys.exit(error.exit_code)
    sys.exit(0)


def main(words: Sequence[str]) -> NoReturn:
    table, folder, *storage = words
    ending_as_tune(lambda: run(Path(table), Path(folder), *storage))


if __name__ == "__main__":
    main(sys.argv[1:])
