"""Service times and overheads of a real model, from what Triton and the load generator report of it.

Triton counts executions and computing time by batch size (``batch_stats`` of the model's statistics); the
difference of two snapshots is one ``Observation``. Executions slow each other down, so observations are told
apart by how many instances were busy on average as a batch was computed.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np

from objectives.metrics import Measurement
from optimizer.batcher.job import Array, Overheads, ServiceTimes
from optimizer.trial import Candidate

Curve: TypeAlias = Callable[[Array], Array]  # batch sizes in samples to seconds

# the mean of so many executions of a size, or of such a share of what sizes have on average if that is more,
# counts as much as the smooth curve
TRUSTED_EXECUTIONS = 4
TRUSTED_SHARE = 0.1
UNMEASURED_CONTENTION = 0.5  # half of the time alone for each further busy instance
SMALLEST_S = 1e-9
NORMAL_P95 = 1.6449  # standard deviations
SPREAD = 1.5  # sizes that lie this factor apart determine a line


@dataclass(frozen=True, slots=True)
class BatchStatistics:
    """Executions of one batch size (in samples) and the time they computed: input, inference and output."""

    batch_size: int
    executions: int
    compute_ns: int


@dataclass(frozen=True, slots=True)
class Observation:
    """What the statistics of a deployment gained while ``concurrency`` clients loaded it for ``wall_s``.

    To see several instances at work takes clients enough for a batch on each.
    """

    instance_count: int
    concurrency: int
    wall_s: float
    batches: tuple[BatchStatistics, ...]
    request_batch_size: int = 1

    @property
    def busy(self) -> float:
        """How many instances were busy as a batch was computed, itself included, on average."""
        samples = sum(b.executions * b.batch_size for b in self.batches)
        executions = sum(b.executions for b in self.batches)
        at_once = self.concurrency * self.request_batch_size * executions / samples  # batches, of all in flight
        most = max(1.0, min(self.instance_count, at_once))
        computed = sum(b.compute_ns for b in self.batches) / 1e9
        return 1 + (most - 1) * min(1.0, computed / (most * self.wall_s))


@dataclass(frozen=True, slots=True, eq=False)
class _Level:
    """What was seen at one number of busy instances: batch sizes ascending, mean seconds, executions."""

    busy: float
    sizes: Array
    seconds: Array
    executions: Array

    @property
    def determines_a_line(self) -> bool:
        return bool(self.sizes[-1] >= SPREAD * self.sizes[0])

    @property
    def trust(self) -> Array:
        """How far to go by the mean of each size. Rare sizes are of the moments in which the load was another."""
        half = max(TRUSTED_EXECUTIONS, TRUSTED_SHARE * float(self.executions.mean()))
        return self.executions / (self.executions + half)


def service_times(
    observations: Sequence[Observation],
    max_batch_size: int,
    instances: int,
    *,
    step: int = 1,
    contention: float = UNMEASURED_CONTENTION,
) -> ServiceTimes:
    """Times for batches of ``step``, 2 ``step`` … ``max_batch_size`` samples on 1 … ``instances`` busy instances.

    For each number of busy instances seen, a line ``a + c * b`` (neither negative) is fitted to the relative
    deviations and corrected towards the means of the sizes that were seen often; times never fall with the size.
    Numbers in between are interpolated, beyond them the slope goes on, at most in proportion to the number.
    ``contention`` is used where one number only was seen: the share of the time alone that each further busy
    instance adds. Raises ValueError where nothing was executed.
    """
    levels = _levels(observations)
    if not levels:
        raise ValueError("calibration: no executions in the statistics")
    grid = np.arange(step, max(max_batch_size, step) + 1, step, dtype=np.float64)
    base = max(levels, key=lambda level: (level.determines_a_line, len(level.sizes), -level.busy))
    shape = _corrected(base, _line(base))
    curves = np.array(
        [
            shape(grid)
            if level is base
            else _corrected(level, _line(level) if level.determines_a_line else shape)(grid)
            for level in levels
        ]
    )
    weights = np.array([level.executions.sum() for level in levels])
    rising = np.array([_isotonic(column, weights) for column in curves.T])
    return ServiceTimes(_over_busy(np.array([level.busy for level in levels]), rising, instances, contention), step)


def _levels(observations: Sequence[Observation]) -> list[_Level]:
    """By the nearest whole number of busy instances, ascending."""
    groups: dict[int, list[tuple[float, BatchStatistics]]] = {}
    for observation in observations:
        for batch in observation.batches:
            if batch.executions > 0 and batch.compute_ns > 0:
                groups.setdefault(round(observation.busy), []).append((observation.busy, batch))
    return [_level(groups[busy]) for busy in sorted(groups)]


def _level(seen: list[tuple[float, BatchStatistics]]) -> _Level:
    executions: dict[int, int] = {}
    nanoseconds: dict[int, int] = {}
    for _, batch in seen:
        executions[batch.batch_size] = executions.get(batch.batch_size, 0) + batch.executions
        nanoseconds[batch.batch_size] = nanoseconds.get(batch.batch_size, 0) + batch.compute_ns
    sizes = sorted(executions)
    counts = np.array([executions[size] for size in sizes], np.float64)
    return _Level(
        float(np.average([busy for busy, _ in seen], weights=[batch.executions for _, batch in seen])),
        np.array(sizes, np.float64),
        np.array([nanoseconds[size] for size in sizes]) / counts / 1e9,
        counts,
    )


def _line(level: _Level) -> Curve:
    """The least squares of the relative deviations, with neither part negative."""
    sizes, seconds = level.sizes, level.seconds
    if not level.determines_a_line:  # nothing tells the fixed part from the rest: half of each
        size, mean = float(sizes.mean()), float(np.average(seconds, weights=level.executions))
        return lambda b: mean * (0.5 + 0.5 * b / size)
    root = np.sqrt(level.trust)
    fixed_column, slope_column = root / seconds, root * sizes / seconds
    (fixed, slope), *_ = np.linalg.lstsq(np.stack([fixed_column, slope_column], 1), root, rcond=None)
    if fixed < 0:
        fixed, slope = 0.0, slope_column @ root / (slope_column @ slope_column)
    elif slope < 0:
        fixed, slope = fixed_column @ root / (fixed_column @ fixed_column), 0.0
    return lambda b: fixed + slope * b


def _corrected(level: _Level, curve: Curve) -> Curve:
    """``curve`` drawn towards the level's means, the more the more executions they are of."""
    expected = curve(level.sizes)
    ratios = level.seconds / expected
    usual = np.average(ratios, weights=level.executions)
    drawn = _isotonic(expected * (usual + level.trust * (ratios - usual)), level.executions) / expected
    return lambda b: np.maximum.accumulate(np.maximum(curve(b) * np.interp(b, level.sizes, drawn), SMALLEST_S))


def _isotonic(values: Array, weights: Array) -> Array:
    """The nearest values that never fall (pool adjacent violators)."""
    blocks: list[tuple[float, float, int]] = []  # mean, weight, length
    for value, weight in zip(values.tolist(), weights.tolist(), strict=True):
        blocks.append((value, weight, 1))
        while len(blocks) > 1 and blocks[-2][0] > blocks[-1][0]:
            (low, a, m), (high, b, n) = blocks[-2:]
            blocks[-2:] = [((low * a + high * b) / (a + b), a + b, m + n)]
    return np.concatenate([np.full(length, mean) for mean, _, length in blocks])


def _over_busy(busy: Array, seconds: Array, instances: int, contention: float) -> Array:
    """``seconds[size, level]``, seen at ``busy[level]`` instances, for 1 … ``instances`` of them."""
    wanted = np.arange(1, instances + 1, dtype=np.float64)
    if len(busy) == 1:
        return np.outer(seconds[:, 0] / (1 + contention * (busy[0] - 1)), 1 + contention * (wanted - 1))
    inside = np.array([np.interp(wanted, busy, row) for row in seconds])
    first, last = seconds[:, 0], seconds[:, -1]
    down = (seconds[:, 1] - first) / (busy[1] - busy[0])
    up = np.minimum((last - seconds[:, -2]) / (busy[-1] - busy[-2]), last / busy[-1])
    below = np.minimum(0, wanted - busy[0])
    above = np.maximum(0, wanted - busy[-1])
    lowest = np.outer(first, wanted / busy[0])
    extended = inside + np.outer(down, below) + np.outer(up, above)
    return np.where(below < 0, np.maximum(extended, lowest), extended)


def overheads(candidate: Candidate, request_batch_size: int, alone: Measurement, release_s: float = 0.0) -> Overheads:
    """From one client's latencies (a closed loop of concurrency 1) on ``candidate``.

    What neither the queue nor the computation accounts for is spent half on the way in and half on the way out;
    waking the batcher and the instance take equally long. Raises ValueError where the latency is unknown.
    """
    if alone.latency_avg_ms is None or alone.queue_ms is None or alone.compute_infer_ms is None:
        raise ValueError("calibration: latency, queue or compute time of a single client is unknown")
    latency, queue = alone.latency_avg_ms / 1e3, alone.queue_ms / 1e3
    computed = (alone.compute_infer_ms + (alone.compute_input_ms or 0) + (alone.compute_output_ms or 0)) / 1e3
    on_the_way = max(0.0, latency - queue - computed)
    between = 0.0
    if alone.throughput_infer_per_sec:
        between = max(0.0, request_batch_size / alone.throughput_infer_per_sec - latency)
    hops = max(0.0, queue - _delay_alone_s(candidate, request_batch_size))
    each = hops / 2 if candidate.dynamic_batching else hops
    return Overheads(on_the_way / 2, on_the_way / 2, between, 0.0, each, each, release_s)


def _delay_alone_s(candidate: Candidate, request_batch_size: int) -> float:
    """How long the batcher holds a lone request back for others to join."""
    sizes = candidate.preferred_batch_sizes or (candidate.max_batch_size,)
    if not candidate.dynamic_batching or request_batch_size in sizes or request_batch_size >= max(sizes):
        return 0.0
    return candidate.max_queue_delay_us / 1e6


def relative_std(alone: Measurement) -> float:
    """The spread of service times (for ``lognormal_jitter``) that a single client's latencies would come from."""
    p50, p95, computed = alone.latency_p50_ms, alone.latency_p95_ms, alone.compute_infer_ms
    if p50 is None or p95 is None or not computed:
        raise ValueError("calibration: latency quantiles or compute time of a single client are unknown")
    sigma = math.log1p(max(0.0, p95 - p50) / computed) / NORMAL_P95
    return math.sqrt(math.expm1(sigma**2))


def release_time_s(saturated: Observation) -> float:
    """How long instances idle between two executions although work is waiting, as under a saturating load."""
    executions = sum(b.executions for b in saturated.batches)
    computed = sum(b.compute_ns for b in saturated.batches) / 1e9
    if not executions:
        raise ValueError("calibration: no executions in the statistics")
    return max(0.0, (saturated.instance_count * saturated.wall_s - computed) / executions)
