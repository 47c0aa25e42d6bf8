"""System shared memory between a load generator and a server on the same machine, and the tensors in it.

A region is a file in /dev/shm, which the server maps when it is registered. It is named after this process, see
``optimizer.core.process_owner``, so that a later run removes it if this process is killed.

All inputs of tune's own load client are in one region, which the server reads. The outputs are in another one, with a
slot for each request in flight. The client appends the outputs in a slot to the serialized request, because protobuf
merges concatenated messages.
"""

from __future__ import annotations

import contextlib
import math
import os
import secrets
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from optimizer.core.endpoint import Connection, Endpoint
from optimizer.core.errors import BadInputError, EnvironmentFault, MeasurementError
from optimizer.core.files import SHARED_MEMORY_FOLDER, cache_folder, write_error
from optimizer.core.locks import file_lock
from optimizer.core.process_owner import is_leftover, this_process
from optimizer.core.safe_text import one_line, show_path
from optimizer.measure.server_calls import open_client
from optimizer.measure.server_client import CallError

if TYPE_CHECKING:
    from tritonclient.grpc.service_pb2 import ModelMetadataResponse


PROBE_BYTES = 4096
LOCK = "perf_analyzer_shared_memory.lock"  # name of the file in the cache folder
FREE_SECONDS = 3.0  # after the kill of a run, its supervisor removes the regions within this time
MAX_CAUSE = 200  # characters


def new_name() -> str:
    """Return an unused name for a region of this process."""
    return f"tritune_{str(this_process()).replace('-', '_')}_{secrets.token_hex(4)}"


@contextlib.contextmanager
def shared_region(name: str, size: int, contents: bytes = b"") -> Iterator[None]:
    """Create the region ``name`` of ``size`` bytes, which begins with ``contents``, and remove it at the end.

    Its memory is reserved at once, because the kernel kills a server that writes to memory that is not available.
    Raises MeasurementError if it is not.
    """
    path = SHARED_MEMORY_FOLDER / name
    try:
        try:
            _write(path, size, contents)
        except OSError as error:
            raise MeasurementError(
                f"{SHARED_MEMORY_FOLDER} has no space for {size / 2**20:,.1f} MiB of inputs or outputs "
                f"({error.strerror}); enlarge it, or measure with --shared-memory none"
            ) from error
        yield
    finally:
        path.unlink(missing_ok=True)


def _write(path: Path, size: int, contents: bytes) -> None:
    """Create ``path`` with ``size`` bytes of reserved memory that begin with ``contents``. Raises OSError."""
    file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        os.posix_fallocate(file, 0, size)
        with memoryview(contents) as view:
            written = 0
            while written < len(view):
                written += os.pwrite(file, view[written:], written)
    finally:
        os.close(file)


@contextlib.contextmanager
def claimed(patterns: Sequence[str]) -> Iterator[None]:
    """Keep other runs of this user from using the regions that ``patterns`` name, as in a shell, within the context.

    perf_analyzer names its regions after the tensors and overwrites those of another process. Raises
    EnvironmentFault if another program has such a region.
    """
    with contextlib.ExitStack() as stack:
        if patterns:
            lock = cache_folder() / LOCK
            try:
                lock.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
                stack.enter_context(file_lock(lock, lambda holder: None))
            except OSError as error:
                raise write_error(lock, error) from error
            _wait_until_free(patterns)
        yield


def _wait_until_free(patterns: Sequence[str]) -> None:
    """Wait until no region has a name of ``patterns``. Raises EnvironmentFault after FREE_SECONDS."""
    deadline = time.monotonic() + FREE_SECONDS
    while existing := [
        path for path in SHARED_MEMORY_FOLDER.iterdir() if any(fnmatchcase(path.name, name) for name in patterns)
    ]:
        if time.monotonic() > deadline:
            raise EnvironmentFault(
                f"{show_path(existing[0])}: another program has shared memory with the name that perf_analyzer "
                "gives to a tensor; remove it if nothing uses it, or leave --shared-memory out"
            )
        time.sleep(0.05)


class RegionClient(Protocol):
    """The part of a ``ServerClient`` that regions need."""

    def register_shared_memory(self, name: str, size: int) -> None: ...

    def unregister_shared_memory(self, name: str) -> None: ...

    def shared_memory(self) -> list[str]: ...

    def close(self) -> None: ...


def unregister_leftovers(client: RegionClient) -> None:
    """Unregister the regions of processes that have ended, so that the server frees their memory."""
    for name in client.shared_memory():
        if is_leftover(name):
            client.unregister_shared_memory(name)


def check_is_shared(endpoint: Endpoint, connect: Callable[[Connection], RegionClient] = open_client) -> None:
    """Raise BadInputError if the server of ``endpoint`` does not map the system shared memory of this machine.

    ``connect`` returns a client of the server.
    """
    name = new_name()
    with closing(connect(endpoint.connection)) as client, shared_region(name, PROBE_BYTES):
        try:
            unregister_leftovers(client)
            client.register_shared_memory(name, PROBE_BYTES)
            client.unregister_shared_memory(name)
        except CallError as error:
            if error.failure in ("unreachable", "overdue"):
                return  # the measurement reports a server that does not answer
            raise BadInputError(
                f"--shared-memory system: the server at {endpoint.connection.address} cannot use the shared memory "
                f"of this machine ({one_line(str(error), MAX_CAUSE)}); it needs the same IPC namespace (docker run "
                "--ipc host) and, from Triton 26.05 on, the option --allow-client-shm=true; else leave "
                "--shared-memory out"
            ) from error


# -- the tensors of requests ------------------------------------------------------------------------------------

ALIGNMENT = 64  # bytes between the starts of two tensors: a cache line
OPEN_LOOP_SLOTS, OPEN_LOOP_BYTES = 1024, 256 << 20  # limits of the output slots of an open loop


@dataclass
class OutgoingRequests:
    """The requests that a client process sends in turn, and their output slots.

    Attributes:
        messages: Serialized requests.
        output_slots: For each slot, the end of a request that puts its outputs there; empty without shared memory.
        regions: Patterns of the names of the regions; empty without shared memory.
        all_answered: Whether every request has been answered. Otherwise the server may still write into the regions.
    """

    messages: Sequence[bytes]
    output_slots: Sequence[bytes] = ()
    regions: tuple[str, ...] = ()
    all_answered: bool = False


@contextlib.contextmanager
def in_shared_memory(
    servers: Sequence[Connection],
    messages: Sequence[bytes],
    outputs: Mapping[str, int],
    concurrency: int,
    connect: Callable[[Connection], RegionClient] = open_client,
) -> Iterator[OutgoingRequests]:
    """Yield ``messages`` with their tensors in regions that ``servers`` map, which are removed at the end.

    ``outputs`` are the bytes of each output. ``concurrency`` is the number of requests in flight, 0 in an open loop.
    Requests of an open loop that find no free slot get their outputs in the response. Regions with unanswered
    requests stay registered until the server ends, because a server that writes to an unregistered region crashes.
    ``connect`` returns a client of a server.

    Raises MeasurementError if there is not enough memory, or if the server refuses it.
    """
    name = new_name()
    inputs_name, outputs_name = f"{name}_inputs", f"{name}_outputs"
    requests, contents = _move_inputs(messages, inputs_name)
    slot_bytes = sum(map(_aligned, outputs.values()))
    count = concurrency or max(1, min(OPEN_LOOP_SLOTS, OPEN_LOOP_BYTES // slot_bytes))
    slots = [_output_slot(outputs, outputs_name, number * slot_bytes) for number in range(count)]
    outgoing_requests = OutgoingRequests(requests, slots, (f"{name}_*",))
    with contextlib.ExitStack() as stack:
        clients = [stack.enter_context(closing(connect(server))) for server in servers]
        regions = ((inputs_name, len(contents), contents), (outputs_name, count * slot_bytes, b""))
        for region_name, size, begin in regions:
            stack.enter_context(shared_region(region_name, size, begin))
            for client in clients:
                stack.enter_context(_registered(client, region_name, size, outgoing_requests))
        yield outgoing_requests


@contextlib.contextmanager
def _registered(client: RegionClient, name: str, size: int, outgoing_requests: OutgoingRequests) -> Iterator[None]:
    """Let the server map the region ``name`` within the context, and after it if a request is unanswered.

    Raises MeasurementError if the server refuses it.
    """
    try:
        client.register_shared_memory(name, size)
    except CallError as error:
        raise MeasurementError(f"the server cannot use shared memory: {error}") from error
    try:
        yield
    finally:
        if outgoing_requests.all_answered:
            with contextlib.suppress(CallError):  # the server may have died
                client.unregister_shared_memory(name)


def output_bytes(
    metadata: ModelMetadataResponse, samples: int, variable_bytes: int, *, has_batch: bool
) -> dict[str, int]:
    """Return the largest size of each output of a request with up to ``samples`` samples.

    ``variable_bytes`` is the size for each sample of an output of strings or with variable dims. ``has_batch``: the
    first dim of the shapes is that of the batch.
    """
    import numpy as np
    from tritonclient.utils import triton_to_np_dtype

    sizes = {}
    for tensor in metadata.outputs:
        dims = tuple(tensor.shape)[has_batch:]
        is_fixed = tensor.datatype != "BYTES" and min(dims, default=1) >= 0
        width = 2 if tensor.datatype == "BF16" else np.dtype(triton_to_np_dtype(tensor.datatype)).itemsize
        sizes[tensor.name] = samples * (width * math.prod(dims) if is_fixed else variable_bytes)
    return sizes


def _move_inputs(messages: Sequence[bytes], region: str) -> tuple[list[bytes], bytes]:
    """Return ``messages`` with inputs that refer to ``region``, and the contents of the region.

    An input without elements stays in its message: Triton takes no empty part of a region.
    """
    from tritonclient.grpc.service_pb2 import ModelInferRequest

    contents, moved = bytearray(), list[bytes]()
    for message in messages:
        request = ModelInferRequest.FromString(message)
        raws = list(request.raw_input_contents)
        del request.raw_input_contents[:]
        for tensor, raw in zip(request.inputs, raws, strict=True):
            if not raw:
                request.raw_input_contents.append(raw)
                continue
            _refer(tensor.parameters, region, len(raw), len(contents))
            contents += raw
            contents += bytes(_aligned(len(contents)) - len(contents))
        moved.append(bytes(request.SerializeToString()))
    return moved, bytes(contents) or bytes(ALIGNMENT)


def _output_slot(outputs: Mapping[str, int], region: str, offset: int) -> bytes:
    """Return a serialized request with nothing but the outputs, which are in ``region`` from ``offset`` on."""
    from tritonclient.grpc.service_pb2 import ModelInferRequest

    request = ModelInferRequest()
    for name, size in outputs.items():
        _refer(request.outputs.add(name=name).parameters, region, size, offset)
        offset += _aligned(size)
    return bytes(request.SerializeToString())


def _refer(parameters: object, region: str, size: int, offset: int) -> None:
    """Set the parameters of a tensor, a map of protobuf, that say where in ``region`` it is."""
    parameters["shared_memory_region"].string_param = region  # type: ignore[index]
    parameters["shared_memory_byte_size"].int64_param = size  # type: ignore[index]
    parameters["shared_memory_offset"].int64_param = offset  # type: ignore[index]


def _aligned(size: int) -> int:
    """Return ``size`` rounded up to a multiple of ALIGNMENT."""
    return -(-size // ALIGNMENT) * ALIGNMENT
