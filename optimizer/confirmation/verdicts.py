"""The verdict on each candidate and load that was measured on fresh servers, with confidence intervals."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from objectives.agreement import Agreement, ServerPair, compare_load_generators
from objectives.confidence import SequentialTest, servers_missing
from objectives.intervals import (
    ConfidenceInterval,
    GainRatio,
    gain_ratio,
    latency_interval_ms,
    throughput_interval,
)
from objectives.metrics import METRICS, TIMINGS, Measurement, Timing, four_digits
from objectives.queue_memory import QueuedLoad
from objectives.sequential import LOOKS
from objectives.server_spread import ServerSpread
from objectives.sla import Sla, Verdict
from objectives.verdict import SlaVerdict, is_disturbed, judge_sla, windows_by_model
from optimizer.config.problem import Problem
from optimizer.confirmation.machine_states import usual_latency_rise
from optimizer.confirmation.windows import (
    confirmed_loads,
    confirmed_spreads,
    counted_server_windows,
    pooled_point,
    server_windows,
    tested_spreads,
    until_end_of_test,
    windows_by_server,
    windows_of,
)
from optimizer.core.notes import UsualStatesJudged
from optimizer.core.trial import LoadPoint, Point, Trial

MAX_RISE = 0.1  # allowed rise of the mean latency within a server's windows, as a share of the bound
COMPARED = "measured for comparison only"


@dataclass(frozen=True, slots=True)
class ConfirmedLoad:
    """The verdict on one candidate at one load, from its windows on fresh servers.

    Attributes:
        point: The candidate and the load, with the pooled measurement of the windows that count.
        judged: The verdict.
        servers: The number of fresh servers.
        windows: The number of their windows.
        disturbed_windows: The number of those in which the machine was disturbed.
        throughput: The confidence interval of the throughput, at the run's confidence as all intervals.
        latency: The metric of ``latency_ms``.
        latency_ms: The confidence interval of the bounded latency.
        error: The error probability of the test; 0 for a comparison.
        crash: The error of the first server that crashed during the test; empty if there was none.
        agreement: Whether perf_analyzer measured the same; None if it did not check another load generator.
        other_intervals: Those of the other bounded latencies by metric and, for a model that streams, of the output
            tokens per second.
        sla: The SLA of the run.
        has_lost: Whether a measurement was lost.
    """

    point: Point
    judged: SlaVerdict
    servers: int
    windows: int
    disturbed_windows: int
    throughput: ConfidenceInterval
    latency: str
    latency_ms: ConfidenceInterval
    error: float
    crash: str
    agreement: Agreement | None
    other_intervals: Mapping[str, ConfidenceInterval]
    sla: Sla
    has_lost: bool

    @property
    def judged_sla(self) -> Sla:
        """Return the SLA with the bounds that were judged, which are lower by the usual rise of latency."""
        return self.sla.with_lower_latencies(self.judged.latency_rise)

    @property
    def meets_sla(self) -> bool:
        """Return whether all windows on fresh servers together meet the bounds that were judged."""
        return self.judged.verdict is not Verdict.FAIL and self.judged_sla.is_met(self.point.measurement)

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


def judge_confirmations(trials: Sequence[Trial], problem: Problem) -> list[ConfirmedLoad]:
    """Return the verdict on each trial and load that was confirmed.

    A candidate that was measured for comparison only is UNDECIDED.
    """
    return [_judge_confirmation(trials, trial, load, problem) for trial, load in confirmed_loads(trials)]


def judge_load(
    trials: Sequence[Trial],
    trial: Trial,
    load: LoadPoint,
    problem: Problem,
    error: float,
    max_servers: int = 0,
) -> SlaVerdict:
    """Return the verdict on ``trial`` at ``load`` from its windows on fresh servers.

    It is a PASS only after a planned number of servers (LOOKS): each further look would be another chance to err. It
    is no PASS if one of the tested servers crashed, because its requests failed.

    If other programs were usually more active in the run than in these windows, the bounds on latencies are lower
    by ``usual_latency_rise``. A result that meets the bounds of the SLA, but not these, is UNDECIDED and not FAIL.
    Nor is it a PASS if the bounds of the SLA give none: nearer to a bound, fewer requests may decide.

    Args:
        trials: All trials of the run, with the confirmations so far.
        trial: One of them, with at least one confirmation at ``load``.
        load: The load to judge.
        problem: The search problem.
        error: The error probability of the test at this load.
        max_servers: The number of servers that the time allows.
    """
    test = SequentialTest(error, max_servers, problem.confidence)
    servers, spreads = server_windows(trial, load), tested_spreads(trials, trial, load, problem)
    known = until_end_of_test(trials, trial, load)
    rise, queued = usual_latency_rise(known, trial, load, problem), queued_load(known, trial, load, problem)
    judged = judge_sla(servers, problem.sla, spreads, test, rise, queued)
    if rise > 0:
        judged = _combine(judge_sla(servers, problem.sla, spreads, test, queued=queued), judged)
    undecided = replace(judged, verdict=Verdict.UNDECIDED, is_promising=False)
    if (crash := _crash_in_test(trial, load)) and judged.verdict is not Verdict.FAIL:
        reason = f"a fresh server crashed under this load: {crash}"
        return replace(undecided, reason=reason, lacks_throughput=False)
    if judged.verdict is not Verdict.PASS:
        return judged
    if len(servers) not in LOOKS:
        return replace(undecided, reason=servers_missing(len(servers)), is_promising=True)
    if load.request_rate and (reason := _describe_rise(servers, problem.sla)):
        return replace(undecided, reason=reason)
    agreement = load_agreement(trial, load, problem, rise)
    if agreement is not None and agreement.contradicts_pass:
        reason, excess = agreement.contradiction, max(judged.excess, agreement.excess)
        if rise > 0 and agreement.excess > 0:
            reason = f"{reason}; {UsualStatesJudged(rise)}"
        return replace(undecided, reason=reason, excess=excess)
    return judged


def queued_load(trials: Sequence[Trial], trial: Trial, load: LoadPoint, problem: Problem) -> QueuedLoad | None:
    """Return ``load`` of ``trial``, one of ``trials``, at one of its servers; None without a request rate.

    It is None for models that stream or keep state as well: their latencies differ for other reasons than a queue.
    """
    if not has_queue_memory(load, problem):
        return None
    period = problem.load_period
    (known,) = [other for other in trials if other.number == trial.number]
    windows = ((window.load, window.measurement) for window in known.confirmations)
    points = [known.point(*pair) for pair in (*known.measurements, *windows)]
    seconds = float(period.seconds_at(load.request_rate)) if period else 0.0
    queued = QueuedLoad(load.request_rate, estimate_capacity(points), period, seconds)
    return queued.part(1 / trial.candidate.server_processes)


def has_queue_memory(load: LoadPoint, problem: Problem) -> bool:
    """Return whether the verdict at ``load`` counts the memory of the queue, as ``queued_load`` describes it."""
    times = problem.request_times
    is_known = times is not None and (times.is_steady or problem.load_period is not None)
    return bool(load.request_rate) and is_known and problem.is_simulated


def estimate_capacity(points: Sequence[Point]) -> float:
    """Return the highest rate in requests per second that the candidate of ``points`` answered.

    Random arrivals may exceed the rate for a short time, which does not count.
    """
    return max(
        min(point.load.request_rate, point.throughput_infer_per_sec / point.load.request_batch_size)
        for point in points
    )


def _combine(measured: SlaVerdict, usual: SlaVerdict) -> SlaVerdict:
    """Return the verdict ``measured`` with the bounds of the SLA if it is no PASS, else ``usual`` without a FAIL.

    ``usual`` is that with the lower bounds of the usual states.
    """
    verdict, reason = measured.verdict, measured.reason
    if verdict is Verdict.PASS:
        verdict = Verdict.UNDECIDED if usual.verdict is Verdict.FAIL else usual.verdict
        reason = f"{usual.reason}; {UsualStatesJudged(usual.latency_rise)}"
    return replace(
        usual,
        verdict=verdict,
        reason=reason,
        is_promising=measured.is_promising and usual.is_promising,
        excess=max(measured.excess, usual.excess),
    )


def _crash_in_test(trial: Trial, load: LoadPoint) -> str:
    """Return the error of the first server that crashed while ``trial`` was tested at ``load``; else nothing."""
    return next((crash.reason for crash in trial.crashes if crash.load == load and crash.error_probability), "")


def load_agreement(trial: Trial, load: LoadPoint, problem: Problem, latency_rise: float = 0.0) -> Agreement | None:
    """Return whether perf_analyzer measured the same as tune's own client; None if it measured nothing there.

    A false disagreement has the error probability of the run. ``latency_rise`` is that of the verdict.
    """
    windows = windows_by_server(trial, load)
    checks = [check for check in trial.cross_checks if check.load == load]
    pairs = [ServerPair(windows.get(check.server, []), check.measurement) for check in checks]
    if not pairs:
        return None
    return compare_load_generators(
        pairs,
        problem.sla,
        1 - problem.confidence,
        shares_cpus=problem.client_shares_cpus,
        latency_rise=latency_rise,
    )


def compare_metric(
    ours: ConfirmedLoad,
    theirs: ConfirmedLoad,
    trials: Sequence[Trial],
    problem: Problem,
    metric: str,
    comparisons: int = 1,
) -> GainRatio | None:
    """Return how many times better ``metric`` is at ``ours`` than at ``theirs``, both confirmed in ``trials``.

    It is None if ratios of the metric have no meaning, or if one of them served nothing. The error of the run is
    divided by the number of ``comparisons`` that are made together (Bonferroni).
    """
    if not METRICS[metric].has_ratio:
        return None
    windows = windows_of(ours.point, trials), windows_of(theirs.point, trials)
    spread = confirmed_spreads(trials, problem, [*windows[0], *windows[1]], metric)[metric]
    return gain_ratio(*windows, metric, spread, 1 - (1 - problem.confidence) / comparisons)


def _judge_confirmation(trials: Sequence[Trial], trial: Trial, load: LoadPoint, problem: Problem) -> ConfirmedLoad:
    """Return the verdict on ``trial``, one of ``trials``, at ``load``."""
    servers, counted = server_windows(trial, load), counted_server_windows(trial, load)
    error = max(window.error_probability for window in trial.windows_at(load))
    # a test that was given up had the time for at least the first look, so its cause is among ``unlikely``
    judged = judge_load(trials, trial, load, problem, error or 1 - problem.confidence, LOOKS[0])
    if not error:
        judged = replace(judged, verdict=Verdict.UNDECIDED, reason=COMPARED)
    point = pooled_point(trial, load)
    if judged.verdict is Verdict.PASS:  # disturbed windows may count, and then they are no reason to doubt it
        point = replace(point, measurement=replace(point.measurement, stable=True, reason=""))
    spreads, latency = confirmed_spreads(trials, problem, counted), problem.sla.judged_latency
    return ConfirmedLoad(
        point=point,
        judged=judged,
        servers=len(servers),
        windows=sum(map(len, servers)),
        disturbed_windows=sum(is_disturbed(window) for server in servers for window in server),
        throughput=throughput_interval(counted, spreads["throughput"], problem.confidence),
        latency=latency,
        latency_ms=_latency_interval_ms(counted, latency, judged, problem, spreads),
        error=error,
        crash=_crash_in_test(trial, load),
        agreement=load_agreement(trial, load, problem, judged.latency_rise),
        other_intervals=_other_intervals(counted, judged, problem, spreads),
        sla=problem.sla,
        has_lost=not all(window.has_values for server in servers for window in server),
    )


def _other_intervals(
    servers: Sequence[Sequence[Measurement]],
    judged: SlaVerdict,
    problem: Problem,
    spreads: Mapping[str, ServerSpread],
) -> dict[str, ConfidenceInterval]:
    """Return ``ConfirmedLoad.other_intervals``."""
    intervals: dict[str, ConfidenceInterval] = {}
    output = "output-throughput"
    if output in spreads:
        intervals[output] = throughput_interval(servers, spreads[output], problem.confidence, output)
    for metric in sorted({bound.metric for bound in problem.sla.latencies} - {problem.sla.judged_latency}):
        intervals[metric] = _latency_interval_ms(servers, metric, judged, problem, spreads)
    return intervals


def _latency_interval_ms(
    servers: Sequence[Sequence[Measurement]],
    metric: str,
    judged: SlaVerdict,
    problem: Problem,
    spreads: Mapping[str, ServerSpread],
) -> ConfidenceInterval:
    """Return the interval of a latency. After a PASS it ends at the bound at the latest.

    The test may bound the quantile of all requests more narrowly than the interval of one fresh server does. Of
    several models under load it is that of the slowest one: each end is the largest of a model.
    """
    effective, spread = judged.effective_requests_of(metric), spreads[metric]
    of_models = [
        latency_interval_ms(own, metric, effective, spread, problem.confidence)
        for own in windows_by_model(servers).values() or [servers]
    ]
    interval = ConfidenceInterval(max(one.low for one in of_models), max(one.high for one in of_models))
    if judged.verdict is Verdict.PASS:
        return replace(interval, high=min(interval.high, problem.sla.latency_bound_ms(metric)))
    return interval


def _describe_rise(servers: Sequence[Sequence[Measurement]], sla: Sla) -> str:
    """Return which mean time of a request rose too much for its bound, as with a growing queue; empty if none did.

    ``servers`` are the windows of each fresh server at one request rate. In a closed loop, no queue can grow.
    """
    for timing in TIMINGS:
        rise_ms = _rise_ms(servers, timing)
        if rise_ms > MAX_RISE * min(sla.bounds_ms(timing), default=math.inf):
            rose = f"the {timing.subject} rose by {four_digits(rise_ms)} ms on each server"
            return f"{rose}: the rate may exceed the capacity"
    return ""


def _rise_ms(servers: Sequence[Sequence[Measurement]], timing: Timing) -> float:
    """Return by how much the mean of ``timing`` rose on each server, from the first to the last third of its windows.

    The result is the average over servers, and 0 if the mean did not rise on one of them, or if one has fewer than
    three windows.
    """
    rises = []
    for windows in servers:
        averages = (getattr(window, timing.field_of("avg")) for window in windows)
        means = [mean for mean in averages if mean is not None]
        third = len(means) // 3
        if third == 0:
            return 0.0
        rises.append((sum(means[-third:]) - sum(means[:third])) / third)
    return sum(rises) / len(rises) if min(rises) > 0 else 0.0
