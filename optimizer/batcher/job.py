"""The nouns of a simulation: how long the model computes, the latencies around it, the load, the outcome.

Units are in the names. Arrays are float64 and are not changed.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from optimizer.trial import Candidate

Array: TypeAlias = npt.NDArray[np.float64]


@dataclass(frozen=True, eq=False)
class ServiceTimes:
    """How long an instance computes on one batch.

    ``seconds[i, k - 1]``: a batch of ``(i + 1) * step`` samples while k instances are busy throughout, itself
    included. Where k changes on the way, what is left of the batch goes on at the new speed.
    """

    seconds: Array
    step: int = 1

    def __post_init__(self) -> None:
        if self.seconds.ndim != 2 or 0 in self.seconds.shape:
            raise ValueError(f"service times: shape {self.seconds.shape}, not (sizes, busy instances)")
        if not (np.isfinite(self.seconds).all() and (self.seconds > 0).all()):
            raise ValueError("service times: not all are positive and finite")
        if self.step < 1:
            raise ValueError(f"service times: step {self.step} is not positive")

    @classmethod
    def linear(
        cls, fixed_s: float, per_sample_s: float, max_batch_size: int, instances: int = 1, *, contention: float = 0.0
    ) -> ServiceTimes:
        """``fixed_s + per_sample_s * b``; each further busy instance adds ``contention`` of the time alone."""
        alone = fixed_s + per_sample_s * np.arange(1, max(1, max_batch_size) + 1)
        return cls(np.outer(alone, 1 + contention * np.arange(instances)))


@dataclass(frozen=True, slots=True)
class Overheads:
    """Latencies around the computation, in seconds.

    ``send_s``: a client sends → the request is in the batcher's queue. ``receive_s``: the computation ends → the
    client has the response. ``client_s``: from there to its next request in a closed loop. ``spacing_s``: the
    least time between two arrivals, and between two responses (clients and network handle one at a time).
    ``wake_s``: the batcher is notified or its wait is over → it runs. ``dispatch_s``: a batch is ready → a
    sleeping instance takes it. ``release_s``: the computation ends → the instance is ready for the next batch.
    """

    send_s: float = 0.0
    receive_s: float = 0.0
    client_s: float = 0.0
    spacing_s: float = 0.0
    wake_s: float = 0.0
    dispatch_s: float = 0.0
    release_s: float = 0.0

    def __post_init__(self) -> None:
        for name in self.__slots__:
            if not 0 <= getattr(self, name) < math.inf:
                raise ValueError(f"overheads: {name} is {getattr(self, name)}, not a latency")


@dataclass(frozen=True, slots=True)
class ClosedLoop:
    """``concurrency`` clients, each sending its next request once it has a response. All start at time 0."""

    concurrency: int


@dataclass(frozen=True, slots=True, eq=False)
class OpenLoop:
    """Requests sent at given times, whatever becomes of the others. ``arrivals_s`` ascends, in seconds from 0."""

    arrivals_s: Array

    @classmethod
    def constant(cls, requests_per_s: float, requests: int) -> OpenLoop:
        return cls(np.arange(requests) / requests_per_s)

    @classmethod
    def poisson(cls, requests_per_s: float, requests: int, seed: int = 0) -> OpenLoop:
        gaps = np.random.default_rng(seed).exponential(1 / requests_per_s, requests)
        return cls(np.cumsum(gaps))

    @classmethod
    def perf_analyzer(
        cls,
        requests_per_s: float,
        seconds: float,
        *,
        poisson: bool = False,
        schedule_s: float | None = None,
        threads: int = 1,
    ) -> OpenLoop:
        """What perf_analyzer sends in its first ``seconds`` with ``--request-rate-range``.

        Its Poisson schedule is drawn from a generator that always starts alike, so it is the same in every run; it
        is ``schedule_s`` long (``--measurement-interval`` times ``--max-trials``), with equally many requests for
        each of ``threads`` (``--max-threads``), then it starts again.
        """
        if not poisson:
            period_ns = int(1e9 / requests_per_s)
            count = max(1, int(seconds * 1e9) // period_ns)
            return cls(np.arange(1, count + 1, dtype=np.float64) * (period_ns / 1e9))
        length_s = seconds if schedule_s is None else schedule_s
        drawn_s = np.cumsum(_exponential_ns(requests_per_s, int(2 * length_s * requests_per_s) + 100)) / 1e9
        count = int(np.searchsorted(drawn_s, length_s)) + 1
        schedule = drawn_s[: count + -count % threads]
        rounds = np.arange(int(seconds / schedule[-1]) + 1, dtype=np.float64) * schedule[-1]
        sends = (rounds[:, None] + schedule).ravel()
        return cls(sends[: max(1, int(np.searchsorted(sends, seconds)))])


def _exponential_ns(rate_per_s: float, count: int) -> npt.NDArray[np.int64]:
    """``std::exponential_distribution`` on a fresh ``std::mt19937``, as the GNU library has them."""
    words = np.random.RandomState(5489).randint(0, 2**32, size=(count, 2), dtype=np.uint32).astype(np.float64)
    uniform = (words[:, 0] + words[:, 1] * 2.0**32) / 2.0**64
    return (-np.log(1 - uniform) / rate_per_s * 1e9).astype(np.int64)


Load: TypeAlias = ClosedLoop | OpenLoop


@dataclass(frozen=True, slots=True)
class Window:
    """How many requests complete before measuring, and how many at least in a closed loop while measuring.

    An open loop is measured until all of its requests are served. None: enough for the load.
    """

    warm_up_requests: int | None = None
    requests: int | None = None

    def resolved(self, load: Load) -> tuple[int, int]:
        """Warm-up and measured requests."""
        warm_up, requests = self.warm_up_requests, self.requests
        if isinstance(load, OpenLoop):
            total = len(load.arrivals_s)
            return (total // 10 if warm_up is None else warm_up), total
        return (
            max(200, 4 * load.concurrency) if warm_up is None else warm_up,
            max(2000, 10 * load.concurrency) if requests is None else requests,
        )


@dataclass(frozen=True, slots=True, eq=False)
class Job:
    """One simulation. ``prefetch`` None: as the candidate's queue policies have it.

    ``fixed_shapes``: no input has a dimension of -1 (without ``allow_ragged_batch``) or is a shape tensor.
    """

    candidate: Candidate
    load: Load
    service: ServiceTimes
    overheads: Overheads = field(default_factory=Overheads)
    request_batch_size: int = 1
    fixed_shapes: bool = True
    prefetch: bool | None = None


@dataclass(frozen=True, slots=True)
class Simulated:
    """What a load would give, in the terms of perf_analyzer.

    Throughput counts samples. Latencies run from a client's send to its response; their quantiles are taken as
    perf_analyzer takes them, over the requests that complete in the window. ``queue_avg_s`` runs from the
    arrival at the batcher to the start of the computation. ``mean_batch_size`` is in samples per execution.
    ``utilization`` is the mean share of busy instances. ``overloaded``: the queue of an open loop only grows, so
    the latencies depend on how long it was watched.
    """

    throughput_infer_per_s: float
    latency_avg_s: float
    latency_p50_s: float
    latency_p90_s: float
    latency_p95_s: float
    latency_p99_s: float
    queue_avg_s: float
    mean_batch_size: float
    utilization: float
    requests: int
    duration_s: float
    overloaded: bool


@dataclass(frozen=True, slots=True, eq=False)
class Trace:
    """Every execution and every request of a run, in the order of their starts and arrivals. Times in seconds.

    Requests are served in the order of their arrival, so that execution e computes requests
    ``first_request[e] : first_request[e] + requests[e]``. An end is NaN where the run stopped before it.
    """

    instance: npt.NDArray[np.int64]
    start_s: Array
    end_s: Array
    first_request: npt.NDArray[np.int64]
    requests: npt.NDArray[np.int64]
    sent_s: Array
    arrived_s: Array
