"""Read perf_analyzer's output and CSV file, and the server's statistics of the same time."""

from __future__ import annotations

import csv
import io
import math
import re
from contextlib import closing
from dataclasses import replace
from typing import TYPE_CHECKING

from objectives import batch_stats
from objectives.metrics import Measurement
from optimizer.core.endpoint import Endpoint
from optimizer.core.errors import MeasurementError
from optimizer.core.measurement_windows import MeasurementWindow
from optimizer.core.process import FinishedProcess, describe_exit_code
from optimizer.core.safe_text import shorten
from optimizer.measure.failure_causes import without_traceback
from optimizer.measure.server_calls import PROBE_SECONDS, open_client
from optimizer.measure.server_client import CallError

if TYPE_CHECKING:
    from google.protobuf.message import Message
    from tritonclient.grpc.service_pb2 import ModelStatistics


_US_COLUMNS = {
    "Client Send": "client_send_ms",
    "Network+Server Send/Recv": "network_ms",
    "Server Queue": "queue_ms",
    "Server Compute Input": "compute_input_ms",
    "Server Compute Infer": "compute_infer_ms",
    "Server Compute Output": "compute_output_ms",
    "Client Recv": "client_recv_ms",
    "p50 latency": "latency_p50_ms",
    "p90 latency": "latency_p90_ms",
    "p95 latency": "latency_p95_ms",
    "p99 latency": "latency_p99_ms",
}


def read_windows(output: str) -> list[MeasurementWindow]:
    """Return the windows (passes) in the output of a verbose run with ``--percentile 95``."""
    number = r"(\d{1,15}(?:\.\d{1,15})?(?:e[+-]?\d{1,2})?)"
    passes = re.findall(rf"Pass \[\d+\] throughput: {number} infer/sec\. p95 latency: (\d{{1,15}}) usec", output)
    return [MeasurementWindow(float(throughput), int(latency_us) / 1000) for throughput, latency_us in passes]


def read_request_count(output: str) -> int | None:
    """Return the number of measured requests; None if the output does not say."""
    match = re.search(r"Request count: (\d{1,15})\b", output)
    return int(match[1]) if match else None


def read_average_ms(output: str) -> float | None:
    """Return the client's average latency.

    With ``--percentile`` perf_analyzer prints it only in the line of the protocol.
    """
    match = re.search(r"Avg (?:gRPC|HTTP) time: (\d{1,15}) usec", output)
    return int(match[1]) / 1000 if match else None


def read_csv(text: str) -> Measurement:
    """Return the measurement in perf_analyzer's CSV of one load.

    Raises MeasurementError if the text is no such CSV or a figure is negative or not finite.
    """
    try:
        (row,) = csv.DictReader(io.StringIO(text))
        values = {field: _non_negative(row[column]) / 1000 for column, field in _US_COLUMNS.items()}
        return Measurement(throughput_infer_per_sec=_non_negative(row["Inferences/Second"]), **values)  # type: ignore[arg-type]
    except (KeyError, ValueError, TypeError, csv.Error) as error:
        raise MeasurementError(f"perf_analyzer wrote a CSV that cannot be read: {shorten(text, 80)}") from error


def failure_text(done: FinishedProcess) -> str:
    """Return why a run of perf_analyzer has no results."""
    if done.exit_code is None:
        return f"perf_analyzer did not end in time and was killed after {done.seconds:.0f} s"
    how = "wrote no figures" if done.exit_code == 0 else f"ended with {describe_exit_code(done.exit_code)}"
    return f"perf_analyzer {how}: {_last_error(done.output)}"


def _non_negative(text: str) -> float:
    value = float(text)
    if not 0 <= value < math.inf:
        raise ValueError(f"{value} is not a rate or a time")
    return value


def _last_error(output: str) -> str:
    """Return why the first request failed, otherwise the last line with an error, otherwise the last line."""
    if request := re.search(r"had error: (.{1,2000})", output, re.DOTALL):
        return without_traceback(request[1].partition("\nThread [")[0])
    lines = [line for line in output.splitlines() if line.strip()]
    errors = [line for line in lines if re.search("error|fail|unable|invalid", line, re.IGNORECASE)]
    return shorten((errors or lines or ["it printed nothing"])[-1], 200)


def with_statistics(
    measurement: Measurement, before: ModelStatistics | None, after: ModelStatistics | None, *, times: bool = True
) -> Measurement:
    """Return ``measurement`` with the batches executed between two readings, and with ``times`` a request's times."""
    if before is None or after is None:
        return measurement
    measurement = replace(
        measurement,
        mean_batch_size=mean_batch_size(before, after),
        batch_stats=batch_stats.to_text(executions_by_size(before, after)),
    )
    if not times:
        return measurement
    first, last = before.inference_stats, after.inference_stats
    requests = max(1, last.success.count - first.success.count)

    def mean_ms(name: str) -> float:
        return float((getattr(last, name).ns - getattr(first, name).ns) / requests / 1e6)

    return replace(
        measurement,
        queue_ms=mean_ms("queue"),
        compute_input_ms=mean_ms("compute_input"),
        compute_infer_ms=mean_ms("compute_infer"),
        compute_output_ms=mean_ms("compute_output"),
    )


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
    """Return the current statistics of the model that batches, summed over the servers of ``endpoint``.

    The result is None if one of them does not respond within PROBE_SECONDS.
    """
    total: ModelStatistics | None = None
    for server in endpoint.servers:
        try:
            with closing(open_client(server.connection)) as client:
                statistics = client.statistics(endpoint.batcher or endpoint.model, PROBE_SECONDS)
        except CallError:
            return None
        if statistics is None:
            return None
        if total is None:
            total = statistics
        else:
            add_statistics(total, statistics)
    return total


def add_statistics(total: ModelStatistics, statistics: ModelStatistics) -> None:
    """Add the counters of one server to ``total``."""
    total.inference_count += statistics.inference_count
    total.execution_count += statistics.execution_count
    _add_durations(total.inference_stats, statistics.inference_stats)
    by_size = {batch.batch_size: batch for batch in total.batch_stats}
    for batch in statistics.batch_stats:
        if (own := by_size.get(batch.batch_size)) is None:
            total.batch_stats.append(batch)
        else:
            _add_durations(own, batch)


def _add_durations(total: Message, statistics: Message) -> None:
    """Add the counts and times of each field that is a StatisticDuration."""
    for field, duration in statistics.ListFields():
        if field.message_type is not None:
            own = getattr(total, field.name)
            own.count += duration.count
            own.ns += duration.ns
