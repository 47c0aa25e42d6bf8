"""Test the task of a stateful model: its sequences, its comparisons, and the options that it refuses."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from optimizer.config.search_space import ModelKind
from optimizer.core.errors import BadInputError
from optimizer.machine.hardware import Hardware
from optimizer.options.run_options import RunOptions
from optimizer.options.values import parse_batch_size
from optimizer.study.task import Task, prepare_task
from tests.repositories import write_ensemble, write_sums

TWO_CPUS = Hardware((), "a CPU", 2, 1 << 30)


@pytest.fixture
def models(tmp_path: Path) -> Path:
    write_sums(tmp_path / "models", tmp_path / "log")
    write_ensemble(tmp_path / "models", 1.0)
    return tmp_path / "models"


def task(models: Path, name: str = "sums", **options: Any) -> Task:
    return prepare_task(RunOptions(name, model_repository=str(models), **options), TWO_CPUS, print)


def test_sequences_have_perf_analyzers_default_length_and_one_comparison(models: Path) -> None:
    made = task(models)
    assert str(made.sequence_length) == "20"
    assert [role for role, _ in made.comparisons()] == ["baseline"]
    assert made.problem.kind is ModelKind.STATEFUL
    assert made.problem.space.is_stateful


@pytest.mark.parametrize("text", ["5", "10..30", "5*3|40*1"])
def test_the_length_may_be_a_distribution(models: Path, text: str) -> None:
    assert str(task(models, sequence_length=text).sequence_length) == text


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"load": "rate"}, "--load rate: sums is stateful"),
        ({"protocol": "http"}, "--protocol http: sums is stateful, .* over gRPC only; use --protocol grpc$"),
        (
            {"target": "remote", "url": "http://localhost:8000"},
            "--url http://localhost:8000: sums is stateful, .* give the gRPC port$",
        ),
        ({"request_batch_size": 2}, "--request-batch-size 2: sums is stateful"),
        ({"model_warmup": True}, "--model-warmup: sums is stateful"),
        ({"concurrent_models": ("first",)}, "--concurrent-models first: sums is stateful"),
        (
            {"perf_analyzer_image": "sdk"},
            "--perf-analyzer-image: sums is stateful, .* leave it out$",
        ),
    ],
)
def test_options_that_do_not_fit_sequences_are_refused(models: Path, options: dict[str, Any], said: str) -> None:
    with pytest.raises(BadInputError, match=f"^{said}"):
        task(models, **options)


def test_a_size_in_a_profile_is_refused_with_its_line(models: Path) -> None:
    profile = models.parent / "st.yaml"
    profile.write_text("model: {repository: models, name: sums}\nrequest:\n  batch_size: 2\n")
    with pytest.raises(BadInputError, match=r"st\.yaml:3: request\.batch_size: 2: sums is stateful, .* write 1$"):
        prepare_task(RunOptions(str(profile)), TWO_CPUS, print)


def test_the_length_says_that_it_may_be_a_mix() -> None:
    with pytest.raises(ValueError, match=r"^write a whole number from 1 to 2147483647, or a mix such as 10\.\.30$"):
        parse_batch_size("20ms")


def test_a_length_for_a_model_without_state_is_refused(models: Path) -> None:
    with pytest.raises(BadInputError, match=r"^--sequence-length: first is not stateful"):
        task(models, "first", sequence_length=20)


@pytest.mark.parametrize(
    ("name", "options", "role"),
    [
        ("chain", {}, "a part of chain"),
        ("first", {"bls_composing_models": ("second",)}, "a part of first"),
        ("first", {"concurrent_models": ("second",)}, "a concurrent model"),
    ],
)
def test_a_stateful_model_is_measured_alone(models: Path, name: str, options: dict[str, Any], role: str) -> None:
    config = models / "second" / "config.pbtxt"
    config.write_text(f"{config.read_text()}sequence_batching {{ }}\n")
    with pytest.raises(BadInputError, match=f"^second: sequence_batching: .*, not as {role}; tune it itself$"):
        task(models, name, **options)


def test_a_stateful_variant_is_refused(models: Path) -> None:
    config = models / "second" / "config.pbtxt"
    config.write_text(f"{config.read_text()}sequence_batching {{ }}\n")
    with pytest.raises(BadInputError, match=r"^second: .*cannot be a variant"):
        task(models, "first", variants=("second",))
