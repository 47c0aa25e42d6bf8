"""The judgement on production as text and as a JSON document."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from rich.console import Console
from rich.text import Text

from objectives.metrics import LATENCY, METRICS, TTFT
from objectives.sla import Constraint, Verdict
from optimizer.core.safe_text import one_line, show_path
from optimizer.options.server_options import QUANTILE_COST, latency_quantiles
from optimizer.results import formatting
from optimizer.results.result_document import json_value
from optimizer.results.terminal_output import (
    plain_table,
    print_line,
    print_table,
    print_unwrapped,
    print_wrapped,
    wrap,
)
from optimizer.watch.expectation import Expectation, Range
from optimizer.watch.fit_check import NOT_EXPORTED, Check, CheckKind, Judgement, ProductionValue
from optimizer.watch.next_steps import (
    SERVER_FAULTS,
    find_cause,
    next_steps,
    search_for_production_requests,
    search_seconds,
)

STATUS_TEXTS = {"differs": "DIFFERS", "unknown": "not checked"}  # others are shown as they are
FIRST_RESPONSES = "--metrics-config=histogram_latencies=true"


def check_name(check: Check, expectation: Expectation) -> str:
    """Return the name of a check in the table, in the answer and in the JSON document."""
    metric = METRICS[check.bound.metric].short_name if check.bound else ""
    return check.kind.title.format(replica=expectation.replica_name, metric=metric)


def _check_names(checks: Iterable[Check], expectation: Expectation) -> str:
    return ", ".join(check_name(check, expectation) for check in checks)


def headline(judgement: Judgement) -> str:
    """Return the answer in one line."""
    expectation = judgement.expectation
    model, run = one_line(expectation.model), show_path(expectation.run.folder.path)
    if judgement.verdict is Verdict.FAIL:
        cause = find_cause(judgement) if _is_led_by_cause(judgement) else None
        return f"{model} no longer fits {run}: {cause or judgement.differing[0].explanation}"
    if judgement.has_few_requests:
        return f"{model}: {_requests_text(judgement)} are too few to say that it fits {run}"
    if judgement.undecided:
        names = _check_names(judgement.undecided, expectation)
        return f"{model}: {_requests_text(judgement)} do not decide whether it fits {run} ({names})"
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
    if timing is LATENCY and not judgement.expectation.is_streamed:
        if METRICS[bound.metric].quantile is None:
            return NOT_EXPORTED
        exports_others = any(load.latencies_ms for load in judgement.loads)
        options = " ".join(latency_quantiles(judgement.expectation.sla.latency_levels, explicit=exports_others))
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
    return judgement.differing[0].kind not in SERVER_FAULTS


def _requests_text(judgement: Judgement) -> str:
    return f"{formatting.count(round(judgement.requests), 'request')} in {judgement.seconds:,.0f} s"


def observed_text(judgement: Judgement) -> str:
    """Return how much was observed."""
    pending = judgement.loads[-1].pending if judgement.loads else 0.0
    parts = [
        f"{_requests_text(judgement)}, {formatting.count(len(judgement.loads), 'interval')}",
        _servers_text(judgement),
        f"{pending:,.0f} waiting at the end",
    ]
    if judgement.verdict is Verdict.UNDECIDED and judgement.has_few_requests:
        parts.append(f"at least {judgement.fewest_requests:,} requests are needed")
    if judgement.lost_intervals:
        lost = formatting.count(judgement.lost_intervals, "interval")
        parts.append(f"{lost} lost: a server was restarted or did not answer")
    return "; ".join(parts)


def _servers_text(judgement: Judgement) -> str:
    servers, processes = formatting.count(judgement.servers, "server"), judgement.expectation.server_processes
    if processes == 1:
        return servers
    return f"{servers}: {formatting.count(judgement.replicas, 'replica')} of {processes} processes"


def print_judgement(console: Console, judgement: Judgement) -> None:
    """Print the judgement, with the answer on the first line."""
    print_line(console, "\n".join(wrap(headline(judgement), console.width)), "bold")
    print_wrapped(console, "observed", observed_text(judgement))
    if (cause := find_cause(judgement)) and not _is_led_by_cause(judgement):
        print_wrapped(console, "cause", str(cause))
    if judgement.checks:
        print_line(console)
        table = plain_table("", ">in production", ">expected", "")
        for check in judgement.checks:
            cells = (
                check_name(check, judgement.expectation),
                _measured_text(check.measured, check.kind.unit),
                _range_text(check.expected_range, check.kind.unit),
                STATUS_TEXTS.get(check.status, check.status),
            )
            table.add_row(*map(Text, cells))
        print_table(console, table)
    if remarks := list(_remarks(judgement)):
        print_line(console)
    for label, text in remarks:
        print_wrapped(console, label, text)
    for step in next_steps(judgement):
        print_line(console)
        print_wrapped(console, "next", step.advice)
        if step.command:
            print_unwrapped(console, "", step.command)


def _remarks(judgement: Judgement) -> Iterator[tuple[str, str]]:
    """Yield the lines below the table, each as (label, text)."""
    for check in judgement.checks:
        if check.status in ("differs", "near"):
            yield check.status, check.explanation
    if judgement.undecided:
        meaning = (
            "outside of the expected range, but the confidence interval overlaps with it: the load changes, or there "
            "are few intervals"
        )
        yield "undecided", f"{_check_names(judgement.undecided, judgement.expectation)}: {meaning}"
    reasons: dict[str, list[Constraint]] = {}
    for bound in judgement.unchecked_bounds:
        reasons.setdefault(_why_unchecked(judgement, bound), []).append(bound)
    yield from (("not checked", f"{_metric_names(bounds)}: {reason}") for reason, bounds in reasons.items())
    if others := ", ".join(judgement.expectation.run.concurrent_models):
        meaning = f"the run measured {judgement.expectation.model} next to other models, and the values are its own"
        yield "not checked", f"{others}: {meaning}"


def follow_line(judgement: Judgement, clock: str) -> str:
    """Return the judgement in one line, for `--follow`."""
    rate_text = "no load"
    if rate := judgement.check(CheckKind.RATE):
        rate_text = f"{_measured_text(rate.measured)} {check_name(rate, judgement.expectation)}"
    return f"{clock} {rate_text}: {headline(judgement)}"


def _measured_text(measured: ProductionValue | None, unit: str = "") -> str:
    if measured is None:
        return formatting.UNKNOWN
    ends = ""
    if math.isfinite(measured.low) and measured.high > measured.low:
        ends = f" ({formatting.number(max(0.0, measured.low))} to {formatting.number(measured.high)})"
    return f"{formatting.number(measured.value)}{ends}{_unit(unit)}"


def _range_text(expected_range: Range | None, unit: str) -> str:
    if expected_range is None:
        return formatting.UNKNOWN
    if math.isinf(expected_range.high):
        return "any"
    low, high = formatting.number(expected_range.low), formatting.number(expected_range.high)
    if expected_range.low <= 0:
        return f"up to {high}{_unit(unit)}"
    return f"{low} to {high}{_unit(unit)}" if low != high else f"{low}{_unit(unit)}"


def _unit(unit: str) -> str:
    return f" {unit}" if unit in ("ms", "%") else unit


def document(judgement: Judgement, urls: Sequence[str]) -> dict[str, Any]:
    """Return the document of `--json`. Values that are unknown or unbounded are null."""
    expectation, cause = judgement.expectation, find_cause(judgement)
    run = expectation.run
    return {
        "verdict": judgement.verdict.value,
        "answer": headline(judgement),
        "cause": cause.kind if cause else None,
        "run": show_path(run.folder.path),
        "written": run.info.get("written"),
        "run_verdict": run.outcome.verdict.value if run.outcome else None,
        "versions": dict(run.versions),
        "model": expectation.model,
        "sla": list(map(str, expectation.sla)),
        "urls": list(urls),
        "servers": judgement.servers,
        "server_processes": expectation.server_processes,
        "intervals": len(judgement.loads),
        "lost_intervals": judgement.lost_intervals,
        "seconds": round(judgement.seconds, 3),
        "requests": round(judgement.requests),
        "fewest_requests": judgement.fewest_requests,
        "failures": {reason: round(count) for reason, count in judgement.failures.items()},
        "pending_requests": round(judgement.loads[-1].pending) if judgement.loads else None,
        "checks": [_check_document(check, expectation) for check in judgement.checks],
        "unchecked_bounds": list(map(str, judgement.unchecked_bounds)),
        "next_steps": [{"advice": step.advice, "command": step.command or None} for step in next_steps(judgement)],
        "search": {
            "earlier_trials": len(run.trials),
            "earlier_seconds": search_seconds(run),
            "command": search_for_production_requests(judgement).command or None,
        },
    }


def _check_document(check: Check, expectation: Expectation) -> dict[str, Any]:
    return {
        "name": check_name(check, expectation),
        "status": check.status,
        "unit": check.kind.unit or None,
        "measured": json_value(check.measured.value) if check.measured else None,
        "confidence_interval": _ends(check.measured),
        "expected": _ends(check.expected_range),
        "explanation": check.explanation or None,
    }


def _ends(interval: ProductionValue | Range | None) -> list[object] | None:
    return None if interval is None else [json_value(interval.low), json_value(interval.high)]
