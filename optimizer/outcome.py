"""What the trials of a run amount to: the recommendation, what it is compared with, the front, what holds it back."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from objectives import pareto
from objectives.confidence import Verdict
from objectives.metrics import METRICS
from objectives.sla import Constraint
from optimizer.confirm.plan import Confirmed, all_confirmed
from optimizer.problem import Problem
from optimizer.trial import Candidate, LoadPoint, Point, Trial, latest_points, points

FRONT_METRICS = (METRICS["throughput"], METRICS["latency-p95"])


@dataclass(frozen=True)
class Outcome:
    """``recommended`` is None where no stable point meets the constraints; ``closest`` is then the nearest.

    It is the best whose confirmation passes; without any such the best whose confirmation leaves it open, but for the
    baseline, which is confirmed to be compared with; else the best that was not confirmed, be it at a load below one
    that failed. ``again`` are all points that were confirmed; ``confirmed`` is what is known of the recommended one,
    None where it is none of them.

    ``baseline`` and ``dynamic_batching`` are the best points of the configuration as given and of plain
    ``dynamic_batching {}`` under the same constraints, None where they have none; ``untried`` names those of
    the two that the run ended before. ``measurements`` are the search's, ``confirmations`` those on fresh servers.
    """

    recommended: Point | None
    baseline: Point | None
    dynamic_batching: Point | None
    front: tuple[Point, ...]
    closest: Point | None
    trials: int
    measurements: int
    holds_back: str = ""
    untried: frozenset[str] = frozenset()
    again: tuple[Confirmed, ...] = ()
    confirmations: int = 0

    @property
    def confirmed(self) -> Confirmed | None:
        return self.confirmation_of(self.recommended)

    def confirmation_of(self, point: Point | None) -> Confirmed | None:
        """What fresh servers say of ``point``; None where only the search measured it."""
        return next((one for one in self.again if one.point is point), None)

    @property
    def speedup(self) -> float | None:
        """Throughput over the baseline's."""
        return _ratio(self.recommended, self.baseline)

    @property
    def speedup_over_dynamic_batching(self) -> float | None:
        return _ratio(self.recommended, self.dynamic_batching)


def assess(trials: Sequence[Trial], problem: Problem, baseline: Candidate, dynamic_batching: Candidate) -> Outcome:
    """The outcome of ``trials`` so far."""
    confirmed = all_confirmed(trials, problem)
    measured = _measured(trials, confirmed)
    unconfirmed = measured + _below_what_missed(trials, confirmed, problem)
    recommended = _recommended(unconfirmed, confirmed, problem, baseline)
    closest = None if recommended else pareto.closest(measured, problem.constraints)

    def best_of(candidate: Candidate) -> Point | None:
        again = [one.point for one in confirmed if one.point.candidate == candidate]
        own = [point for point in measured if point.candidate == candidate]
        return _best(own, problem) or max(again, key=lambda point: point.throughput_infer_per_sec, default=None)

    tried = {trial.candidate for trial in trials}
    compared = {"baseline": baseline, "dynamic_batching": dynamic_batching}
    return Outcome(
        recommended=recommended,
        baseline=best_of(baseline),
        dynamic_batching=best_of(dynamic_batching),
        front=tuple(pareto.front(measured, FRONT_METRICS)),
        closest=closest,
        trials=len(trials),
        measurements=sum(len(trial.measurements) for trial in trials),
        holds_back="" if recommended else _holds_back(trials, confirmed, closest, problem),
        untried=frozenset(role for role, candidate in compared.items() if candidate not in tried),
        confirmations=sum(len(trial.confirmations) for trial in trials),
        again=tuple(confirmed),
    )


def _measured(trials: Sequence[Trial], confirmed: Sequence[Confirmed]) -> list[Point]:
    """A configuration that was confirmed is known by that alone: the search chose it for its good moments."""
    again = {one.point.candidate for one in confirmed}
    searched = [point for point in latest_points(trials) if point.candidate not in again]
    return searched + [one.point for one in confirmed]


def _below_what_missed(trials: Sequence[Trial], confirmed: Sequence[Confirmed], problem: Problem) -> list[Point]:
    """What the search saw of configurations that met the bounds on no fresh server, at lower loads than they were
    confirmed at."""
    met, lowest = set[Candidate](), dict[Candidate, LoadPoint]()
    for one in confirmed:
        candidate, load = one.point.candidate, one.point.load
        lowest[candidate] = min(load, lowest.get(candidate, load))
        if one.judged.verdict is not Verdict.FAIL and _best([one.point], problem, unstable=True):
            met.add(candidate)
    missed = lowest.keys() - met
    return [
        point for point in latest_points(trials) if point.candidate in missed and point.load < lowest[point.candidate]
    ]


def _recommended(
    measured: Sequence[Point], confirmed: Sequence[Confirmed], problem: Problem, baseline: Candidate
) -> Point | None:
    def of(verdict: Verdict) -> list[Point]:
        return [one.point for one in confirmed if one.judged.verdict is verdict]

    open_still = of(Verdict.UNDECIDED)  # maybe only because the machine was disturbed, or windows disagreed
    rest = [point for point in measured if point not in of(Verdict.FAIL)]
    return (
        _best(of(Verdict.PASS), problem)
        or _best([point for point in open_still if point.candidate != baseline], problem, unstable=True)
        or _best(rest, problem)
        or _best(open_still, problem, unstable=True)
    )


def _best(found: Sequence[Point], problem: Problem, *, unstable: bool = False) -> Point | None:
    return pareto.best(found, problem.objectives, problem.constraints, unstable=unstable)


def _holds_back(
    trials: Sequence[Trial], confirmed: Sequence[Confirmed], closest: Point | None, problem: Problem
) -> str:
    """In words, why no point meets the constraints."""
    if closest is None:
        reasons = [trial.reason for trial in trials if trial.reason]
        reasons += [point.measurement.reason for point in points(trials) if point.measurement.reason]
        return f"nothing could be measured: {reasons[-1]}" if reasons else "nothing was measured"
    worst = max(problem.constraints, key=lambda c: c.violation(closest.measurement))
    if worst.violation(closest.measurement) <= 0:
        return f"no measurement that meets the bounds was stable: {closest.measurement.reason}"
    if worst.metric.startswith("latency-"):
        return _slow(trials, confirmed, worst)
    metric = METRICS[worst.metric]
    value = metric.value(closest.measurement)
    if value is None:
        return f"{worst.metric} cannot be measured on this machine"
    measured = f"{value:.4g} {metric.unit}".rstrip()
    return f"{worst.metric} is {measured} where {worst} is asked for"


def _slow(trials: Sequence[Trial], confirmed: Sequence[Confirmed], bound: Constraint) -> str:
    """A latency bound is missed: is it one inference, the company it keeps, or were those good moments?"""
    metric = METRICS[bound.metric]
    alone = [p for p in points(trials) if p.load.concurrency == 1 and metric.value(p.measurement) is not None]
    quickest = min((v for p in alone if (v := metric.value(p.measurement)) is not None), default=None)
    if quickest is not None and quickest > bound.bound:
        return f"one inference alone takes {_ms(quickest)}"
    every = [v for p in points(trials) if (v := metric.value(p.measurement)) is not None]
    if not every:
        return f"{bound.metric} could not be measured"
    quantile = bound.metric.removeprefix("latency-")
    if min(every) > bound.bound or not confirmed:
        return f"the lowest {quantile} measured is {_ms(min(every))}"
    why = next((f" ({one.judged.reason})" for one in confirmed if one.judged.reason), "")
    return f"{quantile} was {_ms(min(every))} while searching, but missed the bound on fresh servers{why}"


def _ms(value: float) -> str:
    return f"{value:,.0f} ms" if value >= 100 else f"{value:.3g} ms"


def _ratio(ours: Point | None, theirs: Point | None) -> float | None:
    if ours is None or theirs is None:
        return None
    over, under = ours.measurement.throughput_infer_per_sec, theirs.measurement.throughput_infer_per_sec
    return over / under if over and under else None
