"""A run on a recorded table as a process: stored and resumed as ``tune`` does, but without a server.

    python -m tests.recorded_process TABLE FOLDER SEARCH [STORAGE]

Each recorded measurement takes MEASURE_SECONDS, so that a test can stop the run in the middle of one, or hold it with
``wait_while_held``. Database statements are repeated for RETRY_SECONDS only, so that tests of a lost
database end soon.
"""

from __future__ import annotations

import json
import math
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import NoReturn

from objectives.metrics import Measurement
from optimizer.confirmation.confirmer import Confirmer
from optimizer.confirmation.plan import ConfirmationPlan, plan_document, read_plan_document
from optimizer.core import interrupts
from optimizer.core.budget import Budget
from optimizer.core.endpoint import Endpoint
from optimizer.core.errors import TuneError
from optimizer.core.files import write_atomically
from optimizer.core.stopwatch import Stopwatch
from optimizer.core.trial import LoadPoint
from optimizer.measure.measurer import Measurer
from optimizer.replay.replay import recorded_problem
from optimizer.results.progress_observers import QuietObserver
from optimizer.results.recommendation import assess
from optimizer.results.result_document import entry
from optimizer.search import make_searcher
from optimizer.store import optuna_storage
from optimizer.store.recording import RecordedServer, baselines, read_recording
from optimizer.store.run_folder import RunFolder
from optimizer.store.trials_table import TrialsTable
from optimizer.study.scheduler import Scheduler
from optimizer.study.trial_runner import run_trials

MEASURE_SECONDS, RETRY_SECONDS = 0.01, 3.0
BOUND_MS = 5.0
RESULT, PLAN = "recommended.json", "plan.json"
HOLD, HELD = ".hold", ".held"  # files next to the folder of a run


def wait_while_held(folder: Path) -> None:
    """Wait while FOLDER.hold exists, if the table has as many rows as that file says. FOLDER.held tells the test."""
    while _row_count(folder) >= _held_at(folder.with_name(folder.name + HOLD)):
        folder.with_name(folder.name + HELD).touch()
        time.sleep(MEASURE_SECONDS)


def _held_at(file: Path) -> float:
    try:
        return int(file.read_text())
    except FileNotFoundError:
        return math.inf


def _row_count(folder: Path) -> int:
    table = folder / "trials.csv"
    return table.read_bytes().count(b"\n") - 1 if table.exists() else 0


@dataclass(frozen=True)
class SlowLoad:
    """A LoadGenerator whose measurements take ``seconds``; those of the confirmation only if it is slow too.

    Tests hold the search with the file FOLDER.hold.
    """

    table: RecordedServer
    folder: Path
    seconds: float
    is_confirmation_slow: bool

    def measure(self, endpoint: Endpoint, load: LoadPoint, seconds: float | None = None) -> Measurement:
        wait_while_held(self.folder)
        time.sleep(self.seconds)
        return self.table.measure(endpoint, load, seconds)

    def measure_windows(self, endpoint: Endpoint, load: LoadPoint, seconds: float, count: int) -> list[Measurement]:
        measure = self.measure if self.is_confirmation_slow else self.table.measure
        return [measure(endpoint, load, seconds)]

    def warm_up(self, endpoint: Endpoint, load: LoadPoint) -> None:
        self.table.warm_up(endpoint, load)


def run(table: Path, folder: Path, search: str, storage: str | None = None) -> None:
    """Start or resume the run in ``folder``; at the end its recommendation is in the file RESULT."""
    recording = read_recording(table)
    problem = recorded_problem(recording, {"p95": BOUND_MS})
    run_folder = RunFolder(folder)
    with run_folder.locked():
        trials_table = TrialsTable(run_folder.trials, problem.model, problem.space.fields)
        searcher = make_searcher(search, problem, 0, storage or str(run_folder.study), run_folder.study_name)
        generator = SlowLoad(recording.server, folder, MEASURE_SECONDS, is_confirmation_slow=True)
        measuring = Measurer(generator, recording.server, trials_table, QuietObserver())
        budget = Budget(math.inf)
        compared = baselines(problem.space)
        (_, baseline), (_, plain) = compared
        trials = run_trials(Scheduler(problem, searcher, budget, Stopwatch(), compared), recording.server, measuring)
        confirmer = Confirmer(problem, recording.server, measuring, budget, trials)
        confirmer.recorded_plan, confirmer.store_plan = read_plan(folder), partial(write_plan, folder)
        trials = confirmer.run([baseline, plain])
        recommended = assess(trials, problem, baseline, plain).recommended
        assert recommended is not None
        write_atomically(folder / RESULT, json.dumps(entry(recommended), indent=2))


def read_plan(folder: Path) -> ConfirmationPlan | None:
    """Return the plan that ``write_plan`` wrote; None if there is none."""
    file = folder / PLAN
    return read_plan_document(json.loads(file.read_text())) if file.exists() else None


def write_plan(folder: Path, plan: ConfirmationPlan) -> None:
    """Store the plan of the confirmation, which ``tune`` writes to run.json."""
    write_atomically(folder / PLAN, json.dumps(plan_document(plan)))


def ending_as_tune(work: Callable[[], None]) -> NoReturn:
    """Report an error as one line and its exit code."""
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
    table, folder, search, *storage = words
    optuna_storage.RETRY_SECONDS = RETRY_SECONDS
    ending_as_tune(lambda: run(Path(table), Path(folder), search, *storage))


if __name__ == "__main__":
    main(sys.argv[1:])
