"""The rules of a load search on one deployment, and what the searches of both kinds of load share.

A load search finds the highest load whose latency meets the SLA. If throughput is no objective, it finds the lowest
load that reaches the throughput floor instead. In the closed loop it chooses concurrencies (``concurrency_search``),
in the open loop request rates (``rate_search``). The next load is a pure function of the measurements, so an
interrupted search resumes from the stored ones.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace

from objectives.metrics import Measurement, Metric
from objectives.sla import Sla
from optimizer.simulator.speed_correction import SpeedCorrection

SATURATED_GAIN = 0.02  # if more load adds less throughput than this share, it only adds latency
HOPELESS = 0.6  # share of the throughput to beat, in a short window that misses the bound
HOPELESS_LATENCY = 1.25  # factor on the bound
GOAL_STEP = 2.0  # factor between loads while a goal still grows


@dataclass(frozen=True, slots=True)
class LoadSearchRules:
    """Limits and goal of a load search.

    Args:
        request_batch_size: Samples per request.
        max_concurrency: The highest concurrency to try.
        sla: The bounds on latencies and on the error rate.
        start: The first load to try: a concurrency, or in the open loop a rate in requests/s.
        open_loop: Whether loads are request rates.
        max_loads: The number of different loads to measure at most.
        to_beat: A throughput in infer/s, at the reference speed of ``speed``. The search gives up a deployment that
            misses the bounds before it reaches this throughput; None finds the best load in any case.
        lowest: Find the lowest load that serves ``throughput_floor`` (infer/s) instead of the highest load.
        loads: The concurrencies that can be measured, ascending; None for any.
        every: Measure exactly these concurrencies, whatever the results, for an exhaustive table.
        goal: Find the load with the highest value of this metric within the bounds, such as the goodput, which may
            fall again at higher loads. None finds the highest load.
        speed: Correction of measurements for the speed of the machine, so that a slow minute neither lowers the loads
            nor ends the search of a deployment.
    """

    request_batch_size: float
    max_concurrency: int
    sla: Sla
    start: float = 4
    open_loop: bool = False
    max_loads: int = 5
    to_beat: float | None = None
    lowest: bool = False
    throughput_floor: float = 0.0
    loads: tuple[int, ...] | None = None
    every: tuple[int, ...] = ()
    goal: Metric | None = None
    speed: SpeedCorrection = field(default_factory=SpeedCorrection)


def is_hopeless(warm_up: Measurement, rules: LoadSearchRules) -> bool:
    """Return whether the warm-up shows that the deployment is not worth a measurement.

    It is worth one if a bounded latency is unknown, since a low throughput alone may be due to the load.
    """
    warm_up = rules.speed.correct(warm_up)
    throughput = warm_up.throughput_infer_per_sec
    if rules.to_beat is None or throughput is None or throughput >= HOPELESS * rules.to_beat:
        return False
    if warm_up.latency_p99_ms is None:  # at least the p95, which a warm-up has
        warm_up = replace(warm_up, latency_p99_ms=warm_up.latency_p95_ms)
    return HOPELESS_LATENCY < rules.sla.share_of_bound(warm_up) < math.inf


def towards_best(met: Mapping[int | float, float], seen: Collection[int | float], resolution: float) -> float | None:
    """Return a load next to the one with the highest value; None if its neighbors are as close as ``resolution``.

    ``met`` has the values of the loads in ``seen`` that meet the bounds.
    """
    best = max(met, key=lambda load: met[load])
    lower = max((load for load in seen if load < best), default=None)
    higher = min((load for load in seen if load > best), default=None)
    has_gained = lower is None or met[best] > (1 + SATURATED_GAIN) * met.get(lower, 0.0)
    if higher is None and has_gained:
        return GOAL_STEP * best
    if lower is None and best >= GOAL_STEP:
        return best / GOAL_STEP
    gaps = [(best, higher or best), (lower or best, best)]
    gaps = [gap for gap in gaps if gap[1] - gap[0] > resolution * gap[0]]
    widest = max(gaps, key=lambda gap: gap[1] / gap[0], default=None)
    return None if widest is None else math.sqrt(widest[0] * widest[1])
