"""What perf_analyzer prints and writes."""

from __future__ import annotations

import csv
import io
import math
import re

from objectives.metrics import Measurement
from optimizer.errors import MeasurementError
from optimizer.load.windows import Window
from optimizer.process import Finished, ending
from optimizer.server_health import cause, shortened

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


def read_windows(output: str) -> list[Window]:
    """The passes of a verbose run with ``--percentile 95``."""
    number = r"(\d{1,15}(?:\.\d{1,15})?(?:e[+-]?\d{1,2})?)"
    found = re.findall(rf"Pass \[\d+\] throughput: {number} infer/sec\. p95 latency: (\d{{1,15}}) usec", output)
    return [Window(float(throughput), int(latency_us) / 1000) for throughput, latency_us in found]


def read_request_count(output: str) -> int | None:
    match = re.search(r"Request count: (\d{1,15})\b", output)
    return int(match[1]) if match else None


def read_average_ms(output: str) -> float | None:
    """With a percentile asked for, the client's average stands only in the line of the protocol."""
    match = re.search(r"Avg (?:gRPC|HTTP) time: (\d{1,15}) usec", output)
    return int(match[1]) / 1000 if match else None


def read_csv(text: str) -> Measurement:
    """perf_analyzer's CSV of one load. Raises MeasurementError where it is not one, or its figures cannot be."""
    try:
        (row,) = csv.DictReader(io.StringIO(text))
        values = {field: _figure(row[column]) / 1000 for column, field in _US_COLUMNS.items()}
        return Measurement(throughput_infer_per_sec=_figure(row["Inferences/Second"]), **values)  # type: ignore[arg-type]
    except (KeyError, ValueError, TypeError, csv.Error) as error:
        raise MeasurementError(f"perf_analyzer wrote a CSV that cannot be read: {shortened(text, 80)}") from error


def fault(done: Finished) -> str:
    """Why a launch gave no figures."""
    if done.exit_code is None:
        return f"perf_analyzer had to be killed after {done.seconds:.0f} s"
    how = "wrote no figures" if done.exit_code == 0 else f"ended with {ending(done.exit_code)}"
    return f"perf_analyzer {how}: {_last_words(done.output)}"


def _figure(text: str) -> float:
    value = float(text)
    if not 0 <= value < math.inf:
        raise ValueError(f"{value} is no rate and no time")
    return value


def _last_words(output: str) -> str:
    """Why the first request failed, else the last line that tells of a fault, else the last line."""
    if request := re.search(r"had error: (.{1,2000})", output, re.DOTALL):
        return cause(request[1].partition("\nThread [")[0])
    lines = [line for line in output.splitlines() if line.strip()]
    told = [line for line in lines if re.search("error|fail|unable|invalid", line, re.IGNORECASE)]
    return shortened((told or lines or ["it printed nothing"])[-1], 200)
