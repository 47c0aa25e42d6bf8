"""Simulated servers that replace the real stack: their spaces, and components that deploy, measure and record."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, field

from simulated_tables import DELAYS_US, POLICIES, REQUEST_BATCH_SIZE, THREADS, SimulatedServer

from objectives.metrics import Measurement
from optimizer.config.search_space import SearchSpace
from optimizer.core.endpoint import Endpoint
from optimizer.core.interfaces import ResourceUsage
from optimizer.core.trial import Candidate, LoadPoint, Point, Trial

CONCURRENCIES = (1, 2, 4, 8, 16, 32, 48, 64)


@dataclass(frozen=True)
class EightLoadsSpace(SearchSpace):
    """A space whose configurations can be measured only at CONCURRENCIES."""

    def allowed_concurrencies(self, candidate: Candidate) -> tuple[int, ...]:
        return CONCURRENCIES


@dataclass
class SimulatedStack:
    """Target, load generator, telemetry and progress observer of a simulated server that is always ready."""

    server: SimulatedServer
    _known: dict[tuple[Candidate, int], Measurement] = field(default_factory=dict)

    @contextlib.contextmanager
    def deploy(self, candidate: Candidate) -> Iterator[Endpoint]:
        yield Endpoint(self.server.name, candidate)

    def deploy_fresh(self, candidate: Candidate) -> contextlib.AbstractContextManager[Endpoint]:
        return self.deploy(candidate)

    def close(self) -> None: ...

    def measure_windows(self, endpoint: Endpoint, load: LoadPoint, seconds: float, count: int) -> list[Measurement]:
        return [self.measure(endpoint, load, seconds)]

    def warm_up(self, endpoint: Endpoint, load: LoadPoint) -> None: ...

    def measure(self, endpoint: Endpoint, load: LoadPoint, seconds: float | None = None) -> Measurement:
        cell = endpoint.candidate, load.concurrency
        if cell not in self._known:
            (self._known[cell],) = self.server.measure([cell])
        return self._known[cell]

    @contextlib.contextmanager
    def record(self, endpoint: Endpoint) -> Iterator[ResourceUsage]:
        yield ResourceUsage()

    def trial_started(self, number: int, candidate: Candidate, role: str) -> None: ...

    def measured(self, number: int, load: LoadPoint, measurement: Measurement) -> None: ...

    def trial_finished(self, trial: Trial, best: Point | None) -> None: ...


SPACES = {
    "small": EightLoadsSpace(
        (4, 16, 64, 256), DELAYS_US, POLICIES, (1, 2, 3, 4), {THREADS: ("1",)}, REQUEST_BATCH_SIZE
    ),
    "tenfold": EightLoadsSpace(
        (4, 8, 16, 32, 64, 128, 256),
        ("off", 0, 50, 100, 200, 500, 1000, 2000, 5000),
        (*POLICIES, "max/2,max"),
        (1, 2, 3, 4),
        {THREADS: ("1", "2")},
        REQUEST_BATCH_SIZE,
    ),
    "large": EightLoadsSpace(
        (4, 8, 16, 32, 64, 128, 256, 512),
        ("off", 0, 50, 100, 200, 300, 500, 700, 1000, 1500, 2000, 3000, 5000),
        (*POLICIES, "max/2,max"),
        (1, 2, 3, 4, 5, 6, 7),
        {THREADS: ("1", "2", "4")},
        REQUEST_BATCH_SIZE,
    ),
}
