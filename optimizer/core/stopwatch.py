"""The wall time of a run by kind of work, and the CPU time and memory of tune itself."""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Literal, TypeAlias, TypeVar

WorkKind: TypeAlias = Literal["server", "load_generator", "set_up", "search", "cluster"]
OwnWork: TypeAlias = Literal["probes", "rows", "display"]


class Stopwatch:
    """Sums the wall time by kind of work. ``own_seconds`` of the report is the rest: the time of tune itself.

    ``server`` is its start, loading of models and status requests. ``set_up`` is downloading the server and building
    the model, once per machine. ``search`` is choosing the next candidate, and predicting the loads of the
    confirmation. ``cluster`` is waiting for workers; the report has it only for clusters. Parts of the own time are
    ``probes`` of the machine's speed, writing ``rows`` of the trials table, and the ``display`` of measurements.
    """

    def __init__(self) -> None:
        self._started = time.monotonic()
        self._spent: dict[WorkKind, float] = {"server": 0.0, "load_generator": 0.0, "set_up": 0.0, "search": 0.0}
        self._own: dict[OwnWork, float] = {"probes": 0.0, "rows": 0.0, "display": 0.0}
        self._confirming = {"confirm": 0.0}

    def wall_seconds(self) -> float:
        """Return the wall time since the stopwatch was created."""
        return time.monotonic() - self._started

    def confirming(self) -> AbstractContextManager[None]:
        """Count the context as confirmation; its server and load generator times are counted there as well."""
        return _added_to(self._confirming, "confirm")

    def count(self, kind: WorkKind) -> AbstractContextManager[None]:
        """Count the time in the context as work of this kind."""
        return _added_to(self._spent, kind)

    def count_own(self, kind: OwnWork) -> AbstractContextManager[None]:
        """Count the time in the context as this part of the own time."""
        return _added_to(self._own, kind)

    def report(self) -> dict[str, float | None]:
        """Return the seconds by kind of work, and the CPU seconds and peak resident bytes of this process."""
        wall = self.wall_seconds()
        return {
            "wall_seconds": round(wall, 3),
            **{f"{name}_seconds": round(seconds, 3) for name, seconds in self._spent.items()},
            "confirm_seconds": round(self._confirming["confirm"], 3),
            "own_seconds": round(wall - sum(self._spent.values()), 3),
            **{f"own_{name}_seconds": round(seconds, 3) for name, seconds in self._own.items()},
            "own_cpu_seconds": round(time.process_time(), 3),
            "peak_memory_bytes": peak_memory_bytes(),
        }


Kind = TypeVar("Kind", bound=str)


@contextlib.contextmanager
def _added_to(seconds: dict[Kind, float], kind: Kind) -> Iterator[None]:
    started = time.monotonic()
    try:
        yield
    finally:
        seconds[kind] = seconds.get(kind, 0.0) + time.monotonic() - started


def with_earlier_times(times: Mapping[str, float | None], earlier: object) -> dict[str, float | None]:
    """Return the sum of ``times``, a report of ``Stopwatch``, and the times of earlier sessions of the run.

    The peak memory is the maximum. ``earlier`` is ``times`` of the record in run.json. Values other than numbers are
    left out.
    """
    before = earlier if isinstance(earlier, dict) else {}
    total = dict(times)
    for name, value in times.items():
        earlier_value = before.get(name)
        if isinstance(earlier_value, (int, float)) and math.isfinite(earlier_value) and earlier_value > 0:
            is_peak = name == "peak_memory_bytes"
            total[name] = max(value or 0, earlier_value) if is_peak else round((value or 0) + earlier_value, 3)
    return total


def peak_memory_bytes() -> int | None:
    """Return the peak resident memory of this process; None if it is unknown.

    It is VmHWM, because the one of getrusage includes the process that called ``exec``.
    """
    try:
        status = Path("/proc/self/status").read_text()
    except OSError:
        return None
    kibibytes = [line.split()[1] for line in status.splitlines() if line.startswith("VmHWM:")]
    return int(kibibytes[0]) * 1024 if kibibytes else None
