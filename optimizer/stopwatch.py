"""Where the wall time of a run goes: the server's work, the load generator's, and the rest, tune's own."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from pathlib import Path


class Stopwatch:
    """Adds up the seconds spent waiting for others; ``own`` is what remains of the wall time."""

    def __init__(self) -> None:
        self._started = time.monotonic()
        self._spent = {"server": 0.0, "load_generator": 0.0, "set_up": 0.0, "search": 0.0}
        self._confirm_seconds = 0.0

    def wall_seconds(self) -> float:
        return time.monotonic() - self._started

    def server(self) -> contextlib.AbstractContextManager[None]:
        """Starting the server, loading models, asking it for its state."""
        return self._spend("server")

    def load_generator(self) -> contextlib.AbstractContextManager[None]:
        return self._spend("load_generator")

    def set_up(self) -> contextlib.AbstractContextManager[None]:
        """What happens once on a machine: fetching the server, building the model."""
        return self._spend("set_up")

    def searching(self) -> contextlib.AbstractContextManager[None]:
        """Ranking what could be deployed next."""
        return self._spend("search")

    def cluster(self) -> contextlib.AbstractContextManager[None]:
        """Waiting for workers, whatever they do; among what is reported where there are some."""
        self._spent.setdefault("cluster", 0.0)
        return self._spend("cluster")

    @contextlib.contextmanager
    def confirming(self) -> Iterator[None]:
        """The last phase, told apart from the search; the server and the load generator work in it as well."""
        started = time.monotonic()
        try:
            yield
        finally:
            self._confirm_seconds += time.monotonic() - started

    @contextlib.contextmanager
    def _spend(self, on: str) -> Iterator[None]:
        started = time.monotonic()
        try:
            yield
        finally:
            self._spent[on] += time.monotonic() - started

    def report(self) -> dict[str, float | None]:
        """Seconds by kind, and this process's CPU seconds and peak memory (resident, bytes)."""
        wall = self.wall_seconds()
        return {
            "wall_seconds": round(wall, 3),
            **{f"{name}_seconds": round(seconds, 3) for name, seconds in self._spent.items()},
            "confirm_seconds": round(self._confirm_seconds, 3),
            "own_seconds": round(wall - sum(self._spent.values()), 3),
            "own_cpu_seconds": round(time.process_time(), 3),
            "peak_memory_bytes": _peak_memory_bytes(),
        }


def _peak_memory_bytes() -> int | None:
    """Of this program alone: getrusage's figure includes what the process was before it became this program."""
    try:
        status = Path("/proc/self/status").read_text()
    except OSError:
        return None
    kibibytes = [line.split()[1] for line in status.splitlines() if line.startswith("VmHWM:")]
    return int(kibibytes[0]) * 1024 if kibibytes else None
