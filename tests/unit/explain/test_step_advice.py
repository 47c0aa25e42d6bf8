"""Test which step of an ensemble ``tune explain`` names, and the setting that would help."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from objectives import model_stats
from objectives.intervals import ConfidenceInterval
from objectives.metrics import Measurement
from objectives.step_stats import StepStatistic, to_text
from optimizer.config.problem import ConcurrentModel
from optimizer.core.candidate import Candidate, FieldValue
from optimizer.core.trial import LoadPoint, Point, Trial
from optimizer.explain.bottleneck import break_down_stages, find_bottleneck
from optimizer.explain.explanation import NO_STEPS, NO_STEPS_OF_STREAM, explain
from optimizer.explain.explanation_document import document
from optimizer.explain.forecaster import Gain, Remedy
from optimizer.explain.step_advice import StepAdvice, advise
from optimizer.results import outcome_values
from optimizer.results.finished_run import candidate_document, read_run
from optimizer.results.report import tables
from optimizer.results.report.content import report_section
from optimizer.results.report.writer import html, markdown
from tests import streaming_run
from tests.explanation_text import explanation_text
from tests.run_folders import MEASURED, change_info, write_run

COUNT, DELAY = "first/instance_group_count", "first/max_queue_delay_microseconds"
MS = 1_000_000


def step_text(first_ms: tuple[int, int], second_ms: tuple[int, int]) -> str:
    """Return the statistics of 100 requests with (queue, compute) times of two steps, executed one by one."""
    steps = [("chain", 0, (0, 0)), ("first", 1, first_ms), ("second", 1, second_ms)]
    return to_text(
        StepStatistic(name, instances, 100, 100, 100 * queue * MS, 100 * compute * MS, 100 * compute * MS)
        for name, instances, (queue, compute) in steps
    )


FIRST_LIMITS, SECOND_LIMITS, NONE_LIMITS = (
    step_text(first, second) for first, second in (((20, 9), (1, 2)), ((1, 2), (20, 9)), ((4, 2), (0, 3)))
)


def advice(
    text: str,
    *fields: tuple[str, FieldValue],
    tried: tuple[tuple[str, FieldValue], ...] = (),
    remedies: tuple[Remedy, ...] = (),
    batches: bool = True,
) -> StepAdvice:
    """Return the advice for 100 requests per second whose tuned step is ``second``."""
    m = Measurement(100.0, latency_avg_ms=34.0, queue_ms=1.0, compute_infer_ms=2.0, step_stats=text, stable=True)
    point = Point(0, Candidate(8, batches, fields=tuple(sorted(fields))), LoadPoint(1, 4), m)
    trials = [Trial(0, point.candidate, ((point.load, m),)), Trial(1, replace(point.candidate, fields=tried))]
    stages = break_down_stages(point, trials, has_other_models=True, tuned_model="second")
    assert stages.is_limited_by_another is (text == FIRST_LIMITS)
    assert find_bottleneck(stages, None).kind == ("other models" if text == FIRST_LIMITS else "client")
    result = advise(stages, remedies, trials)
    assert result is not None
    return result


def test_the_time_of_other_models_is_not_that_of_the_network() -> None:
    m = Measurement(100.0, latency_avg_ms=34.0, queue_ms=1.0, compute_infer_ms=2.0, step_stats=FIRST_LIMITS)
    point = Point(0, Candidate(8), LoadPoint(1, 4), m)
    trials = [Trial(0, point.candidate, ((point.load, m),))]
    stages = break_down_stages(point, trials, has_other_models=True, tuned_model="second")
    assert stages.stages_ms == {"network_ms": 2.0, "other_models_ms": 29.0, "queue_ms": 1.0, "compute_infer_ms": 2.0}


def test_a_batcher_that_is_off_and_was_not_tried_comes_first() -> None:
    result = advice(FIRST_LIMITS, (DELAY, "off"), (COUNT, 1))
    assert (result.step.model, result.setting) == ("first", DELAY)
    assert result.reasons[0] == "first limits the throughput: its instance computed 90 % of the time."
    assert f"with {DELAY} 0, it would" in result.reasons[1]


def test_more_instances_than_the_run_tried_may_help() -> None:
    for fields in (((DELAY, "off"), (COUNT, 1)), ((DELAY, 0), (COUNT, 1))):
        result = advice(FIRST_LIMITS, *fields, tried=((COUNT, 1), (DELAY, 0)))
        assert result.setting == COUNT
        assert f"A higher {COUNT} than 1" in result.reasons[1]
    result = advice(FIRST_LIMITS, (COUNT, 1), (DELAY, 0), tried=((COUNT, 2),))
    assert result.setting == ""
    assert "also tried 2 instances of it" in result.reasons[1]


def test_an_instance_count_that_does_not_vary_has_no_number() -> None:
    """The instances of a step are those on all GPUs and servers, and the setting is that of one group."""
    result = advice(FIRST_LIMITS, (DELAY, 0), tried=((DELAY, 0),))
    assert result.setting == COUNT
    assert result.reasons[1].startswith(f"A higher {COUNT} would help if the device has room; the run did not vary")


def test_the_setting_of_the_tuned_step_is_the_one_with_the_largest_expected_gain() -> None:
    def remedies(gain: float) -> tuple[Remedy, ...]:
        return (
            Remedy("fp16", "half the time", None, Gain(0.9)),
            Remedy("larger_batches", "batch 16", None, Gain(gain, ConfidenceInterval(gain, gain))),
            Remedy("more_instances", "2 instances instead of 1", None, Gain(0.01)),
        )

    result = advice(SECOND_LIMITS, remedies=remedies(0.3))
    assert (result.step.model, result.setting) == ("second", "max_batch_size")
    assert "batch 16 (+30 %)" in result.reasons[1]
    assert advice(SECOND_LIMITS, remedies=remedies(0.3), batches=False).setting == "max_queue_delay_microseconds"
    assert advice(SECOND_LIMITS, remedies=remedies(0.02)).setting == ""


def test_a_delay_that_holds_requests_back_is_named() -> None:
    result = advice(NONE_LIMITS, (DELAY, 5000))
    assert (result.step.model, result.setting) == ("first", DELAY)
    assert f"A lower {DELAY} than 5000" in result.reasons[1]
    assert advice(NONE_LIMITS, (DELAY, "off")).setting == ""
    assert advice(NONE_LIMITS, (DELAY, 100)).setting == "", "a request waits 4 ms, forty times as long"


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """Return the folder of a run of ``chain``, whose step ``second`` is tuned, before steps were recorded."""
    return change_info(write_run(tmp_path, "chain", fields={COUNT: [1], DELAY: ["off"]}), "problem", batcher="second")


def test_a_run_without_the_times_of_steps_says_so(run: Path) -> None:
    explanation = explain(read_run(run))
    assert NO_STEPS in explanation.bottleneck.reasons
    assert (document(explanation)["steps"], document(explanation)["limiting_step"]) == (None, None)
    assert report_section(read_run(run)).steps.rows == []


def test_the_network_is_a_part_of_the_other_models_without_their_times(tmp_path: Path) -> None:
    served = replace(MEASURED, latency_avg_ms=20.0, queue_ms=0.0, compute_infer_ms=0.4)
    finished = read_run(change_info(write_run(tmp_path, "chain", measured=served), "problem", batcher="second"))
    stages_ms = tables.stages_ms(finished, finished.measured.points[0]) or {}
    assert "network" not in stages_ms
    assert stages_ms["other models and network"] == pytest.approx(19.6)


def test_models_without_their_times_say_why(tmp_path: Path) -> None:
    both = change_info(write_run(tmp_path / "both", "chain"), "problem", concurrent_models="other=3")
    assert NO_STEPS in explain(read_run(both)).bottleneck.reasons
    streamed = change_info(streaming_run.write_run(tmp_path / "streamed"), "problem", batcher="second")
    assert NO_STEPS_OF_STREAM in explain(read_run(streamed)).bottleneck.reasons


def test_the_limiting_one_of_several_models_under_load_is_named(tmp_path: Path) -> None:
    by_model = model_stats.to_text(
        {"chain": Measurement(200.0, latency_p95_ms=3.0), "other": Measurement(1800.0, latency_p95_ms=9.0)}
    )
    times = to_text(
        [
            StepStatistic("chain", 1, 100, 100, 0, 20 * MS, 20 * MS),
            StepStatistic("other", 1, 900, 900, 5400 * MS, 1620 * MS, 900 * MS),
        ]
    )
    counted = replace(MEASURED, throughput_infer_per_sec=2000.0, by_model=by_model, step_stats=times)
    run = write_run(tmp_path, "chain", fields={"other/instance_group_count": [1]}, measured=counted)
    explanation = explain(read_run(change_info(run, "problem", concurrent_models="other=9")))
    text = explanation_text(explanation)
    assert "What limits the throughput: other\n" in text
    assert "bottleneck is unknown" not in text
    assert "90 %     6.000       1.800\n" in text
    words = " ".join(text.split())
    assert "A higher other/instance_group_count than 1 would help" in words
    assert "other has to serve more before" in words
    assert "The changes are those of chain; the throughput is that of all models together." in words
    assert document(explanation)["bottleneck"] == "other models"
    candidates = {"other": candidate_document(Candidate(8))}
    simulated = read_run(change_info(run, "problem", concurrent_candidates=candidates))
    assert simulated.problem.concurrent == (ConcurrentModel("other", 9.0, Candidate(8)),)
    assert "has to serve more" not in explanation_text(explain(simulated)), "the limit of each is simulated"
    unknown = write_run(tmp_path / "unknown", "chain", measured=MEASURED)
    change_info(unknown, "problem", concurrent_models="other=9", concurrent_candidates=candidates)
    assert explain(read_run(unknown)).changes is None, "a damaged table lacks the values of each model"


def test_the_limit_of_a_step_is_not_simulated_next_to_other_models(tmp_path: Path) -> None:
    """The simulation has the times of the tuned step, and of the other models under load."""
    by_model = {"chain": Measurement(200.0, latency_p95_ms=30.0), "other": Measurement(200.0, latency_p95_ms=9.0)}
    times = to_text(
        [
            StepStatistic("chain", 0, 100, 100, 0, 0, 0),
            StepStatistic("first", 1, 100, 100, 0, 10 * MS, 10 * MS),
            StepStatistic("second", 1, 100, 100, 900 * MS, 950 * MS, 950 * MS),
            StepStatistic("other", 1, 100, 100, 0, 20 * MS, 20 * MS),
        ]
    )
    counted = replace(
        MEASURED, throughput_infer_per_sec=400.0, by_model=model_stats.to_text(by_model), step_stats=times
    )
    run = write_run(tmp_path, "chain", measured=counted)
    candidates = {"other": candidate_document(Candidate(8))}
    changed = change_info(
        run, "problem", batcher="first", concurrent_models="other=1", concurrent_candidates=candidates
    )
    words = " ".join(explanation_text(explain(read_run(changed))).split())
    assert "second has to serve more before" in words


def test_the_limiting_step_is_in_text_json_and_report(tmp_path: Path) -> None:
    # 100 requests of two samples at 1,000 infer/s are 0.2 s: first computes 0.18 s of them
    times = to_text(
        [
            StepStatistic("chain", 0, 100, 100, 0, 0, 0),
            StepStatistic("first", 1, 100, 100, 600 * MS, 180 * MS, 180 * MS),
            StepStatistic("second", 2, 100, 50, 0, 40 * MS, 20 * MS),
        ]
    )
    served = replace(MEASURED, latency_avg_ms=20.0, queue_ms=0.0, compute_infer_ms=0.4, step_stats=times)
    run = write_run(tmp_path, "chain", fields={COUNT: [1], DELAY: ["off"]}, measured=served)
    finished = read_run(change_info(run, "problem", batcher="second"))
    explanation = explain(finished)
    text = explanation_text(explanation)
    assert "What limits the throughput: first\n" in text
    assert "  first           1       90 %     6.000       1.800\n" in text
    assert "first has to serve more before these gains are possible" in " ".join(text.split())
    result = json.loads(json.dumps(document(explanation)))
    assert result["limiting_step"] == {"model": "first", "saturated": True, "setting": DELAY}
    assert [(step["model"], step["instances"], step["queue_ms"]) for step in result["steps"]] == [
        ("first", 1, 6.0),
        ("second", 2, 0.0),
    ]
    assert result["bottleneck"] == "other models"
    assert tables.stages_ms(finished, finished.measured.points[0]) == {
        **dict.fromkeys(outcome_values.STAGES.values(), 0.0),
        "compute infer": 0.4,
        "network": pytest.approx(11.8),
        "other models": pytest.approx(7.8),
    }
    sections = [report_section(finished)]
    for report in (html(sections, [{}]), markdown(sections)):
        assert "Which model limits the throughput" in report
        assert "first limits the throughput: its instance computed 90 % of the time." in report
