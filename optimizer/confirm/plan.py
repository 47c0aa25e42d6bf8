"""What is confirmed, at which load and for how long: pure rules from what the search measured.

The best of many noisy measurements is too good on average. So the finalists and the baseline are measured again on
fresh servers, in turn, in as many windows as a verdict with the stated confidence needs.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from objectives import pareto
from objectives.confidence import Verdict, requests_needed
from objectives.quantiles import LAST_COLUMN, LEVELS, columns, misses_from_columns, pooled_quantile_ms
from objectives.verdict import Interval, Judged, judge_all, latency_interval_ms, pooled, throughput_interval
from optimizer.problem import Problem
from optimizer.trial import Candidate, Confirmation, LoadPoint, Point, Trial, latest_points

SERVERS = 3  # fresh ones, for each configuration
WINDOWS, FEWER_WINDOWS = 8, 4  # on each server; the baseline, of which no verdict is asked, takes fewer
FINALISTS = 2
FEWEST_REQUESTS = 50  # in each of its windows, which are no longer than the finalists' otherwise
SHORTEST_SECONDS, LONGEST_SECONDS = 0.4, 10.0  # of a window
START_SECONDS, OVERHEAD_SECONDS = 3.0, 0.3  # of a fresh server; of a window beside its length
EXPECTED_SHARE = 0.4  # of the misses that are allowed: so few, and a verdict takes a reasonable time
LOWER_LOAD = 0.85  # of the load that did not pass
LOWER_RATE = 0.95  # in an open loop, where latency falls steeply below the capacity
MOST_RISE = 0.1  # of the bound: that a queue grows by within some seconds


@dataclass(frozen=True, slots=True)
class Entrant:
    """One configuration at one load, to be measured in ``windows`` of ``seconds`` on each of SERVERS servers."""

    trial: int
    candidate: Candidate
    load: LoadPoint
    windows: int
    seconds: float

    @property
    def total_seconds(self) -> float:
        """About, with the servers' starts."""
        return SERVERS * (START_SECONDS + self.windows * (self.seconds + OVERHEAD_SECONDS))


@dataclass(frozen=True, slots=True)
class Confirmed:
    """What the confirmations of one configuration at one load say. Intervals hold with the confidence.

    ``latency`` names the metric that ``latency_ms`` is about.
    """

    point: Point
    judged: Judged
    servers: int
    windows: int
    throughput: Interval
    latency: str
    latency_ms: Interval


def plan(trials: Sequence[Trial], problem: Problem, baseline: Candidate, left_seconds: float) -> list[Entrant]:
    """The best configurations, then the baseline, as many as the time allows, but always the best one.

    Where time is short there are fewer windows, then shorter ones: a verdict may then stay open.
    """
    found = finalists(latest_points(trials), problem, FINALISTS)
    if not found:
        return []
    of_baseline = [p for p in latest_points(trials) if p.candidate == baseline]
    compared = pareto.best(of_baseline, problem.objectives, problem.constraints)
    for finalist_count, with_baseline, windows in (
        (FINALISTS, True, WINDOWS),
        (1, True, WINDOWS),
        (1, False, WINDOWS),
    ):
        entrants = [entrant(point, problem, windows) for point in found[:finalist_count]]
        if with_baseline and compared is not None and compared.candidate not in {e.candidate for e in entrants}:
            entrants.append(_beside(compared, problem, max(one.seconds for one in entrants)))
        if sum(e.total_seconds for e in entrants) <= left_seconds:
            return entrants
    return [shortened(entrant(found[0], problem, WINDOWS), FEWER_WINDOWS, left_seconds)]


def finalists(points: Sequence[Point], problem: Problem, most: int) -> list[Point]:
    """The best point of each of the best configurations, best first. Where no point is stable, fresh servers decide
    about one that is not."""
    rest, found = points, list[Point]()
    while len(found) < most:
        best = pareto.best(rest, problem.objectives, problem.constraints)
        if best is None and not found:
            best = pareto.best(rest, problem.objectives, problem.constraints, unstable=True)
        if best is None:
            break
        found.append(best)
        rest = [point for point in rest if point.candidate != best.candidate]
    return found


def entrant(point: Point, problem: Problem, windows: int, load: LoadPoint | None = None) -> Entrant:
    """``point`` at ``load``, else where few enough requests are expected to miss for a verdict to be reached."""
    load = load or safe_load(point, problem)
    return Entrant(point.trial, point.candidate, load, windows, _window_seconds(point, load, problem, windows))


def _beside(point: Point, problem: Problem, seconds: float) -> Entrant:
    """``point`` at its load, for comparison: in windows of ``seconds``, shorter where less is needed."""
    one = entrant(point, problem, FEWER_WINDOWS, point.load)
    fewest_seconds = FEWEST_REQUESTS * point.load.request_batch_size / max(point.throughput_infer_per_sec, 1e-9)
    return replace(one, seconds=min(max(min(one.seconds, seconds), fewest_seconds), LONGEST_SECONDS))


def safe_load(point: Point, problem: Problem) -> LoadPoint:
    """The load of ``point``, or the one below it at which about EXPECTED_SHARE of the allowed requests miss.

    In a closed loop at saturation latency is proportional to the requests in flight; in an open one it takes little
    less.
    """
    share = 1.0
    for bound in problem.constraints:
        level = LEVELS.get(bound.metric)
        if level is None or level >= LAST_COLUMN:
            continue
        wanted = pooled_quantile_ms([point.measurement], 1 - EXPECTED_SHARE * (1 - level))
        if math.isfinite(wanted) and wanted > bound.bound:
            share = min(share, bound.bound / wanted)
    if share < 1 and point.load.request_rate:
        share = LOWER_RATE
    return point.load if share == 1 else lower(point, share, problem)


def lower(point: Point, share: float, problem: Problem) -> LoadPoint:
    """A load of about ``share`` of that of ``point``, at least one step below it; the same where there is none."""
    load, possible = point.load, problem.space.loads(point.candidate)
    if load.request_rate:
        return replace(load, request_rate=float(f"{share * load.request_rate:.3g}"))
    if possible is not None:
        below = [one for one in possible if one < load.concurrency]
        wanted = min(below, key=lambda one: abs(one - share * load.concurrency), default=load.concurrency)
        return replace(load, concurrency=wanted)
    return replace(load, concurrency=max(1, min(load.concurrency - 1, math.floor(share * load.concurrency))))


def confirmed(trial: Trial, load: LoadPoint, problem: Problem) -> Confirmed | None:
    """What the confirmations of ``trial`` at ``load`` say; None without any."""
    own = [one for one in trial.confirmations if one.load == load]
    if not own:
        return None
    windows = [one.measurement for one in own]
    judged = judge_all(windows, problem.constraints, problem.confidence)
    servers = len({one.server for one in own})
    if servers >= SERVERS and all(window.is_overloaded for window in windows):
        told = f"overloaded on each of {servers} fresh servers: {windows[0].reason}"
        judged = Judged(Verdict.FAIL, told, confidence=problem.confidence)
    if servers < SERVERS and judged.verdict is Verdict.PASS:
        judged = Judged(Verdict.UNDECIDED, f"only {servers} of {SERVERS} fresh servers")
    if judged.verdict is Verdict.PASS and (rise_ms := _rise_ms(own)) > MOST_RISE * _latency_bound_ms(problem):
        told = f"the mean latency rose by {rise_ms:.3g} ms on each server: the rate may be more than it can serve"
        judged = Judged(Verdict.UNDECIDED, told)
    latency = next((c.metric for c in problem.constraints if c.metric in LEVELS), "latency-p95")
    return Confirmed(
        Point(trial.number, trial.candidate, load, pooled(windows)),
        judged,
        servers,
        len(windows),
        throughput_interval(windows, problem.confidence),
        latency,
        latency_interval_ms(windows, latency, judged.effective_requests, problem.confidence),
    )


def all_confirmed(trials: Sequence[Trial], problem: Problem) -> list[Confirmed]:
    loads = {(trial.number, one.load): trial for trial in trials for one in trial.confirmations}
    found = (confirmed(trial, load, problem) for (_, load), trial in loads.items())
    return [one for one in found if one is not None]


def done(trial: Trial, entrant: Entrant, server: int) -> int:
    """The windows of ``entrant`` that were measured on the ``server``-th server already."""
    own = (one for one in trial.confirmations if one.server == server and one.load == entrant.load)
    return sum(not one.is_lost for one in own)


def _rise_ms(own: Sequence[Confirmation]) -> float:
    """By how much the mean latency at a rate rose on each server, from the first third of its windows to the last, on
    average; 0 where it did not on one of them. In a closed loop no queue can grow."""
    rises = []
    for server in {one.server for one in own}:
        means = [one.measurement.latency_avg_ms or 0.0 for one in own if one.server == server]
        third = len(means) // 3
        if third == 0 or not own[0].load.request_rate:
            return 0.0
        rises.append((sum(means[-third:]) - sum(means[:third])) / third)
    return sum(rises) / len(rises) if rises and min(rises) > 0 else 0.0


def _latency_bound_ms(problem: Problem) -> float:
    return min((c.bound for c in problem.constraints if c.metric.startswith("latency-")), default=math.inf)


def _window_seconds(point: Point, load: LoadPoint, problem: Problem, windows: int) -> float:
    """As long as the requests take that the verdict needs.

    Requests in flight together share their fate: about so many tell as much as one (the verdict itself rests on
    the correlation that is found).
    """
    measured = point.measurement
    served = (measured.throughput_infer_per_sec or 0.0) / load.request_batch_size
    if served <= 0:
        return LONGEST_SECONDS
    in_flight = load.concurrency or served * (measured.latency_avg_ms or 0.0) / 1000
    needed = 0
    for bound in problem.constraints:
        level = LEVELS.get(bound.metric)
        if level is not None:
            allowed = 1 - level
            missing = misses_from_columns(1, columns(measured), bound.bound)
            expected = min(missing if missing is not None else allowed, EXPECTED_SHARE * allowed)
            asked = requests_needed(level, SERVERS * windows, expected, problem.confidence, max(1.0, in_flight))
            needed = max(needed, asked)
    seconds = needed / served / (SERVERS * windows)
    return min(max(seconds, SHORTEST_SECONDS), LONGEST_SECONDS)


def shortened(one: Entrant, windows: int, left_seconds: float) -> Entrant:
    """In ``windows`` on each server, as long together as the time allows, but no longer than before."""
    seconds = (left_seconds - SERVERS * START_SECONDS) / (SERVERS * windows) - OVERHEAD_SECONDS
    longest = one.seconds * max(one.windows / windows, 1.0)
    return replace(one, windows=windows, seconds=min(longest, max(seconds, SHORTEST_SECONDS)))
