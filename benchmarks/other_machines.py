"""Recorded tables as other machines would have recorded them: what warm_start.py has a study begin with.

A related machine is the simulator with the service times, the overheads and the noise that the recorded table
tells, all of them changed as another machine would (RELATED). The contrary one is no machine at all: each
configuration has the figures of the one that is furthest from it, setting by setting.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from simulated_tables import noisy

from objectives.metrics import Measurement
from optimizer.batcher.simulator import ClosedLoop, Job, ServiceTimes, lognormal_jitter, simulate_many, trace
from optimizer.batcher.told import told
from optimizer.problem import Problem
from optimizer.replay.recording import Recording
from optimizer.search.server_model import ServerModel, fit
from optimizer.search.service import THREADS, Group
from optimizer.space import OFF
from optimizer.trial import Candidate, LoadPoint, Trial

NOISE = 0.03  # relative, of each figure


@dataclass(frozen=True)
class Machine:
    """How another machine differs: ``speed`` is the factor of all service times; a batch takes ``size ** bend`` of
    it, beside ``busy`` instances ``busy ** contention``, on two threads ``threads``; ``ways`` and ``jitter`` are
    factors of the overheads and of the variation."""

    speed: float
    bend: float
    contention: float
    threads: float
    ways: float
    jitter: float


RELATED = {
    "0.4x": Machine(0.4, bend=-0.05, contention=-0.2, threads=0.85, ways=0.6, jitter=0.7),
    "2.5x": Machine(2.5, bend=0.05, contention=0.2, threads=1.15, ways=1.5, jitter=1.5),
}
CONTRARY = "contrary"
SOURCES = (*RELATED, CONTRARY)


def recorded_on(name: str, recording: Recording, problem: Problem) -> list[Trial]:
    """The trials of ``recording``, measured on the machine ``name`` of SOURCES instead."""
    cells = [(candidate, load) for candidate, load in recording.answers if load is not None]
    found = _contrary(recording, cells) if name == CONTRARY else _on(RELATED[name], recording, problem, cells)
    trials: dict[Candidate, Trial] = {}
    for (candidate, load), measurement in zip(cells, found, strict=True):
        before = trials.get(candidate) or Trial(len(trials), candidate)
        trials[candidate] = replace(before, measurements=(*before.measurements, (load, measurement)))
    return list(trials.values())


def _on(
    machine: Machine, recording: Recording, problem: Problem, cells: Sequence[tuple[Candidate, LoadPoint]]
) -> list[Measurement]:
    points = [row.point for row in recording.answers.values() if row.load]
    here = fit(points, problem, "latency-p95")
    way_s, batch = here.around.way_s * machine.ways, recording.request_batch_size
    overheads = replace(here.around, way_s=way_s, gap_s=here.around.gap_s * machine.ways).overheads()
    jobs = [
        Job(candidate, ClosedLoop(load.concurrency), _times(machine, here, candidate), overheads, batch)
        for candidate, load in cells
    ]
    jitter = lognormal_jitter(here.around.jitter * machine.jitter, seed=1)
    rng = np.random.default_rng(1)
    return [
        noisy(told(one, trace(job, jitter=jitter), way_s, batch), *rng.lognormal(0, NOISE, 2))
        for one, job in zip(simulate_many(jobs, jitter=jitter), jobs, strict=True)
    ]


def _times(machine: Machine, here: ServerModel, candidate: Candidate) -> ServiceTimes:
    group: Group = candidate.instance_count, candidate.fields
    known = here.times(group)
    sizes, busy = (np.arange(1, count + 1, dtype=np.float64) for count in known.seconds.shape)
    threaded = any(THREADS in path and str(value) == "2" for path, value in candidate.fields)
    factor = machine.speed * (machine.threads if threaded else 1.0)
    return replace(known, seconds=known.seconds * factor * np.outer(sizes**machine.bend, busy**machine.contention))


def _contrary(recording: Recording, cells: Sequence[tuple[Candidate, LoadPoint]]) -> list[Measurement]:
    """Batches by size are left out: their sizes are not those of the configuration any more."""
    choices = {name: sorted(values, key=_order) for name, values in recording.space.parameters().items()}
    places = {
        candidate: np.array(_places(recording.space.values_of(candidate) or {}, choices))
        for candidate in dict.fromkeys(candidate for candidate, _ in cells)
    }
    answers = {cell: row.measurement for cell, row in recording.answers.items()}

    def opposite(candidate: Candidate) -> Candidate:
        return max(places, key=lambda other: float(np.abs(places[other] - places[candidate]).sum()))

    opposites = {candidate: opposite(candidate) for candidate in places}
    return [replace(answers[opposites[candidate], load], batch_stats="") for candidate, load in cells]


def _places(values: Mapping[str, object], choices: Mapping[str, Sequence[object]]) -> list[float]:
    return [own.index(values[name]) / max(len(own) - 1, 1) for name, own in choices.items()]


def _order(value: object) -> tuple[bool, float, str]:
    return value != OFF, float(value) if isinstance(value, (int, float)) else 0.0, str(value)
