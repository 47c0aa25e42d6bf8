"""An explanation of a run as the document of ``tune explain --json``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from optimizer.core.trial import Point
from optimizer.explain.bottleneck import used_shares, worst_missed
from optimizer.explain.explain_report import change_name
from optimizer.explain.explanation import ChangeForecasts, Explanation, RunnerUp
from optimizer.explain.forecaster import CandidateForecast, Gain, OtherSla, Remedy
from optimizer.explain.step_advice import StepAdvice
from optimizer.results import configuration_text, result_document
from optimizer.results.forecast_accuracy import CheckedForecast, count_inside, median_error
from optimizer.results.request_steps import StepTimes


def document(explanation: Explanation) -> dict[str, Any]:
    """Return the document of ``--json``. Shares and gains are relative (0.1 is 10 %), None if unknown."""
    binding, changes, runner_up = explanation.binding, explanation.changes, explanation.runner_up
    subject, sla = explanation.subject.point, explanation.run.problem.sla
    constraint = binding.constraint if binding else None
    if not explanation.has_recommendation:
        constraint = worst_missed(subject, sla)
    return {
        "run": str(explanation.run.folder.path),
        "status": explanation.run.status,
        "verdict": explanation.outcome.verdict.value,
        "recommended": explanation.has_recommendation,
        "subject": result_document.entry(subject),
        "no_recommendation_reason": explanation.outcome.no_recommendation_reason or None,
        "bottleneck": explanation.bottleneck.kind,
        "reasons": list(explanation.bottleneck.reasons),
        "stages_ms": explanation.subject.stages_ms,
        "steps": [_step_document(step) for step in explanation.subject.steps] or None,
        "limiting_step": _advice_document(explanation.step_advice) if explanation.step_advice else None,
        "instance_busy_share": explanation.subject.busy_share,
        "copied_share_of_compute": explanation.subject.copied_share,
        "binding": {
            "constraint": str(constraint) if constraint else None,
            "beyond": _entry(binding.beyond if binding else None),
            "gain": binding.gain if binding else None,
            "used_share": used_shares(subject, sla),
        },
        "forecasts": {
            "throughput": _forecasts_document(explanation.forecast_checks.throughput),
            "latency": _forecasts_document(explanation.forecast_checks.latency),
        },
        "predicted_changes": _changes_document(changes) if changes else None,
        "shared_memory": explanation.shared_memory.document() if explanation.shared_memory else None,
        "runner_up": _runner_up_document(runner_up) if runner_up else None,
    }


def _step_document(step: StepTimes) -> dict[str, Any]:
    return {
        "model": step.model,
        "instances": step.instances,
        "instance_busy_share": step.busy_share,
        "queue_ms": step.queue_ms,
        "compute_ms": step.compute_ms,
        "includes_other_models": step.calls_others,
    }


def _advice_document(advice: StepAdvice) -> dict[str, Any]:
    return {"model": advice.step.model, "saturated": advice.step.is_saturated, "setting": advice.setting or None}


def _forecasts_document(checks: Sequence[CheckedForecast]) -> dict[str, Any] | None:
    """Return how many measured values were within their forecast intervals; None without forecasts."""
    if not checks:
        return None
    return {
        "measurements": len(checks),
        "within_interval": count_inside(checks),
        "median_error": median_error(checks),
    }


def _changes_document(changes: ChangeForecasts) -> dict[str, Any]:
    """Return the forecasts of changes; latencies and bounds are in ms, errors and gains are relative."""
    return {
        "model": changes.model,
        "latency": changes.latency.metric,
        "bound_ms": result_document.json_value(changes.latency.bound_ms),
        "median_error": changes.error,
        "measurements": changes.measurement_count,
        "lowest_ms": changes.latency.lowest_ms,
        "latencies": [
            {
                "metric": latency.metric,
                "bound_ms": result_document.json_value(latency.bound_ms),
                "median_error": latency.error,
                "lowest_ms": latency.lowest_ms,
                "lowest_measured": _entry(latency.lowest_measured),
            }
            for latency in changes.latencies
        ],
        "remedies": [
            {
                "name": change_name(remedy),
                "change": remedy.change,
                **_forecast_values(remedy.forecast),
                **_gain_values(remedy.gain),
                **_measured_values(remedy),
            }
            for remedy in changes.remedies
        ],
        "best": _forecast_values(changes.best) if changes.best else None,
        "other_slas": [
            {
                "metric": sla.metric,
                "factor": sla.factor,
                "other_bound_ms": sla.bound_ms,
                **_forecast_values(sla.forecast),
                **_gain_values(sla.gain),
                "forecast_gain": sla.forecast_gain.estimate if sla.forecast_gain else None,
                **_measured_values(sla),
            }
            for sla in changes.other_slas
        ],
        "next_load": _forecast_values(changes.next_load) if changes.next_load else None,
        "next_measured": _entry(changes.next_measured),
    }


def _measured_values(effect: Remedy | OtherSla) -> dict[str, Any]:
    return {"measured": _entry(effect.measured), "refuted_by": _entry(effect.refuted_by)}


def _entry(point: Point | None) -> dict[str, Any] | None:
    return result_document.entry(point) if point else None


def _forecast_values(forecast: CandidateForecast | None) -> dict[str, Any]:
    """Return a forecast with null values if no load meets the bounds."""
    return {
        "configuration": configuration_text.configuration(forecast.candidate) if forecast else None,
        "concurrency": forecast.concurrency if forecast else None,
        "throughput_infer_per_sec": forecast.throughput_infer_per_sec if forecast else None,
        "latency_ms": forecast.latency_ms if forecast else None,
        "latencies_ms": dict(forecast.latencies_ms) if forecast else None,
    }


def _gain_values(gain: Gain | None) -> dict[str, Any]:
    interval = gain.interval if gain else None
    return {
        "gain": gain.estimate if gain else None,
        "gain_interval": [interval.low, interval.high] if interval else None,
    }


def _runner_up_document(runner_up: RunnerUp) -> dict[str, Any]:
    return {
        **result_document.entry(runner_up.point),
        "confirmation": result_document.confirmation(runner_up.confirmed) if runner_up.confirmed else None,
        **result_document.gain_entry("speedup", runner_up.gain),
        "missed": runner_up.missed or None,
    }
