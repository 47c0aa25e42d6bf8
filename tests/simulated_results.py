"""Measurements of simulated servers."""

from __future__ import annotations

from objectives.metrics import Measurement
from optimizer.core.candidate import Candidate
from optimizer.simulator.scenario import SimulationResult

REQUESTS = 500


def measurement_of(simulated: SimulationResult, candidate: Candidate) -> Measurement:
    """Return what perf_analyzer and the server's statistics would report for a simulated server."""
    compute_s = simulated.utilization * candidate.instance_count * simulated.mean_batch_size
    return Measurement(
        simulated.throughput_infer_per_sec,
        latency_avg_ms=simulated.latency_avg_s * 1e3,
        latency_p95_ms=simulated.latency_p95_s * 1e3,
        queue_ms=simulated.queue_avg_s * 1e3,
        compute_input_ms=0.0,
        compute_infer_ms=compute_s / simulated.throughput_infer_per_sec * 1e3,
        compute_output_ms=0.0,
        mean_batch_size=simulated.mean_batch_size,
        requests=REQUESTS,
        stable=True,
    )
