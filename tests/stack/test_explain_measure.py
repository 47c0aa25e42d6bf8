"""Test that ``tune explain --measure`` measures what shared memory changes, on the real server."""

from __future__ import annotations

import json

import pytest

from optimizer.study import shared_memory_measurement
from tests.command_fixtures import FINISHED, Sandbox, Tune
from tests.repositories import write_wide


def test_explain_measures_the_recommendation_of_a_run(
    called_tune: Tune, sandbox: Sandbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shared_memory_measurement, "ROUNDS", 4)
    monkeypatch.setattr(shared_memory_measurement, "SECONDS", 0.3)
    write_wide(sandbox.working_folder / "models")
    study = ("--budget", "30s", "--max-trials", "1", "--measurement-interval", "100ms", "--no-confirmation")
    assert called_tune("--log", "none", "--no-report", *study, "models/wide").code in FINISHED
    ended = called_tune("explain", "--measure", "--json", "wide")
    assert (ended.code, ended.errors) == (0, [])
    effect = json.loads(ended.stdout)["shared_memory"]
    assert len(effect["throughputs_infer_per_sec"]) == 4
    assert effect["same_machine"]
    low, high = effect["ratio_interval"]
    assert low < effect["ratio"] < high
    later = called_tune("explain", "--json", "wide")
    assert json.loads(later.stdout)["shared_memory"] == effect
