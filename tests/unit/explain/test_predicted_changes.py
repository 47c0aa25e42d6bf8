"""Tests of ``tune explain`` for models that stream or keep state: stages, predicted changes and other bounds."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from objectives.intervals import ConfidenceInterval
from objectives.metrics import Measurement
from objectives.sla import Sla
from optimizer.config.search_space import SearchSpace
from optimizer.core.candidate import SERVER_PROCESSES, Candidate
from optimizer.core.trial import LoadPoint, Point, Trial
from optimizer.explain.bottleneck import BottleneckKind, break_down_stages, find_bottleneck
from optimizer.explain.explanation import explain
from optimizer.explain.explanation_document import document
from optimizer.explain.forecaster import CandidateForecast, Gain, compute_gain, forecast_other_slas
from optimizer.explain.predicted_changes import SurrogateForecaster, predict_changes, single_changes
from optimizer.results.finished_run import read_run
from optimizer.simulator.closed_network import MEDIANS, ClosedNetwork
from tests import stateful_run, streaming_run
from tests.conftest import not_none
from tests.csv_tables import read_rows, write_rows
from tests.explanation_text import explanation_text
from tests.run_folders import change_info

BOUNDS = {"ttft-p95": 300.0, "itl-p95": 30.0}
SLA = Sla.from_bounds(BOUNDS)
THREADS = "parameters.intra_op_thread_count.string_value"
SPACE = SearchSpace((2, 4, 8, 16), ("off", 0, 5000), instance_count=(1, 2), fields={THREADS: ("1", "2")})
PROBLEM = replace(streaming_run.problem(), space=SPACE, sla=SLA)


def candidate(size: int, instances: int = 1, threads: str = "1") -> Candidate:
    return Candidate(size, True, instance_count=instances, fields=((THREADS, threads),))


# the server that the tests measure: all parameters of the model are at their medians
TRUE_PARAMETERS = np.zeros(len(MEDIANS) + 1 + len(BOUNDS))
TRUTH = ClosedNetwork(tuple(BOUNDS), 1, 0.1, TRUE_PARAMETERS, np.eye(len(TRUE_PARAMETERS)))


def measured(candidate: Candidate, load: int) -> Measurement:
    """Return a measurement of TRUTH; two threads make everything take 1.5 times as long."""
    (result,) = TRUTH.simulate([(candidate, load)])
    slower = 1.5 if dict(candidate.fields)[THREADS] == "2" else 1.0
    times: dict[str, Any] = {
        f"{metric.replace('-', '_')}_ms": 1e3 * slower * result.latency_s(metric) for metric in BOUNDS
    }
    rate = result.throughput_infer_per_sec / slower
    return Measurement(rate, latency_avg_ms=1e3 * load / rate, requests=500, stable=True, **times)


def best_rate(candidate: Candidate, ttft_ms: float = BOUNDS["ttft-p95"]) -> float:
    sla = Sla.from_bounds(BOUNDS | {"ttft-p95": ttft_ms})
    measurements = [measured(candidate, load) for load in range(1, 49)]
    return max(m.throughput_infer_per_sec or 0.0 for m in measurements if sla.is_met(m))


TRIED = [candidate(4), candidate(8), candidate(16), candidate(8, 2), candidate(8, threads="2")]
TRIED_LOADS = (2, 8, 16, 24)
TRIALS = [
    Trial(
        number, tried_candidate, tuple((LoadPoint(1, load), measured(tried_candidate, load)) for load in TRIED_LOADS)
    )
    for number, tried_candidate in enumerate(TRIED)
]


def changed_rows(folder: Path, change: Callable[[dict[str, str]], dict[str, str]]) -> Path:
    table = folder / "trials.csv"
    write_rows(table, map(change, read_rows(table)))
    return folder


@pytest.fixture(scope="module")
def forecaster() -> SurrogateForecaster:
    return SurrogateForecaster(
        TRIALS, PROBLEM, [*TRIED, *(change.candidate for change in single_changes(SPACE, TRIED[1]))], 0
    )


def test_predicted_gains_match_the_server(forecaster: SurrogateForecaster) -> None:
    subject, forecast_now = TRIED[1], forecaster.best([TRIED[1]], SLA)
    for other in (TRIED[0], TRIED[2], TRIED[3], TRIED[4]):
        gain = not_none(compute_gain(forecaster.best([other], SLA), forecast_now))
        interval = not_none(gain.interval)
        true_gain = best_rate(other) / best_rate(subject) - 1
        assert gain.estimate == pytest.approx(true_gain, abs=0.1), other
        assert interval.low - 0.02 <= true_gain <= interval.high + 0.02, other


def test_other_slas_widen_one_bound_and_keep_the_other_bounds(forecaster: SurrogateForecaster) -> None:
    forecast_now = forecaster.best([TRIED[1]], SLA)
    slas = {
        (other.metric, other.factor): other
        for other in forecast_other_slas(forecaster, [TRIED[1]], SLA, forecast_now)
    }
    assert {metric for metric, _ in slas} == BOUNDS.keys()
    assert slas["ttft-p95", 2.0].bound_ms == 600.0
    wider, true_gain = slas["ttft-p95", 2.0].gain, best_rate(TRIED[1], 600.0) / best_rate(TRIED[1]) - 1
    assert not_none(wider).estimate == pytest.approx(true_gain, abs=0.1)
    assert slas["itl-p95", 2.0].gain is not None


def test_a_setting_that_was_not_tried_has_a_wide_interval(forecaster: SurrogateForecaster) -> None:
    def interval_width(candidate: Candidate) -> float:
        expected = not_none(compute_gain(forecaster.best([candidate], SLA), forecaster.best([TRIED[1]], SLA)))
        interval = not_none(expected.interval)
        return interval.high - interval.low

    assert interval_width(TRIED[1]) == 0.0, "its own error cancels"
    assert interval_width(TRIED[2]) < interval_width(replace(TRIED[1], max_queue_delay_us=5000))


def test_faster_computing_scales_throughput_and_times(forecaster: SurrogateForecaster) -> None:
    forecast_now, faster_forecast = (
        forecaster.best([TRIED[1]], Sla()),
        forecaster.best([TRIED[1]], Sla(), time_share=0.5),
    )
    assert forecast_now is not None
    assert faster_forecast is not None
    assert faster_forecast.throughput_infer_per_sec == pytest.approx(2 * forecast_now.throughput_infer_per_sec)
    assert faster_forecast.latency_ms == pytest.approx(forecast_now.latency_ms / 2)


def test_no_load_meets_a_bound_below_the_lowest_time(forecaster: SurrogateForecaster) -> None:
    lowest_ms = forecaster.lowest_latencies_ms(TRIED)["ttft-p95"]
    sla = Sla.from_bounds({"ttft-p95": 0.5 * lowest_ms})
    assert forecaster.best(TRIED, sla) is None
    changes = single_changes(SPACE, TRIED[1])
    remedies = predict_changes(forecaster, TRIED[1], changes, sla, 1.0, on_gpu=True)
    assert len(remedies) == 1 + len(changes)
    assert all(remedy.forecast is None and remedy.gain is None for remedy in remedies)


def changed_candidates(subject: Candidate) -> dict[str, Candidate]:
    """Return the candidate of each change by its parameter and description."""
    changes = single_changes(SPACE, subject)
    return {f"{change.parameter} {change.description}": change.candidate for change in changes}


def test_each_parameter_takes_its_next_choices() -> None:
    changed = changed_candidates(candidate(16))
    assert changed.keys() == {
        "max_batch_size 8 instead of 16",
        "max_batch_size 32 instead of 16, outside of the search space",
        "max_queue_delay_microseconds off instead of 0",
        "max_queue_delay_microseconds 5,000 instead of 0",
        "instance_group count 2 instead of 1",
        "intra_op_thread_count 2 instead of 1",
    }
    assert changed["instance_group count 2 instead of 1"] == candidate(16, 2)
    assert "intra_op_thread_count 1 instead of the default" in changed_candidates(Candidate(16, True))
    more = changed_candidates(candidate(16, 2))
    assert "instance_group count 3 instead of 2, outside of the search space" in more


def test_an_interval_needs_samples_that_meet_the_bounds() -> None:
    def forecast(rate: float, samples: list[float]) -> CandidateForecast:
        return CandidateForecast(TRIED[0], 4, rate, {"ttft-p95": 100.0}, np.array(samples))

    forecast_now, forecast_changed = forecast(10.0, [10.0] * 100), forecast(20.0, [0.0] * 10 + [20.0] * 90)
    assert compute_gain(forecast_changed, forecast_now) == Gain(1.0, ConfidenceInterval(-1.0, 1.0))
    assert compute_gain(forecast_changed, forecast(10.0, [0.0] * 90 + [10.0] * 10)) == Gain(1.0)
    assert compute_gain(None, forecast_now) is None


# -- stages -------------------------------------------------------------------------------------------------------


def streamed(load: int, ttft_ms: float, total_ms: float, queue_ms: float | None = None) -> Point:
    m = Measurement(
        1e3 * load / total_ms,
        latency_avg_ms=total_ms,
        ttft_avg_ms=ttft_ms,
        ttft_p50_ms=ttft_ms,
        itl_avg_ms=(total_ms - ttft_ms) / 15,
        queue_ms=queue_ms,
        compute_infer_ms=0.1,
        batch_stats="1:100:100000",
        stable=True,
    )
    return Point(0, candidate(8), LoadPoint(1, load), m)


@pytest.mark.parametrize(
    ("kind", "ttft_ms", "total_ms", "queue_ms", "words"),
    [
        (
            "generation",
            100.0,
            400.0,
            1.0,
            "75 % of a request's time is spent between its first and its last response",
        ),
        ("waiting", 500.0, 700.0, 1.0, "68 % of a request's time is spent waiting in the model"),
        ("queue", 300.0, 400.0, 220.0, "55 % of a request's time is spent in Triton's queue"),
        ("first response", 21.0, 22.0, None, "which takes as long in the quickest measurement (20.0 ms"),
    ],
)
def test_the_stages_of_a_stream_are_those_that_the_client_sees(
    kind: BottleneckKind, ttft_ms: float, total_ms: float, queue_ms: float | None, words: str
) -> None:
    quickest, point = streamed(1, 20.0, 120.0), streamed(16, ttft_ms, total_ms, queue_ms)
    loads = tuple((point.load, point.measurement) for point in (quickest, point))
    stages = break_down_stages(point, [Trial(0, point.candidate, loads)])
    assert sum(stages.stages_ms.values()) == pytest.approx(total_ms)
    assert stages.stages_ms["first_response_ms"] == pytest.approx(20.0)
    assert stages.busy_share is None, "the server counts the time of handing a request over"
    result = find_bottleneck(stages, None)
    assert result.kind == kind
    assert words in " ".join(result.reasons)


@pytest.mark.parametrize(
    ("processes", "words"),
    [(1, "(max_batch_size x instances: 8)"), (2, "(max_batch_size x instances x server processes: 16)")],
)
def test_requests_in_flight_are_compared_with_the_places_of_all_server_processes(processes: int, words: str) -> None:
    point = streamed(16, 100.0, 400.0)
    point_of_processes = replace(point, candidate=replace(point.candidate, fields=((SERVER_PROCESSES, processes),)))
    stages = break_down_stages(
        point_of_processes,
        [Trial(0, point_of_processes.candidate, ((point_of_processes.load, point_of_processes.measurement),))],
    )
    assert words in " ".join(find_bottleneck(stages, None).reasons)


def test_the_use_of_the_kv_cache_is_a_reason() -> None:
    point = streamed(16, 500.0, 700.0)
    full_cache = replace(
        point, measurement=replace(point.measurement, kv_cache_utilization=0.97, engine_preemptions=3.0)
    )
    stages = break_down_stages(
        full_cache, [Trial(0, full_cache.candidate, ((full_cache.load, full_cache.measurement),))]
    )
    assert "The KV cache was filled up to 97 %, and 3 requests lost their place" in " ".join(
        find_bottleneck(stages, None).reasons
    )


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"sequence_batching.oldest.max_candidate_sequences": 32}, "have places for 64: each has a place"),
        ({"sequence_batching.oldest.max_candidate_sequences": 8}, "have places for 16: some wait for a place"),
        ({"sequence_batching.direct.minimum_slot_utilization": 0.5}, "have places for 16: some wait for a place"),
    ],
)
def test_the_places_of_sequences_are_counted(fields: dict[str, float], words: str) -> None:
    candidate = Candidate(8, instance_count=2, fields=tuple(fields.items()))
    m = Measurement(800.0, mean_batch_size=8.0, batch_stats="8:100:1900000000", queue_ms=9.0, compute_infer_ms=5.0)
    point = Point(0, candidate, LoadPoint(1, 64), m)
    reasons = find_bottleneck(break_down_stages(point, [Trial(0, candidate, ((point.load, m),))]), None).reasons
    assert words in " ".join(reasons)


def test_an_inconclusive_gain_of_instances_decides_nothing() -> None:
    m = Measurement(800.0, mean_batch_size=8.0, batch_stats="8:100:950000000", queue_ms=9.0, compute_infer_ms=5.0)
    point = Point(0, Candidate(8, True), LoadPoint(1, 16), m)
    stages = break_down_stages(point, [Trial(0, point.candidate, ((point.load, m),))])
    bottleneck = find_bottleneck(stages, Gain(0.2, ConfidenceInterval(-0.1, 0.5)))
    assert bottleneck.kind == "compute"
    assert "More instances" not in " ".join(bottleneck.reasons)
    assert find_bottleneck(stages, Gain(0.2, ConfidenceInterval(0.1, 0.3))).kind == "instances"


# -- runs ---------------------------------------------------------------------------------------------------------


def test_a_run_of_a_model_that_streams_is_explained(tmp_path: Path) -> None:
    explanation = explain(read_run(streaming_run.write_run(tmp_path)))
    changes = not_none(explanation.changes)
    assert {latency.metric for latency in changes.latencies} == streaming_run.BOUNDS_MS.keys()
    assert changes.measurement_count == len(streaming_run.trials()) * len(streaming_run.LOADS)
    shown = explanation_text(explanation)
    assert max(map(len, shown.splitlines()[:-1])) <= 80
    words = " ".join(shown.split())
    assert "Predicted within" in words
    assert "closed queueing network" in words
    assert "requests in flight, it is expected to serve" in words
    assert "another SLA, TTFT p95 <= 400 ms" in words
    assert "another SLA, inter-token p95 <= 60 ms" in words
    json.dumps(document(explanation), allow_nan=False)


def test_a_run_of_a_stateful_model_is_explained(tmp_path: Path) -> None:
    explanation = explain(read_run(stateful_run.write_run(tmp_path)))
    assert explanation.changes is not None
    words = " ".join(explanation_text(explanation).split())
    assert "Predicted within p95 <= 20 ms" in words
    assert "max_candidate_sequences 8 instead of 32: " in words
    assert "24 sequences were in flight, and the instances have places for 32: each has a place" in words
    assert "sequences in flight, it is expected to serve" in words
    json.dumps(document(explanation), allow_nan=False)


def test_the_json_document_has_the_structure_of_batched_models(tmp_path: Path) -> None:
    streamed_document = document(explain(read_run(streaming_run.write_run(tmp_path))))
    batched_document = document(explain(read_run("tests/data/dlrm/sample")))
    assert streamed_document.keys() == batched_document.keys()
    assert streamed_document["predicted_changes"].keys() == batched_document["predicted_changes"].keys()
    for part in ("latencies", "remedies", "other_slas"):
        assert (
            streamed_document["predicted_changes"][part][0].keys()
            == batched_document["predicted_changes"][part][0].keys()
        )
    low, high = streamed_document["predicted_changes"]["remedies"][0]["gain_interval"]
    assert low <= streamed_document["predicted_changes"]["remedies"][0]["gain"] <= high
    assert batched_document["predicted_changes"]["remedies"][0]["gain_interval"] is None


def test_nothing_is_predicted_without_a_complete_measurement(tmp_path: Path) -> None:
    folder = changed_rows(streaming_run.write_run(tmp_path), lambda row: row | {"ttft_p95_ms": ""})
    explanation = explain(read_run(folder))
    assert explanation.changes is None
    assert "No forecast" in explanation_text(explanation)


def test_a_run_without_a_recommendation_has_the_lowest_times(tmp_path: Path) -> None:
    folder = streaming_run.write_run(tmp_path)
    constraints = json.loads((folder / "run.json").read_text())["problem"]["constraints"]
    change_info(folder, "problem", constraints=["ttft-p95 <= 5 ms", *constraints[1:]])
    explanation = explain(read_run(folder))
    assert not explanation.has_recommendation
    words = " ".join(explanation_text(explanation).split())
    assert "TTFT p95 <= 5 ms is missed" in words
    assert "no load is expected to meet the bounds" in words
    assert "The lowest measured TTFT p95 is" in words
    assert "is expected to serve" not in words
    json.dumps(document(explanation), allow_nan=False)


def test_an_open_loop_is_predicted_by_its_requests_in_flight(tmp_path: Path) -> None:
    folder = changed_rows(
        streaming_run.write_run(tmp_path),
        lambda row: row | {"concurrency": "", "request_rate": row["concurrency"]},
    )
    change_info(folder, "options", load="rate")
    explanation = explain(read_run(folder))
    changes = not_none(explanation.changes)
    point = explanation.subject.point
    in_flight = point.throughput_infer_per_sec * (point.measurement.latency_avg_ms or 0.0) / 1e3
    assert not_none(changes.next_load).concurrency == pytest.approx(1.1 * in_flight, abs=1)
    json.dumps(document(explanation), allow_nan=False)
