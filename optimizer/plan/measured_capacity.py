"""The rate of requests that one replica serves, from its closed-loop measurements alone, without a simulator.

A closed loop with n requests in flight measured the throughput of a replica in this state. Under Poisson arrivals the
number in flight varies: it rises with the arrival rate, and falls with the throughput at the current number
(flow-equivalent server: Chandy, Herzog and Woo, "Parametric Analysis of Queuing Networks", IBM J. Res. Dev. 1975).
If all requests in flight share the replica, as with continuous batching, the distribution of the number depends on
the mean of the lengths of requests only (generalized processor sharing: Cohen, Acta Informatica 12, 1979). If more
wait than a replica computes at a time, this is an approximation, as the Erlang C formula is for other services.

The share of arrivals that find n others in flight is the share of time with n in flight (PASTA: Wolff 1982). It is
also the share of the work that is done with n + 1 in flight, because as many transitions go up as down.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
from scipy import optimize, special

from objectives import model_stats
from objectives.arrays import FloatArray
from objectives.intervals import ConfidenceInterval
from objectives.metrics import METRICS, Timing
from objectives.verdict import count_misses, windows_by_model
from optimizer.config.problem import ModelKind
from optimizer.confirmation.verdicts import ConfirmedLoad
from optimizer.confirmation.windows import windows_of
from optimizer.core.errors import BadInputError
from optimizer.core.safe_text import one_line
from optimizer.core.trial import Point
from optimizer.results import summary
from optimizer.results.finished_run import FinishedRun, how_to_finish, resume_command, why_unfinished

MEASURED_KIND = "several models, or a model that streams or keeps state"  # these are planned by measurements
MAX_TEXT_LENGTH = 80  # limit for a value in run.json, which may come from anywhere
PRECISION = 1e-6  # precision of a rate, as a share of the throughput
ASSUMPTIONS = (
    "requests arrive independently of each other and have the lengths of the run",
    "a request that finds as many in flight as were confirmed, or more, misses the bound",
    "more in flight than confirmed do not raise the throughput",
)
STEP_ASSUMPTIONS = (
    "sequences arrive independently of each other and have the lengths of the run",
    "the client sends a step as soon as it has the answer to the last one",
    "a step that is sent with more sequences in flight than confirmed misses the bound",
    "more in flight than confirmed do not raise the throughput",
)
CONCURRENT_ASSUMPTIONS = (
    "the models get requests in the proportion of the run, and have as many in flight as in its measurements",
    *ASSUMPTIONS,
)
RATE_ASSUMPTIONS = ("requests arrive independently of each other, as in the run, and have its lengths",)


@dataclass(frozen=True, eq=False)
class ReplicaCurve:
    """Throughput and requests over a bound of a replica with 1, 2, … in flight, up to the confirmed concurrency.

    Attributes:
        throughput: Requests per second, shape [concurrency].
        over_bound: Share of requests over each bound, which does not fall with the number in flight, shape
            [bounds, concurrency].
        permitted: Largest share of requests that may be over each bound, shape [bounds].
    """

    throughput: FloatArray
    over_bound: FloatArray
    permitted: FloatArray

    @property
    def concurrency(self) -> int:
        """Return the confirmed concurrency."""
        return len(self.throughput)

    @property
    def capacity(self) -> float:
        """Return the throughput at the confirmed concurrency."""
        return float(self.throughput[-1])

    def in_flight(self, rate: float) -> FloatArray:
        """Return the probabilities of 0, 1, … requests in flight at ``rate``, shape [concurrency + 1].

        The last one is that of the confirmed concurrency or more. ``rate`` has to be below the capacity.
        """
        logs = np.concatenate([[0.0], np.cumsum(math.log(rate) - np.log(self.throughput))])
        logs[-1] -= math.log1p(-rate / self.capacity)
        return np.asarray(np.exp(logs - special.logsumexp(logs)), np.float64)

    def mean_in_flight(self, rate: float) -> float:
        """Return the mean number in flight at ``rate``, also with those beyond the confirmed concurrency."""
        shares, load = self.in_flight(rate), rate / self.capacity
        return float(shares @ np.arange(len(shares)) + shares[-1] * load / (1 - load))

    def over_bound_shares(self, rate: float) -> FloatArray:
        """Return the share of requests over each bound at ``rate``, shape [bounds]."""
        shares = self.in_flight(rate)
        return np.asarray(self.over_bound @ shares[:-1] + shares[-1], np.float64)

    def highest_rate(self) -> float:
        """Return the highest rate in requests per second that meets all bounds; 0 if none does."""

        def excess(load: float) -> float:
            return float((self.over_bound_shares(load * self.capacity) - self.permitted).max())

        if excess(PRECISION) > 0:
            return 0.0
        load = optimize.brentq(excess, PRECISION, 1 - PRECISION, xtol=PRECISION)
        return float((load - PRECISION) * self.capacity)

    def faster(self, factor: float) -> ReplicaCurve:
        """Return the curve of a replica with ``factor`` times the throughput."""
        return replace(self, throughput=factor * self.throughput)


@dataclass(frozen=True, slots=True)
class TokenCounts:
    """Numbers of tokens of the prompts or of the outputs of a run."""

    smallest: int
    mean: float
    largest: int

    def __str__(self) -> str:
        if self.smallest == self.largest:
            return f"{self.largest:,} tokens"
        return f"{self.smallest:,} to {self.largest:,} tokens (mean {self.mean:,.4g})"


@dataclass(frozen=True, slots=True)
class LengthSummary:
    """Lengths of the requests of a run: ``tokens`` by ``prompt`` and ``output``, ``sequence`` in steps, as text.

    They are empty if they are unknown or do not apply.
    """

    tokens: dict[str, TokenCounts]
    sequence: str


@dataclass(frozen=True, kw_only=True)
class MeasuredCapacity:
    """The rate that a replica serves by measurements alone, in requests (steps of a stateful model) per second.

    Attributes:
        safe: Rate at the lower end of the confidence interval of the throughput, likely: at its middle, high: at its
            upper end.
        confidence: One-sided confidence of each end.
        confirmed: Confirmed throughput; ``interval`` is its confidence interval on a fresh server.
        concurrency: Confirmed number of requests in flight, those to ``limiting_model`` if there is one; 0 if a
            request rate was confirmed.
        loads: Measured loads of the configuration up to that.
        mean_in_flight: Mean number in flight at the safe rate of a replica with the lower end of the throughput; None
            if a request rate was confirmed or no rate is safe.
        full_share: Share of requests that find ``concurrency`` or more others in flight there.
        lengths: Lengths of the requests of the run.
        assumptions: Assumptions of the plan.
        limiting_model: Of several models that get load, the one whose requests limit the rate; empty for one model.
    """

    safe: float
    likely: float
    high: float
    confidence: float
    confirmed: float
    interval: ConfidenceInterval
    concurrency: int = 0
    loads: int = 1
    mean_in_flight: float | None = None
    full_share: float | None = None
    lengths: LengthSummary
    assumptions: tuple[str, ...]
    limiting_model: str = ""


def derive_capacity(run: FinishedRun) -> MeasuredCapacity:
    """Return the rate of a replica of the recommendation.

    Of several models that get load, each has its part of the rate, and the one with the lowest rate limits the sum.

    Raises BadInputError if it was not confirmed, or if a bound is not on a percentile.
    """
    confirmed = run.outcome.confirmed if run.outcome is not None else None
    if confirmed is None or not _has_throughput(confirmed):
        verify = summary.verify_command(run.folder.path, run.remaining_tests)
        command = resume_command(run) if why_unfinished(run) else verify
        raise BadInputError(
            f"{run.folder.path}: its recommendation has no measurement on fresh servers, which a plan for "
            f"{MEASURED_KIND} needs; {f'`{command}` makes it' if command else how_to_finish(run)}"
        )
    size, interval, load = run.problem.request_batch_size, confirmed.throughput, confirmed.point.load
    if not load.concurrency and run.options.request_times != "poisson":
        raise BadInputError(
            f"{run.folder.path}: its requests did not arrive independently of each other, as "
            "those of users do; give a run of a closed loop, or with --request-distribution poisson"
        )
    capacity = MeasuredCapacity(
        safe=load.request_rate,
        likely=load.request_rate,
        high=load.request_rate,
        confidence=run.problem.confidence,
        confirmed=_middle(confirmed) / size,
        interval=ConfidenceInterval(interval.low / size, interval.high / size),
        lengths=_lengths(run),
        assumptions=RATE_ASSUMPTIONS,
    )
    return _with_closed_loop(capacity, run, confirmed) if load.concurrency else capacity


def _middle(confirmed: ConfirmedLoad) -> float:
    """Return the mean of all windows, limited to the interval: that is one of servers, whose means may differ."""
    return min(max(confirmed.point.throughput_infer_per_sec, confirmed.throughput.low), confirmed.throughput.high)


def _with_closed_loop(capacity: MeasuredCapacity, run: FinishedRun, confirmed: ConfirmedLoad) -> MeasuredCapacity:
    """Return ``capacity`` with the rates that follow from the confirmed number of requests in flight."""
    points, shares = _points(run, confirmed), {run.problem.model: 1.0, **run.concurrent_models}
    parts = {model: share / sum(shares.values()) for model, share in shares.items()}
    curves = {model: _curve(run, points, model, share) for model, share in shares.items()}

    def limit(throughput: float) -> tuple[float, str, ReplicaCurve]:
        """Return the rate of all models with this throughput, the model that limits it, and the curve of that."""
        faster = {
            model: curve.faster(throughput / confirmed.point.throughput_infer_per_sec)
            for model, curve in curves.items()
        }
        rates = {model: curve.highest_rate() / parts[model] for model, curve in faster.items()}
        limiting_model = min(rates, key=lambda model: rates[model])
        return rates[limiting_model], limiting_model, faster[limiting_model]

    safe, limiting_model, slow = limit(confirmed.throughput.low)
    own_rate = safe * parts[limiting_model]
    assumptions = STEP_ASSUMPTIONS if run.problem.kind is ModelKind.STATEFUL else ASSUMPTIONS
    return replace(
        capacity,
        safe=safe,
        likely=limit(_middle(confirmed))[0],
        high=limit(confirmed.throughput.high)[0],
        concurrency=slow.concurrency,
        loads=len(points),
        mean_in_flight=slow.mean_in_flight(own_rate) if safe else None,
        full_share=float(slow.in_flight(own_rate)[-1]) if safe else None,
        assumptions=CONCURRENT_ASSUMPTIONS if run.concurrent_models else assumptions,
        limiting_model=limiting_model if run.concurrent_models else "",
    )


def _has_throughput(confirmed: ConfirmedLoad) -> bool:
    """Return whether the confirmed load has a throughput with a finite confidence interval."""
    interval = confirmed.throughput
    return bool(confirmed.point.throughput_infer_per_sec) and 0 < interval.low <= interval.high < math.inf


def _lengths(run: FinishedRun) -> LengthSummary:
    """Return the lengths in run.json. Raises BadInputError for values that no run can have."""
    problem = run.info["problem"]
    try:
        tokens = {
            name: TokenCounts(int(counts["smallest"]), float(counts["mean"]), int(counts["largest"]))
            for name, counts in (problem.get("tokens") or {}).items()
            if name in ("prompt", "output")
        }
    except (KeyError, TypeError, ValueError, OverflowError, AttributeError) as error:
        raise run.folder.no_record(f"problem.tokens: {error}") from None
    return LengthSummary(tokens, one_line(str(problem.get("sequence_length") or ""), MAX_TEXT_LENGTH))


def _curve(run: FinishedRun, points: Sequence[Point], model: str, share: float) -> ReplicaCurve:
    """Return the curve of the requests to ``model``, which has ``share`` times the load of ``points``.

    Between two loads the throughput is interpolated. Below the lowest one it is proportional to the number in flight,
    and a measurement would show more. The share of requests over a bound is that of the next higher load.
    """
    by_load = {point.load.scaled(share).concurrency: point for point in points}  # a small share may give equal loads
    loads, points = list(by_load), list(by_load.values())
    counts = np.arange(1, loads[-1] + 1)
    size = run.problem.request_batch_size
    rates = [(model_stats.throughput_of(model, point.measurement) or 0.0) / size for point in points]
    throughput = np.minimum(np.interp(counts, [0, *loads], [0.0, *rates]), rates[-1])
    bounds = _percentile_bounds(run)
    shares = np.array([[_over_bound_share(run, point, bound, model) for point in points] for bound in bounds])
    over_bound = np.maximum.accumulate(shares, axis=1)[:, np.searchsorted(loads, counts)]
    return ReplicaCurve(throughput, over_bound, np.array([1 - bound.level for bound in bounds]))


def _points(run: FinishedRun, confirmed: ConfirmedLoad) -> Sequence[Point]:
    """Return the stable points of the confirmed configuration below its load, ascending, then the confirmed point."""
    last = confirmed.point
    below = {
        point.load.concurrency: point
        for point in run.measured.points
        if point.candidate == last.candidate
        and 0 < point.load.concurrency < last.load.concurrency
        and point.measurement.stable
        and point.throughput_infer_per_sec > 0
    }
    return [*(below[load] for load in sorted(below)), last]


class _PercentileBound(NamedTuple):
    """A bound on the percentile ``level`` of a time."""

    bound_ms: float
    level: float
    timing: Timing


def _percentile_bounds(run: FinishedRun) -> list[_PercentileBound]:
    """Return the latency bounds of the run. Raises BadInputError if one is not on a percentile."""
    bounds = []
    for bound in run.problem.sla.latencies:
        level, timing = METRICS[bound.metric].quantile, METRICS[bound.metric].timing
        if level is None or timing is None:
            raise BadInputError(
                f"{run.folder.path}: {bound} permits no share of the requests, which a plan for {MEASURED_KIND} "
                "needs; run `tune` with a bound on a percentile instead, such as --sla-p95 20ms"
            )
        bounds.append(_PercentileBound(bound.bound, level, timing))
    return bounds


def _over_bound_share(run: FinishedRun, point: Point, bound: _PercentileBound, model: str) -> float:
    """Return the share of requests to ``model`` over ``bound``."""
    confirmed = run.measured.confirmation_of(point)
    servers = windows_of(confirmed.point, run.trials) if confirmed else [[point.measurement]]
    return count_misses(windows_by_model(servers).get(model, servers), *bound).share
