"""The budget of a run, the lengths and agreement of measurement windows, and a stopwatch by kind of work."""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import Literal, TypeAlias

from optimizer.core.trial import Trial

CONFIRM_SHARE = 0.4  # share of the time that is reserved for the confirmation


class RunMode(Enum):
    """What a session of a run does."""

    SEARCH_AND_CONFIRM = "search and confirm"
    SEARCH = "search"
    CONFIRM = "confirm"

    @property
    def confirm_share(self) -> float:
        """The share of the budget that is reserved for the confirmation."""
        shares = {RunMode.SEARCH_AND_CONFIRM: CONFIRM_SHARE, RunMode.SEARCH: 0.0, RunMode.CONFIRM: 1.0}
        return shares[self]


@dataclass
class Budget:
    """The wall time and the number of trials that a run may use. The time starts when the object is created.

    Attributes:
        seconds: Wall time of the whole run.
        max_trials: Largest number of trials; None for no limit.
        spent_seconds: Time that a resumed run had used before.
        confirm_share: Share of ``seconds`` that is reserved for the confirmation, 0 to 1.
        clock: Returns monotonic seconds; tests and simulations pass their own.
        other_seconds: Part of ``seconds`` for the start of the process and the report.
    """

    seconds: float
    max_trials: int | None = None
    spent_seconds: float = 0.0
    confirm_share: float = CONFIRM_SHARE
    clock: Callable[[], float] = time.monotonic
    other_seconds: float = 0.0
    _started: float = field(init=False)

    def __post_init__(self) -> None:
        self._started = self.clock()

    def left_seconds(self) -> float:
        """Return the time until the measurements have to end; negative after that."""
        return self.seconds - self.other_seconds - self.spent_seconds - (self.clock() - self._started)

    def search_seconds_left(self) -> float:
        """Return the time until the confirmation has to begin; negative after that."""
        return (1 - self.confirm_share) * self.seconds - self.spent_seconds - (self.clock() - self._started)


def spent_seconds(trials: Sequence[Trial]) -> float:
    """Return the time that these trials used of the budget: deployments, measurements and confirmations."""
    measured = [m for trial in trials for _, m in trial.measurements]
    for trial in trials:
        measured += [again.measurement for again in (*trial.confirmations, *trial.cross_checks)]
    return sum(trial.deploy_seconds or 0 for trial in trials) + sum(m.measure_seconds or 0 for m in measured)


MIN_WINDOWS = 3  # windows of a measurement: perf_analyzer accepts no fewer
FIRST_WINDOW_MS = 300  # longer windows do not reduce the differences between deployments
RATE_WINDOW_MS = 600  # longer, because random arrivals differ between windows
STREAM_WINDOW_MS = 900  # longer, because the times of requests that run together are alike
MIN_WINDOW_MS = 50
WINDOW_STRETCH = 1.2  # actual length of a perf_analyzer window as a multiple of the requested one
MAX_WINDOW_MS = 15_000
REQUESTS_PER_WINDOW = 60
MAX_SPREAD = 0.35  # (max - min) / median of the windows' throughputs, and of their p95 latencies


@dataclass(frozen=True, slots=True)
class MeasurementWindow:
    """The throughput and latency of one measurement window (a "pass" of perf_analyzer)."""

    throughput_infer_per_sec: float
    latency_p95_ms: float


def describe_instability(
    windows: Sequence[MeasurementWindow], spread_limit: float = MAX_SPREAD, p95_spread_limit: float | None = None
) -> str:
    """Return why the windows disagree, or an empty string if they agree.

    They agree if there are at least ``MIN_WINDOWS`` and (max - min) / median is at most ``spread_limit``, or
    ``p95_spread_limit`` for the p95 latencies if that is given.
    """
    if len(windows) < MIN_WINDOWS:
        return f"only {len(windows)} of {MIN_WINDOWS} windows"
    p95_limit = spread_limit if p95_spread_limit is None else p95_spread_limit
    for name, unit, limit, values in (
        ("throughput", "infer/s", spread_limit, [w.throughput_infer_per_sec for w in windows]),
        ("p95", "ms", p95_limit, [w.latency_p95_ms for w in windows]),
    ):
        middle = sorted(values)[len(values) // 2]
        if middle <= 0:
            return f"a window of zero {name}"
        if (max(values) - min(values)) / middle > limit:
            lowest, highest = (f"{end:,.0f}" if end >= 1000 else f"{end:.3g}" for end in (min(values), max(values)))
            return f"unstable: {name} between {lowest} and {highest} {unit}"
    return ""


def window_length_ms(requests_per_window: float, window_ms: int) -> int:
    """Return the window length in ms for ``REQUESTS_PER_WINDOW`` requests.

    A window of ``window_ms`` had ``requests_per_window`` requests. The result is at most ``MAX_WINDOW_MS``.
    """
    return min(MAX_WINDOW_MS, int(window_ms * REQUESTS_PER_WINDOW / max(requests_per_window, 1)))


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
        self._confirm_seconds = 0.0

    def wall_seconds(self) -> float:
        """Return the wall time since the stopwatch was created."""
        return time.monotonic() - self._started

    @contextlib.contextmanager
    def confirming(self) -> Iterator[None]:
        """Count the context as confirmation; its server and load generator times are counted there as well."""
        started = time.monotonic()
        try:
            yield
        finally:
            self._confirm_seconds += time.monotonic() - started

    @contextlib.contextmanager
    def count(self, kind: WorkKind) -> Iterator[None]:
        """Count the time in the context as work of this kind."""
        started = time.monotonic()
        try:
            yield
        finally:
            self._spent[kind] = self._spent.get(kind, 0.0) + time.monotonic() - started

    @contextlib.contextmanager
    def count_own(self, kind: OwnWork) -> Iterator[None]:
        """Count the time in the context as this part of the own time."""
        started = time.monotonic()
        try:
            yield
        finally:
            self._own[kind] += time.monotonic() - started

    def report(self) -> dict[str, float | None]:
        """Return the seconds by kind of work, and the CPU seconds and peak resident bytes of this process."""
        wall = self.wall_seconds()
        return {
            "wall_seconds": round(wall, 3),
            **{f"{name}_seconds": round(seconds, 3) for name, seconds in self._spent.items()},
            "confirm_seconds": round(self._confirm_seconds, 3),
            "own_seconds": round(wall - sum(self._spent.values()), 3),
            **{f"own_{name}_seconds": round(seconds, 3) for name, seconds in self._own.items()},
            "own_cpu_seconds": round(time.process_time(), 3),
            "peak_memory_bytes": _peak_memory_bytes(),
        }


def with_earlier_times(times: Mapping[str, float | None], earlier: object) -> dict[str, float | None]:
    """Return ``times``, a report of ``Stopwatch``, with those of earlier sessions of the run, and the largest memory.

    ``earlier`` is ``times`` of the record in run.json; what is no number there is left out.
    """
    before = earlier if isinstance(earlier, dict) else {}
    total = dict(times)
    for name, value in times.items():
        known = before.get(name)
        if isinstance(known, (int, float)) and math.isfinite(known) and known > 0:
            together = max(value or 0, known) if name == "peak_memory_bytes" else round((value or 0) + known, 3)
            total[name] = together
    return total


def _peak_memory_bytes() -> int | None:
    """Return the peak resident memory (VmHWM). getrusage would include the program before ``exec``."""
    try:
        status = Path("/proc/self/status").read_text()
    except OSError:
        return None
    kibibytes = [line.split()[1] for line in status.splitlines() if line.startswith("VmHWM:")]
    return int(kibibytes[0]) * 1024 if kibibytes else None
