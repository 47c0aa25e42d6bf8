"""A lack of memory under ``ulimit -v``, which libraries may report as another error."""

from __future__ import annotations

import resource
from pathlib import Path

NEAR_LIMIT_BYTES = 64 << 20  # libraries allocate and map blocks of this size

# errors of the dynamic loader, of Python and of protobuf
OUT_OF_MEMORY = (
    *("Cannot allocate memory", "failed to map segment", "can't start new thread"),
    "Couldn't build proto file into descriptor pool: out of memory",
)


def is_out_of_memory(error: BaseException | None) -> bool:
    """Return whether ``error`` or an error that led to it is a lack of memory, even if a library calls it otherwise.

    Close to the limit of ``ulimit -v`` every error counts as one, because native libraries lose a MemoryError or
    replace it, and Python's parser calls it an error of syntax.
    """
    if _is_near_limit():
        return True
    while error is not None:
        if isinstance(error, MemoryError) or any(text in str(error) for text in OUT_OF_MEMORY):
            return True
        error = error.__cause__ or error.__context__
    return False


def _is_near_limit() -> bool:
    """Return whether the address space of this process has come close to the limit of ``ulimit -v``."""
    limit_bytes = resource.getrlimit(resource.RLIMIT_AS)[0]
    return limit_bytes != resource.RLIM_INFINITY and limit_bytes - address_space_peak_bytes() < NEAR_LIMIT_BYTES


def address_space_peak_bytes() -> int:
    """Return the largest address space that this process has had: VmPeak of proc(5)."""
    fields = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return int(fields["VmPeak"].split()[0]) * 1024
