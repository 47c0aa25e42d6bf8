"""Calibration of the simulator from a real server, and perf_analyzer's load, for ``simulator_proof.py``."""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

from objectives.metrics import Measurement
from optimizer.core.candidate import Candidate
from optimizer.simulator.calibration import Observation
from optimizer.simulator.scenario import OpenLoopLoad, Overheads

NORMAL_P95 = 1.6449  # the 95th percentile of the standard normal distribution


def perf_analyzer_load(
    requests_per_s: float,
    seconds: float,
    *,
    poisson: bool = False,
    schedule_s: float | None = None,
    threads: int = 1,
) -> OpenLoopLoad:
    """Return what perf_analyzer sends in its first ``seconds`` with ``--request-rate-range``.

    Its Poisson schedule comes from a generator with a fixed seed, so it is the same in every run. The schedule is
    ``schedule_s`` long (``--measurement-interval`` times ``--max-trials``), has equally many requests for each of
    ``threads`` (``--max-threads``), and is then repeated.
    """
    if not poisson:
        period_ns = int(1e9 / requests_per_s)
        count = max(1, int(seconds * 1e9) // period_ns)
        return OpenLoopLoad(np.arange(1, count + 1, dtype=np.float64) * (period_ns / 1e9))
    length_s = seconds if schedule_s is None else schedule_s
    drawn_s = np.cumsum(_exponential_ns(requests_per_s, int(2 * length_s * requests_per_s) + 100)) / 1e9
    count = int(np.searchsorted(drawn_s, length_s)) + 1
    schedule = drawn_s[: count + -count % threads]
    rounds = np.arange(int(seconds / schedule[-1]) + 1, dtype=np.float64) * schedule[-1]
    sends = (rounds[:, None] + schedule).ravel()
    return OpenLoopLoad(sends[: max(1, int(np.searchsorted(sends, seconds)))])


def _exponential_ns(rate_per_s: float, count: int) -> npt.NDArray[np.int64]:
    """Return what ``std::exponential_distribution`` draws from a new ``std::mt19937`` (GNU library)."""
    words = np.random.RandomState(5489).randint(0, 2**32, size=(count, 2), dtype=np.uint32).astype(np.float64)
    uniform = (words[:, 0] + words[:, 1] * 2.0**32) / 2.0**64
    return (-np.log(1 - uniform) / rate_per_s * 1e9).astype(np.int64)


def estimate_overheads(
    candidate: Candidate, request_batch_size: int, single: Measurement, release_s: float = 0.0
) -> Overheads:
    """Return the overheads that explain the latencies of a single client (concurrency 1) on ``candidate``.

    Time outside queue and computation is split equally between request and response. Waking the batcher and waking
    the instance take equally long.

    Raises:
        ValueError: Latency, queue or compute time is unknown.
    """
    if single.latency_avg_ms is None or single.queue_ms is None or single.compute_infer_ms is None:
        raise ValueError("calibration: latency, queue or compute time of a single client is unknown")
    latency, queue = single.latency_avg_ms / 1e3, single.queue_ms / 1e3
    computed = (single.compute_infer_ms + (single.compute_input_ms or 0) + (single.compute_output_ms or 0)) / 1e3
    network = max(0.0, latency - queue - computed)
    client = 0.0
    if single.throughput_infer_per_sec:
        client = max(0.0, request_batch_size / single.throughput_infer_per_sec - latency)
    waking = max(0.0, queue - _delay_of_single_request_s(candidate, request_batch_size))
    each = waking / 2 if candidate.dynamic_batching else waking
    return Overheads(network / 2, network / 2, client, 0.0, each, each, release_s)


def _delay_of_single_request_s(candidate: Candidate, request_batch_size: int) -> float:
    sizes = candidate.preferred_batch_sizes or (candidate.max_batch_size,)
    if not candidate.dynamic_batching or request_batch_size in sizes or request_batch_size >= max(sizes):
        return 0.0
    return candidate.max_queue_delay_us / 1e6


def estimate_jitter(single: Measurement) -> float:
    """Return the relative standard deviation of service times that explains the latencies of a single client.

    Raises:
        ValueError: Latency quantiles or the compute time are unknown.
    """
    p50, p95, computed = single.latency_p50_ms, single.latency_p95_ms, single.compute_infer_ms
    if p50 is None or p95 is None or not computed:
        raise ValueError("calibration: latency quantiles or compute time of a single client are unknown")
    sigma = math.log1p(max(0.0, p95 - p50) / computed) / NORMAL_P95
    return math.sqrt(math.expm1(sigma**2))


def estimate_release_s(saturated: Observation) -> float:
    """Return how long instances idle between two executions under a saturating load.

    Raises:
        ValueError: There were no executions.
    """
    executions = sum(b.executions for b in saturated.batches)
    computed = sum(b.compute_ns for b in saturated.batches) / 1e9
    if not executions:
        raise ValueError("calibration: no executions in the statistics")
    return max(0.0, (saturated.instance_count * saturated.wall_s - computed) / executions)
