"""The time that the measurements of an earlier session have used of the budget."""

from __future__ import annotations

from dataclasses import replace

from objectives.metrics import Measurement
from optimizer.core.budget import spent_seconds
from optimizer.core.trial import Candidate, ConfirmationWindow, Crash, LoadPoint, Trial

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
    theirs = Trial(0, Candidate(4), ((LOAD, copied), (LOAD, copied)), deploy_seconds=30.0)
    assert spent_seconds([theirs] * 20) == 0
    windows = tuple(ConfirmationWindow(server, LOAD, WINDOW, 0.005) for server in (1, 1, 2, 2))
    assert spent_seconds([replace(theirs, confirmations=windows)]) == 2 * 30 + 4 * 2
    lost = Measurement(None, reason="the load generator failed")
    assert spent_seconds([Trial(0, Candidate(4), ((LOAD, lost),), deploy_seconds=30.0)]) == 30
