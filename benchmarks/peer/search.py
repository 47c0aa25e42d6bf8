"""One search by either tool: what it cost and what it found."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Found:
    """What a search recommends, as it claims. ``config`` is a config.pbtxt."""

    config: str
    concurrency: int
    throughput_infer_per_sec: float
    latency_p95_ms: float


@dataclass(frozen=True, slots=True)
class Search:
    """``wall_seconds`` is the whole process. ``confirm_seconds``, a part of it, went into measuring the
    recommendation again; None for a tool that does not do that. ``launches``: of perf_analyzer, None where not
    counted. ``others_share``: of the cores' time, what neither the search nor this program took."""

    name: str
    wall_seconds: float
    confirm_seconds: float | None
    server_seconds: float
    load_generator_seconds: float
    configurations: int
    measurements: int
    launches: int | None
    window_seconds: float
    others_share: float
    found: Found | None

    @property
    def search_seconds(self) -> float:
        return self.wall_seconds - (self.confirm_seconds or 0)

    @property
    def rest_seconds(self) -> float:
        return self.wall_seconds - self.server_seconds - self.load_generator_seconds
