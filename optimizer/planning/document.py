"""What ``tune plan --json`` prints. Rates are in requests and in inferences a second; null is unknown."""

from __future__ import annotations

import math
from dataclasses import asdict
from typing import Any

from objectives.sla import worst_violation
from optimizer.planning.answer import Answer, Load
from optimizer.planning.plan import Plan
from optimizer.planning.sentence import PUBLISHED, sentence
from optimizer.planning.traffic import SPLIT
from optimizer.store.finished import candidate_document


def document(plan: Plan, note: str = "") -> dict[str, Any]:
    question = plan.question
    return {
        "found": plan.found,
        "traffic": type(question.traffic).__name__.lower(),
        "peak_factor": question.day.peak_factor,
        "balancer": question.balancer,
        "balancer_split": SPLIT[question.balancer],
        "note": note,
        "answers": [_answer(answer) for answer in plan.answers],
    }


def _answer(answer: Answer) -> dict[str, Any]:
    source = answer.source
    size = source.evidence.problem.request_batch_size
    published = PUBLISHED.get(source.builder)
    gpus = source.gpus * answer.replicas
    return {
        "found": answer.found,
        "model": source.model,
        "hardware": source.hardware,
        "runs": list(source.runs),
        "deployments": len(source.evidence.deployments),
        "configuration": candidate_document(source.candidate),
        "sla": [str(bound) for bound in source.bounds],
        "sentence": sentence(source) if worst_violation(source.bounds, source.point.measurement) <= 0 else None,
        "published": None if published is None else asdict(published),
        "replicas": answer.replicas,
        "gpus": gpus or None,
        "gpus_per_replica": source.gpus,
        "count": None if answer.count is None else asdict(answer.count),
        **_rates("rate", answer.rate, size),
        "carries_requests_per_sec": None if answer.carries is None else asdict(answer.carries),
        "at_rate": _load(answer.at_rate, size),
        "tightest_bound_ms": None if answer.tightest_ms is None else _finite(answer.tightest_ms[0]),
        "latency_alone_ms": answer.alone_ms or None,
        "n_plus_1_replicas": answer.spare,
        "one_lost": _load(answer.one_lost, size),
        "burst": _load(answer.in_burst, size),
        "burst_replicas": answer.for_burst,
        "headroom": [_load(load, size) for load in answer.headroom],
        "replicas_by_hour": list(answer.by_hour) or None,
        "cost": None if answer.cost is None else asdict(answer.cost),
        "power": None if answer.power is None else asdict(answer.power),
    }


def _load(load: Load | None, size: float) -> dict[str, Any] | None:
    if load is None:
        return None
    return {
        **_rates("rate", load.rate, size),
        "latency_ms": _finite(load.latency_ms),
        "utilization": round(load.utilization, 4),
        "busy": round(load.busy, 4),
        "meets_sla": load.meets,
        "surely": load.surely,
    }


def _rates(name: str, rate: float, size: float) -> dict[str, float]:
    return {f"{name}_requests_per_sec": round(rate, 3), f"{name}_infer_per_sec": round(rate * size, 3)}


def _finite(value: float) -> float | None:
    return round(value, 4) if math.isfinite(value) else None
