"""Rules of the confirmation: which candidates are measured on fresh servers, at which loads, and the verdict.

The best of many noisy measurements is too good on average. So the best candidate, the runner-up and the baselines are
measured again on fresh servers, in turn. The best one is tested: more servers, and other loads, until the highest
load is found that meets the SLA at the stated confidence. The others need confidence intervals only, each at its own
highest safe load.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from objectives.agreement import Agreement, ServerPair, compare_load_generators
from objectives.arrays import FloatArray
from objectives.confidence import ServerSpread, Verdict, next_look
from objectives.load_sequence import MARGIN, OTHER_MARGIN
from objectives.metrics import METRICS, TIMINGS, Measurement, Timing, four_digits
from objectives.sequential import LOOKS
from objectives.sla import Sla
from objectives.verdict import (
    MOST_EXCLUDED,
    ConfidenceInterval,
    SequentialTest,
    SlaVerdict,
    ThroughputRatio,
    counted_windows,
    is_disturbed,
    judge_sla,
    latency_interval_ms,
    needed_requests,
    pool_measurements,
    server_spreads,
    throughput_interval,
    throughput_ratio,
)
from optimizer.config.search_space import Problem
from optimizer.core.load_shapes import RequestTimes
from optimizer.core.trial import Candidate, Confirmation, LoadPoint, Point, Trial
from optimizer.machine.conditions import describe_disturbance
from optimizer.measure.load_client.plan import MAX_LEAD_IN_SECONDS
from optimizer.simulator.metrics import Performance
from optimizer.simulator.performance_model import PerformanceModel
from optimizer.simulator.speed_correction import SpeedCorrection

COMPARED_SERVERS = 2  # fresh servers of each candidate at each load that needs confidence intervals only
COMPARED_LOADS = 3  # most loads of each of these candidates
WINDOWS, FEWER_WINDOWS = 8, 3  # per server; fewer if time is short
SHORTEST_SECONDS, LONGEST_SECONDS = 0.5, 10.0  # length of a window
WINDOW_REQUESTS = 40  # requests in a window of a slow model
START_SECONDS = 2.5  # estimated: start of a server and of the load generator, and its lead-in
STREAM_GENERATIONS = 2  # of requests of a model that streams: those before the first window, and the last ones
CROSS_CHECK_WINDOWS = 2  # length of perf_analyzer's measurement on each server of a test, in windows
CROSS_CHECK_START_SECONDS = 0.5  # estimated: start and end of perf_analyzer
LOAD_STEP, RATE_STEP = 1.06, 1.03  # between neighboring loads; latency rises steeply with a request rate
LOWEST_LOAD, HIGHEST_LOAD = 0.3, 1.4  # tested loads, relative to the best one that the search measured
# log of latency, added to the predictions for a model that streams. Requests that run together have similar times, so
# the search estimates them less well, and a test on few servers passes only well inside the bound.
STREAM_CAUTION = 0.2
MOST_RISE = 0.1  # allowed rise of the mean latency within a server's windows, as a share of the bound
USUAL_DISTURBANCE = 0.10  # CPU share of other processes beyond the usual one that disturbs no measurement
NO_BOUND = -1e3  # log of the latency over its bound if there is none
COMPARED = "measured for comparison only"
FARTHEST_LOAD = 1.5  # at which the test of a compared candidate begins, relative to the load of the comparison


@dataclass(frozen=True, slots=True)
class ConfirmationCandidate:
    """A candidate at one load, to be measured on fresh servers in ``windows`` of ``seconds`` each.

    ``error`` is the error probability of its test; 0 if it is measured for comparison only. If ``is_cross_checked``,
    perf_analyzer measures once after the windows. ``start_seconds`` is the estimated time without windows.
    """

    trial: int
    candidate: Candidate
    load: LoadPoint
    seconds: float
    error: float = 0.0
    windows: int = WINDOWS
    is_cross_checked: bool = False
    start_seconds: float = START_SECONDS

    @property
    def server_seconds(self) -> float:
        """The estimated duration on one server, including its start."""
        cross_check = CROSS_CHECK_START_SECONDS + self.cross_check_seconds if self.is_cross_checked else 0.0
        return self.start_seconds + self.windows * self.seconds + cross_check

    @property
    def cross_check_seconds(self) -> float:
        """The duration of perf_analyzer's load, if it measures."""
        return CROSS_CHECK_WINDOWS * self.seconds


def with_windows(planned: ConfirmationCandidate, servers: int, seconds: float) -> ConfirmationCandidate:
    """Return ``planned`` with WINDOWS on each server, or FEWER_WINDOWS if ``servers`` need more than ``seconds``."""
    full = replace(planned, windows=WINDOWS)
    return full if servers * full.server_seconds <= seconds else replace(planned, windows=FEWER_WINDOWS)


def reserved_seconds(planned: ConfirmationCandidate, missing: int) -> float:
    """Return the time that comparisons leave to the test of the recommendation.

    It is that of the ``missing`` servers of ``planned``, and of a lower load, because the first one may not pass.
    """
    return missing * planned.server_seconds + LOOKS[0] * replace(planned, windows=FEWER_WINDOWS).server_seconds


@dataclass(frozen=True, slots=True)
class Confirmed:
    """Verdict on one candidate at one load, from its windows on fresh servers.

    ``throughput`` and ``latency_ms`` are confidence intervals at the run's confidence; ``latency`` names the metric
    of the latter. ``point`` pools the windows that count. ``error`` is the error probability of the test; 0 for a
    comparison. ``agreement`` says whether perf_analyzer measured the same; None if it did not measure next to another
    load generator. ``other_intervals`` has the intervals of the other bounded latencies by metric and, for a model
    that streams, of the output tokens per second. ``sla`` is the SLA of the verdict.
    """

    point: Point
    judged: SlaVerdict
    servers: int
    windows: int
    throughput: ConfidenceInterval
    latency: str
    latency_ms: ConfidenceInterval
    error: float = 0.0
    agreement: Agreement | None = None
    other_intervals: Mapping[str, ConfidenceInterval] = field(default_factory=dict)
    sla: Sla = field(default_factory=Sla)

    def interval(self, metric: str) -> ConfidenceInterval | None:
        """Return the confidence interval of ``metric``; None if it was not estimated."""
        return {**self.other_intervals, "throughput": self.throughput, self.latency: self.latency_ms}.get(metric)

    @property
    def disturbance(self) -> str:
        """Why its values are not comparable with those of another run; empty if the machine was not disturbed."""
        if self.judged.counts_disturbed:
            return f"{100 * self.judged.disturbed_share:.0f} % of its windows were disturbed"
        pooled = self.point.measurement
        return "" if pooled.stable else pooled.reason or "its windows disagree"


@dataclass(frozen=True, slots=True)
class LoadLadder:
    """The loads of one candidate that can be tested, ascending, with the predicted latency and throughput.

    Attributes:
        loads: At least one load.
        predicted: The log of the latency over its bound; NO_BOUND if no latency is bounded.
        throughput: The throughput in inferences per second.
        highest_first: Number of the highest load at which the tests may begin; None if all may be the first.
    """

    loads: tuple[LoadPoint, ...]
    predicted: tuple[float, ...]
    throughput: tuple[float, ...]
    highest_first: int | None = None


def finalists(points: Sequence[Point], problem: Problem, most: int) -> list[Point]:
    """Return the best point of each of the ``most`` best candidates, best first.

    Disturbed measurements count with less weight, see ``SpeedCorrection.best_point``. If no point is stable, the best
    unstable one is returned: fresh servers decide about it.
    """
    rest, chosen = points, list[Point]()
    while len(chosen) < most:
        best = SpeedCorrection().best_point(rest, problem.best_point)
        if best is None and not chosen:
            best = problem.best_point(rest, unstable=True)
        if best is None:
            break
        chosen.append(best)
        rest = [point for point in rest if point.candidate != best.candidate]
    return chosen


def load_ladder(
    point: Point,
    points: Sequence[Point],
    problem: Problem,
    model: PerformanceModel | None,
    *,
    every_load: bool = False,
) -> LoadLadder:
    """Return the loads around that of ``point`` with the predicted latency and throughput of its candidate.

    Latency is not monotonic in the load: with a queue delay, fewer requests in flight fill batches worse. It rises
    steeply once requests wait for a place in a running batch. So ``model`` predicts it, and the candidate's own
    measurements correct the predictions. The simulator of the dynamic batcher is corrected by the median error, and
    other models, whose errors depend more on the load, by the interpolated one. Without a model, or where it predicts
    nothing, the measurements are interpolated. Measurements without a latency that is bounded do not count.

    Args:
        point: The candidate at its best load.
        points: The search's points of all candidates.
        problem: The search problem.
        model: The performance model that was fitted to the search's points; None if there is none.
        every_load: Whether the loads cover all concurrencies, for a candidate of which the search tried few loads.
    """
    loads = _possible_loads(point, problem, every_load=every_load)
    own = [other for other in points if other.candidate == point.candidate and _has_all_latencies(other, problem)]
    own = own or [point]
    expected = None if model is None or problem.open_loop else _modeled(model, own, loads, problem)
    if expected is None:
        expected = _extrapolated(own, loads, problem)
    if point.measurement.is_streamed:
        expected[:, 0] += STREAM_CAUTION
    return LoadLadder(tuple(loads), tuple(expected[:, 0].tolist()), tuple(np.exp(expected[:, 1]).tolist()))


def with_single_load(ladder: LoadLadder) -> LoadLadder:
    """Return ``ladder`` for a test without time for a second load: it begins at a load that is likelier to pass."""
    return replace(ladder, highest_first=_highest(ladder, -OTHER_MARGIN))


def _modeled(
    model: PerformanceModel, own: Sequence[Point], loads: Sequence[LoadPoint], problem: Problem
) -> FloatArray | None:
    """Return ``_log_metrics`` at ``loads`` [loads, 2] by ``model``; None where it predicts nothing.

    The errors at ``own``, the points of one candidate, correct the predictions.
    """
    known = [other.load for other in own]
    cells = [(own[0].candidate, load.concurrency) for load in (*loads, *known)]
    figures = np.array([_log_predicted(performance, problem) for performance in model.simulate(cells)])
    if not np.isfinite(figures).all():
        return None
    errors = _measured(own, problem) - figures[len(loads) :]
    correction = np.median(errors, axis=0) if problem.is_simulated else _interpolated(loads, known, errors)
    predicted: FloatArray = figures[: len(loads)] + correction
    return predicted


def _extrapolated(own: Sequence[Point], loads: Sequence[LoadPoint], problem: Problem) -> FloatArray:
    """Return ``_log_metrics`` at ``loads`` [loads, 2], interpolated between ``own``, the points of one candidate.

    Beyond them, latency is proportional to the load, and throughput no higher.
    """
    known = [other.load for other in own]
    sizes, ends = np.array(list(map(_log_size, loads))), list(map(_log_size, known))
    beyond = sizes - np.clip(sizes, min(ends), max(ends))
    inside = _interpolated(loads, known, _measured(own, problem))
    extrapolated: FloatArray = inside + np.stack([beyond, np.minimum(beyond, 0.0)], axis=1)
    return extrapolated


def _measured(own: Sequence[Point], problem: Problem) -> FloatArray:
    """Return ``_log_metrics`` of points [points, 2]."""
    return np.array([_log_metrics(other.measurement, problem) for other in own])


def _has_all_latencies(point: Point, problem: Problem) -> bool:
    return point.throughput_infer_per_sec > 0 and problem.sla.share_of_bound(point.measurement) < math.inf


def _interpolated(loads: Sequence[LoadPoint], known: Sequence[LoadPoint], values: FloatArray) -> FloatArray:
    """Return ``values`` [known, columns] interpolated at ``loads``; values at the same load are averaged."""
    distinct, place = np.unique(list(map(_log_size, known)), return_inverse=True)
    averages = [np.bincount(place, column) / np.bincount(place) for column in values.T]
    sizes = list(map(_log_size, loads))
    return np.stack([np.interp(sizes, distinct, average) for average in averages], axis=1)


def _possible_loads(point: Point, problem: Problem, *, every_load: bool) -> list[LoadPoint]:
    load, possible = point.load, problem.space.allowed_concurrencies(point.candidate)
    if not problem.sla.latencies:
        return [load]
    if any(METRICS[bound.metric].counted for bound in problem.sla) or METRICS["goodput"] in problem.objectives:
        # only the search's measurements show at which load too many requests fail, or the goodput falls again
        return [own for own in _loads_around(point, problem, possible, every_load=every_load) if own <= load]
    return _loads_around(point, problem, possible, every_load=every_load)


def _loads_around(
    point: Point, problem: Problem, possible: tuple[int, ...] | None, *, every_load: bool
) -> list[LoadPoint]:
    load = point.load
    if load.request_rate:
        steps = range(math.ceil(math.log(LOWEST_LOAD, RATE_STEP)), math.floor(math.log(HIGHEST_LOAD, RATE_STEP)) + 1)
        rates = sorted({float(f"{load.request_rate * RATE_STEP**step:.3g}") for step in steps} | {load.request_rate})
        return [replace(load, request_rate=rate) for rate in rates]
    if possible is None and every_load:
        steps = range(math.ceil(math.log(problem.max_concurrency, LOAD_STEP)))
        possible = (*(round(LOAD_STEP**step) for step in steps), problem.max_concurrency)
    elif possible is None:
        steps = range(math.ceil(math.log(LOWEST_LOAD, LOAD_STEP)), math.floor(math.log(HIGHEST_LOAD, LOAD_STEP)) + 1)
        possible = tuple(round(load.concurrency * LOAD_STEP**step) for step in steps)
    within = {size for size in possible if 1 <= size <= problem.max_concurrency} | {load.concurrency}
    return [replace(load, concurrency=size) for size in sorted(within)]


def _log_size(load: LoadPoint) -> float:
    return math.log(load.request_rate or load.concurrency)


def _log_metrics(measurement: Measurement, problem: Problem) -> tuple[float, float]:
    """Return the log of the latency over its bound and of the throughput."""
    share = problem.sla.share_of_bound(measurement) if problem.sla.latencies else 0.0
    return math.log(share) if 0 < share < math.inf else NO_BOUND, math.log(
        measurement.throughput_infer_per_sec or 1.0
    )


def _log_predicted(performance: Performance, problem: Problem) -> tuple[float, float]:
    """Return what ``_log_metrics`` returns of a measurement."""
    shares = [1e3 * performance.latency_s(bound.metric) / bound.bound for bound in problem.sla.latencies]
    return math.log(max(shares)) if shares else NO_BOUND, math.log(performance.throughput_infer_per_s)


def confirmation_candidate(
    point: Point, load: LoadPoint, times: RequestTimes | None, error: float = 0.0, sla: Sla | None = None
) -> ConfirmationCandidate:
    """Return the plan for the candidate of ``point`` at ``load``, sent at ``times`` in an open loop.

    Slow models get longer windows. So do tests of the bounds in ``sla`` that permit few requests to be slow. If the
    times of the requests repeat, a window has whole periods. So all windows have the same load, and their differences
    are those of the server.
    """
    served = point.throughput_infer_per_sec / load.request_batch_size
    requests = max(WINDOW_REQUESTS, *(needed_requests(bound) / (WINDOWS * LOOKS[0]) for bound in sla or ()), 0)
    seconds = requests / served if served > 0 else LONGEST_SECONDS
    start_seconds = START_SECONDS
    if point.measurement.responses_per_sec is not None:
        latency_s = (point.measurement.latency_avg_ms or 0.0) / 1e3
        start_seconds += STREAM_GENERATIONS * min(latency_s, MAX_LEAD_IN_SECONDS)
    seconds = min(max(seconds, SHORTEST_SECONDS), LONGEST_SECONDS)
    if times is not None:
        start_seconds += times.lead_in_at(load.request_rate)
        seconds = times.whole_periods(seconds, load.request_rate)
    return ConfirmationCandidate(point.trial, point.candidate, load, seconds, error, start_seconds=start_seconds)


def first_compared_load(ladder: LoadLadder) -> LoadPoint:
    """Return the highest load that is predicted to be inside the bound by MARGIN, as for the tested candidate."""
    return ladder.loads[_highest(ladder, -MARGIN)]


def next_compared_load(ladder: LoadLadder, measured: Sequence[Confirmed], problem: Problem) -> LoadPoint | None:
    """Return the load at which a candidate is measured next for comparison; None if it needs no more servers.

    A candidate whose last load missed the SLA, or was inside it by more than MARGIN, gets another one. Then the
    predictions are shifted by the measured difference, and the highest load at which a test would be likely to
    pass is next.

    Args:
        ladder: The loads of the candidate.
        measured: The candidate's confirmations, in the order of measuring.
        problem: The search problem.
    """
    if not measured:
        return first_compared_load(ladder)
    last = measured[-1]
    if last.servers < COMPARED_SERVERS:
        return last.point.load
    known = [entry.point.load for entry in measured]
    if len(known) >= COMPARED_LOADS:
        return None
    corrected = corrected_ladder(ladder, last, problem)
    is_close = _log_metrics(last.point.measurement, problem)[0] > -2 * MARGIN
    if corrected is None or (meets_sla(last, problem) and is_close):
        return None
    chosen = first_compared_load(corrected)
    return None if chosen in known else chosen


def corrected_ladder(ladder: LoadLadder, measured: Confirmed, problem: Problem) -> LoadLadder | None:
    """Return ``ladder`` with its predictions shifted by the measured difference at one load; None if unknown."""
    throughput = measured.point.throughput_infer_per_sec
    latency = _log_metrics(measured.point.measurement, problem)[0]
    if measured.point.load not in ladder.loads or latency == NO_BOUND or throughput <= 0:
        return None
    load = ladder.loads.index(measured.point.load)
    shift, factor = latency - ladder.predicted[load], throughput / ladder.throughput[load]
    return LoadLadder(
        ladder.loads,
        tuple(predicted + shift for predicted in ladder.predicted),
        tuple(factor * predicted for predicted in ladder.throughput),
    )


def rival_ladder(ladder: LoadLadder, measured: Confirmed, problem: Problem) -> LoadLadder | None:
    """Return the loads for a test of a compared candidate, corrected by its measurement; None if that is unknown.

    The test begins at most at FARTHEST_LOAD times the load that was measured.
    """
    corrected = corrected_ladder(ladder, measured, problem)
    if corrected is None:
        return None
    farthest = _log_size(measured.point.load) + math.log(FARTHEST_LOAD)
    return replace(corrected, highest_first=sum(_log_size(load) <= farthest for load in corrected.loads) - 1)


def expected_throughput(ladder: LoadLadder) -> float:
    """Return the predicted throughput at the load at which the test of a rival of the best candidate begins."""
    return ladder.throughput[_highest(ladder, -OTHER_MARGIN)]


def _highest(ladder: LoadLadder, limit: float) -> int:
    """Return the highest load whose predicted log of the latency over its bound is at most ``limit``, else 0."""
    end = len(ladder.loads) if ladder.highest_first is None else ladder.highest_first + 1
    return max((load for load, ratio in enumerate(ladder.predicted[:end]) if ratio <= limit), default=0)


def meets_sla(confirmed: Confirmed, problem: Problem) -> bool:
    """Return whether all windows on fresh servers together meet the SLA."""
    return confirmed.judged.verdict is not Verdict.FAIL and problem.sla.is_met(confirmed.point.measurement)


def was_search_disturbed(trials: Sequence[Trial]) -> bool:
    """Return whether other processes or machines disturbed more than MOST_EXCLUDED of the search's measurements."""
    measured = [measurement for trial in trials for _, measurement in trial.measurements]
    disturbed = [measurement for measurement in measured if describe_disturbance(measurement)]
    return len(disturbed) > MOST_EXCLUDED * len(measured)


def disturbance_limit(trials: Sequence[Trial]) -> float:
    """Return the CPU share of other processes above which a window on a fresh server does not count.

    It is fixed before the first of these windows, from what was usual during the search: a machine that is always
    shared is measured as it is.
    """
    shares = [measurement.other_cpu_share for trial in trials for _, measurement in trial.measurements]
    known = [share for share in shares if share is not None]
    return USUAL_DISTURBANCE + (statistics.median(known) if known else 0.0)


def server_windows(trial: Trial, load: LoadPoint) -> list[list[Measurement]]:
    """Return the windows of each fresh server of ``trial`` at ``load``, in the order of measuring.

    If the load was tested, they are those of the test. Earlier ones, for comparison, do not count, because the
    candidate and the load were chosen by them.
    """
    return list(_windows_by_server(trial, load).values())


def counted_server_windows(trial: Trial, load: LoadPoint) -> list[list[Measurement]]:
    """Return those of ``server_windows`` that count for the verdict, see ``counted_windows``."""
    return counted_windows(server_windows(trial, load), is_disturbed)


def _windows_by_server(trial: Trial, load: LoadPoint) -> dict[int, list[Measurement]]:
    own = [confirmation for confirmation in trial.confirmations if confirmation.load == load]
    servers: dict[int, list[Measurement]] = {}
    for confirmation in [again for again in own if again.error] or own:
        servers.setdefault(confirmation.server, []).append(confirmation.measurement)
    return servers


def load_agreement(trial: Trial, load: LoadPoint, problem: Problem) -> Agreement | None:
    """Return whether perf_analyzer measured the same as tune's own client; None if it measured nothing there.

    A false disagreement has the error probability of the run.
    """
    windows = _windows_by_server(trial, load)
    pairs = [ServerPair(windows.get(c.server, []), c.measurement) for c in trial.cross_checks if c.load == load]
    if not pairs:
        return None
    return compare_load_generators(pairs, problem.sla, 1 - problem.confidence, shares_cpus=problem.client_shares_cpus)


def confirmed_windows(trials: Sequence[Trial], *, disturbed: bool = False) -> list[list[list[Measurement]]]:
    """Return the windows by fresh server, of each candidate and load that was confirmed.

    They are those that count if ``disturbed``, otherwise only those in which the machine was not disturbed.
    """
    confirmed = _confirmed_loads(trials)
    if disturbed:
        return [counted_server_windows(trial, load) for trial, load in confirmed]
    groups = [server_windows(trial, load) for trial, load in confirmed]
    kept = [[[window for window in own if not is_disturbed(window)] for own in servers] for servers in groups]
    return [[own for own in servers if own] for servers in kept]


def windows_of(confirmed: Confirmed, trials: Sequence[Trial]) -> list[list[Measurement]]:
    """Return the windows of ``confirmed`` that count, by fresh server; it is a confirmation of ``trials``."""
    trial = next(trial for trial in trials if trial.number == confirmed.point.trial)
    return counted_server_windows(trial, confirmed.point.load)


def confirmed_spreads(
    trials: Sequence[Trial], problem: Problem, counted: Sequence[Sequence[Measurement]]
) -> dict[str, ServerSpread]:
    """Return the variance between servers by metric, pooled over all candidates and loads that were confirmed.

    It is that of the conditions of ``counted``, the windows of one candidate and load that count. A disturbance makes
    servers differ more, so disturbed windows of the others count only if one of these was disturbed as well.
    """
    return server_spreads(confirmed_windows(trials, disturbed=_has_disturbed(counted)), problem.sla)


def _has_disturbed(counted: Sequence[Sequence[Measurement]]) -> bool:
    return any(is_disturbed(window) for own in counted for window in own)


def judge_load(
    trial: Trial,
    load: LoadPoint,
    problem: Problem,
    spreads: Mapping[str, ServerSpread],
    error: float,
    most_servers: int = 0,
) -> SlaVerdict:
    """Return the verdict on ``trial`` at ``load`` from its windows on fresh servers.

    It is a PASS only after a planned number of servers (LOOKS): each further look would be another chance to err.

    Args:
        trial: The trial, with at least one confirmation at ``load``.
        load: The load to judge.
        problem: The search problem.
        spreads: The variance between servers, see ``confirmed_spreads``.
        error: The error probability of the test at this load.
        most_servers: The number of servers that the time allows.
    """
    test = SequentialTest(error, most_servers, problem.confidence)
    servers = server_windows(trial, load)
    judged = judge_sla(servers, problem.sla, spreads, test)
    if judged.verdict is Verdict.PASS and len(servers) not in LOOKS:
        reason = f"{len(servers)} of {next_look(len(servers))} fresh servers were measured"
        return replace(judged, verdict=Verdict.UNDECIDED, reason=reason, is_promising=True)
    if judged.verdict is Verdict.PASS:
        if reason := _rise([again for again in trial.confirmations if again.load == load], problem.sla):
            return replace(judged, verdict=Verdict.UNDECIDED, reason=reason, is_promising=False)
        agreement = load_agreement(trial, load, problem)
        if agreement is not None and agreement.contradiction:
            reason, excess = agreement.contradiction, max(judged.excess, agreement.excess)
            return replace(judged, verdict=Verdict.UNDECIDED, reason=reason, is_promising=False, excess=excess)
    return judged


def judge_confirmations(trials: Sequence[Trial], problem: Problem) -> list[Confirmed]:
    """Return the verdict on each trial and load that was confirmed.

    A candidate that was measured for comparison only is UNDECIDED.
    """
    spreads = {
        disturbed: server_spreads(confirmed_windows(trials, disturbed=disturbed), problem.sla)
        for disturbed in (False, True)
    }
    return [_judge_confirmation(trial, load, problem, spreads) for trial, load in _confirmed_loads(trials)]


def compare_throughput(
    ours: Confirmed, theirs: Confirmed, trials: Sequence[Trial], problem: Problem
) -> ThroughputRatio | None:
    """Return the throughput of ``ours`` relative to that of ``theirs``, both confirmed in ``trials``.

    It is None if one of them served nothing.
    """
    windows = windows_of(ours, trials), windows_of(theirs, trials)
    spread = confirmed_spreads(trials, problem, [*windows[0], *windows[1]])["throughput"]
    return throughput_ratio(*windows, spread, problem.confidence)


def _judge_confirmation(
    trial: Trial, load: LoadPoint, problem: Problem, spreads_by_disturbance: Mapping[bool, Mapping[str, ServerSpread]]
) -> Confirmed:
    servers, counted = server_windows(trial, load), counted_server_windows(trial, load)
    spreads = spreads_by_disturbance[_has_disturbed(counted)]
    error = max(again.error for again in trial.confirmations if again.load == load)
    judged = judge_load(trial, load, problem, spreads, error or 1 - problem.confidence)
    if not error:
        judged = replace(judged, verdict=Verdict.UNDECIDED, reason=COMPARED)
    pooled = pool_measurements([window for own in counted for window in own])
    if judged.verdict is Verdict.PASS:  # disturbed windows may count, and then they are no reason to doubt it
        pooled = replace(pooled, stable=True, reason="")
    latency = problem.sla.judged_latency
    return Confirmed(
        Point(trial.number, trial.candidate, load, pooled),
        judged,
        len(servers),
        sum(map(len, servers)),
        throughput_interval(counted, spreads["throughput"], problem.confidence),
        latency,
        _latency_interval_ms(counted, latency, judged, problem, spreads),
        error,
        load_agreement(trial, load, problem),
        _other_intervals(counted, judged, problem, spreads),
        problem.sla,
    )


def _other_intervals(
    servers: Sequence[Sequence[Measurement]],
    judged: SlaVerdict,
    problem: Problem,
    spreads: Mapping[str, ServerSpread],
) -> dict[str, ConfidenceInterval]:
    """Return ``Confirmed.other_intervals``."""
    confidence, output = problem.confidence, "output-throughput"
    latencies = {bound.metric for bound in problem.sla.latencies} - {problem.sla.judged_latency}
    intervals = {
        metric: _latency_interval_ms(servers, metric, judged, problem, spreads) for metric in sorted(latencies)
    }
    if output not in spreads:
        return intervals
    return {output: throughput_interval(servers, spreads[output], confidence, output), **intervals}


def _latency_interval_ms(
    servers: Sequence[Sequence[Measurement]],
    metric: str,
    judged: SlaVerdict,
    problem: Problem,
    spreads: Mapping[str, ServerSpread],
) -> ConfidenceInterval:
    """Return the interval of a latency. After a PASS it ends at the bound at the latest.

    The test may bound the quantile where few effective requests do not: by the variance of its log between servers.
    """
    effective = judged.effective_requests_of(metric)
    interval = latency_interval_ms(servers, metric, effective, spreads[metric], problem.confidence)
    if judged.verdict is Verdict.PASS:
        return replace(interval, high=min(interval.high, problem.sla.latency_bound_ms(metric)))
    return interval


def _confirmed_loads(trials: Sequence[Trial]) -> list[tuple[Trial, LoadPoint]]:
    """Return each trial and load with confirmations, in the order of measuring."""
    loads = {(trial.number, again.load): (trial, again.load) for trial in trials for again in trial.confirmations}
    return list(loads.values())


def _rise(own: Sequence[Confirmation], sla: Sla) -> str:
    """Return which mean time of a request rose too much for its bound, which a growing queue does; else nothing."""
    for timing in TIMINGS:
        rise_ms = _rise_ms(own, timing)
        if rise_ms > MOST_RISE * min(sla.bounds_ms(timing), default=math.inf):
            rose = f"the {timing.subject} rose by {four_digits(rise_ms)} ms on each server"
            return f"{rose}: the rate may exceed the capacity"
    return ""


def _rise_ms(own: Sequence[Confirmation], timing: Timing) -> float:
    """Return by how much the mean of ``timing`` rose on each server, from the first to the last third of its windows.

    The result is the average over servers, and 0 if latency did not rise on one of them. It is 0 in a closed loop,
    where no queue can grow.
    """
    rises = []
    for server in {confirmation.server for confirmation in own}:
        mean = timing.field_of("avg")
        means = [getattr(window.measurement, mean) or 0.0 for window in own if window.server == server]
        third = len(means) // 3
        if third == 0 or not own[0].load.request_rate:
            return 0.0
        rises.append((sum(means[-third:]) - sum(means[:third])) / third)
    return sum(rises) / len(rises) if rises and min(rises) > 0 else 0.0
