"""Answers a capacity question: replicas for a rate, rate of replicas, or the tightest bound; with cost and power.

``plan_by_simulation`` simulates the replicas. ``measured_plan`` is for models that the simulator does not describe.
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
from optimizer.plan.evidence import PlannedConfiguration, choose_configurations
from optimizer.plan.fleet import (
    Cost,
    Fleet,
    Power,
    RateEstimate,
    ReplicaCount,
    compute_costs,
    compute_power,
    estimate_rate,
    estimate_replicas,
)
from optimizer.plan.measured_capacity import MeasuredCapacity
from optimizer.plan.replica import fit_replica
from optimizer.plan.slowness import EXPECTED, SAFE, ForecastErrors, Slowdown
from optimizer.plan.traffic import CONSTANT_DAY, HOURS, Balancer, Day, PoissonTraffic, RecordedTraffic, Traffic
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
class SimulatedFleet:
    """The simulated behaviour of the ``replicas`` of a plan at its ``rate``.

    Attributes:
        at_rate: The load at the rate.
        tightest_bound_ms: The lowest bound on the judged latency that the replicas meet safely; infinite if they are
            overloaded.
        headroom: The loads at the HEADROOM shares of the rate.
        one_lost: The load with a replica less; None if none would be left.
        burst: The load at BURST times the rate.
        burst_replicas: The replicas that this needs; None if no number is enough.
        forecast_errors: The errors of the simulator on the run.
        further_measuring: The benefit of further measurements; None if the question asks for a bound.
        autoscaler_test: The test of the autoscaler; None if the question has none.
    """

    at_rate: LoadForecast
    tightest_bound_ms: float
    headroom: tuple[LoadForecast, ...]
    one_lost: LoadForecast | None
    burst: LoadForecast
    burst_replicas: int | None
    forecast_errors: ForecastErrors
    further_measuring: FurtherMeasuring | None
    autoscaler_test: AutoscalerTest | None


@dataclass(frozen=True)
class FleetPlan:
    """The answer for one configuration: ``replicas`` serve ``rate`` requests per second, the day's peak.

    Attributes:
        configuration: The configuration of a replica, with the evidence for its speed.
        replicas: 0 if no number meets the bounds.
        rate: 0 if the replicas meet the bounds at no rate.
        count: Set if the question asks for replicas.
        sustainable_rate: Set if the question asks for a rate or a bound; 0 if no rate meets the bounds.
        replicas_by_hour: The replicas in each hour of a day.
        cost: None without a price, or if nothing was planned.
        power: None if nothing was planned.
        simulated: The simulation; None if nothing was planned, or if the plan follows from measurements alone.
        measured_capacity: Set if the plan follows from measurements alone.
        unloaded_latency_ms: The latency without load; 0 if it was not computed.
    """

    configuration: PlannedConfiguration
    replicas: int
    rate: float
    count: ReplicaCount | None = None
    sustainable_rate: RateEstimate | None = None
    replicas_by_hour: tuple[int, ...] = ()
    cost: Cost | None = None
    power: Power | None = None
    simulated: SimulatedFleet | None = None
    measured_capacity: MeasuredCapacity | None = None
    unloaded_latency_ms: float = 0.0

    @property
    def feasible(self) -> bool:
        """Return True if some replicas serve some rate within the bounds, or a given rate within any bound."""
        return self.replicas > 0 and self.rate > 0 and not self.is_overloaded

    @property
    def is_overloaded(self) -> bool:
        """Return True if the replicas cannot safely serve the given rate within any bound on the latency."""
        return self.simulated is not None and math.isinf(self.simulated.tightest_bound_ms)

    @property
    def n_plus_1_replicas(self) -> int | None:
        """Return the replicas of which any one may fail; None if the question gives the replicas."""
        return None if self.count is None else self.count.safe + 1

    def with_costs(self, hour_cost: float | None, mean_rate: float | None) -> FleetPlan:
        """Return the plan with its cost and power.

        ``hour_cost`` is the price of a device, None without one. ``mean_rate`` is the mean of the day in requests per
        second, None if the replicas cannot serve it.
        """
        configuration, cost = self.configuration, None
        inferences = None if mean_rate is None else mean_rate * configuration.request_batch_size
        if hour_cost is not None:
            replica_hour = hour_cost * configuration.devices
            cost = compute_costs(replica_hour, self.replicas, inferences, self.replicas_by_hour)
        return replace(self, cost=cost, power=compute_power(configuration.watts, self.replicas, inferences))


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

    def mean_rate(self, request_batch_size: float) -> float | None:
        """Return the rate in requests per second; None if the question asks for it.

        A recording has its own rate if neither a rate nor replicas are given.
        """
        if self.rate is not None:
            return parse_rate(self.rate, request_batch_size) / request_batch_size
        if isinstance(self.traffic, RecordedTraffic) and not self.limits_replicas:
            return self.traffic.rate
        return None

    def hour_cost(self, hardware: str) -> float | None:
        """Return the price of a device of ``hardware`` per hour; None if there is none."""
        return hour_cost_of(self.hour_costs, hardware)

    def replicas_of(self, configuration: PlannedConfiguration) -> int | None:
        """Return the given replicas, 0 if the budget is too small for one; None if the question asks for them.

        Raises BadInputError if the cost is limited and the price of the hardware is not known.
        """
        if self.replicas is not None:
            return self.replicas
        if self.devices is not None:
            return self.devices // configuration.devices
        if self.max_cost is None:
            return None
        hardware = configuration.hardware
        if (hour_cost := self.hour_cost(hardware)) is None:
            raise BadInputError(f"--max-cost needs the price of {hardware} per hour; give --gpu-hour-cost")
        return int(self.max_cost / (hour_cost * configuration.devices) * (1 + 1e-12))


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
    tightest_ms = answer.simulated.tightest_bound_ms if answer.simulated else math.inf
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
        self._expected = replica.slowness_estimate.quantile(EXPECTED)
        self._safe = replica.slowness_estimate.scenarios(SAFE)

    def answer(self) -> FleetPlan:
        """Return the replicas for the given rate, the rate of the given replicas, or the bound for both."""
        replicas = self._question.replicas_of(self._configuration)
        rate = self._question.mean_rate(self._configuration.request_batch_size)
        if replicas is None:
            assert rate is not None, "the question has a rate or replicas"
            return self._replicas_for(rate)
        if replicas == 0:
            return FleetPlan(self._configuration, 0, rate or 0.0)
        rates, peak_factor = estimate_rate(self._fleet, replicas), self._question.day.peak_factor
        peak = rates.safe if rate is None else rate * peak_factor
        plan = FleetPlan(self._configuration, replicas, peak, sustainable_rate=rates)
        if not peak:
            return replace(plan, unloaded_latency_ms=self._unloaded_latency_ms())
        return self._simulated(plan, peak / peak_factor if rate is None else rate)

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
        plan = FleetPlan(self._configuration, count.safe, peak, count=count, replicas_by_hour=by_hour)
        return self._simulated(plan, mean_rate)

    def _simulated(self, plan: FleetPlan, mean_rate: float) -> FleetPlan:
        """Return ``plan`` with its simulation and costs; ``mean_rate`` is the mean of the day."""
        replicas, rate = plan.replicas, plan.rate
        simulated = SimulatedFleet(
            at_rate=self._forecast(rate, replicas),
            tightest_bound_ms=max(self._latency_ms(rate, replicas, slowdown) for slowdown in self._safe),
            headroom=tuple(self._forecast(share * rate, replicas) for share in HEADROOM),
            one_lost=self._forecast(rate, replicas - 1) if replicas > 1 else None,
            burst=self._forecast(BURST * rate, replicas),
            burst_replicas=self._burst_replicas(BURST * rate),
            forecast_errors=self._fleet.replica.slowness_estimate.forecast,
            further_measuring=self._further_measuring(plan),
            autoscaler_test=self._test_autoscaler(mean_rate),
        )
        plan = replace(plan, simulated=simulated)
        hour_cost = self._question.hour_cost(self._configuration.hardware)
        return plan.with_costs(hour_cost, None if plan.is_overloaded else mean_rate)

    def _burst_replicas(self, rate: float) -> int | None:
        """Return the replicas for ``rate``; None if no number up to MAX_REPLICAS is enough."""
        try:
            return self._fleet.fewest_replicas_at_quantile(rate, SAFE)
        except BadInputError:
            return None

    def _further_measuring(self, plan: FleetPlan) -> FurtherMeasuring | None:
        """Return the benefit of further measurements; None if the question asks for a bound."""
        deployments = int(FURTHER_SECONDS / self._configuration.server_seconds)
        estimate = self._fleet.replica.slowness_estimate.with_more(deployments)
        fleet = replace(self._fleet, replica=replace(self._fleet.replica, slowness_estimate=estimate))
        if plan.count is not None:
            fewer = estimate_replicas(fleet, plan.rate) or plan.count
            hour_cost = self._question.hour_cost(self._configuration.hardware)
            saved = plan.count.safe - fewer.safe
            cost = None if hour_cost is None else saved * hour_cost * self._configuration.devices
            return FurtherMeasuring(deployments, fewer, saved_per_hour=cost)
        if self._question.rate is not None:
            return None
        return FurtherMeasuring(deployments, sustainable_rate=estimate_rate(fleet, plan.replicas))

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


def hour_cost_of(hour_costs: Mapping[str, float], hardware: str) -> float | None:
    """Return the price of a device per hour by the name of its hardware; None if there is none.

    The longest name that is a part of it counts, because A10 is a part of A100. A price without a name comes last.
    """
    names = [name for name in hour_costs if name.lower() in hardware.lower()]
    return hour_costs[max(names, key=len)] if names else None
