"""The variance of a metric between servers of one configuration, pooled over all configurations of a run.

One configuration sees few servers. So the variance between servers is pooled over all configurations of a run, on the
scale of log latency, with a prior of a few servers. A probe of the machine's speed next to each server is a
covariate, and so is the CPU share that other processes took: the differences that they explain are those of machine
states, not of servers.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np

from objectives.arrays import FloatArray
from objectives.metrics import METRICS, Measurement, Timing
from objectives.pooled_windows import averages_and_requests, served_nothing

ServerWindows: TypeAlias = Sequence[Sequence[Measurement]]  # windows of each fresh server, ordered by time
Windows: TypeAlias = Sequence[FloatArray]  # one array for each server, shape [windows]
PRIOR_STD = 0.05  # standard deviation of log latency between servers of one configuration
PRIOR_DEGREES_OF_FREEDOM = 3.0  # degrees of freedom of the prior
USUAL_RANGE = 0.1  # range of the CPU share of other processes that explains no difference of latencies


@dataclass(frozen=True, slots=True)
class ServerSpread:
    """How the log of a metric differs between servers of one configuration.

    Attributes:
        variance: Its variance between servers under one machine state.
        degrees_of_freedom: Degrees of freedom of the variance.
        slope: By how much it rises with the log of the time of the speed probe.
        slope_variance: Variance of the estimated slope.
        excludes_disturbance: Whether differences that other processes explain were left out of the variance.
    """

    variance: float
    degrees_of_freedom: float
    slope: float = 0.0
    slope_variance: float = 0.0
    excludes_disturbance: bool = False


def server_spreads(groups: Sequence[ServerWindows], metrics: Sequence[str] = ()) -> dict[str, ServerSpread]:
    """Return the variance of the log between servers, of the throughput and of ``metrics``, by metric.

    A model that streams has that of its output throughput too.

    Args:
        groups: The windows of each configuration and load that was confirmed.
        metrics: The latencies that are judged, and the metric that configurations are compared by.
    """
    is_streamed = any(window.output_tokens_per_sec for servers in groups for server in servers for window in server)
    names = dict.fromkeys(("throughput", *metrics, *(["output-throughput"] if is_streamed else [])))
    return {metric: _metric_spread(groups, metric) for metric in names}


def pool_server_spread(
    groups: Sequence[Windows],
    log_probes: Sequence[Sequence[float]] = (),
    other_shares: Sequence[Sequence[float]] = (),
) -> ServerSpread:
    """Return the variance between servers, pooled over the configurations and the prior.

    It is the scale of the posterior under a scaled inverse chi-squared prior (Gelman et al. 2013, "Bayesian Data
    Analysis", section 2.6). With this variance, a mean has Student's t distribution. The part of the differences
    that windows explain is left out (one-way analysis of variance). So is the part that the speed of the machine and
    other processes explain, with one slope for all configurations each (analysis of covariance, Fisher 1932).

    Args:
        groups: The log of a latency quantile in each window of each server, one group for each configuration and
            load.
        log_probes: The log of the time of the speed probe next to each server; empty if it is unknown.
        other_shares: The CPU share of other processes next to each server; empty if it is unknown. It is a covariate
            if it differs by more than USUAL_RANGE and makes the variance smaller.
    """
    by_probe = _fit_spread(groups, log_probes, ())
    shares = [share for group in other_shares for share in group]
    if not shares or max(shares) - min(shares) <= USUAL_RANGE:
        return by_probe
    return min(by_probe, _fit_spread(groups, log_probes, other_shares), key=lambda spread: spread.variance)


def _fit_spread(
    groups: Sequence[Windows], log_probes: Sequence[Sequence[float]], other_shares: Sequence[Sequence[float]]
) -> ServerSpread:
    """Return the variance between servers, adjusted for those of both covariates that differ within the groups.

    It is not adjusted if there are no more degrees of freedom than slopes.
    """
    residuals = _centered([[float(windows.mean()) for windows in group] for group in groups])
    degrees_of_freedom = float(sum(len(group) - 1 for group in groups if len(group)))
    covariates = [_centered(log_probes), _centered(other_shares)]
    used = [index for index, covariate in enumerate(covariates) if covariate @ covariate > 0]
    slopes, slope_factors = np.zeros(2), np.zeros((2, 2))  # slope_factors: covariance of the slopes per variance
    if used and degrees_of_freedom > len(used):
        matrix = np.stack([covariates[index] for index in used], axis=1)
        slopes[used], _, rank, _ = np.linalg.lstsq(matrix, residuals)
        slope_factors[np.ix_(used, used)] = np.linalg.pinv(matrix.T @ matrix)
        residuals = residuals - matrix @ slopes[used]
        degrees_of_freedom -= rank
    excludes_disturbance = bool(slope_factors[1, 1])
    # a burst that covers some windows makes them differ, but the share explains its effect on the server's mean
    within = 0.0 if excludes_disturbance else _mean_variance_of_windows(groups)
    between = max(0.0, float(residuals @ residuals) - degrees_of_freedom * within)
    total = PRIOR_DEGREES_OF_FREEDOM + degrees_of_freedom
    variance = (PRIOR_DEGREES_OF_FREEDOM * PRIOR_STD**2 + between) / total
    slope_variance = (variance + within) * float(slope_factors[0, 0])
    return ServerSpread(variance, total, float(slopes[0]), slope_variance, excludes_disturbance)


def _mean_variance_of_windows(groups: Sequence[Windows]) -> float:
    """Return the variance of a server's mean that the differences between its windows explain."""
    servers = [windows for group in groups for windows in group if len(windows) > 1]
    variances = [float(windows.var(ddof=1)) / len(windows) for windows in servers]
    return float(np.mean(variances)) if variances else 0.0


def _metric_spread(groups: Sequence[ServerWindows], metric: str) -> ServerSpread:
    """Return the variance between servers of the log of ``metric``.

    Ratios of throughputs are at the same speed of the machine, but not at the same share of other processes. So
    differences that other processes explain are left out for latencies only.
    """
    groups = [[server for server in servers if has_log(server, metric)] for servers in groups]
    logs = [metric_logs(servers, metric) for servers in groups]
    probes = [[log_probe(server) for server in servers] for servers in groups]
    shares = [[_other_share(server) for server in servers] for servers in groups] if METRICS[metric].timing else []
    return pool_server_spread(logs, _if_complete(probes), _if_complete(shares))


def _if_complete(covariate: Sequence[Sequence[float]]) -> Sequence[Sequence[float]]:
    """Return the values of ``covariate`` for the servers of each group, or nothing if one is unknown (nan)."""
    return covariate if all(math.isfinite(value) for group in covariate for value in group) else ()


def _centered(groups: Sequence[Sequence[float] | FloatArray]) -> FloatArray:
    """Return the values of all groups, each minus the mean of its group."""
    return np.concatenate([np.array(group) - np.mean(group) for group in groups if len(group)] or [np.zeros(0)])


def log_probe(windows: Sequence[Measurement]) -> float:
    """Return the log of the time in ms of the speed probe next to a server; nan if it is unknown."""
    known = [window.speed_probe_ms for window in windows if window.speed_probe_ms]
    return math.log(statistics.fmean(known)) if known else math.nan


def _other_share(windows: Sequence[Measurement]) -> float:
    """Return the CPU share of other processes next to a server; nan if it is unknown."""
    known = [window.other_cpu_share for window in windows if window.other_cpu_share is not None]
    return statistics.fmean(known) if known else math.nan


def metric_logs(servers: ServerWindows, metric: str) -> list[FloatArray]:
    """Return the log of a metric in each window of each server, without windows in which it is unknown.

    Throughputs and averages of times are linearized, see ``_throughput_logs`` and ``_average_logs``.
    """
    timing = METRICS[metric].timing
    if timing is not None and METRICS[metric].quantile is None:
        return _average_logs(servers, timing)
    if METRICS[metric].better == "higher":
        return _throughput_logs(servers, metric)
    values = [[METRICS[metric].value(window) for window in server] for server in servers]
    known = [[value for value in server if value is not None and 0 < value < math.inf] for server in values]
    return [np.log(server) for server in known if server]


def _throughput_logs(servers: ServerWindows, metric: str) -> list[FloatArray]:
    """Return the log of a throughput in each window of each server, linearized at the mean of all servers.

    The mean of logs would be that of a geometric mean, which is too low for windows that differ, and is unknown for a
    window that served nothing. Therefore the log of the throughput ``a`` is log m + (a - m) / m, where ``m`` is the
    mean over the servers of the mean over their windows. A server that served nothing at all has -inf.
    """
    throughputs = []
    for windows in servers:
        values = [0.0 if served_nothing(window) else METRICS[metric].value(window) for window in windows]
        if known := [value for value in values if value is not None and 0 <= value < math.inf]:
            throughputs.append(known)
    means = [statistics.fmean(server) for server in throughputs if any(server)]
    mean = statistics.fmean(means) if means else math.nan
    return [
        math.log(mean) + np.array(server) / mean - 1 if any(server) else np.array([-math.inf])
        for server in throughputs
    ]


def _average_logs(servers: ServerWindows, timing: Timing) -> list[FloatArray]:
    """Return the log of the average of ``timing`` in each window of each server, linearized at the mean of all.

    The mean of logs would be that of a geometric mean, which is too low for windows that differ. Therefore the logs
    are linear in the window's average ``a`` with ``n`` requests: log m + (s - m) / m + n (a - s) / (N m). Here ``s``
    is the mean over the server's requests, ``m`` the mean of ``s`` over the servers, and ``N`` the mean of ``n`` over
    the server's windows. Their mean over windows and servers is log m. Their variances are those of log m by the
    delta method. The mean of a server is a ratio estimator (Cochran 1977, "Sampling Techniques", chapter 6).
    """
    averages = [averages_and_requests(windows, timing) for windows in servers]
    averages = [(averages_ms, requests) for averages_ms, requests in averages if requests.any()]
    means = [float(np.average(averages_ms, weights=requests)) for averages_ms, requests in averages]
    mean = statistics.fmean(means) if means else 0.0
    if mean <= 0:
        return [np.array([-math.inf]) for _ in averages]
    return [
        math.log(mean) + (server_mean - mean + requests / requests.mean() * (averages_ms - server_mean)) / mean
        for server_mean, (averages_ms, requests) in zip(means, averages, strict=True)
    ]


def has_log(windows: Sequence[Measurement], metric: str) -> bool:
    """Return whether the metric of a server has a log: it is known, and not 0 in all windows."""
    return any(np.isfinite(logs).all() for logs in metric_logs([windows], metric))
