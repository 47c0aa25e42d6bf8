"""The simulator fitted to what was measured: service times, latencies around them, and how much both vary."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from objectives.metrics import Measurement
from optimizer.batcher.calibration import Observation
from optimizer.batcher.observations import observation
from optimizer.batcher.simulator import (
    ClosedLoop,
    Job,
    ServiceTimes,
    Simulated,
    Window,
    exponential_delays,
    lognormal_jitter,
    simulate_many,
    trace,
)
from optimizer.batcher.told import told
from optimizer.problem import Problem
from optimizer.search.figures import Cell
from optimizer.search.service import Group, group_of, services
from optimizer.search.surroundings import Surroundings, nearest, way_s
from optimizer.trial import Point

# how many requests a simulation watches, by the requests in flight: enough batches for its own noise to be small
WINDOWS = (
    (24, Window(warm_up_requests=150, requests=700)),
    (80, Window(warm_up_requests=300, requests=2400)),
    (math.inf, Window()),
)


@dataclass(frozen=True, eq=False)
class ServerModel:
    """What is simulated beside the batcher.

    ``times``: service times of a group. ``error`` is what is to be expected of its throughput, relative.
    """

    times: Callable[[Group], ServiceTimes]
    request_batch_size: int
    around: Surroundings
    seed: int = 0
    error: float = 0.1
    fixed_shapes: bool = True

    def simulate(self, cells: Sequence[Cell], threads: int = 1) -> list[Simulated]:
        """What each (candidate, concurrency) would give."""
        jobs = self._jobs(cells)
        jitter = lognormal_jitter(self.around.jitter, self.seed)
        gaps_s = exponential_delays(self.around.gap_s, self.seed)
        simulated: dict[int, Simulated] = {}
        least = 0.0
        for most, window in WINDOWS:
            chosen = [i for i, (_, load) in enumerate(cells) if least < load <= most]
            found = simulate_many(
                [jobs[i] for i in chosen], jitter=jitter, gaps_s=gaps_s, window=window, threads=threads
            )
            simulated.update(zip(chosen, found, strict=True))
            least = most
        return [simulated[i] for i in range(len(cells))]

    def measure(self, cells: Sequence[Cell]) -> list[Measurement]:
        """The same as a load generator and the server's statistics would tell of it."""
        jitter = lognormal_jitter(self.around.jitter, self.seed)
        gaps_s = exponential_delays(self.around.gap_s, self.seed)
        traces = (trace(job, jitter=jitter, gaps_s=gaps_s) for job in self._jobs(cells))
        way_s, batch = self.around.way_s, self.request_batch_size
        return [told(*pair, way_s, batch) for pair in zip(self.simulate(cells), traces, strict=True)]

    def _jobs(self, cells: Sequence[Cell]) -> list[Job]:
        groups = {group: self.times(group) for group in {group_of(candidate) for candidate, _ in cells}}
        overheads = self.around.overheads()
        return [
            Job(
                candidate,
                ClosedLoop(load),
                groups[group_of(candidate)],
                overheads,
                self.request_batch_size,
                self.fixed_shapes,
            )
            for candidate, load in cells
        ]


def fit(points: Sequence[Point], problem: Problem, latency: str, seed: int = 0) -> ServerModel:
    """The model nearest to ``points``: from the server's own statistics, else from throughput and latency alone.

    ``latency``: the metric whose tail is fitted. Raises ValueError without points.
    """
    if not points:
        raise ValueError("no measured points to fit the simulator to")
    observed = [(point, seen) for point in points if (seen := observation(point)) is not None]
    way = way_s([point for point, _ in observed])
    if way is None:
        from optimizer.search.blind_fit import fit_blindly

        return fit_blindly(points, problem, latency, seed)
    groups: dict[Group, list[Observation]] = {}
    for point, seen in observed:
        groups.setdefault(group_of(problem.space.canonical(point.candidate)), []).append(seen)
    times = functools.cache(services(groups, problem, largest_batch(points, problem)).times)
    model = ServerModel(
        times, problem.space.request_batch_size, Surroundings(way), seed, fixed_shapes=problem.fixed_shapes
    )
    around = nearest(
        lambda around, cells: replace(model, around=around).simulate(cells), model.around, points, latency
    )
    return replace(model, around=around)


def largest_batch(points: Sequence[Point], problem: Problem) -> int:
    """Samples of the largest batch that the space or ``points`` can form: no more than are in flight."""
    batch = problem.space.request_batch_size
    size = max(*problem.space.max_batch_size, *(point.candidate.max_batch_size for point in points))
    load = max(problem.max_concurrency, *(point.load.concurrency for point in points))
    return batch * max(1, min(size // batch, load))
