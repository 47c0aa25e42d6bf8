"""Whether two load generators agree: perf_analyzer's measurements next to those of tune's own client.

Both measure the same fresh servers at the same load, one after the other. The ratio of the two values on a server
leaves out how servers differ. The mean of its log is the systematic difference between the load generators; its
variance between servers is noise. They disagree if the systematic difference is above ALLOWED_DIFFERENCE at the
confidence of the run.

A disagreement contradicts a PASS, with one exception. perf_analyzer needs more CPU time for a request than the own
client. On CPUs that it shares with the server, it takes that time from the server. So a worse value is expected
there, and it contradicts a PASS only if it also misses the bound.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from objectives.confidence import mean_bounds, next_look
from objectives.intervals import ConfidenceInterval
from objectives.metrics import LATENCY, METRICS, Measurement, four_digits
from objectives.pooled_windows import pooled_average_ms, pooled_quantile_ms
from objectives.sequential import look_error
from objectives.server_spread import pool_server_spread
from objectives.sla import Sla
from objectives.verdict import is_disturbed

ALLOWED_DIFFERENCE = 0.05  # absolute log of the ratio; a smaller difference does not change a decision
MIN_PAIRS = 2


@dataclass(frozen=True, slots=True)
class ServerPair:
    """The windows of the own client on one fresh server, and the measurement of perf_analyzer on the same server."""

    windows: Sequence[Measurement]
    perf_analyzer: Measurement


@dataclass(frozen=True, slots=True)
class MetricRatio:
    """The ratio of perf_analyzer's value of a metric to the own client's.

    Attributes:
        metric: Name of the metric.
        value: perf_analyzer's value, the geometric mean over the servers.
        ratio: Geometric mean of the ratios of the servers.
        interval: Confidence interval of the expected ratio on a fresh server.
        bound: The bound of the metric in the SLA; None if it has none.
        tested_bound: The bound that was tested, which is lower if latencies are judged as higher than measured.
        shares_cpus: Whether the load generators share CPUs with the server.
    """

    metric: str
    value: float
    ratio: float
    interval: ConfidenceInterval
    bound: float | None = None
    tested_bound: float | None = None
    shares_cpus: bool = False

    @property
    def differs(self) -> bool:
        """Whether the load generators disagree: the interval lies outside the allowed difference."""
        allowed = math.exp(ALLOWED_DIFFERENCE)
        return self.interval.low > allowed or self.interval.high < 1 / allowed

    @property
    def excess(self) -> float:
        """The log of perf_analyzer's value over the tested bound if they disagree and its value is worse, else 0."""
        if self.tested_bound is None or not self.differs or not self._is_worse:
            return 0.0
        return max(0.0, self._sign * math.log(self.value / self.tested_bound))

    @property
    def allowed(self) -> str:
        """The bound of the SLA, and the tested one if it differs: ``allowed: 20, tested as 18.9``."""
        if self.bound is None or self.tested_bound is None:
            return ""
        tested = "" if self.tested_bound == self.bound else f", tested as {four_digits(self.tested_bound)}"
        return f"allowed: {four_digits(self.bound)}{tested}"

    @property
    def contradicts(self) -> bool:
        """Whether the disagreement contradicts a PASS."""
        is_expected = self.shares_cpus and self._is_worse
        return self.differs and (not is_expected or self.excess > 0)

    @property
    def _sign(self) -> int:
        return -1 if METRICS[self.metric].better == "higher" else 1

    @property
    def _is_worse(self) -> bool:
        return self._sign * (self.ratio - 1) > 0

    def __str__(self) -> str:
        """Return a clause: ``perf_analyzer measured 12 % more p95 latency than tune's own client: 21.4 ms``."""
        metric, relation = METRICS[self.metric], "more" if self.ratio > 1 else "less"
        name = metric.name
        if metric.timing is LATENCY:
            name = f"{metric.statistic.replace('avg', 'average')} latency"
        difference = f"{100 * abs(self.ratio - 1):.0f} % {relation} {name}"
        return f"perf_analyzer measured {difference} than tune's own client: {four_digits(self.value)} {metric.unit}"


@dataclass(frozen=True, slots=True)
class Agreement:
    """How perf_analyzer's measurements at one load compare with those of the own client.

    Attributes:
        servers: Servers on which perf_analyzer measured.
        pairs: Servers on which both have values from an undisturbed machine.
        ratios: One for each compared metric; empty if there are fewer than MIN_PAIRS pairs.
        reason: Why a server has no pair; empty if all have one.
    """

    servers: int
    pairs: int
    ratios: tuple[MetricRatio, ...] = ()
    reason: str = ""

    @property
    def disagreement(self) -> str:
        """How the load generators disagree; empty if they do not."""
        return "; ".join(str(ratio) for ratio in self.ratios if ratio.differs)

    @property
    def contradicts_pass(self) -> bool:
        """Whether a disagreement contradicts a PASS."""
        return any(ratio.contradicts for ratio in self.ratios)

    @property
    def contradiction(self) -> str:
        """The disagreements that contradict a PASS; empty if there are none."""
        return "; ".join(
            f"{ratio} ({ratio.allowed})" if ratio.excess else str(ratio) for ratio in self.ratios if ratio.contradicts
        )

    @property
    def excess(self) -> float:
        """The fall of the log of latency after which perf_analyzer's values would meet their bounds."""
        return max((ratio.excess for ratio in self.ratios), default=0.0)


def compare_load_generators(
    pairs: Sequence[ServerPair], sla: Sla, error: float, *, shares_cpus: bool = False, latency_rise: float = 0.0
) -> Agreement:
    """Return how the load generators agree in the throughput and in the judged or bounded latencies.

    A percentile that perf_analyzer does not report is compared at the nearest one that it reports.

    The bounds of the intervals are Student's t. The variance of the log of the ratio between servers is estimated
    from the pairs, with the prior of ``pool_server_spread``.

    Args:
        pairs: The measurements on each server.
        sla: The SLA, whose latencies are compared.
        error: Probability of a false disagreement over all metrics and over the looks at growing data, for load
            generators whose systematic difference is at most ALLOWED_DIFFERENCE.
        shares_cpus: Whether the load generators share CPUs with the server.
        latency_rise: By how much the log of latency is judged as higher than measured, see ``judge_sla``.
    """
    latencies = (METRICS[metric].nearest_reported for metric in sla.bounded_latencies)
    metrics = list(dict.fromkeys(("throughput", *latencies)))
    undisturbed, reason = list[ServerPair](), ""
    for pair in pairs:
        windows = [window for window in pair.windows if not is_disturbed(window)]
        if windows and pair.perf_analyzer.stable and pair.perf_analyzer.throughput_infer_per_sec:
            undisturbed.append(ServerPair(windows, pair.perf_analyzer))
        else:
            reason = reason or pair.perf_analyzer.reason or "its windows were disturbed"
    slas = sla, sla.with_lower_latencies(latency_rise)
    ratios = [
        _metric_ratio(undisturbed, metric, slas, error / len(metrics), shares_cpus=shares_cpus) for metric in metrics
    ]
    return Agreement(len(pairs), len(undisturbed), tuple(filter(None, ratios)), reason)


def _metric_ratio(
    pairs: Sequence[ServerPair], metric: str, slas: tuple[Sla, Sla], error: float, *, shares_cpus: bool
) -> MetricRatio | None:
    """Return the ratio of a metric over all ``pairs``; None if fewer than MIN_PAIRS have it.

    ``slas`` are the SLA and that with the tested bounds.
    """
    values = [(METRICS[metric].value(pair.perf_analyzer), _pooled_value(pair.windows, metric)) for pair in pairs]
    compared = [
        (perf_analyzer, own_client) for perf_analyzer, own_client in values if perf_analyzer and own_client > 0
    ]
    if len(compared) < MIN_PAIRS:
        return None
    logs = [np.array([math.log(perf_analyzer / own_client)]) for perf_analyzer, own_client in compared]
    low, high = mean_bounds(logs, pool_server_spread([logs]), look_error(error, next_look(len(logs))))
    bound, tested_bound = (_tightest_bound(sla, metric) for sla in slas)
    return MetricRatio(
        metric,
        statistics.geometric_mean(perf_analyzer for perf_analyzer, _ in compared),
        math.exp(float(np.mean(logs))),
        ConfidenceInterval(math.exp(low), math.exp(high)),
        bound,
        tested_bound,
        shares_cpus,
    )


def _tightest_bound(sla: Sla, metric: str) -> float | None:
    bounds = sla.bounds_on(metric)
    return (max(bounds) if METRICS[metric].better == "higher" else min(bounds)) if bounds else None


def _pooled_value(windows: Sequence[Measurement], metric: str) -> float:
    """Return the own client's value over all windows of a server, which have the same length; nan if unknown."""
    level, timing = METRICS[metric].quantile, METRICS[metric].timing
    if timing is not None:
        return pooled_average_ms(windows, timing) if level is None else pooled_quantile_ms(windows, level, timing)
    known = [value for window in windows if (value := METRICS[metric].value(window)) is not None]
    return statistics.fmean(known) if known else math.nan
