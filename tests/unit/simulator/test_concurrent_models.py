"""The simulator of a server whose models get load at the same time, fitted to what another such server measured."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from objectives import model_stats
from objectives.metrics import METRICS
from objectives.sla import Sla
from optimizer.config.problem import ConcurrentModel, Problem
from optimizer.config.search_space import SearchSpace
from optimizer.core.candidate import Candidate
from optimizer.core.trial import LoadPoint, Point, Trial
from optimizer.measure.combined_load import combine_models
from optimizer.search.candidate_selector import fit_surrogate
from optimizer.simulator.concurrent_models import ConcurrentServerModel, fit
from optimizer.simulator.dynamic_batching_model import DynamicBatchingModel, simulated_measurement
from optimizer.simulator.fitted_parameters import FittedOverheads
from optimizer.simulator.performance_model import fit_simulator, sample_models
from optimizer.simulator.predicted_metrics import (
    ConfigurationLoad,
    as_closed_loop,
    configuration_loads,
    log_measurements,
    log_predictions,
)
from optimizer.simulator.scenario import Scenario
from optimizer.simulator.simulate import simulate_many, trace
from tests.simulation import constant, poisson_load

DELAY, COUNT, PREFERRED = (
    f"second/{name}" for name in ("max_queue_delay_microseconds", "instance_group_count", "preferred_batch_size")
)
INNER = "inner/instance_group_count"
SPACE = SearchSpace((8,), ("off", 0), ("none",), (1, 2), fields={DELAY: ("off", 0), COUNT: (1, 2)})
OTHER = ConcurrentModel("second", 3.0, Candidate(8))
PROBLEM = Problem("first", SPACE, 1, 64, sla=Sla.from_bounds({"p95": 150.0}), concurrent=(OTHER,))
P95 = "latency-p95"


def server(milliseconds: float) -> DynamicBatchingModel:
    """Return a model that executes each batch in the same time."""
    return DynamicBatchingModel(lambda _: constant(milliseconds / 1e3), 1, FittedOverheads(1e-3))


SERVER = ConcurrentServerModel(PROBLEM, (server(8), server(16)))


def candidate(batches: bool, instances: int, delay: str | int, count: int) -> Candidate:
    return Candidate(8, batches, instance_count=instances, fields=((COUNT, count), (DELAY, delay)))


def measured(loads: list[ConfigurationLoad]) -> list[Point]:
    """Return the measurements of SERVER by its load generators."""
    measurements = SERVER.measure(loads)
    return [Point(0, tried, LoadPoint(1, n), m) for (tried, n), m in zip(loads, measurements, strict=True)]


def test_each_model_has_its_own_settings_and_its_share_of_the_load() -> None:
    """One instance executes 125 and 62.5 requests a second, and a batch of eight in the same time."""
    one_by_one, batched = SERVER.simulate([(candidate(False, 1, "off", 1), 32), (candidate(False, 1, 0, 2), 32)])
    assert [r.throughput_infer_per_sec for r in one_by_one.by_model] == pytest.approx([125, 62.5], rel=0.05)
    assert [r.throughput_infer_per_sec for r in batched.by_model] == pytest.approx([125, 1000], rel=0.05)
    assert batched.throughput_infer_per_sec == pytest.approx(1125, rel=0.05)
    assert one_by_one.latency_s(P95) == pytest.approx(3 * 32 / 62.5, rel=0.1), "the slower model has 96 in flight"
    assert batched.latency_s(P95) == pytest.approx(32 / 125, rel=0.1)
    assert batched.mean_batch_size == 1


def test_an_untried_configuration_of_the_other_model_is_predicted() -> None:
    """A single server would attribute the throughput of both models to the settings of the tuned one."""
    tried = [candidate(*c) for c in ((False, 1, "off", 2), (True, 2, 0, 1))]
    untried = [candidate(*c) for c in ((True, 1, 0, 2), (False, 2, "off", 1))]
    points = measured([(one, n) for one in tried for n in (1, 4, 16, 64)])
    loads = [(one, n) for one in untried for n in (1, 4, 16, 64)]
    truth = log_measurements(measured(loads), [P95])
    errors = {}
    for problem in (PROBLEM, replace(PROBLEM, concurrent=())):
        model = fit_simulator(points, problem, P95)
        errors[model.name] = np.abs(np.expm1(log_predictions(model.simulate(loads), [P95]) - truth)).mean(axis=0)
    of_each, of_one = errors.values()
    assert (of_each < 0.1).all()
    assert (of_one > 0.3).all()


def test_the_settings_of_the_steps_of_a_tuned_ensemble_are_its_own() -> None:
    """The step ``inner`` is not a model under load; its instances change the times of the ensemble."""
    space = replace(SPACE, fields={**SPACE.fields, INNER: (1, 2)})
    problem = replace(PROBLEM, space=space)

    def ensemble(inner: int, count: int) -> Candidate:
        fields = ((INNER, inner), (COUNT, count), (DELAY, "off"))
        return Candidate(8, fields=fields)

    def points(milliseconds: float, inner: int) -> list[Point]:
        served = replace(SERVER, models=(server(milliseconds), SERVER.models[1]))
        loads = [(candidate(False, 1, "off", 1), n) for n in (1, 4, 16)]
        return [
            Point(inner, ensemble(inner, 1), LoadPoint(1, n), m)
            for (_, n), m in zip(loads, served.measure(loads), strict=True)
        ]

    model = fit([*points(16, 1), *points(8, 2)], problem, P95)
    slow, fast = (result.by_model[0] for result in model.simulate([(ensemble(inner, 2), 16) for inner in (1, 2)]))
    assert slow.throughput_infer_per_sec == pytest.approx(62.5, rel=0.1)
    assert fast.throughput_infer_per_sec == pytest.approx(125, rel=0.1)


def test_samples_are_models_of_each_model() -> None:
    points = measured([(candidate(False, 1, "off", 1), n) for n in (1, 4, 16)])
    model = fit_simulator(points, PROBLEM, P95)
    samples = sample_models(model, points, PROBLEM, [P95], 3)
    throughputs = {s.simulate([(candidate(False, 2, 0, 2), 16)])[0].throughput_infer_per_sec for s in samples}
    assert len(throughputs) == 3


def test_the_correction_of_the_speed_is_that_of_each_model() -> None:
    (point,) = measured([(candidate(False, 1, "off", 1), 4)])
    faster = replace(point.measurement, throughput_infer_per_sec=2 * point.throughput_infer_per_sec)
    model = fit_simulator([replace(point, measurement=faster)], PROBLEM, P95)
    (result,) = model.simulate([(point.candidate, 4)])
    assert result.throughput_infer_per_sec == pytest.approx(2 * point.throughput_infer_per_sec, rel=0.1)


def test_measurements_of_another_tuned_model_are_those_of_the_tuned_one() -> None:
    """A warm start may take the trials of another model."""
    points = measured([(candidate(False, 1, "off", 1), 4)])
    loads = [(points[0].candidate, 4)]
    (renamed,) = fit(points, replace(PROBLEM, model="other"), P95).simulate(loads)
    (named,) = fit(points, PROBLEM, P95).simulate(loads)
    assert renamed == named


def test_faster_batches_are_those_of_the_tuned_model() -> None:
    loads = [(candidate(False, 1, "off", 1), 16)]
    (before,), (after,) = SERVER.simulate(loads), SERVER.at_speed(0.5, 1.0).simulate(loads)
    ratios = [
        faster.throughput_infer_per_sec / as_fast.throughput_infer_per_sec
        for as_fast, faster in zip(before.by_model, after.by_model, strict=True)
    ]
    assert ratios == pytest.approx([2, 1], rel=0.05)


def test_preferred_sizes_that_do_not_fit_are_simulated_without_them() -> None:
    fields = ((DELAY, 0), (PREFERRED, "max/3"))
    (result,) = SERVER.simulate([(Candidate(8, fields=fields), 8)])
    assert result.throughput_infer_per_sec > 0


def test_a_report_has_the_sum_and_the_values_of_each_model() -> None:
    (point,) = measured([(candidate(False, 1, "off", 1), 4)])
    by_model = model_stats.from_text(point.measurement.by_model)
    assert list(by_model) == ["first", "second"]
    total = sum(values.throughput_infer_per_sec or 0.0 for values in by_model.values())
    assert point.throughput_infer_per_sec == pytest.approx(total, rel=1e-4)
    assert METRICS[P95].value(point.measurement) == pytest.approx(by_model["second"].latency_p95_ms, rel=1e-4)
    assert by_model["second"].batch_stats


OPEN_LOOP = replace(PROBLEM, open_loop=True)


def at_rate(tried: Candidate, request_rate: float) -> Point:
    """Return the measurement of both models of SERVER in an open loop."""
    own = []
    for seed, (share, milliseconds, one) in enumerate(
        (
            (0.25, 8, replace(tried, fields=())),
            (0.75, 16, Candidate(8, instance_count=int(dict(tried.fields)[COUNT]))),
        )
    ):
        load = poisson_load(share * request_rate, round(4000 * share), seed)
        scenario = Scenario(one, load, constant(milliseconds / 1e3), FittedOverheads(1e-3).to_overheads())
        own.append(simulated_measurement(simulate_many([scenario])[0], trace(scenario), 1e-3))
    by_model = model_stats.to_text(dict(zip(("first", "second"), own, strict=True)))
    measured = replace(combine_models(own), by_model=by_model)
    return Point(0, tried, LoadPoint(1, request_rate=request_rate), measured)


def test_at_a_request_rate_each_model_gets_its_part_of_the_requests() -> None:
    """The second model gets three of four requests, and one instance of it executes 62.5 a second."""
    server = replace(SERVER, problem=OPEN_LOOP)
    few, many = server.simulate([(candidate(False, 1, "off", 1), n) for n in (1, 64)])
    assert few.throughput_infer_per_sec < many.throughput_infer_per_sec == pytest.approx(62.5 / 0.75, rel=0.05)
    for result in (few, many):
        first, second = (own.throughput_infer_per_sec for own in result.by_model)
        assert second == pytest.approx(3 * first)
    assert many.by_model[0].latency_s(P95) < 0.02, "it serves 21 of 125 requests a second"
    assert many.latency_s(P95) > 0.9, "nearly all requests in flight wait for the second model"


def test_a_report_at_a_request_rate_has_the_requests_of_each_model() -> None:
    """A warm start fits another model of the source to such reports."""
    for requests in (1, 64):
        (measured,) = replace(SERVER, problem=OPEN_LOOP).measure([(candidate(False, 1, "off", 1), requests)])
        first, second = model_stats.from_text(measured.by_model).values()
        served = [values.throughput_infer_per_sec or 0.0 for values in (first, second)]
        assert served[1] == pytest.approx(3 * served[0], rel=1e-3)
        assert measured.throughput_infer_per_sec == pytest.approx(sum(served), rel=1e-3)
        in_flight = [
            rate * (own.latency_avg_ms or 0.0) / 1e3 for rate, own in zip(served, (first, second), strict=True)
        ]
        assert sum(in_flight) == pytest.approx(requests, rel=0.3)
    assert in_flight[1] > 0.9 * requests


def test_an_untried_configuration_is_predicted_at_a_request_rate() -> None:
    """Each model is simulated with random arrivals; all as one server in a closed loop, whose tail is corrected."""
    tried = [candidate(False, 1, "off", 1), candidate(True, 2, "off", 2)]
    points = [[at_rate(one, rate) for rate in (30, 60)] for one in tried]
    trials = [
        Trial(number, tried[number], tuple((point.load, point.measurement) for point in own))
        for number, own in enumerate(points)
    ]
    untried = as_closed_loop(
        [at_rate(candidate(batches, 1, "off", 2), rate) for batches in (False, True) for rate in (60, 120)], OPEN_LOOP
    )
    truth, errors = log_measurements(untried, [P95]), []
    for problem in (OPEN_LOOP, replace(OPEN_LOOP, concurrent=())):
        forecast = fit_surrogate(problem, trials).forecast(configuration_loads(untried))
        errors.append(np.abs(np.expm1(np.log(forecast).T - truth)).mean(axis=0))
    of_each, of_one = errors
    assert (of_each < of_one).all()
    assert (of_each < 0.1).all()
    assert of_one[1] > 0.1


def test_requests_in_flight_are_those_of_each_model() -> None:
    """The latency of a measurement is that of the slowest model, and a quarter of the requests waits less."""
    point = at_rate(candidate(False, 1, "off", 1), 80)
    in_flight = [
        (own.throughput_infer_per_sec or 0.0) * (own.latency_avg_ms or 0.0) / 1e3
        for own in model_stats.from_text(point.measurement.by_model).values()
    ]
    of_slowest = point.throughput_infer_per_sec * (point.measurement.latency_avg_ms or 0.0) / 1e3
    (seen,) = as_closed_loop([point], OPEN_LOOP)
    assert seen.load.concurrency == round(sum(in_flight)) < round(0.9 * of_slowest)
    assert seen.measurement == point.measurement


def test_fewer_requests_than_one_in_flight_count_as_one_with_the_same_latencies() -> None:
    """A simulated load has at least one request in flight, which has more throughput than was measured."""
    point = at_rate(candidate(True, 2, "off", 2), 30)
    (seen,) = as_closed_loop([point], OPEN_LOOP)
    assert seen.load.concurrency == 1
    assert seen.throughput_infer_per_sec == pytest.approx(30 / 0.47, rel=0.05)
    assert seen.measurement.latency_p95_ms == point.measurement.latency_p95_ms


def test_the_network_time_of_random_arrivals_is_that_of_most_points() -> None:
    """Two of three measurements spend 2 ms more in the network than the model in simulation."""
    points = as_closed_loop([at_rate(candidate(False, 1, "off", 1), rate) for rate in (30, 40, 50)], OPEN_LOOP)
    slower = [points[0]]
    for point in points[1:]:
        own = {
            name: replace(values, latency_avg_ms=(values.latency_avg_ms or 0.0) + 2)
            for name, values in model_stats.from_text(point.measurement.by_model).items()
        }
        slower.append(replace(point, measurement=replace(point.measurement, by_model=model_stats.to_text(own))))
    before, after = (fit(own, OPEN_LOOP, P95).models[0].overheads.network_s for own in (points, slower))
    assert after > 2 * before


def test_requests_that_arrive_at_random_wait_at_low_rates_too() -> None:
    """No request would wait in a closed loop with one request in flight to each model."""
    points = as_closed_loop([at_rate(candidate(False, 1, "off", 1), rate) for rate in (30, 50, 60)], OPEN_LOOP)
    model = fit(points, OPEN_LOOP, P95)
    (predicted,) = model.simulate([(candidate(False, 1, "off", 1), 2)])
    measured = at_rate(candidate(False, 1, "off", 1), 60).measurement
    assert predicted.throughput_infer_per_sec == pytest.approx(60, rel=0.1)
    assert predicted.latency_s(P95) == pytest.approx((measured.latency_p95_ms or 0.0) / 1e3, rel=0.2)
    assert predicted.by_model[1].queue_avg_s > 0.005
