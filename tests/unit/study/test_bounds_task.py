"""Test the bounds of a task that only tune's own client measures, and the options that do not fit them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from objectives.metrics import METRICS
from objectives.sla import Sla
from optimizer.core.errors import BadInputError
from optimizer.machine.hardware import Hardware
from optimizer.options.run_options import RunOptions
from optimizer.study.task import Task, prepare_task
from tests.repositories import write_sleeper, write_sums

TWO_CPUS = Hardware((), "a CPU", 2, 1 << 30)
HIGH = {"p99.9": 30.0}


@pytest.fixture
def models(tmp_path: Path) -> Path:
    write_sleeper(tmp_path / "models", 1.0)
    write_sums(tmp_path / "models", tmp_path / "log")
    return tmp_path / "models"


def task(models: Path, name: str = "sleeper", **options: Any) -> Task:
    return prepare_task(RunOptions(name, model_repository=str(models), **options), TWO_CPUS, print)


def test_bounds_are_those_of_the_options(models: Path) -> None:
    problem = task(models, sla_ms=HIGH, max_error_percent=0.1, objectives=("goodput",), search="tpe").problem
    assert problem.sla == Sla.from_bounds({"p99.9": 30.0, "error-rate": 0.1})
    assert problem.needs_own_client is METRICS["latency-p99.9"]
    assert problem.maximizes_throughput
    assert task(models, sla_ms={"p99": 30.0}).problem.needs_own_client is None


@pytest.mark.parametrize(
    ("percentile", "hints"),
    [
        ("p59", ["p59 <= 30 ms lets 41 % of the requests be late; did you mean p95?"]),
        ("p87.5", ["p87.5 <= 30 ms lets 12.5 % of the requests be late"]),
        ("p50", []),
        ("p90", []),
        ("avg", []),
    ],
)
def test_a_low_percentile_is_pointed_out(models: Path, percentile: str, hints: list[str]) -> None:
    said: list[str] = []
    options = RunOptions("sleeper", model_repository=str(models), sla_ms={percentile: 30.0})
    prepare_task(options, TWO_CPUS, said.append)
    assert said == hints


def test_bounds_of_a_profile_are_read(models: Path) -> None:
    profile = models.parent / "p.yaml"
    profile.write_text(
        "model: {repository: models, name: sleeper}\nsla: {p99.90: 30ms, p95: 10ms}\ngpu: {sla: {p99.5: 5ms}}\n"
    )
    problem = prepare_task(RunOptions(str(profile)), TWO_CPUS, print).problem
    assert problem.sla == Sla.from_bounds({"p95": 10.0, "p99.9": 30.0})


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"sla_ms": HIGH, "protocol": "http"}, "--protocol http: .* report p99.9, .*; use --protocol grpc"),
        (
            {"max_error_percent": 0.1, "target": "remote", "url": "http://h:8000"},
            "--url http://h:8000: .* error-rate",
        ),
        ({"sla_ms": HIGH, "perf_analyzer_image": "sdk"}, "--perf-analyzer-image: .* leave it out"),
        ({"objectives": ("goodput",), "concurrent_models": ("other",)}, "--concurrent-models: .* report goodput, "),
    ],
)
def test_options_that_do_not_fit_are_refused(models: Path, options: dict[str, Any], said: str) -> None:
    (models / "sleeper").rename(models / "other")
    write_sleeper(models, 1.0)
    with pytest.raises(BadInputError, match=f"^{said}"):
        task(models, **options)


def test_errors_of_a_stateful_model_are_refused(models: Path) -> None:
    with pytest.raises(
        BadInputError,
        match=r"^--max-error-rate: sums is stateful, .* a failed request makes the rest of its sequence void",
    ):
        task(models, "sums", max_error_percent=1.0)
