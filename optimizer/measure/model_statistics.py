"""The statistics that Triton keeps of a model: batches and times between two readings."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import closing
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from objectives import batch_stats, step_stats
from objectives.metrics import Measurement
from optimizer.core.endpoint import Endpoint
from optimizer.measure.server_calls import PROBE_SECONDS, open_client
from optimizer.measure.server_client import CallError

if TYPE_CHECKING:
    from google.protobuf.message import Message
    from tritonclient.grpc.service_pb2 import ModelStatistics


def with_all_statistics(
    measurement: Measurement,
    endpoint: Endpoint,
    before: Mapping[str, ModelStatistics],
    after: Mapping[str, ModelStatistics],
    *,
    with_times: bool = True,
) -> Measurement:
    """Return ``measurement`` with the statistics of ``with_statistics`` and those of each step.

    ``before`` and ``after`` are from ``read_all_statistics``. The steps of a model that streams stay unknown: Triton
    takes a request as served when the model has accepted it.
    """
    tuned = endpoint.tuned_model
    result = with_statistics(measurement, before.get(tuned), after.get(tuned), with_times=with_times)
    names = [name for name, _ in endpoint.steps]
    are_known = all(
        name in before and name in after and not _began_again(before[name], after[name]) for name in names
    )
    if measurement.is_streamed or not are_known:
        return result
    servers = len(endpoint.servers)
    steps = [_step(name, servers * count, before[name], after[name]) for name, count in endpoint.steps]
    return replace(result, step_stats=step_stats.to_text(steps))


def _step(name: str, instances: int, before: ModelStatistics, after: ModelStatistics) -> step_stats.StepStatistic:
    """Return the counters of one model between two readings."""
    first, last = before.inference_stats, after.inference_stats
    compute = ("compute_input", "compute_infer", "compute_output")
    return step_stats.StepStatistic(
        name,
        instances,
        requests=last.success.count - first.success.count,
        executions=after.execution_count - before.execution_count,
        queue_ns=last.queue.ns - first.queue.ns,
        compute_ns=sum(getattr(last, part).ns - getattr(first, part).ns for part in compute),
        busy_ns=sum(batch.compute_ns for batch in executions_by_size(before, after)),
    )


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
    return _read(endpoint, [endpoint.tuned_model]).get(endpoint.tuned_model)


def read_all_statistics(endpoint: Endpoint) -> dict[str, ModelStatistics]:
    """Return the current statistics of the model that batches and of each step, by name; empty as ``_read``."""
    return _read(endpoint, dict.fromkeys([endpoint.tuned_model, *(name for name, _ in endpoint.steps)]))


def _read(endpoint: Endpoint, models: Iterable[str]) -> dict[str, ModelStatistics]:
    """Return the statistics of ``models`` by name, summed over their versions and the servers.

    The result is empty if a server does not respond within PROBE_SECONDS, or does not serve one of them.
    """
    totals: dict[str, ModelStatistics] = {}
    for server in endpoint.servers:
        try:
            with closing(open_client(server.connection)) as client:
                read = {model: client.statistics(model, PROBE_SECONDS) for model in models}
        except CallError:
            return {}
        if not all(read.values()):
            return {}
        for model, versions in read.items():
            for statistics in versions:
                if model in totals:
                    add_statistics(totals[model], statistics)
                else:
                    totals[model] = statistics
    return totals


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
