"""Answers a capacity question from measurements alone, for models that the simulator does not describe."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from optimizer.core.errors import BadInputError
from optimizer.plan.capacity_plan import CapacityPlan, CapacityQuestion, FleetPlan
from optimizer.plan.evidence import PlannedConfiguration, choose_configurations
from optimizer.plan.fleet import MAX_REPLICAS, RateEstimate, ReplicaCount, too_many_replicas
from optimizer.plan.measured_capacity import MEASURED_KIND, MeasuredCapacity, derive_capacity
from optimizer.plan.traffic import PoissonTraffic
from optimizer.results import formatting
from optimizer.results.finished_run import FinishedRun


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
    rate, replicas = question.mean_rate(configuration.request_batch_size), question.replicas_of(configuration)
    if replicas is None:
        assert rate is not None, "the question has a rate or replicas"
        count = replicas_for(rate, capacity) if capacity.safe else None
        plan = FleetPlan(configuration, count.safe if count else 0, rate, count=count)
    else:
        rates = RateEstimate(*(replicas * each for each in (capacity.safe, capacity.likely, capacity.high)))
        plan = FleetPlan(configuration, replicas, rates.safe, sustainable_rate=rates if replicas else None)
    plan = replace(plan, measured_capacity=capacity)
    return plan.with_costs(question.hour_cost(configuration.hardware), plan.rate) if plan.feasible else plan


def replicas_for(rate: float, capacity: MeasuredCapacity) -> ReplicaCount:
    """Return the replicas for ``rate`` requests per second, if a replica serves some rate safely.

    Raises BadInputError if more than MAX_REPLICAS are needed.
    """
    if rate > MAX_REPLICAS * capacity.safe:
        raise too_many_replicas(rate)
    return ReplicaCount(*(math.ceil(rate / each) for each in (capacity.high, capacity.likely, capacity.safe)))
