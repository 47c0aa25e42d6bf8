"""Observers of the progress of a run: none, one line per trial, or a live display."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from rich.console import Console
from rich.text import Text

from optimizer.core.safe_text import one_line
from optimizer.core.trial import Point
from optimizer.results import configuration_text, formatting
from optimizer.results.live_display import LiveObserver
from optimizer.results.recommendation import best_load, front_metrics, newest_confirmation

if TYPE_CHECKING:
    from objectives.metrics import Measurement
    from optimizer.config.search_space import Problem
    from optimizer.core.budget import Budget
    from optimizer.core.trial import Candidate, LoadPoint, Trial


class QuietObserver:
    """Prints nothing."""

    def __enter__(self) -> QuietObserver:
        return self

    def __exit__(self, *error: object) -> None:
        pass

    def trial_started(self, number: int, candidate: Candidate, role: str) -> None:
        pass

    def measured(self, number: int, load: LoadPoint, measurement: Measurement) -> None:
        pass

    def trial_finished(self, trial: Trial, best: Point | None) -> None:
        pass


class PlainObserver(QuietObserver):
    """Prints one unwrapped line per finished trial: elapsed time, configuration, metrics and time left.

    After a confirmation the metrics are those of all windows on that fresh server.
    """

    def __init__(self, console: Console, problem: Problem, budget: Budget) -> None:
        self._console, self._problem, self._budget = console, problem, budget
        self._started = time.monotonic()
        self._roles: dict[int, str] = {}  # roles of running trials, by number
        self._servers: dict[int, int] = {}  # newest fresh server that was shown, by trial

    def trial_started(self, number: int, candidate: Candidate, role: str) -> None:
        self._roles[number] = role

    def trial_finished(self, trial: Trial, best: Point | None) -> None:
        name = self._roles.get(trial.number, "")
        role = "" if name in ("", "search") else f" ({name.replace('_', ' ')})"
        left = formatting.clock(self._budget.left_seconds())
        best_so_far = ""
        if best is not None:
            throughput = formatting.value_of(best, front_metrics(self._problem)[0].name)
            best_so_far = f"; best so far: trial {best.trial}, {throughput}"
        self._print_line(
            f"trial {trial.number}{role}: {configuration_text.configuration(trial.candidate)}: "
            f"{self._trial_figures(trial)}{best_so_far}; {left} left"
        )

    def _trial_figures(self, trial: Trial) -> str:
        if trial.status == "failed":
            return f"failed: {trial.reason}"
        if self._roles.get(trial.number) == "confirm":
            server = trial.confirmations[-1].server if trial.confirmations else None
            if server is None or server == self._servers.get(trial.number):  # the newest server was lost
                return "no figures"
            self._servers[trial.number] = server
            return self._point_figures(newest_confirmation(trial))
        shown, met = best_load(trial, self._problem)
        if shown is None:
            return "no figures"
        if met:  # a disturbed measurement has less weight, so another trial may be the best one
            return self._point_figures(shown) + ("" if shown.measurement.stable else ", disturbed")
        return f"{self._point_figures(shown)}, {self._missed(shown)}"

    def _missed(self, point: Point) -> str:
        """Return why the search cannot recommend ``point``, with the missed bounds if the SLA has several."""
        missed = self._problem.sla.missed(point.measurement)
        if not missed:
            return "its windows disagree"
        return "misses the bound" if len(self._problem.sla) == 1 else f"misses {formatting.bounds(missed)}"

    def _point_figures(self, point: Point) -> str:
        if point.measurement.throughput_infer_per_sec is None:
            return point.measurement.reason or "no figures"
        return formatting.performance(point, *self._problem.sla.bounded_latencies)

    def _print_line(self, line: str) -> None:
        elapsed = formatting.clock(time.monotonic() - self._started)
        self._console.print(Text(one_line(f"{elapsed}  {line}")), soft_wrap=True)


def make_observer(
    log: str, terminal: Console, problem: Problem, budget: Budget, hardware: str
) -> LiveObserver | QuietObserver:
    """Return the observer for ``log``, one of ``run_options.LOGS``."""
    if log == "plain":
        return PlainObserver(terminal, problem, budget)
    return LiveObserver(terminal, problem, budget, hardware=hardware) if log == "live" else QuietObserver()
