"""Forecasts of changes to a configuration by the surrogate of the search, for models that stream or keep state."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TypeVar

import numpy as np

from objectives.arrays import FloatArray
from objectives.sla import Sla
from optimizer.config.batching import format_preferred_sizes, parse_preferred_sizes, resolve_preferred_sizes
from optimizer.config.search_space import OFF, Problem, SearchSpace
from optimizer.core.trial import Candidate, Trial
from optimizer.explain.forecaster import Forecast, Remedy, compute_gain, median_errors
from optimizer.results.report.parameter_effects import label
from optimizer.search.candidate_selector import fit_surrogate
from optimizer.simulator.predicted_metrics import log_measurements

T = TypeVar("T")
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
        self._loads = np.unique(np.geomspace(1, highest, FINE_LOADS).round())
        self._space = space
        self._places = {candidate: i for i, candidate in enumerate(dict.fromkeys(map(space.canonical, candidates)))}
        cells = [(candidate, load) for candidate in self._places for load in loads]
        samples = surrogate.samples(cells, SAMPLES_OF_EACH)
        shape = len(samples), len(self._places), len(loads), 1 + len(self.latencies)
        self._samples = _interpolated(samples.reshape(shape), np.log(loads), np.log(self._loads))

    def best(self, candidates: Sequence[Candidate], sla: Sla, *, time_share: float = 1.0) -> Forecast | None:
        """Return the best of ``candidates`` at its best load within the bounds; None if none meets them.

        A server that takes ``time_share`` of the time at every load has the same throughput and latencies in units
        of this time.
        """
        bounds = np.log([sla.latency_bound_ms(latency) / 1e3 / time_share for latency in self.latencies])
        forecasts = [forecast for candidate in candidates if (forecast := self._best(candidate, bounds, time_share))]
        return max(forecasts, key=lambda forecast: forecast.throughput_infer_per_sec, default=None)

    def at(self, candidate: Candidate, concurrency: int) -> Forecast:
        """Return the forecast of ``candidate`` at a load, without samples."""
        mean = self._samples[:, self._places[self._space.canonical(candidate)]].mean(axis=0)
        return self._forecast(candidate, mean[int(np.argmin(np.abs(self._loads - concurrency)))], concurrency)

    def lowest_latencies_ms(self, candidates: Sequence[Candidate]) -> Mapping[str, float]:
        """Return the lowest value of each latency of any of ``candidates`` at any load."""
        places = [self._places[self._space.canonical(candidate)] for candidate in candidates]
        lowest = self._samples[:, places].mean(axis=0)[..., 1:].min(axis=(0, 1))
        return dict(zip(self.latencies, (1e3 * np.exp(lowest)).tolist(), strict=True))

    def _best(self, candidate: Candidate, bounds: FloatArray, time_share: float) -> Forecast | None:
        samples = self._samples[:, self._places[self._space.canonical(candidate)]]  # [samples, loads, 1 + latencies]
        mean = samples.mean(axis=0)
        within = np.flatnonzero((mean[:, 1:] <= bounds).all(axis=1))
        if not len(within):
            return None
        place = within[np.argmax(mean[within, 0])]
        sampled = np.where((samples[..., 1:] <= bounds).all(axis=2), np.exp(samples[..., 0]), 0.0).max(axis=1)
        scaled = mean[place] + math.log(time_share) * np.array([-1.0, *(1.0 for _ in self.latencies)])
        forecast = self._forecast(candidate, scaled, int(self._loads[place]))
        return replace(forecast, samples=sampled / time_share)

    def _forecast(self, candidate: Candidate, logs: FloatArray, concurrency: int) -> Forecast:
        throughput, *latencies_s = np.exp(logs).tolist()
        return Forecast(
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
    changes: Mapping[Candidate, tuple[str, str]],
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
        assumed = f"assuming that everything takes {fp16_factor:g} of its time"
        change = assumed if on_gpu else f"{assumed} (CPUs often gain nothing)"
        faster = forecaster.best([subject], sla, time_share=fp16_factor)
        remedies.append(Remedy("fp16", change, faster, compute_gain(faster, unchanged)))
    for candidate, (parameter, change) in changes.items():
        forecast = forecaster.best([candidate], sla)
        remedies.append(Remedy("parameter", change, forecast, compute_gain(forecast, unchanged), parameter))
    return remedies


def single_changes(space: SearchSpace, subject: Candidate) -> dict[Candidate, tuple[str, str]]:
    """Return the candidates that differ from ``subject`` in one parameter, with its name and the change in words.

    Each parameter takes its next lower and its next higher choice. Beyond the choices, ``max_batch_size`` is doubled
    and one more instance is added.
    """
    changes: dict[Candidate, tuple[str, str]] = {}
    before = space.canonical(subject)
    for parameter, value, new_value, candidate in _variations(space, before):
        is_outside = new_value not in space.parameters()[parameter]
        change = (
            f"{_text(new_value)} instead of {_text(value)}{', outside of the search space' if is_outside else ''}"
        )
        if (changed := space.canonical(candidate)) != before:
            changes.setdefault(changed, (label(parameter), change))
    return changes


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
    further = min(above, default=beyond)
    return [*([max(below)] if below else []), *([further] if further > value else [])]


def _neighbors(choices: Sequence[T], value: object) -> Sequence[T]:
    """Return the choices before and after ``value``; all of them if it is none of them."""
    if value not in choices:
        return choices
    place = list(choices).index(value)  # type: ignore[arg-type]
    return [*choices[max(place - 1, 0) : place], *choices[place + 1 : place + 2]]


def _text(value: object) -> str:
    return f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else str(value)
