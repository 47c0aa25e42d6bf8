"""Tests of verdicts next to other programs that are usually more active than during the test."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import special

from objectives.metrics import Measurement, four_digits
from objectives.sequential import LOOKS
from objectives.sla import Sla, Verdict
from objectives.verdict import MAX_EXCLUDED_SHARE
from optimizer.confirmation.candidate_tests import ConfirmationState, corrected_predictions
from optimizer.confirmation.load_predictions import LoadPredictions
from optimizer.confirmation.machine_states import (
    LATENCY_SLOPE,
    SLOPE_FACTORS,
    TAIL,
    THROUGHPUT_SLOPE,
    USUAL_DISTURBANCE,
    disturbance_limit,
    slowdown_over_states,
    usual_latency_rise,
)
from optimizer.confirmation.plan import ConfirmationPlan, correct_search_points
from optimizer.confirmation.server_plan import START_SECONDS
from optimizer.confirmation.verdicts import judge_confirmations, judge_load
from optimizer.confirmation.windows import confirmed_spreads, pooled_point
from optimizer.core.budget import Budget
from optimizer.core.candidate import Candidate
from optimizer.core.endpoint import Endpoint
from optimizer.core.resource_usage import ResourceUsage
from optimizer.core.trial import ConfirmationWindow, FreshServer, LoadPoint, Trial
from optimizer.store.trials_table import TrialsTable
from tests.conftest import not_none
from tests.curve_model import CurveModel
from tests.random_server import (
    BOUND_MS,
    FAST,
    FASTER,
    LOADS,
    RandomServer,
    confirm,
    drawn_problem,
    make_confirmer,
    with_measured,
)
from tests.random_server import searched as searched_loads

PROBLEM = replace(drawn_problem(), cpu_count=2)
SEARCHED, TESTED = LoadPoint(1, 8), LoadPoint(1, 10)
BUSY_SHARE = 0.5  # CPU share of other programs while they are active
SECONDS = 0.5
ERROR = 0.005
HIGHEST_SHARE = 0.8
shares = st.lists(st.sampled_from([0.0, 0.05, 0.3, BUSY_SHARE, HIGHEST_SHARE]), min_size=1, max_size=10)


def searched(*shares: float | None, number: int = 0, seconds: float = SECONDS) -> Trial:
    """Return a trial of the search with a measurement for each CPU share of other programs."""
    measured = [
        (
            SEARCHED,
            Measurement(900.0, latency_p95_ms=10.0, stable=True, measure_seconds=seconds, other_cpu_share=share),
        )
        for share in shares
    ]
    return Trial(number, FAST, tuple(measured))


def confirmed_trial(
    *shares: float | None, load: LoadPoint = TESTED, slow_factor: float = 1.0, first_server: int = 1
) -> Trial:
    """Return a trial whose test has LOOKS[0] servers with a window for each share, disturbed windows slower."""
    server, windows = RandomServer(), []
    for number in range(first_server, first_server + LOOKS[0]):
        for place, share in enumerate(shares):
            is_disturbed = (share or 0.0) > 0.1
            slower = replace(load, concurrency=round((slow_factor if is_disturbed else 1.0) * load.concurrency))
            end = 1e9 + 10 * number + SECONDS * place
            window = replace(
                server.measure(Endpoint("", FASTER), slower),
                stable=not is_disturbed,
                other_cpu_share=share,
                measure_seconds=SECONDS,
                begin_unix_seconds=end - SECONDS,
                end_unix_seconds=end,
            )
            windows.append(ConfirmationWindow(number, load, window, ERROR, LATENCY_SLOPE))
    return Trial(1, FASTER, confirmations=tuple(windows))


def rise(*trials: Trial) -> float:
    return usual_latency_rise(trials, trials[-1], TESTED, PROBLEM)


DISTURBED_SEARCH = searched(*(5 * [0.0]), *(4 * [BUSY_SHARE]), seconds=20)
QUIET_TEST = confirmed_trial(*(8 * [0.0]))


def with_slope(trial: Trial, latency_slope: float | None) -> Trial:
    """Return the trial with the slope that the search has shown; None for a separate test."""
    windows = tuple(replace(window, latency_slope=latency_slope) for window in trial.confirmations)
    return replace(trial, confirmations=windows)


def test_a_quiet_test_in_a_disturbed_run_is_judged_by_the_usual_states() -> None:
    """The rise is that of the percentile over all requests of both states, see ``slowdown_over_states``."""
    busy, quiet = 4 * 20.0, 5 * 20.0 + LOOKS[0] * 8 * SECONDS
    fall = math.log(1 / (1 - BUSY_SHARE))
    served = busy * math.exp(-THROUGHPUT_SLOPE * fall)
    mean = (quiet + served * math.exp(LATENCY_SLOPE * fall / TAIL)) / (quiet + served)
    assert rise(DISTURBED_SEARCH, QUIET_TEST) == pytest.approx(TAIL * math.log(mean))


@pytest.mark.parametrize(
    "trials",
    [
        pytest.param((searched(*(9 * [0.0])), QUIET_TEST), id="a quiet machine"),
        pytest.param(
            (searched(*(9 * [BUSY_SHARE])), confirmed_trial(*(8 * [BUSY_SHARE]))),
            id="a machine that is always shared",
        ),
        pytest.param((searched(*(9 * [None])), confirmed_trial(*(8 * [None]))), id="a remote server"),
        pytest.param((searched(*(9 * [0.0]), BUSY_SHARE), QUIET_TEST), id="seldom disturbed"),
        pytest.param((DISTURBED_SEARCH, with_slope(QUIET_TEST, None)), id="a separate test"),
        pytest.param((DISTURBED_SEARCH, with_slope(QUIET_TEST, 0.001)), id="programs that slow hardly anything"),
        pytest.param((DISTURBED_SEARCH, confirmed_trial(0.0, BUSY_SHARE)), id="a busier test than usual"),
    ],
)
def test_a_verdict_does_not_change_without_other_usual_states(trials: tuple[Trial, Trial]) -> None:
    (confirmed,) = judge_confirmations(trials, PROBLEM)
    (unknown_cpus,) = judge_confirmations(trials, replace(PROBLEM, cpu_count=None))
    assert confirmed == unknown_cpus
    assert confirmed.judged.latency_rise == 0.0


def test_a_server_on_gpus_has_no_usual_states() -> None:
    (confirmed,) = judge_confirmations([DISTURBED_SEARCH, QUIET_TEST], replace(PROBLEM, cpu_count=None))
    assert confirmed.judged.verdict is Verdict.PASS
    assert confirmed.judged.latency_rise == 0.0


@pytest.mark.parametrize("sla", [Sla(), Sla.from_bounds({"throughput": 900.0, "error-rate": 1.0})])
def test_without_a_bound_on_a_latency_there_are_no_usual_states(sla: Sla) -> None:
    assert usual_latency_rise([DISTURBED_SEARCH, QUIET_TEST], QUIET_TEST, TESTED, replace(PROBLEM, sla=sla)) == 0.0


def test_throughput_at_a_request_rate_is_the_same_in_each_state() -> None:
    """The slow state has a larger share of the requests than in a closed loop."""
    busy, quiet = 4 * 20.0, 5 * 20.0 + LOOKS[0] * 8 * SECONDS
    fall = math.log(1 / (1 - BUSY_SHARE))
    mean = (quiet + busy * math.exp(LATENCY_SLOPE * fall / TAIL)) / (quiet + busy)
    problem = replace(PROBLEM, open_loop=True)
    measured = usual_latency_rise([DISTURBED_SEARCH, QUIET_TEST], QUIET_TEST, TESTED, problem)
    assert measured == pytest.approx(TAIL * math.log(mean))
    assert measured > rise(DISTURBED_SEARCH, QUIET_TEST)


@pytest.mark.parametrize("fields", [{"node": "other"}, {"measure_seconds": None}])
def test_other_machines_are_no_states_of_the_one_that_confirms(fields: dict[str, Any]) -> None:
    """They are other nodes of a cluster, or other workers of a shared study, whose trials have no time."""
    (disturbed,) = with_measured([searched(BUSY_SHARE, seconds=600)], **fields)
    quiet = searched(*(5 * [0.0]), number=2)
    assert rise(disturbed, quiet, QUIET_TEST) == 0.0
    own = searched(*(6 * [0.0]), *(4 * [BUSY_SHARE]), number=2, seconds=20)
    assert rise(disturbed, own, QUIET_TEST) == rise(own, QUIET_TEST) > 0


def test_the_states_of_a_node_are_judged_by_its_own_usual_share() -> None:
    """Half of the median of both nodes is that of the quiet one, where BUSY_SHARE is a disturbance."""
    shared, quiet = (
        with_measured([searched(*shares, number=number, seconds=20)], node=node)[0]
        for number, node, shares in (
            (2, "shared", 9 * [BUSY_SHARE]),
            (3, "quiet", [*(5 * [0.0]), *(4 * [BUSY_SHARE])]),
        )
    )

    def tested_on(node: str, share: float) -> Trial:
        trial = confirmed_trial(*(8 * [share]))
        windows = [replace(one, measurement=replace(one.measurement, node=node)) for one in trial.confirmations]
        return replace(trial, confirmations=tuple(windows))

    assert rise(shared, quiet, tested_on("quiet", 0.0)) == rise(DISTURBED_SEARCH, QUIET_TEST) > 0
    assert rise(shared, quiet, tested_on("shared", BUSY_SHARE)) == 0.0


def test_a_rise_is_limited_by_the_slopes_that_the_search_tries() -> None:
    slow = replace(confirmed_trial(0.0, HIGHEST_SHARE, slow_factor=1e6), number=2)
    assert rise(DISTURBED_SEARCH, slow, QUIET_TEST) <= max(SLOPE_FACTORS) * LATENCY_SLOPE * math.log(
        1 / (1 - HIGHEST_SHARE)
    )


def test_a_pass_needs_the_bound_in_the_usual_states() -> None:
    (confirmed,) = judge_confirmations([DISTURBED_SEARCH, QUIET_TEST], PROBLEM)
    assert confirmed.judged.verdict is Verdict.UNDECIDED, "the measured latencies meet the bound, so it is no FAIL"
    assert confirmed.judged.reason.startswith("p95 <= 20 ms, tested as p95 <= ")
    assert "other programs were usually more active during this run" in confirmed.judged.reason
    assert not confirmed.judged.is_promising, "a lower load is tested"
    assert confirmed.judged.excess > 0
    assert PROBLEM.sla.is_met(confirmed.point.measurement)
    assert not confirmed.meets_sla
    low = confirmed_trial(*(8 * [0.0]), load=LoadPoint(1, 3))
    (passed,) = judge_confirmations([DISTURBED_SEARCH, low], PROBLEM)
    assert passed.judged.verdict is Verdict.PASS
    assert passed.judged.latency_rise > 0
    assert passed.meets_sla


def test_a_load_that_misses_the_bound_as_measured_fails() -> None:
    (confirmed,) = judge_confirmations(
        [DISTURBED_SEARCH, confirmed_trial(*(8 * [0.0]), load=LoadPoint(1, 30))], PROBLEM
    )
    assert confirmed.judged.verdict is Verdict.FAIL
    assert confirmed.judged.latency_rise > 0


def test_a_load_passes_only_if_it_passes_as_measured() -> None:
    """0.5 % of the requests are far over both bounds, which the latencies predict for the lower bound only.

    So there is a gap below the bound of the SLA, and the count of slow requests decides with a smaller error.
    """
    usual_rise = rise(DISTURBED_SEARCH, QUIET_TEST)
    requests = 200 * len(QUIET_TEST.confirmations)
    latencies = np.exp(0.75 * special.ndtri((np.arange(requests) + 0.5) / requests))
    p99_ms = float(np.quantile(latencies, 0.99))
    latencies[-32:] = 1000.0
    servers = latencies[::-1].reshape(200, 8, LOOKS[0]).transpose(2, 1, 0)  # the slowest requests on all servers
    measured = [RandomServer().measured(window, 1000.0) for server in servers for window in server]
    confirmations = tuple(
        replace(
            window,
            measurement=replace(one, requests_over_ms="", other_cpu_share=0.0, measure_seconds=SECONDS),
        )
        for window, one in zip(QUIET_TEST.confirmations, measured, strict=True)
    )
    trial = replace(QUIET_TEST, confirmations=confirmations)
    problem = replace(PROBLEM, sla=Sla.from_bounds({"p99": p99_ms * math.exp(usual_rise + 0.1875)}))
    lowered = replace(problem, sla=problem.sla.with_lower_latencies(usual_rise), cpu_count=None)
    judged = [
        judge_load([DISTURBED_SEARCH, trial], trial, TESTED, some, ERROR)
        for some in (lowered, replace(problem, cpu_count=None), problem)
    ]
    assert [one.verdict for one in judged] == [Verdict.PASS, Verdict.UNDECIDED, Verdict.UNDECIDED]
    assert judged[2].reason == judged[1].reason


def test_perf_analyzer_is_compared_with_the_bounds_of_the_usual_states() -> None:
    """It needs CPU time of the server, so a worse value contradicts a PASS only if it misses the bound."""
    low = confirmed_trial(*(8 * [0.0]), load=LoadPoint(1, 3))
    checks = tuple(
        ConfirmationWindow(
            number, LoadPoint(1, 3), Measurement(1200.0, latency_p95_ms=0.9 * BOUND_MS, stable=True), ERROR
        )
        for number in range(1, LOOKS[0] + 1)
    )
    problem = replace(PROBLEM, client_shares_cpus=True)
    (confirmed,) = judge_confirmations([DISTURBED_SEARCH, replace(low, cross_checks=checks)], problem)
    usual_rise = confirmed.judged.latency_rise
    assert confirmed.judged.verdict is Verdict.UNDECIDED
    assert confirmed.judged.excess == pytest.approx(math.log(0.9) + usual_rise, abs=1e-3)
    assert not_none(confirmed.agreement).contradicts_pass
    assert f"18 ms (allowed: 20, tested as {four_digits(20 * math.exp(-usual_rise))})" in confirmed.judged.reason
    assert "other programs were usually more active during this run" in confirmed.judged.reason


def test_a_lost_measurement_does_not_change_the_variance_between_servers() -> None:
    """A later session repeats it. With it, more than MAX_EXCLUDED_SHARE of the windows would be disturbed."""
    assert MAX_EXCLUDED_SHARE == 1 / 5
    windows = [
        replace(
            one,
            measurement=replace(
                one.measurement, latency_p95_ms=one.server * (1.0 if one.measurement.stable else 3.0)
            ),
        )
        for one in confirmed_trial(*(4 * [0.0]), BUSY_SHARE).confirmations
    ]
    trial = Trial(1, FASTER, confirmations=tuple(windows))
    lost = ConfirmationWindow(LOOKS[0] + 1, TESTED, Measurement(reason="tritonserver died"), ERROR, LATENCY_SLOPE)
    disturbed = [[window.measurement for window in trial.confirmations if not window.measurement.stable]]
    with_lost = replace(trial, confirmations=(*trial.confirmations, lost))
    spreads = [confirmed_spreads([some], PROBLEM, disturbed) for some in (trial, with_lost)]
    assert spreads[0] == spreads[1]


def test_windows_that_are_left_out_count_by_the_usual_states() -> None:
    """The run was disturbed for more than MAX_EXCLUDED_SHARE of its time, and the test was not."""
    trial = confirmed_trial(*(7 * [0.0]), BUSY_SHARE, slow_factor=3)
    (confirmed,) = judge_confirmations([DISTURBED_SEARCH, trial], PROBLEM)
    assert 0 < confirmed.judged.disturbed_share <= MAX_EXCLUDED_SHARE
    assert confirmed.judged.verdict is Verdict.UNDECIDED
    (alone,) = judge_confirmations([searched(0.0, seconds=100), trial], PROBLEM)
    assert alone.judged.verdict is Verdict.PASS


def test_programs_that_slowed_nothing_in_the_search_raise_the_latency_less() -> None:
    """They took only the CPU time that the server left idle."""
    rises = [rise(DISTURBED_SEARCH, with_slope(QUIET_TEST, slope)) for slope in (0.1, LATENCY_SLOPE)]
    assert 0 < 4 * rises[0] < rises[1]
    slow = replace(confirmed_trial(0.0, BUSY_SHARE, slow_factor=3), number=2)
    fresh_only = rise(DISTURBED_SEARCH, slow, with_slope(QUIET_TEST, 0.0))
    assert fresh_only > 0, "a slope of 0 in the search is no separate test: the windows decide"


def test_programs_that_slow_nothing_on_fresh_servers_raise_the_latency_less() -> None:
    states = [0.0, 0.0, 0.0, BUSY_SHARE]
    rises = [
        rise(DISTURBED_SEARCH, replace(confirmed_trial(*states, slow_factor=factor), number=2), QUIET_TEST)
        for factor in (1.0, 3.0)
    ]
    assert 0 < 2 * rises[0] < rises[1]


@pytest.mark.parametrize("error", [ERROR, 0.0])
def test_later_measurements_do_not_change_a_verdict(error: float) -> None:
    """Nor do they change the bound that a compared load, whose error is 0, has to meet."""
    low = confirmed_trial(*(8 * [0.0]), load=LoadPoint(1, 3))
    low = replace(low, confirmations=tuple(replace(one, error_probability=error) for one in low.confirmations))
    (before,) = judge_confirmations([DISTURBED_SEARCH, low], PROBLEM)
    begin = min(window.measurement.begin_unix_seconds or 0.0 for window in low.confirmations)
    end = max(window.measurement.end_unix_seconds or 0.0 for window in low.confirmations)

    def more_search(end_unix_seconds: float) -> Trial:
        trial = searched(*(90 * [BUSY_SHARE]), number=2)
        return with_measured([trial], end_unix_seconds=end_unix_seconds)[0]

    later_test = replace(confirmed_trial(*(8 * [BUSY_SHARE]), first_server=10), number=3)
    after, _ = judge_confirmations([DISTURBED_SEARCH, low, more_search(end + 1), later_test], PROBLEM)
    assert after.judged.latency_rise == before.judged.latency_rise > 0
    assert after == before or not error, "only intervals of compared loads use all servers"
    (other,) = judge_confirmations([DISTURBED_SEARCH, low, more_search(begin - 1)], PROBLEM)
    assert other.judged.latency_rise == 0, "the machine was always shared until then"


def test_the_tests_of_a_rival_begin_by_the_states_until_then() -> None:
    """It was compared in a quiet moment. The verdict on the comparison is about the states until its end."""
    compared = replace(
        QUIET_TEST, confirmations=tuple(replace(w, error_probability=0.0) for w in QUIET_TEST.confirmations)
    )
    later = replace(confirmed_trial(*(8 * [BUSY_SHARE]), slow_factor=3, first_server=10), number=2)
    trials = [searched(*(9 * [0.0])), compared, later]
    predicted = LoadPredictions((SEARCHED, TESTED), (-0.4, -0.2), (800.0, 900.0))
    plan = ConfirmationPlan(ERROR, (2, 1), {1: predicted})

    def log_ratio(*trials: Trial) -> float:
        confirmation = ConfirmationState(PROBLEM, plan, trials, START_SECONDS, is_cross_checked=False)
        corrected = not_none(corrected_predictions(confirmation, compared))
        return corrected.log_latency_ratios[1]

    measured = math.log((pooled_point(compared, TESTED).measurement.latency_p95_ms or 0.0) / BOUND_MS)
    assert log_ratio(*trials[:2]) == pytest.approx(measured)
    usual_rise = usual_latency_rise(trials, compared, TESTED, PROBLEM)
    assert usual_rise > 0.1
    assert log_ratio(*trials) == pytest.approx(measured + usual_rise, abs=1e-3)
    assert judge_confirmations(trials, PROBLEM)[0].judged.latency_rise == 0


def test_a_search_that_is_continued_later_does_not_change_which_measurements_are_disturbed() -> None:
    """The windows on fresh servers were left out by the limit of the search before the first of them."""
    begin = min(window.measurement.begin_unix_seconds or 0.0 for window in QUIET_TEST.confirmations)
    continued = with_measured([searched(*(90 * [BUSY_SHARE]), number=2)], end_unix_seconds=begin + 1)[0]
    trials = [DISTURBED_SEARCH, QUIET_TEST, continued]
    assert disturbance_limit(trials) == disturbance_limit([DISTURBED_SEARCH]) == USUAL_DISTURBANCE
    assert rise(DISTURBED_SEARCH, continued, QUIET_TEST) > rise(DISTURBED_SEARCH, QUIET_TEST)


@pytest.mark.parametrize("slope", [LATENCY_SLOPE, 0.0, None])
def test_the_verdict_is_the_same_for_a_run_that_is_read_again(slope: float | None, tmp_path: Path) -> None:
    trials = [DISTURBED_SEARCH, with_slope(confirmed_trial(*(7 * [0.0]), BUSY_SHARE, slow_factor=3), slope)]
    table = TrialsTable(tmp_path / "trials.csv", "drawn", {}, cpu_count=2)
    for trial in trials:
        for load, measurement in trial.measurements:
            table.append(trial, load, measurement)
        for window in trial.confirmations:
            table.append(
                trial,
                window.load,
                window.measurement,
                FreshServer(window.server, window.error_probability, latency_slope=window.latency_slope),
            )
    read = TrialsTable(tmp_path / "trials.csv", "drawn", {}).read()
    assert judge_confirmations(read, PROBLEM) == judge_confirmations(trials, PROBLEM)
    assert [window.latency_slope for window in read[1].confirmations] == [slope] * 8 * LOOKS[0]


@given(shares, shares, st.floats(0.1, 100))
def test_the_rise_depends_on_the_shares_of_the_time(
    search: Sequence[float], fresh: Sequence[float], factor: float
) -> None:
    """It is not negative, and at most that of the slowest state."""

    def rise_with(seconds: float) -> float:
        windows = [
            replace(measured, measure_seconds=seconds, stable=(measured.other_cpu_share or 0.0) <= 0.1)
            for _, measured in searched(*fresh).measurements
        ]
        compared = Trial(
            1, FASTER, confirmations=tuple(ConfirmationWindow(1, TESTED, one, 0.0, LATENCY_SLOPE) for one in windows)
        )
        own = Trial(2, FASTER, confirmations=(ConfirmationWindow(2, TESTED, windows[0], ERROR, LATENCY_SLOPE),))
        return rise(searched(*search, seconds=2 * seconds), compared, own)

    assert 0.0 <= rise_with(1.0) <= LATENCY_SLOPE * math.log(1 / (1 - HIGHEST_SHARE))
    assert rise_with(factor) == pytest.approx(rise_with(1.0))


@given(st.lists(st.floats(0, 2), min_size=1, max_size=10), st.floats(0, 1e3), st.floats(0, 3), st.floats(1e-3, 1e3))
def test_the_slowdown_is_between_that_of_the_mildest_and_of_the_worst_state(
    falls: list[float], latency_slope: float, throughput_slope: float, weight: float
) -> None:
    slowdown = slowdown_over_states(np.array(falls), latency_slope, throughput_slope)
    assert latency_slope * min(falls) - 1e-9 <= slowdown <= latency_slope * max(falls) + 1e-9
    weights = np.full(len(falls), weight)
    assert slowdown_over_states(np.array(falls), latency_slope, throughput_slope, weights) == pytest.approx(slowdown)


class SharedServer(RandomServer):
    """A server next to other programs with a constant CPU share; None if it is unknown."""

    def __init__(self, other_cpu_share: float | None) -> None:
        super().__init__()
        self.other_cpu_share = other_cpu_share

    @contextlib.contextmanager
    def record(self, endpoint: Endpoint) -> Iterator[ResourceUsage]:
        yield ResourceUsage(other_cpu_share=self.other_cpu_share)


@pytest.mark.parametrize("busy_share", [0.0, BUSY_SHARE])
def test_windows_have_the_slope_of_a_disturbed_search_or_the_usual_one(busy_share: float, tmp_path: Path) -> None:
    """Other programs took only the CPU time that the server left idle, which a search without them cannot show."""
    model = CurveModel(lambda load: 100.0 * load, lambda load: 1e-3 * load)
    measured = [
        (
            LoadPoint(1, load),
            Measurement(
                100.0 * load,
                latency_p95_ms=float(load),
                stable=True,
                measure_seconds=SECONDS,
                other_cpu_share=busy_share * (load % 2),
            ),
        )
        for load in range(4, 13)
    ]
    trials = [Trial(0, FASTER, tuple(measured))]
    server = RandomServer()
    confirmer = make_confirmer(server, list(trials), PROBLEM, tmp_path, Budget(600))
    confirmer.fit = lambda points: model
    (slope,) = {window.latency_slope for trial in confirmer.run([]) for window in trial.confirmations}
    if busy_share:
        assert slope == correct_search_points(trials, PROBLEM, lambda points: model)[1].latency_slope
        assert slope is not None
        assert slope < 0.2 * LATENCY_SLOPE
    else:
        assert slope == LATENCY_SLOPE


@pytest.mark.parametrize("share", [0.0, None])
def test_the_course_of_a_confirmation_is_the_same_on_a_quiet_machine(share: float | None, tmp_path: Path) -> None:
    def course(cpu_count: int | None) -> tuple[list[Candidate], list[Trial]]:
        server, folder = SharedServer(share), tmp_path / str(cpu_count)
        folder.mkdir()
        trials = with_measured(searched_loads(server, LOADS), other_cpu_share=share, measure_seconds=SECONDS)
        return server.deployed, confirm(server, trials, replace(PROBLEM, cpu_count=cpu_count), folder)

    deployed, trials = course(2)
    assert (deployed, trials) == course(None)
    assert Verdict.PASS in [entry.judged.verdict for entry in judge_confirmations(trials, PROBLEM)]


@pytest.mark.parametrize("concurrency", range(2, 20, 3))
def test_a_verdict_on_the_usual_states_is_no_better_than_that_on_the_test(concurrency: int) -> None:
    """The bounds are lower, so the test makes no more errors."""
    trial = confirmed_trial(*(8 * [0.0]), load=LoadPoint(1, concurrency))
    ranks = [Verdict.FAIL, Verdict.UNDECIDED, Verdict.PASS]
    (usual,), (measured,) = (
        judge_confirmations([DISTURBED_SEARCH, with_slope(trial, slope)], PROBLEM) for slope in (0.5, 0.0)
    )
    assert usual.judged.latency_rise > measured.judged.latency_rise == 0
    assert ranks.index(usual.judged.verdict) <= ranks.index(measured.judged.verdict)
