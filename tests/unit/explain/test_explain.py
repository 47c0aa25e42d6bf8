"""Tests of ``tune explain``: bottleneck, binding constraint, remedies and runner-up."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pandas as pd
import pytest

from objectives.intervals import ConfidenceInterval
from objectives.metrics import METRICS, Measurement
from objectives.sla import Sla
from optimizer.cli.explain import main
from optimizer.config.problem import Problem
from optimizer.config.search_space import SearchSpace
from optimizer.core.candidate import INSTANCE_GPUS, SERVER_PROCESSES, Candidate
from optimizer.core.errors import BadInputError
from optimizer.core.trial import LoadPoint, Point, Trial, latest_points
from optimizer.explain.bottleneck import (
    BottleneckKind,
    break_down_stages,
    find_binding_constraint,
    find_bottleneck,
    used_shares,
    worst_missed,
)
from optimizer.explain.explanation import Explanation, explain, find_runner_up, has_fp16_conversion
from optimizer.explain.explanation_document import document
from optimizer.explain.forecaster import CandidateForecast, Gain, compute_gain
from optimizer.explain.simulated_changes import SimulatedForecaster, simulate_changes
from optimizer.plan.evidence import choose_configurations
from optimizer.plan.plan_report import capacity_sentence
from optimizer.results.finished_run import read_run
from optimizer.simulator.scenario import ClosedLoopLoad, Overheads
from optimizer.simulator.simulate import lognormal_jitter
from tests import simulated_results
from tests.conftest import not_none
from tests.explanation_text import explanation_text
from tests.run_folders import change_info
from tests.simulation import linear_times, simulate

SAMPLE = Path("tests/data/dlrm/sample")
BATCHED = Candidate(8, dynamic_batching=True)
HOLDING = replace(BATCHED, max_queue_delay_us=5000)
SLA = Sla.from_bounds({"p95": 20.0})


@pytest.fixture(scope="module")
def sample() -> Explanation:
    return explain(read_run(SAMPLE))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return Path(shutil.copytree(SAMPLE, tmp_path / "dlrm" / "sample"))


def measured(busy: float, instances: int = 1, **stages_ms: float) -> tuple[Point, list[Trial]]:
    """Return a point with 100 executions of 8 samples per second that take ``busy`` of the instances' time."""
    counted = f"8:100:{round(busy * instances * 1e9)}"
    m = Measurement(800.0, mean_batch_size=8.0, batch_stats=counted, requests=800, stable=True, **stages_ms)  # type: ignore[arg-type]
    point = Point(0, replace(BATCHED, instance_count=instances), LoadPoint(1, 16), m)
    return point, [Trial(0, point.candidate, ((point.load, m),))]


@pytest.mark.parametrize(
    ("kind", "busy", "instances_gain", "stages_ms"),
    [
        ("compute", 0.95, 0.01, {"queue_ms": 9.0, "compute_infer_ms": 5.0}),
        ("compute", 0.95, None, {"queue_ms": 9.0, "compute_infer_ms": 5.0}),
        ("compute", 0.4, 0.3, {"queue_ms": 1.0, "compute_infer_ms": 5.0}),
        ("instances", 0.95, 0.3, {"queue_ms": 9.0, "compute_infer_ms": 5.0}),
        ("copying", 0.95, 0.3, {"queue_ms": 9.0, "compute_infer_ms": 2.0, "compute_input_ms": 3.0}),
        ("copying", 0.5, 0.0, {"compute_infer_ms": 2.0, "compute_input_ms": 2.0, "compute_output_ms": 1.0}),
        ("queue", 0.5, 0.0, {"queue_ms": 9.0, "compute_infer_ms": 5.0}),
        ("client", 0.5, 0.0, {"network_ms": 6.0, "client_send_ms": 3.0, "queue_ms": 8.0, "compute_infer_ms": 1.0}),
        ("client", 0.5, 0.0, {"latency_avg_ms": 18.0, "queue_ms": 8.0, "compute_infer_ms": 1.0}),
    ],
)
def test_the_bottleneck_follows_from_stage_times(
    kind: BottleneckKind, busy: float, instances_gain: float | None, stages_ms: dict[str, float]
) -> None:
    stages = break_down_stages(*measured(busy, 2, **stages_ms))
    assert stages.busy_share == pytest.approx(busy)
    result = find_bottleneck(stages, None if instances_gain is None else Gain(instances_gain))
    assert result.kind == kind
    assert f"The 2 instances computed {100 * busy:.0f} % of the time" in " ".join(result.reasons)


@pytest.mark.parametrize(("size", "batches"), [(1.0, "1 sample"), (1.002, "1 sample"), (1.5, "1.5 samples")])
def test_the_size_of_batches_has_its_unit(size: float, batches: str) -> None:
    point, trials = measured(0.5, queue_ms=9.0, compute_infer_ms=5.0)
    small = replace(point, measurement=replace(point.measurement, mean_batch_size=size))
    stages = break_down_stages(small, trials)
    assert f"of the time, on batches of {batches}." in " ".join(find_bottleneck(stages, None).reasons)


def test_a_stage_whose_removal_gains_nothing_is_not_the_bottleneck() -> None:
    stages = break_down_stages(
        *measured(0.5, network_ms=4.0, queue_ms=1.0, compute_infer_ms=3.0, compute_output_ms=2.0)
    )
    assert find_bottleneck(stages, None, {"client": Gain(0.02), "copying": None}).kind == "client"
    result = find_bottleneck(stages, None, {"client": Gain(0.01), "copying": Gain(0.2)})
    assert result.kind == "compute"
    assert (
        "40 % of a request's time is spent outside the server, but a faster network is not expected to raise the "
        "throughput." in result.reasons
    )
    copying = break_down_stages(*measured(0.5, network_ms=4.0, compute_infer_ms=1.0, compute_output_ms=2.0))
    result = find_bottleneck(copying, None, {"client": Gain(-0.1), "copying": Gain(0.0)})
    assert result.kind == "compute"
    assert [reason.partition(" %")[0] for reason in result.reasons if "not expected" in reason] == ["57", "29"]
    wide = Gain(0.0, ConfidenceInterval(-0.1, 0.3))
    assert find_bottleneck(stages, None, {"client": wide}).kind == "client", "it may gain"


def test_the_stages_are_those_of_the_whole_latency_if_the_client_measured_none() -> None:
    stages = break_down_stages(*measured(0.5, latency_avg_ms=18.0, queue_ms=8.0, compute_infer_ms=1.0))
    assert stages.stages_ms == {"network_ms": 9.0, "queue_ms": 8.0, "compute_infer_ms": 1.0}
    (reason, *_) = find_bottleneck(stages, None).reasons
    assert reason.startswith("50 % of a request's time is spent outside the server")


@pytest.mark.parametrize("network_ms", [None, 2.0], ids=["own client", "perf_analyzer"])
def test_the_time_in_other_models_is_not_taken_for_that_of_the_network(network_ms: float | None) -> None:
    """The server's times are those of the tuned model, such as one step of an ensemble."""
    point, trials = measured(0.5, latency_avg_ms=18.0, queue_ms=4.0, compute_infer_ms=3.0)
    point = replace(point, measurement=replace(point.measurement, network_ms=network_ms))
    stages = break_down_stages(point, trials, has_other_models=True)
    assert stages.stages_ms == {"other_models_ms": 11.0, "queue_ms": 4.0, "compute_infer_ms": 3.0}
    result = find_bottleneck(stages, None)
    assert result.kind == "other models"
    assert result.reasons[0].startswith("61 % of a request's time is spent outside the model whose batches are tuned")


@pytest.mark.parametrize("several", [False, True])
def test_a_faster_network_is_forecast_for_a_single_model_only(folder: Path, *, several: bool) -> None:
    """The simulation of an ensemble has the time of its other steps in that of the network.

    A run that recommends nothing has no configurations that show its steps.
    """
    change_info(folder, "problem", batcher="tokenizer" if several else "dlrm")
    shutil.rmtree(folder / "best")
    explanation = explain(read_run(folder))
    kinds = {remedy.kind for remedy in not_none(explanation.changes).remedies}
    assert ("faster_network" in kinds) is not several
    text = explanation_text(explanation)
    assert ("\n  other models  " in text, "\n  network  " in text) == (several, not several)


def test_the_instances_of_all_server_processes_are_counted() -> None:
    point, trials = measured(0.9, 2, compute_infer_ms=5.0)
    two_processes = replace(point, candidate=replace(point.candidate, fields=((SERVER_PROCESSES, 2),)))
    reasons = " ".join(find_bottleneck(break_down_stages(two_processes, trials), None).reasons)
    assert "The 4 instances of 2 server processes computed 45 % of the time" in reasons


def test_the_instances_of_all_gpus_are_counted() -> None:
    point, trials = measured(0.9, 2, compute_infer_ms=5.0)
    two_gpus = replace(point, candidate=replace(point.candidate, fields=((INSTANCE_GPUS, "0,1"),)))
    reasons = " ".join(find_bottleneck(break_down_stages(two_gpus, trials), None).reasons)
    assert "The 4 instances computed" in reasons


def test_the_bottleneck_is_unknown_without_stage_times() -> None:
    point = Point(0, BATCHED, LoadPoint(1, 4), Measurement(100.0, latency_p95_ms=5.0, stable=True))
    stages = break_down_stages(point, [Trial(0, BATCHED, ((point.load, point.measurement),))])
    assert stages.busy_share is None
    assert find_bottleneck(stages, None).kind == "unknown"


CANDIDATE_SEQUENCES = "sequence_batching.oldest.max_candidate_sequences"


@pytest.mark.parametrize(
    ("candidate", "cause"),
    [
        (BATCHED, "Requests arrive in bursts; instances are idle between them."),
        (HOLDING, "The batcher delays requests to form larger batches while instances are idle."),
        (Candidate(8, fields=((CANDIDATE_SEQUENCES, 15),)), "Sequences wait for a place."),
        (Candidate(8, fields=((CANDIDATE_SEQUENCES, 16),)), "Steps wait for others to form a batch."),
    ],
    ids=["bursts", "delay", "more sequences than places", "a place for each sequence"],
)
def test_the_queue_has_a_cause(candidate: Candidate, cause: str) -> None:
    point, trials = measured(0.5, queue_ms=9.0, compute_infer_ms=2.0)
    queued = replace(point, candidate=candidate)
    assert cause in " ".join(find_bottleneck(break_down_stages(queued, trials), None).reasons)


@pytest.mark.parametrize(
    ("usage", "reason"),
    [
        ({"other_cpu_share": 0.3}, "took 30 % of the CPUs"),
        ({"gpu_utilization": 0.8}, "The GPU was busy 80 % of the time."),
    ],
)
def test_the_use_of_the_machine_is_named_as_a_reason(usage: dict[str, float], reason: str) -> None:
    point, trials = measured(0.9, compute_infer_ms=5.0)
    used = replace(point, measurement=replace(point.measurement, **usage))  # type: ignore[arg-type]
    assert reason in " ".join(find_bottleneck(break_down_stages(used, trials), None).reasons)


def test_the_bound_that_a_faster_point_misses_binds() -> None:
    def point(throughput: float, p95_ms: float, memory: float) -> Point:
        m = Measurement(throughput, latency_p95_ms=p95_ms, server_memory_bytes=memory, stable=True)
        return Point(0, BATCHED, LoadPoint(1, 4), m)

    sla = Sla.from_bounds({"p95": 20.0, "memory": 1e9})
    recommended, too_slow, too_large = point(100, 15.0, 5e8), point(110, 25.0, 5e8), point(120, 15.0, 2e9)
    slow_and_large = point(200, 30.0, 3e9)
    points = [recommended, too_slow, too_large, slow_and_large]
    result = not_none(find_binding_constraint(recommended, points, sla, METRICS["throughput"]))
    assert (result.constraint, result.beyond) == (sla.constraints[1], too_large)
    assert result.gain == pytest.approx(0.2)
    assert used_shares(recommended, sla) == {"p95 <= 20 ms": 0.75, "memory <= 1000000000 bytes": 0.5}
    throughput = METRICS["throughput"]
    assert find_binding_constraint(recommended, [recommended], sla, throughput) is None
    assert worst_missed(slow_and_large, sla) == sla.constraints[1]
    floor = Sla.from_bounds({"throughput": 115.0})
    quicker, memory = point(80, 5.0, 1e9), METRICS["memory"]
    result = not_none(find_binding_constraint(too_large, [*points, quicker], floor, METRICS["latency-p95"]))
    assert (result.constraint, result.beyond) == (floor.constraints[0], quicker)
    assert result.gain == pytest.approx(2.0), "a third of the latency is three times as good"
    smaller = not_none(find_binding_constraint(too_large, [*points, quicker], floor, memory))
    assert smaller.beyond is recommended


# -- forecasts, against a server whose service times they do not see ---------------------------------------------

SPACE = SearchSpace((1, 8, 32), ("off", 0, 500, 2000), ("none", "max/2"), (1, 2, 3))


def simulated_measurement(candidate: Candidate, load: int, *, time_share: float = 1.0) -> Measurement:
    """Measure a server whose batches take 3 ms plus 0.3 ms per sample; instances slow each other down by half."""
    times = linear_times(time_share * 3e-3, time_share * 3e-4, max(candidate.max_batch_size, 1), 8, contention=0.5)
    overheads = Overheads(2e-4, 2e-4, 0.0, 5e-5)
    result = simulate(candidate, ClosedLoopLoad(load), times, overheads, jitter=lognormal_jitter(0.1))
    return simulated_results.measurement_of(result, candidate)


def best_throughput(candidate: Candidate, bound_ms: float, *, time_share: float = 1.0) -> float:
    measurements = [simulated_measurement(candidate, load, time_share=time_share) for load in range(1, 65)]
    return max(m.throughput_infer_per_sec or 0 for m in measurements if (m.latency_p95_ms or 0) <= bound_ms)


def test_forecast_gains_match_the_simulated_server() -> None:
    candidate = Candidate(32, True, instance_count=2)
    problem = Problem("m", SPACE, 1, 64, sla=SLA)
    tried_candidates = [Candidate(1), Candidate(32, True), candidate, Candidate(8, True, instance_count=3)]
    loads = (2, 8, 16, 24)
    trials = [
        Trial(
            i,
            tried_candidate,
            tuple((LoadPoint(1, load), simulated_measurement(tried_candidate, load)) for load in loads),
        )
        for i, tried_candidate in enumerate(tried_candidates)
    ]
    subject = Point(2, candidate, LoadPoint(1, 16), simulated_measurement(candidate, 16))
    forecaster = SimulatedForecaster(latest_points(trials), subject, problem)
    forecast_now, throughput_now = forecaster.best([candidate], SLA), best_throughput(candidate, 20.0)
    three_instances = replace(candidate, instance_count=3)
    cases: list[tuple[str, CandidateForecast | None, float]] = [
        ("three instances", forecaster.best([three_instances], SLA), best_throughput(three_instances, 20.0)),
        (
            "twice as fast",
            forecaster.best([candidate], SLA, time_share=0.5),
            best_throughput(candidate, 20.0, time_share=0.5),
        ),
        (
            "half the bound",
            forecaster.best([candidate], Sla.from_bounds({"p95": 10.0})),
            best_throughput(candidate, 10.0),
        ),
        (
            "twice the bound",
            forecaster.best([candidate], Sla.from_bounds({"p95": 40.0})),
            best_throughput(candidate, 40.0),
        ),
    ]
    for name, forecast, throughput in cases:
        gain = not_none(compute_gain(forecast, not_none(forecast_now)))
        assert gain.interval is None
        assert 1 + gain.estimate == pytest.approx(throughput / throughput_now, rel=0.15), name
    assert forecaster.best([candidate], Sla.from_bounds({"p95": 1.0})) is None


def test_a_forecast_is_within_every_bound() -> None:
    """A wider bound on p95 raises the throughput only as far as the bound on the average permits."""
    candidate = Candidate(8, True, 0, (), 1)
    problem = Problem("m", SPACE, 1, 64, sla=Sla.from_bounds({"p95": 20.0, "avg": 22.0}))
    loads = (1, 2, 4, 8, 12, 16, 24)
    trials = [
        Trial(0, candidate, tuple((LoadPoint(1, load), simulated_measurement(candidate, load)) for load in loads))
    ]
    subject = Point(0, candidate, LoadPoint(1, 16), simulated_measurement(candidate, 16))
    forecaster = SimulatedForecaster(latest_points(trials), subject, problem)
    assert set(forecaster.latencies) == {"latency-p95", "latency-avg"}
    wide = not_none(forecaster.best([candidate], Sla.from_bounds({"p95": 40.0})))
    average_ms = 0.7 * wide.latencies_ms["latency-avg"]
    narrow = not_none(forecaster.best([candidate], Sla.from_bounds({"p95": 40.0, "avg": average_ms})))
    assert narrow.latencies_ms["latency-avg"] <= average_ms
    assert narrow.throughput_infer_per_sec < wide.throughput_infer_per_sec


def test_a_batch_of_one_request_is_no_larger_batch() -> None:
    candidate = Candidate(1)
    trials = [Trial(0, candidate, ((LoadPoint(1, 16), simulated_measurement(candidate, 16)),))]
    trials.append(Trial(1, Candidate(2, True), status="failed", reason="it crashed"))
    subject = break_down_stages(Point(0, candidate, *trials[0].measurements[0]), trials)
    forecaster = SimulatedForecaster(latest_points(trials), subject.point, Problem("m", SPACE, 1, 64, sla=SLA))
    changes = simulate_changes(forecaster, subject, SLA, None, trials, on_gpu=False)
    assert "larger_batches" not in {change.kind for change in changes}


@pytest.mark.parametrize(
    ("failed_candidates", "advised"),
    [
        ((), {"more_instances", "larger_batches"}),
        ((Candidate(32, True, instance_count=2),), {"more_instances", "larger_batches"}),
        ((Candidate(16, True, instance_count=2), Candidate(32, True)), {"more_instances"}),
        ((Candidate(8, True, instance_count=3),), {"larger_batches"}),
    ],
)
def test_sizes_and_counts_that_failed_are_not_advised(
    failed_candidates: tuple[Candidate, ...], advised: set[str]
) -> None:
    """The baseline forms no batches, so its max_batch_size was not tried."""
    subject_candidate = Candidate(8, True, instance_count=2)
    tried_candidates = [Candidate(64, instance_count=2), Candidate(4, True), subject_candidate]
    trials = [
        Trial(i, candidate, ((LoadPoint(1, 16), simulated_measurement(candidate, 16)),))
        for i, candidate in enumerate(tried_candidates)
    ]
    trials += [
        Trial(i, candidate, status="failed", reason="it crashed")
        for i, candidate in enumerate(failed_candidates, len(tried_candidates))
    ]
    subject = break_down_stages(
        Point(2, subject_candidate, LoadPoint(1, 16), simulated_measurement(subject_candidate, 16)), trials
    )
    forecaster = SimulatedForecaster(latest_points(trials), subject.point, Problem("m", SPACE, 1, 64, sla=SLA))
    changes = simulate_changes(forecaster, subject, SLA, None, trials, on_gpu=False)
    assert {change.kind for change in changes} & {"more_instances", "larger_batches"} == advised
    crashed = {
        candidate.max_batch_size
        for candidate in failed_candidates
        if candidate.max_batch_size > subject_candidate.max_batch_size
    }
    assert not crashed & {change.forecast.candidate.max_batch_size for change in changes if change.forecast}


# -- runs ---------------------------------------------------------------------------------------------------------


def test_the_sample_run_is_explained(sample: Explanation) -> None:
    assert sample.bottleneck.kind == "compute"
    assert sample.subject.busy_share == pytest.approx(0.93, abs=0.01)
    assert str(not_none(sample.binding).constraint) == "p95 <= 20 ms"
    changes = not_none(sample.changes)
    kinds = {remedy.kind for remedy in changes.remedies}
    assert kinds == {"more_instances", "fp16", "larger_batches", "faster_network", "no_copying"}
    half_bound, wider_bound, twice_bound = changes.other_slas
    assert (half_bound.bound_ms, wider_bound.bound_ms, twice_bound.bound_ms) == (10.0, 30.0, 40.0)
    gains = [other.gain.estimate for other in (half_bound, wider_bound, twice_bound) if other.gain]
    assert gains[0] < 0 < gains[1] <= gains[2] + 0.02
    assert sample.runner_up is not None
    assert sample.runner_up.point.trial == 5
    assert sample.runner_up.missed == "", "it was measured for comparison only"
    gain = not_none(sample.runner_up.gain)
    ratio = not_none(gain.ratio)
    low, high = ratio.bounds
    assert low < ratio.estimate < high
    assert document(sample)["runner_up"]["speedup_interval"] == [low, high]
    shown = explanation_text(sample, 200)
    assert max(map(len, shown.splitlines())) <= 80
    assert "assumption: inference takes 0.5" in " ".join(shown.split())
    assert "What limits the throughput: computing" in shown


def test_the_first_objective_decides_what_a_run_is_compared_by(folder: Path) -> None:
    """The capacity and the forecasts are about the throughput in any case."""
    change_info(
        folder, "problem", objectives=["latency-p95", "throughput"], constraints=["throughput >= 5000 infer/s"]
    )
    explanation = explain(read_run(folder))
    shown = " ".join(explanation_text(explanation).split())
    beyond = (
        "throughput >= 5,000 infer/s: beyond it, trial 0 had p95 4.15 ms (-77.5 %), with throughput 4,783 infer/s."
    )
    assert beyond in shown
    assert "Another measurement within the bounds had a lower p95: 12,582 infer/s, p95 15.6 ms" in shown
    assert "Gains are in throughput; the objective of the run is p95." in shown
    assert "its p95 was 5.3 % higher than that of the recommendation (from 1.2 % lower to 12.3 % higher)" in shown
    gain = not_none(not_none(explanation.runner_up).gain)
    assert (gain.metric, gain.value) == ("latency-p95", explanation.subject.point.measurement.latency_p95_ms)
    assert document(explanation)["runner_up"]["speedup_values"] == [gain.value, gain.compared_value]


@pytest.mark.parametrize(("objective", "trial"), [("throughput", 5), ("memory", 0)])
def test_the_runner_up_is_the_second_best_by_the_objective(objective: str, trial: int) -> None:
    run = read_run(SAMPLE)
    problem = replace(run.problem, objectives=(METRICS[objective],))
    runner_up = not_none(find_runner_up(replace(run, problem=problem, baseline=BATCHED)))
    assert runner_up.point.trial == trial


def test_the_fp16_factor_is_an_option(capsys: pytest.CaptureFixture[str]) -> None:
    def fp16_gain(factor: str) -> float:
        assert main([str(SAMPLE), "--json", "--fp16-factor", factor]) == 0
        printed = json.loads(capsys.readouterr().out)
        return float(
            next(remedy["gain"] for remedy in printed["predicted_changes"]["remedies"] if remedy["name"] == "FP16")
        )

    assert fp16_gain("0.4") > fp16_gain("0.8") > fp16_gain("1") == pytest.approx(0.0, abs=0.001)
    with pytest.raises(BadInputError, match=r"--fp16-factor 2: write a share"):
        main([str(SAMPLE), "--fp16-factor", "2"])


@pytest.mark.parametrize("name", ["best", "baseline"])
def test_a_model_in_python_has_no_conversion_to_fp16(folder: Path, name: str) -> None:
    shutil.rmtree(folder / "best")
    (folder / name).mkdir()
    (folder / name / "config.pbtxt").write_text('name: "m"\nbackend: "python"\nnew_field: 1\n')
    assert not has_fp16_conversion(read_run(folder))


@pytest.mark.parametrize("text", ["not a config", 'name: "m"\nplatform: "onnxruntime_onnx"\n'])
def test_models_of_other_and_unknown_backends_have_a_conversion_to_fp16(folder: Path, text: str) -> None:
    (folder / "best" / "config.pbtxt").write_text(text)
    assert has_fp16_conversion(read_run(folder))


def test_fp16_is_left_out_for_a_model_without_a_conversion(folder: Path) -> None:
    """The model computes in FP16 already."""
    facts = json.loads((folder / "run.json").read_text())["problem"]["facts"]
    change_info(folder, "problem", facts=facts | {"precision": "fp16"})
    explanation = explain(read_run(folder))
    assert not has_fp16_conversion(explanation.run)
    assert "fp16" not in {remedy.kind for remedy in not_none(explanation.changes).remedies}
    assert "FP16" not in explanation_text(explanation)


def test_a_bound_that_only_unstable_measurements_meet_is_not_said_to_be_missed(folder: Path) -> None:
    table = pd.read_csv(folder / "trials.csv", dtype=str, keep_default_na=False)
    table = table[table["confirmation"] == ""].assign(stable="false", reason="the windows disagree")
    table.to_csv(folder / "trials.csv", index=False)
    change_info(folder, result=None)
    explanation = explain(read_run(folder))
    shown = " ".join(explanation_text(explanation).split())
    assert not explanation.has_recommendation
    assert worst_missed(explanation.subject.point, explanation.run.problem.sla) is None
    assert "No measurement that meets the SLA was stable: the windows disagree." in shown
    assert "is missed" not in shown


def test_a_run_without_a_recommendation_is_explained(folder: Path) -> None:
    change_info(folder, "problem", constraints=["p95 <= 2 ms"])
    explanation = explain(read_run(folder))
    shown = " ".join(explanation_text(explanation).split())
    assert not explanation.has_recommendation
    assert explanation.runner_up is None
    assert "p95 <= 2 ms is missed" in shown
    assert "no load is expected to meet the bound" in shown
    assert "The lowest measured p95 is 4.15 ms: 4,783 infer/s, p95 4.15 ms, concurrency 4; trial 0" in shown
    written = document(explanation)
    json.dumps(written, allow_nan=False)
    assert (written["binding"]["constraint"], written["binding"]["beyond"]) == ("p95 <= 2 ms", None)


def test_a_run_without_a_bound_is_explained(folder: Path) -> None:
    change_info(folder, "problem", constraints=[])
    explanation = explain(read_run(folder))
    assert "None: the run had no SLA." in explanation_text(explanation)
    json.dumps(document(explanation), allow_nan=False)


def test_the_text_warns_if_the_model_is_far_from_the_measurements(sample: Explanation) -> None:
    assert "far from the measurements" not in explanation_text(sample)
    inaccurate_model = replace(sample, changes=replace(not_none(sample.changes), error=0.4))
    assert "far from the measurements: measure a change to rely on it" in " ".join(
        explanation_text(inaccurate_model).split()
    )


def test_a_killed_run_is_explained_from_its_measurements(folder: Path) -> None:
    change_info(folder, status="running")
    lines = (folder / "trials.csv").read_text().splitlines(keepends=True)
    (folder / "trials.csv").write_text("".join(lines[:4]) + lines[4][:30])
    explanation = explain(read_run(folder))
    assert "was killed" in explanation_text(explanation)
    assert not_none(explanation.changes).measurement_count == 3


@pytest.mark.parametrize(
    ("status", "said"),
    [("failed", r"the run failed \(no server\)"), ("running", "the run was killed")],
)
def test_a_run_without_measurements_is_refused_with_its_reason(folder: Path, status: str, said: str) -> None:
    change_info(folder, status=status, reason="no server")
    (folder / "trials.csv").unlink()
    with pytest.raises(BadInputError, match=rf"^{folder}: nothing to explain: {said}$"):
        explain(read_run(folder))


# -- measurements of the run -----------------------------------------------------------------------------------------


def test_a_measurement_within_the_bounds_with_more_throughput_is_named() -> None:
    explanation = explain(read_run(Path("results/dlrm/sample")))
    shown = " ".join(explanation_text(explanation).split())
    assert "no measurement had more throughput" not in shown
    assert "Another measurement within the bounds had more throughput: 18,486 infer/s" in shown
    assert "It is not recommended, because it was measured in the search only; fresh servers of this" in shown
    assert (
        "p95 <= 30 ms: +1 %, measured: 18,486 infer/s, p95 14.9 ms, concurrency 41; trial 7, one measurement of the "
        "search, which is within 20 ms too." in shown
    )
    assert "Its own test ended with UNDECIDED at 99 % confidence. The recommendation has more throughput." in shown


def test_explain_and_plan_show_the_same_throughput() -> None:
    run = read_run(Path("results/dlrm/sample"))
    [[source]] = choose_configurations([run], Sla())
    explanation = explain(run)
    assert source.measured == explanation.subject.point
    assert "measured: 18,300 ± 1,800 infer/s" in explanation_text(explanation)
    assert "46 concurrent requests of 4 samples, 18,300 ± 1,800 infer/s" in capacity_sentence(source, source.measured)


@pytest.mark.parametrize("is_tested", [True, False])
def test_a_disturbed_measurement_with_more_throughput_counts_if_it_is_from_fresh_servers(
    is_tested: bool, sample: Explanation
) -> None:
    """The forecasts of other bounds count it too, with the same numbers."""
    point, outcome = sample.subject.point, sample.outcome
    rate = 1.4 * point.throughput_infer_per_sec
    load, faster = LoadPoint(4, 60), replace(point.measurement, throughput_infer_per_sec=rate, stable=False)
    disturbed = replace(point, load=load, measurement=faster)
    confirmed = [replace(entry, point=disturbed) for entry in outcome.confirmed_loads if entry.point == point]
    more = replace(
        outcome,
        points=(*outcome.points, disturbed),
        confirmed_loads=(*outcome.confirmed_loads, *(confirmed if is_tested else ())),
    )
    shown = " ".join(explanation_text(replace(sample, outcome=more)).split())
    named = "Another measurement within the bounds had more throughput: "
    assert (named in shown and "because its test at this load ended" in shown) == is_tested


def test_a_stable_measurement_that_misses_several_bounds_is_named_before_a_faster_unstable_one(
    sample: Explanation,
) -> None:
    run, point = sample.run, sample.subject.point
    rate = point.throughput_infer_per_sec
    slow = replace(point.measurement, throughput_infer_per_sec=1.1 * rate, latency_p50_ms=15.0, latency_p95_ms=30.0)
    overload = replace(slow, throughput_infer_per_sec=1.2 * rate, stable=False)
    points = (point, *(replace(point, load=LoadPoint(4, 90), measurement=m) for m in (slow, overload)))
    sla = Sla.from_bounds({"p50": 14.0, "p95": 20.0})
    run_with_two_bounds = replace(run, problem=replace(run.problem, sla=sla))
    explanation_with_two_bounds = replace(
        sample,
        run=run_with_two_bounds,
        outcome=replace(sample.outcome, points=points),
        binding=find_binding_constraint(point, points, sla, run.problem.objectives[0]),
    )
    text = " ".join(explanation_text(explanation_with_two_bounds).split())
    fastest = "The stable measurement with the best throughput"
    assert f"Several together. {fastest} misses p50 <= 14 ms and p95 <= 20 ms" in text
    assert f"{1.1 * rate:,.0f} infer/s" in text


@pytest.mark.parametrize(
    ("max_concurrency", "sentence"), [(47, "The run tried at most 47 requests"), (64, "Among the tried conf")]
)
def test_without_a_faster_measurement_the_capacity_or_the_highest_load_is_the_limit(
    max_concurrency: int, sentence: str, sample: Explanation
) -> None:
    run, point = sample.run, sample.subject.point
    assert point.load.concurrency == 47
    explanation_of_one_point = replace(
        sample,
        run=replace(run, problem=replace(run.problem, max_concurrency=max_concurrency)),
        outcome=replace(sample.outcome, points=(point,)),
        binding=find_binding_constraint(point, [point], run.problem.sla, run.problem.objectives[0]),
    )
    assert sentence in " ".join(explanation_text(explanation_of_one_point).split())
