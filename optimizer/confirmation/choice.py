"""The choice of the recommendation from the measurements of a run so far, and of the points compared with it."""

from __future__ import annotations

from collections.abc import Sequence

from objectives.intervals import ConfidenceInterval, GainRatio, ObjectiveGain
from objectives.sla import Sla, Verdict
from objectives.verdict import is_disturbed
from optimizer.config.problem import Problem
from optimizer.confirmation.verdicts import ConfirmedLoad, compare_metric, judge_confirmations
from optimizer.core.candidate import Candidate
from optimizer.core.trial import LoadPoint, Point, Trial, latest_points
from optimizer.simulator.speed_correction import fit_speed_correction

RATIO_TO_ITSELF = GainRatio(1.0, ConfidenceInterval(1.0, 1.0))  # a configuration compared with itself


def best_so_far(trials: Sequence[Trial], problem: Problem, baseline: Candidate | None) -> Point | None:
    """Return the recommendation of a run that would end now, if it meets the SLA as measured; None otherwise.

    A point that missed a bound while the machine was slow may be recommended, but is not shown as the best so far.
    """
    return met_as_measured(Choice(trials, problem).recommended(baseline), problem.sla)


def met_as_measured(recommended: Point | None, sla: Sla) -> Point | None:
    """Return ``recommended`` if it meets the SLA as measured; None otherwise."""
    return recommended if recommended and sla.is_met(recommended.measurement) else None


def confirmation_of(point: Point | None, confirmed: Sequence[ConfirmedLoad]) -> ConfirmedLoad | None:
    """Return the confirmation whose point is the object ``point``; None if only the search measured it."""
    return next((entry for entry in confirmed if entry.point is point), None)


class Choice:
    """The choice of the recommendation, and of the points that it is compared with.

    Attributes:
        confirmed: The confirmations.
        points: Each configuration at each load: confirmed if it is, otherwise as the search measured it.
    """

    def __init__(self, trials: Sequence[Trial], problem: Problem) -> None:
        self._trials, self._problem = trials, problem
        self.confirmed = judge_confirmations(trials, problem)
        confirmed_loads = {(entry.point.candidate, entry.point.load) for entry in self.confirmed}
        searched = [point for point in latest_points(trials) if (point.candidate, point.load) not in confirmed_loads]
        self.points = searched + [entry.point for entry in self.confirmed]
        self._speed = fit_speed_correction(trials, problem)

    def without_selection(self) -> list[Point]:
        """Return the confirmed points, and the search's points of the candidates that were not confirmed.

        The search's points of a confirmed candidate are too good on average: it was chosen because of them.
        """
        candidates = {entry.point.candidate for entry in self.confirmed}
        return [point for point in self.points if point.candidate not in candidates or self._confirmation_of(point)]

    def below_failed_loads(self) -> list[Point]:
        """Return the search's points of candidates that failed their confirmation, at loads below the failed one."""
        met, lowest = set[Candidate](), dict[Candidate, LoadPoint]()
        for entry in self.confirmed:
            candidate, load = entry.point.candidate, entry.point.load
            lowest[candidate] = min(load, lowest.get(candidate, load))
            if entry.judged.verdict is not Verdict.FAIL and self._problem.best_point([entry.point], unstable=True):
                met.add(candidate)
        missed = lowest.keys() - met
        return [point for point in self.points if point.candidate in missed and point.load < lowest[point.candidate]]

    def unconfirmed(self) -> list[Point]:
        """Return the points without those of the search that the choice for a test favors."""
        return self.without_selection() + self.below_failed_loads()

    def recommended(self, baseline: Candidate | None) -> Point | None:
        """Return the recommendation; None if no stable point meets the constraints.

        In this order of preference, it is the best point whose confirmation passes; the best point except the
        baseline whose confirmation is undecided; the best of ``unconfirmed`` that was not confirmed, which may have a
        lower load than one that failed. If none of these meets the constraints as measured, one that was measured
        while the machine was slow may meet them at its usual speed.
        """
        best_point = self._problem.best_point
        passed, failed, undecided = (
            [entry.point for entry in self.confirmed if entry.judged.verdict is verdict]
            for verdict in (Verdict.PASS, Verdict.FAIL, Verdict.UNDECIDED)
        )
        # an undecided point counts even if it is unstable: maybe only the machine was disturbed
        undecided_tests = [
            entry.point for entry in self.confirmed if entry.error and entry.judged.verdict is Verdict.UNDECIDED
        ]
        return (
            best_point(passed)
            or best_point(undecided_tests, unstable=True)
            or best_point([point for point in undecided if point.candidate != baseline], unstable=True)
            or self._best_at_usual_speed([point for point in self.unconfirmed() if point not in failed])
            or best_point(undecided, unstable=True)
        )

    def closest(self) -> Point | None:
        """Return the best unstable point that meets the SLA and has not failed its test, or else the closest one."""
        failed = [entry.point for entry in self.confirmed if entry.judged.verdict is Verdict.FAIL]
        unstable = [point for point in self.unconfirmed() if is_disturbed(point.measurement) and point not in failed]
        return self._problem.best_point(unstable, unstable=True) or self._problem.sla.closest_point(
            self.without_selection()
        )

    def compared_point(self, candidate: Candidate) -> Point | None:
        """Return ``candidate`` at the load at which the recommendation is compared with it, see ``BaselineResult``.

        Of a candidate that only the search measured, a disturbed point counts as in the choice of the recommendation.
        """
        entries = [entry for entry in self.confirmed if entry.point.candidate == candidate]
        met = [entry.point for entry in entries if entry.meets_sla]
        searched = [point for point in self.points if point.candidate == candidate]
        return (
            max(met, key=lambda point: point.load, default=None)
            or self._problem.sla.closest_point([entry.point for entry in entries])
            or self._best_at_usual_speed(searched)
            or self._problem.best_point(searched, unstable=True)
        )

    def gain(self, recommended: Point | None, compared: Point | None) -> ObjectiveGain | None:
        """Return by how much the recommendation is better than ``compared``, see ``BaselineResult.gain``."""
        if recommended is None or compared is None:
            return None
        metric = self._problem.objectives[0]
        value, compared_value = metric.value(recommended.measurement), metric.value(compared.measurement)
        if value is None or compared_value is None:
            return None
        if compared is recommended:
            return ObjectiveGain(metric.name, value, value, RATIO_TO_ITSELF)
        ours, theirs = self._confirmation_of(recommended), self._confirmation_of(compared)
        if ours is None or theirs is None or not (ours.meets_sla and theirs.meets_sla):
            return None
        ratio = compare_metric(ours, theirs, self._trials, self._problem, metric.name)
        if ratio is None and metric.has_ratio:
            return None
        return ObjectiveGain(metric.name, value, compared_value, ratio)

    def _confirmation_of(self, point: Point | None) -> ConfirmedLoad | None:
        return confirmation_of(point, self.confirmed)

    def _best_at_usual_speed(self, points: Sequence[Point]) -> Point | None:
        """Return the best of ``points`` that meets the constraints as measured and at the machine's usual speed.

        If there is none, it is the best that meets them as measured, or else at the usual speed. What fresh servers
        measured is not corrected: the verdict is about the states that the machine had.
        """
        searched = [point for point in points if self._confirmation_of(point) is None]
        return self._speed.best_that_met(points, self._problem) or self._speed.best_point(searched, self._problem)
