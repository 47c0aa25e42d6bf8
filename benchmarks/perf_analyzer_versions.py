"""Compare two releases of perf_analyzer and the project's own client on the same server under the same load.

    python benchmarks/perf_analyzer_versions.py [--rounds 12] [--seconds 3] [--models mlp:16 …] [--smoke]
    tests/newer_glibc.sh FOLDER python benchmarks/perf_analyzer_versions.py …

perf_analyzer 2.60 needs glibc 2.38: the second command runs all of it, with the server, in a chroot that has a newer
C library than this machine.

Each model is served with ``dynamic_batching {}`` by one embedded tritonserver. In each round each client measures
one closed loop for ``--seconds``, and the order changes from round to round. ``CPU µs a request`` is the CPU time of
the client's processes, with their start, over the requests that the server answered. The columns ``of 2.51.0`` are
ratios to the result of that release in the same round, with intervals at 95 %.

Prints a Markdown table for each model, and whether the other clients agree with that release: whether the interval of
each ratio is within 5 % of 1, contains 1, or neither.
"""

from __future__ import annotations

import argparse
import contextlib
import math
import statistics
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import astuple, dataclass, replace
from pathlib import Path

from lib.intervals import Interval, ratio_interval
from lib.measured_model import make_own_client, make_perf_analyzer, prepare_model
from lib.output import head, measured_on, print_progress, row
from lib.process_pool import children_cpu_seconds
from lib.records import this_machine
from optimizer.core.endpoint import Endpoint
from optimizer.core.errors import BadInputError
from optimizer.core.interfaces import LoadGenerator
from optimizer.core.trial import LoadPoint
from optimizer.deploy import perf_analyzer_release, runtime
from optimizer.deploy.embedded_target import EmbeddedTarget
from optimizer.deploy.target_settings import TargetSettings
from optimizer.measure.model_statistics import read_statistics
from optimizer.options.run_options import RunOptions

MODELS = ("mlp:16", "dlrm:26", "text_recognition-small:4")  # name:concurrency
SMOKE_MODELS, SMOKE_ROUNDS, SMOKE_SECONDS = ("mlp:16",), 2, 0.6
PINNED, NEWER = runtime.PINNED_PERF_ANALYZER, perf_analyzer_release.NEWER_VERSION
OWN = "own client"
AGREEMENT = 0.05  # of throughput or p95: a smaller difference changes no decision
COLUMNS = ("infer/s", "p95 ms", "CPU µs a request", f"infer/s, of {PINNED}", f"p95, of {PINNED}")


@dataclass(frozen=True)
class Result:
    """The measurement of one client in one round, and the CPU time of the client per request."""

    throughput: float
    p95_ms: float
    cpu_us: float


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--seconds", type=float, default=3.0, help="length of a measurement (3)")
    parser.add_argument("--models", nargs="+", default=list(MODELS), metavar="NAME:CONCURRENCY")
    parser.add_argument("--smoke", action="store_true", help="check that everything works: two short rounds of mlp")
    given = parser.parse_args()
    if given.smoke:
        given.models, given.rounds, given.seconds = SMOKE_MODELS, SMOKE_ROUNDS, SMOKE_SECONDS
    perf_analyzer_release.ensure_newer(print_progress)
    if problem := perf_analyzer_release.newer_problem():
        parser.exit(2, f"perf_analyzer {NEWER} cannot be measured: {problem}; start this by tests/newer_glibc.sh\n")
    for model in given.models:
        name, _, concurrency = model.partition(":")
        load = LoadPoint(1, concurrency=int(concurrency or 16))
        title = f"{name}, {load.concurrency} in flight, {given.rounds} rounds of {given.seconds:g} s"
        try:
            results = compare(name, load, given.rounds, given.seconds)
        except BadInputError as error:
            parser.exit(error.exit_code, f"{error}\n")
        print("\n".join(table(title, results)), flush=True)
    print("\n" + measured_on("medians", machine=this_machine()))


def compare(name: str, load: LoadPoint, rounds: int, seconds: float) -> dict[str, list[Result]]:
    """Return the results of each client, one per round."""
    prepared = prepare_model(RunOptions(name))
    installed = runtime.ensure(print_progress)
    load = replace(load, request_batch_size=prepared.problem.request_batch_size)
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        pinned = replace(make_perf_analyzer(prepared, folder), binary=installed.pinned_perf_analyzer)
        newer = perf_analyzer_release.newer_perf_analyzer()
        assert newer is not None
        own = make_own_client(prepared, folder)
        clients: dict[str, LoadGenerator] = {PINNED: pinned, NEWER: replace(pinned, binary=newer), OWN: own}
        results: dict[str, list[Result]] = {client: [] for client in clients}
        target = EmbeddedTarget(prepared.source, TargetSettings(folder / "server.log", on_progress=print_progress))
        with contextlib.closing(target), target.deploy(prepared.dynamic_batching) as endpoint:
            for generator in clients.values():  # the server is warm, and the programs are in memory
                generator.measure(endpoint, load, SMOKE_SECONDS)
            for number in range(rounds):
                order = list(clients)
                for client in order[number % len(order) :] + order[: number % len(order)]:
                    results[client].append(measure(clients[client], endpoint, load, seconds))
    return results


def measure(client: LoadGenerator, endpoint: Endpoint, load: LoadPoint, seconds: float) -> Result:
    before, cpu_seconds = answered(endpoint), children_cpu_seconds()
    measurement = client.measure(endpoint, load, seconds)
    cpu_seconds = children_cpu_seconds() - cpu_seconds
    assert measurement.throughput_infer_per_sec is not None
    assert measurement.latency_p95_ms is not None
    cpu_us = 1e6 * cpu_seconds / max(1, answered(endpoint) - before)
    return Result(measurement.throughput_infer_per_sec, measurement.latency_p95_ms, cpu_us)


def answered(endpoint: Endpoint) -> int:
    read = read_statistics(endpoint)
    return int(read.inference_stats.success.count) if read else 0


def table(title: str, results: Mapping[str, Sequence[Result]]) -> list[str]:
    """Return the Markdown table of one model, and the agreement of the other clients with the pinned release."""
    lines = ["", f"**{title}**", "", *head("client", *COLUMNS)]
    notes = []
    for client, rounds in results.items():
        name = client if client == OWN else f"perf_analyzer {client}"
        throughput, p95_ms, cpu_us = map(statistics.median, zip(*map(astuple, rounds), strict=True))
        cells = [f"{throughput:,.0f}", f"{p95_ms:.3g}", f"{cpu_us:.3g}"]
        if client == PINNED:
            lines.append(row(name, *cells, "1", "1"))
            continue
        ratios = [
            ratio_interval([one.throughput for one in rounds], [one.throughput for one in results[PINNED]]),
            ratio_interval([one.p95_ms for one in rounds], [one.p95_ms for one in results[PINNED]]),
        ]
        lines.append(row(name, *cells, *(ratio.text(".3f") for ratio in ratios)))
        notes.append(f"- {name}: throughput {agreement(ratios[0])}, p95 {agreement(ratios[1])}")
    return [*lines, "", *notes]


def agreement(ratio: Interval) -> str:
    """Return whether two clients agree, from the interval of the ratio of their results."""
    if math.isnan(ratio.low):
        return "measured once"
    if ratio.low >= 1 - AGREEMENT and ratio.high <= 1 + AGREEMENT:
        return f"agrees within {AGREEMENT:.0%}"
    return "no measurable difference" if ratio.low <= 1 <= ratio.high else f"**differs by {ratio.estimate - 1:+.1%}**"


if __name__ == "__main__":
    main()
