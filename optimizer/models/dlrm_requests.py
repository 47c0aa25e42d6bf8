"""Click-log-shaped requests: skewed categorical features, heavy-tailed dense ones.

What a sample costs depends on whether the embedding rows that it needs lie in a cache, so the requests must
not repeat a few rows as one random tensor would. 8191 samples make 212,966 look-ups, and at the skew below
these touch 77,000 distinct rows of the uncapped tables and 73,000 of tables capped at 100,000: 37 MB to 39 MB
in FP32, beside 9.5 MB of MLP weights. That is more than the caches that a server usually has to itself, while
the hottest rows stay cached, as in production. With more cache than that, raise ``samples``; perf_analyzer
takes about 0.02 s longer to start for each thousand.

The number is a prime, since perf_analyzer starts over at the end: requests of any size then begin at other
samples on each lap.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

SAMPLES = 8191
SKEW = 0.9
"""The exponent s of Zipf's law, probability ∝ rank**-s, of each categorical feature."""


def dense_features(samples: int, features: int, rng: np.random.Generator) -> npt.NDArray[np.float64]:
    """[samples, features]: log(1 + count) of log-normal counts, from 0 to about 10, so FP16 holds them."""
    typical = rng.uniform(0.0, 4.0, features)  # some features count units, some thousands
    return np.log1p(np.floor(rng.lognormal(typical, 1.5, (samples, features))))


def table_indices(samples: int, cardinalities: Sequence[int], rng: np.random.Generator) -> npt.NDArray[np.int64]:
    """[samples, len(cardinalities)]: for each feature, indices in [0, cardinality), Zipf-distributed.

    The hottest rows are scattered over the table: neighbours would share pages and be prefetched together.
    """
    columns = []
    for n in cardinalities:
        ranks = _zipf(samples, n, rng)
        columns.append((ranks * _scatter(n) + rng.integers(n)) % n)
    return np.stack(columns, axis=1)


def _zipf(samples: int, n: int, rng: np.random.Generator) -> npt.NDArray[np.int64]:
    """Ranks in [0, n) by inverting the power law on [1, n+1): no table of n weights is needed."""
    e = 1.0 - SKEW
    x: npt.NDArray[np.float64] = ((float(n + 1) ** e - 1.0) * rng.random(samples) + 1.0) ** (1.0 / e)
    return np.minimum(x.astype(np.int64) - 1, n - 1)  # rounding may reach n


def _scatter(n: int) -> int:
    """A multiplier coprime to ``n``, which permutes range(n), near n/φ: successive ranks land far apart."""
    candidate = max(1, round(n * 0.6180339887))
    while math.gcd(candidate, n) != 1:
        candidate += 1
    return candidate
