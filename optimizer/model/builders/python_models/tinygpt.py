"""The language model ``tinygpt`` as a decoupled Triton Python model with continuous batching.

A request holds one prompt. Its responses are the most likely next tokens, one a response, exactly MAX_TOKENS of them.
``execute`` queues the requests. A thread admits up to ``max_batch_size`` sequences of its instance at a time. It
computes prompts of new sequences in one pass, and then one token of every running sequence in another. A sequence
that ends frees its slot for the next one at once. Others wait in the instance in the order of their arrival.

Triton's batcher is in front of this queue: with ``max_queue_delay_microseconds`` above 0, prompts wait there for
others and are then computed in the same pass, which interrupts the running sequences less often.

This file is copied into the repository as ``model.py``, next to ``decoder.onnx`` and ``limits.json``. It needs numpy
and ONNX Runtime and nothing of tritune.
"""

from __future__ import annotations

import json
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import onnxruntime as ort

INPUT_IDS, MAX_TOKENS, OUTPUT_ID = "INPUT_IDS", "MAX_TOKENS", "OUTPUT_ID"
CACHE_STEP = 64  # the cache has room for a multiple of this number of tokens
CANCELLATION_SECONDS = 0.1  # between two checks for cancelled requests, which take a call to the server each
PROMPT_TOKENS = 256  # of several prompts in a pass with their filling; running sequences wait for a pass to end
CANCELLED, UNLOADED = "the request is cancelled", "the model is unloaded"
# The stub of tritonserver 2.51 was built for numpy 1 and misreads the arrays of numpy 2; see the onnxruntime backend.
NUMPY_1 = np.__version__.startswith("1.")

Tokens = npt.NDArray[np.int64]
Feeds = dict[str, npt.NDArray[Any]]


class Client(Protocol):
    """The receiver of the responses to one request."""

    def send(self, token: int, *, is_last: bool) -> None:
        """Send a token."""

    def fail(self, message: str) -> None:
        """Send an error, after which nothing follows."""

    def is_cancelled(self) -> bool:
        """Return whether the client has cancelled the request."""


@dataclass(eq=False)
class Generation:
    """A prompt and the state of its output."""

    prompt: Tokens
    max_tokens: int
    client: Client
    token: int = 0
    sent: int = 0

    @property
    def cached(self) -> int:
        """The number of tokens in the cache: all but the newest."""
        return len(self.prompt) + self.sent - 1

    @property
    def is_finished(self) -> bool:
        """Whether all tokens are sent."""
        return self.sent == self.max_tokens

    def add(self, token: int) -> None:
        """Take the next token and send it."""
        self.token = token
        self.sent += 1
        self.client.send(token, is_last=self.is_finished)


class Cache:
    """Keys and values of the running sequences, ``[slots, …]`` for each layer; the used slots come first."""

    def __init__(self, inputs: Mapping[str, tuple[int, int]], slots: int) -> None:
        """Create the cache of the inputs ``past_key.N`` and ``past_value.N``, given with their (heads, features)."""
        self._slots = slots
        self._shapes = inputs
        self._room = 0
        self._arrays: Feeds = {}

    def empty(self, slots: int) -> Feeds:
        """Return the inputs of ``slots`` sequences without a past; the decoder needs room for one token."""
        return {name: np.zeros((slots, *self._shape(name, 1))) for name in self._shapes}

    def first(self, slots: int) -> Feeds:
        """Return the inputs of the first slots, without a copy."""
        return {name: array[:slots] for name, array in self._arrays.items()}

    def reserve(self, tokens: int, slots: int) -> None:
        """Make room for ``tokens`` in each slot and keep the first slots; free the memory of much longer ones."""
        room = -(-tokens // CACHE_STEP) * CACHE_STEP
        if self._room // 2 < room <= self._room:
            return
        kept = min(room, self._room)
        arrays: Feeds = {}
        for name in self._shapes:
            arrays[name] = np.zeros((self._slots, *self._shape(name, room)))
            if kept:
                old, new = self._by_token(name, self._arrays[name]), self._by_token(name, arrays[name])
                new[:slots, :, :kept] = old[:slots, :, :kept]
        self._room, self._arrays = room, arrays

    def put(self, name: str, slot: int, start: int, values: npt.NDArray[Any]) -> None:
        """Store the keys or values of successive tokens of one sequence; ``values`` is [heads, tokens, features]."""
        self._by_token(name, self._arrays[name])[slot, :, start : start + values.shape[1]] = values

    def put_one(self, name: str, starts: Tokens, values: npt.NDArray[Any]) -> None:
        """Store those of one token for each of the first sequences; ``values`` is [sequences, heads, features]."""
        self._by_token(name, self._arrays[name])[np.arange(len(starts)), :, starts] = values

    def move(self, source: int, target: int, tokens: int) -> None:
        """Copy the first tokens of one slot to another."""
        for name, array in self._arrays.items():
            by_token = self._by_token(name, array)
            by_token[target, :, :tokens] = by_token[source, :, :tokens]

    def _shape(self, name: str, tokens: int) -> tuple[int, int, int]:
        heads, features = self._shapes[name]
        return (heads, features, tokens) if is_key(name) else (heads, tokens, features)

    @staticmethod
    def _by_token(name: str, array: npt.NDArray[Any]) -> npt.NDArray[Any]:
        """Return a view [slots, heads, tokens, features]; keys are stored transposed."""
        return array.swapaxes(2, 3) if is_key(name) else array


def is_key(name: str) -> bool:
    """Return whether a tensor holds keys, [slots, heads, features, tokens], not values."""
    return "_key." in name


class RunningBatch:
    """The sequences that are computed together, at most ``size``."""

    def __init__(self, session: ort.InferenceSession, size: int) -> None:
        self.size = size
        self.running: list[Generation] = []
        self._session = session
        self._outputs = [output.name for output in session.get_outputs()]
        shapes = {tensor.name: tensor.shape for tensor in session.get_inputs()}
        self._cache = Cache(
            {
                name: (int(shape[1]), int(shape[2] if is_key(name) else shape[3]))
                for name, shape in shapes.items()
                if name.startswith("past_") and name != "past_counts"
            },
            size,
        )

    @property
    def free(self) -> int:
        """The number of sequences that can be added."""
        return self.size - len(self.running)

    def add(self, new: Sequence[Generation]) -> None:
        """Compute the prompts of ``new`` sequences in one pass and send the first token of each."""
        first = len(self.running)
        counts = np.array([len(generation.prompt) for generation in new], np.int64)
        ids = np.zeros((len(new), counts.max()), np.int64)
        for row, generation in enumerate(new):
            ids[row, : counts[row]] = generation.prompt
        self.running += new
        self._cache.reserve(max(generation.cached + 1 for generation in self.running), first)
        tokens, states = self._step(ids, counts, np.zeros_like(counts), self._cache.empty(len(new)))
        for name, values in states.items():
            for row, count in enumerate(counts):
                self._cache.put(name, first + row, 0, values[row, :, :count])
        self._send(new, tokens)

    def step(self) -> None:
        """Compute and send the next token of each running sequence."""
        sequences = list(self.running)
        starts = np.array([generation.cached for generation in sequences], np.int64)
        self._cache.reserve(int(starts.max()) + 1, len(sequences))
        ids = np.array([[generation.token] for generation in sequences], np.int64)
        tokens, states = self._step(ids, np.ones_like(starts), starts, self._cache.first(len(sequences)))
        for name, values in states.items():
            self._cache.put_one(name, starts, values[:, :, 0])
        self._send(sequences, tokens)

    def remove(self, generation: Generation) -> None:
        """Free the slot of a sequence; the last one moves there."""
        slot, last = self.running.index(generation), len(self.running) - 1
        if slot != last:
            self._cache.move(last, slot, self.running[last].cached)
            self.running[slot] = self.running[last]
        self.running.pop()

    def _step(self, ids: Tokens, counts: Tokens, past_counts: Tokens, past: Feeds) -> tuple[Tokens, Feeds]:
        """Return the next token of each sequence, and the new keys and values by the name of their input.

        They are [sequences, heads, tokens, features].
        """
        feeds = {"input_ids": ids, "token_counts": counts, "past_counts": past_counts, **past}
        results = dict(zip(self._outputs, self._session.run(self._outputs, feeds), strict=True))
        tokens: Tokens = results.pop("logits").argmax(axis=1)
        states = {
            name.replace("new_", "past_"): values.swapaxes(2, 3) if is_key(name) else values
            for name, values in results.items()
        }
        return tokens, states

    def _send(self, sequences: Sequence[Generation], tokens: Tokens) -> None:
        for generation, token in zip(sequences, tokens.tolist(), strict=True):
            generation.add(token)
        for generation in sequences:
            if generation.is_finished:
                self.remove(generation)


def check_request(ids: Tokens, max_tokens: Tokens, limits: Mapping[str, int]) -> None:
    """Raise ValueError if the model cannot answer a request: ``ids`` [batch, tokens], ``max_tokens`` [batch, 1]."""
    if len(ids) != 1:
        raise ValueError(f"the request has {len(ids)} prompts; send one prompt a request")
    positions, vocabulary = limits["positions"], limits["vocabulary"]
    prompt, wanted = ids.size, int(max_tokens.flat[0])
    if prompt == 0:
        raise ValueError(f"{INPUT_IDS} is empty; send a prompt of at least one token")
    if wanted < 1:
        raise ValueError(f"{MAX_TOKENS} is {wanted}; ask for at least one token")
    if prompt + wanted > positions:
        raise ValueError(
            f"the prompt of {prompt} tokens and an output of {wanted} are {prompt + wanted} tokens; "
            f"the model has at most {positions}"
        )
    if ids.min() < 0 or ids.max() >= vocabulary:
        raise ValueError(f"{INPUT_IDS} has a token outside of 0 to {vocabulary - 1}, the model's vocabulary")


def open_session(model: Path, threads: int) -> ort.InferenceSession:
    """Return a session of the decoder; 0 ``threads`` are as many as this process may use CPUs."""
    options = ort.SessionOptions()
    options.intra_op_num_threads = threads or len(os.sched_getaffinity(0))
    return ort.InferenceSession(str(model), options, ["CPUExecutionProvider"])


class Scheduler:
    """Computes the sequences that are submitted, in a thread of its own. ``log`` gets the errors of a pass."""

    def __init__(self, batch: RunningBatch, log: Callable[[str], None]) -> None:
        self._batch = batch
        self._log = log
        self._waiting: deque[Generation] = deque()
        self._changed = threading.Condition()
        self._is_stopping = False
        self._next_check = 0.0
        self._thread = threading.Thread(target=self._run, name="scheduler", daemon=True)
        self._thread.start()

    def submit(self, generation: Generation) -> None:
        """Add a sequence to the end of the queue."""
        with self._changed:
            self._waiting.append(generation)
            self._changed.notify()

    def stop(self) -> None:
        """End the thread after its present pass; sequences that are not finished get an error."""
        with self._changed:
            self._is_stopping = True
            self._changed.notify()
        self._thread.join()

    def _run(self) -> None:
        batch = self._batch
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._is_stopping or self._waiting or batch.running)
            if self._is_stopping:
                break
            try:
                if new := self._admit():
                    batch.add(new)
                self._remove_cancelled()
                if batch.running:
                    batch.step()
            except Exception as error:
                self._log(f"tinygpt: {error}")
                self._fail_running(f"tinygpt: {error}")
        self._fail_running(UNLOADED)
        for generation in self._waiting:
            generation.client.fail(UNLOADED)

    def _admit(self) -> list[Generation]:
        """Return the next sequences whose prompts are computed in one pass."""
        new: list[Generation] = []
        longest = 0
        while self._waiting and len(new) < self._batch.free:
            longest = max(longest, len(self._waiting[0].prompt))
            if new and longest * (len(new) + 1) > PROMPT_TOKENS:
                break
            generation = self._waiting.popleft()
            if generation.client.is_cancelled():
                generation.client.fail(CANCELLED)
            else:
                new.append(generation)
        return new

    def _remove_cancelled(self) -> None:
        if (now := time.monotonic()) < self._next_check:
            return
        self._next_check = now + CANCELLATION_SECONDS
        for generation in list(self._batch.running):
            if generation.client.is_cancelled():
                self._batch.remove(generation)
                generation.client.fail(CANCELLED)

    def _fail_running(self, message: str) -> None:
        running, self._batch.running = self._batch.running, []
        for generation in running:
            if not generation.is_finished:
                generation.client.fail(message)


class TritonPythonModel:
    """The class that Triton's Python backend instantiates."""

    def initialize(self, args: dict[str, str]) -> None:
        """Load the decoder and start the thread. Raises TritonModelException for a wrong number of threads."""
        import triton_python_backend_utils as pb_utils  # exists only inside Triton

        self._triton = pb_utils
        config = json.loads(args["model_config"])
        threads = config.get("parameters", {}).get("intra_op_thread_count", {}).get("string_value", "0")
        if not threads.strip().isdecimal():
            raise pb_utils.TritonModelException(
                f"parameter intra_op_thread_count is {threads!r}; write a whole number of 0 or more"
            )
        folder = Path(args["model_repository"]) / args["model_version"]
        self._limits: dict[str, int] = json.loads((folder / "limits.json").read_text(encoding="utf-8"))
        session = open_session(folder / "decoder.onnx", int(threads))
        batch = RunningBatch(session, max(1, config["max_batch_size"]))
        self._scheduler = Scheduler(batch, pb_utils.Logger.log_error)

    def execute(self, requests: list[Any]) -> None:
        """Queue the requests; those that the model cannot answer get an error."""
        for request in requests:
            client = TritonClient(self._triton, request.get_response_sender())
            try:
                ids, max_tokens = (self._array(request, name) for name in (INPUT_IDS, MAX_TOKENS))
                check_request(ids, max_tokens, self._limits)
            except ValueError as error:
                client.fail(str(error))
            else:
                self._scheduler.submit(Generation(ids[0].astype(np.int64), int(max_tokens.flat[0]), client))

    def finalize(self) -> None:
        """End the thread."""
        self._scheduler.stop()

    def _array(self, request: Any, name: str) -> npt.NDArray[Any]:
        tensor = self._triton.get_input_tensor_by_name(request, name)
        return np.asarray(tensor.as_numpy() if NUMPY_1 else np.from_dlpack(tensor))


class TritonClient:
    """The client of one request; ``triton`` is the module of Triton's Python backend."""

    def __init__(self, triton: Any, sender: Any) -> None:
        self._triton = triton
        self._sender = sender

    def send(self, token: int, *, is_last: bool) -> None:
        """Send a token, [1, 1]."""
        array = np.array([[token]], np.int32)
        tensor = (
            self._triton.Tensor(OUTPUT_ID, array) if NUMPY_1 else self._triton.Tensor.from_dlpack(OUTPUT_ID, array)
        )
        final = self._triton.TRITONSERVER_RESPONSE_COMPLETE_FINAL
        self._sender.send(self._triton.InferenceResponse([tensor]), flags=final if is_last else 0)

    def fail(self, message: str) -> None:
        """Send an error, after which nothing follows."""
        response = self._triton.InferenceResponse(error=self._triton.TritonError(message))
        self._sender.send(response, flags=self._triton.TRITONSERVER_RESPONSE_COMPLETE_FINAL)

    def is_cancelled(self) -> bool:
        """Return whether the client has cancelled the request."""
        return bool(self._sender.is_cancelled())
