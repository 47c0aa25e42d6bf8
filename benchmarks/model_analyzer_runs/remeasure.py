"""Measure winners again, in turn, by the same independent perf_analyzer runs.

Each round deploys every winner on a fresh server from its config.pbtxt, in an order that changes between rounds, so
that drift of the machine affects all alike. A load that slightly misses the bound says nothing about a configuration.
So the loads around the winner's own are measured too, and the best one whose median meets the bound counts.
"""

from __future__ import annotations

import contextlib
import csv
import statistics
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path

from google.protobuf import text_format
from tritonclient.grpc.model_config_pb2 import ModelConfig

from lib.plain_server import perf_analyzer_for
from model_analyzer_runs.search_cost import StatedResult
from optimizer.config import model_config
from optimizer.core.errors import MeasurementError
from optimizer.core.trial import LoadPoint
from optimizer.deploy import runtime
from optimizer.deploy.embedded_target import EmbeddedTarget
from optimizer.deploy.target_settings import TargetSettings
from optimizer.study.task import Task

WINDOW_MS = 1667  # perf_analyzer's windows last a fifth longer: three of 2 s
PERCENT = (80, 90, 100, 110)  # of the winner's own load


@dataclass(frozen=True, slots=True)
class Sample:
    """One perf_analyzer run. ``throughput`` is in infer/s."""

    winner: str
    round: int
    concurrency: int
    throughput: float
    p95_ms: float
    stable: bool


@dataclass(frozen=True)
class Level:
    """One winner at one load, over all rounds."""

    winner: str
    concurrency: int
    samples: tuple[Sample, ...]

    @property
    def throughput(self) -> float:
        return statistics.median(sample.throughput for sample in self.samples)

    @property
    def p95_ms(self) -> float:
        return statistics.median(sample.p95_ms for sample in self.samples)

    def by_round(self) -> dict[int, float]:
        return {sample.round: sample.throughput for sample in self.samples}


def loads(concurrency: int) -> list[int]:
    """Return the loads around ``concurrency``, rounded away from it, so that small values have neighbors too."""
    around = {
        percent * concurrency // 100 if percent < 100 else -(-percent * concurrency // 100) for percent in PERCENT
    }
    return sorted(load for load in around if load >= 1)


def measure_in_turn(
    task: Task,
    winners: dict[str, StatedResult],
    *,
    rounds: int,
    window_ms: int,
    table: Path,
    on_progress: Callable[[str], None],
) -> list[Sample]:
    """Measure each winner at each load around its own in each round. Each sample is stored in ``table`` at once."""
    samples: list[Sample] = []
    columns = [field.name for field in fields(Sample)]
    with table.open("w", newline="") as file:
        writer = csv.DictWriter(file, columns, lineterminator="\n")
        writer.writeheader()
        for number in range(rounds):
            order = list(winners.items())
            for name, result in order if number % 2 == 0 else reversed(order):
                on_progress(f"round {number + 1} of {rounds}: {name}")
                for sample in _measure(task, name, result, number, window_ms, on_progress):
                    samples.append(sample)
                    writer.writerow(asdict(sample))
                    file.flush()
    return samples


def _measure(
    task: Task, name: str, result: StatedResult, number: int, window_ms: int, on_progress: Callable[[str], None]
) -> list[Sample]:
    """Deploy the complete config.pbtxt on a fresh server and run perf_analyzer once for each load."""
    installed = runtime.ensure(on_progress)
    config = text_format.Parse(result.config, ModelConfig())
    candidate = model_config.candidate_of(config, tuple(task.problem.space.fields))
    batch = task.problem.request_batch_size
    samples = []
    with tempfile.TemporaryDirectory() as scratch:
        log = Path(scratch, "perf_analyzer.log")
        load_generator = replace(perf_analyzer_for(task, installed, log), window_ms=window_ms)
        source = replace(task.source, config=config)
        target = EmbeddedTarget(source, TargetSettings(Path(scratch, "server.log"), on_progress=on_progress))
        with contextlib.closing(target), target.deploy(candidate, fresh=True) as endpoint:
            load_generator.warm_up(endpoint, LoadPoint(batch, result.concurrency))
            for concurrency in loads(result.concurrency):
                try:
                    measured = load_generator.measure(endpoint, LoadPoint(batch, concurrency))
                except MeasurementError as error:
                    on_progress(f"{name} at concurrency {concurrency}: {error}")
                    continue
                throughput, p95_ms = measured.throughput_infer_per_sec, measured.latency_p95_ms
                assert throughput is not None
                assert p95_ms is not None
                samples.append(Sample(name, number, concurrency, throughput, p95_ms, measured.stable))
    return samples


def levels(samples: Sequence[Sample]) -> list[Level]:
    """Return the levels by winner, in the order of the samples, and then by load."""
    names = dict.fromkeys(sample.winner for sample in samples)
    result = []
    for name in names:
        own = [sample for sample in samples if sample.winner == name]
        for concurrency in sorted({sample.concurrency for sample in own}):
            result.append(Level(name, concurrency, tuple(s for s in own if s.concurrency == concurrency)))
    return result


def best_level(measured: Sequence[Level], winner: str, sla_ms: float) -> Level | None:
    """Return the level with the highest throughput among those whose median p95 meets the bound."""
    meeting = [level for level in measured if level.winner == winner and level.p95_ms <= sla_ms]
    return max(meeting, key=lambda level: level.throughput, default=None)


def round_ratios(ours: Level, theirs: Level) -> list[float]:
    """Return the ratio of throughputs within each round."""
    others = theirs.by_round()
    return [throughput / others[number] for number, throughput in ours.by_round().items() if others.get(number)]
