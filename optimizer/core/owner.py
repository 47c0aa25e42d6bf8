"""The process that owns temporary files, which their names tell.

Shared memory is called ``tritune_PID_START_NAMESPACE_…``, temporary folders ``tritune-PID-START-NAMESPACE-…``: a
process id alone may have been reused, or belong to a container that shares the memory.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path

_NAME = re.compile(r"tritune[-_](\d{1,19})[-_](\d{1,19})[-_](\d{1,19})[-_]")


@dataclass(frozen=True, slots=True)
class Owner:
    """A process: its id, its start time (clock ticks since boot), and the PID namespace of the id."""

    pid: int
    start: int
    namespace: int

    def __str__(self) -> str:
        return f"{self.pid}-{self.start}-{self.namespace}"

    @property
    def is_visible(self) -> bool:
        """Whether the process id has a meaning here; it has none in another namespace."""
        return self.namespace == _namespace()

    def has_ended(self) -> bool:
        """Return whether the process has ended; false if that cannot be known, as in another namespace."""
        try:
            return self.is_visible and _start(self.pid) != self.start
        except OSError:  # such as too many open files
            return False


def this_process() -> Owner:
    """Return the running process as an owner."""
    start = _start(os.getpid())
    assert start is not None
    return Owner(os.getpid(), start, _namespace())


def read_owner(text: str) -> Owner | None:
    """Parse the text form of an owner; return None for any other text."""
    match = re.fullmatch(r"(\d{1,19})-(\d{1,19})-(\d{1,19})", text)
    return Owner(*map(int, match.groups())) if match else None


def owner_of(name: str) -> Owner | None:
    """Return the owner of the shared memory or temporary folder ``name``; None for any other name."""
    match = _NAME.match(name)
    return Owner(*map(int, match.groups())) if match else None


def is_leftover(name: str) -> bool:
    """Return whether ``name`` is shared memory or a temporary folder of a process that has ended."""
    owner = owner_of(name)
    return owner is not None and owner.has_ended()


def _start(pid: int) -> int | None:
    """Return the start time of a process; None if it does not exist or is a zombie."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return None
    return None if fields[0] in "ZX" else int(fields[19])  # fields 3 and 22 of proc(5)


def _namespace() -> int:
    return Path("/proc/self/ns/pid").stat().st_ino
