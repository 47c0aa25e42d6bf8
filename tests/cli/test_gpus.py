"""GPUs in the output of commands, with a fake of NVIDIA's library."""

from __future__ import annotations

from tests.bad_input import CONFIG, assert_says, without_server
from tests.command_fixtures import Env, Sandbox, Tune
from tests.nvml_fixtures import A100, StandIn, nvml, nvml_library
from tests.repositories import doubler, write_model

__all__ = ["nvml", "nvml_library"]


def environment(nvml: StandIn, sandbox: Sandbox) -> Env:
    stand_in_variables = {name: nvml.environment()[name] for name in ("LD_LIBRARY_PATH", "STAND_IN_NVML")}
    return {**without_server(sandbox), **stand_in_variables, "CUDA_VISIBLE_DEVICES": "0,1"}


def test_a_driver_mismatch_ends_the_command_unless_gpus_are_hidden(
    nvml: StandIn, tune: Tune, sandbox: Sandbox
) -> None:
    """If the GPUs are hidden, the command fails later, because the server cannot be downloaded here."""
    nvml.set_answers(init="error 18")
    write_model(sandbox.working_folder / "models", "m", CONFIG, doubler())
    env = environment(nvml, sandbox)
    ended = tune("--sla-p95", "20ms", "models/m", env=env)
    assert_says(ended, ("NVML: RM has detected an NVML/RM version mismatch; the driver was ", "reboot"), code=3)
    assert ended.stderr_lines[0].endswith("; to continue without GPUs: CUDA_VISIBLE_DEVICES= tune …")
    ended = tune("--sla-p95", "20ms", "models/m", env={**env, "CUDA_VISIBLE_DEVICES": ""})
    assert_says(ended, ("pip could not fetch the server: ",), code=3)


def test_the_energy_objective_names_the_fix_of_a_driver_fault(nvml: StandIn, tune: Tune, sandbox: Sandbox) -> None:
    nvml.set_answers(init="error 18")
    ended = tune("--objective", "energy", "dlrm", env=environment(nvml, sandbox))
    assert_says(ended, ("--objective energy: no power can be read: NVML: ", "mismatch; ", "reboot"), code=3)


def test_the_energy_objective_needs_a_backend_that_runs_on_the_gpu(
    nvml: StandIn, tune: Tune, sandbox: Sandbox
) -> None:
    """The machine has a GPU, but the onnxruntime of the tests is the CPU build."""
    nvml.set_answers(A100)
    write_model(sandbox.working_folder / "models", "m", CONFIG, doubler())
    ended = tune("--objective", "energy", "models/m", env=environment(nvml, sandbox))
    assert_says(ended, ("--objective energy: ", "this model is served on the CPU"), code=3)
