"""A worker process of a shared study on a recorded table, as ``tune --study-name`` without a server.

    python -m tests.worker_process TABLE FOLDER STORAGE STUDY [OPTION=VALUE ...]

Its heartbeats are quick, so that its death is noticed soon. Its messages are on standard error.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import NoReturn

from optimizer.confirmation.confirmer import Confirmer
from optimizer.core.budget import Budget
from optimizer.core.files import write_atomically
from optimizer.core.stopwatch import Stopwatch
from optimizer.measure.measurer import Measurer
from optimizer.options.run_options import RunOptions
from optimizer.replay.replay import recorded_problem
from optimizer.results.progress_observers import QuietObserver
from optimizer.results.recommendation import assess
from optimizer.results.result_document import entry
from optimizer.search import make_searcher_for_study
from optimizer.store.optuna_storage import RetryPolicy
from optimizer.store.optuna_study import StudySharing
from optimizer.store.recording import baselines, read_recording
from optimizer.store.run_folder import RunFolder
from optimizer.store.trials_table import TrialsTable
from optimizer.study.distributed.shared_study import join
from optimizer.study.scheduler import Scheduler
from optimizer.study.trial_runner import run_trials
from tests.recorded_process import RESULT, SlowLoad, ending_as_tune, read_plan, write_plan

BEAT_SECONDS = 1
SLOW_SECONDS = 0.02


@dataclass(frozen=True)
class WorkerSettings:
    """Settings of a worker.

    Other workers count as dead if they are silent for ``grace_seconds``, which a live one may be on a busy machine.
    """

    search: str = "grid"
    budget_seconds: float = 600.0
    grace_seconds: float = 120.0

    @classmethod
    def parse(cls, words: Sequence[str]) -> WorkerSettings:
        options = dict(word.split("=") for word in words)
        numbers = {name: float(value) for name, value in options.items() if name != "search"}
        return replace(cls(search=options.get("search", cls.search)), **numbers)  # type: ignore[arg-type]


def run(worker: WorkerSettings, table: Path, folder: RunFolder, storage: str, study: str) -> None:
    """Join the study. The last worker writes its recommendation to RESULT."""
    recording = read_recording(table)
    problem = recorded_problem(recording, {"p95": 5.0})
    options = RunOptions(problem.model, search=worker.search, storage=storage, study_name=study)
    with folder.locked():
        trials_table = TrialsTable(folder.trials, problem.model, problem.space.fields)
        generator = SlowLoad(recording.server, folder.path, SLOW_SECONDS, is_confirmation_slow=False)
        measurer = Measurer(generator, recording.server, trials_table, QuietObserver())
        budget = Budget(worker.budget_seconds, confirm_share=0.5)
        retry = RetryPolicy(
            time.monotonic() + worker.budget_seconds, on_progress, str(folder.trials), longest_pause_seconds=1.0
        )
        compared = baselines(problem.space)
        sharing = StudySharing(retry, BEAT_SECONDS, round(worker.grace_seconds))
        with join(options, problem, folder, None, sharing) as shared:
            searcher = make_searcher_for_study(shared.tracker, worker.search)
            scheduler = Scheduler(problem, searcher, budget, Stopwatch(), compared, shared)
            trials = run_trials(scheduler, recording.server, measurer)
            if continued_by := shared.leave_search():
                on_progress(continued_by)
                return
            trials = shared.collect_trials(trials, trials_table)
            confirmer = Confirmer(problem, recording.server, measurer, budget, trials)
            confirmer.recorded_plan, confirmer.store_plan = read_plan(folder.path), partial(write_plan, folder.path)
            trials = confirmer.run([candidate for _, candidate in compared])
        recommended = assess(trials, problem, *(candidate for _, candidate in compared)).recommended
        assert recommended is not None
        write_atomically(folder.path / RESULT, json.dumps(entry(recommended), indent=2))


def on_progress(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def main(words: Sequence[str]) -> NoReturn:
    table, folder, storage, study, *options = words
    ending_as_tune(lambda: run(WorkerSettings.parse(options), Path(table), RunFolder(Path(folder)), storage, study))


if __name__ == "__main__":
    main(sys.argv[1:])
