"""The profile that ``tune init`` writes means the same as ``tune MODEL`` without a profile."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from onnx import ModelProto, TensorProto, helper

from optimizer.core.errors import BadInputError
from optimizer.machine.hardware import Hardware
from optimizer.model.profile import load_profile
from optimizer.model.profile_lookup import find_profile, list_profiles
from optimizer.options.run_options import RunOptions
from optimizer.study.environment import Environment
from optimizer.study.initial_profile import InitialProfile, initial_profile
from optimizer.study.task import Task, prepare_task
from tests.repositories import Dims, doubler, onnx_model, serialized, write_bls, write_model, write_python_model

CONFIG = 'platform: "onnxruntime_onnx"\nmax_batch_size: 8\n'
UNDECLARED = 'backend: "python"\n'
IN_MODELS = RunOptions("doubler", model_repository="models")


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a working folder with models in ``models`` and a cache of its own."""
    here = tmp_path / "here"
    here.mkdir()
    monkeypatch.setenv("TRITUNE_CACHE", str(tmp_path / "cache"))
    monkeypatch.chdir(here)
    write_bls(here / "models", milliseconds=2)
    for name in ("doubler", "doubler_int8"):
        write_model(here / "models", name, CONFIG, doubler())
    write_model(here / "models", "alone", 'platform: "onnxruntime_onnx"\n', doubler(dims=(4,)))
    write_model(here / "models", "bare", "", doubler())
    (here / "models" / "bare" / "config.pbtxt").unlink()
    (here / "net.onnx").write_bytes(serialized(doubler()))
    (here / "fixed.onnx").write_bytes(serialized(doubler(dims=(1, 4))))
    return here


def ids(name: str = "ids", dims: Dims = ("n", "words")) -> ModelProto:
    """Return a model with an input of variable size."""
    node = helper.make_node("Identity", [name], ["y"])
    return onnx_model([node], {name: (TensorProto.INT64, dims)}, {"y": (TensorProto.INT64, dims)})


def here() -> Hardware:
    return Environment.detect(RunOptions("mlp"), print).server_hardware()


def drafted(options: RunOptions, output: str | None = None) -> InitialProfile:
    """Return the profile of ``options``, which is written to its file."""
    profile = initial_profile(options, Path(output) if output else None, print)
    profile.path.write_text(profile.text, encoding="utf-8")
    return profile


def task(options: RunOptions) -> Task:
    return prepare_task(options, here(), print)


# -- models -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "options",
    [
        RunOptions("./net.onnx"),
        RunOptions("fixed.onnx"),
        RunOptions("models/doubler"),
        RunOptions("models/doubler", {"avg": 0.5, "p95": 20.0}),
        RunOptions("models/alone"),
        RunOptions("models/bare"),
        RunOptions("first", model_repository="models"),
        RunOptions("chain", model_repository="models"),
        RunOptions("caller", model_repository="models", bls_composing_models=("first", "second")),
        replace(IN_MODELS, variants=("doubler_int8",)),
        replace(IN_MODELS, concurrent_models=("second",)),
        replace(IN_MODELS, concurrent_models=("second=3",)),
    ],
    ids=lambda options: f"{options.model} {options.variants or options.concurrent_models or options.sla_ms or ''}",
)
def test_the_profile_means_the_same_as_no_profile(options: RunOptions) -> None:
    profile = drafted(options)
    assert profile.missing == ()
    assert load_profile(profile.path).space is not None
    original_options = replace(options, model_repository=options.model_repository and str(Path("models").resolve()))
    assert task(RunOptions(str(profile.path))) == task(original_options)


def test_the_inputs_are_comments() -> None:
    text = drafted(RunOptions("models/doubler")).text
    assert text.startswith("# Profile of doubler, written by `tune init`.")
    assert "\n# Inputs of the model, with data type and dims without the batch dimension:\n#   x: FP32 [4]\n" in text
    assert "\n#   x: FP32 [1, 4]\nmodel:\n  # " in drafted(RunOptions("fixed.onnx")).text


def test_a_variable_size_is_named_with_the_line_to_add(folder: Path) -> None:
    (folder / "ids.onnx").write_bytes(serialized(ids()))
    profile = drafted(RunOptions("ids.onnx"))
    (missing,) = profile.missing
    assert missing.startswith(
        "The input ids has the dims [-1]: set shapes in the request section, such as {ids: [128]}"
    )
    with pytest.raises(BadInputError, match=r"input 'ids' of ids has dims \[-1\]"):
        task(RunOptions("ids.yaml"))
    example = "  # shapes: {input_ids: [128]}\n"
    assert example in profile.text
    profile.path.write_text(profile.text.replace(example, "  shapes: {ids: [128]}\n"), encoding="utf-8")
    assert task(RunOptions("ids.yaml")) == task(RunOptions("ids.onnx", shapes=("ids:128",)))


def test_a_python_model_without_inputs_says_what_is_missing(folder: Path) -> None:
    write_python_model(folder / "models", "auto", "").joinpath("config.pbtxt").write_text(UNDECLARED)
    profile = drafted(RunOptions("models/auto"))
    (missing,) = profile.missing
    assert missing.startswith(
        "no config.pbtxt declares the inputs and outputs of auto, which only a server finds out; "
    )
    assert "write input, output and max_batch_size into config.pbtxt" in missing
    read = load_profile(profile.path)
    assert read.space is None
    assert read.load.max_concurrency == 256
    assert not (folder.parent / "cache").exists(), "a server would be installed there"


def test_hostile_names_stay_in_comments(folder: Path) -> None:
    (folder / "odd.onnx").write_bytes(serialized(ids("x\nspace: {max_batch_size: [1]}\n#\x1b[31m", ("n", 4))))
    profile = drafted(RunOptions("odd.onnx"))
    assert load_profile(profile.path).space == load_profile(drafted(RunOptions("net.onnx")).path).space
    assert all(line.isprintable() for line in profile.text.split("\n"))


# -- profiles -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", list_profiles())
def test_a_built_in_model_begins_with_its_profile(name: str) -> None:
    before = load_profile(find_profile(name))
    profile = drafted(RunOptions(name))
    assert (profile.path, profile.missing) == (Path(f"{name}.yaml"), ())
    after = load_profile(profile.path)
    for gpu in (False, True):
        assert dict(after.for_hardware(gpu=gpu)) == dict(before.for_hardware(gpu=gpu))
    assert f"Profile of {name}" in profile.text
    assert "\n# Inputs of the model, " in profile.text


def test_bounds_of_the_command_line_replace_those_of_the_profile() -> None:
    after = load_profile(drafted(RunOptions("bert", {"p99": 7.5})).path)
    for gpu in (False, True):
        assert after.for_hardware(gpu=gpu).sla.latency_bounds_ms() == {"p99": 7.5}
    after = load_profile(drafted(RunOptions("text_recognition", {"p99": 7.5})).path)
    assert after.for_hardware(gpu=True).sla.latency_bounds_ms() == {"p99": 7.5}


def test_a_profile_with_paths_stays_in_its_folder(folder: Path) -> None:
    (folder / "models" / "mine.yaml").write_text("model: {repository: ., name: doubler}\n")
    with pytest.raises(BadInputError, match=r"mine.yaml: has paths that begin in its folder; give --out .*"):
        drafted(RunOptions("models/mine.yaml"))
    after = drafted(RunOptions("models/mine.yaml"), "models/my_mine.yaml")
    assert load_profile(after.path).model == load_profile(Path("models/mine.yaml")).model


# -- refusals -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "output", "message"),
    [
        (RunOptions("models/doubler"), "sub/p.yaml", r"models is not below .*sub, .* give --out .*/here/p.yaml$"),
        (RunOptions("net.onnx"), "sub/p.yml", r"net.onnx is not below .*sub, .* give --out .*/here/p.yml$"),
        (RunOptions("net.onnx"), "p.txt", "--out p.txt: the name of a profile ends in .yaml; give such a name"),
        (RunOptions("net.onnx"), "no/p.yaml", "--out no/p.yaml: no such folder; create no"),
        (RunOptions("mlp", variants=("x",)), None, "--variants x: mlp is a profile; write them into its"),
        (RunOptions("net.onnx", variants=("x",)), None, "--variants x: net.onnx is not in a repository"),
        (RunOptions("nosuch"), None, "no model 'nosuch' in "),
        (RunOptions("nosuch.onnx"), None, "nosuch.onnx: no such file"),
        (RunOptions("nosuch", model_repository="models"), None, "models: no model 'nosuch' there; it has "),
        (RunOptions("m", model_repository="nosuch"), None, "--model-repository nosuch: no such folder"),
    ],
)
def test_a_refusal_is_one_line(options: RunOptions, output: str | None, message: str) -> None:
    Path("sub").mkdir()
    with pytest.raises(BadInputError, match=message) as caught:
        drafted(options, output)
    assert "\n" not in str(caught.value)


def test_the_suggested_place_works() -> None:
    Path("sub").mkdir()
    with pytest.raises(BadInputError) as caught:
        drafted(RunOptions("models/doubler"), "sub/p.yaml")
    place = str(caught.value).rpartition("--out ")[2]
    assert load_profile(drafted(RunOptions("models/doubler"), place).path).name == "p"
