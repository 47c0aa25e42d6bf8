"""The language model ``tinygpt``: its arithmetic against a plain one, its cache, and its continuous batching."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx
import onnxruntime
import pytest
from onnx import numpy_helper
from pydantic import ValidationError
from scipy import special

from optimizer.config.model_source import ModelSource
from optimizer.model import input_data as request_data
from optimizer.model.builders import build, tinygpt
from optimizer.model.builders.python_models.tinygpt import (
    CACHE_STEP,
    CANCELLED,
    Generation,
    RunningBatch,
    Scheduler,
    check_request,
    open_session,
)

Array = npt.NDArray[Any]

LAYERS, HEADS, VOCABULARY, POSITIONS = 2, 2, 50, 160


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> ModelSource:
    settings = {"layers": LAYERS, "hidden": 16, "heads": HEADS, "vocabulary": VOCABULARY, "positions": POSITIONS}
    cache = tmp_path_factory.mktemp("tinygpt")
    return build("tinygpt", settings, cache=cache, max_batch_size=4, kind="KIND_GPU", on_progress=lambda _: None)


@pytest.fixture(scope="module")
def session(small: ModelSource) -> onnxruntime.InferenceSession:
    return open_session(model_file(small), 1)


def model_file(source: ModelSource) -> Path:
    return source.folder("tinygpt") / "1" / "decoder.onnx"


# -- arithmetic -----------------------------------------------------------------------------------------------------


def norm(x: Array, w: dict[str, Array], name: str) -> Array:
    centred = x - x.mean(-1, keepdims=True)
    out: Array = centred / np.sqrt(x.var(-1, keepdims=True) + tinygpt.EPSILON) * w[f"{name}.scale"]
    return out + w[f"{name}.bias"]


def dense(x: Array, w: dict[str, Array], name: str) -> Array:
    out: Array = x @ w[f"{name}.weight"] + w[f"{name}.bias"]
    return out


def reference_logits(w: dict[str, Array], ids: Array) -> Array:
    """Compute GPT-2 for one sequence, head by head, and return the logits after each token."""
    x = w["embedding.token"][ids] + w["embedding.position"][: len(ids)]
    future = np.triu(np.full((len(ids), len(ids)), -np.inf), 1)
    for layer in range(LAYERS):
        name = f"layer.{layer}"
        normed = norm(x, w, f"{name}.attention.norm")
        query, key, value = (dense(normed, w, f"{name}.attention.{part}") for part in ("query", "key", "value"))
        size = x.shape[1] // HEADS
        mixed = []
        for head in range(HEADS):
            columns_of_head = slice(head * size, (head + 1) * size)
            scores = query[:, columns_of_head] @ key[:, columns_of_head].T / np.sqrt(size) + future
            mixed.append(special.softmax(scores, axis=-1) @ value[:, columns_of_head])
        x = x + dense(np.concatenate(mixed, 1), w, f"{name}.attention")
        inner = dense(norm(x, w, f"{name}.norm"), w, f"{name}.inner")
        gelu = 0.5 * inner * (1 + np.tanh(np.sqrt(2 / np.pi) * (inner + 0.044715 * inner**3)))
        x = x + dense(gelu, w, name)
    out: Array = norm(x, w, "final.norm") @ w["head.weight"]
    return out


@pytest.fixture(scope="module")
def weights(small: ModelSource) -> dict[str, Array]:
    model = onnx.load(str(model_file(small)))
    return {tensor.name: numpy_helper.to_array(tensor) for tensor in model.graph.initializer}


def decode(
    session: Any, ids: Array, counts: Sequence[int], past_counts: Sequence[int], past: dict[str, Array]
) -> Any:
    """Return the outputs of one step by name."""
    feeds = {
        "input_ids": ids,
        "token_counts": np.array(counts, np.int64),
        "past_counts": np.array(past_counts, np.int64),
        **past,
    }
    names = [output.name for output in session.get_outputs()]
    return dict(zip(names, session.run(names, feeds), strict=True))


def empty_cache(sequences: int, room: int) -> dict[str, Array]:
    shapes = {"past_key": (HEADS, 8, room), "past_value": (HEADS, room, 8)}
    return {
        f"{name}.{layer}": np.full((sequences, *shape), 3.0)  # entries beyond the past must not matter
        for name, shape in shapes.items()
        for layer in range(LAYERS)
    }


def test_the_decoder_passes_the_checker(small: ModelSource) -> None:
    onnx.checker.check_model(str(model_file(small)), full_check=True)


def test_one_pass_computes_gpt_2(session: Any, weights: dict[str, Array]) -> None:
    rng = np.random.default_rng(1)
    counts = [7, 12, 1]
    ids = rng.integers(0, VOCABULARY, (3, 12))
    outputs = decode(session, ids, counts, [0, 0, 0], empty_cache(3, 1))
    for row, count in enumerate(counts):
        expected = reference_logits(weights, ids[row, :count])[-1]
        np.testing.assert_allclose(outputs["logits"][row], expected, atol=1e-9)


def test_steps_with_the_cache_equal_one_pass(session: Any, weights: dict[str, Array]) -> None:
    ids = np.random.default_rng(2).integers(0, VOCABULARY, 10)
    expected = reference_logits(weights, ids)
    cache = empty_cache(1, 16)
    for place in range(len(ids)):
        outputs = decode(session, ids[None, place : place + 1], [1], [place], cache)
        np.testing.assert_allclose(outputs["logits"][0], expected[place], atol=1e-9)
        for layer in range(LAYERS):
            cache[f"past_key.{layer}"][:, :, :, place] = outputs[f"new_key.{layer}"][..., 0]
            cache[f"past_value.{layer}"][:, :, place] = outputs[f"new_value.{layer}"][:, :, 0]


# -- continuous batching --------------------------------------------------------------------------------------------


PATIENCE_SECONDS = 3000.0  # at idle priority, the processor serves other processes first


class RecordingClient:
    """Keeps the responses to a request. With ``is_held``, the scheduler's thread waits at its first token."""

    def __init__(self, *, is_held: bool = False) -> None:
        self.tokens: list[int] = []
        self.error = ""
        self.cancelled = False
        self.ended = threading.Event()
        self.ended_seconds = 0.0
        self.begun = threading.Event()
        self.may_go_on = threading.Event()
        if not is_held:
            self.may_go_on.set()

    def send(self, token: int, *, is_last: bool) -> None:
        assert not self.ended.is_set()
        self.tokens.append(token)
        self.begun.set()
        assert self.may_go_on.wait(PATIENCE_SECONDS)
        if is_last:
            self.ended_seconds = time.perf_counter()
            self.ended.set()

    def fail(self, message: str) -> None:
        assert not self.ended.is_set()
        self.error = message
        self.ended.set()

    def is_cancelled(self) -> bool:
        return self.cancelled

    def wait(self) -> list[int]:
        assert self.ended.wait(PATIENCE_SECONDS)
        return self.tokens

    def wait_for_first_token(self) -> None:
        assert self.begun.wait(PATIENCE_SECONDS)


def prompts(count: int, seed: int = 0) -> list[Array]:
    rng = np.random.default_rng(seed)
    return [rng.integers(0, VOCABULARY, length) for length in rng.integers(1, 40, count)]


def generate(batch: RunningBatch, requests: Sequence[tuple[Array, int]]) -> list[list[int]]:
    """Return the tokens of each request; new ones join whenever a slot is free."""
    generations = [Generation(prompt, token_count, RecordingClient()) for prompt, token_count in requests]
    waiting = list(generations)
    while waiting or batch.running:
        new, waiting = waiting[: batch.free], waiting[batch.free :]
        if new:
            batch.add(new)
        if batch.running:
            batch.step()
    clients = [generation.client for generation in generations]
    return [client.tokens for client in clients if isinstance(client, RecordingClient)]


def test_tokens_are_those_of_repeated_passes_in_any_batch(session: Any, weights: dict[str, Array]) -> None:
    requests = [(prompt, 5 + 20 * (i % 3)) for i, prompt in enumerate(prompts(9))]
    expected = []
    for prompt, token_count in requests:
        ids = list(prompt)
        for _ in range(token_count):
            ids.append(int(reference_logits(weights, np.array(ids))[-1].argmax()))
        expected.append(ids[len(prompt) :])
    assert [len(tokens) for tokens in expected] == [token_count for _, token_count in requests]
    for size in (1, 2, 4, 16):
        assert generate(RunningBatch(session, size), requests) == expected


def test_the_cache_grows_and_frees_memory(session: Any) -> None:
    rooms: list[int] = []

    class RecordingSession:
        """The session of the decoder; it keeps the number of tokens for which each pass has room."""

        get_inputs, get_outputs = session.get_inputs, session.get_outputs

        def run(self, names: Sequence[str], feeds: dict[str, Array]) -> Any:
            rooms.append(feeds["past_value.0"].shape[2])
            return session.run(names, feeds)

    batch = RunningBatch(RecordingSession(), 2)
    long, short = np.arange(3 * CACHE_STEP // 2) % VOCABULARY, np.arange(4)
    alone = generate(RunningBatch(session, 1), [(short, 40)])
    assert generate(batch, [(long, 50), (short, 40)])[1:] == alone
    assert rooms[-1] == max(rooms) == 3 * CACHE_STEP
    assert generate(batch, [(short, 40)]) == alone
    assert rooms[-1] == CACHE_STEP


@pytest.fixture
def scheduler(session: Any) -> Any:
    scheduler = Scheduler(RunningBatch(session, 2), pytest.fail)
    yield scheduler
    scheduler.stop()


def submit(scheduler: Scheduler, prompt: Array, token_count: int, *, is_held: bool = False) -> RecordingClient:
    client = RecordingClient(is_held=is_held)
    scheduler.submit(Generation(prompt, token_count, client))
    return client


def test_a_short_request_ends_before_a_long_one_that_came_first(session: Any, scheduler: Scheduler) -> None:
    prompt = np.arange(5)
    long = submit(scheduler, prompt, POSITIONS - 5, is_held=True)
    long.wait_for_first_token()
    short = [submit(scheduler, prompt, 2) for _ in range(3)]
    long.may_go_on.set()
    alone = generate(RunningBatch(session, 1), [(prompt, 2)])[0]
    assert [client.wait() for client in short] == [alone] * 3
    assert len(long.wait()) == POSITIONS - 5
    assert all(client.ended_seconds < long.ended_seconds for client in short)


def test_cancelled_requests_leave_their_slots(scheduler: Scheduler) -> None:
    running = [submit(scheduler, np.arange(5), POSITIONS - 5, is_held=True) for _ in range(2)]
    running[0].wait_for_first_token()
    waiting = submit(scheduler, np.arange(5), 4)
    for client in (*running, waiting):
        client.cancelled = True
    for client in running:
        client.may_go_on.set()
    last = submit(scheduler, np.arange(5), 3)
    assert len(last.wait()) == 3
    for client in (*running, waiting):
        client.wait()
        assert client.error == CANCELLED
    assert not waiting.tokens


def test_unfinished_requests_get_an_error_at_the_end(session: Any) -> None:
    scheduler = Scheduler(RunningBatch(session, 1), pytest.fail)
    clients = [submit(scheduler, np.arange(5), POSITIONS - 5, is_held=True) for _ in range(2)]
    clients[0].wait_for_first_token()
    with ThreadPoolExecutor(1) as pool:
        stopping = pool.submit(scheduler.stop)
        while not scheduler._is_stopping:
            time.sleep(0.001)
        clients[0].may_go_on.set()
        stopping.result()
    assert [client.error for client in clients] == ["the model is unloaded"] * 2


def test_a_failed_pass_fails_its_requests_only(session: Any) -> None:
    lines: list[str] = []
    scheduler = Scheduler(RunningBatch(session, 1), lines.append)
    try:
        broken = submit(scheduler, np.array([VOCABULARY]), 2)
        broken.wait()
        assert "tinygpt: " in broken.error
        assert lines == [broken.error]
        assert len(submit(scheduler, np.arange(3), 2).wait()) == 2
    finally:
        scheduler.stop()


@pytest.mark.parametrize(
    ("ids", "max_tokens", "words"),
    [
        ([[]], 1, "INPUT_IDS is empty"),
        ([[1]], 0, "MAX_TOKENS is 0"),
        ([[1]], -3, "MAX_TOKENS is -3"),
        ([[1] * 100], POSITIONS - 99, "are 161 tokens; the model has at most 160"),
        ([[1, VOCABULARY]], 1, "0 to 49"),
        ([[-1]], 1, "0 to 49"),
        ([[1], [2]], 1, "2 prompts; send one prompt a request"),
    ],
)
def test_invalid_requests_are_refused_in_one_line(ids: list[list[int]], max_tokens: int, words: str) -> None:
    limits = {"positions": POSITIONS, "vocabulary": VOCABULARY}
    with pytest.raises(ValueError, match=words) as caught:
        check_request(np.array(ids, np.int32), np.array([[max_tokens]], np.int32), limits)
    assert "\n" not in str(caught.value)


# -- the builder ----------------------------------------------------------------------------------------------------


def test_the_served_model_is_decoupled_and_has_one_instance_on_the_cpu(small: ModelSource) -> None:
    config = small.config
    assert config.backend == "python"
    assert config.model_transaction_policy.decoupled
    assert config.max_batch_size == 4
    assert [group.kind for group in config.instance_group] == [config.instance_group[0].KIND_CPU]
    assert [tensor.allow_ragged_batch for tensor in config.input] == [True, False]
    files = {path.name for path in (small.folder("tinygpt") / "1").iterdir()}
    assert files == {"model.py", "decoder.onnx", "weights.bin", "limits.json"}


def test_request_data_fit_the_model(small: ModelSource) -> None:
    assert small.input_data is not None
    tensors = [
        request_data.InputTensor(spec.name, spec.datatype, spec.dims, True)
        for spec in tinygpt.interface(tinygpt.TinyGptSettings()).inputs
    ]
    entries = list(request_data.parse_entries(small.input_data, tensors))
    assert len(entries) == 251
    for entry in entries:
        limits = {"positions": POSITIONS, "vocabulary": VOCABULARY}
        check_request(entry["INPUT_IDS"][None], entry["MAX_TOKENS"][None], limits)


def test_heads_must_divide_the_width() -> None:
    with pytest.raises(ValidationError, match="hidden 256 is not a multiple of heads 3"):
        tinygpt.TinyGptSettings(heads=3)
