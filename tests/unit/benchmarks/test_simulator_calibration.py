"""The calibration of the simulator for ``benchmarks/simulator_proof.py``: known overheads are recovered."""

from __future__ import annotations

import numpy as np
import pytest

from lib.simulator_calibration import estimate_jitter, estimate_overheads, estimate_release_s, perf_analyzer_load
from objectives.metrics import Measurement
from optimizer.core.candidate import Candidate
from optimizer.simulator.calibration import Observation
from optimizer.simulator.scenario import ClosedLoopLoad, MeasurementInterval, Overheads
from optimizer.simulator.simulate import lognormal_jitter
from tests.simulation import linear_times, observed_deployment, simulate

MS = 1e-3


def test_poisson_requests_are_sent_as_perf_analyzer_sends_them() -> None:
    """Expect the first five values of ``std::exponential_distribution<>(800)`` on a new ``std::mt19937``."""
    load = perf_analyzer_load(800, 10.0, poisson=True)
    assert np.round(load.arrivals_s[:5] * 1e9).tolist() == [181971, 2434298, 6771187, 7083421, 7543934]
    assert len(load.arrivals_s) == pytest.approx(8000, rel=0.05)
    assert load.arrivals_s[-1] < 10.0


def test_a_schedule_that_ends_starts_again() -> None:
    once = perf_analyzer_load(100, 1.0, poisson=True, schedule_s=1.0).arrivals_s
    again = perf_analyzer_load(100, 3.0, poisson=True, schedule_s=1.0, threads=2).arrivals_s
    assert again[: len(once)] == pytest.approx(once)
    period = len(once) + (2 - len(once) % 2)  # the request that passes the end, and equally many for each thread
    assert again[period : 2 * period] == pytest.approx(again[:period] + again[period - 1])
    assert (np.diff(again) >= 0).all()


def test_constant_requests_come_a_period_apart() -> None:
    assert perf_analyzer_load(250, 0.02).arrivals_s == pytest.approx([0.004, 0.008, 0.012, 0.016, 0.020])


@pytest.mark.parametrize("candidate", [Candidate(1), Candidate(8, True), Candidate(8, True, 2000, (4, 8))])
def test_overheads_are_recovered_from_a_single_client(candidate: Candidate) -> None:
    batched = candidate.dynamic_batching
    truth = Overheads(0.1 * MS, 0.1 * MS, 0.03 * MS, 0, 0.05 * MS if batched else 0, 0.05 * MS)
    result = simulate(candidate, ClosedLoopLoad(1), linear_times(3 * MS, 0, 8), truth)
    measured = Measurement(
        throughput_infer_per_sec=result.throughput_infer_per_sec,
        latency_avg_ms=1e3 * result.latency_avg_s,
        queue_ms=1e3 * result.queue_avg_s,
        compute_input_ms=0.5,
        compute_infer_ms=2.0,
        compute_output_ms=0.5,
    )
    estimate = estimate_overheads(candidate, 1, measured)
    for name in ("send_s", "receive_s", "client_s", "dispatch_s"):
        assert getattr(estimate, name) == pytest.approx(getattr(truth, name), abs=1e-6), name
    with pytest.raises(ValueError, match="unknown"):
        estimate_overheads(candidate, 1, Measurement())


def test_the_spread_of_service_times_is_seen_in_a_single_client_s_latencies() -> None:
    result = simulate(
        Candidate(1),
        ClosedLoopLoad(1),
        linear_times(3 * MS, 0, 1),
        jitter=lognormal_jitter(0.2),
        interval=MeasurementInterval(0, 4000),
    )
    measured = Measurement(
        latency_p50_ms=1e3 * result.latency_p50_s, latency_p95_ms=1e3 * result.latency_p95_s, compute_infer_ms=3.0
    )
    assert estimate_jitter(measured) == pytest.approx(0.2, rel=0.05)
    with pytest.raises(ValueError, match="unknown"):
        estimate_jitter(Measurement())


def test_the_release_time_is_recovered_from_a_saturating_load() -> None:
    over = Overheads(release_s=0.2 * MS)
    truth = linear_times(2 * MS, 0.25 * MS, 8, 2)
    assert estimate_release_s(observed_deployment(truth, Candidate(8, True, 0, (), 2), 64, over)) == pytest.approx(
        0.2 * MS, rel=0.1
    )
    with pytest.raises(ValueError, match="no executions"):
        estimate_release_s(Observation(1, 1, 1.0, ()))
