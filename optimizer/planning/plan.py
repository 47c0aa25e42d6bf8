"""A plan: one question, an answer for each hardware that there are runs of."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from objectives.sla import Constraint, parse_rate
from optimizer.errors import BadInputError
from optimizer.planning.answer import Answer, bound_of, rate_of, replicas_for
from optimizer.planning.day import STEADY, Day
from optimizer.planning.fleet import Fleet
from optimizer.planning.replica import replica
from optimizer.planning.source import Source, sources
from optimizer.planning.traffic import Balancer, Recorded, Traffic
from optimizer.store.finished import FinishedRun


@dataclass(frozen=True)
class Question:
    """``rate`` as it was written, the mean over ``day``; ``devices`` are GPUs, or machines without one; ``most_cost``
    per hour. ``hour_costs`` of a device by a part of the hardware's name, an empty one for any. None is not asked."""

    traffic: Traffic
    balancer: Balancer
    day: Day = STEADY
    rate: str | None = None
    replicas: int | None = None
    devices: int | None = None
    most_cost: float | None = None
    hour_costs: Mapping[str, float] = field(default_factory=dict)
    bounds: tuple[Constraint, ...] = ()


@dataclass(frozen=True)
class Plan:
    question: Question
    answers: tuple[Answer, ...]

    @property
    def found(self) -> bool:
        return any(answer.found for answer in self.answers)


def plan(question: Question, runs: Sequence[FinishedRun]) -> Plan:
    """Raises BadInputError where the runs cannot be planned from."""
    found = ([_answer(question, source) for source in alike] for alike in sources(runs, question.bounds))
    return Plan(question, tuple(max(answers, key=_merit) for answers in found))


def _merit(answer: Answer) -> tuple[bool, int, float, float]:
    """The fewest replicas, the highest rate, the tightest bound."""
    tightest_ms = answer.tightest_ms[0] if answer.tightest_ms is not None else math.inf
    return answer.found, -answer.replicas, answer.rate, -tightest_ms


def _answer(question: Question, source: Source) -> Answer:
    try:
        one = replica(source.evidence, source.bounds)
    except ValueError as error:
        raise BadInputError(f"{source.runs[0]}: its trials do not say how long batches take ({error})") from None
    fleet = Fleet(one, question.traffic, question.balancer)
    hour_cost = _hour_cost(question.hour_costs, source.hardware)
    rate = _rate(question, one.request_batch_size)
    replicas = _replicas(question, source, hour_cost)
    if replicas is None:
        assert rate is not None, "one of them is asked"
        return replicas_for(source, fleet, rate, question.day, hour_cost)
    if replicas == 0:
        return Answer(source, 0, rate or 0.0)
    if rate is None:
        return rate_of(source, fleet, replicas, question.day, hour_cost)
    return bound_of(source, fleet, replicas, rate, question.day, hour_cost)


def _rate(question: Question, request_batch_size: float) -> float | None:
    """Requests a second; a recording has its own where none is given and no replicas are."""
    if question.rate is not None:
        return parse_rate(question.rate, request_batch_size) / request_batch_size
    asked = (question.replicas, question.devices, question.most_cost)
    if isinstance(question.traffic, Recorded) and asked == (None, None, None):
        return question.traffic.rate
    return None


def _replicas(question: Question, source: Source, hour_cost: float | None) -> int | None:
    """How many are to be had; 0 where it does not come to one."""
    if question.replicas is not None:
        return question.replicas
    if question.devices is not None:
        return question.devices // source.devices
    if question.most_cost is None:
        return None
    if hour_cost is None:
        raise BadInputError(f"--max-cost: what does an hour of {source.hardware} cost? give --gpu-hour-cost")
    return int(question.most_cost / (hour_cost * source.devices) * (1 + 1e-12))


def _hour_cost(hour_costs: Mapping[str, float], hardware: str) -> float | None:
    named = [cost for name, cost in hour_costs.items() if name and name.lower() in hardware.lower()]
    return named[0] if named else hour_costs.get("")
