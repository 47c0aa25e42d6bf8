"""Bounds on the share of requests over a latency bound on a fresh server, from a few servers that were measured.

The estimand is the expected share on a fresh server of a configuration, under the machine states during its own
measurements. Servers are random: two starts of one configuration differ in speed. Machine states are not: a verdict
is about the mix of states that was observed. So the sampling error has two parts, the difference between servers and
the bursts within a server. Slow changes of the machine's speed within a server are left out of the second part.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import numpy as np

from objectives.arrays import FloatArray
from objectives.metrics import four_digits
from objectives.sequential import LOOKS, look_error
from objectives.server_spread import PRIOR_DEGREES_OF_FREEDOM, USUAL_RANGE, ServerSpread, Windows
from objectives.sla import DEFAULT_CONFIDENCE, Verdict

PROMISING_STANDARD_ERRORS = 1.5  # standard errors by which a load may be better than measured, before the first look
UNSERVED_EXCESS = math.log(2)  # ``excess`` of a load at which a server served nothing
PRIOR_SHARE_STD = 0.1  # prior standard deviation of a server's share of misses, over the permitted share
UNSEEN_GAP_ERROR = 0.02  # error of the bound by the count if the counts show no gap in the latencies
SEEN_MARGIN = 1.5  # factor on the overdispersion that few neighboring windows show, by its sampling error
LIKELY_STANDARD_ERRORS = 1.0  # standard errors beyond the limit of a test, with which it is likely to pass


@dataclass(frozen=True, slots=True)
class ConstraintVerdict:
    """The verdict on one constraint, with its confidence bounds.

    Attributes:
        verdict: PASS, FAIL or UNDECIDED.
        reason: The measured interval, or why there is none.
        low: Lower bound of the share of slow requests (``judge_share``) or of the metric (``judge_mean``).
        high: Upper bound of the same.
        effective_requests: Independent requests with the same information; 0 if it was not estimated.
        is_promising: Whether UNDECIDED may become PASS with more servers: with the same results, and before the first
            look with slightly better ones.
        excess: By how much the log of latency has to fall until the test is likely to pass; for a bound on a rate, by
            how much the log of the rate has to rise until it meets the bound.
        served_nothing: Whether a server served no request of a whole load, so that no distance to the bound is known.
    """

    verdict: Verdict
    reason: str
    low: float = -math.inf
    high: float = math.inf
    effective_requests: float = 0.0
    is_promising: bool = False
    excess: float = 0.0
    served_nothing: bool = False


NOTHING_COUNTED = ConstraintVerdict(
    Verdict.UNDECIDED, "no request was counted", excess=UNSERVED_EXCESS, served_nothing=True
)


@dataclass(frozen=True, slots=True)
class SequentialTest:
    """The error of a test that looks at growing data, and how much more it may measure.

    Attributes:
        error: One-sided error probability of all looks.
        max_servers: Servers that the time allows in total.
        confidence: One minus the error of all tests of the run.
    """

    error: float
    max_servers: int = 0
    confidence: float = DEFAULT_CONFIDENCE


@dataclass(frozen=True, slots=True)
class MissCounts:
    """Requests of one configuration at one load: for each server an array of shape [windows].

    Attributes:
        requests: Number of requests.
        misses: Requests over the latency bound.
        tail: Requests over the quantile of all requests together, whose level is the permitted one. They show how
            bursty latencies are, even if nothing misses the bound.
        slope: By how much the normal quantile of the share over a bound rises with the log of latency, at that
            quantile. It turns the variance of log latency into one of the share.
        distance: Log of the latency bound over that quantile.
        other_shares: CPU share of other processes, 0 to 1; empty if one is unknown.
        queue_overdispersion: The overdispersion that is expected from the memory of the queue, at least 1. Windows
            that are shorter than this memory hardly show it.
        least_queue_overdispersion: The same if the latencies met the bound, which a FAIL has to rule out.
        seen_share: The share of this overdispersion that neighboring windows are expected to show.
    """

    requests: Windows
    misses: Windows
    tail: Windows
    slope: float
    distance: float
    other_shares: Windows = ()
    queue_overdispersion: float = 1.0
    least_queue_overdispersion: float = 1.0
    seen_share: float = 0.0

    @property
    def is_empty(self) -> bool:
        """Whether there was no request in any window, so that no share is known."""
        return not any(windows.any() for windows in self.requests)

    @property
    def overdispersion(self) -> float:
        """How much more shares of requests vary than those of independent requests would.

        It is that of neighboring windows, or that of the queue's memory if it is larger. The prediction is for long
        queues, and may be too high where most of the wait is for a running batch. So it counts only up to the
        overdispersion of neighboring windows over the share of it that they show, times SEEN_MARGIN.
        """
        neighbors = overdispersion(self.requests, self.tail, self.other_shares)
        if self.queue_overdispersion * self.seen_share <= SEEN_MARGIN * neighbors:
            return max(neighbors, self.queue_overdispersion)
        return SEEN_MARGIN * neighbors / self.seen_share

    @property
    def share(self) -> float:
        """The share of requests over the bound: the mean over servers, each with equal weight."""
        return float(np.mean(self.server_shares(self.misses)))

    @property
    def requests_per_server(self) -> float:
        """The harmonic mean of the servers' numbers of requests, since servers have equal weight; nan without any."""
        counts = np.array([float(windows.sum()) for windows in self.requests if windows.any()])
        return float(len(counts) / (1 / counts).sum()) if len(counts) else math.nan

    def server_shares(self, some: Windows) -> FloatArray:
        """Return the share [servers] of ``misses`` or ``tail`` in the requests of each server; 1 if it had none."""
        pairs = zip(some, self.requests, strict=True)
        return np.array([counts.sum() / requests.sum() if requests.any() else 1.0 for counts, requests in pairs])


def effective_requests(counts: MissCounts, allowed: float, variance: float) -> float:
    """Return the number of independent requests with the same information about the share, if it is ``allowed``.

    It is the binomial variance of one request over the variance of the estimated share. ``variance`` is that of the
    normal quantile of the share between servers, see ``latency_variance`` and ``share_spread``.
    """
    binomial = allowed * (1 - allowed)
    between = probit_density(allowed) ** 2 * variance
    within = counts.overdispersion * binomial / counts.requests_per_server
    return float(binomial * len(counts.requests) / (between + within))


def latency_variance(counts: MissCounts, spread: ServerSpread) -> float:
    """Return the variance between servers of the normal quantile of the share, from that of log latency."""
    variance = counts.slope**2 * spread.variance
    return variance * _concentration(counts) if spread.excludes_disturbance else variance


def _concentration(counts: MissCounts) -> float:
    """Return how much larger the variance of the share is than that of servers with equal shares, at least 1.

    If other processes slow some servers, most slow requests are those of these servers, and the share depends on few
    of them. A server's share changes with the log of latency by the density at its normal quantile.
    """
    from scipy import special

    shares = counts.server_shares(counts.tail)
    densities = np.exp(-0.5 * np.square(special.ndtri(np.clip(shares, 0.0, 1.0))))
    mean = float(densities.mean())
    return float(np.square(densities).mean()) / mean**2 if mean > 0 else float(len(shares))


def share_spread(counts: MissCounts, allowed: float, prior_std: float = PRIOR_SHARE_STD) -> ServerSpread:
    """Return the variance between servers of the normal quantile of the share, from the counts alone.

    It is the variance of the servers' shares beyond that within servers, pooled with a prior as in
    ``pool_server_spread``. The prior has PRIOR_DEGREES_OF_FREEDOM degrees of freedom and the standard deviation
    ``prior_std``, as a multiple of ``allowed``. Without it, four servers that happen to be alike would hide
    that servers differ.
    """
    shares, share = counts.server_shares(counts.misses), min(max(counts.share, 0.0), 1.0)
    within = counts.overdispersion * share * (1 - share) / counts.requests_per_server
    degrees_of_freedom = len(shares) - 1
    between = max(0.0, float(np.var(shares, ddof=1)) - within) if degrees_of_freedom else 0.0
    total = PRIOR_DEGREES_OF_FREEDOM + degrees_of_freedom
    variance = (PRIOR_DEGREES_OF_FREEDOM * (prior_std * allowed) ** 2 + degrees_of_freedom * between) / total
    return ServerSpread(variance / probit_density(allowed) ** 2, total)


def overdispersion(requests: Windows, tail: Windows, other_shares: Windows = ()) -> float:
    """Return how much more the counts of neighboring windows differ than independent requests would, at least 1.

    Differences of neighbors leave slow changes of the mean out (von Neumann 1941). Differences of neighbors whose CPU
    shares of other processes differ by more than USUAL_RANGE are left out too: a verdict is about the machine states
    that were observed. If these are more than half of all neighbors, none is left out, because the rest would be too
    few. Windows without requests have no share and are left out.

    Args:
        requests: Requests of each window of each server.
        tail: Requests over a threshold, in the same order.
        other_shares: CPU shares of other processes, in the same order; empty if they are unknown.
    """
    share = sum(float(windows.sum()) for windows in tail) / sum(float(windows.sum()) for windows in requests)
    squares, expected, changes = list[FloatArray](), list[FloatArray](), list[FloatArray]()
    for number, (windows, over) in enumerate(zip(requests, tail, strict=True)):
        served = windows > 0
        counts = windows[served]
        squares.append(np.square(np.diff(over[served] / counts)))
        expected.append(share * (1 - share) * (1 / counts[1:] + 1 / counts[:-1]))
        changes.append(np.abs(np.diff(other_shares[number][served])) if other_shares else 0 * squares[-1])
    is_alike = np.concatenate(changes) <= USUAL_RANGE
    if 2 * np.count_nonzero(is_alike) < len(is_alike):
        is_alike[:] = True
    total = float(np.concatenate(expected)[is_alike].sum())
    return max(1.0, float(np.concatenate(squares)[is_alike].sum()) / total) if total > 0 else 1.0


def clopper_pearson_bounds(
    share: float, effective: float, degrees_of_freedom: float, error: float
) -> tuple[float, float]:
    """Return a lower and an upper bound on the share; each is wrong with probability ``error``.

    These are the exact binomial bounds of Clopper and Pearson (1934) for the effective requests. Their number is
    estimated, so ``error`` is lowered by the ratio of Student's t with ``degrees_of_freedom`` to the normal
    distribution.
    """
    from scipy import special

    error_t = float(special.ndtr(special.stdtrit(degrees_of_freedom, error)))
    hits = share * effective
    others = effective - hits
    low = float(special.betaincinv(hits, others + 1, error_t)) if hits > 0 else 0.0
    high = float(special.betaincinv(hits + 1, others, 1 - error_t)) if others > 0 else 1.0
    return low, high


def fewest_requests(allowed: float, error: float) -> int:
    """Return the effective requests with which the exact bound can be ``allowed``: none of them is over the bound."""
    return math.ceil(math.log(error) / math.log1p(-allowed))


def quantile_share_bound(
    counts: MissCounts, allowed: float, effective: float, degrees_of_freedom: float, error: float
) -> float:
    """Return an upper bound on the share, wrong with probability ``error``, from the distance to the latency bound.

    If no request misses the bound, the count does not show how far the latencies are below it, and its upper bound
    stays high. This bound uses the distance of the measured quantile to the latency bound instead, with Student's t
    on the normal quantile of the share.
    """
    from scipy import special

    quantile = float(special.stdtrit(degrees_of_freedom, error))
    margin = counts.slope * counts.distance + quantile * _probit_standard_error(allowed, effective)
    return 1.0 if math.isnan(margin) else float(special.ndtr(special.ndtri(allowed) - margin))


def _probit_standard_error(allowed: float, effective: float) -> float:
    """Return the standard error of the normal quantile of a share that is ``allowed`` (delta method)."""
    return math.sqrt(allowed * (1 - allowed) / effective) / probit_density(allowed)


def probit_density(share: float) -> float:
    """Return the density of the standard normal distribution at its quantile whose upper tail is ``share``."""
    from scipy import special

    return math.exp(-0.5 * float(special.ndtri(share)) ** 2) / math.sqrt(2 * math.pi)


def judge_share(
    counts: MissCounts,
    allowed: float,
    spread: ServerSpread,
    test: SequentialTest,
    verb: str = "are slower",
) -> ConstraintVerdict:
    """Return the verdict on the share of requests over a bound.

    Between two planned looks the verdict has the error of the next one. Before the first look it is UNDECIDED, and
    promising if a look that the time allows would be a PASS with a distance to the bound that is larger by
    PROMISING_STANDARD_ERRORS.

    Args:
        counts: Requests and misses.
        allowed: Permitted share of requests over the bound.
        spread: Variance between servers.
        test: The test of this configuration and load.
        verb: The verb of the counted requests in the reason.
    """
    if counts.is_empty:
        return NOTHING_COUNTED
    servers, estimate = len(counts.requests), _ShareEstimate.of(counts, allowed, spread)
    effective, excess = estimate.effective, estimate.missing_distance(test.error) / counts.slope
    if servers < LOOKS[0]:
        # the count decides where the distance is unknown, as for failed requests
        inside = max(estimate.inside, estimate.inside_by_count)
        standard_error = _probit_standard_error(allowed, effective)
        return ConstraintVerdict(
            Verdict.UNDECIDED,
            servers_missing(servers),
            effective_requests=effective,
            is_promising=_may_pass(inside, standard_error, servers, spread.degrees_of_freedom, test)
            and estimate.has_enough_requests(test.max_servers),
            excess=excess,
        )
    low, high = estimate.bounds(servers, test.error)
    if counts.least_queue_overdispersion < counts.queue_overdispersion:
        at_bound = replace(counts, queue_overdispersion=counts.least_queue_overdispersion)
        low, _ = _ShareEstimate.of(at_bound, allowed, spread).bounds(servers, test.error)
    verdict = Verdict.PASS if high <= allowed else Verdict.FAIL if low > allowed else Verdict.UNDECIDED
    later_looks = [look for look in LOOKS if servers < look <= test.max_servers]
    is_promising = any(estimate.bounds(look, test.error)[1] <= allowed for look in later_looks)
    reason = (
        f"{100 * low:.2f} % to {100 * high:.2f} % of the requests {verb} (allowed: {100 * allowed:.4g} %), "
        f"{effective:,.0f} effective requests"
    )
    return ConstraintVerdict(verdict, reason, low, high, effective, is_promising, excess)


@dataclass(frozen=True, slots=True)
class _ShareEstimate:
    """The estimated share of requests over a bound, and the information about it.

    Attributes:
        counts: Requests and misses.
        allowed: Permitted share of requests over the bound.
        effective: Effective requests, with the variance of latency between servers.
        effective_by_count: The same with the differences between servers that the counts show.
        degrees_of_freedom: Degrees of freedom of the variance between servers.
        inside: Distance of the normal quantile of the share to the permitted one, from the distance of the latencies
            to the bound; negative if the bound is missed.
        inside_by_count: The same distance from the counts.
    """

    counts: MissCounts
    allowed: float
    effective: float
    effective_by_count: float
    degrees_of_freedom: float
    inside: float
    inside_by_count: float

    @classmethod
    def of(cls, counts: MissCounts, allowed: float, spread: ServerSpread) -> _ShareEstimate:
        from scipy import special

        return cls(
            counts,
            allowed,
            effective_requests(counts, allowed, latency_variance(counts, spread)),
            effective_requests(counts, allowed, share_spread(counts, allowed).variance),
            spread.degrees_of_freedom,
            counts.slope * counts.distance,
            float(special.ndtri(allowed) - special.ndtri(counts.share)),
        )

    @property
    def has_gap(self) -> bool:
        """Whether more requests miss the bound than the distance of the latencies predicts."""
        return self.inside_by_count < self.inside

    def bounds(self, servers: int, error: float) -> tuple[float, float]:
        """Return the lower and the upper bound of the share with ``servers`` servers of the same results.

        The upper bound is the lower one of ``clopper_pearson_bounds`` and ``quantile_share_bound``. If the true share
        is the permitted one, both use the same sampling error; how often the lower one is wrong was simulated
        (benchmarks/verdict_procedure.md). ``quantile_share_bound`` takes the latencies near the bound to be
        continuous. They may have a gap there, and failed requests have none. So the bounds are at least as far apart
        as those of the count with the differences between servers that the counts show. If the counts show no gap,
        this upper bound has the error UNSEEN_GAP_ERROR: it decides only if so few requests are independent that a gap
        may be unseen.

        Args:
            servers: The number of servers.
            error: One-sided error probability of all looks.
        """
        share, factor = self.counts.share, servers / len(self.counts.requests)
        effective, effective_by_count = factor * self.effective, factor * self.effective_by_count
        degrees_of_freedom = self.degrees_of_freedom + servers - len(self.counts.requests)
        error = look_error(error, next_look(servers))
        gap_error = error if self.has_gap else max(error, UNSEEN_GAP_ERROR)
        low, high = clopper_pearson_bounds(share, effective, degrees_of_freedom, error)
        by_quantile = quantile_share_bound(self.counts, self.allowed, effective, degrees_of_freedom, error)
        low_by_count, _ = clopper_pearson_bounds(share, effective_by_count, degrees_of_freedom, error)
        _, high_by_count = clopper_pearson_bounds(share, effective_by_count, degrees_of_freedom, gap_error)
        low = min(low, low_by_count)
        return low, max(low, min(high, by_quantile), high_by_count)

    def has_enough_requests(self, servers: int) -> bool:
        """Return whether ``servers`` servers can pass at all, given the memory of the queue; True without one."""
        if self.counts.queue_overdispersion <= 1:
            return True
        independent = servers * self.counts.requests_per_server / self.counts.overdispersion
        return independent >= fewest_requests(self.allowed, UNSEEN_GAP_ERROR)

    def missing_distance(self, error: float) -> float:
        """Return by how much ``inside`` has to rise until the first look is likely to be a PASS."""
        missing = self._needed_distance(self.effective, error) - self.inside
        if not self.has_gap or self.inside <= 0:  # beyond the bound, the latencies show the distance better
            return missing
        return max(missing, self._needed_distance(self.effective_by_count, error) - self.inside_by_count)

    def _needed_distance(self, effective: float, error: float) -> float:
        """Return the distance to the permitted quantile with which the first look is likely to be a PASS."""
        effective_at_look = effective * LOOKS[0] / len(self.counts.requests)
        standard_error = _probit_standard_error(self.allowed, effective_at_look)
        return _needed_standard_errors(self.degrees_of_freedom, error) * standard_error


def _needed_standard_errors(degrees_of_freedom: float, error: float) -> float:
    """Return the standard errors from an estimate to its bound with which the first look is likely to be a PASS."""
    from scipy import special

    return LIKELY_STANDARD_ERRORS - float(special.stdtrit(degrees_of_freedom, look_error(error, LOOKS[0])))


def _may_pass(
    inside: float, standard_error: float, servers: int, degrees_of_freedom: float, test: SequentialTest
) -> bool:
    """Return whether a look that the time allows would be a PASS if the load were a little better than measured.

    Args:
        inside: Distance of the estimate to its bound; negative if it misses the bound.
        standard_error: The standard error of the estimate.
        servers: The number of servers that were measured.
        degrees_of_freedom: Degrees of freedom of the variance between servers.
        test: The test of this configuration and load.
    """
    from scipy import special

    def limit(look: int) -> float:
        quantile = -float(special.stdtrit(degrees_of_freedom + look - servers, look_error(test.error, look)))
        return quantile * standard_error * math.sqrt(servers / look)

    best = inside + PROMISING_STANDARD_ERRORS * standard_error
    return any(best >= limit(look) for look in LOOKS if look <= test.max_servers)


def judge_mean(
    logs: Windows,
    log_bound: float,
    spread: ServerSpread,
    test: SequentialTest,
    *,
    higher_is_better: bool,
    queue_variance: float = 0.0,
) -> ConstraintVerdict:
    """Return the verdict on the mean of a metric on a fresh server; the looks are as in ``judge_share``.

    Args:
        logs: The log of the metric in each window of each server.
        log_bound: The log of its bound.
        spread: Variance of the log between servers.
        test: The test of this configuration and load.
        higher_is_better: Whether the bound is a lower bound.
        queue_variance: Variance of the mean over a server's windows by the memory of its queue, which the differences
            between the windows may hide.
    """
    servers = len(logs)
    sign = -1.0 if higher_is_better else 1.0
    if not logs:
        return ConstraintVerdict(Verdict.UNDECIDED, "it is unknown")
    served = [windows for windows in logs if not np.isneginf(windows).any()]
    if len(served) < servers:
        # the mean over all servers is lower than that over those which served requests
        error = look_error(test.error, next_look(servers))
        high = mean_bounds(served, spread, error)[1] if served else -math.inf
        misses = higher_is_better and servers >= LOOKS[0] and high < log_bound
        verdict = Verdict.FAIL if misses else Verdict.UNDECIDED
        return ConstraintVerdict(verdict, "a server served nothing", excess=UNSERVED_EXCESS, served_nothing=True)
    distance = sign * (log_bound - _mean(logs))
    standard_error = math.sqrt(_mean_variance(logs, spread, queue_variance))
    excess = -distance
    if not higher_is_better:
        needed = _needed_standard_errors(spread.degrees_of_freedom, test.error)
        excess += needed * standard_error * math.sqrt(servers / LOOKS[0])
    if servers < LOOKS[0]:
        is_promising = _may_pass(distance, standard_error, servers, spread.degrees_of_freedom, test)
        return ConstraintVerdict(
            Verdict.UNDECIDED, servers_missing(servers), is_promising=is_promising, excess=excess
        )
    error = look_error(test.error, next_look(servers))
    _, high = mean_bounds(logs, spread, error, queue_variance)
    # a FAIL has to rule out that the bound is met, where the queue has a shorter memory
    low, _ = mean_bounds(logs, spread, error, queue_variance * min(1.0, math.exp(distance)))
    inner, outer = sorted((sign * (low - log_bound), sign * (high - log_bound)))
    verdict = Verdict.PASS if outer <= 0 else Verdict.FAIL if inner > 0 else Verdict.UNDECIDED
    half = (outer - inner) / 2
    is_promising = any(
        half * math.sqrt(servers / look) <= distance for look in LOOKS if servers < look <= test.max_servers
    )
    reason = (
        f"{four_digits(math.exp(low))} to {four_digits(math.exp(high))} (allowed: {four_digits(math.exp(log_bound))})"
    )
    return ConstraintVerdict(verdict, reason, math.exp(low), math.exp(high), is_promising=is_promising, excess=excess)


def mean_bounds(
    logs: Windows, spread: ServerSpread, error: float, queue_variance: float = 0.0
) -> tuple[float, float]:
    """Return a lower and an upper bound of the mean of the log on a fresh server, each wrong with ``error``.

    They are Student's t bounds, from the variance between servers and that of the windows' means. The latter is at
    least ``queue_variance``, see ``judge_mean``.
    """
    from scipy import special

    half = -float(special.stdtrit(spread.degrees_of_freedom, error)) * math.sqrt(
        _mean_variance(logs, spread, queue_variance)
    )
    middle = _mean(logs)
    return middle - half, middle + half


def fresh_server_range(logs: Windows, spread: ServerSpread, error: float) -> float:
    """Return by how much the log on one fresh server may be above the mean, or below it, each wrong with ``error``.

    It is Student's t with the variance between servers and that of a server's mean.
    """
    from scipy import special

    variance = spread.variance + _windows_variance(logs)
    return -float(special.stdtrit(spread.degrees_of_freedom, error)) * math.sqrt(variance)


def difference_bounds(
    ours: Windows, theirs: Windows, log_probe_difference: float, spread: ServerSpread, error: float
) -> tuple[float, float]:
    """Return a lower and an upper bound of the difference of two means of a log, each wrong with ``error``.

    The means are those on fresh servers of two configurations at the same speed of the machine. So the difference is
    adjusted by the slope on the speed probe (analysis of covariance, Fisher 1932), and its variance includes that of
    the slope. The bounds are Student's t bounds.

    Args:
        ours: The log of the metric in each window of each server.
        theirs: The same of the other configuration.
        log_probe_difference: The mean log of the time of the speed probe at ``ours`` minus that at ``theirs``; 0 if
            it is unknown.
        spread: Variance of the log between servers.
        error: One-sided error.
    """
    from scipy import special

    variance = _mean_variance(ours, spread) + _mean_variance(theirs, spread)
    variance += spread.slope_variance * log_probe_difference**2
    half = -float(special.stdtrit(spread.degrees_of_freedom, error)) * math.sqrt(variance)
    middle = _mean(ours) - _mean(theirs) - spread.slope * log_probe_difference
    return middle - half, middle + half


def _mean(logs: Windows) -> float:
    return float(np.mean([windows.mean() for windows in logs]))


def _mean_variance(logs: Windows, spread: ServerSpread, queue_variance: float = 0.0) -> float:
    """Return the variance of the mean over servers, from the variance between servers and that of their windows.

    If differences that other processes explain were left out of the variance between servers, it contains that of the
    windows already. The rest of the differences between windows is the machine's state, about which the verdict is.
    The memory of the queue counts in any case, because few servers see one of its rare long queues.
    """
    between_windows = 0.0 if spread.excludes_disturbance else _windows_variance(logs)
    return (spread.variance + max(between_windows, queue_variance)) / len(logs)


def _windows_variance(logs: Windows) -> float:
    """Return the variance of the mean over a server's windows, from the differences between them."""
    return float(np.mean([windows.var(ddof=1) / len(windows) if len(windows) > 1 else 0.0 for windows in logs]))


def queue_mean_variance(logs: Windows, independent: float, overdispersion: float, shown: float) -> float:
    """Return the variance of the log of a server's mean latency by the memory of its queue.

    It is the predicted one, as far as neighboring windows can hide it, see ``MissCounts.overdispersion``.

    Args:
        logs: The log of the mean latency in each window of each server.
        independent: The variance if the requests were independent.
        overdispersion: How many times as large it is by the predicted memory.
        shown: The share of the predicted variance that neighboring windows are expected to show, 0 to 1.
    """
    squares = [float(np.square(np.diff(windows)).mean()) / 2 / len(windows) for windows in logs if len(windows) > 1]
    neighbors = max(independent, float(np.mean(squares))) if squares else math.inf
    predicted = overdispersion * independent
    return min(predicted, SEEN_MARGIN * neighbors / shown) if shown > 0 else predicted


def servers_missing(servers: int) -> str:
    """Return the reason of a verdict before the next planned look, after ``servers`` servers."""
    return f"{servers} of {next_look(servers)} fresh servers were measured"


def next_look(servers: int) -> int:
    """Return the first planned look with at least this many servers; the last look beyond it."""
    return next((look for look in LOOKS if look >= servers), LOOKS[-1])
