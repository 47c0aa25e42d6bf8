"""What a run does as lines of text, one for each trial: for logs, and for terminals that are not to be redrawn."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from rich.console import Console
from rich.text import Text

from objectives.metrics import Measurement
from optimizer.report import summary, words
from optimizer.trial import Candidate, LoadPoint, Point, Trial
from optimizer.untrusted import one_line

if TYPE_CHECKING:
    from optimizer.budget import Budget
    from optimizer.problem import Problem


class PlainWatcher:
    """Says each trial as it ends: when, what it was, what it gave, and how much time is left.

    Lines are whole, however wide the terminal is.
    """

    def __init__(self, console: Console, problem: Problem, budget: Budget) -> None:
        self._console, self._problem, self._budget = console, problem, budget
        self._started = time.monotonic()
        self._latency = words.judged_latency(problem.constraints)
        self._roles: dict[int, str] = {}  # of the trials that run, by number
        self._last: dict[int, tuple[LoadPoint, Measurement]] = {}

    def __enter__(self) -> PlainWatcher:
        self._say(f"{self._problem.model}, {words.bounds(self._problem.constraints) or 'no bound'}")
        return self

    def __exit__(self, *error: object) -> None:
        pass

    def trial_started(self, number: int, candidate: Candidate, role: str) -> None:
        self._roles[number] = role
        self._last.pop(number, None)

    def measured(self, number: int, load: LoadPoint, measurement: Measurement) -> None:
        self._last[number] = load, measurement

    def trial_finished(self, trial: Trial, best: Point | None) -> None:
        asked = self._roles.get(trial.number, "")
        role = "" if asked in ("", "search") else f" ({asked.replace('_', ' ')})"
        left = words.clock(self._budget.left_seconds())
        better = "" if best is None else f"; best so far: trial {best.trial}, {words.of(best, 'throughput')}"
        self._say(
            f"trial {trial.number}{role}: {words.configuration(trial.candidate)}: {self._figures(trial)}{better}; "
            f"{left} left"
        )

    def _figures(self, trial: Trial) -> str:
        if trial.status == "failed":
            return f"failed: {trial.reason}"
        last = self._last.get(trial.number)
        if self._roles.get(trial.number) == "confirm" and last is not None:
            load, measurement = last
            return self._told(Point(trial.number, trial.candidate, load, measurement))
        shown, met = summary.best_load(trial, self._problem)
        if shown is None:
            return "no figures"
        return self._told(shown) + ("" if met else ", misses the bound")

    def _told(self, point: Point) -> str:
        if point.measurement.throughput_infer_per_sec is None:
            return point.measurement.reason or "no figures"
        return words.performance(point, self._latency)

    def _say(self, line: str) -> None:
        elapsed = words.clock(time.monotonic() - self._started)
        self._console.print(Text(one_line(f"{elapsed}  {line}")), soft_wrap=True)
