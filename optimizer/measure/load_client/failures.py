"""Failed requests of a load: what kind of failure each is, and their numbers in each measurement."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from objectives.arrays import IntArray
from objectives.metrics import Measurement
from optimizer.core.errors import MeasurementError
from optimizer.measure.load_client.plan import NEVER, ResponseRecord, SendRecord
from optimizer.measure.server_messages import is_rejection, without_traceback

REJECTED, TIMED_OUT, OTHER = range(3)  # kinds of failures
SERVED = -1  # instead of a kind
_TIMEOUT = re.compile("request timeout expired|deadline exceeded", re.IGNORECASE)

Mask = npt.NDArray[np.bool_]


@dataclass(frozen=True, eq=False)
class FailedRequests:
    """The failed requests of a load.

    ``planned_ns`` and ``ended_ns`` are nanoseconds after its start. ``message`` is that of the most frequent failure.
    """

    planned_ns: IntArray
    ended_ns: IntArray
    kinds: IntArray
    message: str

    def check_some_served(self, served: int, load: object) -> None:
        """Raise MeasurementError with the most frequent message if every request failed."""
        if not served and len(self.kinds):
            raise MeasurementError(f"every request failed at {load}: {without_traceback(self.message)}")

    def ended_until(self, end_ns: float, longest_wait_ns: float) -> IntArray:
        """Return ``ended_ns``, but ``end_ns`` for a request that had already waited longer than ``longest_wait_ns``.

        Otherwise a request that hangs until the client stops would be counted nowhere.
        """
        hangs = (self.kinds == TIMED_OUT) & (self.ended_ns > end_ns) & (self.planned_ns < end_ns - longest_wait_ns)
        return np.where(hangs, int(end_ns), self.ended_ns)

    def added_to(
        self, measurements: Sequence[Measurement], times_ns: IntArray, begin_ns: float, end_ns: float
    ) -> list[Measurement]:
        """Return the measurements of equal parts of a time with the failed requests of each.

        Args:
            measurements: The measurements of the served requests, one for each part.
            times_ns: When each failed request counts: ``planned_ns``, or that of ``ended_until``.
            begin_ns: Begin of the first part.
            end_ns: End of the last part.
        """
        edges = np.linspace(begin_ns, end_ns, len(measurements) + 1)
        counts = np.stack(
            [np.histogram(times_ns[self.kinds == kind], edges)[0] for kind in (REJECTED, TIMED_OUT, OTHER)]
        )
        return [_with_failures(own, *of_part) for own, of_part in zip(measurements, counts.T.tolist(), strict=True)]


def split_failures(record: SendRecord, sizes: IntArray) -> tuple[SendRecord, IntArray, FailedRequests | None]:
    """Return the record and the samples of the requests that did not fail, and those that failed.

    The latter are None, and the former all requests, if the first failure has ended the load. A request that the
    client stopped waiting for has timed out, unless the server was overloaded: then the client stopped early.
    ``sizes`` are the samples of the requests, in turn.
    """
    if record.failures is None:
        return record, sizes, None
    kinds = request_kinds(record)
    served, failed = kinds == SERVED, kinds != SERVED
    ended_ns = np.where(record.answered_ns == NEVER, record.ended_ns, record.answered_ns)
    message = max(record.failures, key=lambda own: len((record.failures or {})[own]), default="no answer in time")
    return (
        replace(
            record,
            planned_ns=record.planned_ns[served],
            sent_ns=record.sent_ns[served],
            answered_ns=record.answered_ns[served],
            responses=record.responses and _of_requests(record.responses, served),
        ),
        np.resize(sizes, len(kinds))[served],
        FailedRequests(record.planned_ns[failed], ended_ns[failed], kinds[failed], message),
    )


def request_kinds(record: SendRecord) -> IntArray:
    """Return the kind of the failure of each request, or SERVED. All are SERVED if failures were not counted."""
    kinds = np.full(len(record.planned_ns), SERVED)
    if record.failures is None:
        return kinds
    if not record.overload:
        kinds[(record.sent_ns != NEVER) & (record.answered_ns == NEVER)] = TIMED_OUT
    for message, requests in record.failures.items():
        kinds[np.array(requests, dtype=np.int64)] = failure_kind(message)
    return kinds


def failure_kind(message: str) -> int:
    """Return the kind of a failure by the server's message."""
    if is_rejection(message):
        return REJECTED
    return TIMED_OUT if _TIMEOUT.search(message) else OTHER


def _of_requests(responses: ResponseRecord, kept: Mask) -> ResponseRecord:
    """Return the responses to the requests in ``kept``."""
    counts = np.diff(responses.offsets)
    is_kept = np.repeat(kept, counts)
    return replace(
        responses,
        offsets=np.concatenate(([0], np.cumsum(counts[kept]))),
        arrived_ns=responses.arrived_ns[is_kept],
        messages=tuple(np.array(responses.messages, dtype=object)[is_kept]),
    )


def _with_failures(measurement: Measurement, rejected: int, timed_out: int, other: int) -> Measurement:
    if measurement.throughput_infer_per_sec is None and rejected + timed_out + other:
        measurement = Measurement(0.0, goodput_infer_per_sec=0.0, requests=0, stable=True)
    return replace(measurement, rejected_requests=rejected, timed_out_requests=timed_out, failed_requests=other)
