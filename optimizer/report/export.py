"""The outcome as data: JSON entries, the document of a run, pareto.csv."""

from __future__ import annotations

import csv
import io
import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from objectives.metrics import METRICS
from optimizer.store.disk import write_whole
from optimizer.trial import SETTINGS

if TYPE_CHECKING:
    from optimizer.confirm.plan import Confirmed
    from optimizer.outcome import Outcome
    from optimizer.trial import Point

_LOAD = ("request_batch_size", "concurrency", "request_rate")
_MEASURED = (
    "throughput_infer_per_sec",
    "latency_avg_ms",
    "latency_p50_ms",
    "latency_p90_ms",
    "latency_p95_ms",
    "latency_p99_ms",
    "mean_batch_size",
    "stable",
    "gpu_utilization",
    "gpu_memory_bytes",
    "gpu_power_watts",
    "gpu_sm_clock_mhz",
    "gpu_memory_clock_mhz",
    "gpu_throttling",
    "server_memory_bytes",
    "other_cpu_share",
    "score",
)

ENERGY = "energy_joules_per_1000_infer"


def entry(point: Point) -> dict[str, object]:
    """One measured configuration, named as in trials.csv: settings, trial, load, figures. Unknown is None.

    Throughput counts samples per second, latencies are per request in ms, memory is in bytes, energy in joules for
    1,000 samples.
    """
    candidate = point.candidate
    return {
        **{name: getattr(candidate, name) for name in SETTINGS},
        "preferred_batch_sizes": list(candidate.preferred_batch_sizes),
        **dict(candidate.fields),
        "trial": point.trial,
        **{name: getattr(point.load, name) for name in _LOAD},
        **{name: _known(getattr(point.measurement, name)) for name in _MEASURED},
        ENERGY: _known(METRICS["energy"].value(point.measurement)),
    }


def document(
    outcome: Outcome, *, wall_seconds: float, results_dir: str, extra: Mapping[str, object] | None = None
) -> dict[str, object]:
    """The result of a run, ready for JSON; ``trials`` and ``measurements`` are counts. ``extra`` follows."""
    return {
        "recommended": _entry(outcome, outcome.recommended),
        "confirmation": confirmation(outcome.confirmed) if outcome.confirmed else None,
        "baseline": _entry(outcome, outcome.baseline),
        "dynamic_batching": _entry(outcome, outcome.dynamic_batching),
        "speedup": outcome.speedup,
        "speedup_over_dynamic_batching": outcome.speedup_over_dynamic_batching,
        "pareto": [_entry(outcome, point) for point in outcome.front],
        "closest": _entry(outcome, outcome.closest),
        "holds_back": outcome.holds_back or None,
        "trials": outcome.trials,
        "measurements": outcome.measurements,
        "confirmations": outcome.confirmations,
        "wall_seconds": round(wall_seconds, 3),
        "results_dir": results_dir,
        **(extra or {}),
    }


def confirmation(found: Confirmed) -> dict[str, object]:
    """Verdict and intervals ([low, high], null where there is no bound) of what was measured on fresh servers."""
    judged = found.judged
    return {
        "verdict": judged.verdict.value,
        "confidence": judged.confidence,
        "reason": judged.reason,
        "servers": found.servers,
        "measurements": found.windows,
        "effective_requests": round(judged.effective_requests),
        "throughput_infer_per_sec": [_known(found.throughput.low), _known(found.throughput.high)],
        "latency": found.latency,
        "latency_ms": [_known(found.latency_ms.low), _known(found.latency_ms.high)],
    }


def write_pareto_csv(path: Path, outcome: Outcome) -> None:
    """The front, one point a row, in the columns of trials.csv. Raises EnvironmentFault."""
    fields = sorted({name for point in outcome.front for name, _ in point.candidate.fields})
    columns = ("trial", *SETTINGS, *fields, *_LOAD, *_MEASURED, ENERGY)
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(columns)
    for row in map(entry, outcome.front):
        writer.writerow([_cell(row.get(column)) for column in columns])
    write_whole(path, text.getvalue())


def write_json(path: Path, value: Mapping[str, object]) -> None:
    """Indented JSON with a final line break. Raises EnvironmentFault."""
    write_whole(path, json.dumps(value, indent=2, ensure_ascii=False, allow_nan=False) + "\n")


def _entry(outcome: Outcome, point: Point | None) -> dict[str, object] | None:
    """With the verdict of its confirmation, None where only the search measured it."""
    confirmed = outcome.confirmation_of(point)
    return {**entry(point), "verdict": confirmed.judged.verdict.value if confirmed else None} if point else None


def _known(value: object) -> object:
    """JSON has no NaN and no infinity: they are unknown."""
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _cell(value: object) -> object:
    if isinstance(value, bool):
        return "true" if value else "false"
    return " ".join(map(str, value)) if isinstance(value, list) else value
