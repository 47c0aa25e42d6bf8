"""The line before the first measurement names the model, the server, the time, the goal and the folder."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from objectives.metrics import METRICS
from objectives.sla import Sla
from optimizer.core.budget import RunMode
from optimizer.options.option_reader import run_options
from optimizer.results.formatting import bounds
from optimizer.study.start_line import action_of, start_line
from tests.drawn_server import drawn_problem

FOLDER = Path("results/drawn/1")


@pytest.mark.parametrize(
    ("values", "server"),
    [
        ({}, "the embedded server"),
        ({"target": "local", "tritonserver": "tritonserver"}, "the tritonserver of this machine"),
        ({"target": "remote", "url": "grpcs://triton:8001"}, "the server at triton:8001"),
        ({"cluster": "auto"}, "embedded servers of a cluster"),
    ],
)
def test_the_line_names_the_server(values: dict[str, object], server: str) -> None:
    problem = drawn_problem()
    line = start_line("tuning", problem, run_options("drawn", values), 180.0, FOLDER)
    assert line == (
        f"tuning drawn on {server}, for at most 3:00 minutes: highest throughput within {bounds(problem.sla)}; "
        "results in results/drawn/1"
    )


def test_the_line_has_the_limit_of_trials_and_all_objectives() -> None:
    problem = replace(drawn_problem(), objectives=(METRICS["memory"], METRICS["throughput"]), sla=Sla(()))
    line = start_line("continuing", problem, run_options("drawn", {"max-trials": 5}), 61.0, FOLDER)
    assert line == (
        "continuing drawn on the embedded server, for at most 1:01 minutes and 5 trials: "
        "lowest memory, then highest throughput, without a bound; results in results/drawn/1"
    )


@pytest.mark.parametrize(
    ("mode", "spent_seconds", "action"),
    [
        (RunMode.SEARCH, 0.0, "tuning"),  # of a batch, whose folder exists before
        (RunMode.SEARCH, 12.0, "continuing"),
        (RunMode.SEARCH_AND_CONFIRM, 12.0, "continuing"),
        (RunMode.CONFIRM, 12.0, "testing the recommendation for"),
    ],
)
def test_only_a_run_with_measurements_is_continued(mode: RunMode, spent_seconds: float, action: str) -> None:
    assert action_of(mode, spent_seconds) == action
