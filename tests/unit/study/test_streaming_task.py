"""Test the task of a model that streams: the options that it refuses, and its part in other models."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from optimizer.config.search_space import ModelKind
from optimizer.core.errors import BadInputError
from optimizer.machine.hardware import Hardware
from optimizer.options.run_options import RunOptions
from optimizer.study.task import Task, prepare_task
from tests.repositories import write_ensemble, write_streamer

TWO_CPUS = Hardware((), "a CPU", 2, 1 << 30)
DECOUPLED = "model_transaction_policy { decoupled: true }\n"


@pytest.fixture
def models(tmp_path: Path) -> Path:
    write_streamer(tmp_path / "models", 1.0)
    write_ensemble(tmp_path / "models", 1.0)
    return tmp_path / "models"


def task(models: Path, name: str = "streamer", **options: Any) -> Task:
    return prepare_task(RunOptions(name, model_repository=str(models), **options), TWO_CPUS, print)


@pytest.mark.parametrize("load", ["concurrency", "rate"])
def test_a_decoupled_model_is_accepted_when_it_is_tuned_itself(models: Path, load: str) -> None:
    made = task(models, load=load)
    assert made.source.is_streaming
    assert made.problem.kind is ModelKind.STREAMING


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"protocol": "http"}, "--protocol http: streamer streams, .* over gRPC only; use --protocol grpc$"),
        ({"target": "remote", "url": "http://localhost:8000"}, "--url http://localhost:8000: .* the gRPC port$"),
        ({"perf_analyzer_image": "sdk"}, "--perf-analyzer-image: streamer streams, .* leave it out$"),
        ({"concurrent_models": ("first",)}, "--concurrent-models first: streamer is decoupled, "),
    ],
)
def test_options_that_do_not_fit_streams_are_refused(models: Path, options: dict[str, Any], said: str) -> None:
    with pytest.raises(BadInputError, match=f"^{said}"):
        task(models, **options)


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("chain", {}),
        ("first", {"bls_composing_models": ("second",)}),
        ("first", {"concurrent_models": ("second",)}),
    ],
)
def test_a_decoupled_model_is_no_part_of_other_loads(models: Path, name: str, options: dict[str, Any]) -> None:
    config = models / "second" / "config.pbtxt"
    config.write_text(config.read_text() + DECOUPLED)
    with pytest.raises(BadInputError, match=r"^\w+: decoupled: 'second' sends .* or use a copy that responds once$"):
        task(models, name, **options)


@pytest.mark.parametrize("step_is_decoupled", [True, False])
def test_a_decoupled_ensemble_is_refused(models: Path, step_is_decoupled: bool) -> None:
    for name in ("chain", "second")[: 1 + step_is_decoupled]:
        config = models / name / "config.pbtxt"
        config.write_text(config.read_text() + DECOUPLED)
    with pytest.raises(BadInputError, match=r"^chain: decoupled: "):
        task(models, "chain")


def test_decoupled_models_behind_a_decoupled_python_model_are_accepted(models: Path) -> None:
    config = models / "second" / "config.pbtxt"
    config.write_text(config.read_text() + DECOUPLED)
    assert task(models, "streamer", bls_composing_models=("second",)).source.composing.keys() == {"second"}


def test_an_objective_of_streams_names_the_one_to_use_instead(models: Path) -> None:
    with pytest.raises(BadInputError, match=r"^--objective output-throughput: .* so use --objective throughput$"):
        task(models, "first", objectives=("output-throughput",), sla_ms={"latency-p95": 20.0})


def test_a_variant_streams_only_if_the_model_does(models: Path) -> None:
    config = models / "second" / "config.pbtxt"
    config.write_text(config.read_text() + DECOUPLED)
    with pytest.raises(BadInputError, match=r"^second: only one of first and second is decoupled"):
        task(models, "first", variants=("second",))
