"""Read perf_analyzer's output and CSV file."""

from __future__ import annotations

import csv
import io
import math
import re

from objectives.metrics import Measurement
from optimizer.core.errors import MeasurementError
from optimizer.core.measurement_windows import MeasurementWindow
from optimizer.core.process import FinishedProcess, describe_exit_code, printed_lines
from optimizer.core.safe_text import shorten
from optimizer.measure.server_errors import why_request_failed

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

    Raises MeasurementError if the text is no such CSV or a value is negative or not finite.
    """
    try:
        (row,) = csv.DictReader(io.StringIO(text))
        values = {field: _non_negative(row[column]) / 1000 for column, field in _US_COLUMNS.items()}
        return Measurement(throughput_infer_per_sec=_non_negative(row["Inferences/Second"]), **values)  # type: ignore[arg-type]
    except (KeyError, ValueError, TypeError, csv.Error) as error:
        raise MeasurementError(f"perf_analyzer wrote a CSV that cannot be read: {shorten(text, 80)}") from error


def has_failed_request(output: str) -> bool:
    """Return whether perf_analyzer printed the error with which the server answered a request."""
    return "had error" in output


def failure_text(done: FinishedProcess) -> str:
    """Return why a run of perf_analyzer has no results."""
    if done.exit_code is None:
        return f"perf_analyzer did not end in time and was killed after {done.seconds:.0f} s"
    how = "wrote no results" if done.exit_code == 0 else f"ended with {describe_exit_code(done.exit_code)}"
    return f"perf_analyzer {how}: {_last_error(done.output)}"


def _non_negative(text: str) -> float:
    value = float(text)
    if not 0 <= value < math.inf:
        raise ValueError(f"{value} is not a rate or a time")
    return value


def _last_error(output: str) -> str:
    """Return why the first request failed, otherwise the last line with an error, otherwise the last line."""
    if request := re.search(r"had error: (.{1,2000})", output, re.DOTALL):
        return why_request_failed(request[1].partition("\nThread [")[0])
    lines = printed_lines(output)
    errors = [line for line in lines if re.search("error|fail|unable|invalid", line, re.IGNORECASE)]
    return shorten((errors or lines)[-1], 200)
