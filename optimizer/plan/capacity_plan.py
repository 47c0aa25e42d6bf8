"""Answers a capacity question: replicas for a rate, rate of replicas, or the tightest bound; with cost and power.

``plan_by_simulation`` simulates the replicas. ``plan_by_measurements`` is for models that stream or keep state, which
the simulator does not describe.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from objectives.metrics import METRICS
from objectives.sla import Sla, Verdict
from objectives.units import parse_rate
from optimizer.core.errors import BadInputError
from optimizer.plan.autoscaler import Autoscaler, AutoscalerTest, day_rates, recorded_rates, simulate_autoscaler
from optimizer.plan.evidence import (
    EXPECTED,
    SAFE,
    ForecastErrors,
    PlannedConfiguration,
    Slowdown,
    choose_configurations,
)
from optimizer.plan.fleet import (
    MAX_REPLICAS,
    Cost,
    Fleet,
    Power,
    RateEstimate,
    ReplicaCount,
    compute_costs,
    compute_power,
    estimate_rate,
    estimate_replicas,
    too_many_replicas,
)
from optimizer.plan.measured_capacity import MEASURED_KIND, MeasuredCapacity, derive_capacity
from optimizer.plan.replica import fit_replica
from optimizer.plan.traffic import CONSTANT_DAY, HOURS, Balancer, Day, PoissonTraffic, RecordedTraffic, Traffic
from optimizer.results import formatting
from optimizer.results.finished_run import FinishedRun

HEADROOM = (0.25, 0.5, 0.75, 0.9, 1.0, 1.1, 1.25, 1.5, 2.0)  # shares of the planned rate
BURST = 2.0  # factor on the planned rate
FURTHER_SECONDS = 600.0  # further measuring time whose benefit is computed


@dataclass(frozen=True, slots=True)
class LoadForecast:
    """The expected behaviour of the fleet at ``rate`` requests per second.

    ``meets`` says whether the bounds are expected to be met, ``meets_safely`` whether also at the SAFE quantile of
    the slowness. ``utilization`` is the share of the capacity. ``busy`` is the share of time in which instances
    compute. It is higher with dynamic batching, because small batches take nearly as long as full ones. ``refused``
    is the share of requests that a limited queue refuses; None if that is not simulated.
    """

    rate: float
    latency_ms: float
    utilization: float
    busy: float
    meets: bool
    meets_safely: bool
    refused: float | None = None


@dataclass(frozen=True, slots=True)
class FurtherMeasuring:
    """The expected answer after FURTHER_SECONDS of measuring, which are enough for ``deployments`` more.

    ``count`` is set if the question asks for replicas, ``sustainable_rate`` if it asks for a rate. ``saved_per_hour``
    is in the currency of the given price; None without a price.
    """

    deployments: int
    count: ReplicaCount | None = None
    sustainable_rate: RateEstimate | None = None
    saved_per_hour: float | None = None


@dataclass(frozen=True)
class FleetPlan:
    """The answer for one configuration: ``replicas`` serve ``rate`` requests per second, the day's peak.

    Attributes:
        configuration: The configuration of a replica, with the evidence for its speed.
        replicas: 0 if no number meets the bounds.
        rate: 0 if the replicas meet the bounds at no rate.
        count: Set if the question asks for replicas.
        sustainable_rate: Set if the question asks for a rate or a bound; 0 if no rate meets the bounds.
        at_rate: The load at ``rate``.
        tightest_bound_ms: The lowest bound on the judged latency that the replicas meet safely; infinite if they are
            overloaded.
        headroom: The loads at the HEADROOM shares of ``rate``.
        one_lost: The load with a replica less.
        n_plus_1_replicas: The replicas of which any one may fail.
        burst: The load at BURST times the rate.
        burst_replicas: The replicas that this needs; None if no number is enough.
        replicas_by_hour: The replicas in each hour of a day.
        cost: None without a price, or if nothing was planned.
        power: None if nothing was planned.
        forecast_errors: The errors of the simulator on the run.
        further_measuring: The benefit of further measurements.
        autoscaler_test: The test of the autoscaler.
        unloaded_latency_ms: The latency without load; 0 if it was not computed.
        measured_capacity: Set if the plan follows from measurements alone.
    """

    configuration: PlannedConfiguration
    replicas: int
    rate: float
    count: ReplicaCount | None = None
    sustainable_rate: RateEstimate | None = None
    at_rate: LoadForecast | None = None
    tightest_bound_ms: float | None = None
    headroom: tuple[LoadForecast, ...] = ()
    one_lost: LoadForecast | None = None
    n_plus_1_replicas: int | None = None
    burst: LoadForecast | None = None
    burst_replicas: int | None = None
    replicas_by_hour: tuple[int, ...] = ()
    cost: Cost | None = None
    power: Power | None = None
    forecast_errors: ForecastErrors | None = None
    further_measuring: FurtherMeasuring | None = None
    autoscaler_test: AutoscalerTest | None = None
    unloaded_latency_ms: float = 0.0
    measured_capacity: MeasuredCapacity | None = None

    @property
    def feasible(self) -> bool:
        """Return True if some replicas serve some rate within the bounds, or a given rate within any bound."""
        return self.replicas > 0 and self.rate > 0 and not self.is_overloaded

    @property
    def is_overloaded(self) -> bool:
        """Return True if the replicas cannot safely serve the given rate within any bound on the latency."""
        return self.tightest_bound_ms is not None and math.isinf(self.tightest_bound_ms)


@dataclass(frozen=True)
class CapacityQuestion:
    """A question about capacity; None means that an option was not given.

    ``rate`` is the text of the option, the mean over ``day``. ``devices`` counts GPUs, or machines without GPUs.
    ``max_cost`` is per hour. ``hour_costs`` are prices of a device by part of the hardware's name; an empty name
    stands for all. ``autoscaler`` is tested on the traffic.
    """

    traffic: Traffic
    balancer: Balancer
    day: Day = CONSTANT_DAY
    rate: str | None = None
    replicas: int | None = None
    devices: int | None = None
    max_cost: float | None = None
    hour_costs: Mapping[str, float] = field(default_factory=dict)
    sla: Sla = field(default_factory=Sla)
    autoscaler: Autoscaler | None = None

    @property
    def limits_replicas(self) -> bool:
        """Whether it gives the number of replicas, or what can be spent on them."""
        return (self.replicas, self.devices, self.max_cost) != (None, None, None)


@dataclass(frozen=True)
class CapacityPlan:
    """The answers to ``question``, one for each hardware."""

    question: CapacityQuestion
    answers: tuple[FleetPlan, ...]

    @property
    def feasible(self) -> bool:
        """Return True if the question has an answer on at least one kind of hardware."""
        return any(answer.feasible for answer in self.answers)

    @property
    def verdict(self) -> Verdict:
        """Return FAIL if the question has no answer, UNDECIDED if an answer is from an UNDECIDED run, else PASS."""
        verdicts = {answer.configuration.verdict for answer in self.answers if answer.feasible}
        if not verdicts:
            return Verdict.FAIL
        return Verdict.UNDECIDED if Verdict.UNDECIDED in verdicts else Verdict.PASS


def plan_by_simulation(question: CapacityQuestion, runs: Sequence[FinishedRun]) -> CapacityPlan:
    """Return the best answer for each hardware of ``runs``. Raises BadInputError if the runs do not fit together."""
    answers = [
        max((_Planner(question, alternative).answer() for alternative in alternatives), key=_merit)
        for alternatives in choose_configurations(runs, question.sla)
    ]
    return CapacityPlan(question, tuple(answers))


def _merit(answer: FleetPlan) -> tuple[bool, int, float, float]:
    """Return a sort key: feasible, then fewest replicas, highest rate, tightest bound."""
    tightest_ms = math.inf if answer.tightest_bound_ms is None else answer.tightest_bound_ms
    return answer.feasible, -answer.replicas, answer.rate, -tightest_ms


class _Planner:
    """Answers ``question`` for one configuration.

    Raises BadInputError if its trials do not determine service times.
    """

    def __init__(self, question: CapacityQuestion, configuration: PlannedConfiguration) -> None:
        _check_bounds_measured(configuration)
        try:
            replica = fit_replica(configuration.evidence, configuration.sla)
        except ValueError as error:
            raise BadInputError(
                f"{configuration.runs[0]}: no measurement of its trials shows how long batches take ({error})"
            ) from None
        self._question, self._configuration = question, configuration
        self._fleet = Fleet(replica, question.traffic, question.balancer)
        self._hour_cost = hour_cost_of(question.hour_costs, configuration.hardware)
        self._expected = replica.slowness_estimate.quantile(EXPECTED)
        self._safe = replica.slowness_estimate.scenarios(SAFE)

    def answer(self) -> FleetPlan:
        """Return the replicas for the given rate, the rate of the given replicas, or the bound for both."""
        replicas = requested_replicas(self._question, self._configuration, self._hour_cost)
        rate = requested_rate(self._question, self._fleet.replica.request_batch_size)
        if replicas is None:
            assert rate is not None, "the question has a rate or replicas"
            return self._replicas_for(rate)
        if replicas == 0:
            return FleetPlan(self._configuration, 0, rate or 0.0)
        rates, peak_factor = estimate_rate(self._fleet, replicas), self._question.day.peak_factor
        if rate is not None:
            return self._plan(replicas, rate * peak_factor, rate, sustainable_rate=rates)
        if not rates.safe:
            return FleetPlan(
                self._configuration,
                replicas,
                0.0,
                sustainable_rate=rates,
                unloaded_latency_ms=self._unloaded_latency_ms(),
            )
        return self._plan(replicas, rates.safe, rates.safe / peak_factor, sustainable_rate=rates)

    def _replicas_for(self, mean_rate: float) -> FleetPlan:
        day = self._question.day
        peak = mean_rate * day.peak_factor
        count = estimate_replicas(self._fleet, peak)
        if count is None:
            return FleetPlan(self._configuration, 0, peak, unloaded_latency_ms=self._unloaded_latency_ms())
        by_hour: tuple[int, ...] = ()
        if day.peak_factor > 1:
            rates = (mean_rate * day.hourly_peak(hour) for hour in range(HOURS))
            by_hour = tuple(self._replicas_in_hour(hour_rate, count.safe) for hour_rate in rates)
        return self._plan(count.safe, peak, mean_rate, count=count, by_hour=by_hour)

    def _plan(
        self,
        replicas: int,
        rate: float,
        mean_rate: float,
        *,
        count: ReplicaCount | None = None,
        sustainable_rate: RateEstimate | None = None,
        by_hour: tuple[int, ...] = (),
    ) -> FleetPlan:
        configuration, hour_cost = self._configuration, self._hour_cost
        tightest_ms = max(self._latency_ms(rate, replicas, slowdown) for slowdown in self._safe)
        is_served = math.isfinite(tightest_ms)
        inferences = mean_rate * self._fleet.replica.request_batch_size if is_served else None
        cost = None
        if hour_cost is not None:
            cost = compute_costs(hour_cost * configuration.devices, replicas, inferences, by_hour)
        return FleetPlan(
            configuration,
            replicas,
            rate,
            count=count,
            sustainable_rate=sustainable_rate,
            at_rate=self._forecast(rate, replicas),
            tightest_bound_ms=tightest_ms,
            headroom=tuple(self._forecast(share * rate, replicas) for share in HEADROOM),
            one_lost=self._forecast(rate, replicas - 1) if replicas > 1 else None,
            n_plus_1_replicas=None if count is None else count.safe + 1,
            burst=self._forecast(BURST * rate, replicas),
            burst_replicas=self._burst_replicas(BURST * rate),
            replicas_by_hour=by_hour,
            cost=cost,
            power=compute_power(configuration.watts, replicas, inferences),
            forecast_errors=self._fleet.replica.slowness_estimate.forecast,
            further_measuring=self._further_measuring(rate, replicas, count, sustainable_rate),
            autoscaler_test=self._test_autoscaler(mean_rate),
        )

    def _burst_replicas(self, rate: float) -> int | None:
        """Return the replicas for ``rate``; None if no number up to MAX_REPLICAS is enough."""
        try:
            return self._fleet.fewest_replicas_at_quantile(rate, SAFE)
        except BadInputError:
            return None

    def _further_measuring(
        self, rate: float, replicas: int, count: ReplicaCount | None, sustainable_rate: RateEstimate | None
    ) -> FurtherMeasuring | None:
        """Return the benefit of further measurements; None if the question asks for a bound."""
        deployments = int(FURTHER_SECONDS / self._configuration.server_seconds)
        estimate = self._fleet.replica.slowness_estimate.with_more(deployments)
        fleet = replace(self._fleet, replica=replace(self._fleet.replica, slowness_estimate=estimate))
        if count is not None:
            fewer = estimate_replicas(fleet, rate) or count
            saved = count.safe - fewer.safe
            cost = None if self._hour_cost is None else saved * self._hour_cost * self._configuration.devices
            return FurtherMeasuring(deployments, fewer, saved_per_hour=cost)
        if sustainable_rate is None or self._question.rate is not None:
            return None
        return FurtherMeasuring(deployments, sustainable_rate=estimate_rate(fleet, replicas))

    def _test_autoscaler(self, mean_rate: float) -> AutoscalerTest | None:
        """Return the test on the recording or the day of the question; None if it has no autoscaler."""
        question, configuration, fleet = self._question, self._configuration, self._fleet
        if question.autoscaler is None:
            return None
        if isinstance(fleet.traffic, RecordedTraffic):
            rates, repeats = recorded_rates(fleet.traffic, mean_rate), False
            fleet = replace(fleet, traffic=PoissonTraffic())  # the rates of the steps have the peaks of the recording
        else:
            rates, repeats = day_rates(mean_rate, question.day), True
        return simulate_autoscaler(
            question.autoscaler,
            fleet,
            self._expected,
            rates,
            configuration.point.load,
            configuration.deploy_seconds,
            repeats=repeats,
        )

    def _forecast(self, rate: float, replicas: int) -> LoadForecast:
        fleet = self._fleet
        simulated = fleet.simulate(rate, replicas, self._expected)
        latency_ms = fleet.replica.latency_ms(simulated, fleet.replica.sla.judged_latency)
        utilization = rate / (replicas * fleet.replica.capacity(self._expected))
        meets = fleet.accepts(simulated, self._expected)
        meets_safely = meets and fleet.meets_at_quantile(rate, replicas, SAFE)
        refused = simulated.rejected_share if fleet.replica.refusals else None
        busy = fleet.busy_share(simulated, rate, replicas)
        return LoadForecast(rate, latency_ms, utilization, busy, meets, meets_safely, refused)

    def _latency_ms(self, rate: float, replicas: int, slowdown: Slowdown) -> float:
        simulated = self._fleet.simulate(rate, replicas, slowdown)
        if simulated.overloaded and self._fleet.traffic.is_steady:
            return math.inf
        replica = self._fleet.replica
        return replica.latency_ms(simulated, replica.sla.judged_latency, slowdown.latency_factor)

    def _unloaded_latency_ms(self) -> float:
        return self._latency_ms(0.05 * self._fleet.replica.capacity(self._expected), 1, self._expected)

    def _replicas_in_hour(self, rate: float, max_replicas: int) -> int:
        if rate <= 0:
            return 1
        count = self._fleet.fewest_replicas_at_quantile(rate, SAFE)
        return max_replicas if count is None else min(count, max_replicas)


def _check_bounds_measured(configuration: PlannedConfiguration) -> None:
    """Raise BadInputError if no measurement has the metric of a latency bound."""
    for bound in configuration.sla:
        metric = METRICS[bound.metric]
        if all(metric.value(point.measurement) is None for point in configuration.evidence.points):
            raise BadInputError(
                f"{configuration.runs[0]}: no measurement of its trials has {metric.short_name}, which {bound} "
                "needs; give a bound on another latency, such as --sla-p95 20ms"
            )


def plan_by_measurements(question: CapacityQuestion, runs: Sequence[FinishedRun]) -> CapacityPlan:
    """Return an answer for each of ``runs``, whose hardware differs.

    Raises BadInputError if the runs do not fit together, or if the question needs the simulator.
    """
    simulated = [run for run in runs if run.has_simulated_replica]
    if simulated:
        raise BadInputError(
            f"{simulated[0].folder.path}: is no run of {MEASURED_KIND}, as another one is; plan the two with "
            "separate commands, because only one of them is simulated"
        )
    _check_needs_no_simulator(question, runs)
    configurations = [alternatives[0] for alternatives in choose_configurations(runs, question.sla)]
    for configuration in configurations:
        if len(configuration.runs) > 1:
            raise BadInputError(
                f"{' and '.join(configuration.runs)}: have the same hardware, and runs of {MEASURED_KIND} are not "
                "combined; give one of them"
            )
    answers = (
        _measured_answer(question, configuration, derive_capacity(run))
        for configuration, run in zip(configurations, runs, strict=True)
    )
    return CapacityPlan(question, tuple(answers))


def _check_needs_no_simulator(question: CapacityQuestion, runs: Sequence[FinishedRun]) -> None:
    """Raise BadInputError if the answer to ``question`` does not follow from the measurements of ``runs``."""
    if question.autoscaler is not None or not isinstance(question.traffic, PoissonTraffic):
        raise BadInputError(
            "--trace, --traffic constant and --traffic diurnal need the simulator, which does not describe "
            f"{MEASURED_KIND}; give the rate of the busiest time with --rate instead"
        )
    if question.rate is not None and question.limits_replicas:
        raise BadInputError(
            f"--rate: the tightest bound of a number of replicas needs the simulator, which does not describe "
            f"{MEASURED_KIND}; give only one of --rate, --replicas, --gpus and --max-cost"
        )
    for run in runs:
        bounds = run.problem.sla.latencies
        if question.sla and set(map(str, question.sla)) != set(map(str, bounds)):
            raise BadInputError(
                f"{run.folder.path}: was confirmed within {formatting.bounds(bounds)}, and other bounds need the "
                f"simulator, which does not describe {MEASURED_KIND}; leave --sla-… out, or run `tune` with these "
                "bounds"
            )


def _measured_answer(
    question: CapacityQuestion, configuration: PlannedConfiguration, capacity: MeasuredCapacity
) -> FleetPlan:
    price = hour_cost_of(question.hour_costs, configuration.hardware)
    size = configuration.request_batch_size
    rate, replicas = requested_rate(question, size), requested_replicas(question, configuration, price)
    count: ReplicaCount | None = None
    sustainable_rate: RateEstimate | None = None
    if replicas is None:
        assert rate is not None, "the question has a rate or replicas"
        if not capacity.safe:
            return FleetPlan(configuration, 0, rate, measured_capacity=capacity)
        count = replicas_for(rate, capacity)
        replicas = count.safe
    else:
        sustainable_rate = RateEstimate(
            safe=replicas * capacity.safe, likely=replicas * capacity.likely, high=replicas * capacity.high
        )
        rate = sustainable_rate.safe
        if not rate:
            return FleetPlan(
                configuration,
                replicas,
                0.0,
                sustainable_rate=sustainable_rate if replicas else None,
                measured_capacity=capacity,
            )
    return FleetPlan(
        configuration,
        replicas,
        rate,
        count=count,
        sustainable_rate=sustainable_rate,
        n_plus_1_replicas=None if count is None else replicas + 1,
        cost=None if price is None else compute_costs(price * configuration.devices, replicas, rate * size, ()),
        power=compute_power(configuration.watts, replicas, rate * size),
        measured_capacity=capacity,
    )


def replicas_for(rate: float, capacity: MeasuredCapacity) -> ReplicaCount:
    """Return the replicas for ``rate`` requests per second, if a replica serves some rate safely.

    Raises BadInputError if more than MAX_REPLICAS are needed.
    """
    if rate > MAX_REPLICAS * capacity.safe:
        raise too_many_replicas(rate)
    return ReplicaCount(
        low=math.ceil(rate / capacity.high),
        likely=math.ceil(rate / capacity.likely),
        safe=math.ceil(rate / capacity.safe),
    )


def requested_rate(question: CapacityQuestion, request_batch_size: float) -> float | None:
    """Return requests per second; a recording has its own rate if neither a rate nor replicas are given."""
    if question.rate is not None:
        return parse_rate(question.rate, request_batch_size) / request_batch_size
    if isinstance(question.traffic, RecordedTraffic) and not question.limits_replicas:
        return question.traffic.rate
    return None


def requested_replicas(
    question: CapacityQuestion, configuration: PlannedConfiguration, hour_cost: float | None
) -> int | None:
    """Return the given number of replicas, 0 if the budget is too small for one; None if the question asks for it."""
    if question.replicas is not None:
        return question.replicas
    if question.devices is not None:
        return question.devices // configuration.devices
    if question.max_cost is None:
        return None
    if hour_cost is None:
        raise BadInputError(f"--max-cost needs the price of {configuration.hardware} per hour; give --gpu-hour-cost")
    return int(question.max_cost / (hour_cost * configuration.devices) * (1 + 1e-12))


def hour_cost_of(hour_costs: Mapping[str, float], hardware: str) -> float | None:
    """Return the price of a device per hour by the name of its hardware; None if there is none.

    The longest name that is a part of it counts, because A10 is a part of A100. A price without a name comes last.
    """
    names = [name for name in hour_costs if name.lower() in hardware.lower()]
    return hour_costs[max(names, key=len)] if names else None
