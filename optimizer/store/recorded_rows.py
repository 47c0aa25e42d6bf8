"""Rows of a table of recorded measurements, from a run or from anywhere, as ``tune replay`` uses them."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace

from objectives import batch_stats
from objectives.metrics import Measurement
from optimizer.config.batching import behaviour, normalize
from optimizer.core.candidate import Candidate, FieldValue
from optimizer.core.errors import BadInputError
from optimizer.core.trial import LoadPoint, Point
from optimizer.store.trials_reader import (
    COLUMNS,
    DERIVED_COLUMNS,
    FAILED,
    CsvTable,
    TrialRow,
    common_value,
    empty_but_not_failed,
    quoted,
    read_rows,
)

REQUIRED = ("max_batch_size", "instance_count", "concurrency", "throughput_infer_per_sec", "latency_p95_ms")
UNSET = "unset"  # a parameter without a value, where other rows have one
MAX_CHOICES = 1000  # values of one parameter


@dataclass(frozen=True, slots=True)
class RecordedRow:
    """One row of a recorded table. If ``load`` is None, the deployment failed for the measurement's reason.

    ``deploy_seconds`` is the time of the deployment; None if it is unknown. ``lacks_gpu_memory`` says whether the
    deployment failed because a GPU has too little memory.
    """

    line: int
    candidate: Candidate
    load: LoadPoint | None
    measurement: Measurement
    deploy_seconds: float | None = None
    lacks_gpu_memory: bool = False

    @property
    def point(self) -> Point:
        """Return a measured row as reports use it, with its line in place of the trial's number."""
        assert self.load is not None
        return Point(self.line, self.candidate, self.load, self.measurement)


@dataclass(frozen=True, slots=True)
class RecordedRows:
    """The rows of a table that count.

    Attributes:
        rows: One row for each configuration at each load, in the order of the last row of each.
        request_batch_size: Samples of each request, the same in all rows.
        cpu_count: Number of the server's CPUs, the same in all rows; None if it is unknown.
    """

    rows: list[RecordedRow]
    request_batch_size: int
    cpu_count: int | None


def read_recorded_rows(table: CsvTable) -> RecordedRows:
    """Return the rows of ``table`` that count.

    A row that repeats the configuration and the load of an earlier row of the same trial replaces it. If several
    trials deployed one configuration, the row with their median throughput counts at each load. Measurements that
    confirm a recommendation are left out, because they are not part of the search. Raises BadInputError for a value
    out of range, a repetition in a table without trials, and rows of several models or request batch sizes.
    """
    rows = read_rows(table)
    request_batch_size = _request_batch_size(table, rows)
    cpu_count = common_value(table, "cpu_count", [row.cpu_count for row in rows])
    parameters = _parameters(table)
    has_delays = any(table.texts("max_queue_delay_us"))
    candidates: dict[Hashable, Candidate] = {}  # by configuration
    rows_by_trial: dict[Hashable, dict[int | None, RecordedRow]] = {}  # by configuration and load
    for i, row in enumerate(rows):
        _check_measurement(table, i, row, request_batch_size)
        if row.confirmation is not None:
            continue
        fields = tuple((path, values[i]) for path, values in parameters.items())
        configuration = _configuration_key(row, fields)
        if configuration not in candidates:
            candidates[configuration] = _candidate(row, fields, has_delays=has_delays)
            if behaviour(candidates[configuration], request_batch_size) is None:
                size = candidates[configuration].max_batch_size
                raise table.error(i, f"max_batch_size {size} takes no requests of {request_batch_size} samples")
        recorded = _recorded_row(row, candidates[configuration], request_batch_size)
        key = configuration, recorded.load
        by_trial = rows_by_trial.pop(key, {})  # inserted again, so that the last row of a candidate is last
        if by_trial and (row.trial is None or None in by_trial):
            raise table.error(i, _repetition_fault(next(iter(by_trial.values()))))
        by_trial[row.trial] = recorded
        rows_by_trial[key] = by_trial
    medians = [_median(list(by_trial.values())) for by_trial in rows_by_trial.values()]
    return RecordedRows(medians, request_batch_size, cpu_count)


def _recorded_row(row: TrialRow, candidate: Candidate, request_batch_size: int) -> RecordedRow:
    load = None if row.concurrency is None else LoadPoint(request_batch_size, row.concurrency)
    measurement = Measurement(reason=row.measurement.reason or FAILED) if row.is_failed else row.measurement
    return RecordedRow(row.line, candidate, load, measurement, row.deploy_seconds, row.lacks_gpu_memory)


def _repetition_fault(repeated: RecordedRow) -> str:
    """Return the fault of a row without a trial that has the configuration and the load of ``repeated``."""
    at = f"at concurrency {repeated.load.concurrency}" if repeated.load else "failing to deploy"
    return f"repeats line {repeated.line}: the same configuration {at}; number deployments in a column trial"


def _median(rows: Sequence[RecordedRow]) -> RecordedRow:
    """Return the row with the median throughput, the lower one of two."""
    ascending = sorted(rows, key=lambda row: row.measurement.throughput_infer_per_sec or 0.0)
    return ascending[(len(rows) - 1) // 2]


def _candidate(row: TrialRow, fields: tuple[tuple[str, FieldValue], ...], *, has_delays: bool) -> Candidate:
    """Return the candidate of a row in its plain form.

    A table that does not mention dynamic batching is assumed to use it: without it, a max_batch_size above the
    request's makes no difference. If a table has delays (``has_delays``), an empty one means no dynamic batching.
    """
    batching = row.dynamic_batching
    if batching is None:
        batching = row.max_batch_size > 0 and (row.max_queue_delay_us is not None or not has_delays)
    return normalize(replace(row.candidate(fields), dynamic_batching=batching and not row.has_delay_off))


def _configuration_key(row: TrialRow, fields: Sequence[tuple[str, FieldValue]]) -> Hashable:
    """Return the configuration of a row as written, including settings without an effect, as a key."""
    settings = (row.max_batch_size, row.instance_count, row.dynamic_batching, row.has_delay_off)
    return *settings, row.max_queue_delay_us, row.preferred_batch_sizes, *(_typed(value) for _, value in fields)


def _check_measurement(table: CsvTable, i: int, row: TrialRow, request_batch_size: int) -> None:
    """Raise BadInputError if the row ``i``, which did not fail, lacks a value or has larger batches than it can."""
    if row.is_failed:
        return
    for column, value in (("concurrency", row.concurrency), ("latency_p95_ms", row.measurement.latency_p95_ms)):
        if value is None:
            raise table.error(i, empty_but_not_failed(column))
    largest = max(row.max_batch_size, request_batch_size)
    for size, _, _ in batch_stats.from_text(row.measurement.batch_stats):
        if size > largest:
            raise table.error(
                i, f"batch_stats: a batch of {size} samples where max_batch_size is {row.max_batch_size}"
            )


def _request_batch_size(table: CsvTable, rows: Sequence[TrialRow]) -> int:
    sizes = [row.request_batch_size for row in rows]
    for i, size in enumerate(sizes):
        if size is not None and size % 1:
            raise table.error(i, f"request_batch_size: {size:g} is not a whole number; a mix cannot be replayed")
    size = common_value(table, "request_batch_size", sizes)
    common_value(table, "model", [text or None for text in table.texts("model")])
    return 1 if size is None else int(size)


def _parameters(table: CsvTable) -> dict[str, list[FieldValue]]:
    """Return the values of each parameter, by path: of the columns that the format does not name and that vary.

    Raises BadInputError for a column with more values than a parameter can have.
    """
    parameters = {}
    for column in sorted(set(table.columns) - {*COLUMNS, *DERIVED_COLUMNS}):
        values = _parse(table.texts(column))
        distinct = len(set(map(_typed, values)))
        if distinct > MAX_CHOICES:
            raise BadInputError(
                f"{table.name}: the column {quoted(column)} has {distinct:,} values, too many for a parameter; "
                "leave it out"
            )
        if distinct > 1:
            parameters[column] = values
    return parameters


def _parse(texts: Sequence[str]) -> list[FieldValue]:
    """Return whole numbers, numbers, booleans or texts: the first type that fits all cells with a value."""
    values: dict[str, FieldValue] = {}
    for kind in (int, float, _boolean, str):
        try:
            values = {text: kind(text) for text in texts if text}
            break
        except ValueError:
            continue
    if any(value != value for value in values.values()):  # "nan" cannot be ranked as a number
        values = {text: text for text in values}
    return [values.get(text, UNSET) for text in texts]


def _boolean(text: str) -> bool:
    if text.lower() not in ("true", "false"):
        raise ValueError
    return text.lower() == "true"


def _typed(value: FieldValue) -> Hashable:
    """Return ``value`` with its type, because 1, 1.0 and True are equal."""
    return type(value), value
