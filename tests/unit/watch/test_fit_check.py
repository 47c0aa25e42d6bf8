"""Judgements on made-up loads of a server, against a recorded run of dlrm."""

from __future__ import annotations

import math
import re
import shutil
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from objectives.metrics import Measurement
from objectives.model_stats import to_text
from objectives.sla import Sla, Verdict
from optimizer.core.candidate import SERVER_PROCESSES
from optimizer.core.errors import BadInputError
from optimizer.core.load_shapes import RequestTimes
from optimizer.plan.replica import Replica
from optimizer.plan.slowness import estimate_slowness
from optimizer.results.finished_run import read_run
from optimizer.watch.expectation import (
    Expectation,
    WhyNotSimulated,
    derive_expectation,
    is_pipeline,
    predict_slowness,
    time_in_server_ms,
)
from optimizer.watch.fit_check import NOT_EXPORTED, Check, CheckKind, Judgement, share_interval
from optimizer.watch.next_steps import busy_share, next_steps, plan_step
from optimizer.watch.server_metrics import ServedLoad
from optimizer.watch.watch_report import document, headline, observed_text
from tests import streaming_run
from tests.production_loads import (
    ERROR,
    INTERVALS,
    RATE,
    SAMPLE,
    SECONDS,
    at,
    expectation_of,
    loads,
    printed,
    recorded_expectation,
)
from tests.run_folders import MEASURED, change_info, write_run

IDLE = ServedLoad(SECONDS, 0, {}, 0, 0, 0, 0, 0)
HALF = INTERVALS // 2


def judged(observed: list[ServedLoad], servers: int = 1) -> tuple[Judgement, dict[CheckKind, Check]]:
    judgement = Judgement(recorded_expectation(), observed, servers)
    return judgement, {check.kind: check for check in judgement.checks}


def differing(observed: list[ServedLoad], servers: int = 1) -> set[CheckKind]:
    return {check.kind for check in judged(observed, servers)[0].differing}


@pytest.mark.parametrize("share", [0.02, 0.2, 0.5, 0.8])
@pytest.mark.parametrize("servers", [1, 3])
def test_the_expected_load_fits(share: float, servers: int) -> None:
    assert recorded_expectation().safe_rate is not None
    judgement, checks = judged(loads(share * (recorded_expectation().safe_rate or 0) * servers, servers), servers)
    assert judgement.verdict is Verdict.PASS, judgement.differing
    assert {check.status for check in checks.values()} == {"fits"}
    assert next_steps(judgement) == []


def test_the_confirmed_load_itself_fits_and_is_near_the_capacity() -> None:
    measured = recorded_expectation().point.measurement
    requests = SECONDS * (measured.throughput_infer_per_sec or 0) / recorded_expectation().request_samples
    confirmed = ServedLoad(
        SECONDS,
        requests,
        {},
        requests * recorded_expectation().request_samples,
        requests * recorded_expectation().request_samples / (measured.mean_batch_size or 1),
        requests * (measured.latency_avg_ms or 0),
        requests * (measured.queue_ms or 0),
        requests * ((time_in_server_ms(measured) or 0) - (measured.queue_ms or 0)),
    )
    judgement, checks = judged([confirmed] * INTERVALS)
    assert judgement.verdict is Verdict.PASS, judgement.differing
    assert checks[CheckKind.RATE].status == "near"
    (step,) = next_steps(judgement)
    assert step.command.startswith("tune plan ")


@pytest.mark.parametrize(
    ("changes", "kind"),
    [
        ({"samples": 8 * RATE * SECONDS, "executions": RATE * SECONDS / 2}, CheckKind.REQUEST_SIZE),
        ({"executions": RATE * SECONDS}, CheckKind.BATCH_SIZE),  # no batching
        ({"executions": RATE * SECONDS / 15}, CheckKind.BATCH_SIZE),  # bursts
        ({"compute_ms": 20 * RATE * SECONDS}, CheckKind.EXECUTION_TIME),
        ({"compute_ms": 0.1 * RATE * SECONDS}, CheckKind.EXECUTION_TIME),
        ({"queue_ms": 30 * RATE * SECONDS}, CheckKind.QUEUE_TIME),
        ({"queue_ms": 30 * RATE * SECONDS}, CheckKind.TIME_IN_SERVER),
        ({"request_ms": 25 * RATE * SECONDS}, CheckKind.MEAN_LATENCY),
        ({"latencies_ms": {0.95: (19.0, 21.0)}}, CheckKind.LATENCY_QUANTILE),
        ({"stalled_seconds": 5.0}, CheckKind.STALL),
        ({"failures": {"REJECTED": 20.0}}, CheckKind.FAILED_REQUESTS),
    ],
)
def test_a_changed_load_is_detected(changes: Mapping[str, Any], kind: CheckKind) -> None:
    assert differing(loads(RATE)) == set()
    assert kind in differing(loads(RATE, **changes))


@pytest.mark.parametrize(
    ("samples_per_execution", "explanation"),
    [
        (4.0, "is the recommended config.pbtxt deployed?"),
        (60.0, "requests arrive in bursts, the server is slower, or it has another config.pbtxt"),
        (100.0, "larger than max_batch_size 64 of the recommendation: the server has another config.pbtxt"),
    ],
)
def test_another_configuration_is_named_as_the_cause_of_other_batches(
    samples_per_execution: float, explanation: str
) -> None:
    executions = RATE * SECONDS * recorded_expectation().request_samples / samples_per_execution
    check = judged(loads(RATE, executions=executions))[1][CheckKind.BATCH_SIZE]
    assert check.status == "differs"
    assert check.explanation.endswith(explanation)


def test_batches_of_requests_of_another_size_are_not_compared() -> None:
    check = judged(loads(RATE, samples=8 * RATE * SECONDS))[1][CheckKind.BATCH_SIZE]
    assert (check.status, check.explanation) == ("unknown", "requests of another size form other batches")


def test_a_rate_above_the_confirmed_throughput_is_detected() -> None:
    confirmed = recorded_expectation().confirmed_rate.predicted(1, ERROR)
    assert confirmed is not None
    assert CheckKind.RATE in differing(loads(1.2 * confirmed.high))
    assert CheckKind.RATE not in differing(loads(1.2 * confirmed.high, 2), 2)


def test_the_rate_of_one_of_several_models_is_its_own(tmp_path: Path) -> None:
    throughputs = {"doubler": 300.0, "other": 700.0}
    by_model = to_text({name: replace(MEASURED, throughput_infer_per_sec=rate) for name, rate in throughputs.items()})
    run = write_run(tmp_path / "run", measured=replace(MEASURED, throughput_infer_per_sec=1000.0, by_model=by_model))
    rate = derive_expectation(read_run(run)).confirmed_rate.interval(0.01)
    assert rate is not None
    assert rate.low < 300 / read_run(run).problem.request_batch_size < rate.high < 1000


def test_one_of_several_models_is_not_simulated_from_the_sum(tmp_path: Path) -> None:
    folder = shutil.copytree(SAMPLE, tmp_path / "run")
    expected = derive_expectation(read_run(change_info(folder, "problem", concurrent_models="other=0.5")))
    assert (expected.simulation, expected.safe_rate) == (WhyNotSimulated.CONCURRENT, None)
    assert plan_step(expected, 100).command == "", "the rates of a plan are those of all models together"
    text = printed(Judgement(expected, loads(RATE), 1))
    assert "not checked   other: the run measured dlrm next to other models" in text


def test_the_output_names_each_bound_and_the_kind_of_server() -> None:
    quantiles = loads(RATE, 2, latencies_ms={0.95: (19.0, 19.0), 0.99: (30.0, 30.0)})
    text = printed(Judgement(expectation_of(sla=Sla.from_bounds({"p95": 20.0, "p99": 40.0})), quantiles, 2))
    assert re.findall(r"(?m)^(requests/s per \w+|p\d+ in the server) ", text) == [
        "requests/s per server",
        "p95 in the server",
        "p99 in the server",
    ]
    assert "\nrequests/s per replica " in printed(Judgement(of_processes(2), quantiles, 2))


def test_quantiles_of_the_server_within_the_bound_replace_its_mean() -> None:
    names = set(judged(loads(RATE, latencies_ms={0.95: (19.0, 19.0), 0.99: (40.0, 40.0)}))[1])
    assert CheckKind.LATENCY_QUANTILE in names
    assert CheckKind.MEAN_LATENCY not in names


def test_one_failure_of_many_requests_is_no_difference_and_rejections_of_all_are() -> None:
    assert recorded_expectation().served_requests > 10_000
    few = loads(RATE)
    few[0] = replace(few[0], failures={"OTHER": 1.0})
    assert differing(few) == set()
    refused = replace(IDLE, failures={"REJECTED": 300.0})
    assert differing([refused] * INTERVALS) == {CheckKind.FAILED_REQUESTS}


def test_failures_that_the_run_permits_or_had_are_no_difference() -> None:
    some = loads(RATE, failures={"REJECTED": 0.01 * RATE * SECONDS})
    many = loads(RATE, failures={"REJECTED": 0.05 * RATE * SECONDS})
    permits = expectation_of(sla=Sla.from_bounds({"error-rate": 2.0}))
    had = replace(recorded_expectation(), failed_requests=round(0.02 * recorded_expectation().served_requests))
    for expected, share in ((permits, "none of"), (had, f"{had.failed_requests:,} of")):
        assert Judgement(expected, some, 1).differing == ()
        (check,) = Judgement(expected, many, 1).differing
        assert check.kind == CheckKind.FAILED_REQUESTS
        assert share in check.explanation


def test_few_requests_are_undecided_and_none_are_too() -> None:
    judgement, _ = judged(loads(1.0))
    assert judgement.fewest_requests == 90  # 0.95 ** 90 < 1 %
    assert judgement.verdict is Verdict.UNDECIDED
    judgement = Judgement(recorded_expectation(), [IDLE] * INTERVALS, 1)
    assert judgement.verdict is Verdict.UNDECIDED
    assert [(check.kind, check.status) for check in judgement.checks] == [(CheckKind.RATE, "fits")]
    assert Judgement(recorded_expectation(), [], 1, lost_intervals=INTERVALS).verdict is Verdict.UNDECIDED


@pytest.mark.parametrize(("bounds_ms", "fewest"), [({"p95": 20.0, "p99": 40.0}, 459), ({"avg": 20.0}, 90)])
def test_the_highest_percentile_needs_the_most_requests(bounds_ms: Mapping[str, float], fewest: int) -> None:
    """0.99 ** 459 is below 1 %, and so is 0.95 ** 90, which counts if no percentile has a bound."""
    expected = expectation_of(sla=Sla.from_bounds(bounds_ms))
    enough, too_few = (Judgement(expected, [replace(IDLE, requests=count)], 1) for count in (fewest, fewest - 1))
    assert enough.fewest_requests == fewest
    assert too_few.has_few_requests
    assert not enough.has_few_requests


def test_all_checks_share_the_error_probability() -> None:
    """Three latency bounds lead to ten checks, so the upper end of the rate is wrong with a tenth of 1 %."""
    sla = Sla.from_bounds({"p95": 20.0, "p99": 40.0, "p99.9": 60.0})
    rate = Judgement(expectation_of(sla=sla), loads(500.0), 1).check(CheckKind.RATE)
    assert rate is not None
    assert rate.expected_range is not None
    predicted = recorded_expectation().confirmed_rate.predicted(1, 0.01 / 10)
    assert predicted is not None
    assert rate.expected_range.high == predicted.high


def test_an_overload_in_some_of_the_intervals_is_undecided() -> None:
    """The means are above their limits, and their intervals are not, because few loads have the overload."""
    requests = 3 * RATE * SECONDS
    crowded = loads(3 * RATE, queue_ms=12 * requests, request_ms=30 * requests)
    judgement, checks = judged([*loads(RATE)[:HALF], *crowded[:HALF]])
    assert judgement.verdict is Verdict.UNDECIDED
    assert {check.kind for check in judgement.undecided} == {CheckKind.QUEUE_TIME, CheckKind.MEAN_LATENCY}
    for name in (CheckKind.QUEUE_TIME, CheckKind.MEAN_LATENCY):
        measured, limit = checks[name].measured, checks[name].expected_range
        assert measured is not None
        assert limit is not None
        assert measured.low < limit.high < measured.value
    (step,) = next_steps(judgement)
    assert step.advice.startswith("watch again while the load is steady")
    assert "do not decide whether it fits" in headline(judgement)
    assert "too few" not in headline(judgement) + observed_text(judgement)


@pytest.mark.parametrize("spread", [0.0, 0.01, 0.1, 0.9])
def test_a_mean_above_the_bound_never_fits(spread: float) -> None:
    """The latency of a request, whose mean is 21 ms with a bound of 20 ms, varies from interval to interval."""
    usual = loads(RATE)
    varied = [
        replace(load, request_ms=load.requests * 21 * (1 + spread * (-1) ** place))
        for place, load in enumerate(usual)
    ]
    assert judged(varied)[1][CheckKind.MEAN_LATENCY].status == ("differs" if spread <= 0.01 else "undecided")
    assert judged(varied)[0].verdict is (Verdict.FAIL if spread <= 0.01 else Verdict.UNDECIDED)


def test_a_varying_rate_above_the_confirmed_throughput_is_undecided() -> None:
    confirmed = recorded_expectation().confirmed_rate.predicted(1, ERROR)
    assert confirmed is not None
    many = loads(1.2 * confirmed.high)
    rate = judged([*many, *[IDLE] * 2])[1][CheckKind.RATE]
    assert rate.status == "undecided"
    assert rate.explanation.startswith("the value is above the expected range")


def test_a_failure_of_few_requests_is_undecided() -> None:
    few = loads(10.0)
    few[0] = replace(few[0], failures={"CANCELED": 1.0})
    judgement, checks = judged(few)
    assert (judgement.verdict, checks[CheckKind.FAILED_REQUESTS].status) == (Verdict.UNDECIDED, "undecided")


def test_a_mix_of_sizes_at_a_low_rate_fits() -> None:
    """The mean of few random sizes is often outside of the range, which is narrow."""
    usual = loads(10.0)
    sizes = [(3.2, 5.2)[place % 2] for place in range(INTERVALS)]
    check = judged([replace(load, samples=load.requests * size) for load, size in zip(usual, sizes, strict=True)])[1][
        CheckKind.REQUEST_SIZE
    ]
    assert check.measured is not None
    assert check.expected_range is not None
    assert check.measured.value > check.expected_range.high
    assert (check.status, check.explanation) == ("fits", "")


@pytest.mark.parametrize("share", [0.3, 0.6, 0.9])
@pytest.mark.parametrize("before", [0.0, 0.1])
def test_a_load_that_starts_during_the_observation_fits(share: float, before: float) -> None:
    """Its requests are compared with the rate at which they came, which is above the mean over all intervals."""
    safe = recorded_expectation().safe_rate or 0.0
    earlier = loads(before * safe) if before else [IDLE] * INTERVALS
    judgement, _ = judged([*earlier, *loads(share * safe)[:HALF]])
    assert judgement.verdict is Verdict.PASS, [*judgement.differing, *judgement.undecided]


def test_bounds_on_quantiles_that_the_server_does_not_export_are_not_checked() -> None:
    assert list(map(str, judged(loads(RATE))[0].unchecked_bounds)) == ["p95 <= 20 ms"]
    assert judged(loads(RATE, latencies_ms={0.95: (19.0, 19.0)}))[0].unchecked_bounds == ()
    assert judged([IDLE] * INTERVALS)[0].unchecked_bounds == ()
    means = expectation_of(sla=Sla.from_bounds({"avg": 20.0}))
    assert Judgement(means, loads(RATE), 1).unchecked_bounds == ()


def test_times_that_the_server_does_not_export_are_not_checked() -> None:
    hidden = loads(RATE, request_ms=math.nan, queue_ms=math.nan, compute_ms=math.nan)
    judgement, checks = judged(hidden)
    assert judgement.verdict is Verdict.PASS
    times = {CheckKind.QUEUE_TIME, CheckKind.EXECUTION_TIME, CheckKind.TIME_IN_SERVER, CheckKind.MEAN_LATENCY}
    assert {name for name, check in checks.items() if check.status == "unknown"} == times
    assert {checks[name].explanation for name in times} == {NOT_EXPORTED}
    assert busy_share(recorded_expectation(), hidden, 1) is None
    means = expectation_of(sla=Sla.from_bounds({"avg": 20.0}))
    judgement = Judgement(means, hidden, 1)
    assert list(map(str, judgement.unchecked_bounds)) == ["avg <= 20 ms"]
    assert NOT_EXPORTED in " ".join(printed(judgement).split())


@pytest.mark.parametrize(
    ("quantiles", "remark"),
    [
        ({}, "p95: a tritonserver that is started with --metrics-config=summary_latencies=true, or by"),
        (
            {0.99: (30.0, 30.0)},
            "--metrics-config=summary_latencies=true --metrics-config=summary_quantiles=0.95:0.005",
        ),
        ({0.95: (19.0, 19.0)}, None),
    ],
)
def test_the_output_names_the_option_that_adds_the_bound_itself(
    quantiles: Mapping[float, tuple[float, float]], remark: str | None
) -> None:
    text = printed(judged(loads(RATE, latencies_ms=quantiles))[0])
    assert (remark in " ".join(text.split())) if remark else ("metrics-config" not in text)
    assert ("; p95 was not checked" in text.splitlines()[0]) is bool(remark)


@pytest.mark.parametrize("width", [60, 80, 100])
def test_the_output_has_no_trailing_blanks_and_one_block_of_differences(width: int) -> None:
    slow = [
        replace(load, compute_ms=20 * load.requests, queue_ms=30 * load.requests, request_ms=60 * load.requests)
        for load in loads(RATE)
    ]
    text = printed(judged(slow)[0], width)
    lines = text.splitlines()
    assert [row for row in lines if row != row.rstrip()] == []
    labels = [place for place, row in enumerate(lines) if row.startswith("differs ")]
    assert len(labels) > 2
    assert all(lines[labels[0] : labels[-1]]), "no empty line"
    assert lines[labels[0] - 1] == ""


@pytest.mark.parametrize(("compute_ms", "text"), [(20, "executions take longer"), (0.1, "executions take less time")])
def test_the_direction_of_another_execution_time_is_named(compute_ms: float, text: str) -> None:
    _, checks = judged(loads(RATE, compute_ms=compute_ms * RATE * SECONDS))
    assert checks[CheckKind.EXECUTION_TIME].explanation.startswith(text)


def test_intervals_without_requests_lower_the_rate_and_say_nothing_about_a_request() -> None:
    busy = loads(RATE, compute_ms=20 * RATE * SECONDS, queue_ms=30 * RATE * SECONDS)
    _, checks = judged([*busy, *[IDLE] * INTERVALS])
    rate = checks[CheckKind.RATE].measured
    assert rate is not None
    assert rate.value == pytest.approx(RATE / 2)
    assert checks[CheckKind.EXECUTION_TIME].status == "differs"
    judgement, checks = judged([busy[0], *[IDLE] * INTERVALS])  # a single load has no confidence interval
    assert judgement.differing == ()
    time = checks[CheckKind.QUEUE_TIME].measured
    assert time is not None
    assert (time.low, time.high) == (-math.inf, math.inf)


def test_a_short_stall_is_no_difference() -> None:
    longest = recorded_expectation().longest_latency_ms
    assert longest is not None
    assert longest >= 20
    checks = judged(loads(RATE, stalled_seconds=2.9e-3 * longest))[1]
    assert checks[CheckKind.STALL].status == "fits"
    assert CheckKind.STALL not in judged(loads(RATE))[1]


def of_processes(count: int) -> Expectation:
    """Return the expectation of the sample as if it had measured ``count`` server processes."""
    point, replica = recorded_expectation().point, recorded_expectation().simulation
    assert isinstance(replica, Replica)
    candidate = replace(point.candidate, fields=((SERVER_PROCESSES, count),))
    return replace(
        recorded_expectation(),
        point=replace(point, candidate=candidate),
        simulation=replace(replica, candidate=candidate),
    )


def test_the_servers_of_a_run_with_processes_are_replicas() -> None:
    expected = of_processes(2)
    assert expected.overlap_factor == 2 * recorded_expectation().overlap_factor
    judgement = Judgement(expected, loads(RATE, 2), 4)
    assert judgement.replicas == 2
    (rate,) = (check for check in judgement.checks if check.kind == CheckKind.RATE)
    assert rate.measured is not None
    assert rate.measured.value == pytest.approx(RATE / 2)
    confirmed = expected.confirmed_rate.predicted(1, ERROR)
    assert confirmed is not None
    over = {check.kind for check in Judgement(expected, loads(1.2 * confirmed.high, 2), 2).differing}
    assert CheckKind.RATE in over


def test_the_time_in_the_server_is_unknown_without_that_in_the_queue_or_of_the_execution() -> None:
    measured = Measurement(100.0, queue_ms=2.0, compute_infer_ms=3.0)
    assert time_in_server_ms(measured) == 5.0
    assert time_in_server_ms(replace(measured, compute_input_ms=0.5, compute_output_ms=0.25)) == 5.75
    assert time_in_server_ms(replace(measured, queue_ms=None)) is None
    assert time_in_server_ms(replace(measured, compute_infer_ms=None)) is None


def test_more_deployments_and_replicas_are_expected_to_differ_less_from_the_mean() -> None:
    few, many = (estimate_slowness([0.1, -0.1] * pairs) for pairs in (2, 20))
    slowest = [predict_slowness(*case).quantile(0.99).slowness for case in ((few, 1), (many, 1), (many, 16))]
    assert slowest == sorted(slowest, reverse=True)
    assert 1.0 < slowest[2] < 0.9 * slowest[0]


def test_two_processes_are_expected_to_batch_as_one_with_half_of_the_load() -> None:
    one_process, two_processes = at(RATE), of_processes(2).at(2 * RATE, 1, ERROR)
    assert two_processes is not None
    assert two_processes.mean_batch_size.low == pytest.approx(one_process.mean_batch_size.low, rel=0.3)
    assert two_processes.mean_batch_size.high == pytest.approx(one_process.mean_batch_size.high, rel=0.3)


def test_the_bound_of_a_replica_is_for_the_requests_of_all_its_processes() -> None:
    """The quantile of all of them is between those of the processes."""
    mixed, slow = ({0.95: values} for values in ((15.0, 25.0), (21.0, 25.0)))
    name = CheckKind.LATENCY_QUANTILE
    assert name in {check.kind for check in Judgement(of_processes(1), loads(RATE, latencies_ms=mixed), 2).differing}
    assert name not in {
        check.kind for check in Judgement(of_processes(2), loads(RATE, latencies_ms=mixed), 2).differing
    }
    assert name in {check.kind for check in Judgement(of_processes(2), loads(RATE, latencies_ms=slow), 2).differing}


def test_first_responses_beyond_the_bound_are_detected() -> None:
    streamed = expectation_of(sla=Sla.parse(["ttft-p95 <= 400 ms"]))
    late = {100.0: 10.0, 500.0: 900.0, 2000.0: 1000.0, math.inf: 1000.0}
    observed = loads(RATE, first_responses=late)
    assert CheckKind.LATE_FIRST_RESPONSES in {check.kind for check in Judgement(streamed, observed, 1).differing}
    in_time = {**late, 500.0: 960.0}
    judgement = Judgement(streamed, loads(RATE, first_responses=in_time), 1)
    assert (judgement.differing, judgement.unchecked_bounds) == ((), ())
    below = {limit: count for limit, count in in_time.items() if limit == 100 or math.isinf(limit)}
    text = " ".join(printed(Judgement(streamed, loads(RATE, first_responses=below), 1)).split())
    assert "ttft-p95: the server's histogram of first responses has no limit at the bound or above" in text


@pytest.mark.parametrize("bound", ["ttft-avg <= 400 ms", "itl-p95 <= 400 ms", "p95 <= 400 ms"])
def test_a_server_shows_only_percentiles_of_the_first_response_of_a_stream(bound: str) -> None:
    """Its own latency ends before the last response."""
    expected = expectation_of(sla=Sla.parse([bound]))
    measured = replace(expected.point.measurement, ttft_p50_ms=1.0)
    streamed = replace(expected, point=replace(expected.point, measurement=measured))
    observed = loads(RATE, first_responses={500.0: 1000.0, math.inf: 1000.0}, latencies_ms={0.95: (19.0, 19.0)})
    assert list(map(str, Judgement(streamed, observed, 1).unchecked_bounds)) == [bound]


def test_a_run_without_a_simulator_is_compared_with_its_confirmed_load_only() -> None:
    unsimulated = replace(recorded_expectation(), simulation=WhyNotSimulated.PIPELINE, safe_rate=None)
    checks = {check.kind: check for check in Judgement(unsimulated, loads(RATE), 1).checks}
    assert checks[CheckKind.BATCH_SIZE].status == "unknown"
    assert checks[CheckKind.EXECUTION_TIME].explanation == WhyNotSimulated.PIPELINE.value
    assert checks[CheckKind.QUEUE_TIME].status == "fits"


def test_a_model_that_streams_is_judged_without_a_simulator(tmp_path: Path) -> None:
    expected = derive_expectation(read_run(streaming_run.write_run(tmp_path)))
    assert expected.is_streamed
    confirmed = expected.confirmed_rate.predicted(1, ERROR)
    assert confirmed is not None
    assert expected.safe_rate is not None
    assert 0 < expected.safe_rate < confirmed.high
    requests = 0.5 * expected.safe_rate * 60
    minute = ServedLoad(60, requests, {}, requests, requests, requests * 900, requests, requests * 500)
    judgement = Judgement(expected, [minute] * INTERVALS, 1)
    checks = {check.kind: check for check in judgement.checks}
    text = " ".join(printed(judgement).split())
    assert "; ttft-p95 and itl-p95 were not checked observed" in text
    assert "ttft-p95: a newer tritonserver that is started with --metrics-config=histogram_latencies=true" in text
    assert "itl-p95: Triton does not export it" in text
    assert checks[CheckKind.RATE].status == "fits"
    assert checks[CheckKind.REQUEST_SIZE].status == "fits"
    assert checks[CheckKind.EXECUTION_TIME].explanation == WhyNotSimulated.KIND.value
    assert CheckKind.MEAN_LATENCY not in checks  # Triton's time of a request ends before the last response


def test_a_run_with_a_load_shape_is_judged_without_steady_traffic() -> None:
    times = RequestTimes("spike")
    expected = derive_expectation(expectation_of(request_times=times).run)
    assert (expected.simulation, expected.safe_rate) == (WhyNotSimulated.SHAPED, None)
    confirmed = expected.confirmed_rate.predicted(1, ERROR)
    assert confirmed is not None
    steps = next_steps(Judgement(expected, loads(1.2 * confirmed.high), 1))
    assert any("--trace requests.csv" in step.command for step in steps)


def test_an_ensemble_is_judged_without_the_times_of_its_steps(tmp_path: Path) -> None:
    run = read_run(shutil.copytree(SAMPLE, tmp_path / "run"))
    for name in ("first", "chain"):
        (run.folder.best / name).mkdir()
        (run.folder.best / name / "config.pbtxt").touch()
    expected = derive_expectation(run)
    checks = {check.kind: check for check in Judgement(expected, loads(RATE), 1).checks}
    assert checks[CheckKind.EXECUTION_TIME].explanation == WhyNotSimulated.PIPELINE.value
    assert {checks[name].status for name in (CheckKind.QUEUE_TIME, CheckKind.TIME_IN_SERVER)} == {"unknown"}
    assert checks[CheckKind.RATE].status == "fits"
    change_info(run.folder.path, "problem", concurrent_models="first=2,chain=1")
    assert not is_pipeline(read_run(run.folder.path)), "they get load of their own"


def test_the_document_has_only_values_that_json_has() -> None:
    judgement, _ = judged(loads(RATE, queue_ms=30 * RATE * SECONDS))
    written = document(judgement, ["http://a:8002/metrics"])
    assert written["verdict"] == "FAIL"
    assert written["search"]["earlier_trials"] > 0
    assert written["search"]["command"].startswith("tune ")
    assert f"--warm-start {SAMPLE}" in written["search"]["command"]
    for check in written["checks"]:
        for value in [check["measured"], *(check["confidence_interval"] or []), *(check["expected"] or [])]:
            assert value is None or math.isfinite(value)


def test_the_bounds_of_a_share_are_exact() -> None:
    assert share_interval(0, 100, 0.05) == pytest.approx((0.0, 1 - 0.05 ** (1 / 100)))
    assert share_interval(100, 100, 0.05) == pytest.approx((0.05 ** (1 / 100), 1.0))
    assert share_interval(0, 0, 0.05) == (0.0, 1.0)


@pytest.mark.parametrize(
    ("status", "advice"),
    [
        ("interrupted", f"continue it with `tune --resume {SAMPLE}`"),
        ("left", "give the run of the worker that ended the study"),
    ],
)
def test_a_run_that_has_not_ended_is_refused_with_the_advice_that_fits(status: str, advice: str) -> None:
    run = read_run(SAMPLE)
    with pytest.raises(BadInputError) as caught:
        derive_expectation(replace(run, info={**run.info, "status": status}))
    assert str(caught.value).endswith(f"and has no recommendation to watch; {advice}")


def test_a_run_without_a_recommendation_is_refused() -> None:
    run = read_run(SAMPLE)
    assert run.outcome is not None
    with pytest.raises(BadInputError, match="nothing to watch"):
        derive_expectation(replace(run, outcome=replace(run.outcome, recommended=None)))
