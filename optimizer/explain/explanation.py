"""Explains a run: bottleneck, binding constraint, simulated remedies, and why the runner-up lost."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from objectives.confidence import Verdict
from objectives.verdict import ConfidenceInterval
from optimizer.core.errors import BadInputError
from optimizer.core.trial import Candidate, Point, latest_points
from optimizer.explain.bottleneck import (
    BindingConstraint,
    Bottleneck,
    StageBreakdown,
    binding,
    bottleneck,
    stage_breakdown,
)
from optimizer.explain.simulated_changes import (
    FP16_FACTOR,
    Forecast,
    Forecaster,
    OtherSla,
    Remedy,
    other_slas,
    remedies,
)
from optimizer.results import formatting, summary
from optimizer.results.confirmation_plan import Confirmed, compare_throughput, finalists, meets_sla
from optimizer.results.finished_run import FinishedRun, remark
from optimizer.results.forecast_accuracy import (
    CheckedForecast,
    ForecastChecks,
    check_forecasts,
    count_inside,
    median_error,
)
from optimizer.results.recommendation import Outcome
from optimizer.results.shared_memory_effect import SharedMemoryEffect, read_effect
from optimizer.simulator.metrics import binding_latency, is_complete

UNKNOWN = ConfidenceInterval(-math.inf, math.inf)


@dataclass(frozen=True, slots=True)
class RunnerUp:
    """The second best configuration.

    ``less`` is its lower throughput relative to the recommendation's (negative: it served more). ``interval`` is the
    confidence interval of ``less``, unknown if either was not confirmed. ``missed`` is the reason of its verdict,
    empty for PASS.
    """

    point: Point
    confirmed: Confirmed | None
    less: float
    interval: ConfidenceInterval
    missed: str


def runner_up(run: FinishedRun) -> RunnerUp | None:
    """Return the best confirmed candidate other than the recommendation and the baseline, within the SLA if possible.

    Without one, return the best other candidate of the search.
    """
    outcome = run.outcome
    if outcome is None or outcome.recommended is None:
        return None
    best, ours = outcome.recommended, outcome.confirmed
    confirmed = [entry for entry in outcome.again if entry.point.candidate not in (best.candidate, run.baseline)]
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


MOST_CANDIDATES = 12  # candidates of the Pareto front that are simulated for another SLA


@dataclass(frozen=True, slots=True)
class Simulation:
    """Simulated effects of changes.

    ``latency`` is the metric of the bound. ``error`` is the median relative error in throughput over ``points``
    points. ``quickest_ms`` is the lowest expected latency of any candidate near the Pareto front.
    """

    latency: str
    bound_ms: float
    error: float
    points: int
    remedies: tuple[Remedy, ...]
    other_slas: tuple[OtherSla, ...]
    quickest_ms: float


@dataclass(frozen=True, slots=True)
class Explanation:
    """Explanation of ``run``.

    ``subject`` is the recommendation, or else the point closest to the SLA. ``simulation`` is None if no measurement
    has both a throughput and a latency, or the simulator does not apply to the model. ``unfinished`` says why the run
    is incomplete; it is empty if the run ended. ``shared_memory`` is its measured effect, None if there is none.
    """

    run: FinishedRun
    subject: StageBreakdown
    recommended: bool
    holds_back: str
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
        why = (outcome.holds_back if outcome else "") or run.info.get("reason") or "nothing was measured"
        raise BadInputError(f"{run.folder.path}: nothing to explain: {why} (status of the run: {run.status})")
    subject = stage_breakdown(point, run.trials)
    simulation = _simulation(run, outcome, subject, fp16_factor)
    gains = {remedy.name: remedy.gain for remedy in simulation.remedies} if simulation else {}
    recommended = outcome.recommended is not None
    measured = [*latest_points(run.trials), *(entry.point for entry in outcome.again)]
    return Explanation(
        run,
        subject,
        recommended,
        outcome.holds_back,
        _unfinished(run),
        bottleneck(subject, gains.get("more instances")),
        binding(point, measured, run.problem.sla, met=recommended),
        simulation,
        check_forecasts(run.trials),
        runner_up(run),
        read_effect(run.folder.path),
    )


def _simulation(run: FinishedRun, outcome: Outcome, subject: StageBreakdown, fp16_factor: float) -> Simulation | None:
    measured = latest_points(run.trials)
    if not run.problem.is_simulated:
        return None
    if not any(is_complete(point, binding_latency(run.problem, measured)) for point in measured):
        return None
    forecaster = Forecaster(measured, subject.point, run.problem, run.options.seed)
    bound = run.problem.sla.latency_bound_ms(forecaster.latency)
    tried = _spread(list(dict.fromkeys([subject.point.candidate, *(point.candidate for point in outcome.front)])))
    on_gpu = bool(run.info["hardware"]["gpus"])
    return Simulation(
        forecaster.latency,
        bound,
        forecaster.error,
        forecaster.points,
        remedies(forecaster, subject, bound, fp16_factor, on_gpu=on_gpu),
        other_slas(forecaster, tried, bound) if math.isfinite(bound) else (),
        forecaster.quickest_ms(tried),
    )


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
        "subject": summary.entry(explanation.subject.point),
        "holds_back": explanation.holds_back or None,
        "bound_by": explanation.bottleneck.kind,
        "reasons": list(explanation.bottleneck.reasons),
        "stages_ms": explanation.subject.stages_ms,
        "instance_busy_share": explanation.subject.busy_share,
        "copied_share_of_compute": explanation.subject.copied_share,
        "binding": {
            "constraint": str(bound.constraint) if bound.constraint else None,
            "beyond": summary.entry(bound.beyond) if bound.beyond else None,
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
        "latency": simulation.latency,
        "bound_ms": _finite(simulation.bound_ms),
        "median_error": simulation.error,
        "measurements": simulation.points,
        "quickest_ms": simulation.quickest_ms,
        "remedies": [
            {"name": remedy.name, "change": remedy.change, **_forecast(remedy.forecast), "gain": remedy.gain}
            for remedy in simulation.remedies
        ],
        "other_slas": [
            {"factor": sla.factor, "other_bound_ms": sla.bound_ms, **_forecast(sla.forecast), "gain": sla.gain}
            for sla in simulation.other_slas
        ],
    }


def _forecast(forecast: Forecast | None) -> dict[str, Any]:
    return {
        "configuration": formatting.configuration(forecast.candidate) if forecast else None,
        "concurrency": forecast.concurrency if forecast else None,
        "throughput_infer_per_sec": forecast.throughput_infer_per_sec if forecast else None,
        "latency_ms": forecast.latency_ms if forecast else None,
    }


def _runner_up_document(runner_up: RunnerUp) -> dict[str, Any]:
    return {
        **summary.entry(runner_up.point),
        "confirmation": summary.confirmation(runner_up.confirmed) if runner_up.confirmed else None,
        "less_throughput": runner_up.less,
        "less_throughput_interval": [_finite(runner_up.interval.low), _finite(runner_up.interval.high)],
        "missed": runner_up.missed or None,
    }


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None
