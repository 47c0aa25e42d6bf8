"""System shared memory between a load generator and a server on the same machine.

A region is a file in /dev/shm, which the server maps when it is registered. It is named after this process, see
``optimizer.core.owner``, so that a later run removes it if this process is killed.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import time
from collections.abc import Iterator, Sequence
from contextlib import closing
from fnmatch import fnmatchcase
from pathlib import Path

from optimizer.core.endpoint import Endpoint
from optimizer.core.errors import BadInputError, EnvironmentFault, MeasurementError
from optimizer.core.files import cache_folder, write_error
from optimizer.core.locks import file_lock
from optimizer.core.owner import is_leftover, this_process
from optimizer.core.safe_text import one_line
from optimizer.measure.server_calls import open_client
from optimizer.measure.server_client import CallError, ServerClient

FOLDER = Path("/dev/shm")
PROBE_BYTES = 4096
LOCK = "perf_analyzer_shared_memory.lock"  # in the cache folder
FREE_SECONDS = 3.0  # after the kill of a run, its supervisor removes the regions within this time
MAX_CAUSE = 200  # characters


def new_name() -> str:
    """Return an unused name for a region of this process."""
    return f"tritune_{str(this_process()).replace('-', '_')}_{secrets.token_hex(4)}"


@contextlib.contextmanager
def region(name: str, size: int, contents: bytes = b"") -> Iterator[None]:
    """Create the region ``name`` of ``size`` bytes, which begins with ``contents``, and remove it at the end.

    Its memory is reserved at once, because the kernel kills a server that writes to memory that is not available.
    Raises MeasurementError if it is not.
    """
    path = FOLDER / name
    try:
        try:
            _write(path, size, contents)
        except OSError as error:
            raise MeasurementError(
                f"{FOLDER} has no space for {size / 2**20:,.1f} MiB of inputs or outputs ({error.strerror}); "
                "enlarge it, or measure with --shared-memory none"
            ) from error
        yield
    finally:
        path.unlink(missing_ok=True)


def _write(path: Path, size: int, contents: bytes) -> None:
    file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        os.posix_fallocate(file, 0, size)
        with memoryview(contents) as rest:
            written = 0
            while written < len(rest):
                written += os.pwrite(file, rest[written:], written)
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
    deadline = time.monotonic() + FREE_SECONDS
    while taken := [path for path in FOLDER.iterdir() if any(fnmatchcase(path.name, name) for name in patterns)]:
        if time.monotonic() > deadline:
            raise EnvironmentFault(
                f"{one_line(str(taken[0]))}: another program has shared memory with the name that perf_analyzer "
                "gives to a tensor; remove it if nothing uses it, or leave --shared-memory out"
            )
        time.sleep(0.05)


def unregister_leftovers(client: ServerClient) -> None:
    """Unregister the regions of processes that have ended, so that the server frees their memory."""
    for name in client.shared_memory():
        if is_leftover(name):
            client.unregister_shared_memory(name)


def check_is_shared(endpoint: Endpoint) -> None:
    """Raise BadInputError if the server of ``endpoint`` does not map the system shared memory of this machine."""
    name = new_name()
    with closing(open_client(endpoint.connection)) as client, region(name, PROBE_BYTES):
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
