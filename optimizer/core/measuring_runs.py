"""The runs that measure on this machine now, of all users: each holds a socket whose name describes it.

The socket is in Linux's abstract namespace (unix(7)). Any user can read its name, and the kernel removes it when its
process ends. Nothing connects to it.
"""

from __future__ import annotations

import contextlib
import os
import re
import socket
import zlib
from collections.abc import Iterator
from pathlib import Path

from optimizer.core.notes import OtherRun
from optimizer.core.process_owner import this_process
from optimizer.core.safe_text import one_line

SOCKETS = Path("/proc/net/unix")  # the names of all sockets, with @ for the byte that marks an abstract one
MAX_NAME_BYTES = 108  # of the address of a socket
_MARK = re.compile(r"@tritune (\d{1,10}) (\d{1,19}) (\d{1,10}) (.+)")  # process, its namespace, study, folder


@contextlib.contextmanager
def mark_measuring(folder: Path, study: str = "") -> Iterator[None]:
    """Mark this process within the context as one that measures for the run in ``folder``.

    ``study`` names the study that several runs share; empty for a run of its own. Of a long path the end is shown.
    """
    head = f"\0tritune {os.getpid()} {this_process().namespace} {zlib.crc32(study.encode())} ".encode()
    path, room = ascii(str(folder.absolute()))[1:-1].encode(), MAX_NAME_BYTES - len(head)
    with socket.socket(socket.AF_UNIX) as mark:
        with contextlib.suppress(OSError):  # this process measures for the folder already
            mark.bind(head + (path if len(path) <= room else b"..." + path[3 - room :]))
        yield


def other_runs(study: str = "") -> list[OtherRun]:
    """Return the runs that other processes measure on this machine now, without those that share ``study``.

    Runs in other containers are not seen.
    """
    try:
        names = SOCKETS.read_text(errors="replace")
    except OSError:  # a sandbox may hide it
        return []
    own_namespace, own_study = this_process().namespace, zlib.crc32(study.encode()) if study else None
    marks = sorted((int(pid), int(space), int(key), folder) for pid, space, key, folder in _MARK.findall(names))
    return [
        OtherRun(pid, one_line(folder))
        for pid, namespace, key, folder in marks
        if pid != os.getpid() and namespace == own_namespace and key != own_study
    ]
