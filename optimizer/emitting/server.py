"""The server that the recommendation was measured with, as any container of it is started."""

from __future__ import annotations

import math
from dataclasses import dataclass

from optimizer.emitting.serving import Serving
from optimizer.emitting.winner import Winner

MODELS = "/models"
HTTP, GRPC, METRICS = 8000, 8001, 8002
LIVE, READY = "/v2/health/live", "/v2/health/ready"
MEMORY_HEADROOM = 1.5  # over what was measured: requests larger or more at once than those of the run
MEMORY_STEP = 64 << 20
LONGEST_START_SECONDS = 300  # of an image that is there, a GPU that wakes, a model that comes over a network
LOADS_ALLOWED = 10  # times what loading took when it was measured
PROBE_SECONDS = 5


@dataclass(frozen=True)
class Limits:
    """None where there is nothing to tell a limit from."""

    cpus: int | None
    memory_bytes: int | None
    gpus: int


def limits(winner: Winner) -> Limits:
    """CPUs and GPUs as many as were measured, memory with MEMORY_HEADROOM."""
    memory = winner.memory_bytes
    rounded = None if memory is None else math.ceil(memory * MEMORY_HEADROOM / MEMORY_STEP) * MEMORY_STEP
    return Limits(winner.cpus, rounded, winner.gpus)


def command(winner: Winner, serving: Serving) -> list[str]:
    """tritonserver on the ports that it has by itself."""
    at = MODELS if serving.repository.is_mounted else serving.repository.text
    return ["tritonserver", f"--model-repository={at}", *winner.arguments]


def start_seconds(winner: Winner) -> int:
    """How long a start may take before it counts as failed."""
    return max(LONGEST_START_SECONDS, math.ceil(LOADS_ALLOWED * (winner.load_seconds or 0)))
