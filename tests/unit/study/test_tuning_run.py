from __future__ import annotations

from dataclasses import replace

import pytest

from optimizer.core.notes import HighestConcurrency
from optimizer.results.recommendation import assess
from optimizer.study.tuning_run import _highest_concurrency
from tests.drawn_server import BASELINE, FAST, FASTER, Drawing, drawn_problem, searched


@pytest.mark.parametrize(
    ("concurrency", "allowed", "noted"),
    [
        (8, 8, HighestConcurrency(8)),
        (8, 16, None),
        (15, 15, None),  # 18 of 20 ms: the bound limits it as well
    ],
)
def test_a_load_that_only_the_profile_limits_is_noted(
    concurrency: int, allowed: int, noted: HighestConcurrency | None
) -> None:
    problem = replace(drawn_problem(), max_concurrency=allowed)
    outcome = assess(searched(Drawing(), {FASTER: concurrency}), problem, BASELINE, FAST)
    assert outcome.recommended is not None
    assert outcome.recommended.load.concurrency == concurrency
    assert _highest_concurrency(outcome, problem) == noted
