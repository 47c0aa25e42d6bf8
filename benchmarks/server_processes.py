"""Compare the throughput of several server processes with that of several instances, within a latency bound.

    python benchmarks/server_processes.py [--rounds 4] [--seconds 1] [--models mlp …] [--smoke]

In each round each configuration is deployed in turn, and the closed loop of the own client measures it at growing
loads until one misses the model's bound. Its throughput is the highest one within the bound, or 0 if there is none.
The order of the configurations is reversed in every second round. All configurations have ``dynamic_batching {}``
otherwise. Several server processes divide the CPUs, so with as many processes as CPUs each has one, and ONNX Runtime
starts one thread.
One process with one thread for each instance is the fair comparison.

Prints a Markdown table: the mean throughput, the mean load and p95 at it, the memory of the servers, and the ratio of
the throughput to that of the first configuration with its interval at 95 %.
"""

from __future__ import annotations

import argparse
import contextlib
import tempfile
from dataclasses import replace
from pathlib import Path
from statistics import fmean

from lib.intervals import ratio_within_bound
from lib.measured_model import make_own_client, prepare_model
from lib.output import measured_on, print_head, print_progress, row
from lib.records import this_machine
from objectives.metrics import Measurement
from optimizer.core.candidate import SERVER_PROCESSES, Candidate
from optimizer.core.interfaces import LoadGenerator
from optimizer.core.trial import LoadPoint
from optimizer.deploy.embedded_target import EmbeddedTarget
from optimizer.deploy.several_servers import ServerProcesses
from optimizer.deploy.target_settings import TargetSettings
from optimizer.machine.process_telemetry import ProcessTelemetry
from optimizer.options.run_options import RunOptions
from optimizer.options.values import usable_cpus
from optimizer.study.task import Task

MODELS = ("mlp", "dlrm")
# server processes, instances of each, threads of each instance (0: as many as the process has CPUs)
CONFIGURATIONS = ((1, 1, 0), (1, 2, 0), (1, 1, 1), (1, 2, 1), (2, 1, 0), (2, 2, 0))
THREADS = "parameters.intra_op_thread_count.string_value"
LOADS = (4, 8, 16, 32, 64, 128, 256)
SMOKE_MODELS, SMOKE_ROUNDS, SMOKE_SECONDS = ("mlp",), 2, 0.5
COLUMNS = (
    "model, bound",
    "server processes",
    "instances of each",
    "threads of each instance",
    "infer/s",
    "load",
    "p95 ms",
    "memory MB",
    "ratio",
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--seconds", type=float, default=1.0, help="length of a measurement (1)")
    parser.add_argument("--models", nargs="+", default=list(MODELS))
    parser.add_argument("--smoke", action="store_true", help="check that everything works: two short rounds")
    given = parser.parse_args()
    if given.smoke:
        given.models, given.rounds, given.seconds = SMOKE_MODELS, SMOKE_ROUNDS, SMOKE_SECONDS
    print_head(*COLUMNS)
    for model in given.models:
        prepared = prepare_model(RunOptions(model))
        results = compare(prepared, given.rounds, given.seconds)
        for configuration, points in results.items():
            print(table_row(prepared, configuration, points, results[CONFIGURATIONS[0]]), flush=True)
    print("\n" + measured_on(f"{given.rounds} rounds of {given.seconds:g} s a load", machine=this_machine()))


Configuration = tuple[int, int, int]
Points = list[tuple[LoadPoint, Measurement]]  # the best one of each round


def compare(prepared: Task, rounds: int, seconds: float) -> dict[Configuration, Points]:
    """Return the best points of each configuration."""
    results: dict[Configuration, Points] = {configuration: [] for configuration in CONFIGURATIONS}
    most = max(processes for processes, _, _ in CONFIGURATIONS)
    with tempfile.TemporaryDirectory() as scratch:
        logs = [Path(scratch, f"tritonserver-{number}.log") for number in range(most)]
        client = make_own_client(prepared, Path(scratch), prepared.problem.sla)
        servers = [
            EmbeddedTarget(prepared.source, TargetSettings(log, on_progress=print_progress, cpus=usable_cpus()))
            for log in logs
        ]
        with contextlib.closing(ServerProcesses(servers)) as target:
            for number in range(rounds):
                for configuration in CONFIGURATIONS if number % 2 == 0 else reversed(CONFIGURATIONS):
                    point = best_point(prepared, target, candidate(prepared, *configuration), client, seconds)
                    results[configuration].append(point)
                print_progress(f"{prepared.problem.model}: round {number + 1} of {rounds}")
    return results


def candidate(prepared: Task, processes: int, instances: int, threads: int) -> Candidate:
    own = prepared.dynamic_batching
    fields = dict(own.fields) | {SERVER_PROCESSES: processes, THREADS: str(threads)}
    return replace(own, instance_count=instances, fields=tuple(sorted(fields.items())))


def best_point(
    prepared: Task, target: ServerProcesses, candidate: Candidate, client: LoadGenerator, seconds: float
) -> tuple[LoadPoint, Measurement]:
    """Deploy ``candidate`` and return its best load within the bound.

    If no load is within the bound, return the smallest one, with throughput 0.
    """
    loads = [LoadPoint(prepared.problem.request_batch_size, concurrency) for concurrency in LOADS]
    measured: Points = []
    sla = prepared.problem.sla
    with target.deploy(candidate) as endpoint, ProcessTelemetry().record(endpoint) as usage:
        for load in loads:
            measured.append((load, client.measure(endpoint, load, seconds)))
            if not sla.is_met(measured[-1][1]):
                break
    within = [point for point in measured if sla.is_met(point[1])]
    load, best = max(within or measured[:1], key=lambda point: point[1].throughput_infer_per_sec or 0.0)
    if not within:
        best = replace(best, throughput_infer_per_sec=0.0)
    return load, replace(best, server_memory_bytes=usage.server_memory_bytes)


def table_row(prepared: Task, configuration: Configuration, points: Points, first: Points) -> str:
    own, base = ([m.throughput_infer_per_sec or 0.0 for _, m in side] for side in (points, first))
    ratio = ratio_within_bound(own, base) if points is not first else "1"
    figures = (
        f"{fmean(own):,.0f}",
        f"{fmean(load.concurrency for load, _ in points):.0f}",
        f"{fmean(m.latency_p95_ms or 0.0 for _, m in points):.3g}",
        f"{fmean(m.server_memory_bytes or 0.0 for _, m in points) / 1e6:.0f}",
    )
    name = f"{prepared.problem.model}, {prepared.problem.sla}"
    processes, instances, threads = configuration
    return row(name, str(processes), str(instances), str(threads or "default"), *figures, ratio)


if __name__ == "__main__":
    main()
