"""The rows of a table in the program's own terms: candidate, load, measurement."""

from __future__ import annotations

import re
from collections.abc import Hashable
from dataclasses import dataclass, fields
from typing import Any

from objectives.metrics import Measurement
from optimizer import batch_stats
from optimizer.batching import behaviour, tidy
from optimizer.errors import BadInputError
from optimizer.replay.csv_table import MOST_INT32, CsvTable, shown
from optimizer.space import OFF
from optimizer.store.trials_table import COLUMNS
from optimizer.trial import Candidate, FieldValue, LoadPoint, Point
from optimizer.untrusted import one_line

REQUIRED = ("max_batch_size", "instance_count", "concurrency", "throughput_infer_per_sec", "latency_p95_ms")
UNSET = "unset"  # a parameter without a value, where other rows have one
FAILED = "failed"
# No real table goes beyond these; a simulation of what does would not fit the memory, or its times 64 bits of ns.
MOST_INSTANCES = 1024
MOST_CHOICES = 1000  # of one parameter
MOST_CONCURRENCY = 2**16
MOST_MS = 1e7
MOST = 1e15
_NO_FIGURES = ("requests", "stable", "reason", "batch_stats", "gpu_throttling")
_FIGURES = tuple(f.name for f in fields(Measurement) if f.name not in _NO_FIGURES)


@dataclass(frozen=True, slots=True)
class Row:
    """One row. Without a load it is a deployment that failed, for the measurement's reason."""

    line: int
    candidate: Candidate
    load: LoadPoint | None
    measurement: Measurement

    @property
    def point(self) -> Point:
        """A measured row as reports take it, its line for a trial's number."""
        assert self.load is not None
        return Point(self.line, self.candidate, self.load, self.measurement)


def read_rows(table: CsvTable) -> tuple[list[Row], int]:
    """All rows, and the request batch size that they share. Raises BadInputError.

    A row that repeats the configuration and the load of an earlier one of the same trial replaces it; of another
    trial it is an error. What was measured to confirm a recommendation is left out: it was no part of the search.
    """
    request_batch_size = _request_batch_size(table)
    settings = _Settings(table)
    loads = _loads(table, request_batch_size)
    measurements = _measurements(table, request_batch_size)
    trials, confirmations = table.texts("trial"), table.texts("confirmation")
    candidates: dict[Hashable, Candidate] = {}
    found: dict[Hashable, tuple[int, Row]] = {}
    for i, (load, measurement) in enumerate(zip(loads, measurements, strict=True)):
        if confirmations[i]:
            continue
        own = settings.key(i)
        candidate = candidates.get(own)
        if candidate is None:
            candidate = candidates[own] = settings.candidate(i)
            if behaviour(candidate, request_batch_size) is None:
                size = candidate.max_batch_size
                raise table.fault(i, f"max_batch_size {size} takes no requests of {request_batch_size} samples")
        key = own, load
        before, _ = found.get(key, (i, None))
        if before != i and (not trials[i] or trials[i] != trials[before]):
            what = f"at concurrency {load.concurrency}" if load else "failing to deploy"
            raise table.fault(i, f"repeats line {table.lines[before]}: the same configuration {what}")
        found.pop(key, None)  # so that the last row of a candidate is the last to have been recorded
        found[key] = i, Row(table.lines[i], candidate, load, measurement)
    return [row for _, row in found.values()], request_batch_size


class _Settings:
    """The columns that make a candidate. Those that are missing or have one value are no other parameter."""

    def __init__(self, table: CsvTable) -> None:
        self._sizes = _filled(table, "max_batch_size", 0)
        self._counts = _filled(table, "instance_count", 1, MOST_INSTANCES)
        self._batching = table.truths("dynamic_batching")
        self._off = [text.lower() == OFF for text in table.texts("max_queue_delay_us")]
        self._delays = table.wholes("max_queue_delay_us", least=0, empty=OFF)
        self._has_delays = table.has("max_queue_delay_us")
        self._preferred = _preferred(table)
        others = [column for column in table.frame.columns if column not in COLUMNS]
        values = {column: _values(table.texts(column)) for column in others}
        self._fields = {column: own for column, own in sorted(values.items()) if _varies(table, column, own)}

    def candidate(self, i: int) -> Candidate:
        """The candidate of row ``i`` in plain form.

        A table that says nothing of dynamic batching is taken to be about it: without it a max_batch_size above
        the request's would make no difference. Where delays are given, none is no dynamic batching.
        """
        batching = self._batching[i]
        if batching is None:
            delayed = self._delays[i] is not None or not self._has_delays
            batching = delayed and self._sizes[i] > 0
        sizes = self._preferred[i]
        plain = Candidate(
            max_batch_size=self._sizes[i],
            dynamic_batching=batching and not self._off[i],
            max_queue_delay_us=self._delays[i] or 0,
            preferred_batch_sizes=sizes,
            instance_count=self._counts[i],
            fields=tuple((path, values[i]) for path, values in self._fields.items()),
        )
        return tidy(plain)

    def key(self, i: int) -> Hashable:
        """What makes two rows the same configuration as written: also what is not felt counts."""
        own = self._sizes[i], self._counts[i], self._batching[i], self._off[i], self._delays[i], self._preferred[i]
        return own, tuple(map(_typed, (values[i] for values in self._fields.values())))


def _request_batch_size(table: CsvTable) -> int:
    sizes = table.wholes("request_batch_size", least=1)
    for column, values in (("request_batch_size", sizes), ("model", table.texts("model"))):
        given = [(i, value) for i, value in enumerate(values) if value not in (None, "")]
        for i, value in given:
            if value != given[0][1]:
                first = f"line {table.lines[given[0][0]]} has {one_line(str(given[0][1]), 60)}"
                own = one_line(str(value), 60)
                raise table.fault(i, f"{column} {own}: a table is about one {column}, and {first}")
    return next((size for size in sizes if size is not None), 1)


def _loads(table: CsvTable, request_batch_size: int) -> list[LoadPoint | None]:
    loads: list[LoadPoint | None] = []
    numbers = table.wholes("concurrency", least=1, most=MOST_CONCURRENCY)
    for i, (number, status) in enumerate(zip(numbers, table.texts("status"), strict=True)):
        if number is None and status != FAILED:
            raise table.fault(i, "concurrency: is empty, and the status is not failed")
        loads.append(None if number is None else LoadPoint(request_batch_size, number))
    return loads


def _measurements(table: CsvTable, request_batch_size: int) -> list[Measurement]:
    columns = {
        name: table.numbers(name, most=MOST_MS if name.endswith("_ms") else MOST)
        for name in _FIGURES
        if name in table.frame
    }
    requests, stable = table.wholes("requests", least=0), table.truths("stable")
    reasons, statuses = table.texts("reason"), table.texts("status")
    batches = _batch_stats(table, request_batch_size)
    found = []
    for i, status in enumerate(statuses):
        if status == FAILED:
            found.append(Measurement(reason=reasons[i] or FAILED))
            continue
        figures: dict[str, Any] = {name: values[i] for name, values in columns.items()}
        for name in REQUIRED[3:]:
            if figures[name] is None:
                raise table.fault(i, f"{name}: is empty, and the status is not failed")
        steady = stable[i] is not False
        told = figures | {"batch_stats": batches[i], "requests": requests[i], "reason": reasons[i]}
        found.append(Measurement(**told, stable=steady))
    return found


def _batch_stats(table: CsvTable, request_batch_size: int) -> list[str]:
    texts = table.texts("batch_stats")
    for i, (text, largest) in enumerate(zip(texts, _filled(table, "max_batch_size", 0), strict=True)):
        try:
            entries = batch_stats.from_text(text)
        except ValueError as error:
            raise table.fault(i, f"batch_stats: {shown(text)} is {error}") from None
        for size, executions, compute_ns in entries:
            if size > max(largest, request_batch_size):
                raise table.fault(i, f"batch_stats: a batch of {size} samples where max_batch_size is {largest}")
            if compute_ns > 1e6 * MOST_MS * executions:
                raise table.fault(i, f"batch_stats: batches of {size} samples compute for more than {MOST_MS:g} ms")
    return texts


def _filled(table: CsvTable, column: str, least: int, most: int = MOST_INT32) -> list[int]:
    values = []
    for i, value in enumerate(table.wholes(column, least=least, most=most)):
        if value is None:
            raise table.fault(i, f"{column}: is empty")
        values.append(value)
    return values


def _preferred(table: CsvTable) -> list[tuple[int, ...]]:
    found = []
    for i, text in enumerate(table.texts("preferred_batch_sizes")):
        sizes = text.replace(",", " ").strip("[]()").split()
        if not all(re.fullmatch("[1-9][0-9]{0,9}", size) for size in sizes):
            raise table.fault(i, f"preferred_batch_sizes: {shown(text)} is not a list of whole numbers, such as 8 16")
        found.append(tuple(sorted(set(map(int, sizes)))))
    return found


def _values(texts: list[str]) -> list[FieldValue]:
    """Whole numbers, numbers, true/false or texts: the first of them that all cells with a value are."""
    given = [text for text in texts if text]
    read: dict[str, FieldValue] = {}
    for kind in (int, float, _truth, str):
        try:
            read = {text: kind(text) for text in given}
            break
        except ValueError:
            continue
    if any(value != value for value in read.values()):  # "nan" is no number to rank by
        read = {text: text for text in given}
    return [read.get(text, UNSET) for text in texts]


def _varies(table: CsvTable, column: str, values: list[FieldValue]) -> bool:
    """Whether the column is a parameter. Raises BadInputError where no parameter has so many choices."""
    distinct = len(set(map(_typed, values)))
    if distinct > MOST_CHOICES:
        what = f"{shown(column)} has {distinct:,} values, too many for a parameter; leave it out"
        raise BadInputError(f"{table.name}: the column {what}")
    return distinct > 1


def _truth(text: str) -> bool:
    if text.lower() not in ("true", "false"):
        raise ValueError
    return text.lower() == "true"


def _typed(value: FieldValue) -> Hashable:
    return type(value), value
