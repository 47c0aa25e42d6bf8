"""Two models that share the machine, tuned together by the whole command."""

from __future__ import annotations

import csv
import json

import pytest

from optimizer import model_config
from tests.command_fixtures import Playground, run_tune
from tests.repositories import sleeper_program, write_python_model, write_sleeper

pytestmark = pytest.mark.alone

SLA_MS = 200.0
PROFILE = """\
model: {repository: models, name: sleeper, concurrent_models: [other]}
load: {max_concurrency: 4}
space:
  max_batch_size: [8]
  max_queue_delay_microseconds: [off, 0]
  instance_group_count: [1]
  models: {other: {max_queue_delay_microseconds: [off, 0]}}
"""


def test_both_get_load_and_a_configuration(playground: Playground) -> None:
    write_sleeper(playground.here / "models", milliseconds=8)
    write_python_model(playground.here / "models", "other", sleeper_program(16))
    (playground.here / "both.yaml").write_text(PROFILE)
    arguments = ["--sla-p95", f"{SLA_MS:g}ms", "--budget", "24s", "--max-trials", "3", "--json", "both.yaml"]
    ended = run_tune(playground, *arguments)
    assert (ended.code, ended.stderr) == (0, "")
    document = json.loads(ended.stdout)
    folder = playground.here / document["results_dir"]
    with (folder / "trials.csv").open(newline="") as file:
        alone = [row for row in csv.DictReader(file) if row["trial"] == "0" and row["concurrency"] == "4"]
    for row in alone:  # one request after another: 125 a second of the one, 62 of the other
        assert 140 < float(row["throughput_infer_per_sec"]) < 190
        assert float(row["latency_p95_ms"]) > 60, "the slower one's"
    assert document["recommended"]["throughput_infer_per_sec"] > 200, "in batches"
    served = [model_config.read(folder / "best" / name / "config.pbtxt") for name in ("sleeper", "other")]
    assert [config.name for config in served] == ["sleeper", "other"]
    assert any(config.HasField("dynamic_batching") for config in served)
    for name in ("perf_analyzer.log", "other/perf_analyzer.log"):
        assert (folder / "logs" / name).exists()
