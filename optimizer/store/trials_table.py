"""The trials table of a run (``trials.csv``): one row a measurement, on disk before the next one begins.

The table is the record of a run: its trials are rebuilt from it. A row without a load is a deployment that failed;
earlier measurements of that trial do not count. ``confirmation`` is the number of the fresh server on which the
recommendation was measured again; it is empty for measurements of the search. ``load_generator`` is ``perf_analyzer``
for a measurement that checks the windows of tune's own client on that server, and empty for all others.
``fingerprint`` is the short form of the device and server, ``cpu_count`` the server's number of CPUs. Columns that
trials_reader.COLUMNS does not name are parameters, named by their proto path.
"""

from __future__ import annotations

import csv
import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from objectives import model_stats
from objectives.metrics import Measurement
from optimizer.core.candidate import FieldValue
from optimizer.core.errors import BadInputError, DeploymentError
from optimizer.core.files import write_error
from optimizer.core.safe_text import one_line, read_bytes
from optimizer.core.trial import Crash, FreshServer, LoadPoint, Trial
from optimizer.machine.hardware import ID_LENGTH
from optimizer.store.trials_reader import (
    COLUMNS,
    FAILED,
    LOAD_COLUMNS,
    MAX_BYTES,
    MEASUREMENT_COLUMNS,
    RESULT_COLUMNS,
    TRIAL_COLUMNS,
    CsvTable,
    TrialRow,
    common_value,
    forecast_cells,
    read_csv,
    read_rows,
)

MAX_LIST_LENGTH = 300  # characters of the columns in a message
# A run's table has these; a measurement whose column is missing is unknown.
_REQUIRED = (
    *(*TRIAL_COLUMNS, *LOAD_COLUMNS, "throughput_infer_per_sec", "latency_p95_ms", "stable"),
    *("load_generator", "deploy_seconds", "status", "reason"),
)
_REQUIRED_TO_CONTINUE = (*_REQUIRED, "confirmation", "confirmation_error")  # a recorded table may be a search alone


class TrialsTable:
    """Writes and reads the trials table of one run.

    Attributes:
        path: The file.
        columns: The columns to write: after ``read`` those of the file.
    """

    def __init__(
        self,
        path: Path,
        model: str,
        choices: Mapping[str, Sequence[FieldValue]],
        fingerprint: str = "",
        cpu_count: int | None = None,
        concurrent_models: Sequence[str] = (),
    ) -> None:
        """Describe the table. Its file is not opened yet.

        Args:
            path: The file.
            model: The name of the model.
            choices: The values of the other parameters by path, because a CSV file does not keep their types.
            fingerprint: The short form of the device and server. Rows of another one are refused; if it is empty, all
                rows are read.
            cpu_count: The server's number of CPUs; None if it serves on a GPU or the number is unknown. A table has
                one, so ``read`` replaces it by that of the file: a quota of CPUs may have changed since.
            concurrent_models: Names of the other models whose values each measurement has.
        """
        self.path = path
        self._model = model
        self._fingerprint = fingerprint
        self._cpu_count = cpu_count
        self._choices = choices
        self._concurrent_models = concurrent_models
        self.columns = (*TRIAL_COLUMNS, *choices, *RESULT_COLUMNS)

    def append(
        self, trial: Trial, load: LoadPoint, measurement: Measurement, fresh: FreshServer | None = None
    ) -> None:
        """Write one measurement of ``trial``, on the server ``fresh`` or in the search.

        Raises EnvironmentFault if the file cannot be written.
        """
        server_cells = {} if fresh is None else _server_cells(fresh)
        self._write_row(
            self._trial_cells(trial)
            | _measurement_cells(load, measurement)
            | server_cells
            | {"status": "ok" if measurement.has_values else FAILED, "reason": measurement.reason}
        )

    def append_failure(self, trial: Trial) -> None:
        """Write that ``trial`` could not be deployed, and the reason. Raises EnvironmentFault as ``append``."""
        outcome = {"status": FAILED, "reason": trial.reason, "lacks_gpu_memory": trial.lacks_gpu_memory or None}
        self._write_row(self._trial_cells(trial) | outcome)

    def read(self, *, cut_torn_line: bool = True) -> list[Trial]:
        """Return the trials by number. A last line that a crash left incomplete is ignored.

        ``cut_torn_line`` also removes that line from the file, so that the next row begins on a line of its own.
        Raises BadInputError if the table is not one of this run or has a value out of range. A row is refused too if
        it lacks the values of a model, or was measured with another device, server or perf_analyzer.
        """
        if not self.path.exists():
            return []
        if cut_torn_line:
            self._cut_torn_line()
        table = read_csv(self.path, drop_torn_line=True)
        if table.columns:
            header = tuple(table.columns)
            missing = [name for name in (*_REQUIRED_TO_CONTINUE, *self._choices) if name not in header]
            unknown = [name for name in header if name not in self.columns]
            if missing or unknown:
                names = [*(f"no {name}" for name in missing), *(f"unknown {name}" for name in unknown)]
                raise BadInputError(
                    f"{table.name}: its columns are not those of this run's parameters "
                    f"({one_line(', '.join(names), MAX_LIST_LENGTH)}): continue it with the version of tune that "
                    "began it, or begin a new run (`tune --warm-start` learns from this one)"
                )
            self.columns = header
        for i, fingerprint in enumerate(table.texts("fingerprint")):
            if self._fingerprint and fingerprint not in ("", self._fingerprint):
                raise table.error(
                    i,
                    "was measured with another device, server or perf_analyzer "
                    f"({one_line(fingerprint, ID_LENGTH)}, this is {self._fingerprint}), and the two are not ranked "
                    "together; begin a separate run on this one (`tune --warm-start` learns from the other)",
                )
        rows = read_rows(table)
        for i, row in enumerate(rows):
            if row.measurement.has_values and not model_stats.has_models(self._concurrent_models, row.measurement):
                others = one_line(", ".join(self._concurrent_models), MAX_LIST_LENGTH)
                raise table.error(
                    i, f"by_model: lacks values of {others}, which got load at the same time; restore the row"
                )
        self._cpu_count = next((row.cpu_count for row in rows if row.cpu_count is not None), self._cpu_count)
        return _trials(table, rows, self._choices)

    def _trial_cells(self, trial: Trial) -> dict[str, object]:
        """Return the cells that all rows of ``trial`` share, by column."""
        return {
            "model": self._model,
            "trial": trial.number,
            **trial.candidate.settings,
            "preferred_batch_sizes": " ".join(map(str, trial.candidate.preferred_batch_sizes)),
            "deploy_seconds": trial.deploy_seconds,
            "fingerprint": self._fingerprint,
            "cpu_count": self._cpu_count,
        }

    def _write_row(self, cells: Mapping[str, object]) -> None:
        """Append one line to the file. Columns that ``cells`` lacks are empty."""
        try:
            is_new = not self.path.exists() or self.path.stat().st_size == 0
            with self.path.open("a", newline="") as file:
                writer = csv.writer(file, lineterminator="\n")
                if is_new:
                    writer.writerow(self.columns)
                writer.writerow([_cell_text(cells.get(column)) for column in self.columns])
                file.flush()
                os.fsync(file.fileno())
        except OSError as error:
            raise write_error(self.path, error) from error

    def _cut_torn_line(self) -> None:
        content = read_bytes(self.path, MAX_BYTES, "is this the table of a run?")
        whole = content.rfind(b"\n") + 1
        if whole < len(content):
            try:
                os.truncate(self.path, whole)
            except OSError as error:
                raise write_error(self.path, error) from error


class RunTable(NamedTuple):
    """The table of a run; parameter values are texts. ``cpu_count`` is None if the table does not have it."""

    model: str
    trials: list[Trial]
    cpu_count: int | None


def read_run_table(path: Path) -> RunTable | None:
    """Return the table of any run; None if the table is not one of a run. The file is not changed.

    Raises BadInputError if it cannot be read, has a value out of range, or has rows of several devices or servers.
    """
    table = read_csv(path, drop_torn_line=True)
    if not table.lines or not set(_REQUIRED) <= set(table.columns):
        return None
    fingerprints = set(table.texts("fingerprint"))
    if len(fingerprints) > 1:
        raise BadInputError(
            f"{table.name}: has rows of {len(fingerprints)} devices or servers; keep only those of one"
        )
    rows = read_rows(table)
    trials = _trials(table, rows, {name: () for name in table.columns if name not in COLUMNS})
    cpu_count = common_value(table, "cpu_count", [row.cpu_count for row in rows])
    return RunTable(min(table.texts("model")), trials, cpu_count)


def _trials(table: CsvTable, rows: Sequence[TrialRow], choices: Mapping[str, Sequence[FieldValue]]) -> list[Trial]:
    paths = sorted(choices)
    choice_by_text = {path: {_cell_text(choice): choice for choice in reversed(choices[path])} for path in paths}
    texts = {path: table.texts(path) for path in paths}
    trials: dict[int, Trial] = {}
    first_rows: dict[int, int] = {}  # of each trial
    for i, row in enumerate(rows):
        if row.trial is None:
            raise table.error(i, "trial: is empty; number the trials from 0")
        cells = [(path, texts[path][i]) for path in paths]
        fields = tuple((path, choice_by_text[path].get(text, text)) for path, text in cells if text)
        trial = trials.setdefault(row.trial, Trial(row.trial, row.candidate(fields)))
        first = table.lines[first_rows.setdefault(row.trial, i)]
        if trial.candidate != row.candidate(fields):
            raise table.error(i, f"trial: {row.trial} has another configuration on line {first}; restore the number")
        trials[row.trial] = _with_row(trial, row, _load(table, i, row))
    return [trials[number] for number in sorted(trials)]


def _load(table: CsvTable, i: int, row: TrialRow) -> LoadPoint | None:
    """Return the load of a row; None if it is a failed deployment. Raises BadInputError for a wrong batch size."""
    if row.concurrency is None and row.request_rate is None:
        return None
    if row.request_batch_size is None:
        raise table.error(i, "request_batch_size: is empty; write the samples of a request")
    if row.request_batch_size > max(row.max_batch_size, 1):
        batch_size = f"{row.request_batch_size:g}"
        raise table.error(i, f"request_batch_size: {batch_size} is above the max_batch_size {row.max_batch_size}")
    return LoadPoint(_int_if_whole(row.request_batch_size), row.concurrency or 0, row.request_rate or 0.0)


def _with_row(trial: Trial, row: TrialRow, load: LoadPoint | None) -> Trial:
    """Return ``trial`` with the measurement or failure of its next row, at ``load``."""
    if row.deploy_seconds is not None:  # a later row differs if it was deployed again after a crash
        trial = replace(trial, deploy_seconds=row.deploy_seconds)
    if row.measurement.server_crashed:
        crash = Crash(row.measurement.reason, load, row.confirmation_error or 0.0)
        trial = replace(trial, crashes=(*trial.crashes, crash))
    if load is None:
        return trial.with_failure(DeploymentError(row.measurement.reason, lacks_gpu_memory=row.lacks_gpu_memory))
    if row.confirmation is None:
        return replace(trial, measurements=(*trial.measurements, (load, row.measurement)))
    error, repeats = row.confirmation_error or 0.0, row.confirmation_repeats or 0
    fresh = FreshServer(row.confirmation, error, row.load_generator, repeats, row.confirmation_latency_slope)
    return trial.with_row(load, row.measurement, fresh)


def _measurement_cells(load: LoadPoint, measurement: Measurement) -> dict[str, object]:
    """Return the cells of a measurement and its load, by column."""
    return {
        **load.cells(),
        **{name: getattr(measurement, name) for name in MEASUREMENT_COLUMNS},
        **forecast_cells(measurement),
    }


def _server_cells(fresh: FreshServer) -> dict[str, object]:
    return {
        "confirmation": fresh.number,
        "confirmation_error": fresh.error_probability or None,
        "confirmation_repeats": fresh.repeats or None,
        "confirmation_latency_slope": fresh.latency_slope,
        "load_generator": fresh.load_generator,
    }


def _int_if_whole(size: float) -> float:
    return int(size) if size == int(size) else size


def _cell_text(value: object) -> str:
    if value is None:
        return ""
    if isinstance(value, bool):
        return "true" if value else "false"
    return " ".join(str(value).split()) if isinstance(value, str) else str(value)
