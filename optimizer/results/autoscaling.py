"""Settings of the autoscaler that `tune emit` writes and `tune plan` simulates: defaults, target, metric."""

from __future__ import annotations

import math

DEFAULT_MIN_REPLICAS, DEFAULT_MAX_REPLICAS = 1, 10
DEFAULT_UTILIZATION = 0.7  # share of the measured load that a replica should get on average
RATE_WINDOW_SECONDS = 60  # over which prometheus-adapter averages the metric


def target_load(measured_load: float, utilization: float) -> float:
    """Return the requests in flight, or per second, that a replica should get on average.

    It is rounded down to thousandths, the smallest quantity of an autoscaler in Kubernetes.
    """
    return max(1, math.floor(1e3 * measured_load * utilization + 1e-6)) / 1e3  # 70 % of 90 are 63
