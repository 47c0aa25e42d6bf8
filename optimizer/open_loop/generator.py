"""The load generator of an open loop: latency counts from the planned send, however late client or server were."""

from __future__ import annotations

import itertools
import json
import math
import os
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from objectives.metrics import Measurement
from optimizer.answers import inference
from optimizer.errors import BadInputError, DeploymentError, MeasurementError, ServerCrashed
from optimizer.interfaces import Endpoint
from optimizer.load.server_statistics import is_alive, read_statistics, with_statistics
from optimizer.load.windows import (
    LONGEST_WINDOW_MS,
    RATE_WINDOW_MS,
    REQUESTS_PER_WINDOW,
    SPREAD_LIMIT,
    STRETCH,
    WINDOWS,
)
from optimizer.open_loop.arrivals import Arrivals, Floats, Poisson
from optimizer.open_loop.exchange import HEADERS, Job, Record
from optimizer.open_loop.judgement import LEAD_IN_SECONDS, LateError, judge
from optimizer.process import Finished, ending, run
from optimizer.requests.sizes import Dim
from optimizer.requests.tensors import stream, to_message
from optimizer.server_health import cause, model_died
from optimizer.stopwatch import Stopwatch
from optimizer.store.disk import cannot_write
from optimizer.trial import LoadPoint
from optimizer.untrusted import one_line

if TYPE_CHECKING:
    from tritonclient.grpc.service_pb2 import ModelStatistics

GLANCE_SECONDS = 0.2
MOST_MESSAGES, MOST_MESSAGE_BYTES = 256, 32 << 20  # different requests: sent in turn, and kept in memory
LEAST_MIXED = 16  # of them, where they differ in size
MOST_PLANNED = 2_000_000  # requests of one measurement
CLIENT_SECONDS = 90.0  # the client's own, at most: its start, two requests alone, the end of an overload
SCRATCH = "open-loop-"  # folders of the client's files, beside the log
PACKAGES = Path(__file__).parents[2]


@dataclass(frozen=True, eq=False)
class Messages:
    """Serialized requests, which are sent in turn, and how many samples each has."""

    serialized: list[bytes]
    sizes: npt.NDArray[np.int64]


@dataclass(frozen=True)
class OpenLoop:
    """Sends ``request_rate`` requests a second to an endpoint over gRPC, one client process a measurement.

    ``input_data`` is ``random``, ``zero`` or a JSON data file; ``shapes`` are ``name:d1,d2``: both perf_analyzer's.
    ``request_mix``: how many samples the requests have, where the load's number of them is an average.
    ``latency_bound_ms`` (0: none) says what is late, what an overload is and what need not be told apart. ``log``
    keeps what the client printed. Each measurement has its own arrivals, which follow from ``seed`` and their
    number. The client runs on ``cpus`` only, where they are given. Without ``patience`` nothing is repeated.
    """

    log: Path
    arrivals: Arrivals = field(default_factory=Poisson)
    input_data: str = "random"
    shapes: tuple[str, ...] = ()
    request_mix: Dim | None = None
    latency_bound_ms: float = 0.0
    seed: int = 0
    window_ms: int = RATE_WINDOW_MS
    cpus: frozenset[int] | None = None
    stopwatch: Stopwatch | None = None
    patience: bool = True
    _messages: dict[tuple[str, bool, float], Messages] = field(default_factory=dict, init=False, repr=False)
    _launches: Iterator[int] = field(default_factory=itertools.count, init=False, repr=False, compare=False)

    def measure(self, endpoint: Endpoint, load: LoadPoint, seconds: float | None = None) -> Measurement:
        """Three windows as perf_analyzer's; where they disagree, or the client fell behind, once more.

        With ``seconds`` given, once and for so long, whatever differs within. An overloaded server's measurement is
        not stable.

        Raises MeasurementError where there is no figure (a request failed, none was answered, or the client cannot
        keep up with the rate), ServerCrashed where the server or its model died or hangs.
        """
        if seconds is not None:
            return self._launch(endpoint, load, seconds, math.inf)[0]
        seconds = self._seconds(load.request_rate)
        if self.patience:
            try:
                (measurement,) = self._launch(endpoint, load, seconds, SPREAD_LIMIT)
                if measurement.stable or measurement.is_overloaded:
                    return measurement
                seconds *= 2
            except LateError:
                pass
        return self._launch(endpoint, load, seconds, SPREAD_LIMIT)[0]

    def windows(self, endpoint: Endpoint, load: LoadPoint, seconds: float, count: int) -> list[Measurement]:
        """All ``count`` of one stretch: a queue that grows slowly would be small again at the beginning of each. One
        where the server was overloaded.
        """
        return self._launch(endpoint, load, seconds * count, math.inf, count)

    def warm_up(self, endpoint: Endpoint, load: LoadPoint) -> Measurement | None:
        """A moment of the load; None where it says nothing yet.

        Raises ServerCrashed where the server no longer answers. Whatever else goes wrong, ``measure`` will tell.
        """
        try:
            (seen,) = self._launch(endpoint, load, GLANCE_SECONDS, math.inf)
        except ServerCrashed:
            raise
        except MeasurementError:
            return None
        if not seen.stable:
            return None
        return Measurement(seen.throughput_infer_per_sec, latency_p95_ms=seen.latency_p95_ms, requests=seen.requests)

    def _seconds(self, rate: float) -> float:
        """Long enough for REQUESTS_PER_WINDOW in each window."""
        window_ms = max(STRETCH * self.window_ms, 1000 * REQUESTS_PER_WINDOW / rate)
        return WINDOWS * min(window_ms, LONGEST_WINDOW_MS) / 1000

    def _launch(
        self, endpoint: Endpoint, load: LoadPoint, seconds: float, spread_limit: float, parts: int = 1
    ) -> list[Measurement]:
        seconds += LEAD_IN_SECONDS
        if load.request_rate * seconds > MOST_PLANNED:
            raise MeasurementError(f"{load.request_rate:,.6g} requests/s are more than the load generator can send")
        seed = int(np.random.SeedSequence([self.seed, next(self._launches)]).generate_state(1)[0])
        planned_seconds = self.arrivals.plan(load.request_rate, seconds, seed)
        messages = self._messages_for(endpoint, load)
        before = self._statistics(endpoint)
        record, client_seconds = self._run_client(endpoint, messages.serialized, planned_seconds, seconds)
        if (record.overload or record.error) and not is_alive(endpoint):
            raise ServerCrashed(f"{cause(record.error) or record.overload}; the server no longer answers")
        if record.hangs or model_died(record.error):
            raise ServerCrashed(cause(record.error))
        found = judge(record, load, seconds, self.latency_bound_ms, spread_limit, parts, messages.sizes)
        after = self._statistics(endpoint)
        took_seconds = round(client_seconds / len(found), 3)
        return [with_statistics(replace(one, measure_seconds=took_seconds), before, after) for one in found]

    def _run_client(
        self, endpoint: Endpoint, messages: list[bytes], planned_seconds: Floats, seconds: float
    ) -> tuple[Record, float]:
        """What happened, and how long the client ran. Raises EnvironmentFault where the disk refuses its files."""
        at = endpoint.connection
        if at.protocol != "grpc":
            raise BadInputError(f"--load rate sends over gRPC, and {at.address} is HTTP; give its gRPC port by --url")
        tls = None if at.tls is None else {name: file and str(file) for name, file in asdict(at.tls).items()}
        environment = {
            **os.environ,
            HEADERS: json.dumps(at.sent_headers),
            "PYTHONPATH": os.pathsep.join(filter(None, [str(PACKAGES), os.environ.get("PYTHONPATH")])),
            "OPENBLAS_NUM_THREADS": "1",  # its threads spin for a while when numpy is imported
        }
        try:
            with tempfile.TemporaryDirectory(dir=self.log.parent, prefix=SCRATCH) as scratch:
                folder = Path(scratch)
                job = Job(at.address, self.latency_bound_ms, tls)
                job.write(folder, messages, (1e9 * planned_seconds).astype(np.int64))
                with (self.stopwatch or Stopwatch()).load_generator():
                    done = run(
                        [sys.executable, "-P", "-m", "optimizer.open_loop.client", folder],
                        timeout_seconds=seconds + CLIENT_SECONDS,
                        log=self.log,
                        env=environment,
                        cpus=self.cpus,
                    )
                if done.exit_code != 0:
                    raise MeasurementError(_cause(done), log=self.log)
                return Record.read(folder), done.seconds
        except OSError as error:
            raise cannot_write(self.log.parent, error) from error

    def _statistics(self, endpoint: Endpoint) -> ModelStatistics | None:
        with (self.stopwatch or Stopwatch()).server():
            return read_statistics(endpoint)

    def _messages_for(self, endpoint: Endpoint, load: LoadPoint) -> Messages:
        """Made once. Raises BadInputError, MeasurementError."""
        max_batch_size = endpoint.largest_request
        key = (endpoint.model, max_batch_size > 0, load.request_batch_size)
        if key not in self._messages:
            try:
                metadata = inference.model_metadata(endpoint)
            except DeploymentError as error:
                kind = MeasurementError if is_alive(endpoint) else ServerCrashed
                raise kind(str(error)) from error

            def made(sizes: Sequence[int]) -> list[bytes]:
                inputs = stream(
                    metadata,
                    max_batch_size,
                    input_data=self.input_data,
                    shapes=self.shapes,
                    request_batch_sizes=sizes,
                    seed=self.seed,
                )
                return [to_message(endpoint.model, one) for one in inputs]

            mix = self.request_mix
            (largest,) = made([mix.largest if mix else round(load.request_batch_size)])
            count = min(MOST_MESSAGES, max(1 if mix is None else LEAST_MIXED, MOST_MESSAGE_BYTES // len(largest)))
            sizes = np.full(count, round(load.request_batch_size))
            if mix is not None:
                sizes = mix.draw(count, np.random.default_rng(self.seed))
            self._messages[key] = Messages(made(sizes.tolist()), sizes)
        return self._messages[key]


def _cause(done: Finished) -> str:
    if done.exit_code is None:
        return f"the load generator's client did not end within {done.seconds:.0f} s"
    lines = [line.strip() for line in done.output.splitlines() if line.strip()]
    said = one_line((lines or ["it printed nothing"])[-1], 200)
    return f"the load generator's client ended with {ending(done.exit_code)}: {said}"
