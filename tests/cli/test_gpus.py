"""What a user is told of GPUs: a stand-in for NVIDIA's library is what NVML finds."""

from __future__ import annotations

from tests.cli.test_bad_input import CONFIG, assert_says, without_server
from tests.command_fixtures import Env, Playground, Tune
from tests.nvml_fixtures import A100, StandIn, nvml, nvml_library
from tests.repositories import doubler, write_model

__all__ = ["nvml", "nvml_library"]


DETECT = """
import json
from optimizer.options import RunOptions
from optimizer.stack import Stack
from optimizer.stopwatch import Stopwatch
said = []
Stack.detect(RunOptions("m"), Stopwatch(), said.append)
print(json.dumps(said))
"""


def environment(nvml: StandIn, playground: Playground) -> Env:
    own = {name: nvml.environment()[name] for name in ("LD_LIBRARY_PATH", "STAND_IN_NVML")}
    return {**without_server(playground), **own, "CUDA_VISIBLE_DEVICES": "0,1"}


def test_a_driver_mismatch_ends_it_unless_gpus_are_done_without(
    nvml: StandIn, tune: Tune, playground: Playground
) -> None:
    """Without them as far as the server, which cannot be fetched here."""
    nvml.tell(init="error 18")
    write_model(playground.here / "models", "m", CONFIG, doubler())
    env = environment(nvml, playground)
    ended = tune("--sla-p95", "20ms", "models/m", env=env)
    assert_says(ended, ("NVML: RM has detected an NVML/RM version mismatch; the driver was ", "reboot"), code=3)
    assert ended.complaints[0].endswith("; or go on without GPUs: CUDA_VISIBLE_DEVICES= tune …")
    ended = tune("--sla-p95", "20ms", "models/m", env={**env, "CUDA_VISIBLE_DEVICES": ""})
    assert_says(ended, ("pip could not fetch the server: ",), code=3)


def test_energy_is_refused_with_what_mends_the_driver(nvml: StandIn, tune: Tune, playground: Playground) -> None:
    nvml.tell(init="error 18")
    ended = tune("--objective", "energy", "dlrm", env=environment(nvml, playground))
    assert_says(ended, ("--objective energy: no power can be read: NVML: ", "mismatch; ", "reboot"), code=3)


def test_energy_needs_a_backend_that_reaches_the_gpu(nvml: StandIn, tune: Tune, playground: Playground) -> None:
    """There is a GPU, but the tests' onnxruntime is its CPU build."""
    nvml.tell(A100)
    write_model(playground.here / "models", "m", CONFIG, doubler())
    ended = tune("--objective", "energy", "models/m", env=environment(nvml, playground))
    assert_says(ended, ("--objective energy: ", "serves on its CPU"), code=3)
