"""Trials, fronts and confirmations as pandas data frames: one type per column, units in column names."""

from __future__ import annotations

import io
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, fields
from typing import Any

import pandas as pd

from objectives.metrics import Measurement
from optimizer.confirmation.verdicts import ConfirmedLoad
from optimizer.core.candidate import SETTING_COLUMNS
from optimizer.core.errors import BadInputError
from optimizer.core.trial import CROSS_CHECK_GENERATOR, Trial
from optimizer.results import result_document
from optimizer.results.finished_run import FinishedRun
from optimizer.results.recommendation import Outcome
from optimizer.store.trials_reader import (
    CONFIRMATION_COLUMNS,
    FORECAST_COLUMNS,
    LOAD_COLUMNS,
    TEXT_COLUMNS,
    forecast_cells,
)

_MEASUREMENT_COLUMNS = (*(field.name for field in fields(Measurement) if field.name != "forecast"), *FORECAST_COLUMNS)
_TRIAL_COLUMNS = ("trial", *SETTING_COLUMNS)
_INTERVAL_COLUMNS = (
    *("throughput_infer_per_sec_low", "throughput_infer_per_sec_high"),
    *("latency_ms_low", "latency_ms_high"),
)
_TYPES: dict[str, Any] = {
    **dict.fromkeys(("trial", "max_batch_size", "max_queue_delay_us", "instance_count", "concurrency"), "Int64"),
    **dict.fromkeys(("requests", "confirmation", "servers", "windows"), "Int64"),
    **dict.fromkeys(
        ("dynamic_batching", "stable", "overloaded", "disturbed", "server_crashed", "confirmed"), "boolean"
    ),
    **dict.fromkeys(
        ("status", "reason", "verdict", *TEXT_COLUMNS, "load_generator", "latency", "forecast_latency"), "string"
    ),
}
_FLOAT_COLUMNS = {
    *("deploy_seconds", "request_batch_size", "request_rate", "confidence", "confirmation_error"),
    *{*_INTERVAL_COLUMNS, *_MEASUREMENT_COLUMNS} - set(_TYPES),
}
# The columns of each frame after the settings and the other parameters.
_TRIALS_FRAME = (*CONFIRMATION_COLUMNS, *LOAD_COLUMNS, *_MEASUREMENT_COLUMNS, "deploy_seconds", "status")
_FRONT_FRAME = (*LOAD_COLUMNS, "confirmed", *_MEASUREMENT_COLUMNS)
_CONFIRMATIONS_FRAME = (
    *LOAD_COLUMNS,
    *("verdict", "confidence", "reason", "servers", "windows"),
    *("throughput_infer_per_sec", "throughput_infer_per_sec_low", "throughput_infer_per_sec_high"),
    *("latency", "latency_ms_low", "latency_ms_high"),
)
Row = Mapping[str, object]


def trials_frame(trials: Sequence[Trial]) -> pd.DataFrame:
    """Return one row per measurement, and one for each trial that could not be deployed.

    ``confirmation`` is the number of the fresh server, NA for the search's measurements. ``load_generator`` is
    ``perf_analyzer`` for a measurement that checks tune's own client, NA for all others. ``preferred_batch_sizes``
    are tuples. Unknown values are NA.
    """
    return _frame((row for trial in trials for row, _ in _rows(trial)), _TRIALS_FRAME)


def front_frame(outcome: Outcome | None) -> pd.DataFrame:
    """Return one row per point of the Pareto front; ``confirmed`` if it was measured on fresh servers."""
    front = [(point, outcome.confirmation_of(point) is not None) for point in outcome.front.points] if outcome else []
    rows = (
        {
            "trial": point.trial,
            **point.candidate.settings,
            **point.load.cells(),
            "confirmed": confirmed,
            **_measurement_values(point.measurement),
        }
        for point, confirmed in front
    )
    return _frame(rows, _FRONT_FRAME)


def confirmations_frame(confirmed: Sequence[ConfirmedLoad]) -> pd.DataFrame:
    """Return one row per confirmed candidate and load, with verdict and confidence intervals."""
    return _frame(map(_confirmed_row, confirmed), _CONFIRMATIONS_FRAME)


def _confirmed_row(confirmed: ConfirmedLoad) -> Row:
    """Return the row of a candidate and load that fresh servers measured."""
    document = result_document.confirmation(confirmed)
    throughput_low, throughput_high = result_document.interval_document(confirmed.throughput)
    latency_low, latency_high = result_document.interval_document(confirmed.latency_ms)
    point = confirmed.point
    return {
        "trial": point.trial,
        **point.candidate.settings,
        **point.load.cells(),
        **{name: document[name] for name in ("verdict", "confidence", "reason", "servers", "latency")},
        "windows": document["measurements"],
        "throughput_infer_per_sec": point.measurement.throughput_infer_per_sec,
        "throughput_infer_per_sec_low": throughput_low,
        "throughput_infer_per_sec_high": throughput_high,
        "latency_ms_low": latency_low,
        "latency_ms_high": latency_high,
    }


def _rows(trial: Trial) -> Iterator[tuple[Row, Measurement | None]]:
    """Yield a row for each measurement with the measurement; one without for a trial that was not measured."""
    settings = {
        "trial": trial.number,
        **trial.candidate.settings,
        "deploy_seconds": trial.deploy_seconds,
        "status": trial.status,
    }
    for load, measurement in trial.measurements:
        yield {**settings, **load.cells(), **_measurement_values(measurement), "confirmation": None}, measurement
    for load_generator, windows in ((None, trial.confirmations), (CROSS_CHECK_GENERATOR, trial.cross_checks)):
        for window in windows:
            values = (window.server, window.error_probability or None, load_generator)
            row = dict(zip(CONFIRMATION_COLUMNS, values, strict=True))
            yield (
                {**settings, **window.load.cells(), **_measurement_values(window.measurement), **row},
                window.measurement,
            )
    if not trial.measurements and not trial.confirmations:
        yield {**settings, "reason": trial.reason}, None


def _measurement_values(measurement: Measurement) -> dict[str, object]:
    values = asdict(measurement) | forecast_cells(measurement)
    del values["forecast"]
    return values


def _frame(rows: Iterable[Row], columns: Sequence[str]) -> pd.DataFrame:
    """Return a frame with the settings, the columns of other parameters by name, then ``columns``."""
    row_list = list(rows)
    parameters = sorted({name for row in row_list for name in row} - {*_TRIAL_COLUMNS, *columns})
    frame = pd.DataFrame(row_list, columns=[*_TRIAL_COLUMNS, *parameters, *columns])
    for name in frame.columns:
        frame[name] = _typed(name, frame[name])
    return frame


def _typed(name: str, values: Any) -> Any:
    """Return the column ``name`` with its type, which is the same in all frames."""
    if name == "preferred_batch_sizes":
        return values
    if name in _TYPES:
        return values.astype(_TYPES[name])
    if name in _FLOAT_COLUMNS:
        return values.astype("Float64")
    return values.convert_dtypes()


def measurements(runs: Sequence[FinishedRun]) -> pd.DataFrame:
    """Return the rows of ``trials_frame`` for several runs, with columns ``run``, ``model`` and ``meets``.

    ``meets`` says whether the measurement is stable and meets the SLA of its run. Preferred batch sizes are separated
    by blanks.
    """
    frames = [_run_frame(run) for run in runs]
    paths = {path for run in runs for path in run.problem.space.fields}
    frame = pd.concat(frames, ignore_index=True) if len(frames) > 1 else frames[0]
    texts = [path for path in sorted(paths) if path in frame and frame[path].dtype == object]
    # choices of one parameter may have several types, which a Parquet column cannot
    return frame.astype(dict.fromkeys(texts, "string"))


def _run_frame(run: FinishedRun) -> pd.DataFrame:
    rows = [pair for trial in run.trials for pair in _rows(trial)]
    frame = _frame((row for row, _ in rows), _TRIALS_FRAME)
    sizes = frame["preferred_batch_sizes"].map(lambda sizes: " ".join(map(str, sizes)))
    meets = [m is not None and m.stable and run.problem.sla.is_met(m) for _, m in rows]
    frame = frame.assign(preferred_batch_sizes=sizes, meets=pd.array(meets, dtype="boolean"))
    for index, (name, value) in enumerate({"run": run.name, "model": run.problem.model}.items()):
        frame.insert(index, name, value)
    return frame


def csv(frame: pd.DataFrame) -> bytes:
    """Return ``frame`` as CSV in UTF-8."""
    return frame.to_csv(index=False).encode()


def parquet(frame: pd.DataFrame) -> bytes:
    """Return ``frame`` as Parquet. Raises BadInputError if pyarrow is not installed."""
    data = io.BytesIO()
    try:
        frame.to_parquet(data, engine="pyarrow", index=False)
    except ImportError:
        raise BadInputError(
            "--format parquet: needs pyarrow; install it with: pip install 'tritune[parquet]'"
        ) from None
    return data.getvalue()


WRITERS = {"csv": csv, "parquet": parquet}
