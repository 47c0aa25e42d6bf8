"""The simulator fitted to what was measured: service times, latencies around them, and how much both vary."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from objectives.metrics import METRICS, Measurement
from optimizer.batcher.calibration import Observation
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
from optimizer.batcher.statistics import observation
from optimizer.problem import Problem
from optimizer.search.service import Group, Services
from optimizer.trial import Candidate, Point

Array = npt.NDArray[np.float64]
Cell = tuple[Candidate, int]  # and its concurrency

EVALUATIONS = 120
FITTED_POINTS = 24  # the latest ones: enough for five numbers, few enough to fit within a second
WINDOW = Window(warm_up_requests=150, requests=700)
SMALLEST_S = 1e-6
JITTERS = (0.02, 0.05, 0.1, 0.2, 0.3, 0.45)
# clients and network handle one request at a time, and a few requests take several times longer than most
SPACING_S, DELAY_S, HOP_S = 5e-5, 2e-4, 2e-5
CONTENTION = 0.5  # until several instances were measured
LATENCY_FIELDS = {
    "latency-avg": "latency_avg_s",
    "latency-p50": "latency_p50_s",
    "latency-p90": "latency_p90_s",
    "latency-p95": "latency_p95_s",
    "latency-p99": "latency_p99_s",
}


@dataclass(frozen=True, eq=False)
class ServerModel:
    """What is simulated beside the batcher.

    ``times``: service times of a candidate. ``way_s`` is spent outside queue and computation by each request;
    ``jitter`` is the relative standard deviation of service times.
    """

    times: Callable[[Candidate], ServiceTimes]
    way_s: float
    jitter: float
    seed: int = 0

    def simulate(self, problem: Problem, cells: Sequence[Cell], threads: int = 1) -> list[Simulated]:
        """What each (candidate, concurrency) would give."""
        if not cells:
            return []
        overheads = Overheads(self.way_s / 2, self.way_s / 2, 0.0, SPACING_S, HOP_S, HOP_S)
        services = {candidate: self.times(candidate) for candidate, _ in cells}
        jobs = [
            Job(candidate, ClosedLoop(load), services[candidate], overheads, problem.request_batch_size)
            for candidate, load in cells
        ]
        jitter, delays_s = lognormal_jitter(self.jitter, self.seed), exponential_delays(DELAY_S, self.seed)
        return simulate_many(jobs, jitter=jitter, delays_s=delays_s, window=WINDOW, threads=threads)


def judged_latency(problem: Problem) -> str:
    """The latency that decides: of the first latency bound, else p95."""
    return next((c.metric for c in problem.constraints if c.metric in LATENCY_FIELDS), "latency-p95")


def fit(points: Sequence[Point], problem: Problem, seed: int = 0) -> ServerModel:
    """The model nearest to ``points``: from the server's own statistics, else from throughput and latency alone.

    Raises ValueError without points.
    """
    if not points:
        raise ValueError("no measured points to fit the simulator to")
    observed = [(point, seen) for point in points if (seen := observation(point)) is not None]
    ways = [way for point, _ in observed if (way := _way_s(point.measurement)) is not None]
    if not observed or not ways:
        return _fit_blindly(points, problem, seed)
    groups: dict[Group, list[Observation]] = {}
    for point, seen in observed:
        groups.setdefault((point.candidate.instance_count, point.candidate.fields), []).append(seen)
    way_s = max(SMALLEST_S, float(np.median(ways)) - DELAY_S)
    return _with_jitter(ServerModel(Services.of(groups, problem).times, way_s, JITTERS[0], seed), points, problem)


def _with_jitter(model: ServerModel, points: Sequence[Point], problem: Problem) -> ServerModel:
    """The jitter whose tails (judged latency over mean latency) are nearest to those measured."""
    latency = judged_latency(problem)
    used = list(points)[-FITTED_POINTS:]
    cells = [(point.candidate, point.load.concurrency) for point in used]
    wanted = np.array([_tail(log_figures(point, latency), point.load.concurrency, problem) for point in used])

    def misfit(jitter: float) -> float:
        simulated = replace(model, jitter=jitter).simulate(problem, cells)
        tails = [
            _tail(log_simulated(s, latency), load, problem) for s, (_, load) in zip(simulated, cells, strict=True)
        ]
        return float(np.abs(np.array(tails) - wanted).sum())

    return replace(model, jitter=min(JITTERS, key=misfit))


def _tail(figures: tuple[float, float], load: int, problem: Problem) -> float:
    """log of the judged latency over the mean latency: in a closed loop that is load / throughput."""
    return figures[0] + figures[1] - math.log(load * problem.request_batch_size)


def _way_s(measurement: Measurement) -> float | None:
    """What a request spends neither in the queue nor in computation."""
    m = measurement
    inside = [m.queue_ms, m.compute_input_ms, m.compute_infer_ms, m.compute_output_ms]
    if m.latency_avg_ms is None or any(part is None for part in inside):
        return None
    return max(SMALLEST_S, (m.latency_avg_ms - sum(part for part in inside if part is not None)) / 1e3)


# -- where only throughput and latency are known ------------------------------------------------------------


def _fit_blindly(points: Sequence[Point], problem: Problem, seed: int) -> ServerModel:
    """Five numbers whose simulation is nearest in throughput and latency (squares of log ratios)."""
    from scipy.optimize import minimize

    used = list(points)[-FITTED_POINTS:]
    latency = judged_latency(problem)
    cells = [(point.candidate, point.load.concurrency) for point in used]
    wanted = np.array([log_figures(point, latency) for point in used])
    first = _guess(used, latency)

    def misfit(vector: Array) -> float:
        model = replace(_of_vector(vector, problem, cells), seed=seed)
        simulated = np.array([log_simulated(s, latency) for s in model.simulate(problem, cells)])
        # robust: one point measured in a noisy moment must not bend the rest
        errors = np.abs(simulated - wanted)
        return float(np.where(errors < 0.3, errors**2, 0.6 * errors - 0.09).sum()) + _prior(vector)

    simplex = np.vstack([first, first + 0.7 * np.eye(len(first))])
    options = {"maxfev": EVALUATIONS, "initial_simplex": simplex, "xatol": 0.02, "fatol": 1e-4}
    found = minimize(misfit, first, method="Nelder-Mead", options=options).x
    return replace(_of_vector(found, problem, cells), seed=seed)


def _of_vector(vector: Array, problem: Problem, cells: Sequence[Cell]) -> ServerModel:
    """From logarithms (all five are positive, errors are relative) of fixed_s, per_sample_s, contention, way_s,
    jitter: ``fixed_s + per_sample_s * b`` alone, and each further busy instance adds ``contention`` of it."""
    low = np.log([SMALLEST_S, 1e-9, 1e-3, SMALLEST_S, 0.01])
    high = np.log([10.0, 1.0, 3.0, 1.0, 1.0])
    fixed_s, per_sample_s, contention, way_s, jitter = np.exp(np.clip(vector, low, high)).tolist()
    batch, space = problem.request_batch_size, problem.space
    largest = max(*space.max_batch_size, batch, *(candidate.max_batch_size for candidate, _ in cells))
    instances = max(*space.instance_count, *(candidate.instance_count for candidate, _ in cells))
    alone = fixed_s + per_sample_s * np.arange(batch, largest + batch, batch, dtype=np.float64)
    service = ServiceTimes(np.outer(alone, 1 + contention * np.arange(instances)), step=batch)
    return ServerModel(lambda _: service, way_s, jitter)


def _prior(vector: Array) -> float:
    """Weak: instances usually slow each other down, and service times usually vary a little."""
    contention, jitter = float(vector[2]), float(vector[4])
    return 0.02 * (contention - math.log(CONTENTION)) ** 2 + 0.02 * (jitter - math.log(0.2)) ** 2


def _guess(points: Sequence[Point], latency: str) -> Array:
    """From the quickest request and the highest throughput seen."""
    samples_per_s = max(math.exp(log_figures(point, latency)[0]) for point in points)
    alone_s = min(math.exp(log_figures(point, latency)[1]) / point.load.concurrency for point in points)
    return np.log([alone_s / 2, 0.7 / samples_per_s, CONTENTION, alone_s / 4 + SMALLEST_S, 0.2])


# -- figures as logarithms ----------------------------------------------------------------------------------


def log_figures(point: Point, latency: str) -> tuple[float, float]:
    """(log of inferences/s, log of seconds) as measured."""
    throughput = point.measurement.throughput_infer_per_sec
    milliseconds = METRICS[latency].value(point.measurement)
    assert throughput, "measured points only"
    assert milliseconds, "measured points only"
    return math.log(throughput), math.log(milliseconds / 1e3)


def log_simulated(simulated: Simulated, latency: str) -> tuple[float, float]:
    return math.log(simulated.throughput_infer_per_s), math.log(getattr(simulated, LATENCY_FIELDS[latency]))
