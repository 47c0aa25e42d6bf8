"""Recorded tables as other machines would have recorded them: what warm_start.py has a study begin with.

A related machine is the one that recorded, with service times, contention, overheads and variation changed (RELATED):
each figure is multiplied by what the simulated change makes of the simulated one, so that what the simulation gets
wrong of this server it gets wrong there too, as of any server of that kind. The contrary one is no machine at all:
each configuration has the figures of the one that is furthest from it, setting by setting.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from objectives.metrics import Measurement
from optimizer import batch_stats
from optimizer.batcher.simulator import ServiceTimes, Simulated
from optimizer.batcher.told import LATENCIES
from optimizer.problem import Problem
from optimizer.replay.recording import Recording
from optimizer.search.server_model import ServerModel, fit
from optimizer.search.service import THREADS, Group, group_of
from optimizer.space import OFF
from optimizer.store.trials_table import TrialsTable, read_foreign
from optimizer.trial import Candidate, LoadPoint, Trial

RECORDINGS = Path(__file__).parent / "tables" / "recordings"
SMALLEST_S = 1e-5  # below it a time in the queue is none


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

    def times(self, here: ServerModel, group: Group) -> ServiceTimes:
        known = here.times(group)
        sizes, busy = (np.arange(1, count + 1, dtype=np.float64) for count in known.seconds.shape)
        threaded = any(THREADS in path and str(value) == "2" for path, value in group[1])
        factor = self.speed * (self.threads if threaded else 1.0)
        return replace(known, seconds=known.seconds * factor * np.outer(sizes**self.bend, busy**self.contention))

    def server(self, here: ServerModel) -> ServerModel:
        around = replace(
            here.around,
            way_s=here.around.way_s * self.ways,
            gap_s=here.around.gap_s * self.ways,
            jitter=here.around.jitter * self.jitter,
        )
        return replace(here, times=lambda group: self.times(here, group), around=around)


RELATED = {
    "0.4x": Machine(0.4, bend=-0.05, contention=-0.2, threads=0.85, ways=0.6, jitter=0.7),
    "2.5x": Machine(2.5, bend=0.05, contention=0.2, threads=1.15, ways=1.5, jitter=1.5),
}
CONTRARY = "contrary"
SOURCES = (*RELATED, CONTRARY)


def write_recordings(name: str, numbers: Sequence[int], path: Path) -> None:
    """The mean of some of the recordings of each cell of a table, counted from 0."""
    read = read_foreign(RECORDINGS / f"{name}.csv")
    assert read is not None
    model, trials = read
    configurations = len({trial.candidate for trial in trials})
    found: dict[tuple[Candidate, LoadPoint], list[Measurement]] = {}
    for trial in trials:
        if trial.number // configurations in numbers:
            for load, measurement in trial.measurements:
                found.setdefault((trial.candidate, load), []).append(measurement)
    table = TrialsTable(path, model, {path: () for path, _ in trials[0].candidate.fields})
    places = {candidate: place for place, candidate in enumerate(dict.fromkeys(cell[0] for cell in found))}
    for (candidate, load), measurements in found.items():
        table.append(Trial(places[candidate], candidate), load, _mean(measurements))


def _mean(of: Sequence[Measurement]) -> Measurement:
    means: dict[str, Any] = {
        name: float(np.mean([getattr(one, name) for one in of]))
        for name, value in asdict(of[0]).items()
        if isinstance(value, float) and all(getattr(one, name) is not None for one in of)
    }
    executed = batch_stats.total(batch_stats.from_text(one.batch_stats) for one in of)
    requests = sum(one.requests or 0 for one in of)
    stable = all(one.stable for one in of)
    return replace(of[0], **means, batch_stats=batch_stats.to_text(executed), requests=requests, stable=stable)


def recorded_on(source: str, recording: Recording, problem: Problem) -> list[Trial]:
    """The trials of ``recording``, measured on the machine ``source`` of SOURCES instead."""
    cells = [(candidate, load) for candidate, load in recording.answers if load is not None]
    related = RELATED.get(source)
    found = _on(related, recording, problem, cells) if related else _contrary(recording, cells)
    trials: dict[Candidate, Trial] = {}
    for (candidate, load), measurement in zip(cells, found, strict=True):
        before = trials.get(candidate) or Trial(len(trials), candidate)
        trials[candidate] = replace(before, measurements=(*before.measurements, (load, measurement)))
    return list(trials.values())


def _on(
    machine: Machine, recording: Recording, problem: Problem, cells: Sequence[tuple[Candidate, LoadPoint]]
) -> list[Measurement]:
    here = fit([row.point for row in recording.answers.values() if row.load], problem, "latency-p95")
    there = machine.server(here)
    loaded = [(candidate, load.concurrency) for candidate, load in cells]
    return [
        _changed(recording.answers[cell].measurement, before, after, _factors(here, there, cell[0]), machine.ways)
        for cell, before, after in zip(cells, here.simulate(loaded), there.simulate(loaded), strict=True)
    ]


def _factors(here: ServerModel, there: ServerModel, candidate: Candidate) -> npt.NDArray[np.float64]:
    """Of the service times [sizes], with all instances busy."""
    before, after = (model.times(group_of(candidate)).seconds[:, -1] for model in (here, there))
    return np.asarray(after / before)


def _changed(
    measured: Measurement, before: Simulated, after: Simulated, factors: npt.NDArray[np.float64], ways: float
) -> Measurement:
    executed = batch_stats.from_text(measured.batch_stats)
    step = min(size for size, _, _ in executed)

    def factor(size: float) -> float:
        return float(factors[min(round(size / step), len(factors)) - 1])

    of_compute, waited = factor(measured.mean_batch_size or step), max(before.queue_avg_s, SMALLEST_S)
    ratios = {
        "throughput_infer_per_sec": after.throughput_infer_per_s / before.throughput_infer_per_s,
        **{
            f"latency_{name}_ms": getattr(after, f"latency_{name}_s") / getattr(before, f"latency_{name}_s")
            for name in LATENCIES
        },
        **dict.fromkeys(("compute_input_ms", "compute_infer_ms", "compute_output_ms"), of_compute),
        "queue_ms": max(after.queue_avg_s, SMALLEST_S) / waited,
        "network_ms": ways,
    }
    figures: dict[str, Any] = {name: (getattr(measured, name) or 0.0) * ratio for name, ratio in ratios.items()}
    longer = batch_stats.to_text((size, count, round(ns * factor(size))) for size, count, ns in executed)
    return replace(measured, batch_stats=longer, **figures)


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
