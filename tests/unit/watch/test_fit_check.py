"""Judgements on made-up loads of a server, against a recorded run of dlrm."""

from __future__ import annotations

import functools
import io
import math
import shlex
import shutil
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from objectives.confidence import Verdict
from objectives.sla import Sla
from optimizer.cli import verify
from optimizer.cli.plan import read_plan_arguments
from optimizer.cli.run import read_run_arguments
from optimizer.config.search_space import ModelKind
from optimizer.core.errors import BadInputError
from optimizer.core.load_shapes import RequestTimes
from optimizer.core.trial import SERVER_PROCESSES
from optimizer.options.option_reader import run_options
from optimizer.results.finished_run import read_run
from optimizer.results.summary import NextStep
from optimizer.study.model_finder import trace_sizes
from optimizer.study.warm_start import read_warm_start
from optimizer.watch.cause import busy_share
from optimizer.watch.expectation import (
    Expectation,
    ExpectedAtRate,
    WhyNotSimulated,
    expectation,
    time_in_server_ms,
)
from optimizer.watch.fit_check import NOT_EXPORTED, Check, Judgement, judge, share_interval
from optimizer.watch.server_metrics import ServedLoad
from optimizer.watch.watch_report import (
    document,
    extent,
    headline,
    nearest_other_size,
    next_steps,
    print_judgement,
    search_command,
)
from tests import streaming_run

SAMPLE = Path(__file__).parents[2] / "data" / "dlrm" / "sample"
ERROR = 0.01 / 8
INTERVALS, SECONDS = 12, 5.0
NOISE = (0.98, 1.01, 1.0, 0.99, 1.02, 1.0)  # of the loads in successive intervals


@functools.cache
def sample() -> Expectation:
    return expectation(read_run(SAMPLE))


@functools.cache
def at(rate: float) -> ExpectedAtRate:
    expected = sample().at(rate, 1, ERROR)
    assert expected is not None
    return expected


def loads(rate: float, servers: int = 1, **changes: Any) -> list[ServedLoad]:
    """Return the loads, in INTERVALS, of servers that behave as expected at ``rate`` requests per second together."""
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
        for factor in (NOISE * math.ceil(INTERVALS / len(NOISE)))[:INTERVALS]
    ]


def judged(observed: list[ServedLoad], servers: int = 1) -> tuple[Judgement, dict[str, Check]]:
    judgement = judge(sample(), observed, servers)
    return judgement, {check.name: check for check in judgement.checks}


def differing(observed: list[ServedLoad], servers: int = 1) -> set[str]:
    return {check.name for check in judged(observed, servers)[0].differing}


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
    judgement, checks = judged([confirmed] * INTERVALS)
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
        ({"latencies_ms": {0.95: (19.0, 21.0)}}, "p95 in the server"),
        ({"stalled_seconds": 5.0}, "time without success"),
        ({"failures": {"REJECTED": 20.0}}, "failed requests"),
    ],
)
def test_a_changed_load_is_detected(changes: Mapping[str, Any], name: str) -> None:
    assert differing(loads(RATE)) == set()
    assert name in differing(loads(RATE, **changes))


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
    executions = RATE * SECONDS * sample().request_samples / samples_per_execution
    check = judged(loads(RATE, executions=executions))[1]["samples per execution"]
    assert check.status == "differs"
    assert check.explanation.endswith(explanation)


def test_a_rate_above_the_confirmed_throughput_is_detected() -> None:
    confirmed = sample().rate.predicted(1, ERROR)
    assert confirmed is not None
    assert "requests/s per server" in differing(loads(1.2 * confirmed.high))
    assert "requests/s per server" not in differing(loads(1.2 * confirmed.high, 2), 2)


def test_quantiles_of_the_server_within_the_bound_replace_its_mean() -> None:
    names = set(judged(loads(RATE, latencies_ms={0.95: (19.0, 19.0), 0.99: (40.0, 40.0)}))[1])
    assert "p95 in the server" in names
    assert "mean in the server" not in names


def test_one_failure_of_many_requests_is_no_difference_and_rejections_of_all_are() -> None:
    assert sample().requests > 10_000
    few = loads(RATE)
    few[0] = replace(few[0], failures={"OTHER": 1.0})
    assert differing(few) == set()
    refused = ServedLoad(SECONDS, 0, {"REJECTED": 300.0}, 0, 0, 0, 0, 0)
    assert differing([refused] * INTERVALS) == {"failed requests"}


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
    judgement = judge(sample(), [idle] * INTERVALS, 1)
    assert judgement.verdict is Verdict.UNDECIDED
    assert [(check.name, check.status) for check in judgement.checks] == [("requests/s per server", "fits")]
    assert judge(sample(), [], 1, lost_intervals=INTERVALS).verdict is Verdict.UNDECIDED


IDLE = ServedLoad(SECONDS, 0, {}, 0, 0, 0, 0, 0)
HALF = INTERVALS // 2


def test_all_checks_share_the_error_probability() -> None:
    """With three latency bounds there are ten checks. The upper end of the rate is wrong with a tenth of 1 %."""
    sla = Sla.from_bounds({"p95": 20.0, "p99": 40.0, "p99.9": 60.0})
    run = replace(sample().run, problem=replace(sample().run.problem, sla=sla))
    checks = {check.name: check for check in judge(replace(sample(), run=run), loads(500.0), 1).checks}
    assert checks["requests/s per server"].expected is not None
    predicted = sample().rate.predicted(1, 0.01 / 10)
    assert predicted is not None
    assert checks["requests/s per server"].expected.high == predicted.high


def test_an_overload_in_some_of_the_intervals_is_undecided() -> None:
    """The means are above their limits, and their intervals are not, because few loads have the overload."""
    requests = 3 * RATE * SECONDS
    crowded = loads(3 * RATE, queue_ms=12 * requests, request_ms=30 * requests)
    judgement, checks = judged([*loads(RATE)[:HALF], *crowded[:HALF]])
    assert judgement.verdict is Verdict.UNDECIDED
    assert {check.name for check in judgement.undecided} == {"queue time", "mean in the server"}
    for name in ("queue time", "mean in the server"):
        measured, limit = checks[name].measured, checks[name].expected
        assert measured is not None
        assert limit is not None
        assert measured.low < limit.high < measured.value
    (step,) = next_steps(judgement)
    assert step.advice.startswith("watch again while the load is steady")
    assert "do not decide whether it fits" in headline(judgement)
    assert "too few" not in headline(judgement) + extent(judgement)


@pytest.mark.parametrize("spread", [0.0, 0.01, 0.1, 0.9])
def test_a_mean_above_the_bound_never_fits(spread: float) -> None:
    """The latency of a request, whose mean is 21 ms with a bound of 20 ms, varies from interval to interval."""
    usual = loads(RATE)
    varied = [
        replace(load, request_ms=load.requests * 21 * (1 + spread * (-1) ** place))
        for place, load in enumerate(usual)
    ]
    assert judged(varied)[1]["mean in the server"].status == ("differs" if spread <= 0.01 else "undecided")
    assert judged(varied)[0].verdict is (Verdict.FAIL if spread <= 0.01 else Verdict.UNDECIDED)


def test_a_varying_rate_above_the_confirmed_throughput_is_undecided() -> None:
    confirmed = sample().rate.predicted(1, ERROR)
    assert confirmed is not None
    many = loads(1.2 * confirmed.high)
    rate = judged([*many, *[IDLE] * 2])[1]["requests/s per server"]
    assert rate.status == "undecided"
    assert rate.explanation.startswith("requests/s per server: the value is above the expected ones")


def test_a_failure_of_few_requests_is_undecided() -> None:
    few = loads(10.0)
    few[0] = replace(few[0], failures={"CANCELED": 1.0})
    judgement, checks = judged(few)
    assert (judgement.verdict, checks["failed requests"].status) == (Verdict.UNDECIDED, "undecided")


def test_a_mix_of_sizes_at_a_low_rate_fits() -> None:
    """The mean of few random sizes is often outside of the range, which is narrow."""
    usual = loads(10.0)
    sizes = [(3.2, 5.2)[place % 2] for place in range(INTERVALS)]
    check = judged([replace(load, samples=load.requests * size) for load, size in zip(usual, sizes, strict=True)])[1][
        "samples per request"
    ]
    assert check.measured is not None
    assert check.expected is not None
    assert check.measured.value > check.expected.high
    assert (check.status, check.explanation) == ("fits", "")


@pytest.mark.parametrize("share", [0.3, 0.6, 0.9])
@pytest.mark.parametrize("before", [0.0, 0.1])
def test_a_load_that_starts_during_the_observation_fits(share: float, before: float) -> None:
    """Its requests are compared with the rate at which they came, which is above the mean over all intervals."""
    safe = sample().safe_rate or 0.0
    earlier = loads(before * safe) if before else [IDLE] * INTERVALS
    judgement, _ = judged([*earlier, *loads(share * safe)[:HALF]])
    assert judgement.verdict is Verdict.PASS, [*judgement.differing, *judgement.undecided]


def test_bounds_on_quantiles_that_the_server_does_not_export_are_not_checked() -> None:
    assert list(map(str, judged(loads(RATE))[0].unchecked_bounds)) == ["p95 <= 20 ms"]
    assert judged(loads(RATE, latencies_ms={0.95: (19.0, 19.0)}))[0].unchecked_bounds == ()
    assert judged([IDLE] * INTERVALS)[0].unchecked_bounds == ()
    means = replace(sample().run.problem, sla=Sla.from_bounds({"avg": 20.0}))
    assert judge(replace(sample(), run=replace(sample().run, problem=means)), loads(RATE), 1).unchecked_bounds == ()


def test_times_that_the_server_does_not_export_are_not_checked() -> None:
    hidden = loads(RATE, request_ms=math.nan, queue_ms=math.nan, compute_ms=math.nan)
    judgement, checks = judged(hidden)
    assert judgement.verdict is Verdict.PASS
    times = {"queue time", "execution time", "time in the server", "mean in the server"}
    assert {name for name, check in checks.items() if check.status == "unknown"} == times
    assert {checks[name].explanation for name in times} == {NOT_EXPORTED}
    assert busy_share(sample(), hidden, 1) is None
    means = replace(sample().run.problem, sla=Sla.from_bounds({"avg": 20.0}))
    judgement = judge(replace(sample(), run=replace(sample().run, problem=means)), hidden, 1)
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


def printed(judgement: Judgement, width: int = 80) -> str:
    text = io.StringIO()
    print_judgement(Console(file=text, width=width), judgement)
    return text.getvalue()


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


def test_intervals_without_requests_lower_the_rate_and_say_nothing_about_a_request() -> None:
    idle = ServedLoad(SECONDS, 0, {}, 0, 0, 0, 0, 0)
    busy = loads(RATE, compute_ms=20 * RATE * SECONDS, queue_ms=30 * RATE * SECONDS)
    _, checks = judged([*busy, *[idle] * INTERVALS])
    rate = checks["requests/s per server"].measured
    assert rate is not None
    assert rate.value == pytest.approx(RATE / 2)
    assert checks["execution time"].status == "differs"
    judgement, checks = judged([busy[0], *[idle] * INTERVALS])  # a single load has no confidence interval
    assert judgement.differing == ()
    time = checks["queue time"].measured
    assert time is not None
    assert (time.low, time.high) == (-math.inf, math.inf)


def test_a_short_stall_is_no_difference() -> None:
    longest = sample().longest_ms
    assert longest is not None
    assert longest >= 20
    checks = judged(loads(RATE, stalled_seconds=2.9e-3 * longest))[1]
    assert checks["time without success"].status == "fits"
    assert "time without success" not in judged(loads(RATE))[1]


def of_processes(count: int) -> Expectation:
    """Return the expectation of the sample as if it had measured ``count`` server processes."""
    point, served_by = sample().point, sample().replica
    assert served_by is not None
    candidate = replace(point.candidate, fields=((SERVER_PROCESSES, count),))
    return replace(
        sample(), point=replace(point, candidate=candidate), replica=replace(served_by, candidate=candidate)
    )


def test_the_servers_of_a_run_with_processes_are_replicas() -> None:
    expected = of_processes(2)
    assert expected.overlap == 2 * sample().overlap
    judgement = judge(expected, loads(RATE, 2), 4)
    assert judgement.replicas == 2
    (rate,) = (check for check in judgement.checks if check.name == "requests/s per replica")
    assert rate.measured is not None
    assert rate.measured.value == pytest.approx(RATE / 2)
    confirmed = expected.rate.predicted(1, ERROR)
    assert confirmed is not None
    over = {check.name for check in judge(expected, loads(1.2 * confirmed.high, 2), 2).differing}
    assert "requests/s per replica" in over


def test_two_processes_are_expected_to_batch_as_one_with_half_of_the_load() -> None:
    one, two = at(RATE), of_processes(2).at(2 * RATE, 1, ERROR)
    assert two is not None
    assert two.mean_batch_size.low == pytest.approx(one.mean_batch_size.low, rel=0.3)
    assert two.mean_batch_size.high == pytest.approx(one.mean_batch_size.high, rel=0.3)


def test_the_bound_of_a_replica_is_for_the_requests_of_all_its_processes() -> None:
    """The quantile of all of them is between those of the processes."""
    mixed, slow = ({0.95: values} for values in ((15.0, 25.0), (21.0, 25.0)))
    name = "p95 in the server"
    assert name in {check.name for check in judge(of_processes(1), loads(RATE, latencies_ms=mixed), 2).differing}
    assert name not in {check.name for check in judge(of_processes(2), loads(RATE, latencies_ms=mixed), 2).differing}
    assert name in {check.name for check in judge(of_processes(2), loads(RATE, latencies_ms=slow), 2).differing}


def test_first_responses_beyond_the_bound_are_detected() -> None:
    streamed = replace(
        sample(), run=replace(sample().run, problem=replace(sample().run.problem, sla=Sla.from_bounds({})))
    )
    sla = Sla.parse(["ttft-p95 <= 400 ms"])
    streamed = replace(streamed, run=replace(streamed.run, problem=replace(streamed.run.problem, sla=sla)))
    late = {100.0: 10.0, 500.0: 900.0, 2000.0: 1000.0, math.inf: 1000.0}
    observed = loads(RATE, first_responses=late)
    assert "late first responses" in {check.name for check in judge(streamed, observed, 1).differing}
    in_time = {**late, 500.0: 960.0}
    judgement = judge(streamed, loads(RATE, first_responses=in_time), 1)
    assert (judgement.differing, judgement.unchecked_bounds) == ((), ())
    below = {limit: count for limit, count in in_time.items() if limit == 100 or math.isinf(limit)}
    text = " ".join(printed(judge(streamed, loads(RATE, first_responses=below), 1)).split())
    assert "ttft-p95: the server's histogram of first responses has no limit at the bound or above" in text


def test_a_run_without_a_simulator_is_compared_with_its_confirmed_load_only() -> None:
    unsimulated = replace(sample(), replica=None, why_not_simulated=WhyNotSimulated.PIPELINE, safe_rate=None)
    checks = {check.name: check for check in judge(unsimulated, loads(RATE), 1).checks}
    assert checks["samples per execution"].status == "unknown"
    assert checks["execution time"].explanation == WhyNotSimulated.PIPELINE.value
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
    judgement = judge(expected, [minute] * INTERVALS, 1)
    checks = {check.name: check for check in judgement.checks}
    text = " ".join(printed(judgement).split())
    assert "; ttft-p95 and itl-p95 were not checked observed" in text
    assert "ttft-p95: a newer tritonserver that is started with --metrics-config=histogram_latencies=true" in text
    assert "itl-p95: Triton does not export it" in text
    assert checks["requests/s per server"].status == "fits"
    assert checks["samples per request"].status == "fits"
    assert checks["execution time"].explanation == WhyNotSimulated.KIND.value
    assert "mean in the server" not in checks  # Triton's time of a request ends before the last response


def test_a_run_with_a_load_shape_is_judged_without_steady_traffic() -> None:
    times = RequestTimes("spike")
    shaped = replace(sample().run, problem=replace(sample().run.problem, request_times=times))
    expected = expectation(shaped)
    assert (expected.why_not_simulated, expected.safe_rate) == (WhyNotSimulated.SHAPED, None)
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
    assert checks["execution time"].explanation == WhyNotSimulated.PIPELINE.value
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
        for value in [check["measured"], *(check["confidence_interval"] or []), *(check["expected"] or [])]:
            assert value is None or math.isfinite(value)


def test_the_command_of_a_search_has_the_new_request_size() -> None:
    larger = loads(RATE, samples=8 * RATE * SECONDS)
    steps = next_steps(judged(larger)[0])
    (search,) = (step for step in steps if step.advice.startswith("search again"))
    assert document(judged(larger)[0], ["a"])["search"]["command"] == search.command
    assert "--request-batch-size 8" in search.command
    assert "--warm-start" not in search.command, "tune takes measurements of the same size only"
    assert "--request-batch-size" not in search_command(sample())
    assert f"--warm-start {SAMPLE}" in search_command(sample())


@pytest.mark.parametrize(
    ("own", "present", "proposed"), [(1, 4.2, 4), (1, 1.3, 2), (4, 3.8, 3), (1, 0.6, 1), (2.5, 2.6, 3), (4, 4, 4)]
)
def test_the_proposed_size_is_a_whole_number_on_the_same_side(own: float, present: float, proposed: int) -> None:
    assert nearest_other_size(own, present) == proposed


def test_requests_above_every_max_batch_size_need_another_search_space() -> None:
    largest = max(sample().run.problem.space.max_batch_size)
    judgement = judged(loads(RATE, samples=2 * largest * RATE * SECONDS))[0]
    steps = next_steps(judgement)
    (search,) = (step for step in steps if "search again" in step.advice)
    assert search.advice.startswith(f"raise the largest max_batch_size of the search, {largest}, to {2 * largest}")
    assert search.command == ""
    assert document(judgement, ["a"])["search"]["command"] is None


# -- the proposed commands ---------------------------------------------------------------------------------------


TRACES = {
    "sizes.csv": "time_s,batch_size,priority\n0,1,1\n0.1,4,2\n0.2,1,1\n",
    "priorities.csv": "time_s,priority\n0,1\n0.1,2\n",
    "times.csv": "time_s\n0\n0.1\n0.3\n",
    "intervals.txt": "100\n200\n",
    "requests.csv": "".join(f"{second}\n" for second in range(200)),
}
RATE_LOAD: dict[str, object] = {"load": "rate"}
RUNS: dict[str, tuple[dict[str, object], ModelKind]] = {
    "closed loop": ({}, ModelKind.BATCHED),
    "grid": ({"search": "grid"}, ModelKind.BATCHED),
    "rate": (RATE_LOAD, ModelKind.BATCHED),
    "mix of sizes": ({**RATE_LOAD, "request-batch-size": "1*50|7*50"}, ModelKind.BATCHED),
    "shape": ({**RATE_LOAD, "request-distribution": "spike:4x:10%:1s"}, ModelKind.BATCHED),
    "constant": ({**RATE_LOAD, "request-distribution": "constant"}, ModelKind.BATCHED),
    "intervals": ({**RATE_LOAD, "request-intervals": "intervals.txt"}, ModelKind.BATCHED),
    "trace with sizes": ({**RATE_LOAD, "request-trace": "sizes.csv"}, ModelKind.BATCHED),
    "trace with priorities": ({**RATE_LOAD, "request-trace": "priorities.csv"}, ModelKind.BATCHED),
    "trace and size": (
        {**RATE_LOAD, "request-trace": "times.csv", "request-batch-size": "4"},
        ModelKind.BATCHED,
    ),
    "trace that is gone": ({**RATE_LOAD, "request-trace": "gone.csv"}, ModelKind.BATCHED),
    "priorities": ({"priorities": "1*20|2*80"}, ModelKind.BATCHED),
    "streaming": ({}, ModelKind.STREAMING),
    "streaming with a shape": ({**RATE_LOAD, "request-distribution": "ramp"}, ModelKind.STREAMING),
    "stateful": ({"sequence-length": "5"}, ModelKind.STATEFUL),
    "several models": ({"concurrent-models": "other", "bls-composing-models": "step"}, ModelKind.BATCHED),
    "shared study": ({"storage": "sqlite:///study.db", "study-name": "dlrm"}, ModelKind.BATCHED),
    "remote": ({"target": "remote", "url": "triton:8001"}, ModelKind.BATCHED),
    "docker": ({"target": "docker", "docker-image": "triton", "docker-gpus": "0,1"}, ModelKind.BATCHED),
}
PRESENT_LOADS: dict[str, Mapping[str, Any]] = {
    "larger requests": {"samples": 8 * RATE * SECONDS},
    "slower": {"compute_ms": 20 * RATE * SECONDS, "queue_ms": 30 * RATE * SECONDS},
    "failures": {"failures": {"REJECTED": 0.1 * RATE * SECONDS}, "stalled_seconds": 5.0},
    "higher rate": {"requests": 1e6},
}


def expected_of(values: dict[str, object], kind: ModelKind) -> Expectation:
    """Return the expectation of the sample as if its run had other options and a model of another kind."""
    options, run = run_options("dlrm", values), sample().run
    times = RequestTimes("" if options.request_times == "poisson" else options.request_times)
    is_open = options.load == "rate"
    problem = replace(run.problem, kind=kind, open_loop=is_open, request_times=times if is_open else None)
    why_not = None if kind is ModelKind.BATCHED else WhyNotSimulated.KIND
    run = replace(run, options=options, problem=problem)
    return replace(sample(), run=run, replica=None, why_not_simulated=why_not)  # a simulation takes long


@pytest.mark.parametrize("load", PRESENT_LOADS)
@pytest.mark.parametrize("name", RUNS)
def test_tune_takes_each_proposed_command(
    name: str, load: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sample_folder = SAMPLE.absolute()
    monkeypatch.chdir(tmp_path)
    for file, text in TRACES.items():
        Path(file).write_text(text)
    expected = expected_of(*RUNS[name])
    folder = replace(expected.run.folder, path=sample_folder)
    expected = replace(expected, run=replace(expected.run, folder=folder))
    judgement = judge(expected, loads(RATE, **PRESENT_LOADS[load]), 1)
    assert judgement.differing
    steps = next_steps(judgement)
    assert steps
    commands = [*(step.command for step in steps), document(judgement, ["a"])["search"]["command"]]
    for command in filter(None, commands):
        program, *words = shlex.split(command)
        assert program == "tune"
        if words[0] == "plan":
            read_plan_arguments(words[1:])
        elif words[0] == "verify":
            verify.build_parser().read(words[1:])
        else:
            check_search(words, expected)


def check_search(words: list[str], expected: Expectation) -> None:
    """Parse the command of a search as tune does, and make the checks of tune that need files only."""
    options = read_run_arguments(words).options
    if "gone.csv" not in words and options.request_batch_size is not None:
        assert trace_sizes(options) is None, "tune refuses a size next to a trace with sizes"
    own = expected.run.options.request_batch_size
    if options.warm_start is not None:
        assert options.request_batch_size == own, "tune refuses a warm start with other sizes"
        assert read_warm_start(options.warm_start, options.out, expected.request_samples).trials
    assert (options.storage, options.study_name) == (None, None), "the shared study has the old requests"
    assert (options.model, options.sla_ms) == ("dlrm", expected.run.options.sla_ms)


@pytest.mark.parametrize("name", ["trace with sizes", "trace that is gone"])
def test_a_search_with_a_trace_needs_a_new_trace_for_other_sizes(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The trace has the size of each request, so a command with a size of requests would be refused."""
    monkeypatch.chdir(tmp_path)
    Path("sizes.csv").write_text(TRACES["sizes.csv"])
    judgement = judge(expected_of(*RUNS[name]), loads(RATE, samples=8 * RATE * SECONDS), 1)
    search = next(step for step in next_steps(judgement) if "search again" in step.advice)
    assert search.advice.startswith("record a new trace")
    assert "--request-batch-size" not in search.command


def test_more_servers_need_no_plan_that_tune_refuses() -> None:
    confirmed = sample().rate.predicted(1, ERROR)
    assert confirmed is not None
    many = loads(1.2 * confirmed.high)
    shaped = expected_of(*RUNS["streaming with a shape"])
    (first, *_) = next_steps(judge(replace(shaped, safe_rate=None), many, 1))
    assert first == NextStep("start more servers; `tune plan` cannot compute their number from this run", "")
    unbounded = replace(sample().run, problem=replace(sample().run.problem, sla=Sla.from_bounds({})))
    (first, *_) = next_steps(judge(replace(sample(), run=unbounded), many, 1))
    assert first.command.endswith("--sla-p95 20ms")


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
