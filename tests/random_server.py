"""A target, load generator and telemetry whose latencies are drawn at random."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from objectives.arrays import FloatArray
from objectives.metrics import Measurement
from objectives.sla import Sla
from optimizer.config.problem import Problem
from optimizer.config.search_space import SearchSpace
from optimizer.confirmation.confirmer import Confirmer
from optimizer.confirmation.server_plan import START_SECONDS
from optimizer.core.budget import Budget
from optimizer.core.candidate import Candidate
from optimizer.core.endpoint import Endpoint
from optimizer.core.errors import DeploymentError
from optimizer.core.resource_usage import ResourceUsage
from optimizer.core.trial import LoadPoint, Point, Trial
from optimizer.measure.measurer import Measurer
from optimizer.results.progress_observers import QuietObserver
from optimizer.store.trials_table import TrialsTable
from tests.conftest import latency_window

BASELINE = Candidate(max_batch_size=1)
FAST, FASTER = (Candidate(max_batch_size=64, dynamic_batching=True, instance_count=n) for n in (1, 2))
SERVED = {BASELINE: 300.0, FAST: 1000.0, FASTER: 1200.0}  # requests per second at any load
BOUND_MS = 20.0
LOADS = {BASELINE: 3, FAST: 11, FASTER: 13}  # highest concurrency that meets the bound
COMPARISONS = (BASELINE, FAST)


class RandomServer:
    """Draw gamma-distributed latencies in proportion to the load.

    ``slow`` holds, per candidate, the latencies on each fresh server as multiples of those in the search.
    ``broken`` holds the candidates that cannot be deployed as written.
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
    def deploy(self, candidate: Candidate, *, fresh: bool = False) -> Iterator[Endpoint]:
        if fresh and candidate in self.broken:
            raise DeploymentError("config.pbtxt does not load")
        if fresh:
            self.deployed.append(candidate)
        yield Endpoint("drawn", candidate)

    def close(self) -> None: ...

    def measure_windows(self, endpoint: Endpoint, load: LoadPoint, seconds: float, count: int) -> list[Measurement]:
        return [self.measure(endpoint, load, seconds) for _ in range(count)]

    def warm_up(self, endpoint: Endpoint, load: LoadPoint) -> None: ...

    def measure(self, endpoint: Endpoint, load: LoadPoint, seconds: float | None = None) -> Measurement:
        served = self.served[endpoint.candidate]
        mean_ms = 1000 * load.concurrency / served
        if self.deployed:
            factors = self.slow.get(endpoint.candidate, (1.0,))
            mean_ms *= factors[(self.deployed.count(endpoint.candidate) - 1) % len(factors)]
        return self.measured(self.random.gamma(16, mean_ms / 16, size=max(50, int(served * (seconds or 2)))), served)

    def measured(self, latencies: FloatArray, served: float) -> Measurement:
        """Return the measurement of a window with these latencies in ms, of ``served`` requests per second."""
        return latency_window(latencies, served, BOUND_MS)

    @contextlib.contextmanager
    def record(self, endpoint: Endpoint) -> Iterator[ResourceUsage]:
        yield ResourceUsage()


class BestPointObserver(QuietObserver):
    """Keeps the best point so far that each progress line shows."""

    def __init__(self) -> None:
        self.best_points: list[Point | None] = []

    def trial_finished(self, trial: Trial, best: Point | None) -> None:
        self.best_points.append(best)


class TimedServer(RandomServer):
    """A server whose deployments and windows take as long as planned on the clock of ``budget``."""

    seconds = 0.0
    start_seconds = START_SECONDS

    def measure_windows(self, endpoint: Endpoint, load: LoadPoint, seconds: float, count: int) -> list[Measurement]:
        self.seconds += self.start_seconds + count * seconds
        return super().measure_windows(endpoint, load, seconds, count)

    def budget(self, seconds: float) -> Budget:
        return Budget(seconds, clock=lambda: self.seconds)


def searched(server: RandomServer, loads: dict[Candidate, int]) -> list[Trial]:
    """Return the trials of a search: each candidate at its load."""
    trials = []
    for number, (candidate, concurrency) in enumerate(loads.items()):
        load = LoadPoint(1, concurrency)
        trials.append(Trial(number, candidate, ((load, server.measure(Endpoint("", candidate), load)),)))
    return trials


def with_measured(trials: list[Trial], **fields: Any) -> list[Trial]:
    """Return the trials with ``fields`` replaced in each measurement of the search."""
    return [
        replace(trial, measurements=tuple((load, replace(m, **fields)) for load, m in trial.measurements))
        for trial in trials
    ]


def drawn_problem() -> Problem:
    space = SearchSpace(max_batch_size=(1, 64), instance_count=(1, 2))
    return Problem("drawn", space, 1, 64, sla=Sla.from_bounds({"p95": BOUND_MS}))


def make_confirmer(
    server: RandomServer, trials: list[Trial], problem: Problem, folder: Path, budget: Budget, **measuring: Any
) -> Confirmer:
    """Return the confirmation of ``trials``, which writes trials.csv in ``folder``.

    ``measuring`` has arguments of its ``Measurer``.
    """
    table = TrialsTable(folder / "trials.csv", "drawn", {})
    measurer = Measurer(server, server, table, **{"observer": QuietObserver(), **measuring})
    return Confirmer(problem, server, measurer, budget, trials)


def confirm(
    server: RandomServer,
    trials: list[Trial],
    problem: Problem,
    path: Path,
    seconds: float = 600,
    speed_probe: Callable[[], float] | None = None,
) -> list[Trial]:
    """Return ``trials`` with their confirmations; all rows are in trials.csv in ``path``."""
    table = TrialsTable(path / "trials.csv", "drawn", {})
    for trial in trials:
        for load, measurement in trial.measurements:
            table.append(trial, load, measurement)
    confirmer = make_confirmer(server, table.read(), problem, path, Budget(seconds), speed_probe=speed_probe)
    confirmed = confirmer.run(COMPARISONS)
    assert table.read() == confirmed, "all of it is in the table"
    return confirmed
