"""Measure the highest mean rate within a bound on p95 under each load shape, on one configuration.

    python benchmarks/load_shapes.py [--model dlrm] [--bound-ms 20] [--rounds 8] [--period 2] [--max-batch-size 64]

The configuration has the given max_batch_size, one instance, and dynamic batching without a delay. In each round the
distributions take turns on a fresh server, so that a drift of the machine affects all of them. The load search of
`tune --load rate` finds the highest rate of a round. It starts at the rate of the round before. A rate meets the
bound if the p95 of all requests of three whole periods meets it. Prints a Markdown table with the mean over the
rounds, its 95 % interval (Student's t), and the ratio to Poisson.
"""

from __future__ import annotations

import argparse
import contextlib
import math
import statistics
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from lib.intervals import mean_interval
from lib.measured_model import prepare_model
from lib.output import measured_on, print_head, print_progress, row
from objectives.metrics import Measurement
from objectives.sla import Sla
from optimizer.core.candidate import Candidate
from optimizer.core.endpoint import Endpoint
from optimizer.core.errors import MeasurementError
from optimizer.core.load_shapes import DEFAULTS
from optimizer.core.trial import LoadPoint
from optimizer.deploy.embedded_target import EmbeddedTarget
from optimizer.deploy.target_settings import TargetSettings
from optimizer.measure.load_client.arrivals import parse_arrivals
from optimizer.measure.load_client.generators import OpenLoopGenerator
from optimizer.measure.load_search import FIRST_RATE, LoadSearchRules, RateSearch
from optimizer.options.run_options import RunOptions
from optimizer.simulator.speed_correction import is_comparable
from optimizer.study.scheduler import MAX_COMPARED_RATES
from optimizer.study.task import Task

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
    prepared = prepare_model(options)
    candidate = Candidate(arguments.max_batch_size, dynamic_batching=True)
    names = ["constant", "poisson", *(f"{name}:{arguments.period:g}s" for name in DEFAULTS)]
    sla = Sla.from_bounds({"p95": arguments.bound_ms})
    highest: dict[str, list[tuple[float, float]]] = {name: [] for name in names}
    with tempfile.TemporaryDirectory() as scratch:
        generator = OpenLoopGenerator(
            log=Path(scratch) / "client.log",
            input_data=prepared.input_data,
            shapes=prepared.shapes,
            sla=sla,
        )
        for seed in range(arguments.rounds):
            for name in names:
                own = replace(generator, arrivals=parse_arrivals(name), seed=seed)
                start = next((rate for rate, _ in reversed(highest[name]) if rate), FIRST_RATE)
                rules = LoadSearchRules(1, 1, sla, first_load=start, open_loop=True, max_loads=MAX_COMPARED_RATES)
                with served(prepared, candidate, Path(scratch)) as endpoint:
                    highest[name].append(highest_rate(own, endpoint, rules, 3 * arguments.period))
                print_progress(f"round {seed + 1}, {name}: {highest[name][-1][0]:,.0f} req/s")
    print_head(*COLUMNS)
    for name in names:
        print(line(name, highest[name], highest["poisson"]))
    case = f"{arguments.model}, {candidate}, p95 <= {arguments.bound_ms:g} ms"
    print("\n" + measured_on(case, f"{arguments.rounds} rounds"))


@contextlib.contextmanager
def served(prepared: Task, candidate: Candidate, folder: Path) -> Iterator[Endpoint]:
    """Yield ``candidate`` on a server of its own."""
    target = EmbeddedTarget(prepared.source, TargetSettings(folder / "server.log", on_progress=print_progress))
    with contextlib.closing(target), target.deploy(candidate, fresh=True) as endpoint:
        yield endpoint


def highest_rate(
    generator: OpenLoopGenerator, endpoint: Endpoint, rules: LoadSearchRules, seconds: float
) -> tuple[float, float]:
    """Return the highest mean rate that met the bound and its p95 in ms; zeros if none did."""
    measured: list[tuple[LoadPoint, Measurement]] = []
    while (load := RateSearch(measured, rules).next_load()) is not None:
        try:
            result = generator.measure(endpoint, load, seconds)
        except MeasurementError as error:  # the client cannot keep up
            result = Measurement(reason=str(error))
        measured.append((load, result))
    met = [
        (load.request_rate or 0.0, result.latency_p95_ms or 0.0) for load, result in measured if is_met(result, rules)
    ]
    return max(met, default=(0.0, 0.0))


def is_met(result: Measurement, rules: LoadSearchRules) -> bool:
    """Return whether a measurement meets the bound, and its windows agree."""
    return is_comparable(result) and rules.sla.is_met(result)


def line(name: str, rounds: list[tuple[float, float]], poisson: list[tuple[float, float]]) -> str:
    """Return the row of a distribution."""
    rates = [rate for rate, _ in rounds]
    ratios = [rate / other if other else math.nan for rate, (other, _) in zip(rates, poisson, strict=True)]
    mean, peak = mean_interval(rates), getattr(parse_arrivals(name), "shape", None)
    cells = [
        f"{mean.estimate:,.0f}",
        f"{mean.low:,.0f} to {mean.high:,.0f}" if len(rates) > 1 else "unknown",
        mean_interval(ratios).text(".2f"),
        f"{mean.estimate * (peak.peak if peak else 1):,.0f}",
        f"{statistics.fmean(p95_ms for _, p95_ms in rounds):.1f}",
    ]
    return row(f"`{name}`", *cells)


if __name__ == "__main__":
    main()
