"""The checks of metrics of production against the expectations of a run. Pure functions.

Each check compares the confidence interval of a value in production with the range that is expected after the run. It
differs if they do not overlap, fits if the value itself is expected, and is undecided in between. Together all checks
of a judgement raise a false alarm with the error probability of the run, if its assumptions hold.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from typing import Literal, TypeAlias

import numpy as np
from scipy import special

from objectives.confidence import clopper_pearson_bounds, fewest_requests
from objectives.metrics import LATENCY, METRICS, TTFT
from objectives.sla import Constraint, Verdict
from objectives.verdict import needed_requests
from optimizer.results import formatting
from optimizer.watch.expectation import Expectation, ExpectedAtRate, Range, WhyNotSimulated
from optimizer.watch.server_metrics import ServedLoad, sum_by_key

Status: TypeAlias = Literal["fits", "near", "undecided", "differs", "unknown"]
CHECKS_WITHOUT_BOUNDS = 7  # each latency bound is one check more; all share the error probability
SLOW_SHARE_WITHOUT_SLA = 0.05  # permitted share of slow requests of an SLA without a bound on a percentile
ROUNDING = 1e-9  # relative: counters are read as floating-point numbers
MAX_STEADY_RATIO = 1.05  # mean rate over requests to that over time; a load above it has several rates
MAX_STALL_FACTOR = 3  # multiple of the longest latency; a server that serves nothing for longer is faulty
NOT_EXPORTED = "the server does not export it because of --metrics-config=counter_latencies=false"


class CheckKind(Enum):
    """The value that a check compares: its name, which ``watch_report.check_name`` completes, and its unit."""

    FAILED_REQUESTS = "failed requests", "%"
    STALL = "time without success", "ms"
    RATE = "requests/s per {replica}", "/s"
    REQUEST_SIZE = "samples per request", ""
    BATCH_SIZE = "samples per execution", ""
    QUEUE_TIME = "queue time", "ms"
    EXECUTION_TIME = "execution time", "ms"
    TIME_IN_SERVER = "time in the server", "ms"
    LATENCY_QUANTILE = "{metric} in the server", "ms"
    MEAN_LATENCY = "mean in the server", "ms"
    LATE_FIRST_RESPONSES = "late first responses", "%"

    def __init__(self, title: str, unit: str) -> None:
        self.title, self.unit = title, unit


# times of requests that both the load and the speed of the server change
REQUEST_TIMES = {
    CheckKind.QUEUE_TIME,
    CheckKind.TIME_IN_SERVER,
    CheckKind.LATENCY_QUANTILE,
    CheckKind.MEAN_LATENCY,
    CheckKind.LATE_FIRST_RESPONSES,
}


@dataclass(frozen=True, slots=True)
class ProductionValue:
    """A value in production, with a confidence interval from the differences between the observed intervals."""

    value: float
    low: float
    high: float

    def times(self, factor: float) -> ProductionValue:
        """Return the value in a unit that is smaller by ``factor``."""
        return ProductionValue(factor * self.value, factor * self.low, factor * self.high)


Observed: TypeAlias = ProductionValue | str  # a value, or why there is none


@dataclass(frozen=True, slots=True)
class Check:
    """One check.

    Attributes:
        kind: The value that is compared.
        status: ``differs`` if the recommendation no longer fits, ``near`` if the rate is close to the capacity,
            ``unknown`` if nothing can be said. It is ``undecided`` if the value is outside of the expected range, but
            its confidence interval overlaps with the range.
        measured: The value in production; None if there is none.
        expected_range: The values that are expected after the run; None if they are unknown.
        explanation: The meaning of a difference, or why nothing is known; empty for ``fits``.
        bound: The bound of the SLA that a latency is compared with; None for other kinds.
    """

    kind: CheckKind
    status: Status
    measured: ProductionValue | None = None
    expected_range: Range | None = None
    explanation: str = ""
    bound: Constraint | None = None


@dataclass(frozen=True)
class Judgement:
    """The judgement on the metrics of production in a number of intervals of observation, at least two.

    ``loads`` has the load of each observed interval, summed over the ``servers``, which have a page of metrics each.
    Their number is a multiple of the server processes of the run. ``lost_intervals`` counts the intervals in which a
    server was restarted or could not be read.
    """

    expectation: Expectation
    loads: Sequence[ServedLoad]
    servers: int
    lost_intervals: int = 0

    @property
    def replicas(self) -> int:
        """The number of replicas."""
        return self.servers // self.expectation.server_processes

    @property
    def requests(self) -> float:
        """The requests that were served."""
        return sum(load.requests for load in self.loads)

    @property
    def seconds(self) -> float:
        """The observed time."""
        return sum(load.seconds for load in self.loads)

    def check(self, kind: CheckKind) -> Check | None:
        """Return the first check of this kind; None if there is none."""
        return next((check for check in self.checks if check.kind is kind), None)

    def differs(self, *kinds: CheckKind) -> bool:
        """Return whether a check of one of these kinds differs."""
        return any(check.kind in kinds for check in self.differing)

    @property
    def differing(self) -> tuple[Check, ...]:
        """The checks that found that the recommendation no longer fits."""
        return tuple(check for check in self.checks if check.status == "differs")

    @property
    def undecided(self) -> tuple[Check, ...]:
        """The checks whose value is outside of the expected range, but its confidence interval overlaps with it."""
        return tuple(check for check in self.checks if check.status == "undecided")

    @property
    def unchecked_bounds(self) -> tuple[Constraint, ...]:
        """The bounds on times of requests that the metrics of the servers do not show."""
        if not self.requests:
            return ()
        return tuple(bound for bound in self.expectation.sla.latencies if not self._is_exported(bound))

    def _is_exported(self, bound: Constraint) -> bool:
        metric = METRICS[bound.metric]
        if metric.timing is LATENCY and not self.expectation.is_streamed:
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

    @functools.cached_property
    def fewest_requests(self) -> int:
        """The number of requests below which a bound that all of them meet could still be missed."""
        error = 1 - self.expectation.run.problem.confidence
        needed = max((needed_requests(bound, error) for bound in self.expectation.sla), default=0)
        return needed or fewest_requests(SLOW_SHARE_WITHOUT_SLA, error)

    @functools.cached_property
    def error(self) -> float:
        """The error probability of each end of an interval: that of the run, divided by the number of checks."""
        confidence = self.expectation.run.problem.confidence
        return (1 - confidence) / (CHECKS_WITHOUT_BOUNDS + len(self.expectation.sla.latencies))

    @functools.cached_property
    def failures(self) -> dict[str, float]:
        """The failed requests by reason."""
        return sum_by_key([load.failures for load in self.loads])

    @functools.cached_property
    def at_rate(self) -> ExpectedAtRate | None:
        """The expectation for the rates of the loads; None for requests of another size or without a simulator.

        If the rate changes, most requests come at a higher rate than the mean over time. The ranges then include
        those at the mean over requests. Intervals without requests do not count.
        """
        loads = [load for load in self.loads if load.requests]
        if not loads or self.request_size.status == "differs":
            return None
        requests, seconds = sum(load.requests for load in loads), sum(load.seconds for load in loads)
        over_time = requests / seconds / self.replicas
        over_requests = sum(load.requests**2 / load.seconds for load in loads) / requests / self.replicas
        rates = [over_time, over_requests] if over_requests > MAX_STEADY_RATIO * over_time else [over_time]
        expected = [at_rate for rate in rates if (at_rate := self.expectation.at(rate, self.replicas, self.error))]
        return functools.reduce(ExpectedAtRate.joined, expected) if expected else None

    @functools.cached_property
    def checks(self) -> tuple[Check, ...]:
        """All checks, in the order of the output; those of requests only if there were any."""
        if not self.loads:
            return ()
        checks = (*self._check_stall(), self._check_rate())
        if not any(load.requests or load.failures for load in self.loads):
            return checks
        return (
            self._check_failures(),
            *checks,
            self.request_size,
            self._check_batch_size(),
            self._check_queue_time(),
            self._check_execution_time(),
            self._check_time_in_server(),
            *self._check_bounds(),
        )

    def _ratio(
        self, numerator: Callable[[ServedLoad], float], denominator: Callable[[ServedLoad], float]
    ) -> Observed:
        """Return the ratio of two sums over the loads; each end of its confidence interval is wrong with ``error``.

        The loads are batch means: requests of one interval influence each other, those of different ones hardly do.
        The standard error is that of a ratio estimator (Cochran 1977, "Sampling Techniques", section 6.4), the
        confidence interval Student's t, which is infinite for one load. Loads whose denominator is zero say nothing
        about the ratio. There is none without other loads, or if a server does not export the numerator.
        """
        loads = [load for load in self.loads if denominator(load) > 0]
        if not loads:
            return "no request was served"
        above = np.array([numerator(load) for load in loads])
        below = np.array([denominator(load) for load in loads])
        value = float(above.sum() / below.sum())
        count = len(loads)
        if math.isnan(value):
            return NOT_EXPORTED
        if count < 2:
            return ProductionValue(value, -math.inf, math.inf)
        squares = float(((above - value * below) ** 2).sum()) * count / (count - 1)
        half = -float(special.stdtrit(count - 1, self.error)) * math.sqrt(squares) / float(below.sum())
        return ProductionValue(value, value - half, value + half)

    def _per_request(self, value: Callable[[ServedLoad], float]) -> Observed:
        return self._ratio(value, lambda load: load.requests)

    def _check_failures(self) -> Check:
        """Compare the share of failed requests with its upper bound on the run, and with the bound on the error rate.

        The larger one of both counts. Without a bound on the error rate no request of the run failed.
        """
        served, failed = sum(load.requests for load in self.loads), sum(self.failures.values())
        low, high = share_interval(failed, served + failed, self.error)
        run_failed = self.expectation.failed_requests
        run_requests = self.expectation.served_requests + run_failed
        run_share = share_interval(float(run_failed), float(run_requests), self.error)[1]
        permitted_share = min(self.expectation.sla.permitted_failures, default=0.0)
        allowed = Range(0.0, 100 * max(run_share, permitted_share))
        measured = ProductionValue(failed / (served + failed), low, high)
        reasons = ", ".join(f"{count:,.0f} {reason}" for reason, count in self.failures.items())
        number = f"{run_failed:,}" if run_failed else "none"
        meaning = f"requests fail ({reasons}), and {number} of {run_requests:,} did in the run"
        return _compare(CheckKind.FAILED_REQUESTS, measured.times(100), allowed, meaning)

    def _check_stall(self) -> list[Check]:
        """Compare the longest time without a success while requests waited with the longest latency of the run.

        The result is empty if each server served a request in each interval, or no request waited.
        """
        stalled_ms = 1e3 * max(load.stalled_seconds for load in self.loads)
        if not stalled_ms:
            return []
        longest_ms = self.expectation.longest_latency_ms
        allowed = None if longest_ms is None else Range(0.0, MAX_STALL_FACTOR * longest_ms)
        meaning = f"a server served no request for {stalled_ms / 1e3:,.3g} s, although requests waited"
        return [_compare(CheckKind.STALL, ProductionValue(stalled_ms, stalled_ms, stalled_ms), allowed, meaning)]

    def _check_rate(self) -> Check:
        """Compare the requests per second and replica with the confirmed throughput on further replicas."""
        rate = self._ratio(lambda load: load.requests / self.replicas, lambda load: load.seconds)
        replica = self.expectation.replica_name
        confirmed = self.expectation.confirmed_rate.predicted(self.replicas, self.error)
        if confirmed is None:
            return _unknown(CheckKind.RATE, rate, "the run has no throughput")
        allowed = Range(0.0, confirmed.high)
        meaning = f"the rate is above the confirmed throughput of a {replica}"
        check = _compare(CheckKind.RATE, rate, allowed, meaning)
        safe_rate, measured = self.expectation.safe_rate, check.measured
        if check.status == "fits" and safe_rate is not None and measured and measured.value > safe_rate:
            explanation = (
                f"near the capacity: if requests arrive independently, {formatting.bounds(self.expectation.sla)} is "
                f"safe up to {formatting.number(safe_rate)} requests/s per {replica}"
            )
            return replace(check, status="near", explanation=explanation)
        return check

    @functools.cached_property
    def request_size(self) -> Check:
        """The check of the mean request size: that of the run, within the uncertainty of its throughput.

        A request of another size changes the throughput in requests per second at most in proportion. A change below
        the confidence interval of the throughput has no effect that the run could show. This range does not allow for
        the random sizes of a mix, of which few requests are often outside. So the check is never undecided.
        """
        run_size = self.expectation.request_samples
        throughput = self.expectation.confirmed_rate.interval(1 - self.expectation.run.problem.confidence)
        factor = math.sqrt(throughput.high / throughput.low) if throughput else 1.0
        allowed = Range(run_size / factor, run_size * factor)

        def meaning(size: ProductionValue) -> str:
            return f"requests have {formatting.number(size.value)} samples, and those of the run had {run_size:g}"

        check = _compare(CheckKind.REQUEST_SIZE, self._per_request(lambda load: load.samples), allowed, meaning)
        return replace(check, status="fits", explanation="") if check.status == "undecided" else check

    def _check_batch_size(self) -> Check:
        """Compare the samples per execution with those of the simulator at the same rate."""
        measured = self._ratio(lambda load: load.samples, lambda load: load.executions)
        if self.at_rate is None:
            return self._not_simulated(CheckKind.BATCH_SIZE, measured)
        expected, largest_batch = self.at_rate.mean_batch_size, self.expectation.largest_batch

        def meaning(batch_size: ProductionValue) -> str:
            if batch_size.high < expected.low:
                return "batches are smaller than at this rate in the run: is the recommended config.pbtxt deployed?"
            if batch_size.low > largest_batch * (1 + ROUNDING):
                larger_than = f"max_batch_size {largest_batch:g} of the recommendation"
                return f"batches are larger than {larger_than}: the server has another config.pbtxt"
            return (
                "batches are larger than at this rate in the run: requests arrive in bursts, the server is slower, "
                "or it has another config.pbtxt"
            )

        return _compare(CheckKind.BATCH_SIZE, self._widen(measured), expected, meaning)

    def _widen(self, batch_size: Observed) -> Observed:
        """Return ``batch_size`` with at least the uncertainty of so few executions.

        The variance of a size between ``smallest`` and ``largest`` with a given mean is at most the product of its
        distances from both (Bhatia and Davis 2000).
        """
        if isinstance(batch_size, str):
            return batch_size
        executions = sum(load.executions for load in self.loads)
        value, largest = batch_size.value, self.expectation.largest_batch
        smallest = min(self.expectation.request_samples, largest)
        max_variance = max(0.0, (value - smallest) * (largest - value))
        half = -float(special.ndtri(self.error)) * math.sqrt(max_variance / executions)
        return ProductionValue(value, min(batch_size.low, value - half), max(batch_size.high, value + half))

    def _check_queue_time(self) -> Check:
        """Compare the queue time with the longest one at the confirmed load, or at this rate if it meets the SLA."""
        measured = self._per_request(lambda load: load.queue_ms)
        confirmed = self.expectation.queue_ms.predicted(self.replicas, self.error)
        at_rate_ms = self.at_rate.queue_ms.high if self.at_rate and self.at_rate.meets_sla else 0.0
        meaning = "requests wait longer than at the highest load that met the SLA"
        return _compare(CheckKind.QUEUE_TIME, measured, _up_to_longest(confirmed, at_rate_ms), meaning)

    def _check_execution_time(self) -> Check:
        """Compare the time of an execution with that of the simulator at the same rate."""
        measured = self._per_request(lambda load: load.compute_ms)
        if self.at_rate is None:
            return self._not_simulated(CheckKind.EXECUTION_TIME, measured)
        expected = self.at_rate.compute_ms

        def meaning(time_ms: ProductionValue) -> str:
            differ = "longer" if time_ms.low > expected.high else "less time"
            return (
                f"executions take {differ} than at this rate in the run: the model, the hardware or its speed differs"
            )

        return _compare(CheckKind.EXECUTION_TIME, measured, expected, meaning)

    def _check_time_in_server(self) -> Check:
        """Compare queue and execution time together with the longest ones at the confirmed load, or at this rate."""
        measured = self._per_request(lambda load: load.queue_ms + load.compute_ms)
        confirmed = self.expectation.time_in_server_ms.predicted(self.replicas, self.error)
        at_rate_ms = 0.0
        if self.at_rate and self.at_rate.meets_sla:
            at_rate_ms = self.at_rate.queue_ms.high + self.at_rate.compute_ms.high
        meaning = "requests take longer in the server than at the highest load that met the SLA"
        return _compare(CheckKind.TIME_IN_SERVER, measured, _up_to_longest(confirmed, at_rate_ms), meaning)

    def _not_simulated(self, kind: CheckKind, measured: Observed) -> Check:
        """Return the check of a value that only the simulator could predict."""
        if isinstance(self.expectation.simulation, WhyNotSimulated):
            reason = self.expectation.simulation.value
        elif self.request_size.status == "differs":
            reason = "requests of another size form other batches"
        else:
            reason = "no request was served"
        return _unknown(kind, measured, reason)

    def _check_bounds(self) -> list[Check]:
        """Compare the latencies that the server reports itself with the bounds of the run."""
        checks = []
        for bound in self.expectation.sla.latencies:
            timing, level = METRICS[bound.metric].timing, METRICS[bound.metric].quantile
            check = None
            if timing is TTFT and level is not None:
                check = self._check_first_responses(bound, level)
            elif timing is LATENCY and not self.expectation.is_streamed:
                check = self._check_latency(bound, level)
            if check is not None:
                checks.append(replace(check, bound=bound))
        return checks

    def _check_latency(self, bound: Constraint, level: float | None) -> Check:
        """Compare a quantile of the server's own latency with its bound; without one, the mean.

        The quantile of the worst server counts. With several server processes, the bound is for the requests of all
        processes, whose quantile is between those of the processes. So it is missed only if each process of each
        replica misses it.
        """
        allowed = Range(0.0, bound.bound)
        quantiles = [load.latencies_ms[level] for load in self.loads if level and level in load.latencies_ms]
        if not quantiles:
            mean = self._per_request(lambda load: load.request_ms)
            meaning = f"the mean latency in the server alone is above {formatting.bound(bound)}"
            return _compare(CheckKind.MEAN_LATENCY, mean, allowed, meaning)
        # each value is that of the server's last minute, so that neighboring ones are not independent
        largest = [high for _, high in quantiles]
        smallest = largest if self.expectation.server_processes == 1 else [low for low, _ in quantiles]
        measured = ProductionValue(float(np.median(largest)), min(smallest), max(largest))
        meaning = f"the server's own latency, which is without the network, misses {formatting.bound(bound)}"
        return _compare(CheckKind.LATENCY_QUANTILE, measured, allowed, meaning)

    def _check_first_responses(self, bound: Constraint, level: float) -> Check | None:
        """Compare the share of requests whose first response was later than the bound with the permitted share.

        The server counts them by a few limits. The smallest limit that is not below the bound gives the least share.
        """
        counts = sum_by_key([load.first_responses for load in self.loads])
        total = counts.get(math.inf, 0.0)
        limit = smallest_limit(bound, counts)
        if not total or limit is None:
            return None
        late = total - counts[limit]
        low, high = share_interval(late, total, self.error)
        measured = ProductionValue(late / total, low, high).times(100)
        allowed = Range(0.0, 100 * (1 - level))
        meaning = f"the first responses miss {formatting.bound(bound)}"
        return _compare(CheckKind.LATE_FIRST_RESPONSES, measured, allowed, meaning)


def smallest_limit(bound: Constraint, limits: Iterable[float]) -> float | None:
    """Return the smallest limit of a histogram that is not below ``bound``; None if there is none."""
    return min((limit for limit in limits if bound.bound <= limit < math.inf), default=None)


def share_interval(hits: float, count: float, error: float) -> tuple[float, float]:
    """Return the exact binomial bounds of a share of independent requests; each is wrong with ``error``."""
    return clopper_pearson_bounds(hits / count, count, math.inf, error) if count > 0 else (0.0, 1.0)


def _compare(
    kind: CheckKind,
    measured: Observed,
    expected_range: Range | None,
    meaning: str | Callable[[ProductionValue], str],
) -> Check:
    """Return the check of a value that should be within a range; ``meaning`` is that of a value outside."""
    if expected_range is None:
        return _unknown(kind, measured, "the run lacks the times of this model")
    if isinstance(measured, str):
        return Check(kind, "unknown", None, expected_range, measured)
    tolerance = ROUNDING * abs(measured.value)
    low, high = expected_range.low - tolerance, expected_range.high + tolerance
    if measured.low > high or measured.high < low:
        explanation = meaning if isinstance(meaning, str) else meaning(measured)
        return Check(kind, "differs", measured, expected_range, explanation)
    if low <= measured.value <= high:
        return Check(kind, "fits", measured, expected_range)
    side = "above" if measured.value > high else "below"
    explanation = f"the value is {side} the expected range, but its confidence interval overlaps with it"
    return Check(kind, "undecided", measured, expected_range, explanation)


def _up_to_longest(confirmed: Range | None, at_rate_ms: float) -> Range | None:
    """Return the range up to the longer one of two times; None without the confirmed one."""
    return None if confirmed is None else Range(0.0, max(confirmed.high, at_rate_ms))


def _unknown(kind: CheckKind, measured: Observed, reason: str) -> Check:
    """Return the check of a value for which the run gives no range."""
    return Check(kind, "unknown", None if isinstance(measured, str) else measured, None, reason)
