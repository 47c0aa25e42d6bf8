"""Constraints: parsed once from what the user wrote, judged in floats (a violation <= 0 is met)."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass

from objectives.metrics import METRICS, Measurement

CONFIDENCE = 0.99  # of a verdict on constraints

_MS_PER_UNIT = {"us": 1e-3, "ms": 1.0, "s": 1e3, "m": 60e3, "min": 60e3, "h": 3600e3}
_BYTES_PER_UNIT = {"B": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "KB": 10**3, "MB": 10**6, "GB": 10**9}
_NUMBER = r"([0-9]+(?:\.[0-9]*)?|\.[0-9]+)\s*"
_LONGEST = 400  # characters of a value


@dataclass(frozen=True, slots=True)
class Constraint:
    """A bound on one metric: an upper bound where lower is better, else a lower bound."""

    metric: str
    bound: float

    def violation(self, measurement: Measurement) -> float:
        """How far the bound is missed, relative to it: <= 0 is met, inf where the metric is unknown."""
        metric = METRICS[self.metric]
        value = metric.value(measurement)
        if value is None or math.isnan(value):
            return math.inf
        scale = abs(self.bound) or 1.0
        return (self.bound - value) / scale if metric.better == "higher" else (value - self.bound) / scale

    def __str__(self) -> str:
        metric = METRICS[self.metric]
        relation = ">=" if metric.better == "higher" else "<="
        return f"{metric.name.removeprefix('latency-')} {relation} {self.bound:.12g} {metric.unit}".rstrip()


def parse_constraint(text: str) -> Constraint:
    """What ``str`` made of one. Raises ValueError."""
    name, _, bound = text.replace(">=", "<=").partition("<=")
    metric = next((metric for metric in (name.strip(), f"latency-{name.strip()}") if metric in METRICS), None)
    if metric is None or not bound.split():
        raise ValueError(f"{text!r} is no bound on a metric")
    return Constraint(metric, float(bound.split()[0]))


def worst_violation(constraints: tuple[Constraint, ...], measurement: Measurement) -> float:
    """The largest violation; -inf without constraints."""
    return max((c.violation(measurement) for c in constraints), default=-math.inf)


def parse_duration_ms(text: str, example: str = "20ms") -> float:
    """``20ms``, ``0.02s``, ``500us``, ``5m``, ``1h`` -> milliseconds.

    Raises ValueError, saying what would be right, for a missing unit, a negative or a zero duration. The unit
    of ``example`` is the one that is proposed.
    """
    unit = example.lstrip("0123456789")
    match = _match(r"(us|ms|s|m|min|h)?", text)
    if not match:
        others = {"ms": "20ms, 0.02s or 500us", "m": "5m, 90s or 0.5h"}
        raise ValueError(f"write a positive time such as {others.get(unit, example)}")
    value = float(match[1]) * _MS_PER_UNIT[match[2] or unit]
    if not 0 < value < math.inf:
        raise ValueError(f"the time must be greater than zero, such as {example}")
    if not match[2]:
        raise ValueError(f"a unit is missing: {text.strip()}{unit}?")
    return value


def parse_bytes(text: str) -> float:
    """``4GiB``, ``500MB`` -> bytes. Raises ValueError, saying what would be right."""
    match = _match(r"(B|KiB|MiB|GiB|KB|MB|GB)", text)
    value = float(match[1]) * _BYTES_PER_UNIT[match[2]] if match else 0
    if not 0 < value < math.inf:
        raise ValueError("write a positive size with a unit, such as 4GiB or 500MB")
    return value


def parse_rate(text: str, request_batch_size: float) -> float:
    """``4000``, ``4000/s`` (inferences), ``500req/s`` (requests) -> inferences per second.

    Raises ValueError, saying what would be right.
    """
    match = _match(r"((?:infer|req)?/s)?", text)
    per_unit = request_batch_size if match and (match[2] or "").startswith("req") else 1
    value = float(match[1]) * per_unit if match else 0
    if not 0 < value < math.inf:
        raise ValueError("write a positive rate such as 4000/s (inferences) or 500req/s (requests)")
    return value


def _match(unit: str, text: str) -> re.Match[str] | None:
    """A number and its unit. Blanks are taken off the ends first: two patterns of blanks side by side would take the
    square of their number."""
    return re.fullmatch(_NUMBER + unit, text.strip()) if len(text) <= _LONGEST else None
