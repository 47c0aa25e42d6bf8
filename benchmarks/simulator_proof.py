"""Compare the simulated batcher with the real server, on a Python model that sleeps a known time.

    python benchmarks/simulator_proof.py [--recordings 3] [--predict-only]

The model sleeps FIXED_MS + PER_SAMPLE_MS * b for a batch of b samples, which takes no CPU, so instances do not slow
each other down. A cell is a configuration under a load: a closed loop of some concurrency, or an open loop (constant
or Poisson arrivals) at a share of the configuration's capacity. Service times and overheads are calibrated on the
cells of CALIBRATION; then those of HELD_OUT, which have other configurations, are predicted. A cell's metrics are the
median of its recordings, each in a separate pass. Disturbed recordings are repeated.

Recordings are appended to simulator_proof.csv, so an interrupted command can be continued, and ``--predict-only``
simulates again without a server. Writes simulator_proof.md. Targets: throughput within 3 % and p95 within 5 % on
average (15 % at worst), and 97 % agreement on whether a cell meets a bound on its p95.

Mixed request sizes, different shapes, rejects and queue timeouts are in simulator_queue_proof.py.
"""

from __future__ import annotations

import argparse
import contextlib
import csv
import math
import random
import statistics
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from datetime import date
from pathlib import Path
from typing import Literal

import numpy as np

from lib.idle_machine import OTHERS_LIMIT, CpuUsage, wait_for_quiet
from lib.measured_model import write_requests
from lib.output import print_progress
from lib.recordings import median
from lib.simulator_calibration import estimate_jitter, estimate_overheads, estimate_release_s, perf_analyzer_load
from objectives import batch_stats
from objectives.arrays import FloatArray
from objectives.metrics import Measurement
from optimizer.core.candidate import Candidate
from optimizer.core.endpoint import Endpoint
from optimizer.core.measurement_windows import MIN_WINDOWS
from optimizer.core.trial import LoadPoint
from optimizer.deploy import runtime
from optimizer.deploy.embedded_target import EmbeddedTarget
from optimizer.deploy.target_settings import TargetSettings
from optimizer.machine import hardware
from optimizer.measure.perf_analyzer import MAX_THREADS, LocalRunner, PerfAnalyzer
from optimizer.model.repository import read_repository_model
from optimizer.simulator.calibration import Observation, service_times
from optimizer.simulator.scenario import (
    ClosedLoopLoad,
    MeasurementInterval,
    Overheads,
    Scenario,
    ServiceTimes,
    SimulatedLoad,
    SimulationResult,
)
from optimizer.simulator.simulate import exponential_gaps, lognormal_jitter, simulate_many

RECORDINGS = Path(__file__).with_suffix(".csv")
REPORT = Path(__file__).with_suffix(".md")
FIXED_MS, PER_SAMPLE_MS = 5.0, 1.0
BACKEND_MS, BACKEND_REQUEST_MS = 1.0, 0.12  # approximate time of a batch without its sleep; used only to choose rates
WINDOW_MS = 450  # perf_analyzer takes three, each a fifth longer than requested: 1.6 s
SECONDS = MIN_WINDOWS * 1.2 * WINDOW_MS / 1000
ATTEMPTS = 4
LARGEST = 32  # max_batch_size
MOST_INSTANCES = 3
BOUNDS_MS = (10, 15, 20, 30, 50, 75)
SEEDS = 9
FIT_SEEDS = 5
FIT_STEPS = 300
FIT_STARTS = 4  # random searches; the best one counts
GLANCE = MeasurementInterval(
    50, 300
)  # a short simulation that shows how many requests a closed loop completes in SECONDS

MODEL = "sleeper"
CONFIG = """\
backend: "python"
max_batch_size: 8
input { name: "x" data_type: TYPE_FP32 dims: 1 }
output { name: "y" data_type: TYPE_FP32 dims: 1 }
instance_group { count: 1 kind: KIND_CPU }
"""
PROGRAM = f"""\
import time

import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def execute(self, requests):
        tensors = [pb_utils.get_input_tensor_by_name(request, "x") for request in requests]
        samples = sum(tensor.shape()[0] for tensor in tensors)
        time.sleep(({FIXED_MS} + {PER_SAMPLE_MS} * samples) / 1000)
        return [pb_utils.InferenceResponse([pb_utils.Tensor("y", tensor.as_numpy())]) for tensor in tensors]
"""

Arrivals = Literal["closed", "constant", "poisson"]


# -- measurements -----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Cell:
    """A configuration under a load. ``level`` is the concurrency of a closed loop, or the requests per second."""

    candidate: Candidate
    request_batch_size: int
    arrivals: Arrivals
    level: int

    @property
    def load(self) -> SimulatedLoad:
        """Return the load as perf_analyzer sends it in a recording."""
        if self.arrivals == "closed":
            return ClosedLoopLoad(self.level)
        return perf_analyzer_load(
            self.level,
            SECONDS,
            poisson=self.arrivals == "poisson",
            schedule_s=MIN_WINDOWS * WINDOW_MS / 1000,
            threads=MAX_THREADS,
        )

    def scenario(self, service: ServiceTimes, overheads: Overheads) -> Scenario:
        return Scenario(self.candidate, self.load, service, overheads, self.request_batch_size)

    @property
    def sizes(self) -> int | str:
        """The key of the cell's service times in ``CalibratedServer.services``."""
        return self.request_batch_size

    @property
    def key(self) -> dict[str, str]:
        c = self.candidate
        return {
            "max_batch_size": str(c.max_batch_size),
            "delay_us": str(c.max_queue_delay_us) if c.dynamic_batching else "off",
            "preferred": " ".join(map(str, c.preferred_batch_sizes)),
            "instances": str(c.instance_count),
            "request_batch_size": str(self.request_batch_size),
            "arrivals": self.arrivals,
            "level": str(self.level),
        }


def capacity(candidate: Candidate, request_batch_size: int) -> float:
    """Return the requests per second with all instances busy on the largest batches that the batcher forms."""
    largest = max(candidate.preferred_batch_sizes or (candidate.max_batch_size,))
    requests = max(1, largest // request_batch_size) if candidate.dynamic_batching else 1
    asleep_ms = FIXED_MS + PER_SAMPLE_MS * requests * request_batch_size
    return 1000 * candidate.instance_count * requests / (asleep_ms + BACKEND_MS + BACKEND_REQUEST_MS * requests)


def cells(
    candidate: Candidate,
    *concurrencies: int,
    constant: float | None = None,
    poisson: float | None = None,
    request_batch_size: int = 1,
) -> list[Cell]:
    """Return closed loops, and open loops at shares of the capacity."""
    cells = [Cell(candidate, request_batch_size, "closed", concurrency) for concurrency in concurrencies]
    full = capacity(candidate, request_batch_size)
    if constant:
        cells.append(Cell(candidate, request_batch_size, "constant", round(constant * full)))
    if poisson:
        cells.append(Cell(candidate, request_batch_size, "poisson", round(poisson * full)))
    return cells


def batching(limit: int, delay_us: int, *preferred: int, instances: int = 1) -> Candidate:
    return Candidate(limit, True, delay_us, preferred, instances)


def unbatched(limit: int, instances: int) -> Candidate:
    return Candidate(limit, instance_count=instances)


ALONE = Cell(batching(20, 0), 1, "closed", 1)
SATURATED = Cell(batching(20, 0), 1, "closed", 40)
CALIBRATION = [
    *cells(batching(20, 0), 1, 9, 40, poisson=0.6),
    *cells(batching(6, 0, instances=2), 1, 5, 20),
    *cells(batching(10, 1500), 7, 16, constant=0.5),
    *cells(unbatched(1, 2), 1, 3),
    *cells(batching(5, 0, instances=3), 5, 13),
    *cells(batching(12, 2500, 5, instances=2), 10, 22),
    *cells(batching(15, 0), 1, 4, 12, request_batch_size=3),
    *cells(batching(9, 600, instances=2), 3, 9, request_batch_size=3),
]
HELD_OUT = [
    *cells(unbatched(8, 1), 1, 4, constant=0.8, poisson=0.6),
    *cells(unbatched(1, 3), 3, 8, constant=0.9, poisson=0.7),
    *cells(batching(4, 0), 2, 12, constant=0.5, poisson=0.9),
    *cells(batching(8, 0, instances=2), 6, 24, constant=0.9, poisson=0.4),
    *cells(batching(16, 0), 5, 48, constant=0.3, poisson=0.7),
    *cells(batching(4, 0, instances=3), 4, 16, constant=0.6, poisson=0.8),
    *cells(batching(8, 2000), 1, 16, constant=0.7, poisson=0.5),
    *cells(batching(8, 5000, instances=2), 12, 32, constant=0.4, poisson=0.8),
    *cells(batching(4, 8000, instances=3), 3, 20, constant=0.5, poisson=0.7),
    *cells(batching(16, 3000, 8, 16), 10, 32, constant=0.6, poisson=0.9),
    *cells(batching(16, 1000, 8), 8, 24, constant=0.8, poisson=0.6),
    *cells(batching(8, 4000, 4, instances=2), 8, 20, constant=0.6, poisson=0.5),
    *cells(batching(32, 0, 16, 32), 12, 40, constant=0.5, poisson=0.8),
    *cells(batching(32, 10000), 24, 48, constant=0.4, poisson=0.6),
    *cells(batching(12, 0), 3, 8, constant=0.9, poisson=0.6, request_batch_size=3),
    *cells(batching(12, 3000, instances=2), 4, 16, constant=0.6, poisson=0.8, request_batch_size=3),
    *cells(batching(16, 2000, 6, 12), 2, 10, constant=0.7, poisson=0.5, request_batch_size=3),
    *cells(batching(8, 1000, instances=3), 5, 18, constant=0.8, poisson=0.6, request_batch_size=3),
]


# -- measuring --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class RateLoadGenerator(PerfAnalyzer):
    """perf_analyzer with a request rate if ``arrivals`` is not closed."""

    arrivals: Arrivals = "closed"
    requests_per_s: int = 0

    def command(self, endpoint: Endpoint, load: LoadPoint, window_ms: int, windows: int = MIN_WINDOWS) -> list[str]:
        command = super().command(endpoint, load, window_ms, windows)
        if self.arrivals != "closed":
            at = command.index("--concurrency-range")
            rate = ["--request-rate-range", str(self.requests_per_s), "--request-distribution", self.arrivals]
            command[at : at + 2] = rate
        return command


@contextlib.contextmanager
def bench(config: str = CONFIG) -> Iterator[tuple[EmbeddedTarget, RateLoadGenerator]]:
    installed = runtime.ensure(print_progress)
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        version = folder / "models" / MODEL / "1"
        version.mkdir(parents=True)
        version.joinpath("model.py").write_text(PROGRAM)
        version.with_name("config.pbtxt").write_text(config)
        source = read_repository_model(folder / "models", MODEL, gpu=False)
        load_generator = RateLoadGenerator(
            installed.perf_analyzer,
            LocalRunner(installed.perf_analyzer_libraries),
            folder / "perf_analyzer.log",
            write_requests(source, folder, "zero"),
            window_ms=WINDOW_MS,
            repeat=False,
        )
        with contextlib.closing(
            EmbeddedTarget(source, TargetSettings(folder / "server.log", on_progress=print_progress))
        ) as target:
            yield target, load_generator


def record(path: Path, wanted: Sequence[Cell], recordings: int) -> None:
    """Append recordings until each cell has the given number."""
    done = read(path)
    missing: list[tuple[int, Candidate, list[Cell]]] = []
    for recording in range(recordings):
        lacking: dict[Candidate, list[Cell]] = {}
        for cell in wanted:
            if len(done.get(cell, ())) <= recording:
                lacking.setdefault(cell.candidate, []).append(cell)
        order = list(lacking)
        random.Random(recording).shuffle(order)
        missing += [(recording, candidate, lacking[candidate]) for candidate in order]
    if not missing:
        return
    with bench() as (target, load_generator):
        for place, (recording, candidate, lacked) in enumerate(missing):
            print_progress(f"configuration {place + 1} of {len(missing)}")
            wait_for_quiet()
            for cell, measurement in measured(target, load_generator, candidate, lacked):
                append(path, recording, cell, measurement)


def record_once(
    target: EmbeddedTarget, load_generator: RateLoadGenerator, wanted: Sequence[Cell]
) -> dict[Cell, list[Measurement]]:
    """Record each cell once, disturbed or not."""
    return {
        cell: [measurement]
        for candidate in dict.fromkeys(cell.candidate for cell in wanted)
        for cell, measurement in measured(
            target, load_generator, candidate, [cell for cell in wanted if cell.candidate == candidate], attempts=1
        )
    }


def measured(
    target: EmbeddedTarget,
    load_generator: RateLoadGenerator,
    candidate: Candidate,
    wanted: Sequence[Cell],
    attempts: int = ATTEMPTS,
) -> Iterator[tuple[Cell, Measurement]]:
    """Yield each cell of one configuration as soon as it is measured."""
    with target.deploy(candidate) as endpoint:
        load_generator.warm_up(endpoint, LoadPoint(1, 2 * candidate.instance_count))
        for cell in wanted:
            yield cell, measure(endpoint, load_generator, cell, attempts)


def measure(endpoint: Endpoint, load_generator: RateLoadGenerator, cell: Cell, attempts: int) -> Measurement:
    """Return the first undisturbed attempt, or else the least disturbed one."""
    load = LoadPoint(cell.request_batch_size, cell.level if cell.arrivals == "closed" else 1)
    generator = replace(load_generator, arrivals=cell.arrivals, requests_per_s=cell.level)
    tries: list[tuple[float, Measurement]] = []
    while len(tries) < attempts:
        before = CpuUsage.now()
        measurement = generator.measure(endpoint, load)
        others = CpuUsage.now().others_since(before)
        if not sent(cell, measurement):
            print_progress(f"{' '.join(cell.key.values())}: a thread of the load generator sent nothing; again")
            continue
        tries.append((others, measurement))
        if others <= OTHERS_LIMIT or attempts == 1:
            break
        print_progress(f"{' '.join(cell.key.values())}: others took {tries[-1][0]:.0%} of the machine; again")
        wait_for_quiet()
    return min(tries, key=lambda one: one[0])[1]


def sent(cell: Cell, measured: Measurement) -> bool:
    """Return whether the load generator kept the rate: sometimes one of its two threads does not start."""
    if isinstance(cell.load, ClosedLoopLoad):
        return True
    return (measured.requests or 0) > 0.75 * len(cell.load.arrivals_s)


FIGURES = (
    *("throughput_infer_per_sec", "latency_avg_ms", "latency_p50_ms", "latency_p90_ms", "latency_p95_ms"),
    *("latency_p99_ms", "queue_ms", "compute_input_ms", "compute_infer_ms", "compute_output_ms"),
    *("mean_batch_size", "requests", "batch_stats"),
)


def append(path: Path, recording: int, cell: Cell, measurement: Measurement) -> None:
    row = {"recording": str(recording), **cell.key, **{name: getattr(measurement, name) for name in FIGURES}}
    fresh = not path.exists()
    with path.open("a", newline="") as file:
        writer = csv.DictWriter(file, row, lineterminator="\n")
        if fresh:
            writer.writeheader()
        writer.writerow(row)


def read(path: Path) -> dict[Cell, list[Measurement]]:
    measurements: dict[Cell, list[Measurement]] = {}
    if path.exists():
        known = {tuple(cell.key.values()): cell for cell in (*CALIBRATION, *HELD_OUT)}
        with path.open(newline="") as file:
            for row in csv.DictReader(file):
                cell = known.get(tuple(row[name] for name in ALONE.key))
                if cell is not None:
                    measurements.setdefault(cell, []).append(read_measurement(row))
        measurements = {cell: [m for m in seen if sent(cell, m)] for cell, seen in measurements.items()}
    return measurements


def read_measurement(row: Mapping[str, str]) -> Measurement:
    figures = {name: float(row[name]) for name in FIGURES if name != "batch_stats"}
    return replace(Measurement(batch_stats=row["batch_stats"]), **figures)  # type: ignore[arg-type]


# -- predicting -------------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class CalibratedServer:
    """The calibrated parameters of the simulation. ``services`` has service times by ``Cell.sizes``."""

    services: Mapping[int | str, ServiceTimes]
    overheads: Overheads
    gap_s: float  # mean of the exponential gaps between arrivals
    jitter: float
    missed_share: float = 0.0  # as in Scenario; it matters only to configurations with a queue policy

    def predict(self, wanted: Sequence[Cell], seeds: int = SEEDS) -> list[SimulationResult]:
        """Return medians over seeds of jitter and gaps, over about as long an interval as on the real server."""
        draws = [
            (lognormal_jitter(self.jitter, seed), exponential_gaps(self.gap_s, seeds + seed)) for seed in range(seeds)
        ]
        results: list[SimulationResult] = []
        for cell in wanted:
            job = replace(cell.scenario(self.services[cell.sizes], self.overheads), missed_share=self.missed_share)
            interval = MeasurementInterval(0)
            if cell.arrivals == "closed":
                (glance,) = simulate_many([job], jitter=draws[0][0], gaps_s=draws[0][1], interval=GLANCE)
                interval = MeasurementInterval(0, max(20, round(SECONDS * glance.requests / glance.duration_s)))
            outcomes = [simulate_many([job], jitter=j, gaps_s=gaps, interval=interval)[0] for j, gaps in draws]
            results.append(_middle(outcomes))
        return results


def _middle(draws: Sequence[SimulationResult]) -> SimulationResult:
    names = ("throughput_infer_per_sec", "latency_p50_s", "latency_p95_s", "mean_batch_size")
    return replace(draws[0], **{name: statistics.median(getattr(one, name) for one in draws) for name in names})


def calibrate(
    recorded: Mapping[Cell, Sequence[Measurement]],
    by: Sequence[Cell] = tuple(CALIBRATION),
    *,
    alone: Cell = ALONE,
    saturated: Cell = SATURATED,
    steps: int = FIT_STEPS,
    starts: int = FIT_STARTS,
) -> CalibratedServer:
    """Return the server calibrated on the cells of ``by``.

    Service times come from the executions of all cells. Overheads start from those of a single client and of a
    saturated instance, and random searches fit them to the cells' metrics.
    """
    seen = {cell: recorded[cell] for cell in by}
    observed: dict[tuple[int | str, int], list[Observation]] = {}
    for cell, measurements in seen.items():
        own = observed.setdefault((cell.sizes, cell.request_batch_size), [])
        own.extend(_observation(cell, m) for m in measurements)
    services = {
        sizes: service_times(observations, LARGEST, MOST_INSTANCES, step=step, contention=0.0)
        for (sizes, step), observations in observed.items()
    }
    medians = {cell: median(list(measurements)) for cell, measurements in seen.items()}
    release_s = statistics.median(estimate_release_s(_observation(saturated, m)) for m in seen[saturated])
    over = estimate_overheads(alone.candidate, alone.request_batch_size, medians[alone], release_s)
    numbers = [over.send_s, over.receive_s, over.client_s, over.wake_s, over.dispatch_s, over.release_s, GAP_S]
    start = np.log(np.maximum([*numbers, estimate_jitter(medians[alone])], SMALLEST_S))
    fits = [_fitted(start, services, medians, steps, seed) for seed in range(starts)]
    return min(fits, key=lambda fit: fit[0])[1]


GAP_S = 70e-6  # start of the fit
SMALLEST_S = 1e-6
ERROR_LIMIT = 0.3  # upper limit of a single cell's error


def _fitted(
    start: FloatArray,
    services: Mapping[int | str, ServiceTimes],
    medians: Mapping[Cell, Measurement],
    steps: int,
    seed: int,
) -> tuple[float, CalibratedServer]:
    """Search at random over the logarithms of overheads, mean gap and jitter. Return the misfit and the server."""
    rng = np.random.default_rng(seed)
    best, least = start, mean_error(_server(start, services), medians)
    scale, failures = 0.5, 0
    for _ in range(steps):
        tried = best + scale * rng.standard_normal(len(best)) * (rng.random(len(best)) < 0.35)
        misfit = mean_error(_server(tried, services), medians)
        if misfit < least:
            best, least, failures = tried, misfit, 0
        else:
            failures += 1
            if failures % 25 == 0:
                scale = max(0.1, 0.8 * scale)
    return least, _server(best, services)


def _server(logarithms: FloatArray, services: Mapping[int | str, ServiceTimes]) -> CalibratedServer:
    send_s, receive_s, client_s, wake_s, dispatch_s, release_s, gap_s, jitter = np.exp(logarithms).tolist()
    overheads = Overheads(send_s, receive_s, client_s, 0.0, wake_s, dispatch_s, release_s)
    return CalibratedServer(services, overheads, gap_s, jitter)


def mean_error(server: CalibratedServer, medians: Mapping[Cell, Measurement]) -> float:
    """Return the mean error of throughput, p95 and, with half their weight, the mean batch size."""
    total = 0.0
    for measured, simulated in zip(medians.values(), server.predict(list(medians), FIT_SEEDS), strict=True):
        for weight, seen, predicted in (
            (1.0, measured.throughput_infer_per_sec, simulated.throughput_infer_per_sec),
            (1.0, measured.latency_p95_ms, 1000 * simulated.latency_p95_s),
            (0.5, measured.mean_batch_size, simulated.mean_batch_size),
        ):
            total += weight * min(abs(math.log(predicted / (seen or math.nan))), ERROR_LIMIT)
    return total / len(medians)


def _observation(cell: Cell, measured: Measurement) -> Observation:
    batches = batch_stats.from_text(measured.batch_stats)
    throughput = measured.throughput_infer_per_sec or math.nan
    requests_per_s = throughput / cell.request_batch_size
    in_flight = requests_per_s * (measured.latency_avg_ms or math.nan) / 1000
    wall_s = sum(batch.executions * batch.batch_size for batch in batches) / throughput
    return Observation(
        cell.candidate.instance_count, max(1, round(in_flight)), wall_s, batches, cell.request_batch_size
    )


# -- results -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Compared:
    cell: Cell
    measured: Measurement
    simulated: SimulationResult

    @property
    def throughput_error(self) -> float:
        return self.simulated.throughput_infer_per_sec / (self.measured.throughput_infer_per_sec or math.nan) - 1

    @property
    def p95_error(self) -> float:
        return 1000 * self.simulated.latency_p95_s / (self.measured.latency_p95_ms or math.nan) - 1

    def agrees(self, bound_ms: float) -> bool:
        """Return whether measurement and simulation agree on whether the p95 is within the bound."""
        return (1000 * self.simulated.latency_p95_s <= bound_ms) == ((self.measured.latency_p95_ms or 0) <= bound_ms)


@dataclass(frozen=True)
class Summary:
    throughput: float  # mean absolute errors
    p95: float
    worst_p95: float
    agreement: float

    @classmethod
    def of(cls, compared: Sequence[Compared]) -> Summary:
        p95 = [abs(one.p95_error) for one in compared]
        return cls(
            statistics.fmean(abs(one.throughput_error) for one in compared),
            statistics.fmean(p95),
            max(p95),
            statistics.fmean(one.agrees(bound) for one in compared for bound in BOUNDS_MS),
        )

    def __str__(self) -> str:
        return (
            f"throughput MAPE {self.throughput:.1%} · p95 MAPE {self.p95:.1%}, worst {self.worst_p95:.1%} · "
            f"agreement on the bound {self.agreement:.1%}"
        )


def compare(
    recorded: Mapping[Cell, Sequence[Measurement]], server: CalibratedServer, wanted: Sequence[Cell]
) -> list[Compared]:
    there = [cell for cell in wanted if cell in recorded]
    return [
        Compared(cell, median(list(recorded[cell])), simulated)
        for cell, simulated in zip(there, server.predict(there), strict=True)
    ]


HEADER = (
    *("max batch", "delay µs", "preferred", "instances", "samples a request", "load"),
    *("infer/s", "simulated", "error", "p95 ms", "simulated", "error", "mean batch", "simulated"),
)


def row(one: Compared) -> str:
    *configuration, arrivals, level = one.cell.key.values()
    m, s = one.measured, one.simulated
    load = f"closed, {level} in flight" if arrivals == "closed" else f"{arrivals}, {level} requests/s"
    figures = (
        *(f"{m.throughput_infer_per_sec:,.0f}", f"{s.throughput_infer_per_sec:,.0f}", f"{one.throughput_error:+.1%}"),
        *(f"{m.latency_p95_ms:.1f}", f"{1000 * s.latency_p95_s:.1f}", f"{one.p95_error:+.1%}"),
        *(f"{m.mean_batch_size:.2f}", f"{s.mean_batch_size:.2f}"),
    )
    return "| " + " | ".join((*configuration, load, *figures)) + " |"


def table(compared: Sequence[Compared]) -> str:
    head = "| " + " | ".join(HEADER) + " |\n|" + " --: |" * len(HEADER)
    return "\n".join([head, *map(row, compared)])


NOTES = """\
## Largest errors, and changes made to reduce them

Instances, server and load generator share two cores. The responses of a batch, and the requests that follow them,
therefore take an irregular time of 0.3 to 1.3 ms. If this time is about as long as the queue delay, or if two
instances end at about the same time, it decides whether the clients of a batch stay together ("8 together" and "4
and 4" both last for seconds). Recordings of such cells differ from each other by more than the targets, and these
cells have the largest errors. The following was tried:

1. Independent exponential delays of requests and fixed spacing: throughput MAPE 1.4 %, p95 MAPE 3.7 %, worst 27.5
   % (without a cell in which most requests were not sent, see 4). The clients of a batch stayed together for too
   long.
2. Responses that leave one after the other before the computation ends, as the Python backend sends them, and a
   release time for each request: the fit to the calibration cells was no better (misfit 0.032 in both cases), so
   the simulator has neither.
3. Exponential gaps between arrivals, each of which delays all later ones (`gaps_s`): throughput MAPE 0.9 to 1.5
   %, p95 MAPE 2.9 to 4.0 %. This was kept. The worst error was then 14 to 29 %, depending on the start of the
   fit, because no calibration cell determined how long the batcher takes to wake up in a burst. So two
   calibration cells were added whose batches exceed their preferred size (12, delay 2500 µs, preferred 5), and
   the best of four fits is used.
4. Occasionally one of perf_analyzer's two threads sends nothing in an open loop, so half of the requests are
   missing. Such recordings are repeated. perf_analyzer's Poisson schedule is the same in every run, and the
   simulation uses exactly this schedule (`perf_analyzer_load`), because near capacity the p95 differs much
   between random schedules.

The held-out cells were known when steps 1 to 3 were chosen. As a check, 24 cells of six further configurations
were recorded once each after all choices had been made: throughput MAPE 0.9 %, p95 MAPE 4.4 %, worst 20.3 %,
agreement on the bound 98.6 %. The two cells above 15 % are 44 in flight on max batch 24, delay 4000 µs, preferred
12 and 24 (+18.7 %), and requests of 3 samples at a constant 60 % of capacity on two instances (+20.3 %)."""


def report(recorded: Mapping[Cell, Sequence[Measurement]], server: CalibratedServer, on: str) -> str:
    """Return the Markdown of simulator_proof.md."""
    held_out, own = compare(recorded, server, HELD_OUT), compare(recorded, server, CALIBRATION)
    fewest = min(len(recorded[one.cell]) for one in held_out)
    overheads = [
        *(f"{field.name} {1e6 * getattr(server.overheads, field.name):.0f} µs" for field in fields(Overheads)),
        f"exponential gaps of {1e6 * server.gap_s:.0f} µs on average",
        f"jitter {server.jitter:.1%}",
    ]
    services = "; ".join(
        f"{size}: "
        + ", ".join(
            f"S({size * requests}) {1000 * times.seconds[requests - 1, 0]:.2f} ms"
            for requests in (1, 2, 4, 8)
            if requests <= len(times.seconds)
        )
        for size, times in server.services.items()
        if isinstance(size, int)
    )
    return f"""# The simulated batcher against the real server: latest measurement

**Question:** Does the simulated batcher agree with the real server?

**Answer:** In {len(held_out)} held-out cells: {Summary.of(held_out)}.

`python benchmarks/simulator_proof.py`

A Python model on the real tritonserver sleeps {FIXED_MS:g} ms + {PER_SAMPLE_MS:g} ms per sample.
Each cell is the median of {fewest} recordings of {SECONDS:.1f} s. MAPE is the mean absolute percentage error.
The agreement is over bounds of {", ".join(map(str, BOUNDS_MS))} ms on the p95 of every cell. {on}

## Held-out cells

{table(held_out)}

{NOTES}

## Calibration

Service times (as the server counts them by batch size: the sleep and the backend's own work) and overheads come
from the {len(own)} cells below alone; no held-out configuration is among them.
Service times by samples per request: {services}. Overheads: {"; ".join(overheads)}.
Errors of these cells: {Summary.of(own)}

{table(own)}
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--recordings", type=int, default=3)
    parser.add_argument("--predict-only", action="store_true")
    arguments = parser.parse_args()
    if not arguments.predict_only:
        record(RECORDINGS, [*CALIBRATION, *HELD_OUT], arguments.recordings)
    recorded = read(RECORDINGS)
    text = report(recorded, calibrate(recorded), f"{hardware.detect()}; {date.today()}.")
    REPORT.write_text(text)
    print(text)


if __name__ == "__main__":
    main()
