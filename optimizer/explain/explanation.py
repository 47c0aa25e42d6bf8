"""Explains a run: its bottleneck, the binding constraint, the effects of changes, and the runner-up."""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

from google.protobuf import text_format

from objectives.confidence import Verdict
from objectives.intervals import ConfidenceInterval
from objectives.metrics import METRICS
from optimizer.config.backends import backend_of, is_ensemble
from optimizer.config.model_config_proto import ModelConfig
from optimizer.config.search_space import Problem
from optimizer.confirmation.plan import finalists
from optimizer.confirmation.verdicts import ConfirmedLoad, compare_throughput, meets_sla
from optimizer.core.errors import BadInputError
from optimizer.core.trial import Candidate, Point, latest_points
from optimizer.explain.bottleneck import (
    BindingConstraint,
    Bottleneck,
    BottleneckKind,
    StageBreakdown,
    break_down_stages,
    find_binding_constraint,
    find_bottleneck,
)
from optimizer.explain.forecaster import (
    Forecast,
    Forecaster,
    Gain,
    OtherSla,
    Remedy,
    find_measurement,
    forecast_other_slas,
    is_beyond_failures,
)
from optimizer.explain.predicted_changes import SurrogateForecaster, predict_changes, single_changes
from optimizer.explain.simulated_changes import (
    FP16_FACTOR,
    NEAR_CLIENT,
    NO_COPYING,
    SimulatedForecaster,
    simulate_changes,
)
from optimizer.results import configuration_text, result_document
from optimizer.results.finished_run import FinishedRun, remark
from optimizer.results.forecast_accuracy import (
    CheckedForecast,
    ForecastChecks,
    check_forecasts,
    count_inside,
    median_error,
)
from optimizer.results.recommendation import Outcome
from optimizer.results.report.content import stored_configs
from optimizer.results.shared_memory_effect import SharedMemoryEffect, effect_of_trial
from optimizer.simulator.predicted_metrics import as_closed_loop, is_complete, predicted_latencies

HALF_PRECISIONS = ("fp16", "bf16")
UNKNOWN = ConfidenceInterval(-math.inf, math.inf)


@dataclass(frozen=True, slots=True)
class RunnerUp:
    """The second best configuration.

    ``less`` is its lower throughput relative to the recommendation's (negative: it served more). ``interval`` is the
    confidence interval of ``less``, unknown if either was not confirmed. ``missed`` is the reason of its verdict,
    empty for PASS.
    """

    point: Point
    confirmed: ConfirmedLoad | None
    less: float
    interval: ConfidenceInterval
    missed: str


def find_runner_up(run: FinishedRun) -> RunnerUp | None:
    """Return the best confirmed candidate other than the recommendation and the baseline, within the SLA if possible.

    Without one, return the best other candidate of the search.
    """
    outcome = run.outcome
    if outcome is None or outcome.recommended is None:
        return None
    best, ours = outcome.recommended, outcome.confirmed
    confirmed = [
        entry for entry in outcome.confirmed_loads if entry.point.candidate not in (best.candidate, run.baseline)
    ]
    met = [entry for entry in confirmed if meets_sla(entry, run.problem)]
    theirs = max(met or confirmed, key=lambda entry: entry.point.throughput_infer_per_sec, default=None)
    if theirs is None:
        others = [point for point in latest_points(run.trials) if point.candidate != best.candidate]
        point = next(iter(finalists(others, run.problem, 1)), None)
        return None if point is None else RunnerUp(point, None, _less(best, point), UNKNOWN, "")
    missed = "" if theirs.judged.verdict is Verdict.PASS or not theirs.error else theirs.judged.reason
    gain = compare_throughput(ours, theirs, run.trials, run.problem) if ours else None
    if gain is None:
        return RunnerUp(theirs.point, theirs, _less(best, theirs.point), UNKNOWN, missed)
    low, less, high = (1 - 1 / ratio for ratio in (gain.interval.low, gain.estimate, gain.interval.high))
    return RunnerUp(theirs.point, theirs, less, ConfidenceInterval(low, high), missed)


def _less(ours: Point, theirs: Point) -> float:
    return 1 - theirs.throughput_infer_per_sec / ours.throughput_infer_per_sec


MOST_CANDIDATES = 12  # candidates of the Pareto front that are forecast for another SLA
HIGHER = 1.1  # the next higher load, relative to that of the subject; at least one request more


@dataclass(frozen=True, slots=True)
class PredictedLatency:
    """A latency metric that the model predicts.

    ``bound_ms`` is infinite without a bound. ``error`` is the median relative error of the model. ``quickest_ms`` is
    the lowest value that is expected of any candidate near the Pareto front, at most the lowest measured one.
    ``quickest`` is the measurement with the lowest value, None if no measurement has one.
    """

    metric: str
    bound_ms: float
    error: float
    quickest_ms: float
    quickest: Point | None = None


@dataclass(frozen=True, slots=True)
class Simulation:
    """Expected effects of changes.

    They come from the simulator of the dynamic batcher. For models that it does not describe they come from the
    surrogate of the search.

    Attributes:
        model: Name of the model that predicts them.
        is_simulated: Whether that is the simulator.
        latencies: The predicted latencies, the binding one first.
        error: Median relative error of the model in throughput, before it is corrected by the measurements.
        points: Number of the measurements that the model was fitted to.
        remedies: Changes of the subject, the largest gain first.
        best: The best tried configuration within the bounds; None if no load of any meets them.
        other_slas: The best measurement and the best tried configuration within another bound, with their gains.
        next_load: The subject at the next higher load; None if it is simulated.
        next_measured: The measurement of the subject at that load; None if there is none.
    """

    model: str
    is_simulated: bool
    latencies: tuple[PredictedLatency, ...]
    error: float
    points: int
    remedies: tuple[Remedy, ...]
    best: Forecast | None
    other_slas: tuple[OtherSla, ...]
    next_load: Forecast | None
    next_measured: Point | None = None

    @property
    def latency(self) -> PredictedLatency:
        """The binding latency."""
        return self.latencies[0]


@dataclass(frozen=True, slots=True)
class Explanation:
    """Explanation of ``run``.

    ``subject`` is the recommendation, or else the point closest to the SLA. ``simulation`` is None if no measurement
    has both a throughput and every predicted latency. ``unfinished`` says why the run is incomplete; it is empty if
    the run ended. ``shared_memory`` is its measured effect, None if there is none.
    """

    run: FinishedRun
    subject: StageBreakdown
    recommended: bool
    no_recommendation_reason: str
    unfinished: str
    bottleneck: Bottleneck
    binding: BindingConstraint
    simulation: Simulation | None
    forecasts: ForecastChecks
    runner_up: RunnerUp | None
    shared_memory: SharedMemoryEffect | None


def explain(run: FinishedRun, fp16_factor: float = FP16_FACTOR) -> Explanation:
    """Return the explanation of ``run``. ``fp16_factor`` is the assumed factor on inference time in FP16.

    Raises BadInputError if the run has no measurements, or the file of a measured effect is damaged.
    """
    outcome = run.outcome
    point = (outcome.recommended or outcome.closest) if outcome else None
    if outcome is None or point is None:
        why = (
            (outcome.no_recommendation_reason if outcome else "") or run.info.get("reason") or "nothing was measured"
        )
        raise BadInputError(f"{run.folder.path}: nothing to explain: {why} (status of the run: {run.status})")
    subject = break_down_stages(point, run.trials)
    simulation = _simulation(run, outcome, subject, fp16_factor)
    recommended = outcome.recommended is not None
    measured = [*latest_points(run.trials), *(entry.point for entry in outcome.confirmed_loads)]
    return Explanation(
        run,
        subject,
        recommended,
        outcome.no_recommendation_reason,
        _unfinished(run),
        _bottleneck(subject, simulation),
        find_binding_constraint(point, measured, run.problem.sla, met=recommended),
        simulation,
        check_forecasts(run.trials),
        find_runner_up(run),
        effect_of_trial(run.folder.path, point.trial),
    )


def _bottleneck(subject: StageBreakdown, simulation: Simulation | None) -> Bottleneck:
    if simulation is None:
        return find_bottleneck(subject, None)
    gains = {remedy.name: remedy.gain for remedy in simulation.remedies}
    removals: dict[BottleneckKind, Gain | None] = {
        "client": gains.get(NEAR_CLIENT),
        "copying": gains.get(NO_COPYING),
    }
    return find_bottleneck(subject, _gain_of_instances(simulation, subject.point.candidate), removals)


def _has_fp16_conversion(run: FinishedRun) -> bool:
    """Return False if the model computes in FP16 already, or if its code in Python decides how it computes."""
    if str(run.facts.get("precision", "")).lower() in HALF_PRECISIONS:
        return False
    texts = stored_configs(run, run.folder.best) or stored_configs(run, run.folder.baseline)
    configs = []
    for text in texts.values():
        with suppress(text_format.ParseError):
            configs.append(text_format.Parse(text, ModelConfig(), allow_unknown_field=True))
    backends = {backend_of(config) for config in configs if not is_ensemble(config)}
    return backends != {"python"}


def _simulation(run: FinishedRun, outcome: Outcome, subject: StageBreakdown, fp16_factor: float) -> Simulation | None:
    own, sla, problem = subject.point.candidate, run.problem.sla, run.problem
    measured = latest_points(run.trials)
    closed = as_closed_loop(measured, problem) if problem.open_loop else measured
    if not any(is_complete(point, *predicted_latencies(problem, closed)) for point in closed):
        return None
    tried = _spread(list(dict.fromkeys([own, *(point.candidate for point in outcome.front.points)])))
    on_gpu = bool(run.gpus)
    factor = fp16_factor if _has_fp16_conversion(run) else None
    forecaster: Forecaster
    if problem.is_simulated:
        forecaster = simulated = SimulatedForecaster(measured, subject.point, problem, run.options.seed)
        changes = simulate_changes(simulated, subject, sla, factor, run.trials, on_gpu=on_gpu)
        next_load = None
    else:
        changed = single_changes(problem.space, own)
        words = {one: change for one, change in changed.items() if not is_beyond_failures(one, own, run.trials)}
        forecaster = predicted = SurrogateForecaster(run.trials, problem, [*tried, *words], run.options.seed)
        changes = predict_changes(predicted, own, words, sla, factor, on_gpu=on_gpu)
        next_load = _next_load(predicted, subject.point, problem)
    best = forecaster.best(tried, sla)
    # the simulator forecasts the lowest latency with one request in flight: where that is measured, it is known
    unknown = [one for one in tried if not (problem.is_simulated and find_measurement(outcome, one, 1))]
    quickest_ms = forecaster.quickest_ms(unknown) if unknown else {}
    error, *errors = forecaster.errors
    latencies = [
        _predicted_latency(outcome, metric, sla.latency_bound_ms(metric), own_error, quickest_ms.get(metric))
        for metric, own_error in zip(forecaster.latencies, errors, strict=True)
    ]
    effects = [change.measured_in(outcome, subject.point, sla) for change in changes]
    return Simulation(
        forecaster.model_name,
        problem.is_simulated,
        tuple(latencies),
        error,
        forecaster.points,
        tuple(sorted(effects, key=lambda effect: -(effect.gain.estimate if effect.gain else -1.0))),
        best,
        tuple(other.measured_in(outcome) for other in forecast_other_slas(forecaster, tried, sla, best)),
        next_load,
        find_measurement(outcome, own, next_load.concurrency) if next_load else None,
    )


def _predicted_latency(
    outcome: Outcome, metric: str, bound_ms: float, error: float, expected_ms: float | None
) -> PredictedLatency:
    times_ms = [(own_ms, point) for point in outcome.points if (own_ms := METRICS[metric].value(point.measurement))]
    measured_ms, quickest = min(times_ms, key=lambda pair: pair[0], default=(None, None))
    lowest_ms = min(value for value in (expected_ms, measured_ms) if value is not None)
    return PredictedLatency(metric, bound_ms, error, lowest_ms, quickest)


def _next_load(forecaster: SurrogateForecaster, point: Point, problem: Problem) -> Forecast | None:
    """Return ``point`` at the next higher load: its measured values times the predicted ratios."""
    closed = as_closed_loop([point], problem) if problem.open_loop else [point]
    measured_ms = {metric: METRICS[metric].value(point.measurement) for metric in forecaster.latencies}
    if not closed or not all(measured_ms.values()):
        return None
    concurrency = closed[0].load.concurrency
    now = forecaster.at(point.candidate, concurrency)
    following = forecaster.at(point.candidate, max(concurrency + 1, round(HIGHER * concurrency)))
    ratio = following.throughput_infer_per_sec / now.throughput_infer_per_sec
    latencies_ms = {
        metric: (own_ms or 0.0) * following.latencies_ms[metric] / now.latencies_ms[metric]
        for metric, own_ms in measured_ms.items()
    }
    return replace(
        following, throughput_infer_per_sec=point.throughput_infer_per_sec * ratio, latencies_ms=latencies_ms
    )


def _gain_of_instances(simulation: Simulation, own: Candidate) -> Gain | None:
    """Return the gain by more instances; None if it is unknown."""
    for remedy in simulation.remedies:
        if remedy.forecast and remedy.forecast.candidate.instance_count > own.instance_count:
            return remedy.gain
    return None


def _spread(candidates: list[Candidate]) -> list[Candidate]:
    step = max(1, math.ceil(len(candidates) / MOST_CANDIDATES))
    return candidates[::step]


def _unfinished(run: FinishedRun) -> str:
    text = remark(run)
    return f"{text[0].upper()}{text[1:]}." if text else ""


def document(explanation: Explanation) -> dict[str, Any]:
    """Return the document of ``--json``. Shares and gains are relative (0.1 is 10 %), None if unknown."""
    bound, second = explanation.binding, explanation.runner_up
    return {
        "run": str(explanation.run.folder.path),
        "status": explanation.run.status,
        "verdict": explanation.run.outcome.verdict.value if explanation.run.outcome else None,
        "recommended": explanation.recommended,
        "subject": result_document.entry(explanation.subject.point),
        "no_recommendation_reason": explanation.no_recommendation_reason or None,
        "bound_by": explanation.bottleneck.kind,
        "reasons": list(explanation.bottleneck.reasons),
        "stages_ms": explanation.subject.stages_ms,
        "instance_busy_share": explanation.subject.busy_share,
        "copied_share_of_compute": explanation.subject.copied_share,
        "binding": {
            "constraint": str(bound.constraint) if bound.constraint else None,
            "beyond": result_document.entry(bound.beyond) if bound.beyond else None,
            "gain": bound.gain,
            "used_share": bound.used,
        },
        "forecasts": {
            "throughput": _forecasts_document(explanation.forecasts.throughput),
            "latency": _forecasts_document(explanation.forecasts.latency),
        },
        "simulated": _simulation_document(explanation.simulation) if explanation.simulation else None,
        "shared_memory": explanation.shared_memory.document() if explanation.shared_memory else None,
        "runner_up": _runner_up_document(second) if second else None,
    }


def _forecasts_document(checks: Sequence[CheckedForecast]) -> dict[str, Any] | None:
    if not checks:
        return None
    return {
        "measurements": len(checks),
        "within_interval": count_inside(checks),
        "median_error": median_error(checks),
    }


def _simulation_document(simulation: Simulation) -> dict[str, Any]:
    return {
        "model": simulation.model,
        "latency": simulation.latency.metric,
        "bound_ms": result_document.json_value(simulation.latency.bound_ms),
        "median_error": simulation.error,
        "measurements": simulation.points,
        "quickest_ms": simulation.latency.quickest_ms,
        "latencies": [
            {
                "metric": latency.metric,
                "bound_ms": result_document.json_value(latency.bound_ms),
                "median_error": latency.error,
                "quickest_ms": latency.quickest_ms,
                "quickest_measured": result_document.entry(latency.quickest) if latency.quickest else None,
            }
            for latency in simulation.latencies
        ],
        "remedies": [
            {
                "name": remedy.name,
                "change": remedy.change,
                **_forecast(remedy.forecast),
                **_gain(remedy.gain),
                **_measured(remedy),
            }
            for remedy in simulation.remedies
        ],
        "best": _forecast(simulation.best) if simulation.best else None,
        "other_slas": [
            {
                "metric": sla.metric,
                "factor": sla.factor,
                "other_bound_ms": sla.bound_ms,
                **_forecast(sla.forecast),
                **_gain(sla.gain),
                "forecast_gain": sla.forecast_gain.estimate if sla.forecast_gain else None,
                **_measured(sla),
            }
            for sla in simulation.other_slas
        ],
        "next_load": _forecast(simulation.next_load) if simulation.next_load else None,
        "next_measured": result_document.entry(simulation.next_measured) if simulation.next_measured else None,
    }


def _measured(effect: Remedy | OtherSla) -> dict[str, Any]:
    return {
        "measured": result_document.entry(effect.measured) if effect.measured else None,
        "refuted_by": result_document.entry(effect.refuted_by) if effect.refuted_by else None,
    }


def _forecast(forecast: Forecast | None) -> dict[str, Any]:
    return {
        "configuration": configuration_text.configuration(forecast.candidate) if forecast else None,
        "concurrency": forecast.concurrency if forecast else None,
        "throughput_infer_per_sec": forecast.throughput_infer_per_sec if forecast else None,
        "latency_ms": forecast.latency_ms if forecast else None,
        "latencies_ms": dict(forecast.latencies_ms) if forecast else None,
    }


def _gain(gain: Gain | None) -> dict[str, Any]:
    interval = gain.interval if gain else None
    return {
        "gain": gain.estimate if gain else None,
        "gain_interval": [interval.low, interval.high] if interval else None,
    }


def _runner_up_document(runner_up: RunnerUp) -> dict[str, Any]:
    return {
        **result_document.entry(runner_up.point),
        "confirmation": result_document.confirmation(runner_up.confirmed) if runner_up.confirmed else None,
        "less_throughput": runner_up.less,
        "less_throughput_interval": result_document.interval_document(runner_up.interval),
        "missed": runner_up.missed or None,
    }
