"""Convert recorded tables to other machines, for warm_start.py.

A related machine (RELATED) has different service times, contention, overheads and variation. Each measured metric is
multiplied by the ratio of two simulations, changed and unchanged, so the simulation's errors are the same on both
machines, as they are on similar servers. The contrary machine is no real machine: each configuration gets the
measurements of the one that is furthest from it, setting by setting.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from lib.recordings import TABLES
from objectives import batch_stats
from objectives.metrics import STATISTICS, Measurement
from optimizer.config.problem import Problem
from optimizer.config.search_space import OFF
from optimizer.core.candidate import Candidate
from optimizer.core.trial import LoadPoint, Trial
from optimizer.simulator.dynamic_batching_model import DynamicBatchingModel, fit
from optimizer.simulator.fitted_parameters import INTRA_OP_THREAD_COUNT, ExecutionSettings, execution_settings
from optimizer.simulator.scenario import ServiceTimes, SimulationResult
from optimizer.store.recording import Recording, read_recording
from optimizer.store.trials_table import TrialsTable, read_run_table

MIN_TIME_S = 1e-5  # a shorter queue time counts as zero


@dataclass(frozen=True)
class Machine:
    """The differences of another machine.

    ``speed`` is a factor on all service times. A batch takes ``size ** bend`` times as long, with ``busy`` instances
    ``busy ** contention`` times, and with two threads ``threads`` times. ``ways`` and ``jitter`` are factors on the
    overheads and on the variation.
    """

    speed: float
    bend: float
    contention: float
    threads: float
    ways: float
    jitter: float

    def times(self, base: DynamicBatchingModel, group: ExecutionSettings) -> ServiceTimes:
        known = base.times(group)
        sizes, busy = (np.arange(1, count + 1, dtype=np.float64) for count in known.seconds.shape)
        threaded = any(INTRA_OP_THREAD_COUNT in path and str(value) == "2" for path, value in group.fields)
        factor = self.speed * (self.threads if threaded else 1.0)
        return replace(known, seconds=known.seconds * factor * np.outer(sizes**self.bend, busy**self.contention))

    def server(self, base: DynamicBatchingModel) -> DynamicBatchingModel:
        overheads = replace(
            base.overheads,
            network_s=base.overheads.network_s * self.ways,
            gap_s=base.overheads.gap_s * self.ways,
            jitter=base.overheads.jitter * self.jitter,
        )
        return replace(base, times=lambda group: self.times(base, group), overheads=overheads)


RELATED = {
    "0.4x": Machine(0.4, bend=-0.05, contention=-0.2, threads=0.85, ways=0.6, jitter=0.7),
    "2.5x": Machine(2.5, bend=0.05, contention=0.2, threads=1.15, ways=1.5, jitter=1.5),
}
CONTRARY = "contrary"
SOURCES = (*RELATED, CONTRARY)


def write_recordings(name: str, numbers: Sequence[int], path: Path) -> None:
    """Write the mean of the selected recordings (counted from 0) of each cell of a table.

    The number of CPUs is that of the table, because early recordings do not have it.
    """
    read = read_run_table(TABLES / "recordings" / f"{name}.csv")
    assert read is not None
    trials, cpu_count = read.trials, read_recording(TABLES / f"{name}.csv").cpu_count
    configurations = len({trial.candidate for trial in trials})
    cells: dict[tuple[Candidate, LoadPoint], list[Measurement]] = {}
    for trial in trials:
        if trial.number // configurations in numbers:
            for load, measurement in trial.measurements:
                cells.setdefault((trial.candidate, load), []).append(measurement)
    table = TrialsTable(path, read.model, {path: () for path, _ in trials[0].candidate.fields}, cpu_count=cpu_count)
    places = {candidate: place for place, candidate in enumerate(dict.fromkeys(cell[0] for cell in cells))}
    for (candidate, load), measurements in cells.items():
        table.append(Trial(places[candidate], candidate), load, _mean(measurements))


def _mean(of: Sequence[Measurement]) -> Measurement:
    means: dict[str, Any] = {
        name: float(np.mean([getattr(one, name) for one in of]))
        for name, value in asdict(of[0]).items()
        if isinstance(value, float) and all(getattr(one, name) is not None for one in of)
    }
    executed = batch_stats.sum_by_size(batch_stats.from_text(one.batch_stats) for one in of)
    requests = sum(one.requests or 0 for one in of)
    stable = all(one.stable for one in of)
    return replace(of[0], **means, batch_stats=batch_stats.to_text(executed), requests=requests, stable=stable)


def recorded_on(source: str, recording: Recording, problem: Problem) -> list[Trial]:
    """Return the trials of ``recording`` as measured on the machine ``source`` of SOURCES."""
    cells = [(candidate, load) for candidate, load in recording.answers if load is not None]
    related = RELATED.get(source)
    measurements = _on(related, recording, problem, cells) if related else _contrary(recording, cells)
    trials: dict[Candidate, Trial] = {}
    for (candidate, load), measurement in zip(cells, measurements, strict=True):
        before = trials.get(candidate) or Trial(len(trials), candidate)
        trials[candidate] = replace(before, measurements=(*before.measurements, (load, measurement)))
    return list(trials.values())


def _on(
    machine: Machine, recording: Recording, problem: Problem, cells: Sequence[tuple[Candidate, LoadPoint]]
) -> list[Measurement]:
    base = fit([row.point for row in recording.answers.values() if row.load], problem, "latency-p95")
    other = machine.server(base)
    loaded = [(candidate, load.concurrency) for candidate, load in cells]
    return [
        _changed(recording.answers[cell].measurement, before, after, _factors(base, other, cell[0]), machine.ways)
        for cell, before, after in zip(cells, base.simulate(loaded), other.simulate(loaded), strict=True)
    ]


def _factors(
    base: DynamicBatchingModel, other: DynamicBatchingModel, candidate: Candidate
) -> npt.NDArray[np.float64]:
    """Return the factors on the service times [sizes] with all instances busy."""
    before, after = (model.times(execution_settings(candidate)).seconds[:, -1] for model in (base, other))
    return np.asarray(after / before)


def _changed(
    measured: Measurement,
    before: SimulationResult,
    after: SimulationResult,
    factors: npt.NDArray[np.float64],
    ways: float,
) -> Measurement:
    executed = batch_stats.from_text(measured.batch_stats)
    step = min(size for size, _, _ in executed)

    def factor(size: float) -> float:
        return float(factors[min(round(size / step), len(factors)) - 1])

    of_compute, waited = factor(measured.mean_batch_size or step), max(before.queue_avg_s, MIN_TIME_S)
    ratios = {
        "throughput_infer_per_sec": after.throughput_infer_per_sec / before.throughput_infer_per_sec,
        **{
            f"latency_{name}_ms": getattr(after, f"latency_{name}_s") / getattr(before, f"latency_{name}_s")
            for name in STATISTICS
        },
        **dict.fromkeys(("compute_input_ms", "compute_infer_ms", "compute_output_ms"), of_compute),
        "queue_ms": max(after.queue_avg_s, MIN_TIME_S) / waited,
        "network_ms": ways,
    }
    figures: dict[str, Any] = {name: (getattr(measured, name) or 0.0) * ratio for name, ratio in ratios.items()}
    longer = batch_stats.to_text((size, count, round(ns * factor(size))) for size, count, ns in executed)
    return replace(measured, batch_stats=longer, **figures)


def _contrary(recording: Recording, cells: Sequence[tuple[Candidate, LoadPoint]]) -> list[Measurement]:
    """Return the contrary machine's trials, without batch statistics, whose sizes do not fit the configuration."""
    choices = {name: sorted(values, key=_order) for name, values in recording.space.parameters().items()}
    places = {
        candidate: np.array(_places(recording.space.parameter_values(candidate) or {}, choices))
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
