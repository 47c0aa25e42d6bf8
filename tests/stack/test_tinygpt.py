"""The language model ``tinygpt`` on a real server: tokens, continuous batching, errors and cancellation."""

from __future__ import annotations

import contextlib
import queue
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import pytest
from tritonclient.grpc import InferenceServerClient, InferInput

from optimizer.config import model_config
from optimizer.config.model_source import ModelSource
from optimizer.core.candidate import Candidate
from optimizer.core.files import cache_folder
from optimizer.core.trial import LoadPoint
from optimizer.deploy.embedded_target import EmbeddedTarget
from optimizer.deploy.target_settings import TargetSettings
from optimizer.measure.load_client.generators import ClosedLoopGenerator
from optimizer.model.builders import build
from optimizer.model.input_data import to_json

Tokens: TypeAlias = npt.NDArray[np.int32]

SECONDS = 240.0  # only a server that hangs takes so long for a response
LONGEST = 512


class Stream:
    """A gRPC stream to the model; responses are read one by one."""

    def __init__(self, url: str) -> None:
        self._client = InferenceServerClient(url)
        self._responses: queue.Queue[tuple[Any, Any]] = queue.Queue()
        self._client.start_stream(lambda result, error: self._responses.put((result, error)))

    def send(self, name: str, prompt: list[int] | Tokens, max_tokens: int) -> None:
        ids = np.array(prompt, np.int32).reshape(1, -1)
        tensors = []
        for tensor, values in (("INPUT_IDS", ids), ("MAX_TOKENS", np.array([[max_tokens]], np.int32))):
            made = InferInput(tensor, list(values.shape), "INT32")
            made.set_data_from_numpy(values)
            tensors.append(made)
        self._client.async_stream_infer("tinygpt", tensors, request_id=name, enable_empty_final_response=True)

    def next(self) -> tuple[str, int, bool]:
        """Return the request, the token and whether it is the last response. Raises RuntimeError for an error."""
        result, error = self._responses.get(timeout=SECONDS)
        if error is not None:
            raise RuntimeError(error.message())
        response = result.get_response()
        output = result.as_numpy("OUTPUT_ID")
        assert output.shape == (1, 1)
        return response.id, int(output[0, 0]), response.parameters["triton_final_response"].bool_param

    def collect(self, requests: int) -> dict[str, list[int]]:
        """Return the tokens of each request, in the order of the last tokens."""
        tokens: dict[str, list[int]] = {}
        ended: dict[str, list[int]] = {}
        while len(ended) < requests:
            name, token, is_last = self.next()
            assert name not in ended
            tokens.setdefault(name, []).append(token)
            if is_last:
                ended[name] = tokens[name]
        return ended

    def close(self, *, cancel: bool = False) -> None:
        self._client.stop_stream(cancel_requests=cancel)
        self._client.close()


@pytest.fixture(scope="module")
def tinygpt() -> ModelSource:
    return build("tinygpt", {}, cache=cache_folder(), max_batch_size=16, kind="KIND_CPU", on_progress=print)


@pytest.fixture(scope="module")
def target(tinygpt: ModelSource, tmp_path_factory: pytest.TempPathFactory) -> Iterator[EmbeddedTarget]:
    made = EmbeddedTarget(tinygpt, TargetSettings(tmp_path_factory.mktemp("server") / "tritonserver.log"))
    yield made
    made.close()


@contextlib.contextmanager
def deployed(target: EmbeddedTarget, candidate: Candidate) -> Iterator[Stream]:
    with target.deploy(candidate) as endpoint, contextlib.closing(Stream(endpoint.grpc)) as stream:
        yield stream


def candidate_of(source: ModelSource, **settings: Any) -> Candidate:
    threads = (("parameters.intra_op_thread_count.string_value", "1"),)
    return replace(model_config.candidate_of(source.config), fields=threads, **settings)


def prompts(count: int) -> dict[str, Tokens]:
    rng = np.random.default_rng(5)
    return {
        str(i): rng.integers(0, 2048, length, dtype=np.int32) for i, length in enumerate(rng.integers(1, 50, count))
    }


@pytest.fixture(scope="module")
def tokens_one_by_one(target: EmbeddedTarget, tinygpt: ModelSource) -> dict[str, list[int]]:
    """Return the tokens of each prompt, computed one after another."""
    tokens: dict[str, list[int]] = {}
    with deployed(target, candidate_of(tinygpt, max_batch_size=1)) as stream:
        for name, prompt in prompts(12).items():
            stream.send(name, prompt, 6 + int(name))
            tokens |= stream.collect(1)
    return tokens


BATCHED = {"max_batch_size": 16, "dynamic_batching": True}


@pytest.mark.parametrize(
    "settings",
    [
        {"max_batch_size": 4},
        {**BATCHED, "max_queue_delay_us": 20_000},
        {**BATCHED, "instance_count": 2},
    ],
)
def test_the_requested_tokens_come_and_are_the_same_in_every_configuration(
    target: EmbeddedTarget, tinygpt: ModelSource, tokens_one_by_one: dict[str, list[int]], settings: dict[str, Any]
) -> None:
    with deployed(target, candidate_of(tinygpt, **settings)) as stream:
        for name, prompt in prompts(12).items():
            stream.send(name, prompt, 6 + int(name))
        tokens = stream.collect(12)
    assert {name: len(row) for name, row in tokens.items()} == {str(i): 6 + i for i in range(12)}
    assert tokens == tokens_one_by_one


def test_a_request_that_cannot_be_answered_gets_one_line(target: EmbeddedTarget, tinygpt: ModelSource) -> None:
    with deployed(target, candidate_of(tinygpt, max_batch_size=2, dynamic_batching=True)) as stream:
        stream.send("bad", [1] * 500, 13)
        with pytest.raises(RuntimeError) as caught:
            stream.next()
        assert "513 tokens; the model has at most 512" in str(caught.value)
        assert "\n" not in str(caught.value)
        stream.send("good", [1], 2)
        assert len(stream.collect(1)["good"]) == 2


def test_a_cancelled_request_leaves_its_place_to_a_short_one(target: EmbeddedTarget, tinygpt: ModelSource) -> None:
    """Two requests run at a time. The cancelled one would end after the other one of the same length."""
    with (
        target.deploy(candidate_of(tinygpt, max_batch_size=2, dynamic_batching=True)) as endpoint,
        contextlib.closing(Stream(endpoint.grpc)) as stream,
    ):
        stream.send("other", [1, 2, 3], LONGEST - 3)
        assert stream.next()[0] == "other"
        cancelled = Stream(endpoint.grpc)
        cancelled.send("cancelled", [1, 2, 3], LONGEST - 3)
        assert cancelled.next()[0] == "cancelled"
        cancelled.close(cancel=True)
        stream.send("short", [4, 5], 1)
        assert list(stream.collect(2)) == ["short", "other"]


def test_the_load_client_counts_its_tokens(target: EmbeddedTarget, tinygpt: ModelSource, tmp_path: Path) -> None:
    """The latency of a request is its time to first response and the times between its tokens."""
    data = tmp_path / "requests.json"
    data.write_bytes(
        to_json([{"INPUT_IDS": ids, "MAX_TOKENS": np.array([8], np.int32)} for ids in prompts(12).values()])
    )
    generator = ClosedLoopGenerator(
        log=tmp_path / "client.log", input_data=data, is_streaming=True, token_output="OUTPUT_ID"
    )
    candidate = candidate_of(tinygpt, max_batch_size=2, dynamic_batching=True)
    with target.deploy(candidate) as endpoint:  # the load continues until 60 requests have ended
        measured = generator.measure(endpoint, LoadPoint(1, concurrency=2), 1.0)
    tokens = measured.output_tokens_per_sec
    assert measured.throughput_infer_per_sec is not None
    assert tokens == pytest.approx(8 * measured.throughput_infer_per_sec, rel=0.25)
    assert tokens == pytest.approx(measured.responses_per_sec)
    assert measured.ttft_avg_ms is not None
    assert measured.itl_avg_ms is not None
    assert measured.latency_avg_ms == pytest.approx(measured.ttft_avg_ms + 7 * measured.itl_avg_ms, rel=0.01)


def test_the_server_counts_requests(target: EmbeddedTarget, tinygpt: ModelSource) -> None:
    with target.deploy(candidate_of(tinygpt, **BATCHED)) as endpoint:
        with contextlib.closing(Stream(endpoint.grpc)) as stream:
            for name in "abc":
                stream.send(name, [1, 2], 4)
            stream.collect(3)
        with InferenceServerClient(endpoint.grpc) as client:
            statistics = client.get_inference_statistics("tinygpt").model_stats[0]
    assert statistics.inference_count == 3
    assert statistics.inference_stats.success.count == 3
