"""What runs leave that were killed together with all that would have cleaned up: found by the owner in its name.

Shared memory is called ``tritune_PID_START_NAMESPACE_…``, temporary folders ``tritune-PID-START-NAMESPACE-…``: a
process number alone may belong to another process by now, or to one in another container that shares the memory.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path

SHARED_MEMORY = Path("/dev/shm")
_NAME = re.compile(r"tritune[-_](\d+)[-_](\d+)[-_](\d+)[-_]")


@dataclass(frozen=True, slots=True)
class Owner:
    """A process: its number, its start (clock ticks since boot), the namespace in which the number holds."""

    pid: int
    start: int
    namespace: int

    def __str__(self) -> str:
        return f"{self.pid}-{self.start}-{self.namespace}"

    def is_gone(self) -> bool:
        """False where it cannot be known, in another namespace."""
        return self.namespace == _namespace() and _start(self.pid) != self.start


def this_process() -> Owner:
    start = _start(os.getpid())
    assert start is not None
    return Owner(os.getpid(), start, _namespace())


def read_owner(text: str) -> Owner | None:
    """What ``str`` makes of one; None where it is something else."""
    match = re.fullmatch(r"(\d{1,19})-(\d{1,19})-(\d{1,19})", text)
    return Owner(*map(int, match.groups())) if match else None


def new_folder() -> Path:
    """A temporary folder that only this user can read. Raises OSError."""
    return Path(tempfile.mkdtemp(prefix=f"tritune-{this_process()}-"))


def shared_memory_prefix(folder: Path) -> str:
    """For the regions of the server that has this ``new_folder``: of no other, in this process neither."""
    return f"{folder.name.replace('-', '_')}_"


def remove_leftovers() -> None:
    """Remove the shared memory and the temporary folders of processes that no longer exist."""
    for region in SHARED_MEMORY.glob("tritune_*"):
        if _owner_is_gone(region.name):
            with contextlib.suppress(OSError):
                region.unlink()
    for folder in Path(tempfile.gettempdir()).glob("tritune-*"):
        if _owner_is_gone(folder.name):
            shutil.rmtree(folder, ignore_errors=True)
    remove_environment_folders()


def remove_environment_folders() -> None:
    """Remove the empty folders in /tmp that Triton's Python backend makes at each start, and that a server leaves
    which does not end by itself (that takes 3 s). They bear no owner: only where no server runs at all."""
    for name in Path("/proc").glob("[0-9]*/comm"):
        with contextlib.suppress(OSError):
            if name.read_text().strip() == "tritonserver":
                return
    for folder in Path("/tmp").glob("python_env_*"):
        with contextlib.suppress(OSError):
            folder.rmdir()


def _owner_is_gone(name: str) -> bool:
    match = _NAME.match(name)
    return match is not None and Owner(*map(int, match.groups())).is_gone()


def _start(pid: int) -> int | None:
    """None for a process that does not exist, or whose parent has only not asked yet how it ended."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return None if fields[0] in "ZX" else int(fields[19])  # the 3rd and the 22nd in proc(5)


def _namespace() -> int:
    return Path("/proc/self/ns/pid").stat().st_ino
