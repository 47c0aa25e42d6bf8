"""Compare the simulated queue with the real server: request sizes, shapes, rejects and timeouts.

    python benchmarks/simulator_queue_proof.py [--section sizes rejects …] [--recordings 3] [--predict-only]

The model, the calibration and the errors are those of simulator_proof.py. The sections are:

- ``sizes``: the requests have different numbers of samples.
- ``shapes``: the input has a dimension of -1, and only requests of equal shape share a batch.
- ``rejects``: ``max_queue_size`` is set, and the arrivals exceed the capacity or come in bursts.
- ``timeouts``: requests expire in the queue, which rejects them or moves them behind the others.
- ``priorities``: a fifth of the requests has the first of two priority levels, whose queues have their own policies.
- ``apart`` and ``together``: the cells of the last three with the batcher's thread on another CPU than the server's
  other threads, or on the same one. A trace of the threads says how many ends of executions it then misses: 1 or 62 %
  (MISSED_WHERE). So nothing is fitted to these queues.

The requests are sent by tritune's own client, because perf_analyzer stops at the first refused request. Sizes, shapes
and arrivals of a recording are exactly those of the simulation. Throughput and latency are those of the requests that
were executed; the shares of rejected and expired requests are compared too.

Recordings are appended to simulator_queue_proof.csv, so an interrupted command can be continued, and
``--predict-only`` simulates again without a server. Writes simulator_queue_proof.md with all sections that have been
recorded. Targets: throughput within 3 %, p95 within 5 % and the share of refused requests within 2 percentage points
on average.
"""

from __future__ import annotations

import argparse
import contextlib
import csv
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import date
from pathlib import Path

import numpy as np

import simulator_proof as proof
from lib.idle_machine import OTHERS_LIMIT, CpuUsage, wait_for_quiet
from lib.output import print_progress
from lib.recordings import median
from objectives.arrays import IntArray
from objectives.metrics import Measurement
from optimizer.config.queue_policy import DEFAULT_PRIORITY_LEVEL, PRIORITY_LEVELS, PRIORITY_POLICY
from optimizer.core.candidate import Candidate, FieldValue
from optimizer.core.endpoint import Endpoint
from optimizer.core.request_sizes import parse_priorities, parse_size_distribution
from optimizer.machine import cpu_usage, hardware
from optimizer.measure.load_client import client
from optimizer.measure.load_client.arrivals import ConstantArrivals, PoissonArrivals
from optimizer.measure.load_client.client_files import NEVER, SendPlan, SendRecord
from optimizer.measure.load_client.http2 import INFER_METHOD, Http2Connection
from optimizer.measure.model_statistics import read_statistics, with_statistics
from optimizer.model.inference_requests import to_message
from optimizer.simulator.scenario import (
    ClosedLoopLoad,
    OpenLoopLoad,
    Overheads,
    Scenario,
    ServiceTimes,
    SimulatedLoad,
)
from simulator_proof import Cell, Compared, batching, unbatched

RECORDINGS = Path(__file__).with_suffix(".csv")
REPORT = Path(__file__).with_suffix(".md")
SECONDS = 3.0
PATIENT_MS = 5000.0  # the batcher may sleep for half a second, which is no overload
CLIENT_SECONDS = 60.0  # time limit of the client beyond SECONDS
ANY_SHAPE = proof.CONFIG.replace('name: "x" data_type: TYPE_FP32 dims: 1', 'name: "x" data_type: TYPE_FP32 dims: -1')
ANY_SHAPE = ANY_SHAPE.replace('name: "y" data_type: TYPE_FP32 dims: 1', 'name: "y" data_type: TYPE_FP32 dims: -1')
POLICY = "dynamic_batching.default_queue_policy."
REJECTED, TIMED_OUT = "Exceeds maximum queue size", "Request timeout expired"
SECTIONS = ("sizes", "shapes", "rejects", "timeouts", "priorities", "apart", "together")
# The share of missed notifications by the place of the batcher's thread, from a trace of the server's threads.
MISSED_WHERE = {"apart": 0.01, "together": 0.62}
IDLE_SECONDS, IDLE_WAKES = 1.5, range(2, 5)  # an idle batcher wakes every half second
FIGURES = (*proof.FIGURES, "rejected_share", "timed_out_share")


@dataclass(frozen=True)
class QueueCell(Cell):
    """A cell whose requests differ, or whose queue has a policy.

    ``mix`` are the samples of a request in the syntax of ``core.request_sizes``. The queue policy is in the
    candidate's fields. ``priorities`` are shares in the syntax of ``core.request_sizes``. ``threads`` is the place of
    the batcher's thread, a key of MISSED_WHERE; empty: the operating system decides.
    """

    mix: str = ""
    shape_shares: tuple[float, ...] = (1.0,)
    priorities: str = ""
    threads: str = ""

    @property
    def fixed_shapes(self) -> bool:
        return len(self.shape_shares) == 1

    @property
    def sizes(self) -> str:
        return self.mix or str(self.request_batch_size)

    @property
    def load(self) -> SimulatedLoad:
        if self.arrivals == "closed":
            return ClosedLoopLoad(self.level)
        arrivals = PoissonArrivals() if self.arrivals == "poisson" else ConstantArrivals()
        return OpenLoopLoad(arrivals.plan(self.level, SECONDS, seed=0))

    @property
    def key(self) -> dict[str, str]:
        policy = " ".join(f"{path.removeprefix(POLICY)}={value}" for path, value in self.candidate.fields)
        policy += f" priorities={self.priorities}" if self.priorities else ""
        shapes = " ".join(map(str, self.shape_shares))
        return {**super().key, "mix": self.mix, "shapes": shapes, "policy": policy, "threads": self.threads}

    def scenario(self, service: ServiceTimes, overheads: Overheads) -> Scenario:
        return replace(
            super().scenario(service, overheads),
            fixed_shapes=self.fixed_shapes,
            request_mix=parse_size_distribution(self.mix) if self.mix else None,
            shape_shares=self.shape_shares,
            priorities=parse_priorities(self.priorities) if self.priorities else None,
        )


def capacity(candidate: Candidate, mix: str) -> float:
    """Return about how many requests per second all instances execute on the largest batches."""
    mean = parse_size_distribution(mix).mean if mix else 1.0
    requests = max(1.0, candidate.max_batch_size // mean) if candidate.dynamic_batching else 1.0
    asleep_ms = proof.FIXED_MS + proof.PER_SAMPLE_MS * requests * mean
    busy_ms = asleep_ms + proof.BACKEND_MS + proof.BACKEND_REQUEST_MS * requests
    return 1000 * candidate.instance_count * requests / busy_ms


def cells(
    candidate: Candidate,
    *concurrencies: int,
    constant: float | None = None,
    poisson: float | None = None,
    mix: str = "",
    shape_shares: tuple[float, ...] = (1.0,),
    priorities: str = "",
) -> list[QueueCell]:
    """Return closed loops, and open loops at shares of the capacity."""
    full, requests = capacity(candidate, mix), (mix, shape_shares, priorities)
    cells = [QueueCell(candidate, 1, "closed", level, *requests) for level in concurrencies]
    if constant:
        cells.append(QueueCell(candidate, 1, "constant", round(constant * full), *requests))
    if poisson:
        cells.append(QueueCell(candidate, 1, "poisson", round(poisson * full), *requests))
    return cells


def limited(candidate: Candidate, *, queue: int = 0, timeout_us: int = 0, action: str = "REJECT") -> Candidate:
    """Return the candidate with a queue policy."""
    fields: list[tuple[str, int | str]] = []
    if queue:
        fields.append((POLICY + "max_queue_size", queue))
    if timeout_us:
        fields.append((POLICY + "default_timeout_microseconds", timeout_us))
        fields.append((POLICY + "timeout_action", action))
    return replace(candidate, fields=tuple(sorted(fields)))


def leveled(candidate: Candidate, **policies: FieldValue) -> Candidate:
    """Return the candidate with two priority levels; ``max_queue_size_2`` is a setting of the second one."""
    own = {f"{PRIORITY_POLICY}.{name[-1]}.{name[:-2]}": value for name, value in policies.items()}
    levels: dict[str, FieldValue] = {PRIORITY_LEVELS: 2, DEFAULT_PRIORITY_LEVEL: 2}
    return replace(candidate, fields=tuple(sorted({**levels, **own}.items())))


FIRST_FIFTH = "1*20|2*80"
TWO_SIZES, MANY_SIZES = "1*3|4", "1..6"
ALONE = QueueCell(batching(20, 0), 1, "closed", 1)
SATURATED = QueueCell(batching(20, 0), 1, "closed", 40)
CALIBRATION = [
    *cells(batching(20, 0), 1, 9, 40, poisson=0.6),
    *cells(batching(6, 0, instances=2), 1, 5, 20),
    *cells(batching(10, 1500), 7, 16, constant=0.5),
    *cells(batching(12, 2500, 5, instances=2), 10, 22),
]
SIZES_CALIBRATION = [
    *cells(batching(28, 0), 1, 3, 12, mix=TWO_SIZES),
    *cells(batching(28, 0), 1, 3, 12, mix=MANY_SIZES),
]
# The share of notifications that the batcher misses without prefetch (Scenario.missed_share) is fitted to these.
POLICY_CALIBRATION = [
    *cells(limited(batching(12, 0), queue=10), constant=0.9, poisson=0.8),
    *cells(limited(batching(10, 0), timeout_us=30_000, action="DELAY"), poisson=0.75),
    *cells(limited(batching(6, 1000), queue=100), 9, poisson=0.85),
]
MISSED_SHARES = tuple(np.arange(0.0, 1.0, 0.05).round(2).tolist())
HALVES, THREE_SHAPES = (1.0, 1.0), (6.0, 3.0, 1.0)
HELD_OUT = {
    "sizes": [
        *cells(unbatched(8, 1), 3, poisson=0.6, mix=TWO_SIZES),
        *cells(batching(8, 0), 4, 16, poisson=0.7, mix=TWO_SIZES),
        *cells(batching(16, 3000), 4, 12, constant=0.6, poisson=0.8, mix=TWO_SIZES),
        *cells(batching(16, 2000, 8), 6, poisson=0.6, mix=MANY_SIZES),
        *cells(batching(16, 0, instances=2), 6, 16, poisson=0.7, mix=MANY_SIZES),
        *cells(batching(8, 4000, instances=2), 5, poisson=0.5, mix=MANY_SIZES),
    ],
    "shapes": [
        *cells(batching(8, 0), 4, 16, poisson=0.3, shape_shares=HALVES),
        *cells(batching(8, 4000), 6, 16, poisson=0.3, shape_shares=HALVES),
        *cells(batching(8, 0, instances=2), 6, 20, poisson=0.4, shape_shares=THREE_SHAPES),
        *cells(batching(16, 3000, 4, instances=2), 8, 20, poisson=0.3, shape_shares=THREE_SHAPES),
    ],
    "rejects": [
        *cells(limited(batching(8, 0), queue=4), constant=1.2, poisson=0.9),
        *cells(limited(batching(8, 0), queue=16), constant=1.5, poisson=1.1),
        *cells(limited(batching(8, 3000), queue=6), constant=0.7, poisson=0.9),
        *cells(limited(batching(4, 0, instances=2), queue=2), constant=1.1, poisson=0.8),
    ],
    "timeouts": [
        *cells(limited(batching(8, 0), timeout_us=10_000), constant=1.2, poisson=0.9),
        *cells(limited(batching(8, 8000, 2), timeout_us=4000), poisson=0.3),
        *cells(limited(batching(8, 8000, 4), timeout_us=6000), poisson=0.6),
        *cells(limited(batching(4, 0, instances=2), timeout_us=15_000), constant=1.3, poisson=0.9),
        *cells(limited(batching(8, 0), timeout_us=10_000, action="DELAY"), poisson=0.8),
        *cells(limited(batching(8, 2000), timeout_us=20_000, action="DELAY"), poisson=0.85),
        *cells(limited(batching(8, 0), timeout_us=12_000, queue=12), poisson=1.2),
    ],
    "priorities": [
        *cells(leveled(batching(8, 0)), 6, poisson=0.6, priorities=FIRST_FIFTH),
        *cells(
            leveled(batching(8, 0), default_timeout_microseconds_2=10_000),
            constant=1.2,
            poisson=0.9,
            priorities=FIRST_FIFTH,
        ),
        *cells(
            leveled(batching(8, 2000), default_timeout_microseconds_2=15_000), 12, poisson=1.1, priorities=FIRST_FIFTH
        ),
        *cells(leveled(batching(8, 0), max_queue_size_1=8, max_queue_size_2=8), poisson=1.1, priorities=FIRST_FIFTH),
        *cells(
            leveled(batching(8, 0), default_timeout_microseconds_2=10_000, timeout_action_2="DELAY"),
            poisson=0.8,
            priorities=FIRST_FIFTH,
        ),
        *cells(
            leveled(
                batching(4, 0, instances=2),
                default_timeout_microseconds_1=30_000,
                default_timeout_microseconds_2=10_000,
            ),
            poisson=1.2,
            priorities=FIRST_FIFTH,
        ),
    ],
}
WITH_POLICY = [cell for name in ("rejects", "timeouts", "priorities") for cell in HELD_OUT[name]]
HELD_OUT |= {place: [replace(cell, threads=place) for cell in WITH_POLICY] for place in MISSED_WHERE}


def calibration(sections: Sequence[str]) -> list[QueueCell]:
    has_policies = not {"rejects", "timeouts", "priorities"}.isdisjoint(sections)
    return [
        *CALIBRATION,
        *(SIZES_CALIBRATION if "sizes" in sections else ()),
        *(POLICY_CALIBRATION if has_policies else ()),
    ]


# -- measuring --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Recording:
    """A measurement of the executed requests, and the shares of the others."""

    measurement: Measurement
    rejected_share: float
    timed_out_share: float


class RefusedRequests(Http2Connection):
    """A connection on which an error is an answer; ``errors`` has the messages by number of the call."""

    errors: dict[int, str]

    def receive(self, data: bytes) -> list[tuple[int, str]]:
        ended = super().receive(data)
        self.errors.update(
            (call - client.WARM_UPS, error) for call, error in ended if error and call >= client.WARM_UPS
        )
        return [(call, "") for call, _ in ended]


def run_client(folder: Path) -> None:
    """Send the plan in ``folder``, and write the client's record and the messages of refused requests there."""
    plan, messages, planned_ns = SendPlan.read(folder)
    sender: client.LoadClient = (
        client.ClosedLoopClient(plan, messages)
        if plan.concurrency
        else client.OpenLoopClient(plan, messages, planned_ns)
    )
    connection = RefusedRequests(plan.addresses[0], INFER_METHOD)
    connection.errors = {}
    sender._channels[0].http2 = connection
    sender.run(folder)
    folder.joinpath("errors.json").write_text(json.dumps(connection.errors))


def send(endpoint: Endpoint, cell: QueueCell) -> Recording:
    """Apply the load of ``cell`` for SECONDS. Raises RuntimeError if a request failed for another reason."""
    load = cell.load
    scenario = cell.scenario(ServiceTimes(np.ones((1, 1))), Overheads())
    samples, shapes = scenario.mix()
    facts = zip(samples.tolist(), shapes.tolist(), scenario.priority_mix().tolist(), strict=True)
    messages = [
        to_message(proof.MODEL, {"x": np.zeros((size, 1 + shape), np.float32)}, priority)
        for size, shape, priority in facts
    ]
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        concurrency, planned_ns = 0, list[int]()
        if isinstance(load, ClosedLoopLoad):
            concurrency = load.concurrency
        else:
            planned_ns = (1e9 * load.arrivals_s).astype(np.int64).tolist()
        SendPlan((endpoint.grpc,), PATIENT_MS, None, concurrency, SECONDS).write(folder, messages, planned_ns)
        before = read_statistics(endpoint)
        command = [sys.executable, __file__, "--client", scratch]
        subprocess.run(command, check=True, timeout=SECONDS + CLIENT_SECONDS)
        after = read_statistics(endpoint)
        record = SendRecord.read(folder)
        errors = {int(call): text for call, text in json.loads(folder.joinpath("errors.json").read_text()).items()}
    if record.error or record.overload:
        raise RuntimeError(f"{' '.join(cell.key.values())}: {record.error or record.overload}")
    seen = recording(record, errors, samples)
    return replace(seen, measurement=with_statistics(seen.measurement, before, after))


def recording(record: SendRecord, errors: Mapping[int, str], samples: IntArray) -> Recording:
    """Return the figures of a record; ``samples`` are those of successive requests, used cyclically.

    Raises RuntimeError for an error that is no refusal by the queue.
    """
    for error in set(errors.values()):
        if REJECTED not in error and TIMED_OUT not in error:
            raise RuntimeError(f"a request failed: {error}")
    executed = record.answered_ns != NEVER
    total = int(executed.sum())
    executed[list(errors)] = False
    latencies_ms = np.sort((record.answered_ns - record.sent_ns)[executed]) / 1e6
    seconds = float(record.answered_ns[executed].max() - record.sent_ns.min()) / 1e9
    own = np.resize(samples, len(executed))[executed]

    def quantile(share: float) -> float:
        return float(latencies_ms[int(share * (len(latencies_ms) - 1) + 0.5)])

    measurement = Measurement(
        throughput_infer_per_sec=float(own.sum()) / seconds,
        latency_avg_ms=float(latencies_ms.mean()),
        latency_p50_ms=quantile(0.50),
        latency_p90_ms=quantile(0.90),
        latency_p95_ms=quantile(0.95),
        latency_p99_ms=quantile(0.99),
        requests=int(executed.sum()),
        stable=True,
    )
    rejected = sum(REJECTED in error for error in errors.values())
    return Recording(measurement, rejected / total, (len(errors) - rejected) / total)


def record(path: Path, wanted: Sequence[QueueCell], recordings: int) -> None:
    """Append recordings until each cell has the given number."""
    done = read(path, wanted)
    for fixed_shapes in (True, False):
        missing: list[tuple[int, QueueCell]] = []
        for number in range(recordings):
            lacking = [
                cell for cell in wanted if cell.fixed_shapes == fixed_shapes and len(done.get(cell, ())) <= number
            ]
            candidates = list(dict.fromkeys(cell.candidate for cell in lacking))
            random.Random(number).shuffle(candidates)
            missing += [(number, cell) for own in candidates for cell in lacking if cell.candidate == own]
        if missing:
            for number, cell, seen in measured(missing, proof.CONFIG if fixed_shapes else ANY_SHAPE):
                append(path, number, cell, seen)


def measured(missing: Sequence[tuple[int, QueueCell]], config: str) -> Iterator[tuple[int, QueueCell, Recording]]:
    """Yield each recording as soon as it is made; successive cells of one configuration share a deployment."""
    with proof.bench(config) as (target, _):
        place = 0
        while place < len(missing):
            number, first = missing[place]
            with target.deploy(first.candidate) as endpoint:
                while place < len(missing) and missing[place][1].candidate == first.candidate:
                    number, cell = missing[place]
                    print_progress(f"recording {place + 1} of {len(missing)}")
                    place_threads(endpoint, cell.threads)
                    yield number, cell, least_disturbed(endpoint, cell)
                    place += 1


def place_threads(endpoint: Endpoint, where: str) -> None:
    """Run the batcher's thread on another CPU than the server's other threads, or on the same one.

    The batcher is the thread that wakes twice a second while the server is idle; of several, the latest one.
    """
    assert endpoint.server_pid is not None, "the server runs on this machine"
    below = cpu_usage.process_tree(endpoint.server_pid)
    server = next(pid for pid in below if Path(f"/proc/{pid}/comm").read_text().strip() == "tritonserver")
    before = switches(server)
    time.sleep(IDLE_SECONDS if where else 0.0)
    after = switches(server)
    cpus = sorted(os.sched_getaffinity(0))
    for thread in after:
        os.sched_setaffinity(thread, cpus[1:] if where else cpus)
    if where:
        batcher = max(thread for thread, count in after.items() if count - before.get(thread, count) in IDLE_WAKES)
        os.sched_setaffinity(batcher, cpus[:1] if where == "apart" else cpus[1:])


def switches(process: int) -> dict[int, int]:
    """Return how often each thread of a process has started to wait."""
    counts = {}
    for folder in Path(f"/proc/{process}/task").iterdir():
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # the thread has ended
            status = dict(line.split(":", 1) for line in (folder / "status").read_text().splitlines() if ":" in line)
            counts[int(folder.name)] = int(status["voluntary_ctxt_switches"])
    return counts


def least_disturbed(endpoint: Endpoint, cell: QueueCell) -> Recording:
    """Return the first undisturbed attempt, or else the least disturbed one."""
    tries: list[tuple[float, Recording]] = []
    while len(tries) < proof.ATTEMPTS and not (tries and tries[-1][0] <= OTHERS_LIMIT):
        wait_for_quiet()
        before = CpuUsage.now()
        seen = send(endpoint, cell)
        tries.append((CpuUsage.now().others_since(before), seen))
    return min(tries, key=lambda one: one[0])[1]


def append(path: Path, number: int, cell: QueueCell, seen: Recording) -> None:
    figures = {name: getattr(seen.measurement, name) for name in proof.FIGURES}
    shares = {"rejected_share": seen.rejected_share, "timed_out_share": seen.timed_out_share}
    row = {"recording": str(number), **cell.key, **figures, **shares}
    fresh = not path.exists()
    with path.open("a", newline="") as file:
        writer = csv.DictWriter(file, row, lineterminator="\n")
        if fresh:
            writer.writeheader()
        writer.writerow(row)


def read(path: Path, wanted: Sequence[QueueCell]) -> dict[QueueCell, list[Recording]]:
    recorded: dict[QueueCell, list[Recording]] = {}
    if path.exists():
        known = {tuple(cell.key.values()): cell for cell in wanted}
        with path.open(newline="") as file:
            for row in csv.DictReader(file):
                cell = known.get(tuple(row[name] for name in ALONE.key))
                if cell is not None:
                    shares = float(row["rejected_share"]), float(row["timed_out_share"])
                    recorded.setdefault(cell, []).append(Recording(proof.read_measurement(row), *shares))
    return recorded


# -- results -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ComparedQueue(Compared):
    """A comparison with the shares of refused requests, in percent of all requests."""

    rejected: float
    timed_out: float

    @property
    def refused_error(self) -> float:
        """The larger one of the differences of both shares, in percentage points."""
        differences = (
            100 * self.simulated.rejected_share - self.rejected,
            100 * self.simulated.timed_out_share - self.timed_out,
        )
        return max(differences, key=abs)


def compare(
    recorded: Mapping[QueueCell, Sequence[Recording]], server: proof.CalibratedServer, wanted: Sequence[QueueCell]
) -> list[ComparedQueue]:
    there = [cell for cell in wanted if cell in recorded]
    compared = []
    servers = {cell.threads: server for cell in there}
    for place in MISSED_WHERE.keys() & servers.keys():
        servers[place] = replace(server, missed_share=MISSED_WHERE[place])
    predictions = [servers[cell.threads].predict([cell])[0] for cell in there]
    for cell, simulated in zip(there, predictions, strict=True):
        seen = recorded[cell]
        compared.append(
            ComparedQueue(
                cell,
                median([one.measurement for one in seen]),
                simulated,
                100 * statistics.median(one.rejected_share for one in seen),
                100 * statistics.median(one.timed_out_share for one in seen),
            )
        )
    return compared


HEADER = (
    *("max batch", "delay µs", "preferred", "instances", "load", "samples", "shapes", "policy"),
    *("infer/s", "simulated", "error", "p95 ms", "simulated", "error", "mean batch", "simulated"),
    *("rejected %", "simulated", "timed out %", "simulated"),
)


def row(one: ComparedQueue) -> str:
    key = dict(one.cell.key)
    m, s = one.measured, one.simulated
    arrivals, level = key.pop("arrivals"), key.pop("level")
    load = f"closed, {level} in flight" if arrivals == "closed" else f"{arrivals}, {level} requests/s"
    figures = (
        *(key[name] for name in ("max_batch_size", "delay_us", "preferred", "instances")),
        *(load, key["mix"] or "1", key["shapes"], key["policy"]),
        *(f"{m.throughput_infer_per_sec:,.0f}", f"{s.throughput_infer_per_sec:,.0f}", f"{one.throughput_error:+.1%}"),
        *(f"{m.latency_p95_ms:.1f}", f"{1000 * s.latency_p95_s:.1f}", f"{one.p95_error:+.1%}"),
        *(f"{m.mean_batch_size:.2f}", f"{s.mean_batch_size:.2f}"),
        *(f"{one.rejected:.1f}", f"{100 * s.rejected_share:.1f}"),
        *(f"{one.timed_out:.1f}", f"{100 * s.timed_out_share:.1f}"),
    )
    return "| " + " | ".join(text.replace("|", "\\|") for text in figures) + " |"


def table(compared: Sequence[ComparedQueue]) -> str:
    head = "| " + " | ".join(HEADER) + " |\n|" + " --: |" * len(HEADER)
    return "\n".join([head, *map(row, compared)])


def summary(compared: Sequence[ComparedQueue]) -> str:
    refused = [abs(one.refused_error) for one in compared]
    shares = f"share of refused requests: mean error {statistics.fmean(refused):.1f}, worst {max(refused):.1f} points"
    return f"{proof.Summary.of(compared)} · {shares}"


def calibrate(
    recorded: Mapping[QueueCell, Sequence[Recording]], by: Sequence[QueueCell], *, steps: int = proof.FIT_STEPS
) -> proof.CalibratedServer:
    """Return the server calibrated on the cells of ``by``. Raises KeyError if one of them was not recorded.

    The open loops with a queue policy only determine the share of missed notifications. In a closed loop it also
    matters whether the next requests arrive before the instance is idle.
    """
    measurements: dict[Cell, list[Measurement]] = {cell: [one.measurement for one in recorded[cell]] for cell in by}
    usual = [cell for cell in by if not cell.candidate.fields]
    server = proof.calibrate(measurements, usual, alone=ALONE, saturated=SATURATED, steps=steps)
    medians: dict[Cell, Measurement] = {
        cell: median(measurements[cell]) for cell in by if cell.candidate.fields and cell.arrivals != "closed"
    }
    if not medians:
        return server
    servers = [replace(server, missed_share=share) for share in MISSED_SHARES]
    return min(servers, key=lambda server: proof.mean_error(server, medians))


def percentages(shares: Sequence[float]) -> str:
    return f"{min(shares):.1%} to {max(shares):.1%}"


def report(
    recorded: Mapping[QueueCell, Sequence[Recording]],
    server: proof.CalibratedServer,
    sections: Sequence[str],
    on: str,
) -> str:
    """Return the Markdown of simulator_queue_proof.md for the sections that were recorded completely."""
    parts, summaries = [], []
    for name in sections:
        compared = compare(recorded, server, HELD_OUT[name])
        summaries.append(proof.Summary.of(compared))
        fewest = min(len(recorded[cell]) for cell in HELD_OUT[name])
        recordings = f"each the median of {fewest} recordings" if fewest > 1 else "each with 1 recording"
        title = f"## {name.capitalize()}: {len(compared)} cells, {recordings}"
        parts.append(f"{title}\n\n**{summary(compared)}**\n\n{table(compared)}")
    body = "\n\n".join(parts)
    agreements = percentages([one.agreement for one in summaries])
    errors = percentages([one.throughput for one in summaries])
    own = compare(recorded, server, calibration(sections))
    return f"""# The simulated queue against the real server: latest measurement

**Question:** Does the simulated queue agree with the real server, for mixed sizes, rejects, timeouts and priorities?

**Answer:** By section, {agreements} of the cells agree on a bound on p95, and the throughput MAPE is {errors}.

`python benchmarks/simulator_queue_proof.py`

A Python model on the real tritonserver sleeps {proof.FIXED_MS:g} ms + {proof.PER_SAMPLE_MS:g} ms per sample.
The cells below were not used for the calibration. {on}

{body}

## Calibration

The batcher misses {server.missed_share:.0%} of the notifications by ended executions.
Errors of the {len(own)} cells of the calibration: {summary(own)}

{table(own)}
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--section", nargs="+", choices=SECTIONS, default=list(SECTIONS), help="what to record (all)")
    parser.add_argument("--recordings", type=int, default=3)
    parser.add_argument("--predict-only", action="store_true")
    parser.add_argument("--client", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.client:
        run_client(arguments.client)
        return
    if not arguments.predict_only:
        wanted = [*calibration(arguments.section), *(cell for name in arguments.section for cell in HELD_OUT[name])]
        record(RECORDINGS, wanted, arguments.recordings)
    known = [*calibration(SECTIONS), *(cell for wanted in HELD_OUT.values() for cell in wanted)]
    recorded = read(RECORDINGS, known)
    sections = [name for name, wanted in HELD_OUT.items() if all(cell in recorded for cell in wanted)]
    server = calibrate(recorded, calibration(sections))
    text = report(recorded, server, sections, f"{hardware.detect()}; {date.today()}.")
    REPORT.write_text(text)
    print(text)


if __name__ == "__main__":
    main()
