"""Simulated servers, whose parameters no search method knows, and their trials tables.

A table has every configuration at every load, without noise, so a search can find the exact best row and any regret
is its own. Only `linear` matches the searcher's model; the service times of the others bend, have steps, or depend on
a field that the simulator does not know.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np

from objectives.arrays import FloatArray
from objectives.metrics import Measurement
from optimizer.config.search_space import SearchSpace
from optimizer.core.candidate import ORT_SETTING_PATHS, Candidate, FieldValue
from optimizer.core.trial import LoadPoint, Trial
from optimizer.simulator.dynamic_batching_model import simulated_measurement
from optimizer.simulator.scenario import (
    ClosedLoopLoad,
    MeasurementInterval,
    OpenLoopLoad,
    Overheads,
    Scenario,
    ServiceTimes,
    SimulatedLoad,
    SimulationTrace,
)
from optimizer.simulator.simulate import lognormal_jitter, simulate_many, trace
from optimizer.store.trials_table import TrialsTable

REQUEST_BATCH_SIZE = 4
CONCURRENCIES = (2, 4, 8, 16, 32, 64)
THREADS = "parameters.intra_op_thread_count.string_value"
DELAYS_US = ("off", 0, 200, 1000, 5000)
INTERVAL = MeasurementInterval(warm_up_requests=1000, requests=16_000)  # long enough for a small random error
GLANCE = MeasurementInterval(warm_up_requests=150, requests=1500)
POLICIES = ("none", "max/2")
PLAIN = SearchSpace((4, 16, 64, 256), DELAYS_US, POLICIES, (1, 2, 3, 4), request_batch_size=REQUEST_BATCH_SIZE)
THREADED = SearchSpace((8, 32, 128), DELAYS_US, POLICIES, (1, 2, 3), {THREADS: ("1", "2")}, REQUEST_BATCH_SIZE)
# name -> seed of its parameters, chosen so that under two or three of the bounds of search_methods.py no baseline
# comes within 10 % of the best: on the servers of many seeds nothing beats plain dynamic batching
SERVERS = {"linear": 1, "steps": 12, "kink": 3, "threads": 34, "sublinear": 35}
# settings of ONNX Runtime: the value that is not the default, and the range of its effect on the speed, about that of
# the models of execution.md
EXECUTION_DEFAULTS: Mapping[str, FieldValue] = {"allow_spinning": "1", "execution_mode": "0", "graph_level": 0}
EXECUTION_SPEEDS: Mapping[str, tuple[FieldValue, float, float]] = {
    "allow_spinning": ("0", 1.38, 1.48),
    "execution_mode": ("1", 0.45, 0.6),
    "graph_level": (1, 0.77, 1.03),
}
# time of a batch relative to that of one sample, by the number of samples
CURVES: Mapping[str, Callable[[FloatArray], FloatArray]] = {
    "linear": lambda sizes: sizes,
    "steps": lambda sizes: 24 * np.ceil(sizes / 24),  # tiles that are computed whole
    "kink": lambda sizes: sizes + 1.5 * np.maximum(sizes - 48, 0),  # batches that exceed a cache take longer
    "sublinear": lambda sizes: 4 * sizes**0.7,  # larger batches use the machine better
}


@dataclass(frozen=True)
class SimulatedServer:
    """The parameters of a simulated server, the truth behind a table.

    A batch alone takes ``fixed_s + per_sample_s * curve``; each further busy instance adds ``contention`` of it,
    more than in proportion. Each request spends ``network_s`` outside queue and computation. A second thread makes
    an instance ``thread_speedup`` times as fast and contention ``thread_contention`` times as strong. ``speeds`` are
    the factors on the speed of other settings, by path and value.
    """

    name: str
    fixed_s: float
    per_sample_s: float
    contention: float
    network_s: float
    jitter: float
    seed: int
    curve: str = "linear"
    thread_speedup: float = 1.0
    thread_contention: float = 1.0
    speeds: Mapping[tuple[str, FieldValue], float] = field(default_factory=dict)
    space: SearchSpace = field(default=PLAIN, repr=False)
    concurrencies: tuple[int, ...] = CONCURRENCIES

    def measure(self, cells: Sequence[tuple[Candidate, int]], threads: int = 1) -> list[Measurement]:
        """Return the measurement of each (candidate, concurrency) by perf_analyzer and the server's statistics."""
        jobs, jitter = self._jobs(cells), lognormal_jitter(self.jitter, self.seed)
        result = simulate_many(jobs, jitter=jitter, threads=threads, interval=INTERVAL)
        traces = (trace(job, jitter=jitter) for job in jobs)
        return [simulated_measurement(*pair, self.network_s) for pair in zip(result, traces, strict=True)]

    def shares_in_time(self, cells: Sequence[tuple[Candidate, int]], deadline_ms: float) -> list[float]:
        """Return the share of requests of each (candidate, concurrency) whose latency is within the deadline."""
        jitter, shares = lognormal_jitter(self.jitter, self.seed), []
        for job in self._jobs(cells):
            executed = trace(job, jitter=jitter, interval=INTERVAL)
            served = np.flatnonzero(executed.execution >= 0)[INTERVAL.warm_up_requests or 0 :]
            end_s = executed.end_s[executed.execution[served]] + self.network_s / 2
            latencies_s = end_s[np.isfinite(end_s)] - executed.sent_s[served][np.isfinite(end_s)]
            shares.append(float(np.mean(1e3 * latencies_s <= deadline_ms)))
        return shares

    def glance(self, cells: Sequence[tuple[Candidate, int]], threads: int = 1) -> list[tuple[float, float]]:
        """Return throughput (infer/s) and p95 (ms) of each cell in a short, noisy measurement."""
        jitter = lognormal_jitter(self.jitter, self.seed)
        result = simulate_many(self._jobs(cells), jitter=jitter, threads=threads, interval=GLANCE)
        return [(one.throughput_infer_per_sec, 1e3 * one.latency_p95_s) for one in result]

    def open_loop(self, candidate: Candidate, arrivals_s: FloatArray, slowness: float, seed: int) -> SimulationTrace:
        """Return a trace of requests that arrive at these times from 0, if all takes ``slowness`` times as long."""
        job = self.scenario(candidate, OpenLoopLoad(arrivals_s))
        service = ServiceTimes(slowness * job.service.seconds, job.service.step)
        return trace(
            replace(job, service=service),
            jitter=lognormal_jitter(self.jitter, seed),
            interval=MeasurementInterval(0),
        )

    def scenario(self, candidate: Candidate, load: SimulatedLoad) -> Scenario:
        """Return the simulation of ``candidate`` under any load."""
        (closed_loop,) = self._jobs([(candidate, 1)])
        return replace(closed_loop, load=load)

    def _jobs(self, cells: Sequence[tuple[Candidate, int]]) -> list[Scenario]:
        overheads = Overheads(self.network_s / 2, self.network_s / 2, wake_s=2e-5, dispatch_s=2e-5)
        largest = max(candidate.max_batch_size for candidate, _ in cells)
        most = max(candidate.instance_count for candidate, _ in cells)
        service = {fields: self._service(largest, most, fields) for fields in {cell[0].fields for cell in cells}}
        return [
            Scenario(candidate, ClosedLoopLoad(load), service[candidate.fields], overheads, REQUEST_BATCH_SIZE)
            for candidate, load in cells
        ]

    def _service(self, largest: int, instances: int, fields: Sequence[tuple[str, FieldValue]]) -> ServiceTimes:
        step = REQUEST_BATCH_SIZE
        sizes = np.arange(step, max(largest, step) + 1, step, dtype=np.float64)
        alone = self.fixed_s + self.per_sample_s * CURVES[self.curve](sizes)
        slowed = self.contention * np.arange(instances) ** 1.15
        alone = alone / math.prod(self.speeds.get(setting, 1.0) for setting in fields)
        if int(dict(fields).get(THREADS, 1)) > 1:
            alone, slowed = alone / self.thread_speedup, slowed * self.thread_contention
        return ServiceTimes(np.outer(alone, 1 + slowed), step=step)


def hidden_server(name: str) -> SimulatedServer:
    """Return the server ``name`` of SERVERS. Its parameters are random with a fixed seed."""
    seed = SERVERS[name]
    rng = np.random.default_rng(seed)
    threaded = name in ("threads", "sublinear")
    return SimulatedServer(
        name,
        fixed_s=10 ** rng.uniform(-3.7, -2.6),
        per_sample_s=10 ** rng.uniform(-5.0, -4.2),
        contention=rng.uniform(0.2, 1.0),
        network_s=10 ** rng.uniform(-4.0, -3.2),
        jitter=rng.uniform(0.05, 0.25),
        seed=seed,
        curve=name if name in CURVES else "linear",
        thread_speedup=rng.uniform(1.3, 1.8) if threaded else 1.0,
        thread_contention=rng.uniform(1.5, 3.0) if threaded else 1.0,
        space=THREADED if threaded else PLAIN,
    )


def drawn_server(seed: int) -> SimulatedServer:
    """Return a server with random parameters and a space of about 48 configurations, at four loads."""
    rng = np.random.default_rng(seed)
    threaded, smallest = bool(rng.integers(2)), REQUEST_BATCH_SIZE * int(rng.choice([2, 4]))
    space = SearchSpace(
        (smallest, 4 * smallest),
        ("off", 0, int(rng.choice([200, 1000])), int(rng.choice([3000, 8000]))),
        POLICIES,
        (1, 2) if threaded else (1, 2, 3, 4),
        {THREADS: ("1", "2")} if threaded else {},
        REQUEST_BATCH_SIZE,
    )
    return SimulatedServer(
        f"drawn-{seed}",
        fixed_s=10 ** rng.uniform(-3.7, -2.2),
        per_sample_s=10 ** rng.uniform(-5.2, -3.6),
        contention=rng.uniform(0.0, 1.0),
        network_s=10 ** rng.uniform(-4.0, -3.2),
        jitter=rng.uniform(0.05, 0.25),
        seed=seed,
        curve=str(rng.choice(list(CURVES))),
        thread_speedup=rng.uniform(1.2, 1.9),
        thread_contention=rng.uniform(1.0, 3.0),
        space=space,
        concurrencies=(2, 4, 8, 16) if rng.integers(2) else (4, 8, 16, 32),
    )


def execution_server(seed: int, settings: Sequence[str]) -> SimulatedServer:
    """Return a server whose space has ``settings`` of EXECUTION_SPEEDS in addition to two numbers of threads."""
    rng = np.random.default_rng(seed)
    fields: dict[str, tuple[FieldValue, ...]] = {THREADS: ("1", "2")}
    fields |= {ORT_SETTING_PATHS[name]: (EXECUTION_DEFAULTS[name], EXECUTION_SPEEDS[name][0]) for name in settings}
    others = EXECUTION_SPEEDS.items()
    speeds = {(ORT_SETTING_PATHS[name], value): rng.uniform(low, high) for name, (value, low, high) in others}
    return SimulatedServer(
        f"execution-{seed}-{'+'.join(('threads', *settings))}",
        fixed_s=10 ** rng.uniform(-3.0, -2.3),
        per_sample_s=10 ** rng.uniform(-5.0, -4.2),
        contention=rng.uniform(0.2, 1.0),
        network_s=10 ** rng.uniform(-4.0, -3.2),
        jitter=rng.uniform(0.05, 0.25),
        seed=seed,
        curve="sublinear",
        thread_speedup=rng.uniform(1.3, 1.8),
        thread_contention=rng.uniform(1.5, 3.0),
        speeds=speeds,
        space=SearchSpace((8, 32), ("off", 0, 1000), ("none", "max/2"), (1, 2), fields, REQUEST_BATCH_SIZE),
        concurrencies=(4, 8, 16, 32),
    )


def write(server: SimulatedServer, path: Path, deadline_ms: float | None = None) -> None:
    """Write every configuration at every load as a trials table; with ``deadline_ms`` it has the goodput too."""
    candidates = server.space.candidates()
    cells = [(candidate, load) for candidate in candidates for load in server.concurrencies]
    measured = dict(zip(cells, server.measure(cells, os.cpu_count() or 1), strict=True))
    if deadline_ms is not None:
        for cell, share in zip(cells, server.shares_in_time(cells, deadline_ms), strict=True):
            goodput = share * (measured[cell].throughput_infer_per_sec or 0.0)
            measured[cell] = replace(measured[cell], goodput_infer_per_sec=goodput)
    path.unlink(missing_ok=True)
    table = TrialsTable(path, server.name, server.space.fields)
    for number, candidate in enumerate(candidates):
        for load in server.concurrencies:
            table.append(Trial(number, candidate), LoadPoint(REQUEST_BATCH_SIZE, load), measured[candidate, load])
