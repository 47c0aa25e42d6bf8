"""The loop: suggest, deploy, sweep, record, observe."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from optimizer.budget import Budget
from optimizer.course import Course
from optimizer.interfaces import Searcher, Target
from optimizer.measuring import Measuring
from optimizer.problem import Problem
from optimizer.sharing.others import Nobody, Others
from optimizer.stopwatch import Stopwatch
from optimizer.trial import Candidate, Point, Trial
from optimizer.trial_runner import TrialRunner


@dataclass
class Tuner:
    """Drives one study, a trial at a time. Only here do the searcher, the target and the load generator meet."""

    problem: Problem
    searcher: Searcher
    target: Target
    measuring: Measuring
    budget: Budget
    stopwatch: Stopwatch = field(default_factory=Stopwatch)
    others: Others = field(default_factory=Nobody)

    def run(self, comparisons: Sequence[tuple[str, Candidate]]) -> list[Trial]:
        """Measure ``comparisons`` (role, candidate), then search until searcher or budget end it.

        Continues where the table ends. Whatever stops it, all that was measured is in the table.
        """
        course = Course(self.problem, self.searcher, self.budget, self.stopwatch, comparisons, self.others)
        self._course = course
        runner = TrialRunner(
            self.target, self.measuring, course.baseline, self.budget.search_seconds_left, self.stopwatch
        )
        before = self.measuring.table.read()
        unfinished = before.pop() if before else None
        course.resume(before)
        following = course.taken_up(unfinished) if unfinished else course.awaited()
        while following is not None:
            role, trial = following
            trial = runner.run(trial, role, course.rules(trial.candidate))
            course.finished(trial, runner.log)
            self.measuring.watcher.trial_finished(trial, course.best())
            following = course.awaited()
        return course.trials

    def best(self) -> Point | None:
        """So far."""
        return self._course.best()

    @property
    def satisfied(self) -> bool:
        """Whether the searcher ended the search, not the budget."""
        return self._course.satisfied
