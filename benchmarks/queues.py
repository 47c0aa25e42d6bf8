"""Measure what limits of the queue, timeouts and priorities gain below, near and above the capacity of a server.

    python benchmarks/queues.py [--rounds 6] [--seconds 2] [--smoke]

Prints one Markdown table for each request rate of one model, whose requests have the priorities 1 (20 %) and 2
(80 %); the latest tables are in queues.md. Each queue serves the same requests in turn. Goodput counts the inferences
per second that are served within the bound. The intervals are of the ratio to the queue without a policy, at 95 %.

The last line of each table is the policy that had the most goodput in the first half of the rounds, compared in the
second half, as a search would choose it. It may gain nothing.
"""

from __future__ import annotations

import argparse
import contextlib
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from lib.intervals import ratio_interval
from lib.measured_model import make_own_client, prepare_model
from lib.output import measured_on, print_head, print_progress, row
from objectives import latency_sketch, priority_stats
from objectives.metrics import METRICS, Measurement
from objectives.pooled_windows import pool_measurements
from objectives.sla import Sla
from optimizer.config.queue_policy import (
    DEFAULT_PRIORITY_LEVEL,
    MAX_QUEUE_SIZE,
    PRIORITY_LEVELS,
    PRIORITY_POLICY,
    TIMEOUT_ACTION,
    TIMEOUT_US,
)
from optimizer.core.candidate import Candidate, FieldValue
from optimizer.core.request_sizes import parse_priorities
from optimizer.core.trial import LoadPoint
from optimizer.deploy.embedded_target import EmbeddedTarget
from optimizer.deploy.target_settings import TargetSettings
from optimizer.measure.load_client.generators import OpenLoopGenerator
from optimizer.options.run_options import RunOptions

MODEL, BOUND_MS = "text_recognition-small", 60.0
PROFILE = Path(__file__).with_name("tables") / f"{MODEL}.yaml"
THREADS = ("parameters.intra_op_thread_count.string_value", "1")
PRIORITIES = parse_priorities("1*20|2*80")
CONCURRENCY = 16  # at which the capacity is measured
SHARES = (0.6, 0.9, 1.3)  # of the capacity
LEAST = 1e-3  # infer/s; replaces a goodput of 0, which has no logarithm
NO_POLICY = "no policy"
COLUMNS = (
    *("queue", "served/s", "goodput/s", "of that without a policy", "p95 ms", "failed"),
    *("priority 1: goodput/s", "of that without a policy", "p95 ms", "failed"),
)
LEVELS: Mapping[str, FieldValue] = {PRIORITY_LEVELS: 2, DEFAULT_PRIORITY_LEVEL: 2}
LOW = f"{PRIORITY_POLICY}.2"
TIMEOUT = round(1000 * BOUND_MS / 2)
QUEUES: Mapping[str, Mapping[str, FieldValue]] = {
    NO_POLICY: {},
    "max_queue_size 16": {MAX_QUEUE_SIZE: 16},
    "timeout of half the bound, REJECT": {TIMEOUT_US: TIMEOUT, TIMEOUT_ACTION: "REJECT"},
    "timeout of half the bound, DELAY": {TIMEOUT_US: TIMEOUT, TIMEOUT_ACTION: "DELAY"},
    "2 levels": LEVELS,
    "2 levels, timeout of both": {**LEVELS, TIMEOUT_US: TIMEOUT},
    "2 levels, timeout of level 2": {**LEVELS, f"{LOW}.default_timeout_microseconds": TIMEOUT},
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=6, help="measurements of each queue at each rate, at least 2")
    parser.add_argument("--seconds", type=float, default=2.0, help="length of a measurement")
    parser.add_argument("--smoke", action="store_true", help="few short rounds at one rate, to check the command")
    arguments = parser.parse_args()
    rounds, seconds = (2, 0.5) if arguments.smoke else (max(2, arguments.rounds), arguments.seconds)
    of_model = prepare_model(RunOptions(str(PROFILE)))
    batch, sla = of_model.problem.request_batch_size, Sla.from_bounds({"p95": BOUND_MS})
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        target = EmbeddedTarget(of_model.source, TargetSettings(folder / "server.log", on_progress=print_progress))
        open_loop = OpenLoopGenerator(
            log=folder / "open.log",
            input_data=of_model.input_data,
            shapes=of_model.shapes,
            sla=sla,
            counts_failures=True,
            priorities=PRIORITIES,
        )
        with contextlib.closing(target):
            with target.deploy(configured({})) as endpoint:
                closed = make_own_client(of_model, folder)
                full = closed.measure_windows(endpoint, LoadPoint(batch, concurrency=CONCURRENCY), seconds, 1)[0]
            capacity = (full.throughput_infer_per_sec or 0.0) / batch
            print(f"{MODEL}: {capacity:,.4g} requests/s at {CONCURRENCY} in flight; goodput is within {sla}.")
            shares = SHARES[-1:] if arguments.smoke else SHARES
            loads = {share: LoadPoint(batch, request_rate=float(f"{share * capacity:.3g}")) for share in shares}
            measured: dict[tuple[float, str], list[Measurement]] = {}
            for name, fields in QUEUES.items():
                with target.deploy(configured(fields)) as endpoint:
                    for share, load in loads.items():
                        windows = [open_loop.measure_windows(endpoint, load, seconds, 1)[0] for _ in range(rounds)]
                        measured[share, name] = windows
    for share, load in loads.items():
        print(f"\n**{share:.0%} of the capacity: {load.request_rate:,.4g} requests/s, {rounds} rounds**\n")
        print_table({name: measured[share, name] for name in QUEUES})
    print("\n" + measured_on(f"{rounds} rounds of {seconds:g} s"))


def configured(fields: Mapping[str, FieldValue]) -> Candidate:
    """Return the configuration of the model with these settings of the queue."""
    return Candidate(8, dynamic_batching=True, fields=tuple(sorted([THREADS, *fields.items()])))


def print_table(measured: Mapping[str, Sequence[Measurement]]) -> None:
    """Print a row for each queue, and the one that is chosen by the first half of its rounds."""
    print_head(*COLUMNS)
    plain = measured[NO_POLICY]
    for name, windows in measured.items():
        pooled = pool_measurements(windows)
        first = next((own for own in priority_stats.from_text(pooled.by_priority) if own.priority == 1), None)
        first_cells = ["–"] * 4  # the client stops early on an overloaded server, so nothing is known of a priority
        if first is not None:
            failed = first.errors / max(first.errors + first.served, 1)
            first_cells = [
                f"{sum(map(first_goodput, windows)) / len(windows):,.4g}",
                ratio(list(map(first_goodput, windows)), list(map(first_goodput, plain)), name),
                f"{first.latency_ms(0.95) or 0.0:.3g}",
                f"{failed:.1%}",
            ]
        overloaded = " (overloaded)" if pooled.overloaded else ""
        cells = [
            f"{name}{overloaded}",
            f"{pooled.throughput_infer_per_sec or 0.0:,.4g}",
            f"{pooled.goodput_infer_per_sec or 0.0:,.4g}",
            ratio(goodputs(windows), goodputs(plain), name),
            f"{pooled.latency_p95_ms or 0.0:.3g}",
            f"{METRICS['error-rate'].value(pooled) or 0.0:.1f} %",
        ]
        print(row(*cells, *first_cells))
    half = len(plain) // 2
    chosen = max(measured, key=lambda name: sum(goodputs(measured[name][:half])))
    gain = ratio(goodputs(measured[chosen][half:]), goodputs(plain[half:]), chosen)
    print(f"\nChosen by the goodput of the first half of the rounds: {chosen}; in the second half {gain}.")


def goodputs(windows: Sequence[Measurement]) -> list[float]:
    return [max(window.goodput_infer_per_sec or 0.0, LEAST) for window in windows]


def first_goodput(window: Measurement) -> float:
    """Return the infer/s of priority 1 within the bound."""
    for own in priority_stats.from_text(window.by_priority):
        if own.priority == 1 and own.sketch:
            return max(own.throughput_infer_per_sec * (1 - latency_sketch.share_over(own.sketch, BOUND_MS)), LEAST)
    return LEAST


def ratio(values: Sequence[float], others: Sequence[float], name: str) -> str:
    if name == NO_POLICY:
        return "1"
    if min(others) <= LEAST:
        return "– (nothing without a policy)"
    return ratio_interval(values, others).text(".3f")


if __name__ == "__main__":
    main()
