"""Load generators that apply a load to several models, or to several server processes, at the same time."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from objectives import model_stats, step_stats
from objectives.metrics import LATENCY, STATISTICS, Measurement
from optimizer.core.endpoint import Endpoint
from optimizer.core.errors import MeasurementError
from optimizer.core.interfaces import LoadGenerator
from optimizer.core.trial import LoadPoint
from optimizer.measure.load_client.open_loop import LateError

T = TypeVar("T")

LATENCIES = tuple(map(LATENCY.field_of, STATISTICS))
WORST = (*LATENCIES, "late_request_share", "send_lateness_p99_ms")


@dataclass(frozen=True)
class ConcurrentLoadGenerator:
    """Applies load to all models of an endpoint at the same time, with one load generator per model.

    A model has the given concurrency times its share in ``shares``. A request rate is that of all models together,
    and each has its part of it.
    A measurement has the sum of the throughputs and the largest of the latencies, since a bound holds for every
    model. Those of each model are in ``by_model``. ``step_stats`` has the statistics of each model on the server, or
    none if they are unknown for one of them. Other batches and times on the server are left out.
    """

    generators: Mapping[str, LoadGenerator]
    shares: Mapping[str, float]

    def measure(self, endpoint: Endpoint, load: LoadPoint, seconds: float | None = None) -> Measurement:
        """Return the combined measurement, repeated once if late requests of an open loop void it.

        Raises the first failure once all generators have ended.
        """
        with contextlib.nullcontext() if seconds is not None else contextlib.suppress(LateError):
            return self._measure(endpoint, load, seconds)
        return self._measure(endpoint, load, seconds)

    def _measure(self, endpoint: Endpoint, load: LoadPoint, seconds: float | None) -> Measurement:
        measured = self._run_all(endpoint, load, lambda generator, model, own: generator.measure(model, own, seconds))
        return _combine_by_model(endpoint, measured)

    def measure_windows(self, endpoint: Endpoint, load: LoadPoint, seconds: float, count: int) -> list[Measurement]:
        """Return as many combined measurements as all generators took."""
        windows = self._run_all(
            endpoint, load, lambda generator, model, own: generator.measure_windows(model, own, seconds, count)
        )
        return [_combine_by_model(endpoint, simultaneous) for simultaneous in zip(*windows, strict=False)]

    def warm_up(self, endpoint: Endpoint, load: LoadPoint) -> Measurement | None:
        """Return the combined result of all warm-ups; None if one has none."""
        results = self._run_all(endpoint, load, lambda generator, model, own: generator.warm_up(model, own))
        measurements = [result for result in results if result is not None]
        return _combine_by_model(endpoint, measurements) if len(measurements) == len(results) else None

    def _run_all(
        self, endpoint: Endpoint, load: LoadPoint, action: Callable[[LoadGenerator, Endpoint, LoadPoint], T]
    ) -> list[T]:
        """Return what ``action`` returns for each model and its load; all run at the same time.

        Raises the first error.
        """
        endpoints = [endpoint, *endpoint.concurrent_models]
        whole = sum(self.shares.values()) if load.request_rate else 1.0
        loads = [load.scaled(self.shares[model.model] / whole) for model in endpoints]
        with ThreadPoolExecutor(len(endpoints)) as pool:
            futures = [
                pool.submit(action, self.generators[model.model], model, own)
                for model, own in zip(endpoints, loads, strict=True)
            ]
        return [future.result() for future in futures]


def _combine_by_model(endpoint: Endpoint, measurements: Sequence[Measurement]) -> Measurement:
    """Return ``combine_models`` with the values of each model of ``endpoint``."""
    names = (endpoint.model, *(model.model for model in endpoint.concurrent_models))
    by_model = model_stats.to_text(dict(zip(names, measurements, strict=True)))
    steps = [measurement.step_stats for measurement in measurements]
    return replace(combine_models(measurements), by_model=by_model, step_stats=" ".join(steps) if all(steps) else "")


def combine_models(measurements: Sequence[Measurement]) -> Measurement:
    """Combine the measurements of models under load at the same time; a value that one lacks is unknown."""
    throughputs = _values(measurements, "throughput_infer_per_sec")
    requests, seconds = _values(measurements, "requests"), _values(measurements, "measure_seconds")
    begins, ends = _values(measurements, "begin_unix_seconds"), _values(measurements, "end_unix_seconds")
    worst: dict[str, Any] = {
        name: max(values) for name in WORST if (values := _values(measurements, name)) is not None
    }
    return Measurement(
        throughput_infer_per_sec=None if throughputs is None else sum(throughputs),
        requests=None if requests is None else int(min(requests)),
        measure_seconds=None if seconds is None else max(seconds),
        stable=all(measurement.stable for measurement in measurements),
        overloaded=any(measurement.overloaded for measurement in measurements),
        reason="; ".join(dict.fromkeys(measurement.reason for measurement in measurements if measurement.reason)),
        begin_unix_seconds=None if begins is None else min(begins),
        end_unix_seconds=None if ends is None else max(ends),
        **worst,
    )


def _values(measurements: Sequence[Measurement], name: str) -> list[float] | None:
    """Return the field ``name`` of each measurement; None if one of them lacks it."""
    values = [getattr(measurement, name) for measurement in measurements]
    return None if None in values else values


MIN_OVERLAP_SHARE = 1 / 1.5  # share of the measuring time in which all servers have to be under load


@dataclass(frozen=True)
class ServerProcessesLoadGenerator:
    """Measures all server processes of an endpoint at the same time, with one load generator for each.

    ``make`` returns the one for a number of the process, from 1. Each sends to its server only, with an equal share
    of the requests in flight. A measurement has the sum of the throughputs and of the counters in ``step_stats``. A
    latency is the mean over the servers, weighted by their requests: a percentile of all requests is between those of
    the servers, and so is the mean.
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
    weights = [measurement.requests or 0 for measurement in measurements]
    if _values(measurements, "throughput_infer_per_sec") is None or not all(weights):
        raise MeasurementError("a server process answered no request")
    means: dict[str, Any] = {}
    for name in LATENCIES:
        if (values := _values(measurements, name)) is not None:
            means[name] = sum(w * value for w, value in zip(weights, values, strict=True)) / sum(weights)
    seconds = max(measurement.measure_seconds or 0.0 for measurement in measurements)
    texts = [measurement.step_stats for measurement in measurements]
    steps = step_stats.from_text(step_stats.pool(texts)) if all(texts) else ()
    means["step_stats"] = step_stats.to_text(
        step._replace(instances=len(measurements) * step.instances) for step in steps
    )
    return replace(combine_models(measurements), requests=sum(weights), measure_seconds=seconds, **means)
