"""Judgements on made-up loads of a server, against a recorded run of dlrm."""

from __future__ import annotations

import functools
import math
import shutil
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from objectives.confidence import Verdict
from objectives.sla import Sla
from optimizer.core.errors import BadInputError
from optimizer.core.load_shapes import RequestTimes
from optimizer.results.finished_run import read_run
from optimizer.watch.expectation import (
    NOT_SIMULATED,
    PIPELINE,
    SHAPED,
    Expectation,
    ExpectedAtRate,
    expectation,
    time_in_server_ms,
)
from optimizer.watch.fit_check import Check, Judgement, judge, share_interval
from optimizer.watch.server_metrics import ServedLoad
from optimizer.watch.watch_report import document, next_steps, search_command
from tests import streaming_run

SAMPLE = Path(__file__).parents[2] / "data" / "dlrm" / "sample"
ERROR = 0.01 / 8
SAMPLES, SECONDS = 12, 5.0
NOISE = (0.98, 1.01, 1.0, 0.99, 1.02, 1.0)  # of the samples


@functools.cache
def sample() -> Expectation:
    return expectation(read_run(SAMPLE))


def at(rate: float, servers: int = 1) -> ExpectedAtRate:
    expected = sample().at(rate, servers, ERROR)
    assert expected is not None
    return expected


def loads(rate: float, servers: int = 1, **changes: Any) -> list[ServedLoad]:
    """Return samples of servers that behave as expected at ``rate`` requests per second together."""
    here, size = at(rate / servers), sample().request_samples
    requests = rate * SECONDS
    usual = ServedLoad(
        SECONDS,
        requests,
        {},
        requests * size,
        requests * size / math.sqrt(here.mean_batch_size.low * here.mean_batch_size.high),
        requests * 3.0,
        requests * min(0.5 * here.queue_ms.high, 5.0),
        requests * math.sqrt(here.compute_ms.low * here.compute_ms.high),
    )
    changed = replace(usual, **changes)
    noisy = ("requests", "samples", "executions", "request_ms", "queue_ms", "compute_ms")
    return [
        replace(changed, **{name: factor * getattr(changed, name) for name in noisy})
        for factor in (NOISE * math.ceil(SAMPLES / len(NOISE)))[:SAMPLES]
    ]


def judged(samples: list[ServedLoad], servers: int = 1) -> tuple[Judgement, dict[str, Check]]:
    judgement = judge(sample(), samples, servers)
    return judgement, {check.name: check for check in judgement.checks}


def differing(samples: list[ServedLoad], servers: int = 1) -> set[str]:
    return {check.name for check in judged(samples, servers)[0].differing}


@pytest.mark.parametrize("share", [0.02, 0.2, 0.5, 0.8])
@pytest.mark.parametrize("servers", [1, 3])
def test_the_expected_load_fits(share: float, servers: int) -> None:
    assert sample().safe_rate is not None
    judgement, checks = judged(loads(share * (sample().safe_rate or 0) * servers, servers), servers)
    assert judgement.verdict is Verdict.PASS, judgement.differing
    assert {check.status for check in checks.values()} == {"fits"}
    assert next_steps(judgement) == []


def test_the_confirmed_load_itself_fits_and_is_near_the_capacity() -> None:
    measured = sample().point.measurement
    requests = SECONDS * (measured.throughput_infer_per_sec or 0) / sample().request_samples
    confirmed = ServedLoad(
        SECONDS,
        requests,
        {},
        requests * sample().request_samples,
        requests * sample().request_samples / (measured.mean_batch_size or 1),
        requests * (measured.latency_avg_ms or 0),
        requests * (measured.queue_ms or 0),
        requests * ((time_in_server_ms(measured) or 0) - (measured.queue_ms or 0)),
    )
    judgement, checks = judged([confirmed] * SAMPLES)
    assert judgement.verdict is Verdict.PASS, judgement.differing
    assert checks["requests/s per server"].status == "near"
    (step,) = next_steps(judgement)
    assert step.command.startswith("tune plan ")


RATE = 1000.0


@pytest.mark.parametrize(
    ("changes", "name"),
    [
        ({"samples": 8 * RATE * SECONDS, "executions": RATE * SECONDS / 2}, "samples per request"),
        ({"executions": RATE * SECONDS}, "samples per execution"),  # no batching
        ({"executions": RATE * SECONDS / 15}, "samples per execution"),  # bursts
        ({"compute_ms": 20 * RATE * SECONDS}, "execution time"),
        ({"compute_ms": 0.1 * RATE * SECONDS}, "execution time"),
        ({"queue_ms": 30 * RATE * SECONDS}, "queue time"),
        ({"queue_ms": 30 * RATE * SECONDS}, "time in the server"),
        ({"request_ms": 25 * RATE * SECONDS}, "mean in the server"),
        ({"latencies_ms": {0.95: 21.0}}, "p95 in the server"),
        ({"failures": {"REJECTED": 20.0}}, "failed requests"),
    ],
)
def test_a_changed_load_is_detected(changes: Mapping[str, Any], name: str) -> None:
    assert differing(loads(RATE)) == set()
    assert name in differing(loads(RATE, **changes))


def test_a_rate_above_the_confirmed_throughput_is_detected() -> None:
    confirmed = sample().rate.predicted(1, ERROR)
    assert confirmed is not None
    assert "requests/s per server" in differing(loads(1.2 * confirmed.high))
    assert "requests/s per server" not in differing(loads(1.2 * confirmed.high, 2), 2)


def test_quantiles_of_the_server_within_the_bound_replace_its_mean() -> None:
    names = set(judged(loads(RATE, latencies_ms={0.95: 19.0, 0.99: 40.0}))[1])
    assert "p95 in the server" in names
    assert "mean in the server" not in names


def test_one_failure_of_many_requests_is_no_difference_and_rejections_of_all_are() -> None:
    assert sample().requests > 10_000
    few = loads(RATE)
    few[0] = replace(few[0], failures={"OTHER": 1.0})
    assert differing(few) == set()
    refused = ServedLoad(SECONDS, 0, {"REJECTED": 300.0}, 0, 0, 0, 0, 0)
    assert differing([refused] * SAMPLES) == {"failed requests"}


def test_failures_that_the_run_permits_or_had_are_no_difference() -> None:
    some = loads(RATE, failures={"REJECTED": 0.01 * RATE * SECONDS})
    many = loads(RATE, failures={"REJECTED": 0.05 * RATE * SECONDS})
    problem = replace(sample().run.problem, sla=Sla.from_bounds({"error-rate": 2.0}))
    permits = replace(sample(), run=replace(sample().run, problem=problem))
    had = replace(sample(), failed=round(0.02 * sample().requests))
    for expected, share in ((permits, "none of"), (had, f"{had.failed:,} of")):
        assert judge(expected, some, 1).differing == ()
        (check,) = judge(expected, many, 1).differing
        assert check.name == "failed requests"
        assert share in check.explanation


def test_few_requests_are_undecided_and_none_are_too() -> None:
    judgement, _ = judged(loads(1.0))
    assert judgement.fewest_requests == 90  # 0.95 ** 90 < 1 %
    assert judgement.verdict is Verdict.UNDECIDED
    idle = ServedLoad(SECONDS, 0, {}, 0, 0, 0, 0, 0)
    judgement = judge(sample(), [idle] * SAMPLES, 1)
    assert (judgement.verdict, judgement.checks) == (Verdict.UNDECIDED, ())
    assert judge(sample(), [], 1, lost=SAMPLES).verdict is Verdict.UNDECIDED


def test_first_responses_beyond_the_bound_are_detected() -> None:
    streamed = replace(
        sample(), run=replace(sample().run, problem=replace(sample().run.problem, sla=Sla.from_bounds({})))
    )
    sla = Sla.parse(["ttft-p95 <= 400 ms"])
    streamed = replace(streamed, run=replace(streamed.run, problem=replace(streamed.run.problem, sla=sla)))
    late = {100.0: 10.0, 500.0: 900.0, 2000.0: 1000.0, math.inf: 1000.0}
    samples = loads(RATE, first_responses=late)
    assert "late first responses" in {check.name for check in judge(streamed, samples, 1).differing}
    in_time = {**late, 500.0: 960.0}
    assert judge(streamed, loads(RATE, first_responses=in_time), 1).differing == ()


def test_a_run_without_a_simulator_is_compared_with_its_confirmed_load_only() -> None:
    unsimulated = replace(sample(), replica=None, why_not_simulated="no simulator", safe_rate=None)
    checks = {check.name: check for check in judge(unsimulated, loads(RATE), 1).checks}
    assert checks["samples per execution"].status == "unknown"
    assert checks["execution time"].explanation == "no simulator"
    assert checks["queue time"].status == "fits"


def test_a_model_that_streams_is_judged_without_a_simulator(tmp_path: Path) -> None:
    expected = expectation(read_run(streaming_run.write_run(tmp_path)))
    assert expected.is_streamed
    confirmed = expected.rate.predicted(1, ERROR)
    assert confirmed is not None
    assert expected.safe_rate is not None
    assert 0 < expected.safe_rate < confirmed.high
    requests = 0.5 * expected.safe_rate * 60
    minute = ServedLoad(60, requests, {}, requests, requests, requests * 900, requests, requests * 500)
    checks = {check.name: check for check in judge(expected, [minute] * SAMPLES, 1).checks}
    assert checks["requests/s per server"].status == "fits"
    assert checks["samples per request"].status == "fits"
    assert checks["execution time"].explanation == NOT_SIMULATED
    assert "mean in the server" not in checks  # Triton's time of a request ends before the last response


def test_a_run_with_a_load_shape_is_judged_without_steady_traffic() -> None:
    times = RequestTimes("spike")
    shaped = replace(sample().run, problem=replace(sample().run.problem, request_times=times))
    expected = expectation(shaped)
    assert (expected.why_not_simulated, expected.safe_rate) == (SHAPED, None)
    confirmed = expected.rate.predicted(1, ERROR)
    assert confirmed is not None
    steps = next_steps(judge(expected, loads(1.2 * confirmed.high), 1))
    assert any("--trace requests.csv" in step.command for step in steps)


def test_an_ensemble_is_judged_without_the_times_of_its_steps(tmp_path: Path) -> None:
    run = read_run(shutil.copytree(SAMPLE, tmp_path / "run"))
    for name in ("first", "chain"):
        (run.folder.best / name).mkdir()
        (run.folder.best / name / "config.pbtxt").touch()
    expected = expectation(run)
    checks = {check.name: check for check in judge(expected, loads(RATE), 1).checks}
    assert checks["execution time"].explanation == PIPELINE
    assert {checks[name].status for name in ("queue time", "time in the server")} == {"unknown"}
    assert checks["requests/s per server"].status == "fits"


def test_the_document_has_only_values_that_json_has() -> None:
    judgement, _ = judged(loads(RATE, queue_ms=30 * RATE * SECONDS))
    written = document(judgement, ["http://a:8002/metrics"])
    assert written["verdict"] == "FAIL"
    assert written["search"]["earlier_trials"] > 0
    assert written["search"]["command"].startswith("tune ")
    assert f"--warm-start {SAMPLE}" in written["search"]["command"]
    for check in written["checks"]:
        for value in [check["measured"], *(check["interval"] or []), *(check["expected"] or [])]:
            assert value is None or math.isfinite(value)


def test_the_command_of_a_search_has_the_new_request_size() -> None:
    samples = loads(RATE, samples=8 * RATE * SECONDS)
    steps = next_steps(judged(samples)[0])
    assert any("--request-batch-size 8" in step.command for step in steps)
    assert "--request-batch-size" not in search_command(sample())


def test_a_search_with_a_trace_needs_a_new_trace_for_other_sizes() -> None:
    """The trace has the size of each request, so a command with a size of requests would be refused."""
    judgement = judged(loads(RATE, samples=8 * RATE * SECONDS))[0]
    run = judgement.expected.run
    run = replace(run, options=replace(run.options, arrivals="requests.csv"))
    steps = next_steps(replace(judgement, expected=replace(judgement.expected, run=run)))
    search = next(step for step in steps if "search again" in step.advice)
    assert search.advice.startswith("record a new trace")
    assert "--request-batch-size" not in search.command


def test_the_bounds_of_a_share_are_exact() -> None:
    assert share_interval(0, 100, 0.05) == pytest.approx((0.0, 1 - 0.05 ** (1 / 100)))
    assert share_interval(100, 100, 0.05) == pytest.approx((0.05 ** (1 / 100), 1.0))
    assert share_interval(0, 0, 0.05) == (0.0, 1.0)


def test_a_run_that_has_not_ended_is_refused() -> None:
    run = read_run(SAMPLE)
    with pytest.raises(BadInputError, match="was interrupted"):
        expectation(replace(run, info={**run.info, "status": "interrupted"}))


def test_a_run_without_a_recommendation_is_refused() -> None:
    run = read_run(SAMPLE)
    assert run.outcome is not None
    with pytest.raises(BadInputError, match="nothing to watch"):
        expectation(replace(run, outcome=replace(run.outcome, recommended=None)))
