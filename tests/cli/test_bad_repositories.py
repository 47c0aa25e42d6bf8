"""Faulty model repositories, models and requests give exit code 2 and one line; nothing is started."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
from onnx import ModelProto, TensorProto

from optimizer.machine import hardware
from tests.bad_input import (
    CONFIG,
    LONG,
    assert_says,
    tune_without_server,
    without_server,
)
from tests.command_fixtures import Sandbox, Tune
from tests.repositories import doubler, serialized, write_model


@dataclass(frozen=True)
class Repository:
    """A repository ``models`` whose model ``m`` is faulty, and the expected message."""

    spoil: Callable[[Path], object]
    words: tuple[str, ...]


def replace_config(text: str | bytes) -> Callable[[Path], object]:
    data = text if isinstance(text, bytes) else text.encode()
    return lambda model: (model / "config.pbtxt").write_bytes(data)


def replace_by_a_file(model: Path) -> None:
    shutil.rmtree(model)
    model.write_text("")


def replace_onnx(data: bytes) -> Callable[[Path], object]:
    return lambda model: (model / "1" / "model.onnx").write_bytes(data)


def without_config(model: Path) -> None:
    (model / "config.pbtxt").unlink()
    (model / "1" / "model.onnx").rename(model / "net.onnx")


def with_empty_version_and_no_config(model: Path) -> None:
    (model / "config.pbtxt").unlink()
    (model / "2").mkdir()


def with_weights_in(location: str) -> ModelProto:
    model = doubler()
    weights = model.graph.initializer.add(name="w", data_type=TensorProto.FLOAT, dims=[1])
    weights.data_location = TensorProto.EXTERNAL
    weights.external_data.add(key="location", value=location)
    return model


def with_operator(name: str, domain: str = "") -> ModelProto:
    model = doubler()
    model.graph.node[0].op_type, model.graph.node[0].domain = name, domain
    if domain:
        model.opset_import.add(domain=domain, version=1)
    return model


REPOSITORIES = {
    "gone": Repository(lambda model: shutil.rmtree(model), ("models: ", "'m'", "none")),
    "a file": Repository(replace_by_a_file, ("models: ", "'m'", "none")),
    "neither config nor model": Repository(
        without_config,
        ("models/m: ", "config.pbtxt is missing", "to tune 'net.onnx', name that file"),
    ),
    "config in the version folder": Repository(
        lambda m: (m / "config.pbtxt").rename(m / "1" / "model.onnx").rename(m / "1" / "config.pbtxt"),
        ("models/m: ", "config.pbtxt is missing", "next to its version folders: move models/m/1/config.pbtxt there"),
    ),
    "no version": Repository(lambda m: shutil.rmtree(m / "1"), ("models/m: ", "model.onnx", "models/m/1/model.onnx")),
    "no model file": Repository(lambda m: (m / "1" / "model.onnx").unlink(), ("models/m: ", "models/m/1/model.onnx")),
    "other name": Repository(replace_config(f'name: "n"\n{CONFIG}'), ("m/config.pbtxt: ", "'n'", "'m'", "equal")),
    "other backend": Repository(
        replace_config('backend: "tensorrt_plan"\n'),
        ("config.pbtxt: ", "'tensorrt_plan'", "python, pytorch"),
    ),
    "no backend": Repository(
        lambda m: (
            (m / "config.pbtxt").write_text("max_batch_size: 8\n"),
            (m / "1" / "model.onnx").rename(m / "1" / "model.bin"),
        ),
        ("config.pbtxt: has no backend, and no version folder has a file that tells it (model.onnx, ", "onnxruntime"),
    ),
    "stateful and decoupled": Repository(
        replace_config(f"{CONFIG}sequence_batching {{ }}\nmodel_transaction_policy {{ decoupled: true }}\n"),
        ("config.pbtxt: ", "sequence_batching and decoupled: ", "tune a copy with one of them"),
    ),
    "stateful with dynamic batching": Repository(
        replace_config(f"{CONFIG}sequence_batching {{ }}\ndynamic_batching {{ }}\n"),
        ("config.pbtxt:", '"dynamic_batching" is specified along with field "sequence_batching"'),
    ),
    "implicit state": Repository(
        replace_config(f'{CONFIG}sequence_batching {{ state {{ input_name: "s" output_name: "t" }} }}\n'),
        ("config.pbtxt: ", "sequence_batching.state: ", "no implicit state", "--target local"),
    ),
    "sequence ids as texts": Repository(
        replace_config(
            f'{CONFIG}sequence_batching {{ control_input {{ name: "ID" control {{ kind: CONTROL_SEQUENCE_CORRID '
            "data_type: TYPE_STRING } } }\n"
        ),
        ("config.pbtxt: ", "control input 'ID' is TYPE_STRING", "TYPE_UINT64"),
    ),
    "oldest without candidates": Repository(
        replace_config(f"{CONFIG}sequence_batching {{ oldest {{ }} }}\n"),
        ("config.pbtxt: ", "sequence_batching.oldest: max_candidate_sequences is missing"),
    ),
    "preferred size of sequences above the limit": Repository(
        replace_config(
            f"{CONFIG}sequence_batching {{ oldest {{ max_candidate_sequences: 4 preferred_batch_size: 16 }} }}\n"
        ),
        ("config.pbtxt: ", "sequence_batching.oldest: preferred_batch_size 16 is above max_batch_size 8"),
    ),
    "preferred size above the limit": Repository(
        replace_config(f"{CONFIG}dynamic_batching {{ preferred_batch_size: [4, 16] }}\n"),
        ("config.pbtxt: ", "preferred_batch_size 16", "max_batch_size 8", "Triton refuses"),
    ),
    "PyTorch without tensors": Repository(
        lambda m: (
            (m / "config.pbtxt").write_text('platform: "pytorch_libtorch"\n'),
            (m / "1" / "model.onnx").rename(m / "1" / "model.pt"),
        ),
        ("config.pbtxt: ", "write input and output", "dims"),
    ),
    "PyTorch weights alone": Repository(
        lambda m: (
            (m / "config.pbtxt").write_text(CONFIG.replace("onnxruntime_onnx", "pytorch_libtorch")),
            (m / "1" / "model.onnx").rename(m / "1" / "model.pt"),
        ),
        ("m/1/model.pt: ", "not TorchScript", "torch.jit.save"),
    ),
    "max_batch_size below 0": Repository(
        replace_config(CONFIG.replace(": 8", ": -1")), ("config.pbtxt: ", "max_batch_size -1 is below 0")
    ),
    "preferred size below 1": Repository(
        replace_config(f"{CONFIG}dynamic_batching {{ preferred_batch_size: -1 }}\n"),
        ("config.pbtxt: ", "preferred_batch_size -1 is below 1"),
    ),
    "dims of 0": Repository(
        replace_config(CONFIG.replace("dims: 4", "dims: 0", 1)), ("config.pbtxt: ", "input 'x': dims [0]", "from 1")
    ),
    "dims below 0": Repository(
        replace_config(CONFIG.replace("dims: 4", "dims: -5")),
        ("config.pbtxt: ", "input 'x': dims [-5]", "-1 for a variable size"),
    ),
    "an input twice": Repository(
        replace_config(f'{CONFIG}input {{ name: "x" data_type: TYPE_FP32 dims: 4 }}\n'),
        ("config.pbtxt: ", "input 'x' is there 2 times"),
    ),
    "another type": Repository(
        replace_config(CONFIG.replace("TYPE_FP32", "TYPE_INT32", 1)),
        ("config.pbtxt: ", "input 'x' has data_type TYPE_INT32", "the graph has TYPE_FP32"),
    ),
    "another type of an output": Repository(
        replace_config(CONFIG.replace("FP32", "INT64").replace("INT64", "FP32", 1)),
        ("config.pbtxt: ", "output 'y' has data_type TYPE_INT64", "the graph has TYPE_FP32"),
    ),
    "other dims": Repository(
        replace_config(CONFIG.replace("dims: 4", "dims: 5", 1)),
        ("config.pbtxt: ", "input 'x' has dims [5] after the batch dimension", "the shape [-1, 4]"),
    ),
    "dims without the batch dimension": Repository(
        replace_config(CONFIG.replace(": 8", ": 0")),
        ("config.pbtxt: ", "input 'x' has dims [4], and the graph has the shape [-1, 4]"),
    ),
    "a scalar": Repository(
        lambda m: (
            (m / "config.pbtxt").write_text('platform: "onnxruntime_onnx"\n'),
            (m / "1" / "model.onnx").write_bytes(serialized(doubler(dims=()))),
        ),
        ("input 'x' of ", "model.onnx: it is a scalar", "the shape [1]"),
    ),
    "a configured scalar": Repository(
        replace_config(CONFIG.replace(": 8", ": 0").replace("dims: 4", "dims: 1 reshape { }", 1)),
        ("config.pbtxt: ", "input 'x': it is a scalar"),
    ),
    "a version that is not there": Repository(
        replace_config(f"{CONFIG}version_policy {{ specific {{ versions: [3, 4] }} }}\n"),
        ("config.pbtxt: ", "version_policy: there is no version 3, 4; the model has 1"),
    ),
    "an empty version": Repository(
        lambda m: (m / "2").mkdir(), ("m: the version that Triton loads has no model.onnx; ", "m/2/model.onnx")
    ),
    "an empty version without config.pbtxt": Repository(
        with_empty_version_and_no_config,
        ("m: the version that Triton loads has no model.onnx; ", "m/2/model.onnx"),
    ),
    "a custom operator": Repository(
        replace_onnx(serialized(with_operator("Frobnicate", "com.example"))),
        ("m/1/model.onnx: ", "has no operator 'com.example:Frobnicate'", "--target local"),
    ),
    "an unknown operator": Repository(
        replace_onnx(serialized(with_operator("Frobnicate"))), ("m/1/model.onnx: ", "has no operator 'Frobnicate'")
    ),
    "an operator whose name is not UTF-8": Repository(
        replace_onnx(serialized(with_operator("Frobnicate")).replace(b"Frobnicate", b"Frobnic\x80te")),
        ("m/1/model.onnx: a name in its graph is not UTF-8",),
    ),
    "a dimension whose name is not UTF-8": Repository(
        lambda m: (
            (m / "config.pbtxt").write_text('platform: "onnxruntime_onnx"\n'),
            (m / "1" / "model.onnx").write_bytes(serialized(doubler()).replace(b"batch", b"b\x80tch")),
        ),
        ("m/1/model.onnx: a name in its graph is not UTF-8",),
    ),
    "weights in a file whose name is not UTF-8": Repository(
        replace_onnx(serialized(with_weights_in("w.bin")).replace(b"w.bin", b"w.b\x80n")),
        ("m/1/model.onnx: a name in its graph is not UTF-8",),
    ),
    "too many instances": Repository(
        replace_config(f"{CONFIG}instance_group {{ count: 100000 kind: KIND_CPU }}\n"),
        ("config.pbtxt: ", "100,000 instances are above the limit of 64", "--max-instance-count"),
    ),
    "instances below 0": Repository(
        replace_config(f"{CONFIG}instance_group {{ count: -5 kind: KIND_CPU }}\n"),
        ("config.pbtxt: ", "instance_group: count -5 is below 0"),
    ),
    "weights outside the folder": Repository(
        replace_onnx(serialized(with_weights_in("../../secret.bin"))),
        ("m/1/model.onnx: its weights are in '../../secret.bin', outside the folder of the model",),
    ),
    "unknown field": Repository(
        replace_config(f"{CONFIG}max_bach_size: 8\n"), ("m/config.pbtxt:5: ", "max_bach_size")
    ),
    "unknown input": Repository(
        replace_config(CONFIG.replace('"x"', '"z"')), ("m/config.pbtxt: ", "input 'z'", "1/model.onnx", "has x")
    ),
    "unknown output": Repository(
        replace_config(CONFIG.replace('"y"', '"w"')), ("m/config.pbtxt: ", "output 'w'", "1/model.onnx", "has y")
    ),
    "no batch dimension": Repository(
        lambda m: (
            (m / "config.pbtxt").write_text('platform: "onnxruntime_onnx"\nmax_batch_size: 8\n'),
            (m / "1" / "model.onnx").write_bytes(serialized(doubler(dims=(4,)))),
        ),
        ("m/config.pbtxt: ", "max_batch_size is 8", "input 'x'", "no batch dimension", "[4]", "max_batch_size: 0"),
    ),
    "dims unknown": Repository(
        lambda m: (
            (m / "config.pbtxt").write_text('platform: "onnxruntime_onnx"\nmax_batch_size: 8\n'),
            (m / "1" / "model.onnx").write_bytes(serialized(doubler(dims=("batch", "words")))),
        ),
        ("input 'x' of m ", "[-1]", "--shape x:16..128", "request.shapes", "{x: [128]}", "request.input_data"),
    ),
    "cut in the graph": Repository(
        replace_onnx(serialized(doubler())[:-5]), ("m/1/model.onnx: ", "not an ONNX model")
    ),
}


@pytest.mark.parametrize("case", REPOSITORIES)
def test_a_faulty_model_repository_is_reported(case: str, called_tune: Tune, sandbox: Sandbox) -> None:
    spoilt = REPOSITORIES[case]
    spoilt.spoil(write_model(sandbox.working_folder / "models", "m", CONFIG, doubler()))
    ended = tune_without_server(called_tune, sandbox, "--sla-p95", "20ms", "--model-repository", "models", "m")
    assert_says(ended, spoilt.words)


@pytest.mark.skipif(bool(hardware.gpu_names()), reason="needs a machine without a GPU")
@pytest.mark.parametrize("group", ["kind: KIND_GPU", "gpus: 0"])
def test_a_model_for_a_gpu_is_refused_without_one(group: str, called_tune: Tune, sandbox: Sandbox) -> None:
    write_model(sandbox.working_folder, "m", f"{CONFIG}instance_group {{ count: 1 {group} }}\n", doubler())
    ended = tune_without_server(called_tune, sandbox, "--sla-p95", "20ms", "m")
    assert_says(ended, ("m/config.pbtxt: instance_group: ", "GPU"))


@pytest.mark.skipif(bool(hardware.gpu_names()), reason="needs a machine without a GPU")
def test_an_accelerator_of_a_gpu_is_refused_on_a_cpu(called_tune: Tune, sandbox: Sandbox) -> None:
    write_model(sandbox.working_folder / "models", "m", CONFIG, doubler())
    choices = "  onnxruntime:\n    precision_mode: [FP16]\n    execution_accelerator: [none, tensorrt]\n"
    profile = f"model: {{repository: models, name: m}}\nspace:\n{choices}"
    (sandbox.working_folder / "p.yaml").write_text(profile)
    ended = tune_without_server(called_tune, sandbox, "--sla-p95", "20ms", "p.yaml")
    assert_says(ended, ("p.yaml:5: space.onnxruntime.execution_accelerator: needs a GPU, and this model is served",))


def test_the_number_of_instances_is_limited(called_tune: Tune, sandbox: Sandbox) -> None:
    write_model(sandbox.working_folder / "models", "m", CONFIG, doubler())
    profile = "model: {repository: models, name: m}\nspace: {instance_group_count: [1, 65]}\n"
    (sandbox.working_folder / "p.yaml").write_text(profile)
    too_many = ("65 instances are above the limit of 64", "--max-instance-count")
    ended = tune_without_server(called_tune, sandbox, "--sla-p95", "20ms", "p.yaml")
    assert_says(ended, ("p.yaml:2: space.instance_group_count: ", *too_many))
    assert_says(called_tune("sweep", "--instance-count", "1,65", "models/m"), ("--instance-count: ", *too_many))
    allowed = called_tune("--max-instance-count", "65", "--sla-p95", "20ms", "p.yaml", env=without_server(sandbox))
    assert_says(allowed, ("pip could not fetch the server",), code=3)


def test_instances_that_cannot_fit_into_memory_are_refused(called_tune: Tune, sandbox: Sandbox) -> None:
    group = "instance_group { count: 1000000 kind: KIND_CPU }\n"
    write_model(sandbox.working_folder, "m", CONFIG + group, doubler())
    arguments = ["--max-instance-count", "1000000", "--sla-p95", "20ms", "m"]
    ended = tune_without_server(called_tune, sandbox, *arguments)
    assert_says(ended, ("m/config.pbtxt: instance_group: ", "1,000,000 instances need about", "GiB; write fewer"))


def test_a_model_folder_is_checked_like_a_repository(called_tune: Tune, sandbox: Sandbox) -> None:
    folder = write_model(sandbox.working_folder, "m", CONFIG, None)
    ended = tune_without_server(called_tune, sandbox, "--sla-p95", "20ms", str(folder))
    assert_says(ended, (f"{folder}: ", "model.onnx", f"{folder}/1/model.onnx"))


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("gone.onnx", ("gone.onnx: ", "no such file")),
        ("gone.pt", ("gone.pt: ", "no such file")),
        ("net.pt", ("net.pt: ", "does not contain its tensors' dims", "NAME/config.pbtxt", "docs/pytorch.md")),
    ],
)
def test_a_file_that_is_not_a_model_is_reported(
    name: str, words: tuple[str, ...], called_tune: Tune, sandbox: Sandbox
) -> None:
    (sandbox.working_folder / "net.pt").touch()
    assert_says(tune_without_server(called_tune, sandbox, "--sla-p95", "20ms", name), words)


def test_an_unknown_model_is_reported_with_the_models_of_the_repository(called_tune: Tune, sandbox: Sandbox) -> None:
    write_model(sandbox.working_folder / "models", "first", CONFIG, doubler())
    write_model(sandbox.working_folder / "models", "second", CONFIG, doubler())
    for name, shown in (("third", "'third'"), (LONG, f"'{LONG[:58]}…")):
        ended = tune_without_server(called_tune, sandbox, "--model-repository", "models", name)
        assert_says(ended, ("models: no model ", f"{shown} there", "first, second"))


def test_a_missing_model_is_reported_with_the_models_of_the_repository(called_tune: Tune, sandbox: Sandbox) -> None:
    folder = sandbox.working_folder / "models"
    write_model(folder, "first", CONFIG, doubler())
    write_model(folder, "bare", CONFIG, doubler())
    (folder / "bare" / "config.pbtxt").unlink()  # an ONNX model needs none
    (folder / "notes").mkdir()
    ended = tune_without_server(called_tune, sandbox, "--model-repository", "models")
    assert_says(ended, ("MODEL is missing: models has the models bare, first",))
    ended = tune_without_server(called_tune, sandbox, "./models")
    assert_says(ended, ("this is a model repository with bare, first; give --model-repository FOLDER and one",))
    ended = tune_without_server(called_tune, sandbox, "--model-repository", "models/notes", "first")
    assert_says(ended, ("models/notes: no model 'first' there; it has none",))
    ended = tune_without_server(called_tune, sandbox, "--model-repository", "models/first", "first")
    assert_says(ended, ("models/first: is the folder of a model; give the repository, which contains that folder: ",))


def test_a_model_name_cannot_lead_out_of_its_repository(called_tune: Tune, sandbox: Sandbox) -> None:
    write_model(sandbox.working_folder, "m", CONFIG, doubler())
    (sandbox.working_folder / "models").mkdir()
    ended = tune_without_server(called_tune, sandbox, "--model-repository", "models", "../m")
    assert_says(ended, ("'../m'",))


@pytest.mark.parametrize("path", ["nowhere", "file", LONG])
def test_a_missing_repository_folder_is_reported(path: str, called_tune: Tune, sandbox: Sandbox) -> None:
    (sandbox.working_folder / "file").write_text("")
    ended = tune_without_server(called_tune, sandbox, "--model-repository", path, "m")
    assert_says(ended, (f"--model-repository {path[:100]}", "no such folder"))


@pytest.mark.parametrize("name", ["m$(touch PWNED)", "m x"])
@pytest.mark.parametrize("kind", ["model", "step", "bls-composing-models", "concurrent-models", "variants"])
def test_a_model_name_that_a_shell_would_interpret_is_refused(
    name: str, kind: str, called_tune: Tune, sandbox: Sandbox
) -> None:
    models = sandbox.working_folder / "models"
    write_model(models, name, CONFIG, doubler())
    arguments = [f"models/{name}"]
    if kind == "step":
        steps = f'ensemble_scheduling {{ step {{ model_name: "{name}" model_version: -1 }} }}\n'
        write_model(models, "chain", CONFIG.replace("onnxruntime_onnx", "ensemble") + steps, None)
        arguments = ["--model-repository", "models", "chain"]
    elif kind != "model":
        write_model(models, "m", CONFIG, doubler())
        arguments = [f"--{kind}", name, "models/m"]
    assert_says(tune_without_server(called_tune, sandbox, *arguments), (repr(name), "shell", "rename it"))


def test_a_request_larger_than_max_batch_size_is_refused(called_tune: Tune, sandbox: Sandbox) -> None:
    write_model(sandbox.working_folder / "models", "m", CONFIG, doubler())
    arguments = ["--request-batch-size", "9", "--model-repository", "models", "m"]
    ended = tune_without_server(called_tune, sandbox, *arguments)
    assert_says(ended, ("--request-batch-size 9 ", "max_batch_size 8", "config.pbtxt"))


def test_a_request_batch_for_a_model_without_batching_is_refused(called_tune: Tune, sandbox: Sandbox) -> None:
    config = CONFIG.replace("max_batch_size: 8", "max_batch_size: 0")
    write_model(sandbox.working_folder / "models", "m", config, doubler(dims=(4,)))
    arguments = ["--request-batch-size", "2", "--model-repository", "models", "m"]
    assert_says(
        tune_without_server(called_tune, sandbox, *arguments), ("--request-batch-size 2 ", "max_batch_size 0")
    )


# -- requests ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ("--input-data none.npz", ("input data none.npz: ", "no such file or folder", "random or zero")),
        ("--input-data x.json", ("x.json: entry 1, input x: has 1 values", "[4] has 4")),
        ("--input-data x.csv", ("x.csv:3: input x: ", '"b" is not FP32')),
        ("--input-data x.json --input-range x:0..1", ("input data x.json: ", "random requests only")),
        ("--shape x:3", ("shape x:3: ", "x has dims [4]")),
        ("--shape z:3", ("shape z:3: ", "the model's inputs are x")),
        ("--input-data zero --input-range x:0..1", ("range x:0..1: ", "zero has no range of values")),
        ("--input-data /dev/zero", ("input data /dev/zero: ", "is a device", "give a file or folder")),
        ("--input-data nan.json", ("nan.json: entry 1, input x: NaN is not a number of JSON", "b64")),
        ("--input-data huge.json", ("huge.json: entry 1, input x: Infinity is not a number of JSON", "b64")),
        ("--input-data huge.csv", ("huge.csv:2: input x: ", '"1e400" is not FP32')),
        ("--input-data large.json", ("large.json: entry 1, input x: 1e+39 is too large for FP32",)),
        ("--string-data a", ("--string-data", "m has no input of strings (its inputs are x FP32)", "leave them out")),
        ("--string-length 9", ("--string-length", "m has no input of strings", "leave them out")),
        ("--variants m", ("--variants m: m is the tuned model itself", "name models that can replace it")),
        ("--concurrent-models m", ("--concurrent-models m: m is the tuned model itself", "leave it out")),
        ("--bls-composing-models m", ("--bls-composing-models m: m is the tuned model itself", "leave it out")),
    ],
)
def test_request_data_that_does_not_fit_the_model_is_refused(
    called_tune: Tune, sandbox: Sandbox, arguments: str, words: tuple[str, ...]
) -> None:
    write_model(sandbox.working_folder / "models", "m", CONFIG, doubler())
    (sandbox.working_folder / "x.json").write_text('{"data": [{"x": [1]}]}')
    (sandbox.working_folder / "x.csv").write_text("x[0],x[1],x[2],x[3]\n1,2,3,4\n1,b,3,4\n")
    (sandbox.working_folder / "nan.json").write_text('{"data": [{"x": [1, 2, 3, NaN]}]}')
    (sandbox.working_folder / "huge.json").write_text('{"data": [{"x": [1, 2, 3, 1e400]}]}')
    (sandbox.working_folder / "large.json").write_text('{"data": [{"x": [1, 2, 3, 1e39]}]}')
    (sandbox.working_folder / "huge.csv").write_text("x[0],x[1],x[2],x[3]\n1,2,3,1e400\n")
    options = [*arguments.split(), "--model-repository", "models", "m"]
    assert_says(tune_without_server(called_tune, sandbox, *options), words)
