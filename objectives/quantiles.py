"""Percentiles by name, such as ``p99.9``, and quantiles between and beyond those that are known."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from decimal import Decimal
from functools import lru_cache

_PERCENTILE = re.compile(r"p([0-9]{1,3}(?:\.[0-9]{1,4})?)", re.ASCII)
PERCENTILE_RULE = "a percentile is at least 50 and below 100, with at most four decimals, such as p95 or p99.9"


@lru_cache(maxsize=256)
def parse_percentile(text: str) -> tuple[str, float]:
    """Return the shortest name of a percentile and its level: ``("p99.9", 0.999)`` for ``p99.90``.

    Raises ValueError with the rule.
    """
    match = _PERCENTILE.fullmatch(text)
    percent = Decimal(match[1]) if match else Decimal(0)
    if not 50 <= percent < 100:
        raise ValueError(PERCENTILE_RULE)
    return f"p{percent.normalize():f}", float(percent / 100)


def quantile_at(quantiles: Mapping[float, float], level: float) -> float:
    """Return the quantile at ``level`` from at least two ``quantiles``, the known values by level.

    The distribution is taken as exponential between two of them, and the exponential between the two highest ones
    continues beyond them.
    """
    import numpy as np  # takes too long to import for the help of the command

    levels = np.array([0.0, *sorted(quantiles)])
    values = np.array([0.0, *(quantiles[known_level] for known_level in sorted(quantiles))])
    depths = -np.log1p(-levels)
    depth = -math.log1p(-level)
    if depth <= depths[-1]:
        return float(np.interp(depth, depths, values))
    slope = (values[-1] - values[-2]) / (depths[-1] - depths[-2])
    return float(values[-1] + slope * (depth - depths[-1]))
