"""Forecasts of changes to a configuration by the surrogate of the search, for models that stream or keep state."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

import numpy as np

from objectives.arrays import FloatArray
from objectives.sla import Sla
from optimizer.config.batching import format_preferred_sizes, parse_preferred_sizes, resolve_preferred_sizes
from optimizer.config.problem import Problem
from optimizer.config.search_space import OFF, SearchSpace
from optimizer.core.candidate import Candidate
from optimizer.core.trial import Trial
from optimizer.explain.forecaster import CandidateForecast, Remedy, compute_gain, median_errors
from optimizer.results.report.parameter_effects import label
from optimizer.search.candidate_selector import fit_surrogate
from optimizer.simulator.predicted_metrics import log_measurements

Choice = TypeVar("Choice")
LOADS = 12  # concurrencies at which each candidate is predicted
LOAD_FACTOR = 2.0  # the largest of them, relative to the largest measured one
FINE_LOADS = 200  # largest number of concurrencies to which the predictions are interpolated
SAMPLES_OF_EACH = 20  # samples of the posterior of each sample of the server model


class SurrogateForecaster:
    """Forecasts ``candidates`` with the surrogate: a model of the server, corrected by Gaussian processes.

    It knows all candidates from the beginning, because the samples of its posterior are joint ones. Candidates of a
    similar configuration have similar errors, which cancel in gains.
    """

    def __init__(self, trials: Sequence[Trial], problem: Problem, candidates: Sequence[Candidate], seed: int) -> None:
        """Fit to ``trials``. Raises ValueError if no measurement has the throughput and all bounded latencies."""
        surrogate, space = fit_surrogate(problem, trials, seed), problem.space
        measured = [(space.canonical(point.candidate), point.load.concurrency) for point in surrogate.measured]
        self.latencies = surrogate.latencies
        self.model_name = surrogate.model_name
        self.measurement_count = len(measured)
        logs = log_measurements(surrogate.measured, self.latencies)
        self.errors = median_errors(surrogate.simulated(measured), logs)
        highest = LOAD_FACTOR * max(load for _, load in measured)
        loads = list(dict.fromkeys(round(load) for load in np.geomspace(1, highest, LOADS).tolist()))
        self._fine_loads = np.unique(np.geomspace(1, highest, FINE_LOADS).round())
        self._space = space
        distinct = dict.fromkeys(map(space.canonical, candidates))
        self._indices = {candidate: index for index, candidate in enumerate(distinct)}
        samples = surrogate.samples([(candidate, load) for candidate in distinct for load in loads], SAMPLES_OF_EACH)
        shape = len(samples), len(distinct), len(loads), 1 + len(self.latencies)
        # [samples, candidates, fine loads, 1 + latencies]: log throughput and log latencies in seconds
        self._samples = _interpolated(samples.reshape(shape), np.log(loads), np.log(self._fine_loads))

    def best(self, candidates: Sequence[Candidate], sla: Sla, *, time_share: float = 1.0) -> CandidateForecast | None:
        """Return the best of ``candidates`` at its best load within the bounds; None if none meets them.

        A server that takes ``time_share`` of the time at every load has the same throughput and latencies in units
        of this time.
        """
        log_bounds = np.log([sla.latency_bound_ms(latency) / 1e3 / time_share for latency in self.latencies])
        forecasts = [self._best(candidate, log_bounds, time_share) for candidate in candidates]
        return max(
            (forecast for forecast in forecasts if forecast is not None),
            key=lambda forecast: forecast.throughput_infer_per_sec,
            default=None,
        )

    def at(self, candidate: Candidate, concurrency: int) -> CandidateForecast:
        """Return the forecast of ``candidate`` at a load, without samples."""
        mean = self._samples_of(candidate).mean(axis=0)
        nearest = int(np.argmin(np.abs(self._fine_loads - concurrency)))
        return self._forecast(candidate, mean[nearest], concurrency)

    def lowest_latencies_ms(self, candidates: Sequence[Candidate]) -> Mapping[str, float]:
        """Return the lowest value of each latency of any of ``candidates`` at any load."""
        indices = [self._indices[self._space.canonical(candidate)] for candidate in candidates]
        lowest = self._samples[:, indices].mean(axis=0)[..., 1:].min(axis=(0, 1))
        return dict(zip(self.latencies, (1e3 * np.exp(lowest)).tolist(), strict=True))

    def _samples_of(self, candidate: Candidate) -> FloatArray:
        """Return the samples [samples, fine loads, 1 + latencies] of a candidate."""
        return self._samples[:, self._indices[self._space.canonical(candidate)]]

    def _best(self, candidate: Candidate, log_bounds: FloatArray, time_share: float) -> CandidateForecast | None:
        """Return ``candidate`` at its best load; ``log_bounds`` [latencies] are in units of ``time_share`` s."""
        samples = self._samples_of(candidate)
        mean = samples.mean(axis=0)
        within_bounds = np.flatnonzero((mean[:, 1:] <= log_bounds).all(axis=1))
        if not len(within_bounds):
            return None
        best = within_bounds[np.argmax(mean[within_bounds, 0])]
        is_within = (samples[..., 1:] <= log_bounds).all(axis=2)
        best_throughputs = np.where(is_within, np.exp(samples[..., 0]), 0.0).max(axis=1)
        scaled = mean[best] + math.log(time_share) * np.array([-1.0, *(1.0 for _ in self.latencies)])
        forecast = self._forecast(candidate, scaled, int(self._fine_loads[best]))
        return replace(forecast, samples=best_throughputs / time_share)

    def _forecast(self, candidate: Candidate, logs: FloatArray, concurrency: int) -> CandidateForecast:
        """Return the forecast with ``logs`` [1 + latencies]: log throughput and log latencies in seconds."""
        throughput, *latencies_s = np.exp(logs).tolist()
        return CandidateForecast(
            candidate,
            concurrency,
            throughput,
            {latency: 1e3 * seconds for latency, seconds in zip(self.latencies, latencies_s, strict=True)},
        )


def _interpolated(values: FloatArray, loads: FloatArray, finer: FloatArray) -> FloatArray:
    """Return ``values`` [samples, candidates, loads, columns], interpolated linearly to the loads ``finer``."""
    above = np.clip(np.searchsorted(loads, finer), 1, len(loads) - 1)
    share = ((finer - loads[above - 1]) / (loads[above] - loads[above - 1]))[:, None]
    return np.asarray((1 - share) * values[:, :, above - 1] + share * values[:, :, above])


def predict_changes(
    forecaster: SurrogateForecaster,
    subject: Candidate,
    changes: Sequence[ParameterChange],
    sla: Sla,
    fp16_factor: float | None,
    *,
    on_gpu: bool,
) -> list[Remedy]:
    """Return the forecast of each of the ``changes`` alone, and of faster computing.

    ``fp16_factor`` is None if the model has no conversion to FP16.
    """
    unchanged = forecaster.best([subject], sla)
    remedies = []
    if fp16_factor is not None:
        assumption = f"assuming that everything takes {fp16_factor:g} of its time"
        description = assumption if on_gpu else f"{assumption} (CPUs often gain nothing)"
        faster = forecaster.best([subject], sla, time_share=fp16_factor)
        remedies.append(Remedy("fp16", description, faster, compute_gain(faster, unchanged)))
    for change in changes:
        forecast = forecaster.best([change.candidate], sla)
        gain = compute_gain(forecast, unchanged)
        remedies.append(Remedy("parameter", change.description, forecast, gain, change.parameter))
    return remedies


@dataclass(frozen=True, slots=True)
class ParameterChange:
    """A candidate that differs from another one in one parameter.

    ``parameter`` is the name of the parameter, ``description`` its new and its old value in words.
    """

    candidate: Candidate
    parameter: str
    description: str


def single_changes(space: SearchSpace, subject: Candidate) -> list[ParameterChange]:
    """Return the changes of ``subject`` in one parameter, without those that lead to the same configuration.

    Each parameter takes its next lower and its next higher choice. Beyond the choices, ``max_batch_size`` is doubled
    and one more instance is added.
    """
    changes: dict[Candidate, ParameterChange] = {}
    before = space.canonical(subject)
    for parameter, value, new_value, candidate in _variations(space, before):
        description = f"{_value_text(new_value)} instead of {_value_text(value)}"
        if new_value not in space.parameters()[parameter]:
            description += ", outside of the search space"
        changed = space.canonical(candidate)
        if changed != before:
            changes.setdefault(changed, ParameterChange(changed, label(parameter), description))
    return list(changes.values())


def _variations(space: SearchSpace, subject: Candidate) -> Iterator[tuple[str, object, object, Candidate]]:
    """Yield (parameter, present value, new value, candidate with the new value)."""
    size, count, fields = subject.max_batch_size, subject.instance_count, dict(subject.fields)
    policy = format_preferred_sizes(subject.preferred_batch_sizes, size)
    possible = [choice for choice in space.max_batch_size if choice >= space.request_batch_size]
    for other in _nearest_choices(possible, size, beyond=2 * size):
        sizes = resolve_preferred_sizes(policy, other) or ()
        preferred = tuple(preferred for preferred in sizes if preferred <= other)
        yield "max_batch_size", size, other, replace(subject, max_batch_size=other, preferred_batch_sizes=preferred)
    delay = subject.max_queue_delay_us if subject.dynamic_batching else OFF
    for other_delay in _neighbors(space.max_queue_delay_us, delay):
        if other_delay == OFF:
            batching = replace(subject, dynamic_batching=False, max_queue_delay_us=0, preferred_batch_sizes=())
        else:
            batching = replace(subject, dynamic_batching=True, max_queue_delay_us=int(other_delay or 0))
        yield "max_queue_delay_us", delay, other_delay, batching
    if subject.dynamic_batching:
        for other_policy in _neighbors(space.preferred_batch_sizes, policy):
            sizes = resolve_preferred_sizes(parse_preferred_sizes(other_policy), size) or ()
            yield "preferred_batch_sizes", policy, other_policy, replace(subject, preferred_batch_sizes=sizes)
    for other in _nearest_choices(space.instance_count, count, beyond=count + 1):
        yield "instance_count", count, other, replace(subject, instance_count=other)
    for path, choices in space.fields.items():
        for value in _neighbors(choices, fields.get(path)):
            changed = tuple(sorted((fields | {path: value}).items()))
            yield path, fields.get(path, "the default"), value, replace(subject, fields=changed)


def _nearest_choices(choices: Sequence[int], value: int, beyond: int) -> list[int]:
    """Return the largest choice below ``value`` and the smallest one above it; ``beyond`` without one above."""
    below, above = [choice for choice in choices if choice < value], [choice for choice in choices if choice > value]
    nearest = [max(below)] if below else []
    next_above = min(above, default=beyond)
    return [*nearest, next_above] if next_above > value else nearest


def _neighbors(choices: Sequence[Choice], value: object) -> Sequence[Choice]:
    """Return the choices before and after ``value``; all of them if it is none of them."""
    if value not in choices:
        return choices
    index = list(choices).index(value)  # type: ignore[arg-type]
    return [*choices[max(index - 1, 0) : index], *choices[index + 1 : index + 2]]


def _value_text(value: object) -> str:
    return f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else str(value)
