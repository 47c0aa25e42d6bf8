"""Are a configuration's answers those of the unbatched baseline? Requests are sent alone, then many at once.

The baseline's answers are kept in a file, so that a resumed run compares with the same ones.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from pathlib import Path

from optimizer.answers import inference
from optimizer.answers.comparison import Tolerance
from optimizer.answers.reference import Reference
from optimizer.errors import BadInputError, DeploymentError
from optimizer.interfaces import Endpoint
from optimizer.untrusted import one_line

REQUESTS = 32  # different ones, or as many as the baseline answers in REFERENCE_SECONDS
REFERENCE_SECONDS = 2.0
REFERENCE_ATTEMPTS = 2  # a server may die
LEAST_IN_FLIGHT, MOST_IN_FLIGHT = 16, 256
MOST_BYTES = 128 << 20  # in flight
CHECK_SECONDS = 5.0  # if each request of a check were answered alone
TIMEOUT_SECONDS = 30.0
_AT_A_TIME = 4  # requests, between two looks at the clock


class Unguarded:
    """Where answers are not to be compared: a model that is random by nature, a recorded table."""

    needs_reference = False

    def __init__(self, note: str = "") -> None:
        self.note = note

    def reference(self, endpoint: Endpoint) -> None: ...

    def check(self, endpoint: Endpoint) -> None: ...


class OutputGuard:
    """Compares each deployment's answers with those of the unbatched baseline, to the same requests.

    The requests are those of the load, by ``input_data`` and ``shapes``; ``file`` keeps them and the answers. It is
    read where it exists: raises BadInputError where it is not one of ours.
    """

    def __init__(
        self,
        file: Path,
        *,
        input_data: str,
        shapes: Sequence[str],
        request_batch_size: int,
        tolerance: Tolerance | None = None,
    ) -> None:
        self._file = file
        self._input_data = input_data
        self._shapes = tuple(shapes)
        self._request_batch_size = request_batch_size
        self._tolerance = tolerance or Tolerance()
        self._known = Reference.read(file) if file.exists() else None
        self._attempts = 0
        self._trouble = "it was not asked"

    @property
    def needs_reference(self) -> bool:
        return self._known is None and self._attempts < REFERENCE_ATTEMPTS

    @property
    def note(self) -> str:
        """Why nothing is compared; empty where all is well."""
        trouble = self._trouble if self._known is None else self._known.trouble
        return f"answers were not compared with the baseline's: {trouble}" if trouble else ""

    def reference(self, endpoint: Endpoint) -> None:
        """Ask the baseline: each request alone, one after another, and all of them twice.

        Where it gives no answers, or does not repeat its own, or no requests can be made, ``note`` says so. Raises
        EnvironmentFault where the answers cannot be kept.
        """
        self._attempts += 1
        try:
            requests = self._requests(endpoint)
            first, _ = _ask_alone(endpoint, requests)
            again, seconds = _ask_alone(endpoint, requests[: len(first)])
            made = Reference(tuple(requests[: len(first)]), tuple(first), seconds / len(again))
            told = _compared(made, range(len(again)), again, self._tolerance)
        except (DeploymentError, BadInputError) as error:
            self._trouble = str(error)
            if isinstance(error, BadInputError):
                self._attempts = REFERENCE_ATTEMPTS
            return
        if told:
            made = Reference((), (), 0.0, f"it does not repeat its own ({told})")
        made.write(self._file)
        self._known = made

    def check(self, endpoint: Endpoint) -> None:
        """Send the same requests, many at once, and compare; nothing where there is nothing to compare with.

        Raises DeploymentError where answers differ by more than the tolerance, or the server fails a request.
        """
        known = self._known
        if known is None or known.trouble:
            return
        sent = max(len(known.requests), self._in_flight(endpoint, known))
        order = [number % len(known.requests) for number in range(sent)]
        timeout_seconds = max(TIMEOUT_SECONDS, 4 * sent * known.seconds_alone)
        messages = [inference.addressed(known.requests[number], endpoint.model) for number in order]
        answers = inference.infer(endpoint, messages, in_flight=sent, timeout_seconds=timeout_seconds)
        told = _compared(known, order, answers, self._tolerance)
        if told:
            raise DeploymentError(f"answers differ from the unbatched baseline's: {told}")

    def _requests(self, endpoint: Endpoint) -> list[bytes]:
        from optimizer.requests.tensors import RequestSource, generate, to_message

        metadata, max_batch_size = inference.model_metadata(endpoint), endpoint.largest_request
        tensors = RequestSource.of(metadata, max_batch_size, self._shapes).tensors
        size = self._request_batch_size * sum(abs(math.prod(t.shape)) * t.dtype.itemsize for t in tensors)
        inputs = generate(
            metadata,
            max_batch_size,
            input_data=self._input_data,
            shapes=self._shapes,
            request_batch_size=self._request_batch_size,
            count=max(_AT_A_TIME, min(REQUESTS, MOST_BYTES // max(size, 1))),
        )
        return [to_message(endpoint.model, request) for request in inputs]

    def _in_flight(self, endpoint: Endpoint, known: Reference) -> int:
        """Twice what fills a batch, so that the next one fills while one is computed; fewer of a slow model."""
        candidate = endpoint.candidate
        wanted = 2 * math.ceil(candidate.max_batch_size / self._request_batch_size) * candidate.dynamic_batching
        in_time = CHECK_SECONDS / max(known.seconds_alone, 1e-6)
        in_memory = MOST_BYTES / max(map(len, known.requests))
        return max(LEAST_IN_FLIGHT, min(wanted, int(min(in_time, in_memory)), MOST_IN_FLIGHT))


def _compared(known: Reference, order: Sequence[int], answers: Sequence[bytes], tolerance: Tolerance) -> str:
    """As ``Reference.compare``. Raises DeploymentError where an answer is not what it says it is."""
    try:
        return known.compare(order, answers, tolerance)
    except ValueError as error:
        raise DeploymentError(
            f"an output does not fill its own shape ({one_line(str(error), 100)}); of a model in Python: has the "
            "server another numpy than its Python backend knows?"
        ) from error


def _ask_alone(endpoint: Endpoint, requests: Sequence[bytes]) -> tuple[list[bytes], float]:
    """The answers to the first of ``requests``, and the seconds they took: at least _AT_A_TIME, then for as long as
    there is time."""
    started = time.monotonic()
    answers: list[bytes] = []
    while len(answers) < len(requests) and time.monotonic() - started < REFERENCE_SECONDS:
        some = requests[len(answers) : len(answers) + _AT_A_TIME]
        answers += inference.infer(endpoint, some, in_flight=1, timeout_seconds=TIMEOUT_SECONDS)
    return answers, time.monotonic() - started
