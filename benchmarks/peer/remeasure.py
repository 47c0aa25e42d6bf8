"""Winners measured again, in turn, by the same independent perf_analyzer runs.

Each round deploys every winner afresh, from its config.pbtxt, and the order changes from round to round: what drifts
on the machine meets all alike. A load that misses the bound by a little tells nothing of a configuration, so those
around the winner's own are measured too, and the best one that meets the bound in the median counts.
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

from optimizer import model_config, runtime
from optimizer.deploy.embedded import EmbeddedTarget
from optimizer.errors import MeasurementError
from optimizer.load.perf_analyzer import PerfAnalyzer
from optimizer.task import Task
from optimizer.trial import LoadPoint
from peer.search import Found

WINDOW_MS = 1667  # perf_analyzer's windows last a fifth longer: three of 2 s
PERCENT = (80, 90, 100, 110)  # of the winner's own load


@dataclass(frozen=True, slots=True)
class Sample:
    """One perf_analyzer run. ``throughput`` is in inferences a second."""

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
    """The loads around ``concurrency``; rounded away from it, so that small ones have neighbours too."""
    around = {
        percent * concurrency // 100 if percent < 100 else -(-percent * concurrency // 100) for percent in PERCENT
    }
    return sorted(load for load in around if load >= 1)


def measure_in_turn(
    what: Task,
    winners: dict[str, Found],
    *,
    rounds: int,
    window_ms: int,
    table: Path,
    say: Callable[[str], None],
) -> list[Sample]:
    """Every winner at every load around its own in every round; each sample is in ``table`` before the next."""
    samples: list[Sample] = []
    columns = [field.name for field in fields(Sample)]
    with table.open("w", newline="") as file:
        writer = csv.DictWriter(file, columns, lineterminator="\n")
        writer.writeheader()
        for number in range(rounds):
            order = list(winners.items())
            for name, found in order if number % 2 == 0 else reversed(order):
                say(f"round {number + 1} of {rounds}: {name}")
                for sample in _measure(what, name, found, number, window_ms, say):
                    samples.append(sample)
                    writer.writerow(asdict(sample))
                    file.flush()
    return samples


def _measure(
    what: Task, name: str, found: Found, number: int, window_ms: int, say: Callable[[str], None]
) -> list[Sample]:
    """One fresh deployment of the whole config.pbtxt, one perf_analyzer run a load."""
    installed = runtime.ensure(say)
    config = text_format.Parse(found.config, ModelConfig())
    candidate = model_config.candidate_of(config, tuple(what.problem.space.fields))
    batch = what.problem.request_batch_size
    samples = []
    with tempfile.TemporaryDirectory() as scratch:
        log = Path(scratch, "perf_analyzer.log")
        load_generator = PerfAnalyzer(
            installed.perf_analyzer,
            installed.perf_analyzer_libraries,
            log,
            input_data=what.input_data,
            shapes=what.shapes,
            window_ms=window_ms,
            patience=False,
        )
        source = replace(what.source, config=config)
        target = EmbeddedTarget(source, log=Path(scratch, "server.log"), say=say)
        with contextlib.closing(target), target.deploy_as_written(candidate) as endpoint:
            load_generator.warm_up(endpoint, LoadPoint(batch, found.concurrency))
            for concurrency in loads(found.concurrency):
                try:
                    measured = load_generator.measure(endpoint, LoadPoint(batch, concurrency))
                except MeasurementError as error:
                    say(f"{name} at concurrency {concurrency}: {error}")
                    continue
                throughput, p95_ms = measured.throughput_infer_per_sec, measured.latency_p95_ms
                assert throughput is not None
                assert p95_ms is not None
                samples.append(Sample(name, number, concurrency, throughput, p95_ms, measured.stable))
    return samples


def levels(samples: Sequence[Sample]) -> list[Level]:
    """By winner, in the order of the samples, then by load."""
    names = dict.fromkeys(sample.winner for sample in samples)
    found = []
    for name in names:
        own = [sample for sample in samples if sample.winner == name]
        for concurrency in sorted({sample.concurrency for sample in own}):
            found.append(Level(name, concurrency, tuple(s for s in own if s.concurrency == concurrency)))
    return found


def best_level(measured: Sequence[Level], winner: str, sla_ms: float) -> Level | None:
    """The most throughput among the loads whose p95 meets the bound in the median."""
    meeting = [level for level in measured if level.winner == winner and level.p95_ms <= sla_ms]
    return max(meeting, key=lambda level: level.throughput, default=None)


def round_ratios(ours: Level, theirs: Level) -> list[float]:
    """Throughput over throughput of the same round."""
    others = theirs.by_round()
    return [throughput / others[number] for number, throughput in ours.by_round().items() if others.get(number)]
