"""Test the tasks of models: request sizes, bounds, streams and sequences, and the options that do not fit them."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import pytest

from objectives.metrics import METRICS
from objectives.sla import Sla
from optimizer.config.problem import ModelKind
from optimizer.core.errors import BadInputError
from optimizer.machine.hardware import Hardware
from optimizer.options.run_options import RunOptions
from optimizer.options.values import parse_batch_size
from optimizer.study.task import Task, prepare_task
from tests.repositories import doubler, serialized, write_ensemble, write_sleeper, write_streamer, write_sums

TWO_CPUS = Hardware((), "a CPU", 2, 1 << 30)
HIGH = {"p99.9": 30.0}
DECOUPLED = "model_transaction_policy { decoupled: true }\n"
SIZE_CASES = [
    ("64", "64 is above the model's max_batch_size 8; lower it, "),
    ("1*9|8*1", r"1\*9\|8\*1 is a mix of up to 8 samples per request, but perf_analyzer sends requests of one size"),
]


@pytest.fixture
def models(tmp_path: Path) -> Path:
    write_sleeper(tmp_path / "models", 1.0)
    write_sums(tmp_path / "models", tmp_path / "log")
    write_streamer(tmp_path / "models", 1.0)
    write_ensemble(tmp_path / "models", 1.0)
    return tmp_path / "models"


def task(models: Path, name: str, **options: Any) -> Task:
    return prepare_task(RunOptions(name, model_repository=str(models), **options), TWO_CPUS, print)


def test_a_size_above_that_of_an_onnx_file_without_batches_is_refused_with_the_export(tmp_path: Path) -> None:
    file = tmp_path / "fixed.onnx"
    file.write_bytes(serialized(doubler(dims=(1, 4))))
    said = (
        r"^--request-batch-size 8 is above the model's max_batch_size 0; leave it out, or export the model with an "
    )
    with pytest.raises(BadInputError, match=said):
        prepare_task(RunOptions(str(file), request_batch_size=parse_batch_size("8")), TWO_CPUS, print)


@pytest.mark.parametrize(("size", "said"), SIZE_CASES)
def test_a_size_of_the_profile_is_refused_with_its_line(size: str, said: str, tmp_path: Path) -> None:
    model = write_sleeper(tmp_path / "models", 1.0).name
    profile = tmp_path / "p.yaml"
    profile.write_text(f"model: {{repository: models, name: {model}}}\nrequest:\n  batch_size: {size}\n")
    with pytest.raises(BadInputError, match=rf"p\.yaml:3: request\.batch_size: {said}"):
        prepare_task(RunOptions(str(profile)), TWO_CPUS, print)


@pytest.mark.parametrize(
    ("request_section", "said"),
    [
        ("shapes: {x: [3, 3]}", r"p\.yaml:3: request\.shapes\.x: x has dims \[\d+\]; write sizes that fit"),
        ("shapes: {z: 3}", r"p\.yaml:3: request\.shapes\.z: the model's inputs are x$"),
        ("ranges: {z: 0..3}", r"p\.yaml:3: request\.ranges\.z: the model's inputs are x$"),
    ],
)
def test_an_input_of_the_profile_is_refused_with_its_line(request_section: str, said: str, tmp_path: Path) -> None:
    model = write_sleeper(tmp_path / "models", 1.0).name
    profile = tmp_path / "p.yaml"
    profile.write_text(f"model: {{repository: models, name: {model}}}\nrequest:\n  {request_section}\n")
    with pytest.raises(BadInputError, match=said):
        prepare_task(RunOptions(str(profile)), TWO_CPUS, print)
    profile.write_text(f"model: {{repository: models, name: {model}}}\n")
    with pytest.raises(BadInputError, match=r"^shape z:3: the model's inputs are x$") as caught:
        prepare_task(RunOptions(str(profile), shapes=("z:3",)), TWO_CPUS, print)
    assert str(pickle.loads(pickle.dumps(caught.value))) == str(caught.value), "workers send errors to each other"


@pytest.mark.parametrize(("size", "said"), SIZE_CASES)
def test_a_size_of_the_command_line_is_refused_with_its_option(size: str, said: str, tmp_path: Path) -> None:
    model = write_sleeper(tmp_path / "models", 1.0).name
    options = RunOptions(model, model_repository=str(tmp_path / "models"), request_batch_size=size)
    with pytest.raises(BadInputError, match=f"^--request-batch-size {said}"):
        prepare_task(options, TWO_CPUS, print)


def test_a_size_of_a_trace_above_the_space_is_refused_with_its_column(tmp_path: Path) -> None:
    model = write_sleeper(tmp_path / "models", 1.0).name
    trace, profile = tmp_path / "trace.csv", tmp_path / "p.yaml"
    trace.write_text("time_s,batch_size\n" + "".join(f"{i / 100},{1 + i % 2 * 6}\n" for i in range(100)))
    profile.write_text(f"model: {{repository: models, name: {model}}}\nspace: {{max_batch_size: [2, 4]}}\n")
    options = RunOptions(str(profile), load="rate", request_times=str(trace))
    with pytest.raises(BadInputError, match="batch_size 7 is above every max_batch_size of ") as caught:
        prepare_task(options, TWO_CPUS, print)
    assert str(caught.value).startswith(f"{trace}: ")


def test_bounds_are_those_of_the_options(models: Path) -> None:
    problem = task(
        models, "sleeper", sla_ms=HIGH, max_error_percent=0.1, objectives=("goodput",), search="tpe"
    ).problem
    assert problem.sla == Sla.from_bounds({"p99.9": 30.0, "error-rate": 0.1})
    assert problem.unreported_goal is METRICS["latency-p99.9"]
    assert problem.maximizes_throughput
    assert task(models, "sleeper", sla_ms={"p99": 30.0}).problem.unreported_goal is None


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
            {"max_error_percent": 0.1, "target": "remote", "protocol": "http", "url": "http://h:8000"},
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
        task(models, "sleeper", **options)


def test_errors_of_a_stateful_model_are_refused(models: Path) -> None:
    with pytest.raises(
        BadInputError,
        match=r"^--max-error-rate: sums is stateful, .* a failed request makes the rest of its sequence void",
    ):
        task(models, "sums", max_error_percent=1.0)


@pytest.mark.parametrize("load", ["concurrency", "rate"])
def test_a_decoupled_model_is_accepted_when_it_is_tuned_itself(models: Path, load: str) -> None:
    made = task(models, "streamer", load=load)
    assert made.source.is_streaming
    assert made.problem.kind is ModelKind.STREAMING


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"protocol": "http"}, "--protocol http: streamer streams, .* over gRPC only; use --protocol grpc$"),
        (
            {"target": "remote", "protocol": "http", "url": "http://localhost:8000"},
            "--url http://localhost:8000: .* the gRPC port$",
        ),
        ({"perf_analyzer_image": "sdk"}, "--perf-analyzer-image: streamer streams, .* leave it out$"),
        ({"concurrent_models": ("first",)}, "--concurrent-models first: streamer is decoupled, "),
    ],
)
def test_options_that_do_not_fit_streams_are_refused(models: Path, options: dict[str, Any], said: str) -> None:
    with pytest.raises(BadInputError, match=f"^{said}"):
        task(models, "streamer", **options)


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


def test_sequences_have_perf_analyzers_default_length_and_one_comparison(models: Path) -> None:
    made = task(models, "sums")
    assert str(made.sequence_length) == "20"
    assert [role for role, _ in made.comparisons()] == ["baseline"]
    assert made.problem.kind is ModelKind.STATEFUL
    assert made.problem.space.is_stateful


def test_a_warm_up_of_a_step_needs_the_sizes_of_its_inputs(models: Path) -> None:
    assert task(models, "chain", model_warmup=True).source.warm_up == {}
    for step in ("first", "second"):
        config = models / step / "config.pbtxt"
        config.write_text(config.read_text().replace("dims: 4", "dims: -1"))
    said = "--model-warmup: requests go to chain, so the size of input x of (first|second) is not known; leave it out"
    with pytest.raises(BadInputError, match=f"^{said}"):
        task(models, "chain", model_warmup=True)


@pytest.mark.parametrize("text", ["5", "10..30", "5*3|40*1"])
def test_the_length_may_be_a_distribution(models: Path, text: str) -> None:
    assert str(task(models, "sums", sequence_length=text).sequence_length) == text


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"load": "rate"}, "sums is stateful .* without a request rate; use --load concurrency"),
        ({"protocol": "http"}, "--protocol http: sums is stateful, .* over gRPC only; use --protocol grpc$"),
        (
            {"target": "remote", "protocol": "http", "url": "http://localhost:8000"},
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
        task(models, "sums", **options)


def test_a_size_in_a_profile_is_refused_with_its_line(models: Path) -> None:
    profile = models.parent / "st.yaml"
    profile.write_text("model: {repository: models, name: sums}\nrequest:\n  batch_size: 2\n")
    with pytest.raises(BadInputError, match=r"st\.yaml:3: request\.batch_size: 2: sums is stateful, .* write 1$"):
        prepare_task(RunOptions(str(profile)), TWO_CPUS, print)


def test_a_size_that_is_no_number_is_refused_with_the_form_of_a_mix() -> None:
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
