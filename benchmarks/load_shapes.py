"""Measure the highest mean rate within a bound on p95 under each load shape, on one configuration.

    python benchmarks/load_shapes.py [--model dlrm] [--bound-ms 20] [--rounds 8] [--period 2] [--max-batch-size 64]

The configuration has the given max_batch_size, one instance, and dynamic batching without a delay. In each round the
distributions take turns on a fresh server, so that a drift of the machine affects all of them. The highest rate of a
round is found by bisection: a rate meets the bound if the p95 of all requests of three whole periods meets it, in one
of two measurements. Prints a Markdown table with the mean over the rounds, its 95 % interval (Student's t), and the
ratio to Poisson.
"""

from __future__ import annotations

import argparse
import contextlib
import math
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from scipy import stats

from objectives.sla import Sla
from optimizer.core.errors import MeasurementError
from optimizer.core.interfaces import Endpoint
from optimizer.core.load_shapes import DEFAULTS
from optimizer.core.trial import Candidate, LoadPoint
from optimizer.deploy.embedded_target import EmbeddedTarget
from optimizer.machine import hardware
from optimizer.measure.load_client.arrivals import parse_arrivals
from optimizer.measure.load_client.generator import OpenLoopGenerator
from optimizer.options.run_options import RunOptions
from optimizer.study import task
from optimizer.study.task import Task

FIRST_RATE = 100.0
RESOLUTION = 1.04  # ratio of the rates between which the bisection ends
MOST_MEASUREMENTS = 14
COLUMNS = ("distribution", "highest mean req/s", "95 % interval", "of Poisson", "peak req/s", "p95 ms")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="dlrm")
    parser.add_argument("--bound-ms", type=float, default=20.0)
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--period", type=float, default=2.0, help="seconds of a shape")
    parser.add_argument("--max-batch-size", type=int, default=64)
    arguments = parser.parse_args()
    options = RunOptions(arguments.model, load="rate", request_batch_size=1)
    prepared = task.prepare_task(options, replace(hardware.detect(), gpus=()), say)
    candidate = Candidate(arguments.max_batch_size, dynamic_batching=True)
    names = ["constant", "poisson", *(f"{name}:{arguments.period:g}s" for name in DEFAULTS)]
    highest: dict[str, list[tuple[float, float]]] = {name: [] for name in names}
    with tempfile.TemporaryDirectory() as scratch:
        generator = OpenLoopGenerator(
            log=Path(scratch) / "client.log",
            input_data=prepared.input_data,
            shapes=prepared.shapes,
            sla=Sla.from_bounds({"p95": arguments.bound_ms}),
        )
        for seed in range(arguments.rounds):
            for name in names:
                own = replace(generator, arrivals=parse_arrivals(name), seed=seed)
                with served(prepared, candidate, Path(scratch)) as endpoint:
                    highest[name].append(highest_rate(own, endpoint, arguments.bound_ms, 3 * arguments.period))
                say(f"round {seed + 1}, {name}: {highest[name][-1][0]:,.0f} req/s")
    print("| " + " | ".join(COLUMNS) + " |")
    print("| --- |" + " --: |" * (len(COLUMNS) - 1))
    for name in names:
        print(line(name, highest[name], highest["poisson"]))
    machine, rounds = hardware.detect(), f"{arguments.rounds} rounds"
    print(f"\n{arguments.model}, {candidate}, p95 <= {arguments.bound_ms:g} ms; {rounds}; {machine}; ", end="")
    print(time.strftime("%Y-%m-%d"))


@contextlib.contextmanager
def served(prepared: Task, candidate: Candidate, folder: Path) -> Iterator[Endpoint]:
    """Yield ``candidate`` on a server of its own."""
    target = EmbeddedTarget(prepared.source, log=folder / "server.log", say=say)
    with contextlib.closing(target), target.deploy_fresh(candidate) as endpoint:
        yield endpoint


def highest_rate(
    generator: OpenLoopGenerator, endpoint: Endpoint, bound_ms: float, seconds: float
) -> tuple[float, float]:
    """Return the highest mean rate that met the bound and its p95 in ms; zeros if none did."""
    low, high, p95_ms, rate = 0.0, math.inf, 0.0, FIRST_RATE
    for _ in range(MOST_MEASUREMENTS):
        measured_ms = p95_at(generator, endpoint, rate, seconds)
        if measured_ms > bound_ms:  # perhaps another process has disturbed it
            measured_ms = p95_at(generator, endpoint, rate, seconds)
        if measured_ms <= bound_ms:
            low, p95_ms = rate, measured_ms
        else:
            high = rate
        if high < RESOLUTION * low:
            break
        rate = 2 * low if math.isinf(high) else math.sqrt(low * high) if low else high / 2
    return low, p95_ms


def p95_at(generator: OpenLoopGenerator, endpoint: Endpoint, rate: float, seconds: float) -> float:
    """Return the p95 in ms; infinite if the server is overloaded or the client cannot keep up."""
    try:
        result = generator.measure(endpoint, LoadPoint(1, request_rate=rate), seconds)
    except MeasurementError:
        return math.inf
    return math.inf if result.overloaded else result.latency_p95_ms or math.inf


def line(name: str, rounds: list[tuple[float, float]], poisson: list[tuple[float, float]]) -> str:
    """Return the row of a distribution."""
    rates = [rate for rate, _ in rounds]
    ratios = [rate / other if other else math.nan for rate, (other, _) in zip(rates, poisson, strict=True)]
    arrivals = parse_arrivals(name)
    peak = getattr(arrivals, "shape", None)
    cells = [
        f"{statistics.fmean(rates):,.0f}",
        interval(rates, "{:,.0f}"),
        f"{statistics.fmean(ratios):.2f} ({interval(ratios, '{:.2f}')})",
        f"{statistics.fmean(rates) * (peak.peak if peak else 1):,.0f}",
        f"{statistics.fmean(p95_ms for _, p95_ms in rounds):.1f}",
    ]
    return "| " + " | ".join([f"`{name}`", *cells]) + " |"


def interval(values: list[float], form: str) -> str:
    """Return the 95 % confidence interval of the mean."""
    if len(values) < 2:
        return "unknown"
    half = stats.t.ppf(0.975, len(values) - 1) * statistics.stdev(values) / math.sqrt(len(values))
    middle = statistics.fmean(values)
    return f"{form.format(middle - half)} to {form.format(middle + half)}"


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
