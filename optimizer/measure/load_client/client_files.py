"""The files between a load generator and its client process: the plan of a load, and the record of its requests.

The client starts before every measurement, so this module imports numpy only to read a record.
"""

from __future__ import annotations

import json
from array import array
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, TypeAlias

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    Nanoseconds: TypeAlias = npt.NDArray[np.int64]

HEADERS_VARIABLE = "TRITUNE_HEADERS"  # environment variable of the client: the headers as a JSON object
NEVER = -1  # stands for the time of a request that was not sent or not answered
MIN_LEAD_IN_SECONDS, MAX_LEAD_IN_SECONDS = 0.5, 20.0  # limits of the lead-in for models that stream
PLAN_FILE, MESSAGES_FILE, PLANNED_FILE, ORDER_FILE = "plan.json", "messages.bin", "planned.bin", "order.bin"
RECORD_FILE, TIMES_FILE = "record.json", "times.bin"
RESPONSE_TIMES_FILE, RESPONSES_FILE = "response_times.bin", "responses.bin"
ALL_ANSWERED_FILE = "all_answered"  # an empty file
WRITE_BYTES = 2**18  # messages are written in blocks of this size, which takes about 0.1 ms


@dataclass(frozen=True, slots=True)
class StreamPlan:
    """The part of a plan for a model that streams: it sends any number of responses to a request.

    The client chooses the lead-in, see ``streaming_client``, and the plan's ``seconds`` count after it.

    Attributes:
        first_response_bound_ms: Largest bound on the time to first response; 0 without one.
        fewest_requests: A closed loop continues after the plan's ``seconds`` until this number of requests have
            ended since the lead-in, and ``window_requests`` in each window.
        windows: Number of equal windows into which the time after the lead-in is divided.
        window_requests: The least number of requests in a window of a closed loop.
        longest_seconds: Limit for the time after the lead-in.
        lead_in_requests: The first planned times are those of the lead-in; the others count from its end.
    """

    first_response_bound_ms: float = 0.0
    fewest_requests: int = 0
    windows: int = 1
    window_requests: int = 0
    longest_seconds: float = 0.0
    lead_in_requests: int = 0


@dataclass(frozen=True, slots=True)
class SendPlan:
    """The task of the client process: ``host:port`` of each server, the latency bound (0: none) and the TLS files.

    The requests are spread over the servers, which serve the same.

    ``tls`` maps the field names of ``Tls`` to paths; None sends unencrypted requests. Headers are secrets: they are
    passed in the environment and written to no file. A closed loop keeps ``concurrency`` requests in flight for
    ``seconds``. If ``concurrency`` is 0, the load is an open loop.

    Attributes:
        stream: The part for a model that streams; None for other models.
        period_seconds: The planned times of an open loop repeat after this time; 0 if they do not.
        sequence_lengths: The requests belong to sequences of these numbers of requests, in turn, ``concurrency`` of
            which are in flight.
        counts_failures: Whether the load continues after a request that failed, and the record has all of them.
        output_slots: The slots for outputs in shared memory: the end of a request that names the slot, as hex digits.
    """

    addresses: tuple[str, ...]
    latency_bound_ms: float
    tls: dict[str, str | None] | None = None
    concurrency: int = 0
    seconds: float = 0.0
    stream: StreamPlan | None = None
    period_seconds: float = 0.0
    sequence_lengths: tuple[int, ...] = ()
    counts_failures: bool = False
    output_slots: tuple[str, ...] = ()

    def write(
        self,
        folder: Path,
        messages: Sequence[bytes],
        planned_ns: Iterable[int] = (),
        order: Iterable[int] = (),
    ) -> None:
        """Write the plan; the serialized ``messages`` are sent in turn, or those with the numbers in ``order``.

        In an open loop they are sent ``planned_ns`` after the start.
        """
        sizes = [len(message) for message in messages]
        folder.joinpath(PLAN_FILE).write_text(json.dumps({"plan": asdict(self), "sizes": sizes}))
        folder.joinpath(MESSAGES_FILE).write_bytes(b"".join(messages))
        folder.joinpath(PLANNED_FILE).write_bytes(array("q", planned_ns).tobytes())
        folder.joinpath(ORDER_FILE).write_bytes(array("q", order).tobytes())

    @classmethod
    def read(cls, folder: Path) -> tuple[SendPlan, list[bytes], list[int]]:
        """Return the plan, the messages as they are sent in turn, and the planned times in nanoseconds."""
        document = json.loads(folder.joinpath(PLAN_FILE).read_text())
        messages, start = list[bytes](), 0
        data, planned, order = folder.joinpath(MESSAGES_FILE).read_bytes(), array("q"), array("q")
        for size in document["sizes"]:
            messages.append(data[start : start + size])
            start += size
        planned.frombytes(folder.joinpath(PLANNED_FILE).read_bytes())
        order.frombytes(folder.joinpath(ORDER_FILE).read_bytes())
        messages = [messages[number] for number in order] or messages
        plan = cls(**document["plan"])
        stream = document["plan"]["stream"]
        plan = replace(
            plan,
            stream=stream and StreamPlan(**stream),
            addresses=tuple(plan.addresses),
            sequence_lengths=tuple(plan.sequence_lengths),
            output_slots=tuple(plan.output_slots),
        )
        return plan, messages, planned.tolist()


@dataclass(frozen=True, slots=True)
class ResponseRecord:
    """The responses of a model that streams, ordered by request and then by arrival.

    Those of request ``i`` have the numbers ``offsets[i]`` to ``offsets[i + 1] - 1``. ``arrived_ns`` are nanoseconds
    after the start, ``messages`` serialized ModelStreamInferResponse. ``begin_ns`` and ``end_ns`` limit the time that
    counts.
    """

    offsets: Nanoseconds
    arrived_ns: Nanoseconds
    messages: tuple[bytes, ...]
    begin_ns: int
    end_ns: int

    @classmethod
    def read(cls, folder: Path, requests: int) -> ResponseRecord:
        """Read the files of the responses in ``folder``; ``requests`` is the number of requests."""
        import numpy as np

        content = np.fromfile(folder / RESPONSE_TIMES_FILE, dtype=np.int64)
        begin_ns, end_ns = content[:2].tolist()
        request, arrived_ns, sizes = content[2:].reshape(3, -1)
        order = np.argsort(request, kind="stable")
        data, ends = folder.joinpath(RESPONSES_FILE).read_bytes(), np.cumsum(sizes)
        spans = zip((ends - sizes)[order].tolist(), ends[order].tolist(), strict=True)
        return cls(
            np.searchsorted(request[order], np.arange(requests + 1)),
            arrived_ns[order],
            tuple(data[start:end] for start, end in spans),
            begin_ns,
            end_ns,
        )


@dataclass(frozen=True, slots=True)
class SendRecord:
    """When each request was planned, sent and answered, in nanoseconds after the start; NEVER if it was not.

    In a closed loop a request is planned for the time at which it is sent. ``ended_ns`` is when the client stopped
    reading answers. ``overload`` is the reason for an early stop and ``error`` the message of the first failed
    request; both are empty otherwise. ``hangs`` is true if a request that was sent alone remained unanswered, or if a
    closed loop got no answer for a long time. ``cpu_share`` is the client's CPU time as a share of one core.
    ``responses`` is None unless the model streams; a request is then answered when its call ends. ``failures`` are
    the numbers of the failed requests by their message; None if the first one ends the load. ``start_unix_ns`` is the
    Unix time of the start; None if it is unknown.
    """

    planned_ns: Nanoseconds
    sent_ns: Nanoseconds
    answered_ns: Nanoseconds
    ended_ns: int
    overload: str = ""
    error: str = ""
    hangs: bool = False
    cpu_share: float = 0.0
    responses: ResponseRecord | None = None
    failures: Mapping[str, Sequence[int]] | None = None
    start_unix_ns: int | None = None

    @classmethod
    def read(cls, folder: Path) -> SendRecord:
        """Read the record that ``write_record`` left in ``folder``."""
        import numpy as np

        facts: dict[str, Any] = json.loads(folder.joinpath(RECORD_FILE).read_text())
        planned, sent, answered = np.fromfile(folder / TIMES_FILE, dtype=np.int64).reshape(3, -1)
        streamed = (folder / RESPONSE_TIMES_FILE).exists()
        responses = ResponseRecord.read(folder, len(planned)) if streamed else None
        return cls(planned, sent, answered, responses=responses, **facts)


def write_record(folder: Path, times_ns: Sequence[Sequence[int]], facts: Mapping[str, object]) -> None:
    """Write the client's record: planned, sent and answered times of all requests, and the other fields."""
    folder.joinpath(RECORD_FILE).write_text(json.dumps(facts))
    folder.joinpath(TIMES_FILE).write_bytes(b"".join(array("q", times).tobytes() for times in times_ns))


def open_responses(folder: Path) -> BinaryIO:
    """Return the file to which the client writes the message of each response as it arrives."""
    return folder.joinpath(RESPONSES_FILE).open("wb", buffering=WRITE_BYTES)


def write_response_times(
    folder: Path,
    counted_ns: tuple[int, int],
    requests: Sequence[int],
    arrived_ns: Sequence[int],
    sizes: Sequence[int],
) -> None:
    """Write the requests, times and message sizes of all responses, which are in their order of arrival.

    ``counted_ns`` are begin and end of the time that counts. Messages that are written later are not read.
    """
    columns = (counted_ns, requests, arrived_ns, sizes)
    folder.joinpath(RESPONSE_TIMES_FILE).write_bytes(b"".join(array("q", column).tobytes() for column in columns))
