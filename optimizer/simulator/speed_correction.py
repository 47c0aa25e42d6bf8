"""The correction of the search's measurements for the speed that the machine had, and for disturbances.

The speed of a machine changes during a search, and configurations are compared across minutes. The speed probe, taken
while the server is idle, is a covariate (analysis of covariance, Fisher 1932): throughput and latency are corrected
to the median probe of the run. Stored measurements stay as they were measured.
"""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from objectives import batch_stats, latency_sketch
from objectives.metrics import RATES, STATISTICS, TIMINGS, Measurement
from optimizer.config.problem import Problem
from optimizer.core.candidate import Candidate
from optimizer.core.trial import LoadPoint, Point, Trial, latest_points
from optimizer.machine.cpu_usage import DISTURBANCE_LIMIT

# Prior of the slope: by how much the log of latency rises with the log of the probe. The probe computes and copies on
# all CPUs of the server, so 1 is expected of a server on CPUs, and 0 of one on GPUs. The deviation leaves both
# possible: a model may wait for a timer or for memory.
CPU_SLOPE, GPU_SLOPE, SLOPE_STD = 1.0, 0.0, 0.5
MAX_SLOPE = 1.5
MIN_SLOPE_STD = 0.25  # the reliability of the probe is only an estimate
PROBE_NOISE = 0.03  # smallest standard deviation of the log of a probe at constant speed
DEPLOYMENT_NOISE = 0.06  # standard deviation of the log throughput between deployments at constant speed
DISTURBANCE_NOISE = 0.2  # standard deviation of the log throughput for each CPU that others take, of those there are
TIMES = (
    *(timing.field_of(statistic) for timing in TIMINGS for statistic in STATISTICS),
    *("client_send_ms", "network_ms", "queue_ms", "compute_input_ms", "compute_infer_ms", "compute_output_ms"),
    "client_recv_ms",
)


def scaled_rates(measurement: Measurement, factor: float) -> dict[str, Any]:
    """Return the known throughputs of ``measurement`` times ``factor``, by field."""
    return {name: value * factor for name in RATES if (value := getattr(measurement, name)) is not None}


def scaled_sketches(measurement: Measurement, factor: float) -> dict[str, str]:
    """Return the sketches of ``measurement`` with all times multiplied by ``factor``, by field."""
    sketches = {timing.sketch_field: timing.sketch(measurement) for timing in TIMINGS}
    return {name: latency_sketch.scale(sketch, factor) for name, sketch in sketches.items() if sketch}


def at_other_speed(measurement: Measurement, factor: float) -> Measurement:
    """Return the measurement as on a machine that is faster by ``factor``: its throughput, times and batch times."""
    if factor == 1.0:
        return measurement
    values: dict[str, Any] = {
        name: value / factor for name in TIMES if (value := getattr(measurement, name)) is not None
    }
    values |= scaled_rates(measurement, factor)
    values |= scaled_sketches(measurement, 1 / factor)
    counted = batch_stats.from_text(measurement.batch_stats)
    values["batch_stats"] = batch_stats.to_text((b, n, round(ns / factor)) for b, n, ns in counted)
    return replace(measurement, **values)


def disturbance_noise(measurement: Measurement) -> float:
    """Return the standard deviation of the log throughput that other processes add; 0 if they took few CPUs."""
    share = measurement.other_cpu_share
    return DISTURBANCE_NOISE * share if share is not None and share > DISTURBANCE_LIMIT else 0.0


def is_comparable(measurement: Measurement) -> bool:
    """Return whether the search may recommend the measurement: it is stable, or a disturbance explains why not."""
    if measurement.stable:
        return True
    is_measured = measurement.has_values and not measurement.overloaded
    return is_measured and disturbance_noise(measurement) > 0


@dataclass(frozen=True, slots=True)
class RankedPoint:
    """A point and the ``measurement`` that it is ranked by."""

    measurement: Measurement
    point: Point


@dataclass(frozen=True, slots=True)
class SpeedCorrection:
    """Corrects measurements to the speed at which the probe takes ``reference_ms``.

    Attributes:
        reference_ms: The median probe of the run; 0 corrects nothing.
        slope: By how much the log of latency rises, and the log of throughput falls, with the log of the probe.
        error: The standard deviation of ``slope``.
    """

    reference_ms: float = 0.0
    slope: float = 0.0
    error: float = 0.0

    def log_slowness(self, measurement: Measurement) -> float:
        """Return the log of the probe relative to the reference; 0 if it is unknown."""
        if not self.reference_ms or not measurement.speed_probe_ms:
            return 0.0
        return math.log(measurement.speed_probe_ms / self.reference_ms)

    def error_of(self, measurement: Measurement) -> float:
        """Return the error of the correction in log throughput, which has the sign of ``log_slowness``."""
        return self.error * self.log_slowness(measurement)

    def correct(self, measurement: Measurement) -> Measurement:
        """Return the measurement as at the reference speed: its throughput, times and times by batch size."""
        return at_other_speed(measurement, math.exp(self.slope * self.log_slowness(measurement)))

    def correct_points(self, points: Iterable[Point]) -> list[Point]:
        """Return the points as at the reference speed."""
        return [replace(point, measurement=self.correct(point.measurement)) for point in points]

    def best_point(self, points: Iterable[Point], problem: Problem) -> Point | None:
        """Return the point, as measured, that ``Problem.best_point`` takes among the corrected ones, if any.

        A disturbed measurement is ranked by a throughput that is one standard error lower, so that it is not chosen
        because its noise is large.
        """
        chosen = problem.best_point([RankedPoint(self._ranked(point.measurement), point) for point in points])
        return chosen.point if chosen else None

    def best_that_met(self, points: Iterable[Point], problem: Problem) -> Point | None:
        """Return the best of ``points`` that met the SLA as measured; None if none did.

        It also meets the SLA at the reference speed, unless no point does so.
        """
        met = [point for point in points if problem.sla.is_met(point.measurement)]
        return self.best_point(met, problem) or NO_CORRECTION.best_point(met, problem)

    def _ranked(self, measurement: Measurement) -> Measurement:
        corrected, noise = self.correct(measurement), disturbance_noise(measurement)
        if not noise or not is_comparable(corrected) or corrected.throughput_infer_per_sec is None:
            return corrected
        return replace(corrected, **scaled_rates(corrected, math.exp(-noise)), stable=True)


NO_CORRECTION = SpeedCorrection()


def fit_speed_correction(trials: Sequence[Trial], problem: Problem) -> SpeedCorrection:
    """Return the correction for the search's measurements of ``trials``.

    The slope is the posterior mean of a regression within the groups of points that measured the same candidate at
    the same load. A regression on a probe with noise has a smaller slope, by the reliability ratio (Fuller 1987,
    "Measurement Error Models", section 1.2). This holds for the prior too. Request rates are not corrected: their
    throughput does not depend on the speed, nor is their latency proportional to it.
    """
    points = latest_points(trials)
    probes = {point.trial: point.measurement.speed_probe_ms for point in points if point.measurement.speed_probe_ms}
    if len(probes) < 2 or problem.open_loop:
        return NO_CORRECTION
    reference_ms = statistics.median(probes.values())
    reliability = probe_reliability([probes[number] for number in sorted(probes)])
    precision = 1 / max(reliability * SLOPE_STD, MIN_SLOPE_STD) ** 2
    weighted = precision * reliability * (GPU_SLOPE if problem.cpu_count is None else CPU_SLOPE)
    for group in _repeated(points, problem):
        probe, slowness = _deviations(group, reference_ms)
        precision += sum(x * x for x in probe) / DEPLOYMENT_NOISE**2
        weighted += sum(x * y for x, y in zip(probe, slowness, strict=True)) / DEPLOYMENT_NOISE**2
    slope = min(max(weighted / precision, 0.0), MAX_SLOPE)
    return SpeedCorrection(reference_ms, slope, 1 / math.sqrt(precision))


def probe_reliability(probes_ms: Sequence[float]) -> float:
    """Return the share of the variance of the log probe that comes from the speed of the machine, 0 to 1.

    ``probes_ms`` are in the order of the deployments. A speed that lasts for some deployments changes successive
    probes by little, while a disturbance of less than a second changes each of them. So the variance of the noise is
    half the mean square successive difference (von Neumann et al. 1941, "The mean square successive difference").
    """
    logs = [math.log(probe) for probe in probes_ms]
    if len(logs) < 2:
        return 0.0
    successive = statistics.fmean((later - earlier) ** 2 for earlier, later in itertools.pairwise(logs)) / 2
    variance = statistics.variance(logs)
    return max(0.0, 1 - max(successive, PROBE_NOISE**2) / variance) if variance > 0 else 0.0


def _repeated(points: Sequence[Point], problem: Problem) -> list[list[Point]]:
    """Return the points of each candidate at each load that several deployments measured."""
    groups: dict[tuple[Candidate, LoadPoint], list[Point]] = {}
    for point in points:
        if point.throughput_infer_per_sec and point.measurement.speed_probe_ms and is_comparable(point.measurement):
            groups.setdefault((problem.space.canonical(point.candidate), point.load), []).append(point)
    return [group for group in groups.values() if len(group) > 1]


def _deviations(group: Sequence[Point], reference_ms: float) -> tuple[list[float], list[float]]:
    """Return the log of the probe and minus the log of the throughput of each point, without their means."""
    probe = [math.log((point.measurement.speed_probe_ms or reference_ms) / reference_ms) for point in group]
    slowness = [-math.log(point.throughput_infer_per_sec) for point in group]
    middle, mean = statistics.fmean(probe), statistics.fmean(slowness)
    return [x - middle for x in probe], [y - mean for y in slowness]
