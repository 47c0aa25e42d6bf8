"""The times at which the peer's servers and load generators ran.

The wrapper scripts that the peer starts write a line to a file and then become the program itself (``exec``), so that
the peer watches and ends the right process. The end is observed from outside, by the process's file descriptor.
"""

from __future__ import annotations

import contextlib
import os
import select
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from shlex import quote

SERVER, LOAD_GENERATOR = "tritonserver", "perf_analyzer"


@dataclass(frozen=True, slots=True)
class Launch:
    """One process, with times in seconds since the epoch."""

    program: str
    started: float
    ended: float


def log_start(program: str, log: Path) -> str:
    """Return the line of a wrapper script that logs its start; ``exec`` keeps the process id."""
    return f'printf \'%s %s %s\\n\' {program} "$$" "$(date +%s.%N)" >> {quote(str(log))}\n'


class Observer:
    """Reads starts from ``log`` and waits for the ends. ``watch`` must be called repeatedly."""

    def __init__(self, log: Path) -> None:
        self.launches: list[Launch] = []
        self._log = log
        self._read = 0
        self._running: dict[int, tuple[str, float]] = {}  # by file descriptor
        log.touch()

    def watch(self, seconds: float) -> None:
        """Look for new starts and then for ends, for at most ``seconds``."""
        with self._log.open() as file:
            file.seek(self._read)
            lines = [line for line in file.readlines() if line.endswith("\n")]
        for line in lines:
            self._read += len(line)
            program, pid, started = line.split()
            try:
                self._running[os.pidfd_open(int(pid))] = (program, float(started))
            except ProcessLookupError:
                self.launches.append(Launch(program, float(started), time.time()))
        for ended in select.select(list(self._running), [], [], seconds)[0]:
            self._end(ended)

    def close(self) -> None:
        """Record the end of processes that are still running."""
        self.watch(0)
        for running in list(self._running):
            self._end(running)
        self.launches.sort(key=lambda launch: launch.started)

    def _end(self, descriptor: int) -> None:
        program, started = self._running.pop(descriptor)
        self.launches.append(Launch(program, started, time.time()))
        with contextlib.suppress(OSError):
            os.close(descriptor)


def seconds_of_loads(launches: Sequence[Launch]) -> float:
    return sum(one.ended - one.started for one in launches if one.program == LOAD_GENERATOR)


def seconds_of_servers(launches: Sequence[Launch]) -> float:
    """Return the time spent on starting servers and loading models (until the first load) and on ending them.

    A server without any load counts completely.
    """
    total = 0.0
    loads = [one for one in launches if one.program == LOAD_GENERATOR]
    for server in launches:
        if server.program != SERVER:
            continue
        own = [load for load in loads if server.started <= load.started <= server.ended]
        total += server.ended - server.started
        if own:
            total -= max(load.ended for load in own) - min(load.started for load in own)
    return total
