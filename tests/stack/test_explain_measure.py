"""Test on the real server that ``tune explain`` measures shared memory, and names the slow step of an ensemble."""

from __future__ import annotations

import json

import pytest

from optimizer.cli import explain
from tests.command_fixtures import FINISHED, Sandbox, Tune
from tests.repositories import skip_without_python_models, sleeper_program, write_ensemble, write_wide


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


SLOW_FIRST = """\
model: {repository: models, name: chain, batcher: second}
load: {max_concurrency: 8}
space:
  max_batch_size: [8]
  max_queue_delay_microseconds: [0]
  instance_group_count: [2]
  models: {first: {instance_group_count: [1], max_queue_delay_microseconds: [off, 0]}}
"""


@pytest.mark.parametrize("protocol", ["grpc", "http"])
def test_the_slow_step_of_an_ensemble_is_named(called_tune: Tune, sandbox: Sandbox, protocol: str) -> None:
    """tune's own client measures over gRPC, and perf_analyzer over HTTP."""
    skip_without_python_models()
    folder = sandbox.working_folder
    write_ensemble(folder / "models", milliseconds=5)
    (folder / "models" / "first" / "1" / "model.py").write_text(sleeper_program(60))
    (folder / "chain.yaml").write_text(SLOW_FIRST)
    study = ("--budget", "2m", "--max-trials", "1", "--measurement-interval", "300ms", "--no-confirmation")
    ended = called_tune("--log", "none", "--protocol", protocol, "--sla-p95", "5s", *study, "chain.yaml")
    assert ended.code in FINISHED
    explained = json.loads(called_tune("explain", "--json", "chain").stdout)
    first, second = explained["steps"]
    assert [(step["model"], step["instances"]) for step in (first, second)] == [("first", 1), ("second", 1)]
    assert first["queue_ms"] > second["queue_ms"]
    assert first["compute_ms"] > 60 > second["compute_ms"]
    assert first["instance_busy_share"] > second["instance_busy_share"]
    setting = "first/max_queue_delay_microseconds"
    assert explained["limiting_step"] == {"model": "first", "saturated": True, "setting": setting}
    assert explained["bottleneck"] == "other models"
    assert "What limits the throughput: first" in called_tune("explain", "chain").stdout
    (report,) = folder.glob("results/*/*/report.html")
    assert "first limits the throughput: its instance computed" in report.read_text()
