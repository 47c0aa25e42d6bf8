"""The problem statement: all that a search method is told."""

from __future__ import annotations

from dataclasses import dataclass, field

from objectives.metrics import METRICS, Metric
from objectives.sla import CONFIDENCE, Constraint
from optimizer.requests.sizes import Dim
from optimizer.space import Space


@dataclass(frozen=True)
class Problem:
    """All that a search method is told: what may vary and what is good, never how it is measured.

    ``open_loop``: requests are sent at a rate, whatever has been answered, instead of so many in flight.
    ``cpu_count``: of the machine that serves, where it serves on its CPU and that is known. ``confidence``: of the
    verdict on the constraints. ``fixed_shapes``: no input's size may differ from request to request, which decides
    when Triton's batcher looks at what has come.

    ``request_batch_size``: samples of a request, on average where ``request_mix`` says how many they have. To the
    ``space`` such requests are single samples, as many as they have together.
    """

    model: str
    space: Space
    request_batch_size: float
    max_concurrency: int
    objectives: tuple[Metric, ...] = field(default=(METRICS["throughput"],))
    constraints: tuple[Constraint, ...] = ()
    open_loop: bool = False
    cpu_count: int | None = None
    confidence: float = CONFIDENCE
    fixed_shapes: bool = True
    request_mix: Dim | None = None
