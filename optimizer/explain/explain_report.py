"""An explanation of a run as text on the terminal."""

from __future__ import annotations

import math
from collections.abc import Iterator

from rich.console import Console
from rich.text import Text

from objectives.intervals import ObjectiveGain
from objectives.metrics import METRICS, Metric
from objectives.sla import Constraint, Sla
from optimizer.core.candidate import Candidate
from optimizer.core.trial import Point
from optimizer.explain.bottleneck import BottleneckKind, used_shares, worst_missed
from optimizer.explain.explanation import ChangeForecasts, Explanation, PredictedLatency, RunnerUp
from optimizer.explain.forecaster import NEGLIGIBLE_GAIN, CandidateForecast, ChangeKind, Gain, OtherSla, Remedy
from optimizer.results import configuration_text, formatting, outcome_values, summary
from optimizer.results.finished_run import remark
from optimizer.results.formatting import percent, signed_percent
from optimizer.results.recommendation import Outcome
from optimizer.results.request_steps import HEADERS, step_rows
from optimizer.results.shared_memory_effect import SharedMemoryEffect
from optimizer.results.terminal_output import plain_table, print_table, wrap
from optimizer.simulator import concurrent_models

WIDTH = 80
LARGE_ERROR = 0.25  # median relative error in throughput of a model whose forecasts are only hints

BOTTLENECK_NAMES: dict[BottleneckKind, str] = {
    "compute": "computing",
    "instances": "too few instances",
    "copying": "copying inputs and outputs",
    "queue": "the queue",
    "client": "the client and the network",
    "other models": "the other models",
    "waiting": "waiting for the first response",
    "first response": "the time of a prompt",
    "generation": "generating responses",
    "unknown": "unknown",
}
STAGE_NAMES = {stage: name.removeprefix("server ") for stage, name in outcome_values.STAGES.items()} | {
    outcome_values.OTHER_MODELS: "other models",
    "waiting_ms": "waiting",
    "first_response_ms": "first response",
    "further_responses_ms": "further responses",
}
CHANGE_NAMES: dict[ChangeKind, str] = {
    "more_instances": "more instances",
    "fp16": "FP16",
    "larger_batches": "larger batches",
    "faster_network": "faster network",
    "no_copying": "no copying",
}


def print_explanation(console: Console, explanation: Explanation) -> None:
    """Print ``explanation`` in at most 80 columns."""
    _print_subject(console, explanation)
    _heading(console, f"What limits the throughput: {_bottleneck_name(explanation)}")
    _sentences(console, *explanation.bottleneck.reasons)
    _print_stages(console, explanation)
    _heading(console, f"Which bound prevents {formatting.advantage(explanation.outcome.objective)}")
    _sentences(console, *_binding_constraint(explanation))
    if explanation.changes is not None:
        _print_changes(console, explanation, explanation.changes)
    elif not explanation.run.problem.is_simulated:
        _heading(console, "What would help")
        _sentences(console, "No forecast: no measurement has the throughput and every bounded latency.")
    if explanation.shared_memory is not None:
        _heading(console, "Shared memory between client and server")
        _sentences(console, *_shared_memory_effect(explanation.shared_memory))
    if explanation.has_recommendation:
        _heading(console, "Why the runner-up was not recommended")
        _sentences(console, *_runner_up(explanation, explanation.runner_up))
    console.print()
    console.print(Text.assemble(("results  ", "dim"), str(explanation.run.folder.path)), soft_wrap=True)


def _bottleneck_name(explanation: Explanation) -> str:
    """Return the name of the bottleneck; that of the model if it is another one than the tuned one.

    If several models get load, it is the model in any case, because there are no stages of a request.
    """
    subject = explanation.subject
    if explanation.step_advice is not None and (subject.is_limited_by_another or not subject.stages_ms):
        return explanation.step_advice.step.model
    return BOTTLENECK_NAMES[explanation.bottleneck.kind]


def _print_subject(console: Console, explanation: Explanation) -> None:
    problem, point, outcome = explanation.run.problem, explanation.subject.point, explanation.outcome
    for line in wrap(summary.headline(outcome, problem), WIDTH):
        console.print(Text(line, formatting.VERDICT_STYLES[outcome.verdict]))
    metrics = outcome_values.shown_metrics(problem)
    role = "recommended" if explanation.has_recommendation else "closest"
    _sentences(console, f"{role}, trial {point.trial}: {configuration_text.configuration(point.candidate)}")
    _sentences(console, f"measured: {outcome_values.measured_performance(outcome, point, *metrics)}")
    if unfinished := remark(explanation.run):
        _sentences(console, f"{unfinished[0].upper()}{unfinished[1:]}.")


def _print_stages(console: Console, explanation: Explanation) -> None:
    stages, steps = explanation.subject.stages_ms, explanation.subject.steps
    if total := sum(stages.values()):
        table = plain_table("  stage of a request", ">ms", ">share")
        for stage, milliseconds in stages.items():
            table.add_row(f"  {STAGE_NAMES[stage]}", f"{milliseconds:,.3f}", percent(milliseconds / total))
        print_table(console, table)
    if steps:
        name, *numbers = HEADERS
        table = plain_table(f"  {name}", *numbers)
        for model, *cells in step_rows(steps):
            table.add_row(Text(f"  {model}"), *cells)
        print_table(console, table)


def _binding_constraint(explanation: Explanation) -> Iterator[str]:
    """Yield the constraint that binds, the parts of the bounds that are used, and the next higher load."""
    binding, subject, sla = explanation.binding, explanation.subject.point, explanation.run.problem.sla
    if not sla:
        yield "None: the run had no SLA."
        return
    if not explanation.has_recommendation:
        why = explanation.outcome.no_recommendation_reason
        missed = worst_missed(subject, sla)
        yield f"{formatting.bound(missed)} is missed: {why}." if missed else f"{why[:1].upper()}{why[1:]}."
    elif binding is None:
        yield _no_bound_binds(explanation)
    else:
        objective = explanation.outcome.objective
        value = formatting.value_of(binding.beyond, binding.constraint.metric)
        served = "served" if objective.name == "throughput" else f"had {formatting.goal_label(objective.name)}"
        better = "" if binding.gain is None else f" ({_change(objective, 1 + binding.gain)})"
        yield (
            f"{formatting.bound(binding.constraint)}: beyond it, trial {binding.beyond.trial} {served} "
            f"{formatting.value_of(binding.beyond, objective.name)}{better}, "
            f"with {formatting.short_metric(binding.constraint.metric)} {value}."
        )
    if explanation.has_recommendation:
        yield from _more_within(explanation)
        shares = used_shares(subject, sla)
        used = [
            f"{percent(shares[str(bound)])} of {formatting.bound(bound)}" for bound in sla if str(bound) in shares
        ]
        if used:
            yield f"The recommendation uses {', '.join(used)}."
        changes = explanation.changes
        if changes is not None and changes.next_load is not None:
            yield _next_load(changes.next_load, changes.next_measured, explanation)


def _change(objective: Metric, times_better: float) -> str:
    """Return the signed change of the value of ``objective`` that is ``times_better``."""
    return signed_percent((times_better if objective.better == "higher" else 1 / times_better) - 1, 1)


def _no_bound_binds(explanation: Explanation) -> str:
    """Return why no bound binds, with the measurement that had a better objective if there is one."""
    outcome, subject, problem = explanation.outcome, explanation.subject.point, explanation.run.problem
    objective = outcome.objective
    advantage = formatting.advantage(objective)
    better = [point for point in outcome.points if objective.is_better(point.measurement, subject.measurement)]
    if not better:
        if objective.name != "throughput":
            return f"None: no measurement had {advantage}."
        if subject.load.concurrency and subject.load.concurrency >= problem.max_concurrency:
            highest = max(point.load.concurrency for point in outcome.points)
            return (
                f"None: no measurement had more throughput. The run tried at most {highest:,} "
                "requests in flight, so more of them may serve more."
            )
        return (
            "None: no measurement had more throughput. Among the tried configurations and loads, the capacity of the "
            "server is the limit."
        )
    reliable = [point for point in better if _is_reliable(point, outcome)]
    best = Sla().best_point(reliable or better, [objective], unstable=True) or better[0]
    shown = _measured(explanation, best)
    if not reliable:
        return f"Only an unstable measurement had {advantage}, so none is known to bind: {shown}."
    missed = problem.sla.missed(best.measurement)
    if missed:
        bounds, name = formatting.bounds(missed), formatting.goal_label(objective.name)
        return f"Several together. The stable measurement with the best {name} misses {bounds}: {shown}."
    return f"None: no measurement beyond a bound had {advantage}."


def _is_reliable(point: Point, outcome: Outcome) -> bool:
    """Return whether ``point`` was stable in the search or has intervals from fresh servers, as in best_within."""
    return point.measurement.stable or outcome.confirmation_of(point) is not None


def _more_within(explanation: Explanation) -> Iterator[str]:
    """Yield the measurement within the bounds with a better objective than the recommendation, and why it lost."""
    outcome, subject, sla = explanation.outcome, explanation.subject.point, explanation.run.problem.sla
    objective = outcome.objective
    reliable = [point for point in outcome.points if _is_reliable(point, outcome)]
    best = sla.best_point(reliable, [objective], unstable=True)
    if best is None or not objective.is_better(best.measurement, subject.measurement):
        return
    why = outcome_values.why_not_recommended(outcome, best)
    advantage = formatting.advantage(objective)
    yield f"Another measurement within the bounds had {advantage}: {_measured(explanation, best)}."
    yield f"It is not recommended, because {why}."


def _measured(explanation: Explanation, point: Point) -> str:
    """Return a measurement with its intervals and its origin."""
    outcome, metrics = explanation.outcome, outcome_values.shown_metrics(explanation.run.problem)
    origin = f"trial {point.trial}"
    if outcome.confirmation_of(point) is None:
        origin += ", one measurement of the search" + ("" if point.measurement.stable else ", unstable")
    return f"{outcome_values.measured_performance(outcome, point, *metrics)}; {origin}"


def _next_load(forecast: CandidateForecast, measured: Point | None, explanation: Explanation) -> str:
    """Return the measurement of the recommendation at the next higher load, or the forecast without one."""
    problem = explanation.run.problem
    noun = "sequences" if problem.space.is_stateful else "requests"
    if measured is not None:
        return f"With {forecast.concurrency:,} {noun} in flight, it was measured: {_measured(explanation, measured)}."
    missed = [
        formatting.bound(bound)
        for bound in problem.sla.latencies
        if forecast.latencies_ms.get(bound.metric, 0.0) > bound.bound
    ]
    if missed:
        effect = f", which misses {' and '.join(missed)}"
    else:
        effect = ", within the latency bounds" if problem.sla.latencies else ""
    throughput = formatting.quantity(METRICS["throughput"], forecast.throughput_infer_per_sec)
    return (
        f"With {forecast.concurrency:,} {noun} in flight, it is expected to serve {throughput} with "
        f"{_latencies(forecast)}{effect}."
    )


def _latencies(forecast: CandidateForecast) -> str:
    """Return the predicted latencies, such as ``p95 18 ms and p99 23 ms``."""
    return " and ".join(
        f"{formatting.short_metric(metric)} {formatting.number(value)} ms"
        for metric, value in forecast.latencies_ms.items()
    )


def _print_changes(console: Console, explanation: Explanation, changes: ChangeForecasts) -> None:
    """Print the effect of each change and of each other SLA and, without a recommendation, the lowest latencies."""
    problem = explanation.run.problem
    is_simulated = problem.is_simulated
    _heading(console, "What would help")
    _sentences(console, _origin(changes, is_simulated=is_simulated))
    simulated = {other.name for other in problem.concurrent} if concurrent_models.applies(problem) else set[str]()
    if explanation.step_advice is not None and explanation.subject.is_limited_by_another:
        model = explanation.step_advice.step.model
        if model not in simulated:
            sentence = f"{model} has to serve more before these gains are possible: its limit is not simulated."
            _sentences(console, sentence)
    objective = explanation.outcome.objective
    if objective.name != "throughput":
        goal = formatting.goal_label(objective.name)
        _sentences(console, f"Gains are in throughput; the objective of the run is {goal}.")
    if explanation.forecast_checks.throughput:
        _sentences(console, str(explanation.forecast_checks))
    if explanation.run.concurrent_models:
        model = explanation.run.tuned_model
        _sentences(console, f"The changes are those of {model}; the throughput is that of all models together.")
    for remedy in changes.remedies:
        if remedy.kind == "no_copying" and explanation.shared_memory is not None:
            continue  # it is measured
        name, effect = change_name(remedy), _effect(remedy, explanation)
        if is_simulated:
            _sentences(console, f"{name}: {effect} ({remedy.change})")
        else:
            _sentences(console, f"{name} {remedy.change}: {effect}")
    best = None
    if not is_simulated and explanation.has_recommendation and changes.best is not None:
        best = changes.best.candidate
        if best != explanation.subject.point.candidate:
            _sentences(console, _best_tried(changes.best))
    for other in changes.other_slas:
        goal = f"{formatting.short_metric(other.metric)} <= {formatting.exact(round(other.bound_ms, 3))} ms"
        _sentences(console, f"another SLA, {goal}: {_effect_of_sla(other, best, explanation)}")
    if not explanation.has_recommendation:
        alone = ", with one request at a time" if is_simulated else ""
        for latency in changes.latencies:
            if math.isfinite(latency.bound_ms):
                _sentences(console, *_lowest_latency(latency, alone, explanation))


def change_name(remedy: Remedy) -> str:
    """Return the name of a change for people: that of its kind, or of the changed parameter."""
    return CHANGE_NAMES.get(remedy.kind, remedy.parameter)


def _lowest_latency(latency: PredictedLatency, alone: str, explanation: Explanation) -> Iterator[str]:
    """Yield the lowest measured latency, then the lowest expected one if that is clearly lower."""
    name, measured_ms = formatting.short_metric(latency.metric), math.inf
    if latency.lowest_measured is not None:
        measured_ms = METRICS[latency.metric].value(latency.lowest_measured.measurement) or math.inf
        yield (
            f"The lowest measured {name} is {formatting.number(measured_ms)} ms: "
            f"{_measured(explanation, latency.lowest_measured)}."
        )
    if latency.lowest_ms < (1 - NEGLIGIBLE_GAIN) * measured_ms:
        yield (
            f"The lowest expected {name} of the tried configurations is {formatting.number(latency.lowest_ms)} "
            f"ms{alone}. It was not measured."
        )


def _effect(remedy: Remedy, explanation: Explanation) -> str:
    """Return the measurement of the changed configuration, or the forecast if there is none."""
    if remedy.measured is not None:
        sign = f"{signed_percent(remedy.gain.estimate)}, " if remedy.gain and explanation.has_recommendation else ""
        return f"{sign}measured: {_measured(explanation, remedy.measured)}"
    if remedy.forecast is None:
        has_several = explanation.changes is not None and len(explanation.changes.latencies) > 1
        return f"no load is expected to meet the {'bounds' if has_several else 'bound'}"
    gain = remedy.gain if explanation.has_recommendation else None
    if gain is not None and gain.interval is None and gain.estimate <= -NEGLIGIBLE_GAIN:
        effect = "less is expected"
    else:
        effect = _forecast_gain(gain, remedy.forecast, explanation)
    return f"{effect}{_refutation(remedy, explanation)}"


def _effect_of_sla(other: OtherSla, best: Candidate | None, explanation: Explanation) -> str:
    """Return the best measurement within another bound, and the forecast if that is higher.

    ``best`` is the candidate to which the forecast gain is relative, None if the text does not name it.
    """
    forecast, point = other.forecast, other.measured
    changed = ""
    if forecast is not None and forecast.candidate != best:
        changed = f" ({configuration_text.configuration(forecast.candidate)})"
    if point is None:
        if forecast is None:
            return "no load is expected to meet it, and none was measured within it"
        gain = other.gain if explanation.has_recommendation else None
        return f"{_forecast_gain(gain, forecast, explanation)}{changed}{_refutation(other, explanation)}"
    is_other = point != explanation.subject.point
    sign = f"{signed_percent(other.gain.estimate)}, " if other.gain and is_other else ""
    text = f"{sign}measured: {_measured(explanation, point)}"
    bound_ms = explanation.run.problem.sla.latency_bound_ms(other.metric)
    latency_ms = METRICS[other.metric].value(point.measurement)
    if is_other and other.factor > 1 and latency_ms is not None and latency_ms <= bound_ms:
        text += f", which is within {formatting.exact(bound_ms)} ms too"
    if point.candidate != explanation.subject.point.candidate:
        text += f" ({configuration_text.configuration(point.candidate)})"
    expected = _expected_throughput(other, explanation)
    if expected <= (1 + NEGLIGIBLE_GAIN) * point.throughput_infer_per_sec or other.refuted_by is not None:
        return text
    return f"{text}. Expected: up to {formatting.quantity(METRICS['throughput'], expected)}{changed}"


def _expected_throughput(other: OtherSla, explanation: Explanation) -> float:
    """Return the expected throughput: the measured one of the recommendation times the gain, if it is known."""
    if other.forecast is None:
        return 0.0
    if other.forecast_gain is None or not explanation.has_recommendation:
        return other.forecast.throughput_infer_per_sec
    return explanation.subject.point.throughput_infer_per_sec * (1 + other.forecast_gain.estimate)


def _refutation(effect: Remedy | OtherSla, explanation: Explanation) -> str:
    """Return a clause about the measurement that refutes a forecast; empty if there is none."""
    if effect.refuted_by is None:
        return ""
    return f", but the measurement at this load misses the bounds: {_measured(explanation, effect.refuted_by)}"


def _best_tried(forecast: CandidateForecast) -> str:
    """Return that another tried configuration is expected to serve more than the recommendation."""
    throughput = formatting.quantity(METRICS["throughput"], forecast.throughput_infer_per_sec)
    return (
        f"Within these bounds, another tried configuration is expected to serve most: {throughput} at concurrency "
        f"{forecast.concurrency:,} ({configuration_text.configuration(forecast.candidate)}). "
        "The gains of other bounds are relative to it."
    )


def _origin(changes: ChangeForecasts, *, is_simulated: bool) -> str:
    """Return the origin of the gains: the model, the number of measurements it was fitted to, and its errors."""
    bounds = [
        formatting.bound(Constraint(latency.metric, latency.bound_ms))
        for latency in changes.latencies
        if math.isfinite(latency.bound_ms)
    ]
    within = f" within {' and '.join(bounds)}" if bounds else ""
    fitted = f"fitted to {formatting.count(changes.measurement_count, 'measurement')} of this run"
    if is_simulated:
        return (
            f"Simulated{within}, {fitted} (median error in throughput {percent(changes.error)}). Each change is "
            f"simulated alone, at its best load.{_caution(changes)}"
        )
    errors = [
        f"{percent(latency.error)} in {formatting.short_metric(latency.metric)}" for latency in changes.latencies
    ]
    return (
        f"Predicted{within} by a {changes.model} {fitted} (median error {percent(changes.error)} in throughput, "
        f"{', '.join(errors)}), corrected by Gaussian processes. Each change is predicted alone, at its best load, "
        f"with a 95 % interval.{_caution(changes)}"
    )


def _caution(changes: ChangeForecasts) -> str:
    """Return a sentence about a model that is far from the measurements; empty if it is close to them."""
    if changes.error <= LARGE_ERROR:
        return ""
    return " The model is far from the measurements: measure a change to rely on it."


def _shared_memory_effect(effect: SharedMemoryEffect) -> Iterator[str]:
    yield f"{effect}."
    if effect.is_recommended:
        yield "Use it in a client on the machine of the server (see docs/shared-memory.md)."


def _forecast_gain(gain: Gain | None, forecast: CandidateForecast, explanation: Explanation) -> str:
    """Return the gain over the recommendation; without one, the forecast itself."""
    if gain is None:
        throughput = formatting.quantity(METRICS["throughput"], forecast.throughput_infer_per_sec)
        return f"{throughput}, {_latencies(forecast)}"
    low, high = gain.bounds
    if -NEGLIGIBLE_GAIN < low <= high < NEGLIGIBLE_GAIN:
        return "no difference is expected"
    if gain.interval is not None:
        return f"{signed_percent(gain.estimate)} ({signed_percent(low)} to {signed_percent(high)})"
    expected = explanation.subject.point.throughput_infer_per_sec * (1 + gain.estimate)
    return f"{signed_percent(gain.estimate)}, about {formatting.quantity(METRICS['throughput'], expected)}"


def _runner_up(explanation: Explanation, runner_up: RunnerUp | None) -> Iterator[str]:
    """Yield the runner-up, how it compares with the recommendation, and why it is not recommended."""
    if runner_up is None:
        yield "There is none: no other configuration met the SLA."
        return
    yield f"trial {runner_up.point.trial}: {configuration_text.configuration(runner_up.point.candidate)}"
    metrics = outcome_values.shown_metrics(explanation.run.problem)
    relation = _relation(explanation.outcome.objective, runner_up.gain)
    yield f"{formatting.performance(runner_up.point, *metrics)}{'' if runner_up.confirmed else ', in the search'}"
    if runner_up.confirmed is None:
        yield f"In single measurements {relation}."
        yield "It was not confirmed on fresh servers, so there is no confidence interval."
        return
    yield f"On average over its windows {relation}."
    if runner_up.gain and runner_up.gain.differs_from_values:
        yield summary.GAIN_NOTE
    ratio = runner_up.gain.ratio if runner_up.gain else None
    verdict = formatting.verdict(runner_up.confirmed)
    if runner_up.confirmed.sla:
        verdict = f"Its own test ended with {verdict}"
    if runner_up.missed:
        yield f"{verdict}: {runner_up.missed}."
    elif ratio is None:
        yield f"{verdict}."
    elif ratio.interval.high < 1:
        why = outcome_values.why_not_recommended(explanation.outcome, runner_up.point)
        yield f"{verdict}. It is not recommended, because {why}."
    elif not ratio.is_measurable:
        yield f"{verdict}. The difference is within the uncertainty of the measurements."
    else:
        yield f"{verdict}. The recommendation has {formatting.advantage(explanation.outcome.objective)}."


def _relation(objective: Metric, gain: ObjectiveGain | None) -> str:
    """Return how the runner-up compares with the recommendation, whose ``gain`` over it is given, as a clause.

    It is ``it served 3.0 % less than the recommendation``, or ``its p95 was 3.0 % higher than that of the
    recommendation``, with the interval if it is known.
    """
    name = formatting.goal_label(objective.name)
    if gain is None:
        return f"its {name} and that of the recommendation cannot be compared, because one is unknown"
    if not objective.has_ratio or not min(gain.value, gain.compared_value) > 0:
        values = (formatting.quantity(objective, value) for value in (gain.compared_value, gain.value))
        return f"its {name} was {' instead of '.join(values)}"
    subject, less, more, than = f"its {name} was", "lower", "higher", "that of the recommendation"
    if objective.name == "throughput":
        subject, less, more, than = "it served", "less", "more", "the recommendation"
    factors, ratio = [gain.compared_value / gain.value], gain.ratio
    if ratio is not None:
        nearest_first = sorted(ratio.bounds, key=lambda bound: abs(math.log(bound)))
        factors = [times if objective.better == "lower" else 1 / times for times in (ratio.estimate, *nearest_first)]
    difference, *ends = (f"{percent(abs(factor - 1), 1)} {more if factor > 1 else less}" for factor in factors)
    interval = f" (from {' to '.join(ends)})" if ends else ""
    return f"{subject} {difference} than {than}{interval}"


def _heading(console: Console, text: str) -> None:
    console.print()
    console.print(Text(text, "bold"))


def _sentences(console: Console, *sentences: str) -> None:
    """Print each sentence as an indented paragraph."""
    for sentence in sentences:
        for line in wrap(sentence, WIDTH - 2, first_indent="  ", indent="    "):
            console.print(Text(line), soft_wrap=True)
