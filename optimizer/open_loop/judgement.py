"""From what happened to the requests of an open loop to a Measurement, or to why there is none."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import pairwise
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from objectives.metrics import Measurement
from optimizer.errors import MeasurementError
from optimizer.load.windows import WINDOWS, Window, instability
from optimizer.open_loop.exchange import NEVER, Record
from optimizer.server_health import cause
from optimizer.trial import LoadPoint

Floats: TypeAlias = npt.NDArray[np.float64]
Mask: TypeAlias = npt.NDArray[np.bool_]
Sizes: TypeAlias = npt.NDArray[np.int64]

ONE: Sizes = np.ones(1, dtype=np.int64)  # sample in each request

LEAD_IN_SECONDS = 0.2  # sent, but not counted: connection, caches and queue come to what they are under load
# A request sent later than the larger of these is late. It counts in the latency, which is from the plan on: what is
# void is a measurement that the client's own lateness decides.
LATE_MS, LATE_SHARE_OF_BOUND = 1.0, 0.25
MOST_LATE = 0.01  # of the requests
SATURATED = 0.9  # of a core: what the client's one thread can use at most, and a little less


class LateError(MeasurementError):
    """The load generator did not keep to its plan: what it measured is not the load that was asked for."""


@dataclass(frozen=True, slots=True)
class Requests:
    """The requests that count, by the order of their plan: from the lead-in's end to ``end_seconds``.

    ``latencies_ms`` are from the planned send to the answer; of an unanswered request to when nobody looked any
    more, the least that it can be. ``sizes`` are in samples.
    """

    planned_seconds: Floats
    late_by_ms: Floats
    latencies_ms: Floats
    answered: Mask
    sizes: Sizes
    end_seconds: float

    @classmethod
    def of(cls, record: Record, seconds: float, sizes: Sizes = ONE) -> Requests:
        """``seconds``: how long requests were planned for, with the lead-in; ``sizes`` are those of all, in turn."""
        planned, ended_ns = record.planned_ns, record.ended_ns
        end_ns = min(ended_ns, seconds * 1e9)
        counted = (planned >= LEAD_IN_SECONDS * 1e9) & (planned < end_ns)
        planned, sent, answered = planned[counted], record.sent_ns[counted], record.answered_ns[counted]
        late_by = np.where(sent == NEVER, ended_ns, sent) - planned
        latencies = np.where(answered == NEVER, ended_ns, answered) - planned
        own = np.resize(sizes, len(counted))[counted]
        return cls(planned / 1e9, late_by / 1e6, latencies / 1e6, answered != NEVER, own, end_ns / 1e9)

    @property
    def span_seconds(self) -> float:
        return self.end_seconds - LEAD_IN_SECONDS

    def late_share(self, limit_ms: float) -> float:
        return float(np.mean(self.late_by_ms > limit_ms))

    def parts(self, count: int) -> list[Requests]:
        """Equal parts of the time, in its order."""
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

    def windows(self, rate: float) -> list[Window]:
        """Thirds of the time. Throughput is what of ``rate`` is answered: the arrivals' own chance is left out."""
        return [
            Window(rate * float(part.answered.mean()), _quantile(part.latencies_ms, 0.95))
            if len(part.latencies_ms)
            else Window(0.0, 0.0)
            for part in self.parts(WINDOWS)
        ]


def judge(
    record: Record,
    load: LoadPoint,
    seconds: float,
    latency_bound_ms: float,
    spread_limit: float,
    parts: int = 1,
    sizes: Sizes = ONE,
) -> list[Measurement]:
    """What the client saw under ``load``, planned for ``seconds``, in so many equal parts of the time.

    ``sizes``: samples of the requests, in turn. A bound of 0 is none. Of an overloaded server there is one
    measurement.

    Not stable where the server was overloaded, or thirds of the time disagree (by ``spread_limit``, and not all on
    one side of the bound). Raises MeasurementError where a request failed or none was answered, LateError where too
    many were sent late and it was not the server's doing.
    """
    if record.error:
        raise MeasurementError(f"a request failed at {load.request_rate:,.6g} requests/s: {cause(record.error)}")
    requests = Requests.of(record, seconds, sizes)
    if not np.any(record.answered_ns != NEVER):
        waited = f"{record.ended_ns / 1e9:.1f} s at {load.request_rate:,.6g} requests/s"
        raise MeasurementError(f"no request was answered within {waited}")
    if not len(requests.planned_seconds):
        raise MeasurementError(f"no request fell due within {seconds:.3g} s at {load.request_rate:,.6g} requests/s")
    _check_kept_up(record, requests, load, latency_bound_ms)
    samples_rate = load.request_rate * load.request_batch_size
    if record.overload:
        # it answers what was sent long ago: its capacity is what it answered in the time
        answered = np.resize(sizes, len(record.answered_ns))[record.answered_ns >= LEAD_IN_SECONDS * 1e9]
        return [_measurement(requests, answered, requests.span_seconds, record.overload)]
    reason = _disagreement(requests.windows(samples_rate), latency_bound_ms, spread_limit)
    span_seconds = requests.span_seconds / parts
    return [_measurement(own, own.sizes[own.answered], span_seconds, reason) for own in requests.parts(parts)]


def _measurement(requests: Requests, answered: Sizes, seconds: float, reason: str) -> Measurement:
    """``answered``: the samples of each request that was."""
    if not len(requests.latencies_ms):
        return Measurement(reason=f"no request fell due within {seconds:.3g} s")
    return Measurement(
        throughput_infer_per_sec=float(answered.sum()) / seconds,
        latency_avg_ms=float(requests.latencies_ms.mean()),
        latency_p50_ms=_quantile(requests.latencies_ms, 0.50),
        latency_p90_ms=_quantile(requests.latencies_ms, 0.90),
        latency_p95_ms=_quantile(requests.latencies_ms, 0.95),
        latency_p99_ms=_quantile(requests.latencies_ms, 0.99),
        requests=len(answered),
        stable=not reason,
        reason=reason,
    )


def _check_kept_up(record: Record, requests: Requests, load: LoadPoint, latency_bound_ms: float) -> None:
    """Raises LateError. An overloaded server may have taken the client's CPU time, but not from a client that had
    a core to itself: its backlog may be its own."""
    limit_ms = max(LATE_MS, LATE_SHARE_OF_BOUND * latency_bound_ms)
    late = requests.late_share(limit_ms)
    if late > MOST_LATE and (not record.overload or record.cpu_share > SATURATED):
        raise LateError(
            f"the load generator cannot keep up: at {load.request_rate:,.6g} requests/s {late:.1%} were sent more "
            f"than {limit_ms:g} ms late (it used {record.cpu_share:.0%} of a core); lower the rate, give it CPUs of "
            "its own or stop what else runs"
        )


def _disagreement(windows: list[Window], latency_bound_ms: float, spread_limit: float) -> str:
    """Latencies that vary, but always meet the bound or never, say what is asked; unless they rise all the time."""
    reason = instability(windows, spread_limit)
    p95s_ms = [window.latency_p95_ms for window in windows]
    one_side = max(p95s_ms) <= latency_bound_ms or min(p95s_ms) > latency_bound_ms > 0
    rising = all(before < after for before, after in pairwise(p95s_ms))
    return "" if reason.startswith("unstable: p95") and one_side and not rising else reason


def _quantile(values: Floats, share: float) -> float:
    """An order statistic: the least value that at least ``share`` of them do not exceed."""
    return float(np.quantile(values, share, method="inverted_cdf"))
