"""Test runs and sweeps that put load on two models of one server at the same time."""

from __future__ import annotations

import json

import pytest

from objectives import step_stats
from objectives.model_stats import from_text
from optimizer.config import model_config
from tests.command_fixtures import Sandbox, assert_search_ended, run_tune
from tests.csv_tables import read_rows
from tests.repositories import SLEEPER_CONFIG, sleeper_program, write_python_model, write_sleeper

SLA_MS = 500.0
LOAD = 16  # twice the largest batch: with fewer, batches of four take turns with those of three and one
PROFILE = f"""\
model: {{repository: models, name: sleeper, concurrent_models: [other]}}
load: {{max_concurrency: {LOAD}}}
space:
  max_batch_size: [8]
  max_queue_delay_microseconds: [off, 0]
  instance_group_count: [1]
  models: {{other: {{max_queue_delay_microseconds: [off, 0]}}}}
"""


def test_both_models_get_load_and_a_configuration(sandbox: Sandbox) -> None:
    write_sleeper(sandbox.working_folder / "models", milliseconds=8)
    write_python_model(sandbox.working_folder / "models", "other", sleeper_program(16))
    (sandbox.working_folder / "both.yaml").write_text(PROFILE)
    arguments = [
        "--sla-p95",
        f"{SLA_MS:g}ms",
        "--budget",
        "3m",
        "--max-trials",
        "2",
        "--no-confirmation",
        "--measurement-interval",
        "1s",
        "--json",
        "both.yaml",
    ]
    ended = run_tune(sandbox, *arguments)
    document = json.loads(ended.stdout)
    folder = sandbox.working_folder / document["results_dir"]
    is_found = assert_search_ended(ended, folder)
    rows = read_rows(folder / "trials.csv")
    alone = [row for row in rows if (row["trial"], row["concurrency"]) == ("0", str(LOAD))]
    assert alone
    for row in alone:  # one request at a time: at most 125 a second of one model, 62 of the other
        assert 0 < float(row["throughput_infer_per_sec"]) < 190
        assert float(row["latency_p95_ms"]) > 240, "the slower one's"
    one_by_one, in_batches = (
        max(float(row["throughput_infer_per_sec"] or 0) for row in rows if row["trial"] == trial) for trial in "01"
    )
    assert in_batches > one_by_one, "even the slower model executes up to eight requests at a time"
    for name in ("perf_analyzer.log", "other/perf_analyzer.log"):
        assert (folder / "logs" / name).exists()
    for row in rows:
        if by_model := from_text(row["by_model"]):
            throughputs = [model.throughput_infer_per_sec or 0 for model in by_model.values()]
            assert list(by_model) == ["sleeper", "other"]
            assert sum(throughputs) == pytest.approx(float(row["throughput_infer_per_sec"]))
            assert [step.model for step in step_stats.from_text(row["step_stats"])] == ["sleeper", "other"]
    if not is_found:  # other processes disturbed each load
        return
    served = [model_config.read(folder / "best" / name / "config.pbtxt") for name in ("sleeper", "other")]
    assert [config.name for config in served] == ["sleeper", "other"]
    has_batcher = any(config.HasField("dynamic_batching") for config in served)
    assert has_batcher is (document["recommended"]["trial"] == 1)


@pytest.mark.parametrize(
    "load", [("--concurrency", "1"), ("--request-rate", "40", "--request-distribution", "constant")]
)
def test_the_requests_of_each_model_have_its_share(sandbox: Sandbox, load: tuple[str, ...]) -> None:
    """Each request has an instance of its own, so requests in proportion to those in flight are answered."""
    models = sandbox.working_folder / "models"
    write_sleeper(models, milliseconds=20)
    write_python_model(models, "other", sleeper_program(20), SLEEPER_CONFIG.replace("count: 1", "count: 3"))
    ended = run_tune(
        sandbox,
        *("sweep", "--model-repository", "models", "--concurrent-models", "other=3", *load),
        *("--measurement-interval", "1s", "sleeper"),
    )
    assert "several models get load, in the proportion sleeper 1, other 3" in " ".join(ended.stdout.split())
    (table,) = sandbox.working_folder.glob("results/sleeper/*/trials*.csv")
    (row,) = read_rows(table)
    sleeper, other = from_text(row["by_model"]).values()
    assert sleeper.requests is not None
    assert other.requests is not None
    assert other.requests / sleeper.requests == pytest.approx(3, rel=0.1)
