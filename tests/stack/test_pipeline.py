"""Ensembles, BLS and variants on the real server: each model is served as the candidate says."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from tritonclient.grpc import InferenceServerClient, InferInput
from tritonclient.grpc.model_config_pb2 import ModelConfig

from objectives import batch_stats
from optimizer.config.model_source import configured_candidate, served_models
from optimizer.core.candidate import VARIANT, Candidate
from optimizer.core.endpoint import Endpoint
from optimizer.core.errors import DeploymentError
from optimizer.core.trial import LoadPoint
from optimizer.deploy import runtime
from optimizer.deploy.embedded_target import EmbeddedTarget
from optimizer.deploy.target_settings import TargetSettings
from optimizer.measure.model_statistics import read_statistics
from optimizer.measure.output_check import BaselineOutputCheck
from optimizer.measure.perf_analyzer import LocalRunner, PerfAnalyzer
from optimizer.model.repository import read_source
from tests.generated_requests import write_requests
from tests.repositories import (
    doubler,
    onnx_model,
    skip_without_python_models,
    stored,
    write_bls,
    write_model,
    write_python_model,
)

COUNT, DELAY, SIZE = (
    f"first/{name}" for name in ("instance_group_count", "max_queue_delay_microseconds", "max_batch_size")
)


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory) -> Path:
    skip_without_python_models()
    folder = tmp_path_factory.mktemp("models")
    write_bls(folder, milliseconds=5)
    return folder


@pytest.fixture(scope="module")
def chain(repository: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[EmbeddedTarget]:
    source = read_source(stored(repository), "chain", batcher="second")
    target = EmbeddedTarget(source, TargetSettings(tmp_path_factory.mktemp("server") / "log"))
    with contextlib.closing(target):
        yield target


def served(endpoint: Endpoint, model: str) -> ModelConfig:
    with InferenceServerClient(endpoint.grpc) as client:
        assert client.is_model_ready(model)
        config = client.get_model_config(model).config
    assert isinstance(config, ModelConfig)
    return config


def answer(endpoint: Endpoint, model: str, x: str, y: str) -> list[float]:
    values = InferInput(x, [1, 4], "FP32")
    values.set_data_from_numpy(np.arange(4, dtype=np.float32)[None])
    with InferenceServerClient(endpoint.grpc) as client:
        return [float(value) for value in client.infer(model, [values]).as_numpy(y)[0]]


def test_each_step_is_served_as_the_candidate_says(chain: EmbeddedTarget) -> None:
    for candidate in (
        Candidate(8, True, 300, (4,), 2, ((COUNT, 2), (DELAY, 0))),
        Candidate(8, True, 300, (4,), 2, ((COUNT, 1), (DELAY, "off"))),  # only the first step changes
    ):
        with chain.deploy(candidate) as endpoint:
            second, first = served(endpoint, "second"), served(endpoint, "first")
            assert second.dynamic_batching.max_queue_delay_microseconds == 300
            assert list(second.dynamic_batching.preferred_batch_size) == [4]
            assert second.instance_group[0].count == 2
            fields = dict(candidate.fields)
            assert first.instance_group[0].count == fields[COUNT]
            assert first.HasField("dynamic_batching") == (fields[DELAY] == 0)
            assert answer(endpoint, "chain", "X", "Y") == [0, 1, 2, 3]


def test_an_ensemble_takes_no_more_than_its_steps(chain: EmbeddedTarget) -> None:
    for size, other in ((4, 8), (8, 2), (8, 8)):
        with chain.deploy(Candidate(size, fields=((SIZE, other),))) as endpoint:
            assert served(endpoint, "chain").max_batch_size == min(size, other)
            assert served(endpoint, "second").max_batch_size == size
            assert served(endpoint, "first").max_batch_size == other


def test_models_load_from_the_handed_out_files(chain: EmbeddedTarget) -> None:
    with chain.deploy(Candidate(4, True, fields=((COUNT, 2),)), fresh=True) as endpoint:
        assert (endpoint.model, endpoint.batcher, endpoint.largest_request) == ("chain", "second", 4)
        assert served(endpoint, "first").instance_group[0].count == 2
        assert served(endpoint, "second").max_batch_size == 4


def test_refused_step_fails_the_candidate_and_the_next_is_served(chain: EmbeddedTarget) -> None:
    """The server's answer depends on the models that are loaded. The error has the step's reason, from the log."""
    field = "first/preferred_batch_size"
    of_second = "cannot read model 'second': dynamic batching preferred size must be <= max batch size"
    chain.stop()  # so that first the ensemble is not loaded, then it is, then the other step changes as well
    for refused, reason in (
        (Candidate(8, True, preferred_batch_sizes=(16,)), of_second),
        (Candidate(8, True, 100, (16,), fields=((DELAY, 0),)), of_second),
        (Candidate(8, fields=((DELAY, 0), (field, "16"))), "first: preferred_batch_size 16 does not fit 8"),
    ):
        with pytest.raises(DeploymentError, match=reason), chain.deploy(refused):
            pass
        with chain.deploy(Candidate(8, True)) as endpoint:
            assert answer(endpoint, "chain", "X", "Y") == [0, 1, 2, 3]


def test_batches_are_counted_for_the_tuned_model(chain: EmbeddedTarget, tmp_path: Path) -> None:
    installed = runtime.ensure(print)
    load = PerfAnalyzer(
        installed.perf_analyzer,
        LocalRunner(installed.perf_analyzer_libraries),
        tmp_path / "log",
        write_requests(chain.source.config, tmp_path),
        window_ms=400,  # perf_analyzer is started again if no request is answered within a window
        repeat=False,
    )
    with chain.deploy(Candidate(8, True)) as endpoint:
        before = read_statistics(endpoint)
        measured = load.measure(endpoint, LoadPoint(1, 8))
        after = read_statistics(endpoint)
    assert before is not None
    assert after is not None
    assert (before.name, after.name) == ("second", "second")
    entries = batch_stats.from_text(measured.batch_stats or "")
    assert any(size > 1 for size, _, _ in entries)
    # each request has one sample, and its compute time is that of its batch
    requests = sum(size * executions for size, executions, _ in entries)
    answered = after.inference_stats.success.count - before.inference_stats.success.count
    launches = (tmp_path / "commands.log").read_text().count("--concurrency-range")
    # a launch that gave no result is repeated, and its requests are not part of the measurement
    assert 0 < requests <= answered
    assert requests == answered or launches > 1
    assert measured.compute_input_ms is not None
    assert measured.compute_infer_ms is not None
    assert measured.compute_output_ms is not None
    compute_ms = sum(size * ns for size, _, ns in entries) / requests / 1e6
    of_requests_ms = measured.compute_input_ms + measured.compute_infer_ms + measured.compute_output_ms
    assert of_requests_ms == pytest.approx(compute_ms, rel=1e-6)
    assert all(ns >= 5e6 * executions for _, executions, ns in entries), "the second step sleeps for 5 ms"


def test_python_model_and_the_models_that_it_calls(repository: Path, tmp_path: Path) -> None:
    source = read_source(stored(repository), "caller", composing=["first", "second"], batcher="second")
    fields = ("caller/instance_group_count", COUNT)
    assert configured_candidate(source, fields) == Candidate(8, fields=((fields[0], 1), (fields[1], 1)))
    target = EmbeddedTarget(source, TargetSettings(tmp_path / "log"))
    candidate = Candidate(8, True, fields=((fields[0], 2), (COUNT, 1)))
    with contextlib.closing(target), target.deploy(candidate) as endpoint:
        assert served(endpoint, "caller").instance_group[0].count == 2
        assert served(endpoint, "second").HasField("dynamic_batching")
        assert answer(endpoint, "caller", "x", "y") == [0, 1, 2, 3]


def test_variants_are_compared_with_the_baseline_and_only_one_is_served(tmp_path: Path) -> None:
    from onnx import TensorProto, helper

    config = 'platform: "onnxruntime_onnx"\nmax_batch_size: 8\n'
    tripled = [helper.make_node("Sum", ["x", "x", "x"], ["y"])]
    dims = (TensorProto.FLOAT, ("batch", 4))
    for name, model in (
        ("plain", doubler()),
        ("same", doubler()),
        ("wrong", onnx_model(tripled, {"x": dims}, {"y": dims})),
    ):
        write_model(tmp_path / "models", name, config, model)
    source = read_source(stored(tmp_path / "models"), "plain", variants=["same", "wrong"])
    requests = write_requests(source.config, tmp_path)
    guard = BaselineOutputCheck(tmp_path / "reference.npz", input_data=requests, shapes=(), request_batch_size=1)
    target = EmbeddedTarget(source, TargetSettings(tmp_path / "log"))
    with contextlib.closing(target):
        with target.deploy(configured_candidate(source, [VARIANT])) as endpoint:
            assert endpoint.model == "plain"
            guard.record_reference(endpoint)
        with target.deploy(Candidate(8, fields=((VARIANT, "same"),))) as endpoint:
            guard.check(endpoint)
            assert answer(endpoint, "same", "x", "y") == [0, 2, 4, 6]
            with InferenceServerClient(endpoint.grpc) as client:
                assert not client.is_model_ready("plain")
        with (
            target.deploy(Candidate(8, fields=((VARIANT, "wrong"),))) as endpoint,
            pytest.raises(DeploymentError, match="outputs differ"),
        ):
            guard.check(endpoint)


def test_a_variant_whose_reload_was_refused_is_unloaded_for_the_next_one(tmp_path: Path) -> None:
    """Triton keeps the old configuration loaded when it refuses the new one."""
    for name in ("plain", "same"):
        write_model(tmp_path / "models", name, 'platform: "onnxruntime_onnx"\nmax_batch_size: 8\n', doubler())
    source = read_source(stored(tmp_path / "models"), "plain", variants=["same"])
    undeployable = Candidate(8, True, 0, (16,), fields=((VARIANT, "plain"),))
    settings = TargetSettings(tmp_path / "log", sees_gpus=False)
    with contextlib.closing(EmbeddedTarget(source, settings)) as target:
        with target.deploy(configured_candidate(source, [VARIANT])) as endpoint:
            assert endpoint.model == "plain"
        with pytest.raises(DeploymentError, match="preferred"), target.deploy(undeployable):
            pass
        with (
            target.deploy(Candidate(8, fields=((VARIANT, "same"),))) as endpoint,
            InferenceServerClient(endpoint.grpc) as client,
        ):
            assert client.is_model_ready("same")
            assert not client.is_model_ready("plain")


def test_candidates_are_warmed_up_without_response_cache(tmp_path: Path) -> None:
    config = 'platform: "onnxruntime_onnx"\nmax_batch_size: 8\nresponse_cache { enable: true }\n'
    write_model(tmp_path / "models", "plain", config, doubler(dims=("batch", "width")))
    source = replace(read_source(stored(tmp_path / "models"), "plain"), warm_up={"x": (4,)})
    target = EmbeddedTarget(source, TargetSettings(tmp_path / "log"))
    candidate = Candidate(8, True, preferred_batch_sizes=(4,))
    assert served_models(source, candidate).configs["plain"].response_cache.enable
    with contextlib.closing(target):
        for fresh in (False, True):
            with target.deploy(candidate, fresh=fresh) as endpoint:
                now = served(endpoint, "plain")
                assert [sample.batch_size for sample in now.model_warmup] == [1, 4, 8]
                assert list(now.model_warmup[0].inputs["x"].dims) == [4]
                assert not now.response_cache.enable
                assert answer(endpoint, "plain", "x", "y") == [0, 2, 4, 6]


# the output is the largest batch that the model has executed before
LARGEST_PROGRAM = """\
import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def initialize(self, args):
        self.largest = 0

    def execute(self, requests):
        inputs = [pb_utils.get_input_tensor_by_name(request, "x").as_numpy() for request in requests]
        answers = [pb_utils.InferenceResponse([pb_utils.Tensor("y", np.full_like(x, self.largest))]) for x in inputs]
        self.largest = max(self.largest, len(requests))
        return answers
"""


def test_a_warm_up_of_the_user_is_no_larger_than_the_batches_of_a_candidate(tmp_path: Path) -> None:
    folder = write_python_model(tmp_path / "models", "largest", LARGEST_PROGRAM)
    sample = 'key: "x" value { data_type: TYPE_FP32 dims: 4 zero_data: true }'
    with (folder / "config.pbtxt").open("a") as config:
        config.write(f'model_warmup {{ name: "own" batch_size: 8 inputs {{ {sample} }} }}\n')
    target = EmbeddedTarget(read_source(stored(tmp_path / "models"), "largest"), TargetSettings(tmp_path / "log"))
    with contextlib.closing(target):
        for size in (4, 8):
            with target.deploy(Candidate(size)) as endpoint:
                assert answer(endpoint, "largest", "x", "y") == [size] * 4


def test_a_model_without_a_batch_dimension_is_warmed_up(tmp_path: Path) -> None:
    folder = write_python_model(tmp_path / "models", "largest", LARGEST_PROGRAM)
    config = folder / "config.pbtxt"
    config.write_text(config.read_text().replace("max_batch_size: 8", "max_batch_size: 0").replace("4", "[ 1, 4 ]"))
    source = replace(read_source(stored(tmp_path / "models"), "largest"), warm_up={})
    target = EmbeddedTarget(source, TargetSettings(tmp_path / "log"))
    with contextlib.closing(target), target.deploy(configured_candidate(source, [])) as endpoint:
        assert answer(endpoint, "largest", "x", "y") == [1] * 4
