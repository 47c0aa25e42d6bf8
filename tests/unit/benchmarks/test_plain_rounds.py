"""Which runs ``benchmarks/plain_rounds.py`` measures again, and at which loads."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from optimizer.config.problem import ModelKind
from optimizer.results.finished_run import read_run
from plain_rounds import ROLES, compared_points, why_not

SAMPLE = Path(__file__).parents[3] / "results" / "dlrm" / "sample"


def test_the_configurations_of_the_run_are_measured_at_its_loads() -> None:
    points = compared_points(read_run(SAMPLE))
    assert tuple(points) == ROLES
    assert (points["recommended"].candidate.instance_count, points["recommended"].load.concurrency) == (2, 46)
    assert not points["baseline"].candidate.dynamic_batching


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        ({"options": replace(read_run(SAMPLE).options, target="docker")}, "of the target docker"),
        ({"problem": replace(read_run(SAMPLE).problem, kind=ModelKind.STATEFUL)}, "its model is stateful"),
        ({"outcome": None}, "it has measured nothing"),
    ],
)
def test_a_run_that_plain_servers_cannot_repeat_is_refused(changed: dict[str, Any], reason: str) -> None:
    assert why_not(read_run(SAMPLE)) == ""
    assert reason in why_not(replace(read_run(SAMPLE), **changed))
