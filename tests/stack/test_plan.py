"""Compares predictions of `tune plan` from closed-loop measurements with the real server under Poisson load.

The assertions hold on a machine of any speed, because the model sleeps for most of its service time.
"""

from __future__ import annotations

import contextlib
from pathlib import Path

from objectives.metrics import Measurement
from objectives.sla import Sla
from optimizer.config.problem import Problem
from optimizer.config.search_space import SearchSpace
from optimizer.core.candidate import Candidate
from optimizer.core.endpoint import Endpoint
from optimizer.core.trial import LoadPoint, Trial
from optimizer.deploy import runtime
from optimizer.deploy.embedded_target import EmbeddedTarget
from optimizer.deploy.target_settings import TargetSettings
from optimizer.measure.load_client.arrivals import PoissonArrivals
from optimizer.measure.load_client.generators import OpenLoopGenerator
from optimizer.measure.load_client.open_loop import LateError
from optimizer.measure.perf_analyzer import LocalRunner, PerfAnalyzer
from optimizer.plan import traffic
from optimizer.plan.evidence import collect_evidence
from optimizer.plan.fleet import Fleet
from optimizer.plan.replica import fit_replica
from tests.generated_requests import write_requests
from tests.repositories import skip_without_python_models, stored, write_sleeper

SLEEP_MS = 40.0  # of a batch
CANDIDATE = Candidate(8, dynamic_batching=True)
LIMIT = CANDIDATE.max_batch_size * 1000 / SLEEP_MS  # requests a second that no machine exceeds
BOUND_MS = 500.0
SLA = Sla.from_bounds({"p95": BOUND_MS})
PROBLEM = Problem("sleeper", SearchSpace((8,), (0,), ("none",), (1,)), 1, 64, sla=SLA)
ATTEMPTS = 3


def measured(open_loop: OpenLoopGenerator, endpoint: Endpoint, rate: float) -> Measurement:
    """Measure, again if the load generator was late: such a measurement does not show the server's latency."""
    load = LoadPoint(1, request_rate=round(rate))
    for _ in range(ATTEMPTS - 1):
        with contextlib.suppress(LateError):
            return open_loop.measure(endpoint, load, 3.0)
    return open_loop.measure(endpoint, load, 3.0)


def test_latency_and_capacity_of_a_replica(tmp_path: Path) -> None:
    skip_without_python_models()
    write_sleeper(tmp_path / "models", SLEEP_MS)
    installed, source = runtime.ensure(print), stored(tmp_path / "models")("sleeper")
    requests = write_requests(source.config, tmp_path)
    perf_analyzer = PerfAnalyzer(
        installed.perf_analyzer,
        LocalRunner(installed.perf_analyzer_libraries),
        tmp_path / "perf_analyzer.log",
        requests,
    )
    open_loop = OpenLoopGenerator(log=tmp_path / "client.log", input_data=requests, sla=SLA)
    target = EmbeddedTarget(source, TargetSettings(tmp_path / "tritonserver.log"))
    with contextlib.closing(target), target.deploy(CANDIDATE) as endpoint:
        perf_analyzer.warm_up(endpoint, LoadPoint(1, 8))
        loads = [LoadPoint(1, concurrency) for concurrency in (2, 8, 24)]
        trial = Trial(0, CANDIDATE, tuple((load, perf_analyzer.measure(endpoint, load, 2.0)) for load in loads))
        replica = fit_replica(collect_evidence(CANDIDATE, PROBLEM, [[trial]], PoissonArrivals()), SLA)
        fleet, expected = Fleet(replica, traffic.PoissonTraffic(), "random"), replica.slowness_estimate.quantile(0.5)
        capacity = replica.capacity(expected)
        assert 0 < capacity < 1.2 * LIMIT

        rate = 0.4 * capacity
        result = measured(open_loop, endpoint, rate)
        predicted_ms = replica.latency_ms(fleet.simulate(rate, 1, expected), "latency-p95")
        print(f"at {rate:,.0f} requests/s p95 {result.latency_p95_ms} ms, predicted {predicted_ms:.2f} ms")
        assert not result.overloaded
        assert predicted_ms > SLEEP_MS / 2  # benchmarks/planning_errors.py compares predictions with measurements

        usual, safe = (fleet.highest_rate(1, replica.slowness_estimate.quantile(share)) for share in (0.5, 0.999))
        assert 0.3 * capacity < usual < capacity
        assert 0 < safe <= usual, "the measurements differ, and by how much depends on the machine"
        beyond = measured(open_loop, endpoint, 1.5 * LIMIT)
        assert beyond.overloaded or (beyond.latency_p95_ms or 0) > BOUND_MS
        assert not fleet.meets(1.5 * LIMIT, 1, expected)
