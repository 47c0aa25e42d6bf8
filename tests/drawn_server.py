"""A server whose latencies are drawn at random: target, load generator and telemetry in one."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import numpy as np

from objectives.metrics import Measurement
from objectives.sla import Constraint
from optimizer.errors import DeploymentError
from optimizer.interfaces import Endpoint, Samples
from optimizer.problem import Problem
from optimizer.space import Space
from optimizer.trial import Candidate, LoadPoint, Trial

BASELINE = Candidate(max_batch_size=1)
FAST, FASTER = (Candidate(max_batch_size=64, dynamic_batching=True, instance_count=n) for n in (1, 2))
SERVED = {BASELINE: 300.0, FAST: 1000.0, FASTER: 1200.0}  # requests per second, at whatever load
BOUND_MS = 20.0
LOADS = {BASELINE: 3, FAST: 11, FASTER: 13}  # that meet it, in requests in flight
QUANTILES = {"p50": 0.5, "p90": 0.9, "p95": 0.95, "p99": 0.99}


class Drawing:
    """Gamma-distributed latencies in proportion to the load.

    ``slow``: latencies of a candidate on fresh servers as multiples of what the search saw, for each server.
    ``broken``: what cannot be deployed as it is written.
    """

    def __init__(
        self,
        slow: dict[Candidate, tuple[float, ...]] | None = None,
        broken: tuple[Candidate, ...] = (),
        served: dict[Candidate, float] | None = None,
    ) -> None:
        self.slow, self.broken, self.served = slow or {}, broken, served or SERVED
        self.random = np.random.default_rng(3)
        self.deployed: list[Candidate] = []

    @contextlib.contextmanager
    def deploy(self, candidate: Candidate) -> Iterator[Endpoint]:
        yield Endpoint("drawn", candidate)

    @contextlib.contextmanager
    def deploy_as_written(self, candidate: Candidate) -> Iterator[Endpoint]:
        if candidate in self.broken:
            raise DeploymentError("config.pbtxt does not load")
        self.deployed.append(candidate)
        yield Endpoint("drawn", candidate)

    def close(self) -> None: ...

    def windows(self, endpoint: Endpoint, load: LoadPoint, seconds: float, count: int) -> list[Measurement]:
        return [self.measure(endpoint, load, seconds)]

    def warm_up(self, endpoint: Endpoint, load: LoadPoint) -> None: ...

    def measure(self, endpoint: Endpoint, load: LoadPoint, seconds: float | None = None) -> Measurement:
        served = self.served[endpoint.candidate]
        mean_ms = 1000 * load.concurrency / served
        if self.deployed:
            factors = self.slow.get(endpoint.candidate, (1.0,))
            mean_ms *= factors[(self.deployed.count(endpoint.candidate) - 1) % len(factors)]
        latencies = self.random.gamma(16, mean_ms / 16, size=max(50, int(served * (seconds or 2))))
        columns: Any = {f"latency_{name}_ms": float(np.quantile(latencies, q)) for name, q in QUANTILES.items()}
        return Measurement(served, float(latencies.mean()), **columns, requests=len(latencies), stable=True)

    @contextlib.contextmanager
    def record(self, endpoint: Endpoint) -> Iterator[Samples]:
        yield Samples()


def searched(server: Drawing, loads: dict[Candidate, int]) -> list[Trial]:
    """What a search has found: each candidate at its load."""
    found = []
    for number, (candidate, concurrency) in enumerate(loads.items()):
        load = LoadPoint(1, concurrency)
        found.append(Trial(number, candidate, ((load, server.measure(Endpoint("", candidate), load)),)))
    return found


def drawn_problem() -> Problem:
    space = Space(max_batch_size=(1, 64), instance_count=(1, 2))
    return Problem("drawn", space, 1, 64, constraints=(Constraint("latency-p95", BOUND_MS),))
