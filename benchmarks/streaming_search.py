"""Compare search methods on models with continuous batching: recorded tinygpt, and made-up servers.

    python benchmarks/streaming_search.py > benchmarks/streaming_search.md

``simulated`` is the search with the simulator of continuous batching, ``network`` the same with the closed network in
its place. tinygpt was recorded (tables/streaming/tinygpt.csv). The made-up servers are simulated with another
contention than the search assumes, and with a limit of the cache that it does not know. The search has bounds on the
time to the first response and on the inter-token latency. Measurements have 5 % noise.
"""

from __future__ import annotations

import argparse
import itertools
import math
import multiprocessing
import os
import shlex
import statistics
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import numpy as np
from continuous_batching import TABLE, TOKENS
from measurement_noise import NoisyServer
from search_methods import MADE_UP_NOISE
from search_report import MAX_TRIALS, as_count, as_percent
from tune_runs import row

from objectives.metrics import METRICS, Measurement
from optimizer.config.search_space import ModelKind, SearchSpace
from optimizer.core.request_sizes import TokenRequests, parse_token_lengths
from optimizer.core.trial import Candidate, LoadPoint
from optimizer.machine import hardware
from optimizer.replay.engine import TOLERANCES, ReplayResult, Spread, recorded_problem, replay
from optimizer.simulator.continuous_batching import (
    LATENCY_METRICS,
    BatchingScenario,
    PassTimes,
    RequestLengths,
    simulate_batching,
)
from optimizer.store.recorded_rows import RecordedRow
from optimizer.store.recording import RecordedLoad, Recording, read_recording, recorded_space

THREADS = "parameters.intra_op_thread_count.string_value"
SPACE = SearchSpace((2, 4, 8, 16, 32), (0, 2000, 10_000), ("none",), (1, 2, 3), {THREADS: ("1", "2")})
CONCURRENCIES = (1, 2, 4, 8, 16, 32, 64)
REQUESTS = 500  # of a measurement of a made-up server
RECORDED = "tinygpt"
SERVERS = (RECORDED, *map(str, range(4)))  # and the seeds of made-up ones
# deployments at most
METHODS = {"simulated": MAX_TRIALS, "network": MAX_TRIALS, "tpe": MAX_TRIALS, "random": MAX_TRIALS, "grid": 10_000}
# share of the measurements that meets the bound on the time to first response, and on the inter-token latency
BOUNDS = {"both": (0.5, 0.5), "first response": (0.35, 0.9), "inter-token": (0.9, 0.35)}


@dataclass(frozen=True)
class StreamingServer:
    """A made-up server with continuous batching.

    The tokens of all sequences of an instance fit in its share of ``kv_tokens``. Each further instance adds
    ``contention`` of the time. A second thread makes an instance ``thread_speedup`` times as fast and contention
    ``thread_contention`` times as strong.
    """

    times: PassTimes
    kv_tokens: int
    contention: float
    thread_speedup: float
    thread_contention: float
    tokens: TokenRequests

    def measure(self, candidate: Candidate, concurrency: int, lengths: RequestLengths) -> Measurement:
        """Return the measurement of a closed loop."""
        has_two = dict(candidate.fields)[THREADS] == "2"
        slowdown = self.contention * (self.thread_contention if has_two else 1.0)
        speed, count = self.thread_speedup if has_two else 1.0, candidate.instance_count
        scenario = BatchingScenario(
            candidate.max_batch_size,
            concurrency,
            replace(self.times, kv_tokens=self.kv_tokens // count),
            tuple((1 + slowdown * further) / speed for further in range(count)),
            candidate.max_queue_delay_us / 1e6,
            candidate.max_batch_size,
        )
        result = simulate_batching([scenario], lengths)[0]
        latencies: dict[str, Any] = {
            f"{metric.replace('-', '_')}_ms": 1e3 * result.latency_s(metric) for metric in LATENCY_METRICS
        }
        return Measurement(result.throughput_infer_per_s, requests=REQUESTS, stable=True, **latencies)


def made_up_server(seed: int) -> StreamingServer:
    """Return a server with random parameters. Lengths are fixed or lognormal."""
    rng = np.random.default_rng(seed)
    fixed_s = 10 ** rng.uniform(-3.0, -1.8)
    times = PassTimes(
        fixed_s,
        sequence_s=fixed_s * 10 ** rng.uniform(-2.0, -0.5),
        prompt_s=fixed_s * 10 ** rng.uniform(-2.5, -1.3),
        round_trip_s=fixed_s * 10 ** rng.uniform(-1.5, 0.0),
    )
    spread = ":0.7" if rng.integers(2) else ""
    prompt, output = (
        parse_token_lengths(f"lognormal:{mean}{spread}" if spread else str(mean))
        for mean in (int(rng.integers(16, 256)), int(rng.integers(16, 96)))
    )
    return StreamingServer(
        times,
        kv_tokens=round(10 ** rng.uniform(3.2, 4.3)),
        contention=rng.uniform(0.1, 1.0),
        thread_speedup=rng.uniform(1.1, 1.8),
        thread_contention=rng.uniform(1.2, 3.0),
        tokens=TokenRequests(prompt, output, "INPUT_IDS", "MAX_TOKENS"),
    )


@lru_cache
def recorded(server: str) -> tuple[Recording, TokenRequests]:
    """Return the table of a server, and its lengths. That of a made-up one has no noise."""
    if server == RECORDED:
        return read_recording(TABLE), TOKENS
    made_up = made_up_server(int(server))
    lengths = RequestLengths.of(made_up.tokens, int(server))
    loads = {candidate: set(CONCURRENCIES) for candidate in SPACE.candidates()}
    rows: dict[RecordedLoad, RecordedRow] = {}
    for candidate, concurrency in itertools.product(loads, CONCURRENCIES):
        load = LoadPoint(1, concurrency)
        rows[candidate, load] = RecordedRow(
            len(rows), candidate, load, made_up.measure(candidate, concurrency, lengths)
        )
    known = frozenset(name for name in METRICS if name.startswith(("throughput", "latency-", "ttft-", "itl-")))
    recording = Recording(
        f"server {server}", tuple(rows.values()), recorded_space(loads, 1), rows, 1, known, cpu_count=8
    )
    return recording, made_up.tokens


def bounds_ms(recording: Recording, kind: str) -> dict[str, float]:
    """Return the bounds of a kind of BOUNDS. Each is met by its share of the measurements."""
    bounds = {}
    for metric, share in zip(("ttft-p95", "itl-p95"), BOUNDS[kind], strict=True):
        values = [METRICS[metric].value(one.measurement) or 0.0 for one in recording.rows]
        bounds[metric] = float(f"{np.quantile(values, share):.2g}")
    return bounds


@dataclass(frozen=True)
class SearchJob:
    """One search of the table of a server under a kind of bounds."""

    server: str
    kind: str
    method: str
    seed: int


def run_search(job: SearchJob) -> ReplayResult | None:
    """Return the result of the search; None if no configuration meets the bounds."""
    recording, tokens = recorded(job.server)
    problem = replace(
        recorded_problem(recording, bounds_ms(recording, job.kind)),
        kind=ModelKind.STREAMING,
        tokens=None if job.method == "network" else tokens,
    )
    best = recording.best(problem)
    if best is None:
        return None
    method = "simulated" if job.method == "network" else job.method
    noisy = NoisyServer(recording.trials(), MADE_UP_NOISE, job.seed)
    result = replay(recording, problem, best, method, job.seed, METHODS[job.method], server=noisy)
    return replace(result, recommended=None)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=10, metavar="N", help="seeds of each search (10)")
    parser.add_argument(
        "--servers", nargs="+", default=SERVERS, metavar="SERVER", help=f"{RECORDED}, or seeds of made-up ones (all)"
    )
    parser.add_argument("--methods", nargs="+", default=tuple(METHODS), choices=tuple(METHODS))
    parser.add_argument("--processes", type=int, default=os.cpu_count() or 1, metavar="N")
    arguments = parser.parse_args()
    for name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
        os.environ.setdefault(name, "1")  # the processes fill the cores
    jobs = [
        SearchJob(*job)
        for job in itertools.product(arguments.servers, BOUNDS, arguments.methods, range(arguments.seeds))
    ]
    with ProcessPoolExecutor(arguments.processes, multiprocessing.get_context("spawn")) as pool:
        size = math.ceil(len(jobs) / len(arguments.servers))  # a process makes the table of a server once
        results = dict(zip(jobs, pool.map(run_search, jobs, chunksize=size), strict=True))
    runs = {job: result for job, result in results.items() if result is not None}
    print("# Search of models with continuous batching: latest measurement\n")
    print(f"`{shlex.join(['python', 'benchmarks/streaming_search.py', *sys.argv[1:]])}`\n")
    print(_introduction(arguments.seeds))
    made_up = [server for server in arguments.servers if server != RECORDED]
    for name, servers in ((RECORDED, [RECORDED]), (f"{len(made_up)} made-up servers", made_up)):
        own = {job: result for job, result in runs.items() if job.server in servers}
        if own:
            print(f"## {name[0].upper()}{name[1:]}\n")
            _print_table(arguments.methods, own)
            print()
    machine = hardware.detect()
    print(f"{machine.cpu}, {machine.cpu_count} cores; {time.strftime('%Y-%m-%d')}")


def _introduction(seeds: int) -> str:
    return f"""\
`simulated` is the search with the simulator of continuous batching (`optimizer/simulator/continuous_batching.py`).
`network` is the same with the closed network (`optimizer/simulator/closed_network.py`) in its place. Gaussian
processes correct both. Each cell has median / p90 over servers and {seeds} seeds. **Mean** is the mean regret at the
end of the search. **Until within 5 %** is the mean number of deployments; a search that did not reach it counts as
{MAX_TRIALS}.
The bounds are on `ttft-p95` and `itl-p95`; the shares of the measurements that meet each of them are
{"; ".join(f"{kind}: {first:.0%} and {token:.0%}" for kind, (first, token) in BOUNDS.items())}.
The made-up servers are simulated with the same passes as the search assumes, so the recorded table counts more.
"""


def _print_table(methods: Sequence[str], runs: dict[SearchJob, ReplayResult]) -> None:
    print(
        row(
            "bounds",
            "search",
            "regret",
            "mean",
            "after 4",
            "after 6",
            "deployed until it stopped",
            "until within 5 %",
        )
    )
    print(row("---", "---", *["--:"] * 6))
    for kind in (*BOUNDS, "all"):
        for method in methods:
            own = [run for job, run in runs.items() if job.method == method and kind in (job.kind, "all")]
            if not own:
                continue
            until = statistics.mean(min(run.until[TOLERANCES[0]].deployments, MAX_TRIALS) for run in own)
            shares = ([run.regret for run in own], *([run.regret_after(count) for run in own] for count in (4, 6)))
            deployed = Spread.of([run.effort.deployments for run in own])
            regret, *after = [f"{as_percent(own.median)} / {as_percent(own.p90)}" for own in map(Spread.of, shares)]
            mean = as_percent(statistics.mean(shares[0]))
            stopped = f"{as_count(deployed.median)} / {as_count(deployed.p90)}"
            print(row(kind, method, regret, mean, *after, stopped, f"{until:.1f}"))


if __name__ == "__main__":
    main()
