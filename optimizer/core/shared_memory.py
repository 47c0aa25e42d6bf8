"""Shared memory through which a load generator passes tensors to a server on its machine."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias

SharedMemoryName: TypeAlias = Literal["none", "system", "cuda"]
DEFAULT_OUTPUT_BYTES = 102_400  # perf_analyzer's default


@dataclass(frozen=True, slots=True)
class SharedMemory:
    """The kind of shared memory, and the space for each sample of an output whose size the model does not fix."""

    kind: Literal["system", "cuda"]
    output_bytes: int = DEFAULT_OUTPUT_BYTES
