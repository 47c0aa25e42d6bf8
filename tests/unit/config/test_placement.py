"""Tests of the GPUs of instances, and of the device that serves a model."""

from __future__ import annotations

import contextlib
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from google.protobuf import text_format
from tritonclient.grpc.model_config_pb2 import ModelConfig

from optimizer.config import gpu_placement, model_config
from optimizer.config.gpu_placement import missing_gpu, parse, used_gpus
from optimizer.config.model_source import ModelSource
from optimizer.config.problem import Problem
from optimizer.config.search_space import SearchSpace
from optimizer.core.candidate import CPU_ACCELERATOR, INSTANCE_GPUS, Candidate
from optimizer.core.errors import BadInputError, ParameterError
from optimizer.machine import hardware
from optimizer.machine.hardware import Hardware
from optimizer.model.instances import DeviceAssignment, has_gpu_choice
from optimizer.model.profile import parse_profile
from optimizer.options.run_options import RunOptions
from optimizer.results.configuration_text import configuration, triton_lines
from optimizer.simulator.fitted_parameters import execution_settings, relative_duration
from optimizer.simulator.scenario import ClosedLoopLoad
from optimizer.study.task import check_settings, prepare_task
from tests.simulation import linear_times, simulate

TWO_GPUS = Hardware(gpus=("A", "A"), cpu="a CPU", cpu_count=2, memory_bytes=8 << 30)


def config(backend: str, *groups: str) -> ModelConfig:
    text = f'name: "m" max_batch_size: 8 backend: "{backend}"'
    return text_format.Parse(text + "".join(f" instance_group {{ {group} }}" for group in groups), ModelConfig())


def placed(gpus: str, count: int = 2) -> Candidate:
    return Candidate(8, instance_count=count, fields=((INSTANCE_GPUS, gpus),))


# -- in config.pbtxt --------------------------------------------------------------------------------------------


def test_a_placement_is_written_and_read_back() -> None:
    applied = model_config.apply(placed("0,1"), config("onnxruntime", 'name: "a" kind: KIND_CPU profile: "p"'))
    (group,) = applied.instance_group
    assert (list(group.gpus), group.count, group.kind, group.name) == ([0, 1], 2, group.KIND_GPU, "a")
    assert list(group.profile) == ["p"]
    assert model_config.candidate_of(applied, [INSTANCE_GPUS]) == placed("0,1")
    assert model_config.differences(placed("0,1"), applied) == []
    assert model_config.differences(placed("1"), applied) == ["instance_group_gpus is 0,1, wanted 1"]
    assert placed("0,1").instances == 4
    assert placed("1").instances == 2


def test_groups_of_a_gpu_each_become_one() -> None:
    base = config("onnxruntime", "count: 1 gpus: 0", "count: 1 gpus: 1", "count: 1 passive: true")
    assert gpu_placement.get_gpus(base) is None
    assert INSTANCE_GPUS not in dict(model_config.candidate_of(base, [INSTANCE_GPUS]).fields)
    applied = model_config.apply(placed("0,1"), base)
    assert [(list(group.gpus), group.passive) for group in applied.instance_group] == [([0, 1], False), ([], True)]


def test_a_model_without_groups_is_placed() -> None:
    applied = model_config.apply(placed("1", count=1), config("python"))
    assert text_format.MessageToString(applied.instance_group[0], as_one_line=True).strip() == (
        "count: 1 gpus: 1 kind: KIND_GPU"
    )


@pytest.mark.parametrize(
    ("groups", "gpus"),
    [
        ([], ()),  # no model with instances
        (["kind: KIND_CPU"], ()),
        (["kind: KIND_GPU"], None),
        (["gpus: 1"], (1,)),
        (["kind: KIND_GPU gpus: [ 2, 0 ]", "kind: KIND_CPU"], (0, 2)),
        (["kind: KIND_GPU gpus: 0", "count: 1"], None),
    ],
)
def test_the_gpus_of_instances_are_those_of_their_groups(groups: list[str], gpus: tuple[int, ...] | None) -> None:
    assert used_gpus([config("onnxruntime", *groups)]) == gpus


def test_a_placement_is_shown_in_the_words_of_config_pbtxt() -> None:
    assert "instance_group [ { count: 2 kind: KIND_GPU gpus: [ 0, 1 ] } ]" in triton_lines(placed("0,1"))
    assert configuration(placed("0,1")) == "batch 8 · 2 instances on GPU 0, 1 · no dynamic batching"


# -- as choices -------------------------------------------------------------------------------------------------


def test_choices_of_gpus_are_sets() -> None:
    space = SearchSpace((8,), instance_count=(1, 2), fields={INSTANCE_GPUS: ("0", "1+0", "0,1")})
    assert space.fields == {INSTANCE_GPUS: ("0", "0,1")}
    assert len(space.candidates()) == len(space) == 4
    with pytest.raises(ValueError, match=r"^instance_group_gpus: 'x': write numbers of GPUs"):
        SearchSpace((8,), fields={INSTANCE_GPUS: ("x",)})
    assert parse("3+1") == (1, 3)


def test_a_profile_lists_choices_of_gpus(tmp_path: Path) -> None:
    profile = parse_profile(profile_text("instance_group_gpus: [[0], [1], [0, 1]]"), tmp_path / "p.yaml")
    assert profile.space is not None
    assert profile.space.fields() == {INSTANCE_GPUS: ("0", "1", "0,1")}
    with pytest.raises(BadInputError, match=r"p.yaml:2: space.instance_group_gpus.*: write numbers"):
        parse_profile(profile_text("instance_group_gpus: [[-1]]"), tmp_path / "p.yaml")


def profile_text(space: str) -> bytes:
    return f"model: {{builder: mlp}}\nspace: {{{space}}}\n".encode()


@pytest.mark.parametrize(
    ("space", "gpus", "problem"),
    [
        (
            "instance_group_gpus: [[0], [0, 2]]",
            2,
            "instance_group_gpus: GPU 2 is not there: there are 2, from 0 to 1",
        ),
        ("instance_group_gpus: [[1]]", 1, "instance_group_gpus: GPU 1 is not there: there is one, GPU 0"),
        ("instance_group_gpus: [[0]]", 0, "instance_group_gpus: GPU 0 is not there: there is none"),
        (
            "config: {instance_group.0.gpus.0: [0, 3]}",
            2,
            "config.instance_group.0.gpus.0: GPU 3 is not there: there are 2, from 0 to 1",
        ),
    ],
)
def test_a_gpu_that_the_machine_lacks_is_refused(space: str, gpus: int, problem: str, tmp_path: Path) -> None:
    (tmp_path / "p.yaml").write_bytes(profile_text(space))
    with pytest.raises(BadInputError) as caught:
        prepare_task(RunOptions(str(tmp_path / "p.yaml")), replace(TWO_GPUS, gpus=("A",) * gpus), print)
    assert str(caught.value) == f"{tmp_path}/p.yaml:2: space.{problem}"


def test_other_settings_name_no_gpu() -> None:
    assert missing_gpu("instance_group.0.kind", "KIND_GPU", 0) == ""


def test_the_simulation_knows_how_many_instances_there_are() -> None:
    """Two GPUs with one instance each are simulated as two instances that do not slow each other."""
    apart, together = execution_settings(placed("0,1", count=1)), execution_settings(placed("0", count=2))
    assert apart[0] == together[0] == 2
    problem = Problem("m", SearchSpace((8,)), 1, 8, ())
    assert relative_duration(apart, 2, problem) == 1
    assert relative_duration(together, 2, problem) > 1
    service_times = linear_times(0.010, 0.0, 8, instances=2)
    on_one_gpu, on_two_gpus = (
        simulate(placed(gpus, count=1), ClosedLoopLoad(4), service_times) for gpus in ("0", "0,1")
    )
    assert on_two_gpus.throughput_infer_per_sec == pytest.approx(2 * on_one_gpu.throughput_infer_per_sec, rel=0.05)


# -- the serving device -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("backend", "group", "is_embedded_on_gpu", "is_native_on_gpu"),
    [
        ("onnxruntime", "count: 1", hardware.onnxruntime_on_gpu(), True),
        ("onnxruntime", "kind: KIND_GPU", True, True),
        ("onnxruntime", "kind: KIND_CPU", False, False),
        ("pytorch", "count: 1", hardware.torch_on_gpu(), True),
        ("python", "count: 1", False, True),
        ("python", "kind: KIND_GPU", True, True),
    ],
)
def test_the_backend_and_the_kind_of_the_group_decide_the_device(
    backend: str, group: str, is_embedded_on_gpu: bool, is_native_on_gpu: bool
) -> None:
    base = config(backend, group)
    assert DeviceAssignment(1).on_gpu(base) is is_embedded_on_gpu
    assert DeviceAssignment(1, is_embedded=False).on_gpu(base) is is_native_on_gpu
    assert not DeviceAssignment(0, is_embedded=False).on_gpu(base)


@pytest.mark.parametrize(("kind", "is_allowed"), [("KIND_CPU", True), ("KIND_GPU", False)])
def test_an_accelerator_needs_the_device_of_the_tuned_model(kind: str, is_allowed: bool) -> None:
    """Another model of the run is on a GPU."""
    source = ModelSource(Path("models"), "m", config("onnxruntime", f"kind: {kind}"))
    fields = {f"{CPU_ACCELERATOR}.name": ("none", "openvino"), "other/instance_group.0.kind": ("KIND_GPU",)}
    with (
        contextlib.nullcontext()
        if is_allowed
        else pytest.raises(ParameterError, match="openvino computes on the CPU")
    ):
        check_settings(fields, source, RunOptions("m"), on_gpu=True)


@pytest.mark.parametrize(
    ("version", "with_cuda"),
    [
        ("__version__ = '2.13.0+cu130'\ncuda: Optional[str] = '13.0'\n", True),
        ("__version__ = '2.13.0+cpu'\ncuda: Optional[str] = None\n", False),
        ("cuda = '12.6'\nhip: Optional[str] = None\n", True),
        ("cuda = ", False),
        (None, False),
    ],
)
def test_cuda_of_torch_is_detected_without_importing_torch(
    version: str | None, with_cuda: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = tmp_path / "torch"
    package.mkdir()
    (package / "__init__.py").write_text("raise ImportError('imported')")
    if version is not None:
        (package / "version.py").write_text(version)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "torch", raising=False)
    assert hardware.torch_on_gpu() is with_cuda


def test_a_choice_of_gpus_or_of_their_kind_can_ask_for_a_gpu() -> None:
    assert has_gpu_choice({INSTANCE_GPUS: ("0",)})
    assert has_gpu_choice({"instance_group.0.kind": ("KIND_CPU", "KIND_GPU")})
    assert not has_gpu_choice({"instance_group.0.kind": ("KIND_CPU",)})


def test_the_note_says_why_the_model_is_served_on_the_cpu() -> None:
    embedded = DeviceAssignment(2)
    assert "onnxruntime-gpu" in str(embedded.explain_cpu_serving(config("onnxruntime")))
    assert "onnxruntime-gpu" in str(embedded.explain_cpu_serving(config("onnxruntime", "kind: KIND_CPU")))
    assert "torch has no CUDA" in str(embedded.explain_cpu_serving(config("pytorch")))
    assert "KIND_GPU" in str(embedded.explain_cpu_serving(config("python")))
    assert "asks for the CPU" in str(embedded.explain_cpu_serving(config("python", "kind: KIND_CPU")))


@pytest.mark.parametrize("backend", ["onnxruntime", "pytorch", "tensorrt"])
def test_the_note_on_a_native_backend_names_its_config(backend: str) -> None:
    """The packages that are installed next to tune do not matter for a native backend."""
    cpu_model = config(backend, "kind: KIND_CPU", "kind: KIND_GPU passive: true")
    native = DeviceAssignment(2, is_embedded=False)
    assert not native.on_gpu(cpu_model)
    assert "asks for the CPU" in str(native.explain_cpu_serving(cpu_model))


@pytest.mark.parametrize(("gpus", "metric"), [((), "memory"), (("A",), "gpu-memory")])
def test_memory_is_that_of_the_device(gpus: tuple[str, ...], metric: str, tmp_path: Path) -> None:
    """The constraint and the objective of a profile that requires a GPU use only GPU memory."""
    fields = "{instance_group.0.kind: [KIND_CPU, KIND_GPU]}"
    (tmp_path / "p.yaml").write_bytes(profile_text(f"max_batch_size: [8], config: {fields}"))
    options = RunOptions(str(tmp_path / "p.yaml"), objectives=("throughput", "memory"), max_memory_bytes=4 << 30)
    task = prepare_task(options, replace(TWO_GPUS, gpus=gpus), print)
    assert [rule.name for rule in task.problem.objectives] == ["throughput", metric]
    assert [rule.metric for rule in task.problem.sla] == [metric]
    assert task.on_gpu == bool(gpus)
    assert (task.problem.cpu_count is None) == bool(gpus)
