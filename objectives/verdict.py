"""The verdict on an SLA, from the measurement windows on fresh servers of one configuration at one load."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TypeVar

import numpy as np

from objectives import model_stats
from objectives.arrays import FloatArray
from objectives.confidence import (
    NOTHING_COUNTED,
    ConstraintVerdict,
    MissCounts,
    SequentialTest,
    fewest_requests,
    judge_mean,
    judge_share,
    queue_mean_variance,
    servers_missing,
    share_spread,
)
from objectives.intervals import UNBOUNDED, ConfidenceInterval
from objectives.metrics import LATENCY, METRICS, Measurement, Timing, four_digits
from objectives.pooled_windows import (
    misses_over,
    pooled_average_ms,
    pooled_quantile_ms,
    requests_with,
    served_nothing,
)
from objectives.queue_memory import (
    MIN_TAIL_LEVEL,
    QueuedLoad,
    exponential_tail_ms,
    mean_overdispersion,
    seen_share,
)
from objectives.sequential import LOOKS
from objectives.server_spread import ServerSpread, ServerWindows, Windows, metric_logs
from objectives.sla import DEFAULT_CONFIDENCE, Constraint, Sla, Verdict

NOTHING = "nothing was measured"
# The excess (log of latency) after a test of failed requests: their number does not show the distance to the bound.
COUNTED_EXCESS = 0.1
PRIOR_FAILED_STD = 0.4  # prior standard deviation of a server's share of failures, over the permitted share
SLOPE_LEVELS = 1.5  # the slope is taken between the permitted share times this factor and divided by it
MAX_SLOPE = 50.0  # limit of the slope, where latencies hardly vary
Window = TypeVar("Window")
_ESTIMAND = "expected share of requests over the bound on a fresh server of this configuration, under the"
OBSERVED_STATES, USUAL_STATES = (
    "mix of machine states observed during its confirmation",
    "machine states that are usual in the run",
)
MAX_EXCLUDED_SHARE = 0.2  # if more of the windows were left out, the others would not represent the machine


@dataclass(frozen=True, slots=True)
class SlaVerdict:
    """The verdict on all constraints together: PASS if each passes, FAIL if one fails.

    Attributes:
        verdict: PASS, FAIL or UNDECIDED.
        reason: The measured intervals, or why nothing is decided.
        effective_requests: Independent requests with the same information; 0 if it was not estimated.
        confidence: One minus the error of all tests of the run together.
        slow_share: Bounds on the share of requests over the first latency bound, lower by ``latency_rise``.
        disturbed_share: Share of the windows in which the machine was disturbed, see ``counted_windows``.
        is_promising: Whether more servers with the same results would turn UNDECIDED into PASS.
        excess: By how much the log of latency has to fall until the test is likely to pass. After a PASS it is
            usually negative: by so much it may rise. Without a bound on latencies or failures it is that of the
            throughput, see ``ConstraintVerdict``.
        effective_by_metric: Effective requests of each bound on a latency, by metric.
        lacks_throughput: Whether the bound on the throughput does not pass, and more servers would not change that.
        unlikely: The constraints that do not pass, and would not pass with more servers either.
        latency_rise: By how much the log of latency is usually higher than in the windows that count, because other
            programs are more active. The bounds on latencies were tested as lower by it.
    """

    verdict: Verdict
    reason: str
    effective_requests: float = 0.0
    confidence: float = DEFAULT_CONFIDENCE
    slow_share: ConfidenceInterval = UNBOUNDED
    disturbed_share: float = 0.0
    is_promising: bool = False
    excess: float = 0.0
    effective_by_metric: Mapping[str, float] = field(default_factory=dict)
    lacks_throughput: bool = False
    unlikely: tuple[Constraint, ...] = ()
    latency_rise: float = 0.0

    @property
    def counts_disturbed(self) -> bool:
        """Whether disturbed windows count, because too many were disturbed to leave them out."""
        return self.disturbed_share > MAX_EXCLUDED_SHARE

    def effective_requests_of(self, metric: str) -> float:
        """Return the effective requests of the bound on ``metric``, or of the deciding bounds without one."""
        return self.effective_by_metric.get(metric, self.effective_requests)


def is_disturbed(window: Measurement) -> bool:
    """Return whether other programs disturbed ``window``, or it is not stable, but the server was not overloaded."""
    return window.disturbed or not (window.stable or window.overloaded)


def is_overloaded(window: Measurement) -> bool:
    """Return whether ``window`` is that of a server that fell behind its request rate."""
    return window.overloaded


def disturbed_share(
    servers: Sequence[Sequence[Window]],
    disturbed: Callable[[Window], bool],
    overloaded: Callable[[Window], bool] = lambda _: False,
) -> float:
    """Return the share of the windows that were disturbed, 0 to 1; 0 without any window.

    An overloaded server has one window for its whole load, which counts as much as those of any other server.

    Args:
        servers: The windows of each server, such as measurements.
        disturbed: Returns whether a window was disturbed: ``is_disturbed`` for measurements.
        overloaded: Returns whether a window is that of an overloaded server.
    """
    most = max(map(len, servers), default=0)
    weights = [(most if overloaded(window) else 1, disturbed(window)) for server in servers for window in server]
    total = sum(weight for weight, _ in weights)
    return sum(weight for weight, is_counted in weights if is_counted) / total if total else 0.0


def counted_windows(
    servers: Sequence[Sequence[Window]],
    disturbed: Callable[[Window], bool],
    overloaded: Callable[[Window], bool] = lambda _: False,
) -> list[list[Window]]:
    """Return the windows of each server that count for a verdict, without servers that have none.

    Disturbed windows do not count if they are few. If more than ``MAX_EXCLUDED_SHARE`` of all windows were disturbed,
    all of them count. The verdict is about the disturbed machine then, and errs on the safe side for a quiet one. The
    share of disturbed windows depends on no latency. The arguments are those of ``disturbed_share``.
    """
    if disturbed_share(servers, disturbed, overloaded) > MAX_EXCLUDED_SHARE:
        return [list(server) for server in servers if server]
    kept = [[window for window in server if not disturbed(window)] for server in servers]
    return [server for server in kept if server]


def estimand(sla: Sla, latency_rise: float) -> str:
    """Describe the estimand of the verdict on the quantiles of ``sla``. Its unit is the request.

    ``latency_rise`` is that of the ``SlaVerdict``: if it is above 0, the verdict is about the usual states.
    """
    text = f"{_ESTIMAND} {USUAL_STATES if latency_rise > 0 else OBSERVED_STATES}"
    timings = [METRICS[constraint.metric].timing for constraint in sla if METRICS[constraint.metric].quantile]
    subjects = list(dict.fromkeys(timing.subject for timing in timings if timing))
    if subjects in ([], [LATENCY.subject]):
        return text if len(timings) < 2 else text.replace("over the bound", "over each bound")
    shares = " and of those ".join(f"whose {subject} is over its bound" for subject in subjects)
    return text.replace("over the bound", shares)


def judge_sla(
    servers: ServerWindows,
    sla: Sla,
    spreads: Mapping[str, ServerSpread],
    test: SequentialTest,
    latency_rise: float = 0.0,
    queued: QueuedLoad | None = None,
) -> SlaVerdict:
    """Return the verdict on all constraints of the SLA, from windows on fresh servers of one configuration and load.

    The windows that count are those of ``counted_windows``. If disturbed windows count, the verdict is not FAIL but
    UNDECIDED, because the machine may be the cause.

    Args:
        servers: The windows of each server.
        sla: The SLA to judge.
        spreads: The variance between servers by metric, as ``server_spreads`` returns it.
        test: The error that the test may make.
        latency_rise: By how much the log of latency is judged as higher than measured. The bounds on latencies are
            tested as lower by it.
        queued: The load at a request rate, whose queue changes slowly; None for another load.
    """
    windows = [window for server in servers for window in server]
    lost = next((window for window in windows if not window.has_values), None)
    if lost is not None or not windows:
        reason = (
            f"a measurement was lost: {lost.reason or 'the load generator reported no throughput'}"
            if lost
            else NOTHING
        )
        return SlaVerdict(Verdict.UNDECIDED, reason, confidence=test.confidence, latency_rise=latency_rise)
    counted = counted_windows(servers, is_disturbed, is_overloaded)
    judged = [
        (constraint, _judge_models(counted, constraint.with_lower_latency(latency_rise), spreads, test, queued))
        for constraint in sla
    ]
    disturbed = [window for window in windows if is_disturbed(window)]
    combined = _combine(judged, test.confidence, latency_rise)
    combined = replace(combined, disturbed_share=disturbed_share(servers, is_disturbed, is_overloaded))
    if not judged and len(counted) < LOOKS[0]:
        reason = servers_missing(len(counted))
        return replace(combined, verdict=Verdict.UNDECIDED, reason=reason)
    if combined.counts_disturbed and combined.verdict is not Verdict.PASS:
        cause = next((window.reason for window in disturbed if window.reason), "the windows disagree")
        reason = f"{len(disturbed)} of {len(windows)} windows were disturbed: {cause}"
        return replace(combined, verdict=Verdict.UNDECIDED, reason=reason)
    return combined


def _combine(
    judged: Sequence[tuple[Constraint, ConstraintVerdict]], confidence: float, latency_rise: float
) -> SlaVerdict:
    entries = [entry for _, entry in judged]
    verdicts = {entry.verdict for entry in entries}
    unlikely = [(c, entry) for c, entry in judged if entry.verdict is not Verdict.PASS and not entry.is_promising]
    verdict = next((kind for kind in (Verdict.FAIL, Verdict.UNDECIDED) if kind in verdicts), Verdict.PASS)
    deciding = [(constraint, entry) for constraint, entry in judged if entry.verdict is verdict]
    slow = next((entry for constraint, entry in judged if METRICS[constraint.metric].quantile), None)
    request_entries = [entry for constraint, entry in judged if METRICS[constraint.metric].is_of_requests]
    return SlaVerdict(
        verdict,
        "; ".join(f"{_tested(constraint, latency_rise)}: {entry.reason}" for constraint, entry in deciding),
        effective_requests=min(
            (entry.effective_requests for _, entry in deciding if entry.effective_requests), default=0.0
        ),
        confidence=confidence,
        slow_share=UNBOUNDED if slow is None else ConfidenceInterval(slow.low, slow.high),
        is_promising=not unlikely,
        excess=max((entry.excess for entry in request_entries or entries), default=0.0),
        effective_by_metric={
            constraint.metric: entry.effective_requests for constraint, entry in judged if entry.effective_requests
        },
        lacks_throughput=any(
            constraint.metric == "throughput"
            for constraint, entry in unlikely
            if not entry.served_nothing  # such a server may serve more at a lower load
        ),
        unlikely=tuple(constraint for constraint, _ in unlikely),
        latency_rise=latency_rise,
    )


def _tested(constraint: Constraint, latency_rise: float) -> str:
    """Return ``constraint``, and the lower bound of its test if it has one."""
    lower = constraint.with_lower_latency(latency_rise)
    return str(constraint) if lower == constraint else f"{constraint}, tested as {lower}"


def needed_requests(bound: Constraint, error: float) -> int:
    """Return about how many effective requests a PASS of ``bound`` needs; 0 if it permits no share of them.

    ``error`` is the error probability of the test.
    """
    metric, allowed = METRICS[bound.metric], bound.bound / 100
    if metric.counted_requests is not None:
        return fewest_requests(allowed, error) if 0 < allowed < 1 else 0
    return 0 if metric.quantile is None else fewest_requests(1 - metric.quantile, error)


def _judge_models(
    servers: ServerWindows,
    bound: Constraint,
    spreads: Mapping[str, ServerSpread],
    test: SequentialTest,
    queued: QueuedLoad | None,
) -> ConstraintVerdict:
    """Return the verdict on one constraint: for a time of the requests that of the model with the worst one."""
    by_model = windows_by_model(servers) if METRICS[bound.metric].timing is LATENCY else {}
    if not by_model:
        return _judge_constraint(servers, bound, spreads, test, queued)
    requests = {
        name: sum(requests_with(window, LATENCY) for server in own for window in server)
        for name, own in by_model.items()
    }
    shares = {name: count / max(1, sum(requests.values())) for name, count in requests.items()}
    judged = {
        name: _judge_constraint(own, bound, spreads, test, queued and queued.part(shares[name]))
        for name, own in by_model.items()
    }
    order = (Verdict.PASS, Verdict.UNDECIDED, Verdict.FAIL)
    name, worst = max(
        judged.items(), key=lambda item: (order.index(item[1].verdict), not item[1].is_promising, item[1].excess)
    )
    return replace(worst, reason=f"{name!r}: {worst.reason}")


def windows_by_model(servers: ServerWindows) -> dict[str, ServerWindows]:
    """Return the windows of each model under load; empty unless all windows have values of the same models."""
    by_model = [[model_stats.from_text(window.by_model) for window in server] for server in servers]
    models_of_windows = [models.keys() for server in by_model for models in server]
    if any(names != models_of_windows[0] for names in models_of_windows):
        return {}
    return {
        name: [
            [
                replace(models[name], overloaded=window.overloaded, other_cpu_share=window.other_cpu_share)
                for window, models in zip(server, of_server, strict=True)
            ]
            for server, of_server in zip(servers, by_model, strict=True)
        ]
        for name in (models_of_windows[0] if models_of_windows else ())
    }


def _judge_constraint(
    servers: ServerWindows,
    bound: Constraint,
    spreads: Mapping[str, ServerSpread],
    test: SequentialTest,
    queued: QueuedLoad | None,
) -> ConstraintVerdict:
    """Return the verdict on one constraint.

    - A latency quantile: the requests above the bound are counted (``judge_share``). Failed requests count as late.
    - The error rate: the failed requests are counted in the same way.
    - The average latency and the throughput: Student's t on the logs of the servers' means, see ``metric_logs``.
    - Any other metric: each window must meet the bound.
    """
    metric = METRICS[bound.metric]
    level, timing = metric.quantile, metric.timing
    if level is not None and timing is not None:
        counts = count_misses(servers, bound.bound, level, timing, queued)
        return judge_share(counts, 1 - level, spreads[bound.metric], test)
    if metric.counted_requests is not None:
        return _judge_counted(servers, bound, metric.counted_requests, test)
    if bound.metric in spreads:
        logs = metric_logs(servers, bound.metric)
        judged = judge_mean(
            logs,
            math.log(bound.bound),
            spreads[bound.metric],
            test,
            higher_is_better=metric.better == "higher",
            queue_variance=_queue_variance(servers, logs, timing, queued) if timing is not None else 0.0,
        )
        windows = [window for server in servers for window in server] if timing is not None else []
        nothing = sum(served_nothing(window) and bool(window.errors) for window in windows)  # all requests failed
        if not nothing or judged.verdict is Verdict.FAIL:
            return judged
        reason = f"no request was served in {nothing} of {sum(map(len, servers))} windows"
        return ConstraintVerdict(Verdict.UNDECIDED, reason, excess=max(judged.excess, COUNTED_EXCESS))
    return _judge_each_window([metric.value(window) for server in servers for window in server], bound)


def _queue_variance(servers: ServerWindows, logs: Windows, timing: Timing, queued: QueuedLoad | None) -> float:
    """Return the variance of the log of a server's mean ``timing`` by the memory of its queue; 0 if it is unknown.

    It is unknown for a load whose rate changes, and for an overloaded server. The standard deviation of the times
    is taken as the mean of their exponential tail.
    """
    windows = [window for server in servers for window in server]
    requests = sum(requests_with(window, timing) for window in windows)
    if queued is None or queued.period is not None or not requests or any(window.overloaded for window in windows):
        return 0.0
    median_ms, high_ms = (pooled_quantile_ms(windows, level, timing) for level in (0.5, MIN_TAIL_LEVEL))
    if not high_ms < math.inf:
        return 0.0
    tail_ms = exponential_tail_ms(median_ms, high_ms, MIN_TAIL_LEVEL)
    independent = (tail_ms / pooled_average_ms(windows, timing)) ** 2 * len(servers) / requests
    memory_seconds, window_seconds = queued.memory_seconds(tail_ms), requests / len(windows) / queued.request_rate
    overdispersion = float(mean_overdispersion(queued.request_rate, memory_seconds))
    return queue_mean_variance(logs, independent, overdispersion, float(seen_share(window_seconds, memory_seconds)))


def count_misses(
    servers: ServerWindows,
    bound_ms: float,
    level: float,
    timing: Timing = LATENCY,
    queued: QueuedLoad | None = None,
) -> MissCounts:
    """Return the requests with ``timing``, those above ``bound_ms`` and those above the quantile of all together.

    They are counted where the load generator did so, otherwise estimated from a window's quantiles. Failed requests
    are above both.
    """
    windows = [window for server in servers for window in server]
    served = sum(requests_with(window, timing) for window in windows)
    failed = sum(window.errors or 0 for window in windows)
    level_of_served = level * (1 + failed / served) if served else math.inf
    quantile_ms = pooled_quantile_ms(windows, level_of_served, timing) if level_of_served < 1 else math.inf
    counts = MissCounts(
        [
            np.array([float(requests_with(window, timing) + (window.errors or 0)) for window in server])
            for server in servers
        ],
        [np.array([misses_over(window, bound_ms, timing) for window in server]) for server in servers],
        [np.array([misses_over(window, quantile_ms, timing) for window in server]) for server in servers],
        _slope(windows, level, timing),
        math.log(bound_ms / quantile_ms) if 0 < quantile_ms < math.inf else -math.inf,
        _other_shares(servers),
    )
    if queued is None or quantile_ms == math.inf or any(window.overloaded for window in windows):
        return counts  # the latencies of an overloaded server have no distribution in the long run
    median_ms, tail_level = pooled_quantile_ms(windows, 0.5, timing), max(level, MIN_TAIL_LEVEL)
    tail_ms = exponential_tail_ms(median_ms, pooled_quantile_ms(windows, tail_level, timing), tail_level)
    tail_ms = queued.constant_tail_ms(tail_ms, tail_level)
    within = min(1.0, max(0.0, bound_ms - median_ms) / (quantile_ms - median_ms)) if quantile_ms > median_ms else 1.0
    return replace(
        counts,
        queue_overdispersion=queued.overdispersion(1 - level, tail_ms),
        least_queue_overdispersion=queued.overdispersion(1 - level, within * tail_ms),
        seen_share=float(seen_share(served / len(windows) / queued.request_rate, queued.memory_seconds(tail_ms))),
    )


def _other_shares(servers: ServerWindows) -> list[FloatArray]:
    """Return the CPU share of other processes in each window of each server; nothing if one is unknown."""
    shares = [[window.other_cpu_share for window in server] for server in servers]
    known = [[share for share in server if share is not None] for server in shares]
    return [np.array(server) for server in known] if known == shares else []


def _slope(windows: Sequence[Measurement], level: float, timing: Timing) -> float:
    """Return by how much the normal quantile of the share over a bound rises with the log of latency."""
    from scipy import special

    shares = [(1 - level) * SLOPE_LEVELS, (1 - level) / SLOPE_LEVELS]
    low, high = (pooled_quantile_ms(windows, 1 - share, timing) for share in shares)
    if not math.isfinite(high):  # beyond the highest known quantile
        shares[1], high = 1 - level, pooled_quantile_ms(windows, level, timing)
    if not 0 < low < high < math.inf:
        return MAX_SLOPE
    return min(float(np.subtract(*special.ndtri(shares))) / math.log(high / low), MAX_SLOPE)


def _judge_counted(
    servers: ServerWindows,
    bound: Constraint,
    counted: Callable[[Measurement], int | None],
    test: SequentialTest,
) -> ConstraintVerdict:
    """Return the verdict on a percentage of the requests, such as the error rate, which ``counted`` counts.

    The variance between servers is that of their shares beyond the binomial one, since no latency explains it.
    """
    counts_by_server = [
        [(window, count) for window in server if (count := counted(window)) is not None] for server in servers
    ]
    if not counts_by_server or not all(counts_by_server):
        return ConstraintVerdict(Verdict.UNDECIDED, "failed requests were not counted")
    # unanswered requests are in none of the counts
    if any(window.overloaded for server in servers for window in server):
        return ConstraintVerdict(
            Verdict.FAIL if len(servers) >= LOOKS[0] else Verdict.UNDECIDED,
            "the server was overloaded, and requests stayed unanswered",
            excess=COUNTED_EXCESS,
        )
    requests = [
        np.array([float((window.requests or 0) + count) for window, count in server]) for server in counts_by_server
    ]
    misses = [np.array([float(count) for _, count in server]) for server in counts_by_server]
    allowed = bound.bound / 100
    other_shares = _other_shares([[window for window, _ in server] for server in counts_by_server])
    counts = MissCounts(requests, misses, misses, 1.0, -math.inf, other_shares)
    if counts.is_empty:
        return NOTHING_COUNTED
    spread = share_spread(counts, allowed, PRIOR_FAILED_STD)
    judged = judge_share(counts, allowed, spread, test, "fail")
    reason, needed = judged.reason, needed_requests(bound, test.error)
    if judged.verdict is Verdict.UNDECIDED and len(servers) >= LOOKS[0] and 0 < judged.effective_requests < needed:
        reason = f"{reason}; at least {needed:,} are needed"
    is_inside = judged.verdict is Verdict.PASS
    return replace(judged, reason=reason, excess=-COUNTED_EXCESS if is_inside else COUNTED_EXCESS)


def _judge_each_window(values: Sequence[float | None], bound: Constraint) -> ConstraintVerdict:
    known = [value for value in values if value is not None and math.isfinite(value)]
    if len(known) < len(values):
        return ConstraintVerdict(Verdict.UNDECIDED, "it is unknown")
    higher = METRICS[bound.metric].better == "higher"
    met = [value >= bound.bound if higher else value <= bound.bound for value in known]
    verdict = Verdict.PASS if all(met) else Verdict.UNDECIDED if any(met) else Verdict.FAIL
    return ConstraintVerdict(
        verdict,
        f"{four_digits(min(known))} to {four_digits(max(known))} in {len(known)} measurements",
        min(known),
        max(known),
    )
