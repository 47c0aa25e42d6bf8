"""The counters of one model on Triton's metrics page, read at an interval, and the load between two readings.

Triton adds the time of each request to its duration counters. So the compute counters divided by the requests are the
mean time of the execution that a request was part of, as the compute times of a ``Measurement``.
"""

from __future__ import annotations

import itertools
import math
import operator
import re
import time
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from http.client import BadStatusLine, HTTPException, RemoteDisconnected
from typing import TypeVar
from urllib.error import HTTPError

from optimizer.core.errors import BadInputError, EnvironmentFault, TuneError
from optimizer.core.interfaces import Clock
from optimizer.core.safe_text import one_line
from optimizer.machine.metrics_page import MetricsPage, fetch_metrics_page, parse_metrics_page

PREFIX = "nv_inference_"
SUCCESSES = f"{PREFIX}request_success"
FAILURES = f"{PREFIX}request_failure"
COMPUTE_DURATIONS = tuple(f"{PREFIX}compute_{part}_duration_us" for part in ("input", "infer", "output"))
REQUEST_SUMMARY = f"{PREFIX}request_summary_us"  # with --metrics-config=summary_latencies=true
FIRST_RESPONSE_BUCKETS = f"{PREFIX}first_response_histogram_ms_bucket"  # only newer servers export it
PENDING = f"{PREFIX}pending_request_count"  # 0 of an ensemble, whose requests wait for its steps
ANY_REASON = "any reason"  # older servers do not distinguish the reasons of failures
MAX_LISTED_MODELS = 5  # limit for a message
MIN_SERVER_ERROR = 500  # HTTP status
SUMMED = (
    "requests",
    "samples",
    "executions",
    "request_ms",
    "queue_ms",
    "compute_ms",
)  # counters of both classes below
Key = TypeVar("Key", str, float)


@dataclass(frozen=True, slots=True)
class ModelCounters:
    """The counters of one model at one moment, summed over its versions and GPUs. Times are in milliseconds.

    The times are NaN if the server does not export them (``--metrics-config=counter_latencies=false``).
    ``at_seconds`` is monotonic time. ``failures`` is by reason.
    ``pending`` has the requests that wait for the model or for its steps, which are other models that it calls.
    ``step_requests`` are the requests that the steps have served.
    ``latencies_ms`` holds the server's own quantiles of the time of a request by level, ``first_responses`` the
    requests whose first response came within a time in ms; both are empty if the server does not export them.
    """

    at_seconds: float
    requests: float
    failures: Mapping[str, float]
    samples: float
    executions: float
    request_ms: float
    queue_ms: float
    compute_ms: float
    pending: float = 0.0
    step_requests: float = 0.0
    latencies_ms: Mapping[float, float] = field(default_factory=dict)
    first_responses: Mapping[float, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class ServedLoad:
    """The load that one or more servers served within ``seconds``. Times are sums over the requests, in milliseconds.

    They are NaN if a server does not export them.
    ``failures`` is by reason, without reasons that did not occur. ``pending`` counts the requests that waited at the
    end. ``latencies_ms`` holds the smallest and the largest quantile of any server by level. ``first_responses`` is
    as in ``ModelCounters``, for the requests within the time. ``stalled_seconds`` is how long a server has served
    no request although one waited at the beginning; 0 if each server served one, or none waited.
    """

    seconds: float
    requests: float
    failures: Mapping[str, float]
    samples: float
    executions: float
    request_ms: float
    queue_ms: float
    compute_ms: float
    pending: float = 0.0
    latencies_ms: Mapping[float, tuple[float, float]] = field(default_factory=dict)
    first_responses: Mapping[float, float] = field(default_factory=dict)
    stalled_seconds: float = 0.0


def is_triton(text: str) -> bool:
    """Return whether ``text`` is a metrics page of Triton, also of one without models."""
    return re.search(r"^(# HELP )?nv_[a-z_]+[ {]", text, re.MULTILINE) is not None


def models_of(page: MetricsPage) -> list[str]:
    """Return the names of the models on a metrics page, sorted."""
    return sorted({labels["model"] for labels, _ in page.get(SUCCESSES, ()) if "model" in labels})


@dataclass(frozen=True, slots=True)
class _ModelMetrics:
    """The metrics of some models on a metrics page, by name."""

    by_name: MetricsPage

    @classmethod
    def on_page(cls, page: MetricsPage, models: Collection[str]) -> _ModelMetrics:
        """Return the metrics of ``models`` on ``page``."""
        return cls(
            {
                name: [(labels, value) for labels, value in values if labels.get("model") in models]
                for name, values in page.items()
            }
        )

    def values(self, name: str) -> Sequence[tuple[Mapping[str, str], float]]:
        """Return the labels and the value of each series of the metric; empty if the server does not export it."""
        return self.by_name.get(name, ())

    def total(self, name: str) -> float:
        """Return the sum of the metric; 0 if the server does not export it."""
        return sum(value for _, value in self.values(name))

    def duration_ms(self, name: str) -> float:
        """Return the sum of a metric of times in milliseconds; NaN if the server does not export it."""
        return self.total(name) / 1e3 if self.values(name) else math.nan


def read_counters(
    page: MetricsPage, model: str, at_seconds: float, steps: Collection[str] = ()
) -> ModelCounters | None:
    """Return the counters of ``model``, which calls the models ``steps``; None if the server does not serve it."""
    metrics, step_metrics = _ModelMetrics.on_page(page, {model}), _ModelMetrics.on_page(page, steps)
    if not metrics.values(SUCCESSES):
        return None
    latencies_us = _combine_by_number(metrics.values(REQUEST_SUMMARY), "quantile", max)
    return ModelCounters(
        at_seconds=at_seconds,
        requests=metrics.total(SUCCESSES),
        failures=sum_by_key(
            [{labels.get("reason", ANY_REASON): value} for labels, value in metrics.values(FAILURES)]
        ),
        samples=metrics.total(f"{PREFIX}count"),
        executions=metrics.total(f"{PREFIX}exec_count"),
        request_ms=metrics.duration_ms(f"{PREFIX}request_duration_us"),
        queue_ms=metrics.duration_ms(f"{PREFIX}queue_duration_us"),
        compute_ms=sum(map(metrics.duration_ms, COMPUTE_DURATIONS)),
        pending=metrics.total(PENDING) + step_metrics.total(PENDING),
        step_requests=step_metrics.total(SUCCESSES),
        latencies_ms={level: value / 1e3 for level, value in latencies_us.items()},
        first_responses=_combine_by_number(metrics.values(FIRST_RESPONSE_BUCKETS), "le", operator.add),
    )


def _combine_by_number(
    values: Sequence[tuple[Mapping[str, str], float]], label: str, combine: Callable[[float, float], float]
) -> dict[float, float]:
    """Return the ``values`` of each number in ``label``, combined from 0 on; values without one are left out."""
    by_number: dict[float, float] = {}
    for labels, value in values:
        try:
            number = float(labels[label])
        except (KeyError, ValueError):
            continue
        by_number[number] = combine(by_number.get(number, 0.0), value)
    return by_number


def compute_load(before: ModelCounters, after: ModelCounters, stalled_seconds: float = 0.0) -> ServedLoad | None:
    """Return the load between two readings; None if the server was restarted: its counters began again.

    ``stalled_seconds`` is that of the server's load in the interval before.
    """
    changes = {name: getattr(after, name) - getattr(before, name) for name in SUMMED}
    failures = _added(before.failures, after.failures)
    first_responses = _added(before.first_responses, after.first_responses)
    seconds = after.at_seconds - before.at_seconds
    counts = (*changes.values(), *failures.values(), *first_responses.values())
    if seconds <= 0 or any(count < 0 for count in counts):
        return None
    has_served = changes["requests"] or after.step_requests != before.step_requests
    is_stalled = before.pending > 0 and not has_served
    return ServedLoad(
        seconds=seconds,
        failures={reason: count for reason, count in failures.items() if count},
        pending=after.pending,
        latencies_ms={level: (value, value) for level, value in after.latencies_ms.items()},
        first_responses=first_responses,
        stalled_seconds=stalled_seconds + seconds if is_stalled else 0.0,
        **changes,
    )


def _added(before: Mapping[Key, float], after: Mapping[Key, float]) -> dict[Key, float]:
    return {key: count - before.get(key, 0.0) for key, count in after.items()}


def sum_loads(loads: Sequence[ServedLoad]) -> ServedLoad:
    """Return the load of several servers within the same time."""
    ranges: dict[float, tuple[float, float]] = {}
    for level, (low, high) in (item for load in loads for item in load.latencies_ms.items()):
        lowest, highest = ranges.get(level, (low, high))
        ranges[level] = min(lowest, low), max(highest, high)
    return ServedLoad(
        seconds=sum(load.seconds for load in loads) / len(loads),
        failures=sum_by_key([load.failures for load in loads]),
        latencies_ms=ranges,
        first_responses=sum_by_key([load.first_responses for load in loads]),
        stalled_seconds=max(load.stalled_seconds for load in loads),
        **{name: sum(getattr(load, name) for load in loads) for name in (*SUMMED, "pending")},
    )


def sum_by_key(counts: Sequence[Mapping[Key, float]]) -> dict[Key, float]:
    """Return the sum of the ``counts`` of each key."""
    keys = dict.fromkeys(key for mapping in counts for key in mapping)
    return {key: sum(mapping.get(key, 0.0) for mapping in counts) for key in keys}


@dataclass(frozen=True, slots=True)
class ObservedLoads:
    """The load of all servers together in each of the newest intervals.

    ``lost_intervals`` counts the intervals among them without a load, because a server was restarted or not readable.
    """

    loads: tuple[ServedLoad, ...]
    lost_intervals: int


def read_server(url: str, model: str, steps: Collection[str] = (), clock: Clock = time) -> ModelCounters:
    """Return the counters of ``model``, which calls ``steps``, on the metrics page at ``url``.

    ``clock`` gives the time of the reading.

    Raises EnvironmentFault if the page cannot be read, and BadInputError if it is not Triton's or lacks the model.
    """
    text = _fetch_text(url)
    at_seconds = clock.monotonic()
    if not is_triton(text):
        raise BadInputError(
            f"--url {url}: has no metrics of Triton; give its page of metrics, http://HOST:8002/metrics by default"
        )
    page = parse_metrics_page(text)
    counters = read_counters(page, model, at_seconds, steps)
    if counters is None:
        models = models_of(page)
        names = ", ".join(map(one_line, models[:MAX_LISTED_MODELS]))
        names += ", …" if len(models) > MAX_LISTED_MODELS else ""
        raise BadInputError(
            f"--url {url}: the server has no metrics of the model {one_line(model)} (it has: {names or 'none'}); "
            "give the server of this model, or --model with its name there"
        )
    return counters


def _fetch_text(url: str) -> str:
    """Return the page at ``url``. Raises EnvironmentFault or, if it is no page of metrics, BadInputError."""
    try:
        return fetch_metrics_page(url)
    except HTTPError as error:
        if error.code >= MIN_SERVER_ERROR:
            advice = "check the server and the proxies in front of it"
            raise EnvironmentFault(f"--url {url}: HTTP status {error.code}; {advice}") from None
        raise BadInputError(
            f"--url {url}: HTTP status {error.code}, so this is no page of metrics; give that of Triton, "
            "http://HOST:8002/metrics by default"
        ) from None
    except (OSError, ValueError, HTTPException) as error:
        if isinstance(error, BadStatusLine) and not isinstance(error, RemoteDisconnected):
            raise BadInputError(
                f"--url {url}: no HTTP server answers there, but perhaps one of gRPC; give Triton's page of "
                "metrics, http://HOST:8002/metrics by default"
            ) from None
        reason = getattr(error, "reason", error)  # of a URLError
        reason = getattr(reason, "strerror", None) or reason  # without its number
        raise EnvironmentFault(
            f"--url {url}: the metrics cannot be read ({one_line(str(reason)) or type(error).__name__}); "
            "check the address and that the server runs"
        ) from None


def observe_loads(
    urls: Sequence[str],
    model: str,
    interval_seconds: float,
    count: int,
    clock: Clock = time,
    on_start: Callable[[], None] = lambda: None,
    steps: Collection[str] = (),
) -> Iterator[ObservedLoads]:
    """Yield the loads in the newest ``count`` intervals after each interval, as soon as there are ``count``.

    ``clock`` times the intervals; tests simulate it. ``on_start`` is called after the first reading of all servers.
    ``steps`` are the models that ``model`` calls.

    An interval is lost if a server was restarted within it, could not be read, or lacked the model for a while.

    Raises EnvironmentFault or BadInputError if the first reading fails, or the last one and all intervals were lost.
    """
    before = {url: read_server(url, model, steps, clock) for url in urls}
    on_start()
    started, newest = clock.monotonic(), deque[ServedLoad | None](maxlen=count)
    stalled_seconds: dict[str, float] = {}
    for number in itertools.count(1):
        clock.sleep(max(0.0, started + number * interval_seconds - clock.monotonic()))
        after: dict[str, ModelCounters] = {}
        fault: TuneError | None = None
        for url in urls:
            try:
                after[url] = read_server(url, model, steps, clock)
            except TuneError as error:
                fault = error
        load_of_url = {
            url: load
            for url in before.keys() & after.keys()
            if (load := compute_load(before[url], after[url], stalled_seconds.get(url, 0.0))) is not None
        }
        stalled_seconds = {url: load.stalled_seconds for url, load in load_of_url.items()}
        newest.append(sum_loads(list(load_of_url.values())) if len(load_of_url) == len(urls) else None)
        before = after
        if len(newest) < count:
            continue
        loads = tuple(load for load in newest if load is not None)
        if not loads and fault is not None:
            raise fault
        yield ObservedLoads(loads, count - len(loads))
