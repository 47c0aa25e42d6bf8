"""Answers a capacity question for models that stream or keep state, which the simulator does not describe."""

from __future__ import annotations

import math
from collections.abc import Sequence

from optimizer.core.errors import BadInputError
from optimizer.plan.capacity_plan import (
    CapacityPlan,
    CapacityQuestion,
    FleetPlan,
    costs,
    hour_cost_of,
    power,
    requested_rate,
    requested_replicas,
)
from optimizer.plan.evidence import PlannedConfiguration, planned_configurations
from optimizer.plan.fleet import MOST_REPLICAS, RateEstimate, ReplicaCount
from optimizer.plan.measured_capacity import MeasuredCapacity, measured_capacity
from optimizer.plan.traffic import PoissonTraffic
from optimizer.results import formatting
from optimizer.results.finished_run import FinishedRun

KIND = "a model that streams or keeps state"


def plan_by_measurements(question: CapacityQuestion, runs: Sequence[FinishedRun]) -> CapacityPlan:
    """Return an answer for each of ``runs``, whose hardware differs.

    Raises BadInputError if the runs do not fit together, or if the question needs the simulator.
    """
    simulated = [run for run in runs if run.problem.is_simulated]
    if simulated:
        raise BadInputError(
            f"{simulated[0].folder.path}: is no run of {KIND}, but another run is, and these are planned in "
            "different ways; give runs of one kind"
        )
    _check(question, runs)
    sources = [alternatives[0] for alternatives in planned_configurations(runs, question.sla)]
    several = next((source for source in sources if len(source.runs) > 1), None)
    if several is not None:
        raise BadInputError(
            f"{' and '.join(several.runs)}: have the same hardware, and runs of {KIND} are not combined; give "
            "one of them"
        )
    answers = (_answer(question, source, measured_capacity(run)) for source, run in zip(sources, runs, strict=True))
    return CapacityPlan(question, tuple(answers))


def _check(question: CapacityQuestion, runs: Sequence[FinishedRun]) -> None:
    """Raise BadInputError if the answer to ``question`` does not follow from the measurements of ``runs``."""
    if question.autoscaler is not None or not isinstance(question.traffic, PoissonTraffic):
        raise BadInputError(
            f"--trace, --traffic constant and --traffic diurnal need the simulator, which does not describe {KIND}; "
            "give the rate of the busiest time with --rate instead"
        )
    sizes = (question.replicas, question.devices, question.most_cost)
    if question.rate is not None and sizes != (None, None, None):
        raise BadInputError(
            f"--rate: the tightest bound of a number of replicas needs the simulator, which does not describe "
            f"{KIND}; give only one of --rate, --replicas, --gpus and --max-cost"
        )
    for run in runs:
        own = run.problem.sla.latencies
        if question.sla and set(map(str, question.sla)) != set(map(str, own)):
            raise BadInputError(
                f"{run.folder.path}: was confirmed within {formatting.bounds(own)}, and other bounds need the "
                f"simulator, which does not describe {KIND}; leave --sla-… out, or run `tune` with these bounds"
            )


def _answer(question: CapacityQuestion, source: PlannedConfiguration, capacity: MeasuredCapacity) -> FleetPlan:
    price = hour_cost_of(question.hour_costs, source.hardware)
    size = source.evidence.problem.request_batch_size
    rate, replicas = requested_rate(question, size), requested_replicas(question, source, price)
    count: ReplicaCount | None = None
    carries: RateEstimate | None = None
    if replicas is None:
        assert rate is not None, "the question has a rate or replicas"
        if not capacity.safe:
            return FleetPlan(source, 0, rate, capacity=capacity)
        count = replicas_for(rate, capacity)
        replicas = count.safe
    else:
        carries = RateEstimate(*(replicas * own for own in (capacity.safe, capacity.likely, capacity.high)))
        rate = carries.safe
        if not rate:
            return FleetPlan(source, replicas, 0.0, carries=carries if replicas else None, capacity=capacity)
    return FleetPlan(
        source,
        replicas,
        rate,
        count,
        carries,
        spare=None if count is None else replicas + 1,
        cost=None if price is None else costs(price * source.devices, replicas, rate * size, ()),
        power=power(source.watts, replicas, rate * size),
        capacity=capacity,
    )


def replicas_for(rate: float, capacity: MeasuredCapacity) -> ReplicaCount:
    """Return the replicas for ``rate`` requests per second, if a replica serves some rate safely.

    Raises BadInputError if more than MOST_REPLICAS are needed.
    """
    if rate > MOST_REPLICAS * capacity.safe:
        raise BadInputError(
            f"--rate: {rate:,.6g} requests/s need more than {MOST_REPLICAS:,} replicas; check the unit"
        )
    low, likely, safe = (math.ceil(rate / own) for own in (capacity.high, capacity.likely, capacity.safe))
    return ReplicaCount(low, likely, safe)
