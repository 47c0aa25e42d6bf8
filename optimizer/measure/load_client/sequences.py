"""The client's closed loop for stateful models: a fixed number of sequences, each with one request at a time.

It starts before every measurement like ``client.py``, so it imports no protobuf: the parameters of a sequence are
appended to the serialized request as further entries of its map ``parameters``.
"""

from __future__ import annotations

import sys
import time
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import cycle
from pathlib import Path
from typing import Any

from optimizer.measure.load_client.client import WARM_UPS, WATCH_SECONDS, ClosedLoopClient, main
from optimizer.measure.load_client.overload import OverloadDetector

MAX_SEQUENCE_ID = 2**31 - 1  # the control input CORRID may be TYPE_INT32
NANOSECONDS_AN_ID = 10_000  # no client starts 100,000 sequences a second
_PARAMETERS, _KEY, _VALUE = b"\x22", b"\x0a", b"\x12"  # tags: ModelInferRequest.parameters, key and value of an entry
_TRUE, _INT64 = b"\x08\x01", b"\x10"  # InferParameter: bool_param true, the tag of int64_param


def fresh_ids(now_ns: int | None = None) -> Iterator[int]:
    """Yield sequence ids that no earlier client of the last six hours has used: they count up with the time.

    ``now_ns`` is the time since the epoch in nanoseconds; None for the current time.
    """
    first = (time.time_ns() if now_ns is None else now_ns) // NANOSECONDS_AN_ID
    while True:
        yield 1 + first % MAX_SEQUENCE_ID
        first += 1


def step_parameters(sequence: int, *, start: bool, end: bool) -> bytes:
    """Return what turns a serialized ModelInferRequest into a step of ``sequence`` if it is appended."""
    parameters = _entry(b"sequence_id", _INT64 + _varint(sequence))
    if start:
        parameters += _entry(b"sequence_start", _TRUE)
    return parameters + _entry(b"sequence_end", _TRUE) if end else parameters


def _entry(key: bytes, value: bytes) -> bytes:
    entry = _KEY + _varint(len(key)) + key + _VALUE + _varint(len(value)) + value
    return _PARAMETERS + _varint(len(entry)) + entry


def _varint(number: int) -> bytes:
    groups = bytearray()
    while number > 127:
        groups.append(number & 127 | 128)
        number >>= 7
    return bytes([*groups, number])


@dataclass(slots=True)
class Slot:
    """One of the sequences in flight: ``steps_left`` steps are still to be sent, 0 before a new sequence.

    ``entry`` is the number of the request whose inputs the next step has.
    """

    sequence: int = 0
    steps_left: int = 0
    entry: int = 0


class SequenceClient(ClosedLoopClient):
    """Keeps ``concurrency`` sequences in flight; the next step is sent when the last one is answered.

    The first sequence of each slot is shortened, so that the sequences do not all start and end together. After the
    load each open sequence gets one more step, which ends it; it is answered too late to count.
    """

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._ids, self._lengths = fresh_ids(), cycle(self._plan.sequence_lengths)
        self._slots = [Slot() for _ in range(self._plan.concurrency)]
        self._idle = deque(self._slots)
        self._slot_of: list[Slot] = []  # the slot of each request that was sent
        self._next_entry = 0

    def _warm_up_messages(self) -> list[bytes]:
        """Return a sequence of WARM_UPS steps."""
        sequence, last = next(self._ids), WARM_UPS - 1
        return [
            self._messages[0] + step_parameters(sequence, start=number == 0, end=number == last)
            for number in range(WARM_UPS)
        ]

    def _record_answer(self, number: int, now_ns: int) -> None:
        super()._record_answer(number, now_ns)
        self._idle.append(self._slot_of[number])

    def _send_due(self) -> int:
        now_ns = self._now_ns()
        if now_ns >= self._end_ns:
            return sys.maxsize
        while self._idle:
            slot = self._idle.popleft()
            is_first = not slot.steps_left
            if is_first:
                self._begin(slot)
            self._send_step(slot, now_ns, is_first=is_first)
        return self._end_ns

    def _begin(self, slot: Slot) -> None:
        """Give ``slot`` a new sequence."""
        length = next(self._lengths)
        if not slot.sequence:
            open_before = sum(1 for open_slot in self._slots if open_slot.sequence)
            length = max(1, length * (open_before + 1) // len(self._slots))
        slot.sequence, slot.steps_left, slot.entry = next(self._ids), length, self._next_entry
        self._next_entry += length

    def _send_step(self, slot: Slot, now_ns: int, *, is_first: bool = False) -> None:
        message = self._messages[slot.entry % len(self._messages)]
        slot.entry, slot.steps_left = slot.entry + 1, slot.steps_left - 1
        self._request(message + step_parameters(slot.sequence, start=is_first, end=not slot.steps_left))
        self._record_sent(now_ns)
        self._slot_of.append(slot)

    def _finish(self, folder: Path, detector: OverloadDetector) -> None:
        """End each open sequence when its last step is answered: others may wait for its place in the batcher."""
        while not self._error:
            while self._idle:
                slot = self._idle.popleft()
                if slot.steps_left:
                    slot.steps_left = 1
                    self._send_step(slot, self._now_ns())
            if not self._in_flight:
                break
            self._exchange(WATCH_SECONDS)
            self._check_progress(self._now_ns(), detector)
        self._write_record(folder)


if __name__ == "__main__":
    main(SequenceClient)
