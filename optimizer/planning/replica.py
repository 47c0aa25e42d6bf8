"""One replica: the simulated server, fitted to what was measured, and how sure that is."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from objectives.metrics import METRICS
from objectives.sla import Constraint
from optimizer.batcher.calibration import service_times
from optimizer.batcher.observations import observation
from optimizer.batcher.simulator import (
    ClosedLoop,
    Job,
    Load,
    OpenLoop,
    ServiceTimes,
    Simulated,
    Window,
    exponential_delays,
    lognormal_jitter,
    simulate_many,
)
from optimizer.planning.belief import Belief, belief
from optimizer.planning.evidence import Deployment, Evidence
from optimizer.problem import Problem
from optimizer.search.figures import LATENCY_FIELDS
from optimizer.search.in_flight import in_flight
from optimizer.search.server_model import ServerModel, fit
from optimizer.search.service import group_of
from optimizer.search.surroundings import Surroundings, nearest, way_s
from optimizer.trial import Candidate, LoadPoint, Point

Array: TypeAlias = npt.NDArray[np.float64]

SLOWNESSES = np.geomspace(0.6, 1.7, 13)  # at which loads are simulated, to find that of a deployment
FINE = np.geomspace(SLOWNESSES[0], SLOWNESSES[-1], 401)
CLOSED_WINDOW = Window(warm_up_requests=400, requests=4000)
RATE_REQUESTS = 20_000
FITTED_POINTS = 12  # so many of them, of one configuration, settle what is beside the computation
FULLEST = 4  # batches for each instance in flight: more adds nothing to the throughput
LARGEST_TAIL = 1.5  # a factor on latencies beyond it is an outlier


@dataclass(frozen=True, eq=False)
class Replica:
    """``tail``: by how much longer the judged latency was measured than simulated, at equal throughput.

    ``request_batch_size``: samples of a request, on average. ``bounds`` are on latencies.
    """

    candidate: Candidate
    model: ServerModel
    request_batch_size: float
    bounds: tuple[Constraint, ...]
    belief: Belief
    tail: float = 1.0

    def serve(self, arrivals_s: Array, slowness: float) -> Simulated:
        """What it gives where batches take ``slowness`` times as long as in the model; ``tail`` is not in it yet."""
        load = OpenLoop(as_samples(arrivals_s, self.request_batch_size / self.model.request_batch_size))
        return _simulated(self.model, [(self.candidate, load)], slowness)[0]

    def latency_ms(self, found: Simulated, metric: str, lateness: float = 1.0) -> float:
        return 1e3 * self.tail * lateness * float(getattr(found, LATENCY_FIELDS[metric]))

    def meets(self, found: Simulated, lateness: float = 1.0) -> bool:
        return all(self.latency_ms(found, bound.metric, lateness) <= bound.bound for bound in self.bounds)

    def capacity(self, slowness: float) -> float:
        """The most requests a second, however long they take."""
        samples = self.candidate.instance_count * max(1, self.candidate.max_batch_size)
        full = ClosedLoop(max(1, min(FULLEST * samples // self.model.request_batch_size, 4096)))
        found = _simulated(self.model, [(self.candidate, full)], slowness)[0]
        return found.throughput_infer_per_s / self.request_batch_size


def as_samples(arrivals_s: Array, each: float) -> Array:
    """Requests of a mix of sizes are simulated as that many single samples that come at once."""
    if each == 1:
        return arrivals_s
    return np.repeat(arrivals_s, np.diff(np.floor(each * np.arange(len(arrivals_s) + 1))).astype(int))


def replica(evidence: Evidence, bounds: Sequence[Constraint], seed: int = 0) -> Replica:
    """Fitted to ``evidence``; the first of ``bounds`` says which latency is fitted.

    Raises ValueError where nothing was measured that tells service times.
    """
    problem, candidate = evidence.problem, evidence.candidate
    size = problem.space.request_batch_size
    most = max(problem.max_concurrency, *(p.candidate.max_batch_size // size + 1 for p in evidence.points), 1)
    problem = replace(problem, max_concurrency=most)
    latency = bounds[0].metric
    measured = evidence.points
    if problem.open_loop:
        measured = in_flight(measured, problem)
    known = [point for point in measured if METRICS[latency].value(point.measurement)]
    own = [point for point in known if point.candidate == candidate]
    chosen = sorted(known, key=lambda point: point.candidate == candidate)  # the fit looks at the last ones
    model = _fitted(known, chosen[-max(FITTED_POINTS, len(own)) :], problem, latency, seed)
    speeds = _Speeds(model, evidence, latency)
    found = belief([speeds.log_slowness(one) for one in evidence.deployments])
    return Replica(candidate, model, problem.request_batch_size, tuple(bounds), found, speeds.tail())


def _fitted(
    measured: Sequence[Point], chosen: Sequence[Point], problem: Problem, latency: str, seed: int
) -> ServerModel:
    """As the search fits it, but to one combination of instances and fields alone: how much its instances slow each
    other down is then learned, not assumed."""
    observed = [seen for point in measured if (seen := observation(point)) is not None]
    way = way_s(measured)
    if way is None or not observed:
        return fit(chosen, problem, latency, seed)
    size = problem.space.request_batch_size
    largest = max(size, *(point.candidate.max_batch_size for point in measured))
    instances = measured[0].candidate.instance_count
    times = service_times(observed, largest - largest % size, instances, step=size)
    first = ServerModel(lambda _: times, size, Surroundings(way), seed, fixed_shapes=problem.fixed_shapes)
    around = nearest(lambda one, cells: replace(first, around=one).simulate(cells), first.around, chosen, latency)
    return replace(first, around=around)


class _Speeds:
    """How slow each deployment was: the slowness whose simulation is nearest to its measurements.

    In a closed loop throughput tells; at a rate, which is served at any speed, latency does.
    """

    def __init__(self, model: ServerModel, evidence: Evidence, latency: str) -> None:
        self._evidence, self._latency = evidence, latency
        self._each = evidence.problem.request_batch_size / model.request_batch_size
        cells = list(dict.fromkeys((point.candidate, point.load) for point in evidence.points))
        jobs = [(candidate, self._load(load)) for candidate, load in cells]
        found = [_simulated(model, jobs, slowness) for slowness in SLOWNESSES.tolist()]
        self._simulated = {cell: [row[i] for row in found] for i, cell in enumerate(cells)}

    def log_slowness(self, deployment: Deployment) -> float:
        misfit = sum((self._difference(point) ** 2 for point in deployment.points), np.zeros(len(FINE)))
        return math.log(FINE[int(np.argmin(misfit))])

    def tail(self) -> float:
        """The median over measurements of the recommended configuration of measured / simulated latency, each
        deployment as slow as it was; 1 where none of them tells."""
        ratios = []
        for one in self._evidence.deployments:
            own = math.exp(self.log_slowness(one))
            for point in one.points:
                value = METRICS[self._latency].value(point.measurement)
                if value and point.candidate == self._evidence.candidate:
                    simulated_ms = 1e3 * float(np.interp(own, SLOWNESSES, self._field(point, self._latency)))
                    ratios.append(value / simulated_ms)
        ratio = float(np.median(ratios)) if ratios else 1.0
        return min(max(ratio, 1 / LARGEST_TAIL), LARGEST_TAIL)

    def _difference(self, point: Point) -> Array:
        """log(measured / simulated) at each of FINE."""
        measured = point.measurement
        if point.load.concurrency:
            assert measured.throughput_infer_per_sec, "evidence has figures only"
            simulated = np.array([one.throughput_infer_per_s for one in self._simulated[point.candidate, point.load]])
            ratio = measured.throughput_infer_per_sec / np.interp(FINE, SLOWNESSES, simulated)
            return np.asarray(np.log(ratio))
        assert measured.latency_avg_ms, "evidence has figures only"
        simulated_ms = 1e3 * np.interp(FINE, SLOWNESSES, self._field(point, "latency-avg"))
        return np.asarray(np.log(measured.latency_avg_ms / simulated_ms))

    def _field(self, point: Point, latency: str) -> Array:
        return np.array(
            [getattr(one, LATENCY_FIELDS[latency]) for one in self._simulated[point.candidate, point.load]]
        )

    def _load(self, load: LoadPoint) -> Load:
        if load.concurrency:
            return ClosedLoop(load.concurrency)
        planned = self._evidence.arrivals.plan(load.request_rate, RATE_REQUESTS / load.request_rate, seed=0)
        return OpenLoop(as_samples(planned, self._each))


def _simulated(model: ServerModel, jobs: Sequence[tuple[Candidate, Load]], slowness: float) -> list[Simulated]:
    service = {}
    for candidate, _ in jobs:
        group = group_of(candidate)
        if group not in service:
            times = model.times(group)
            service[group] = ServiceTimes(times.seconds * slowness, times.step)
    around, size = model.around, model.request_batch_size
    overheads = around.overheads()
    jitter, gaps_s = lognormal_jitter(around.jitter, model.seed), exponential_delays(around.gap_s, model.seed)
    found: list[Simulated] = []
    for candidate, load in jobs:
        window = CLOSED_WINDOW if isinstance(load, ClosedLoop) else Window()
        job = Job(candidate, load, service[group_of(candidate)], overheads, size, model.fixed_shapes)
        found += simulate_many([job], jitter=jitter, gaps_s=gaps_s, window=window)
    return found
