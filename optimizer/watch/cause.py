"""The cause of long times in production: too much load, a slower server, or bursts of load. Pure functions."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

from optimizer.explain.bottleneck import SATURATED
from optimizer.results import formatting
from optimizer.watch.expectation import Expectation
from optimizer.watch.fit_check import Check, Judgement, rate_check_name
from optimizer.watch.server_metrics import ServedLoad

CauseKind: TypeAlias = Literal["load", "slower server", "bursts"]


@dataclass(frozen=True, slots=True)
class Cause:
    """Why requests take longer than in the run, or why there are too many; ``evidence`` is a clause."""

    kind: CauseKind
    evidence: str

    def __str__(self) -> str:
        words = {"load": "too much load", "slower server": "a slower server", "bursts": "load in bursts"}
        return f"{words[self.kind]}: {self.evidence}"


def find_cause(judgement: Judgement) -> Cause | None:
    """Return the cause; None if no time or rate differs, or the metrics do not tell the causes apart.

    A server that serves as much as in the run, while requests wait, has too much load. One that serves less although
    its instances always compute is slower. Instances that are idle between requests that wait get them in bursts.
    A server serves less if the interval of its rate is below the confidence interval of the confirmed throughput.
    (Its prediction interval also has the rates of servers that are slower than those of the run.)
    """
    expected, by_name = judgement.expected, {check.name: check for check in judgement.checks}
    rate, execution = by_name.get(rate_check_name(expected)), by_name.get("execution time")
    if rate is None or rate.measured is None:
        return None
    confirmed = expected.rate.interval(1 - expected.run.problem.confidence)
    if confirmed is None:
        return None
    measured = f"{formatting.number(rate.measured.value)} requests/s per {expected.replica_name}"
    in_run = f"{formatting.number(confirmed.low)} to {formatting.number(confirmed.high)}"
    if rate.status == "differs":
        return Cause("load", f"{measured} are more than the run served ({in_run})")
    if execution is not None and execution.status == "differs":
        return _slower_execution(execution)
    if not any(check.is_time and check.status == "differs" for check in judgement.checks):
        return None
    if _is_different(by_name.get("samples per execution")) or _is_different(by_name.get("samples per request")):
        return None  # these are the cause
    if rate.measured.high >= confirmed.low:
        compared = "as many as" if rate.measured.value >= confirmed.low else "not clearly fewer than"
        return Cause("load", f"{measured} are {compared} the run served ({in_run}), and requests wait longer")
    busy = busy_share(expected, judgement.loads, judgement.servers)
    if busy is None:
        return None
    if busy >= SATURATED:
        computing = f"its instances compute {busy:.0%} of the time"
        return Cause("slower server", f"{computing}, but {measured} are fewer than the run served ({in_run})")
    return Cause("bursts", f"requests wait although the instances compute only {busy:.0%} of the time")


def busy_share(expected: Expectation, loads: Sequence[ServedLoad], servers: int) -> float | None:
    """Return the share of the time in which the instances computed; None if the metrics do not show it.

    Triton sums the time of an execution over its requests, so the mean execution is that of a request.
    """
    if expected.replica is None:
        return None
    requests, seconds = sum(load.requests for load in loads), sum(load.seconds for load in loads)
    compute_ms = sum(load.compute_ms for load in loads)
    if not requests or not seconds or math.isnan(compute_ms):
        return None
    execution_s = compute_ms / requests / 1e3
    instances = servers * expected.point.candidate.instances
    return min(1.0, sum(load.executions for load in loads) * execution_s / (seconds * instances))


def _slower_execution(execution: Check) -> Cause | None:
    measured, within = execution.measured, execution.expected
    if measured is None or within is None or measured.low <= within.high:
        return None
    taken, most = formatting.number(measured.value), formatting.number(within.high)
    return Cause("slower server", f"an execution takes {taken} ms, and at most {most} ms are expected at this rate")


def _is_different(check: Check | None) -> bool:
    return check is not None and check.status == "differs"
