"""Measure the CPU time that Triton's own latency quantiles take.

    python benchmarks/latency_quantiles.py [--rounds 6] [--seconds 5] [--concurrency 16]

Each round starts one server of the built-in model mlp with ``summary_latencies`` and one without, in alternating
order, sends a closed loop with tune's own client, and reads the CPU time of the process of tritonserver (the model
executes in another process). Prints a Markdown table of each round and the medians; the latest one is in
latency_quantiles.md.
"""

from __future__ import annotations

import argparse
import contextlib
import math
import statistics
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path

import psutil

from lib.measured_model import write_requests
from lib.output import measured_on, print_head, print_progress, print_title
from lib.records import this_machine
from optimizer.core.candidate import Candidate
from optimizer.core.files import cache_folder
from optimizer.core.trial import LoadPoint
from optimizer.deploy import runtime
from optimizer.deploy.embedded_target import embedded_installation
from optimizer.deploy.installed_server import InstalledTarget
from optimizer.deploy.target_settings import TargetSettings
from optimizer.measure.load_client.generators import ClosedLoopGenerator
from optimizer.model.builders import build
from optimizer.options.server_options import latency_quantiles
from optimizer.watch.server_metrics import read_server

CANDIDATE = Candidate(8, dynamic_batching=True, max_queue_delay_us=500, instance_count=2)
WARM_UP_SECONDS = 1.0
P95 = 0.95


@dataclass(frozen=True)
class Cost:
    """CPU time of tritonserver in µs a request, and requests a second, on one server."""

    cpu_us: float
    rate: float


def measured(*, quantiles: bool, concurrency: int, seconds: float, folder: Path) -> Cost:
    """Return the cost of the requests to a new server. The requests are those that the server has counted."""
    source = build("mlp", {}, cache=cache_folder(), max_batch_size=64, kind="KIND_CPU", on_progress=print_progress)
    installation = embedded_installation(runtime.ensure(print_progress))
    if quantiles:
        installation = replace(installation, arguments=latency_quantiles((P95,)))
    target = InstalledTarget(source, installation, TargetSettings(folder / "tritonserver.log", exports_metrics=True))
    client = ClosedLoopGenerator(log=folder / "client.log", input_data=write_requests(source, folder))
    with contextlib.closing(target), target.deploy(CANDIDATE) as endpoint:
        assert endpoint.server_pid is not None, "the server runs on this machine"
        below = psutil.Process(endpoint.server_pid).children()
        (server,) = (process for process in below if process.name() == "tritonserver")
        url = f"http://{endpoint.metrics}/metrics"
        load = LoadPoint(1, concurrency=concurrency)
        client.measure(endpoint, load, WARM_UP_SECONDS)
        cpu_seconds, requests = _cpu_seconds(server), read_server(url, endpoint.model).requests
        measurement = client.measure(endpoint, load, seconds)
        cpu_seconds = _cpu_seconds(server) - cpu_seconds
        requests = read_server(url, endpoint.model).requests - requests
    return Cost(1e6 * cpu_seconds / requests, measurement.throughput_infer_per_sec or math.nan)


def _cpu_seconds(process: psutil.Process) -> float:
    times = process.cpu_times()
    return times.user + times.system


def main() -> None:
    """Measure both servers in each round and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--seconds", type=float, default=5.0, help="seconds of load on each server")
    parser.add_argument("--concurrency", type=int, default=16, help="requests in flight")
    arguments = parser.parse_args()
    without, with_quantiles = list[Cost](), list[Cost]()
    with tempfile.TemporaryDirectory() as folder:
        for number in range(arguments.rounds):
            for quantiles in (False, True) if number % 2 else (True, False):
                costs = with_quantiles if quantiles else without
                costs.append(
                    measured(
                        quantiles=quantiles,
                        concurrency=arguments.concurrency,
                        seconds=arguments.seconds,
                        folder=Path(folder),
                    )
                )
                print_progress(f"round {number + 1}: {costs[-1]}")
    print_title("CPU time of Triton's latency quantiles: latest measurement")
    print_head("round", "CPU µs a request without", "with", "requests/s without", "with", text=0)
    for number, (plain, other) in enumerate(zip(without, with_quantiles, strict=True), start=1):
        print(f"| {number} | {_cells(plain.cpu_us, other.cpu_us)} | {_cells(plain.rate, other.rate)} |")
    cpu, rate = ([[getattr(cost, name) for cost in costs] for costs in (without, with_quantiles)]
                 for name in ("cpu_us", "rate"))  # fmt: skip
    print(f"| median | {_cells(*map(statistics.median, cpu))} | {_cells(*map(statistics.median, rate))} |\n")
    differences = [other - plain for plain, other in zip(*cpu, strict=True)]
    print(f"The quantiles take {statistics.median(differences):.0f} µs of CPU time a request in the median round.\n")
    print(measured_on(machine=this_machine()))


def _cells(plain: float, other: float) -> str:
    return f"{plain:,.0f} | {other:,.0f}"


if __name__ == "__main__":
    main()
