"""The verdict on an SLA from measurement windows: with counts and sketches, or with only a few latency quantiles."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import TypeAlias, TypeVar

import numpy as np

from objectives import latency_sketch, priority_stats
from objectives.arrays import FloatArray
from objectives.confidence import (
    ConstraintVerdict,
    MissCounts,
    ServerSpread,
    Verdict,
    difference_bounds,
    fewest_requests,
    judge_mean,
    judge_share,
    mean_bounds,
    pool_server_spread,
    share_spread,
)
from objectives.metrics import LATENCY, METRICS, QUANTILES, TIMINGS, Measurement, Timing, four_digits
from objectives.sequential import LOOKS
from objectives.sla import CONFIDENCE, Constraint, Sla

HIGHEST_LEVEL = max(QUANTILES.values())  # nothing is known about the latencies above this quantile
EDGES = 200  # latencies at which the tails of windows without sketches are added up


def order_statistic_levels(effective: float, quantile: float, confidence: float) -> tuple[float, float]:
    """Return the levels of the sample quantiles that bound the true quantile from below and above.

    The bounds are order statistics (Conover 1999, "Practical Nonparametric Statistics", section 3.2). For example,
    the p99 of 161 or more independent requests is an upper bound of the true p95 at 99 % confidence.

    Args:
        effective: Effective requests.
        quantile: Level of the true quantile.
        confidence: One-sided confidence of each bound.

    Returns:
        The lower level (0 if no request is a bound) and the upper level (inf if no request is a bound).
    """
    from scipy import special

    above = np.arange(math.ceil(effective))  # candidate numbers of requests above the sample quantile
    # P(at most `above` requests exceed the true quantile), the binomial distribution
    chance = special.betainc(effective - above, above + 1.0, quantile)
    fewest, most = above[chance >= confidence], above[chance <= 1 - confidence]
    low = 1 - fewest[0] / effective if fewest.size else 0.0
    return float(low), float(1 - most[-1] / effective) if most.size else math.inf


def latency_quantiles(measurement: Measurement, timing: Timing = LATENCY) -> dict[float, float]:
    """Return the known quantiles of ``timing`` in ms, by level."""
    quantiles_ms = {level: METRICS[timing.metric(name)].value(measurement) for name, level in QUANTILES.items()}
    return {level: ms for level, ms in quantiles_ms.items() if ms is not None and math.isfinite(ms)}


def pooled_quantile_ms(windows: Sequence[Measurement], level: float, timing: Timing = LATENCY) -> float:
    """Return the quantile of ``timing`` over all requests of ``windows`` in ms; nan if no quantile is known.

    If all windows have sketches, these are merged, so the error is at most ``latency_sketch.RELATIVE_ACCURACY``.
    Otherwise the tail of a window is taken as exponential between its quantiles and beyond the highest one, as in
    ``_tail_shares``, and the result is inf above ``HIGHEST_LEVEL``.
    """
    known = [(window, own) for window in windows if (own := latency_quantiles(window, timing))]
    if known and all(timing.sketch(window) for window, _ in known):
        return latency_sketch.pooled_quantile_ms([timing.sketch(window) for window, _ in known], level)
    if level > HIGHEST_LEVEL:
        return math.inf
    if not known:
        return math.nan
    ends_ms = [ms for _, own in known for ms in (*own.values(), _tail_quantile_ms(own, level))]
    edges_ms = np.unique([*ends_ms, *np.linspace(min(ends_ms), max(ends_ms), EDGES)])
    requests = [_requests_with(window, timing) for window, _ in known]
    shares = np.average([_tail_shares(own, edges_ms) for _, own in known], axis=0, weights=requests)
    return float(np.interp(-math.log(1 - level), -np.log(shares), edges_ms))  # shares fall as the edges rise


def _requests_with(window: Measurement, timing: Timing) -> int:
    """Return the number of requests that have ``timing``: those in its sketch, or all of them if there is none.

    It is 1 if the number is unknown, so that windows have equal weights. A request with a single response has no
    inter-token latency.
    """
    sketch = "" if timing is LATENCY else timing.sketch(window)
    if sketch:
        return latency_sketch.count(sketch)
    return window.requests or (0 if _served_nothing(window) else 1)


def _counted_misses(window: Measurement, bound_ms: float, timing: Timing) -> float | None:
    """Return the requests above ``bound_ms``: exact, or by the sketch; None if the window has only quantiles."""
    exact, sketch = latency_sketch.requests_over(timing.requests_over(window), bound_ms), timing.sketch(window)
    if exact is not None or not sketch:
        return exact
    return _requests_with(window, timing) * latency_sketch.share_over(sketch, bound_ms)


def _tail_quantile_ms(quantiles_ms: Mapping[float, float], level: float) -> float:
    """Return the latency at ``level`` if the exponential between the two highest quantiles continues."""
    (before, before_ms), (last, last_ms) = sorted([(0.0, 0.0), *quantiles_ms.items()])[-2:]
    beyond = max(0.0, math.log((1 - last) / (1 - level)))
    return last_ms + beyond * max(last_ms - before_ms, 1e-9) / math.log((1 - before) / (1 - last))


def _tail_shares(quantiles_ms: Mapping[float, float], bounds_ms: FloatArray | float) -> FloatArray:
    """Return the share of requests above each bound, with the exponential tail beyond the highest quantile."""
    (before, before_ms), (last, last_ms) = sorted([(0.0, 0.0), *quantiles_ms.items()])[-2:]
    decay_per_ms = math.log((1 - before) / (1 - last)) / max(last_ms - before_ms, 1e-9)
    beyond_ms = np.maximum(0.0, np.asarray(bounds_ms, dtype=np.float64) - last_ms)
    return np.asarray(_miss_shares(quantiles_ms, bounds_ms) * np.exp(-decay_per_ms * beyond_ms), dtype=np.float64)


def _miss_shares(quantiles_ms: Mapping[float, float], bounds_ms: FloatArray | float) -> FloatArray:
    """Return the share of requests above each bound; at least the share above the highest quantile."""
    levels, values = [0.0, *sorted(quantiles_ms)], [0.0, *sorted(quantiles_ms.values())]
    return np.asarray(np.exp(np.interp(bounds_ms, values, np.log1p(-np.array(levels)))), dtype=np.float64)


@dataclass(frozen=True, slots=True)
class ConfidenceInterval:
    """A lower and an upper bound of a metric, each at the confidence; infinite or nan if they are unknown."""

    low: float
    high: float

    @property
    def is_unknown(self) -> bool:
        """Whether the measurements do not bound the metric."""
        return math.isnan(self.low) or math.isnan(self.high) or math.isinf(self.low)


UNBOUNDED = ConfidenceInterval(-math.inf, math.inf)


@dataclass(frozen=True, slots=True)
class ThroughputRatio:
    """The ratio of two throughputs on fresh servers, with its confidence interval."""

    estimate: float
    interval: ConfidenceInterval

    @property
    def bounds(self) -> tuple[float, float]:
        """The ends of the interval."""
        return self.interval.low, self.interval.high

    @property
    def is_measurable(self) -> bool:
        """Whether the throughputs differ by more than chance: the interval does not contain 1."""
        return not self.interval.low <= 1 <= self.interval.high


NOTHING = "nothing was measured"
_SUMMED = ("requests", "rejected_requests", "timed_out_requests", "failed_requests")
# log of latency by which the load changes after a test of a count, which does not show how far its bound is
COUNTED_EXCESS = 0.1
SLOPE_LEVELS = 1.5  # the shares at which the slope of the distribution is taken: times and divided by this factor
LARGEST_SLOPE = 50.0  # of the normal quantile of the share by the log of latency: latencies that hardly vary


Window = TypeVar("Window")
ServerWindows: TypeAlias = Sequence[Sequence[Measurement]]  # of each fresh server, ordered by time
ESTIMAND = (
    "expected share of requests over the bound on a fresh server of this configuration, under the mix of machine "
    "states observed during its confirmation"
)
MOST_EXCLUDED = 0.2  # share of the windows; if more were left out, the rest would not represent the machine
LARGEST_LOG = 700.0  # the exponential of more is not a floating-point number


@dataclass(frozen=True, slots=True)
class SlaVerdict:
    """The verdict on all constraints together: PASS if each passes, FAIL if one fails.

    Attributes:
        verdict: PASS, FAIL or UNDECIDED.
        reason: The measured intervals, or why nothing is decided.
        effective_requests: Independent requests with the same information; 0 if it was not estimated.
        confidence: One minus the error of all tests of the run together.
        slow_share: Bounds on the share of requests over the first latency bound.
        disturbed_share: Share of the windows in which the machine was disturbed, see ``counted_windows``.
        is_promising: Whether more servers with the same results would turn UNDECIDED into PASS.
        excess: By how much the log of latency has to fall until the test is likely to pass.
        effective_by_metric: Effective requests of each bound on a latency, by metric.
    """

    verdict: Verdict
    reason: str
    effective_requests: float = 0.0
    confidence: float = CONFIDENCE
    slow_share: ConfidenceInterval = UNBOUNDED
    disturbed_share: float = 0.0
    is_promising: bool = False
    excess: float = 0.0
    effective_by_metric: Mapping[str, float] = field(default_factory=dict)

    @property
    def counts_disturbed(self) -> bool:
        """Whether disturbed windows count, because too many were disturbed to leave them out."""
        return self.disturbed_share > MOST_EXCLUDED

    def effective_requests_of(self, metric: str) -> float:
        """Return the effective requests of the bound on ``metric``, or of the deciding bounds without one."""
        return self.effective_by_metric.get(metric, self.effective_requests)


@dataclass(frozen=True, slots=True)
class SequentialTest:
    """The error of a test that looks at growing data, and how much more it may measure.

    ``error`` is the one-sided error probability of all looks, ``most_servers`` the number of servers that the time
    allows, ``confidence`` one minus the error of all tests of the run.
    """

    error: float
    most_servers: int = 0
    confidence: float = CONFIDENCE


def is_disturbed(window: Measurement) -> bool:
    """Return whether ``window`` is not stable for another reason than an overloaded server."""
    return not (window.stable or window.overloaded)


def counted_windows(servers: Sequence[Sequence[Window]], disturbed: Callable[[Window], bool]) -> list[list[Window]]:
    """Return the windows of each server that count for a verdict, without servers that have none.

    Disturbed windows do not count if they are few. If more than ``MOST_EXCLUDED`` of all windows were disturbed, all
    of them count. The verdict is about the disturbed machine then, and errs on the safe side for a quiet one. The
    share of disturbed windows depends on no latency.

    Args:
        servers: The windows of each server, such as measurements.
        disturbed: Returns whether a window was disturbed: ``is_disturbed`` for measurements.
    """
    flags = [disturbed(window) for own in servers for window in own]
    if sum(flags) > MOST_EXCLUDED * len(flags):
        return [list(own) for own in servers if own]
    kept = [[window for window in own if not disturbed(window)] for own in servers]
    return [own for own in kept if own]


def estimand(sla: Sla) -> str:
    """Describe the estimand of the verdict on the quantiles of ``sla``. Its unit is the request."""
    timings = [METRICS[constraint.metric].timing for constraint in sla if METRICS[constraint.metric].quantile]
    subjects = list(dict.fromkeys(timing.subject for timing in timings if timing))
    if subjects in ([], [LATENCY.subject]):
        return ESTIMAND if len(timings) < 2 else ESTIMAND.replace("over the bound", "over each bound")
    shares = " and of those ".join(f"whose {subject} is over its bound" for subject in subjects)
    return ESTIMAND.replace("over the bound", shares)


def judge_sla(
    servers: ServerWindows, sla: Sla, spreads: Mapping[str, ServerSpread], test: SequentialTest
) -> SlaVerdict:
    """Return the verdict on all constraints of the SLA, from windows on fresh servers of one configuration and load.

    The windows that count are those of ``counted_windows``. If disturbed windows count, the verdict is not FAIL but
    UNDECIDED, because the machine may be the cause.

    Args:
        servers: The windows of each server.
        sla: The SLA to judge.
        spreads: The variance between servers by metric, as ``server_spreads`` returns it.
        test: The error that the test may make.
    """
    windows = [window for own in servers for window in own]
    lost = next((window for window in windows if window.throughput_infer_per_sec is None), None)
    if lost is not None or not windows:
        reason = f"a measurement was lost: {lost.reason or 'it has no figures'}" if lost else NOTHING
        return SlaVerdict(Verdict.UNDECIDED, reason, confidence=test.confidence)
    counted = counted_windows(servers, is_disturbed)
    judged = [(constraint, _judge_constraint(counted, constraint, spreads, test)) for constraint in sla]
    disturbed = [window for window in windows if is_disturbed(window)]
    combined = replace(_combine(judged, test.confidence), disturbed_share=len(disturbed) / len(windows))
    if not judged and len(counted) < LOOKS[0]:
        reason = f"{len(counted)} of {LOOKS[0]} fresh servers were measured"
        return replace(combined, verdict=Verdict.UNDECIDED, reason=reason, is_promising=True)
    if combined.counts_disturbed and combined.verdict is not Verdict.PASS:
        cause = next((window.reason for window in disturbed if window.reason), "the windows disagree")
        reason = f"{len(disturbed)} of {len(windows)} windows were disturbed: {cause}"
        return replace(combined, verdict=Verdict.UNDECIDED, reason=reason)
    return combined


def _combine(judged: Sequence[tuple[Constraint, ConstraintVerdict]], confidence: float) -> SlaVerdict:
    verdicts = {own.verdict for _, own in judged}
    verdict = next((kind for kind in (Verdict.FAIL, Verdict.UNDECIDED) if kind in verdicts), Verdict.PASS)
    deciding = [(constraint, own) for constraint, own in judged if own.verdict is verdict]
    slow = next((own for constraint, own in judged if METRICS[constraint.metric].quantile), None)
    metrics = {constraint.metric: METRICS[constraint.metric] for constraint, _ in judged}
    latencies = [
        own for constraint, own in judged if metrics[constraint.metric].timing or metrics[constraint.metric].counted
    ]
    return SlaVerdict(
        verdict,
        "; ".join(f"{constraint}: {own.reason}" for constraint, own in deciding),
        effective_requests=min(
            (own.effective_requests for _, own in deciding if own.effective_requests), default=0.0
        ),
        confidence=confidence,
        slow_share=UNBOUNDED if slow is None else ConfidenceInterval(slow.low, slow.high),
        is_promising=all(own.verdict is Verdict.PASS or own.is_promising for _, own in judged),
        excess=max((own.excess for own in latencies or [own for _, own in judged]), default=0.0),
        effective_by_metric={
            constraint.metric: own.effective_requests for constraint, own in judged if own.effective_requests
        },
    )


def needed_requests(bound: Constraint, error: float = 1 - CONFIDENCE) -> int:
    """Return the effective requests that a verdict on ``bound`` needs at least; 0 if it permits no share of them."""
    metric = METRICS[bound.metric]
    level, allowed = metric.quantile, bound.bound / 100
    if metric.counted is not None:
        return fewest_requests(allowed, error) if 0 < allowed < 1 else 0
    return 0 if level is None else fewest_requests(1 - level, error)


def server_spreads(groups: Sequence[ServerWindows], sla: Sla) -> dict[str, ServerSpread]:
    """Return the variance of the log between servers, of the throughput and of each bounded latency, by metric.

    Args:
        groups: The windows of each configuration and load that was confirmed.
        sla: The SLA, whose latencies are judged.
    """
    metrics = ["throughput", *(constraint.metric for constraint in sla.latencies), sla.judged_latency]
    if any(window.output_tokens_per_sec for servers in groups for own in servers for window in own):
        metrics.append("output-throughput")
    return {metric: _metric_spread(groups, metric) for metric in metrics}


def _metric_spread(groups: Sequence[ServerWindows], metric: str) -> ServerSpread:
    known = [[own for own in servers if _is_known(own, metric)] for servers in groups]
    probes = [[log_probe(own) for own in servers] for servers in known]
    is_probed = all(math.isfinite(probe) for servers in probes for probe in servers)
    return pool_server_spread([_logs(servers, metric) for servers in known], probes if is_probed else ())


def log_probe(windows: Sequence[Measurement]) -> float:
    """Return the log of the time in ms of the speed probe next to a server; nan if it is unknown."""
    known = [window.speed_probe_ms for window in windows if window.speed_probe_ms]
    return math.log(statistics.fmean(known)) if known else math.nan


def _logs(servers: ServerWindows, metric: str) -> list[FloatArray]:
    """Return the log of a metric in each window of each server, without windows in which it is unknown.

    A server with a window of 0, which served nothing, has the log of the mean of its windows instead. It is -inf if
    all of them are 0.
    """
    is_rate = METRICS[metric].better == "higher"
    logs = []
    for own in servers:
        values = [0.0 if is_rate and _served_nothing(window) else METRICS[metric].value(window) for window in own]
        known = [value for value in values if value is not None and 0 <= value < math.inf]
        mean = statistics.fmean(known) if known else 0.0
        if known and min(known) > 0:
            logs.append(np.log(known))
        elif known:
            logs.append(np.array([math.log(mean) if mean else -math.inf]))
    return logs


def _served_nothing(window: Measurement) -> bool:
    """Return whether every request of a window failed."""
    return window.requests == 0 and bool(window.errors)


def _is_known(windows: Sequence[Measurement], metric: str) -> bool:
    """Return whether the metric of a server has a log: it is known, and not 0 in all windows."""
    return any(np.isfinite(own).all() for own in _logs([windows], metric))


def _judge_constraint(
    servers: ServerWindows, bound: Constraint, spreads: Mapping[str, ServerSpread], test: SequentialTest
) -> ConstraintVerdict:
    """Return the verdict on one constraint.

    - A latency quantile: the requests above the bound are counted (``judge_share``). Failed requests count as late.
    - The error rate: the failed requests are counted in the same way.
    - The average latency and the throughput: Student's t on the logs of the servers' means.
    - Any other metric: each window must meet the bound.
    """
    level, timing = METRICS[bound.metric].quantile, METRICS[bound.metric].timing
    if level is not None and timing is not None:
        counts = count_misses(servers, bound.bound, level, timing)
        return judge_share(counts, 1 - level, spreads[bound.metric], test.error, test.most_servers)
    if METRICS[bound.metric].counted is not None:
        return _judge_counted(servers, bound, spreads["throughput"].freedom, test)
    if bound.metric in spreads:
        judged = judge_mean(
            _logs(servers, bound.metric),
            math.log(bound.bound),
            spreads[bound.metric],
            test.error,
            test.most_servers,
            higher_is_better=METRICS[bound.metric].better == "higher",
        )
        nothing = sum(_served_nothing(window) for own in servers for window in own) if timing is not None else 0
        if not nothing or judged.verdict is Verdict.FAIL:
            return judged
        reason = f"no request was served in {nothing} of {sum(map(len, servers))} windows"
        return ConstraintVerdict(Verdict.UNDECIDED, reason, excess=max(judged.excess, COUNTED_EXCESS))
    return _judge_each_window([METRICS[bound.metric].value(window) for own in servers for window in own], bound)


def count_misses(servers: ServerWindows, bound_ms: float, level: float, timing: Timing = LATENCY) -> MissCounts:
    """Return the requests with ``timing``, those above ``bound_ms`` and those above the quantile of all together.

    They are counted where the load generator did so, otherwise estimated from a window's quantiles. Failed requests
    are above both.
    """
    windows = [window for own in servers for window in own]
    served = sum(_requests_with(window, timing) for window in windows)
    failed = sum(window.errors or 0 for window in windows)
    level_of_served = level * (1 + failed / served) if served else math.inf
    own_ms = pooled_quantile_ms(windows, level_of_served, timing) if level_of_served < 1 else math.inf
    return MissCounts(
        [
            np.array([float(_requests_with(window, timing) + (window.errors or 0)) for window in own])
            for own in servers
        ],
        [np.array([_misses(window, bound_ms, timing) for window in own]) for own in servers],
        [np.array([_misses(window, own_ms, timing) for window in own]) for own in servers],
        _slope(windows, level, timing),
        math.log(bound_ms / own_ms) if 0 < own_ms < math.inf else -math.inf,
    )


def _slope(windows: Sequence[Measurement], level: float, timing: Timing) -> float:
    """Return by how much the normal quantile of the share over a bound rises with the log of latency."""
    from scipy import special

    shares = [(1 - level) * SLOPE_LEVELS, (1 - level) / SLOPE_LEVELS]
    low, high = (pooled_quantile_ms(windows, 1 - share, timing) for share in shares)
    if not math.isfinite(high):  # beyond the highest known quantile
        shares[1], high = 1 - level, pooled_quantile_ms(windows, level, timing)
    if not 0 < low < high < math.inf:
        return LARGEST_SLOPE
    return min(float(np.subtract(*special.ndtri(shares))) / math.log(high / low), LARGEST_SLOPE)


def throughput_interval(
    servers: ServerWindows, spread: ServerSpread, confidence: float = CONFIDENCE, metric: str = "throughput"
) -> ConfidenceInterval:
    """Return the confidence interval of the throughput ``metric`` on a fresh server in its unit per second.

    It is Student's t interval of the log, with the variance between servers that all configurations have together. If
    a server served nothing, the lower end is 0, and the upper end is that of the other servers.
    """
    logs = _logs(servers, metric)
    if not logs:
        return UNBOUNDED
    served = [own for own in logs if np.isfinite(own).all()]
    if not served:
        return ConfidenceInterval(0.0, 0.0)
    low, high = mean_bounds(served, spread, 1 - confidence)
    return ConfidenceInterval(math.exp(low) if len(served) == len(logs) else 0.0, math.exp(high))


def throughput_ratio(
    ours: ServerWindows, theirs: ServerWindows, spread: ServerSpread, confidence: float = CONFIDENCE
) -> ThroughputRatio | None:
    """Return the ratio of our throughput to theirs on fresh servers.

    It is None if one of them is unknown or a server served nothing. It is the ratio at the same speed of the machine,
    see ``confidence.difference_bounds``. The estimate is the middle of the interval on the log scale.

    Args:
        ours: The windows of each server of one configuration at one load.
        theirs: The same of the other configuration.
        spread: The variance of the log of the throughput between servers, as ``server_spreads`` returns it.
        confidence: One-sided confidence of each end of the interval.
    """
    both = [[own for own in servers if _logs([own], "throughput")] for servers in (ours, theirs)]
    if not all(both) or not all(_is_known(own, "throughput") for servers in both for own in servers):
        return None
    logs = [_logs(servers, "throughput") for servers in both]
    probes = [statistics.fmean(map(log_probe, servers)) for servers in both]
    difference = probes[0] - probes[1]
    bounds = difference_bounds(
        logs[0], logs[1], difference if math.isfinite(difference) else 0.0, spread, 1 - confidence
    )
    low, high = (min(max(bound, -LARGEST_LOG), LARGEST_LOG) for bound in bounds)
    return ThroughputRatio(math.exp((low + high) / 2), ConfidenceInterval(math.exp(low), math.exp(high)))


def latency_interval_ms(
    servers: ServerWindows,
    metric: str,
    effective_requests: float,
    spread: ServerSpread,
    confidence: float = CONFIDENCE,
) -> ConfidenceInterval:
    """Return the confidence interval of a latency metric on a fresh server in ms.

    Quantiles are bounded by order statistics of all requests, the average by Student's t.
    """
    level, timing = METRICS[metric].quantile, METRICS[metric].timing
    if level is None or timing is None:
        logs = _logs(servers, metric)
        if not logs:
            return UNBOUNDED
        low, high = mean_bounds(logs, spread, 1 - confidence)
        return ConfidenceInterval(math.exp(low), math.exp(high))
    if effective_requests < 1:
        return UNBOUNDED
    windows = [window for own in servers for window in own]
    low, high = order_statistic_levels(effective_requests, level, confidence)
    return ConfidenceInterval(pooled_quantile_ms(windows, low, timing), pooled_quantile_ms(windows, high, timing))


def pool_measurements(windows: Sequence[Measurement]) -> Measurement:
    """Return one measurement for all windows.

    Latency quantiles are those of all served requests, sketches are merged, and requests are summed, also by
    priority. Other values are medians over the windows in which they are known. The result is stable if all windows
    are.
    """
    values: dict[str, object] = {}
    for own in fields(Measurement):
        known = [value for w in windows if isinstance(value := getattr(w, own.name), (int, float))]
        if known and own.name not in ("stable", "overloaded", *_SUMMED):
            values[own.name] = round(statistics.median(known), 4)
    served = [window for window in windows if window.requests != 0]
    for timing in TIMINGS if served else ():
        for name, level in QUANTILES.items():
            if all(level in latency_quantiles(window, timing) for window in served):
                values[timing.field_of(name)] = round(pooled_quantile_ms(served, level, timing), 4)
        sketches = [sketch for window in served if (sketch := timing.sketch(window))]
        if len(sketches) == len(served):
            values[timing.sketch_field] = latency_sketch.merge(sketches)
    values["by_priority"] = priority_stats.pool([window.by_priority for window in windows])
    sums = {name: [count for window in windows if (count := getattr(window, name)) is not None] for name in _SUMMED}
    values |= {name: sum(counts) for name, counts in sums.items() if any(counts) or (counts and name != "requests")}
    stable = all(window.stable and window.throughput_infer_per_sec is not None for window in windows)
    reason = next((window.reason for window in windows if window.reason), "")
    overloaded = any(window.overloaded for window in windows)
    medians = Measurement(**values)  # type: ignore[arg-type]
    return replace(medians, stable=stable, overloaded=overloaded, reason=reason)


def _misses(window: Measurement, bound_ms: float, timing: Timing) -> float:
    """Return the requests above ``bound_ms`` or failed: counted where possible, else estimated.

    It is all of them if nothing is known.
    """
    counted = _counted_misses(window, bound_ms, timing)
    if counted is None:
        quantiles_ms, requests = latency_quantiles(window, timing), _requests_with(window, timing)
        counted = requests * float(_tail_shares(quantiles_ms, bound_ms)) if quantiles_ms else float(requests)
    return counted + (window.errors or 0)


def _judge_counted(
    servers: ServerWindows, bound: Constraint, freedom: float, test: SequentialTest
) -> ConstraintVerdict:
    """Return the verdict on a percentage of the requests that were counted, such as the error rate.

    The variance between servers is that of their shares beyond the binomial one, since no latency explains it. Its
    degrees of freedom are those of the throughput, for which the run has more servers.
    """
    counted = METRICS[bound.metric].counted
    known = [
        [(window, count) for window in own if counted and (count := counted(window)) is not None] for own in servers
    ]
    if not known or not all(known):
        return ConstraintVerdict(Verdict.UNDECIDED, "failed requests were not counted")
    if any(window.overloaded for own in servers for window in own):  # unanswered requests are in none of the counts
        return ConstraintVerdict(
            Verdict.FAIL if len(servers) >= LOOKS[0] else Verdict.UNDECIDED,
            "the server was overloaded, and requests stayed unanswered",
            excess=COUNTED_EXCESS,
        )
    requests = [np.array([float((window.requests or 0) + count) for window, count in own]) for own in known]
    misses = [np.array([float(count) for _, count in own]) for own in known]
    allowed = bound.bound / 100
    counts = MissCounts(requests, misses, misses, 1.0, -math.inf)
    spread = share_spread(counts, allowed, freedom)
    judged = judge_share(counts, allowed, spread, test.error, test.most_servers, "fail")
    reason, needed = judged.reason, needed_requests(bound, test.error)
    if judged.verdict is Verdict.UNDECIDED and len(servers) >= LOOKS[0] and 0 < judged.effective_requests < needed:
        reason = f"{reason}; at least {needed:,} are needed"
    is_inside = judged.verdict is Verdict.PASS
    return replace(judged, reason=reason, excess=-COUNTED_EXCESS if is_inside else COUNTED_EXCESS)


def _judge_each_window(values: Sequence[float | None], bound: Constraint) -> ConstraintVerdict:
    known = [value for value in values if value is not None and math.isfinite(value)]
    if not known or len(known) < len(values):
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
