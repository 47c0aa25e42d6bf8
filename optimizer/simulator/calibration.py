"""Service times of a real model, estimated from Triton's statistics.

Triton counts executions and compute time by batch size (``batch_stats`` of the model's statistics); the difference
of two snapshots is one ``Observation``. Concurrent executions slow each other down, so observations are grouped by
the mean number of busy instances.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np

from objectives import batch_stats
from objectives.arrays import FloatArray
from objectives.batch_stats import BatchStatistic
from optimizer.core.trial import Point
from optimizer.simulator.scenario import ServiceTimes, concurrency_of_process

Curve: TypeAlias = Callable[[FloatArray], FloatArray]  # batch sizes in samples to seconds

# A mean has the same weight as the smooth curve if it is over this many executions, or over this share of the
# average number of executions of a size, whichever is more.
TRUSTED_EXECUTIONS = 4
TRUSTED_SHARE = 0.1
UNMEASURED_CONTENTION = 0.5  # share of the uncontended time that each further busy instance adds
MIN_SERVICE_TIME_S = 1e-9  # service times have to be positive
MIN_SIZE_RATIO = 1.5  # batch sizes that are at least this factor apart determine a line


@dataclass(frozen=True, slots=True)
class Observation:
    """The change of a deployment's statistics while ``concurrency`` clients loaded it for ``wall_s`` seconds.

    Several instances are busy only if there are enough clients for a batch on each.
    """

    instance_count: int
    concurrency: int
    wall_s: float
    batches: tuple[BatchStatistic, ...]
    request_batch_size: int = 1

    @property
    def busy(self) -> float:
        """Return the mean number of busy instances during an execution, including its own."""
        samples = sum(b.executions * b.batch_size for b in self.batches)
        executions = sum(b.executions for b in self.batches)
        batches_in_flight = self.concurrency * self.request_batch_size * executions / samples
        most = max(1.0, min(self.instance_count, batches_in_flight))
        computed = sum(b.compute_ns for b in self.batches) / 1e9
        return 1 + (most - 1) * min(1.0, computed / (most * self.wall_s))


@dataclass(frozen=True, slots=True, eq=False)
class _BusyStatistics:
    """The statistics at one number of busy instances: ascending batch sizes, mean seconds, executions."""

    busy: float
    sizes: FloatArray
    seconds: FloatArray
    executions: FloatArray

    @property
    def determines_a_line(self) -> bool:
        return bool(self.sizes[-1] >= MIN_SIZE_RATIO * self.sizes[0])

    @property
    def trust(self) -> FloatArray:
        """Return the weight (0 to 1) of each size's mean.

        Rare sizes have a low weight, because they occur at moments of unusual load.
        """
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
    """Return times for batches of ``step``, 2 ``step``, ... ``max_batch_size`` samples on 1 to ``instances``.

    For each observed number of busy instances, a line ``a + c * b`` with a, c >= 0 is fitted to the relative errors.
    It is corrected towards the means of frequent sizes. Times never decrease with the size. Between observed
    numbers of busy instances times are interpolated; beyond them the slope continues, at most in proportion to the
    number.

    Args:
        observations: Statistics under different loads.
        max_batch_size: Samples of the largest batch.
        instances: The largest number of busy instances.
        step: The samples between two batch sizes, usually those of a request.
        contention: The share of the uncontended time that each further busy instance adds, if only one number of
            busy instances was observed.

    Raises:
        ValueError: There were no executions.
    """
    groups = _busy_statistics(observations)
    if not groups:
        raise ValueError("calibration: no executions in the statistics")
    grid = np.arange(step, max(max_batch_size, step) + 1, step, dtype=np.float64)
    base = max(groups, key=lambda group: (group.determines_a_line, len(group.sizes), -group.busy))
    shape = _corrected(base, _line(base))
    curves = [shape if group is base else _fitted_curve(group, shape) for group in groups]
    weights = np.array([group.executions.sum() for group in groups])
    # more busy instances never make a batch faster
    rising = np.array([_isotonic(column, weights) for column in np.array([curve(grid) for curve in curves]).T])
    return ServiceTimes(_over_busy(np.array([group.busy for group in groups]), rising, instances, contention), step)


def _busy_statistics(observations: Sequence[Observation]) -> list[_BusyStatistics]:
    """Return the statistics by the nearest whole number of busy instances, ascending."""
    groups: dict[int, list[tuple[float, BatchStatistic]]] = {}
    for observation in observations:
        for batch in observation.batches:
            if batch.executions > 0 and batch.compute_ns > 0:
                groups.setdefault(round(observation.busy), []).append((observation.busy, batch))
    return [_sum_statistics(groups[busy]) for busy in sorted(groups)]


def _sum_statistics(seen: list[tuple[float, BatchStatistic]]) -> _BusyStatistics:
    sums = np.array(batch_stats.sum_by_size([[batch for _, batch in seen]]), np.int64)
    executions = sums[:, 1].astype(np.float64)
    return _BusyStatistics(
        float(np.average([busy for busy, _ in seen], weights=[batch.executions for _, batch in seen])),
        sums[:, 0].astype(np.float64),
        sums[:, 2] / executions / 1e9,
        executions,
    )


def _fitted_curve(group: _BusyStatistics, shape: Curve) -> Curve:
    """Return the curve of ``group``, of the given ``shape`` if its own sizes do not determine a line."""
    return _corrected(group, _line(group) if group.determines_a_line else shape)


def _line(group: _BusyStatistics) -> Curve:
    """Return the line with the least squares of relative errors and no negative coefficient."""
    sizes, seconds = group.sizes, group.seconds
    if not group.determines_a_line:  # the fixed part is unknown: assume half
        size, mean = float(sizes.mean()), float(np.average(seconds, weights=group.executions))
        return lambda b: mean * (0.5 + 0.5 * b / size)
    root = np.sqrt(group.trust)
    fixed_column, slope_column = root / seconds, root * sizes / seconds
    (fixed, slope), *_ = np.linalg.lstsq(np.stack([fixed_column, slope_column], 1), root, rcond=None)
    if fixed < 0:
        fixed, slope = 0.0, slope_column @ root / (slope_column @ slope_column)
    elif slope < 0:
        fixed, slope = fixed_column @ root / (fixed_column @ fixed_column), 0.0
    return lambda b: fixed + slope * b


def _corrected(group: _BusyStatistics, curve: Curve) -> Curve:
    """Return ``curve`` corrected towards the means of ``group``, weighted by their executions."""
    expected = curve(group.sizes)
    ratios = group.seconds / expected
    mean = np.average(ratios, weights=group.executions)
    shrunk = _isotonic(expected * (mean + group.trust * (ratios - mean)), group.executions) / expected
    return lambda b: np.maximum.accumulate(
        np.maximum(curve(b) * np.interp(b, group.sizes, shrunk), MIN_SERVICE_TIME_S)
    )


def _isotonic(values: FloatArray, weights: FloatArray) -> FloatArray:
    """Return the closest non-decreasing values (pool adjacent violators)."""
    blocks: list[tuple[float, float, int]] = []  # mean, weight, length
    for value, weight in zip(values.tolist(), weights.tolist(), strict=True):
        blocks.append((value, weight, 1))
        while len(blocks) > 1 and blocks[-2][0] > blocks[-1][0]:
            (mean, weight, length), (next_mean, next_weight, next_length) = blocks[-2:]
            total = weight + next_weight
            blocks[-2:] = [((mean * weight + next_mean * next_weight) / total, total, length + next_length)]
    return np.concatenate([np.full(length, mean) for mean, _, length in blocks])


def _over_busy(busy: FloatArray, seconds: FloatArray, instances: int, contention: float) -> FloatArray:
    """Return ``seconds[size, group]``, observed at ``busy[group]`` instances, for 1 to ``instances`` of them."""
    counts = np.arange(1, instances + 1, dtype=np.float64)
    if len(busy) == 1:
        return np.outer(seconds[:, 0] / (1 + contention * (busy[0] - 1)), 1 + contention * (counts - 1))
    inside = np.array([np.interp(counts, busy, row) for row in seconds])
    first, last = seconds[:, 0], seconds[:, -1]
    down = (seconds[:, 1] - first) / (busy[1] - busy[0])
    up = np.minimum((last - seconds[:, -2]) / (busy[-1] - busy[-2]), last / busy[-1])
    below = np.minimum(0, counts - busy[0])
    above = np.maximum(0, counts - busy[-1])
    lowest = np.outer(first, counts / busy[0])
    extended = inside + np.outer(down, below) + np.outer(up, above)
    return np.where(below < 0, np.maximum(extended, lowest), extended)


def observe_point(point: Point) -> Observation | None:
    """Return the statistics of a measured point, or None if the server reported none.

    Without counts by batch size (``batch_stats``) all executions are taken to have the mean size. The duration is
    that of the counted samples at the measured throughput. Executions are counted from before the load began until
    after it ended, but throughput only in the windows in between.

    Several server processes count as one that has its share of the load for as many times as long.
    """
    throughput = point.measurement.throughput_infer_per_sec
    counted = batch_stats.from_text(point.measurement.batch_stats) or _from_means(point)
    batches = tuple(batch for batch in counted if batch.executions > 0 and batch.compute_ns > 0)
    if not throughput or not batches:
        return None
    wall_s = sum(batch.executions * batch.batch_size for batch in counted) / throughput
    candidate, batch = point.candidate, round(point.load.request_batch_size)
    concurrency = concurrency_of_process(candidate, point.load.concurrency)
    return Observation(candidate.instances, concurrency, candidate.server_processes * wall_s, batches, batch)


def _from_means(point: Point) -> tuple[BatchStatistic, ...]:
    m, batch = point.measurement, round(point.load.request_batch_size)
    if m.compute_infer_ms is None or not m.mean_batch_size or not m.requests:
        return ()
    computed_ms = m.compute_infer_ms + (m.compute_input_ms or 0) + (m.compute_output_ms or 0)
    executions = max(1, round(m.requests * batch / m.mean_batch_size))
    size = max(batch, batch * round(m.mean_batch_size / batch))
    return (BatchStatistic(size, executions, round(computed_ms * 1e6 * executions)),)
