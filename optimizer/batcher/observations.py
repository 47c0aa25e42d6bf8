"""What a measurement says of service times, as calibration takes it."""

from __future__ import annotations

from optimizer import batch_stats
from optimizer.batcher.calibration import BatchStatistics, Observation
from optimizer.trial import Point


def observation(point: Point) -> Observation | None:
    """What a measured point says of service times; None where the server told nothing.

    Where executions were counted by batch size (``batch_stats``), those; else all executions count as being of
    the mean size. They took as long as so many samples take at the throughput: executions are counted from before
    the load began until after it ended, throughput in the windows between.
    """
    throughput = point.measurement.throughput_infer_per_sec
    counted = read_batch_stats(point.measurement.batch_stats) or _of_means(point)
    batches = tuple(batch for batch in counted if batch.executions > 0 and batch.compute_ns > 0)
    if not throughput or not batches:
        return None
    wall_s = sum(batch.executions * batch.batch_size for batch in counted) / throughput
    load = point.load
    batch = round(load.request_batch_size)
    return Observation(point.candidate.instances, load.concurrency, wall_s, batches, batch)


def read_batch_stats(text: str) -> tuple[BatchStatistics, ...]:
    """As ``batch_stats.from_text``. Raises ValueError."""
    return tuple(BatchStatistics(*entry) for entry in batch_stats.from_text(text))


def _of_means(point: Point) -> tuple[BatchStatistics, ...]:
    m, batch = point.measurement, round(point.load.request_batch_size)
    if m.compute_infer_ms is None or not m.mean_batch_size or not m.requests:
        return ()
    computed_ms = m.compute_infer_ms + (m.compute_input_ms or 0) + (m.compute_output_ms or 0)
    executions = max(1, round(m.requests * batch / m.mean_batch_size))
    size = max(batch, batch * round(m.mean_batch_size / batch))
    return (BatchStatistics(size, executions, round(computed_ms * 1e6 * executions)),)
