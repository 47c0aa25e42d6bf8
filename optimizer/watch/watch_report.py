"""The judgement on production as text and as a JSON document, with the next step and its cost."""

from __future__ import annotations

import math
import shlex
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from rich.console import Console
from rich.text import Text

from objectives.confidence import Verdict
from optimizer.core.safe_text import one_line
from optimizer.options.command_line import command_line
from optimizer.options.run_options import is_trace
from optimizer.results import formatting
from optimizer.results.finished_run import FinishedRun
from optimizer.results.formatting import plain_table, print_line, print_table
from optimizer.results.terminal_summary import print_unwrapped, print_wrapped
from optimizer.watch.expectation import Expectation, Range, is_shaped
from optimizer.watch.fit_check import Check, Estimate, Judgement

SAVED = "warm starts from related machines took 5 to 14 % fewer deployments"  # benchmarks/warm_start.md
WORDS = {"fits": "fits", "near": "near", "differs": "DIFFERS", "unknown": "not checked"}
CAPACITY = ("requests/s per server",)  # checks that more servers repair
MODEL = ("execution time", "samples per execution")  # checks after which the deployment itself may be another one
FAILURES = ("failed requests",)


@dataclass(frozen=True, slots=True)
class SearchCost:
    """The cost of the earlier search: its trials, and its wall time with the confirmation (None if unknown)."""

    trials: int
    seconds: float | None


@dataclass(frozen=True, slots=True)
class NextStep:
    """A step for people: ``advice`` is a clause, ``command`` carries it out (may be empty)."""

    advice: str
    command: str


def search_cost(run: FinishedRun) -> SearchCost:
    """Return the cost of the earlier search."""
    result = run.info.get("result")
    seconds = result.get("wall_seconds") if isinstance(result, dict) else None
    is_known = isinstance(seconds, (int, float)) and not isinstance(seconds, bool) and 0 < seconds < math.inf
    return SearchCost(len(run.trials), float(seconds) if is_known and seconds is not None else None)


def cost_sentence(cost: SearchCost) -> str:
    """Return the cost of a warm-started search as a sentence without a full stop."""
    took = "" if cost.seconds is None else f" in {formatting.clock(cost.seconds)}"
    return f"the earlier search took {formatting.count(cost.trials, 'trial')}{took}, with its confirmation; {SAVED}"


def search_command(expected: Expectation, request_samples: float | None = None) -> str:
    """Return the command of a search that starts from the run, with requests of ``request_samples`` if these differ.

    `grid` measures every configuration, and takes no warm start.
    """
    run = expected.run
    start = None if run.options.search == "grid" else str(run.folder.path)
    size = run.options.request_batch_size
    if request_samples is not None and not is_trace(run.options.arrivals):  # a trace has the sizes
        size = max(1, round(request_samples))
    options = replace(run.options, warm_start=start, request_batch_size=size, storage=None, join=None)
    return command_line(options)


def next_steps(judgement: Judgement) -> list[NextStep]:
    """Return what to do, most urgent first; empty if the recommendation fits."""
    expected, steps = judgement.expected, []
    run = shlex.quote(one_line(str(expected.run.folder.path)))
    by_name = {check.name: check for check in judgement.checks}
    differing = {check.name for check in judgement.differing}
    if differing & {*FAILURES}:
        steps.append(NextStep("read the server's log, which has the reason of each failed request", ""))
    capacity = [by_name[name] for name in CAPACITY if name in by_name]
    if any(check.status in ("differs", "near") and check.measured for check in capacity):
        rate = next(check.measured.value for check in capacity if check.measured) * judgement.servers
        traffic = " --trace requests.csv" if is_shaped(expected.run) else ""
        steps.append(NextStep("compute the number of servers", f"tune plan {run} --rate {rate:.4g}req/s{traffic}"))
    if differing & {*MODEL}:
        steps.append(
            NextStep("on the machine in production, test the recommendation again", f"tune verify --fresh {run}")
        )
    if differing - {*CAPACITY, *FAILURES}:
        size = by_name.get("samples per request")
        differs = size is not None and size.status == "differs" and size.measured is not None
        command = search_command(expected, size.measured.value if differs and size and size.measured else None)
        again = "search again"
        if differs and is_trace(expected.run.options.arrivals):
            again = "record a new trace, whose requests have the present sizes, and search again with it"
        steps.append(NextStep(f"{again}: {cost_sentence(search_cost(expected.run))}", command))
    return steps


def headline(judgement: Judgement) -> str:
    """Return the answer in one line."""
    model, run = one_line(judgement.expected.model), one_line(str(judgement.expected.run.folder.path))
    if judgement.verdict is Verdict.FAIL:
        return f"{model} no longer fits {run}: {judgement.differing[0].explanation}"
    if judgement.verdict is Verdict.UNDECIDED:
        return f"{model}: {_requests(judgement)} are too few to say that it fits {run}"
    is_near = any(check.status == "near" for check in judgement.checks)
    return f"{model} fits {run}{', near its capacity' if is_near else ''}"


def _requests(judgement: Judgement) -> str:
    return f"{formatting.count(round(judgement.requests), 'request')} in {judgement.seconds:,.0f} s"


def extent(judgement: Judgement) -> str:
    """Return how much was observed."""
    pending = judgement.loads[-1].pending if judgement.loads else 0.0
    parts = [
        f"{_requests(judgement)}, {formatting.count(len(judgement.loads), 'sample')}",
        f"{formatting.count(judgement.servers, 'server')}",
        f"{pending:,.0f} waiting at the end",
    ]
    if judgement.verdict is Verdict.UNDECIDED:
        parts.append(f"at least {judgement.fewest_requests:,} requests are needed")
    if judgement.lost:
        parts.append(f"{formatting.count(judgement.lost, 'sample')} lost: a server was restarted or did not answer")
    return "; ".join(parts)


def print_judgement(console: Console, judgement: Judgement) -> None:
    """Print the judgement, with the answer on the first line."""
    print_line(console, headline(judgement), "bold")
    print_wrapped(console, "observed", extent(judgement))
    if judgement.checks:
        print_line(console)
        table = plain_table("", ">in production", ">expected", "")
        for check in judgement.checks:
            cells = (check.name, _measured(check), _range(check.expected, check.unit), WORDS[check.status])
            table.add_row(*map(Text, cells))
        print_table(console, table)
    for check in judgement.checks:
        if check.status in ("differs", "near"):
            print_line(console)
            print_wrapped(console, check.status, check.explanation)
    for step in next_steps(judgement):
        print_line(console)
        print_wrapped(console, "next", step.advice)
        if step.command:
            print_unwrapped(console, "", step.command)


def line(judgement: Judgement, clock: str) -> str:
    """Return the judgement in one line, for `--follow`."""
    rate = next((check for check in judgement.checks if check.name in CAPACITY), None)
    shown = f"{_measured(rate)} {CAPACITY[0]}" if rate else "no requests"
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
    cost = search_cost(expected.run)
    return {
        "verdict": judgement.verdict.value,
        "answer": headline(judgement),
        "run": one_line(str(expected.run.folder.path)),
        "written": expected.run.info.get("written"),
        "run_verdict": expected.run.outcome.verdict.value if expected.run.outcome else None,
        "versions": dict(expected.run.versions),
        "model": expected.model,
        "sla": list(map(str, expected.sla)),
        "urls": list(urls),
        "servers": judgement.servers,
        "samples": len(judgement.loads),
        "lost_samples": judgement.lost,
        "seconds": round(judgement.seconds, 3),
        "requests": round(judgement.requests),
        "fewest_requests": judgement.fewest_requests,
        "failures": {reason: round(count) for reason, count in judgement.failures.items()},
        "pending_requests": round(judgement.loads[-1].pending) if judgement.loads else None,
        "checks": [_check_document(check) for check in judgement.checks],
        "next_steps": [{"advice": step.advice, "command": step.command or None} for step in next_steps(judgement)],
        "search": {
            "earlier_trials": cost.trials,
            "earlier_seconds": cost.seconds,
            "command": search_command(expected),
        },
    }


def _check_document(check: Check) -> dict[str, Any]:
    return {
        "name": check.name,
        "status": check.status,
        "unit": check.unit or None,
        "measured": _finite(check.measured.value) if check.measured else None,
        "interval": _ends(check.measured),
        "expected": _ends(check.expected),
        "explanation": check.explanation or None,
    }


def _ends(interval: Estimate | Range | None) -> list[float | None] | None:
    return None if interval is None else [_finite(interval.low), _finite(interval.high)]


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None
