"""Files of another kind, encoding or place than expected give one line with the remedy; nothing is started."""

from __future__ import annotations

import codecs
from pathlib import Path

import pytest

from tests.bad_input import CONFIG, assert_says, tune_without_server
from tests.command_fixtures import Sandbox, Tune
from tests.repositories import doubler, serialized, write_model

PROFILE = "model: {builder: mlp}\nsla: {p95: 20ms}\n"
SLA = ("--sla-p95", "20ms")
FILES = {
    "empty ONNX file": ("net.onnx", b"", ("net.onnx: ", "the file is empty", "export or download it again")),
    "part of an ONNX file": (
        "net.onnx",
        b"\x08\x08\x3a\x7f",
        ("net.onnx: ", "cannot be decoded", "download it again"),
    ),
    "pointer of Git LFS": (
        "net.onnx",
        b"version https://git-lfs.github.com/spec/v1\noid sha256:0\n",
        ("net.onnx: ", "a pointer of Git LFS", "`git lfs pull`"),
    ),
    "UTF-16 profile": (
        "p.yaml",
        PROFILE.encode("utf-16"),
        ("p.yaml:1: ", "not UTF-8 text", "save the file as UTF-8"),
    ),
    "merge key": (
        "p.yaml",
        b"model: {builder: mlp}\nsla:\n  <<: {p95: 20ms}\n  p99: 40ms\n",
        ("p.yaml:3: sla: ", "the merge key << is not supported", "write its keys out"),
    ),
    "file of another kind, without a folder": (
        "p.json",
        b"{}",
        ("p.json: ", "is no profile, ONNX file or model folder", "give a .yaml or .onnx file"),
    ),
    "no batch dimension in a profile": (
        "p.yaml",
        b"model: {builder: mlp}\nspace: {max_batch_size: [0]}\n",
        ("p.yaml:2: space.max_batch_size: ", "0 is for a model without a batch dimension", "write sizes from 1"),
    ),
}
CONFIGS = {
    "byte order mark": (
        codecs.BOM_UTF8 + CONFIG.encode(),
        ("models/m/config.pbtxt:1: ", "begins with a byte order mark, which Triton does not read", "save it without"),
    ),
    "UTF-16": (CONFIG.encode("utf-16"), ("models/m/config.pbtxt: ", "not UTF-8 text", "save it as UTF-8")),
}


@pytest.mark.parametrize("case", FILES)
def test_a_wrong_file_is_reported_with_the_remedy(case: str, called_tune: Tune, sandbox: Sandbox) -> None:
    name, content, words = FILES[case]
    (sandbox.working_folder / name).write_bytes(content)
    if "batch dimension" in case:  # mlp is built before
        assert_says(called_tune(*SLA, "--dry-run", name), words)
    else:
        assert_says(tune_without_server(called_tune, sandbox, *SLA, name), words)


@pytest.mark.parametrize("case", CONFIGS)
def test_the_encoding_of_a_config_is_named(case: str, called_tune: Tune, sandbox: Sandbox) -> None:
    content, words = CONFIGS[case]
    model = write_model(sandbox.working_folder / "models", "m", CONFIG, doubler())
    (model / "config.pbtxt").write_bytes(content)
    assert_says(tune_without_server(called_tune, sandbox, *SLA, "--model-repository", "models", "m"), words)


def test_windows_line_ends_and_a_mark_before_a_profile_are_read(called_tune: Tune, sandbox: Sandbox) -> None:
    model = write_model(sandbox.working_folder / "models", "m", CONFIG, doubler())
    (model / "config.pbtxt").write_bytes(CONFIG.replace("\n", "\r\n").encode())
    profile = "model: {repository: models, name: m}\r\nsla: {p95: 20ms}\r\nslo: 1\r\n"
    (sandbox.working_folder / "p.yaml").write_bytes(codecs.BOM_UTF8 + profile.encode())
    assert_says(tune_without_server(called_tune, sandbox, "p.yaml"), ("p.yaml:3: slo: ", "did you mean sla?"))
    (sandbox.working_folder / "p.yaml").write_bytes(codecs.BOM_UTF8 + profile.replace("slo: 1\r\n", "").encode())
    shown = called_tune("--dry-run", "p.yaml")
    assert (shown.code, shown.errors) == (0, [])


def test_a_config_given_as_the_model_is_answered_with_its_folder(called_tune: Tune, sandbox: Sandbox) -> None:
    write_model(sandbox.working_folder / "models", "m", CONFIG, doubler())
    ended = tune_without_server(called_tune, sandbox, *SLA, "models/m/config.pbtxt")
    assert_says(ended, ("models/m/config.pbtxt: ", "give the folder of the model, models/m"))


def test_a_run_given_as_the_model_is_answered_with_its_commands(called_tune: Tune, sandbox: Sandbox) -> None:
    run = sandbox.working_folder / "run"
    (run / "best").mkdir(parents=True)
    (run / "run.json").write_text("{}")
    (run / "best" / "config.pbtxt").write_text(CONFIG)
    ended = tune_without_server(called_tune, sandbox, *SLA, "run")
    assert_says(ended, (f"{run}: ", "this is the folder of a run", "--resume", "`tune explain`"))


def test_a_profile_given_as_a_suite_is_answered_in_one_line(called_tune: Tune, sandbox: Sandbox) -> None:
    (sandbox.working_folder / "p.yaml").write_text(PROFILE)
    assert_says(called_tune("batch", "p.yaml"), ("p.yaml:1: ", "this is the profile of a model", "`tune FILE`"))


@pytest.mark.parametrize("name", ["nowhere", "p.yaml"])
def test_a_folder_of_results_that_does_not_exist_is_reported(name: str, called_tune: Tune, sandbox: Sandbox) -> None:
    (sandbox.working_folder / "p.yaml").write_text(PROFILE)
    assert_says(called_tune("runs", "--results", name), (f"--results {name}: no such folder",))


def test_a_sweep_without_the_batch_dimension_of_the_model_is_refused(called_tune: Tune, sandbox: Sandbox) -> None:
    write_model(sandbox.working_folder / "models", "m", CONFIG, doubler())
    ended = called_tune("sweep", "--max-batch-size", "0,8", "models/m")
    assert_says(ended, ("--max-batch-size: ", "0 is for a model without a batch dimension", "write sizes from 1"))
    assert not (sandbox.working_folder / "results").exists()


@pytest.mark.parametrize(
    ("model", "problem"),
    [
        ("mlp", "cannot build mlp in /proc/nowhere"),
        ("net.onnx", "cannot write into /proc/nowhere"),
        ("models/m", "cannot write /proc/nowhere/requests/random-"),
    ],
)
def test_a_home_that_cannot_be_written_is_not_called_full(
    model: str, problem: str, called_tune: Tune, sandbox: Sandbox
) -> None:
    write_model(sandbox.working_folder / "models", "m", CONFIG, doubler())
    (sandbox.working_folder / "net.onnx").write_bytes(serialized(doubler()))
    ended = called_tune(*SLA, "--dry-run", model, env={"TRITUNE_CACHE": Path("/proc/nowhere")})
    assert_says(ended, (problem, "; set TRITUNE_CACHE to another folder"), code=3)
    assert "free space" not in ended.stderr


def test_a_plan_for_an_unknown_model_announces_no_search(called_tune: Tune) -> None:
    ended = called_tune("plan", "nowhere", "--rate", "100/s")
    assert_says(ended, ("no model 'nowhere'", "`tune models` lists them"))
    assert len(ended.stderr.splitlines()) == 1
