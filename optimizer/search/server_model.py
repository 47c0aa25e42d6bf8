"""The simulator fitted to what was measured: service times, latencies around them, and how much both vary."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from optimizer.batcher.calibration import Observation
from optimizer.batcher.observations import observation
from optimizer.batcher.simulator import (
    ClosedLoop,
    Job,
    Overheads,
    ServiceTimes,
    Simulated,
    Window,
    exponential_delays,
    lognormal_jitter,
    simulate_many,
)
from optimizer.problem import Problem
from optimizer.search.figures import Cell, log_figures, log_simulated, with_tails
from optimizer.search.service import Group, group_of, services
from optimizer.trial import Point

FITTED_POINTS = 24  # the latest ones: enough for a handful of numbers, few enough to fit within a second
WINDOW = Window(warm_up_requests=150, requests=700)
WINDOW_LOADS = 200  # up to so many requests in flight; more take a window of their own
SMALLEST_S = 1e-6
JITTERS = (0.02, 0.05, 0.1, 0.2, 0.3, 0.45)
# A batch's clients get their responses and send their next requests one after another, GAP_S apart on average
# (134 µs in benchmarks/simulator_proof.md); a rate that was measured bounds it. HOP_S: the batcher or an instance
# is woken.
GAP_S, HOP_S = 1e-4, 1e-4
GAP_SHARE = 0.4  # of the time between two requests at the highest rate measured


@dataclass(frozen=True, eq=False)
class ServerModel:
    """What is simulated beside the batcher.

    ``times``: service times of a group. ``way_s`` is spent outside queue and computation by each request;
    ``gap_s`` lies between two arrivals, on average; ``jitter`` is the relative standard deviation of service times;
    ``error`` is what is to be expected of its throughput, relative.
    """

    times: Callable[[Group], ServiceTimes]
    request_batch_size: int
    way_s: float
    gap_s: float
    jitter: float
    seed: int = 0
    error: float = 0.1

    def simulate(self, cells: Sequence[Cell], threads: int = 1) -> list[Simulated]:
        """What each (candidate, concurrency) would give."""
        overheads = Overheads(self.way_s / 2, self.way_s / 2, 0.0, 0.0, HOP_S, HOP_S)
        groups = {group: self.times(group) for group in {group_of(candidate) for candidate, _ in cells}}
        jobs = [
            Job(candidate, ClosedLoop(load), groups[group_of(candidate)], overheads, self.request_batch_size)
            for candidate, load in cells
        ]
        jitter, gaps_s = lognormal_jitter(self.jitter, self.seed), exponential_delays(self.gap_s, self.seed)
        simulated: dict[int, Simulated] = {}
        for window, large in ((WINDOW, False), (Window(), True)):
            chosen = [i for i, (_, load) in enumerate(cells) if (load > WINDOW_LOADS) is large]
            found = simulate_many(
                [jobs[i] for i in chosen], jitter=jitter, gaps_s=gaps_s, window=window, threads=threads
            )
            simulated.update(zip(chosen, found, strict=True))
        return [simulated[i] for i in range(len(cells))]


def fit(points: Sequence[Point], problem: Problem, latency: str, seed: int = 0) -> ServerModel:
    """The model nearest to ``points``: from the server's own statistics, else from throughput and latency alone.

    ``latency``: the metric whose tail is fitted. Raises ValueError without points.
    """
    if not points:
        raise ValueError("no measured points to fit the simulator to")
    observed = [(point, seen) for point in points if (seen := observation(point)) is not None]
    ways = [way for point, _ in observed if (way := _way_s(point)) is not None]
    if not observed or not ways:
        from optimizer.search.blind_fit import fit_blindly

        return fit_blindly(points, problem, latency, seed)
    groups: dict[Group, list[Observation]] = {}
    for point, seen in observed:
        groups.setdefault(group_of(problem.space.canonical(point.candidate)), []).append(seen)
    times = services(groups, problem, largest_batch(points, problem)).times
    model = ServerModel(times, problem.request_batch_size, float(np.median(ways)), gap_s(points), JITTERS[0], seed)
    return _with_jitter(model, points, latency)


def gap_s(points: Sequence[Point]) -> float:
    """Between two requests of one burst; less where more requests a second were served."""
    rates = [(p.measurement.throughput_infer_per_sec or 0) / p.load.request_batch_size for p in points]
    return min(GAP_S, GAP_SHARE / max(*rates, 1e-9))


def largest_batch(points: Sequence[Point], problem: Problem) -> int:
    """Samples of the largest batch that the space or ``points`` can form: no more than are in flight."""
    batch = problem.request_batch_size
    size = max(*problem.space.max_batch_size, *(point.candidate.max_batch_size for point in points))
    load = max(problem.max_concurrency, *(point.load.concurrency for point in points))
    return batch * max(1, min(size // batch, load))


def _with_jitter(model: ServerModel, points: Sequence[Point], latency: str) -> ServerModel:
    """The jitter whose tails (judged latency over mean latency) are nearest to those measured."""
    used = list(points)[-FITTED_POINTS:]
    cells = [(point.candidate, point.load.concurrency) for point in used]

    def tails(figures: list[tuple[float, float]]) -> np.ndarray:
        return with_tails(np.array(figures), cells, model.request_batch_size)[:, 1]

    wanted = tails([log_figures(point, latency) for point in used])

    def misfit(jitter: float) -> float:
        simulated = replace(model, jitter=jitter).simulate(cells)
        return float(np.abs(tails([log_simulated(one, latency) for one in simulated]) - wanted).sum())

    return replace(model, jitter=min(JITTERS, key=misfit))


def _way_s(point: Point) -> float | None:
    """What a request spends neither in the queue nor in computation; the mean latency is load / throughput."""
    m, load = point.measurement, point.load
    inside = [part for part in (m.queue_ms, m.compute_input_ms, m.compute_infer_ms, m.compute_output_ms) if part]
    if m.queue_ms is None or m.compute_infer_ms is None or not m.throughput_infer_per_sec:
        return None
    latency_s = load.concurrency * load.request_batch_size / m.throughput_infer_per_sec
    if m.latency_avg_ms is not None:
        latency_s = m.latency_avg_ms / 1e3
    return max(SMALLEST_S, latency_s - sum(inside) / 1e3)
