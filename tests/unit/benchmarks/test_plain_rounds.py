"""The repeated measurement of the compared configurations of a run, with made-up figures of perf_analyzer."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from optimizer.config.search_space import ModelKind
from optimizer.results.finished_run import read_run

sys.path.insert(0, str(Path(__file__).parents[3] / "benchmarks"))

from plain_rounds import ROLES, PlainRounds, RoundResult, compared_points, document, report, why_not

SAMPLE = Path(__file__).parents[3] / "results" / "dlrm" / "sample"


@pytest.fixture
def rounds() -> PlainRounds:
    return PlainRounds(
        compared_points(read_run(SAMPLE)),
        [
            RoundResult("baseline", 1, 100.0, 5.0, 8.0, 9.0, 10.0),
            RoundResult("recommended", 1, 300.0, 5.0, 8.0, 9.5, 10.0),
            RoundResult("baseline", 2, 200.0, 5.0, 8.0, 11.0, 12.0),
            RoundResult("recommended", 2, 400.0, 5.0, 8.0, 10.5, 11.0),
            RoundResult("baseline", 3, reason="the plain server is not ready"),
            RoundResult("recommended", 3, 500.0, 5.0, 8.0, 10.0, 11.0),
        ],
    )


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


def test_a_gain_is_within_a_round(rounds: PlainRounds) -> None:
    assert rounds.gains("recommended") == [3.0, 2.0]
    assert rounds.gains("dynamic_batching") == []


def test_the_document_has_medians_and_every_round(rounds: PlainRounds) -> None:
    cells = {cell["role"]: cell for cell in document(rounds)["cells"]}
    assert cells["recommended"]["throughput_infer_per_sec"] == 400
    assert cells["baseline"]["latency_p95_ms"] == 10
    assert cells["baseline"]["reason"] == "the plain server is not ready"
    assert cells["dynamic_batching"]["throughput_infer_per_sec"] is None
    assert len(document(rounds)["rounds"]) == 6


def test_the_table_names_what_was_not_measured(rounds: PlainRounds) -> None:
    text = "\n".join(report(rounds))
    assert "| 2 | 4,580 | 150 (100 to 200) | 19.2 | 10 | 1.00 (1.00 to 1.00) |" in text
    assert "| 3 | 18,380 | 400 (300 to 500) | 18.27 | 10 | 2.50 (2.00 to 3.00) |" in text
    assert "| 0 | 12,208 | not measured | 19.79 |  | not measured |" in text
    assert "round 3, baseline: the plain server is not ready" in text
