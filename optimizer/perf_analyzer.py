"""perf_analyzer: the command it is run with, the reading of what it says, and our own judgement of stability.

perf_analyzer's own stability test fails half the points on a noisy machine and then writes no figures at all.
So it takes a fixed number of windows and never judges (``--stability-percentage 999``); the windows that it
prints are judged here.
"""

from __future__ import annotations

import csv
import io
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from objectives.metrics import Measurement
from optimizer import batch_stats
from optimizer.errors import MeasurementError
from optimizer.interfaces import Endpoint
from optimizer.process import Finished, run
from optimizer.stopwatch import Stopwatch
from optimizer.trial import LoadPoint

if TYPE_CHECKING:
    from tritonclient.grpc.service_pb2 import ModelStatistics

WINDOWS = 3  # the least that perf_analyzer accepts as a result
FIRST_WINDOW_MS = 600
SHORTEST_WINDOW_MS = 50
GLANCE_MS = 100
LONGEST_WINDOW_MS = 15_000
REQUESTS_PER_WINDOW = 60
SPREAD_LIMIT = 0.35  # of the windows' throughputs and of their p95s: (max - min) / median
MAX_THREADS = 2  # few: on a CPU they share the cores with the server
_US_COLUMNS = {
    "Client Send": "client_send_ms",
    "Network+Server Send/Recv": "network_ms",
    "Server Queue": "queue_ms",
    "Server Compute Input": "compute_input_ms",
    "Server Compute Infer": "compute_infer_ms",
    "Server Compute Output": "compute_output_ms",
    "Client Recv": "client_recv_ms",
    "p50 latency": "latency_p50_ms",
    "p90 latency": "latency_p90_ms",
    "p95 latency": "latency_p95_ms",
    "p99 latency": "latency_p99_ms",
}


@dataclass(frozen=True, slots=True)
class Window:
    """One measurement window ("pass") as perf_analyzer prints it."""

    throughput_infer_per_sec: float
    latency_p95_ms: float


@dataclass(frozen=True)
class PerfAnalyzer:
    """Runs perf_analyzer against an endpoint, one load a launch, each in a process group with a timeout.

    ``input_data`` is ``random``, ``zero`` or a JSON data file; ``shapes`` are ``name:d1,d2``. What a launch
    printed is kept in ``log``. Without ``patience`` windows that disagree or see few requests are not repeated.
    """

    binary: Path
    libraries: Path
    log: Path
    protocol: Literal["grpc", "http"] = "grpc"
    input_data: str = "random"
    shapes: tuple[str, ...] = ()
    stopwatch: Stopwatch | None = None
    window_ms: int = FIRST_WINDOW_MS
    patience: bool = True

    def measure(self, endpoint: Endpoint, load: LoadPoint) -> Measurement:
        """Three windows of ``window_ms``; where they disagree, once more with windows twice as long.

        Raises MeasurementError where perf_analyzer gives no figures: server gone, requests failing, timeout.
        """
        window_ms = self.window_ms
        while True:
            measurement, windows = self._launch(endpoint, load, window_ms)
            if measurement is None:  # not one request was answered within the windows
                window_ms *= 5
                if window_ms > LONGEST_WINDOW_MS:
                    raise MeasurementError(
                        f"no request was answered within {window_ms / 5000:g} s at {load}", log=self.log
                    )
                continue
            unstable = instability(windows)
            per_window = (measurement.requests or 0) / WINDOWS
            longer_ms = _window_for(per_window, window_ms) if per_window < REQUESTS_PER_WINDOW / 2 else 0
            if self.patience and (unstable or longer_ms) and window_ms == self.window_ms:
                window_ms = max(2 * window_ms, longer_ms)
                continue
            return replace(measurement, stable=not unstable, reason=unstable)

    def warm_up(self, endpoint: Endpoint, load: LoadPoint) -> Measurement | None:
        """Two short windows: in the first, requests page weights in and grow buffers; the second is the glance."""
        windows = read_windows(self._run(endpoint, load, GLANCE_MS, windows=2).output)
        if len(windows) < 2 or windows[1].throughput_infer_per_sec <= 0:
            return None
        glance = windows[1]
        requests = glance.throughput_infer_per_sec / load.request_batch_size * GLANCE_MS / 1000
        return Measurement(
            glance.throughput_infer_per_sec, latency_p95_ms=glance.latency_p95_ms, requests=max(1, round(requests))
        )

    def command(self, endpoint: Endpoint, load: LoadPoint, window_ms: int, windows: int = WINDOWS) -> list[str]:
        """The command line, to be run in a folder of its own: it writes ``perf.csv`` there."""
        address = endpoint.grpc if self.protocol == "grpc" else endpoint.http
        command = [str(self.binary), "-m", endpoint.model, "-i", self.protocol, "-u", address, "--async"]
        command += ["-b", str(load.request_batch_size), "--concurrency-range", str(load.concurrency)]
        command += ["--max-threads", str(MAX_THREADS), "--input-data", self.input_data]
        for shape in self.shapes:
            command += ["--shape", shape]
        command += ["--percentile", "95", "--measurement-interval", str(window_ms)]
        command += ["--max-trials", str(windows), "--stability-percentage", "999", "-v", "-f", "perf.csv"]
        return command

    def _launch(self, endpoint: Endpoint, load: LoadPoint, window_ms: int) -> tuple[Measurement | None, list[Window]]:
        csv_path = self.log.with_name("perf.csv")
        csv_path.unlink(missing_ok=True)
        before = self._statistics(endpoint)
        done = self._run(endpoint, load, window_ms)
        after = self._statistics(endpoint)
        if done.exit_code == 3 or "No valid requests recorded" in done.output:
            return None, []
        windows = read_windows(done.output)
        text = csv_path.read_text(errors="replace") if csv_path.exists() else ""
        if done.exit_code != 0 or not text:
            raise MeasurementError(_cause(done), log=self.log)
        measurement = read_csv(text)
        return replace(
            measurement,
            requests=read_request_count(done.output),
            mean_batch_size=mean_batch_size(before, after),
            batch_stats=batch_stats.to_text(executions_by_size(before, after)),
            latency_avg_ms=read_average_ms(done.output),
            measure_seconds=round(done.seconds, 3),
        ), windows

    def _statistics(self, endpoint: Endpoint) -> ModelStatistics | None:
        with (self.stopwatch or Stopwatch()).server():
            return _statistics(endpoint)

    def _run(self, endpoint: Endpoint, load: LoadPoint, window_ms: int, windows: int = WINDOWS) -> Finished:
        timeout = 30 + windows * 4 * window_ms / 1000
        environment = {
            "LD_LIBRARY_PATH": str(self.libraries),
            "PATH": os.environ.get("PATH", ""),
            "HOME": os.environ.get("HOME", ""),
        }
        with (self.stopwatch or Stopwatch()).load_generator():
            return run(
                self.command(endpoint, load, window_ms, windows),
                timeout_seconds=timeout,
                log=self.log,
                env=environment,
                cwd=self.log.parent,
            )


def read_windows(output: str) -> list[Window]:
    """The passes of a verbose run with ``--percentile 95``."""
    found = re.findall(r"Pass \[\d+\] throughput: ([\d.e+]+) infer/sec\. p95 latency: (\d+) usec", output)
    return [Window(float(throughput), int(latency_us) / 1000) for throughput, latency_us in found]


def read_request_count(output: str) -> int | None:
    match = re.search(r"Request count: (\d+)", output)
    return int(match[1]) if match else None


def read_average_ms(output: str) -> float | None:
    """With a percentile asked for, the client's average stands only in the line of the protocol."""
    match = re.search(r"Avg (?:gRPC|HTTP) time: (\d+) usec", output)
    return int(match[1]) / 1000 if match else None


def read_csv(text: str) -> Measurement:
    """perf_analyzer's CSV of one load. Raises MeasurementError where it is not one."""
    rows = list(csv.DictReader(io.StringIO(text)))
    try:
        (row,) = rows
        values = {field: float(row[column]) / 1000 for column, field in _US_COLUMNS.items()}
        return Measurement(throughput_infer_per_sec=float(row["Inferences/Second"]), **values)  # type: ignore[arg-type]
    except (KeyError, ValueError, TypeError) as error:
        raise MeasurementError(f"perf_analyzer wrote a CSV that cannot be read: {text[:80]!r}") from error


def instability(windows: Sequence[Window]) -> str:
    """Why the windows do not agree; empty where they do."""
    if len(windows) < WINDOWS:
        return f"only {len(windows)} of {WINDOWS} windows"
    for name, values in (
        ("throughput", [w.throughput_infer_per_sec for w in windows]),
        ("p95", [w.latency_p95_ms for w in windows]),
    ):
        middle = sorted(values)[len(values) // 2]
        if middle <= 0:
            return f"a window of zero {name}"
        if (max(values) - min(values)) / middle > SPREAD_LIMIT:
            return f"unstable: {name} between {min(values):.4g} and {max(values):.4g}"
    return ""


def mean_batch_size(before: ModelStatistics | None, after: ModelStatistics | None) -> float | None:
    """Inferences per execution between two readings of the server's statistics."""
    if before is None or after is None:
        return None
    executions = int(after.execution_count - before.execution_count)
    inferences = int(after.inference_count - before.inference_count)
    if executions <= 0:
        return None
    return round(inferences / executions, 3)


def executions_by_size(before: ModelStatistics | None, after: ModelStatistics | None) -> list[batch_stats.Entry]:
    """Executions between two readings, by batch size; none where a reading is missing."""
    if before is None or after is None:
        return []
    was = {batch.batch_size: batch for batch in before.batch_stats}
    entries = []
    for batch in after.batch_stats:
        parts = (batch.compute_input, batch.compute_infer, batch.compute_output)
        executions, ns = batch.compute_infer.count, sum(part.ns for part in parts)
        if (old := was.get(batch.batch_size)) is not None:
            executions -= old.compute_infer.count
            ns -= sum(part.ns for part in (old.compute_input, old.compute_infer, old.compute_output))
        if executions > 0 and ns >= 0:
            entries.append((batch.batch_size, executions, ns))
    return entries


def _statistics(endpoint: Endpoint) -> ModelStatistics | None:
    from tritonclient.grpc import InferenceServerClient
    from tritonclient.utils import InferenceServerException

    try:
        with InferenceServerClient(endpoint.grpc) as client:
            return client.get_inference_statistics(endpoint.model, client_timeout=10).model_stats[0]
    except (InferenceServerException, IndexError):
        return None


def _window_for(requests_per_window: float, window_ms: int) -> int:
    """A window long enough for REQUESTS_PER_WINDOW requests at the rate seen."""
    return min(LONGEST_WINDOW_MS, int(window_ms * REQUESTS_PER_WINDOW / max(requests_per_window, 1)))


def _cause(done: Finished) -> str:
    if done.exit_code is None:
        return f"perf_analyzer did not end within {done.seconds:.0f} s"
    lines = [line.strip() for line in done.output.splitlines() if line.strip()]
    told = [line for line in lines if re.search("error|fail|unable|invalid", line, re.IGNORECASE)]
    said = (told or lines or ["it printed nothing"])[-1]
    return f"perf_analyzer ended with exit code {done.exit_code}: {said[:200]}"
