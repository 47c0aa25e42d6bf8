"""Turn the record of a client into measurements, or void those of an open loop whose client sent too late."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from objectives.latency_sketch import count_over, sketch_latencies
from objectives.metrics import Measurement
from objectives.sla import Sla
from optimizer.core.errors import MeasurementError
from optimizer.core.notes import LateRequests
from optimizer.core.timing import MIN_WINDOWS, MeasurementWindow, describe_instability
from optimizer.core.trial import LoadPoint
from optimizer.measure.load_client.plan import NEVER, SendRecord
from optimizer.measure.server_health import without_traceback

LATE_MS = 1.0  # a request that is sent later than this after its planned time counts as late


def lateness_note(measured: Iterable[Measurement]) -> LateRequests | None:
    """Return a note on the late requests of all measurements together; None if there are none."""
    known = [each for each in measured if each.late_request_share is not None and each.requests]
    late = sum((each.late_request_share or 0.0) * (each.requests or 0) for each in known)
    if not late:
        return None
    share = late / sum(each.requests or 0 for each in known)
    worst = max(known, key=lambda each: each.send_lateness_p99_ms or 0.0)
    return LateRequests(share, LATE_MS, worst.send_lateness_p99_ms or 0.0)


Floats: TypeAlias = npt.NDArray[np.float64]
Mask: TypeAlias = npt.NDArray[np.bool_]
Sizes: TypeAlias = npt.NDArray[np.int64]

ONE_SAMPLE: Sizes = np.ones(1, dtype=np.int64)

LEAD_IN_SECONDS = 0.2  # sent but not counted: connection, caches and queue reach their steady state
CLOSED_LOOP_LEAD_IN_SECONDS = 0.5  # of the closed loop, which also warms a fresh server up in this time
# if the median request of the last third is later than this share of the time, the client sends less than the rate
BEHIND_SHARE = 0.01
MANY_LATE_SHARE = 0.01  # share of the requests; more late ones may look like an overload of the server
SATURATED_CPU_SHARE = 0.9  # share of a core: the client has one thread
ADVICE = "lower the rate, reserve CPUs for it with --client-cpus or stop other programs"


class NoAnswersError(MeasurementError):
    """Raised if a closed loop got no answer in the time that counts."""


class LateError(MeasurementError):
    """Raised if requests were sent so late that it is open whether the server meets the bounds."""


@dataclass(frozen=True, slots=True)
class SentRequests:
    """The requests planned between the end of the lead-in and ``end_seconds``, in planned order.

    ``latencies_ms`` count from the planned send time to the answer. For an unanswered request it is the time until
    the client stopped reading answers, a lower bound. ``sizes`` are samples per request.
    """

    planned_seconds: Floats
    late_by_ms: Floats
    latencies_ms: Floats
    answered: Mask
    sizes: Sizes
    end_seconds: float

    @classmethod
    def of(cls, record: SendRecord, seconds: float, sizes: Sizes = ONE_SAMPLE) -> SentRequests:
        """Return the counted requests of ``record``.

        ``seconds`` is the planned time including the lead-in; request ``i`` has ``sizes[i % len(sizes)]`` samples.
        """
        planned, ended_ns = record.planned_ns, record.ended_ns
        end_ns = min(ended_ns, seconds * 1e9)
        counted = (planned >= LEAD_IN_SECONDS * 1e9) & (planned < end_ns)
        planned, sent, answered = planned[counted], record.sent_ns[counted], record.answered_ns[counted]
        late_by = np.where(sent == NEVER, ended_ns, sent) - planned
        latencies = np.where(answered == NEVER, ended_ns, answered) - planned
        samples = np.resize(sizes, len(counted))[counted]
        return cls(planned / 1e9, late_by / 1e6, latencies / 1e6, answered != NEVER, samples, end_ns / 1e9)

    @property
    def span_seconds(self) -> float:
        return self.end_seconds - LEAD_IN_SECONDS

    def late_share(self, limit_ms: float = LATE_MS) -> float:
        return float(np.mean(self.late_by_ms > limit_ms))

    def on_time(self) -> SentRequests:
        """Return the requests with a lower estimate of the latencies that they would have had if none had been late.

        Late requests arrive in a burst, and requests that are sent before the burst is answered queue behind it. If
        arrivals are late by at most ``d``, no departure from a first-in-first-out queue is late by more than ``d``.
        So each request of the burst or behind it loses the largest lateness of the burst.
        """
        late = self.late_by_ms > LATE_MS
        planned_ms = 1e3 * self.planned_seconds
        late_until_ms = np.maximum.accumulate(np.where(late, planned_ms + self.latencies_ms, -np.inf))
        delayed = late | (planned_ms + self.late_by_ms < late_until_ms)
        burst = np.cumsum(delayed & ~np.roll(delayed, 1))
        largest_ms = np.zeros(len(delayed) + 1)
        np.maximum.at(largest_ms, burst[delayed], self.late_by_ms[delayed])
        latencies_ms = np.where(delayed, np.maximum(self.latencies_ms - largest_ms[burst], 0.0), self.latencies_ms)
        return replace(self, latencies_ms=latencies_ms, late_by_ms=np.zeros(len(delayed)))

    def parts(self, count: int) -> list[SentRequests]:
        """Divide the time into ``count`` equal parts and return the requests of each."""
        edges = LEAD_IN_SECONDS + self.span_seconds * np.arange(1, count) / count
        places = np.searchsorted(self.planned_seconds, edges)
        return [
            replace(
                self,
                planned_seconds=self.planned_seconds[begin:end],
                late_by_ms=self.late_by_ms[begin:end],
                latencies_ms=self.latencies_ms[begin:end],
                answered=self.answered[begin:end],
                sizes=self.sizes[begin:end],
            )
            for begin, end in pairwise([0, *places.tolist(), len(self.planned_seconds)])
        ]

    def windows(self, rate: float) -> list[MeasurementWindow]:
        """Return one window per third of the time.

        The throughput is ``rate`` times the share of answered requests: random arrivals do not change it.
        """
        return [
            MeasurementWindow(rate * float(part.answered.mean()), _quantile(part.latencies_ms, 0.95))
            if len(part.latencies_ms)
            else MeasurementWindow(0.0, 0.0)
            for part in self.parts(MIN_WINDOWS)
        ]


def judge_open_loop(
    record: SendRecord,
    load: LoadPoint,
    seconds: float,
    sla: Sla,
    spread_limit: float,
    parts: int = 1,
    sizes: Sizes = ONE_SAMPLE,
) -> list[Measurement]:
    """Return the measurements of ``parts`` equal parts of the time; a single one if the server was overloaded.

    Requests were planned for ``seconds``. ``sla`` has the latency bounds; ``sizes`` are the samples of
    the requests, in turn. A measurement is not stable if the server was overloaded, or if thirds of the time disagree
    by more than ``spread_limit`` and are not all on one side of the tightest bound. These thirds are judged without
    lateness, since they show whether the server is in a steady state.

    Raises MeasurementError if a request failed or none was answered, LateError if late requests void the measurement.
    """
    if record.error:
        raise MeasurementError(
            f"a request failed at {load.request_rate:,.6g} requests/s: {without_traceback(record.error)}"
        )
    requests = SentRequests.of(record, seconds, sizes)
    if not np.any(record.answered_ns != NEVER):
        waited = f"{record.ended_ns / 1e9:.1f} s at {load.request_rate:,.6g} requests/s"
        raise MeasurementError(f"no request was answered within {waited}")
    if not len(requests.planned_seconds):
        raise MeasurementError(f"no request was due within {seconds:.3g} s at {load.request_rate:,.6g} requests/s")
    _check_kept_up(record, requests, load)
    samples_rate = load.request_rate * load.request_batch_size
    if record.overload:
        # the answers belong to requests that were sent long ago; count all answers in this time as the capacity
        answered = np.resize(sizes, len(record.answered_ns))[record.answered_ns >= LEAD_IN_SECONDS * 1e9]
        measurement = _measurement(requests, answered, requests.span_seconds, sla, record.overload)
        return [replace(measurement, overloaded=True)]
    on_time = requests.on_time()
    _check_verdict(requests, on_time, load, sla)
    bound_ms = sla.latency_bound_ms(default=0.0)
    reason = _disagreement(on_time.windows(samples_rate), bound_ms, spread_limit)
    reason = reason or ("" if sla else _lateness_in_p95(requests, on_time, spread_limit))
    span_seconds = requests.span_seconds / parts
    return [
        _measurement(part, part.sizes[part.answered], span_seconds, sla, reason) for part in requests.parts(parts)
    ]


def judge_closed_loop(
    record: SendRecord,
    load: LoadPoint,
    seconds: float,
    sla: Sla,
    spread_limit: float,
    parts: int = 1,
    sizes: Sizes = ONE_SAMPLE,
) -> list[Measurement]:
    """Return the measurements of ``parts`` equal parts of the ``seconds`` after the lead-in.

    A request belongs to the part in which it was answered, and its latency counts from the actual send. The other
    arguments are those of ``judge_open_loop``. A measurement is not stable if thirds of the time disagree by more
    than ``spread_limit`` and are not all on one side of the tightest bound, or if the client used up a core: its own
    backlog is then part of the latency. The latter does not depend on the latencies, because windows of a verdict
    must not be left out by their results.

    Raises MeasurementError if a request failed, NoAnswersError if none was answered.
    """
    if record.error:
        raise MeasurementError(f"a request failed at {load}: {without_traceback(record.error)}")
    begin_ns, length_ns = CLOSED_LOOP_LEAD_IN_SECONDS * 1e9, seconds * 1e9
    counted = (record.answered_ns >= begin_ns) & (record.answered_ns < begin_ns + length_ns)
    if not counted.any():
        raise NoAnswersError(f"no request was answered within {seconds:.3g} s at {load}")
    answered_ns = record.answered_ns[counted]
    latencies_ms = (answered_ns - record.sent_ns[counted]) / 1e6
    samples = np.resize(sizes, len(counted))[counted]

    def divide(count: int) -> list[tuple[Floats, Sizes]]:
        places = np.minimum(((answered_ns - begin_ns) * count / length_ns).astype(np.int64), count - 1)
        return [(latencies_ms[places == place], samples[places == place]) for place in range(count)]

    windows = [
        MeasurementWindow(
            float(answered.sum()) * MIN_WINDOWS / seconds, _quantile(own_ms, 0.95) if len(own_ms) else 0.0
        )
        for own_ms, answered in divide(MIN_WINDOWS)
    ]
    bound_ms = sla.latency_bound_ms(default=0.0)
    reason = "" if math.isinf(spread_limit) else _disagreement(windows, bound_ms, spread_limit)
    if record.cpu_share > SATURATED_CPU_SHARE:
        reason = f"the load generator used {record.cpu_share:.0%} of a core, so the latency may be its own; {ADVICE}"
    return [
        _figures(own_ms, answered, seconds / parts, sla, reason)
        if len(own_ms)
        else Measurement(reason=f"no request was answered within {seconds / parts:.3g} s")
        for own_ms, answered in divide(parts)
    ]


def _measurement(requests: SentRequests, answered: Sizes, seconds: float, sla: Sla, reason: str) -> Measurement:
    """Return the measurement over ``seconds``; ``answered`` holds the samples of each answered request."""
    if not len(requests.latencies_ms):
        return Measurement(reason=f"no request was due within {seconds:.3g} s")
    return replace(
        _figures(requests.latencies_ms, answered, seconds, sla, reason),
        late_request_share=round(requests.late_share(), 6),
        send_lateness_p99_ms=round(_quantile(requests.late_by_ms, 0.99), 6),
    )


def _figures(latencies_ms: Floats, answered: Sizes, seconds: float, sla: Sla, reason: str) -> Measurement:
    """Return the throughput of the ``answered`` samples and the quantiles, counts and sketch of the latencies."""
    return Measurement(
        throughput_infer_per_sec=float(answered.sum()) / seconds,
        latency_avg_ms=float(latencies_ms.mean()),
        latency_p50_ms=_quantile(latencies_ms, 0.50),
        latency_p90_ms=_quantile(latencies_ms, 0.90),
        latency_p95_ms=_quantile(latencies_ms, 0.95),
        latency_p99_ms=_quantile(latencies_ms, 0.99),
        requests_over_ms=count_over(latencies_ms, [bound.bound for bound in sla.latencies]),
        latency_sketch=sketch_latencies(latencies_ms),
        requests=len(answered),
        stable=not reason,
        reason=reason,
    )


def _check_kept_up(record: SendRecord, requests: SentRequests, load: LoadPoint) -> None:
    """Raise LateError if the client sent fewer requests a second than planned.

    An overloaded server may have taken the client's CPU time, and the overload counts. If the client used up a core,
    the backlog may be its own.
    """
    if record.overload:
        behind = record.cpu_share > SATURATED_CPU_SHARE and requests.late_share() > MANY_LATE_SHARE
    else:
        last = requests.parts(MIN_WINDOWS)[-1].late_by_ms
        median_ms = _quantile(last, 0.5) if len(last) else 0.0
        behind = median_ms > 1e3 * BEHIND_SHARE * requests.span_seconds or bool(np.any(record.sent_ns == NEVER))
    if behind:
        used = f"it used {record.cpu_share:.0%} of a core"
        raise LateError(f"the load generator cannot keep up: {_late(requests, load)} ({used}); {ADVICE}")


def _check_verdict(requests: SentRequests, on_time: SentRequests, load: LoadPoint, sla: Sla) -> None:
    """Raise LateError if a bound is missed that could be met without the lateness of requests."""
    measured, at_best = (
        _measurement(each, each.sizes[each.answered], each.span_seconds, sla, "") for each in (requests, on_time)
    )
    missed = sla.missed(measured)
    if missed and missed.is_met(at_best):
        raise LateError(
            f"the load generator was late: {_late(requests, load)}; {missed} is missed, "
            f"but could be met without that lateness; {ADVICE}"
        )


def _late(requests: SentRequests, load: LoadPoint) -> str:
    return (
        f"at {load.request_rate:,.6g} requests/s {requests.late_share():.1%} were sent more than {LATE_MS:g} ms "
        f"late, by up to {requests.late_by_ms.max():.4g} ms"
    )


def _lateness_in_p95(requests: SentRequests, on_time: SentRequests, spread_limit: float) -> str:
    """Return why the p95 depends more on the client's lateness than on the server, or an empty string."""
    p95_ms, at_best_ms = (_quantile(each.latencies_ms, 0.95) for each in (requests, on_time))
    if p95_ms - at_best_ms <= spread_limit * at_best_ms or math.isinf(spread_limit):
        return ""
    return f"unstable: p95 {p95_ms:.4g} ms, of which late sending may be {p95_ms - at_best_ms:.4g} ms"


def _disagreement(windows: list[MeasurementWindow], latency_bound_ms: float, spread_limit: float) -> str:
    """Return why the windows disagree; an empty string if they agree or their differences do not matter.

    Different p95 latencies do not matter if all of them meet the bound or all miss it, unless they keep rising.
    """
    p95s_ms = [window.latency_p95_ms for window in windows]
    one_side = max(p95s_ms) <= latency_bound_ms or min(p95s_ms) > latency_bound_ms > 0
    rising = all(before < after for before, after in pairwise(p95s_ms))
    return describe_instability(windows, spread_limit, math.inf if one_side and not rising else None)


def _quantile(values: Floats, share: float) -> float:
    """Return the smallest value that at least ``share`` of the values do not exceed."""
    return float(np.quantile(values, share, method="inverted_cdf"))
