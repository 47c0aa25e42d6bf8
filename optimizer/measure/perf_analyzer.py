"""The load generator that runs perf_analyzer in a closed loop and turns its output into a measurement."""

from __future__ import annotations

import glob
import math
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Literal, TypeAlias

from objectives.metrics import Measurement
from optimizer.core.endpoint import REDACTED, Connection, Endpoint, SharedMemory, Tls
from optimizer.core.errors import DeploymentError, MeasurementError, RequestFailed, ServerCrashed
from optimizer.core.measurement_windows import (
    FIRST_WINDOW_MS,
    MAX_SPREAD,
    MIN_WINDOW_MS,
    MIN_WINDOWS,
    REQUESTS_PER_WINDOW,
    WINDOW_STRETCH,
    MeasurementWindow,
    describe_instability,
    longest_window_ms,
    window_length_ms,
)
from optimizer.core.process import FinishedProcess, SecretArgument, SupervisedProcess, wait_and_stop
from optimizer.core.stopwatch import Stopwatch
from optimizer.core.trial import LoadPoint
from optimizer.machine.nvml import cuda_folders
from optimizer.measure import server_calls
from optimizer.measure.model_statistics import completed_requests, read_all_statistics, with_all_statistics
from optimizer.measure.perf_output import (
    failure_text,
    has_failed_request,
    read_average_ms,
    read_csv,
    read_request_count,
    read_windows,
)
from optimizer.measure.server_calls import PROBE_SECONDS, all_servers_respond
from optimizer.measure.server_client import ca_file
from optimizer.measure.server_errors import model_died
from optimizer.measure.shared_memory import claimed
from optimizer.model.input_data import count_entries
from optimizer.options.addresses import SSL_FLAGS

if TYPE_CHECKING:
    from tritonclient.grpc.service_pb2 import ModelStatistics


# error of servers before 2.34 to requests of a newer perf_analyzer
RESERVED_KEY_ERROR = "parameter keys starting with 'triton_' are reserved"


@dataclass(frozen=True)
class PerfAnalyzerCommand:
    """One run of perf_analyzer; the fields are arguments of ``SupervisedProcess`` and ``wait_and_stop``.

    The command runs in the folder of ``log`` and writes its files there. ``arguments`` begin with the program.
    ``reads`` are the files that it reads, ``shm_patterns`` the patterns of the names of its shared memory.
    """

    arguments: Sequence[str]
    timeout_seconds: float
    log: Path
    reads: Sequence[Path] = ()
    cpus: frozenset[int] | None = None
    check: Callable[[], None] = lambda: None
    shm_patterns: Sequence[str] = ()


@dataclass
class OverdueCheck:
    """Checks, when a run of perf_analyzer takes longer than planned, whether the server still completes requests.

    Attributes:
        endpoint: The servers under load.
        log: The log of the run, for errors.
        started: The start of the run, in seconds of the monotonic clock.
        due: When the run should have ended. Before that, nothing is checked.
        drain_seconds: How long the server may complete no request after that.
    """

    endpoint: Endpoint
    log: Path
    started: float
    due: float
    drain_seconds: float
    _completed: int = field(default=-1, init=False)
    _completed_at: float = field(default=0.0, init=False)

    def __call__(self) -> None:
        """Raise ServerCrashed if the server does not respond, or has completed no request for too long."""
        if (now := time.monotonic()) <= self.due:
            return
        if not all_servers_respond(self.endpoint):
            raise ServerCrashed(f"the server did not answer within {PROBE_SECONDS:g} s", log=self.log)
        if (count := completed_requests(self.endpoint)) != self._completed:
            self._completed, self._completed_at = count, now
        elif now - self._completed_at > self.drain_seconds:
            raise ServerCrashed(
                f"perf_analyzer was killed after {now - self.started:.0f} s, because the server completed no request "
                f"for {self.drain_seconds:g} s",
                log=self.log,
            )


PerfAnalyzerRunner: TypeAlias = Callable[[PerfAnalyzerCommand], FinishedProcess]


@dataclass
class LocalRunner:
    """Runs perf_analyzer on this machine, an older release of it if the server refuses requests of the newer one.

    It gets the variables of CUDA, because it has to see the same GPUs as the server, with the same numbers.

    Attributes:
        libraries: A folder of shared libraries that it needs.
        variables: More variables, unless the environment sets them.
        older: Fetches the older release and returns its path; None if no server refuses requests.
    """

    libraries: Path
    variables: Mapping[str, str] = field(default_factory=dict)
    older: Callable[[], Path] | None = None
    _older_binary: Path | None = field(default=None, init=False)

    def __call__(self, command: PerfAnalyzerCommand) -> FinishedProcess:
        if self._older_binary is None:
            done = self._run(command)
            if self.older is None or RESERVED_KEY_ERROR not in done.output:
                return done
            self._older_binary = self.older()
        return self._run(replace(command, arguments=[str(self._older_binary), *command.arguments[1:]]))

    def _run(self, command: PerfAnalyzerCommand) -> FinishedProcess:
        environment = {
            **self.variables,
            **{name: value for name, value in os.environ.items() if name.startswith("CUDA_")},
            "LD_LIBRARY_PATH": os.pathsep.join([str(self.libraries), *cuda_folders()]),
            "PATH": os.environ.get("PATH", ""),
            "HOME": os.environ.get("HOME", ""),
        }
        command.log.unlink(missing_ok=True)
        process = SupervisedProcess(
            command.arguments,
            log=command.log,
            env=environment,
            cwd=command.log.parent,
            cpus=command.cpus,
            shm_patterns=command.shm_patterns,
        )
        return wait_and_stop(process, command.timeout_seconds, command.check)


def connection_arguments(connection: Connection) -> list[str]:
    """Return perf_analyzer's arguments for ``connection``.

    They include the values of the headers, because perf_analyzer accepts headers only on its command line.
    """
    protocol, address, tls = connection.protocol, connection.address, connection.tls
    arguments = ["-i", protocol, "-u", f"https://{address}" if tls and protocol == "http" else address]
    if tls is not None:
        arguments += ["--ssl-grpc-use-ssl"] if protocol == "grpc" else []
        for name, file in _tls_files(tls).items():
            arguments += [SSL_FLAGS[protocol][name], str(file)]
    for name, value in connection.sent_headers.items():
        arguments += ["-H", SecretArgument(f"{name}:{value}", redacted=f"{name}:{REDACTED}")]
    return arguments


def _tls_files(tls: Tls) -> dict[str, Path]:
    """Return the PEM files of ``tls`` by the names of SSL_FLAGS, without those that are not given."""
    files = {"ca": ca_file(tls), "cert": tls.cert, "key": tls.key}
    return {name: file for name, file in files.items() if file is not None}


NEVER_UNSTABLE = 10**9  # percent: a slow model's first window may have a twentieth of the throughput of the others
WARM_UP_WINDOW_MS = 100
WARM_UP_DRAIN_SECONDS = 10.0  # a killed warm-up changes no measurement
# reading a data file and registering its entries in shared memory; usually twice as fast
MIN_BYTES_PER_SECOND, MIN_ENTRIES_PER_SECOND = 10e6, 1000
# with many requests in flight, the last of them may be answered minutes after the last window
MAX_DRAIN_SECONDS, DRAIN_BOUNDS = 600.0, 2
MAX_CSV_BYTES = 2**16
MAX_THREADS = 2  # few, because on a CPU they share the cores with the server


@dataclass(frozen=True)
class PerfAnalyzer:
    """Runs perf_analyzer against an endpoint, once per load, each time in a process group with a time limit.

    Args:
        binary: perf_analyzer; the name of its command if ``runner`` runs it somewhere else.
        runner: Runs the command.
        log: File for the output of each run; other files are written to its folder.
        input_data: The requests, in perf_analyzer's JSON.
        shapes: ``name:d1,d2``.
        repeat: Repeat a measurement whose windows have few requests with longer windows.
        overdue_seconds: Seconds after the expected end of the last window; a run that takes longer is overdue, and
            the server is checked.
        drain_seconds: Seconds in which the server may complete no request before an overdue run is killed.
        latency_bound_ms: The largest bound on the latency, which extends the longest window and ``drain_seconds``.
        cpus: CPUs that it runs on; None for all.
        sequence_length: Requests in each sequence to a stateful model; None for other models.
        shared_memory: Shared memory for inputs and outputs; None sends them in the messages.
    """

    binary: Path
    runner: PerfAnalyzerRunner
    log: Path
    input_data: Path
    protocol: Literal["grpc", "http"] = "grpc"
    shapes: tuple[str, ...] = ()
    stopwatch: Stopwatch = field(default_factory=Stopwatch)
    window_ms: int = FIRST_WINDOW_MS
    repeat: bool = True
    overdue_seconds: float = 3.0
    drain_seconds: float = 30.0
    latency_bound_ms: float = 0.0
    cpus: frozenset[int] | None = None
    sequence_length: int | None = None
    shared_memory: SharedMemory | None = None

    def measure(self, endpoint: Endpoint, load: LoadPoint, seconds: float | None = None) -> Measurement:
        """Return a measurement over three windows, repeated once with longer windows if they have few requests.

        With ``seconds``, the three windows take about that time together, and the measurement is not repeated: the
        caller takes several such measurements and judges their differences.

        Raises:
            MeasurementError: perf_analyzer gave no results twice in a row.
            ServerCrashed: The server or its model died or hangs.
        """
        first_ms = self.window_ms
        if seconds is not None:
            first_ms = max(MIN_WINDOW_MS, round(1000 * seconds / MIN_WINDOWS / WINDOW_STRETCH))
        window_ms, longest_ms = first_ms, round(longest_window_ms(self.latency_bound_ms))
        while True:
            try:
                result = self._attempt(endpoint, load, window_ms)
            except ServerCrashed:
                raise
            except MeasurementError:  # perf_analyzer itself may have been killed
                result = self._attempt(endpoint, load, window_ms)
            if result is None:
                if window_ms >= longest_ms:
                    raise ServerCrashed(  # it hangs, or has more work than it can ever finish
                        f"no request was answered within {window_ms / 1000:g} s at concurrency {load.concurrency}, "
                        f"request batch size {load.request_batch_size:g}",
                        log=self.log,
                    )
                window_ms = min(5 * window_ms, longest_ms)
                continue
            measurement, windows = result
            per_window = (measurement.requests or 0) / MIN_WINDOWS
            has_few = per_window < REQUESTS_PER_WINDOW / 2
            if self.repeat and seconds is None and has_few and window_ms == first_ms:
                window_ms = max(2 * window_ms, window_length_ms(per_window, window_ms))
                continue
            unstable = describe_instability(windows, MAX_SPREAD if seconds is None else math.inf)
            return replace(measurement, stable=not unstable, reason=unstable)

    def measure_windows(self, endpoint: Endpoint, load: LoadPoint, seconds: float, count: int) -> list[Measurement]:
        """Return ``count`` measurements, each from a launch of its own; the load pauses between them."""
        return [self.measure(endpoint, load, seconds) for _ in range(count)]

    def warm_up(self, endpoint: Endpoint, load: LoadPoint) -> Measurement | None:
        """Run two short windows and return the second; None if it is empty.

        In the first one, requests page weights in and grow buffers. Raises ServerCrashed if the server no longer
        answers. Other errors are left to ``measure``.
        """
        limit_seconds = min(self.drain_seconds, WARM_UP_DRAIN_SECONDS)
        windows = read_windows(self._run(endpoint, load, WARM_UP_WINDOW_MS, limit_seconds, windows=2).output)
        if len(windows) < 2 or windows[1].throughput_infer_per_sec <= 0:
            return None
        throughput = windows[1].throughput_infer_per_sec
        requests = throughput / load.request_batch_size * WARM_UP_WINDOW_MS / 1000
        return Measurement(throughput, latency_p95_ms=windows[1].latency_ms, requests=max(1, round(requests)))

    def command(self, endpoint: Endpoint, load: LoadPoint, window_ms: int, windows: int = MIN_WINDOWS) -> list[str]:
        """Return the command line; it writes ``perf.csv`` to the current folder."""
        connection = endpoint.connection_for_load(self.protocol)
        command = [str(self.binary), "-m", endpoint.model, *connection_arguments(connection), "--async"]
        command += ["-b", str(round(load.request_batch_size)), "--concurrency-range", str(load.concurrency)]
        command += ["--max-threads", str(MAX_THREADS), "--input-data", str(self.input_data)]
        for shape in self.shapes:
            command += ["--shape", shape]
        if self.sequence_length is not None:
            command += ["--sequence-length", str(self.sequence_length), "--sequence-length-variation", "0"]
        if (shared := self.shared_memory) is not None:
            command += ["--shared-memory", shared.kind, "--output-shared-memory-size", str(shared.output_bytes)]
        command += ["--percentile", "95", "--measurement-interval", str(window_ms), "--max-trials", str(windows)]
        return [*command, "--stability-percentage", str(NEVER_UNSTABLE), "-v", "-f", "perf.csv"]

    def _attempt(
        self, endpoint: Endpoint, load: LoadPoint, window_ms: int
    ) -> tuple[Measurement, list[MeasurementWindow]] | None:
        """Return the measurement of one run and its windows; None if no request was answered in one of them."""
        csv_path = self.log.with_name("perf.csv")
        csv_path.unlink(missing_ok=True)
        before = self._statistics(endpoint)
        done = self._run(endpoint, load, window_ms, max(self.drain_seconds, MAX_DRAIN_SECONDS))
        end_unix_seconds = time.time()  # ``done`` is the last run; an older release may have been fetched before it
        none_valid = done.exit_code == 3 or "No valid requests recorded" in done.output
        unanswered = none_valid and done.exit_code is not None and not has_failed_request(done.output)
        text = _head(csv_path) if done.exit_code == 0 else ""
        if not text and not (unanswered and all_servers_respond(endpoint)):
            raise self._failure(endpoint, done)
        if unanswered:
            return None
        # perf_analyzer's times describe the requested model, which may not be the one that batches
        with_times = endpoint.tuned_model != endpoint.model
        measurement = replace(
            with_all_statistics(read_csv(text), endpoint, before, self._statistics(endpoint), with_times=with_times),
            requests=read_request_count(done.output),
            latency_avg_ms=read_average_ms(done.output),
            measure_seconds=round(done.seconds, 3),
            begin_unix_seconds=round(end_unix_seconds - done.seconds, 3),
            end_unix_seconds=round(end_unix_seconds, 3),
        )
        return measurement, read_windows(done.output)

    def _statistics(self, endpoint: Endpoint) -> dict[str, ModelStatistics]:
        """Return the server's statistics by model; the time counts as that of the server."""
        with self.stopwatch.count("server"):
            return read_all_statistics(endpoint)

    def _run(
        self, endpoint: Endpoint, load: LoadPoint, window_ms: int, limit_seconds: float, windows: int = MIN_WINDOWS
    ) -> FinishedProcess:
        """Run perf_analyzer, at most ``limit_seconds`` beyond its start and windows.

        Raises ServerCrashed if it is overdue and the server does not respond, or completes no request, either.
        """
        start_seconds, started = self._start_seconds(), time.monotonic()
        due = started + start_seconds + windows * WINDOW_STRETCH * window_ms / 1000 + self.overdue_seconds
        drain_seconds = max(self.drain_seconds, DRAIN_BOUNDS * self.latency_bound_ms / 1000)
        tls = endpoint.connection_for_load(self.protocol).tls
        is_system = self.shared_memory is not None and self.shared_memory.kind == "system"
        regions = _regions(endpoint) if is_system else ()
        command = PerfAnalyzerCommand(
            self.command(endpoint, load, window_ms, windows),
            timeout_seconds=start_seconds + limit_seconds + windows * 4 * window_ms / 1000,
            log=self.log,
            reads=[*([] if tls is None else _tls_files(tls).values()), self.input_data],
            cpus=self.cpus,
            check=OverdueCheck(endpoint, self.log, started, due, drain_seconds),
            shm_patterns=regions,
        )
        with claimed(regions), self.stopwatch.count("load_generator"):
            return self.runner(command)

    def _start_seconds(self) -> float:
        """Return how long perf_analyzer may read the data file and register its entries in shared memory."""
        entries = 0 if self.shared_memory is None else count_entries(self.input_data)
        return self.input_data.stat().st_size / MIN_BYTES_PER_SECOND + entries / MIN_ENTRIES_PER_SECOND

    def _failure(self, endpoint: Endpoint, done: FinishedProcess) -> MeasurementError:
        """Return the error for a run without results: ServerCrashed if the server died, RequestFailed if it lives."""
        message = failure_text(done)
        if not all_servers_respond(endpoint):
            return ServerCrashed(f"{message}; the server no longer answers", log=self.log)
        if done.exit_code is None or model_died(done.output):
            return ServerCrashed(message, log=self.log)
        return (RequestFailed if has_failed_request(done.output) else MeasurementError)(message, log=self.log)


def _regions(endpoint: Endpoint) -> tuple[str, ...]:
    """Return patterns of the names of perf_analyzer's regions: OUTPUT, and INPUT_STREAM_STEP for an input."""
    try:
        metadata = server_calls.model_metadata(endpoint)
    except ServerCrashed:
        raise
    except DeploymentError as error:
        raise MeasurementError(str(error)) from error
    inputs = [f"{glob.escape(tensor.name)}_[0-9]*_[0-9]*" for tensor in metadata.inputs]
    return (*inputs, *(glob.escape(tensor.name) for tensor in metadata.outputs))


def _head(path: Path) -> str:
    """Return the beginning of a file; an empty string if it cannot be read."""
    try:
        with path.open("rb") as file:
            return file.read(MAX_CSV_BYTES).decode(errors="replace")
    except OSError:
        return ""
