"""Compare the throughput with system shared memory to that with tensors in messages, for both load generators.

    python benchmarks/shared_memory.py [--rounds 12] [--seconds 2] [--models mlp:16 …] [--smoke]

Each model is served with ``dynamic_batching {}`` by one embedded tritonserver. In each round each load generator, in
turn, measures a closed loop without and with shared memory; the order alternates. ``mlp`` has small inputs and
outputs, ``resnext50-32x4d`` inputs of 588 KiB. ``wide`` returns twice its input of 1 MiB, so it computes almost
nothing, and nearly all of its time is spent on copies.

Prints a Markdown table: the mean throughput and p95 without and with shared memory, and the ratio of the throughputs
with its interval at 95 %.
"""

from __future__ import annotations

import argparse
import contextlib
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from lib.intervals import ratio_interval
from lib.measured_model import make_own_client, make_perf_analyzer, prepare_model
from lib.output import measured_on, print_head, print_progress, row
from lib.records import this_machine
from optimizer.core.endpoint import SharedMemory
from optimizer.core.interfaces import LoadGenerator
from optimizer.core.trial import LoadPoint
from optimizer.deploy.embedded_target import EmbeddedTarget
from optimizer.deploy.target_settings import TargetSettings
from optimizer.options.run_options import RunOptions
from optimizer.study.task import Task
from tests.repositories import write_wide

MODELS = ("mlp:16", "resnext50-32x4d:2", "wide:4")  # name:concurrency
SMOKE_MODELS, SMOKE_ROUNDS, SMOKE_SECONDS = ("mlp:16", "wide:4"), 2, 0.5
COLUMNS = (
    "model",
    "load generator",
    "infer/s",
    "with shared memory",
    "p95 ms",
    "with shared memory",
    "ratio of infer/s",
)
SHARED = SharedMemory("system")


@dataclass(frozen=True)
class Pair:
    """Inferences per second and p95 in ms of one round, without and with shared memory."""

    throughputs: tuple[float, float]
    p95_ms: tuple[float, float]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--seconds", type=float, default=2.0, help="length of a measurement (2)")
    parser.add_argument("--models", nargs="+", default=list(MODELS), metavar="NAME:CONCURRENCY")
    parser.add_argument("--smoke", action="store_true", help="check that everything works: two short rounds")
    given = parser.parse_args()
    if given.smoke:
        given.models, given.rounds, given.seconds = SMOKE_MODELS, SMOKE_ROUNDS, SMOKE_SECONDS
    print_head(*COLUMNS, text=2)
    for model in given.models:
        name, _, concurrency = model.partition(":")
        for generator, pairs in compare(name, int(concurrency or 1), given.rounds, given.seconds).items():
            print(table_row(f"{name}, {concurrency or 1} in flight", generator, pairs), flush=True)
    print("\n" + measured_on(f"{given.rounds} rounds of {given.seconds:g} s", machine=this_machine()))


def compare(name: str, concurrency: int, rounds: int, seconds: float) -> dict[str, list[Pair]]:
    """Return the pairs of each load generator."""
    results: dict[str, list[Pair]] = {}
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        prepared = prepare(name, folder)
        load = LoadPoint(prepared.problem.request_batch_size, concurrency)
        generators = make_generators(prepared, folder)
        target = EmbeddedTarget(prepared.source, TargetSettings(folder / "server.log", on_progress=print_progress))
        with contextlib.closing(target), target.deploy(prepared.dynamic_batching) as endpoint:
            for number in range(rounds):
                for each, ways in generators.items():
                    places = (0, 1) if number % 2 == 0 else (1, 0)
                    done = {place: ways[place].measure(endpoint, load, seconds) for place in places}
                    first, second = done[0], done[1]
                    results.setdefault(each, []).append(
                        Pair(
                            (first.throughput_infer_per_sec or 0.0, second.throughput_infer_per_sec or 0.0),
                            (first.latency_p95_ms or 0.0, second.latency_p95_ms or 0.0),
                        )
                    )
    return results


def prepare(name: str, folder: Path) -> Task:
    """Return the task of a reference model, or of ``wide``, which is written to ``folder``."""
    options = RunOptions(name)
    if name == "wide":
        write_wide(folder / "models")
        options = RunOptions(name, model_repository=str(folder / "models"))
    return prepare_model(options)


def make_generators(prepared: Task, folder: Path) -> dict[str, Sequence[LoadGenerator]]:
    """Return each load generator without and with shared memory."""
    perf_analyzer, own = make_perf_analyzer(prepared, folder), make_own_client(prepared, folder)
    return {
        "perf_analyzer": (perf_analyzer, replace(perf_analyzer, shared_memory=SHARED)),
        "own client": (own, replace(own, shared_memory=SHARED)),
    }


def table_row(model: str, generator: str, pairs: Sequence[Pair]) -> str:
    throughputs = np.array([pair.throughputs for pair in pairs])
    p95_ms = np.array([pair.p95_ms for pair in pairs]).mean(axis=0)
    ratio = ratio_interval(throughputs[:, 1].tolist(), throughputs[:, 0].tolist())
    mean = throughputs.mean(axis=0)
    figures = (f"{mean[0]:,.0f}", f"{mean[1]:,.0f}", f"{p95_ms[0]:.3g}", f"{p95_ms[1]:.3g}", ratio.text(".2f"))
    return row(model, generator, *figures)


if __name__ == "__main__":
    main()
