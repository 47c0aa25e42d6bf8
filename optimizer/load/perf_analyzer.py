"""perf_analyzer: the command that it is run with, again where its windows disagree or saw too little.

perf_analyzer's own stability test fails half the points on a noisy machine and then writes no figures at all.
So it takes a fixed number of windows and never judges (``--stability-percentage``); the windows that it prints are
judged here.
"""

from __future__ import annotations

import math
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from objectives.metrics import Measurement
from optimizer import batch_stats
from optimizer.errors import MeasurementError, ServerCrashed
from optimizer.interfaces import Endpoint
from optimizer.load.launcher import Launch, Launcher, OnThisMachine
from optimizer.load.perf_connection import connecting, files
from optimizer.load.perf_output import fault, read_average_ms, read_csv, read_request_count, read_windows
from optimizer.load.server_statistics import (
    executions_by_size,
    is_alive,
    mean_batch_size,
    read_statistics,
    with_statistics,
)
from optimizer.load.windows import (
    FIRST_WINDOW_MS,
    LONGEST_WINDOW_MS,
    REQUESTS_PER_WINDOW,
    SHORTEST_WINDOW_MS,
    SPREAD_LIMIT,
    STRETCH,
    WINDOWS,
    Window,
    instability,
    window_for,
)
from optimizer.process import Finished
from optimizer.server_health import PROBE_SECONDS, model_died
from optimizer.stopwatch import Stopwatch
from optimizer.trial import LoadPoint

if TYPE_CHECKING:
    from tritonclient.grpc.service_pb2 import ModelStatistics

NEVER_UNSTABLE = 10**9  # percent: the first of a slow model's windows may see a twentieth of the others
GLANCE_MS = 100
GLANCE_DRAIN_SECONDS = 10.0  # no figure hangs on it
OVERDUE_SECONDS = 3.0  # after the last window: then the server is asked whether it still lives
CSV_BYTES = 2**16
GENERATED = ("random", "zero")  # input data that is in no file
MAX_THREADS = 2  # few: on a CPU they share the cores with the server


@dataclass(frozen=True)
class PerfAnalyzer:
    """Runs perf_analyzer against an endpoint, one load a launch, each in a process group with a timeout.

    ``input_data`` is ``random``, ``zero`` or a JSON data file; ``shapes`` are ``name:d1,d2``. What a launch
    printed is kept in ``log``. Without ``patience`` windows that disagree or see few requests are not repeated.
    The requests in flight may take ``drain_seconds`` once the last window is over, then it is killed. A server that
    says nothing for ``probe_seconds`` is dead or hangs. It runs on ``cpus``, as in SupervisedProcess. Where
    ``launcher`` runs it, ``binary`` is the command as that one knows it.
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
    probe_seconds: float = PROBE_SECONDS
    cpus: frozenset[int] | None = None
    launcher: Launcher | None = None

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
            if measurement is None:  # no request was answered within one of the windows
                window_ms *= 5
                if window_ms > LONGEST_WINDOW_MS:
                    raise ServerCrashed(  # hangs, or has more to do than it will ever be through with
                        f"no request was answered within {window_ms / 5000:g} s at {load}", log=self.log
                    )
                continue
            unstable = instability(windows, SPREAD_LIMIT if seconds is None else math.inf)
            per_window = (measurement.requests or 0) / WINDOWS
            longer_ms = window_for(per_window, window_ms) if per_window < REQUESTS_PER_WINDOW / 2 else 0
            if self.patience and seconds is None and (unstable or longer_ms) and window_ms == asked_ms:
                window_ms = max(2 * window_ms, longer_ms)
                continue
            return replace(measurement, stable=not unstable, reason=unstable)

    def windows(self, endpoint: Endpoint, load: LoadPoint, seconds: float, count: int) -> list[Measurement]:
        """One: in a closed loop each launch is at its steady load within a few requests."""
        return [self.measure(endpoint, load, seconds)]

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
        at = endpoint.connection_for_load(self.protocol)
        command = [str(self.binary), "-m", endpoint.model, *connecting(at), "--async"]
        command += ["-b", str(round(load.request_batch_size)), "--concurrency-range", str(load.concurrency)]
        command += ["--max-threads", str(MAX_THREADS), "--input-data", self.input_data]
        for shape in self.shapes:
            command += ["--shape", shape]
        command += ["--percentile", "95", "--measurement-interval", str(window_ms)]
        command += [
            "--max-trials",
            str(windows),
            "--stability-percentage",
            str(NEVER_UNSTABLE),
            "-v",
            "-f",
            "perf.csv",
        ]
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
        if not text and not (unanswered and is_alive(endpoint, self.probe_seconds)):
            raise self._fault(endpoint, done)
        if unanswered:
            return None, []
        measurement = read_csv(text)
        after = self._statistics(endpoint)
        if endpoint.batcher not in ("", endpoint.model):  # perf_analyzer's own columns are of the model that it asks
            measurement = with_statistics(measurement, before, after)
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
            return read_statistics(endpoint, self.probe_seconds)

    def _run(self, endpoint: Endpoint, load: LoadPoint, window_ms: int, windows: int = WINDOWS) -> Finished:
        """Raises ServerCrashed once perf_analyzer is overdue and the server does not answer either."""
        due = time.monotonic() + windows * STRETCH * window_ms / 1000 + OVERDUE_SECONDS

        def check() -> None:
            if time.monotonic() > due and not is_alive(endpoint, self.probe_seconds):
                raise ServerCrashed(f"the server did not answer within {self.probe_seconds:g} s", log=self.log)

        at = endpoint.connection_for_load(self.protocol)
        launch = Launch(
            self.command(endpoint, load, window_ms, windows),
            timeout_seconds=self.drain_seconds + windows * 4 * window_ms / 1000,
            log=self.log,
            reads=[*files(at), *([] if self.input_data in GENERATED else [Path(self.input_data)])],
            cpus=self.cpus,
            check=check,
        )
        with (self.stopwatch or Stopwatch()).load_generator():
            return (self.launcher or OnThisMachine(self.libraries))(launch)

    def _fault(self, endpoint: Endpoint, done: Finished) -> MeasurementError:
        """Whose fault it is that there are no figures."""
        said = fault(done)
        if not is_alive(endpoint, self.probe_seconds):
            return ServerCrashed(f"{said}; the server no longer answers", log=self.log)
        if done.exit_code is None or model_died(done.output):
            return ServerCrashed(said, log=self.log)
        return MeasurementError(said, log=self.log)


def _head(path: Path) -> str:
    """The beginning of a file; empty where it cannot be read."""
    try:
        with path.open("rb") as file:
            return file.read(CSV_BYTES).decode(errors="replace")
    except OSError:
        return ""
