"""On which GPUs instances run, and on which device a model is served at all."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from google.protobuf import text_format
from tritonclient.grpc.model_config_pb2 import ModelConfig

from optimizer import model_config, placement
from optimizer.batcher.simulator import ClosedLoop, ServiceTimes, simulate
from optimizer.errors import BadInputError
from optimizer.machine import hardware
from optimizer.machine.hardware import Hardware
from optimizer.options import RunOptions
from optimizer.placement import absent, named, parse
from optimizer.problem import Problem
from optimizer.profile.reader import parse_profile
from optimizer.report import words
from optimizer.search.service import demand, group_of
from optimizer.serving import Serving, asks_for_gpu, note
from optimizer.space import Space
from optimizer.task import prepare
from optimizer.trial import INSTANCE_GPUS, Candidate

TWO_GPUS = Hardware(gpus=("A", "A"), cpu="a CPU", cpu_count=2, memory_bytes=8 << 30)


def config(backend: str, *groups: str) -> ModelConfig:
    text = f'name: "m" max_batch_size: 8 backend: "{backend}"'
    return text_format.Parse(text + "".join(f" instance_group {{ {group} }}" for group in groups), ModelConfig())


def placed(gpus: str, count: int = 2) -> Candidate:
    return Candidate(8, instance_count=count, fields=((INSTANCE_GPUS, gpus),))


# -- in config.pbtxt --------------------------------------------------------------------------------------------


def test_a_placement_is_written_and_read_back() -> None:
    found = model_config.apply(placed("0,1"), config("onnxruntime", 'name: "a" kind: KIND_CPU profile: "p"'))
    (group,) = found.instance_group
    assert (list(group.gpus), group.count, group.kind, group.name) == ([0, 1], 2, group.KIND_GPU, "a")
    assert list(group.profile) == ["p"]
    assert model_config.candidate_of(found, [INSTANCE_GPUS]) == placed("0,1")
    assert model_config.differences(placed("0,1"), found) == []
    assert model_config.differences(placed("1"), found) == ["instance_group_gpus is 0,1, wanted 1"]
    assert placed("0,1").instances == 4
    assert placed("1").instances == 2


def test_groups_of_a_gpu_each_become_one() -> None:
    given = config("onnxruntime", "count: 1 gpus: 0", "count: 1 gpus: 1", "count: 1 passive: true")
    assert placement.get(given) is None
    assert INSTANCE_GPUS not in dict(model_config.candidate_of(given, [INSTANCE_GPUS]).fields)
    found = model_config.apply(placed("0,1"), given)
    assert [(list(group.gpus), group.passive) for group in found.instance_group] == [([0, 1], False), ([], True)]


def test_a_model_without_groups_is_placed() -> None:
    found = model_config.apply(placed("1", count=1), config("python"))
    assert text_format.MessageToString(found.instance_group[0], as_one_line=True).strip() == (
        "count: 1 gpus: 1 kind: KIND_GPU"
    )


@pytest.mark.parametrize(
    ("groups", "gpus"),
    [
        ([], ()),  # none that could have instances
        (["kind: KIND_CPU"], ()),
        (["kind: KIND_GPU"], None),
        (["gpus: 1"], (1,)),
        (["kind: KIND_GPU gpus: [ 2, 0 ]", "kind: KIND_CPU"], (0, 2)),
        (["kind: KIND_GPU gpus: 0", "count: 1"], None),
    ],
)
def test_where_instances_may_be(groups: list[str], gpus: tuple[int, ...] | None) -> None:
    assert named([config("onnxruntime", *groups)]) == gpus


def test_it_is_shown_as_config_pbtxt_words_it() -> None:
    assert "instance_group [ { count: 2 kind: KIND_GPU gpus: [ 0, 1 ] } ]" in words.triton_lines(placed("0,1"))
    assert words.configuration(placed("0,1")) == "batch 8 · 2 instances on GPU 0, 1 · no dynamic batching"


# -- as choices -------------------------------------------------------------------------------------------------


def test_choices_are_sets_of_gpus() -> None:
    space = Space((8,), instance_count=(1, 2), fields={INSTANCE_GPUS: ("0", "1+0", "0,1")})
    assert space.fields == {INSTANCE_GPUS: ("0", "0,1")}
    assert len(space.candidates()) == len(space) == 4
    with pytest.raises(ValueError, match=r"^instance_group_gpus: 'x': write numbers of GPUs"):
        Space((8,), fields={INSTANCE_GPUS: ("x",)})
    assert parse("3+1") == (1, 3)


def test_a_profile_lists_them(tmp_path: Path) -> None:
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
def test_a_gpu_that_is_not_there(space: str, gpus: int, problem: str, tmp_path: Path) -> None:
    (tmp_path / "p.yaml").write_bytes(profile_text(space))
    with pytest.raises(BadInputError) as caught:
        prepare(RunOptions(str(tmp_path / "p.yaml")), replace(TWO_GPUS, gpus=("A",) * gpus), print)
    assert str(caught.value) == f"{tmp_path}/p.yaml:2: space.{problem}"


def test_other_settings_name_no_gpu() -> None:
    assert absent("instance_group.0.kind", "KIND_GPU", 0) == ""


def test_the_simulation_knows_how_many_instances_there_are() -> None:
    """Two GPUs with an instance each are as one with two, and none of them slows the other."""
    apart, together = group_of(placed("0,1", count=1)), group_of(placed("0", count=2))
    assert apart[0] == together[0] == 2
    problem = Problem("m", Space((8,)), 1, 8, (), ())
    assert demand(apart[1], 2, problem) == 1
    assert demand(together[1], 2, problem) > 1
    served = ServiceTimes.linear(0.010, 0.0, 8, instances=2)
    one, two = (simulate(placed(gpus, count=1), ClosedLoop(4), served) for gpus in ("0", "0,1"))
    assert two.throughput_infer_per_s == pytest.approx(2 * one.throughput_infer_per_s, rel=0.05)


# -- which device serves ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("backend", "group", "embedded", "native"),
    [
        ("onnxruntime", "count: 1", hardware.onnxruntime_on_gpu(), True),
        ("onnxruntime", "kind: KIND_GPU", True, True),
        ("onnxruntime", "kind: KIND_CPU", False, False),
        ("pytorch", "count: 1", hardware.torch_on_gpu(), True),
        ("python", "count: 1", False, True),
        ("python", "kind: KIND_GPU", True, True),
    ],
)
def test_the_backend_and_the_kind_decide(backend: str, group: str, embedded: bool, native: bool) -> None:
    given = config(backend, group)
    assert Serving(1).on_gpu(given) is embedded
    assert Serving(1, native=True).on_gpu(given) is native
    assert not Serving(0, native=True).on_gpu(given)


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
def test_torch_is_asked_without_importing_it(
    version: str | None, with_cuda: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = tmp_path / "torch"
    package.mkdir()
    (package / "__init__.py").write_text("raise ImportError('imported')")
    if version is not None:
        (package / "version.py").write_text(version)
    monkeypatch.syspath_prepend(tmp_path)
    assert hardware.torch_on_gpu() is with_cuda


def test_what_is_searched_can_ask_for_a_gpu() -> None:
    assert asks_for_gpu({INSTANCE_GPUS: ("0",)})
    assert asks_for_gpu({"instance_group.0.kind": ("KIND_CPU", "KIND_GPU")})
    assert not asks_for_gpu({"instance_group.0.kind": ("KIND_CPU",)})


def test_notes_say_what_is_lacking() -> None:
    assert "onnxruntime-gpu" in note(config("onnxruntime"))
    assert "torch has no CUDA" in note(config("pytorch"))
    assert "KIND_GPU" in note(config("python"))
    assert "asks for the CPU" in note(config("python", "kind: KIND_CPU"))


@pytest.mark.parametrize(("gpus", "metric"), [((), "memory"), (("A",), "gpu-memory")])
def test_memory_is_that_of_the_device(gpus: tuple[str, ...], metric: str, tmp_path: Path) -> None:
    """A profile that asks for a GPU: the constraint and the objective are about its memory, and nothing else's."""
    asked = "{instance_group.0.kind: [KIND_CPU, KIND_GPU]}"
    (tmp_path / "p.yaml").write_bytes(profile_text(f"max_batch_size: [8], config: {asked}"))
    options = RunOptions(str(tmp_path / "p.yaml"), objectives=("throughput", "memory"), max_memory_bytes=4 << 30)
    what = prepare(options, replace(TWO_GPUS, gpus=gpus), print)
    assert [one.name for one in what.problem.objectives] == ["throughput", metric]
    assert [one.metric for one in what.problem.constraints] == [metric]
    assert what.on_gpu == bool(gpus)
    assert (what.problem.cpu_count is None) == bool(gpus)
