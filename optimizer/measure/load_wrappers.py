"""Load generators that wrap others: for several models or servers at the same time, and for hints on failures."""

from __future__ import annotations

import re
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

from objectives.metrics import Measurement
from optimizer.core.endpoint import Endpoint, SharedMemory
from optimizer.core.errors import BadInputError, MeasurementError, RequestFailed, ServerCrashed
from optimizer.core.interfaces import LoadGenerator
from optimizer.core.safe_text import one_line
from optimizer.core.trial import Candidate, LoadPoint
from optimizer.measure.server_client import is_refused_by_queue, lacks_gpu_memory, lacks_memory
from optimizer.measure.shared_memory import check_is_shared

T = TypeVar("T")

LATENCIES = ("latency_avg_ms", "latency_p50_ms", "latency_p90_ms", "latency_p95_ms", "latency_p99_ms")


@dataclass(frozen=True)
class ConcurrentLoadGenerator:
    """Applies the same load to all models of an endpoint at the same time, with one load generator per model.

    A measurement has the sum of the throughputs and the largest of the latencies, since a bound holds for every
    model. Values of a single model (batches, times on the server) are left out.
    """

    generators: Mapping[str, LoadGenerator]

    def measure(self, endpoint: Endpoint, load: LoadPoint, seconds: float | None = None) -> Measurement:
        """Return the combined measurement; raise the first failure once all generators have ended."""
        return combine(self._run_all(endpoint, lambda generator, model: generator.measure(model, load, seconds)))

    def measure_windows(self, endpoint: Endpoint, load: LoadPoint, seconds: float, count: int) -> list[Measurement]:
        """Return as many combined measurements as all generators took."""
        windows = self._run_all(
            endpoint, lambda generator, model: generator.measure_windows(model, load, seconds, count)
        )
        return [combine(simultaneous) for simultaneous in zip(*windows, strict=False)]

    def warm_up(self, endpoint: Endpoint, load: LoadPoint) -> Measurement | None:
        """Return the combined result of all warm-ups; None if one has none."""
        results = self._run_all(endpoint, lambda generator, model: generator.warm_up(model, load))
        measurements = [result for result in results if result is not None]
        return combine(measurements) if len(measurements) == len(results) else None

    def _run_all(self, endpoint: Endpoint, action: Callable[[LoadGenerator, Endpoint], T]) -> list[T]:
        """Return what ``action`` returns for each model; all run at the same time. Raises the first error."""
        endpoints = [endpoint, *endpoint.concurrent_models]
        with ThreadPoolExecutor(len(endpoints)) as pool:
            futures = [pool.submit(action, self.generators[model.model], model) for model in endpoints]
        return [future.result() for future in futures]


def combine(measurements: Sequence[Measurement]) -> Measurement:
    """Combine the measurements of models under load at the same time; a value that one lacks is unknown."""
    throughputs = _values(measurements, "throughput_infer_per_sec")
    requests, seconds = _values(measurements, "requests"), _values(measurements, "measure_seconds")
    worst: dict[str, Any] = {
        name: max(values) for name in LATENCIES if (values := _values(measurements, name)) is not None
    }
    return Measurement(
        throughput_infer_per_sec=None if throughputs is None else sum(throughputs),
        requests=None if requests is None else int(min(requests)),
        measure_seconds=None if seconds is None else max(seconds),
        **_stability(measurements),
        **_time(measurements),
        **worst,
    )


def _values(measurements: Sequence[Measurement], name: str) -> list[float] | None:
    """Return the field ``name`` of each measurement; None if one of them lacks it."""
    values = [getattr(measurement, name) for measurement in measurements]
    return None if None in values else values


def _stability(measurements: Sequence[Measurement]) -> dict[str, Any]:
    """Return the fields of a Measurement that say whether all of ``measurements`` are stable, and why not."""
    reasons = dict.fromkeys(measurement.reason for measurement in measurements if measurement.reason)
    return {"stable": all(measurement.stable for measurement in measurements), "reason": "; ".join(reasons)}


def _time(measurements: Sequence[Measurement]) -> dict[str, Any]:
    """Return the fields of a Measurement with the time from the first start to the last end; None if unknown."""
    begins, ends = _values(measurements, "begin_unix_seconds"), _values(measurements, "end_unix_seconds")
    return {
        "begin_unix_seconds": None if begins is None else min(begins),
        "end_unix_seconds": None if ends is None else max(ends),
    }


MIN_OVERLAP_SHARE = 1 / 1.5  # share of the measuring time in which all servers have to be under load


@dataclass(frozen=True)
class ServerProcessesLoadGenerator:
    """Measures all server processes of an endpoint at the same time, with one load generator for each.

    ``make`` returns the one for a number of the process, from 1. Each sends to its server only, with an equal share
    of the requests in flight. A measurement has the sum of the throughputs. A latency is the mean over the servers,
    weighted by their requests: a percentile of all requests is between those of the servers, and so is the mean.
    """

    make: Callable[[int], LoadGenerator]

    def measure(self, endpoint: Endpoint, load: LoadPoint, seconds: float | None = None) -> Measurement:
        """Return the combined measurement; raise the first failure once all generators have ended.

        Raises MeasurementError if there are fewer requests in flight than servers.
        """
        servers = endpoint.servers
        if len(servers) == 1:
            return self.make(1).measure(endpoint, load, seconds)
        if load.concurrency < len(servers):
            raise MeasurementError(
                f"a concurrency of {load.concurrency} cannot be divided among {len(servers)} servers; raise the "
                "concurrency, or try fewer server_processes"
            )
        numbers = range(1, len(servers) + 1)
        with ThreadPoolExecutor(len(servers)) as pool:
            futures = [pool.submit(self._measure_share, number, endpoint, load, seconds) for number in numbers]
        measured = [future.result() for future in futures]
        combined = combine_servers([measurement for measurement, _ in measured])
        last_begin_s = max(end_s - (measurement.measure_seconds or 0.0) for measurement, end_s in measured)
        together_seconds = min(end_s for _, end_s in measured) - last_begin_s
        if together_seconds < MIN_OVERLAP_SHARE * (combined.measure_seconds or 0.0):
            raise MeasurementError("the server processes were not measured at the same time: one began later")
        return combined

    def _measure_share(
        self, number: int, endpoint: Endpoint, load: LoadPoint, seconds: float | None
    ) -> tuple[Measurement, float]:
        """Return the measurement of the server ``number`` with its share of the requests in flight, and its end.

        The end is in seconds of the monotonic clock.
        """
        servers = endpoint.servers
        share = load.concurrency // len(servers) + (number <= load.concurrency % len(servers))
        server = replace(servers[number - 1], replicas=())
        measurement = self.make(number).measure(server, replace(load, concurrency=share), seconds)
        return measurement, time.monotonic()

    def measure_windows(self, endpoint: Endpoint, load: LoadPoint, seconds: float, count: int) -> list[Measurement]:
        """Return ``count`` combined measurements."""
        return [self.measure(endpoint, load, seconds) for _ in range(count)]

    def warm_up(self, endpoint: Endpoint, load: LoadPoint) -> Measurement | None:
        """Do nothing: it measures servers that have had load already."""
        return None


def combine_servers(measurements: Sequence[Measurement]) -> Measurement:
    """Combine the measurements of servers that shared a load. Raises MeasurementError if one lacks a throughput."""
    throughputs = _values(measurements, "throughput_infer_per_sec")
    weights = [measurement.requests or 0 for measurement in measurements]
    if throughputs is None or not all(weights):
        raise MeasurementError("a server process answered no request")
    means: dict[str, Any] = {}
    for name in LATENCIES:
        if (values := _values(measurements, name)) is not None:
            means[name] = sum(w * value for w, value in zip(weights, values, strict=True)) / sum(weights)
    return Measurement(
        throughput_infer_per_sec=sum(throughputs),
        requests=sum(weights),
        measure_seconds=max(measurement.measure_seconds or 0.0 for measurement in measurements),
        **_stability(measurements),
        **_time(measurements),
        **means,
    )


@dataclass
class ExplainingLoadGenerator(ABC):
    """Wraps ``load_generator`` and explains its failures. Each method raises BadInputError too."""

    load_generator: LoadGenerator

    def measure(self, endpoint: Endpoint, load: LoadPoint, seconds: float | None = None) -> Measurement:
        return self._explain(endpoint, lambda: self.load_generator.measure(endpoint, load, seconds))

    def measure_windows(self, endpoint: Endpoint, load: LoadPoint, seconds: float, count: int) -> list[Measurement]:
        return self._explain(endpoint, lambda: self.load_generator.measure_windows(endpoint, load, seconds, count))

    def warm_up(self, endpoint: Endpoint, load: LoadPoint) -> Measurement | None:
        return self._explain(endpoint, lambda: self.load_generator.warm_up(endpoint, load))

    @abstractmethod
    def _explain(self, endpoint: Endpoint, measure: Callable[[], T]) -> T:
        """Return the result of ``measure``, which sends requests to ``endpoint``. Raises BadInputError too."""


_TOO_SMALL = "shared memory size specified with the request for output"


@dataclass
class SharedMemoryLoadGenerator(ExplainingLoadGenerator):
    """Wraps ``load_generator``, whose requests use shared memory, and explains failures that this causes.

    Before the first load it checks whether the server maps ``system`` shared memory of this machine. Raises
    BadInputError if it does not, or if an output is larger than its shared memory: all measurements would fail.
    """

    shared_memory: SharedMemory
    _is_checked: bool = field(default=False, init=False)

    def _explain(self, endpoint: Endpoint, measure: Callable[[], T]) -> T:
        if self.shared_memory.kind == "system" and not self._is_checked:
            check_is_shared(endpoint)
            self._is_checked = True
        try:
            return measure()
        except MeasurementError as error:
            if _TOO_SMALL not in str(error):
                raise
            raise BadInputError(
                f"{one_line(str(error), 2 * _MAX_CAUSE)}; set a larger --output-shared-memory-size, which is "
                "the size for each sample of an output of strings or of variable shape",
                log=error.log,
            ) from error


_INDEX_ERROR = re.compile(
    r"out of (?:data |the )?(?:bounds|range)|outside (?:the )?(?:bounds|range)|is not in \[0|index\w* out of"
    r"|(?:indices|index)\b.{0,80}must be (?:within|less|in)|IndexError|device-side assert\b",
    re.IGNORECASE,
)
_VALID_RANGE = re.compile(r"range \[-?\d{1,18}, ?(\d{1,18})\]")  # part of a message of ONNX Runtime
_EXAMPLE_HIGHEST = "30521"
_RAISED_BY_MODEL = "Failed to process the request(s) for model"  # how Triton's Python backend reports an exception
_MAX_NAMES, _MAX_CAUSE = 100, 200  # limits in characters
REFUSED_CONFIGURATIONS = 3  # configurations whose measurements all failed with one error
_NUMBERS = re.compile(r"[-+]?\d[\d.,]*(?:e[-+]?\d+)?", re.IGNORECASE)


def index_hint(message: str, unbounded: tuple[str, ...]) -> str:
    """Return how to avoid a request that failed with an index out of bounds; an empty string for other messages.

    ``unbounded`` are the inputs with random integers of the whole range of their type.
    """
    if not unbounded or not _INDEX_ERROR.search(message):
        return ""
    valid = _VALID_RANGE.search(message)
    highest = valid[1] if valid else _EXAMPLE_HIGHEST
    names = one_line(", ".join(unbounded), _MAX_NAMES)
    first = one_line(unbounded[0], 60)
    return (
        f"the random data of {names}, which may be an index, includes all integers of its type: give bounds, such as "
        f"--input-range {first}:0..{highest}, or real requests with --input-data FILE"
    )


def random_numbers_hint(message: str) -> str:
    """Return how to give other numbers than random ones if a model in Python raised an exception; else nothing.

    Backends in Python, such as tritune's own for ONNX Runtime, also raise one if the server lacks memory.
    """
    if _RAISED_BY_MODEL not in message or lacks_memory(message) or lacks_gpu_memory(message):
        return ""
    return (
        "random floats are normally distributed, and random integers are any value of their type: if the model takes "
        "others, give bounds with --input-range NAME:LOW..HIGH, or real requests with --input-data FILE"
    )


def refusal_hint(message: str) -> str:
    """Return what to do if each measurement of REFUSED_CONFIGURATIONS configurations failed with ``message``.

    The text is empty if a queue refused the requests, or if the server lacks memory: a lower load, or another
    candidate, may serve them.
    """
    if is_refused_by_queue(message) or lacks_memory(message) or lacks_gpu_memory(message):
        return ""
    return (
        f"no measurement succeeded in the first {REFUSED_CONFIGURATIONS} configurations, so they are not the cause: "
        "give requests that the model takes with --input-data FILE, or correct the model"
    )


@dataclass
class RefusedRequestsLoadGenerator(ExplainingLoadGenerator):
    """Wraps ``load_generator`` and explains failures that the data of the requests cause.

    If a request fails because an index is out of bounds and an input in ``unbounded`` has random integers, the error
    message ends with a hint. With ``has_unbounded_numbers`` (random numbers without bounds) it also does so if a
    model in Python raised an exception. Before the first successful measurement the error is a BadInputError, which
    ends the run, since every configuration would fail in the same way. An exception of the model ends it at
    ``baseline`` only: another candidate may cause one itself, and after ``--resume`` or on a cluster it may be
    measured first. Any other error of the model ends it once REFUSED_CONFIGURATIONS configurations, ``baseline``
    among them, have failed with it.
    """

    unbounded: tuple[str, ...]
    has_unbounded_numbers: bool = False
    baseline: Candidate | None = None
    _measured: bool = field(default=False, init=False)
    _refused: dict[str, set[Candidate]] = field(default_factory=dict, init=False)  # by error, without its numbers

    def warm_up(self, endpoint: Endpoint, load: LoadPoint) -> Measurement | None:
        return self.load_generator.warm_up(endpoint, load)

    def _explain(self, endpoint: Endpoint, measure: Callable[[], T]) -> T:
        try:
            result = measure()
        except MeasurementError as error:
            hint, fails_always = index_hint(str(error), self.unbounded), not self._measured
            if not hint and self.has_unbounded_numbers:
                hint = random_numbers_hint(str(error))
                fails_always = fails_always and endpoint.candidate == self.baseline
            if not hint and self._is_always_refused(endpoint, error):
                hint, fails_always = refusal_hint(str(error)), True
            if not hint or isinstance(error, ServerCrashed):
                raise
            kind = BadInputError if fails_always else MeasurementError
            raise kind(f"{one_line(str(error), _MAX_CAUSE)}; {hint}", log=error.log) from error
        self._measured = True
        return result

    def _is_always_refused(self, endpoint: Endpoint, error: MeasurementError) -> bool:
        """Return whether no measurement has succeeded, and ``error`` was the same in enough configurations."""
        if self._measured or not isinstance(error, RequestFailed):
            return False
        same = _NUMBERS.sub("", str(error))  # loads, values and the numbers of instances differ
        self._refused.setdefault(same, set()).add(endpoint.candidate)
        return self.baseline in self._refused[same] and len(self._refused[same]) >= REFUSED_CONFIGURATIONS
