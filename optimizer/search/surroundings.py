"""What a simulated server has beside the computation: the way to and fro, wake-ups, gaps, and how much times vary."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from optimizer.batcher.simulator import Overheads, Simulated
from optimizer.search.figures import Cell, log_figures, log_simulated, with_tails
from optimizer.trial import Point

FITTED_POINTS = 24  # the latest ones: enough for a handful of numbers, few enough to fit within a second
SMALLEST_S = 1e-6
# A batch's clients get their responses and send their next requests one after another, USUAL_GAP_S apart on average
# (134 µs in benchmarks/simulator_proof.md); a rate that was measured bounds it. USUAL_HOP_S: the batcher or an
# instance is woken.
USUAL_GAP_S, USUAL_HOP_S, USUAL_JITTER = 1e-4, 1e-4, 0.1
GAP_SHARE = 0.95  # of the time between two requests at the highest rate measured
JITTERS = (0.02, 0.05, 0.1, 0.2, 0.3, 0.45)
GAPS_S = (SMALLEST_S, 1e-5, 3e-5, 1e-4, 2e-4)
HOPS_S = (SMALLEST_S, 2e-5, 5e-5, 1e-4, 2e-4)
WAYS = (1.0, 0.75, 0.5)  # of what was measured, as gaps are part of that
QUICKER = 0.2  # quantile of the ways measured
USUAL = {"gap_s": USUAL_GAP_S, "hop_s": USUAL_HOP_S}
DOUBT = 0.002  # what a factor e away from the usual must gain in squared errors
OUTLIER = 0.15  # an error beyond it counts in proportion


@dataclass(frozen=True, slots=True)
class Surroundings:
    """``way_s`` is spent outside queue and computation by each request; ``gap_s`` lies between two arrivals, on
    average; ``hop_s`` passes until the batcher or an instance wakes; ``jitter`` is the relative standard deviation of
    service times.
    """

    way_s: float
    gap_s: float = USUAL_GAP_S
    hop_s: float = USUAL_HOP_S
    jitter: float = USUAL_JITTER

    def overheads(self) -> Overheads:
        return Overheads(self.way_s / 2, self.way_s / 2, 0.0, 0.0, self.hop_s, self.hop_s)


def way_s(points: Sequence[Point]) -> float | None:
    """That of the quicker points: in the slower ones requests wait for each other on the way, which the gaps explain.
    None where no point tells."""
    seen = [way for point in points if (way := _way_s(point)) is not None]
    return float(np.quantile(seen, QUICKER)) if seen else None


def gap_limit_s(points: Sequence[Point]) -> float:
    """The longest gap that the highest rate of requests leaves room for."""
    rates = [(p.measurement.throughput_infer_per_sec or 0) / p.load.request_batch_size for p in points]
    return GAP_SHARE / max(*rates, 1e-9)


def nearest(
    simulate: Callable[[Surroundings, Sequence[Cell]], Sequence[Simulated]],
    first: Surroundings,
    points: Sequence[Point],
    latency: str,
) -> Surroundings:
    """``first`` with the jitter, gap and hop whose simulation is nearest to ``points`` in throughput, in the tail of
    ``latency``, in the size of batches and in the time in the queue."""
    used = list(points)[-FITTED_POINTS:]
    cells = [(point.candidate, point.load.concurrency) for point in used]
    batch = used[0].load.request_batch_size
    wanted = with_tails(np.array([log_figures(point, latency) for point in used]), cells, batch)
    sizes = np.array([point.measurement.mean_batch_size or math.nan for point in used])
    queues = np.array([_or_nan(point.measurement.queue_ms) for point in used])
    means_ms = 1e3 * np.exp(np.log([load * batch for _, load in cells]) - wanted[:, 0])  # Little's law

    def misfit(one: Surroundings) -> float:
        found = simulate(one, cells)
        figures = with_tails(np.array([log_simulated(s, latency) for s in found]), cells, batch)
        errors = np.stack(
            [
                figures[:, 0] - wanted[:, 0],
                figures[:, 1] - wanted[:, 1],
                0.5 * np.log(np.array([s.mean_batch_size for s in found]) / sizes),
                0.5 * (np.array([1e3 * s.queue_avg_s for s in found]) - queues) / means_ms,
            ]
        )
        size = np.abs(np.nan_to_num(errors))
        squares = np.where(size < OUTLIER, size**2, 2 * OUTLIER * size - OUTLIER**2)
        unusual = sum(math.log(getattr(one, name) / usual) ** 2 for name, usual in USUAL.items())
        return float(squares.sum()) + DOUBT * unusual

    limit_s = max(gap_limit_s(points), SMALLEST_S)
    best = min((replace(first, jitter=one) for one in JITTERS), key=misfit)
    gaps_s = [gap for gap in GAPS_S if gap <= limit_s]
    choices = itertools.product([share * first.way_s for share in WAYS], gaps_s, HOPS_S)
    best = min((Surroundings(*choice, jitter=best.jitter) for choice in choices), key=misfit)
    return min((replace(best, jitter=one) for one in JITTERS), key=misfit)


def _or_nan(value: float | None) -> float:
    return math.nan if value is None else value


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
