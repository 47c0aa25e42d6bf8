"""The HorizontalPodAutoscaler that `tune emit` writes, simulated on the hours of a day or on a recording.

The rules are those of the HorizontalPodAutoscaler (autoscaling/v2) with its default behavior:
https://kubernetes.io/docs/tasks/run-application/horizontal-pod-autoscale/. Each step of the simulation takes the
latencies of a replica from the simulated batcher in a steady state. A queue that grows because replicas are missing
stays on its replica until the replica has served it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import cache

import numpy as np
from scipy import special

from objectives.arrays import FloatArray
from optimizer.core.trial import LoadPoint
from optimizer.plan.fleet import ARRIVAL_SEED, Fleet
from optimizer.plan.slowness import Slowdown
from optimizer.plan.traffic import HOURS, Day, RecordedTraffic
from optimizer.results.autoscaling import RATE_WINDOW_SECONDS, ScalingLimits, target_load

SYNC_SECONDS = 15  # --horizontal-pod-autoscaler-sync-period
METRIC_DELAY_SECONDS = 15.0  # --metric-resolution of the metrics API
COOL_DOWN_SECONDS = 300.0  # --horizontal-pod-autoscaler-downscale-stabilization
TOLERANCE = 0.1  # --horizontal-pod-autoscaler-tolerance
MAX_GROWTH, MAX_ADDED = 2, 4  # in SYNC_SECONDS at most twice as many replicas, or 4 more if that is a larger number
READY_SECONDS = 5.0  # period of the readiness probe in the manifest, after which a loaded replica gets requests
STEP_SECONDS = 5
MAX_STEPS = 30 * 24 * 3600 // STEP_SECONDS  # limit for a recording that was stretched to a low rate
LOADS = (0.02, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.85, 0.9, 0.95, 0.98)  # shares of the capacity
MAX_DISTINCT_REPLICAS = 32  # with more, the arrivals at one of them by round-robin hardly change
REQUESTS = 10_000  # number of requests in a simulation of one load
# the quantile that each field of a SimulationResult has
LATENCY_LEVELS = {"latency_p50_s": 0.5, "latency_p90_s": 0.9, "latency_p95_s": 0.95, "latency_p99_s": 0.99}


@dataclass(frozen=True)
class Autoscaler(ScalingLimits):
    """The settings of a HorizontalPodAutoscaler.

    ``metric_delay_s`` is the age of the newest metric, ``cool_down_s`` the time before replicas are removed, and
    ``start_s`` the time until a new replica serves requests; None takes the measured time of a deployment.
    """

    metric_delay_s: float = METRIC_DELAY_SECONDS
    cool_down_s: float = COOL_DOWN_SECONDS
    start_s: float | None = None


@dataclass(frozen=True, slots=True)
class AutoscalerTest:
    """Result of a simulation in which ``autoscaler`` scaled the fleet for ``seconds``.

    ``target`` is the number of requests in flight, or per second, that each of ``pods_per_replica`` pods should get.
    A pod is one server process. For ``too_few_seconds`` the replicas that were ready missed a bound.
    ``over_bound_share`` is the share of requests over the shortest bound. Numbers of replicas are fractions if a
    replica has several pods.
    """

    autoscaler: Autoscaler
    start_s: float
    target: float
    is_rate: bool
    pods_per_replica: int
    seconds: float
    too_few_seconds: float
    over_bound_share: float
    mean_replicas: float
    most_replicas: float


@dataclass(frozen=True, eq=False)
class _SteadyState:
    """The behaviour of one of several pods at ``rates``, ascending.

    ``excess_ms`` is the largest difference of a latency from its bound. ``over_bound_share`` is the share of requests
    over the shortest bound. ``in_flight`` is the mean number of requests in flight.
    """

    rates: FloatArray
    excess_ms: FloatArray
    over_bound_share: FloatArray
    in_flight: FloatArray


def day_rates(mean_rate: float, day: Day) -> FloatArray:
    """Return the rate in each step of a day."""
    hours = np.arange(0, HOURS, STEP_SECONDS / 3600)
    return mean_rate * (1 + (day.peak_factor - 1) * np.sin(2 * math.pi * hours / HOURS))


def recorded_rates(traffic: RecordedTraffic, rate: float) -> FloatArray:
    """Return the mean rate in each step of the recording, scaled in time to ``rate``, for at most MAX_STEPS steps."""
    times = np.cumsum(traffic.intervals_s) * (traffic.rate / rate)
    steps = min(int(times[-1] // STEP_SECONDS), MAX_STEPS)
    if not steps:
        return np.array([rate])
    counted, _ = np.histogram(times, steps, (0.0, float(steps * STEP_SECONDS)))
    return counted / STEP_SECONDS


def simulate_autoscaler(
    autoscaler: Autoscaler,
    fleet: Fleet,
    slowdown: Slowdown,
    rates: FloatArray,
    measured: LoadPoint,
    deploy_seconds: float,
    *,
    repeats: bool,
) -> AutoscalerTest:
    """Return how ``autoscaler`` copes with ``rates``, the requests per second of each step.

    ``measured`` is the load of a replica that the target is a share of. The autoscaler counts pods, each of which is
    one server process. ``repeats``: the rates are a day that follows an equal day. Otherwise the fleet has settled at
    the first rate.
    """
    start_s = math.ceil(deploy_seconds) + READY_SECONDS if autoscaler.start_s is None else autoscaler.start_s
    processes = fleet.replica.candidate.server_processes
    fleet = replace(fleet, replica=fleet.replica.server_process())
    min_pods, max_pods = processes * autoscaler.min_replicas, processes * autoscaler.max_replicas
    limits = replace(autoscaler, min_replicas=min_pods, max_replicas=max_pods)
    target = target_load((measured.request_rate or measured.concurrency) / processes, autoscaler.target_utilization)
    is_rate = bool(measured.request_rate)
    before = rates if repeats else np.full(_settling_steps(autoscaler, start_s), rates[0])
    scaled = _ScaledFleet(limits, _Pod(fleet, slowdown), target, start_s, is_rate=is_rate)
    scaled.settle(float(rates[0]))
    for rate in before.tolist():
        scaled.step(rate)
    too_few = over_bound = 0.0
    pods = []
    for rate in rates.tolist():
        missed, share = scaled.step(rate)
        too_few += STEP_SECONDS * missed
        over_bound += share * rate
        pods.append(scaled.pods)
    return AutoscalerTest(
        autoscaler=autoscaler,
        start_s=start_s,
        target=target,
        is_rate=is_rate,
        pods_per_replica=processes,
        seconds=float(STEP_SECONDS * len(rates)),
        too_few_seconds=too_few,
        over_bound_share=over_bound / max(float(rates.sum()), 1e-9),
        mean_replicas=float(np.mean(pods)) / processes,
        most_replicas=max(pods) / processes,
    )


def _settling_steps(autoscaler: Autoscaler, start_s: float) -> int:
    """Return the steps after which a constant rate has settled."""
    longest_s = autoscaler.cool_down_s + start_s + autoscaler.metric_delay_s + RATE_WINDOW_SECONDS
    return math.ceil(2 * longest_s / STEP_SECONDS)


class _Pod:
    """A pod of ``fleet``, whose replicas are single pods, under ``slowdown``."""

    def __init__(self, fleet: Fleet, slowdown: Slowdown) -> None:
        self._fleet, self._slowdown = fleet, slowdown
        self.capacity = fleet.replica.capacity(slowdown)
        self.shortest_bound_ms = min(bound.bound for bound in fleet.replica.sla)
        self.steady_state = cache(self._steady_state)

    def _steady_state(self, pods: int) -> _SteadyState:
        """Return the behaviour of one of ``pods``."""
        fleet, slowdown = self._fleet, self._slowdown
        replica = fleet.replica
        network_s = replica.model.overheads.network_s
        rows = []
        for share in LOADS:
            rate = share * self.capacity
            arrivals_s = fleet.traffic.replica_arrivals_s(rate * pods, pods, fleet.balancer, REQUESTS, ARRIVAL_SEED)
            simulated = replica.serve(arrivals_s, slowdown)
            ms_factor = 1e3 * replica.latency_ratio * slowdown.latency_factor
            quantiles_ms = [ms_factor * getattr(simulated, name) for name in LATENCY_LEVELS]
            excess_ms = max(
                replica.latency_ms(simulated, bound.metric, slowdown.latency_factor) - bound.bound
                for bound in replica.sla
            )
            in_flight = rate * max(0.0, simulated.latency_avg_s - network_s)
            rows.append((rate, excess_ms, _over_bound_share(quantiles_ms, self.shortest_bound_ms), in_flight))
        _, lowest_excess_ms, lowest_share, _ = rows[0]
        without_load = (0.0, lowest_excess_ms, lowest_share, 0.0)  # latencies as at the lowest rate
        return _SteadyState(*np.array([without_load, *rows]).T)


class _ScaledFleet:
    """A fleet whose number of pods follows the metric. ``step`` advances it by STEP_SECONDS."""

    def __init__(
        self,
        autoscaler: Autoscaler,
        pod: _Pod,
        target: float,
        start_s: float,
        *,
        is_rate: bool,
    ) -> None:
        self._autoscaler, self._pod = autoscaler, pod
        self._target, self._is_rate = target, is_rate
        self._start_steps = math.ceil(start_s / STEP_SECONDS)
        self._step = 0
        self._queued = np.zeros(autoscaler.min_replicas)  # requests of each ready pod beyond the steady state
        self._starting: list[int] = []  # the step at which each one gets ready
        self._metrics: list[float] = []  # sum over the pods in each step
        self._proposals: list[tuple[int, int]] = []  # step and number of pods

    @property
    def pods(self) -> int:
        """Return the number of pods that are ready or start."""
        return len(self._queued) + len(self._starting)

    def settle(self, rate: float) -> None:
        """Begin with as many pods as the capacity needs for ``rate``."""
        pods = math.ceil(rate / (self._pod.capacity * self._autoscaler.target_utilization))
        self._queued = np.zeros(self._bounded(pods))

    def step(self, rate: float) -> tuple[bool, float]:
        """Serve ``rate`` for one step; return whether a bound was missed, and the share over the shortest bound."""
        self._queued = np.append(self._queued, np.zeros(sum(ready <= self._step for ready in self._starting)))
        self._starting = [ready for ready in self._starting if ready > self._step]
        served = self._serve(rate)
        if self._step % (SYNC_SECONDS // STEP_SECONDS) == 0:
            self._scale()
        self._step += 1
        return served

    def _serve(self, rate: float) -> tuple[bool, float]:
        """Divide ``rate`` among the ready pods, record the metric, and return what ``step`` returns."""
        pod_rate, capacity = rate / len(self._queued), self._pod.capacity
        steady = self._pod.steady_state(min(len(self._queued), MAX_DISTINCT_REPLICAS))
        self._queued = np.maximum(self._queued + STEP_SECONDS * (pod_rate - capacity), 0.0)
        waits_ms = 1e3 * self._queued / capacity
        over_bound_share = np.interp(pod_rate, steady.rates, steady.over_bound_share)
        shares = np.where(waits_ms > self._pod.shortest_bound_ms, 1.0, over_bound_share)
        excess_ms = np.interp(pod_rate, steady.rates, steady.excess_ms) + waits_ms
        in_flight = np.interp(pod_rate, steady.rates, steady.in_flight) + self._queued
        served = min(pod_rate, capacity) * len(self._queued)
        self._metrics.append(served if self._is_rate else float(in_flight.sum()))
        return bool((excess_ms > 0).any()), float(shares.mean())

    def _scale(self) -> None:
        """Start or remove pods as the HorizontalPodAutoscaler does after each SYNC_SECONDS."""
        end = len(self._metrics) - round(self._autoscaler.metric_delay_s / STEP_SECONDS)
        window = self._metrics[max(0, end - RATE_WINDOW_SECONDS // STEP_SECONDS) : max(0, end)]
        if not window:
            return
        total, ready, pods = float(np.mean(window)), len(self._queued), self.pods
        ratio, counted = total / (ready * self._target), ready
        if pods > ready:
            # Kubernetes assumes that a starting pod uses nothing when it scales up, else that it uses the target
            assumed = 0 if ratio > 1 else self._target * (pods - ready)
            adjusted = (total + assumed) / (pods * self._target)
            ratio, counted = (adjusted if (adjusted > 1) == (ratio > 1) else 1.0), pods
        desired = pods if abs(ratio - 1) <= TOLERANCE else math.ceil(ratio * counted)
        desired = self._bounded(min(desired, max(MAX_GROWTH * pods, pods + MAX_ADDED)))
        oldest = self._step - self._autoscaler.cool_down_s / STEP_SECONDS
        self._proposals = [(at, count) for at, count in self._proposals if at > oldest] + [(self._step, desired)]
        desired = max(desired, min(pods, max(count for _, count in self._proposals)))
        if desired > pods:
            self._starting += [self._step + self._start_steps] * (desired - pods)
        elif desired < pods:  # those that start are removed first
            still_starting = max(0, desired - ready)
            self._starting, self._queued = self._starting[:still_starting], self._queued[:desired]

    def _bounded(self, replicas: int) -> int:
        return min(max(replicas, self._autoscaler.min_replicas), self._autoscaler.max_replicas)


def _over_bound_share(quantiles_ms: list[float], bound_ms: float) -> float:
    """Return the share of requests over the bound. The latency is taken to be log-normal between two quantiles."""
    logs, z_scores = np.log(quantiles_ms), special.ndtri(list(LATENCY_LEVELS.values()))
    upper = min(max(int(np.searchsorted(logs, math.log(bound_ms))), 1), len(logs) - 1)
    width = max(float(logs[upper] - logs[upper - 1]), 1e-6)
    slope = (z_scores[upper] - z_scores[upper - 1]) / width
    return float(special.ndtr(-(z_scores[upper] + (math.log(bound_ms) - logs[upper]) * slope)))
