"""Test the client's steps of sequences without a server."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Iterable
from itertools import islice
from pathlib import Path

import pytest
from tritonclient.grpc.service_pb2 import ModelInferRequest

from optimizer.core.candidate import Candidate
from optimizer.core.endpoint import Endpoint
from optimizer.measure.load_client.client import WARM_UPS
from optimizer.measure.load_client.client_files import SendPlan
from optimizer.measure.load_client.sequences import (
    MAX_SEQUENCE_ID,
    NANOSECONDS_AN_ID,
    SequenceClient,
    fresh_ids,
    step_parameters,
)
from optimizer.measure.output_check import TIMEOUT_SECONDS, SequenceOutputCheck
from optimizer.measure.output_comparison import ReferenceOutputs
from tests.load_clients import SimulatedNetwork, run_in_this_process

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


@pytest.mark.parametrize(
    ("seconds_alone", "sequences", "timeout_seconds"),
    [(0.001, 16, TIMEOUT_SECONDS), (0.1, 10, TIMEOUT_SECONDS), (1.0, 4, 4 * 4 * 5 * 1.0)],
)
def test_the_output_check_sends_fewer_slow_sequences_and_waits_for_them(
    seconds_alone: float, sequences: int, timeout_seconds: float, random_requests: Path, tmp_path: Path
) -> None:
    sent = []

    def infer(_: Endpoint, messages: Iterable[bytes], *, in_flight: int, timeout_seconds: float) -> list[bytes]:
        sent.append((in_flight, timeout_seconds))
        return [b"" for _ in messages]

    file = tmp_path / "reference.npz"
    ReferenceOutputs((b"",) * 10, (b"",) * 10, seconds_alone, 0.0).write(file)
    check = SequenceOutputCheck(
        file, input_data=random_requests, shapes=(), request_batch_size=1, sequence_length=5, infer=infer
    )
    assert check.check(Endpoint("m", Candidate(4))) == 0.0
    assert sent == [(1, timeout_seconds)] * sequences


def steps_of(
    folder: Path, serve: Callable[[float], float], concurrency: int, lengths: tuple[int, ...], messages: int = 3
) -> list[ModelInferRequest]:
    """Return the steps that the client sends in 4 s to a server with these answers, without those of the warm-up."""
    plan = SendPlan(("a:1",), 0.0, concurrency=concurrency, seconds=4.0, sequence_lengths=lengths)
    requests = [ModelInferRequest(raw_input_contents=[bytes([i])]).SerializeToString() for i in range(messages)]
    network = SimulatedNetwork(serve)
    run_in_this_process(SequenceClient(plan, requests, (), None, network), folder)
    return [ModelInferRequest.FromString(message) for _, message in network.calls[WARM_UPS:]]


def sequence_of(step: ModelInferRequest) -> int:
    return int(step.parameters["sequence_id"].int64_param)


def test_the_next_step_is_sent_when_the_last_one_is_answered(tmp_path: Path) -> None:
    """The first sequence waits for its answer until after the load, and the second one continues."""
    seconds = itertools.chain([0.01] * WARM_UPS, [5.0], itertools.repeat(0.1))
    steps = steps_of(tmp_path, lambda arrived: arrived + next(seconds), 2, (100,))
    assert sequence_of(steps[0]) not in {sequence_of(step) for step in steps[1:-2]}
    assert len({sequence_of(step) for step in steps[1:-2]}) == 1
    assert len(steps) > 40, "one each 0.1 s"


def test_first_sequences_are_shortened_so_that_they_do_not_end_together(tmp_path: Path) -> None:
    steps = steps_of(tmp_path, lambda arrived: arrived + 0.05, 4, (8,))
    lengths = list(Counter(map(sequence_of, steps)).values())
    assert lengths[:4] == [2, 4, 6, 8]
    assert set(lengths[4:-4]) == {8}


def test_the_steps_of_a_sequence_have_consecutive_entries(tmp_path: Path) -> None:
    steps = steps_of(tmp_path, lambda arrived: arrived + 0.1, 1, (4, 2), messages=5)
    entries = [step.raw_input_contents[0][0] for step in steps]
    assert entries == [i % 5 for i in range(len(entries))]
