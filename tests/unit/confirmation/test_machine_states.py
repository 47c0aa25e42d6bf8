"""Tests of verdicts next to other programs that are usually more active than during the test."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from objectives.confidence import Verdict
from objectives.metrics import Measurement
from objectives.sequential import LOOKS
from objectives.verdict import MAX_EXCLUDED_SHARE
from optimizer.confirmation.machine_states import (
    LATENCY_SLOPE,
    TAIL,
    THROUGHPUT_SLOPE,
    slowdown_over_states,
    usual_latency_rise,
)
from optimizer.confirmation.verdicts import judge_confirmations, meets_sla
from optimizer.core.endpoint import Endpoint
from optimizer.core.interfaces import ResourceUsage
from optimizer.core.trial import Candidate, ConfirmationWindow, FreshServer, LoadPoint, Trial
from optimizer.store.trials_table import TrialsTable
from tests.random_server import FAST, FASTER, LOADS, RandomServer, confirm, drawn_problem, with_measured
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


def with_slope(trial: Trial, latency_slope: float) -> Trial:
    """Return the trial with the slope that the search has shown."""
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
        pytest.param((DISTURBED_SEARCH, with_slope(QUIET_TEST, 0.0)), id="a separate test"),
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


def test_a_pass_needs_the_bound_in_the_usual_states() -> None:
    (confirmed,) = judge_confirmations([DISTURBED_SEARCH, QUIET_TEST], PROBLEM)
    assert confirmed.judged.verdict is Verdict.UNDECIDED, "the measured latencies meet the bound, so it is no FAIL"
    assert "other programs were usually more active during this run" in confirmed.judged.reason
    assert not confirmed.judged.is_promising, "a lower load is tested"
    assert confirmed.judged.excess > 0
    assert PROBLEM.sla.is_met(confirmed.point.measurement)
    assert not meets_sla(confirmed, PROBLEM)
    low = confirmed_trial(*(8 * [0.0]), load=LoadPoint(1, 3))
    (passed,) = judge_confirmations([DISTURBED_SEARCH, low], PROBLEM)
    assert passed.judged.verdict is Verdict.PASS
    assert passed.judged.latency_rise > 0
    assert meets_sla(passed, PROBLEM)


def test_a_load_that_misses_the_bound_as_measured_fails() -> None:
    (confirmed,) = judge_confirmations(
        [DISTURBED_SEARCH, confirmed_trial(*(8 * [0.0]), load=LoadPoint(1, 30))], PROBLEM
    )
    assert confirmed.judged.verdict is Verdict.FAIL
    assert confirmed.judged.latency_rise > 0


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


def test_programs_that_slow_nothing_on_fresh_servers_raise_the_latency_less() -> None:
    states = [0.0, 0.0, 0.0, BUSY_SHARE]
    rises = [
        rise(DISTURBED_SEARCH, replace(confirmed_trial(*states, slow_factor=factor), number=2), QUIET_TEST)
        for factor in (1.0, 3.0)
    ]
    assert 0 < 2 * rises[0] < rises[1]


def test_later_measurements_do_not_change_a_verdict() -> None:
    low = confirmed_trial(*(8 * [0.0]), load=LoadPoint(1, 3))
    (before,) = judge_confirmations([DISTURBED_SEARCH, low], PROBLEM)
    end = max(window.measurement.end_unix_seconds or 0.0 for window in low.confirmations)

    def more_search(end_unix_seconds: float) -> Trial:
        trial = searched(*(90 * [BUSY_SHARE]), number=2)
        return with_measured([trial], end_unix_seconds=end_unix_seconds)[0]

    later_test = replace(confirmed_trial(*(8 * [BUSY_SHARE]), first_server=10), number=3)
    after, _ = judge_confirmations([DISTURBED_SEARCH, low, more_search(end + 1), later_test], PROBLEM)
    assert after == before
    assert after.judged.latency_rise > 0
    (other,) = judge_confirmations([DISTURBED_SEARCH, low, more_search(end - 1)], PROBLEM)
    assert other.judged.latency_rise == 0, "the machine was always shared until then"


def test_the_verdict_is_the_same_for_a_run_that_is_read_again(tmp_path: Path) -> None:
    trials = [DISTURBED_SEARCH, confirmed_trial(*(7 * [0.0]), BUSY_SHARE, slow_factor=3)]
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


@given(st.lists(st.floats(0, 2), min_size=1, max_size=10), st.floats(0, 3), st.floats(0, 3), st.floats(1e-3, 1e3))
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
