"""Batches whose runs are copies of the sample run of dlrm, for tests of the code that runs and reads batches."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from optimizer.core.budget import RunMode
from optimizer.options.run_options import RunOptions
from optimizer.results.finished_run import FinishedRun
from optimizer.store.run_folder import RunFolder
from optimizer.study.batch.batch_runner import BatchRunner
from optimizer.study.batch.record import BatchFolder, BatchRecord, new_record
from optimizer.study.batch.suite import Suite, read_suite
from tests.csv_tables import read_rows, write_rows

SAMPLE = Path("tests/data/dlrm/sample").absolute()
SUITE = "name: nightly\nbudget: {budget}s\nentries: [{{model: [{models}], sla: {{p95: 20ms}}}}]\n"


@dataclass
class SampleRuns:
    """A ``RunEntry`` that writes as many of the sample's rows into the run's folder as fit the granted time.

    ``now`` advances with the rows, and by ``set_up_seconds`` before the first one of a run. A model in ``broken``
    raises; ``interrupts`` is interrupted after its first rows; ``stalls`` measures nothing more after its minimum.
    """

    broken: dict[str, Exception] = field(default_factory=dict)
    interrupts: str = ""
    now: float = 0.0
    calls: list[tuple[str, float, RunMode]] = field(default_factory=list)
    budgets: list[float] = field(default_factory=list)
    set_up_seconds: float = 0.0
    stalls: str = ""

    def __call__(self, options: RunOptions, folder: RunFolder, mode: RunMode, seconds: float) -> str:
        started = self.now
        self.calls.append((options.model, seconds, mode))
        self.budgets.append(options.budget_seconds)
        if options.model in self.broken:
            raise self.broken[options.model]
        rows = read_rows(SAMPLE / "trials.csv")
        written = read_rows(folder.trials) if folder.trials.exists() else []
        if not written:
            started = self.now = self.now + self.set_up_seconds
        elif options.model == self.stalls and mode is RunMode.SEARCH:
            self.now += 1.0
            return "found"
        spent = _seconds(written)
        left = [row for row in rows if row not in written and bool(row["confirmation"]) == (mode is RunMode.CONFIRM)]
        for row in left:
            new = row["trial"] not in {stored_row["trial"] for stored_row in written}
            if new and len({stored_row["trial"] for stored_row in written}) == options.max_trials:
                break
            written.append(row)
            self.now = started + _seconds(written) - spent
            if self.now - started >= seconds or options.model == self.interrupts:
                break
        searched = all(row in written for row in rows if not row["confirmation"])
        interrupted = options.model == self.interrupts
        status = "interrupted" if interrupted else "found"
        self._write(folder, written, options, status, "converged" if searched else "budget")
        return status

    def _write(
        self, folder: RunFolder, rows: list[dict[str, str]], options: RunOptions, status: str, search_ended: str
    ) -> None:
        write_rows(folder.trials, rows)
        sample_info = json.loads((SAMPLE / "run.json").read_text())
        facts: dict[str, object] = {"options": None, "status": status, "search_ended": search_ended}
        facts["times"] = {"set_up_seconds": self.set_up_seconds}
        facts["result"] = {}  # that of the sample has all rows
        folder.write_info(options, {**sample_info, **facts})
        info = json.loads(folder.info.read_text())
        info["options"] = {**json.loads((SAMPLE / "run.json").read_text())["options"], "model": options.model}
        folder.info.write_text(json.dumps(info))
        folder.report.write_text("the run's own page")


def _seconds(rows: list[dict[str, str]]) -> float:
    deployed = {row["trial"]: float(row["deploy_seconds"] or 0) for row in rows}
    return sum(deployed.values()) + sum(float(row["measure_seconds"] or 0) for row in rows)


def suite_of(folder: Path, *models: str, budget: float = 600) -> Suite:
    path = folder / "nightly.yaml"
    path.write_text(SUITE.format(budget=budget, models=", ".join(models)))
    return read_suite(path)


def by_model(improvements: dict[str, float]) -> Callable[[FinishedRun], float]:
    return lambda run: improvements[run.options.model]


def run(suite: Suite, sample_runs: SampleRuns, folder: BatchFolder, record: BatchRecord | None = None) -> BatchRecord:
    record = record or new_record(suite, suite.budget_seconds)
    lines: list[str] = []
    improvement = by_model({entry.options.model: 0.1 for entry in suite.entries})
    return BatchRunner(suite, folder, record, sample_runs, lines.append, improvement, lambda: sample_runs.now).run()
