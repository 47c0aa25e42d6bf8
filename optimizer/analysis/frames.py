"""Trials, fronts and confirmations as pandas tables: one type a column, the unit in its name."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, fields
from typing import Any

import pandas as pd

from objectives.metrics import Measurement
from optimizer.confirm.plan import Confirmed
from optimizer.report import export
from optimizer.trial import SETTINGS, LoadPoint, Point, Trial

_LOAD = ("request_batch_size", "concurrency", "request_rate")
_MEASURED = tuple(field.name for field in fields(Measurement))
_SETTINGS = ("trial", *SETTINGS)
_INTERVALS = tuple(f"{name}_{end}" for name in ("throughput_infer_per_sec", "latency_ms") for end in ("low", "high"))
_CONFIRMED = ("verdict", "confidence", "reason", "servers", "windows", _MEASURED[0], *_INTERVALS[:2], "latency")
_TYPES: dict[str, Any] = {
    **dict.fromkeys(("trial", "max_batch_size", "max_queue_delay_us", "instance_count", "concurrency"), "Int64"),
    **dict.fromkeys(("requests", "confirmation", "servers", "windows"), "Int64"),
    **dict.fromkeys(("dynamic_batching", "stable"), "boolean"),
    **dict.fromkeys(("status", "reason", "verdict", "batch_stats", "gpu_throttling", "latency"), "string"),
}
_FIGURES = {"deploy_seconds", "request_batch_size", "request_rate", "confidence", *_INTERVALS, *_MEASURED} - {*_TYPES}
Row = Mapping[str, object]


def of_trials(trials: Sequence[Trial]) -> pd.DataFrame:
    """One row a measurement, confirmations too (``confirmation``: the number of the fresh server), and one for a
    trial that could not be deployed. ``preferred_batch_sizes`` are tuples; the unknown is NA."""
    rows = (row for trial in trials for row in _rows(trial))
    return _frame(rows, ("confirmation", *_LOAD, *_MEASURED, "deploy_seconds", "status"))


def of_points(points: Sequence[Point]) -> pd.DataFrame:
    """One row a measured point."""
    rows = (
        {**_settings(Trial(point.trial, point.candidate)), **_load(point.load), **asdict(point.measurement)}
        for point in points
    )
    return _frame(rows, (*_LOAD, *_MEASURED))


def of_confirmed(confirmed: Sequence[Confirmed]) -> pd.DataFrame:
    """One row a configuration that was measured on fresh servers: its verdict, and the ends of the intervals in which
    throughput and the judged ``latency`` lie with that confidence."""
    return _frame(map(_confirmed, confirmed), (*_LOAD, *_CONFIRMED, *_INTERVALS[2:]))


def _confirmed(one: Confirmed) -> Row:
    told = export.confirmation(one)
    low_high = {
        f"{name}_{end}": bounds[place]
        for name in ("throughput_infer_per_sec", "latency_ms")
        if isinstance(bounds := told[name], list)
        for place, end in enumerate(("low", "high"))
    }
    point = one.point
    return {
        **_settings(Trial(point.trial, point.candidate)),
        **_load(point.load),
        "verdict": told["verdict"],
        "confidence": told["confidence"],
        "reason": told["reason"],
        "servers": told["servers"],
        "windows": told["measurements"],
        "throughput_infer_per_sec": point.measurement.throughput_infer_per_sec,
        "latency": told["latency"],
        **low_high,
    }


def _rows(trial: Trial) -> Iterable[Row]:
    settings = {**_settings(trial), "deploy_seconds": trial.deploy_seconds, "status": trial.status}
    for load, measurement in trial.measurements:
        yield {**settings, **_load(load), **asdict(measurement), "confirmation": None}
    for again in trial.confirmations:
        yield {**settings, **_load(again.load), **asdict(again.measurement), "confirmation": again.server}
    if not trial.measurements and not trial.confirmations:
        yield {**settings, "reason": trial.reason}


def _settings(trial: Trial) -> dict[str, object]:
    candidate = trial.candidate
    own = {name: getattr(candidate, name) for name in SETTINGS}
    return {"trial": trial.number, **own, **dict(candidate.fields)}


def _load(load: LoadPoint) -> dict[str, object]:
    """A closed loop has no rate, an open one no concurrency."""
    return {name: getattr(load, name) or None for name in _LOAD}


def _frame(rows: Iterable[Row], columns: Sequence[str]) -> pd.DataFrame:
    """``columns`` are there without rows too; those of other parameters follow the settings."""
    every = list(rows)
    others = sorted({name for row in every for name in row} - {*_SETTINGS, *columns})
    frame = pd.DataFrame(every, columns=[*_SETTINGS, *others, *columns])
    for name in frame.columns:
        frame[name] = _typed(name, frame[name])
    return frame


def _typed(name: str, values: Any) -> Any:
    """A parameter has the type of its choices."""
    if name == "preferred_batch_sizes":
        return values
    if name in _TYPES:
        return values.astype(_TYPES[name])
    if name in _FIGURES:
        return values.astype("Float64")
    return values.convert_dtypes()
