"""Tests of a run's verdict: PASS, UNDECIDED with its cause, or FAIL, and the exit code of each."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from objectives.intervals import ConfidenceInterval, GainRatio, ObjectiveGain
from objectives.latency_sketch import sketch_latencies
from objectives.metrics import METRICS, Measurement
from objectives.sequential import LOOKS
from objectives.sla import Sla, Verdict
from objectives.verdict import OBSERVED_STATES, USUAL_STATES
from optimizer.cli.exit_codes import exit_code
from optimizer.cli.output import INTERRUPTED
from optimizer.config.problem import Problem
from optimizer.confirmation.verdicts import judge_confirmations
from optimizer.core.candidate import Candidate
from optimizer.core.trial import ConfirmationWindow, LoadPoint, Trial
from optimizer.options.command_line import command_line
from optimizer.results import outcome_values, result_document, summary
from optimizer.results.finished_run import nothing_recommended, read_run
from optimizer.results.recommendation import Outcome, assess
from tests.conftest import known_problem, measurement

SAMPLE = Path("tests/data/dlrm/sample")
BASELINE, PLAIN, BEST = Candidate(1), Candidate(64, True), Candidate(16, True)
LOAD = LoadPoint(1, concurrency=8)
COMPLETE = summary.RemainingTests(is_complete=True)
ERROR = 0.005  # error probability of the test; 0 for a comparison


def outcome(
    *servers: float,
    windows: int = 8,
    error: float = ERROR,
    disturbed: int = 0,
    problem: Problem | None = None,
    searched_ms: float = 10.0,
) -> Outcome:
    """Return the outcome of a run whose best candidate had this p95 in ms on each of its fresh servers.

    The machine was disturbed in the first ``disturbed`` windows of each server.
    """
    confirmations = tuple(
        ConfirmationWindow(number, LOAD, measurement(1000.0, p95_ms, stable=window >= disturbed), error)
        for number, p95_ms in enumerate(servers, start=1)
        for window in range(windows)
    )
    trials = [Trial(0, BEST, ((LOAD, measurement(1000.0, searched_ms)),), confirmations=confirmations)]
    return assess(trials, problem or known_problem(), BASELINE, PLAIN)


def on_servers(*servers: Measurement, each: int = 1, error: float = ERROR) -> tuple[ConfirmationWindow, ...]:
    """Return ``each`` windows like these on every fresh server."""
    return tuple(
        ConfirmationWindow(number, LOAD, window, error)
        for number, window in enumerate(servers, start=1)
        for _ in range(each)
    )


def unbounded() -> Problem:
    return replace(known_problem(), sla=Sla())


@pytest.mark.parametrize(
    ("result", "verdict", "code"),
    [
        (outcome(*[10.0] * LOOKS[0]), Verdict.PASS, 0),
        (outcome(*[10.0] * (LOOKS[0] - 1)), Verdict.UNDECIDED, 4),
        (outcome(), Verdict.UNDECIDED, 4),
        (outcome(*[10.0] * LOOKS[0], error=0.0), Verdict.UNDECIDED, 4),
        (outcome(*[40.0] * LOOKS[0]), Verdict.FAIL, 1),
        (outcome(searched_ms=40.0), Verdict.FAIL, 1),
        (outcome(problem=unbounded()), Verdict.PASS, 0),
        (outcome(10.0, problem=unbounded()), Verdict.PASS, 0),
        (assess([], unbounded(), BASELINE, PLAIN), Verdict.FAIL, 1),
    ],
    ids=[
        *("passed", "few servers", "not confirmed", "compared only", "failed", "too slow"),
        *("no bound", "no bound, one server", "no bound, nothing measured"),
    ],
)
def test_the_verdict_gives_the_exit_code(result: Outcome, verdict: Verdict, code: int) -> None:
    assert result.verdict is verdict
    assert exit_code("found" if result.recommended else "none", result.verdict) == code
    assert bool(summary.undecided_cause(result)) is (verdict is Verdict.UNDECIDED)
    document = result_document.document(result, wall_seconds=1, results_dir="r")
    assert document["verdict"] == verdict.value


def test_a_run_that_ended_early_has_its_own_exit_code() -> None:
    for verdict in Verdict:
        assert exit_code("interrupted", verdict) == INTERRUPTED
        assert exit_code("left", verdict) == 0


@pytest.mark.parametrize(
    ("result", "cause"),
    [
        (outcome(), "it was not tested on fresh servers"),
        (outcome(10.0, 10.0, 10.0), f"the time ended after 3 of at least {LOOKS[0]} fresh servers"),
        (outcome(*[19.5] * 4, disturbed=3), "other programs disturbed 38 % of the windows"),
        (
            outcome(*[19.5] * 3, disturbed=3),
            f"the test ended after 3 of at least {LOOKS[0]} fresh servers, and p95 <= 20 ms (19.5 ms from 976 "
            "effective requests) was not likely to pass in the time that was left; "
            "other programs disturbed 38 % of the windows",
        ),
        (outcome(*[10.0] * 4, error=0.0), "it was compared on 4 fresh servers, but not tested"),
    ],
    ids=["not confirmed", "few servers", "disturbed", "few servers, disturbed", "compared only"],
)
def test_the_cause_is_in_the_headline(result: Outcome, cause: str) -> None:
    assert summary.undecided_cause(result) == cause
    headline = summary.headline(result, known_problem())
    values = r"1,000( ± \d+)? infer/s, p95 (10\.0|19\.5)( ± \d\.\d)? ms"
    assert re.match(rf"known: UNDECIDED at {values} \(SLA: p95 <= 20 ms\): ", headline)
    assert headline.endswith(cause)


def test_a_share_close_to_the_permitted_one_is_undecided() -> None:
    cause = summary.undecided_cause(outcome(*[19.5] * LOOKS[0]))
    assert " % of the requests are slower than 20 ms, and 5 % may be" in cause


@pytest.mark.parametrize(("low", "shown"), [(1e-9, "0 to 12 %"), (4.1e-5, "0.0041 to 12 %")])
def test_a_share_has_only_digits_that_say_something(low: float, shown: str) -> None:
    result = outcome(9.0, 9.0, 14.0, 18.0)
    assert result.confirmed is not None
    judged = replace(result.confirmed.judged, slow_share=ConfidenceInterval(low, 0.12))
    again = tuple(replace(entry, judged=judged) for entry in result.confirmed_loads)
    cause = summary.undecided_cause(replace(result, confirmed_loads=again))
    assert cause == f"the 4 servers differ too much ({shown} of the requests are slower than 20 ms)"


@pytest.mark.parametrize(("share", "is_told"), [(0.4, True), (0.05, False), (None, False)])
def test_a_cause_says_if_others_took_the_cpus(share: float | None, is_told: bool) -> None:
    windows = [replace(measurement(1000.0, p95_ms), other_cpu_share=share) for p95_ms in (9.0, 9.0, 14.0, 18.0)]
    trials = [Trial(0, BEST, ((LOAD, measurement(1000.0, 10.0)),), confirmations=on_servers(*windows, each=8))]
    result = assess(trials, known_problem(), BASELINE, PLAIN)
    cause, advice = summary.undecided_cause(result), summary.next_step(result, "r", "tune known").advice
    assert cause.startswith("the 4 servers differ too much (")
    assert cause.endswith("; other processes or machines took 40 % of the CPUs while this was measured") is is_told
    assert advice.startswith("stop other programs on this machine, then ") is is_told
    assert advice.endswith("continue the test")


def test_too_few_requests_for_a_high_percentile_are_the_cause() -> None:
    high = replace(known_problem(), sla=Sla.from_bounds({"p99.99": 20.0}))
    sketch = sketch_latencies(np.random.default_rng(0).gamma(9.0, 1.0, 500))
    window = replace(measurement(1000.0, 14.0), requests=500, latency_sketch=sketch, requests_over_ms="20:0")
    confirmations = on_servers(*[window] * LOOKS[0], each=8)
    trials = [Trial(0, BEST, ((LOAD, window),), confirmations=confirmations)]
    cause = summary.undecided_cause(assess(trials, high, BASELINE, PLAIN))
    assert re.search(r"; p99\.99 needs about 53,000 effective requests, and these were [0-9.,]+$", cause), cause


def test_too_few_requests_for_a_small_error_rate_are_the_cause() -> None:
    rare = replace(known_problem(), sla=Sla.from_bounds({"error-rate": 0.01}))
    window = replace(measurement(1000.0, 14.0), requests=500, rejected_requests=0)
    confirmations = on_servers(*[window] * LOOKS[0], each=8)
    trials = [Trial(0, BEST, ((LOAD, window),), confirmations=confirmations)]
    cause = summary.undecided_cause(assess(trials, rare, BASELINE, PLAIN))
    assert cause.endswith("15,504 effective requests; at least 52,981 are needed"), cause


def test_a_run_that_ended_before_the_search_needs_a_larger_budget() -> None:
    only = Trial(0, BASELINE, ((LOAD, measurement(1000, 10.0)),))
    result = assess([only], known_problem(), BASELINE, PLAIN)
    assert result.verdict is Verdict.UNDECIDED
    assert "before any other configuration" in summary.undecided_cause(result)
    longer = "tune --budget 600s dlrm"
    step = summary.next_step(result, "results/dlrm/1", "tune dlrm", longer)
    assert (step.advice, step.command) == ("run again with a larger --budget", longer)
    assert summary.next_command(result, "results/dlrm/1", longer) == longer


def test_a_test_on_a_disturbed_machine_passes_if_all_windows_are_far_inside_the_bound() -> None:
    result = outcome(*[10.0] * LOOKS[0], disturbed=5)
    assert result.verdict is Verdict.PASS
    assert result.confirmed is not None
    assert result.confirmed.judged.disturbed_share == 5 / 8
    assert result.recommended in result.front.points
    assert "not stable" not in str(result_document.document(result, wall_seconds=1, results_dir="r"))


@pytest.mark.parametrize("servers", [4, 13])
def test_a_disturbed_test_continues_after_other_programs_were_stopped(servers: int) -> None:
    step = summary.next_step(outcome(*[19.5] * servers, disturbed=4), "r", "tune known")
    advice = "stop other programs on this machine, then continue the test"
    assert (step.advice, step.command) == (advice, "tune verify r --budget 3m")
    step = summary.next_step(outcome(*[19.5] * servers, disturbed=4), "r", "tune known", tests=COMPLETE)
    advice = "stop other programs on this machine, then make a separate test, because more servers cannot change"
    assert (step.advice, step.command) == (f"{advice} the verdict", "tune verify --fresh r")


SHARED = replace(known_problem(), cpu_count=2)  # other programs may take a part of its CPUs


def beside_others(candidate: Candidate, *windows: ConfirmationWindow, number: int = 0) -> Trial:
    """Return a trial on fresh servers, whose search other programs disturbed for a third of the time."""
    shares = (0.0, 0.0, 0.5)
    searched = tuple(
        (LOAD, replace(measurement(1000.0, 15.0), measure_seconds=9.0, other_cpu_share=share)) for share in shares
    )
    return Trial(number, candidate, searched, confirmations=windows)


def quiet_windows(p95_ms: float, error: float = ERROR, servers: int = LOOKS[0]) -> list[ConfirmationWindow]:
    """Return a window on each fresh server of a test or a comparison that no other program disturbed."""
    measured = measurement(1000.0, p95_ms)
    return [ConfirmationWindow(number, LOAD, measured, error, latency_slope=1.5) for number in range(servers)]


@pytest.mark.parametrize("p95_ms", [8.2, 10.0])
def test_the_cause_has_the_bound_of_the_usual_states(p95_ms: float) -> None:
    """The latencies meet the bound as measured; a third of the search was disturbed, but not the test."""
    result = assess([beside_others(BEST, *quiet_windows(p95_ms))], SHARED, BASELINE, PLAIN)
    assert result.verdict is Verdict.UNDECIDED
    assert result.confirmed is not None
    rise = result.confirmed.judged.latency_rise
    cause = summary.undecided_cause(result)
    assert cause.startswith(f"p95 <= 20 ms, tested as p95 <= {20 * math.exp(-rise):.4g} ms: ")
    assert cause.endswith(f"latencies are judged as {100 * math.expm1(rise):.0f} % higher than measured")
    document = result_document.document(result, wall_seconds=1, results_dir="r")
    assert document["confirmation"]["latency_factor"] == round(math.exp(rise), 4)  # type: ignore[index]
    assert document["confirmation"]["reason"] == cause  # type: ignore[index]
    assert "stop other programs" in summary.next_step(result, "r", "tune known").advice
    begun = assess([beside_others(BEST, *quiet_windows(p95_ms, servers=1))], SHARED, BASELINE, PLAIN)
    assert summary.next_step(begun, "r", "tune known").advice == "continue the test", "servers are missing"


def test_the_estimand_names_the_states_of_the_verdict() -> None:
    usual = assess([beside_others(BEST, *quiet_windows(1.0))], SHARED, BASELINE, PLAIN)
    observed = assess([Trial(0, BEST, confirmations=tuple(quiet_windows(1.0)))], SHARED, BASELINE, PLAIN)
    for result, states in ((usual, USUAL_STATES), (observed, OBSERVED_STATES)):
        assert result.verdict is Verdict.PASS
        assert result.confirmed is not None
        assert str(result_document.confirmation(result.confirmed)["estimand"]).endswith(f"under the {states}")
        assert dict(summary.verdict_lines(result))["estimand"].endswith(f"under the {states}")


def test_a_test_that_was_given_up_names_the_bound_of_the_user() -> None:
    lower = [
        replace(window, server=2, load=LoadPoint(1, concurrency=6), error_probability=ERROR / 2)
        for window in quiet_windows(12.0, servers=1)
    ]
    windows = [*(quiet_windows(12.0, servers=2) * 8), *lower]
    result = assess([beside_others(BEST, *windows)], SHARED, BASELINE, PLAIN)
    assert result.confirmed is not None
    assert result.confirmed.point.load == LOAD
    assert re.fullmatch(
        rf"the test ended after 2 of at least {LOOKS[0]} fresh servers, and p95 <= 20 ms \(12\.0 ms from \d+ "
        r"effective requests\) was not likely to pass in the time that was left; other programs were usually more "
        r"active during this run than during this test, so latencies are judged as \d+ % higher than measured",
        summary.undecided_cause(result),
    )


@pytest.mark.parametrize(
    ("baseline_ms", "best_ms", "subject"), [(12.0, 1.0, "it"), (1.0, 12.0, "the recommendation"), (1.0, 1.0, "")]
)
def test_a_missing_gain_has_the_usual_states_as_its_reason(baseline_ms: float, best_ms: float, subject: str) -> None:
    """All latencies meet the bound as measured."""
    trials = [
        beside_others(BASELINE, *quiet_windows(baseline_ms, error=0.0)),
        beside_others(BEST, *quiet_windows(best_ms), number=1),
    ]
    result = assess(trials, SHARED, BASELINE, PLAIN)
    assert result.recommended is not None
    assert result.recommended.candidate == BEST
    assert (result.baseline.gain is None) is bool(subject)
    gains = {name: cells[-1] for name, *cells in outcome_values.comparisons(result, SHARED)}
    reason = f"not confirmed: {subject} misses the bound in the usual states of the machine"
    assert (gains["current (baseline)"] == reason) is bool(subject)
    document = result_document.document(result, wall_seconds=1, results_dir="r")
    missed = {name: document[name]["misses_in_usual_states"] for name in ("baseline", "recommended")}  # type: ignore[index]
    assert missed == {"baseline": subject == "it", "recommended": subject == "the recommendation"}
    assert (document["speedup"] is None) is bool(subject)


@pytest.mark.parametrize(
    ("files", "command"),
    [
        (["config.pbtxt"], "tune emit {}"),
        (["config.pbtxt", "1/model.json"], "tune emit {} --out tuned_models"),
        (["first/config.pbtxt", "second/config.pbtxt"], "tune emit {} --out tuned_models"),
    ],
)
def test_the_proposed_command_has_a_folder_for_several_files(files: list[str], command: str, tmp_path: Path) -> None:
    for name in files:
        path = tmp_path / "best" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
    step = summary.next_step(outcome(*[10.0] * LOOKS[0]), tmp_path, "tune known")
    assert step.command == command.format(tmp_path)


@pytest.mark.parametrize("can_serve", [False, True])
def test_only_a_server_of_this_machine_is_proposed_to_be_served(can_serve: bool) -> None:
    step = summary.next_step(outcome(*[10.0] * LOOKS[0]), "r", "tune known", can_serve=can_serve)
    assert (step.alternative.command if step.alternative else "") == ("tune serve r" if can_serve else "")


def test_a_disturbance_of_another_configuration_widens_no_interval() -> None:
    """Servers differ more while other programs run, but not those that were measured at other times."""

    def tested(candidate: Candidate, number: int, servers_ms: list[float], *, stable: bool) -> Trial:
        confirmations = tuple(
            ConfirmationWindow(server, LOAD, measurement(1000.0, p95_ms * noise, stable=stable), ERROR)
            for server, p95_ms in enumerate(servers_ms, start=1)
            for noise in (0.98, 1.0, 1.02)
        )
        return Trial(number, candidate, ((LOAD, measurement(1000.0, 15.0)),), confirmations=confirmations)

    best = tested(BEST, 0, [16.0, 16.2, 15.9, 16.1], stable=True)
    plain_trials = [tested(PLAIN, 1, [12.0, 40.0, 15.0, 60.0], stable=stable) for stable in (False, True)]
    alone, disturbed, varied = (
        judge_confirmations([best, *other_trials], known_problem())[0]
        for other_trials in ([], plain_trials[:1], plain_trials[1:])
    )
    assert disturbed.latency_ms == alone.latency_ms
    assert disturbed.judged.verdict is Verdict.PASS
    assert varied.latency_ms.high > disturbed.latency_ms.high
    assert varied.judged.verdict is Verdict.UNDECIDED


@pytest.mark.parametrize(
    ("ratio", "tests", "command"),
    [
        (0.8, summary.UNKNOWN_TESTS, "tune verify r --budget 3m"),
        (0.8, COMPLETE, "tune emit r"),
        (0.95, summary.UNKNOWN_TESTS, "tune emit r"),
    ],
    ids=["served more", "served more, and nothing is left to test", "served as much"],
)
def test_a_compared_configuration_that_served_more_is_tested_next(
    ratio: float, tests: summary.RemainingTests, command: str
) -> None:
    interval = ConfidenceInterval(ratio - 0.1, ratio + 0.1)
    result = outcome(*[10.0] * LOOKS[0])
    assert result.dynamic_batching is not None
    gain = ObjectiveGain("throughput", 1000.0 * ratio, 1000.0, GainRatio(ratio, interval))
    served = replace(result.dynamic_batching, gain=gain)
    result = replace(result, dynamic_batching=served)
    step = summary.next_step(result, "r", "tune known", tests=tests)
    assert step.command == command
    assert step.advice.startswith("dynamic_batching {} had more throughput") == (
        command == "tune verify r --budget 3m"
    )


def test_a_model_without_a_batch_dimension_is_not_compared_with_dynamic_batching() -> None:
    alone = Candidate(0)
    trials = [Trial(0, alone, ((LOAD, measurement(1000.0, 10.0)),))]
    result = assess(trials, known_problem(), alone, alone)
    assert [row[0] for row in outcome_values.comparisons(result, known_problem())] == [
        "recommended",
        "current (baseline)",
    ]
    document = result_document.document(result, wall_seconds=1, results_dir="r")
    assert (document["dynamic_batching"], document["speedup_over_dynamic_batching"]) == (None, None)


@pytest.mark.parametrize(
    ("stable", "disturbance"), [(True, ""), (False, " (other programs disturbed 100 % of the windows)")]
)
def test_a_fallback_that_was_not_tested_is_undecided(stable: bool, disturbance: str) -> None:
    failed = on_servers(*[measurement(1000, 40.0, stable=stable)] * LOOKS[0])
    tested = Trial(0, BEST, ((LOAD, measurement(1000, 10.0)),), confirmations=failed)
    other = Trial(1, replace(BEST, max_batch_size=4), ((LOAD, measurement(800, 10.0)),))
    result = assess([tested, other], known_problem(), BASELINE, PLAIN)
    assert result.verdict is Verdict.UNDECIDED
    assert summary.undecided_cause(result) == (
        f"no configuration passed its test on fresh servers{disturbance}, "
        "and this one was not tested on fresh servers"
    )
    advice = summary.next_step(result, "r", "tune known").advice
    assert advice.startswith("stop other programs on this machine, then") is not stable


def test_a_fallback_to_a_lower_load_names_the_tested_one() -> None:
    lower = LoadPoint(1, concurrency=4)
    failed = on_servers(*[measurement(1000, 40.0)] * LOOKS[0])
    searched = ((lower, measurement(700, 8.0)), (LOAD, measurement(1000, 10.0)))
    result = assess([Trial(0, BEST, searched, confirmations=failed)], known_problem(), BASELINE, PLAIN)
    assert result.recommended is not None
    assert result.recommended.load == lower
    assert summary.undecided_cause(result) == (
        "no configuration passed its test on fresh servers, and this one was not tested on fresh servers at this "
        "load, only at concurrency 8"
    )


def slow(p95_ms: float, slowness: float, throughput: float = 1000.0) -> Measurement:
    """Return the measurement on a machine of this slowness of a server with this p95 at the usual speed."""
    measured = measurement(throughput / slowness, p95_ms * slowness)
    return replace(measured, speed_probe_ms=20.0 * slowness)


def drifted(*best: Measurement, confirmed: Sequence[Measurement] = ()) -> Outcome:
    """Return the outcome of a run whose best candidate shows ``best``, on a machine that is slow for a time.

    The slow time lasts for several deployments, so that the speed probe is reliable.
    """
    slow_trials = [
        Trial(n, replace(PLAIN, max_batch_size=32 + n), ((LOAD, slow(30.0, 1.4 if n < 10 else 1.0, 500.0)),))
        for n in range(2, 30)
    ]
    loads = tuple((LoadPoint(1, concurrency=8 + n), window) for n, window in enumerate(best))
    trials = [Trial(0, BEST, loads, confirmations=on_servers(*confirmed)), *slow_trials]
    return assess(trials, replace(known_problem(), cpu_count=2), BASELINE, PLAIN)


def test_a_test_on_fresh_servers_is_not_corrected_for_the_speed_of_the_machine() -> None:
    """The test did not decide, and its p95 of 22.7 ms misses the bound, although a faster machine may meet it."""
    result = drifted(slow(16.0, 1.0), confirmed=[slow(p95_ms, 1.4) for p95_ms in (10.0, 18.0)])
    assert [entry.judged.verdict for entry in result.confirmed_loads] == [Verdict.UNDECIDED]
    assert not result.sla.is_met(result.confirmed_loads[0].point.measurement)
    assert result.recommended is None
    assert result.verdict is Verdict.UNDECIDED, "more servers may still pass"
    assert summary.undecided_cause(result) == (
        "fresh servers had p95 22.7 ms, but their test did not decide: the test ended after 2 of at least 4 fresh "
        "servers, and p95 <= 20 ms (22.7 ms from 22.6 effective requests) was not likely to pass in the time that "
        "was left"
    )
    step = summary.next_step(result, "r", "tune known")
    assert (step.advice, step.command) == ("continue the test", "tune verify r --budget 3m")
    result = drifted(slow(16.0, 1.0), confirmed=[slow(p95_ms, 1.0) for p95_ms in (70.0, 75.0)])
    assert result.verdict is Verdict.FAIL, "the latency is far above the bound"


def test_a_point_that_met_the_bound_as_measured_is_preferred() -> None:
    """The bound is met as measured at concurrency 8 and 10, and at the usual speed at 8 and 9."""
    points = slow(15.0, 1.0, 900.0), slow(17.0, 1.4, 1400.0), slow(25.0, 0.75, 1200.0)
    result = drifted(*points)
    assert result.recommended is not None
    assert result.recommended.load.concurrency == 8
    result = drifted(slow(25.0, 1.0, 900.0), *points[1:])
    assert result.recommended is not None
    assert result.recommended.load.concurrency == 10
    assert result.verdict is Verdict.UNDECIDED
    assert summary.undecided_cause(result) == "it was not tested on fresh servers"


def test_a_recommendation_that_missed_the_bound_on_a_slow_machine_says_so() -> None:
    result = drifted(slow(15.0, 1.5))
    assert result.verdict is Verdict.UNDECIDED
    assert summary.undecided_cause(result) == (
        "it was not tested on fresh servers; it measured p95 22.5 ms while the machine was slow, and is expected to "
        "meet p95 <= 20 ms at its usual speed"
    )
    (recommended, *_) = outcome_values.comparisons(result, known_problem())
    assert recommended[-1] == "misses p95 <= 20 ms"


def test_another_bound_that_is_undecided_is_the_cause() -> None:
    both = replace(known_problem(), sla=Sla.from_bounds({"p95": 20.0, "throughput": 990.0}))
    assert "throughput" in summary.undecided_cause(outcome(*[10.0] * LOOKS[0], problem=both))


def test_several_latency_bounds_are_all_shown_with_their_intervals() -> None:
    both = replace(known_problem(), sla=Sla.from_bounds({"p95": 20.0, "p99": 40.0}))
    result = outcome(*[16.0, 16.2, 15.9, 16.1], problem=both)
    confirmed = result.confirmed
    assert confirmed is not None
    p99 = confirmed.interval("latency-p99")
    assert p99 is not None
    assert p99.low < 1.3 * 16 < p99.high
    assert [text.split()[0] for text in summary.confirmed_intervals(confirmed)][1:] == ["p95", "p99"]
    assert outcome_values.comparison_headers(result, both)[1:4] == (">infer/s", ">p95 ms", ">p99 ms")
    document = result_document.document(result, wall_seconds=1, results_dir="r")
    confirmation = document["confirmation"]
    assert isinstance(confirmation, dict)
    assert list(confirmation["other_latencies_ms"]) == ["latency-p99"]
    assert "over each bound" in confirmation["estimand"]


def test_without_a_bound_the_headline_has_no_verdict() -> None:
    result = outcome(problem=unbounded())
    assert summary.headline(result, unbounded()) == "known: 1,000 infer/s"
    assert summary.verdict(result) == "PASS: no SLA was given; not measured again on fresh servers"


def test_the_next_command_is_for_undecided_runs_only() -> None:
    assert summary.next_command(outcome(), "my results/1", "tune longer") == "tune verify 'my results/1' --budget 3m"
    assert summary.next_command(outcome(), "1", "tune longer", COMPLETE) == "tune verify --fresh 1"
    assert summary.next_command(outcome(*[10.0] * LOOKS[0]), "1", "tune longer") == ""


@pytest.mark.parametrize(("verdict_seconds", "budget"), [(20.0, "3m"), (144.0, "3m"), (145.0, "4m"), (1200.0, "25m")])
def test_the_next_command_has_the_time_that_the_next_verdict_needs(verdict_seconds: float, budget: str) -> None:
    tests = summary.RemainingTests(verdict_seconds=verdict_seconds)
    command = f"tune verify r --budget {budget}"
    for result in (outcome(), outcome(10.0), outcome(16.0, 25.0, 14.0, 26.0)):
        step = summary.next_step(result, "r", "tune known", tests=tests)
        assert step.command == summary.next_command(result, "r", "tune longer", tests) == command


@pytest.mark.parametrize("tests", [COMPLETE, summary.RemainingTests(verdict_seconds=145.3), summary.UNKNOWN_TESTS])
def test_the_remaining_tests_are_read_from_run_json(tests: summary.RemainingTests) -> None:
    run = read_run(SAMPLE)
    assert replace(run, info={**run.info, **tests.document()}).remaining_tests == tests


@pytest.mark.parametrize("seconds", ["145", -1.0, math.inf, math.nan, None, [145.0]])
def test_an_impossible_time_in_run_json_is_unknown(seconds: object) -> None:
    assert summary.RemainingTests.read({"next_verdict_seconds": seconds}) == summary.UNKNOWN_TESTS


def test_the_verdict_of_a_recorded_run_depends_on_its_confirmation_and_bounds() -> None:
    run = read_run(SAMPLE)
    assert run.outcome is not None
    assert run.outcome.verdict is Verdict.PASS
    compared = run.baseline, run.dynamic_batching
    searched = [replace(trial, confirmations=()) for trial in run.trials]
    assert assess(searched, run.problem, *compared).verdict is Verdict.UNDECIDED
    assert assess(searched, replace(run.problem, sla=Sla()), *compared).verdict is Verdict.PASS
    tight = replace(run.problem, sla=Sla.from_bounds({"p95": 0.1}))
    assert assess(run.trials, tight, *compared).verdict is Verdict.FAIL


def test_a_missed_bound_names_a_higher_load_that_was_quicker_than_single_inferences() -> None:
    alone, batched = measurement(30.0, 60.0), measurement(90.0, 45.0)
    loads = (LoadPoint(1, concurrency=1), alone), (LoadPoint(1, concurrency=4), batched)
    result = assess([Trial(0, BASELINE, loads)], known_problem(), BASELINE, PLAIN)
    assert (
        result.no_recommendation_reason == "a single inference takes 60.0 ms, and the lowest p95 measured is 45.0 ms"
    )


@pytest.mark.parametrize(("share", "verdict"), [(0.0, Verdict.FAIL), (0.6, Verdict.UNDECIDED)])
def test_a_recorded_run_that_just_misses_its_bound_fails_on_a_quiet_machine_only(
    share: float, verdict: Verdict
) -> None:
    run = read_run(SAMPLE)
    trials = [
        replace(
            trial,
            measurements=tuple((load, replace(m, other_cpu_share=share)) for load, m in trial.measurements),
            confirmations=(),
        )
        for trial in run.trials
    ]
    lowest_ms = min(m.latency_p95_ms for trial in trials for _, m in trial.measurements if m.latency_p95_ms)
    close = replace(run.problem, sla=Sla.from_bounds({"p95": 0.95 * lowest_ms}))
    assert assess(trials, close, run.baseline, run.dynamic_batching).verdict is verdict


RERUN = "stop other programs on this machine, then run again"


def searched(*p95_ms: float, shares: tuple[float | None, ...], stable: bool = True) -> Outcome:
    """Return the outcome of a search with these p95 in ms, while others took these shares of the CPUs."""
    points = tuple(
        (LoadPoint(1, concurrency=n), replace(measurement(1000.0, latency_ms, stable=stable), other_cpu_share=share))
        for n, (latency_ms, share) in enumerate(zip(p95_ms, shares, strict=True), start=1)
    )
    return assess([Trial(0, BASELINE, points)], known_problem(), BASELINE, PLAIN)


def test_a_missed_bound_is_undecided_if_other_programs_may_be_the_cause() -> None:
    result = searched(60.0, shares=(0.8,))
    assert (result.verdict, exit_code("none", result.verdict)) == (Verdict.UNDECIDED, 4)
    assert summary.headline(result, known_problem()) == (
        "known: UNDECIDED, no measurement meets p95 <= 20 ms: other processes or machines took more than 10 % of the "
        "CPUs in 1 of 1 measurements"
    )
    assert summary.next_step(result, "run", "tune known") == summary.NextStep(RERUN, "tune known")
    assert summary.next_command(result, "run", "tune longer") == "", "there is no test to continue"
    document = result_document.document(result, wall_seconds=1, results_dir="r")
    assert document["closest"] is not None, "the closest configuration is kept"
    assert (document["verdict"], document["recommended"]) == ("UNDECIDED", None)
    assert document["inconclusive"] == {"kind": "search_disturbed", "disturbed": 1, "total": 1}


def test_a_missed_bound_fails_if_other_programs_cannot_be_the_cause() -> None:
    result = searched(300.0, shares=(0.8,))
    assert (result.verdict, exit_code("none", result.verdict)) == (Verdict.FAIL, 1)
    assert result.no_recommendation_reason == (
        "a single inference takes 300 ms; other processes or machines took 80 % of the CPUs while this was measured"
    )
    assert summary.next_step(result, "run", "tune known").command == "tune explain run"


@pytest.mark.parametrize(
    ("shares", "verdict", "cause"),
    [
        ((0.0, 0.05, 0.02, 0.0), Verdict.FAIL, ""),
        ((None, None, None, None), Verdict.FAIL, ""),
        ((0.0, 0.3, 0.0, 0.4), Verdict.FAIL, ""),
        ((0.0, 0.3, 0.3, 0.4), Verdict.UNDECIDED, "in 3 of 4 measurements"),
        ((0.3, 0.0, 0.0, 0.0), Verdict.UNDECIDED, "the closest configuration may be faster: other processes or"),
    ],
    ids=["quiet", "unknown", "half disturbed", "mostly disturbed", "closest disturbed"],
)
def test_a_fail_needs_measurements_without_a_disturbance(
    shares: tuple[float | None, ...], verdict: Verdict, cause: str
) -> None:
    result = searched(24.0, 26.0, 28.0, 30.0, shares=shares)
    assert result.verdict is verdict
    assert cause in summary.undecided_cause(result)
    assert bool(summary.undecided_cause(result)) is (verdict is Verdict.UNDECIDED)


@pytest.mark.parametrize(
    ("metric", "bound", "verdict"),
    [
        ("throughput", 1900.0, Verdict.UNDECIDED),
        ("throughput", 2100.0, Verdict.FAIL),
        ("memory", 1e6, Verdict.FAIL),
    ],
)
def test_a_disturbance_explains_less_throughput_but_no_memory(metric: str, bound: float, verdict: Verdict) -> None:
    share = 0.5  # at most twice the 1,000 infer/s without it
    points = ((LOAD, replace(measurement(1000.0, 10.0), other_cpu_share=share, server_memory_bytes=2e6)),)
    problem = replace(known_problem(), sla=Sla.from_bounds({"p95": 20.0, metric: bound}))
    assert assess([Trial(0, BASELINE, points)], problem, BASELINE, PLAIN).verdict is verdict


def test_a_measurement_that_meets_the_sla_but_is_not_stable_is_no_fail() -> None:
    result = searched(10.0, shares=(None,), stable=False)
    assert result.verdict is Verdict.UNDECIDED
    headline = summary.headline(result, known_problem())
    assert headline.startswith("known: UNDECIDED, no stable measurement meets p95 <= 20 ms: ")
    assert summary.next_step(result, "run", "tune known").advice == RERUN


def at_loads(*measured: Measurement, sla: Sla | None = None) -> Outcome:
    """Return the outcome of a search that measured the baseline once at each concurrency from 1."""
    points = tuple((LoadPoint(1, concurrency=n), measurement) for n, measurement in enumerate(measured, start=1))
    problem = replace(known_problem(), sla=known_problem().sla if sla is None else sla)
    return assess([Trial(0, BASELINE, points)], problem, BASELINE, PLAIN)


def test_a_stable_measurement_that_misses_the_bound_hides_no_unstable_one_that_meets_it() -> None:
    unstable = replace(measurement(500.0, 10.0, stable=False), reason="the windows disagree")
    result = at_loads(unstable, measurement(1000.0, 30.0))
    assert result.verdict is Verdict.UNDECIDED
    assert result.inconclusive is not None
    assert result.inconclusive.kind == "unstable"
    assert result.no_recommendation_reason == "no measurement that meets the SLA was stable: the windows disagree"
    failed = outcome(*[40.0] * LOOKS[0])
    assert failed.verdict is Verdict.FAIL, "an unstable point that has failed its test is none"


def test_a_run_without_bounds_can_have_only_unstable_measurements() -> None:
    unstable = replace(measurement(500.0, 10.0, stable=False), reason="the windows disagree")
    result = at_loads(unstable, sla=Sla())
    assert (result.recommended, result.verdict) == (None, Verdict.UNDECIDED)
    assert summary.headline(result, unbounded()) == (
        "known: UNDECIDED, no stable measurement was made: no measurement was stable: the windows disagree"
    )


def test_an_objective_that_nothing_measures_is_the_cause_without_bounds() -> None:
    energy = replace(unbounded(), objectives=(METRICS["energy"],))
    result = assess([Trial(0, BASELINE, ((LOAD, measurement(500.0, 10.0)),))], energy, BASELINE, PLAIN)
    assert result.verdict is Verdict.FAIL
    assert result.no_recommendation_reason == "energy cannot be measured on this machine"


def test_bounds_that_are_met_at_different_loads_only_are_the_cause() -> None:
    sla = Sla.from_bounds({"p95": 20.0, "throughput": 4000.0})
    result = at_loads(measurement(1000.0, 5.0), measurement(3900.0, 22.0), sla=sla)
    assert result.verdict is Verdict.FAIL
    assert result.no_recommendation_reason == (
        "the closest measurement misses p95 <= 20 ms and throughput >= 4,000 infer/s, and no load meets all bounds "
        "together"
    )


def test_failed_requests_are_late_in_the_cause() -> None:
    failing = replace(measurement(1000.0, 5.0), requests=900, failed_requests=100)
    result = at_loads(failing)
    assert result.verdict is Verdict.FAIL
    assert result.no_recommendation_reason == "so many requests failed at each load that p95 has no value"


def test_a_test_that_was_given_up_or_lost_a_window_is_not_said_to_lack_time() -> None:
    lower = LoadPoint(1, concurrency=6)

    def tested(load: LoadPoint, number: int, p95_ms: float, error: float) -> list[ConfirmationWindow]:
        return [ConfirmationWindow(number, load, measurement(1000.0, p95_ms), error) for _ in range(8)]

    higher = tested(LOAD, 1, 19.5, ERROR) + tested(LOAD, 2, 19.5, ERROR)
    search = ((LOAD, measurement(1000.0, 10.0)),)
    given_up = Trial(0, BEST, search, confirmations=(*higher, *tested(lower, 3, 21.0, ERROR / 2)))
    two_bounds = replace(known_problem(), sla=Sla.from_bounds({"avg": 100.0, "p95": 20.0}))
    result = assess([given_up], two_bounds, BASELINE, PLAIN)
    assert result.recommended is not None
    assert result.recommended.load == LOAD
    assert summary.undecided_cause(result) == (
        f"the test ended after 2 of at least {LOOKS[0]} fresh servers, and p95 <= 20 ms (19.5 ms from 525 effective "
        "requests) was not likely to pass in the time that was left"
    )
    last = Trial(0, BEST, search, confirmations=tuple(higher))
    result = assess([last], two_bounds, BASELINE, PLAIN)
    assert "p95 <= 20 ms (19.5 ms from 525 effective requests) was not likely to pass" in (
        summary.undecided_cause(result)
    ), "no other load was tested, although time may have been left"
    lost = ConfirmationWindow(2, LOAD, Measurement(reason="the load generator failed"), ERROR)
    trial = Trial(0, BEST, search, confirmations=(*tested(LOAD, 1, 10.0, ERROR), lost))
    result = assess([trial], known_problem(), BASELINE, PLAIN)
    assert summary.undecided_cause(result) == "a measurement was lost: the load generator failed"


def test_the_newest_test_is_that_of_the_last_fresh_server() -> None:
    """A candidate was compared at ``LOAD``, tested at a lower load, and then tested at ``LOAD``.

    Another one, whose trial has a higher number, was tested before.
    """

    def measured(load: LoadPoint, *servers: int, error: float) -> list[ConfirmationWindow]:
        served = measurement(125.0 * load.concurrency, 10.0)
        return [ConfirmationWindow(number, load, served, error) for number in servers]

    lower = LoadPoint(1, concurrency=6)
    confirmations = (
        *measured(LOAD, 1, 3, error=0.0),
        *measured(lower, 5, 6, error=ERROR / 4),
        *measured(LOAD, 7, 8, error=ERROR / 8),
    )
    trial = Trial(0, BEST, ((LOAD, measurement(1000.0, 10.0)),), confirmations=confirmations)
    other = Trial(1, PLAIN, confirmations=tuple(measured(LOAD, 2, 4, error=ERROR)))
    result = assess([trial, other], known_problem(), BASELINE, PLAIN)
    order = [(entry.point.trial, entry.point.load) for entry in result.confirmed_loads]
    assert order == [(1, LOAD), (0, lower), (0, LOAD)]
    only = assess([trial], known_problem(), BASELINE, PLAIN)
    assert only.recommended is not None
    assert only.recommended.load == LOAD
    assert summary.undecided_cause(only) == f"the time ended after 2 of at least {LOOKS[0]} fresh servers"


@pytest.mark.parametrize(("disturbed", "verdict"), [(0, Verdict.FAIL), (4, Verdict.UNDECIDED)])
def test_a_disturbed_test_of_the_only_configuration_is_no_fail(disturbed: int, verdict: Verdict) -> None:
    result = outcome(*[26.0] * LOOKS[0], disturbed=disturbed)
    assert result.recommended is None
    assert result.closest is not None
    assert result.verdict is verdict
    if verdict is Verdict.UNDECIDED:
        cause = "other programs disturbed 16 of 32 windows on fresh servers"
        assert summary.undecided_cause(result) == cause
        step = summary.next_step(result, "r", "tune known")
        assert step.command == summary.next_command(result, "r", "tune longer") == "tune verify r --budget 3m"
        assert summary.next_step(result, "r", "tune known", tests=COMPLETE) == summary.NextStep(RERUN, "tune known")
        assert summary.next_command(result, "r", "tune longer", COMPLETE) == "", (
            "no further server can change the verdict"
        )


def test_the_disturbed_windows_are_counted_although_an_overloaded_one_has_more_weight() -> None:
    """It is the only window of its server, and its share is that of the eight windows of another server."""
    overload = replace(measurement(900.0, 26.0, stable=False), overloaded=True, disturbed=True)
    slow_windows = [(server, measurement(1000.0, 26.0)) for server in range(LOOKS[0] - 1) for _ in range(8)]
    confirmations = tuple(
        ConfirmationWindow(server, LOAD, window, ERROR) for server, window in [*slow_windows, (LOOKS[0], overload)]
    )
    trial = Trial(0, BEST, ((LOAD, measurement(1000.0, 10.0)),), confirmations=confirmations)
    result = assess([trial], known_problem(), BASELINE, PLAIN)
    assert summary.undecided_cause(result) == "other programs disturbed 1 of 25 windows on fresh servers"


@pytest.mark.parametrize(
    ("servers_ms", "disturbed", "begin", "end"),
    [
        (
            [26.0] * 2,
            4,
            "other programs disturbed 8 of 16 windows on fresh servers; the test ended after 2 of at least 4 "
            "fresh servers, and p95 <= 20 ms (26.0 ms from ",
            " was not likely to pass in the time that was left",
        ),
        (
            [16.0, 25.0, 14.0, 26.0],
            0,
            "fresh servers had p95 23.1 ms, but their test did not decide: 0.14 to 44 % of the requests are slower ",
            "; p95 needs about 104 effective requests, and these were 40.6",
        ),
    ],
    ids=["disturbed", "too few effective requests"],
)
def test_a_test_without_a_recommendation_says_why_it_did_not_decide(
    servers_ms: list[float], disturbed: int, begin: str, end: str
) -> None:
    result = outcome(*servers_ms, disturbed=disturbed)
    assert (result.recommended, result.verdict) == (None, Verdict.UNDECIDED)
    cause = summary.undecided_cause(result)
    assert cause.startswith(begin), cause
    assert cause.endswith(end), cause
    document = result_document.document(result, wall_seconds=1, results_dir="r")
    assert isinstance(document["inconclusive"], dict)
    assert document["inconclusive"].keys() == {"kind", "disturbed", "total"}


@pytest.mark.parametrize(("infer_per_sec", "verdict"), [(500.0, Verdict.FAIL), (990.0, Verdict.UNDECIDED)])
def test_too_little_throughput_on_few_servers_is_undecided_only_near_the_bound(
    infer_per_sec: float, verdict: Verdict
) -> None:
    windows = on_servers(*[measurement(infer_per_sec, 10.0)] * 2, each=8)
    trial = Trial(0, BEST, ((LOAD, measurement(1100.0, 10.0)),), confirmations=windows)
    bounded = replace(known_problem(), sla=Sla.from_bounds({"p95": 20.0, "throughput": 1000.0}))
    assert assess([trial], bounded, BASELINE, PLAIN).verdict is verdict


def test_the_reason_of_a_fail_has_the_value_of_a_test_that_ended_before_its_first_look() -> None:
    result = outcome(22.0, 23.0)
    assert result.verdict is Verdict.FAIL
    why = "(p95 <= 20 ms: 22.6 ms on 2 servers)"
    assert summary.cause(result) == f"p95 was 10.0 ms in the search, but missed the bound on fresh servers {why}"


def test_the_reason_of_a_fail_is_that_of_the_test_and_not_of_a_comparison() -> None:
    search, fresh = ((LOAD, measurement(1000.0, 10.0)),), [measurement(1000.0, 40.0)] * LOOKS[0]
    trials = [
        Trial(0, BASELINE, search, confirmations=on_servers(*fresh, error=0.0)),
        Trial(1, BEST, search, confirmations=on_servers(*fresh)),
    ]
    result = assess(trials, known_problem(), BASELINE, PLAIN)
    assert result.verdict is Verdict.FAIL
    assert re.match(
        r"p95 was 10\.0 ms in the search, but missed the bound on fresh servers \(p95 <= 20 ms: ",
        result.no_recommendation_reason,
    )


def test_a_complete_test_is_run_again_with_the_reason() -> None:
    result = outcome(16.0, 25.0, 14.0, 26.0)
    step = summary.next_step(result, "r", "tune known", tests=COMPLETE)
    assert step == summary.NextStep("run again, because more servers cannot change the verdict", "tune known")
    step = summary.next_step(result, "r", "tune known")
    assert step == summary.NextStep("continue the test", "tune verify r --budget 3m")


@pytest.mark.parametrize(
    ("result", "advice"),
    [
        (outcome(), "test it on fresh servers"),
        (outcome(*[10.0] * 4, error=0.0), "test it on fresh servers"),
        (outcome(10.0), "continue the test"),
    ],
    ids=["not measured there", "compared only", "begun"],
)
def test_only_a_test_that_has_begun_continues(result: Outcome, advice: str) -> None:
    assert summary.next_step(result, "r", "tune known") == summary.NextStep(advice, "tune verify r --budget 3m")


def test_a_command_that_needs_a_recommendation_names_the_disturbance() -> None:
    result = searched(24.0, shares=(0.5,))
    run = read_run(SAMPLE)
    error = str(nothing_recommended(replace(run, outcome=result), "emit"))
    assert error.startswith(f"{SAMPLE}: the run is UNDECIDED and recommends nothing to emit: other processes")
    assert error.endswith(f"; {RERUN}: `{command_line(run.options)}`")
    undecided = replace(run, outcome=outcome(16.0, 25.0, 14.0, 26.0))
    assert str(nothing_recommended(undecided, "emit")).endswith(
        f"; continue the test: `tune verify {SAMPLE} --budget 3m`"
    )
    complete = replace(undecided, info={**run.info, "confirmation_complete": True})
    assert str(nothing_recommended(complete, "emit")).endswith(f"the verdict: `{command_line(run.options)}`")
    quiet = nothing_recommended(replace(run, outcome=searched(24.0, shares=(0.0,))), "emit")
    assert "no configuration met p95 <= 20 ms" in str(quiet)
