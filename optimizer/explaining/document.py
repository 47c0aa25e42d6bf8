"""An explanation as data."""

from __future__ import annotations

import math
from typing import Any

from optimizer.explaining.explanation import Explanation, Simulation
from optimizer.explaining.forecast import Forecast
from optimizer.explaining.runner_up import RunnerUp
from optimizer.report import export, words


def document(told: Explanation) -> dict[str, Any]:
    """What ``--json`` prints. Shares and gains are relative (0.1 is 10 %), null where they are unknown."""
    found, second = told.binding, told.runner_up
    return {
        "run": str(told.run.folder.path),
        "status": told.run.status,
        "recommended": told.recommended,
        "subject": export.entry(told.subject.point),
        "holds_back": told.holds_back or None,
        "bound_by": told.bottleneck.kind,
        "reasons": list(told.bottleneck.reasons),
        "stages_ms": told.subject.stages_ms,
        "instance_busy_share": told.subject.busy_share,
        "copied_share_of_compute": told.subject.copied_share,
        "binding": {
            "constraint": str(found.constraint) if found.constraint else None,
            "beyond": export.entry(found.beyond) if found.beyond else None,
            "gain": found.gain,
            "used_share": found.used,
        },
        "simulated": _simulated(told.simulation) if told.simulation else None,
        "runner_up": _second(second) if second else None,
    }


def _simulated(found: Simulation) -> dict[str, Any]:
    return {
        "latency": found.latency,
        "bound_ms": _finite(found.bound_ms),
        "median_error": found.error,
        "measurements": found.points,
        "quickest_ms": found.quickest_ms,
        "remedies": [
            {"name": one.name, "change": one.change, **_forecast(one.forecast), "gain": one.gain}
            for one in found.remedies
        ],
        "other_slas": [
            {"factor": one.factor, "other_bound_ms": one.bound_ms, **_forecast(one.forecast), "gain": one.gain}
            for one in found.other_slas
        ],
    }


def _forecast(one: Forecast | None) -> dict[str, Any]:
    return {
        "configuration": words.configuration(one.candidate) if one else None,
        "concurrency": one.concurrency if one else None,
        "throughput_infer_per_sec": one.throughput_infer_per_sec if one else None,
        "latency_ms": one.latency_ms if one else None,
    }


def _second(found: RunnerUp) -> dict[str, Any]:
    return {
        **export.entry(found.point),
        "confirmation": export.confirmation(found.confirmed) if found.confirmed else None,
        "less_throughput": found.less,
        "less_throughput_interval": [_finite(found.interval.low), _finite(found.interval.high)],
        "missed": found.missed or None,
    }


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None
