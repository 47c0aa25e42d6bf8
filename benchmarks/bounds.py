"""Measure high percentiles with both load generators, and the gain of a limited queue within an error rate.

    python benchmarks/bounds.py [--rounds 6] [--seconds 4] [--tables tails queues] [--smoke]

Prints two Markdown tables; the latest ones are in bounds.md.

1. p99 and p99.9 of tune's own client, and p99 of perf_analyzer, in turn on one server at the same concurrency, for a
   model that computes and one that sleeps.
2. Goodput, p95 and error rate of one model at request rates around its capacity, with several limits of the queue. A
   rate counts if the p95 of all requests and the error rate are within their bounds.
"""

from __future__ import annotations

import argparse
import contextlib
import statistics
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from intervals import ratio_interval
from measured_model import make_own_client, make_perf_analyzer, prepare_model, say

from objectives.metrics import METRICS, Measurement
from objectives.pooled_windows import pool_measurements, pooled_quantile_ms
from objectives.sla import Sla
from optimizer.core.trial import Candidate, FieldValue, LoadPoint
from optimizer.deploy.embedded_target import EmbeddedTarget
from optimizer.deploy.target_settings import TargetSettings
from optimizer.machine import hardware
from optimizer.measure.load_client.generator import ClosedLoopGenerator, OpenLoopGenerator
from optimizer.options.run_options import RunOptions
from optimizer.study import task

TABLES = Path(__file__).with_name("tables")
CONCURRENCY = 16
QUEUE_MODEL, BOUND_MS, ERROR_PERCENT = "text_recognition-small", 60.0, 1.0
QUEUE_LIMITS = (0, 4, 8, 16)  # requests in the queue; 0 is no limit
SHARES = (0.7, 0.8, 0.9, 1.0, 1.1, 1.3)  # of the capacity
MAX_QUEUE_SIZE = "dynamic_batching.default_queue_policy.max_queue_size"
THREADS = ("parameters.intra_op_thread_count.string_value", "1")
TAIL_CANDIDATES = {
    "mlp": Candidate(64, dynamic_batching=True, fields=(THREADS,)),
    "sleep-1": Candidate(8, dynamic_batching=True),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--seconds", type=float, default=4.0, help="length of a measurement")
    parser.add_argument("--tables", nargs="+", choices=("tails", "queues"), default=["tails", "queues"])
    parser.add_argument("--smoke", action="store_true", help="one short round with few loads, to check the command")
    arguments = parser.parse_args()
    rounds, seconds = (1, 0.5) if arguments.smoke else (arguments.rounds, arguments.seconds)
    shares, limits = ((0.5, 1.2), (0, 4)) if arguments.smoke else (SHARES, QUEUE_LIMITS)
    if "tails" in arguments.tables:
        for model in TAIL_CANDIDATES:
            print_tails(model, rounds, seconds)
    if "queues" in arguments.tables:
        print_queues(rounds, seconds, shares, limits)
    print(f"\nmedians of {rounds} rounds; {hardware.detect()}; {time.strftime('%Y-%m-%d')}")


@contextlib.contextmanager
def prepared(model: str) -> Iterator[tuple[task.Task, EmbeddedTarget, Path]]:
    """Yield the task of the model, a server for it and a folder for logs."""
    of_model = prepare_model(RunOptions(str(TABLES / f"{model}.yaml")))
    with tempfile.TemporaryDirectory() as scratch:
        target = EmbeddedTarget(of_model.source, TargetSettings(Path(scratch) / "server.log", say=say))
        with contextlib.closing(target):
            yield of_model, target, Path(scratch)


def print_tails(model: str, rounds: int, seconds: float) -> None:
    """Print p99 and p99.9 of both load generators on one server of ``model``."""
    print(f"\n**{model}, {CONCURRENCY} in flight, {rounds} rounds of {seconds:g} s**\n")
    print_row("load generator", "infer/s", "p99 ms", "p99.9 ms", "requests", "p99, of own")
    print_row("---", *["--:"] * 5)
    with prepared(model) as (of_model, target, folder):
        own = make_own_client(of_model, folder, of_model.problem.sla)
        other = make_perf_analyzer(of_model, folder)
        load = LoadPoint(of_model.problem.request_batch_size, concurrency=CONCURRENCY)
        rows: dict[str, list[Measurement]] = {"own client": [], "perf_analyzer": []}
        with target.deploy(TAIL_CANDIDATES[model]) as endpoint:
            for _ in range(rounds):
                rows["own client"].append(own.measure_windows(endpoint, load, seconds, 1)[0])
                rows["perf_analyzer"].append(other.measure(endpoint, load, seconds))
    own_p99 = [one.latency_p99_ms or 0.0 for one in rows["own client"]]
    for name, measured in rows.items():
        ratio = ratio_interval([one.latency_p99_ms or 0.0 for one in measured], own_p99)
        print_row(
            name,
            f"{median(measured, 'throughput'):,.0f}",
            f"{median(measured, 'latency-p99'):.2f}",
            f"{pooled_quantile_ms(measured, 0.999):.2f}" if measured[0].latency_sketch else "–",
            f"{sum(one.requests or 0 for one in measured):,}",
            "1" if name == "own client" else ratio.text(".3f"),
        )


def print_queues(rounds: int, seconds: float, shares: tuple[float, ...], limits: tuple[int, ...]) -> None:
    """Print goodput, p95 and error rate at rates around the capacity, by the limit of the queue."""
    sla = Sla.from_bounds({"p95": BOUND_MS, "error-rate": ERROR_PERCENT})
    print(f"\n**{QUEUE_MODEL}: {sla}, {rounds} rounds of {seconds:g} s**\n")
    with prepared(QUEUE_MODEL) as (of_model, target, folder):
        batch = of_model.problem.request_batch_size
        closed = ClosedLoopGenerator(
            log=folder / "closed.log", input_data=of_model.input_data, shapes=of_model.shapes
        )
        with target.deploy(queued(0)) as endpoint:
            full = closed.measure_windows(endpoint, LoadPoint(batch, concurrency=CONCURRENCY), seconds, 1)[0]
        capacity = (full.throughput_infer_per_sec or 0.0) / batch
        print(f"Capacity: {capacity:,.4g} requests/s at {CONCURRENCY} in flight.\n")
        print_row(
            "max_queue_size", "req/s", "of capacity", "served/s", "goodput/s", "p95 ms", "failed", "within bounds"
        )
        print_row(*["--:"] * 8)
        best: dict[int, list[float]] = {}  # goodput in each round at the best rate within the bounds
        for limit in limits:
            open_loop = OpenLoopGenerator(
                log=folder / "open.log",
                input_data=of_model.input_data,
                shapes=of_model.shapes,
                sla=sla.latencies,
                counts_failures=True,
            )
            with target.deploy(queued(limit)) as endpoint:
                for share in shares:
                    load = LoadPoint(batch, request_rate=float(f"{share * capacity:.3g}"))
                    measured = [open_loop.measure_windows(endpoint, load, seconds, 1)[0] for _ in range(rounds)]
                    pooled = pool_measurements(measured)
                    is_met = sla.is_met(pooled) and not pooled.overloaded
                    goodputs = [one.goodput_infer_per_sec or 0.0 for one in measured]
                    if is_met and sum(goodputs) > sum(best.get(limit, [])):
                        best[limit] = goodputs
                    print_row(
                        str(limit or "none"),
                        f"{load.request_rate:,.4g}",
                        f"{share:.0%}",
                        f"{pooled.throughput_infer_per_sec or 0.0:,.4g}",
                        f"{pooled.goodput_infer_per_sec or 0.0:,.4g}",
                        f"{METRICS['latency-p95'].bounded_value(pooled) or 0.0:.3g}",
                        f"{METRICS['error-rate'].value(pooled) or 0.0:.2f} %",
                        "yes" if is_met else "overloaded" if pooled.overloaded else "no",
                    )
    print()
    for limit in limits:
        text = "no rate is within the bounds"
        if limit in best:
            text = f"most goodput within the bounds {statistics.median(best[limit]):,.4g}/s"
        if limit and limit in best and 0 in best:
            text += f", of that without a limit: {ratio_interval(best[limit], best[0]).text('.3f')}"
        print(f"- max_queue_size {limit or 'none'}: {text}")


def queued(limit: int) -> Candidate:
    """Return the configuration with this limit of the queue."""
    fields: list[tuple[str, FieldValue]] = [THREADS, *([(MAX_QUEUE_SIZE, limit)] if limit else [])]
    return Candidate(8, dynamic_batching=True, fields=tuple(sorted(fields)))


def median(measured: list[Measurement], metric: str) -> float:
    return statistics.median(METRICS[metric].value(one) or 0.0 for one in measured)


def print_row(*cells: str) -> None:
    print("| " + " | ".join(cells) + " |", flush=True)


if __name__ == "__main__":
    main()
