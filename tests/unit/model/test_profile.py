"""Profiles as read for machines with and without a GPU."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from optimizer.config.search_space import SearchSpace
from optimizer.core.errors import BadInputError
from optimizer.core.yaml_lines import parse
from optimizer.model.profile import load_profile
from optimizer.model.profile_lookup import find_profile
from optimizer.model.profile_schema import BuiltModel, SpaceSection, StoredModel
from tests.profile_file import MODEL, load

CONFIGS = Path(__file__).parents[3] / "configs"


@pytest.mark.usefixtures("folder")
def test_profile_with_every_key() -> None:
    profile = load("""
description: mine
model: {repository: ./models, name: mine}
sla: {avg: 500us, p50: 0.01s, p95: 20ms}
request: {batch_size: 2, input_data: data.json, shapes: {input.1: [1, 32], 308: [7]}}
load: {max_concurrency: 8}
space:
  max_batch_size: [4, 8]
  max_queue_delay_microseconds: [off, 0, 200]
  preferred_batch_size: [none, max/2, 4, [4, max], "max/2,max"]
  instance_group_count: [1, 2]
  config:
    parameters.threads.string_value: ["1", "2"]
    optimization.graph.level: [-1, 0x1]
""")
    assert isinstance(profile.model, StoredModel)
    assert profile.model.repository == Path("models").resolve()
    assert profile.model.name == "mine"
    assert (profile.name, profile.description, profile.path) == ("p", "mine", Path("p.yaml"))
    assert profile.sla.latency_bounds_ms() == {"avg": 0.5, "p50": 10, "p95": 20}
    assert profile.request.batch_size == 2
    assert profile.request.input_data == Path("data.json").resolve()
    assert profile.request.shapes == {"input.1": "1,32", "308": "7"}
    assert profile.load.max_concurrency == 8
    assert profile.space == SpaceSection(
        max_batch_size=(4, 8), max_queue_delay_microseconds=("off", 0, 200),
        preferred_batch_size=("none", "max/2", "4", "4,max", "max/2,max"), instance_group_count=(1, 2),
        config={"parameters.threads.string_value": ("1", "2"), "optimization.graph.level": (-1, 1)},
    )  # fmt: skip


@pytest.mark.usefixtures("folder")
def test_only_the_model_is_needed() -> None:
    profile = load(MODEL)
    empty = load(MODEL + "sla:\nrequest:\nload:\nspace:\ngpu:\n")
    assert empty.model_dump() == profile.model_dump()
    assert profile.model == BuiltModel(builder="mlp")
    assert profile.sla.latency_bounds_ms() == {}
    assert profile.request.batch_size == 1
    assert profile.request.input_data is None
    assert profile.space is None


@pytest.mark.parametrize("word", ["off", "Off", "OFF", "'off'", "false"])
@pytest.mark.usefixtures("folder")
def test_off_in_every_yaml_spelling(word: str) -> None:
    space = load(MODEL + f"space: {{max_queue_delay_microseconds: [{word}, 0]}}").space
    assert space
    assert space.max_queue_delay_microseconds == ("off", 0)


@pytest.mark.parametrize(
    ("text", "value"),
    [("yes", "yes"), ("on", "on"), ("1:30", "1:30"), ("1:30.5", "1:30.5"), ("2024-01-01", "2024-01-01"),
     ("010", 10), ("1_000", 1000), ("-0x1F", -31), ("1.5", 1.5), ("True", True), ("~", None), ("'1'", "1")],
)  # fmt: skip
def test_words_that_yaml_1_1_misreads_stay_as_written(text: str, value: object) -> None:
    read = parse(f"key: {text}".encode(), "p.yaml", hint="").plain()
    assert read == {"key": value}
    assert isinstance(read, dict)
    assert type(read["key"]) is type(value)


@pytest.mark.usefixtures("folder")
def test_on_a_gpu_its_keys_replace_those_above() -> None:
    profile = load("""
model: {builder: mlp, settings: {layers: 1, seed: 7}}
request: {batch_size: 4, input_data: zero}
space: {max_batch_size: [4, 8], config: {optimization.graph.level: [1]}}
gpu:
  model: {settings: {layers: 3}}
  sla: {p95: 5ms}
  request: {batch_size: 16}
  space: {max_batch_size: [16], config: {}}
""")
    gpu = profile.for_hardware(gpu=True)
    assert profile.for_hardware(gpu=False) == profile == gpu.for_hardware(gpu=False)
    assert gpu.for_hardware(gpu=True) == gpu
    assert gpu.model == BuiltModel(builder="mlp", settings={"layers": 3})
    assert gpu.sla.latency_bounds_ms() == {"p95": 5}
    assert (gpu.request.batch_size, gpu.request.input_data) == (16, "zero")
    assert gpu.space == SpaceSection(max_batch_size=(16,))
    assert str(gpu.fault("request", "batch_size", problem="x")) == "p.yaml:8: gpu.request.batch_size: x"
    assert str(gpu.fault("request", "input_data", problem="x")) == "p.yaml:3: request.input_data: x"


@pytest.mark.usefixtures("folder")
def test_a_later_check_can_point_at_any_place() -> None:
    profile = load(MODEL + "space:\n  max_batch_size:\n  - 4\n  - 8\n")
    at_item = profile.fault("space", "max_batch_size", 1, problem="x")
    assert str(at_item) == "p.yaml:5: space.max_batch_size: x"
    assert str(profile.fault("space", "config", "a.b", problem="x")) == "p.yaml:2: space.config.a.b: x"
    assert str(profile.fault("load", problem="x")) == "p.yaml:1: load: x"


@pytest.mark.usefixtures("folder")
@pytest.mark.parametrize(
    ("choices", "line"),
    [
        ({"request_batch_size": 9}, "p.yaml:2: space: no valid configuration: max_batch_size 4, 8, "),
        ({"instance_count": (0,)}, "p.yaml:6: space.instance_group_count: 0 is not a whole number"),
        ({"fields": {"name": (None,)}}, "p.yaml:8: space.config.name: None is not a text"),
    ],
)
def test_invalid_space_is_reported_at_its_line(choices: dict[str, Any], line: str) -> None:
    values = "space:\n  max_batch_size:\n  - 4\n  - 8\n  instance_group_count: [1]\n  config:\n    name: [x]\n"
    profile = load(MODEL + values)
    with pytest.raises(ValueError, match=r".") as caught:
        replace(SearchSpace((4, 8)), **choices)
    assert str(profile.space_fault(caught.value)).startswith(line)


@pytest.mark.parametrize("path", sorted(CONFIGS.glob("*.yaml")), ids=lambda path: path.stem)
@pytest.mark.parametrize("gpu", [False, True])
def test_the_shipped_profiles_are_good(path: Path, gpu: bool) -> None:
    profile = load_profile(path).for_hardware(gpu=gpu)
    assert isinstance(profile.model, BuiltModel)
    assert find_profile(profile.name).resolve() == path
    assert profile.description
    assert list(profile.sla.latency_bounds_ms()) == (["ttft-p95", "itl-p95"] if path.stem == "tinygpt" else ["p95"])
    assert profile.space
    assert profile.space.max_batch_size
    batching: dict[str, Any] = {
        "max_queue_delay_us": profile.space.max_queue_delay_microseconds or (),
        "preferred_batch_sizes": profile.space.preferred_batch_size or (),
    }
    is_stateful = profile.request.sequence_length is not None  # those two are fields of the sequence batcher then
    space = SearchSpace(
        max_batch_size=profile.space.max_batch_size,
        **({} if is_stateful else batching),
        instance_count=profile.space.instance_group_count or (),
        fields=profile.space.fields(),
        request_batch_size=int(profile.request.batch_size),
    )
    assert 6 <= len(space) <= 2000, "some, and no more than are ranked in moments"


@pytest.mark.usefixtures("folder")
def test_settings_of_onnx_runtime_have_names() -> None:
    values = "model: {builder: mlp}\nspace:\n  onnxruntime: {intra_op_thread_count: [1, 2], graph_level: [0, 2]}\n"
    space = load(values).space
    assert space is not None
    assert space.fields() == {
        "parameters.intra_op_thread_count.string_value": ("1", "2"),
        "optimization.graph.level": (0, 2),
    }
    for wrong, messages in (
        ("graph_level: [3]", "graph_level: 3 is not -1, 0, 1 or 2"),
        ("threads: [1]", "threads: .*intra_op_thread_count"),
    ):
        with pytest.raises(BadInputError, match=rf":2: space.onnxruntime.{messages}"):
            load(f"model: {{builder: mlp}}\nspace: {{onnxruntime: {{{wrong}}}}}\n")
