"""Headline, metrics, comparisons and JSON document of an outcome, shared by terminal, reports and files."""

from __future__ import annotations

import csv
import io
import json
import math
import shlex
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Final

from objectives.agreement import ALLOWED_DIFFERENCE, Agreement
from objectives.confidence import Verdict
from objectives.load_sequence import MARGIN
from objectives.metrics import METRICS, Measurement
from objectives.sequential import LOOKS
from objectives.verdict import ESTIMAND, MOST_EXCLUDED, QUANTILE_LEVELS
from optimizer.core.errors import BadInputError
from optimizer.core.files import write_atomically
from optimizer.core.safe_text import one_line
from optimizer.core.trial import SETTING_COLUMNS, latest_points
from optimizer.results import formatting

if TYPE_CHECKING:
    from objectives.verdict import ThroughputRatio
    from optimizer.config.search_space import Problem
    from optimizer.core.trial import Point, Trial
    from optimizer.results.confirmation_plan import Confirmed
    from optimizer.results.recommendation import Outcome


_PERCENTILES = ("latency-p50", "latency-p90", "latency-p95", "latency-p99")
_ALWAYS_SHOWN = {"throughput", *_PERCENTILES}
VERIFY_BUDGET = "3m"  # of the command that is proposed for an UNDECIDED run
KEYS: Final = {  # of ``document``
    "verdict": "PASS, FAIL or UNDECIDED.",
    "undecided_cause": "Why the verdict is UNDECIDED; null for another one.",
    "recommended": "The recommended point: its configuration, load and metrics with the names of trials.csv, "
    "`energy_joules_per_1000_infer`, and `verdict` (null if it was not measured on fresh servers).",
    "confirmation": "Test of the recommendation on fresh servers; null if there was none:",
    "confirmation.verdict": "PASS, FAIL or UNDECIDED.",
    "confirmation.confidence": "Confidence level.",
    "confirmation.reason": "The deciding interval in words.",
    "confirmation.servers": "Number of fresh servers.",
    "confirmation.measurements": "Number of windows.",
    "confirmation.effective_requests": "Number of independent requests that carry the same information.",
    "confirmation.estimand": "What is estimated, in words.",
    "confirmation.slow_share": "Interval of the share of requests over the bound.",
    "confirmation.excluded_share": "Share of the windows that do not count.",
    "confirmation.error": "Error probability of the test.",
    "confirmation.throughput_infer_per_sec": "Interval of the throughput.",
    "confirmation.latency": "Name of the bounded latency.",
    "confirmation.latency_ms": "Interval of that latency.",
    "confirmation.perf_analyzer": "Comparison with perf_analyzer on the same servers; null if it did not check.",
    "baseline": "The configuration as given, in the same form; null if it meets the bounds nowhere.",
    "dynamic_batching": "Plain `dynamic_batching {}`, in the same form.",
    "speedup": "Throughput of the recommendation relative to the baseline's; null if one was not confirmed.",
    "speedup_interval": "Interval of it.",
    "speedup_over_dynamic_batching": "Throughput of the recommendation relative to that of `dynamic_batching {}`.",
    "speedup_over_dynamic_batching_interval": "Interval of it.",
    "pareto": "Points of the Pareto front, in the form of `recommended`.",
    "dominated_by": "Point of the search that dominates the recommendation; null if there is none.",
    "closest": "Without a recommendation, the point that misses the bounds by least.",
    "holds_back": "Without a recommendation, why.",
    "trials": "Number of trials.",
    "measurements": "Number of measurements of the search.",
    "confirmations": "Number of measurements on fresh servers.",
    "wall_seconds": "Wall time until the result.",
    "results_dir": "Folder of the run.",
}


def headline(outcome: Outcome, problem: Problem) -> str:
    """Return the result in one sentence: the verdict with throughput and cause, or why nothing meets the SLA."""
    goal = formatting.bounds(problem.sla)
    if outcome.recommended is not None:
        throughput = formatting.value_of(outcome.recommended, "throughput")
        if not goal:
            return f"{problem.model}: {throughput}"
        cause = undecided_cause(outcome)
        because = f": {cause}" if cause else ""
        return f"{problem.model}: {outcome.verdict.value} at {throughput} within {goal}{because}"
    failing = f"no configuration meets {goal}" if goal else "no configuration could be measured"
    because = f": {outcome.holds_back.rstrip('.')}" if outcome.holds_back else ""
    return f"{problem.model}: {failing}{because}"


def undecided_cause(outcome: Outcome) -> str:
    """Return why the verdict of the run is UNDECIDED, without a full stop; empty for another verdict."""
    if outcome.verdict is not Verdict.UNDECIDED:
        return ""
    confirmed = outcome.confirmed
    if confirmed is None or not confirmed.error:
        if any(entry.error for entry in outcome.again):
            return "no configuration passed its test on fresh servers, and this one was not tested"
        return "it was not tested on fresh servers"
    judged, servers = confirmed.judged, confirmed.servers
    if judged.excluded_share > MOST_EXCLUDED:
        return f"the machine was disturbed in {100 * judged.excluded_share:.0f} % of the windows"
    if servers < LOOKS[0]:
        return f"the time ended after {servers} of {formatting.count(LOOKS[0], 'server')}"
    bound = next((constraint for constraint in outcome.sla if constraint.metric in QUANTILE_LEVELS), None)
    slow = judged.slow_share
    if bound is None or slow.is_unknown:
        return judged.reason
    allowed = 1 - QUANTILE_LEVELS[bound.metric]
    if not slow.low <= allowed < slow.high:  # another constraint is undecided
        return judged.reason
    share = f"{formatting.number(100 * slow.low, 2)} to {formatting.number(100 * slow.high, 2)} %"
    measured = f"{share} of the requests are slower than {formatting.exact(bound.bound)} ms"
    latency_ms = METRICS[bound.metric].value(confirmed.point.measurement)
    if latency_ms is not None and latency_ms <= math.exp(-MARGIN) * bound.bound:
        return f"the {servers} servers differ too much ({measured})"
    return f"{measured}, and {100 * allowed:.4g} % may be"


def verify_command(folder: str | Path) -> str:
    """Return the command that continues the test of the recommendation of the run in ``folder``."""
    return f"tune verify {shlex.quote(one_line(str(folder)))} --budget {VERIFY_BUDGET}"


def next_command(outcome: Outcome, folder: str | Path) -> str:
    """Return the command that continues the test of the run in ``folder``; empty unless it is UNDECIDED."""
    return verify_command(folder) if outcome.verdict is Verdict.UNDECIDED else ""


def nothing_recommended(folder: Path, problem: Problem, action: str) -> BadInputError:
    """Return the error for ``action``, which needs a recommendation, on a run that has none."""
    goal = formatting.bounds(problem.sla) or "the SLA"
    return BadInputError(
        f"{one_line(str(folder))}: no configuration met {goal}, so there is nothing to {action}; "
        "tune again with a wider bound, smaller requests or more hardware"
    )


def figures(point: Point, problem: Problem) -> list[tuple[str, str]]:
    """Return (label, values with units) of a point, including unknown values of objectives and constraints."""
    load, measurement = point.load, point.measurement
    throughput = formatting.value_of(point, "throughput")
    batch = load.request_batch_size
    if batch > 1 and measurement.throughput_infer_per_sec is not None:
        requests = formatting.number(measurement.throughput_infer_per_sec / batch)
        size = f"{batch:,} samples each" if problem.request_mix is None else f"{batch:,.4g} samples on average"
        throughput += f" = {requests} req/s of {size}"
    served = f"concurrency {formatting.load(load)} (requests in flight)"
    if load.request_rate:
        served = f"{formatting.load(load)} (open loop: sent independently of responses)"
    if measurement.mean_batch_size is not None:
        served += f", mean batch {formatting.number(measurement.mean_batch_size)} samples"
    latencies = [f"{formatting.short_metric(name)} {formatting.value_of(point, name)}" for name in _PERCENTILES]
    lines = [("throughput", throughput), ("latency", " · ".join(latencies)), ("load", served)]
    metrics = [*(metric.name for metric in problem.objectives), *(c.metric for c in problem.sla)]
    metrics += [name for name in (memory_of(measurement), "energy") if METRICS[name].value(measurement) is not None]
    rest = [name for name in dict.fromkeys(metrics) if name not in _ALWAYS_SHOWN]
    lines += [(formatting.metric_label(name), formatting.value_of(point, name)) for name in rest]
    gpu = formatting.gpu(measurement)
    return [*lines, ("GPU", gpu)] if gpu else lines


def memory_of(measurement: Measurement) -> str:
    """Return the name of the memory metric: the GPU's if it was measured, otherwise the server's."""
    return "memory" if measurement.gpu_memory_bytes is None else "gpu-memory"


def verdict(outcome: Outcome) -> str:
    """Return the verdict on the recommendation with its confidence intervals, or why it was not confirmed."""
    confirmed = outcome.confirmed
    if confirmed is None:
        if not outcome.sla:
            return f"{formatting.NO_SLA}; not measured again on fresh servers"
        return f"UNDECIDED: {undecided_cause(outcome)}"
    judged = confirmed.judged
    reason = "" if judged.verdict is Verdict.PASS else f": {judged.reason}"
    words = f"{formatting.verdict(judged)}{reason}" if outcome.sla else formatting.NO_SLA
    windows, servers = formatting.count(confirmed.windows, "measurement"), confirmed.servers
    measured = f"{windows} on {formatting.count(servers, 'fresh server')}"
    return f"{words} ({', '.join(confirmed_intervals(confirmed))}; {measured})"


def verdict_lines(outcome: Outcome) -> list[tuple[str, str]]:
    """Return (label, text) of the verdict, of the estimand of a share of requests, and of perf_analyzer's check."""
    if outcome.recommended is None:
        return []
    is_share = any(constraint.metric in QUANTILE_LEVELS for constraint in outcome.sla)
    estimand = [("estimand", ESTIMAND)] if outcome.confirmed and is_share else []
    check = [("cross-check", text)] if (text := cross_check(outcome)) else []
    return [("verdict", verdict(outcome)), *estimand, *check]


def confirmed_intervals(confirmed: Confirmed) -> list[str]:
    """Return the confidence interval of the throughput and, if it is known, of the judged latency."""
    intervals = [formatting.interval(METRICS["throughput"], confirmed.throughput)]
    if not confirmed.latency_ms.is_unknown:
        latency = formatting.interval(METRICS[confirmed.latency], confirmed.latency_ms)
        intervals.append(f"{formatting.short_metric(confirmed.latency)} {latency}")
    return intervals


def cross_check(outcome: Outcome) -> str:
    """Return how perf_analyzer's measurements on the confirmed servers compare with those of tune's own client.

    The text is empty if perf_analyzer did not measure next to another load generator.
    """
    agreement = outcome.confirmed.agreement if outcome.confirmed else None
    if agreement is None:
        return ""
    if not agreement.ratios:
        return f"perf_analyzer was not compared with tune's own client: {agreement.reason or 'too few servers'}"
    ratios = [
        f"{formatting.short_metric(own.metric)} {own.ratio:.2f}x ({own.interval.low:.2f} to {own.interval.high:.2f})"
        for own in agreement.ratios
    ]
    servers = formatting.count(agreement.pairs, "server")
    text = f"perf_analyzer against tune's own client on the same {servers}: {', '.join(ratios)}"
    return f"{text}; {agreement.disagreement}" if agreement.disagreement else text


def comparisons(outcome: Outcome, problem: Problem) -> list[tuple[str, str, str]]:
    """Return (configuration, metrics at its best load, gain of the recommendation over it) for each role."""
    latency = problem.sla.judged_latency
    goal = formatting.bounds(problem.sla)
    missed = f"no measured load meets {goal}" if goal else "not measured"

    def row(name: str, point: Point | None, gain: str, role: str = "") -> tuple[str, str, str]:
        if point is None:
            return name, "not reached before the run ended" if role in outcome.untried else missed, ""
        text = formatting.performance(point, latency)
        if not problem.sla.is_met(point.measurement):
            text += f", misses {goal} on fresh servers"
        return name, text, gain

    def gain(point: Point | None, ratio: ThroughputRatio | None) -> str:
        return "same" if point is outcome.recommended else formatting.gain(ratio)

    return [
        row("recommended", outcome.recommended, ""),
        row("baseline, as given", outcome.baseline, gain(outcome.baseline, outcome.gain), "baseline"),
        row(
            "dynamic_batching {}",
            outcome.dynamic_batching,
            gain(outcome.dynamic_batching, outcome.gain_over_dynamic_batching),
            "dynamic_batching",
        ),
    ]


FRONT_HEADERS = (">infer/s", ">p95 ms", ">load", "measured", ">trial", "configuration (batch: max_batch_size)")


def front_rows(outcome: Outcome, points: Sequence[Point]) -> list[tuple[str, ...]]:
    """Return the cells below FRONT_HEADERS of points of the Pareto front."""
    return [
        (
            formatting.number(point.measurement.throughput_infer_per_sec),
            formatting.number(point.measurement.latency_p95_ms),
            formatting.load(point.load),
            "fresh" if outcome.confirmation_of(point) else "search",
            str(point.trial),
            formatting.configuration(point.candidate),
        )
        for point in points
    ]


def shown_front(outcome: Outcome, most: int) -> list[Point]:
    """Return at most ``most`` points, evenly spread over the Pareto front, with the recommendation if it is on it."""
    shown = list(evenly_spread(outcome.front, most))
    best = next((place for place, point in enumerate(outcome.front) if point is outcome.recommended), None)
    if best is not None and not any(point is outcome.recommended for point in shown):
        shown[round(best * (len(shown) - 1) / (len(outcome.front) - 1))] = outcome.front[best]
    return shown


def front_remark(outcome: Outcome) -> str:
    """Return why the recommendation is not on the Pareto front; empty if it is on it or there is none."""
    best, better = outcome.recommended, outcome.dominated_by
    if best is None or any(point is best for point in outcome.front):
        return ""
    if better is None:
        return "The recommendation is not on the front: it was disturbed, or its p95 latency is unknown."
    confirmed = outcome.confirmation_of(better)
    again = [entry for entry in outcome.again if entry.point.candidate == better.candidate]
    if confirmed is not None and confirmed.error:
        why = f"but its test at this load ended {confirmed.judged.verdict.value}"
    elif confirmed is not None:
        why = "but it was measured there for comparison only"
    elif again:
        why = "but only in the search; this configuration was measured on fresh servers at another load"
    else:
        why = "but only in the search, which overestimates its best configurations"
    seen = formatting.performance(better, "latency-p95")
    return f"The recommendation is not on the front: trial {better.trial} had {seen}, {why}."


def evenly_spread(points: Sequence[Point], most: int) -> Sequence[Point]:
    """Return at most ``most`` of ``points`` in even steps, including both ends."""
    if len(points) <= most:
        return points
    return [points[round(i * (len(points) - 1) / (most - 1))] for i in range(most)]


def best_load(trial: Trial, problem: Problem) -> tuple[Point | None, bool]:
    """Return the trial's best point and True; if none meets the SLA, the closest point and False."""
    measured = latest_points([trial])
    best = problem.best_point(measured)
    return best or problem.sla.closest_point(measured), best is not None


_LOAD = ("request_batch_size", "concurrency", "request_rate")
_MEASURED = (
    *("throughput_infer_per_sec", "latency_avg_ms", "latency_p50_ms", "latency_p90_ms", "latency_p95_ms"),
    *("latency_p99_ms", "mean_batch_size", "stable", "gpu_utilization", "gpu_memory_bytes", "gpu_power_watts"),
    *("gpu_sm_clock_mhz", "gpu_memory_clock_mhz", "gpu_throttling", "server_memory_bytes", "other_cpu_share"),
    "score",
)

ENERGY = "energy_joules_per_1000_infer"


def entry(point: Point) -> dict[str, object]:
    """Return a measured point with the names of trials.csv: settings, trial, load, metrics; None if unknown.

    Throughput is in samples per second, latencies are per request in ms, memory is in bytes and energy in joules per
    1,000 samples.
    """
    candidate = point.candidate
    return {
        **{name: getattr(candidate, name) for name in SETTING_COLUMNS},
        "preferred_batch_sizes": list(candidate.preferred_batch_sizes),
        **dict(candidate.fields),
        "trial": point.trial,
        **{name: getattr(point.load, name) for name in _LOAD},
        **{name: _known(getattr(point.measurement, name)) for name in _MEASURED},
        ENERGY: _known(METRICS["energy"].value(point.measurement)),
    }


def document(
    outcome: Outcome, *, wall_seconds: float, results_dir: str, extra: Mapping[str, object] | None = None
) -> dict[str, object]:
    """Return the result of a run for JSON; ``trials`` and ``measurements`` are counts. ``extra`` is appended."""
    return {
        "verdict": outcome.verdict.value,
        "undecided_cause": undecided_cause(outcome) or None,
        "recommended": _entry(outcome, outcome.recommended),
        "confirmation": confirmation(outcome.confirmed) if outcome.confirmed else None,
        "baseline": _entry(outcome, outcome.baseline),
        "dynamic_batching": _entry(outcome, outcome.dynamic_batching),
        **_gain("speedup", outcome.gain),
        **_gain("speedup_over_dynamic_batching", outcome.gain_over_dynamic_batching),
        "pareto": [_entry(outcome, point) for point in outcome.front],
        "dominated_by": _entry(outcome, outcome.dominated_by),
        "closest": _entry(outcome, outcome.closest),
        "holds_back": outcome.holds_back or None,
        "trials": outcome.trials,
        "measurements": outcome.measurements,
        "confirmations": outcome.confirmations,
        "wall_seconds": round(wall_seconds, 3),
        "results_dir": results_dir,
        **(extra or {}),
    }


def confirmation(confirmed: Confirmed) -> dict[str, object]:
    """Return verdict and confidence intervals of a confirmation: [low, high], None for an end that is unknown."""
    judged = confirmed.judged
    return {
        "verdict": judged.verdict.value,
        "confidence": judged.confidence,
        "reason": judged.reason,
        "servers": confirmed.servers,
        "measurements": confirmed.windows,
        "effective_requests": round(judged.effective_requests),
        "estimand": ESTIMAND,
        "slow_share": [_known(judged.slow_share.low), _known(judged.slow_share.high)],
        "excluded_share": round(judged.excluded_share, 4),
        "error": confirmed.error,
        "throughput_infer_per_sec": [_known(confirmed.throughput.low), _known(confirmed.throughput.high)],
        "latency": confirmed.latency,
        "latency_ms": [_known(confirmed.latency_ms.low), _known(confirmed.latency_ms.high)],
        "perf_analyzer": _agreement(confirmed.agreement) if confirmed.agreement else None,
    }


def _agreement(agreement: Agreement) -> dict[str, object]:
    """Return the comparison of perf_analyzer with tune's own client; ``ratio`` is perf_analyzer's value over it."""
    return {
        "servers": agreement.servers,
        "pairs": agreement.pairs,
        "allowed_ratio": round(math.exp(ALLOWED_DIFFERENCE), 4),
        "ratios": {
            own.metric: {
                "perf_analyzer": own.value,
                "ratio": own.ratio,
                "interval": [_known(own.interval.low), _known(own.interval.high)],
            }
            for own in agreement.ratios
        },
        "disagreement": agreement.disagreement or None,
        "contradicts_pass": bool(agreement.contradiction),
        "reason": agreement.reason or None,
    }


def write_pareto_csv(path: Path, outcome: Outcome) -> None:
    """Write the Pareto front with the columns of trials.csv, one point per row. Raises EnvironmentFault.

    ``confirmed`` says whether a row is from fresh servers or from the search.
    """
    fields = sorted({name for point in outcome.front for name, _ in point.candidate.fields})
    columns = ("trial", *SETTING_COLUMNS, *fields, *_LOAD, "confirmed", *_MEASURED, ENERGY)
    rows = [{**entry(point), "confirmed": outcome.confirmation_of(point) is not None} for point in outcome.front]
    write_csv(path, columns, rows)


def write_csv(path: Path, columns: Sequence[str], rows: Iterable[Mapping[str, object]]) -> None:
    """Write a table as CSV; values that a row lacks are empty. Raises EnvironmentFault."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(columns)
    writer.writerows([_cell(row.get(column)) for column in columns] for row in rows)
    write_atomically(path, text.getvalue())


def write_json(path: Path, value: Mapping[str, object]) -> None:
    """Write indented JSON with a final line break. Raises EnvironmentFault."""
    write_atomically(path, json.dumps(value, indent=2, ensure_ascii=False, allow_nan=False) + "\n")


def _gain(name: str, gain: ThroughputRatio | None) -> dict[str, object]:
    return {name: gain.estimate if gain else None, f"{name}_interval": list(gain.bounds) if gain else None}


def _entry(outcome: Outcome, point: Point | None) -> dict[str, object] | None:
    confirmed = outcome.confirmation_of(point)
    return {**entry(point), "verdict": confirmed.judged.verdict.value if confirmed else None} if point else None


def _known(value: object) -> object:
    """Return None for NaN and infinity, which JSON does not have."""
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _cell(value: object) -> object:
    if isinstance(value, bool):
        return "true" if value else "false"
    return " ".join(map(str, value)) if isinstance(value, list) else value
