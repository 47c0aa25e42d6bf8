"""The files between a load generator and its client process: the plan of a load and the record of its requests.

The client starts before every measurement, so this module imports numpy only to read a record.
"""

from __future__ import annotations

import json
from array import array
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    Nanoseconds: TypeAlias = npt.NDArray[np.int64]

HEADERS = "TRITUNE_HEADERS"  # environment variable of the client: the headers of each request as a JSON object
NEVER = -1  # instead of a time: the request was not sent or not answered
PLAN, MESSAGES, PLANNED = "plan.json", "messages.bin", "planned.bin"
FACTS, TIMES = "record.json", "times.bin"


@dataclass(frozen=True, slots=True)
class SendPlan:
    """The task of the client process: the server's ``host:port``, the latency bound (0: none) and the TLS files.

    ``tls`` maps the field names of ``Tls`` to paths; None sends unencrypted requests. Headers are secrets: they are
    passed in the environment and written to no file. A closed loop keeps ``concurrency`` requests in flight for
    ``seconds``. If ``concurrency`` is 0, the load is an open loop. With ``sequence_lengths`` the requests belong to
    sequences of these numbers of requests, in turn, and ``concurrency`` of them are in flight.
    """

    address: str
    latency_bound_ms: float
    tls: dict[str, str | None] | None = None
    concurrency: int = 0
    seconds: float = 0.0
    sequence_lengths: tuple[int, ...] = ()

    def write(self, folder: Path, messages: Sequence[bytes], planned_ns: Iterable[int] = ()) -> None:
        """Write the plan; the serialized ``messages`` are sent in turn.

        In an open loop they are sent ``planned_ns`` after the start.
        """
        sizes = [len(message) for message in messages]
        folder.joinpath(PLAN).write_text(json.dumps({"plan": asdict(self), "sizes": sizes}))
        folder.joinpath(MESSAGES).write_bytes(b"".join(messages))
        folder.joinpath(PLANNED).write_bytes(array("q", planned_ns).tobytes())

    @classmethod
    def read(cls, folder: Path) -> tuple[SendPlan, list[bytes], list[int]]:
        """Return the plan, its messages and its planned times in nanoseconds."""
        document = json.loads(folder.joinpath(PLAN).read_text())
        messages, start = list[bytes](), 0
        data, planned = folder.joinpath(MESSAGES).read_bytes(), array("q")
        for size in document["sizes"]:
            messages.append(data[start : start + size])
            start += size
        planned.frombytes(folder.joinpath(PLANNED).read_bytes())
        return cls(**document["plan"]), messages, planned.tolist()


@dataclass(frozen=True, slots=True)
class SendRecord:
    """When each request was planned, sent and answered, in nanoseconds after the start; NEVER if it was not.

    In a closed loop a request is planned for the time at which it is sent. ``ended_ns`` is when the client stopped
    reading answers. ``overload`` is the reason for an early stop and ``error`` the message of the first failed
    request; both are empty otherwise. ``hangs`` is true if a request that was sent alone remained unanswered, or if a
    closed loop got no answer for a long time. ``cpu_share`` is the client's CPU time as a share of one core.
    """

    planned_ns: Nanoseconds
    sent_ns: Nanoseconds
    answered_ns: Nanoseconds
    ended_ns: int
    overload: str = ""
    error: str = ""
    hangs: bool = False
    cpu_share: float = 0.0

    @classmethod
    def read(cls, folder: Path) -> SendRecord:
        """Read the record that ``write_record`` left in ``folder``."""
        import numpy as np

        facts: dict[str, Any] = json.loads(folder.joinpath(FACTS).read_text())
        planned, sent, answered = np.fromfile(folder / TIMES, dtype=np.int64).reshape(3, -1)
        return cls(planned, sent, answered, **facts)


def write_record(folder: Path, times_ns: Sequence[Sequence[int]], facts: Mapping[str, object]) -> None:
    """Write the client's record: planned, sent and answered times of all requests, and the other fields."""
    folder.joinpath(FACTS).write_text(json.dumps(facts))
    folder.joinpath(TIMES).write_bytes(b"".join(array("q", times).tobytes() for times in times_ns))
