"""Models of the vLLM and TensorRT-LLM backends: the example profiles, their configurations and their requests."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from optimizer.core.errors import BadInputError
from optimizer.machine.hardware import Hardware
from optimizer.model import input_data
from optimizer.options.run_options import RunOptions
from optimizer.study.model_finder import find_model
from optimizer.study.task import Task, prepare_task

EXAMPLES = Path(__file__).parents[3] / "docs" / "examples"
SERVER = Hardware(gpus=(), cpu="a CPU", cpu_count=8, memory_bytes=8 << 30)
VLLM_CONFIG = 'backend: "vllm"\ninstance_group [{ count: 1 kind: KIND_MODEL }]\n'
TEXT_MODEL = """\
backend: "BACKEND"
max_batch_size: 64
model_transaction_policy { decoupled: true }
input { name: "text_input" data_type: TYPE_STRING dims: 1 }
input { name: "max_tokens" data_type: TYPE_INT32 dims: 1 }
input { name: "stream" data_type: TYPE_BOOL dims: 1 optional: true }
input { name: "end_id" data_type: TYPE_INT32 dims: 1 optional: true }
output { name: "text_output" data_type: TYPE_STRING dims: -1 }
dynamic_batching { }
instance_group { count: 1 kind: KIND_CPU }
parameters { key: "batch_scheduler_policy" value { string_value: "guaranteed_no_evict" } }
"""
ENSEMBLE = """\
platform: "ensemble"
max_batch_size: 64
input { name: "text_input" data_type: TYPE_STRING dims: 1 }
output { name: "text_output" data_type: TYPE_STRING dims: -1 }
ensemble_scheduling { step {
  model_name: "tensorrt_llm" model_version: -1
  input_map { key: "text_input" value: "text_input" } output_map { key: "text_output" value: "text_output" }
} }
"""


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the current folder with the example profiles and their repository."""
    monkeypatch.setenv("TRITUNE_CACHE", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    for example in EXAMPLES.glob("*.yaml"):
        tmp_path.joinpath(example.name).write_text(example.read_text())
    write_llm_model("llm", VLLM_CONFIG, "model.json", json.dumps({"model": "m", "max_num_seqs": 128}))
    for name in ("preprocessing", "postprocessing", "tensorrt_llm_bls"):
        write_llm_model(name, TEXT_MODEL.replace("BACKEND", "python"), "model.py", "")
    write_llm_model("tensorrt_llm", TEXT_MODEL.replace("BACKEND", "tensorrtllm"), "notes", "")
    write_llm_model("ensemble", ENSEMBLE, "notes", "")
    return tmp_path


def write_llm_model(name: str, config: str, file: str, content: str) -> None:
    version = Path("models", name, "1")
    version.mkdir(parents=True)
    version.parent.joinpath("config.pbtxt").write_text(config)
    version.joinpath(file).write_text(content)


def options(model: str, repository: str | None = None) -> RunOptions:
    return RunOptions(model, target="docker", docker_image="image", model_repository=repository)


def prepare(model: str) -> Task:
    return prepare_task(options(model), SERVER, lambda _: None)


def samples(task: Task, model: str) -> list[input_data.InputSample]:
    config = task.source.models[model]
    types = {13: "BYTES", 1: "BOOL"}  # DataType in model_config.proto
    tensors = [
        input_data.InputTensor(t.name, types.get(t.data_type, "INT32"), tuple(t.dims), config.max_batch_size > 0)
        for t in config.input
    ]
    return list(input_data.parse_entries(task.input_data, tensors))


def test_the_profile_of_a_vllm_model_tunes_the_number_of_sequences() -> None:
    task = prepare("vllm.yaml")
    assert task.source.is_streaming
    assert not task.problem.is_simulated
    assert task.problem.space.fields["model_json.max_num_seqs"] == (32, 64, 128, 256, 512)
    assert task.problem.space.max_batch_size == (0,)
    assert task.baseline.model_json == {"max_num_seqs": 128}
    assert [bound.metric for bound in task.problem.sla.latencies] == ["ttft-p95", "itl-p95"]
    requests = samples(task, "llm")
    assert all(sample.keys() == {"text_input", "stream", "sampling_parameters"} for sample in requests)
    parameters = [json.loads(sample["sampling_parameters"][0]) for sample in requests]
    assert all(
        sample["stream"][0] and chosen["ignore_eos"] for sample, chosen in zip(requests, parameters, strict=True)
    )
    assert {32, 256} <= {chosen["max_tokens"] for chosen in parameters}
    words = sorted(len(sample["text_input"][0].split()) for sample in requests)
    assert words[len(words) // 2] == pytest.approx(256, rel=0.05)


def test_the_profile_of_a_tensorrt_llm_model_tunes_the_scheduler_policy() -> None:
    task = prepare("tensorrt_llm.yaml")
    assert (task.source.name, task.source.batcher) == ("tensorrt_llm_bls", "tensorrt_llm")
    assert task.source.is_streaming
    policy = "parameters.batch_scheduler_policy.string_value"
    assert task.problem.space.fields[policy] == ("guaranteed_no_evict", "max_utilization")
    assert dict(task.baseline.fields)[policy] == "guaranteed_no_evict"
    (first, *_) = samples(task, "tensorrt_llm_bls")
    assert first.keys() == {"text_input", "max_tokens", "stream"}
    assert 32 <= first["max_tokens"][0] <= 256


def test_an_ensemble_that_streams_is_refused_in_one_line() -> None:
    with pytest.raises(BadInputError) as caught:
        find_model(options("ensemble", "models"), SERVER, lambda _: None)
    assert str(caught.value).startswith("ensemble: decoupled: 'tensorrt_llm' sends any number of responses")
    assert "such as tensorrt_llm_bls, with its models in bls_composing_models" in str(caught.value)


def test_one_engine_is_served_unless_the_profile_says_otherwise() -> None:
    task = prepare_task(options("llm", "models"), SERVER, lambda _: None)
    assert task.problem.space.instance_count == (1,)
    of_step = replace(options("tensorrt_llm_bls", "models"), bls_composing_models=("preprocessing", "tensorrt_llm"))
    task = prepare_task(of_step, SERVER, lambda _: None)
    assert task.source.batcher == "preprocessing"
    fields = task.problem.space.fields
    assert "tensorrt_llm/instance_group_count" not in fields
    assert fields["tensorrt_llm_bls/instance_group_count"] == (1, 2, 3), "the number of configurations is limited"
    assert fields["tensorrt_llm/max_queue_delay_microseconds"] == ("off", 0)


def test_each_variant_needs_the_file_before_anything_is_measured() -> None:
    write_llm_model("other", VLLM_CONFIG, "notes", "")
    profile = Path("vllm.yaml")
    profile.write_text(profile.read_text().replace("name: llm", "name: llm\n  variants: [other]"))
    with pytest.raises(BadInputError, match=r"space.model_json: no version folder of other has a model\.json"):
        prepare("vllm.yaml")


def test_a_remote_server_gets_no_large_files() -> None:
    """The load request has all files of the version folders."""
    with Path("models", "llm", "1", "weights").open("wb") as file:
        file.truncate(17 << 20)
    assert prepare("vllm.yaml").source.varies_model_json
    remote = RunOptions("vllm.yaml", target="remote", url="localhost:8001")
    with pytest.raises(BadInputError, match=r"llm: its version folders have 18 MB.* at most 16 MiB"):
        prepare_task(remote, SERVER, lambda _: None)


@pytest.mark.parametrize(
    ("old", "new", "problem"),
    [
        ("name: llm", "name: tensorrt_llm", "space.model_json: no version folder of tensorrt_llm has a model.json"),
        (
            "max_batch_size: [0]",
            "max_batch_size: [8]",
            r"vllm.yaml:\d+: space.max_batch_size: llm has no batch dimension",
        ),
        ("    max_num_seqs:", "    a/b:", "'a/b': not a key of model.json, such as max_num_seqs"),
    ],
)
def test_a_space_that_does_not_fit_is_one_line(old: str, new: str, problem: str) -> None:
    profile = Path("vllm.yaml")
    profile.write_text(profile.read_text().replace(old, new))
    with pytest.raises(BadInputError, match=problem) as caught:
        prepare("vllm.yaml")
    assert "\n" not in str(caught.value)
