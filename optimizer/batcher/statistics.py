"""The server's statistics of a measurement, as calibration takes them."""

from __future__ import annotations

from optimizer.batcher.calibration import BatchStatistics, Observation
from optimizer.trial import Point


def observation(point: Point) -> Observation | None:
    """What a measured point says of service times; None where the server told nothing.

    Where executions were counted by batch size (``batch_stats``), those; else all executions count as being of
    the mean size.
    """
    m, batch = point.measurement, point.load.request_batch_size
    if not m.throughput_infer_per_sec or not m.requests:
        return None
    wall_s = m.requests * batch / m.throughput_infer_per_sec
    batches = read_batch_stats(m.batch_stats) or _of_means(point)
    if not batches:
        return None
    return Observation(point.candidate.instance_count, point.load.concurrency, wall_s, batches, batch)


def read_batch_stats(text: str) -> tuple[BatchStatistics, ...]:
    """``size:executions:compute_ns`` for each batch size, separated by spaces. Raises ValueError."""
    entries = [[int(number) for number in entry.split(":")] for entry in text.split()]
    return tuple(BatchStatistics(size, executions, compute_ns) for size, executions, compute_ns in entries)


def _of_means(point: Point) -> tuple[BatchStatistics, ...]:
    m, batch = point.measurement, point.load.request_batch_size
    if m.compute_infer_ms is None or not m.mean_batch_size or not m.requests:
        return ()
    computed_ms = m.compute_infer_ms + (m.compute_input_ms or 0) + (m.compute_output_ms or 0)
    executions = max(1, round(m.requests * batch / m.mean_batch_size))
    size = max(batch, batch * round(m.mean_batch_size / batch))
    return (BatchStatistics(size, executions, round(computed_ms * 1e6 * executions)),)
