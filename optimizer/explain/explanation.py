"""Explain a run: its bottleneck, the binding constraint, the effects of changes, and the runner-up."""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace

from google.protobuf import text_format

from objectives import model_stats
from objectives.intervals import ObjectiveGain
from objectives.metrics import METRICS
from objectives.sla import Verdict
from optimizer.config.backends import backend_of, is_ensemble
from optimizer.config.model_config_proto import ModelConfig
from optimizer.config.problem import Problem
from optimizer.confirmation.plan import finalists
from optimizer.confirmation.verdicts import ConfirmedLoad, compare_metric
from optimizer.core.candidate import Candidate
from optimizer.core.errors import BadInputError
from optimizer.core.trial import Point, latest_points
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
    CandidateForecast,
    Forecaster,
    Gain,
    OtherSla,
    Remedy,
    find_measurement,
    forecast_other_slas,
    is_beyond_failures,
)
from optimizer.explain.predicted_changes import SurrogateForecaster, predict_changes, single_changes
from optimizer.explain.simulated_changes import FP16_FACTOR, SimulatedForecaster, simulate_changes
from optimizer.explain.step_advice import StepAdvice, advise
from optimizer.results.finished_run import FinishedRun, why_unfinished
from optimizer.results.forecast_accuracy import ForecastChecks, check_forecasts
from optimizer.results.recommendation import Outcome
from optimizer.results.report.content import stored_configs
from optimizer.results.shared_memory_effect import SharedMemoryEffect, effect_of_trial
from optimizer.simulator.predicted_metrics import as_closed_loop, is_complete, predicted_latencies

HALF_PRECISIONS = ("fp16", "bf16")
NO_STEPS = (
    "The run has no times of each model. Triton's statistics do not show them if a model serves the requests of "
    "several others, or if a step of an ensemble calls other models."
)
NO_STEPS_OF_STREAM = (
    "The run has no times of each model: in Triton's statistics, a streamed request ends when the model accepts it."
)
MAX_CANDIDATES = 12  # candidates of the Pareto front that are forecast: each takes as long as a change
NEXT_LOAD_FACTOR = 1.1  # the next higher load, relative to that of the subject; at least one request more


@dataclass(frozen=True, slots=True)
class RunnerUp:
    """The second best configuration.

    ``gain`` is that of the recommendation over it in the first objective, None if either value is unknown. It has no
    ratio if either was not confirmed. ``missed`` is the reason of its verdict, empty for PASS.
    """

    point: Point
    confirmed: ConfirmedLoad | None
    gain: ObjectiveGain | None
    missed: str


def find_runner_up(run: FinishedRun) -> RunnerUp | None:
    """Return the best confirmed candidate other than the recommendation and the baseline, by the objectives.

    If none of them meets the SLA, it is the one closest to it. Without a confirmed one, return the best other
    candidate of the search.
    """
    outcome, problem = run.outcome, run.problem
    if outcome is None or outcome.recommended is None:
        return None
    best, objective = outcome.recommended, problem.objectives[0]
    confirmed = [
        entry for entry in outcome.confirmed_loads if entry.point.candidate not in (best.candidate, run.baseline)
    ]
    searched = [point for point in latest_points(run.trials) if point.candidate != best.candidate]
    point = (
        problem.best_point([entry.point for entry in confirmed if entry.meets_sla], unstable=True)
        or problem.sla.closest_point([entry.point for entry in confirmed], problem.objectives)
        or next(iter(finalists(searched, problem, 1)), None)
    )
    if point is None:
        return None
    ours, theirs = outcome.confirmed, outcome.confirmation_of(point)
    missed = (
        "" if theirs is None or theirs.judged.verdict is Verdict.PASS or not theirs.error else theirs.judged.reason
    )
    values = objective.value(best.measurement), objective.value(point.measurement)
    if values[0] is None or values[1] is None:
        return RunnerUp(point, theirs, None, missed)
    ratio = compare_metric(ours, theirs, run.trials, problem, objective.name) if ours and theirs else None
    return RunnerUp(point, theirs, ObjectiveGain(objective.name, values[0], values[1], ratio), missed)


@dataclass(frozen=True, slots=True)
class PredictedLatency:
    """A latency metric that the model predicts.

    ``bound_ms`` is infinite without a bound. ``error`` is the median relative error of the model. ``lowest_ms`` is
    the lowest value that is expected of any candidate near the Pareto front, at most the lowest measured one.
    ``lowest_measured`` is the measurement with the lowest value, None if no measurement has one.
    """

    metric: str
    bound_ms: float
    error: float
    lowest_ms: float
    lowest_measured: Point | None = None


@dataclass(frozen=True, slots=True)
class ChangeForecasts:
    """Forecasts of changes to the subject.

    They come from the simulator of the dynamic batcher. For models that it does not describe they come from the
    surrogate of the search.

    Attributes:
        model: Name of the model that predicts them.
        latencies: The predicted latencies, the binding one first.
        error: Median relative error of the model in throughput, before it is corrected by the measurements.
        measurement_count: Number of the measurements that the model was fitted to.
        remedies: Changes of the subject, the largest gain first.
        best: The best tried configuration within the bounds; None if no load of any meets them.
        other_slas: The best measurement and the best tried configuration within another bound, with their gains.
        next_load: The subject at the next higher load; None if the forecasts come from the simulator.
        next_measured: The measurement of the subject at that load; None if there is none.
    """

    model: str
    latencies: tuple[PredictedLatency, ...]
    error: float
    measurement_count: int
    remedies: tuple[Remedy, ...]
    best: CandidateForecast | None
    other_slas: tuple[OtherSla, ...]
    next_load: CandidateForecast | None
    next_measured: Point | None = None

    @property
    def latency(self) -> PredictedLatency:
        """The binding latency."""
        return self.latencies[0]


@dataclass(frozen=True, slots=True)
class Explanation:
    """Explanation of ``run``, whose outcome is ``outcome``.

    ``subject`` is the recommendation, or else the point closest to the SLA. ``binding`` is the constraint that binds
    the recommendation, None if there is no recommendation or if no constraint binds it. ``changes`` is None if no
    measurement has both a throughput and every predicted latency. ``shared_memory`` is its measured effect, None if
    none is known. ``step_advice`` names the step that limits the throughput of several models, None if their times
    were not recorded.
    """

    run: FinishedRun
    outcome: Outcome
    subject: StageBreakdown
    bottleneck: Bottleneck
    binding: BindingConstraint | None
    changes: ChangeForecasts | None
    forecast_checks: ForecastChecks
    runner_up: RunnerUp | None
    shared_memory: SharedMemoryEffect | None
    step_advice: StepAdvice | None

    @property
    def has_recommendation(self) -> bool:
        return self.outcome.recommended is not None


def explain(run: FinishedRun, fp16_factor: float = FP16_FACTOR) -> Explanation:
    """Return the explanation of ``run``. ``fp16_factor`` is the assumed factor on inference time in FP16.

    Raises BadInputError if the run has no measurements, or the file of a measured effect is damaged.
    """
    outcome, point = run.outcome, run.shown
    if outcome is None or point is None:
        reasons = (outcome.no_recommendation_reason if outcome else "", why_unfinished(run))
        reason = "; ".join(filter(None, reasons)) or "nothing was measured"
        raise BadInputError(f"{run.folder.path}: nothing to explain: {reason}")
    subject = break_down_stages(point, run.trials, has_other_models=run.has_other_models, tuned_model=run.tuned_model)
    changes = _forecast_changes(run, outcome, subject, fp16_factor)
    advice = advise(subject, changes.remedies if changes else (), run.trials)
    step_reasons: tuple[str, ...] = advice.reasons if advice else ()
    if advice is None and (run.has_other_models or run.concurrent_models):
        step_reasons = (NO_STEPS_OF_STREAM if point.measurement.is_streamed else NO_STEPS,)
    binding = None
    if outcome.recommended is not None:
        measured = [*latest_points(run.trials), *(entry.point for entry in outcome.confirmed_loads)]
        binding = find_binding_constraint(point, measured, run.problem.sla, run.problem.objectives[0])
    return Explanation(
        run=run,
        outcome=outcome,
        subject=subject,
        bottleneck=_bottleneck(subject, changes, step_reasons),
        binding=binding,
        changes=changes,
        forecast_checks=check_forecasts(run.trials),
        runner_up=find_runner_up(run),
        shared_memory=effect_of_trial(run.folder.path, point.trial),
        step_advice=advice,
    )


def _bottleneck(
    subject: StageBreakdown, changes: ChangeForecasts | None, step_reasons: tuple[str, ...]
) -> Bottleneck:
    """Return the bottleneck of ``subject``; the forecasts tell stages apart that last long without limiting it."""
    if changes is None:
        return find_bottleneck(subject, None, step_reasons=step_reasons)
    gains = {remedy.kind: remedy.gain for remedy in changes.remedies}
    removals: dict[BottleneckKind, Gain | None] = {
        "client": gains.get("faster_network"),
        "copying": gains.get("no_copying"),
    }
    return find_bottleneck(subject, _gain_of_instances(changes, subject.point.candidate), removals, step_reasons)


def has_fp16_conversion(run: FinishedRun) -> bool:
    """Return whether the model may be converted to FP16.

    It cannot if it computes in FP16 already, or if its code in Python decides how it computes.
    """
    if str(run.facts.get("precision", "")).lower() in HALF_PRECISIONS:
        return False
    texts = stored_configs(run, run.folder.best) or stored_configs(run, run.folder.baseline)
    configs = []
    for text in texts.values():
        with suppress(text_format.ParseError):
            configs.append(text_format.Parse(text, ModelConfig(), allow_unknown_field=True))
    backends = {backend_of(config) for config in configs if not is_ensemble(config)}
    return backends != {"python"}


def _forecast_changes(
    run: FinishedRun, outcome: Outcome, subject: StageBreakdown, fp16_factor: float
) -> ChangeForecasts | None:
    """Return the forecasts of changes to ``subject``; None if no measurement has all predicted metrics and models."""
    problem, sla, candidate = run.problem, run.problem.sla, subject.point.candidate
    measured = latest_points(run.trials)
    closed = as_closed_loop(measured, problem)
    others = [other.name for other in problem.concurrent]
    known = [point for point in closed if model_stats.has_models(others, point.measurement)]
    if not any(is_complete(point, *predicted_latencies(problem, closed)) for point in known):
        return None
    tried = list(dict.fromkeys([candidate, *(point.candidate for point in outcome.front.points)]))
    tried = tried[:: max(1, math.ceil(len(tried) / MAX_CANDIDATES))]
    factor = fp16_factor if has_fp16_conversion(run) else None
    on_gpu = bool(run.gpus)
    forecaster: Forecaster
    next_load = None
    if problem.is_simulated:
        forecaster = simulator = SimulatedForecaster(measured, subject.point, problem, run.options.seed)
        remedies = simulate_changes(simulator, subject, sla, factor, run.trials, on_gpu=on_gpu)
    else:
        changes = [
            change
            for change in single_changes(problem.space, candidate)
            if not is_beyond_failures(change.candidate, candidate, run.trials)
        ]
        candidates = [*tried, *(change.candidate for change in changes)]
        forecaster = surrogate = SurrogateForecaster(run.trials, problem, candidates, run.options.seed)
        remedies = predict_changes(surrogate, candidate, changes, sla, factor, on_gpu=on_gpu)
        next_load = _next_load(surrogate, subject.point, problem)
    best = forecaster.best(tried, sla)
    measured_remedies = [remedy.with_measurements(outcome, subject.point, sla) for remedy in remedies]
    other_slas = forecast_other_slas(forecaster, tried, sla, best)
    return ChangeForecasts(
        model=forecaster.model_name,
        latencies=_predicted_latencies(forecaster, tried, problem, outcome),
        error=forecaster.errors[0],
        measurement_count=forecaster.measurement_count,
        remedies=tuple(
            sorted(measured_remedies, key=lambda remedy: -(remedy.gain.estimate if remedy.gain else -1.0))
        ),
        best=best,
        other_slas=tuple(other.with_measurements(outcome) for other in other_slas),
        next_load=next_load,
        next_measured=find_measurement(outcome, candidate, next_load.concurrency) if next_load else None,
    )


def _predicted_latencies(
    forecaster: Forecaster, tried: Sequence[Candidate], problem: Problem, outcome: Outcome
) -> tuple[PredictedLatency, ...]:
    """Return the latencies that ``forecaster`` predicts, each with its lowest value of ``tried`` and as measured."""
    # the simulator forecasts the lowest latency with one request in flight: where that is measured, it is known
    unmeasured = [
        candidate for candidate in tried if not (problem.is_simulated and find_measurement(outcome, candidate, 1))
    ]
    expected_ms = forecaster.lowest_latencies_ms(unmeasured) if unmeasured else {}
    latencies = []
    for name, error in zip(forecaster.latencies, forecaster.errors[1:], strict=True):
        times_ms = [(ms, point) for point in outcome.points if (ms := METRICS[name].value(point.measurement))]
        measured_ms, lowest_measured = min(times_ms, key=lambda pair: pair[0], default=(math.inf, None))
        lowest_ms = min(expected_ms.get(name, math.inf), measured_ms)
        bound_ms = problem.sla.latency_bound_ms(name)
        latencies.append(PredictedLatency(name, bound_ms, error, lowest_ms, lowest_measured))
    return tuple(latencies)


def _next_load(forecaster: SurrogateForecaster, point: Point, problem: Problem) -> CandidateForecast | None:
    """Return ``point`` at the next higher load: its measured values times the predicted ratios."""
    closed = as_closed_loop([point], problem)
    measured_ms = {metric: METRICS[metric].value(point.measurement) for metric in forecaster.latencies}
    if not closed or not all(measured_ms.values()):
        return None
    concurrency = closed[0].load.concurrency
    present = forecaster.at(point.candidate, concurrency)
    higher = forecaster.at(point.candidate, max(concurrency + 1, round(NEXT_LOAD_FACTOR * concurrency)))
    ratio = higher.throughput_infer_per_sec / present.throughput_infer_per_sec
    latencies_ms = {
        metric: (latency_ms or 0.0) * higher.latencies_ms[metric] / present.latencies_ms[metric]
        for metric, latency_ms in measured_ms.items()
    }
    return replace(higher, throughput_infer_per_sec=point.throughput_infer_per_sec * ratio, latencies_ms=latencies_ms)


def _gain_of_instances(changes: ChangeForecasts, subject: Candidate) -> Gain | None:
    """Return the gain by more instances; None if it is unknown."""
    for remedy in changes.remedies:
        if remedy.forecast and remedy.forecast.candidate.instance_count > subject.instance_count:
            return remedy.gain
    return None
