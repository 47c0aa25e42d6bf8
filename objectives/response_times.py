"""Times of the responses of one request of a model that streams, as text in a ``Measurement``."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import pairwise

from objectives.arrays import FloatArray
from objectives.metrics import plain_number

MAX_RESPONSES = 256  # responses of a request whose times are kept
MAX_TEXT = 16 * MAX_RESPONSES
MAX_MS = 1e7
DECIMALS = 3


def to_text(times_ms: Iterable[float]) -> str:
    """Return the times of the first MAX_RESPONSES responses in ms, such as ``41.2 52.75 64``."""
    return " ".join(plain_number(ms, DECIMALS) for ms in list(times_ms)[:MAX_RESPONSES])


def from_text(text: str) -> tuple[float, ...]:
    """Return the times of a text of ``to_text`` in ms. Raises ValueError with the rule that it breaks."""
    rule = f"not a list of at most {MAX_RESPONSES} times from 0 to {MAX_MS:.10g} ms"
    if len(text) > MAX_TEXT:
        raise ValueError(rule)
    try:
        times_ms = tuple(map(float, text.split()))
    except ValueError:
        raise ValueError(rule) from None
    if len(times_ms) > MAX_RESPONSES or not all(0 <= ms <= MAX_MS for ms in times_ms):
        raise ValueError(rule)
    if any(later < earlier for earlier, later in pairwise(times_ms)):
        raise ValueError("not a list of times in their order")
    return times_ms


def median_request(times_ms: Sequence[FloatArray]) -> str:
    """Return the text of the request with the median time of its last response; empty if none has a response.

    Args:
        times_ms: The times of the responses of each request, in ms after it was sent.
    """
    answered = sorted((request for request in times_ms if len(request)), key=lambda request: float(request[-1]))
    return to_text(answered[(len(answered) - 1) // 2].tolist()) if answered else ""
