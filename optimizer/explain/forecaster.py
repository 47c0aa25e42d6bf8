"""Forecasts of the best load of a configuration within bounds, and the gains by them and by measurements."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import product
from typing import Literal, Protocol

import numpy as np

from objectives.arrays import FloatArray
from objectives.intervals import ConfidenceInterval
from objectives.sla import Constraint, Sla
from optimizer.core.candidate import Candidate
from optimizer.core.trial import Point, Trial
from optimizer.results.recommendation import Outcome

SLA_FACTORS = (0.5, 1.5, 2.0)
GAIN_LEVELS = (0.025, 0.5, 0.975)  # the median of a gain and the ends of its 95 % interval
NEGLIGIBLE_GAIN = 0.02  # smaller gains are within the error of the simulation
MIN_SAMPLES = 20  # samples for an interval in which some load meets the bounds without the change


@dataclass(frozen=True, slots=True)
class CandidateForecast:
    """The forecast of a candidate at a load, usually at its best one within the bounds.

    ``latencies_ms`` are the predicted latencies by metric, the binding one first. ``samples`` [samples] are the best
    throughputs within the bounds by samples of the model's posterior, 0 where no load meets them; None if the model
    has no samples. Those of two forecasts of the same forecaster belong together.
    """

    candidate: Candidate
    concurrency: int
    throughput_infer_per_sec: float
    latencies_ms: Mapping[str, float]
    samples: FloatArray | None = field(default=None, compare=False, repr=False)

    @property
    def latency_ms(self) -> float:
        """The binding latency."""
        return next(iter(self.latencies_ms.values()))


class Forecaster(Protocol):
    """Forecasts candidates by a model that was fitted to a run.

    Attributes:
        model_name: The name of the kind of model, for people.
        latencies: The predicted latency metrics, the binding one first.
        errors: The median relative errors of the fitted model in the throughput and in each latency, before its
            corrections by the measurements.
        measurement_count: The number of measurements to which the model was fitted.
    """

    model_name: str
    latencies: tuple[str, ...]
    errors: tuple[float, ...]
    measurement_count: int

    def best(self, candidates: Sequence[Candidate], sla: Sla, *, time_share: float = 1.0) -> CandidateForecast | None:
        """Return the best of ``candidates`` at its best load within the bounds; None if none meets them.

        ``time_share`` is a factor on the time of computing.
        """

    def lowest_latencies_ms(self, candidates: Sequence[Candidate]) -> Mapping[str, float]:
        """Return the lowest value of each latency of any of ``candidates`` at any load."""


def is_beyond_failures(candidate: Candidate, subject: Candidate, trials: Sequence[Trial]) -> bool:
    """Return whether ``candidate`` has larger batches or more instances than ``subject`` that failed in ``trials``.

    A number counts as failed if a trial with it or a lower one failed, and none with as many was measured. Only
    trials with the same kind of batching count, because the server forms batches with one kind only.
    """
    alike = [trial for trial in trials if trial.candidate.dynamic_batching == candidate.dynamic_batching]

    def has_failed(number: Callable[[Candidate], int]) -> bool:
        served = max((number(trial.candidate) for trial in alike if trial.measurements), default=0)
        failed = [number(trial.candidate) for trial in alike if trial.status == "failed"]
        return any(max(number(subject), served) < count <= number(candidate) for count in failed)

    return has_failed(lambda tried: tried.max_batch_size) or has_failed(lambda tried: tried.instance_count)


def median_errors(predicted: FloatArray, measured: FloatArray) -> tuple[float, ...]:
    """Return the median relative error of each column of logarithms [points, columns]."""
    return tuple(statistics.median(column) for column in np.abs(np.expm1(predicted - measured)).T.tolist())


@dataclass(frozen=True, slots=True)
class Gain:
    """The relative gain in throughput; 0.1 is 10 % more.

    ``estimate`` is the median and ``interval`` the 95 % interval over the samples of the model's posterior. Without
    samples the interval is None.
    """

    estimate: float
    interval: ConfidenceInterval | None = None

    @property
    def bounds(self) -> tuple[float, float]:
        """Return the ends of the interval; both are the estimate without one."""
        return (self.interval.low, self.interval.high) if self.interval else (self.estimate, self.estimate)

    @property
    def is_possible(self) -> bool:
        """Return whether the throughput may rise by more than the error of the simulation."""
        return self.bounds[1] >= NEGLIGIBLE_GAIN


def compute_gain(forecast: CandidateForecast | None, reference: CandidateForecast | None) -> Gain | None:
    """Return the gain of ``forecast`` over ``reference``; None if either forecast is None."""
    if forecast is None or reference is None:
        return None
    if forecast.samples is not None and reference.samples is not None:
        meets = reference.samples > 0
        if meets.sum() >= MIN_SAMPLES:
            ratios = forecast.samples[meets] / reference.samples[meets]
            low, median, high = (np.quantile(ratios, GAIN_LEVELS) - 1).tolist()
            return Gain(median, ConfidenceInterval(low, high))
    return Gain(forecast.throughput_infer_per_sec / reference.throughput_infer_per_sec - 1)


ChangeKind = Literal["more_instances", "fp16", "larger_batches", "faster_network", "no_copying", "parameter"]


@dataclass(frozen=True, slots=True)
class Remedy:
    """A change that could raise the throughput; ``change`` describes it.

    ``forecast`` is None if no load would meet the bounds. ``gain`` is relative to the subject at its best load within
    the same bounds, None if either meets them at no load. ``parameter`` is the name of the changed parameter, empty
    for the other kinds. ``measured`` is the best measurement of the changed configuration within the bounds, and the
    gain is then the measured one. ``refuted_by`` is a measurement at the forecast load that misses the bounds.
    """

    kind: ChangeKind
    change: str
    forecast: CandidateForecast | None
    gain: Gain | None
    parameter: str = ""
    measured: Point | None = None
    refuted_by: Point | None = None

    def with_measurements(self, outcome: Outcome, subject: Point, sla: Sla) -> Remedy:
        """Return this with the measurements of the changed configuration, whose gain replaces the forecast one.

        A change outside the configuration, such as FP16, has none.
        """
        if self.forecast is None or self.forecast.candidate == subject.candidate:
            return self
        measured = outcome.best_within(sla, [self.forecast.candidate])
        gain = (measured and _measured_gain(measured, subject)) or self.gain
        return replace(self, measured=measured, refuted_by=_refutation(self.forecast, outcome, sla), gain=gain)


@dataclass(frozen=True, slots=True)
class OtherSla:
    """The best tried candidate within ``factor`` times the bound on ``metric``.

    ``measured`` is the best measurement of any configuration within the other bounds. ``gain`` is then its gain over
    the recommendation, None without a recommendation. Otherwise it is ``forecast_gain``, which is relative to the
    best tried candidate within the bounds. ``refuted_by`` is a measurement at the forecast load that misses the other
    bounds.
    """

    metric: str
    factor: float
    bound_ms: float
    sla: Sla
    forecast: CandidateForecast | None
    forecast_gain: Gain | None
    gain: Gain | None
    measured: Point | None = None
    refuted_by: Point | None = None

    def with_measurements(self, outcome: Outcome) -> OtherSla:
        """Return this with the measurements within its bounds, whose gain replaces the forecast one."""
        measured, recommended = outcome.best_within(self.sla), outcome.recommended
        expected = None if measured else self.forecast_gain
        gain = _measured_gain(measured, recommended) if measured and recommended else expected
        return replace(self, measured=measured, refuted_by=_refutation(self.forecast, outcome, self.sla), gain=gain)


def forecast_other_slas(
    forecaster: Forecaster, tried: Sequence[Candidate], sla: Sla, best: CandidateForecast | None
) -> tuple[OtherSla, ...]:
    """Return the best of ``tried`` within each latency bound multiplied by each of SLA_FACTORS; other bounds stay.

    The gains are relative to ``best``, the best candidate within ``sla``.
    """
    bounds_ms = {metric: sla.latency_bound_ms(metric) for metric in forecaster.latencies}
    forecasts = []
    for metric, factor in product((m for m, bound in bounds_ms.items() if math.isfinite(bound)), SLA_FACTORS):
        bound_ms = factor * bounds_ms[metric]
        other = Sla((*sla.without(metric), Constraint(metric, bound_ms)))
        forecast = forecaster.best(tried, other)
        expected = compute_gain(forecast, best)
        forecasts.append(OtherSla(metric, factor, bound_ms, other, forecast, expected, expected))
    return tuple(forecasts)


def find_measurement(outcome: Outcome, candidate: Candidate, concurrency: int) -> Point | None:
    """Return the measurement of ``candidate`` with ``concurrency`` requests in flight; None if there is none."""
    measured = (point for point in outcome.points if point.candidate == candidate)
    return next((point for point in measured if point.load.concurrency == concurrency), None)


def _measured_gain(measured: Point, subject: Point) -> Gain | None:
    """Return the gain of a measurement over that of ``subject``; None if that served nothing."""
    if not subject.throughput_infer_per_sec:
        return None
    return Gain(measured.throughput_infer_per_sec / subject.throughput_infer_per_sec - 1)


def _refutation(forecast: CandidateForecast | None, outcome: Outcome, sla: Sla) -> Point | None:
    """Return the measurement at the load of ``forecast`` if it misses ``sla``, else None."""
    point = find_measurement(outcome, forecast.candidate, forecast.concurrency) if forecast else None
    return None if point is None or sla.is_met(point.measurement) else point
