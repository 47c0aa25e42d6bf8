"""Measurements in an open loop as a simulation in a closed one knows them: by the requests in flight."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from optimizer.problem import Problem
from optimizer.trial import LoadPoint, Point


def in_flight(points: Sequence[Point], problem: Problem) -> list[Point]:
    """``points`` with each rate replaced by the concurrency that is as much in flight on average (Little's law), of
    requests as the space knows them.

    Those whose mean latency is unknown are left out; what an overloaded server had queued counts as the most that
    is measured.
    """
    found = []
    for point in points:
        measured, batch = point.measurement, problem.space.request_batch_size
        if measured.throughput_infer_per_sec and measured.latency_avg_ms:
            mean = measured.throughput_infer_per_sec / batch * measured.latency_avg_ms / 1e3
            concurrency = max(1, min(round(mean), problem.max_concurrency))
            found.append(replace(point, load=LoadPoint(batch, concurrency)))
    return found
