"""What runs say of one configuration: every deployment of it, or of one that computes as it does."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from objectives.metrics import Measurement
from objectives.verdict import pooled
from optimizer import batch_stats
from optimizer.open_loop.arrivals import Arrivals
from optimizer.problem import Problem
from optimizer.search.service import group_of
from optimizer.trial import Candidate, LoadPoint, Point, Trial, points


@dataclass(frozen=True)
class Deployment:
    """One server that was started, and what it gave at each load."""

    points: tuple[Point, ...]


@dataclass(frozen=True)
class Evidence:
    """Of ``candidate``, measured with ``arrivals`` where at a rate.

    ``deployments`` have the same instances and fields: they differ in batching alone, which is simulated, so that
    each tells how fast the machine computes.
    """

    candidate: Candidate
    problem: Problem
    deployments: tuple[Deployment, ...]
    arrivals: Arrivals

    @property
    def points(self) -> list[Point]:
        return [point for one in self.deployments for point in one.points]


def collect(candidate: Candidate, problem: Problem, runs: Sequence[Sequence[Trial]], arrivals: Arrivals) -> Evidence:
    """From the trials of several runs of one model on one hardware. What was lost or overloaded tells nothing."""
    group = group_of(problem.space.canonical(candidate))
    alike = [
        trial for trials in runs for trial in trials if group_of(problem.space.canonical(trial.candidate)) == group
    ]
    found = (one for trial in alike for one in _deployments(trial))
    return Evidence(candidate, problem, tuple(one for one in found if one.points), arrivals)


def _deployments(trial: Trial) -> Iterator[Deployment]:
    yield Deployment(tuple(point for point in points([trial]) if _tells(point)))
    for server in dict.fromkeys(one.server for one in trial.confirmations):
        own = [one for one in trial.confirmations if one.server == server]
        loads = dict.fromkeys(one.load for one in own)
        pools = (_pooled(trial, load, [one.measurement for one in own if one.load == load]) for load in loads)
        yield Deployment(tuple(point for point in pools if _tells(point)))


def _pooled(trial: Trial, load: LoadPoint, windows: Sequence[Measurement]) -> Point:
    """The windows of one server as one measurement."""
    counted = batch_stats.total(batch_stats.from_text(window.batch_stats) for window in windows)
    measured = replace(pooled(windows), batch_stats=batch_stats.to_text(counted))
    return Point(trial.number, trial.candidate, load, measured)


def _tells(point: Point) -> bool:
    measured = point.measurement
    return bool(measured.throughput_infer_per_sec and measured.latency_avg_ms and not measured.is_overloaded)
