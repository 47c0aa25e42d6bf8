"""The result of a run as data: the keys of run.json, measured points with the names of trials.csv, pareto.csv."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Final

from objectives import model_stats, priority_stats
from objectives.agreement import ALLOWED_DIFFERENCE, Agreement
from objectives.metrics import LATENCY, METRICS, QUANTILES, STATISTICS, Measurement
from objectives.verdict import estimand
from optimizer.core.candidate import SETTING_COLUMNS
from optimizer.core.files import write_csv
from optimizer.results import formatting
from optimizer.results.outcome_values import STREAMED_TIMINGS
from optimizer.results.summary import undecided_cause
from optimizer.store.trials_reader import ENERGY, LOAD_COLUMNS

if TYPE_CHECKING:
    from objectives.intervals import ConfidenceInterval, ObjectiveGain
    from optimizer.confirmation.verdicts import ConfirmedLoad
    from optimizer.core.trial import Point
    from optimizer.results.no_recommendation import InconclusiveResult
    from optimizer.results.recommendation import Outcome

_METRIC_KEYS = (
    *("throughput_infer_per_sec", "goodput_infer_per_sec"),
    *("latency_avg_ms", "latency_p50_ms", "latency_p90_ms", "latency_p95_ms"),
    *("latency_p99_ms", "mean_batch_size", "stable", "gpu_utilization", "gpu_memory_bytes", "gpu_power_watts"),
    *("gpu_sm_clock_mhz", "gpu_memory_clock_mhz", "gpu_throttling", "server_memory_bytes", "other_cpu_share"),
    *("kv_cache_utilization", "engine_tokens_per_sec", "engine_preemptions"),
    *("score", "output_deviation", "rejected_requests", "timed_out_requests", "failed_requests"),
)
_STREAMING_KEYS = (
    *(timing.field_of(statistic) for timing in STREAMED_TIMINGS for statistic in STATISTICS),
    *("responses_per_sec", "output_tokens_per_sec"),
)
KEYS: Final = {  # descriptions of the keys of ``document``
    "verdict": "PASS, FAIL or UNDECIDED.",
    "undecided_cause": "Why the verdict is UNDECIDED; null for another one.",
    "recommended": "The recommended point: its configuration, load and metrics with the names of trials.csv, "
    "`energy_joules_per_1000_infer`, `verdict` (null if it was not measured on fresh servers), and "
    "`misses_in_usual_states` (whether it meets the bounds as measured there, but not in the usual states of the "
    "run). `priorities` and `models` have the requests, throughput and latency of each of several.",
    "confirmation": "Test of the recommendation on fresh servers; null if there was none:",
    "confirmation.verdict": "PASS, FAIL or UNDECIDED.",
    "confirmation.confidence": "Confidence level.",
    "confirmation.reason": "The deciding interval in words.",
    "confirmation.servers": "Number of fresh servers.",
    "confirmation.measurements": "Number of windows.",
    "confirmation.effective_requests": "Number of independent requests that carry the same information.",
    "confirmation.estimand": "What is estimated, in words.",
    "confirmation.slow_share": "Interval of the share of requests over the first latency bound, after that bound was "
    "divided by `latency_factor`.",
    "confirmation.disturbed_share": "Share of the windows in which other programs disturbed the machine; "
    "they count only if it is above 0.2.",
    "confirmation.latency_factor": "Factor by which latencies are judged as higher than measured, because other "
    "programs were usually more active during the run; 1 if they were not.",
    "confirmation.error": "Error probability of the test.",
    "confirmation.throughput_infer_per_sec": "Interval of the throughput.",
    "confirmation.latency": "Name of the first bounded latency.",
    "confirmation.latency_ms": "Interval of that latency.",
    "confirmation.other_latencies_ms": "Intervals of the other bounded latencies, by metric.",
    "confirmation.streaming": "Only of a model that streams: intervals of the output tokens per second and of the "
    "other bounded latencies, by metric.",
    "confirmation.perf_analyzer": "Comparison with perf_analyzer on the same servers; null if it did not check.",
    "baseline": "The configuration as given, in the same form; null if it meets the bounds nowhere.",
    "dynamic_batching": "Plain `dynamic_batching {}`, in the same form; null also if the model cannot have it.",
    "objective": "The first objective, which the gains are about: `metric` is its name, and `better` is `higher` or "
    "`lower`.",
    "speedup": "Value of the objective of the recommendation divided by the baseline's, or the inverse if lower is "
    "better; 1 if the baseline is recommended. Null if one was not confirmed or missed its bounds on fresh servers "
    "(see `misses_in_usual_states`), and for `error-rate` and `score`.",
    "speedup_interval": "Interval of it.",
    "speedup_values": "Values of the objective of the recommendation and of the baseline, in the unit of the metric.",
    "speedup_text": "The gain in words, such as `p95 4.3x lower (3.8 to 4.9)`.",
    "speedup_over_dynamic_batching": "The same relative to `dynamic_batching {}`.",
    "speedup_over_dynamic_batching_interval": "Interval of it.",
    "speedup_over_dynamic_batching_values": "Values of the objective of both.",
    "speedup_over_dynamic_batching_text": "This gain in words.",
    "pareto": "Points of the Pareto front, in the form of `recommended`.",
    "dominated_by": "Point of the search that dominates the recommendation; null if there is none.",
    "closest": "Without a recommendation, an unstable point that meets the bounds, or the one closest to them.",
    "no_recommendation_reason": "Without a recommendation, why.",
    "inconclusive": "Without a recommendation, why the verdict is UNDECIDED; null for FAIL:",
    "inconclusive.kind": "`search_disturbed` or `closest_disturbed` (other programs took CPU time during most "
    "measurements, or that of the closest point), `test_disturbed` (windows on fresh servers were disturbed), "
    "`test_undecided` (a test did not decide) or `unstable` (a measurement meets the bounds, but is not stable).",
    "inconclusive.disturbed": "Number of disturbed measurements, or windows of the test.",
    "inconclusive.total": "Number of all of these.",
    "trials": "Number of trials.",
    "measurements": "Number of measurements of the search.",
    "confirmations": "Number of measurements on fresh servers.",
    "wall_seconds": "Wall time of the run until the result, of all its sessions together.",
    "results_dir": "Folder of the run.",
}


def document(outcome: Outcome, *, wall_seconds: float, results_dir: str) -> dict[str, object]:
    """Return the result of a run for JSON; ``trials`` and ``measurements`` are counts."""
    dynamic = outcome.dynamic_batching
    return {
        "verdict": outcome.verdict.value,
        "undecided_cause": undecided_cause(outcome) or None,
        "recommended": judged_entry(outcome, outcome.recommended),
        "confirmation": confirmation(outcome.confirmed) if outcome.confirmed else None,
        "baseline": judged_entry(outcome, outcome.baseline.point),
        "dynamic_batching": judged_entry(outcome, dynamic.point if dynamic else None),
        "objective": {"metric": outcome.objective.name, "better": outcome.objective.better},
        **gain_entry("speedup", outcome.baseline.gain),
        **gain_entry("speedup_over_dynamic_batching", dynamic.gain if dynamic else None),
        "pareto": [judged_entry(outcome, point) for point in outcome.front.points],
        "dominated_by": judged_entry(outcome, outcome.front.dominating),
        "closest": judged_entry(outcome, outcome.closest),
        "no_recommendation_reason": outcome.no_recommendation_reason or None,
        "inconclusive": _inconclusive(outcome.inconclusive) if outcome.inconclusive else None,
        "trials": outcome.trials,
        "measurements": outcome.measurements,
        "confirmations": outcome.confirmations,
        "wall_seconds": round(wall_seconds, 3),
        "results_dir": results_dir,
    }


def entry(point: Point) -> dict[str, object]:
    """Return a measured point with the names of trials.csv: settings, trial, load, metrics; None if unknown.

    Throughput is in samples per second, latencies are per request in ms, memory is in bytes and energy in joules per
    1,000 samples. The metrics of streaming follow for a model that streams.
    """
    streamed = _STREAMING_KEYS if point.measurement.is_streamed else ()
    return {
        **point.candidate.settings,
        "preferred_batch_sizes": list(point.candidate.preferred_batch_sizes),
        "trial": point.trial,
        **{name: getattr(point.load, name) for name in LOAD_COLUMNS},
        **{name: json_value(getattr(point.measurement, name)) for name in (*_METRIC_KEYS, *streamed)},
        ENERGY: json_value(METRICS["energy"].value(point.measurement)),
        **({"priorities": _priorities(point.measurement)} if point.measurement.by_priority else {}),
        **({"models": _models(point.measurement)} if point.measurement.by_model else {}),
    }


def _inconclusive(result: InconclusiveResult) -> dict[str, object]:
    """Return why the verdict is UNDECIDED without a recommendation. The values of the test are in trials.csv."""
    return {"kind": result.kind, "disturbed": result.disturbed, "total": result.total}


def _priorities(measurement: Measurement) -> list[dict[str, object]]:
    """Return the statistics of each priority for JSON."""
    return [
        {
            "priority": stats.priority,
            "throughput_infer_per_sec": stats.throughput_infer_per_sec,
            "requests": stats.served,
            "rejected_requests": stats.rejected,
            "timed_out_requests": stats.timed_out,
            "failed_requests": stats.failed,
            **{LATENCY.field_of(name): stats.latency_ms(level) for name, level in QUANTILES.items()},
        }
        for stats in priority_stats.from_text(measurement.by_priority)
    ]


def _models(measurement: Measurement) -> list[dict[str, object]]:
    """Return the values of each model under load for JSON."""
    by_model = model_stats.from_text(measurement.by_model)
    return [
        {"model": name, **{field: json_value(getattr(values, field)) for field in model_stats.FIELDS}}
        for name, values in by_model.items()
    ]


def judged_entry(outcome: Outcome, point: Point | None) -> dict[str, object] | None:
    """Return ``entry`` of a point of ``outcome``, with what fresh servers showed about it; None without a point."""
    if point is None:
        return None
    confirmed = outcome.confirmation_of(point)
    return {
        **entry(point),
        "verdict": confirmed.judged.verdict.value if confirmed else None,
        "misses_in_usual_states": outcome.misses_in_usual_states(point),
    }


def gain_entry(name: str, gain: ObjectiveGain | None) -> dict[str, object]:
    """Return the keys of a gain whose first one is ``name``: the ratio, its interval, both values and the text."""
    ratio = gain.ratio if gain else None
    return {
        name: ratio.estimate if ratio else None,
        f"{name}_interval": list(ratio.bounds) if ratio else None,
        f"{name}_values": [json_value(gain.value), json_value(gain.compared_value)] if gain else None,
        f"{name}_text": formatting.gain(gain) if gain else None,
    }


def confirmation(confirmed: ConfirmedLoad) -> dict[str, object]:
    """Return verdict and confidence intervals of a confirmation: [low, high], None for an end that is unknown."""
    judged = confirmed.judged
    return {
        "verdict": judged.verdict.value,
        "confidence": judged.confidence,
        "reason": judged.reason,
        "servers": confirmed.servers,
        "measurements": confirmed.windows,
        "effective_requests": round(judged.effective_requests),
        "estimand": estimand(confirmed.sla, judged.latency_rise),
        "slow_share": interval_document(judged.slow_share),
        "disturbed_share": round(judged.disturbed_share, 4),
        "latency_factor": round(math.exp(judged.latency_rise), 4),
        "error": confirmed.error,
        "throughput_infer_per_sec": interval_document(confirmed.throughput),
        "latency": confirmed.latency,
        "latency_ms": interval_document(confirmed.latency_ms),
        "other_latencies_ms": _bounds_of(
            {name: interval for name, interval in confirmed.other_intervals.items() if METRICS[name].timing}
        ),
        **({"streaming": _bounds_of(confirmed.other_intervals)} if confirmed.point.measurement.is_streamed else {}),
        "perf_analyzer": _agreement(confirmed.agreement) if confirmed.agreement else None,
    }


def _bounds_of(intervals: Mapping[str, ConfidenceInterval]) -> dict[str, list[object]]:
    return {metric: interval_document(interval) for metric, interval in intervals.items()}


def _agreement(agreement: Agreement) -> dict[str, object]:
    """Return the comparison of perf_analyzer with tune's own client; ``ratio`` is perf_analyzer's value over it."""
    return {
        "servers": agreement.servers,
        "pairs": agreement.pairs,
        "allowed_ratio": round(math.exp(ALLOWED_DIFFERENCE), 4),
        "ratios": {
            metric_ratio.metric: {
                "perf_analyzer": metric_ratio.value,
                "ratio": metric_ratio.ratio,
                "interval": interval_document(metric_ratio.interval),
            }
            for metric_ratio in agreement.ratios
        },
        "disagreement": agreement.disagreement or None,
        "contradicts_pass": agreement.contradicts_pass,
        "reason": agreement.reason or None,
    }


def interval_document(interval: ConfidenceInterval) -> list[object]:
    """Return [low, high] for JSON, with None for an end that is unknown."""
    return [json_value(interval.low), json_value(interval.high)]


def json_value(value: object) -> object:
    """Return ``value``, or None for NaN and infinity, which JSON does not have."""
    return None if isinstance(value, float) and not math.isfinite(value) else value


def write_pareto_csv(path: Path, outcome: Outcome) -> None:
    """Write the Pareto front with the columns of trials.csv, one point per row. Raises EnvironmentFault.

    ``confirmed`` says whether a row is from fresh servers or from the search.
    """
    fields = sorted({name for point in outcome.front.points for name, _ in point.candidate.fields})
    streamed = _STREAMING_KEYS if outcome.is_streamed else ()
    columns = ("trial", *SETTING_COLUMNS, *fields, *LOAD_COLUMNS, "confirmed", *_METRIC_KEYS, *streamed, ENERGY)
    rows = [
        {**entry(point), **point.load.cells(), "confirmed": outcome.confirmation_of(point) is not None}
        for point in outcome.front.points
    ]
    write_csv(path, columns, rows)
