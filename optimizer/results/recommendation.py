"""The outcome of a run: the recommendation, the configurations compared with it, and the Pareto front."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from objectives import pareto
from objectives.intervals import ObjectiveGain
from objectives.metrics import METRICS, Metric
from objectives.sla import Sla, Verdict
from optimizer.config.problem import Problem
from optimizer.confirmation.choice import Choice, confirmation_of, met_as_measured
from optimizer.confirmation.verdicts import ConfirmedLoad
from optimizer.core.candidate import Candidate
from optimizer.core.trial import Point, Trial, latest_points
from optimizer.results.formatting import ComparedSide
from optimizer.results.no_recommendation import InconclusiveResult, inconclusive_result, no_recommendation_reason
from optimizer.simulator.speed_correction import NO_CORRECTION


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
        recommended: The recommendation, see ``Choice.recommended``; None if no stable point meets the constraints.
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
    def best_so_far(self) -> Point | None:
        """Return the same as ``choice.best_so_far``."""
        return met_as_measured(self.recommended, self.sla)

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
        return confirmation_of(point, self.confirmed_loads)

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
    choice = Choice(trials, problem)
    points, confirmed = choice.points, choice.confirmed
    recommended = choice.recommended(baseline)
    closest = None if recommended else choice.closest()
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
