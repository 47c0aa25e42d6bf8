"""Compare forecasts of the simulator of continuous batching, and of the closed network, with measurements of tinygpt.

    python benchmarks/continuous_batching.py > benchmarks/continuous_batching.md

A search is imitated by a few random configurations of tables/streaming/tinygpt.csv, each measured at two of its
loads. Both models are fitted to them and forecast all loads of the other configurations. The configurations are
divided in two halves, each with every choice of every setting. Constants of the prior were chosen on the half
``training``.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from random import Random
from typing import Protocol

import numpy as np

from lib.output import measured_on, print_title, row
from lib.recordings import STREAMING_TABLE, STREAMING_TOKENS
from objectives.arrays import FloatArray
from optimizer.config.problem import ModelKind, Problem
from optimizer.core.candidate import Candidate
from optimizer.core.trial import Point
from optimizer.replay.replay import recorded_problem
from optimizer.simulator import closed_network, continuous_batching_model
from optimizer.simulator.predicted_metrics import ConfigurationLoad, Performance, log_measurements, log_predictions
from optimizer.store.recording import Recording, read_recording

BOUNDS = {"ttft-p95": 200.0, "itl-p95": 30.0}
METRICS = ("throughput", "ttft-p95", "itl-p95")
CONFIGURATIONS = (2, 4, 8)  # that a search has measured
LOADS = 2  # of each of them
HALVES = ("training", "test")
TARGETS = {"throughput": 0.10, "ttft-p95": 0.15}  # median error


class Model(Protocol):
    """A fitted model of the server."""

    def simulate(self, cells: Sequence[ConfigurationLoad], threads: int = 1) -> Sequence[Performance]: ...


@dataclass(frozen=True)
class Forecasts:
    """Relative errors of one fit [cells, METRICS], and the times of the fit and of a forecast."""

    errors: FloatArray
    fit_s: float
    cell_s: float


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=20, metavar="N", help="random choices of the measured ones (20)")
    arguments = parser.parse_args()
    recording = read_recording(STREAMING_TABLE)
    problem = replace(recorded_problem(recording, BOUNDS), kind=ModelKind.STREAMING, tokens=STREAMING_TOKENS)
    print_title("Forecasts of continuous batching: latest measurement")
    print(_introduction(arguments.seeds))
    for half, configurations in halves(recording).items():
        print(f"## Configurations: {half}\n")
        print(row("configurations measured", "model", *METRICS, "fit", "forecast of a load"))
        print(row("--:", "---", *["--:"] * (len(METRICS) + 2)))
        for count, name in itertools.product(CONFIGURATIONS, MODELS):
            runs = [forecasts(name, problem, sample(configurations, count, seed)) for seed in range(arguments.seeds)]
            errors = np.abs(np.concatenate([run.errors for run in runs]))
            cells = [f"{np.median(own):.1%} / {np.quantile(own, 0.9):.1%}" for own in errors.T]
            fit_s, cell_s = (statistics.median(getattr(run, field) for run in runs) for field in ("fit_s", "cell_s"))
            print(row(str(count), name, *cells, f"{fit_s:.2f} s", f"{1e3 * cell_s:.2f} ms"), flush=True)
        print()
    print(measured_on())


def _introduction(seeds: int) -> str:
    targets = ", ".join(f"{error:.0%} in {metric}" for metric, error in TARGETS.items())
    return f"""\
Median / p90 of the relative errors over the other configurations at all loads, and over {seeds} random choices of the
measured ones. A measured configuration has {LOADS} of its {LOADS * 2} loads. The latencies are p95. The target is a
median error of at most {targets}. No constant of the simulator was chosen with the half `test`.
"""


MODELS: Mapping[str, Callable[..., Model]] = {
    "simulator": continuous_batching_model.fit,
    "closed network": closed_network.fit,
}


def halves(recording: Recording) -> dict[str, dict[Candidate, list[Point]]]:
    """Return the measured points of each configuration, in two halves.

    A half has the configurations whose settings have an even sum of places (a half fraction of a factorial design).
    """
    by_candidate: dict[Candidate, list[Point]] = {}
    for one in recording.rows:
        by_candidate.setdefault(one.candidate, []).append(one.point)
    choices = recording.space.parameters()

    def parity(candidate: Candidate) -> int:
        values = recording.space.parameter_values(candidate)
        assert values is not None
        return sum(choices[name].index(value) for name, value in values.items()) % 2

    return {
        half: {candidate: points for candidate, points in by_candidate.items() if parity(candidate) == k}
        for k, half in enumerate(HALVES)
    }


def sample(configurations: dict[Candidate, list[Point]], count: int, seed: int) -> tuple[list[Point], list[Point]]:
    """Return the measured points of ``count`` random configurations, and all points of the others."""
    rng = Random(f"{count} {seed}")
    chosen = rng.sample(list(configurations), count)
    measured = [point for candidate in chosen for point in rng.sample(configurations[candidate], LOADS)]
    return measured, [point for candidate, own in configurations.items() if candidate not in chosen for point in own]


def forecasts(name: str, problem: Problem, points: tuple[list[Point], list[Point]]) -> Forecasts:
    """Return the errors of a model that is fitted to the first points and forecasts the second ones."""
    measured, others = points
    latencies = METRICS[1:]
    began = time.perf_counter()
    model = MODELS[name](measured, problem, latencies)
    fitted = time.perf_counter()
    results = model.simulate([(point.candidate, point.load.concurrency) for point in others])
    ended = time.perf_counter()
    predicted = log_predictions(results, latencies)
    actual = log_measurements(others, latencies)
    return Forecasts(np.expm1(predicted - actual), fitted - began, (ended - fitted) / len(others))


if __name__ == "__main__":
    main()
