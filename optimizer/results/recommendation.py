"""The outcome of a run: the recommendation, the configurations compared with it, and the Pareto front."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from objectives import pareto
from objectives.intervals import ConfidenceInterval, GainRatio, ObjectiveGain
from objectives.metrics import METRICS, Metric
from objectives.sla import Sla, Verdict
from objectives.verdict import is_disturbed
from optimizer.config.problem import Problem
from optimizer.confirmation.verdicts import ConfirmedLoad, compare_metric, judge_confirmations
from optimizer.core.candidate import Candidate
from optimizer.core.trial import LoadPoint, Point, Trial, latest_points
from optimizer.results.formatting import ComparedSide
from optimizer.results.no_recommendation import InconclusiveResult, inconclusive_result, no_recommendation_reason
from optimizer.simulator.speed_correction import NO_CORRECTION, fit_speed_correction

RATIO_TO_ITSELF = GainRatio(1.0, ConfidenceInterval(1.0, 1.0))  # a configuration compared with itself


@dataclass(frozen=True, slots=True)
class BaselineResult:
    """A configuration that the recommendation is compared with.

    Attributes:
        point: The configuration at the highest load that met the constraints on fresh servers; otherwise at the
            closest load measured there; without fresh servers, at the best load of the search. None if it meets the
            constraints nowhere. With a latency objective fresh servers get the best load of the search only.
        gain: By how much the first objective of the recommendation is better than its own; None unless both met the
            constraints on fresh servers, in the usual states of the run, and the objective is known.
        is_tried: Whether it was reached before the run ended.
        failure: Why it could not be served or measured at all; empty if it was measured.
    """

    point: Point | None
    gain: ObjectiveGain | None
    is_tried: bool
    failure: str = ""


class FrontMetrics(NamedTuple):
    """The metrics of the Pareto front."""

    throughput: Metric
    latency: Metric


FRONT_METRICS = FrontMetrics(METRICS["throughput"], METRICS["latency-p95"])  # the usual ones, see ``front_metrics``


@dataclass(frozen=True, slots=True)
class ParetoFront:
    """The points that no other point dominates.

    ``dominating`` is the best of its points that dominates the recommendation; None if the recommendation is on the
    front, or is unstable.
    """

    points: tuple[Point, ...]
    metrics: FrontMetrics
    dominating: Point | None


@dataclass(frozen=True)
class Outcome:
    """The recommendation of a run, and the configurations that it is compared with.

    Attributes:
        recommended: The recommendation, see ``_Choice.recommended``; None if no stable point meets the constraints.
        closest: Without a recommendation, an unstable point that meets the constraints, otherwise the one that misses
            them by least; None if nothing was measured.
        no_recommendation_reason: Without a recommendation, the reason for people, without a full stop.
        inconclusive: Without a recommendation, why another run may find one; None if the constraints are missed for
            sure.
        baseline: The model's own configuration.
        dynamic_batching: The same with plain ``dynamic_batching {}``. None for a model that can have none: a stateful
            one, or one without a batch dimension.
        front: The Pareto front of ``points``.
        points: Each configuration at each load with its best estimate: the windows on fresh servers together, or else
            the search's measurement. All other points are among them.
        confirmed_loads: The configurations and loads that fresh servers measured.
        trials: Number of trials.
        measurements: Number of measurements of the search.
        confirmations: Number of measurements on fresh servers.
        sla: The constraints.
        objective: The first objective, in which the recommendation is compared.
        crashes: Errors of the servers of the recommended configuration that died or hung, except in the test of the
            recommended load, whose ``ConfirmedLoad`` has one.
    """

    recommended: Point | None
    closest: Point | None
    no_recommendation_reason: str
    inconclusive: InconclusiveResult | None
    baseline: BaselineResult
    dynamic_batching: BaselineResult | None
    front: ParetoFront
    points: tuple[Point, ...]
    confirmed_loads: tuple[ConfirmedLoad, ...]
    trials: int
    measurements: int
    confirmations: int
    sla: Sla
    objective: Metric
    crashes: tuple[str, ...]

    @property
    def shown(self) -> Point | None:
        """Return the recommendation or, without one, the closest point; None if nothing was measured."""
        return self.recommended or self.closest

    @property
    def is_streamed(self) -> bool:
        """Return whether the model streams its responses."""
        return any(point.measurement.is_streamed for point in self.points)

    @property
    def verdict(self) -> Verdict:
        """Return the verdict of the run.

        - PASS: the recommendation passed its test on fresh servers, or there is a recommendation and no constraint
          that it could miss.
        - UNDECIDED: the recommendation was not tested on fresh servers, or the test did not decide.
        - FAIL: no configuration is recommended. It is UNDECIDED instead if the result is ``inconclusive``.
        """
        if self.recommended is None:
            return Verdict.UNDECIDED if self.inconclusive else Verdict.FAIL
        if not self.sla:
            return Verdict.PASS
        return self.confirmed.judged.verdict if self.confirmed else Verdict.UNDECIDED

    @property
    def speedup(self) -> float | None:
        """Return how many times better the objective is than with the baseline, as estimated; None if unknown."""
        gain = self.baseline.gain
        return gain.ratio.estimate if gain and gain.ratio else None

    @property
    def confirmed(self) -> ConfirmedLoad | None:
        """Return the confirmation of the recommendation; None if only the search measured it."""
        return self.confirmation_of(self.recommended)

    def confirmation_of(self, point: Point | None) -> ConfirmedLoad | None:
        """Return the confirmation of ``point``; None if only the search measured it."""
        return _confirmation_of(point, self.confirmed_loads)

    def misses_in_usual_states(self, point: Point | None) -> bool:
        """Return whether ``point`` meets the SLA as fresh servers measured it, but not in the run's usual states."""
        confirmed = self.confirmation_of(point)
        if confirmed is None or not self.sla.is_met(confirmed.point.measurement):
            return False
        return not confirmed.judged_sla.is_met(confirmed.point.measurement)

    def missed_in_usual_states(self, compared: BaselineResult) -> ComparedSide | None:
        """Return which of the recommendation and ``compared`` is why there is no gain over ``compared``.

        Both meet the SLA as measured, but this one not in the usual states of the run. The result is None if there is
        a gain, or if it is missing for another reason.
        """
        point = compared.point
        if compared.gain is not None or point is None or not self.sla.is_met(point.measurement):
            return None
        if self.misses_in_usual_states(self.recommended):
            return "recommendation"
        return "compared" if self.misses_in_usual_states(point) else None

    def best_within(self, sla: Sla, candidates: Collection[Candidate] | None = None) -> Point | None:
        """Return the measurement with the most throughput of ``candidates`` within ``sla``; None if none meets it.

        Without ``candidates``, all configurations count. Values from fresh servers replace those of the search.
        An unstable measurement counts only if the run recommends or confirms it. Within the latency bounds of the
        run, its recommendation comes first, because only its verdict was tested.
        """
        met = [
            point
            for point in self.points
            if (candidates is None or point.candidate in candidates)
            and (point.measurement.stable or self.confirmation_of(point) or point is self.recommended)
            and sla.is_met(point.measurement)
        ]
        if self.recommended in met and set(sla.latencies) == set(self.sla.latencies):
            return self.recommended
        return max(met, key=lambda point: point.throughput_infer_per_sec, default=None)


def assess(trials: Sequence[Trial], problem: Problem, baseline: Candidate, dynamic_batching: Candidate) -> Outcome:
    """Return the outcome of ``trials``, of a finished run or so far."""
    choice = _Choice(trials, problem)
    points, confirmed = choice.points, choice.confirmed
    measured = choice.without_selection()
    unconfirmed = measured + choice.below_failed_loads()
    recommended = choice.recommended(unconfirmed, baseline)
    closest = None if recommended else choice.closest(measured, unconfirmed)
    reason = "" if recommended else no_recommendation_reason(trials, confirmed, closest, problem).rstrip(".")

    def result_of(candidate: Candidate) -> BaselineResult:
        is_recommended = recommended is not None and recommended.candidate == candidate
        point = recommended if is_recommended else choice.compared_point(candidate)
        is_tried = any(trial.candidate == candidate for trial in trials)
        return BaselineResult(point, choice.gain(recommended, point), is_tried, _failure(candidate, trials))

    return Outcome(
        recommended=recommended,
        closest=closest,
        no_recommendation_reason=reason,
        inconclusive=inconclusive_result(points, confirmed, closest, problem.sla),
        baseline=result_of(baseline),
        dynamic_batching=result_of(dynamic_batching) if dynamic_batching.dynamic_batching else None,
        front=_pareto_front(points, recommended, problem),
        points=tuple(points),
        confirmed_loads=tuple(confirmed),
        trials=len(trials),
        measurements=count_measurements(trials),
        confirmations=count_confirmations(trials),
        sla=problem.sla,
        objective=problem.objectives[0],
        crashes=() if recommended is None else _crashes_outside_test(recommended, trials),
    )


def _pareto_front(points: Sequence[Point], recommended: Point | None, problem: Problem) -> ParetoFront:
    """Return the front of ``points``, with its best point that dominates the recommendation."""
    metrics = front_metrics(problem)
    front = pareto.pareto_front(points, metrics)
    dominating = (point for point in front if recommended and pareto.dominates(point, recommended, metrics))
    return ParetoFront(tuple(front), metrics, next(dominating, None))


def _crashes_outside_test(recommended: Point, trials: Sequence[Trial]) -> tuple[str, ...]:
    """Return the errors of crashed servers of the recommended configuration, except in the test of its load."""
    crashes = [crash for trial in trials if trial.candidate == recommended.candidate for crash in trial.crashes]
    return tuple(crash.reason for crash in crashes if crash.load != recommended.load or not crash.error_probability)


def count_measurements(trials: Sequence[Trial]) -> int:
    """Return the number of measurements of the search."""
    return sum(len(trial.measurements) for trial in trials)


def count_confirmations(trials: Sequence[Trial]) -> int:
    """Return the number of measurements on fresh servers, with those of perf_analyzer.

    Lost windows do not count, because a later session may repeat them.
    """
    measured = sum(not window.is_lost for trial in trials for window in trial.confirmations)
    return measured + sum(len(trial.cross_checks) for trial in trials)


def front_metrics(problem: Problem) -> FrontMetrics:
    """Return the throughput and the latency of the Pareto front.

    They are FRONT_METRICS, except that some goals take their place: an objective of goodput or of output tokens per
    second, and a first latency bound on one of the times of a model that streams.
    """
    throughputs, judged = (METRICS["goodput"], METRICS["output-throughput"]), METRICS[problem.sla.judged_latency]
    is_streamed = judged.timing is not None and judged.timing.needs_streaming
    return FrontMetrics(
        next((metric for metric in problem.objectives if metric in throughputs), FRONT_METRICS.throughput),
        judged if is_streamed else FRONT_METRICS.latency,
    )


def _confirmation_of(point: Point | None, confirmed: Sequence[ConfirmedLoad]) -> ConfirmedLoad | None:
    """Return the confirmation whose point is the object ``point``; None if only the search measured it."""
    return next((entry for entry in confirmed if entry.point is point), None)


class _Choice:
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

    def recommended(self, measured: Sequence[Point], baseline: Candidate) -> Point | None:
        """Return the recommendation; None if no stable point meets the constraints.

        In this order of preference, it is the best point whose confirmation passes; the best point except the
        baseline whose confirmation is undecided; the best of ``measured`` that was not confirmed, which may have a
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
            or self._best_at_usual_speed([point for point in measured if point not in failed])
            or best_point(undecided, unstable=True)
        )

    def closest(self, measured: Sequence[Point], unconfirmed: Sequence[Point]) -> Point | None:
        """Return the best unstable point that meets the SLA and has not failed its test, or else the closest one.

        ``measured`` are the points without those that the choice for a test favors, ``unconfirmed`` the same with the
        search's points at loads below a failed one.
        """
        failed = [entry.point for entry in self.confirmed if entry.judged.verdict is Verdict.FAIL]
        unstable = [point for point in unconfirmed if is_disturbed(point.measurement) and point not in failed]
        return self._problem.best_point(unstable, unstable=True) or self._problem.sla.closest_point(measured)

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
        return _confirmation_of(point, self.confirmed)

    def _best_at_usual_speed(self, points: Sequence[Point]) -> Point | None:
        """Return the best of ``points`` that meets the constraints as measured and at the machine's usual speed.

        If there is none, it is the best that meets them as measured, or else at the usual speed. What fresh servers
        measured is not corrected: the verdict is about the states that the machine had.
        """
        searched = [point for point in points if self._confirmation_of(point) is None]
        return self._speed.best_that_met(points, self._problem) or self._speed.best_point(searched, self._problem)


def _failure(candidate: Candidate, trials: Sequence[Trial]) -> str:
    """Return why no measurement of ``candidate`` has values; empty if one has, or if there is none."""
    tried = [trial for trial in trials if trial.candidate == candidate]
    if any(trial.has_served for trial in tried):
        return ""
    reasons = [reason for trial in tried for reason in (trial.reason, *(m.reason for _, m in trial.measurements))]
    return next(filter(None, reversed(reasons)), "")


@dataclass(frozen=True, slots=True)
class BestLoad:
    """The load at which a trial is shown.

    Attributes:
        trial: The trial.
        point: Its best point, or the closest one if none meets the SLA; None if nothing was measured.
        meets_sla: Whether the point meets the SLA.
    """

    trial: Trial
    point: Point | None
    meets_sla: bool


def best_load(trial: Trial, problem: Problem) -> BestLoad:
    """Return the best load of ``trial`` as the search measured it.

    As in the search, a measurement whose windows disagree counts if other processes disturbed it.
    """
    measured = latest_points([trial])
    best = NO_CORRECTION.best_point(measured, problem)
    return BestLoad(trial, best or problem.sla.closest_point(measured), best is not None)
