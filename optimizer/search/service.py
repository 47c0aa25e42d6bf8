"""Service times of every combination of instances and other fields, from those that were measured."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from optimizer.batcher.calibration import Observation, service_times
from optimizer.batcher.simulator import ServiceTimes
from optimizer.batching import of_batcher
from optimizer.machine import cpus
from optimizer.problem import Problem
from optimizer.trial import INSTANCE_GPUS, SERVER_CPUS, Candidate, FieldValue

Array = npt.NDArray[np.float64]
Fields = tuple[tuple[str, FieldValue], ...]
Group = tuple[int, Fields]  # instance count, and the other fields that are not the batcher's

THREADS = "intra_op_thread_count"  # ONNX Runtime's parameter: how many cores an instance computes on
# With threads known, each further busy instance adds SLOWED of the time alone while there are cores for all, and
# twice as many threads as cores take 2 ** CROWDED of it: they spin, and displace one another. Twice the threads
# of one instance alone take 2 ** -THREADS_GAIN of the time. So it was on both models with varied threads in
# benchmarks/tables.
SLOWED, CROWDED, THREADS_GAIN = 0.25, 1.6, 0.4
SEVERAL = 4  # executions, of which the mean says something
CONTENTION = 0.5  # of the time alone that each further busy instance adds, where nothing is known of threads


def group_of(candidate: Candidate) -> Group:
    """What the speed of a server depends on, and the simulation is told little of."""
    return candidate.instances, tuple(pair for pair in candidate.fields if not of_batcher(pair[0]))


@dataclass(frozen=True, eq=False)
class Services:
    """``shape`` [sizes]: seconds for batches of 1, 2, … requests in the group measured best; ``scales``: how much
    longer the same batches took in each measured group than ``demand`` explains."""

    shape: Array
    scales: dict[Group, float]
    problem: Problem

    def times(self, group: Group) -> ServiceTimes:
        """Those of the group, else of the nearest, as the demand for cores differs."""
        scale = self.scales[min(self.scales, key=lambda other: _distance(group, other))]
        busy = [demand(group[1], k, self.problem) for k in range(1, group[0] + 1)]
        return ServiceTimes(np.outer(self.shape * scale, busy), step=self.problem.space.request_batch_size)


def services(groups: dict[Group, list[Observation]], problem: Problem, largest: int) -> Services:
    """From the statistics of each group. ``largest``: samples of the largest batch that is asked for."""
    sizes = {group: {b.batch_size for one in seen for b in one.batches} for group, seen in groups.items()}
    instances, fields = base = max(groups, key=lambda group: (_range(groups[group]), len(sizes[group]), -group[0]))
    seconds = service_times(
        groups[base], largest, instances, step=problem.space.request_batch_size, contention=SLOWED
    ).seconds
    shape = seconds[:, instances - 1] / demand(fields, instances, problem)
    return Services(shape, {group: _scale(shape, group, seen, problem) for group, seen in groups.items()}, problem)


def _range(seen: Sequence[Observation]) -> int:
    """How often the smallest batch that was executed several times doubles to the largest."""
    executed = Counter[int]()
    for one in seen:
        executed.update({b.batch_size: b.executions for b in one.batches})
    sizes = [size for size, executions in executed.items() if executions >= SEVERAL]
    return round(math.log2(max(sizes) / min(sizes))) if sizes else 0


def demand(fields: Fields, busy: float, problem: Problem) -> float:
    """How much longer a batch takes with ``busy`` instances of so many threads each than on one of one thread. Those
    on different GPUs do not slow each other.

    Beyond the machine's cores instances only take each other's time. Where the cores are not known, there are as
    many as the most threads that the space gives one instance.
    """
    threads = _threads(fields)
    cores = _cpu_count(fields) or problem.cpu_count or _most_threads(problem)
    busy = max(1.0, busy / _gpu_count(fields))
    if threads is None or cores is None:
        return 1 + CONTENTION * (busy - 1)
    threads = threads or cores
    crowded: float = (busy * threads / cores) ** CROWDED
    alone: float = threads**-THREADS_GAIN
    return alone * max(1 + SLOWED * (busy - 1), crowded)


def _scale(shape: Array, group: Group, seen: Sequence[Observation], problem: Problem) -> float:
    ratios, weights = [], []
    for one in seen:
        for b in one.batches:
            row = min(max(round(b.batch_size / problem.space.request_batch_size), 1), len(shape)) - 1
            expected = shape[row] * demand(group[1], one.busy, problem)
            ratios.append(math.log(b.compute_ns / 1e9 / b.executions / expected))
            weights.append(b.executions)
    return math.exp(float(np.average(ratios, weights=weights)))


def _threads(fields: Fields) -> float | None:
    """Threads of an instance; 0 is as many as there are cores; None where the configuration does not say."""
    return next((_number(value) for path, value in fields if THREADS in path), None)


def _cpu_count(fields: Fields) -> float | None:
    chosen = dict(fields).get(SERVER_CPUS)
    return None if chosen is None else len(cpus.parse(str(chosen)))


def _gpu_count(fields: Fields) -> int:
    return str(dict(fields).get(INSTANCE_GPUS, "")).count(",") + 1


def _most_threads(problem: Problem) -> float | None:
    """Of a choice of several: a single one says nothing of the machine."""
    for path, values in problem.space.fields.items():
        if THREADS in path and len(values) > 1:
            return max(_number(value) or 0 for value in values) or None
    return None


def _number(value: FieldValue) -> float | None:
    try:
        number = float(value)
    except ValueError:
        return None
    return number if 0 <= number < math.inf else None


def _distance(group: Group, other: Group) -> tuple[int, float]:
    ours, theirs = dict(group[1]), dict(other[1])
    differing = sum(ours.get(path) != theirs.get(path) for path in ours.keys() | theirs.keys())
    return differing, abs(math.log2(group[0] / other[0]))
