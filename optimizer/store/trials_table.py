"""trials.csv: one row a measurement, appended and flushed to disk before the next begins.

The table is the record of a run: trials are rebuilt from it. A row without a load is a deployment that
failed: what was measured before it does not count, since the configuration cannot be had. ``confirmation`` is the
number of the fresh server that a recommended configuration was measured on again, empty in the search. Columns that
are not named here are parameters, by their proto path.
"""

from __future__ import annotations

import csv
import io
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from pathlib import Path

from objectives.metrics import Measurement
from optimizer import batch_stats
from optimizer.errors import BadInputError
from optimizer.store.disk import cannot_write
from optimizer.trial import SETTINGS, Candidate, Confirmation, FieldValue, LoadPoint, Trial
from optimizer.untrusted import one_line, read_bytes

MAX_BYTES = 64 << 20
_LOAD = ("request_batch_size", "concurrency", "request_rate")
_MEASUREMENT = tuple(f.name for f in fields(Measurement) if f.name != "reason")
_OUTCOME = ("confirmation", "deploy_seconds", "status", "reason")
COLUMNS = ("model", "trial", *SETTINGS, *_LOAD, *_MEASUREMENT, *_OUTCOME)  # and the other parameters
# columns that tables of earlier versions lack
_LATER = ("batch_stats", "confirmation", "server_memory_bytes", "other_cpu_share", "score")


class TrialsTable:
    """The table of one run. ``choices`` are the values of the other parameters, by path: a CSV knows no types.

    ``columns`` are those that are written; once ``read``, the file's own.
    """

    def __init__(self, path: Path, model: str, choices: Mapping[str, Sequence[FieldValue]]) -> None:
        self.path = path
        self._model = model
        self._choices = choices
        self.columns = ("model", "trial", *SETTINGS, *choices, *_LOAD, *_MEASUREMENT, *_OUTCOME)

    def append(
        self, trial: Trial, load: LoadPoint, measurement: Measurement, confirmation: int | None = None
    ) -> None:
        """Write one measurement of ``trial``. Raises EnvironmentFault where the disk refuses it."""
        failed = measurement.throughput_infer_per_sec is None
        row = self._row(trial) | {
            "request_batch_size": load.request_batch_size,
            "concurrency": load.concurrency or None,
            "request_rate": load.request_rate or None,
            **{name: getattr(measurement, name) for name in _MEASUREMENT},
            "confirmation": confirmation,
            "status": "failed" if failed else "ok",
            "reason": measurement.reason,
        }
        self._write(row)

    def append_failure(self, trial: Trial) -> None:
        """Write that ``trial`` could not be deployed, and why."""
        self._write(self._row(trial) | {"status": "failed", "reason": trial.reason})

    def read(self, *, mend: bool = True) -> list[Trial]:
        """The trials so far, by number. A last line torn by a crash is left out, and cut off to ``mend`` the file.

        A table of an earlier version goes on without the columns that it lacks. Raises BadInputError where the
        table is not one of this run.
        """
        if not self.path.exists():
            return []
        text = self._whole_lines(mend)
        reader = csv.DictReader(io.StringIO(text))
        if text:
            try:
                header = tuple(reader.fieldnames or ())
            except csv.Error:
                header = ()
            self.columns = self._checked(header)
        trials: dict[int, Trial] = {}
        try:
            for row in reader:
                self._collect(row, trials)
        except (KeyError, ValueError, TypeError, csv.Error) as error:
            where = f"{one_line(str(self.path))}:{reader.line_num}"
            raise BadInputError(f"{where}: not a row of a trials table ({one_line(str(error), 200)})") from None
        return [trials[number] for number in sorted(trials)]

    def _checked(self, header: tuple[str, ...]) -> tuple[str, ...]:
        lacking = set(_LATER) - set(header)
        if header != tuple(column for column in self.columns if column not in lacking):
            raise BadInputError(f"{self.path}: its columns are not those of this run's parameters")
        return header

    def _collect(self, row: dict[str, str], trials: dict[int, Trial]) -> None:
        if None in row or None in row.values():
            raise ValueError("it has another number of cells than the header")
        number = int(row["trial"])
        trial = trials.get(number) or Trial(
            number, self._candidate(row), deploy_seconds=_float(row["deploy_seconds"])
        )
        if not row["concurrency"] and not row["request_rate"]:
            reason = one_line(row["reason"])
            trials[number] = Trial(number, trial.candidate, (), "failed", reason, trial.deploy_seconds)
            return
        load = LoadPoint(
            _whole_or_mean(row["request_batch_size"]), int(row["concurrency"] or 0), float(row["request_rate"] or 0)
        )
        values: dict[str, object] = {
            name: _float(row.get(name, ""))
            for name in _MEASUREMENT
            if name not in ("requests", "stable", "batch_stats")
        }
        values["requests"] = int(row["requests"]) if row["requests"] else None
        values["stable"] = row["stable"] == "true"
        values["batch_stats"] = row.get("batch_stats") or ""
        batch_stats.from_text(row.get("batch_stats") or "")  # raises ValueError
        measurement = Measurement(**values, reason=one_line(row["reason"]))  # type: ignore[arg-type]
        if server := row.get("confirmation"):
            trials[number] = trial.confirmed_by(Confirmation(int(server), load, measurement))
        else:
            trials[number] = replace(trial, measurements=(*trial.measurements, (load, measurement)))

    def _candidate(self, row: dict[str, str]) -> Candidate:
        return Candidate(
            max_batch_size=int(row["max_batch_size"]),
            dynamic_batching=row["dynamic_batching"] == "true",
            max_queue_delay_us=int(row["max_queue_delay_us"] or 0),
            preferred_batch_sizes=tuple(int(size) for size in row["preferred_batch_sizes"].split()),
            instance_count=int(row["instance_count"]),
            fields=tuple(
                (path, next((choice for choice in choices if _text(choice) == row[path]), row[path]))
                for path, choices in sorted(self._choices.items())
                if row[path]
            ),
        )

    def _row(self, trial: Trial) -> dict[str, object]:
        candidate = trial.candidate
        return {
            "model": self._model,
            "trial": trial.number,
            **{name: getattr(candidate, name) for name in SETTINGS},
            "preferred_batch_sizes": " ".join(map(str, candidate.preferred_batch_sizes)),
            **dict(candidate.fields),
            "deploy_seconds": trial.deploy_seconds,
        }

    def _write(self, row: Mapping[str, object]) -> None:
        try:
            new = not self.path.exists() or self.path.stat().st_size == 0
            with self.path.open("a", newline="") as file:
                writer = csv.writer(file, lineterminator="\n")
                if new:
                    writer.writerow(self.columns)
                writer.writerow([_text(row.get(column)) for column in self.columns])
                file.flush()
                os.fsync(file.fileno())
        except OSError as error:
            raise cannot_write(self.path, error) from error

    def _whole_lines(self, mend: bool) -> str:
        content = read_bytes(self.path, MAX_BYTES, "is this the table of a run?")
        whole = content[: content.rfind(b"\n") + 1]
        if mend and len(whole) < len(content):
            try:
                os.truncate(self.path, len(whole))
            except OSError as error:
                raise cannot_write(self.path, error) from error
        return whole.decode(errors="replace")


def _text(value: object) -> str:
    if value is None:
        return ""
    if isinstance(value, bool):
        return "true" if value else "false"
    return " ".join(str(value).split()) if isinstance(value, str) else str(value)


def _whole_or_mean(text: str) -> float:
    return int(text) if text.isdecimal() else float(text)


def _float(text: str) -> float | None:
    value = float(text) if text else None
    if value is not None and not math.isfinite(value):
        raise ValueError(f"{value} is no figure")
    return value
