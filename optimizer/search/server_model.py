"""The simulator fitted to what was measured: a handful of numbers that stand for model, server and client."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from objectives.metrics import METRICS
from optimizer.batcher.simulator import (
    ClosedLoop,
    Job,
    Overheads,
    ServiceTimes,
    Simulated,
    Window,
    lognormal_jitter,
    simulate_many,
)
from optimizer.problem import Problem
from optimizer.trial import Candidate, Point

Array = npt.NDArray[np.float64]

EVALUATIONS = 120
FITTED_POINTS = 24  # the latest ones: enough for five numbers, few enough to fit within a second
WINDOW = Window(warm_up_requests=150, requests=700)
SMALLEST_S = 1e-6
LATENCY_FIELDS = {
    "latency-avg": "latency_avg_s",
    "latency-p50": "latency_p50_s",
    "latency-p90": "latency_p90_s",
    "latency-p95": "latency_p95_s",
    "latency-p99": "latency_p99_s",
}


@dataclass(frozen=True, slots=True)
class ServerModel:
    """``fixed_s + per_sample_s * b`` for a batch alone; each further busy instance adds ``contention`` of it.

    ``way_s`` is spent outside queue and computation by each request, ``jitter`` is the relative standard
    deviation of service times.
    """

    fixed_s: float
    per_sample_s: float
    contention: float
    way_s: float
    jitter: float

    def vector(self) -> Array:
        """Logarithms: all five are positive, and errors are relative."""
        return np.log([self.fixed_s, self.per_sample_s, self.contention, self.way_s, self.jitter])

    @classmethod
    def of_vector(cls, vector: Array) -> ServerModel:
        low = np.log([SMALLEST_S, 1e-9, 1e-3, SMALLEST_S, 0.01])
        high = np.log([10.0, 1.0, 3.0, 1.0, 1.0])
        return cls(*np.exp(np.clip(vector, low, high)).tolist())

    def simulate(self, problem: Problem, cells: Sequence[tuple[Candidate, int]]) -> list[Simulated]:
        """What each (candidate, concurrency) would give."""
        if not cells:
            return []
        batch = problem.request_batch_size
        largest = max(max(candidate.max_batch_size, batch) for candidate, _ in cells)
        instances = max(candidate.instance_count for candidate, _ in cells)
        sizes = np.arange(batch, largest + batch, batch, dtype=np.float64)
        alone = self.fixed_s + self.per_sample_s * sizes
        service = ServiceTimes(np.outer(alone, 1 + self.contention * np.arange(instances)), step=batch)
        overheads = Overheads(send_s=self.way_s / 2, receive_s=self.way_s / 2)
        jobs = [
            Job(candidate, ClosedLoop(concurrency), service, overheads, batch) for candidate, concurrency in cells
        ]
        return simulate_many(jobs, jitter=lognormal_jitter(self.jitter), window=WINDOW)


def judged_latency(problem: Problem) -> str:
    """The latency that decides: of the first latency bound, else p95."""
    return next((c.metric for c in problem.constraints if c.metric in LATENCY_FIELDS), "latency-p95")


def fit(points: Sequence[Point], problem: Problem, start: ServerModel | None) -> ServerModel:
    """The model whose simulation is nearest to ``points`` in throughput and latency (squares of log ratios).

    ``start`` is the model of fewer points. Raises ValueError without points.
    """
    from scipy.optimize import minimize

    used = list(points)[-FITTED_POINTS:]
    if not used:
        raise ValueError("no measured points to fit the simulator to")
    latency = judged_latency(problem)
    cells = [(point.candidate, point.load.concurrency) for point in used]
    wanted = np.array([log_figures(point, latency) for point in used])
    first = (start or _guess(used, latency)).vector()

    def misfit(vector: Array) -> float:
        model = ServerModel.of_vector(vector)
        simulated = np.array([log_simulated(s, latency) for s in model.simulate(problem, cells)])
        # robust: one point measured in a noisy moment must not bend the rest
        errors = np.abs(simulated - wanted)
        return float(np.where(errors < 0.3, errors**2, 0.6 * errors - 0.09).sum()) + _prior(vector)

    simplex = np.vstack([first, first + 0.7 * np.eye(len(first))])
    options = {"maxfev": EVALUATIONS, "initial_simplex": simplex, "xatol": 0.02, "fatol": 1e-4}
    return ServerModel.of_vector(minimize(misfit, first, method="Nelder-Mead", options=options).x)


def log_figures(point: Point, latency: str) -> tuple[float, float]:
    """(log of inferences/s, log of seconds) as measured."""
    throughput = point.measurement.throughput_infer_per_sec
    milliseconds = METRICS[latency].value(point.measurement)
    assert throughput, "measured points only"
    assert milliseconds, "measured points only"
    return math.log(throughput), math.log(milliseconds / 1e3)


def log_simulated(simulated: Simulated, latency: str) -> tuple[float, float]:
    return math.log(simulated.throughput_infer_per_s), math.log(getattr(simulated, LATENCY_FIELDS[latency]))


def _prior(vector: Array) -> float:
    """Weak: instances usually slow each other down, and service times usually vary a little."""
    contention, jitter = float(vector[2]), float(vector[4])
    return 0.02 * (contention - math.log(0.5)) ** 2 + 0.02 * (jitter - math.log(0.2)) ** 2


def _guess(points: Sequence[Point], latency: str) -> ServerModel:
    """From the quickest request and the highest throughput seen."""
    samples_per_s = max(math.exp(log_figures(point, latency)[0]) for point in points)
    alone_s = min(math.exp(log_figures(point, latency)[1]) / point.load.concurrency for point in points)
    return ServerModel(alone_s / 2, 0.7 / samples_per_s, 0.5, alone_s / 4 + SMALLEST_S, 0.2)
