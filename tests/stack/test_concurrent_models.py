"""Test a run that tunes two models on one machine together."""

from __future__ import annotations

import csv
import json

from optimizer.config import model_config
from tests.command_fixtures import UNDECIDED, Playground, run_tune
from tests.repositories import sleeper_program, write_python_model, write_sleeper

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


def test_both_models_get_load_and_a_configuration(playground: Playground) -> None:
    write_sleeper(playground.working_folder / "models", milliseconds=8)
    write_python_model(playground.working_folder / "models", "other", sleeper_program(16))
    (playground.working_folder / "both.yaml").write_text(PROFILE)
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
    ended = run_tune(playground, *arguments, timeout=270)
    assert (ended.code, ended.stderr) == (UNDECIDED, "")
    document = json.loads(ended.stdout)
    folder = playground.working_folder / document["results_dir"]
    with (folder / "trials.csv").open(newline="") as file:
        alone = [row for row in csv.DictReader(file) if row["trial"] == "0" and row["concurrency"] == str(LOAD)]
    for row in alone:  # one request at a time: at most 125 a second of one model, 62 of the other
        assert 0 < float(row["throughput_infer_per_sec"]) < 190
        assert float(row["latency_p95_ms"]) > 240, "the slower one's"
    one_by_one = max(float(row["throughput_infer_per_sec"]) for row in alone)
    assert document["recommended"]["throughput_infer_per_sec"] > one_by_one, "in batches"
    served = [model_config.read(folder / "best" / name / "config.pbtxt") for name in ("sleeper", "other")]
    assert [config.name for config in served] == ["sleeper", "other"]
    assert any(config.HasField("dynamic_batching") for config in served)
    for name in ("perf_analyzer.log", "other/perf_analyzer.log"):
        assert (folder / "logs" / name).exists()
