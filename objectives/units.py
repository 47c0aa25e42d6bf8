"""Parsers of values with units, as users write them: durations, sizes in bytes and rates."""

from __future__ import annotations

import math
import re

_MS_PER_UNIT = {"us": 1e-3, "ms": 1.0, "s": 1e3, "m": 60e3, "min": 60e3, "h": 3600e3}
_BYTES_PER_UNIT = {"B": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "KB": 10**3, "MB": 10**6, "GB": 10**9}
UNITS = frozenset((*_MS_PER_UNIT, *_BYTES_PER_UNIT, "%"))  # units that may follow a number
_NUMBER = r"([0-9]+(?:\.[0-9]*)?|\.[0-9]+)\s*"
_MAX_CHARACTERS = 400  # limit for a value with its unit


def parse_duration_ms(text: str, example: str = "20ms") -> float:
    """Return the duration in milliseconds: ``20ms``, ``0.02s``, ``500us``, ``5m`` or ``1h``.

    ``example`` is shown in error messages, and its unit is proposed if the unit is missing.

    Raises ValueError with an example if the unit is missing or the duration is not positive.
    """
    unit = example.lstrip("0123456789")
    match = _match(r"(us|ms|s|m|min|h)?", text)
    if not match:
        examples = {"ms": "20ms, 0.02s or 500us", "m": "5m, 90s or 0.5h"}
        raise ValueError(f"{_time_fault(text)}; write a positive time such as {examples.get(unit, example)}")
    value = float(match[1]) * _MS_PER_UNIT[match[2] or unit]
    if not 0 < value < math.inf:
        raise ValueError(f"the time must be greater than zero, such as {example}")
    if not match[2]:
        raise ValueError(f"a unit is missing: {text.strip()}{unit}?")
    return value


def _time_fault(text: str) -> str:
    """Return the fault of ``text``, which is not a number with or without a unit of time."""
    if not text.strip():
        return "the time is missing"
    if text.strip().startswith("-"):
        return "a time is never negative"
    if _match(r"[A-Za-z]+", text):
        return f"the unit is none of {', '.join(_MS_PER_UNIT)}"
    return "this is not a number with a unit of time"


def parse_bytes(text: str) -> float:
    """Return the size in bytes: ``4GiB`` or ``500MB``. Raises ValueError with an example for any other text."""
    match = _match(r"(B|KiB|MiB|GiB|KB|MB|GB)", text)
    value = float(match[1]) * _BYTES_PER_UNIT[match[2]] if match else 0
    if not 0 < value < math.inf:
        raise ValueError("write a positive size with a unit, such as 4GiB or 500MB")
    return value


def parse_rate(text: str, request_batch_size: float) -> float:
    """Return inferences per second: ``4000`` or ``4000/s`` are inferences, ``500req/s`` are requests.

    ``request_batch_size`` is the number of samples of a request. Raises ValueError with an example for any other
    text.
    """
    match = _match(r"((?:infer|req)?/s)?", text)
    per_unit = request_batch_size if match and (match[2] or "").startswith("req") else 1
    value = float(match[1]) * per_unit if match else 0
    if not 0 < value < math.inf:
        raise ValueError("write a positive rate such as 4000/s (inferences) or 500req/s (requests)")
    return value


def _match(unit: str, text: str) -> re.Match[str] | None:
    """Match a number and its unit.

    Blanks are stripped first: two adjacent patterns of blanks would take quadratic time.
    """
    return re.fullmatch(_NUMBER + unit, text.strip()) if len(text) <= _MAX_CHARACTERS else None
