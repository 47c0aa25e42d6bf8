"""Tests for regions of system shared memory and for requests that refer to them."""

from __future__ import annotations

import itertools
import os
import subprocess
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest
from tritonclient.grpc.service_pb2 import ModelInferRequest, ModelMetadataResponse

from optimizer.core.candidate import Candidate
from optimizer.core.endpoint import Connection, Endpoint
from optimizer.core.errors import BadInputError, MeasurementError
from optimizer.core.files import SHARED_MEMORY_FOLDER
from optimizer.core.process_owner import is_leftover, this_process
from optimizer.measure.server_client import CallError, CallFailure
from optimizer.measure.shared_memory import (
    check_is_shared,
    in_shared_memory,
    new_name,
    output_bytes,
    shared_region,
    unregister_leftovers,
)
from optimizer.model.inference_requests import to_message

ENDPOINT = Endpoint("m", Candidate(8), grpc="localhost:1")


class RegionServer:
    """A RegionClient that keeps a list of regions; ``failure`` is how it answers a registration."""

    def __init__(self, *regions: str, failure: CallFailure | None = None) -> None:
        self.regions = dict.fromkeys(regions, 0)
        self.registrations = 0
        self._failure = failure

    def register_shared_memory(self, name: str, size: int) -> None:
        self.registrations += 1
        if self._failure is not None:
            raise CallError(Connection("localhost:1"), self._failure, "Unable to open shared memory region")
        assert (SHARED_MEMORY_FOLDER / name).stat().st_size == size
        self.regions[name] = size

    def unregister_shared_memory(self, name: str) -> None:
        del self.regions[name]

    def shared_memory(self) -> list[str]:
        return list(self.regions)

    def close(self) -> None: ...


@pytest.fixture(autouse=True)
def no_region_is_left() -> Iterator[None]:
    yield
    assert list(SHARED_MEMORY_FOLDER.glob(f"tritune_{os.getpid()}_*")) == []


def test_a_region_is_private_and_has_its_memory() -> None:
    with shared_region(name := new_name(), 10_000, b"abc"):
        status = (SHARED_MEMORY_FOLDER / name).stat()
        assert status.st_mode & 0o777 == 0o600
        assert status.st_size == 10_000
        assert status.st_blocks * 512 >= 10_000
        assert (SHARED_MEMORY_FOLDER / name).read_bytes()[:4] == b"abc\0"


def test_memory_that_is_not_available_is_a_measurement_error() -> None:
    with (
        pytest.raises(MeasurementError, match=r"/dev/shm has no space for [\d,.]+ MiB .*--shared-memory none"),
        shared_region(new_name(), 1 << 50),
    ):
        pytest.fail("there is no such machine")


def test_regions_of_ended_processes_are_unregistered() -> None:
    process = subprocess.Popen(["true"])
    process.wait()
    ended_region = f"tritune_{str(replace(this_process(), pid=process.pid)).replace('-', '_')}_1_inputs"
    assert is_leftover(ended_region)
    server = RegionServer(ended_region, own_region := new_name(), "theirs")
    unregister_leftovers(server)
    assert server.shared_memory() == [own_region, "theirs"]


def test_a_server_without_the_memory_of_this_machine_is_bad_input() -> None:
    with pytest.raises(BadInputError, match="localhost:1 cannot use the shared memory of this machine") as caught:
        check_is_shared(ENDPOINT, lambda _: RegionServer(failure="refused"))
    assert "--ipc host" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_server_that_does_not_answer_is_left_to_the_measurement() -> None:
    server = RegionServer(failure="unreachable")
    check_is_shared(ENDPOINT, lambda _: server)
    assert server.registrations == 1


def metadata(**outputs: tuple[str, list[int]]) -> ModelMetadataResponse:
    response = ModelMetadataResponse(name="m")
    for name, (datatype, shape) in outputs.items():
        response.outputs.add(name=name, datatype=datatype, shape=shape)
    return response


def test_outputs_of_variable_size_get_the_largest_size() -> None:
    outputs = metadata(
        fixed=("FP32", [-1, 3, 4]), half=("BF16", [-1, 5]), varied=("INT64", [-1, -1, 4]), texts=("BYTES", [-1, 1])
    )
    assert output_bytes(outputs, 2, 1000, has_batch=True) == {
        "fixed": 2 * 4 * 12,
        "half": 2 * 2 * 5,
        "varied": 2000,
        "texts": 2000,
    }
    assert output_bytes(metadata(one=("FP64", [])), 1, 1000, has_batch=False) == {"one": 8}


def test_requests_refer_to_their_inputs_and_places() -> None:
    server = RegionServer()
    arrays = [{"x": np.full(3, value, np.float32), "none": np.zeros(0, np.float32)} for value in (1, 2)]
    messages = [to_message("m", feeds) for feeds in arrays]
    outputs = {"y": 100, "z": 8}
    with in_shared_memory([Connection("localhost:1")], messages, outputs, 3, lambda _: server) as sent:
        assert len(sent.output_slots) == 3
        (inputs_name, inputs_size), (outputs_name, outputs_size) = server.regions.items()
        contents = (SHARED_MEMORY_FOLDER / inputs_name).read_bytes()
        used = set()
        for feeds, message in zip(arrays, sent.messages, strict=True):
            for place in sent.output_slots:
                request = ModelInferRequest.FromString(message + place)
                x, none = request.inputs
                assert (none.name, dict(none.parameters)) == ("none", {})
                assert list(request.raw_input_contents) == [b""]
                offset = x.parameters["shared_memory_offset"].int64_param
                size = x.parameters["shared_memory_byte_size"].int64_param
                assert x.parameters["shared_memory_region"].string_param == inputs_name
                assert contents[offset : offset + size] == feeds["x"].tobytes()
                assert [output.name for output in request.outputs] == ["y", "z"]
                for output in request.outputs:
                    assert output.parameters["shared_memory_region"].string_param == outputs_name
                    start = output.parameters["shared_memory_offset"].int64_param
                    assert output.parameters["shared_memory_byte_size"].int64_param == outputs[output.name]
                    used.add((start, start + outputs[output.name]))
        spans = sorted(used)
        assert len(spans) == 6
        assert all(end <= start for (_, end), (start, _) in itertools.pairwise(spans))
        assert spans[-1][1] <= outputs_size
        assert inputs_size == len(contents)
        sent.all_answered = True
    assert server.regions == {}


def test_regions_with_unanswered_requests_stay_registered() -> None:
    """The server crashes if it writes to an unregistered region."""
    server, message = RegionServer(), to_message("m", {"x": np.zeros(1)})
    with in_shared_memory([Connection("localhost:1")], [message], {"y": 8}, 1, lambda _: server):
        assert len(server.regions) == 2
    assert len(server.regions) == 2


def test_the_places_of_an_open_loop_are_limited() -> None:
    message = to_message("m", {"x": np.zeros(1)})
    for size, count in ((8, 1024), (64 << 20, 4), (1 << 29, 1)):
        connections = [Connection("localhost:1")]
        with in_shared_memory(connections, [message], {"y": size}, 0, lambda _: RegionServer()) as sent:
            assert len(sent.output_slots) == count
