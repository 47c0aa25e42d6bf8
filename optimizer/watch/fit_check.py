"""The checks of metrics of production against the expectations of a run. Pure functions.

Each check compares two intervals: that of the value in production, and that of the values that are expected. It
differs if they do not overlap, fits if the value itself is expected, and is undecided in between. Together all checks
of a judgement raise a false alarm with the error probability of the run, if its assumptions hold.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal, TypeAlias

import numpy as np
from scipy import special

from objectives.confidence import Verdict, fewest_requests, miss_rate_bounds
from objectives.metrics import LATENCY, METRICS, TTFT
from objectives.sla import Constraint
from objectives.verdict import needed_requests
from optimizer.results import formatting
from optimizer.watch.expectation import Expectation, ExpectedAtRate, Range
from optimizer.watch.server_metrics import ServedLoad, sum_by_key

Status: TypeAlias = Literal["fits", "near", "undecided", "differs", "unknown"]
CHECKS_WITHOUT_BOUNDS = 7  # each latency bound is one check more; all share the error probability
USUAL_SHARE = 0.05  # permitted share of slow requests of an SLA without a bound on a percentile
ROUNDING = 1e-9  # relative: counters are read as floating-point numbers
CHANGING = 1.05  # ratio of the mean rates over requests and over time from which a load has several rates
NOT_EXPORTED = "the server does not export it because of --metrics-config=counter_latencies=false"
STALLED = 3  # multiple of the longest latency; a server that serves nothing for longer is faulty


@dataclass(frozen=True, slots=True)
class Estimate:
    """A value in production, with a confidence interval from the differences between the observed intervals."""

    value: float
    low: float
    high: float


@dataclass(frozen=True, slots=True)
class Check:
    """One check.

    Attributes:
        name: Name of the check.
        status: ``differs`` if the recommendation no longer fits, ``near`` if the rate is close to the capacity,
            ``unknown`` if nothing can be said. It is ``undecided`` if the value is outside of the expected ones,
            but its interval has some of them.
        unit: Unit of the values; empty for a plain number.
        measured: The value in production; None if there is none.
        expected: The values that the run leads to expect; None if they are unknown.
        explanation: The meaning of a difference, or why nothing is known; empty for ``fits``.
        is_time: Whether it compares a time of requests that load and speed change.
    """

    name: str
    status: Status
    unit: str = ""
    measured: Estimate | None = None
    expected: Range | None = None
    explanation: str = ""
    is_time: bool = False


@dataclass(frozen=True)
class Judgement:
    """The judgement on the metrics of production in a number of intervals of observation.

    ``servers`` have a page of metrics each; a replica has as many of them as the run has server processes.
    ``loads`` has the load of each observed interval, summed over the servers. ``lost_intervals`` counts the intervals
    in which a server was restarted or could not be read. ``failures`` has the failed requests by reason.
    """

    expected: Expectation
    servers: int
    loads: tuple[ServedLoad, ...]
    lost_intervals: int
    checks: tuple[Check, ...]
    fewest_requests: int
    failures: Mapping[str, float] = field(default_factory=dict)

    @property
    def replicas(self) -> int:
        """The number of replicas."""
        return self.servers // self.expected.server_processes

    @property
    def requests(self) -> float:
        """The requests that were served."""
        return sum(load.requests for load in self.loads)

    @property
    def seconds(self) -> float:
        """The observed time."""
        return sum(load.seconds for load in self.loads)

    @property
    def differing(self) -> tuple[Check, ...]:
        """The checks that found that the recommendation no longer fits."""
        return tuple(check for check in self.checks if check.status == "differs")

    @property
    def undecided(self) -> tuple[Check, ...]:
        """The checks whose value is outside of the expected ones, but its interval has some of them."""
        return tuple(check for check in self.checks if check.status == "undecided")

    @property
    def unchecked_bounds(self) -> tuple[Constraint, ...]:
        """The bounds on times of requests that the metrics of the servers do not show."""
        if not self.requests:
            return ()
        return tuple(bound for bound in self.expected.sla.latencies if not self._is_exported(bound))

    def _is_exported(self, bound: Constraint) -> bool:
        metric = METRICS[bound.metric]
        if metric.timing is LATENCY and not self.expected.is_streamed:
            if metric.quantile is None:
                return not any(math.isnan(load.request_ms) for load in self.loads)
            return any(metric.quantile in load.latencies_ms for load in self.loads)
        limits = [limit for load in self.loads for limit in load.first_responses]
        return metric.timing is TTFT and metric.quantile is not None and smallest_limit(bound, limits) is not None

    @property
    def has_few_requests(self) -> bool:
        """Whether there were too few requests to say that the recommendation fits."""
        return self.requests < self.fewest_requests

    @property
    def verdict(self) -> Verdict:
        """FAIL: a check differs. UNDECIDED: a check is undecided, or there were too few requests."""
        if self.differing:
            return Verdict.FAIL
        return Verdict.UNDECIDED if self.has_few_requests or self.undecided else Verdict.PASS


def judge(expected: Expectation, loads: Sequence[ServedLoad], servers: int, lost_intervals: int = 0) -> Judgement:
    """Return the judgement on ``loads``, those of ``servers`` together in at least two intervals.

    ``servers`` is a multiple of the server processes of the run.
    """
    confidence, replicas = expected.run.problem.confidence, servers // expected.server_processes
    error = (1 - confidence) / (CHECKS_WITHOUT_BOUNDS + len(expected.sla.latencies))
    failures = sum_by_key([load.failures for load in loads])
    checks: list[Check] = []
    if loads:
        rate = _ratio(loads, lambda load: load.requests / replicas, lambda load: load.seconds, error)
        checks = [*_check_stalled(expected, loads), _check_rate(expected, rate, replicas, error)]
    if any(load.requests or load.failures for load in loads):
        size = _ratio(loads, lambda load: load.samples, lambda load: load.requests, error)
        sizes = _check_request_size(expected, size, 1 - confidence)
        at_rate = _expected_at_rates(expected, loads, replicas, error) if sizes.status != "differs" else None
        checks = [
            _check_failures(expected, sum(load.requests for load in loads), failures, error),
            *checks,
            sizes,
            _check_batches(expected, loads, at_rate, error, sizes),
            _check_queue(expected, loads, at_rate, replicas, error),
            _check_compute(expected, loads, at_rate, error, sizes),
            _check_time_in_server(expected, loads, at_rate, replicas, error),
            *_check_bounds(expected, loads, error),
        ]
    return Judgement(
        expected,
        servers,
        tuple(loads),
        lost_intervals,
        tuple(checks),
        _fewest_requests(expected, confidence),
        failures,
    )


def _fewest_requests(expected: Expectation, confidence: float) -> int:
    """Return the number of requests below which a bound that all of them meet could still be missed."""
    error = 1 - confidence
    needed = max((needed_requests(bound, error) for bound in expected.sla), default=0)
    return needed or fewest_requests(USUAL_SHARE, error)


def _expected_at_rates(
    expected: Expectation, loads: Sequence[ServedLoad], replicas: int, error: float
) -> ExpectedAtRate | None:
    """Return the expectation for the rates of ``loads``; None without requests or without a simulator.

    If the rate changes, most requests come at a higher rate than the mean over time. The ranges then include those at
    the mean over requests. Intervals without requests do not count.
    """
    known = [load for load in loads if load.requests]
    if not known:
        return None
    requests, seconds = (sum(getattr(load, name) for load in known) for name in ("requests", "seconds"))
    over_time = requests / seconds / replicas
    over_requests = sum(load.requests**2 / load.seconds for load in known) / requests / replicas
    rates = [over_time, over_requests] if over_requests > CHANGING * over_time else [over_time]
    ranges = [one for rate in rates if (one := expected.at(rate, replicas, error))]
    return functools.reduce(ExpectedAtRate.joined, ranges) if ranges else None


def _ratio(
    loads: Sequence[ServedLoad],
    numerator: Callable[[ServedLoad], float],
    denominator: Callable[[ServedLoad], float],
    error: float,
) -> Estimate:
    """Return the ratio of two sums over ``loads``; each end of its confidence interval is wrong with ``error``.

    The loads are batch means: requests of one interval influence each other, those of different ones hardly do. The
    standard error is that of a ratio estimator (Cochran 1977, "Sampling Techniques", section 6.4), the confidence
    interval Student's t. Loads whose denominator is zero say nothing about the ratio. It is (nan, -inf, inf) without
    others, and (nan, nan, nan) if a server does not export the numerator.
    """
    known = [load for load in loads if denominator(load) > 0]
    if not known:
        return Estimate(math.nan, -math.inf, math.inf)
    above = np.array([numerator(load) for load in known])
    below = np.array([denominator(load) for load in known])
    value = float(above.sum() / below.sum())
    count = len(known)
    if math.isnan(value):
        return Estimate(value, value, value)
    if count < 2:
        return Estimate(value, -math.inf, math.inf)
    squares = float(((above - value * below) ** 2).sum()) * count / (count - 1)
    half = -float(special.stdtrit(count - 1, error)) * math.sqrt(squares) / float(below.sum())
    return Estimate(value, value - half, value + half)


def _check_failures(expected: Expectation, requests: float, failures: Mapping[str, float], error: float) -> Check:
    """Compare the share of failed requests with its upper bound on the run, and with the bound on the error rate.

    The larger one of both counts. Without a bound on the error rate no request of the run failed.
    """
    failed = sum(failures.values())
    low, high = share_interval(failed, requests + failed, error)
    counted = expected.requests + expected.failed
    most = share_interval(float(expected.failed), float(counted), error)[1]
    permitted = [bound.bound / 100 for bound in expected.sla if METRICS[bound.metric].counted]
    most = max(most, min(permitted, default=0.0))
    measured = Estimate(failed / (requests + failed), low, high)
    reasons = ", ".join(f"{count:,.0f} {reason}" for reason, count in failures.items())
    fewer = f"{expected.failed:,}" if expected.failed else "none"
    meaning = f"requests fail ({reasons}), and {fewer} of {counted:,} did in the run"
    return _compared("failed requests", "%", _percent(measured), Range(0.0, 100 * most), meaning)


def share_interval(hits: float, count: float, error: float) -> tuple[float, float]:
    """Return the exact binomial bounds of a share of independent requests; each is wrong with ``error``."""
    return miss_rate_bounds(hits / count, count, math.inf, error) if count > 0 else (0.0, 1.0)


def _check_stalled(expected: Expectation, loads: Sequence[ServedLoad]) -> list[Check]:
    """Compare the time in which a server served nothing while requests waited with the longest latency of the run.

    The result is empty if each server served a request in each interval, or no request waited.
    """
    longest_ms = 1e3 * max(load.stalled_seconds for load in loads)
    if not longest_ms:
        return []
    permitted = None if expected.longest_ms is None else Range(0.0, STALLED * expected.longest_ms)
    meaning = f"a server served no request for {longest_ms / 1e3:,.3g} s, although requests waited"
    return [_at_most("time without success", "ms", Estimate(longest_ms, longest_ms, longest_ms), permitted, meaning)]


def rate_check_name(expected: Expectation) -> str:
    """Return the name of the check that more servers repair."""
    return f"requests/s per {expected.replica_name}"


def _check_rate(expected: Expectation, rate: Estimate, replicas: int, error: float) -> Check:
    """Compare the requests per second and replica with the confirmed throughput on further replicas."""
    name, unit, of_replica = rate_check_name(expected), "/s", f"of a {expected.replica_name}"
    confirmed = expected.rate.predicted(replicas, error)
    if confirmed is None:
        return Check(name, "unknown", unit, rate, None, "the run has no throughput")
    within = Range(0.0, confirmed.high)
    check = _compared(name, unit, rate, within, f"the rate is above the confirmed throughput {of_replica}")
    safe = expected.safe_rate
    if check.status == "fits" and safe is not None and rate.value > safe:
        explanation = (
            f"near the capacity: if requests arrive independently, {formatting.bounds(expected.sla)} is safe up to "
            f"{formatting.number(safe)} requests/s per {expected.replica_name}"
        )
        return Check(name, "near", unit, rate, within, explanation)
    return check


def _check_request_size(expected: Expectation, size: Estimate, error: float) -> Check:
    """Compare the mean request size with that of the run, within the uncertainty of its throughput.

    A request of another size changes the throughput in requests per second at most in proportion. A change below the
    confidence interval of the throughput has no effect that the run could show. This range does not allow for the
    random sizes of a mix, of which few requests are often outside. So the check is never undecided.
    """
    own = expected.request_samples
    throughput = expected.rate.interval(error)
    factor = math.sqrt(throughput.high / throughput.low) if throughput else 1.0
    allowed = Range(own / factor, own * factor)
    check = _compared(
        "samples per request",
        "",
        size,
        allowed,
        f"requests have {formatting.number(size.value)} samples, and those of the run had {own:g}",
    )
    return replace(check, status="fits", explanation="") if check.status == "undecided" else check


def _check_batches(
    expected: Expectation, loads: Sequence[ServedLoad], at_rate: ExpectedAtRate | None, error: float, sizes: Check
) -> Check:
    """Compare the samples per execution with those of the simulator at the same rate."""
    name = "samples per execution"
    measured = _ratio(loads, lambda load: load.samples, lambda load: load.executions, error)
    if at_rate is None:
        return Check(name, "unknown", "", _known(measured), None, _why_unknown(expected, sizes))
    if measured.high < at_rate.mean_batch_size.low:
        meaning = "batches are smaller than at this rate in the run: is the recommended config.pbtxt deployed?"
    elif measured.low > expected.largest_batch * (1 + ROUNDING):
        meaning = (
            f"batches are larger than max_batch_size {expected.largest_batch:g} of the recommendation: the server "
            "has another config.pbtxt"
        )
    else:
        meaning = (
            "batches are larger than at this rate in the run: requests arrive in bursts, the server is slower, or it "
            "has another config.pbtxt"
        )
    return _compared(name, "", _wide(measured, loads, expected, error), at_rate.mean_batch_size, meaning)


def _wide(measured: Estimate, loads: Sequence[ServedLoad], expected: Expectation, error: float) -> Estimate:
    """Return ``measured`` with at least the uncertainty of so few executions.

    The variance of a size between ``smallest`` and ``largest`` with a given mean is at most the product of its
    distances from both (Bhatia and Davis 2000).
    """
    executions = sum(load.executions for load in loads)
    if not executions:
        return measured
    smallest = min(expected.request_samples, expected.largest_batch)
    most = max(0.0, (measured.value - smallest) * (expected.largest_batch - measured.value))
    half = -float(special.ndtri(error)) * math.sqrt(most / executions)
    return Estimate(
        measured.value, min(measured.low, measured.value - half), max(measured.high, measured.value + half)
    )


def _check_queue(
    expected: Expectation, loads: Sequence[ServedLoad], at_rate: ExpectedAtRate | None, replicas: int, error: float
) -> Check:
    """Compare the queue time with the longest one at the confirmed load, or at this rate if the SLA is met there."""
    measured = _ratio(loads, lambda load: load.queue_ms, lambda load: load.requests, error)
    longest = expected.queue_ms.predicted(replicas, error)
    limit = _longest(longest, at_rate.queue_ms.high if at_rate and at_rate.meets else 0.0)
    meaning = "requests wait longer than at the highest load that met the SLA"
    return _time_at_most("queue time", "ms", measured, limit, meaning)


def _check_compute(
    expected: Expectation, loads: Sequence[ServedLoad], at_rate: ExpectedAtRate | None, error: float, sizes: Check
) -> Check:
    """Compare the time of an execution with that of the simulator at the same rate."""
    name = "execution time"
    measured = _ratio(loads, lambda load: load.compute_ms, lambda load: load.requests, error)
    if at_rate is None:
        return Check(name, "unknown", "ms", _known(measured), None, _why_unknown(expected, sizes))
    is_longer = measured.low > at_rate.compute_ms.high
    meaning = (
        f"executions take {'longer' if is_longer else 'less time'} than at this rate in the run: the model, the "
        "hardware or its speed differs"
    )
    return _compared(name, "ms", measured, at_rate.compute_ms, meaning)


def _check_time_in_server(
    expected: Expectation, loads: Sequence[ServedLoad], at_rate: ExpectedAtRate | None, replicas: int, error: float
) -> Check:
    """Compare queue and execution time together with the longest ones at the confirmed load, or at this rate."""
    measured = _ratio(loads, lambda load: load.queue_ms + load.compute_ms, lambda load: load.requests, error)
    longest = expected.server_ms.predicted(replicas, error)
    here_ms = at_rate.queue_ms.high + at_rate.compute_ms.high if at_rate and at_rate.meets else 0.0
    limit = _longest(longest, here_ms)
    meaning = "requests take longer in the server than at the highest load that met the SLA"
    return _time_at_most("time in the server", "ms", measured, limit, meaning)


def _check_bounds(expected: Expectation, loads: Sequence[ServedLoad], error: float) -> list[Check]:
    """Compare the latencies that the server reports itself with the bounds of the run."""
    checks = []
    for bound in expected.sla.latencies:
        timing, level = METRICS[bound.metric].timing, METRICS[bound.metric].quantile
        if timing is TTFT and level is not None:
            checks.append(_check_first_response(bound, level, loads, error))
        elif timing is LATENCY and not expected.is_streamed:
            checks.append(_check_latency(expected, bound, level, loads, error))
    return [check for check in checks if check is not None]


def _check_latency(
    expected: Expectation, bound: Constraint, level: float | None, loads: Sequence[ServedLoad], error: float
) -> Check | None:
    """Compare a quantile of the server's own latency with its bound; without one, the mean.

    The quantile of the worst server counts. With several server processes, the bound is for the requests of all of
    them, whose quantile is between those of the processes. So it is missed only if each process of each replica
    misses it.
    """
    within = Range(0.0, bound.bound)
    name = f"{bound.metric.removeprefix('latency-')} in the server"
    values = [own for load in loads if level is not None and (own := load.latencies_ms.get(level))]
    if values:
        # each value is that of the server's last minute, so that neighboring ones are not independent
        largest = [high for _, high in values]
        smallest = largest if expected.server_processes == 1 else [low for low, _ in values]
        measured = Estimate(float(np.median(largest)), min(smallest), max(largest))
        return _time_at_most(
            name,
            "ms",
            measured,
            within,
            f"the server's own latency, which is without the network, misses {formatting.bound(bound)}",
        )
    mean = _ratio(loads, lambda load: load.request_ms, lambda load: load.requests, error)
    meaning = f"the mean latency in the server alone is above {formatting.bound(bound)}"
    return _time_at_most("mean in the server", "ms", mean, within, meaning)


def _check_first_response(bound: Constraint, level: float, loads: Sequence[ServedLoad], error: float) -> Check | None:
    """Compare the share of requests whose first response was later than the bound with the permitted share.

    The server counts them by a few limits. The smallest limit that is not below the bound gives the least share.
    """
    counts = sum_by_key([load.first_responses for load in loads])
    total = counts.get(math.inf, 0.0)
    limit = smallest_limit(bound, counts)
    if not total or limit is None:
        return None
    late = total - counts[limit]
    low, high = share_interval(late, total, error)
    measured = _percent(Estimate(late / total, low, high))
    meaning = f"the first responses miss {formatting.bound(bound)}"
    return _time_at_most("late first responses", "%", measured, Range(0.0, 100 * (1 - level)), meaning)


def smallest_limit(bound: Constraint, limits: Iterable[float]) -> float | None:
    """Return the smallest limit of a histogram that is not below ``bound``; None if there is none."""
    return min((limit for limit in limits if bound.bound <= limit < math.inf), default=None)


# -- one comparison --------------------------------------------------------------------------------------------------


def _compared(name: str, unit: str, measured: Estimate, expected: Range, meaning: str) -> Check:
    """Return the check of a value that should be within a range; ``meaning`` is that of a value outside."""
    if math.isnan(measured.value):
        why = NOT_EXPORTED if math.isnan(measured.low) else "no request was served"
        return Check(name, "unknown", unit, None, expected, why)
    tolerance = ROUNDING * abs(measured.value)
    low, high = expected.low - tolerance, expected.high + tolerance
    if measured.low > high or measured.high < low:
        return Check(name, "differs", unit, measured, expected, meaning)
    if low <= measured.value <= high:
        return Check(name, "fits", unit, measured, expected)
    side = "above" if measured.value > high else "below"
    explanation = f"{name}: the value is {side} the expected ones, but its interval has some of them"
    return Check(name, "undecided", unit, measured, expected, explanation)


def _at_most(name: str, unit: str, measured: Estimate, expected: Range | None, meaning: str) -> Check:
    """Return the check of a value that should not be too high."""
    if expected is None:
        return Check(name, "unknown", unit, _known(measured), None, "the run lacks the times of this model")
    return _compared(name, unit, measured, expected, meaning)


def _time_at_most(name: str, unit: str, measured: Estimate, expected: Range | None, meaning: str) -> Check:
    """Return the check of a time of requests that load and speed change."""
    return replace(_at_most(name, unit, measured, expected, meaning), is_time=True)


def _longest(confirmed: Range | None, at_rate: float) -> Range | None:
    """Return the range up to the longer one of two times; None without the confirmed one."""
    return None if confirmed is None else Range(0.0, max(confirmed.high, at_rate))


def _why_unknown(expected: Expectation, sizes: Check) -> str:
    if expected.why_not_simulated is not None:
        return expected.why_not_simulated.value
    return "requests of another size form other batches" if sizes.status == "differs" else "no request was served"


def _known(measured: Estimate) -> Estimate | None:
    return None if math.isnan(measured.value) else measured


def _percent(share: Estimate) -> Estimate:
    return Estimate(100 * share.value, 100 * share.low, 100 * share.high)
