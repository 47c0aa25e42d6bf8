"""Service times of every combination of instances and other fields, from those that were measured."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from optimizer.batcher.calibration import Observation, service_times
from optimizer.batcher.simulator import ServiceTimes
from optimizer.problem import Problem
from optimizer.trial import Candidate, FieldValue

Array = npt.NDArray[np.float64]
Fields = tuple[tuple[str, FieldValue], ...]
Group = tuple[int, Fields]  # instance count, other fields

THREADS = "intra_op_thread_count"  # ONNX Runtime's parameter: how many cores an instance computes on
SLOWED = 0.15  # of the time alone that each further busy instance adds while there are cores for all
THREADS_GAIN = 0.4  # twice the threads take 2 ** -0.4 of the time
CROWDED = 1.4  # twice as many threads as cores take 2 ** 1.4 of the time: they spin, and displace one another


@dataclass(frozen=True, eq=False)
class Services:
    """``shape`` [sizes]: seconds for batches of 1, 2, … requests in the group measured best; ``scales``: how much
    longer the same batches took in each measured group than ``demand`` explains."""

    shape: Array
    scales: dict[Group, float]
    problem: Problem

    @classmethod
    def of(cls, groups: dict[Group, list[Observation]], problem: Problem) -> Services:
        """From the statistics of each group."""
        sizes = {group: {b.batch_size for one in seen for b in one.batches} for group, seen in groups.items()}
        base = max(groups, key=lambda group: (len(sizes[group]), -group[0]))
        batch = problem.request_batch_size
        largest = max(*problem.space.max_batch_size, batch, *(size for one in sizes.values() for size in one))
        instances, fields = base
        shape = service_times(groups[base], largest, instances, step=batch, contention=SLOWED).seconds[:, -1]
        shape = shape / demand(fields, instances, problem)
        services = cls(shape, {}, problem)
        scales = {group: services._scale(group, seen) for group, seen in groups.items()}
        return cls(shape, scales, problem)

    def times(self, candidate: Candidate) -> ServiceTimes:
        """Those of the candidate's own group, else of the nearest, as the demand for cores differs."""
        group = (candidate.instance_count, candidate.fields)
        scale = self.scales[min(self.scales, key=lambda other: _distance(group, other))]
        busy = [demand(candidate.fields, k, self.problem) for k in range(1, candidate.instance_count + 1)]
        return ServiceTimes(np.outer(self.shape * scale, busy), step=self.problem.request_batch_size)

    def _scale(self, group: Group, seen: Sequence[Observation]) -> float:
        batch, ratios, weights = self.problem.request_batch_size, [], []
        for one in seen:
            for b in one.batches:
                row = min(max(round(b.batch_size / batch), 1), len(self.shape)) - 1
                expected = self.shape[row] * demand(group[1], one.busy, self.problem)
                ratios.append(math.log(b.compute_ns / 1e9 / b.executions / expected))
                weights.append(b.executions)
        return math.exp(float(np.average(ratios, weights=weights)))


def demand(fields: Fields, busy: float, problem: Problem) -> float:
    """How much longer a batch takes with ``busy`` instances of so many threads each than on one of one thread.

    Beyond the machine's cores instances only take each other's time. How many cores there are is not told: as
    many as the most threads that the space gives one instance.
    """
    threads, cores = _threads(fields), _cores(problem)
    alone = threads**-THREADS_GAIN
    if cores is None:
        return alone * (1 + 0.5 * (busy - 1))
    return alone * max(1 + SLOWED * (busy - 1), (busy * threads / cores) ** CROWDED)


def _threads(fields: Fields) -> float:
    return next((_number(value) for path, value in fields if THREADS in path), 1.0)


def _cores(problem: Problem) -> float | None:
    for path, values in problem.space.fields.items():
        if THREADS in path:
            return max(_number(value) for value in values)
    return None


def _number(value: FieldValue) -> float:
    try:
        return max(1.0, float(value))
    except ValueError:
        return 1.0


def _distance(group: Group, other: Group) -> tuple[float, float]:
    same = sum(a != b for a, b in zip(group[1], other[1], strict=False)) + abs(len(group[1]) - len(other[1]))
    return same, abs(math.log2(group[0] / other[0]))
