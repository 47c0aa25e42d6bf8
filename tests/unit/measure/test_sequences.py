"""Test the client's steps of sequences without a server."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from itertools import islice
from pathlib import Path

import pytest
from tritonclient.grpc.service_pb2 import ModelInferRequest

from optimizer.core.candidate import Candidate
from optimizer.core.endpoint import Endpoint
from optimizer.measure.load_client.client_files import SendPlan
from optimizer.measure.load_client.sequences import (
    MAX_SEQUENCE_ID,
    NANOSECONDS_AN_ID,
    SequenceClient,
    fresh_ids,
    step_parameters,
)
from optimizer.measure.output_check import MIN_IN_FLIGHT, TIMEOUT_SECONDS, SequenceOutputCheck
from optimizer.measure.output_comparison import ReferenceOutputs

REQUEST = ModelInferRequest(model_name="m", raw_input_contents=[b"1234"])


@pytest.mark.parametrize("sequence", [1, 127, 128, 2**31 - 1])
@pytest.mark.parametrize(("start", "end"), [(True, False), (False, False), (False, True), (True, True)])
def test_parameters_are_appended_to_a_serialized_request(sequence: int, start: bool, end: bool) -> None:
    message = REQUEST.SerializeToString() + step_parameters(sequence, start=start, end=end)
    request = ModelInferRequest.FromString(message)
    assert (request.model_name, request.raw_input_contents) == (REQUEST.model_name, REQUEST.raw_input_contents)
    assert request.parameters["sequence_id"].int64_param == sequence
    flags = {name: value.bool_param for name, value in request.parameters.items() if name != "sequence_id"}
    assert flags == {name: True for name, is_set in (("sequence_start", start), ("sequence_end", end)) if is_set}


def test_ids_are_fresh_and_fit_an_int32() -> None:
    first = list(islice(fresh_ids(), 1000))
    assert len(set(first)) == 1000
    assert all(1 <= number <= MAX_SEQUENCE_ID for number in first)


@pytest.mark.parametrize("started_ns", [0, 1_700_000_000 * 10**9, (MAX_SEQUENCE_ID - 500) * NANOSECONDS_AN_ID])
def test_ids_of_two_measurements_differ_if_at_most_100_sequences_a_ms_were_started(
    started_ns: int,
) -> None:
    first = list(islice(fresh_ids(started_ns), 1000))
    second = list(islice(fresh_ids(started_ns + 10_000_000), 1000))
    assert len({*first, *second}) == 2000


def test_the_output_check_waits_for_slow_sequences(random_requests: Path, tmp_path: Path) -> None:
    waited = []

    def infer(_: Endpoint, messages: Iterable[bytes], *, in_flight: int, timeout_seconds: float) -> list[bytes]:
        waited.append((in_flight, timeout_seconds))
        return list(messages)

    check = SequenceOutputCheck(
        tmp_path / "reference.npz",
        input_data=random_requests,
        shapes=(),
        request_batch_size=1,
        sequence_length=5,
        infer=infer,
    )
    endpoint = Endpoint("m", Candidate(4))
    for seconds_alone, timeout_seconds in ((0.001, TIMEOUT_SECONDS), (1.0, 4 * MIN_IN_FLIGHT * 5 * 1.0)):
        check._send_together(endpoint, ReferenceOutputs((b"",) * 10, (), seconds_alone, 0.0))
        assert waited == [(1, timeout_seconds)] * MIN_IN_FLIGHT
        waited.clear()


class RecordingConnection:
    """Stands in for the connection: it keeps the requests that the client sends."""

    def __init__(self) -> None:
        self.requests: list[ModelInferRequest] = []

    def request(self, message: bytes) -> None:
        self.requests.append(ModelInferRequest.FromString(message))


def new_client(
    concurrency: int, lengths: tuple[int, ...], messages: int = 3
) -> tuple[SequenceClient, RecordingConnection]:
    plan = SendPlan(("localhost:1",), 0.0, concurrency=concurrency, seconds=1e9, sequence_lengths=lengths)
    requests = [ModelInferRequest(raw_input_contents=[bytes([i])]).SerializeToString() for i in range(messages)]
    client, connection = SequenceClient(plan, requests), RecordingConnection()
    client._channels[0].http2 = connection  # type: ignore[assignment]
    return client, connection


def test_the_next_step_is_sent_when_the_last_one_is_answered() -> None:
    client, connection = new_client(2, (3,))
    client._send_due()
    client._send_due()
    assert len(connection.requests) == 2, "both sequences wait for an answer"
    client._record_answer(1, 5)
    client._send_due()
    ids = [request.parameters["sequence_id"].int64_param for request in connection.requests]
    assert ids[2] == ids[1] != ids[0]


def test_first_sequences_are_shortened_so_that_they_do_not_end_together() -> None:
    client, connection = new_client(4, (8,))
    for number in range(200):
        client._send_due()
        client._record_answer(number, number)
    ends = Counter(request.parameters["sequence_id"].int64_param for request in connection.requests)
    assert list(ends.values())[:4] == [2, 4, 6, 8]
    assert set(list(ends.values())[4:-4]) == {8}


def test_the_steps_of_a_sequence_have_consecutive_entries() -> None:
    client, connection = new_client(1, (4, 2), messages=5)
    for number in range(18):
        client._send_due()
        client._record_answer(number, number)
    entries = [request.raw_input_contents[0][0] for request in connection.requests]
    assert entries == [i % 5 for i in range(len(entries))]
