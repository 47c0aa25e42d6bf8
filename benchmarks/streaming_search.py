"""Compare search methods on made-up servers with continuous batching, which tritune's simulator does not describe.

    python benchmarks/streaming_search.py > benchmarks/streaming_search.md

Each server computes iterations: one token of each running sequence, and the prompts of those that it admits. The
search has bounds on the time to the first response and on the inter-token latency. Measurements have 5 % noise.
"""

from __future__ import annotations

import argparse
import heapq
import itertools
import math
import multiprocessing
import os
import shlex
import statistics
import sys
import time
from collections import deque
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any

import numpy as np
from search_methods import MADE_UP_NOISE
from search_report import MAX_TRIALS, as_count, as_percent
from tune_runs import row

from objectives.metrics import METRICS, QUANTILES, Measurement
from optimizer.config.search_space import ModelKind, SearchSpace
from optimizer.core.trial import Candidate, LoadPoint
from optimizer.machine import hardware
from optimizer.replay.engine import TOLERANCES, ReplayResult, Spread, recorded_problem, replay
from optimizer.store.recorded_rows import RecordedRow
from optimizer.store.recording import RecordedLoad, Recording, recorded_space

THREADS = "parameters.intra_op_thread_count.string_value"
SPACE = SearchSpace((2, 4, 8, 16, 32), (0, 2000, 10_000), ("none",), (1, 2, 3), {THREADS: ("1", "2")})
CONCURRENCIES = (1, 2, 4, 8, 16, 32, 64)
WARM_UP, REQUESTS = 100, 500  # of a measurement
SEEDS = range(4)  # of the servers; no constant of the search may be chosen on these
METHODS = {"simulated": MAX_TRIALS, "tpe": MAX_TRIALS, "random": MAX_TRIALS, "grid": 10_000}  # deployments at most
# share of the measurements that meets the bound on the time to first response, and on the inter-token latency
BOUNDS = {"both": (0.5, 0.5), "first response": (0.35, 0.9), "inter-token": (0.9, 0.35)}


@dataclass(frozen=True)
class StreamingServer:
    """A made-up server with continuous batching.

    An iteration takes ``fixed_s``, ``sequence_s`` for each running sequence and ``prompt_s`` for each token of a
    prompt that it admits. The tokens of all sequences of an instance fit in its share of ``kv_tokens``. Each further
    instance adds ``contention`` of the time. A second thread makes an instance ``thread_speedup`` times as fast and
    contention ``thread_contention`` times as strong. Lengths are geometric with the given means, or fixed.
    """

    seed: int
    fixed_s: float
    sequence_s: float
    prompt_s: float
    kv_tokens: int
    contention: float
    thread_speedup: float
    thread_contention: float
    prompt_tokens: int
    output_tokens: int
    has_fixed_lengths: bool

    def measure(self, candidate: Candidate, concurrency: int) -> Measurement:
        """Return the measurement of a closed loop."""
        return _Execution(self, candidate, concurrency).run()


def made_up_server(seed: int) -> StreamingServer:
    """Return a server with random parameters."""
    rng = np.random.default_rng(seed)
    fixed_s = 10 ** rng.uniform(-3.0, -1.8)
    return StreamingServer(
        seed,
        fixed_s,
        sequence_s=fixed_s * 10 ** rng.uniform(-2.0, -0.5),
        prompt_s=fixed_s * 10 ** rng.uniform(-2.5, -1.3),
        kv_tokens=round(10 ** rng.uniform(3.2, 4.3)),
        contention=rng.uniform(0.1, 1.0),
        thread_speedup=rng.uniform(1.1, 1.8),
        thread_contention=rng.uniform(1.2, 3.0),
        prompt_tokens=int(rng.integers(16, 256)),
        output_tokens=int(rng.integers(16, 96)),
        has_fixed_lengths=bool(rng.integers(2)),
    )


@dataclass(slots=True)
class _Request:
    sent_s: float
    prompt: int
    output: int
    first_s: float = math.nan
    end_s: float = math.nan


@dataclass(slots=True)
class _Instance:
    """An instance: its running requests with the tokens that they lack, and the iterations until its next event.

    ``event`` is the number of that event; earlier ones are void.
    """

    running: list[tuple[_Request, int]] = field(default_factory=list)
    iterations: int = 0
    event: int = -1
    is_idle: bool = True


class _Execution:
    """The discrete-event simulation of one measurement. Requests wait in one FIFO queue."""

    def __init__(self, server: StreamingServer, candidate: Candidate, concurrency: int) -> None:
        self._server, self._slots = server, candidate.max_batch_size
        self._delay_s = candidate.max_queue_delay_us / 1e6
        threads, count = dict(candidate.fields)[THREADS], candidate.instance_count
        slowdown = server.contention * (server.thread_contention if threads == "2" else 1.0)
        self._factor = (1 + slowdown * (min(count, concurrency) - 1)) / (
            server.thread_speedup if threads == "2" else 1
        )
        self._kv_tokens = server.kv_tokens / count
        self._concurrency = concurrency
        self._rng = np.random.default_rng(server.seed)
        self._instances = [_Instance() for _ in range(count)]
        self._queue: deque[_Request] = deque()
        self._events: list[tuple[float, int, _Instance]] = []
        self._order = itertools.count()
        self._finished: list[_Request] = []

    def run(self) -> Measurement:
        """Return the measurement after the warm-up."""
        for number in range(self._concurrency):
            self._send(1e-4 * number)
        while len(self._finished) < WARM_UP + REQUESTS:
            now, number, instance = heapq.heappop(self._events)
            if number != instance.event:
                continue
            self._end_iterations(instance, now)
            self._begin(instance, now)
            for other in self._instances:
                if other.is_idle and self._queue:
                    self._begin(other, now)
        return self._measurement()

    def _send(self, now: float) -> None:
        mean = self._server.prompt_tokens, self._server.output_tokens
        lengths = mean if self._server.has_fixed_lengths else (1 + self._rng.poisson(self._rng.exponential(mean)))
        self._queue.append(_Request(now, int(lengths[0]), int(min(lengths[1], 4 * mean[1]))))
        for instance in self._instances:
            if instance.is_idle:
                self._begin(instance, now)
                break

    def _begin(self, instance: _Instance, now: float) -> None:
        """Admit requests that have waited for the delay or fill the instance, and begin the next iterations.

        While no request can be admitted nothing changes until the first sequence ends, so that is the next event.
        """
        server, prompts, admitted, is_full = self._server, 0, list[_Request](), False
        free = self._slots - len(instance.running)
        used = sum(request.prompt + request.output for request, _ in instance.running)
        is_due = self._queue and (now - self._queue[0].sent_s >= self._delay_s - 1e-9 or len(self._queue) >= free)
        while is_due and self._queue and len(instance.running) < self._slots:
            request = self._queue[0]
            used += request.prompt + request.output
            if instance.running and used > self._kv_tokens:
                is_full = True
                break
            instance.running.append((self._queue.popleft(), request.output))
            admitted.append(request)
            prompts += request.prompt
        instance.is_idle, instance.iterations = not instance.running, 0
        end_s = now
        if instance.running:
            is_full = is_full or not self._queue or len(instance.running) == self._slots
            instance.iterations = min(tokens for _, tokens in instance.running) if is_full else 1
            iteration_s = self._factor * (server.fixed_s + server.sequence_s * len(instance.running))
            first_s = iteration_s + self._factor * server.prompt_s * prompts
            for request in admitted:
                request.first_s = now + first_s
            end_s += first_s + (instance.iterations - 1) * iteration_s
        elif self._queue:
            end_s = self._queue[0].sent_s + self._delay_s
        else:
            return
        instance.event = next(self._order)
        heapq.heappush(self._events, (end_s, instance.event, instance))

    def _end_iterations(self, instance: _Instance, now: float) -> None:
        left, finished = [], 0
        for request, tokens in instance.running:
            if tokens > instance.iterations:
                left.append((request, tokens - instance.iterations))
            else:
                request.end_s = now
                self._finished.append(request)
                finished += 1
        instance.running = left
        for _ in range(finished):
            self._send(now)

    def _measurement(self) -> Measurement:
        measured = self._finished[WARM_UP : WARM_UP + REQUESTS]
        seconds = measured[-1].end_s - self._finished[WARM_UP - 1].end_s
        times_ms = {
            "latency": [1e3 * (one.end_s - one.sent_s) for one in measured],
            "ttft": [1e3 * (one.first_s - one.sent_s) for one in measured],
            "itl": [1e3 * (one.end_s - one.first_s) / (one.output - 1) for one in measured if one.output > 1],
        }
        values: dict[str, Any] = {f"{name}_avg_ms": float(np.mean(own)) for name, own in times_ms.items()}
        for (name, own), (statistic, level) in itertools.product(times_ms.items(), QUANTILES.items()):
            values[f"{name}_{statistic}_ms"] = float(np.quantile(own, level))
        return Measurement(throughput_infer_per_sec=REQUESTS / seconds, requests=REQUESTS, stable=True, **values)


@lru_cache
def recorded(seed: int) -> Recording:
    """Return the table of the server ``seed``: every configuration at every load, without noise."""
    server = made_up_server(seed)
    loads = {candidate: set(CONCURRENCIES) for candidate in SPACE.candidates()}
    rows: dict[RecordedLoad, RecordedRow] = {}
    for candidate, concurrency in itertools.product(loads, CONCURRENCIES):
        load = LoadPoint(1, concurrency)
        measurement = server.measure(candidate, concurrency)
        rows[candidate, load] = RecordedRow(len(rows), candidate, load, measurement)
    known = frozenset(name for name in METRICS if name.startswith(("throughput", "latency-", "ttft-", "itl-")))
    return Recording(f"server {seed}", tuple(rows.values()), recorded_space(loads, 1), rows, 1, known, cpu_count=8)


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

    server: int
    kind: str
    method: str
    seed: int


def run_search(job: SearchJob) -> ReplayResult | None:
    """Return the result of the search without the simulator; None if no configuration meets the bounds."""
    recording = recorded(job.server)
    problem = replace(recorded_problem(recording, bounds_ms(recording, job.kind)), kind=ModelKind.STREAMING)
    best = recording.best(problem)
    if best is None:
        return None
    result = replay(recording, problem, best, job.method, job.seed, METHODS[job.method], noise=MADE_UP_NOISE)
    return replace(result, recommended=None)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=10, metavar="N", help="seeds of each search (10)")
    parser.add_argument(
        "--servers", type=int, nargs="+", default=SEEDS, metavar="SEED", help="made-up servers (0 to 3)"
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
    print("# Search of streaming models without a simulator: latest measurement\n")
    print(f"`{shlex.join(['python', 'benchmarks/streaming_search.py', *sys.argv[1:]])}`\n")
    print(_introduction(arguments.seeds, len(arguments.servers)))
    _print_table(arguments.methods, runs)
    machine = hardware.detect()
    print(f"\n{machine.cpu}, {machine.cpu_count} cores; {time.strftime('%Y-%m-%d')}")


def _introduction(seeds: int, servers: int) -> str:
    return f"""\
The iterations of {servers} made-up servers are simulated (`StreamingServer`), with {len(SPACE.candidates())}
configurations each. `simulated` searches without its simulator: the closed network of
`optimizer/simulator/closed_network.py`, corrected by Gaussian processes. Each cell has median / p90 over servers and
{seeds} seeds. **Until within 5 %** is the mean number of deployments; a search that did not reach it counts as
{MAX_TRIALS}. The bounds are on `ttft-p95` and `itl-p95`; the shares of the measurements that meet each of them are
{"; ".join(f"{kind}: {first:.0%} and {token:.0%}" for kind, (first, token) in BOUNDS.items())}.
"""


def _print_table(methods: Sequence[str], runs: dict[SearchJob, ReplayResult]) -> None:
    print(row("bounds", "search", "regret", "after 6", "after 10", "deployed until it stopped", "until within 5 %"))
    print(row("---", "---", *["--:"] * 5))
    for kind in (*BOUNDS, "all"):
        for method in methods:
            own = [run for job, run in runs.items() if job.method == method and kind in (job.kind, "all")]
            until = statistics.mean(min(run.until[TOLERANCES[0]].deployments, MAX_TRIALS) for run in own)
            shares = ([run.regret for run in own], *([run.regret_after(count) for run in own] for count in (6, 10)))
            deployed = Spread.of([run.effort.deployments for run in own])
            cells = [f"{as_percent(spread.median)} / {as_percent(spread.p90)}" for spread in map(Spread.of, shares)]
            print(
                row(kind, method, *cells, f"{as_count(deployed.median)} / {as_count(deployed.p90)}", f"{until:.1f}")
            )


if __name__ == "__main__":
    main()
