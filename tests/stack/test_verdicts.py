"""Verdicts on real servers: far inside the bound, and on a machine that becomes slower after the search."""

from __future__ import annotations

import pytest

from optimizer.deploy import runtime
from tests.command_fixtures import UNDECIDED, Run, Sandbox, run_tune
from tests.repositories import write_python_model, write_steady

SLA_MS = 1000.0
SLOW_SLA_MS, SLOWDOWN, MOST_IN_FLIGHT = 80.0, 1.4, 48
# Executions take SLOWDOWN times as long once the file exists, as on a machine that became slower. A batch of all
# requests in flight is the fastest, so throughput rises with the load up to the bound.
SLOWING_PROGRAM = f"""\
import time
from pathlib import Path

import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def execute(self, requests):
        inputs = [pb_utils.get_input_tensor_by_name(request, "x") for request in requests]
        seconds = 0.02 + 0.001 * sum(len(x.as_numpy()) for x in inputs)
        time.sleep(seconds * ({SLOWDOWN} if Path("SLOW_FILE").exists() else 1))
        return [pb_utils.InferenceResponse([pb_utils.Tensor("y", x.as_numpy())]) for x in inputs]
"""
SLOWING_PROFILE = f"""\
model: {{repository: models, name: slowing}}
load: {{max_concurrency: {MOST_IN_FLIGHT}}}
request: {{batch_size: 1}}
space:
  max_batch_size: [{MOST_IN_FLIGHT}]
  max_queue_delay_microseconds: [0]
  instance_group_count: [1]
"""


@pytest.mark.alone  # other tests would disturb most windows
def test_a_model_far_inside_the_bound_passes(sandbox: Sandbox) -> None:
    write_steady(sandbox.working_folder)
    arguments = ["--sla-p95", f"{SLA_MS:.0f}ms", "--budget", "90s", "--max-trials", "1"]
    run = Run(sandbox, run_tune(sandbox, *arguments, "--json", "steady.yaml"))
    if "the machine was disturbed" in (run.document["undecided_cause"] or ""):
        pytest.skip("other processes disturbed the windows, whatever the latency")
    assert (run.document["verdict"], run.document["undecided_cause"]) == ("PASS", None), run.document["confirmation"]
    assert (run.ended.code, run.ended.stderr) == (0, "")


@pytest.mark.alone
@pytest.mark.long  # two minutes, and a disturbed machine may leave the verdict open
@pytest.mark.skipif(runtime.running_python() not in runtime.NUMPY_WHEELS, reason="no models in Python here")
def test_on_a_machine_that_became_slower_a_lower_load_passes(sandbox: Sandbox) -> None:
    slow = sandbox.root / "slow"
    write_python_model(sandbox.working_folder / "models", "slowing", SLOWING_PROGRAM.replace("SLOW_FILE", str(slow)))
    (sandbox.working_folder / "slowing.yaml").write_text(SLOWING_PROFILE)
    arguments = ["--sla-p95", f"{SLOW_SLA_MS:.0f}ms", "--budget", "60s", "--max-trials", "2", "--no-confirmation"]
    searched = Run(sandbox, run_tune(sandbox, *arguments, "--json", "slowing.yaml"))
    assert searched.ended.code == UNDECIDED, searched.ended
    slow.touch()
    verified = run_tune(sandbox, "verify", "--budget", "2m", searched.folder, "--json")
    assert (verified.code, verified.errors) == (0, []), verified
    before, after = searched.document["recommended"], Run(sandbox, verified).document["recommended"]
    assert after["latency_p95_ms"] <= SLOW_SLA_MS
    assert after["concurrency"] < before["concurrency"]
    assert after["throughput_infer_per_sec"] < before["throughput_infer_per_sec"] / SLOWDOWN**0.5
