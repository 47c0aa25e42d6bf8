"""The time that the measurements of an earlier session have used of the budget."""

from __future__ import annotations

import math
from dataclasses import asdict, replace

import pytest

from objectives.metrics import Measurement
from optimizer.core.budget import SpentTime, read_spent_time, spent_seconds
from optimizer.core.candidate import Candidate
from optimizer.core.trial import ConfirmationWindow, Crash, LoadPoint, Trial

LOAD = LoadPoint(1, 4)
WINDOW = Measurement(100.0, measure_seconds=2.0, stable=True)


def test_each_start_of_a_server_is_spent() -> None:
    """One server of the search and three fresh ones start, of which each has two windows and one measurement more."""
    searched = Trial(0, Candidate(4), ((LOAD, WINDOW),), deploy_seconds=60.0)
    assert spent_seconds([searched]) == 60 + 2
    windows = tuple(ConfirmationWindow(server, LOAD, WINDOW, 0.005) for server in (1, 1, 3, 3, 4, 4))
    checks = tuple(ConfirmationWindow(server, LOAD, WINDOW, 0.005) for server in (1, 3, 4))
    confirmed = Trial(0, Candidate(4), ((LOAD, WINDOW),), "ok", "", 60.0, windows, checks)
    assert spent_seconds([confirmed]) == 4 * 60 + 10 * 2
    crashed = Trial(0, Candidate(4), deploy_seconds=60.0, crashes=(Crash("it died"),))
    assert spent_seconds([crashed]) == 2 * 60
    assert spent_seconds([Trial(0, Candidate(4), status="failed", reason="it does not load")]) == 0


def test_the_search_of_another_worker_is_not_spent() -> None:
    """Its rows have no measure_seconds. Its fresh servers were started by this worker."""
    copied = Measurement(100.0, stable=True)
    trial_of_other_worker = Trial(0, Candidate(4), ((LOAD, copied), (LOAD, copied)), deploy_seconds=30.0)
    assert spent_seconds([trial_of_other_worker] * 20) == 0
    windows = tuple(ConfirmationWindow(server, LOAD, WINDOW, 0.005) for server in (1, 1, 2, 2))
    assert spent_seconds([replace(trial_of_other_worker, confirmations=windows)]) == 2 * 30 + 4 * 2
    lost = Measurement(None, reason="the load generator failed")
    assert spent_seconds([Trial(0, Candidate(4), ((LOAD, lost),), deploy_seconds=30.0)]) == 30


def test_the_time_of_a_cluster_is_that_of_the_workers_which_measured() -> None:
    """Eight workers measure for 360 s each, and one of them confirms for 100 s."""
    searching, confirming = replace(WINDOW, measure_seconds=90.0), replace(WINDOW, measure_seconds=100.0)
    trials = [Trial(number, Candidate(number), ((LOAD, searching),) * 4) for number in range(8)]
    first_session = SpentTime().next_session([], 8)
    assert (first_session.seconds, first_session.total(trials)) == (0, 360)
    trials[0] = replace(trials[0], confirmations=(ConfirmationWindow(1, LOAD, confirming),))
    assert first_session.total(trials) == 460
    for workers in (1, 2, 16):
        second_session = read_spent_time(asdict(first_session.next_session(trials, workers)))
        assert (second_session.seconds, second_session.total(trials)) == (460, 460)
        later_trial = Trial(8, Candidate(8), ((LOAD, confirming),))
        assert second_session.total([*trials, later_trial]) == 460 + 100 / workers


@pytest.mark.parametrize(
    "damaged", [None, [], {"at_once": 0}, {"at_once": True}, {"seconds": "1"}, {"seconds": math.nan}]
)
def test_without_a_valid_record_all_trials_ran_in_sequence(damaged: object) -> None:
    valid = {"seconds": 5.0, "estimated_seconds": 1.0, "at_once": 8}
    document = {**valid, **damaged} if isinstance(damaged, dict) else damaged
    searched = Trial(0, Candidate(4), ((LOAD, WINDOW),), deploy_seconds=60.0)
    assert read_spent_time(document).total([searched]) == 62
    assert read_spent_time(valid) == SpentTime(5.0, 1.0, 8)
