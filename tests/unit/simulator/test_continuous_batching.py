"""The simulator of continuous batching: exact cases, laws that hold for any server, and the fit of its parameters."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from objectives.sla import Sla
from optimizer.config.problem import ModelKind, Problem
from optimizer.config.search_space import SearchSpace
from optimizer.core.candidate import Candidate
from optimizer.core.request_sizes import TokenRequests, parse_token_lengths
from optimizer.simulator import continuous_batching, iteration_loop
from optimizer.simulator.closed_network import ClosedNetwork
from optimizer.simulator.continuous_batching import (
    LATENCY_METRICS,
    ContinuousBatchingPerformance,
    ContinuousBatchingScenario,
    PassTimes,
    RequestLengths,
    simulate_continuous_batching,
)
from optimizer.simulator.continuous_batching_model import MEDIANS, ContinuousBatchingModel, fit, slots
from optimizer.simulator.dynamic_batching_model import DynamicBatchingModel
from optimizer.simulator.performance_model import fit_model, model_type, sample_models
from tests.simulation import measured_points

LATENCIES = ("ttft-p95", "itl-p95")
THREADS = "parameters.intra_op_thread_count.string_value"
SPACE = SearchSpace((2, 4, 8, 16), (0, 20_000), instance_count=(1, 2), fields={THREADS: ("1", "2")})


def tokens(prompt: str, output: str) -> TokenRequests:
    return TokenRequests(parse_token_lengths(prompt), parse_token_lengths(output), "INPUT_IDS", "MAX_TOKENS")


PROBLEM = Problem(
    "m",
    SPACE,
    1,
    32,
    sla=Sla.from_bounds({"ttft-p95": 200.0, "itl-p95": 30.0}),
    cpu_count=2,
    kind=ModelKind.STREAMING,
    tokens=tokens("16..64", "16"),
)


def lengths(prompt: str, output: str) -> RequestLengths:
    return RequestLengths.from_tokens(tokens(prompt, output))


def simulate(scenario: ContinuousBatchingScenario, of: RequestLengths) -> ContinuousBatchingPerformance:
    return simulate_continuous_batching([scenario], of)[0]


def batched(size: int, instances: int = 1, threads: str = "1", delay_us: int = 0) -> Candidate:
    return Candidate(size, True, delay_us, instance_count=instances, fields=((THREADS, threads),))


times = st.builds(
    PassTimes,
    fixed_s=st.floats(1e-3, 2e-2),
    sequence_s=st.floats(1e-5, 5e-3),
    prompt_s=st.floats(1e-6, 5e-4),
    round_trip_s=st.floats(1e-5, 5e-3),
    power=st.floats(0.5, 1.0),
    prompt_limit=st.sampled_from([0, 256]),
    kv_tokens=st.sampled_from([0, 300]),
)
scenarios = st.builds(
    ContinuousBatchingScenario,
    slots=st.sampled_from([1, 2, 4, 16]),
    concurrency=st.integers(1, 40),
    times=times,
    factors=st.sampled_from([(1.0,), (1.0, 1.5), (1.0, 1.2, 1.9)]),
    delay_s=st.sampled_from([0.0, 0.02]),
    full_batch=st.sampled_from([4, 16]),
)


@pytest.mark.parametrize("concurrency", [1, 5])
def test_one_slot_serves_requests_one_after_another(concurrency: int) -> None:
    pass_times = PassTimes(fixed_s=0.01, sequence_s=0.002, prompt_s=0.001)
    result = simulate(ContinuousBatchingScenario(1, concurrency, pass_times), lengths("30", "11"))
    request_s = 0.01 + 30 * 0.001 + 10 * 0.012
    assert result.throughput_infer_per_sec == pytest.approx(1 / request_s)
    assert result.tokens_per_s == pytest.approx(11 / request_s)
    for statistic in ("avg", "p50", "p95", "p99"):
        assert result.latency_s(f"itl-{statistic}") == pytest.approx(0.012)
        assert result.latency_s(f"latency-{statistic}") == pytest.approx(concurrency * request_s)
        assert result.latency_s(f"ttft-{statistic}") == pytest.approx((concurrency - 1) * request_s + 0.04)
    assert result.mean_batch_size == 1


def test_a_request_alone_waits_for_the_queue_delay_and_the_network() -> None:
    pass_times = PassTimes(fixed_s=0.01, sequence_s=0.002, prompt_s=0.001, round_trip_s=0.004)
    scenario = ContinuousBatchingScenario(8, 1, pass_times, delay_s=0.02, full_batch=8)
    result = simulate(scenario, replace(lengths("30", "11"), delays=np.ones(1024)))
    assert result.latency_s("ttft-p50") == pytest.approx(0.004 + 0.02 + 0.04)
    assert result.latency_s("latency-p50") == pytest.approx(0.004 + 0.02 + 0.04 + 0.12)
    assert simulate(replace(scenario, full_batch=1), lengths("30", "11")).latency_s("ttft-p50") < 0.05


def test_each_instance_has_requests_of_its_own() -> None:
    pass_times = PassTimes(fixed_s=0.01, sequence_s=0.002, prompt_s=0.001)
    one_instance, two_instances = (
        simulate(ContinuousBatchingScenario(4, 4 * len(factors), pass_times, factors), lengths("30", "11"))
        for factors in ((1.0,), (1.0, 1.0))
    )
    assert two_instances.throughput_infer_per_sec == pytest.approx(
        2 * one_instance.throughput_infer_per_sec, rel=0.15
    )
    slow = simulate(ContinuousBatchingScenario(4, 8, pass_times, (1.0, 2.0)), lengths("30", "11"))
    assert slow.throughput_infer_per_sec == pytest.approx(two_instances.throughput_infer_per_sec / 2, rel=0.05)


@settings(max_examples=60)
@given(scenarios)
def test_requests_are_conserved(scenario: ContinuousBatchingScenario) -> None:
    result = simulate(scenario, lengths("16..64", "1..16"))
    in_flight = result.throughput_infer_per_sec * result.latency_s("latency-avg")
    assert in_flight == pytest.approx(scenario.concurrency, rel=0.12), "Little's law"
    assert 0 < result.utilization <= 1
    assert 1 <= result.mean_batch_size <= min(scenario.slots, scenario.concurrency)
    for kind in ("ttft", "itl", "latency"):
        levels = [result.latency_s(f"{kind}-{statistic}") for statistic in ("p50", "p90", "p95", "p99")]
        assert levels == sorted(levels)
    assert result.latency_s("ttft-p50") <= result.latency_s("latency-p50")
    assert simulate(scenario, lengths("16..64", "1..16")) == result, "equal input gives equal output"


@settings(max_examples=30)
@given(times, st.sampled_from([8, 32]))
def test_more_slots_serve_more(pass_times: PassTimes, concurrency: int) -> None:
    pass_times = replace(pass_times, kv_tokens=0, prompt_limit=0)
    results = [
        simulate(ContinuousBatchingScenario(slots, concurrency, pass_times), lengths("16", "16"))
        for slots in (1, 2, 4, 8)
    ]
    throughputs = np.array([result.throughput_infer_per_sec for result in results])
    assert (throughputs[1:] > 0.97 * throughputs[:-1]).all()


def test_a_limit_of_the_cache_acts_as_fewer_slots() -> None:
    pass_times = PassTimes(fixed_s=0.01, sequence_s=0.002, prompt_s=0.001)
    limited = simulate(ContinuousBatchingScenario(16, 16, replace(pass_times, kv_tokens=4 * 41)), lengths("30", "11"))
    few = simulate(ContinuousBatchingScenario(4, 16, pass_times), lengths("30", "11"))
    assert limited.throughput_infer_per_sec == pytest.approx(few.throughput_infer_per_sec)
    assert limited.mean_batch_size <= 4


def test_the_prompts_of_a_pass_are_limited() -> None:
    pass_times = PassTimes(fixed_s=0.0, sequence_s=0.001, prompt_s=0.001)
    scenario = ContinuousBatchingScenario(8, 8, pass_times)
    together, one_by_one = (
        simulate(replace(scenario, times=replace(pass_times, prompt_limit=limit)), lengths("30", "11"))
        for limit in (0, 40)
    )
    assert one_by_one.mean_batch_size < together.mean_batch_size == 8


# -- the fit ------------------------------------------------------------------------------------------------------


def model(place: Sequence[float] = ()) -> ContinuousBatchingModel:
    size = len(MEDIANS) + len(LATENCIES)
    standardized = np.array([*place, *[0.0] * (size - len(place))])
    return ContinuousBatchingModel(
        PROBLEM, LATENCIES, RequestLengths.from_tokens(tokens("16..64", "16")), 4e-3, standardized, np.eye(size)
    )


CELLS = [
    (candidate, load)
    for candidate in (batched(2), batched(16), batched(8, 2), batched(4, 1, "2"), batched(16, 2, "2"))
    for load in (4, 16, 32)
]
OTHERS = [(batched(8), 32), (batched(4, 2), 8), (batched(16, 1, "2"), 16), (batched(8, delay_us=20_000), 8)]


def test_the_fit_recovers_the_parameters_of_its_own_simulations() -> None:
    truth = model([0.5, -0.7, 0.5, 0.6, 0.3, -0.4, 0.5, -0.5])
    fitted = fit(measured_points(truth, CELLS, LATENCY_METRICS), PROBLEM, LATENCIES)
    for predicted, true in zip(fitted.simulate(OTHERS), truth.simulate(OTHERS), strict=True):
        assert predicted.throughput_infer_per_sec == pytest.approx(true.throughput_infer_per_sec, rel=0.07)
        assert predicted.latency_s("ttft-p95") == pytest.approx(true.latency_s("ttft-p95"), rel=0.2)
        assert predicted.latency_s("itl-p95") == pytest.approx(true.latency_s("itl-p95"), rel=0.15)


def test_one_outlier_hardly_changes_the_fit() -> None:
    points = measured_points(model(), CELLS, LATENCY_METRICS, noise=0.03)
    wrong = replace(points[2].measurement, throughput_infer_per_sec=points[2].throughput_infer_per_sec / 5)
    disturbed = [*points[:2], replace(points[2], measurement=wrong), *points[3:]]
    usual, other = (fit(fitted_points, PROBLEM, LATENCIES).simulate(OTHERS) for fitted_points in (points, disturbed))
    for before, after in zip(usual, other, strict=True):
        assert after.throughput_infer_per_sec == pytest.approx(before.throughput_infer_per_sec, rel=0.15)


def test_samples_agree_where_it_was_measured_and_differ_elsewhere() -> None:
    points = measured_points(model(), [(batched(4), load) for load in (2, 4, 8)], LATENCY_METRICS)
    fitted = fit(points, PROBLEM, LATENCIES)
    logs = np.log(
        [
            [
                result.throughput_infer_per_sec
                for result in sample.simulate([(batched(4), 4), (batched(16, 2, "2"), 32)])
            ]
            for sample in fitted.samples(16)
        ]
    )
    near, far = logs.std(axis=0)
    assert near < 0.15 < far


def test_the_model_of_the_server_follows_from_the_problem() -> None:
    assert model_type(PROBLEM) is ContinuousBatchingModel
    assert model_type(replace(PROBLEM, tokens=None)) is ClosedNetwork
    assert model_type(replace(PROBLEM, tokens=tokens("16", "1..2"))) is ContinuousBatchingModel
    assert model_type(replace(PROBLEM, tokens=tokens("16", "1"))) is ClosedNetwork, "there is no second token"
    assert model_type(replace(PROBLEM, kind=ModelKind.STATEFUL)) is ClosedNetwork
    assert model_type(replace(PROBLEM, kind=ModelKind.BATCHED)) is DynamicBatchingModel
    unknown_slots = replace(PROBLEM, space=SearchSpace((0,), is_streaming=True))
    assert model_type(unknown_slots) is ClosedNetwork
    fields = {"model_json.max_num_seqs": (8, 64)}
    vllm = replace(PROBLEM, space=SearchSpace((0,), fields=fields, is_streaming=True))
    assert model_type(vllm) is ContinuousBatchingModel
    assert [slots(candidate) for candidate in vllm.space.candidates()] == [8, 64]
    points = measured_points(model(), CELLS[:3], LATENCY_METRICS)
    fitted = fit_model(points, PROBLEM, LATENCIES, 0)
    assert isinstance(fitted, ContinuousBatchingModel)
    assert len(sample_models(fitted, points, PROBLEM, LATENCIES, 3)) == 3


def test_other_fields_change_the_speed() -> None:
    problem = replace(PROBLEM, space=SearchSpace((0,), fields={"model_json.max_num_seqs": (8,), "a": ("1", "2")}))
    size = len(MEDIANS) + 1 + len(LATENCIES)
    fitted_model = ContinuousBatchingModel(
        problem, LATENCIES, lengths("16", "16"), 4e-3, np.zeros(size), np.eye(size)
    )
    place = np.zeros(size)
    place[len(MEDIANS)] = 1.0
    cells = [(candidate, 8) for candidate in problem.space.candidates()]
    slow, fast = (
        result.throughput_infer_per_sec for result in replace(fitted_model, standardized=place).simulate(cells)
    )
    assert fast > 1.2 * slow


@pytest.mark.parametrize("choice", ["auto", -1, 0, True])
def test_continuous_batching_needs_a_number_of_sequences(choice: Any) -> None:
    field = "model_json.max_num_seqs"
    space = SearchSpace((0,), fields={field: (choice, 64)}, is_streaming=True)
    assert model_type(replace(PROBLEM, space=space)) is ClosedNetwork
    assert slots(Candidate(0, fields=((field, choice),))) == 256


@pytest.mark.parametrize("running", [1, 64, 256, 512])
def test_sending_is_a_part_of_the_pass(running: int) -> None:
    """Otherwise a later pass would begin before the earlier one."""
    times = PassTimes(0.001, 0.004, 1e-5, power=0.5)
    result = simulate(ContinuousBatchingScenario(running, running, times), lengths("16", "4..8"))
    assert min(result.latency_s(metric) for metric in LATENCY_METRICS) > 0
    pass_s = times.fixed_s + times.sequence_s * running**times.power
    assert result.latency_s("itl-avg") == pytest.approx(pass_s, rel=0.5)


def test_the_fit_needs_a_measurement() -> None:
    with pytest.raises(ValueError, match="no measured points"):
        fit([], PROBLEM, LATENCIES)


def test_any_percentile_is_estimated_from_the_simulated_ones() -> None:
    performance = ContinuousBatchingPerformance(
        1.0, 1.0, 1.0, 1.0, tuple(map(float, range(1, 16))), {"ttft-p99.9": 2.0}
    )
    assert performance.latency_s("ttft-p95") == 4.0
    assert performance.latency_s("latency-avg") == 11.0
    assert 4.0 < performance.latency_s("ttft-p97") < 5.0
    assert performance.latency_s("ttft-p99.9") == pytest.approx(2 * (5 + math.log(10) / math.log(5)))


def test_the_columns_of_the_results_are_those_of_the_compiled_loop() -> None:
    for name in ("TOKENS_PER_S", "TOGETHER", "OCCUPIED"):
        assert getattr(continuous_batching, name) == getattr(iteration_loop, name)
    assert slice(iteration_loop.LATENCIES, iteration_loop.RESULTS) == continuous_batching.LATENCY_COLUMNS
