"""An explanation in plain sentences."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Iterator

from rich.console import Console
from rich.text import Text

from objectives.metrics import METRICS
from objectives.sla import Constraint
from optimizer.explaining.bottleneck import Kind
from optimizer.explaining.explanation import Explanation, Simulation
from optimizer.explaining.forecast import Forecast
from optimizer.explaining.runner_up import RunnerUp
from optimizer.report import summary, words
from optimizer.report.plain_tables import plain_table, print_table

WIDTH = 80
SLIGHT = 0.02  # gains below it are within what a simulation errs

BOUNDS: dict[Kind, str] = {
    "compute": "computing",
    "instances": "too few instances",
    "copying": "copying inputs and outputs",
    "queue": "the queue",
    "client": "the client and the way to it",
    "unknown": "unknown",
}


def print_explanation(console: Console, told: Explanation) -> None:
    """At most 80 columns, whatever the terminal has."""
    _print_subject(console, told)
    _heading(console, f"What bounds the throughput: {BOUNDS[told.bottleneck.kind]}")
    _sentences(console, *told.bottleneck.reasons)
    _print_stages(console, told)
    _heading(console, "Which constraint binds")
    _sentences(console, *_binding(told))
    if told.simulation is not None:
        _print_simulation(console, told, told.simulation)
    if told.recommended:
        _heading(console, "Why the runner-up lost")
        _sentences(console, *_runner_up(told, told.runner_up))
    console.print()
    console.print(Text.assemble(("results  ", "dim"), str(told.run.folder.path)), soft_wrap=True)


def _print_subject(console: Console, told: Explanation) -> None:
    problem, point = told.run.problem, told.subject.point
    outcome = told.run.outcome
    assert outcome is not None
    headline = summary.headline(outcome, problem)
    for line in textwrap.wrap(headline, WIDTH):
        console.print(Text(line, "bold green" if told.recommended else "bold red"))
    latency = words.judged_latency(problem.constraints)
    role = "recommended" if told.recommended else "closest"
    _sentences(console, f"{role}, trial {point.trial}: {words.configuration(point.candidate)}")
    _sentences(console, f"at its best load: {words.performance(point, latency)}")
    if told.unfinished:
        _sentences(console, told.unfinished)


def _print_stages(console: Console, told: Explanation) -> None:
    stages = told.subject.stages_ms
    total = sum(stages.values())
    if not total:
        return
    table = plain_table("  stage of a request", ">ms", ">share")
    for stage, milliseconds in stages.items():
        table.add_row(f"  {stage}", f"{milliseconds:,.3f}", f"{milliseconds / total:.0%}")
    print_table(console, table)


def _binding(told: Explanation) -> Iterator[str]:
    found = told.binding
    if not told.run.problem.constraints:
        yield "None: the run had no bound."
        return
    if not told.recommended:
        yield f"{found.constraint} is missed: {told.holds_back.rstrip('.')}."
    elif found.constraint is None or found.beyond is None:
        yield "None of what was measured served more: the server's capacity binds, no bound does."
    else:
        value = words.of(found.beyond, found.constraint.metric)
        yield (
            f"{words.bound(found.constraint)}: beyond it trial {found.beyond.trial} served "
            f"{words.of(found.beyond, 'throughput')} ({found.gain:+.1%}), with {_short(found.constraint)} {value}."
        )
    if told.recommended:
        shares = [f"{share:.0%} of {text}" for text, share in found.used.items()]
        if shares:
            yield f"The recommendation uses {', '.join(shares)}."


def _print_simulation(console: Console, told: Explanation, found: Simulation) -> None:
    _heading(console, "What would help")
    bound = f" within {_latency_bound(found)}" if math.isfinite(found.bound_ms) else ""
    _sentences(
        console,
        f"Simulated{bound}, with times that {words.count(found.points, 'measurement')} of this run told "
        f"(median error in throughput {found.error:.0%}); each change alone, at its best load.",
    )
    for one in found.remedies:
        effect = _gain(one.gain, one.forecast, found, told)
        _sentences(console, f"{one.name}: {effect} ({one.change})")
    if found.other_slas:
        latency = words.short(found.latency)
        for other in found.other_slas:
            goal = f"{latency} <= {words.exact(round(other.bound_ms, 3))} ms"
            effect = _gain(other.gain, other.forecast, found, told, of_sla=True)
            best = f" ({words.configuration(other.forecast.candidate)})" if other.forecast else ""
            _sentences(console, f"another SLA, {goal}: {effect}{best}")
    if not told.recommended and math.isfinite(found.bound_ms):
        _sentences(
            console,
            f"The lowest {words.short(found.latency)} that is expected of what was tried is "
            f"{words.number(found.quickest_ms)} ms, one request at a time.",
        )


def _gain(
    gain: float | None, forecast: Forecast | None, found: Simulation, told: Explanation, *, of_sla: bool = False
) -> str:
    if forecast is None:
        return "no load meets it" if of_sla else "no load meets the bound"
    throughput = words.quantity(METRICS["throughput"], forecast.throughput_infer_per_sec)
    if gain is None or not told.recommended:
        return f"{throughput}, {words.short(found.latency)} {words.number(forecast.latency_ms)} ms"
    if abs(gain) < SLIGHT:
        return "makes no difference"
    if gain < 0 and not of_sla:
        return "serves less"
    ours = told.subject.point.throughput_infer_per_sec
    return f"{gain:+.0%}, about {words.quantity(METRICS['throughput'], ours * (1 + gain))}"


def _runner_up(told: Explanation, found: RunnerUp | None) -> Iterator[str]:
    if found is None:
        yield "There is none: nothing else met the bounds."
        return
    yield f"trial {found.point.trial}: {words.configuration(found.point.candidate)}"
    latency = words.judged_latency(told.run.problem.constraints)
    yield f"{words.performance(found.point, latency)}{'' if found.confirmed else ', in the search'}"
    if found.confirmed is None:
        yield (
            f"It served {_less(found.less)} than the recommendation, in single measurements: it was not measured on "
            "fresh servers, so that no interval can be given."
        )
        return
    low, high = sorted((found.interval.low, found.interval.high), key=abs)
    sure = "" if math.isinf(high) else f" (from {_less(low)} to {_less(high)})"
    yield f"On the average of its windows it served {_less(found.less)} than the recommendation{sure}."
    verdict = words.verdict(found.confirmed.judged)
    if found.missed:
        yield f"Its verdict is {verdict}: {found.missed}."
    else:
        yield f"It met the bounds as well ({verdict}): the recommendation serves more."


def _less(share: float) -> str:
    return f"{abs(share):.1%} {'less' if share >= 0 else 'more'}"


def _latency_bound(found: Simulation) -> str:
    return words.bound(Constraint(found.latency, found.bound_ms))


def _short(constraint: Constraint) -> str:
    return words.short(constraint.metric)


def _heading(console: Console, text: str) -> None:
    console.print()
    console.print(Text(text, "bold"))


def _sentences(console: Console, *sentences: str) -> None:
    for sentence in sentences:
        for line in textwrap.wrap(sentence, WIDTH - 2, initial_indent="  ", subsequent_indent="    "):
            console.print(Text(line), soft_wrap=True)
