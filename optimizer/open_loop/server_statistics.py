"""What the server itself says of a measurement."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from objectives.metrics import Measurement
from optimizer import batch_stats
from optimizer.perf_analyzer import executions_by_size, mean_batch_size

if TYPE_CHECKING:
    from tritonclient.grpc.service_pb2 import ModelStatistics


def with_statistics(
    measurement: Measurement, before: ModelStatistics | None, after: ModelStatistics | None
) -> Measurement:
    """``measurement`` with the batches that were executed between two readings, and a request's mean times."""
    if before is None or after is None:
        return measurement
    was, now = before.inference_stats, after.inference_stats
    requests = max(1, now.success.count - was.success.count)

    def mean_ms(name: str) -> float:
        return float((getattr(now, name).ns - getattr(was, name).ns) / requests / 1e6)

    return replace(
        measurement,
        mean_batch_size=mean_batch_size(before, after),
        batch_stats=batch_stats.to_text(executions_by_size(before, after)),
        queue_ms=mean_ms("queue"),
        compute_input_ms=mean_ms("compute_input"),
        compute_infer_ms=mean_ms("compute_infer"),
        compute_output_ms=mean_ms("compute_output"),
    )
