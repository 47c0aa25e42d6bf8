"""Simulated servers that replace the real stack: their spaces, and components that deploy, measure and record."""

from __future__ import annotations

import contextlib
import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache

import numpy as np

from lib.simulated_tables import DELAYS_US, POLICIES, REQUEST_BATCH_SIZE, THREADS, SimulatedServer, hidden_server
from objectives.metrics import Measurement
from optimizer.config.search_space import SearchSpace
from optimizer.core.candidate import Candidate
from optimizer.core.endpoint import Endpoint
from optimizer.core.resource_usage import ResourceUsage
from optimizer.core.trial import LoadPoint
from optimizer.simulator.speed_correction import TIMES

CONCURRENCIES = (1, 2, 4, 8, 16, 32, 48, 64)
TRUE_LOADS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64)  # at which the truth is simulated
SERVERS = ("linear", "steps", "kink")
MAX_CONCURRENCY = 64
DEPLOY_SECONDS = 3.0
PROBE_SECONDS, PROBE_NOISE = 0.04, 0.02  # of a speed probe: time, standard deviation of its log


@dataclass(frozen=True)
class EightLoadsSpace(SearchSpace):
    """A space whose configurations can be measured only at CONCURRENCIES."""

    def allowed_concurrencies(self, candidate: Candidate) -> tuple[int, ...]:
        return CONCURRENCIES


@dataclass
class SimulatedStack:
    """Target, load generator and telemetry of a simulated server that is always ready."""

    server: SimulatedServer
    _known: dict[tuple[Candidate, int], Measurement] = field(default_factory=dict)

    @contextlib.contextmanager
    def deploy(self, candidate: Candidate, *, fresh: bool = False) -> Iterator[Endpoint]:
        yield Endpoint(self.server.name, candidate)

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


def slowed(measurement: Measurement, slowness: float) -> Measurement:
    """Return the measurement of a machine on which everything takes ``exp(slowness)`` times as long."""
    factor = math.exp(slowness)
    times = {name: factor * value for name in TIMES if (value := getattr(measurement, name)) is not None}
    served = measurement.throughput_infer_per_sec
    return replace(measurement, throughput_infer_per_sec=None if served is None else served / factor, **times)


@lru_cache
def true_measurements(server: str) -> dict[Candidate, list[Measurement]]:
    """Return the measurement of each candidate of a hidden server at TRUE_LOADS, without noise."""
    hidden = hidden_server(server)
    candidates = hidden.space.candidates()
    measured = iter(hidden.measure([(candidate, load) for candidate in candidates for load in TRUE_LOADS]))
    return {candidate: list(itertools.islice(measured, len(TRUE_LOADS))) for candidate in candidates}


def feasible_bound_ms(server: str, share: float) -> float:
    """Return the p95 that ``share`` of all configurations and loads of a server do not exceed, in two digits."""
    latencies = [one.latency_p95_ms or math.inf for curve in true_measurements(server).values() for one in curve]
    return float(f"{np.quantile(latencies, share):.2g}")


def highest_throughput(curve: Sequence[tuple[float, float]], bound_ms: float) -> float:
    """Return the highest throughput within a bound, interpolated between the loads; 0 if no load is within it.

    ``curve`` has the p95 in ms and the throughput at ascending loads.
    """
    best = max((throughput for p95_ms, throughput in curve if p95_ms <= bound_ms), default=0.0)
    for (p95_ms, throughput), (higher_ms, more) in itertools.pairwise(curve):
        if p95_ms <= bound_ms < higher_ms < math.inf:
            share = math.log(bound_ms / p95_ms) / math.log(higher_ms / p95_ms)
            best = max(best, throughput + share * (more - throughput))
    return best


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
