"""One trial: its configuration deployed, its loads measured, each row on disk before anything else happens."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from optimizer.crashes import tried_again
from optimizer.errors import DeploymentError, ServerCrashed
from optimizer.interfaces import Endpoint, Target
from optimizer.load.rate_sweep import next_rate
from optimizer.load.sweep import SweepRules, is_hopeless, next_load
from optimizer.measuring import Measuring
from optimizer.stopwatch import Stopwatch
from optimizer.trial import Candidate, LoadPoint, Trial


@dataclass
class TrialRunner:
    """``seconds_left`` are those until the search has to end; ``baseline`` gives the answers to compare with."""

    target: Target
    measuring: Measuring
    baseline: Candidate
    seconds_left: Callable[[], float]
    stopwatch: Stopwatch

    def __post_init__(self) -> None:
        self._asked_again = False
        self.log: Path | None = None  # of the last trial that failed

    def run(self, trial: Trial, role: str, rules: SweepRules) -> Trial:
        """``trial`` from where it stands to where it ends; one whose sweep is complete is not deployed again.

        What is measured is in ``self.current`` at once, whatever happens next.
        """
        self.current, self._rules = trial, rules
        complete = bool(trial.measurements) and self._next_load() is None
        if trial.status != "ok" or complete:
            return trial
        self.measuring.watcher.trial_started(trial.number, trial.candidate, role)
        self._ask_baseline_again()
        try:
            tried_again(self._deploy_and_sweep, self._is_worth_retrying)
        except DeploymentError as error:
            self._fail(error)
        return self.current

    def _fail(self, error: DeploymentError) -> None:
        """The current trial is infeasible, whatever it served before; its rows stay in the table."""
        if isinstance(error, ServerCrashed) and _figures(self.current):
            return  # only the time was up, before it could be tried again
        self.current = replace(self.current, status="failed", reason=str(error), measurements=())
        self.log = error.log
        self.measuring.table.append_failure(self.current)

    def _deploy_and_sweep(self) -> None:
        started, guard = time.monotonic(), self.measuring.guard
        with self.target.deploy(self.current.candidate) as endpoint:
            self.current = replace(self.current, deploy_seconds=round(time.monotonic() - started, 3))
            if guard.needs_reference and self.current.candidate == self.baseline:
                with self.stopwatch.server():
                    guard.reference(endpoint)
            self.measuring.begin(endpoint)
            self._sweep(endpoint)

    def _is_worth_retrying(self) -> bool:
        """The baseline always: all else is compared with it."""
        return self.current.candidate == self.baseline or self.seconds_left() > 0

    def _ask_baseline_again(self) -> None:
        """For the answers to compare with, where they were lost: a resumed run, a server that died."""
        guard = self.measuring.guard
        if guard.needs_reference and self.current.candidate != self.baseline and not self._asked_again:
            self._asked_again = True
            with contextlib.suppress(DeploymentError), self.target.deploy(self.baseline) as endpoint:
                guard.reference(endpoint)

    def _next_load(self) -> LoadPoint | None:
        rule = next_rate if self._rules.open_loop else next_load
        return rule(self.current.measurements, self._rules)

    def _sweep(self, endpoint: Endpoint) -> None:
        warm = False
        while (load := self._next_load()) is not None:
            if self.current.measurements and self.seconds_left() < 0:
                return
            if not warm:
                glance = self.measuring.load_generator.warm_up(endpoint, load)
                if glance is not None and is_hopeless(glance, self._rules):
                    glance = replace(glance, reason="given up after a first short window")
                    self.current = self.measuring.keep(self.current, load, glance)
                    return
                warm = True
            self.current = self.measuring.measure(self.current, endpoint, load)
            nothing = self.current.measurements[-1][1].throughput_infer_per_sec is None
            if nothing and not self._rules.open_loop:  # else the rate was too high for the load generator
                return


def _figures(trial: Trial) -> bool:
    return any(measurement.throughput_infer_per_sec is not None for _, measurement in trial.measurements)
