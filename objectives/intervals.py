"""Confidence intervals of metrics on a fresh server, from the windows on the servers that were measured."""

from __future__ import annotations

import math
import statistics
from dataclasses import dataclass

import numpy as np

from objectives.confidence import difference_bounds, fresh_server_range, mean_bounds
from objectives.metrics import METRICS
from objectives.pooled_windows import pooled_quantile_ms
from objectives.server_spread import ServerSpread, ServerWindows, has_log, log_probe, metric_logs

MAX_LOG = 700.0  # the exponential of more is not a floating-point number


@dataclass(frozen=True, slots=True)
class ConfidenceInterval:
    """A lower and an upper bound of a metric, each at the confidence; infinite or nan if they are unknown."""

    low: float
    high: float

    @property
    def is_unknown(self) -> bool:
        """Whether the measurements do not bound the metric."""
        return math.isnan(self.low) or math.isnan(self.high) or math.isinf(self.low)


UNBOUNDED = ConfidenceInterval(-math.inf, math.inf)


@dataclass(frozen=True, slots=True)
class GainRatio:
    """How many times better a metric is on fresh servers of one configuration than of another.

    It is the value of the first one over that of the other, or its inverse if lower values of the metric are better.
    """

    estimate: float
    interval: ConfidenceInterval

    @property
    def bounds(self) -> tuple[float, float]:
        """The ends of the interval."""
        return self.interval.low, self.interval.high

    @property
    def is_measurable(self) -> bool:
        """Whether the values differ by more than chance: the interval does not contain 1."""
        return not self.interval.low <= 1 <= self.interval.high


@dataclass(frozen=True, slots=True)
class ObjectiveGain:
    """The gain in an objective on fresh servers of one configuration over another.

    Attributes:
        metric: Name of the objective.
        value: The value of the first configuration, in the unit of the metric.
        compared_value: That of the other one.
        ratio: How many times better it is; None if ratios of the metric have no meaning, see ``Metric.has_ratio``.
    """

    metric: str
    value: float
    compared_value: float
    ratio: GainRatio | None

    def __post_init__(self) -> None:
        """Raise ValueError for impossible values: a batch.json may come from anywhere."""
        if self.metric not in METRICS or (self.ratio and not min(self.ratio.estimate, *self.ratio.bounds) > 0):
            raise ValueError(f"{self.metric} {self.ratio} is not a gain")

    @property
    def differs_from_values(self) -> bool:
        """Whether the ratio of the two values is outside of the interval, see ``gain_ratio`` for the reasons."""
        if self.ratio is None or not self.value or not self.compared_value:
            return False
        values = self.value, self.compared_value
        better, other = values if METRICS[self.metric].better == "higher" else values[::-1]
        return not self.ratio.interval.low <= better / other <= self.ratio.interval.high


def throughput_interval(
    servers: ServerWindows, spread: ServerSpread, confidence: float, metric: str = "throughput"
) -> ConfidenceInterval:
    """Return the confidence interval of the throughput ``metric`` on a fresh server in its unit per second.

    It is Student's t interval of the log, with the variance between servers that all configurations have together. If
    a server served nothing, the lower end is 0, and the upper end is that of the other servers.
    """
    logs = metric_logs(servers, metric)
    if not logs:
        return UNBOUNDED
    served = [windows for windows in logs if np.isfinite(windows).all()]
    if not served:
        return ConfidenceInterval(0.0, 0.0)
    low, high = mean_bounds(served, spread, 1 - confidence)
    return ConfidenceInterval(math.exp(low) if len(served) == len(logs) else 0.0, math.exp(high))


def gain_ratio(
    ours: ServerWindows, theirs: ServerWindows, metric: str, spread: ServerSpread, confidence: float
) -> GainRatio | None:
    """Return how many times better ``metric`` is at ours than at theirs on fresh servers.

    It is None if one of them is unknown, or 0 on a server, such as the throughput of one that served nothing. It is
    the ratio at the same speed of the machine, see ``confidence.difference_bounds``. The estimate is the middle of
    the interval on the log scale. Of a percentile it is the ratio of the geometric means of the windows' percentiles:
    that of all requests together depends on how many windows were slow by chance.

    Args:
        ours: The windows of each server of one configuration at one load.
        theirs: The same of the other configuration.
        metric: Name of the metric.
        spread: The variance of its log between servers, as ``server_spreads`` returns it.
        confidence: One-sided confidence of each end of the interval.
    """
    ours, theirs = ([server for server in servers if metric_logs([server], metric)] for servers in (ours, theirs))
    if not ours or not theirs or not all(has_log(server, metric) for server in (*ours, *theirs)):
        return None
    probe_difference = statistics.fmean(map(log_probe, ours)) - statistics.fmean(map(log_probe, theirs))
    if not math.isfinite(probe_difference):
        probe_difference = 0.0
    our_logs, their_logs = metric_logs(ours, metric), metric_logs(theirs, metric)
    low, high = difference_bounds(our_logs, their_logs, probe_difference, spread, 1 - confidence)
    if METRICS[metric].better == "lower":
        low, high = -high, -low
    low, high = (min(max(bound, -MAX_LOG), MAX_LOG) for bound in (low, high))
    return GainRatio(math.exp((low + high) / 2), ConfidenceInterval(math.exp(low), math.exp(high)))


def latency_interval_ms(
    servers: ServerWindows,
    metric: str,
    effective_requests: float,
    spread: ServerSpread,
    confidence: float,
) -> ConfidenceInterval:
    """Return the confidence interval of a latency metric on a fresh server in ms.

    Quantiles are bounded by order statistics of all requests, the average by Student's t. If latencies vary less
    within servers than between them, the effective requests are too few for an order statistic. The quantile of all
    requests is then about that of a slow server, so both ends are those of one fresh server (``fresh_server_range``).
    """
    level, timing = METRICS[metric].quantile, METRICS[metric].timing
    logs = metric_logs(servers, metric)
    if level is None or timing is None:
        if not logs:
            return UNBOUNDED
        low, high = mean_bounds(logs, spread, 1 - confidence)
        return ConfidenceInterval(math.exp(low), math.exp(high))
    if effective_requests < 1:
        return UNBOUNDED
    windows = [window for server in servers for window in server]
    low, high = order_statistic_levels(effective_requests, level, confidence)
    if logs and high > 1:
        quantile_ms = pooled_quantile_ms(windows, level, timing)
        factor = math.exp(fresh_server_range(logs, spread, 1 - confidence))
        return ConfidenceInterval(quantile_ms / factor, quantile_ms * factor)
    return ConfidenceInterval(pooled_quantile_ms(windows, low, timing), pooled_quantile_ms(windows, high, timing))


def order_statistic_levels(effective: float, quantile: float, confidence: float) -> tuple[float, float]:
    """Return the levels of the sample quantiles that bound the true quantile from below and above.

    The bounds are order statistics (Conover 1999, "Practical Nonparametric Statistics", section 3.2). For example,
    the p99 of 161 or more independent requests is an upper bound of the true p95 at 99 % confidence.

    Args:
        effective: Effective requests.
        quantile: Level of the true quantile.
        confidence: One-sided confidence of each bound.

    Returns:
        The lower level (0 if no request is a bound) and the upper level (inf if no request is a bound).
    """
    from scipy import special

    above = np.arange(math.ceil(effective))  # candidate numbers of requests above the sample quantile
    # P(at most `above` requests exceed the true quantile), the binomial distribution
    chance = special.betainc(effective - above, above + 1.0, quantile)
    fewest, most = above[chance >= confidence], above[chance <= 1 - confidence]
    low = 1 - fewest[0] / effective if fewest.size else 0.0
    return float(low), float(1 - most[-1] / effective) if most.size else math.inf
