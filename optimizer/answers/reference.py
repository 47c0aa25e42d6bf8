"""What the baseline answered, in a file of the run: reference.npz."""

from __future__ import annotations

import io
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from optimizer.answers.comparison import Answer, Difference, Tolerance, difference, magnitudes, read_answer
from optimizer.answers.npz import Array, read_npz
from optimizer.errors import BadInputError
from optimizer.store.disk import write_whole


@dataclass(frozen=True)
class Reference:
    """What the baseline answered: serialized requests and responses, in their order, and the time that one took.

    ``trouble`` says why there are none.
    """

    requests: tuple[bytes, ...]
    responses: tuple[bytes, ...]
    seconds_alone: float
    trouble: str = ""

    @cached_property
    def answers(self) -> list[Answer]:
        return [read_answer(response) for response in self.responses]

    @cached_property
    def typical(self) -> dict[str, float]:
        return magnitudes(self.answers)

    def compare(self, order: Sequence[int], responses: Sequence[bytes], tolerance: Tolerance) -> str:
        """The largest difference in words, of ``responses`` to the requests of these numbers; empty without one."""
        found: list[tuple[Difference, int]] = []
        for number, response in zip(order, responses, strict=True):
            one = difference(self.answers[number], read_answer(response), tolerance, self.typical)
            if one is not None:
                found.append((one, number))
        if not found:
            return ""
        worst, number = max(found, key=lambda item: item[0])
        where = f"{worst.place} of " if worst.place else ""
        return f"{worst.text}, at {where}request {number}; {len(found)} of {len(responses)} answers differ"

    def write(self, file: Path) -> None:
        """Whole or not at all. Raises EnvironmentFault."""
        arrays: dict[str, Any] = {f"request_{i}": _bytes(message) for i, message in enumerate(self.requests)}
        arrays |= {f"response_{i}": _bytes(message) for i, message in enumerate(self.responses)}
        content = io.BytesIO()
        np.savez(content, seconds_alone=self.seconds_alone, trouble=self.trouble, **arrays)
        write_whole(file, content.getvalue())

    @classmethod
    def read(cls, file: Path) -> Reference:
        """Raises BadInputError where ``file`` has not been written by ``write``."""
        from google.protobuf.message import DecodeError

        arrays = read_npz(file)
        try:
            numbers = range(sum(name.startswith("request_") for name in arrays))
            found = cls(
                tuple(arrays[f"request_{i}"].tobytes() for i in numbers),
                tuple(arrays[f"response_{i}"].tobytes() for i in numbers),
                float(arrays["seconds_alone"]),
                str(arrays["trouble"]),
            )
            if not (found.answers or found.trouble) or not math.isfinite(found.seconds_alone):
                raise ValueError
        except (KeyError, ValueError, TypeError, DecodeError):
            raise BadInputError(f"{file}: not the answers of a run; delete it, and they are asked for anew") from None
        return found


def _bytes(message: bytes) -> Array:
    return np.frombuffer(message, dtype=np.uint8)
