"""The ratio of two throughputs that were measured in turn on one server."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from objectives.verdict import ConfidenceInterval, ThroughputRatio


def paired_ratio(pairs: Sequence[tuple[float, float]], confidence: float) -> ThroughputRatio:
    """Return the mean ratio of the second to the first throughput of each pair, with its confidence interval.

    The interval is that of Student's t on the mean of the log ratios. A pair is measured within seconds, so a slow
    change of the machine's speed affects both. ``confidence`` is that of each end. At least two pairs are needed.
    """
    from scipy import special

    logs = np.log([second / first for first, second in pairs])
    mean, error = float(logs.mean()), float(logs.std(ddof=1)) / math.sqrt(len(logs))
    margin = float(special.stdtrit(len(logs) - 1, confidence)) * error
    return ThroughputRatio(math.exp(mean), ConfidenceInterval(math.exp(mean - margin), math.exp(mean + margin)))
