"""Prints an explanation of a run."""

from __future__ import annotations

import math
from collections.abc import Iterator

from rich.console import Console
from rich.text import Text

from objectives.metrics import METRICS
from objectives.sla import Constraint
from optimizer.core.trial import Candidate, Point
from optimizer.explain.bottleneck import BottleneckKind
from optimizer.explain.explanation import Explanation, PredictedLatency, RunnerUp, Simulation
from optimizer.explain.forecaster import SLIGHT, Forecast, Gain, OtherSla, Remedy
from optimizer.results import configuration_text, formatting, outcome_values, summary
from optimizer.results.shared_memory_effect import SharedMemoryEffect
from optimizer.results.terminal_output import plain_table, print_table, wrap

WIDTH = 80
LARGE_ERROR = 0.25  # median relative error in throughput of a model whose forecasts are only hints

BOUNDS: dict[BottleneckKind, str] = {
    "compute": "computing",
    "instances": "too few instances",
    "copying": "copying inputs and outputs",
    "queue": "the queue",
    "client": "the client and the network",
    "waiting": "waiting for the first response",
    "first response": "the time of a prompt",
    "generation": "generating responses",
    "unknown": "unknown",
}


def print_explanation(console: Console, explanation: Explanation) -> None:
    """Print ``explanation`` in at most 80 columns."""
    _print_subject(console, explanation)
    _heading(console, f"What limits the throughput: {BOUNDS[explanation.bottleneck.kind]}")
    _sentences(console, *explanation.bottleneck.reasons)
    _print_stages(console, explanation)
    _heading(console, "Which constraint binds")
    _sentences(console, *_binding(explanation))
    if explanation.simulation is not None:
        _print_simulation(console, explanation, explanation.simulation)
    elif not explanation.run.problem.is_simulated:
        _heading(console, "What would help")
        _sentences(console, "Nothing is predicted: no measurement has the throughput and all bounded times.")
    if explanation.shared_memory is not None:
        _heading(console, "Shared memory between client and server")
        _sentences(console, *_shared_memory(explanation.shared_memory))
    if explanation.recommended:
        _heading(console, "Why the runner-up was not recommended")
        _sentences(console, *_runner_up(explanation, explanation.runner_up))
    console.print()
    console.print(Text.assemble(("results  ", "dim"), str(explanation.run.folder.path)), soft_wrap=True)


def _print_subject(console: Console, explanation: Explanation) -> None:
    problem, point = explanation.run.problem, explanation.subject.point
    outcome = explanation.run.outcome
    assert outcome is not None
    headline = summary.headline(outcome, problem)
    for line in wrap(headline, WIDTH):
        console.print(Text(line, formatting.VERDICT_STYLES[outcome.verdict]))
    latencies = problem.sla.bounded_latencies
    role = "recommended" if explanation.recommended else "closest"
    _sentences(console, f"{role}, trial {point.trial}: {configuration_text.configuration(point.candidate)}")
    _sentences(console, f"measured: {outcome_values.measured_performance(outcome, point, *latencies)}")
    if explanation.unfinished:
        _sentences(console, explanation.unfinished)


def _print_stages(console: Console, explanation: Explanation) -> None:
    stages = explanation.subject.stages_ms
    total = sum(stages.values())
    if not total:
        return
    table = plain_table("  stage of a request", ">ms", ">share")
    for stage, milliseconds in stages.items():
        table.add_row(f"  {stage}", f"{milliseconds:,.3f}", f"{milliseconds / total:.0%}")
    print_table(console, table)


def _binding(explanation: Explanation) -> Iterator[str]:
    binding = explanation.binding
    if not explanation.run.problem.sla:
        yield "None: the run had no SLA."
        return
    if not explanation.recommended:
        why = explanation.no_recommendation_reason
        missed = f"{formatting.bound(binding.constraint)} is missed: {why}" if binding.constraint else None
        yield f"{missed or why[:1].upper() + why[1:]}."
    elif binding.constraint is None or binding.beyond is None:
        yield _no_bound_binds(explanation)
    else:
        value = formatting.value_of(binding.beyond, binding.constraint.metric)
        yield (
            f"{formatting.bound(binding.constraint)}: beyond it, trial {binding.beyond.trial} served "
            f"{formatting.value_of(binding.beyond, 'throughput')} ({binding.gain:+.1%}), "
            f"with {formatting.short_metric(binding.constraint.metric)} {value}."
        )
    if explanation.recommended:
        yield from _more_within(explanation)
        used = ((bound, binding.used.get(str(bound))) for bound in explanation.run.problem.sla)
        shares = [f"{share:.0%} of {formatting.bound(bound)}" for bound, share in used if share is not None]
        if shares:
            yield f"The recommendation uses {', '.join(shares)}."
        if explanation.simulation is not None and explanation.simulation.next_load is not None:
            yield _next_load(explanation.simulation.next_load, explanation.simulation.next_measured, explanation)


def _no_bound_binds(explanation: Explanation) -> str:
    """Return why no bound binds, with the measurement that had more throughput if there is one."""
    outcome, subject, problem = explanation.run.outcome, explanation.subject.point, explanation.run.problem
    assert outcome is not None
    most = max(outcome.points, key=lambda point: point.throughput_infer_per_sec, default=subject)
    if most.throughput_infer_per_sec <= subject.throughput_infer_per_sec:
        if subject.load.concurrency and subject.load.concurrency >= problem.max_concurrency:
            tried = max(point.load.concurrency for point in outcome.points)
            return (
                f"None: no measurement had more throughput. The run tried at most {tried:,} "
                "requests in flight, so more of them may serve more."
            )
        return (
            "None: no measurement had more throughput. Among the tried configurations and loads, the capacity of the "
            "server is the limit."
        )
    shown = _measured(explanation, most)
    if not most.measurement.stable:
        return f"Only an unstable measurement had more throughput, so none is known to bind: {shown}."
    missed = problem.sla.missed(most.measurement)
    if missed:
        bounds = formatting.bounds(missed)
        return f"Several together. The measurement with the most throughput misses {bounds}: {shown}."
    return "None: no measurement beyond a bound had more throughput."


def _more_within(explanation: Explanation) -> Iterator[str]:
    """Yield the measurement within the bounds that had more throughput than the recommendation, and why it lost."""
    outcome, subject, sla = explanation.run.outcome, explanation.subject.point, explanation.run.problem.sla
    assert outcome is not None
    within = [point for point in outcome.points if point.measurement.stable and sla.is_met(point.measurement)]
    most = max(within, key=lambda point: point.throughput_infer_per_sec, default=subject)
    if most.throughput_infer_per_sec <= subject.throughput_infer_per_sec:
        return
    why = outcome_values.why_not_recommended(outcome, most)
    yield f"Another measurement within the bounds had more throughput: {_measured(explanation, most)}."
    yield f"It is not recommended, because {why}."


def _measured(explanation: Explanation, point: Point) -> str:
    """Return a measurement with its intervals and its origin."""
    outcome, latencies = explanation.run.outcome, explanation.run.problem.sla.bounded_latencies
    assert outcome is not None
    origin = f"trial {point.trial}"
    if outcome.confirmation_of(point) is None:
        origin += ", one measurement of the search" + ("" if point.measurement.stable else ", unstable")
    return f"{outcome_values.measured_performance(outcome, point, *latencies)}; {origin}"


def _next_load(forecast: Forecast, measured: Point | None, explanation: Explanation) -> str:
    problem = explanation.run.problem
    noun = "sequences" if problem.space.is_stateful else "requests"
    if measured is not None:
        return f"With {forecast.concurrency:,} {noun} in flight, it was measured: {_measured(explanation, measured)}."
    missed = [
        formatting.bound(bound)
        for bound in problem.sla.latencies
        if forecast.latencies_ms.get(bound.metric, 0.0) > bound.bound
    ]
    effect = (
        f", which misses {' and '.join(missed)}"
        if missed
        else ", within the bounds on times"
        if problem.sla.latencies
        else ""
    )
    throughput = formatting.quantity(METRICS["throughput"], forecast.throughput_infer_per_sec)
    return (
        f"With {forecast.concurrency:,} {noun} in flight, it is expected to serve {throughput} with "
        f"{_latencies(forecast)}{effect}."
    )


def _latencies(forecast: Forecast) -> str:
    return " and ".join(
        f"{formatting.short_metric(metric)} {formatting.number(value)} ms"
        for metric, value in forecast.latencies_ms.items()
    )


def _print_simulation(console: Console, explanation: Explanation, simulation: Simulation) -> None:
    _heading(console, "What would help")
    _sentences(console, _source(simulation))
    if explanation.forecasts.throughput:
        _sentences(console, str(explanation.forecasts))
    for remedy in simulation.remedies:
        if remedy.name == "no copying" and explanation.shared_memory is not None:
            continue  # it is measured
        effect = _effect(remedy, explanation)
        change = f"{remedy.name}: {effect} ({remedy.change})"
        _sentences(console, change if simulation.is_simulated else f"{remedy.name} {remedy.change}: {effect}")
    usual = None
    if not simulation.is_simulated and explanation.recommended and simulation.best is not None:
        usual = simulation.best.candidate
        if usual != explanation.subject.point.candidate:
            _sentences(console, _best_tried(simulation.best))
    for other in simulation.other_slas:
        goal = f"{formatting.short_metric(other.metric)} <= {formatting.exact(round(other.bound_ms, 3))} ms"
        _sentences(console, f"another SLA, {goal}: {_effect_of_sla(other, usual, explanation)}")
    if not explanation.recommended:
        alone = ", with one request at a time" if explanation.run.problem.is_simulated else ""
        for latency in simulation.latencies:
            if math.isfinite(latency.bound_ms):
                _sentences(console, *_lowest(latency, alone, explanation))


def _lowest(latency: PredictedLatency, alone: str, explanation: Explanation) -> Iterator[str]:
    """Yield the lowest measured latency, then the lowest expected one if that is clearly lower."""
    name, measured_ms = formatting.short_metric(latency.metric), math.inf
    if latency.quickest is not None:
        measured_ms = METRICS[latency.metric].value(latency.quickest.measurement) or math.inf
        yield (
            f"The lowest measured {name} is {formatting.number(measured_ms)} ms: "
            f"{_measured(explanation, latency.quickest)}."
        )
    if latency.quickest_ms < (1 - SLIGHT) * measured_ms:
        yield (
            f"The lowest expected {name} of the tried configurations is {formatting.number(latency.quickest_ms)} "
            f"ms{alone}. It was not measured."
        )


def _effect(remedy: Remedy, explanation: Explanation) -> str:
    """Return the measurement of the changed configuration, or the forecast if there is none."""
    if remedy.measured is not None:
        sign = f"{remedy.gain.estimate:+.0%}, " if remedy.gain and explanation.recommended else ""
        return f"{sign}measured: {_measured(explanation, remedy.measured)}"
    return f"{_gain(remedy.gain, remedy.forecast, explanation)}{_refuted(remedy, explanation)}"


def _effect_of_sla(other: OtherSla, usual: Candidate | None, explanation: Explanation) -> str:
    """Return the best measurement within another bound, and the forecast where that is higher."""
    forecast, point = other.forecast, other.measured
    refuted = _refuted(other, explanation)
    candidate = forecast.candidate if forecast else usual
    best = f" ({configuration_text.configuration(candidate)})" if candidate and candidate != usual else ""
    if point is None:
        return f"{_gain(other.gain, forecast, explanation, of_sla=True)}{best}{refuted}"
    is_other = point != explanation.subject.point
    sign = f"{other.gain.estimate:+.0%}, " if other.gain and is_other else ""
    text = f"{sign}measured: {_measured(explanation, point)}"
    own_bound_ms = explanation.run.problem.sla.latency_bound_ms(other.metric)
    latency_ms = METRICS[other.metric].value(point.measurement)
    if is_other and other.factor > 1 and latency_ms is not None and latency_ms <= own_bound_ms:
        text += f", which is within {formatting.exact(own_bound_ms)} ms too"
    if point.candidate != explanation.subject.point.candidate:
        text += f" ({configuration_text.configuration(point.candidate)})"
    expected = _expected(other, explanation)
    if expected <= (1 + SLIGHT) * point.throughput_infer_per_sec or other.refuted_by is not None:
        return text
    return f"{text}. Expected: up to {formatting.quantity(METRICS['throughput'], expected)}{best}"


def _expected(other: OtherSla, explanation: Explanation) -> float:
    """Return the expected throughput: the measured one of the recommendation times the gain, if it is known."""
    if other.forecast is None:
        return 0.0
    if other.forecast_gain is None or not explanation.recommended:
        return other.forecast.throughput_infer_per_sec
    return explanation.subject.point.throughput_infer_per_sec * (1 + other.forecast_gain.estimate)


def _refuted(effect: Remedy | OtherSla, explanation: Explanation) -> str:
    if effect.refuted_by is None:
        return ""
    return f", but the measurement at this load misses the bounds: {_measured(explanation, effect.refuted_by)}"


def _best_tried(forecast: Forecast) -> str:
    throughput = formatting.quantity(METRICS["throughput"], forecast.throughput_infer_per_sec)
    return (
        f"Within these bounds, another tried configuration is expected to serve most: {throughput} at concurrency "
        f"{forecast.concurrency:,} ({configuration_text.configuration(forecast.candidate)}). "
        "The gains of other bounds are relative to it."
    )


def _source(simulation: Simulation) -> str:
    """Return the origin of the gains: the model, the number of measurements it was fitted to, and its errors."""
    bounds = [
        formatting.bound(Constraint(latency.metric, latency.bound_ms))
        for latency in simulation.latencies
        if math.isfinite(latency.bound_ms)
    ]
    within = f" within {' and '.join(bounds)}" if bounds else ""
    fitted = f"fitted to {formatting.count(simulation.points, 'measurement')} of this run"
    if simulation.is_simulated:
        return (
            f"Simulated{within}, {fitted} (median error in throughput {simulation.error:.0%}). Each change is "
            f"simulated alone, at its best load.{_caution(simulation)}"
        )
    errors = [f"{latency.error:.0%} in {formatting.short_metric(latency.metric)}" for latency in simulation.latencies]
    return (
        f"Predicted{within} by a {simulation.model} {fitted} (median error {simulation.error:.0%} in throughput, "
        f"{', '.join(errors)}), corrected by Gaussian processes. Each change is predicted alone, at its best load, "
        f"with a 95 % interval.{_caution(simulation)}"
    )


def _caution(simulation: Simulation) -> str:
    """Return a sentence about a model that is far from the measurements; empty if it is close to them."""
    if simulation.error <= LARGE_ERROR:
        return ""
    return " The model is far from the measurements: measure a change to rely on it."


def _shared_memory(effect: SharedMemoryEffect) -> Iterator[str]:
    yield f"{effect}."
    if effect.is_recommended:
        yield "Use it in a client on the machine of the server (see docs/shared-memory.md)."


def _gain(gain: Gain | None, forecast: Forecast | None, explanation: Explanation, *, of_sla: bool = False) -> str:
    if forecast is None:
        simulation = explanation.simulation
        has_several = simulation is not None and len(simulation.latencies) > 1
        if of_sla:
            return "no load is expected to meet it, and none was measured within it"
        return f"no load is expected to meet the {'bounds' if has_several else 'bound'}"
    throughput = formatting.quantity(METRICS["throughput"], forecast.throughput_infer_per_sec)
    if gain is None or not explanation.recommended:
        return f"{throughput}, {_latencies(forecast)}"
    low, high = gain.bounds
    if -SLIGHT < low <= high < SLIGHT:
        return "no difference is expected"
    if gain.interval is not None:
        return f"{gain.estimate:+.0%} ({low:+.0%} to {high:+.0%})"
    if gain.estimate < 0 and not of_sla:
        return "less is expected"
    ours = explanation.subject.point.throughput_infer_per_sec
    return f"{gain.estimate:+.0%}, about {formatting.quantity(METRICS['throughput'], ours * (1 + gain.estimate))}"


def _runner_up(explanation: Explanation, runner_up: RunnerUp | None) -> Iterator[str]:
    if runner_up is None:
        yield "There is none: no other configuration met the SLA."
        return
    yield f"trial {runner_up.point.trial}: {configuration_text.configuration(runner_up.point.candidate)}"
    latencies = explanation.run.problem.sla.bounded_latencies
    yield f"{formatting.performance(runner_up.point, *latencies)}{'' if runner_up.confirmed else ', in the search'}"
    if runner_up.confirmed is None:
        yield (
            f"It served {_less(runner_up.less)} than the recommendation in single measurements. It was not confirmed "
            "on fresh servers, so there is no confidence interval."
        )
        return
    low, high = sorted((runner_up.interval.low, runner_up.interval.high), key=abs)
    interval = "" if math.isinf(high) else f" (from {_less(low)} to {_less(high)})"
    yield f"On average over its windows it served {_less(runner_up.less)} than the recommendation{interval}."
    verdict = formatting.verdict(runner_up.confirmed)
    if runner_up.confirmed.sla:
        verdict = f"Its own test ended with {verdict}"
    if runner_up.missed:
        yield f"{verdict}: {runner_up.missed}."
    elif runner_up.interval.high < 0 and explanation.run.outcome is not None:
        why = outcome_values.why_not_recommended(explanation.run.outcome, runner_up.point)
        yield f"{verdict}. It is not recommended, because {why}."
    elif runner_up.interval.low <= 0 <= runner_up.interval.high:
        yield f"{verdict}. The difference is within the uncertainty of the measurements."
    else:
        yield f"{verdict}. The recommendation serves more."


def _less(share: float) -> str:
    return f"{abs(share):.1%} {'less' if share >= 0 else 'more'}"


def _heading(console: Console, text: str) -> None:
    console.print()
    console.print(Text(text, "bold"))


def _sentences(console: Console, *sentences: str) -> None:
    for sentence in sentences:
        for line in wrap(sentence, WIDTH - 2, first_indent="  ", indent="    "):
            console.print(Text(line), soft_wrap=True)
