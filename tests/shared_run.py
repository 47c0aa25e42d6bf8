"""A worker of a shared study on a recorded table, as a process: as ``tune --join`` does it, but without a server.

    python -m tests.shared_run TABLE FOLDER STORAGE STUDY [OPTION=VALUE ...]

Its heart beats quickly, so that it is soon missed. What it says of others is on standard error.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NoReturn

from objectives.metrics import Measurement
from objectives.sla import Constraint
from optimizer.budget import Budget
from optimizer.confirm.confirmer import Confirmer
from optimizer.deploy.recorded import RecordedTable
from optimizer.interfaces import Endpoint
from optimizer.measuring import Measuring
from optimizer.options import RunOptions
from optimizer.outcome import assess
from optimizer.replay.baselines import baselines
from optimizer.replay.recording import read_recording
from optimizer.report.export import entry
from optimizer.report.live import QuietWatcher
from optimizer.search import searcher_on
from optimizer.sharing.join import join
from optimizer.store.disk import write_whole
from optimizer.store.patience import Patience
from optimizer.store.run_folder import RunFolder
from optimizer.store.study import Shared
from optimizer.store.trials_table import TrialsTable
from optimizer.trial import LoadPoint
from optimizer.tuner import Tuner
from tests.recorded_run import RESULT, ending_as_tune

BEAT_SECONDS, GRACE_SECONDS = 1, 4


@dataclass(frozen=True)
class Worker:
    """``slow_seconds`` is what a measurement takes; ``within_ms`` the bound on p95."""

    search: str = "grid"
    budget_seconds: float = 600.0
    slow_seconds: float = 0.02
    within_ms: float = 5.0

    @classmethod
    def told(cls, words: Sequence[str]) -> Worker:
        given = dict(word.split("=") for word in words)
        numbers = {name: float(value) for name, value in given.items() if name != "search"}
        return replace(cls(search=given.get("search", cls.search)), **numbers)  # type: ignore[arg-type]


@dataclass(frozen=True)
class SlowLoad:
    """A LoadGenerator whose measurements take their time, but for those that confirm."""

    table: RecordedTable
    seconds: float

    def measure(self, endpoint: Endpoint, load: LoadPoint, seconds: float | None = None) -> Measurement:
        time.sleep(self.seconds)
        return self.table.measure(endpoint, load, seconds)

    def windows(self, endpoint: Endpoint, load: LoadPoint, seconds: float, count: int) -> list[Measurement]:
        return [self.table.measure(endpoint, load, seconds)]

    def warm_up(self, endpoint: Endpoint, load: LoadPoint) -> None:
        self.table.warm_up(endpoint, load)


def run(worker: Worker, table: Path, folder: RunFolder, storage: str, study: str) -> None:
    """Join the study. The last worker leaves what it recommends in RESULT."""
    recording = read_recording(table)
    problem = recording.problem([Constraint("latency-p95", worker.within_ms)])
    options = RunOptions(problem.model, search=worker.search, storage=storage, join=study)
    with folder.locked():
        kept = TrialsTable(folder.trials, problem.model, problem.space.fields)
        load = SlowLoad(recording.server, worker.slow_seconds)
        measuring = Measuring(load, recording.server, kept, QuietWatcher())
        budget = Budget(worker.budget_seconds, confirm_share=0.5)
        patience = Patience(
            time.monotonic() + worker.budget_seconds, say, str(folder.trials), longest_pause_seconds=1.0
        )
        compared = baselines(problem.space)
        with join(options, problem, folder, None, Shared(patience, BEAT_SECONDS, GRACE_SECONDS)) as shared:
            searcher = searcher_on(shared.ledger, worker.search, problem)
            trials = Tuner(problem, searcher, recording.server, measuring, budget, others=shared).run(compared)
            if handed_on := shared.hand_on():
                say(handed_on)
                return
            trials = shared.gathered(trials, kept)
            trials = Confirmer(problem, recording.server, measuring, budget, trials).run(compared[0][1])
        recommended = assess(trials, problem, *(candidate for _, candidate in compared)).recommended
        assert recommended is not None
        write_whole(folder.path / RESULT, json.dumps(entry(recommended), indent=2))


def say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def main(words: Sequence[str]) -> NoReturn:
    table, folder, storage, study, *options = words
    ending_as_tune(lambda: run(Worker.told(options), Path(table), RunFolder(Path(folder)), storage, study))


if __name__ == "__main__":
    main(sys.argv[1:])
