"""The cause of a difference between production and a run, and the next steps with their cost. Pure functions."""

from __future__ import annotations

import math
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

from optimizer.config.problem import ModelKind
from optimizer.core.errors import BadInputError
from optimizer.core.safe_text import show_path
from optimizer.options.command_line import search_again_command
from optimizer.options.run_options import EXHAUSTIVE_SEARCHES, RunOptions, is_trace
from optimizer.results import formatting
from optimizer.results.finished_run import FinishedRun
from optimizer.results.request_steps import SATURATED
from optimizer.results.summary import NextStep
from optimizer.study.model_finder import trace_sizes
from optimizer.watch.expectation import Expectation, WhyNotSimulated
from optimizer.watch.fit_check import REQUEST_TIMES, Check, CheckKind, Judgement
from optimizer.watch.server_metrics import ServedLoad

CauseKind: TypeAlias = Literal["load", "slower server", "bursts"]
CAUSE_TEXTS = {"load": "too much load", "slower server": "a slower server", "bursts": "load in bursts"}
SERVER_FAULTS = (CheckKind.FAILED_REQUESTS, CheckKind.STALL)  # no configuration repairs them
DEPLOYMENT_CHECKS = (CheckKind.EXECUTION_TIME, CheckKind.BATCH_SIZE)  # if they differ, another model may be deployed
WARM_START_SAVING = "warm starts from related machines took 5 to 14 % fewer deployments"  # benchmarks/warm_start.md
NO_WARM_START = "a warm start would need a run with requests of this size"


@dataclass(frozen=True, slots=True)
class Cause:
    """Why requests take longer than in the run, or why there are too many; ``evidence`` is a clause."""

    kind: CauseKind
    evidence: str

    def __str__(self) -> str:
        return f"{CAUSE_TEXTS[self.kind]}: {self.evidence}"


def find_cause(judgement: Judgement) -> Cause | None:
    """Return the cause; None if no time or rate differs, or the metrics do not tell the causes apart.

    If the server serves as much as in the run while requests wait, there is too much load. If it serves less and its
    instances are always busy, the server is slower. If requests wait while the instances are partly idle, the load
    comes in bursts.

    A server serves less if the confidence interval of its rate is below that of the confirmed throughput. (The
    prediction interval of the throughput also has the rates of servers that are slower than those of the run.)
    """
    expectation = judgement.expectation
    rate, execution_time = judgement.check(CheckKind.RATE), judgement.check(CheckKind.EXECUTION_TIME)
    confirmed = expectation.confirmed_rate.interval(1 - expectation.run.problem.confidence)
    if rate is None or rate.measured is None or confirmed is None:
        return None
    measured = f"{formatting.number(rate.measured.value)} requests/s per {expectation.replica_name}"
    in_run = f"{formatting.number(confirmed.low)} to {formatting.number(confirmed.high)}"
    if rate.status == "differs":
        return Cause("load", f"{measured} are more than the run served ({in_run})")
    if execution_time is not None and execution_time.status == "differs":
        return _slower_execution(execution_time)
    if not judgement.differs(*REQUEST_TIMES):
        return None
    if judgement.differs(CheckKind.BATCH_SIZE, CheckKind.REQUEST_SIZE):
        return None  # these are the cause
    if rate.measured.high >= confirmed.low:
        compared = "as many as" if rate.measured.value >= confirmed.low else "not clearly fewer than"
        return Cause("load", f"{measured} are {compared} the run served ({in_run}), and requests wait longer")
    busy = busy_share(expectation, judgement.loads, judgement.servers)
    if busy is None:
        return None
    if busy >= SATURATED:
        computing = f"its instances compute {formatting.percent(busy)} of the time"
        return Cause("slower server", f"{computing}, but {measured} are fewer than the run served ({in_run})")
    return Cause(
        "bursts", f"requests wait although the instances compute only {formatting.percent(busy)} of the time"
    )


def busy_share(expectation: Expectation, loads: Sequence[ServedLoad], servers: int) -> float | None:
    """Return the share of the time in which the instances computed; None if the metrics do not show it.

    Triton sums the time of an execution over its requests, so the mean execution is that of a request.
    """
    if isinstance(expectation.simulation, WhyNotSimulated):
        return None
    requests, seconds = sum(load.requests for load in loads), sum(load.seconds for load in loads)
    compute_ms = sum(load.compute_ms for load in loads)
    if not requests or not seconds or math.isnan(compute_ms):
        return None
    execution_s = compute_ms / requests / 1e3
    instances = servers * expectation.point.candidate.instances
    return min(1.0, sum(load.executions for load in loads) * execution_s / (seconds * instances))


def _slower_execution(execution_time: Check) -> Cause | None:
    measured, expected_range = execution_time.measured, execution_time.expected_range
    if measured is None or expected_range is None or measured.low <= expected_range.high:
        return None
    measured_ms, max_expected_ms = formatting.number(measured.value), formatting.number(expected_range.high)
    return Cause(
        "slower server",
        f"an execution takes {measured_ms} ms, and at most {max_expected_ms} ms are expected at this rate",
    )


def next_steps(judgement: Judgement) -> list[NextStep]:
    """Return what to do, most urgent first; empty if the recommendation fits."""
    expectation, steps = judgement.expectation, []
    if judgement.differs(CheckKind.STALL):
        steps.append(NextStep("read the log of the server that serves nothing, and start it again if it hangs", ""))
    if judgement.differs(CheckKind.FAILED_REQUESTS):
        steps.append(NextStep("read the server's log, which has the reason of each failed request", ""))
    rate, cause = judgement.check(CheckKind.RATE), find_cause(judgement)
    cause_kind = cause.kind if cause else None
    if rate is not None and rate.measured is not None:
        total_rate = rate.measured.value * judgement.replicas
        if cause_kind == "load":
            steps.append(overload_step(judgement, rate, rate.measured.value))
        elif rate.status == "near":
            steps.append(plan_step(expectation, total_rate))
        if cause_kind == "bursts":
            steps.append(plan_step(expectation, total_rate, has_bursts=True))
    if judgement.differs(*DEPLOYMENT_CHECKS) or cause_kind == "slower server":
        run = shlex.quote(show_path(expectation.run.folder.path))
        steps.append(
            NextStep("on the machine in production, test the recommendation again", f"tune verify --fresh {run}")
        )
    explained = {CheckKind.RATE, *SERVER_FAULTS}  # a search would not change them
    if cause_kind in ("load", "bursts"):
        explained |= REQUEST_TIMES
    if {check.kind for check in judgement.differing} - explained:
        steps.append(search_for_production_requests(judgement))
    if judgement.undecided and not judgement.differing:
        steps.append(NextStep("watch again while the load is steady, or in more intervals (--intervals)", ""))
    return steps


# -- a new search ----------------------------------------------------------------------------------------------------


def search_for_production_requests(judgement: Judgement) -> NextStep:
    """Return the search with requests as in production."""
    size = judgement.check(CheckKind.REQUEST_SIZE)
    if size is not None and size.status == "differs" and size.measured is not None:
        return search_for_size(judgement.expectation, size.measured.value)
    return repeat_search(judgement.expectation)


def repeat_search(expectation: Expectation) -> NextStep:
    """Return the search with the same requests, which starts from the run.

    An exhaustive search takes no warm start.
    """
    run = expectation.run
    command = search_again_command(run.options, run=str(run.folder.path))
    remark = "" if run.options.search in EXHAUSTIVE_SEARCHES else WARM_START_SAVING
    return _search_step(expectation, "search again", command, remark)


def search_for_size(expectation: Expectation, request_samples: float) -> NextStep:
    """Return the search for requests of ``request_samples`` on average, another size than that of the run.

    It has no warm start, which takes measurements of the same size only.
    """
    problem, options = expectation.run.problem, expectation.run.options
    if has_recorded_sizes(options):
        advice = (
            "record a new trace, whose requests have the present sizes, in place of the old one, and search again"
        )
        return _search_step(expectation, advice, search_again_command(options), NO_WARM_START)
    size = nearest_other_size(expectation.request_samples, request_samples)
    if size == expectation.request_samples or problem.kind is ModelKind.STATEFUL:  # of one sample in Triton
        return repeat_search(expectation)
    largest = max(problem.space.max_batch_size)
    if size > largest:
        advice = f"raise the largest max_batch_size of the search, {largest:,}, to {size:,} or more, and search again"
        return _search_step(expectation, f"{advice} with --request-batch-size {size}", "", NO_WARM_START)
    command = search_again_command(options, request_batch_size=size)
    return _search_step(expectation, "search again", command, NO_WARM_START)


def nearest_other_size(run_size: float, production_size: float) -> int:
    """Return the whole number nearest to ``production_size``, on the same side of ``run_size`` if possible."""
    nearest = max(1, round(production_size))
    if nearest != run_size:
        return nearest
    return math.ceil(production_size) if production_size > run_size else max(1, math.floor(production_size))


def has_recorded_sizes(options: RunOptions) -> bool:
    """Return whether the load of a run is a trace with the size of each request."""
    if options.load != "rate" or not is_trace(options.request_times) or options.request_batch_size is not None:
        return False
    try:
        return trace_sizes(options) is not None
    except BadInputError:  # the file no longer exists, and a new one is needed anyway
        return True


def search_seconds(run: FinishedRun) -> float | None:
    """Return the wall time of the earlier search with its confirmation; None if it is unknown."""
    result = run.info.get("result")
    seconds = result.get("wall_seconds") if isinstance(result, dict) else None
    if isinstance(seconds, bool) or not isinstance(seconds, (int, float)) or not 0 < seconds < math.inf:
        return None
    return float(seconds)


def _search_step(expectation: Expectation, advice: str, command: str, remark: str = "") -> NextStep:
    """Return a search as a step, with the cost of the earlier one, and ``remark`` as a further clause."""
    run = expectation.run
    seconds, trials = search_seconds(run), formatting.count(len(run.trials), "trial")
    took = "" if seconds is None else f" in {formatting.duration(seconds)}"
    clauses = [f"{advice}: the earlier search took {trials}{took}, with its confirmation", *filter(None, [remark])]
    return NextStep("; ".join(clauses), command)


# -- another number of replicas --------------------------------------------------------------------------------------


def plan_step(expectation: Expectation, rate: float, *, has_bursts: bool = False) -> NextStep:
    """Return the step that says how many replicas serve ``rate`` requests per second.

    `tune plan` needs a latency bound and a simulator or, for models that it does not describe, a safe rate. It needs
    the times of the requests if these come in bursts.
    """
    run, replicas = expectation.run, f"{expectation.replica_name}s"
    if run.problem.is_simulated:
        can_plan = expectation.simulation not in (WhyNotSimulated.NO_BATCH_TIMES, WhyNotSimulated.CONCURRENT)
    else:
        can_plan = expectation.safe_rate is not None
    if not can_plan:
        return NextStep(f"start more {replicas}; `tune plan` cannot compute their number from this run", "")
    rounded = f"{rate:.0f}" if rate >= 1000 else f"{rate:.4g}"  # without an exponent
    command = f"tune plan {shlex.quote(show_path(run.folder.path))} --rate {rounded}req/s"
    advice = f"compute the number of {replicas}"
    if not expectation.sla.latencies:
        command += " --sla-p95 20ms"
        advice += " for a latency bound, such as this one"
    if has_bursts or run.problem.has_load_shape:
        command += " --trace requests.csv"
        advice = f"record the times of the requests, such as requests.csv, and {advice}"
    return NextStep(advice, command)


def overload_step(judgement: Judgement, rate: Check, served_rate: float) -> NextStep:
    """Return the step for replicas that serve ``served_rate`` requests/s each, while they get too much load.

    Their clients may send more than that: those of a closed loop wait for responses. So there is a command only if
    the number of replicas for this rate is above the present one.
    """
    expectation, replicas = judgement.expectation, judgement.replicas
    step = plan_step(expectation, served_rate * replicas)
    if not step.command:
        return step
    sent = f"clients send at least the {formatting.number(served_rate * replicas)} requests/s that are served"
    is_above_safe = replicas == 1 and expectation.safe_rate is not None and served_rate > expectation.safe_rate
    if rate.status == "differs" or is_above_safe:
        advice = f"{step.advice}, which is above the present {replicas:,}: {sent}; give their own rate if it is known"
        return NextStep(advice, step.command)
    more = f"start more {expectation.replica_name}s than the present {replicas:,}"
    return NextStep(f"{more}: {sent}; `tune plan` computes the number from the rate that they send", "")
