"""What the load generator hands to its client, and what it gets back: the files between two processes."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

Nanoseconds: TypeAlias = npt.NDArray[np.int64]

HEADERS = "TRITUNE_HEADERS"  # in the client's environment: those of each request, a JSON object
NEVER = -1  # in place of a time: was not sent, was not answered


@dataclass(frozen=True, slots=True)
class Job:
    """``address`` is the server's ``host:port``; 0 is no latency bound. ``tls`` are its files, by the fields of Tls.

    Headers are secrets and in no file: they come in the environment.
    """

    address: str
    latency_bound_ms: float
    tls: dict[str, str | None] | None = None

    def write(self, folder: Path, messages: Sequence[bytes], planned_ns: Nanoseconds) -> None:
        """``messages`` are serialized requests, sent in turn at ``planned_ns`` after the start."""
        folder.joinpath("job.json").write_text(json.dumps(asdict(self)))
        data = np.frombuffer(b"".join(messages), dtype=np.uint8)
        ends = np.cumsum([len(message) for message in messages])
        np.savez(folder / "requests.npz", planned_ns=planned_ns, ends=ends, bytes=data)

    @classmethod
    def read(cls, folder: Path) -> tuple[Job, list[bytes], list[int]]:
        """The job, its messages and its planned times."""
        job = cls(**json.loads(folder.joinpath("job.json").read_text()))
        with np.load(folder / "requests.npz") as arrays:
            ends, data, planned_ns = arrays["ends"].tolist(), arrays["bytes"].tobytes(), arrays["planned_ns"].tolist()
        return job, [data[start:end] for start, end in zip([0, *ends[:-1]], ends, strict=True)], planned_ns


@dataclass(frozen=True, slots=True)
class Record:
    """What happened. Times are nanoseconds since the start, by request; NEVER where it did not come to that.

    ``ended_ns`` is when the client stopped looking. ``overload`` says why it stopped early, ``error`` is the first
    failed request's message; both are empty otherwise. ``hangs``: not even a request alone was answered.
    ``cpu_share`` is what the client used of one core.
    """

    planned_ns: Nanoseconds
    sent_ns: Nanoseconds
    answered_ns: Nanoseconds
    ended_ns: int
    overload: str = ""
    error: str = ""
    hangs: bool = False
    cpu_share: float = 0.0

    def write(self, folder: Path) -> None:
        np.savez(folder / "record.npz", **{name: getattr(self, name) for name in self.__slots__})

    @classmethod
    def read(cls, folder: Path) -> Record:
        with np.load(folder / "record.npz") as arrays:
            values: dict[str, Any] = {name: array if array.ndim else array.item() for name, array in arrays.items()}
        return cls(**values)
