"""The interval of a ratio of paired throughputs contains the true ratio as often as its confidence says."""

from __future__ import annotations

import numpy as np
import pytest

from optimizer.results.shared_memory_effect import paired_ratio


def test_the_ratio_is_that_of_the_pairs() -> None:
    ratio = paired_ratio([(100.0, 200.0), (50.0, 100.0), (10.0, 20.0)], 0.99)
    assert ratio.estimate == pytest.approx(2)
    assert ratio.bounds == pytest.approx((2, 2))


def test_each_end_holds_at_its_confidence() -> None:
    """The speed of the machine drifts by a factor of ten, which affects both of a pair."""
    rng = np.random.default_rng(1)
    above = below = 0
    runs = 4000
    for _ in range(runs):
        speed = np.exp(np.linspace(0, np.log(10), 8))
        first = speed * np.exp(0.1 * rng.standard_normal(8))
        second = 1.3 * speed * np.exp(0.1 * rng.standard_normal(8))
        ratio = paired_ratio(list(zip(first.tolist(), second.tolist(), strict=True)), 0.95)
        above += ratio.interval.low > 1.3
        below += ratio.interval.high < 1.3
    for misses in (above, below):
        assert misses / runs == pytest.approx(0.05, abs=0.012)
