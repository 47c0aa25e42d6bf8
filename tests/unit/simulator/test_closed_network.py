"""The closed queueing network: its bounds, its fit to few measurements, and its prediction of streaming latencies."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from objectives.metrics import METRICS
from objectives.sla import Sla
from optimizer.config.problem import ModelKind, Problem
from optimizer.config.search_space import SearchSpace
from optimizer.core.candidate import Candidate
from optimizer.simulator.closed_network import MEDIANS, ClosedNetwork, fit
from optimizer.simulator.performance_model import fit_model, sample_models
from optimizer.simulator.predicted_metrics import binding_latency, is_complete, latency_bounds_s, predicted_latencies
from tests.simulation import measured_points

LATENCIES = ("ttft-p95", "itl-p95", "latency-p95")
SIZE = len(MEDIANS) + 1 + len(LATENCIES)
SPACE = SearchSpace((2, 4, 8, 16, 32), (0, 1000), instance_count=(1, 2, 4))
BOUNDS = Sla.from_bounds({"ttft-p95": 200.0, "itl-p95": 30.0})
PROBLEM = Problem("m", SPACE, 1, 64, sla=BOUNDS, kind=ModelKind.STREAMING)
LOADS = (1, 2, 4, 8, 16, 32, 64)


def batched(size: int, instances: int = 1) -> Candidate:
    return Candidate(size, True, instance_count=instances)


def network(place: Sequence[float] = (0.0,) * SIZE) -> ClosedNetwork:
    return ClosedNetwork(LATENCIES, 1, 0.1, np.array(place), np.eye(SIZE))


places = st.lists(st.floats(-2, 2), min_size=SIZE, max_size=SIZE)
candidates = st.builds(batched, st.sampled_from(SPACE.max_batch_size), st.sampled_from(SPACE.instance_count))


@given(places, candidates)
def test_the_throughput_is_within_the_asymptotic_bounds(place: list[float], candidate: Candidate) -> None:
    results = network(place).simulate([(candidate, load) for load in LOADS])
    throughputs = np.array([result.throughput_infer_per_sec for result in results])
    assert (throughputs <= np.array(LOADS) * throughputs[0] * 1.02).all(), "at most n / R"
    assert (np.diff(throughputs) > -1e-9 * throughputs[0]).all() or candidate.instance_count > 1
    assert all(0 < result.utilization <= 1 for result in results)
    assert all(0.999 < result.mean_batch_size <= load for result, load in zip(results, LOADS, strict=True))


@given(places, candidates)
def test_a_queue_delays_the_first_response_but_not_the_further_ones(place: list[float], candidate: Candidate) -> None:
    full = 256 * candidate.max_batch_size * candidate.instance_count
    before, after = network(place).simulate([(candidate, full), (candidate, 2 * full)])
    assert after.latency_s("itl-p95") == pytest.approx(before.latency_s("itl-p95"), rel=1e-3)
    assert after.latency_s("ttft-p95") > 1.5 * before.latency_s("ttft-p95")
    assert after.latency_s("latency-p95") == pytest.approx(2 * before.latency_s("latency-p95"), rel=0.01)


def test_more_slots_raise_the_throughput_up_to_a_saturation() -> None:
    results = network().simulate([(batched(size), 64) for size in SPACE.max_batch_size])
    throughputs = np.array([result.throughput_infer_per_sec for result in results])
    gains = throughputs[1:] / throughputs[:-1]
    assert (gains > 1).all()
    assert (np.diff(gains) < 0).all()


def test_a_few_measurements_predict_other_loads_and_batches() -> None:
    truth = network([0.3, 1.2, 0.5, 0.0, 0.2, 0.4, 0.3, -0.5, 0.2])
    measured = [(batched(4), load) for load in (1, 4, 16)] + [(batched(32), load) for load in (8, 32)]
    fitted = fit(measured_points(truth, measured, LATENCIES, noise=0.05), PROBLEM, LATENCIES)
    cells = [(batched(16), 16), (batched(8), 64)]
    for predicted, true in zip(fitted.simulate(cells), truth.simulate(cells), strict=True):
        assert predicted.throughput_infer_per_sec == pytest.approx(true.throughput_infer_per_sec, rel=0.15)
        for latency in LATENCIES:
            assert predicted.latency_s(latency) == pytest.approx(true.latency_s(latency), rel=0.3)


def test_one_outlier_hardly_changes_the_fit() -> None:
    cells = [(batched(size), load) for size in (4, 32) for load in (1, 4, 16)]
    points = measured_points(network(), cells, LATENCIES)
    wrong = replace(points[2].measurement, throughput_infer_per_sec=points[2].throughput_infer_per_sec / 5)
    disturbed = [*points[:2], replace(points[2], measurement=wrong), *points[3:]]
    cell = [(batched(16), 16)]
    (usual,), (other,) = (
        fit(fitted_points, PROBLEM, LATENCIES).simulate(cell) for fitted_points in (points, disturbed)
    )
    assert other.throughput_infer_per_sec == pytest.approx(usual.throughput_infer_per_sec, rel=0.2)


def test_samples_agree_where_it_was_measured_and_differ_elsewhere() -> None:
    points = measured_points(network(), [(batched(4), load) for load in (1, 2, 4, 8)], LATENCIES)
    model = fit_model(points, PROBLEM, LATENCIES, 0)
    samples = sample_models(model, points, PROBLEM, LATENCIES, 24)
    logs = np.log(
        [
            [result.throughput_infer_per_sec for result in sample.simulate([(batched(4), 4), (batched(32, 4), 64)])]
            for sample in samples
        ]
    )
    near, far = logs.std(axis=0)
    assert near < 0.2 < far


def test_the_fit_needs_a_measurement() -> None:
    with pytest.raises(ValueError, match="no measured points"):
        fit([], PROBLEM, LATENCIES)


def test_all_bounded_latencies_are_predicted_without_a_simulator() -> None:
    points = measured_points(network(), [(batched(4), 4), (batched(4), 64)], LATENCIES)
    assert set(predicted_latencies(PROBLEM, points)) == {"ttft-p95", "itl-p95"}
    assert predicted_latencies(PROBLEM, points)[0] == binding_latency(PROBLEM, points)
    assert predicted_latencies(replace(PROBLEM, sla=Sla()), points) == ("latency-p95",)
    simulated = replace(PROBLEM, kind=ModelKind.BATCHED, sla=Sla.from_bounds({"p95": 20.0, "p99": 90.0}))
    assert predicted_latencies(simulated, points) == ("latency-p95",)
    assert latency_bounds_s(PROBLEM, ("itl-p95", "latency-p95")).tolist() == pytest.approx([0.03, np.inf])


def test_a_point_is_complete_with_all_latencies() -> None:
    (point,) = measured_points(network(), [(batched(4), 4)], LATENCIES)
    assert is_complete(point, *LATENCIES)
    assert not is_complete(point, "ttft-p99", "itl-p95")
    assert METRICS["ttft-p99"].value(point.measurement) is None


def test_any_percentile_is_predicted_between_and_beyond_the_known_tails() -> None:
    latencies = ("latency-p90", "latency-p93", "latency-p95", "latency-p99", "latency-p99.9")
    size = len(MEDIANS) + 1 + len(latencies)
    model = ClosedNetwork(latencies, 1, 0.1, np.zeros(size), np.eye(size))
    (result,) = model.simulate([(batched(8), 16)])
    predicted = [result.latency_s(latency) for latency in latencies]
    assert predicted == sorted(predicted)
    assert len(set(predicted)) == len(latencies)
