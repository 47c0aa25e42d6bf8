"""Test the error that each look at a sequential test spends."""

from __future__ import annotations

import numpy as np
import pytest
from scipy import special

from objectives.sequential import LOOKS, look_error, spent_error


@pytest.mark.parametrize("error", [0.05, 0.01, 0.00125])
def test_the_looks_together_spend_the_planned_error(error: float) -> None:
    sums = np.random.default_rng(0).normal(size=(400_000, 13)).cumsum(1)
    crossed = np.zeros(len(sums), dtype=bool)
    for look in LOOKS[:4]:
        crossed |= sums[:, look - 1] / np.sqrt(look) > -special.ndtri(look_error(error, look))
        spent = spent_error(error, look)
        assert crossed.mean() == pytest.approx(spent, abs=4 * np.sqrt(spent / len(sums)))


def test_each_look_has_a_smaller_error_than_all_together() -> None:
    levels = [look_error(0.01, look) for look in LOOKS]
    assert all(
        0 < level < spent_error(0.01, look) or look == LOOKS[0] for look, level in zip(LOOKS, levels, strict=True)
    )
    assert levels[0] == pytest.approx(spent_error(0.01, LOOKS[0]), rel=0.02)
    assert sum(levels) > 0.01, "looks at the same data are correlated, so they need no Bonferroni correction"


def test_the_spent_error_approaches_the_whole_error() -> None:
    spent = [spent_error(0.01, servers) for servers in (1, 2, 4, 100, 10**9)]
    assert spent == sorted(spent)
    assert spent[:2] == [0, 0]
    assert spent[-1] == pytest.approx(0.01)
    assert spent_error(0.01, LOOKS[0]) == 0.005, "half of the error is spent at the first look"
