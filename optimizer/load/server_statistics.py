"""What the server itself says of a measurement."""

from __future__ import annotations

from contextlib import closing
from dataclasses import replace
from typing import TYPE_CHECKING

from objectives.metrics import Measurement
from optimizer import batch_stats
from optimizer.deploy.client import CallError, answers, open_client
from optimizer.interfaces import Endpoint
from optimizer.server_health import PROBE_SECONDS

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


def mean_batch_size(before: ModelStatistics | None, after: ModelStatistics | None) -> float | None:
    """Inferences per execution between two readings of the server's statistics."""
    if before is None or after is None:
        return None
    executions = int(after.execution_count - before.execution_count)
    inferences = int(after.inference_count - before.inference_count)
    if executions <= 0:
        return None
    return round(inferences / executions, 3)


def executions_by_size(before: ModelStatistics | None, after: ModelStatistics | None) -> list[batch_stats.Entry]:
    """Executions between two readings, by batch size; none where a reading is missing."""
    if before is None or after is None:
        return []
    was = {batch.batch_size: batch for batch in before.batch_stats}
    entries = []
    for batch in after.batch_stats:
        parts = (batch.compute_input, batch.compute_infer, batch.compute_output)
        executions, ns = batch.compute_infer.count, sum(part.ns for part in parts)
        if (old := was.get(batch.batch_size)) is not None:
            executions -= old.compute_infer.count
            ns -= sum(part.ns for part in (old.compute_input, old.compute_infer, old.compute_output))
        if executions > 0 and ns >= 0:
            entries.append((batch.batch_size, executions, ns))
    return entries


def read_statistics(endpoint: Endpoint, seconds: float = PROBE_SECONDS) -> ModelStatistics | None:
    """Of the model that batches, as they are now; None where the server does not tell within ``seconds``."""
    try:
        with closing(open_client(endpoint.connection)) as client:
            return client.statistics(endpoint.batcher or endpoint.model, seconds)
    except CallError:
        return None


def is_alive(endpoint: Endpoint, seconds: float = PROBE_SECONDS) -> bool:
    """Whether the server of ``endpoint`` answers within ``seconds``."""
    with closing(open_client(endpoint.connection)) as client:
        return answers(client, seconds)
