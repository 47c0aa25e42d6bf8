"""Compare the outputs of a stateful model with those that each of its sequences gets when it is sent alone."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from optimizer.core.endpoint import Endpoint
from optimizer.measure import server_calls
from optimizer.measure.load_client.sequences import fresh_ids, step_parameters
from optimizer.measure.output_check import (
    CHECK_SECONDS,
    REFERENCE_SECONDS,
    TIMEOUT_SECONDS,
    BaselineOutputCheck,
    ReferenceOutputs,
)

SEQUENCES = 16  # distinct ones, or as many as the baseline answers in REFERENCE_SECONDS
MAX_STEPS = 8  # of a sequence
MIN_IN_FLIGHT, MAX_IN_FLIGHT = 16, 64  # sequences at a time, each sent by a thread of its own


class SequenceOutputCheck(BaselineOutputCheck):
    """Compares the answers to interleaved sequences with the answers that each of them gets alone.

    A model or a batcher that mixes up the states of two sequences gives other answers. ``sequence_length`` is the
    longest sequence of the load; the sequences of the check have as many steps, but at most MAX_STEPS. The other
    arguments are those of ``BaselineOutputCheck``.
    """

    def __init__(self, *arguments: Any, sequence_length: int, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self._steps = min(sequence_length, MAX_STEPS)

    def _wanted_requests(self) -> int:
        return SEQUENCES * self._steps

    def _requests(self, endpoint: Endpoint) -> list[bytes]:
        requests = super()._requests(endpoint)
        return requests[: max(1, len(requests) // self._steps) * self._steps]

    def _send_alone(self, endpoint: Endpoint, requests: Sequence[bytes]) -> tuple[list[bytes], float]:
        """Send the sequences one after the other until REFERENCE_SECONDS are over, at least one of them."""
        started, ids = time.monotonic(), fresh_ids()
        responses: list[bytes] = []
        while len(responses) < len(requests):
            steps = requests[len(responses) : len(responses) + self._steps]
            responses += _send_sequence(endpoint, steps, next(ids))
            if time.monotonic() - started > REFERENCE_SECONDS:
                break
        return responses, time.monotonic() - started

    def _send_together(self, endpoint: Endpoint, reference: ReferenceOutputs) -> tuple[list[int], list[bytes]]:
        """Send several sequences at the same time, each step after the answer to the step before it."""
        numbers = range(len(reference.requests))
        sequences = [numbers[first : first + self._steps] for first in range(0, len(numbers), self._steps)]
        in_time = int(CHECK_SECONDS / max(self._steps * reference.seconds_alone, 1e-6))
        wanted = min(2 * endpoint.candidate.max_batch_size, in_time, MAX_IN_FLIGHT)
        chosen = [sequences[place % len(sequences)] for place in range(max(MIN_IN_FLIGHT, wanted))]

        # a sequence may have to wait until all others have ended
        timeout_seconds = max(TIMEOUT_SECONDS, 4 * len(chosen) * self._steps * reference.seconds_alone)

        def send(steps: range, sequence: int) -> list[bytes]:
            return _send_sequence(
                endpoint, [reference.requests[number] for number in steps], sequence, timeout_seconds
            )

        with ThreadPoolExecutor(len(chosen)) as pool:
            answers = list(pool.map(send, chosen, fresh_ids()))
        return [number for steps in chosen for number in steps], [response for own in answers for response in own]

    def _is_refused(self, endpoint: Endpoint, request: bytes) -> bool:
        return super()._is_refused(endpoint, request + step_parameters(next(fresh_ids()), start=True, end=True))


def _send_sequence(
    endpoint: Endpoint, requests: Sequence[bytes], sequence: int, timeout_seconds: float = TIMEOUT_SECONDS
) -> list[bytes]:
    """Send ``requests`` as the steps of one sequence and return the responses; each may take ``timeout_seconds``."""

    def steps() -> Iterator[bytes]:
        for place, request in enumerate(requests):
            is_first, is_last = place == 0, place == len(requests) - 1
            yield request + step_parameters(sequence, start=is_first, end=is_last)

    return server_calls.infer(endpoint, steps(), in_flight=1, timeout_seconds=timeout_seconds)
