"""Measurement windows: how long they are, and whether those of one measurement agree."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

WINDOWS = 3  # of a measurement; the least that perf_analyzer accepts as a result
FIRST_WINDOW_MS = 300  # longer ones tell no more: what differs from one deployment to the next is in all of them
RATE_WINDOW_MS = 600  # arrivals at random differ from one window to the next
SHORTEST_WINDOW_MS = 50
STRETCH = 1.2  # a window of perf_analyzer lasts so much longer than asked for
LONGEST_WINDOW_MS = 15_000
REQUESTS_PER_WINDOW = 60
SPREAD_LIMIT = 0.35  # of the windows' throughputs and of their p95s: (max - min) / median


@dataclass(frozen=True, slots=True)
class Window:
    """One measurement window ("pass") as perf_analyzer calls it."""

    throughput_infer_per_sec: float
    latency_p95_ms: float


def instability(windows: Sequence[Window], spread_limit: float = SPREAD_LIMIT) -> str:
    """Why the windows do not agree; empty where they do."""
    if len(windows) < WINDOWS:
        return f"only {len(windows)} of {WINDOWS} windows"
    for name, values in (
        ("throughput", [w.throughput_infer_per_sec for w in windows]),
        ("p95", [w.latency_p95_ms for w in windows]),
    ):
        middle = sorted(values)[len(values) // 2]
        if middle <= 0:
            return f"a window of zero {name}"
        if (max(values) - min(values)) / middle > spread_limit:
            return f"unstable: {name} between {min(values):.4g} and {max(values):.4g}"
    return ""


def window_for(requests_per_window: float, window_ms: int) -> int:
    """A window long enough for REQUESTS_PER_WINDOW requests at the rate seen."""
    return min(LONGEST_WINDOW_MS, int(window_ms * REQUESTS_PER_WINDOW / max(requests_per_window, 1)))
