"""The reader of trials tables: a CSV file becomes typed rows, and each value is checked against its range."""

from __future__ import annotations

import contextlib
import itertools
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Final, TypeVar

from objectives import batch_stats, latency_sketch, model_stats, priority_stats, response_times, step_stats
from objectives.metrics import METRICS, TIMINGS, Forecast, Measurement
from optimizer.config.search_space import OFF
from optimizer.core.candidate import SETTING_COLUMNS, Candidate, FieldValue
from optimizer.core.errors import BadInputError
from optimizer.core.files import read_csv_rows
from optimizer.core.safe_text import is_folder, one_line, read_bytes, show_path
from optimizer.core.trial import CROSS_CHECK_GENERATOR, MAX_CONCURRENCY
from optimizer.options.values import MAX_CPU_COUNT, MAX_INT32

MAX_BYTES = 64 << 20  # limit for a table, which is read into memory and may come from anywhere
MAX_ROWS, MAX_COLUMNS = 50_000, 1_000


@dataclass(frozen=True)
class CsvTable:
    """The cells of a CSV file by column, as printable text without surrounding blanks.

    ``lines`` has the line of the file on which each row begins; ``name`` is the file as errors show it.
    """

    name: str
    columns: Mapping[str, Sequence[str]]
    lines: Sequence[int]

    def texts(self, column: str) -> Sequence[str]:
        """Return the cells of ``column``; empty texts if the table does not have it."""
        return self.columns.get(column) or [""] * len(self.lines)

    def select(self, column: str, text: str) -> CsvTable:
        """Return the rows that have ``text`` in ``column``."""
        chosen = [i for i, cell in enumerate(self.texts(column)) if cell == text]
        columns = {name: [cells[i] for i in chosen] for name, cells in self.columns.items()}
        return CsvTable(self.name, columns, [self.lines[i] for i in chosen])

    def error(self, row: int, message: str) -> BadInputError:
        """Return the error ``FILE:LINE: message`` about a row, by its index."""
        return BadInputError(f"{self.name}:{self.lines[row]}: {message}")


def quoted(text: str) -> str:
    """Return a cell as an error message quotes it, at most 60 characters long."""
    quoted = repr(text)
    return quoted if len(quoted) <= 60 else f"{quoted[:57]}…"


def read_csv(path: Path, required: Sequence[str] = (), *, drop_torn_line: bool = False) -> CsvTable:
    """Read a table with the ``required`` columns and at least one row.

    Empty lines are skipped, and so are columns without a name (pandas writes one for its index). With
    ``drop_torn_line`` the file may be empty, and a last line that does not end with a line break is ignored.
    Raises BadInputError with the file and line if the file cannot be read or is no such table.
    """
    name = show_path(path)
    if is_folder(path):
        raise BadInputError(f"{name}: is a folder; give the table in it, such as {name}/trials.csv")
    content = read_bytes(path, MAX_BYTES, "leave out what is not needed")
    if drop_torn_line:
        content = content[: content.rfind(b"\n") + 1]
    rows = _printable_rows(name, content)
    _, header = next(rows, (0, None))
    if header is None:
        if drop_torn_line:
            return CsvTable(name, {}, [])
        raise BadInputError(f"{name}: is empty; a table begins with a line that names its columns")
    _check_header(name, header, required)
    cells, lines = list[list[str]](), list[int]()
    for line, row in rows:
        if len(row) != len(header):
            raise BadInputError(f"{name}:{line}: has {len(row)} cells where the header has {len(header)}")
        if len(cells) == MAX_ROWS:
            raise BadInputError(f"{name}: has more than {MAX_ROWS:,} rows; leave out what is not needed")
        cells.append(row)
        lines.append(line)
    if not cells and not drop_torn_line:
        raise BadInputError(f"{name}: has no rows below its header")
    columns = dict(zip(header, zip(*cells, strict=True), strict=True)) if cells else dict.fromkeys(header, ())
    columns.pop("", None)
    return CsvTable(name, columns, lines)


def _printable_rows(name: str, content: bytes) -> Iterator[tuple[int, list[str]]]:
    """Yield each row with a cell that is not empty, with the line on which it begins."""
    for line, row in read_csv_rows(content, name):
        cells = [cell.strip() for cell in row]
        if any(cells):
            yield line, cells if "".join(cells).isprintable() else [one_line(cell) for cell in cells]


def _check_header(name: str, header: list[str], required: Sequence[str]) -> None:
    missing = [column for column in required if column not in header]
    if missing:
        lacks = f"columns {', '.join(missing)}" if len(missing) > 1 else f"column {missing[0]}"
        raise BadInputError(f"{name}: lacks the {lacks}; a table needs {', '.join(required)}")
    if len(header) > MAX_COLUMNS:
        raise BadInputError(f"{name}: has more than {MAX_COLUMNS:,} columns; leave out what is not needed")
    for first, second in itertools.pairwise(sorted(column for column in header if column)):
        if first == second:
            raise BadInputError(f"{name}: has two columns {quoted(first)}")


FAILED: Final = "failed"  # the status of a deployment or a measurement that failed
BOOLEANS = {"true": True, "false": False, "1": True, "0": False}

# A value beyond these is not a measurement; a simulation of it would exceed the memory or 64 bits of nanoseconds.
MAX_INSTANCES = 1024
MAX_MS = 1e7
MAX_VALUE = 1e15

LOAD_COLUMNS = ("request_batch_size", "concurrency", "request_rate")
MEASUREMENT_COLUMNS = tuple(f.name for f in fields(Measurement) if f.name not in ("reason", "forecast"))
FORECAST_COLUMNS = {f"forecast_{f.name}": f.name for f in fields(Forecast)}  # column: attribute
CONFIRMATION_COLUMNS = ("confirmation", "confirmation_error", "load_generator")
OUTCOME_COLUMNS = (
    *(*CONFIRMATION_COLUMNS, "confirmation_repeats", "confirmation_latency_slope"),
    *("deploy_seconds", "status", "reason"),
    *("lacks_gpu_memory", "fingerprint", "cpu_count"),
)
TRIAL_COLUMNS = ("model", "trial", *SETTING_COLUMNS)
RESULT_COLUMNS = (*LOAD_COLUMNS, *MEASUREMENT_COLUMNS, *FORECAST_COLUMNS, *OUTCOME_COLUMNS)
COLUMNS = (*TRIAL_COLUMNS, *RESULT_COLUMNS)  # all others are parameters, which a run writes between these two
ENERGY = "energy_joules_per_1000_infer"
# Columns of pareto.csv and of the CSV of a sweep, which are no parameters either.
DERIVED_COLUMNS = ("confirmed", "measurements", "priorities", ENERGY)
DESCRIPTIONS: Final = {  # for the columns that are no attribute of Candidate, LoadPoint or Measurement
    "model": "Name of the model.",
    "trial": "Number of the trial, from 0. A trial is one configuration with its measurements.",
    "confirmation": "Number of the fresh server in the run, from 1; empty for measurements of the search.",
    "confirmation_error": "Error probability of the test of this load; empty if the configuration is only compared.",
    "confirmation_repeats": "Number of the first lost server of an earlier session that this server repeats. That "
    "server and all lost ones of the configuration after it do not count. Empty for others.",
    "confirmation_latency_slope": "Rise of the log of latency over the fall of the log of the CPU share that other "
    "programs leave, as the search has shown it, or 1.5 if it has shown none; empty for measurements of the search "
    "and in a separate test.",
    "load_generator": f"`{CROSS_CHECK_GENERATOR}` for a measurement that checks tune's own client; empty for others.",
    "deploy_seconds": "Time of the deployment; empty if unknown.",
    "status": f"`ok`, or `{FAILED}` if the deployment or the measurement failed.",
    "lacks_gpu_memory": "`true` if the deployment failed because a GPU has too little memory; empty for all others.",
    "fingerprint": "Short form of device, server and perf_analyzer. Rows of different ones are not ranked together.",
    "cpu_count": "Number of CPUs of the server; empty if it serves on a GPU or the number is unknown.",
}

_COUNT_COLUMNS = ("requests", "rejected_requests", "timed_out_requests", "failed_requests")
INTEGER_RANGES: Mapping[str, tuple[int, int]] = {  # column: smallest and largest allowed value
    "trial": (0, MAX_INT32),
    "max_batch_size": (0, MAX_INT32),
    "max_queue_delay_us": (0, MAX_INT32),
    "instance_count": (1, MAX_INSTANCES),
    "concurrency": (1, MAX_CONCURRENCY),
    **dict.fromkeys(_COUNT_COLUMNS, (0, MAX_INT32)),
    **dict.fromkeys(("confirmation", "confirmation_repeats"), (1, MAX_INT32)),
    "cpu_count": (1, MAX_CPU_COUNT),
}
_SHARE_COLUMNS = (
    "gpu_utilization",
    "other_cpu_share",
    "kv_cache_utilization",
    "late_request_share",
    "output_deviation",
)


def _check_batch_stats(text: str) -> None:
    for size, executions, compute_ns in batch_stats.from_text(text):
        if compute_ns > 1e6 * MAX_MS * executions:
            raise ValueError(f"more than {MAX_MS:g} ms for a batch of {size} samples")


def _check_requests_over(text: str) -> None:
    if any(float(bound) > MAX_MS for bound in latency_sketch.parse_counts(text)):
        raise ValueError(f"a bound above {MAX_MS:g} ms")


TEXT_COLUMNS: Mapping[str, Callable[[str], object]] = {  # column: raises ValueError with the rule that a text breaks
    "batch_stats": _check_batch_stats,
    "step_stats": step_stats.from_text,
    "by_priority": priority_stats.from_text,
    "by_model": model_stats.from_text,
    **{timing.over_field: _check_requests_over for timing in TIMINGS},
    **{timing.sketch_field: latency_sketch.check_sketch for timing in TIMINGS},
    "response_times_ms": response_times.from_text,
    **dict.fromkeys(("gpu_throttling", "node"), str),
}
_FLAG_COLUMNS = ("overloaded", "disturbed", "server_crashed")  # false if they are empty
_FLOAT_COLUMNS = tuple(
    name for name in MEASUREMENT_COLUMNS if name not in (*INTEGER_RANGES, *TEXT_COLUMNS, "stable", *_FLAG_COLUMNS)
)
NUMBER_RANGES: Mapping[str, tuple[float, float]] = {
    "request_batch_size": (1, MAX_INT32),  # the mean of a mix may be a fraction
    "request_rate": (1e-6, MAX_VALUE),
    "deploy_seconds": (0, MAX_VALUE),
    **{name: (0, MAX_MS) if name.endswith("_ms") else (0, MAX_VALUE) for name in _FLOAT_COLUMNS},
    **{
        column: (0, MAX_MS if "_ms" in name else MAX_VALUE)
        for column, name in FORECAST_COLUMNS.items()
        if name != "latency"
    },
    **dict.fromkeys(_SHARE_COLUMNS, (0, 1)),
    "score": (-MAX_VALUE, MAX_VALUE),
    "confirmation_error": (0, 1),
    "confirmation_latency_slope": (0, 10),
}

Value = TypeVar("Value")


def forecast_cells(measurement: Measurement) -> dict[str, float | str | None]:
    """Return the values of the columns in FORECAST_COLUMNS."""
    return {column: getattr(measurement.forecast, name, None) for column, name in FORECAST_COLUMNS.items()}


def empty_but_not_failed(column: str) -> str:
    """Return the fault of an empty cell in a row whose measurement did not fail."""
    return f"{column}: is empty, and the status is not failed; write it, or the status failed"


@dataclass(frozen=True, slots=True)
class TrialRow:
    """One row: a measurement, or a deployment that failed (no concurrency and no request rate).

    ``has_delay_off`` is true if ``max_queue_delay_us`` is written as ``off``. None stands for an empty cell.
    """

    line: int
    trial: int | None
    max_batch_size: int
    dynamic_batching: bool | None
    max_queue_delay_us: int | None
    has_delay_off: bool
    preferred_batch_sizes: tuple[int, ...]
    instance_count: int
    request_batch_size: float | None
    concurrency: int | None
    request_rate: float | None
    measurement: Measurement
    confirmation: int | None
    confirmation_error: float | None
    confirmation_repeats: int | None
    confirmation_latency_slope: float | None
    load_generator: str
    deploy_seconds: float | None
    is_failed: bool
    lacks_gpu_memory: bool
    cpu_count: int | None

    def candidate(self, fields: tuple[tuple[str, FieldValue], ...]) -> Candidate:
        """Return the candidate with these ``fields``, without dynamic batching if the row does not mention it."""
        return Candidate(
            max_batch_size=self.max_batch_size,
            dynamic_batching=self.dynamic_batching is True,
            max_queue_delay_us=self.max_queue_delay_us or 0,
            preferred_batch_sizes=self.preferred_batch_sizes,
            instance_count=self.instance_count,
            fields=fields,
        )


def read_rows(table: CsvTable) -> list[TrialRow]:
    """Return the rows of ``table`` as typed values.

    Raises BadInputError with the file, line, column, value and allowed range for the first value that is wrong.
    """
    wholes = {name: _whole_numbers(table, name) for name in INTEGER_RANGES}
    numbers = {name: _numbers(table, name) for name in NUMBER_RANGES}
    is_failed = _each(table, "status", _is_failed)
    for name in ("max_batch_size", "instance_count"):
        if None in wholes[name]:
            minimum, maximum = INTEGER_RANGES[name]
            rule = f"{name}: is empty; write a whole number from {minimum} to {maximum}"
            raise table.error(wholes[name].index(None), rule)
    columns: dict[str, Sequence[Any]] = {
        "line": table.lines,
        **{name: cells for name, cells in (wholes | numbers).items() if name in TrialRow.__slots__},
        "dynamic_batching": _each(table, "dynamic_batching", _boolean),
        "has_delay_off": [text.lower() == OFF for text in table.texts("max_queue_delay_us")],
        "preferred_batch_sizes": _each(table, "preferred_batch_sizes", _sizes),
        "measurement": _measurements(table, wholes, numbers, is_failed),
        "load_generator": _each(table, "load_generator", _load_generator),
        "is_failed": is_failed,
        "lacks_gpu_memory": [value or False for value in _each(table, "lacks_gpu_memory", _boolean)],
    }
    names = tuple(columns)
    rows = [TrialRow(**dict(zip(names, cells, strict=True))) for cells in zip(*columns.values(), strict=True)]
    for i, row in enumerate(rows):
        _check_row(table, i, row)
    return rows


def _check_row(table: CsvTable, i: int, row: TrialRow) -> None:
    """Raise BadInputError if the cells of ``row``, which is the row ``i``, do not fit each other."""
    if row.load_generator and row.confirmation is None:
        raise table.error(i, "confirmation: is empty, and load_generator is not")
    if row.confirmation_repeats is not None and row.confirmation_repeats >= (row.confirmation or 0):
        raise table.error(i, f"confirmation_repeats: {row.confirmation_repeats} is not below confirmation")
    if row.is_failed:
        return
    if row.concurrency is None and row.request_rate is None:
        raise table.error(i, empty_but_not_failed("concurrency"))
    if not row.measurement.has_values:
        raise table.error(i, empty_but_not_failed("throughput_infer_per_sec"))


def common_value(table: CsvTable, column: str, values: Sequence[Value | None]) -> Value | None:
    """Return the value of all rows that have one in ``column``; None if no row has.

    ``values`` are those of the rows; None is an empty cell. Raises BadInputError if two values differ.
    """
    present = [(i, value) for i, value in enumerate(values) if value is not None]
    for i, value in present:
        if value != present[0][1]:
            first = f"line {table.lines[present[0][0]]} has {_shown(present[0][1])}"
            raise table.error(i, f"{column} {_shown(value)}: a table has one {column}, but {first}")
    return present[0][1] if present else None


def _shown(value: object) -> str:
    return f"{value:g}" if isinstance(value, float) else one_line(str(value), 60)


def _measurements(
    table: CsvTable,
    wholes: Mapping[str, Sequence[int | None]],
    numbers: Mapping[str, Sequence[float | None]],
    is_failed: Sequence[bool],
) -> list[Measurement]:
    # Measurements that a table does not mark otherwise are stable.
    stable = [
        value if value is not None else not failed
        for value, failed in zip(_each(table, "stable", _boolean), is_failed, strict=True)
    ]
    columns: dict[str, Sequence[Any]] = {
        **{name: numbers[name] for name in _FLOAT_COLUMNS if name in table.columns},
        **{name: wholes[name] for name in _COUNT_COLUMNS},
        "stable": stable,
        **{name: [value or False for value in _each(table, name, _boolean)] for name in _FLAG_COLUMNS},
        **{name: _checked(table, name, check) for name, check in TEXT_COLUMNS.items()},
        "reason": table.texts("reason"),
        "forecast": _forecasts(table, numbers),
    }
    names = tuple(columns)
    return [Measurement(**dict(zip(names, row, strict=True))) for row in zip(*columns.values(), strict=True)]


def _forecasts(table: CsvTable, numbers: Mapping[str, Sequence[float | None]]) -> list[Forecast | None]:
    """Return the forecast of each row: all its columns have values, or none has."""
    latencies = _each(table, "forecast_latency", _latency_metric)
    forecasts: list[Forecast | None] = []
    for i, latency in enumerate(latencies):
        row = {
            column: latency or None if name == "latency" else numbers[column][i]
            for column, name in FORECAST_COLUMNS.items()
        }
        empty = [column for column, value in row.items() if value is None]
        if empty and len(empty) < len(row):
            raise table.error(i, f"{empty[0]}: is empty, and other columns of the forecast are not")
        values: dict[str, Any] = {FORECAST_COLUMNS[column]: value for column, value in row.items()}
        for name in () if empty else ("throughput_infer_per_sec", "latency_ms"):
            if not values[f"{name}_low"] <= values[name] <= values[f"{name}_high"]:
                raise table.error(i, f"forecast_{name}: {values[name]:g} is outside of its own interval")
        forecasts.append(None if empty else Forecast(**values))
    return forecasts


def _each(table: CsvTable, column: str, parse: Callable[[str], Value]) -> list[Value]:
    """Return the parsed cells of ``column``. ``parse`` raises ValueError with the rule that a text breaks."""
    parsed: dict[str, Value] = {}
    values = []
    for i, text in enumerate(table.texts(column)):
        if text not in parsed:
            try:
                parsed[text] = parse(text)
            except ValueError as error:
                raise table.error(i, f"{column}: {quoted(text)} is {error}") from None
        values.append(parsed[text])
    return values


def _checked(table: CsvTable, column: str, check: Callable[[str], object]) -> Sequence[str]:
    """Return the cells of ``column``, after ``check``, which raises ValueError as the ``parse`` of ``_each``."""
    _each(table, column, check)
    return table.texts(column)


def _numbers(table: CsvTable, column: str) -> list[float | None]:
    minimum, maximum = NUMBER_RANGES[column]
    rule = f"not a number from {minimum:.10g} to {maximum:.10g}"
    return _each(table, column, lambda text: _number(text, minimum, maximum, rule))


def _whole_numbers(table: CsvTable, column: str) -> list[int | None]:
    minimum, maximum = INTEGER_RANGES[column]
    rule = f"not a whole number from {minimum} to {maximum}"

    def parse(text: str) -> int | None:
        if column == "max_queue_delay_us" and text.lower() == OFF:
            return None
        value = _number(text, minimum, maximum, rule)
        if value is not None and value % 1:
            raise ValueError(rule)
        return None if value is None else int(value)

    return _each(table, column, parse)


def _number(text: str, minimum: float, maximum: float, rule: str) -> float | None:
    if not text:
        return None
    try:
        value = math.nan if "_" in text else float(text)  # Python reads 1_000 as 1000
    except ValueError:
        value = math.nan
    if not minimum <= value <= maximum:
        raise ValueError(rule)
    return value


def _boolean(text: str) -> bool | None:
    if text and text.lower() not in BOOLEANS:
        raise ValueError("neither true nor false")
    return BOOLEANS.get(text.lower())


def _is_failed(text: str) -> bool:
    if text not in ("", "ok", FAILED):
        raise ValueError("neither ok nor failed")
    return text == FAILED


def _load_generator(text: str) -> str:
    if text not in ("", CROSS_CHECK_GENERATOR):
        raise ValueError(f"neither empty nor {CROSS_CHECK_GENERATOR}")
    return text


def _latency_metric(text: str) -> str:
    metric = None
    with contextlib.suppress(KeyError):
        metric = METRICS[text]
    if text and (metric is None or metric.timing is None or metric.name != text):
        raise ValueError("not a latency metric such as latency-p95")
    return text


def _sizes(text: str) -> tuple[int, ...]:
    sizes = text.replace(",", " ").strip("[]()").split()
    if not all(re.fullmatch("[1-9][0-9]{0,9}", word) and int(word) <= MAX_INT32 for word in sizes):
        raise ValueError(f"not a list of whole numbers from 1 to {MAX_INT32}, such as 8 16")
    return tuple(sorted(set(map(int, sizes))))
