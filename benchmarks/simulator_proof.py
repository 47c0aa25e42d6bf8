"""The simulated batcher against the real server: a Python model that sleeps a known time, served and simulated.

    python benchmarks/simulator_proof.py [--recordings 3] [--predict-only]

The model sleeps FIXED_MS + PER_SAMPLE_MS * b for a batch of b samples. Service times and overheads are calibrated on
the cells of CALIBRATION; the cells of HELD_OUT, other configurations throughout, are then predicted. A cell is a
configuration under a load: a closed loop of some concurrency, or an open loop (constant or Poisson) at a share of
the configuration's capacity. Its figures are the median of the recordings, each in a pass of its own; what others
disturbed is recorded anew. Recordings are appended to simulator_proof.csv: interrupted, the command goes on where
it was, and ``--predict-only`` simulates again without a server. Prints the Markdown of simulator_proof.md.
"""

from __future__ import annotations

import argparse
import contextlib
import csv
import random
import tempfile
import textwrap
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from record_tables import OTHERS_LIMIT, Usage, say, wait_for_quiet

from optimizer import runtime
from optimizer.deploy.embedded import EmbeddedTarget
from optimizer.interfaces import Endpoint
from optimizer.perf_analyzer import WINDOWS, PerfAnalyzer
from optimizer.repository import read_repository_model
from optimizer.trial import Candidate, LoadPoint

RECORDINGS = Path(__file__).with_suffix(".csv")
FIXED_MS, PER_SAMPLE_MS = 5.0, 1.0
WINDOW_MS = 450  # perf_analyzer takes three, each a fifth longer than asked: 1.6 s
SECONDS = WINDOWS * 1.2 * WINDOW_MS / 1000
ATTEMPTS = 4

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


# -- what is measured -------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Cell:
    """A configuration under a load: ``level`` is the concurrency of a closed loop, else requests per second."""

    candidate: Candidate
    request_batch_size: int
    arrivals: str  # closed, constant or poisson
    level: int

    @property
    def key(self) -> tuple[str, ...]:
        c = self.candidate
        batching = f"{c.max_queue_delay_us}" if c.dynamic_batching else "off"
        preferred = " ".join(map(str, c.preferred_batch_sizes))
        return (
            *(str(c.max_batch_size), batching, preferred, str(c.instance_count)),
            *(str(self.request_batch_size), self.arrivals, str(self.level)),
        )


KEY_COLUMNS = ("max_batch_size", "delay_us", "preferred", "instances", "request_batch_size", "arrivals", "level")
FIGURES = (
    *("throughput_infer_per_sec", "latency_avg_ms", "latency_p50_ms", "latency_p90_ms", "latency_p95_ms"),
    *("latency_p99_ms", "queue_ms", "compute_input_ms", "compute_infer_ms", "compute_output_ms"),
    *("client_send_ms", "network_ms", "client_recv_ms", "mean_batch_size", "requests"),
)
COLUMNS = ("recording", *KEY_COLUMNS, *FIGURES, "wall_s", "others", "batch_stats")


def capacity(candidate: Candidate, request_batch_size: int) -> float:
    """Requests per second with all instances busy on batches as large as the batcher makes them."""
    largest = max(candidate.preferred_batch_sizes or (candidate.max_batch_size,))
    requests = max(1, largest // request_batch_size) if candidate.dynamic_batching else 1
    seconds = (FIXED_MS + PER_SAMPLE_MS * requests * request_batch_size) / 1000
    return candidate.instance_count * requests / seconds


def cells(candidate: Candidate, *loads: int | tuple[str, float], request_batch_size: int = 1) -> list[Cell]:
    """``loads``: a concurrency, or how requests arrive and at which share of the capacity."""
    found = []
    for load in loads:
        arrivals, level = load if isinstance(load, tuple) else ("closed", load)
        if arrivals != "closed":
            level *= capacity(candidate, request_batch_size)
        found.append(Cell(candidate, request_batch_size, arrivals, round(level)))
    return found


def batching(limit: int, delay_us: int, *preferred: int, instances: int = 1) -> Candidate:
    return Candidate(limit, True, delay_us, preferred, instances)


def unbatched(limit: int, instances: int) -> Candidate:
    return Candidate(limit, instance_count=instances)


CALIBRATION = [
    *cells(batching(20, 0), 1, 9, 40, ("poisson", 0.6)),
    *cells(batching(6, 0, instances=2), 1, 5, 20),
    *cells(batching(10, 1500), 7, 16, ("constant", 0.5)),
    *cells(unbatched(1, 2), 1, 3),
    *cells(batching(15, 0, instances=1), 1, 4, 12, request_batch_size=3),
]
HELD_OUT = [
    *cells(unbatched(8, 1), 1, 4, ("constant", 0.8), ("poisson", 0.6)),
    *cells(unbatched(1, 3), 3, 8, ("constant", 0.9), ("poisson", 0.7)),
    *cells(batching(4, 0), 2, 12, ("constant", 0.5), ("poisson", 0.9)),
    *cells(batching(8, 0, instances=2), 6, 24, ("constant", 0.9), ("poisson", 0.4)),
    *cells(batching(16, 0), 5, 48, ("constant", 0.3), ("poisson", 0.7)),
    *cells(batching(4, 0, instances=3), 4, 16, ("constant", 0.6), ("poisson", 0.8)),
    *cells(batching(8, 2000), 1, 16, ("constant", 0.7), ("poisson", 0.5)),
    *cells(batching(8, 5000, instances=2), 12, 32, ("constant", 0.4), ("poisson", 0.8)),
    *cells(batching(4, 8000, instances=3), 3, 20, ("constant", 0.5), ("poisson", 0.7)),
    *cells(batching(16, 3000, 8, 16), 10, 32, ("constant", 0.6), ("poisson", 0.9)),
    *cells(batching(16, 1000, 8), 8, 24, ("constant", 0.8), ("poisson", 0.6)),
    *cells(batching(8, 4000, 4, instances=2), 8, 20, ("constant", 0.6), ("poisson", 0.5)),
    *cells(batching(32, 0, 16, 32), 12, 40, ("constant", 0.5), ("poisson", 0.8)),
    *cells(batching(32, 10000), 24, 48, ("constant", 0.4), ("poisson", 0.6)),
    *cells(batching(12, 0, instances=1), 3, 8, ("constant", 0.9), ("poisson", 0.6), request_batch_size=3),
    *cells(batching(12, 3000, instances=2), 4, 16, ("constant", 0.6), ("poisson", 0.8), request_batch_size=3),
    *cells(batching(16, 2000, 6, 12), 2, 10, ("constant", 0.7), ("poisson", 0.5), request_batch_size=3),
    *cells(batching(8, 1000, instances=3), 5, 18, ("constant", 0.8), ("poisson", 0.6), request_batch_size=3),
]


# -- measuring --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class LoadGenerator(PerfAnalyzer):
    """perf_analyzer that also keeps to a rate of requests, where ``arrivals`` is not closed."""

    arrivals: str = "closed"
    requests_per_s: int = 0

    def command(self, endpoint: Endpoint, load: LoadPoint, window_ms: int, windows: int = WINDOWS) -> list[str]:
        command = super().command(endpoint, load, window_ms, windows)
        if self.arrivals != "closed":
            at = command.index("--concurrency-range")
            rate = ["--request-rate-range", str(self.requests_per_s), "--request-distribution", self.arrivals]
            command[at : at + 2] = rate
        return command


@contextlib.contextmanager
def bench() -> Iterator[tuple[EmbeddedTarget, LoadGenerator]]:
    installed = runtime.ensure(say)
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        version = folder / "models" / MODEL / "1"
        version.mkdir(parents=True)
        version.joinpath("model.py").write_text(textwrap.dedent(PROGRAM))
        version.with_name("config.pbtxt").write_text(CONFIG)
        source = read_repository_model(folder / "models", MODEL, gpu=False)
        load_generator = LoadGenerator(
            installed.perf_analyzer,
            installed.perf_analyzer_libraries,
            folder / "perf_analyzer.log",
            input_data="zero",
            window_ms=WINDOW_MS,
            patience=False,
        )
        with contextlib.closing(EmbeddedTarget(source, log=folder / "server.log", say=say)) as target:
            yield target, load_generator


def record(path: Path, wanted: Sequence[Cell], recordings: int) -> None:
    """Append what is missing of so many recordings of each cell."""
    with bench() as (target, load_generator):
        for recording in range(recordings):
            done = {
                tuple(row[name] for name in KEY_COLUMNS) for row in read(path) if row["recording"] == str(recording)
            }
            missing: dict[Candidate, list[Cell]] = {}
            for cell in wanted:
                if cell.key not in done:
                    missing.setdefault(cell.candidate, []).append(cell)
            order = list(missing)
            random.Random(recording).shuffle(order)
            for place, candidate in enumerate(order):
                say(f"recording {recording + 1}: configuration {place + 1} of {len(order)}")
                wait_for_quiet()
                with target.deploy(candidate) as endpoint:
                    load_generator.warm_up(endpoint, LoadPoint(1, 2 * candidate.instance_count))
                    for cell in missing[candidate]:
                        append(path, recording, cell, measure(endpoint, load_generator, cell))


def measure(endpoint: Endpoint, load_generator: LoadGenerator, cell: Cell) -> dict[str, Any]:
    """The least disturbed of ATTEMPTS tries, or the first that others left in peace."""
    closed = cell.arrivals == "closed"
    load = LoadPoint(cell.request_batch_size, cell.level if closed else 1)
    generator = replace(load_generator, arrivals=cell.arrivals, requests_per_s=cell.level)
    tries: list[dict[str, Any]] = []
    for _ in range(ATTEMPTS):
        usage, counted, started = Usage.now(), batch_statistics(endpoint), time.monotonic()
        measurement = generator.measure(endpoint, load)
        row = {name: getattr(measurement, name) for name in FIGURES}
        row["wall_s"] = round(time.monotonic() - started, 3)
        row["others"] = round(Usage.now().others_since(usage), 4)
        row["batch_stats"] = difference(counted, batch_statistics(endpoint))
        tries.append(row)
        if row["others"] <= OTHERS_LIMIT:
            break
        say(f"{' '.join(cell.key)}: others took {row['others']:.0%} of the machine; again")
        wait_for_quiet()
    return min(tries, key=lambda one: float(one["others"]))


Counted = dict[int, tuple[int, int]]  # batch size: executions, nanoseconds computed


def batch_statistics(endpoint: Endpoint) -> Counted:
    from tritonclient.grpc import InferenceServerClient

    with InferenceServerClient(endpoint.grpc) as client:
        (model,) = client.get_inference_statistics(endpoint.model, client_timeout=10).model_stats
    return {
        one.batch_size: (one.compute_infer.count, one.compute_input.ns + one.compute_infer.ns + one.compute_output.ns)
        for one in model.batch_stats
    }


def difference(before: Counted, after: Counted) -> str:
    """``size:executions:nanoseconds`` of each batch size that was executed in between."""
    entries = []
    for size, (executions, nanoseconds) in sorted(after.items()):
        earlier = before.get(size, (0, 0))
        if executions > earlier[0]:
            entries.append(f"{size}:{executions - earlier[0]}:{nanoseconds - earlier[1]}")
    return " ".join(entries)


def append(path: Path, recording: int, cell: Cell, row: dict[str, Any]) -> None:
    fresh = not path.exists()
    with path.open("a", newline="") as file:
        writer = csv.DictWriter(file, COLUMNS, lineterminator="\n")
        if fresh:
            writer.writeheader()
        writer.writerow({"recording": recording, **dict(zip(KEY_COLUMNS, cell.key, strict=True)), **row})


def read(path: Path) -> list[dict[str, str]]:
    if not path.exists():
        return []
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--recordings", type=int, default=3)
    parser.add_argument("--predict-only", action="store_true")
    parser.add_argument("--calibration-only", action="store_true")
    parser.add_argument("--csv", type=Path, default=RECORDINGS)
    given = parser.parse_args()
    record(given.csv, CALIBRATION + ([] if given.calibration_only else HELD_OUT), given.recordings)


if __name__ == "__main__":
    main()
