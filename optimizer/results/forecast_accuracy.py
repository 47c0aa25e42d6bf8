"""The forecasts that the search made of its measurements, compared with these."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from objectives.metrics import METRICS, Metric
from optimizer.core.trial import Point, Trial, all_points
from optimizer.results import formatting


@dataclass(frozen=True, slots=True)
class CheckedForecast:
    """A measured value of ``metric``, and the median and the 95 % interval that were forecast for it."""

    point: Point
    metric: Metric
    measured: float
    expected: float
    low: float
    high: float

    @property
    def is_inside(self) -> bool:
        """Whether the measured value is within the interval."""
        return self.low <= self.measured <= self.high

    @property
    def error(self) -> float:
        """The relative error of the forecast."""
        return abs(self.expected / self.measured - 1)


@dataclass(frozen=True, slots=True)
class ForecastChecks:
    """The checked forecasts of throughput and of latency, in the order of measuring. Both are of the same points."""

    throughput: tuple[CheckedForecast, ...]
    latency: tuple[CheckedForecast, ...]

    def __str__(self) -> str:
        """Return a sentence with the number of values within the interval; empty without a forecast."""
        if not self.throughput:
            return ""
        measurements = formatting.count(len(self.throughput), "measurement")
        return (
            f"Of {measurements} that the search forecast, {count_inside(self.throughput):,} of the throughputs and "
            f"{count_inside(self.latency):,} of the latencies were within the 95 % interval; the median errors were "
            f"{formatting.percent(median_error(self.throughput))} and "
            f"{formatting.percent(median_error(self.latency))}."
        )


def count_inside(checks: Sequence[CheckedForecast]) -> int:
    """Return the number of measured values within their intervals."""
    return sum(check.is_inside for check in checks)


def median_error(checks: Sequence[CheckedForecast]) -> float:
    """Return the median relative error of the forecasts."""
    return statistics.median(check.error for check in checks)


def check_forecasts(trials: Sequence[Trial]) -> ForecastChecks:
    """Return the forecasts of all stable measurements of the search that have one."""
    throughputs, latencies = list[CheckedForecast](), list[CheckedForecast]()
    for point in all_points(trials):
        measurement, forecast = point.measurement, point.measurement.forecast
        if forecast is None or not measurement.stable:
            continue
        throughput, latency = METRICS["throughput"], METRICS[forecast.latency]
        served, took_ms = throughput.value(measurement), latency.value(measurement)
        if not served or not took_ms:
            continue
        ends = forecast.throughput_infer_per_sec_low, forecast.throughput_infer_per_sec_high
        throughputs.append(CheckedForecast(point, throughput, served, forecast.throughput_infer_per_sec, *ends))
        ends = forecast.latency_ms_low, forecast.latency_ms_high
        latencies.append(CheckedForecast(point, latency, took_ms, forecast.latency_ms, *ends))
    return ForecastChecks(tuple(throughputs), tuple(latencies))
