"""The measured throughput of configurations within bounds: the one answer of ``tune explain`` and ``tune plan``."""

from __future__ import annotations

from collections.abc import Collection

from objectives.metrics import METRICS
from objectives.sla import Sla
from optimizer.core.trial import Candidate, Point
from optimizer.results.recommendation import Outcome


def measured_within(outcome: Outcome, sla: Sla, candidates: Collection[Candidate] | None = None) -> Point | None:
    """Return the measurement with the most throughput of ``candidates`` within ``sla``; None if none meets it.

    Without ``candidates``, all configurations count. Values from fresh servers replace those of the search. Within
    the latency bounds of the run, its recommendation comes first, because only its verdict was tested.
    """
    met = [
        point
        for point in outcome.points
        if (candidates is None or point.candidate in candidates)
        and (point.measurement.stable or outcome.confirmation_of(point))
        and sla.is_met(point.measurement)
    ]
    if outcome.recommended in met and set(sla.latencies) == set(outcome.sla.latencies):
        return outcome.recommended
    return max(met, key=lambda point: point.throughput_infer_per_sec, default=None)


def measured_at(outcome: Outcome, candidate: Candidate, concurrency: int) -> Point | None:
    """Return the measurement of ``candidate`` with ``concurrency`` requests in flight; None if there is none."""
    own = (point for point in outcome.points if point.candidate == candidate)
    return next((point for point in own if point.load.concurrency == concurrency), None)


def quickest_measured(outcome: Outcome, metric: str) -> Point | None:
    """Return the measurement with the lowest value of the latency ``metric``; None if none has it."""
    known = [point for point in outcome.points if METRICS[metric].value(point.measurement)]
    return min(known, key=lambda point: METRICS[metric].value(point.measurement) or 0.0, default=None)
