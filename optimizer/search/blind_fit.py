"""The simulator fitted where only throughput and latency are known, as in a table of five columns."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from optimizer.batcher.simulator import ServiceTimes
from optimizer.problem import Problem
from optimizer.search.figures import Array, log_figures, log_simulated
from optimizer.search.server_model import ServerModel, largest_batch
from optimizer.search.service import Group
from optimizer.search.surroundings import FITTED_POINTS, SMALLEST_S, USUAL_GAP_S, Surroundings, gap_limit_s
from optimizer.trial import Point

EVALUATIONS = 120
ERROR = 0.2  # of the throughput: twice that of a model which knows the service times
CONTENTION, JITTER = 0.5, 0.2  # where the points do not tell


def fit_blindly(points: Sequence[Point], problem: Problem, latency: str, seed: int) -> ServerModel:
    """Five numbers whose simulation is nearest in throughput and latency (squares of log ratios)."""
    from scipy.optimize import minimize

    used = list(points)[-FITTED_POINTS:]
    largest = largest_batch(points, problem)
    gap = min(USUAL_GAP_S, gap_limit_s(points))
    cells = [(point.candidate, point.load.concurrency) for point in used]
    wanted = np.array([log_figures(point, latency) for point in used])
    first = _guess(used, latency)

    def misfit(vector: Array) -> float:
        model = _of_vector(vector, problem, largest, gap, seed)
        simulated = np.array([log_simulated(s, latency) for s in model.simulate(cells)])
        # robust: one point measured in a noisy moment must not bend the rest
        errors = np.abs(simulated - wanted)
        return float(np.where(errors < 0.3, errors**2, 0.6 * errors - 0.09).sum()) + _prior(vector)

    simplex = np.vstack([first, first + 0.7 * np.eye(len(first))])
    options = {"maxfev": EVALUATIONS, "initial_simplex": simplex, "xatol": 0.02, "fatol": 1e-4}
    found = minimize(misfit, first, method="Nelder-Mead", options=options).x
    return _of_vector(found, problem, largest, gap, seed)


def _of_vector(vector: Array, problem: Problem, largest: int, gap: float, seed: int) -> ServerModel:
    """From logarithms (all five are positive, errors are relative) of fixed_s, per_sample_s, contention, way_s,
    jitter: ``fixed_s + per_sample_s * b`` alone, and each further busy instance adds ``contention`` of it."""
    low = np.log([SMALLEST_S, 1e-9, 1e-3, SMALLEST_S, 0.01])
    high = np.log([10.0, 1.0, 3.0, 1.0, 1.0])
    fixed_s, per_sample_s, contention, way_s, jitter = np.exp(np.clip(vector, low, high)).tolist()
    batch = problem.space.request_batch_size
    alone = fixed_s + per_sample_s * np.arange(batch, largest + batch, batch, dtype=np.float64)

    def times(group: Group) -> ServiceTimes:
        return ServiceTimes(np.outer(alone, 1 + contention * np.arange(group[0])), step=batch)

    return ServerModel(times, batch, Surroundings(way_s, gap_s=gap, jitter=jitter), seed, ERROR, problem.fixed_shapes)


def _prior(vector: Array) -> float:
    """Weak: instances usually slow each other down, and service times usually vary a little."""
    contention, jitter = float(vector[2]), float(vector[4])
    return 0.02 * (contention - math.log(CONTENTION)) ** 2 + 0.02 * (jitter - math.log(JITTER)) ** 2


def _guess(points: Sequence[Point], latency: str) -> Array:
    """From the quickest request and the highest throughput seen."""
    samples_per_s = max(math.exp(log_figures(point, latency)[0]) for point in points)
    alone_s = min(math.exp(log_figures(point, latency)[1]) / point.load.concurrency for point in points)
    return np.log([alone_s / 2, 0.7 / samples_per_s, CONTENTION, alone_s / 4 + SMALLEST_S, JITTER])
