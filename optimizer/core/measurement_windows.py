"""The lengths of measurement windows, and the test of whether windows agree."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

MIN_WINDOWS = 3  # windows of a measurement: perf_analyzer accepts no fewer
FIRST_WINDOW_MS = 300  # longer windows do not reduce the differences between deployments
RATE_WINDOW_MS = 600  # longer, because random arrivals differ between windows
STREAM_WINDOW_MS = 900  # longer, because the times of requests that run together are alike
MIN_WINDOW_MS = 50
WINDOW_STRETCH = 1.2  # actual length of a perf_analyzer window as a multiple of the requested one
MAX_WINDOW_MS = 15_000  # longer for a model that may take longer for a request
REQUESTS_PER_WINDOW = 60
# a window of a request rate that would be longer has fewer requests, but at least these
LONG_RATE_WINDOW_MS, FEWEST_REQUESTS_PER_WINDOW = 3_000, 10
MAX_SPREAD = 0.35  # (max - min) / median of the windows' throughputs, and of their latencies


@dataclass(frozen=True, slots=True)
class MeasurementWindow:
    """The throughput and a statistic of the latency in one measurement window (a "pass" of perf_analyzer)."""

    throughput_infer_per_sec: float
    latency_ms: float


def describe_instability(
    windows: Sequence[MeasurementWindow],
    spread_limit: float = MAX_SPREAD,
    latency_spread_limit: float | None = None,
    latency: str = "p95",
) -> str:
    """Return why the windows disagree, or an empty string if they agree.

    They agree if there are at least ``MIN_WINDOWS`` and (max - min) / median is at most ``spread_limit``, or
    ``latency_spread_limit`` for the latencies if that is given. ``latency`` is the name of their statistic.
    """
    if len(windows) < MIN_WINDOWS:
        return f"only {len(windows)} of {MIN_WINDOWS} windows"
    throughputs = [window.throughput_infer_per_sec for window in windows]
    latencies = [window.latency_ms for window in windows]
    latency_limit = spread_limit if latency_spread_limit is None else latency_spread_limit
    throughput_spread = _describe_spread(throughputs, spread_limit, "throughput", "infer/s")
    return throughput_spread or _describe_spread(latencies, latency_limit, latency, "ms")


def _describe_spread(values: Sequence[float], limit: float, name: str, unit: str) -> str:
    """Return how ``values`` differ if their (max - min) / median is above ``limit``; otherwise an empty string.

    A median of zero is described too.
    """
    median, lowest, highest = sorted(values)[len(values) // 2], min(values), max(values)
    if median <= 0:
        return f"a window of zero {name}"
    if (highest - lowest) / median <= limit:
        return ""
    ends = [f"{end:,.0f}" if end >= 1000 else f"{end:.3g}" for end in (lowest, highest)]
    return f"unstable: {name} between {' and '.join(ends)} {unit}"


def longest_window_ms(latency_bound_ms: float) -> float:
    """Return the length of a window in which a server that meets ``latency_bound_ms`` (0: none) answers a request."""
    return max(float(MAX_WINDOW_MS), latency_bound_ms)


def window_length_ms(requests_per_window: float, window_ms: int) -> int:
    """Return the window length in ms for ``REQUESTS_PER_WINDOW`` requests.

    A window of ``window_ms`` had ``requests_per_window`` requests. The result is at most ``MAX_WINDOW_MS``.
    """
    return min(MAX_WINDOW_MS, int(window_ms * REQUESTS_PER_WINDOW / max(requests_per_window, 1)))
