"""Selections of the windows on fresh servers: by candidate and load, counted, undisturbed, tested or lost.

Pooled measurements and the variance between servers are computed from them.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import replace

from objectives.metrics import Measurement
from objectives.pooled_windows import pool_measurements
from objectives.server_spread import ServerSpread, server_spreads
from objectives.verdict import counted_windows, is_disturbed, is_overloaded
from optimizer.config.problem import Problem
from optimizer.core.trial import ConfirmationWindow, LoadPoint, Point, Trial, trial_of


def server_windows(trial: Trial, load: LoadPoint) -> list[list[Measurement]]:
    """Return the windows of each fresh server of ``trial`` at ``load``, in the order of measuring.

    If the load was tested, they are those of the test. Earlier ones, for comparison, do not count, because the
    candidate and the load were chosen by them.
    """
    return list(windows_by_server(trial, load).values())


def counted_server_windows(trial: Trial, load: LoadPoint) -> list[list[Measurement]]:
    """Return those of ``server_windows`` that count for the verdict, see ``counted_windows``."""
    return counted_windows(server_windows(trial, load), is_disturbed, is_overloaded)


def windows_by_server(trial: Trial, load: LoadPoint) -> dict[int, list[Measurement]]:
    """Return ``server_windows`` by the number of the fresh server."""
    windows = trial.windows_at(load)
    tested = [window for window in windows if window.is_tested]
    servers: dict[int, list[Measurement]] = {}
    for window in tested or windows:
        servers.setdefault(window.server, []).append(window.measurement)
    return servers


def undisturbed_windows(trials: Sequence[Trial]) -> list[list[list[Measurement]]]:
    """Return the undisturbed windows by fresh server, of each candidate and load that was confirmed.

    Servers without such windows are left out.
    """
    groups = []
    for trial, load in confirmed_loads(trials):
        servers = server_windows(trial, load)
        undisturbed = [[window for window in server if not is_disturbed(window)] for server in servers]
        groups.append([server for server in undisturbed if server])
    return groups


def windows_of(point: Point, trials: Sequence[Trial]) -> list[list[Measurement]]:
    """Return the windows at the load of ``point`` that count, by fresh server; one of ``trials`` has them."""
    return counted_server_windows(trial_of(point, trials), point.load)


def pooled_point(trial: Trial, load: LoadPoint) -> Point:
    """Return the candidate of ``trial`` at ``load``, with the pooled measurement of the windows that count."""
    windows = [window for server in counted_server_windows(trial, load) for window in server]
    return trial.point(load, pool_measurements(windows))


def confirmed_spreads(
    trials: Sequence[Trial], problem: Problem, counted: Sequence[Sequence[Measurement]], *metrics: str
) -> dict[str, ServerSpread]:
    """Return the variance between servers by metric, pooled over all candidates and loads that were confirmed.

    It has the throughput, the bounded latencies and ``metrics``.

    It is that of the conditions of ``counted``, the windows of one candidate and load that count. A disturbance makes
    servers differ more, so disturbed windows of the others count only if one of these was disturbed as well. Lost
    windows do not count: a later session repeats them, which must not change a test that has ended.
    """
    trials = [_without_lost_windows(trial) for trial in trials]
    if any(is_disturbed(window) for server in counted for window in server):
        groups = [counted_server_windows(trial, load) for trial, load in confirmed_loads(trials)]
    else:
        groups = undisturbed_windows(trials)
    return server_spreads(groups, (*problem.sla.bounded_latencies, *metrics))


def tested_spreads(
    trials: Sequence[Trial], trial: Trial, load: LoadPoint, problem: Problem
) -> dict[str, ServerSpread]:
    """Return ``confirmed_spreads`` for the verdict on ``trial``, one of ``trials``, at ``load``.

    If the load was tested, windows that were measured after its test ended do not count: a PASS at a planned look is
    final, and later measurements must not change it.
    """
    known = until_end_of_test(trials, trial, load) if load in errors_by_load(trial) else trials
    return confirmed_spreads(known, problem, counted_server_windows(trial, load))


def until_end_of_test(trials: Sequence[Trial], trial: Trial, load: LoadPoint) -> list[Trial]:
    """Return ``trials`` without measurements after the last server of ``trial`` at ``load``, that of its test if any.

    Windows on later fresh servers are left out, and measurements of a search that a resumed run continued later.
    Those of the search whose time is unknown are kept.
    """
    servers = windows_by_server(trial, load)
    last = max(servers)
    end = max(window.end_unix_seconds or 0.0 for windows in servers.values() for window in windows) or math.inf
    return [
        replace(
            other,
            measurements=tuple(pair for pair in other.measurements if (pair[1].end_unix_seconds or 0.0) <= end),
            confirmations=tuple(window for window in other.confirmations if window.server <= last),
        )
        for other in trials
    ]


def _without_lost_windows(trial: Trial) -> Trial:
    return replace(trial, confirmations=tuple(window for window in trial.confirmations if not window.is_lost))


def last_server(trials: Sequence[Trial]) -> int:
    """Return the number of the last fresh server; 0 if there is none."""
    return max((window.server for trial in trials for window in trial.confirmations), default=0)


def confirmed_loads(trials: Sequence[Trial]) -> list[tuple[Trial, LoadPoint]]:
    """Return each trial and load with confirmations, in the order of their last fresh servers.

    So a load that was first compared, and tested after another load, follows that one.
    """
    loads = {(trial.number, window.load): (trial, window) for trial in trials for window in trial.confirmations}
    ordered = sorted(loads.values(), key=lambda entry: entry[1].server)
    return [(trial, window.load) for trial, window in ordered]


def errors_by_load(trial: Trial) -> dict[LoadPoint, float]:
    """Return the error of the test of each tested load of ``trial``, in the order of testing."""
    return {window.load: window.error_probability for window in trial.confirmations if window.is_tested}


def begun_error(trials: Sequence[Trial]) -> float:
    """Return the error probability of all tests that were begun. A load that inherits an error adds nothing."""
    return sum(sum(set(errors_by_load(trial).values())) for trial in trials)


def last_lost_windows(trial: Trial) -> tuple[ConfirmationWindow, ...]:
    """Return the lost measurements at the end of the confirmations of ``trial``, which a later session repeats."""
    windows = trial.confirmations
    lost = itertools.takewhile(lambda window: window.is_lost, reversed(windows))
    return windows[len(windows) - len(list(lost)) :]


def without_last_lost_windows(trial: Trial) -> Trial:
    """Return ``trial`` without ``last_lost_windows``."""
    count = len(trial.confirmations) - len(last_lost_windows(trial))
    return replace(trial, confirmations=trial.confirmations[:count])
