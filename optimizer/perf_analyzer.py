"""perf_analyzer: the command it is run with, the reading of what it says, and our own judgement of stability.

perf_analyzer's own stability test fails half the points on a noisy machine and then writes no figures at all.
So it takes a fixed number of windows and never judges (``--stability-percentage 999``); the windows that it
prints are judged here.
"""

from __future__ import annotations

import csv
import io
import math
import os
import re
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from objectives.metrics import Measurement
from optimizer import batch_stats
from optimizer.errors import MeasurementError, ServerCrashed
from optimizer.interfaces import Endpoint
from optimizer.process import Finished, ending, run
from optimizer.server_health import PROBE_SECONDS, answers, cause, model_died, shortened
from optimizer.stopwatch import Stopwatch
from optimizer.trial import LoadPoint

if TYPE_CHECKING:
    from tritonclient.grpc.service_pb2 import ModelStatistics

WINDOWS = 3  # the least that perf_analyzer accepts as a result
FIRST_WINDOW_MS = 600
SHORTEST_WINDOW_MS = 50
GLANCE_MS = 100
STRETCH = 1.2  # a window lasts so much longer than asked for
LONGEST_WINDOW_MS = 15_000
REQUESTS_PER_WINDOW = 60
SPREAD_LIMIT = 0.35  # of the windows' throughputs and of their p95s: (max - min) / median
GLANCE_DRAIN_SECONDS = 10.0  # no figure hangs on it
OVERDUE_SECONDS = 3.0  # after the last window: then the server is asked whether it still lives
CSV_BYTES = 2**16
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
    The requests in flight may take ``drain_seconds`` once the last window is over, then it is killed. It runs on
    ``cpus``, as in SupervisedProcess.
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
    drain_seconds: float = 30.0
    cpus: frozenset[int] | None = None

    def measure(self, endpoint: Endpoint, load: LoadPoint, seconds: float | None = None) -> Measurement:
        """Three windows of ``window_ms``; where they disagree, once more with windows twice as long.

        With ``seconds`` given, three windows that take so long together: one of many such measurements, whose
        differences are judged by whoever repeats them.

        Raises MeasurementError where perf_analyzer gives no figures, twice in a row; ServerCrashed at once where the
        server or its model died or hangs.
        """
        asked_ms = self.window_ms
        if seconds is not None:
            asked_ms = max(SHORTEST_WINDOW_MS, round(1000 * seconds / WINDOWS / STRETCH))
        window_ms = asked_ms
        while True:
            measurement, windows = self._launch(endpoint, load, window_ms)
            if measurement is None:  # not one request was answered within the windows
                window_ms *= 5
                if window_ms > LONGEST_WINDOW_MS:
                    raise ServerCrashed(  # hangs, or has more to do than it will ever be through with
                        f"no request was answered within {window_ms / 5000:g} s at {load}", log=self.log
                    )
                continue
            unstable = instability(windows, SPREAD_LIMIT if seconds is None else math.inf)
            per_window = (measurement.requests or 0) / WINDOWS
            longer_ms = _window_for(per_window, window_ms) if per_window < REQUESTS_PER_WINDOW / 2 else 0
            if self.patience and seconds is None and (unstable or longer_ms) and window_ms == asked_ms:
                window_ms = max(2 * window_ms, longer_ms)
                continue
            return replace(measurement, stable=not unstable, reason=unstable)

    def warm_up(self, endpoint: Endpoint, load: LoadPoint) -> Measurement | None:
        """Two short windows: in the first, requests page weights in and grow buffers; the second is the glance.

        Raises ServerCrashed where the server no longer answers. Whatever else goes wrong, ``measure`` will tell.
        """
        brief = replace(self, drain_seconds=min(self.drain_seconds, GLANCE_DRAIN_SECONDS))
        windows = read_windows(brief._run(endpoint, load, GLANCE_MS, windows=2).output)
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
        try:
            return self._attempt(endpoint, load, window_ms)
        except ServerCrashed:
            raise
        except MeasurementError:
            return self._attempt(endpoint, load, window_ms)  # perf_analyzer itself may have been killed

    def _attempt(
        self, endpoint: Endpoint, load: LoadPoint, window_ms: int
    ) -> tuple[Measurement | None, list[Window]]:
        csv_path = self.log.with_name("perf.csv")
        csv_path.unlink(missing_ok=True)
        before = self._statistics(endpoint)
        done = self._run(endpoint, load, window_ms)
        none_valid = done.exit_code == 3 or "No valid requests recorded" in done.output
        unanswered = none_valid and done.exit_code is not None and "had error" not in done.output
        text = _head(csv_path) if done.exit_code == 0 else ""
        if not text and not (unanswered and _answers(endpoint)):
            raise self._fault(endpoint, done)
        if unanswered:
            return None, []
        measurement = read_csv(text)
        after = self._statistics(endpoint)
        return replace(
            measurement,
            requests=read_request_count(done.output),
            mean_batch_size=mean_batch_size(before, after),
            batch_stats=batch_stats.to_text(executions_by_size(before, after)),
            latency_avg_ms=read_average_ms(done.output),
            measure_seconds=round(done.seconds, 3),
        ), read_windows(done.output)

    def _statistics(self, endpoint: Endpoint) -> ModelStatistics | None:
        with (self.stopwatch or Stopwatch()).server():
            return _statistics(endpoint)

    def _run(self, endpoint: Endpoint, load: LoadPoint, window_ms: int, windows: int = WINDOWS) -> Finished:
        """Raises ServerCrashed once perf_analyzer is overdue and the server does not answer either."""
        due = time.monotonic() + windows * STRETCH * window_ms / 1000 + OVERDUE_SECONDS

        def check() -> None:
            if time.monotonic() > due and not _answers(endpoint):
                raise ServerCrashed(f"the server did not answer within {PROBE_SECONDS:g} s", log=self.log)

        environment = {
            "LD_LIBRARY_PATH": str(self.libraries),
            "PATH": os.environ.get("PATH", ""),
            "HOME": os.environ.get("HOME", ""),
        }
        with (self.stopwatch or Stopwatch()).load_generator():
            return run(
                self.command(endpoint, load, window_ms, windows),
                timeout_seconds=self.drain_seconds + windows * 4 * window_ms / 1000,
                log=self.log,
                env=environment,
                cwd=self.log.parent,
                cpus=self.cpus,
                check=check,
            )

    def _fault(self, endpoint: Endpoint, done: Finished) -> MeasurementError:
        """Whose fault it is that there are no figures."""
        said = _cause(done)
        if not _answers(endpoint):
            return ServerCrashed(f"{said}; the server no longer answers", log=self.log)
        if done.exit_code is None or model_died(done.output):
            return ServerCrashed(said, log=self.log)
        return MeasurementError(said, log=self.log)


def read_windows(output: str) -> list[Window]:
    """The passes of a verbose run with ``--percentile 95``."""
    number = r"(\d{1,15}(?:\.\d{1,15})?(?:e[+-]?\d{1,2})?)"
    found = re.findall(rf"Pass \[\d+\] throughput: {number} infer/sec\. p95 latency: (\d{{1,15}}) usec", output)
    return [Window(float(throughput), int(latency_us) / 1000) for throughput, latency_us in found]


def read_request_count(output: str) -> int | None:
    match = re.search(r"Request count: (\d{1,15})\b", output)
    return int(match[1]) if match else None


def read_average_ms(output: str) -> float | None:
    """With a percentile asked for, the client's average stands only in the line of the protocol."""
    match = re.search(r"Avg (?:gRPC|HTTP) time: (\d{1,15}) usec", output)
    return int(match[1]) / 1000 if match else None


def read_csv(text: str) -> Measurement:
    """perf_analyzer's CSV of one load. Raises MeasurementError where it is not one, or its figures cannot be."""
    try:
        (row,) = csv.DictReader(io.StringIO(text))
        values = {field: _figure(row[column]) / 1000 for column, field in _US_COLUMNS.items()}
        return Measurement(throughput_infer_per_sec=_figure(row["Inferences/Second"]), **values)  # type: ignore[arg-type]
    except (KeyError, ValueError, TypeError, csv.Error) as error:
        raise MeasurementError(f"perf_analyzer wrote a CSV that cannot be read: {shortened(text, 80)}") from error


def _figure(text: str) -> float:
    value = float(text)
    if not 0 <= value < math.inf:
        raise ValueError(f"{value} is no rate and no time")
    return value


def instability(windows: Sequence[Window], spread_limit: float = SPREAD_LIMIT) -> str:
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
        if (max(values) - min(values)) / middle > spread_limit:
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


def _answers(endpoint: Endpoint) -> bool:
    from tritonclient.grpc import InferenceServerClient

    with InferenceServerClient(endpoint.grpc) as client:
        return answers(client)


def _statistics(endpoint: Endpoint) -> ModelStatistics | None:
    from tritonclient.grpc import InferenceServerClient
    from tritonclient.utils import InferenceServerException

    try:
        with InferenceServerClient(endpoint.grpc) as client:
            return client.get_inference_statistics(endpoint.model, client_timeout=PROBE_SECONDS).model_stats[0]
    except (InferenceServerException, IndexError):
        return None


def _window_for(requests_per_window: float, window_ms: int) -> int:
    """A window long enough for REQUESTS_PER_WINDOW requests at the rate seen."""
    return min(LONGEST_WINDOW_MS, int(window_ms * REQUESTS_PER_WINDOW / max(requests_per_window, 1)))


def _head(path: Path) -> str:
    """The beginning of a file; empty where it cannot be read."""
    try:
        with path.open("rb") as file:
            return file.read(CSV_BYTES).decode(errors="replace")
    except OSError:
        return ""


def _cause(done: Finished) -> str:
    if done.exit_code is None:
        return f"perf_analyzer had to be killed after {done.seconds:.0f} s"
    how = "wrote no figures" if done.exit_code == 0 else f"ended with {ending(done.exit_code)}"
    return f"perf_analyzer {how}: {_last_words(done.output)}"


def _last_words(output: str) -> str:
    """Why the first request failed, else the last line that tells of a fault, else the last line."""
    if request := re.search(r"had error: (.{1,2000})", output, re.DOTALL):
        return cause(request[1].partition("\nThread [")[0])
    lines = [line for line in output.splitlines() if line.strip()]
    told = [line for line in lines if re.search("error|fail|unable|invalid", line, re.IGNORECASE)]
    return shortened((told or lines or ["it printed nothing"])[-1], 200)
