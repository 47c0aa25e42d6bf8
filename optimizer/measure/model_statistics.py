"""The statistics that Triton keeps of a model: batches and times between two readings."""

from __future__ import annotations

from contextlib import closing
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from objectives import batch_stats
from objectives.metrics import Measurement
from optimizer.core.endpoint import Endpoint
from optimizer.measure.server_calls import PROBE_SECONDS, open_client
from optimizer.measure.server_client import CallError

if TYPE_CHECKING:
    from google.protobuf.message import Message
    from tritonclient.grpc.service_pb2 import ModelStatistics


def with_statistics(
    measurement: Measurement,
    before: ModelStatistics | None,
    after: ModelStatistics | None,
    *,
    with_times: bool = True,
) -> Measurement:
    """Return ``measurement`` with the batches executed between two readings, and the mean times of a request.

    They stay unknown if a reading is missing, or if the counters began again between the two. Without
    ``with_times``, ``measurement`` keeps its times.
    """
    if before is None or after is None or _began_again(before, after):
        return measurement
    measurement = replace(
        measurement,
        mean_batch_size=mean_batch_size(before, after),
        batch_stats=batch_stats.to_text(executions_by_size(before, after)),
    )
    if not with_times:
        return measurement
    first, last = before.inference_stats, after.inference_stats
    requests = max(1, last.success.count - first.success.count)
    mean_times: dict[str, Any] = {
        f"{name}_ms": float((getattr(last, name).ns - getattr(first, name).ns) / requests / 1e6)
        for name in ("queue", "compute_input", "compute_infer", "compute_output")
    }
    return replace(measurement, **mean_times)


def _began_again(before: ModelStatistics, after: ModelStatistics) -> bool:
    """Return whether a counter fell, because another client reloaded the model or another server answers."""
    later = _counters(after)
    return any(count > later.get(name, 0) for name, count in _counters(before).items())


def _counters(statistics: ModelStatistics) -> dict[tuple[str, int], int]:
    """Return the counters of a model, by name and batch size; the size is 0 for those of all requests."""
    counters = {("inferences", 0): statistics.inference_count, ("executions", 0): statistics.execution_count}
    for part in (statistics.inference_stats, *statistics.batch_stats):
        size = getattr(part, "batch_size", 0)
        for field, value in part.ListFields():
            if field.message_type is not None:
                counters |= {(f"{field.name} count", size): value.count, (f"{field.name} ns", size): value.ns}
    return counters


def mean_batch_size(before: ModelStatistics, after: ModelStatistics) -> float | None:
    """Return the inferences per execution between two readings; None if there was no execution."""
    executions = int(after.execution_count - before.execution_count)
    inferences = int(after.inference_count - before.inference_count)
    if executions <= 0:
        return None
    return round(inferences / executions, 3)


def executions_by_size(before: ModelStatistics, after: ModelStatistics) -> list[batch_stats.BatchStatistic]:
    """Return the executions between two readings by batch size."""
    earlier = {batch.batch_size: batch for batch in before.batch_stats}
    entries = []
    for batch in after.batch_stats:
        parts = (batch.compute_input, batch.compute_infer, batch.compute_output)
        executions, ns = batch.compute_infer.count, sum(part.ns for part in parts)
        if (old := earlier.get(batch.batch_size)) is not None:
            executions -= old.compute_infer.count
            ns -= sum(part.ns for part in (old.compute_input, old.compute_infer, old.compute_output))
        if executions > 0 and ns >= 0:
            entries.append(batch_stats.BatchStatistic(batch.batch_size, executions, ns))
    return entries


def read_statistics(endpoint: Endpoint) -> ModelStatistics | None:
    """Return the current statistics of the model that batches, summed over its versions and the servers.

    The result is None if one of them does not respond within PROBE_SECONDS.
    """
    total: ModelStatistics | None = None
    for server in endpoint.servers:
        try:
            with closing(open_client(server.connection)) as client:
                versions = client.statistics(endpoint.batcher or endpoint.model, PROBE_SECONDS)
        except CallError:
            return None
        if not versions:
            return None
        for statistics in versions:
            if total is None:
                total = statistics
            else:
                add_statistics(total, statistics)
    return total


def completed_requests(endpoint: Endpoint) -> int:
    """Return how many requests the model that batches has completed so far, or refused; 0 if this is unknown."""
    statistics = read_statistics(endpoint)
    if statistics is None:
        return 0
    return int(statistics.inference_stats.success.count + statistics.inference_stats.fail.count)


def add_statistics(total: ModelStatistics, statistics: ModelStatistics) -> None:
    """Add the counters of another version or server to ``total``."""
    total.inference_count += statistics.inference_count
    total.execution_count += statistics.execution_count
    _add_durations(total.inference_stats, statistics.inference_stats)
    by_size = {batch.batch_size: batch for batch in total.batch_stats}
    for batch in statistics.batch_stats:
        if (total_of_size := by_size.get(batch.batch_size)) is None:
            total.batch_stats.append(batch)
        else:
            _add_durations(total_of_size, batch)


def _add_durations(total: Message, statistics: Message) -> None:
    """Add the counts and times of each field that is a StatisticDuration."""
    for field, duration in statistics.ListFields():
        if field.message_type is not None:
            total_duration = getattr(total, field.name)
            total_duration.count += duration.count
            total_duration.ns += duration.ns
