"""The process that created shared memory or a temporary folder, by its name, and whether that process has ended."""

from __future__ import annotations

import os
import re
import zlib
from dataclasses import dataclass
from pathlib import Path

# Shared memory is called tritune_PID_START_NAMESPACE_…, temporary folders tritune-PID-START-NAMESPACE-…: a process id
# alone may have been reused, or belong to a container that shares the memory or a host that shares the folder.
_OWNER = r"(\d{1,19})[-_](\d{1,19})[-_](\d{1,19})"


@dataclass(frozen=True, slots=True)
class Owner:
    """A process: its id, its start time (clock ticks since boot), and a number for its host and PID namespace."""

    pid: int
    start: int
    namespace: int

    def __str__(self) -> str:
        return f"{self.pid}-{self.start}-{self.namespace}"

    @property
    def is_visible(self) -> bool:
        """Whether the process id has a meaning here; it has none on another host or in another namespace."""
        return self.namespace == _namespace()

    def has_ended(self) -> bool:
        """Return whether the process has ended; false if that cannot be known, as on another host."""
        try:
            return self.is_visible and _start_ticks(self.pid) != self.start
        except OSError:  # such as too many open files
            return False


def this_process() -> Owner:
    """Return the running process as an owner."""
    start = _start_ticks(os.getpid())
    assert start is not None
    return Owner(os.getpid(), start, _namespace())


def read_owner(text: str) -> Owner | None:
    """Parse the text form of an owner; return None for any other text."""
    return _owner(re.fullmatch(_OWNER, text))


def owner_of(name: str) -> Owner | None:
    """Return the owner of the shared memory or temporary folder ``name``; None for any other name."""
    return _owner(re.match(rf"tritune[-_]{_OWNER}[-_]", name))


def _owner(match: re.Match[str] | None) -> Owner | None:
    return Owner(*map(int, match.groups())) if match else None


def is_leftover(name: str) -> bool:
    """Return whether ``name`` is shared memory or a temporary folder of a process that has ended."""
    owner = owner_of(name)
    return owner is not None and owner.has_ended()


def is_alive(pid: int) -> bool:
    """Return whether a process exists and is not a zombie."""
    return _start_ticks(pid) is not None


def _start_ticks(pid: int) -> int | None:
    """Return the start time of a process; None if it does not exist or is a zombie."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return None
    return None if fields[0] in "ZX" else int(fields[19])  # fields 3 and 22 of proc(5)


def _namespace() -> int:
    """Return a number for this host and PID namespace: the first namespace of each host has the same inode."""
    return zlib.crc32(os.uname().nodename.encode()) >> 8 << 32 | Path("/proc/self/ns/pid").stat().st_ino
