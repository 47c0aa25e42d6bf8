"""Compare the outputs of each deployment with those of the unbatched baseline, which reference.npz keeps."""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import Protocol

from optimizer.core.endpoint import Endpoint
from optimizer.core.errors import BadInputError, DeploymentError, ModelRefused, RequestOverdue, ServerCrashed
from optimizer.core.interfaces import OutputCheck
from optimizer.core.notes import ModelNotes, NanOutputs, Note, OutputsNotCompared
from optimizer.core.safe_text import one_line
from optimizer.measure import server_calls
from optimizer.measure.explained_failures import duration_hint, index_hint
from optimizer.measure.load_client.sequences import fresh_ids, step_parameters
from optimizer.measure.output_comparison import ReferenceOutputs, Tolerance, concatenate
from optimizer.measure.server_errors import missing_model

REQUESTS = 32  # distinct ones, or as many as the baseline answers in REFERENCE_SECONDS
REFERENCE_SECONDS = 2.0
MIN_REQUESTS = 2  # distinct ones of a slow model: with a single one exchanged answers would not be noticed
REFERENCE_ATTEMPTS = 2  # a server may die
MIN_IN_FLIGHT = 4  # of a slow model: the first request may be executed alone, and the others form a batch
USUAL_IN_FLIGHT, MAX_IN_FLIGHT = 16, 256
MAX_BYTES = 128 << 20  # limit for the requests in flight
CHECK_SECONDS = 5.0  # limit for a check whose requests are answered one at a time
TIMEOUT_SECONDS = 30.0
_CHUNK = 4  # requests between two looks at the clock
MAX_ROUNDING = 30.0  # a larger share of the allowed difference is no rounding, whatever the precision of the model
ROUNDING_HINT = "; if that is rounding, allow it with tolerance: in a profile"


class Infer(Protocol):
    """Sends requests to the server of an endpoint, see ``server_calls.infer``."""

    def __call__(
        self, endpoint: Endpoint, /, messages: Iterable[bytes], *, in_flight: int, timeout_seconds: float
    ) -> list[bytes]: ...


class NoOutputCheck:
    """Compares nothing, for models with random outputs and for recorded tables. ``note`` tells the user why."""

    needs_reference = False

    def __init__(self, note: Note | None = None) -> None:
        self.note = note

    def record_reference(self, endpoint: Endpoint) -> None: ...

    def check(self, endpoint: Endpoint) -> None: ...


@dataclass(eq=False)
class BaselineOutputCheck:
    """Compares each deployment's outputs with those of the unbatched baseline for the same requests.

    The requests follow from ``input_data`` and ``shapes``, as those of the load; the inputs ``unbounded`` have random
    integers of the whole range of their type. ``other_model`` is the name of the model if it is not the tuned one.
    ``file`` keeps requests and outputs and is read if it exists.
    ``infer`` sends the requests. Raises BadInputError if ``file`` is not a file of reference outputs.
    """

    file: Path
    input_data: Path
    shapes: Sequence[str]
    request_batch_size: int
    unbounded: tuple[str, ...] = ()
    other_model: str = ""
    tolerance: Tolerance = field(default_factory=Tolerance)
    infer: Infer = server_calls.infer
    _attempts: int = field(default=0, init=False)
    _missing_reason: str = field(default="the baseline was not measured", init=False)

    def __post_init__(self) -> None:
        self._reference = ReferenceOutputs.read(self.file) if self.file.exists() else None

    @property
    def needs_reference(self) -> bool:
        """Whether ``record_reference`` should be called for the next deployment of the baseline."""
        return self._reference is None and self._attempts < REFERENCE_ATTEMPTS

    @property
    def note(self) -> Note | None:
        """Why outputs are not compared, or that the baseline's have NaN; None if they are compared and have none."""
        reference = self._reference
        if reason := self._missing_reason if reference is None else reference.missing_reason:
            return OutputsNotCompared(reason)
        output, share = reference.nan_share() if reference else ("", 0.0)
        return NanOutputs(output, share) if share else None

    def record_reference(self, endpoint: Endpoint) -> None:
        """Send each request to the baseline twice, one at a time, and keep its outputs.

        ``note`` reports if the baseline fails, does not repeat its outputs, or no requests can be generated. Raises
        ModelRefused if the model fails every request, and EnvironmentFault if the file cannot be written. Raises
        BadInputError if random integers cause the failures, or may cause answers that take too long.
        """
        self._attempts += 1
        requests = list[bytes]()
        try:
            requests, started = self._requests(endpoint), time.monotonic()
            try:
                first, _ = self._send_alone(endpoint, requests)
            except RequestOverdue:  # a model may compile kernels during its first request
                first, _ = self._send_alone(endpoint, requests)
            first_seconds = time.monotonic() - started
            second, seconds = self._send_alone(endpoint, requests[: len(first)])
            sent = tuple(requests[: len(first)])
            reference = ReferenceOutputs(sent, tuple(first), seconds / len(second), first_seconds)
            difference = reference.compare(range(len(second)), second, self.tolerance).problem
        except (DeploymentError, BadInputError) as error:
            self._missing_reason = str(error)
            if isinstance(error, BadInputError):
                self._attempts = REFERENCE_ATTEMPTS
            elif requests and isinstance(error, RequestOverdue) and self.unbounded:
                raise BadInputError(f"{error}; {duration_hint(self.unbounded, self.other_model)}") from error
            elif requests and all(self._is_refused(endpoint, request) for request in requests[:_CHUNK]):
                if hint := index_hint(str(error), self.unbounded, self.other_model):
                    raise BadInputError(f"{error}; {hint}") from error
                calls = missing_model(str(error)) and "; name the models that it calls with --bls-composing-models"
                flags = "--input-data, --input-range or --string-data"
                if self.other_model:
                    flags = f"--input-range {one_line(self.other_model, 60)}/INPUT:LOW..HIGH"
                raise ModelRefused(
                    f"the model loads, but every request fails ({error}){calls}; correct the model, or give "
                    f"other requests with {flags}",
                    has_advice=True,
                ) from error
            return
        if difference:
            reference = ReferenceOutputs((), (), 0.0, 0.0, f"the baseline does not repeat its outputs ({difference})")
        reference.write(self.file)
        self._reference = reference

    def check(self, endpoint: Endpoint) -> float | None:
        """Send the same requests, many at once, and return the largest difference as a share of the allowed one.

        Return None without reference outputs. Raises DeploymentError if outputs differ by more than the tolerance or
        the server fails a request.
        """
        reference = self._reference
        if reference is None or reference.missing_reason:
            return None
        order, responses = self._send_together(endpoint, reference)
        deviation = reference.compare(order, responses, self.tolerance)
        if deviation.problem:
            hint = ROUNDING_HINT if deviation.share_of_tolerance < MAX_ROUNDING else ""
            raise DeploymentError(f"outputs differ from those of the unbatched baseline: {deviation.problem}{hint}")
        return deviation.share_of_tolerance

    def _send_alone(self, endpoint: Endpoint, requests: Sequence[bytes]) -> tuple[list[bytes], float]:
        """Send ``requests`` one at a time until REFERENCE_SECONDS are over, at least MIN_REQUESTS of them.

        Return the responses and the seconds they took.
        """
        started = time.monotonic()
        responses: list[bytes] = []
        while len(responses) < len(requests) and time.monotonic() - started < REFERENCE_SECONDS:
            chunk = requests[len(responses) : len(responses) + (_CHUNK if responses else MIN_REQUESTS)]
            responses += self.infer(endpoint, chunk, in_flight=1, timeout_seconds=TIMEOUT_SECONDS)
        return responses, time.monotonic() - started

    def _send_together(self, endpoint: Endpoint, reference: ReferenceOutputs) -> tuple[list[int], list[bytes]]:
        """Send the requests of ``reference``, many at once; return the numbers of requests and the responses."""
        count = max(len(reference.requests), self._in_flight(endpoint, reference))
        order = [number % len(reference.requests) for number in range(count)]
        timeout_seconds = max(TIMEOUT_SECONDS, 4 * reference.expected_seconds(count))
        messages = [server_calls.with_model_name(reference.requests[number], endpoint.model) for number in order]

        def send(in_flight: int) -> list[bytes]:
            return self.infer(endpoint, messages, in_flight=in_flight, timeout_seconds=timeout_seconds)

        return order, server_calls.send_as_queue_permits(send, count)

    def _is_refused(self, endpoint: Endpoint, request: bytes) -> bool:
        """Return whether the server answers ``request`` with an error; a crash is no answer."""
        try:
            self.infer(endpoint, [request], in_flight=1, timeout_seconds=TIMEOUT_SECONDS)
        except ServerCrashed:
            return False
        except DeploymentError:
            return True
        return False

    def _distinct_requests(self) -> int:
        """Return the number of distinct requests, if they are not too large."""
        return REQUESTS

    def _requests(self, endpoint: Endpoint) -> list[bytes]:
        """Return the serialized requests of the check. Raises DeploymentError or BadInputError if there are none."""
        from optimizer.model.inference_requests import input_tensors, read_request_inputs, to_message

        metadata, max_batch_size = server_calls.model_metadata(endpoint), endpoint.largest_request
        tensors = input_tensors(metadata, max_batch_size, self.shapes)
        sample_bytes = sum(abs(math.prod(tensor.dims)) * tensor.dtype.itemsize for tensor in tensors)
        request_bytes = max(self.request_batch_size * sample_bytes, 1)
        count = max(_CHUNK, min(self._distinct_requests(), MAX_BYTES // request_bytes))
        inputs = read_request_inputs(
            metadata,
            max_batch_size,
            input_data=self.input_data,
            shapes=self.shapes,
            request_batch_sizes=[self.request_batch_size] * count,
        )
        return [to_message(endpoint.model, request) for request in inputs]

    def _in_flight(self, endpoint: Endpoint, reference: ReferenceOutputs) -> int:
        """Return twice the requests of a full batch, so that the next batch forms during an execution.

        Slow models and large requests get fewer, but enough for a first request and one batch behind it, up to
        USUAL_IN_FLIGHT in total.
        """
        candidate = endpoint.candidate
        batch = math.ceil(candidate.max_batch_size / self.request_batch_size) * candidate.dynamic_batching
        usual = max(USUAL_IN_FLIGHT, min(2 * batch, MAX_IN_FLIGHT))
        least = max(MIN_IN_FLIGHT, min(batch + 1, USUAL_IN_FLIGHT))
        in_time = CHECK_SECONDS / max(reference.seconds_alone, 1e-6)
        in_memory = MAX_BYTES / max(map(len, reference.requests))
        return max(least, int(min(usual, in_time, in_memory)))


def infer_streamed(
    endpoint: Endpoint, messages: Iterable[bytes], *, in_flight: int, timeout_seconds: float
) -> list[bytes]:
    """Return the concatenated responses to each request, as an ``Infer`` for models that stream.

    So it does not matter how the outputs are distributed over the responses.
    """
    streamed = server_calls.stream(endpoint, messages, in_flight=in_flight, timeout_seconds=timeout_seconds)
    return [concatenate(responses) for responses in streamed]


SEQUENCES = 16  # distinct ones, or as many as the baseline answers in REFERENCE_SECONDS
MAX_STEPS = 8  # longest sequence
MAX_SEQUENCES_IN_FLIGHT = 64  # each is sent by a thread of its own


@dataclass(eq=False, kw_only=True)
class SequenceOutputCheck(BaselineOutputCheck):
    """Compares the answers to interleaved sequences with the answers that each of them gets alone.

    A model or a batcher that mixes up the states of two sequences gives other answers. ``sequence_length`` is the
    longest sequence of the load; the sequences of the check have as many steps, but at most MAX_STEPS.
    The other arguments are those of ``BaselineOutputCheck``.
    """

    sequence_length: int

    @property
    def _steps(self) -> int:
        """The number of requests in each sequence of the check."""
        return min(self.sequence_length, MAX_STEPS)

    def _distinct_requests(self) -> int:
        return SEQUENCES * self._steps

    def _requests(self, endpoint: Endpoint) -> list[bytes]:
        """Return the requests of whole sequences."""
        requests = super()._requests(endpoint)
        return requests[: max(1, len(requests) // self._steps) * self._steps]

    def _send_alone(self, endpoint: Endpoint, requests: Sequence[bytes]) -> tuple[list[bytes], float]:
        """Send the sequences one after the other until REFERENCE_SECONDS are over, at least one of them."""
        started, ids = time.monotonic(), fresh_ids()
        responses: list[bytes] = []
        while len(responses) < len(requests):
            steps = requests[len(responses) : len(responses) + self._steps]
            responses += self._send_sequence(endpoint, steps, next(ids))
            if time.monotonic() - started > REFERENCE_SECONDS:
                break
        return responses, time.monotonic() - started

    def _send_together(self, endpoint: Endpoint, reference: ReferenceOutputs) -> tuple[list[int], list[bytes]]:
        """Send several sequences at the same time, each step after the answer to the step before it."""
        numbers = range(len(reference.requests))
        sequences = [numbers[first : first + self._steps] for first in range(0, len(numbers), self._steps)]
        in_time = int(CHECK_SECONDS / max(self._steps * reference.seconds_alone, 1e-6))
        usual = max(USUAL_IN_FLIGHT, min(2 * endpoint.candidate.max_batch_size, MAX_SEQUENCES_IN_FLIGHT))
        count = max(MIN_IN_FLIGHT, min(usual, in_time))
        sent_sequences = [sequences[number % len(sequences)] for number in range(count)]

        # a sequence may have to wait until all others have ended
        expected_seconds = reference.expected_seconds(len(sent_sequences) * self._steps)
        timeout_seconds = max(TIMEOUT_SECONDS, 4 * expected_seconds)

        def send(steps: range, sequence: int) -> list[bytes]:
            return self._send_sequence(
                endpoint, [reference.requests[number] for number in steps], sequence, timeout_seconds
            )

        with ThreadPoolExecutor(len(sent_sequences)) as pool:
            answers = list(pool.map(send, sent_sequences, fresh_ids()))
        return list(chain.from_iterable(sent_sequences)), list(chain.from_iterable(answers))

    def _is_refused(self, endpoint: Endpoint, request: bytes) -> bool:
        return super()._is_refused(endpoint, request + step_parameters(next(fresh_ids()), start=True, end=True))

    def _send_sequence(
        self, endpoint: Endpoint, requests: Sequence[bytes], sequence: int, timeout_seconds: float = TIMEOUT_SECONDS
    ) -> list[bytes]:
        """Send ``requests`` as the steps of one sequence and return the responses.

        Each may take ``timeout_seconds``.
        """

        def steps() -> Iterator[bytes]:
            for step, request in enumerate(requests):
                is_first, is_last = step == 0, step == len(requests) - 1
                yield request + step_parameters(sequence, start=is_first, end=is_last)

        return self.infer(endpoint, steps(), in_flight=1, timeout_seconds=timeout_seconds)


class CombinedOutputCheck:
    """Checks all models of an endpoint; ``checks`` has one output check per model."""

    def __init__(self, checks: Mapping[str, OutputCheck]) -> None:
        self._checks = checks

    @property
    def needs_reference(self) -> bool:
        return any(check.needs_reference for check in self._checks.values())

    @property
    def note(self) -> ModelNotes | None:
        notes = tuple((model, check.note) for model, check in self._checks.items() if check.note is not None)
        return ModelNotes(notes) if notes else None

    def record_reference(self, endpoint: Endpoint) -> None:
        for check, model in self._pairs(endpoint):
            if check.needs_reference:
                check.record_reference(model)

    def check(self, endpoint: Endpoint) -> float | None:
        """Return the largest share of all models. Raises DeploymentError if the outputs of a model differ."""
        shares = [check.check(model) for check, model in self._pairs(endpoint)]
        return max((share for share in shares if share is not None), default=None)

    def _pairs(self, endpoint: Endpoint) -> Iterator[tuple[OutputCheck, Endpoint]]:
        return ((self._checks[model.model], model) for model in (endpoint, *endpoint.concurrent_models))
