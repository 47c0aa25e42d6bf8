"""What ``tune verify`` found, as text and as data."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.console import Console
from rich.text import Text

from objectives.metrics import METRICS
from optimizer.report import export, words

if TYPE_CHECKING:
    from collections.abc import Sequence

    from optimizer.confirm.plan import Confirmed
    from optimizer.confirm.verification import Verified
    from optimizer.outcome import Outcome
    from optimizer.problem import Problem


def print_verified(
    console: Console,
    verified: Verified,
    before: Outcome,
    problem: Problem,
    results_dir: str,
    notes: Sequence[str] = (),
) -> None:
    """The answer, then each configuration as it was and as it is, then ``notes``."""
    holds = verified.holds
    goal = words.bounds(problem.constraints) or "no bound"
    answer = "holds" if holds else "does not hold"
    _say(console, f"{problem.model}: the recommendation {answer} ({goal})", "bold green" if holds else "bold red")
    if verified.reason:
        _say(console, f"because {verified.reason}")
    _say(console)
    for place, one in enumerate(verified.found):
        role = "recommended" if place == 0 and verified.found else "runner-up"
        _say(console, f"{role}, trial {one.point.trial}: {words.configuration(one.point.candidate)}", "bold")
        if place == 0 and before.recommended is not None:
            _say(console, f"  was  {words.performance(before.recommended, one.latency)}")
        _say(console, f"  now  {words.performance(one.point, one.latency)}")
        _say(console, f"  {words.verdict(one.judged)}, {_intervals(one)}")
    for candidate, reason in verified.failed:
        _say(console, f"not measured: {words.configuration(candidate)}: {reason}", "red")
    _say(console)
    _say(console, f"verdict {_holds(verified.verdict_holds)}, ranking {_holds(verified.ranking_holds)}")
    for note in notes:
        _say(console, f"note: {note}", "yellow")
    _say(console, f"results {results_dir}")


def document(verified: Verified, before: Outcome, results_dir: str, notes: Sequence[str] = ()) -> dict[str, object]:
    """What ``--json`` prints and verify.json keeps."""
    return {
        "holds": verified.holds,
        "verdict_holds": verified.verdict_holds,
        "ranking_holds": verified.ranking_holds,
        "reason": verified.reason or None,
        "before": export.entry(before.recommended) if before.recommended else None,
        "found": [{**export.entry(one.point), "confirmation": export.confirmation(one)} for one in verified.found],
        "failed": [
            {"configuration": words.configuration(candidate), "reason": reason}
            for candidate, reason in verified.failed
        ],
        "notes": list(notes),
        "results_dir": results_dir,
    }


def _intervals(one: Confirmed) -> str:
    told = words.interval(METRICS["throughput"], one.throughput)
    if one.latency_ms.is_unknown:
        return told
    return f"{told}, {words.short(one.latency)} {words.interval(METRICS[one.latency], one.latency_ms)}"


def _holds(holds: bool) -> str:
    return "holds" if holds else "does not hold"


def _say(console: Console, text: str = "", style: str = "") -> None:
    console.print(Text(text, style), soft_wrap=True)
