"""The cost and result of one search by either tool."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class StatedResult:
    """The recommendation of a search with the performance it states. ``config`` is a config.pbtxt."""

    config: str
    concurrency: int
    throughput_infer_per_sec: float
    latency_p95_ms: float


@dataclass(frozen=True, slots=True)
class SearchCost:
    """The cost of a search.

    ``wall_seconds`` is that of the whole process. ``confirm_seconds`` is the part of it in which the recommendation
    is measured again, or None if the tool does not do that. ``launches`` counts perf_analyzer processes, if known.
    ``others_share`` is the share of the cores' time that neither the search nor this program used.
    """

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
    found: StatedResult | None

    @property
    def search_seconds(self) -> float:
        return self.wall_seconds - (self.confirm_seconds or 0)

    @property
    def rest_seconds(self) -> float:
        return self.wall_seconds - self.server_seconds - self.load_generator_seconds
