"""Test that ``tune explain --measure`` measures the effect of shared memory, on the real server."""

from __future__ import annotations

import json

import pytest

from optimizer.cli import explain
from tests.command_fixtures import FINISHED, Sandbox, Tune
from tests.repositories import write_wide


def test_explain_shows_what_was_measured_for_the_recommendation_of_a_run(
    called_tune: Tune, sandbox: Sandbox, capfd: pytest.CaptureFixture[str]
) -> None:
    write_wide(sandbox.working_folder / "models")
    study = ("--budget", "30s", "--max-trials", "1", "--measurement-interval", "100ms", "--no-confirmation")
    assert called_tune("--log", "none", "--no-report", *study, "models/wide").code in FINISHED
    (folder,) = (sandbox.working_folder / "results").glob("*/*")
    assert explain.main(["--measure", "--json", str(folder)], rounds=4, seconds=0.3) == 0
    effect = json.loads(capfd.readouterr().out)["shared_memory"]
    assert len(effect["throughputs_infer_per_sec"]) == 4
    assert effect["same_machine"]
    low, high = effect["ratio_interval"]
    assert low < effect["ratio"] < high
    ended = called_tune("explain", "--json", "wide")
    assert (ended.code, ended.errors) == (0, [])
    assert json.loads(ended.stdout)["shared_memory"] == effect
