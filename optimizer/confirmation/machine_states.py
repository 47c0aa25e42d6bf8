"""The states of the machine during a run: the CPU share of other programs, and its effect on latency."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence

import numpy as np

from objectives.arrays import FloatArray
from objectives.metrics import METRICS, Measurement
from objectives.verdict import MAX_EXCLUDED_SHARE
from optimizer.config.problem import Problem
from optimizer.confirmation.windows import confirmed_loads, counted_server_windows
from optimizer.core.trial import LoadPoint, Trial
from optimizer.machine.cpu_usage import lost_cpu_to_others

USUAL_DISTURBANCE = 0.10  # CPU share of other processes beyond the usual one that disturbs no measurement
MAX_OTHER_SHARE = 0.9  # CPU share of other processes; larger ones count as this
# How much the log of a latency percentile rises, and the log of throughput falls, with the fall of the log of the CPU
# share that is left, where the fall is a disturbance. benchmarks/disturbed_runs.md has the slopes of real runs.
LATENCY_SLOPE, THROUGHPUT_SLOPE = 1.5, 1.2
# Possible factors on both slopes, which are equally likely at first. 0 is that of programs that take only the CPU
# time that the server leaves idle.
SLOPE_FACTORS = (0.0, 0.25, 0.5, 0.75, 1.0, 1.25, 1.5)
# The prior of the slope of a run counts as much as windows with this sum of squared falls
PRIOR_FALL_SQUARES = 0.25
MIN_LATENCY_RISE = 0.005  # a smaller rise is far below the differences between equal servers, and counts as 0
TAIL = 0.1  # rise of the log of latency at which the share of slower requests falls by a factor of e


def was_search_disturbed(trials: Sequence[Trial]) -> bool:
    """Return whether others disturbed more than MAX_EXCLUDED_SHARE of the search's measurements."""
    measured = search_measurements(trials)
    return sum(map(lost_cpu_to_others, measured)) > MAX_EXCLUDED_SHARE * len(measured)


def disturbance_limit(trials: Sequence[Trial], node: str = "") -> float:
    """Return the CPU share of other processes above which a window on a fresh server of ``node`` does not count.

    It follows from ``usual_share`` of the node: a machine that is always shared is measured as it is. ``node`` is
    empty outside of a cluster.
    """
    return USUAL_DISTURBANCE + usual_share(trials, node)


def usual_share(trials: Sequence[Trial], node: str | None = None) -> float:
    """Return the median of the known CPU shares of other processes during the search, 0 to 1.

    Measurements after the begin of the first window on a fresh server do not count, so a search that is continued
    later does not change the share. Nor do those of other workers of a shared study, which have no time: they are
    those of other machines.

    On a cluster it is the share of ``node``. It is that of all nodes if ``node`` is None, or if the search measured
    nothing there.
    """
    begins = [window.measurement.begin_unix_seconds for trial in trials for window in trial.confirmations]
    first = min((begin for begin in begins if begin is not None), default=math.inf)
    own = [measurement for measurement in search_measurements(trials) if measurement.measure_seconds is not None]
    known = [
        (measurement.node, measurement.other_cpu_share)
        for measurement in own
        if measurement.other_cpu_share is not None and (measurement.end_unix_seconds or 0.0) <= first
    ]
    of_node = [share for measured_on, share in known if measured_on == node]
    shares = of_node or [share for _, share in known]
    return statistics.median(shares) if shares else 0.0


def log_share_lost(measurements: Sequence[Measurement], usual_share: FloatArray | float) -> FloatArray:
    """Return the fall of the log of the CPU share that other processes left, from the usual one; 0 if unknown.

    ``usual_share`` is the usual CPU share of other processes, one for all measurements or one for each.
    """
    usual = np.minimum(np.broadcast_to(usual_share, len(measurements)), MAX_OTHER_SHARE)
    known = (measurement.other_cpu_share for measurement in measurements)
    shares = [expected if share is None else share for share, expected in zip(known, usual, strict=True)]
    return np.asarray(np.log1p(-usual) - np.log1p(-np.minimum(shares, MAX_OTHER_SHARE)))


def slowdown_over_states(
    falls: FloatArray, latency_slope: float, throughput_slope: float, weights: FloatArray | float = 1.0
) -> float:
    """Return by how much the log of a latency percentile over all states is higher than in the usual state.

    Most slow requests are those of the slowest states. The share of requests that are slower than t is taken to fall
    as t ** (-1 / TAIL) in each state. Then the percentile over all requests is higher by
    TAIL * log(mean(exp(slowdown / TAIL))). Each state has the weight of its requests in this mean.

    Args:
        falls: The fall of the log of the CPU share that other processes left, in each state; at least one.
        latency_slope: Rise of the log of a latency percentile over this fall.
        throughput_slope: Fall of the log of throughput over this fall.
        weights: The time of each state, in any unit; the same one for all by default.
    """
    served = np.exp(-throughput_slope * falls) * weights
    exponents = latency_slope * falls / TAIL
    highest = float(exponents.max())  # it is subtracted, because the powers would exceed the range of floats
    return TAIL * (highest + math.log(np.average(np.exp(exponents - highest), weights=served)))


def usual_latency_rise(trials: Sequence[Trial], trial: Trial, load: LoadPoint, problem: Problem) -> float:
    """Return by how much latency is usually higher than in the windows of ``trial`` at ``load`` that count.

    It is a difference of logs, at least 0, which other programs explain: they were usually more active in this run
    than in these windows. It is 0 if they disturbed at most MAX_EXCLUDED_SHARE of the time of all measurements. A
    measurement is disturbed if their CPU share is above ``disturbance_limit`` of its node. In the other ones they
    change nothing.

    The measurements that count are those of the search and on fresh servers. On a cluster they are those of the nodes
    of these windows, and in a shared study those of this worker. A separate test has no usual states: its
    ``latency_slope`` is None.

    The result is 0 for a server on GPUs, without a bound on a latency, where the CPU shares of other programs are
    unknown, and below MIN_LATENCY_RISE.

    Args:
        trials: The trials whose measurements count. For a verdict they end with its test (``until_end_of_test``), so
            that later measurements do not change it.
        trial: One of them, with confirmations at ``load``.
        load: The load that is judged, or from which other loads are predicted.
        problem: The search problem.
    """
    counted = [window for server in counted_server_windows(trial, load) for window in server]
    prior_slope = trial.windows_at(load)[0].latency_slope
    if problem.cpu_count is None or not problem.sla.latencies or not counted or prior_slope is None:
        return 0.0
    nodes = {window.node for window in counted}
    fresh = [window.measurement for other in trials for window in other.confirmations if not window.is_lost]
    known = [measurement for measurement in (*search_measurements(trials), *fresh) if measurement.measure_seconds]
    measured = [measurement for measurement in known if measurement.node in nodes]
    falls = _disturbed_falls(measured, trials)
    seconds = np.array([measurement.measure_seconds or 0.0 for measurement in measured])
    if seconds @ (falls > 0) <= MAX_EXCLUDED_SHARE * seconds.sum():
        return 0.0
    slope = _latency_slope(trials, problem, prior_slope)
    # a request rate is served in each state
    slopes = slope, 0.0 if problem.open_loop else slope * THROUGHPUT_SLOPE / LATENCY_SLOPE
    usual = slowdown_over_states(falls, *slopes, seconds)
    rise = usual - slowdown_over_states(_disturbed_falls(counted, trials), *slopes)
    return rise if rise >= MIN_LATENCY_RISE else 0.0


def _latency_slope(trials: Sequence[Trial], problem: Problem, prior_slope: float) -> float:
    """Return the rise of the log of latency over the fall of the log of the CPU share left, on fresh servers.

    It is estimated from the differences between the windows of one configuration and load. The prior is a normal one
    with the mean ``prior_slope`` (Bayesian linear regression, Gelman et al. 2013, "Bayesian Data Analysis", section
    14.8). It is that of the search, which shows whether other programs take only the CPU time that the server leaves
    idle: windows at one load do not show that. The result is in the range of slopes that the search tries.
    """
    products, squares = PRIOR_FALL_SQUARES * prior_slope, PRIOR_FALL_SQUARES
    latency = METRICS[problem.sla.judged_latency]
    for trial, load in confirmed_loads(trials):
        windows = [window.measurement for window in trial.windows_at(load)]
        latencies_ms = np.array([latency.value(window) or 0.0 for window in windows])
        known = (latencies_ms > 0) & np.isfinite(latencies_ms)
        if known.any():
            falls = _disturbed_falls(windows, trials)[known]
            falls -= falls.mean()
            products += float(falls @ np.log(latencies_ms[known]))
            squares += float(falls @ falls)
    return min(max(0.0, products / squares), max(SLOPE_FACTORS) * LATENCY_SLOPE)


def _disturbed_falls(measurements: Sequence[Measurement], trials: Sequence[Trial]) -> FloatArray:
    """Return ``log_share_lost`` of each of ``measurements``, a part of ``trials``; 0 if it was not disturbed.

    The usual share is that of its node.
    """
    share_of_node = {node: usual_share(trials, node) for node in {measurement.node for measurement in measurements}}
    usual = np.array([share_of_node[measurement.node] for measurement in measurements])
    limits = USUAL_DISTURBANCE + usual
    is_disturbed = list(map(lost_cpu_to_others, measurements, limits))
    return np.where(is_disturbed, log_share_lost(measurements, usual), 0.0)


def search_measurements(trials: Sequence[Trial]) -> list[Measurement]:
    """Return the measurements of the search."""
    return [measurement for trial in trials for _, measurement in trial.measurements]
