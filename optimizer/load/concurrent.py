"""Several models under load at once, as they will be where they share a device."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, TypeVar

from objectives.metrics import Measurement
from optimizer.interfaces import Endpoint, LoadGenerator
from optimizer.trial import LoadPoint

T = TypeVar("T")

LATENCIES = ("latency_avg_ms", "latency_p50_ms", "latency_p90_ms", "latency_p95_ms", "latency_p99_ms")


@dataclass(frozen=True)
class ConcurrentModels:
    """The same load on each model of an endpoint, at the same time. ``generators`` are by model.

    What is measured is the sum of the throughputs and the largest of the latencies: a bound holds for every model.
    What only one of them would tell (batches, times on the server) is left out.
    """

    generators: Mapping[str, LoadGenerator]

    def measure(self, endpoint: Endpoint, load: LoadPoint, seconds: float | None = None) -> Measurement:
        return together(self._each(endpoint, lambda one, at: one.measure(at, load, seconds)))

    def windows(self, endpoint: Endpoint, load: LoadPoint, seconds: float, count: int) -> list[Measurement]:
        found = self._each(endpoint, lambda one, at: one.windows(at, load, seconds, count))
        return [together(same) for same in zip(*found, strict=False)]

    def warm_up(self, endpoint: Endpoint, load: LoadPoint) -> Measurement | None:
        glances = self._each(endpoint, lambda one, at: one.warm_up(at, load))
        seen = [glance for glance in glances if glance is not None]
        return together(seen) if len(seen) == len(glances) else None

    def _each(self, endpoint: Endpoint, measure: Callable[[LoadGenerator, Endpoint], T]) -> list[T]:
        """The first failure is raised once all have ended."""
        endpoints = [endpoint, *endpoint.beside]
        with ThreadPoolExecutor(len(endpoints)) as pool:
            found = [pool.submit(measure, self.generators[at.model], at) for at in endpoints]
        return [one.result() for one in found]


def together(found: Sequence[Measurement]) -> Measurement:
    """Of models that were measured at the same time; what one of them does not tell is unknown."""

    def known(name: str) -> list[float] | None:
        values = [getattr(one, name) for one in found]
        return None if None in values else values

    throughputs, requests, seconds = known("throughput_infer_per_sec"), known("requests"), known("measure_seconds")
    worst: dict[str, Any] = {name: max(values) for name in LATENCIES if (values := known(name)) is not None}
    return Measurement(
        throughput_infer_per_sec=None if throughputs is None else sum(throughputs),
        requests=None if requests is None else int(min(requests)),
        measure_seconds=None if seconds is None else max(seconds),
        stable=all(one.stable for one in found),
        reason="; ".join(dict.fromkeys(one.reason for one in found if one.reason)),
        **worst,
    )
