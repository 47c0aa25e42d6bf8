"""Values of each of several models under load, as text.

The text of a model has the values of FORM, and models are separated by spaces. This is the form of
``Measurement.by_model`` and of the column ``by_model``. Latencies and the times of a request on the server are in ms.
The last three values are ``requests_over_ms``, ``latency_sketch`` and ``batch_stats``. An unknown value is empty. The
name and the last three values are quoted as in a URL.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any
from urllib.parse import quote, unquote

from objectives import batch_stats, latency_sketch
from objectives.metrics import LATENCY, STATISTICS, Measurement

FORM = "model:requests:infer_per_sec:avg:p50:p90:p95:p99:queue:input:infer:output:over:sketch:batches"
FIELDS = (
    *("requests", "throughput_infer_per_sec", *map(LATENCY.field_of, STATISTICS)),
    *("queue_ms", "compute_input_ms", "compute_infer_ms", "compute_output_ms"),
)
_NUMBER = r"[0-9]{1,12}(?:\.[0-9]{1,6})?"
_MODEL = re.compile(rf"([^:]+):([0-9]{{1,12}})?((?::(?:{_NUMBER})?){{{len(FIELDS) - 1}}})" + 3 * ":([^:]*)", re.ASCII)


def to_text(by_model: Mapping[str, Measurement]) -> str:
    """Return the values of each model as text that ``from_text`` reads."""
    return " ".join(
        ":".join(
            (
                quote(name, safe=""),
                *(_write(getattr(measurement, field)) for field in FIELDS),
                quote(measurement.requests_over_ms, safe=""),
                quote(measurement.latency_sketch, safe=""),
                quote(measurement.batch_stats, safe=""),
            )
        )
        for name, measurement in by_model.items()
    )


def throughput_of(model: str, measurement: Measurement) -> float | None:
    """Return the inferences per second of ``model``, which ``measurement`` has alone or next to other models."""
    return from_text(measurement.by_model).get(model, measurement).throughput_infer_per_sec


def has_models(models: Iterable[str], measurement: Measurement) -> bool:
    """Return whether ``measurement`` has values of each of the ``models`` under load."""
    return set(models) <= from_text(measurement.by_model).keys()


def _write(value: float | None) -> str:
    return "" if value is None else str(value) if isinstance(value, int) else f"{value:.4f}"


def from_text(text: str) -> dict[str, Measurement]:
    """Return the values of each model in ``text``; empty for an empty text.

    Raises ValueError naming the expected form.
    """
    by_model = {}
    for word in text.split():
        match = _MODEL.fullmatch(word)
        if match is None:
            raise ValueError(f"not a list of {FORM}")
        numbers = [float(number) if number else None for number in match[3].split(":")[1:]]
        values: dict[str, Any] = dict(zip(FIELDS[1:], numbers, strict=True))
        over, sketch, batches = map(unquote, match.group(4, 5, 6))
        latency_sketch.parse_counts(over)
        latency_sketch.check_sketch(sketch)
        batch_stats.from_text(batches)
        requests = int(match[2]) if match[2] else None
        by_model[unquote(match[1])] = Measurement(
            requests=requests, requests_over_ms=over, latency_sketch=sketch, batch_stats=batches, **values
        )
    return by_model
