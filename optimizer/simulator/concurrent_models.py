"""A model of a server whose models get load at the same time: each is simulated alone, with its share of the load.

How much the models slow each other down is in the service times of each, which are fitted to its measurements under
the load of all. How this depends on the configuration of the others is an error of the simulation.

At a request rate each model serves its part of the requests, which arrive at random. The requests in flight to it
follow from its latency. A load is the number of requests in flight to all models (``as_closed_loop``), which are
divided accordingly.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import numpy as np

from objectives import model_stats
from objectives.arrays import FloatArray
from objectives.metrics import LATENCY, STATISTICS, Measurement
from optimizer.config.model_source import candidate_with_fields
from optimizer.config.problem import ConcurrentModel, Problem
from optimizer.config.search_space import INSTANCE_COUNT, MAX_BATCH_SIZE, PREFERRED_BATCH_SIZE, SearchSpace
from optimizer.core.candidate import Candidate, fields_of_model, model_of_field
from optimizer.core.errors import DeploymentError
from optimizer.core.trial import LoadPoint, Point
from optimizer.simulator import dynamic_batching_model
from optimizer.simulator.dynamic_batching_model import DynamicBatchingModel
from optimizer.simulator.predicted_metrics import ConfigurationLoad, ModelErrors, as_closed_loop, six_digits
from optimizer.simulator.scenario import SimulationResult
from optimizer.simulator.speed_correction import at_other_speed

# the request rates at which a model is simulated, as shares of its highest throughput
RATE_SHARES = (0.05, 0.15, 0.3, 0.5, 0.7, 0.85, 0.95)
LATENCIES_S = tuple(f"latency_{name}_s" for name in STATISTICS)
MEAN_LATENCY = LATENCY.metric("avg")


@dataclass(frozen=True, slots=True)
class CombinedPerformance:
    """The performance of all models together: the sum of the throughputs, and the largest latency.

    The batch size is that of the tuned model, which is the first of ``by_model``.
    """

    by_model: tuple[SimulationResult, ...]

    @property
    def throughput_infer_per_sec(self) -> float:
        return sum(result.throughput_infer_per_sec for result in self.by_model)

    @property
    def mean_batch_size(self) -> float:
        return self.by_model[0].mean_batch_size

    @property
    def utilization(self) -> float:
        return max(result.utilization for result in self.by_model)

    def latency_s(self, metric: str) -> float:
        """Return the largest latency of a metric such as ``latency-p95``."""
        return max(result.latency_s(metric) for result in self.by_model)


@dataclass(frozen=True, eq=False)
class ConcurrentServerModel:
    """The simulated server of each model; ``models`` are the tuned one and ``problem.concurrent``, in this order."""

    problem: Problem
    models: tuple[DynamicBatchingModel, ...]
    name: ClassVar[str] = "simulator of the dynamic batcher of each model"

    @property
    def errors(self) -> ModelErrors:
        """The expected errors: the largest ones of a model."""
        errors = [model.errors for model in self.models]
        return ModelErrors(max(error.throughput for error in errors), max(error.tail for error in errors))

    def simulate(self, loads: Sequence[ConfigurationLoad], threads: int = 1) -> list[CombinedPerformance]:
        """Return the simulated performance of each (candidate, concurrency)."""
        if self.problem.open_loop:
            return self._simulate_rates(loads, threads)
        by_model = [model.simulate(self._loads(i, loads), threads) for i, model in enumerate(self.models)]
        return [CombinedPerformance(results) for results in zip(*by_model, strict=True)]

    def _simulate_rates(self, loads: Sequence[ConfigurationLoad], threads: int) -> list[CombinedPerformance]:
        """Return the performance of each (candidate, requests in flight to all models) at a request rate."""
        shares = [1.0, *(other.share for other in self.problem.concurrent)]
        largest = max(self.problem.max_concurrency, *(concurrency for _, concurrency in loads), 1)
        candidates = list(dict.fromkeys(candidate for candidate, _ in loads))
        curves = [
            _simulate_curves(model, [_candidate_of(part, one, self.problem) for one in candidates], largest, threads)
            for part, model in zip(_parts(self.problem), self.models, strict=True)
        ]
        by_candidate = dict(zip(candidates, zip(*curves, strict=True), strict=True))
        performances = []
        for candidate, concurrency in loads:
            own = by_candidate[candidate]
            rate, requests = _divide(concurrency, own, shares)
            results = [
                curve.at(n, share * rate) for curve, n, share in zip(own, requests.tolist(), shares, strict=True)
            ]
            performances.append(CombinedPerformance(tuple(results)))
        return performances

    def measure(self, loads: Sequence[ConfigurationLoad]) -> list[Measurement]:
        """Return the simulated report of the load generators for each (candidate, concurrency)."""
        names = [self.problem.model, *(other.name for other in self.problem.concurrent)]
        performances, by_model = self.simulate(loads), list[list[Measurement]]()
        for i, model in enumerate(self.models):
            results, own = [performance.by_model[i] for performance in performances], self._loads(i, loads)
            if self.problem.open_loop:  # the requests in flight to the model, by Little's law
                size = model.request_batch_size
                own = [
                    (one, max(1, round(result.throughput_infer_per_sec * result.latency_s(MEAN_LATENCY) / size)))
                    for (one, _), result in zip(own, results, strict=True)
                ]
            measured = zip(model.measure(own), results, strict=True)
            by_model.append([replace(measurement, **_measured_values(result)) for measurement, result in measured])
        return [
            Measurement(
                **_measured_values(performance),
                by_model=model_stats.to_text(dict(zip(names, measurements, strict=True))),
                stable=True,
            )
            for performance, measurements in zip(performances, zip(*by_model, strict=True), strict=True)
        ]

    def at_speed(self, time_share: float, network_share: float) -> ConcurrentServerModel:
        """Return the model with other times, see ``DynamicBatchingModel.at_speed``; batch times of the tuned one."""
        tuned, *others = self.models
        scaled = (tuned.at_speed(time_share, network_share), *(m.at_speed(1.0, network_share) for m in others))
        return replace(self, models=scaled)

    def _loads(self, index: int, loads: Sequence[ConfigurationLoad]) -> list[ConfigurationLoad]:
        """Return the configuration of one model and its load, for each of ``loads`` of all models."""
        part = _parts(self.problem)[index]
        own = [
            (_candidate_of(part, candidate, self.problem), _load_of(part, LoadPoint(1, n))) for candidate, n in loads
        ]
        return [(candidate, load.concurrency) for candidate, load in own]


def applies(problem: Problem) -> bool:
    """Return whether each model of ``problem`` is simulated."""
    return problem.is_simulated and bool(problem.concurrent)


def fit(points: Sequence[Point], problem: Problem, latency: str, seed: int = 0) -> ConcurrentServerModel:
    """Return the server model that is closest to the measured ``points``; see ``dynamic_batching_model.fit``.

    Raises ValueError if ``points`` is empty.
    """
    models = [
        dynamic_batching_model.fit(*arguments, latency, seed, open_loop=problem.open_loop)
        for arguments in _arguments(points, problem)
    ]
    return ConcurrentServerModel(problem, tuple(models))


def sample_models(
    model: ConcurrentServerModel, points: Sequence[Point], problem: Problem, latency: str, count: int
) -> list[ConcurrentServerModel]:
    """Return ``count`` samples of the posterior of ``model``, which was fitted to ``points`` and ``latency``."""
    samples = [
        dynamic_batching_model.sample_models(one, *arguments, latency, count, open_loop=problem.open_loop)
        for one, arguments in zip(model.models, _arguments(points, problem), strict=True)
    ]
    return [replace(model, models=models) for models in zip(*samples, strict=True)]


@dataclass(frozen=True, eq=False)
class RateCurve:
    """The performance of a configuration of one model at ascending request rates.

    ``in_flight`` are the mean requests in flight, and ``throughput`` the inferences per second.
    """

    results: Sequence[SimulationResult]
    in_flight: FloatArray
    throughput: FloatArray

    @classmethod
    def from_results(cls, results: Sequence[SimulationResult], request_batch_size: int, most: int) -> RateCurve:
        """Return the curve of ``results``, the first of a single request; at most ``most`` requests are in flight."""
        throughput = np.array([0.0, *(result.throughput_infer_per_sec for result in results[1:])])
        latency_s = np.array([result.latency_avg_s for result in results])
        in_flight = np.maximum.accumulate(np.minimum(throughput * latency_s / request_batch_size, most))
        return cls(results, in_flight, throughput)

    def at(self, requests: float, throughput_infer_per_sec: float) -> SimulationResult:
        """Return the performance with ``requests`` in flight and this throughput."""
        position = float(np.interp(requests, self.in_flight, range(len(self.results))))
        low, high = self.results[math.floor(position)], self.results[math.ceil(position)]
        weight = position % 1
        latencies_s: dict[str, Any] = {
            name: (1 - weight) * getattr(low, name) + weight * getattr(high, name) for name in LATENCIES_S
        }
        nearest = self.results[round(position)]
        return replace(nearest, throughput_infer_per_sec=throughput_infer_per_sec, **latencies_s)


def _simulate_curves(
    model: DynamicBatchingModel, candidates: Sequence[Candidate], most: int, threads: int
) -> list[RateCurve]:
    """Return the curve of each candidate, up to the throughput with ``most`` requests in flight.

    Requests arrive at random, so some wait although the mean rate is low. The latencies at the lowest and at the
    highest throughput are those of closed loops, with one request and with ``most``.
    """
    alone, saturated = (model.simulate([(one, n) for one in candidates], threads) for n in (1, most))
    rates = [
        (candidate, share * result.throughput_infer_per_sec / model.request_batch_size)
        for candidate, result in zip(candidates, saturated, strict=True)
        for share in RATE_SHARES
    ]
    results, count = model.simulate_rates(rates, threads), len(RATE_SHARES)
    return [
        RateCurve.from_results(
            [first, *results[index * count : (index + 1) * count], last], model.request_batch_size, most
        )
        for index, (first, last) in enumerate(zip(alone, saturated, strict=True))
    ]


def _divide(requests: int, curves: Sequence[RateCurve], shares: Sequence[float]) -> tuple[float, FloatArray]:
    """Return the rate at which ``requests`` are in flight to all models, and those to each [models].

    The rate is the inferences per second of a model whose share of the load is 1. All models serve the same one. The
    requests that the slowest model cannot serve wait in its queue.
    """
    rising = [np.diff(np.maximum.accumulate(curve.throughput), prepend=-1.0) > 0 for curve in curves]
    rates = [curve.throughput[up] / share for curve, up, share in zip(curves, rising, shares, strict=True)]
    in_flight = [curve.in_flight[up] for curve, up in zip(curves, rising, strict=True)]
    slowest = int(np.argmin([own[-1] for own in rates]))
    possible = np.unique(np.concatenate(rates).clip(max=rates[slowest][-1]))
    needed = np.array(
        [np.interp(possible, own, requests_of) for own, requests_of in zip(rates, in_flight, strict=True)]
    )
    totals = needed.sum(axis=0)
    rate = float(np.interp(requests, totals, possible))
    divided = np.array([np.interp(rate, possible, own) for own in needed])
    divided[slowest] += max(0.0, requests - totals[-1])
    return rate, divided


def _measured_values(performance: CombinedPerformance | SimulationResult) -> dict[str, Any]:
    """Return the throughput and the latencies of ``performance`` by the field of a measurement."""
    latencies_ms = {
        LATENCY.field_of(name): six_digits(1e3 * performance.latency_s(LATENCY.metric(name))) for name in STATISTICS
    }
    return {"throughput_infer_per_sec": six_digits(performance.throughput_infer_per_sec), **latencies_ms}


def _parts(problem: Problem) -> tuple[ConcurrentModel | None, ...]:
    """Return the models under load; None for the tuned one."""
    return (None, *problem.concurrent)


def _arguments(points: Sequence[Point], problem: Problem) -> list[tuple[list[Point], Problem]]:
    """Return the points and the problem of each model."""
    return [(_points_of(part, points, problem), _problem_of(part, problem)) for part in _parts(problem)]


def _candidate_of(part: ConcurrentModel | None, candidate: Candidate, problem: Problem) -> Candidate:
    """Return the configuration of one model in ``candidate``; that of an ensemble includes its steps."""
    if part is None:
        others = {other.name for other in problem.concurrent}
        own = tuple((path, value) for path, value in candidate.fields if model_of_field(path) not in others)
        return replace(candidate, fields=own)
    fields = fields_of_model(candidate.fields, part.name)
    try:
        return candidate_with_fields(part.name, part.candidate, fields)
    except DeploymentError:  # the deployment will fail, whatever is simulated
        return candidate_with_fields(part.name, part.candidate, {**fields, PREFERRED_BATCH_SIZE: "none"})


def _load_of(part: ConcurrentModel | None, load: LoadPoint) -> LoadPoint:
    return load if part is None else load.scaled(part.share)


def _points_of(part: ConcurrentModel | None, points: Sequence[Point], problem: Problem) -> list[Point]:
    """Return ``points`` as measurements of one model, with the correction of the speed that they have."""
    own = []
    for point in points:
        by_model = model_stats.from_text(point.measurement.by_model)
        # the tuned model is the first one, and has another name in the study of another model (--warm-start)
        measured = by_model.get(part.name) if part else next(iter(by_model.values()), None)
        throughput = sum(values.throughput_infer_per_sec or 0.0 for values in by_model.values())
        if measured is None or not throughput:
            continue
        if not problem.open_loop:  # whose measurements are not corrected
            measured = at_other_speed(measured, point.throughput_infer_per_sec / throughput)
        candidate, load = _candidate_of(part, point.candidate, problem), _load_of(part, point.load)
        own.append(replace(point, candidate=candidate, load=load, measurement=measured))
    return as_closed_loop(own, replace(problem, concurrent=()))


def _problem_of(part: ConcurrentModel | None, problem: Problem) -> Problem:
    """Return the problem of one model alone."""
    space = problem.space
    if part is None:
        others = {other.name for other in problem.concurrent}
        fields = {path: values for path, values in space.fields.items() if model_of_field(path) not in others}
        return replace(problem, space=replace(space, fields=fields), concurrent=())

    def choices(parameter: str, configured: int) -> tuple[int, ...]:
        return tuple(int(value) for value in space.fields.get(f"{part.name}/{parameter}", (configured,)))

    own = SearchSpace(
        choices(MAX_BATCH_SIZE, part.candidate.max_batch_size),
        instance_count=choices(INSTANCE_COUNT, part.candidate.instance_count),
        request_batch_size=space.request_batch_size,
    )
    most = LoadPoint(1, problem.max_concurrency)
    if not problem.open_loop:
        most = _load_of(part, most)
    return replace(problem, model=part.name, space=own, max_concurrency=most.concurrency, queue=(), concurrent=())
