"""The judgement on production as text and as a JSON document, with the next step and its cost."""

from __future__ import annotations

import math
import shlex
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from rich.console import Console
from rich.text import Text

from objectives.confidence import Verdict
from objectives.metrics import LATENCY, METRICS, TTFT
from objectives.sla import Constraint
from optimizer.config.search_space import ModelKind
from optimizer.core.errors import BadInputError
from optimizer.core.safe_text import one_line, show_path
from optimizer.options.command_line import command_line
from optimizer.options.run_options import RunOptions, is_trace
from optimizer.options.server_options import QUANTILE_COST, latency_quantiles
from optimizer.results import formatting
from optimizer.results.finished_run import FinishedRun
from optimizer.results.summary import NextStep
from optimizer.results.terminal_output import (
    plain_table,
    print_line,
    print_table,
    print_unwrapped,
    print_wrapped,
    wrap,
)
from optimizer.study.model_finder import trace_sizes
from optimizer.watch.cause import find_cause
from optimizer.watch.expectation import Expectation, Range, WhyNotSimulated, is_shaped
from optimizer.watch.fit_check import NOT_EXPORTED, Check, Estimate, Judgement, rate_check_name

SAVED = "warm starts from related machines took 5 to 14 % fewer deployments"  # benchmarks/warm_start.md
COLD = "a warm start would need a run with requests of this size"
WORDS = {"fits": "fits", "near": "near", "undecided": "undecided", "differs": "DIFFERS", "unknown": "not checked"}
FIRST_RESPONSES = "--metrics-config=histogram_latencies=true"
MODEL = ("execution time", "samples per execution")  # checks after which the deployment itself may be another one
FAILURES, STALLS = "failed requests", "time without success"  # checks of faults that no configuration repairs


def search_seconds(run: FinishedRun) -> float | None:
    """Return the wall time of the earlier search with its confirmation; None if it is unknown."""
    result = run.info.get("result")
    seconds = result.get("wall_seconds") if isinstance(result, dict) else None
    if isinstance(seconds, bool) or not isinstance(seconds, (int, float)) or not 0 < seconds < math.inf:
        return None
    return float(seconds)


def search_step(expected: Expectation, advice: str, command: str, remark: str = "") -> NextStep:
    """Return a search as a step, with the cost of the earlier one, and ``remark`` as a further clause."""
    seconds, trials = search_seconds(expected.run), formatting.count(len(expected.run.trials), "trial")
    took = "" if seconds is None else f" in {formatting.clock(seconds)}"
    clauses = [f"{advice}: the earlier search took {trials}{took}, with its confirmation", *filter(None, [remark])]
    return NextStep("; ".join(clauses), command)


def same_search(expected: Expectation) -> NextStep:
    """Return the search with the same requests."""
    remark = SAVED if expected.run.options.search != "grid" else ""
    return search_step(expected, "search again", search_command(expected), remark)


def search_command(expected: Expectation) -> str:
    """Return the command of a search with the same requests that starts from the run.

    `grid` measures every configuration, and takes no warm start.
    """
    run = expected.run
    start = None if run.options.search == "grid" else str(run.folder.path)
    return _search_again(run.options, warm_start=start)


def present_search(judgement: Judgement) -> NextStep:
    """Return the search with requests as in production."""
    size = next((check for check in judgement.checks if check.name == "samples per request"), None)
    if size is not None and size.status == "differs" and size.measured is not None:
        return search_for_size(judgement.expected, size.measured.value)
    return same_search(judgement.expected)


def search_for_size(expected: Expectation, request_samples: float) -> NextStep:
    """Return the search for requests of ``request_samples`` on average, another size than that of the run.

    It has no warm start, which takes measurements of the same size only.
    """
    problem, options = expected.run.problem, expected.run.options
    if has_recorded_sizes(options):
        advice = (
            "record a new trace, whose requests have the present sizes, in place of the old one, and search again"
        )
        return search_step(expected, advice, _search_again(options), COLD)
    size = nearest_other_size(expected.request_samples, request_samples)
    if size == expected.request_samples or problem.kind is ModelKind.STATEFUL:  # Triton takes one sample a request
        return same_search(expected)
    largest = max(problem.space.max_batch_size)
    if size > largest:
        advice = f"raise the largest max_batch_size of the search, {largest:,}, to {size:,} or more, and search again"
        return search_step(expected, f"{advice} with --request-batch-size {size}", "", COLD)
    return search_step(expected, "search again", _search_again(options, request_batch_size=size), COLD)


def nearest_other_size(own: float, present: float) -> int:
    """Return the whole number of samples that is nearest to ``present``, on the same side of ``own`` if possible."""
    nearest = max(1, round(present))
    if nearest != own:
        return nearest
    return math.ceil(present) if present > own else max(1, math.floor(present))


def has_recorded_sizes(options: RunOptions) -> bool:
    """Return whether the load of a run is a trace with the size of each request."""
    if options.load != "rate" or not is_trace(options.request_times) or options.request_batch_size is not None:
        return False
    try:
        return trace_sizes(options) is not None
    except BadInputError:  # the file no longer exists, and a new one is needed anyway
        return True


def _search_again(options: RunOptions, **changes: Any) -> str:
    return command_line(replace(options, **{"warm_start": None, "storage": None, "study_name": None, **changes}))


def plan_step(expected: Expectation, rate: float) -> NextStep:
    """Return the step that says how many replicas serve ``rate`` requests per second.

    `tune plan` needs a latency bound and a simulator or, for models that it does not describe, a safe rate.
    """
    run, of_what = expected.run, f"the number of {expected.replica_name}s"
    rounded = f"{rate:.0f}" if rate >= 1000 else f"{rate:.4g}"  # without an exponent
    command = f"tune plan {shlex.quote(show_path(run.folder.path))} --rate {rounded}req/s"
    if run.problem.is_simulated and expected.why_not_simulated is not WhyNotSimulated.NO_BATCH_TIMES:
        if not expected.sla.latencies:
            return NextStep(f"compute {of_what} for a latency bound, such as this one", f"{command} --sla-p95 20ms")
        if is_shaped(run):
            advice = f"record the times of the requests, such as requests.csv, and compute {of_what}"
            return NextStep(advice, f"{command} --trace requests.csv")
        return NextStep(f"compute {of_what}", command)
    if not run.problem.is_simulated and expected.safe_rate is not None:
        return NextStep(f"compute {of_what}", command)
    return NextStep(f"start more {expected.replica_name}s; `tune plan` cannot compute their number from this run", "")


def overload_step(judgement: Judgement, rate: Check, served: float) -> NextStep:
    """Return the step for replicas that serve ``served`` requests per second each, while they get too much load.

    Their clients may send more than that: those of a closed loop wait for responses. So there is a command only if
    the number of replicas for this rate is above the present one.
    """
    expected, replicas = judgement.expected, judgement.replicas
    step = plan_step(expected, served * replicas)
    if not step.command:
        return step
    sent = f"clients send at least the {formatting.number(served * replicas)} requests/s that are served"
    is_above_safe = replicas == 1 and expected.safe_rate is not None and served > expected.safe_rate
    if rate.status == "differs" or is_above_safe:
        advice = f"{step.advice}, which is above the present {replicas:,}: {sent}; give their own rate if it is known"
        return NextStep(advice, step.command)
    computed = "`tune plan` computes the number from the rate that they send"
    return NextStep(f"start more {expected.replica_name}s than the present {replicas:,}: {sent}; {computed}", "")


def burst_step(expected: Expectation, rate: float) -> NextStep:
    """Return the step for a server whose requests arrive in bursts of ``rate`` per second on average."""
    step = plan_step(expected, rate)
    if not step.command or " --trace " in step.command:
        return step
    of_what = f"the number of {expected.replica_name}s"
    advice = f"record the times of the requests, such as requests.csv, and compute {of_what}"
    return NextStep(advice, f"{step.command} --trace requests.csv")


def next_steps(judgement: Judgement) -> list[NextStep]:
    """Return what to do, most urgent first; empty if the recommendation fits."""
    expected, steps = judgement.expected, []
    run = shlex.quote(show_path(expected.run.folder.path))
    by_name = {check.name: check for check in judgement.checks}
    differing = {check.name for check in judgement.differing}
    if STALLS in differing:
        steps.append(NextStep("read the log of the server that serves nothing, and start it again if it hangs", ""))
    if FAILURES in differing:
        steps.append(NextStep("read the server's log, which has the reason of each failed request", ""))
    capacity, cause = by_name.get(rate_check_name(expected)), find_cause(judgement)
    kind = cause.kind if cause else None
    if capacity and capacity.measured and kind == "load":
        steps.append(overload_step(judgement, capacity, capacity.measured.value))
    elif capacity and capacity.measured and capacity.status == "near":
        steps.append(plan_step(expected, capacity.measured.value * judgement.replicas))
    if kind == "bursts" and capacity and capacity.measured:
        steps.append(burst_step(expected, capacity.measured.value * judgement.replicas))
    if differing & {*MODEL} or kind == "slower server":
        steps.append(
            NextStep("on the machine in production, test the recommendation again", f"tune verify --fresh {run}")
        )
    by_load = {check.name for check in judgement.differing if check.is_time} if kind in ("load", "bursts") else set()
    if differing - {rate_check_name(expected), FAILURES, STALLS} - by_load:
        steps.append(present_search(judgement))
    if judgement.undecided and not differing:
        steps.append(NextStep("watch again while the load is steady, or in more intervals (--intervals)", ""))
    return steps


def headline(judgement: Judgement) -> str:
    """Return the answer in one line."""
    model, run = one_line(judgement.expected.model), show_path(judgement.expected.run.folder.path)
    if judgement.verdict is Verdict.FAIL:
        cause = find_cause(judgement) if _is_led_by_cause(judgement) else None
        return f"{model} no longer fits {run}: {cause or judgement.differing[0].explanation}"
    if judgement.has_few_requests:
        return f"{model}: {_requests(judgement)} are too few to say that it fits {run}"
    if judgement.undecided:
        names = ", ".join(check.name for check in judgement.undecided)
        return f"{model}: {_requests(judgement)} do not decide whether it fits {run} ({names})"
    is_near = any(check.status == "near" for check in judgement.checks)
    fits = f"{model} fits {run}{', near its capacity' if is_near else ''}"
    if not judgement.unchecked_bounds:
        return fits
    verb = "was" if len(judgement.unchecked_bounds) == 1 else "were"
    return f"{fits}; {_metric_names(judgement.unchecked_bounds)} {verb} not checked"


def _metric_names(bounds: Sequence[Constraint]) -> str:
    return " and ".join(METRICS[bound.metric].short_name for bound in bounds)


def _why_unchecked(judgement: Judgement, bound: Constraint) -> str:
    """Return why the metrics of the servers do not show ``bound``, and how they would if a server can export it."""
    timing = METRICS[bound.metric].timing
    if timing is LATENCY and not judgement.expected.is_streamed:
        if METRICS[bound.metric].quantile is None:
            return NOT_EXPORTED
        has_others = any(load.latencies_ms for load in judgement.loads)
        options = " ".join(latency_quantiles(judgement.expected.sla.latency_levels, explicit=has_others))
        started = f"a tritonserver that is started with {options}, or by `tune serve --latency-quantiles`, exports it"
        return f"{started}; this takes {QUANTILE_COST}"
    if timing is LATENCY:
        return "Triton's time of a request ends before its last response"
    if timing is TTFT and METRICS[bound.metric].quantile is not None:
        if any(load.first_responses for load in judgement.loads):
            return "the server's histogram of first responses has no limit at the bound or above"
        return f"a newer tritonserver that is started with {FIRST_RESPONSES} counts the late first responses"
    return "Triton does not export it"


def _is_led_by_cause(judgement: Judgement) -> bool:
    """Return whether the answer has the cause of a difference: faults that no configuration repairs precede it."""
    return judgement.differing[0].name not in (FAILURES, STALLS)


def _requests(judgement: Judgement) -> str:
    return f"{formatting.count(round(judgement.requests), 'request')} in {judgement.seconds:,.0f} s"


def extent(judgement: Judgement) -> str:
    """Return how much was observed."""
    pending = judgement.loads[-1].pending if judgement.loads else 0.0
    parts = [
        f"{_requests(judgement)}, {formatting.count(len(judgement.loads), 'interval')}",
        _servers(judgement),
        f"{pending:,.0f} waiting at the end",
    ]
    if judgement.verdict is Verdict.UNDECIDED and judgement.has_few_requests:
        parts.append(f"at least {judgement.fewest_requests:,} requests are needed")
    if judgement.lost_intervals:
        lost = formatting.count(judgement.lost_intervals, "interval")
        parts.append(f"{lost} lost: a server was restarted or did not answer")
    return "; ".join(parts)


def _servers(judgement: Judgement) -> str:
    shown = formatting.count(judgement.servers, "server")
    each = judgement.expected.server_processes
    return shown if each == 1 else f"{shown}: {formatting.count(judgement.replicas, 'replica')} of {each} processes"


def print_judgement(console: Console, judgement: Judgement) -> None:
    """Print the judgement, with the answer on the first line."""
    print_line(console, "\n".join(wrap(headline(judgement), console.width)), "bold")
    print_wrapped(console, "observed", extent(judgement))
    if (cause := find_cause(judgement)) and not _is_led_by_cause(judgement):
        print_wrapped(console, "cause", str(cause))
    if judgement.checks:
        print_line(console)
        table = plain_table("", ">in production", ">expected", "")
        for check in judgement.checks:
            cells = (check.name, _measured(check), _range(check.expected, check.unit), WORDS[check.status])
            table.add_row(*map(Text, cells))
        print_table(console, table)
    if remarks := _remarks(judgement):
        print_line(console)
    for label, text in remarks:
        print_wrapped(console, label, text)
    for step in next_steps(judgement):
        print_line(console)
        print_wrapped(console, "next", step.advice)
        if step.command:
            print_unwrapped(console, "", step.command)


def _remarks(judgement: Judgement) -> list[tuple[str, str]]:
    """Return the lines below the table, each as (label, text)."""
    remarks: list[tuple[str, str]] = [
        (check.status, check.explanation) for check in judgement.checks if check.status in ("differs", "near")
    ]
    if judgement.undecided:
        names = ", ".join(check.name for check in judgement.undecided)
        meaning = (
            f"{names}: outside of the expected range, but the confidence interval overlaps with it: the load "
            "changes, or there are few intervals"
        )
        remarks.append(("undecided", meaning))
    reasons: dict[str, list[Constraint]] = {}
    for bound in judgement.unchecked_bounds:
        reasons.setdefault(_why_unchecked(judgement, bound), []).append(bound)
    remarks += [("not checked", f"{_metric_names(bounds)}: {reason}") for reason, bounds in reasons.items()]
    return remarks


def line(judgement: Judgement, clock: str) -> str:
    """Return the judgement in one line, for `--follow`."""
    name = rate_check_name(judgement.expected)
    rate = next((check for check in judgement.checks if check.name == name), None)
    shown = f"{_measured(replace(rate, unit=''))} {name}" if rate else "no load"
    return f"{clock} {shown}: {headline(judgement)}"


def _measured(check: Check) -> str:
    measured = check.measured
    if measured is None:
        return formatting.UNKNOWN
    ends = ""
    if math.isfinite(measured.low) and measured.high > measured.low:
        ends = f" ({formatting.number(max(0.0, measured.low))} to {formatting.number(measured.high)})"
    return f"{formatting.number(measured.value)}{ends}{_unit(check.unit)}"


def _range(expected: Range | None, unit: str) -> str:
    if expected is None:
        return formatting.UNKNOWN
    if math.isinf(expected.high):
        return "any"
    high = formatting.number(expected.high)
    low = formatting.number(expected.low)
    if expected.low <= 0:
        return f"up to {high}{_unit(unit)}"
    return f"{low} to {high}{_unit(unit)}" if low != high else f"{low}{_unit(unit)}"


def _unit(unit: str) -> str:
    return f" {unit}" if unit in ("ms", "%") else unit


def document(judgement: Judgement, urls: Sequence[str]) -> dict[str, Any]:
    """Return the document of `--json`. Values that are unknown or unbounded are null."""
    expected = judgement.expected
    search = present_search(judgement)
    return {
        "verdict": judgement.verdict.value,
        "answer": headline(judgement),
        "cause": cause.kind if (cause := find_cause(judgement)) else None,
        "run": show_path(expected.run.folder.path),
        "written": expected.run.info.get("written"),
        "run_verdict": expected.run.outcome.verdict.value if expected.run.outcome else None,
        "versions": dict(expected.run.versions),
        "model": expected.model,
        "sla": list(map(str, expected.sla)),
        "urls": list(urls),
        "servers": judgement.servers,
        "server_processes": expected.server_processes,
        "intervals": len(judgement.loads),
        "lost_intervals": judgement.lost_intervals,
        "seconds": round(judgement.seconds, 3),
        "requests": round(judgement.requests),
        "fewest_requests": judgement.fewest_requests,
        "failures": {reason: round(count) for reason, count in judgement.failures.items()},
        "pending_requests": round(judgement.loads[-1].pending) if judgement.loads else None,
        "checks": [_check_document(check) for check in judgement.checks],
        "unchecked_bounds": list(map(str, judgement.unchecked_bounds)),
        "next_steps": [{"advice": step.advice, "command": step.command or None} for step in next_steps(judgement)],
        "search": {
            "earlier_trials": len(expected.run.trials),
            "earlier_seconds": search_seconds(expected.run),
            "command": search.command or None,
        },
    }


def _check_document(check: Check) -> dict[str, Any]:
    return {
        "name": check.name,
        "status": check.status,
        "unit": check.unit or None,
        "measured": _finite(check.measured.value) if check.measured else None,
        "confidence_interval": _ends(check.measured),
        "expected": _ends(check.expected),
        "explanation": check.explanation or None,
    }


def _ends(interval: Estimate | Range | None) -> list[float | None] | None:
    return None if interval is None else [_finite(interval.low), _finite(interval.high)]


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None
