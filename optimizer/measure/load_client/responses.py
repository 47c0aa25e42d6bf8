"""The responses of models that stream: times to first response, inter-token latencies, responses and tokens."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, TypeAlias

import numpy as np
import numpy.typing as npt

from objectives.arrays import FloatArray, IntArray
from objectives.metrics import ITL, TTFT, Timing
from optimizer.core.errors import MeasurementError
from optimizer.core.safe_text import one_line
from optimizer.measure.load_client.client_files import NEVER, ResponseRecord

if TYPE_CHECKING:
    from tritonclient.grpc.service_pb2 import ModelInferResponse

Arrays: TypeAlias = "npt.NDArray[np.object_]"  # an array of floats for each request
Selection: TypeAlias = "npt.NDArray[np.bool_] | slice"

_NO_OUTPUTS = -1  # instead of a number of tokens


@dataclass(frozen=True, slots=True)
class StreamedRequests:
    """The responses with outputs; a response without outputs only says that a request has ended.

    Attributes:
        first_ns: Arrival of each request's first response; NEVER without one.
        last_ns: Arrival of its last response; NEVER without one.
        responses: Number of its responses.
        tokens: Number of tokens in them.
        arrived_ns: Arrival of each response of all requests.
        tokens_each: Tokens of each response, in the order of ``arrived_ns``.
    """

    first_ns: IntArray
    last_ns: IntArray
    responses: IntArray
    tokens: IntArray
    arrived_ns: IntArray
    tokens_each: IntArray

    @classmethod
    def decode(cls, record: ResponseRecord, token_output: str = "") -> StreamedRequests:
        """Return the responses of ``record``.

        The tokens of a response are the elements of its output ``token_output``; each response counts as one token if
        that is empty. Raises MeasurementError if no response has this output.
        """
        tokens = _count_tokens(record.messages, token_output)
        is_response = tokens != _NO_OUTPUTS
        requests = len(record.offsets) - 1
        request = np.repeat(np.arange(requests), np.diff(record.offsets))[is_response]
        arrived_ns, tokens = record.arrived_ns[is_response], tokens[is_response]
        responses = np.bincount(request, minlength=requests)
        ends, has_responses = np.cumsum(responses), responses > 0
        first_ns, last_ns = np.full((2, requests), NEVER, dtype=np.int64)
        first_ns[has_responses] = arrived_ns[(ends - responses)[has_responses]]
        last_ns[has_responses] = arrived_ns[ends[has_responses] - 1]
        tokens_of_request = np.bincount(request, weights=tokens, minlength=requests).astype(np.int64)
        return cls(first_ns, last_ns, responses, tokens_of_request, arrived_ns, tokens)

    def ended_ns(self, answered_ns: IntArray) -> IntArray:
        """Return when each request ended: at its last response, or at the end of its call if it has none.

        ``answered_ns`` are the ends of the calls; a request whose call has not ended has not ended either.
        """
        return np.where((answered_ns == NEVER) | (self.last_ns == NEVER), answered_ns, self.last_ns)

    def times(self, started_ns: IntArray, waited_until_ns: IntArray) -> StreamTimes:
        """Return the times of the requests; time to first response counts from ``started_ns``.

        For a request without responses that has not ended it is a lower bound: the time until ``waited_until_ns``,
        which is NEVER for a request that has ended.
        """
        first_ns = np.where(self.first_ns == NEVER, waited_until_ns, self.first_ns)
        ttft_ms = np.where(first_ns == NEVER, np.nan, (first_ns - started_ns) / 1e6)
        gaps = np.maximum(self.responses - 1, 1)
        itl_ms = np.where(self.responses >= 2, (self.last_ns - self.first_ns) / gaps / 1e6, np.nan)
        return StreamTimes(
            ttft_ms, itl_ms, self.responses, self.tokens, self._arrivals_ms(started_ns, waited_until_ns == NEVER)
        )

    def _arrivals_ms(self, started_ns: IntArray, has_ended: npt.NDArray[np.bool_]) -> Arrays:
        """Return the arrivals of each request's responses after ``started_ns``; none if it has not ended."""
        arrivals_ms = np.empty(len(started_ns), dtype=object)
        begin = 0
        for index, (started, ended, count) in enumerate(zip(started_ns, has_ended, self.responses, strict=True)):
            arrivals_ms[index] = (self.arrived_ns[begin : begin + count * ended] - started) / 1e6
            begin += count
        return arrivals_ms

    def output_between(self, begin_ns: float, end_ns: float) -> StreamOutput:
        """Return the number of responses and tokens that arrived in this time."""
        counted = (self.arrived_ns >= begin_ns) & (self.arrived_ns < end_ns)
        return StreamOutput(int(counted.sum()), int(self.tokens_each[counted].sum()))


@dataclass(frozen=True, slots=True)
class StreamOutput:
    """The number of responses and of tokens that a model sent in some time."""

    responses: int
    tokens: int

    def fields(self, seconds: float) -> dict[str, float]:
        """Return the fields of a Measurement over ``seconds``."""
        return {
            "responses_per_sec": self.responses / seconds,
            "output_tokens_per_sec": self.tokens / seconds,
        }


@dataclass(frozen=True, slots=True)
class StreamTimes:
    """The time to first response and the inter-token latency of each request (NaN if it has none), and its responses.

    ``arrivals_ms`` has the arrivals of its responses, counted as the time to first response.
    """

    ttft_ms: FloatArray
    itl_ms: FloatArray
    responses: IntArray
    tokens: IntArray
    arrivals_ms: Arrays

    def take(self, selection: Selection) -> StreamTimes:
        """Return the times of the selected requests."""
        return StreamTimes(*(getattr(self, column.name)[selection] for column in fields(self)))

    def by_timing(self) -> dict[Timing, FloatArray]:
        """Return the times of all requests in ms, by their kind."""
        return {TTFT: self.ttft_ms, ITL: self.itl_ms}

    @property
    def output(self) -> StreamOutput:
        """The responses and tokens of all requests."""
        return StreamOutput(int(self.responses.sum()), int(self.tokens.sum()))


def _count_tokens(messages: tuple[bytes, ...], token_output: str) -> IntArray:
    """Return the tokens of each serialized ModelStreamInferResponse; _NO_OUTPUTS for one without outputs."""
    from google.protobuf.message import DecodeError
    from tritonclient.grpc.service_pb2 import ModelStreamInferResponse

    try:
        responses = [ModelStreamInferResponse.FromString(message).infer_response for message in messages]
    except DecodeError as error:
        raise MeasurementError("the server sent a response that is no ModelStreamInferResponse") from error
    names = {output.name for response in responses[:1000] for output in response.outputs}
    if token_output and names and token_output not in names:
        shown = one_line(", ".join(sorted(names)), 200)
        raise MeasurementError(
            f"no response has the output {one_line(token_output, 60)}, whose elements are the tokens; it has {shown}"
        )
    return np.array([_tokens(response, token_output) for response in responses], dtype=np.int64)


def _tokens(response: ModelInferResponse, token_output: str) -> int:
    """Return the tokens of a response, see ``StreamedRequests.decode``; _NO_OUTPUTS without outputs."""
    if not response.outputs:
        return _NO_OUTPUTS
    if not token_output:
        return 1
    return sum(math.prod(output.shape) for output in response.outputs if output.name == token_output)
