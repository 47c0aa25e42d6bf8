"""What a table recorded: candidates, loads and what they gave, ready to be answered with."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

from objectives import pareto
from objectives.metrics import METRICS
from objectives.sla import Constraint
from optimizer.deploy.recorded import RecordedTable
from optimizer.errors import BadInputError
from optimizer.problem import Problem
from optimizer.replay.csv_table import CsvTable, read_csv
from optimizer.replay.rows import REQUIRED, Row, read_rows
from optimizer.replay.space import RecordedSpace, recorded_space
from optimizer.trial import Candidate, LoadPoint, Trial

Cell = tuple[Candidate, LoadPoint | None]
FINGERPRINT = "fingerprint"


@dataclass(frozen=True)
class Recording:
    """``rows`` are as recorded; ``answers`` has the row that counts for a canonical candidate at a load.

    Of candidates that behave the same that is the first recorded; they failed to deploy (no load) if all did.
    ``known`` are the metrics that the table has; ``fingerprint`` is that of the device and server, where it tells.
    """

    name: str
    rows: tuple[Row, ...]
    space: RecordedSpace
    answers: Mapping[Cell, Row]
    request_batch_size: int
    known: frozenset[str]
    fingerprint: str = ""

    def problem(self, constraints: Sequence[Constraint]) -> Problem:
        """The most throughput within ``constraints``. Raises BadInputError where a metric was not recorded."""
        for constraint in constraints:
            if constraint.metric not in self.known:
                short = constraint.metric.removeprefix("latency-")
                raise BadInputError(
                    f"{self.name}: --sla-{short} needs the column latency_{short}_ms, which the table does not have"
                )
        return Problem(
            model="recorded",
            space=self.space,
            request_batch_size=self.request_batch_size,
            max_concurrency=max((row.load.concurrency for row in self.rows if row.load), default=1),
            constraints=tuple(constraints),
        )

    def best(self, problem: Problem) -> Row | None:
        """The row of the most throughput that meets the constraints, also where another row counts for it."""
        return pareto.best(self._measured(), problem.objectives, problem.constraints)

    def closest(self, problem: Problem) -> Row | None:
        """Where none meets them, the row that misses them least."""
        return pareto.closest(self._measured(), problem.constraints, problem.objectives)

    @cached_property
    def server(self) -> RecordedTable:
        """Target, load generator and telemetry that answer with the recorded."""
        return RecordedTable(self.trials())

    def trials(self) -> list[Trial]:
        """What was recorded, by candidate."""
        trials: dict[Candidate, Trial] = {}
        for (candidate, load), row in self.answers.items():
            trial = trials.get(candidate) or Trial(len(trials), candidate)
            if load is None:
                trials[candidate] = replace(trial, status="failed", reason=row.measurement.reason)
            else:
                trials[candidate] = replace(trial, measurements=(*trial.measurements, (load, row.measurement)))
        return list(trials.values())

    def _measured(self) -> list[Row]:
        return [row for row in self.rows if row.load]


def read_recording(path: Path) -> Recording:
    """The table at ``path``. Raises BadInputError in one line with the line and the column of the fault."""
    found = read_recordings(path)
    if len(found) > 1:
        raise BadInputError(f"{found[0].name}: has rows of {len(found)} devices or servers; leave those of one")
    return found[0]


def read_recordings(path: Path) -> list[Recording]:
    """As ``read_recording``, of a table that may have rows of several devices or servers: each for itself."""
    table = read_csv(path, REQUIRED)
    found = dict.fromkeys(table.texts(FINGERPRINT))
    if len(found) == 1:
        return [_recording(table, *found)]
    parts = [replace(table.only(FINGERPRINT, one), name=f"{table.name} ({one or 'unknown'})") for one in found]
    return [_recording(part, one) for part, one in zip(parts, found, strict=True)]


def _recording(table: CsvTable, fingerprint: str) -> Recording:
    rows, request_batch_size = read_rows(table)
    deployed = {row.candidate: row.load is not None for row in rows}  # by its last row
    rows = [row for row in rows if deployed[row.candidate] == (row.load is not None)]
    loads: dict[Candidate, set[int]] = {}
    for row in rows:
        loads.setdefault(row.candidate, set()).update({row.load.concurrency} if row.load else ())
    try:
        space = recorded_space(loads, request_batch_size)
    except ValueError as error:
        raise BadInputError(f"{table.name}: {error}") from None
    canonical = {candidate: space.canonical(candidate) for candidate in loads}
    some = {canonical[row.candidate] for row in rows if row.load}
    answers: dict[Cell, Row] = {}
    for row in rows:
        if row.load or canonical[row.candidate] not in some:
            answers.setdefault((canonical[row.candidate], row.load), row)
    known = frozenset(name for name in METRICS if name == "latency-p95" or _is_known(name, rows))
    return Recording(table.name, tuple(rows), space, answers, request_batch_size, known, fingerprint)


def _is_known(metric: str, rows: Sequence[Row]) -> bool:
    return any(METRICS[metric].value(row.measurement) is not None for row in rows)
