"""Headline, metrics, comparisons and JSON document of an outcome, shared by terminal, reports and files."""

from __future__ import annotations

import csv
import io
import json
import math
import shlex
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

from objectives import priority_stats
from objectives.agreement import ALLOWED_DIFFERENCE, Agreement
from objectives.confidence import Verdict
from objectives.load_sequence import MARGIN
from objectives.metrics import LATENCY, METRICS, QUANTILES, STATISTICS, TIMINGS, Measurement
from objectives.sequential import LOOKS
from objectives.sla import Constraint, Sla
from objectives.verdict import SlaVerdict, estimand, needed_requests
from optimizer.core.errors import BadInputError
from optimizer.core.files import write_atomically
from optimizer.core.safe_text import one_line
from optimizer.core.trial import SETTING_COLUMNS, latest_points
from optimizer.machine.conditions import describe_disturbance
from optimizer.results import formatting
from optimizer.simulator.speed_correction import SpeedCorrection

if TYPE_CHECKING:
    from objectives.metrics import Timing
    from objectives.verdict import ConfidenceInterval, ThroughputRatio
    from optimizer.config.search_space import Problem
    from optimizer.core.trial import Point, Trial
    from optimizer.results.confirmation_plan import Confirmed
    from optimizer.results.recommendation import Outcome


OUTPUT = formatting.OUTPUT_THROUGHPUT
STREAMED_TIMINGS = tuple(timing for timing in TIMINGS if timing.needs_streaming)
_SHOWN_TIMES = {timing: [timing.metric(name) for name in QUANTILES] for timing in TIMINGS}
_ALWAYS_SHOWN = {"throughput", *_SHOWN_TIMES[LATENCY]}
_STREAMED_SHOWN = {OUTPUT, *(name for timing in STREAMED_TIMINGS for name in _SHOWN_TIMES[timing])}
VERIFY_BUDGET = "3m"  # of the command that is proposed for an UNDECIDED run
SMALLEST_PERCENT = 1e-4  # a smaller share is shown as 0


def answer(outcome: Outcome, problem: Problem) -> str:
    """Return the result in one line: the verdict, and throughput and latencies of the recommendation with the SLA.

    For a model that streams, the output tokens per second follow the throughput.
    """
    goal, best = formatting.bounds(problem.sla), outcome.recommended
    if best is None:
        return f"{problem.model}: FAIL, no configuration " + (f"meets {goal}" if goal else "could be measured")
    throughput = estimate(outcome, best, "throughput")
    if best.measurement.output_tokens_per_sec is not None:
        throughput += f", {estimate(outcome, best, OUTPUT)}"
    if not goal:
        return f"{problem.model}: {throughput}"
    latencies = (
        f", {formatting.short_metric(bound.metric)} {estimate(outcome, best, bound.metric)}"
        for bound in problem.sla.latencies
    )
    return f"{problem.model}: {outcome.verdict.value} at {throughput}{''.join(latencies)} (SLA: {goal})"


def cause(outcome: Outcome) -> str:
    """Return why the verdict is UNDECIDED or FAIL, without a full stop; empty for PASS."""
    return one_line(undecided_cause(outcome) or outcome.holds_back.rstrip("."))


KEYS: Final = {  # of ``document``
    "verdict": "PASS, FAIL or UNDECIDED.",
    "undecided_cause": "Why the verdict is UNDECIDED; null for another one.",
    "recommended": "The recommended point: its configuration, load and metrics with the names of trials.csv, "
    "`energy_joules_per_1000_infer`, and `verdict` (null if it was not measured on fresh servers). "
    "With several priorities, `priorities` has the requests, throughput and latency of each.",
    "confirmation": "Test of the recommendation on fresh servers; null if there was none:",
    "confirmation.verdict": "PASS, FAIL or UNDECIDED.",
    "confirmation.confidence": "Confidence level.",
    "confirmation.reason": "The deciding interval in words.",
    "confirmation.servers": "Number of fresh servers.",
    "confirmation.measurements": "Number of windows.",
    "confirmation.effective_requests": "Number of independent requests that carry the same information.",
    "confirmation.estimand": "What is estimated, in words.",
    "confirmation.slow_share": "Interval of the share of requests over the bound.",
    "confirmation.disturbed_share": "Share of the windows in which other programs disturbed the machine; "
    "they count only if it is above 0.2.",
    "confirmation.error": "Error probability of the test.",
    "confirmation.throughput_infer_per_sec": "Interval of the throughput.",
    "confirmation.latency": "Name of the bounded latency.",
    "confirmation.latency_ms": "Interval of that latency.",
    "confirmation.streaming": "Only of a model that streams: intervals of the output tokens per second and of the "
    "other bounded latencies, by metric.",
    "confirmation.perf_analyzer": "Comparison with perf_analyzer on the same servers; null if it did not check.",
    "baseline": "The configuration as given, in the same form; null if it meets the bounds nowhere.",
    "dynamic_batching": "Plain `dynamic_batching {}`, in the same form; null also if the model cannot have it.",
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
    "wall_seconds": "Wall time of the run until the result, of all its sessions together.",
    "results_dir": "Folder of the run.",
}


def no_change(outcome: Outcome) -> str:
    """Return the sentence in place of the changes, if the current configuration is recommended."""
    if outcome.trials == 1:
        return "No change: no other configuration was measured."
    return "No change: the current configuration is recommended."


def headline(outcome: Outcome, problem: Problem) -> str:
    """Return the result in one sentence: the answer and its cause."""
    because = cause(outcome)
    return f"{answer(outcome, problem)}: {because}" if because else answer(outcome, problem)


def estimate(outcome: Outcome, point: Point, metric: str) -> str:
    """Return a value at ``point`` with the digits that its interval allows: ``13,800 ± 400 infer/s``."""
    measured = METRICS[metric]
    value = measured.value(point.measurement)
    if measured.unit == "bytes":
        return formatting.quantity(measured, value)
    return formatting.estimate(value, _interval(outcome, point, metric), measured.unit)


def measured_performance(outcome: Outcome, point: Point, latency: str) -> str:
    """Return a measurement with its confidence intervals, such as ``18,400 ± 2,000 infer/s, p95 18.3 ± 1.1 ms, …``.

    A measurement of the search has no intervals.
    """
    if outcome.confirmation_of(point) is None:
        return formatting.performance(point, latency)
    tokens = formatting.OUTPUT_THROUGHPUT if point.measurement.output_tokens_per_sec is not None else ""
    values = [estimate(outcome, point, metric) for metric in ("throughput", tokens) if metric]
    load = formatting.load(point.load)
    at = f"at {load}" if point.load.request_rate else f"concurrency {load}"
    return f"{', '.join(values)}, {formatting.short_metric(latency)} {estimate(outcome, point, latency)}, {at}"


def _interval(outcome: Outcome, point: Point, metric: str) -> ConfidenceInterval | None:
    """Return the confidence interval of a value at ``point``; None if fresh servers give none."""
    confirmed = outcome.confirmation_of(point)
    return confirmed.interval(metric) if confirmed else None


def undecided_cause(outcome: Outcome) -> str:
    """Return why the verdict of the run is UNDECIDED, without a full stop; empty for another verdict."""
    if outcome.verdict is not Verdict.UNDECIDED:
        return ""
    confirmed = outcome.confirmed
    if confirmed is None or not confirmed.error:
        if _only_baseline_measured(outcome):
            return "the run ended before any other configuration than the current one was measured"
        untested = "was not tested on fresh servers"
        if confirmed is not None:
            untested = f"was compared on {formatting.count(confirmed.servers, 'fresh server')}, but not tested"
        if any(entry.error for entry in outcome.again):
            return f"no configuration passed its test on fresh servers, and this one {untested}"
        return f"it {untested}"
    if confirmed.judged.counts_disturbed:
        return f"the machine was disturbed in {100 * confirmed.judged.disturbed_share:.0f} % of the windows"
    disturbance = describe_disturbance(confirmed.point.measurement)
    return "; ".join(filter(None, (_cause_in_test(outcome, confirmed), disturbance)))


def _cause_in_test(outcome: Outcome, confirmed: Confirmed) -> str:
    """Return why the test on fresh servers did not decide."""
    judged, servers = confirmed.judged, confirmed.servers
    if servers < LOOKS[0]:
        return f"the time ended after {servers} of {formatting.count(LOOKS[0], 'server')}"
    bound = next((constraint for constraint in outcome.sla if METRICS[constraint.metric].quantile), None)
    slow = judged.slow_share
    if bound is None or slow.is_unknown:
        return _reason_with_needed(judged, outcome.sla, confirmed.error)
    allowed = 1 - (METRICS[bound.metric].quantile or 0.0)
    if not slow.low <= allowed < slow.high:  # another constraint is undecided
        return _reason_with_needed(judged, outcome.sla, confirmed.error)
    low, high = (100 * end if 100 * end >= SMALLEST_PERCENT else 0.0 for end in (slow.low, slow.high))
    share = f"{formatting.number(low, 2) if low else '0'} to {formatting.number(high, 2)} %"
    timing = METRICS[bound.metric].timing
    over = f"{formatting.exact(bound.bound)} ms"
    measured = f"{share} of the requests are slower than {over}"
    if timing is not None and timing.needs_streaming:
        measured = f"{share} of the requests have a {timing.subject} above {over}"
    effective, needed = judged.effective_requests, needed_requests(bound, confirmed.error)
    too_few = (
        f"{measured}; {formatting.short_metric(bound.metric)} needs at least {formatting.approximate(needed)} "
        f"effective requests, and these were {formatting.approximate(effective)}"
    )
    if (confirmed.point.measurement.requests or 0) < needed:
        return too_few
    latency_ms = METRICS[bound.metric].value(confirmed.point.measurement)
    if latency_ms is not None and latency_ms <= math.exp(-MARGIN) * bound.bound:
        return f"the {servers} servers differ too much ({measured})"
    return too_few if effective < needed else f"{measured}, and {100 * allowed:.4g} % may be"


def _is_disturbed(confirmed: Confirmed | None) -> bool:
    """Return whether other processes or machines took CPU time from the test."""
    if confirmed is None or not confirmed.error:
        return False
    return confirmed.judged.counts_disturbed or bool(describe_disturbance(confirmed.point.measurement))


def _may_fail_by_disturbance(measurement: Measurement, sla: Sla) -> bool:
    """Return whether ``measurement`` could meet all bounds if other processes or machines had taken no CPU time.

    Each latency is then at best that part of itself in which the CPUs were free for the server.
    """
    if not describe_disturbance(measurement):
        return False
    free_share = 1 - (measurement.other_cpu_share or 0.0)

    def may_meet(bound: Constraint) -> bool:
        value = METRICS[bound.metric].value(measurement)
        return bound.violation(measurement) <= 0 or (
            METRICS[bound.metric].timing is not None and value is not None and free_share * value <= bound.bound
        )

    return all(may_meet(bound) for bound in sla)


def _only_baseline_measured(outcome: Outcome) -> bool:
    """Return whether the run ended before the search, so that its recommendation says nothing of other settings."""
    return outcome.trials == 1 and outcome.recommended is outcome.baseline and "dynamic_batching" in outcome.untried


def _reason_with_needed(judged: SlaVerdict, sla: Sla, error: float) -> str:
    """Return the reason of an UNDECIDED verdict, with the effective requests that an error rate lacks."""
    for bound in sla:
        needed = needed_requests(bound, error)
        is_undecided = METRICS[bound.metric].counted is not None and f"{bound}: " in judged.reason
        if is_undecided and 0 < judged.effective_requests_of(bound.metric) < needed:
            name = formatting.short_metric(bound.metric)
            return f"{judged.reason}; {name} needs at least {formatting.approximate(needed)} effective requests"
    return judged.reason


def verify_command(folder: str | Path) -> str:
    """Return the command that continues the test of the recommendation of the run in ``folder``."""
    return f"tune verify {shlex.quote(one_line(str(folder)))} --budget {VERIFY_BUDGET}"


def next_command(outcome: Outcome, folder: str | Path) -> str:
    """Return the command that continues the test of the run in ``folder``; empty unless it is UNDECIDED."""
    return verify_command(folder) if outcome.verdict is Verdict.UNDECIDED else ""


@dataclass(frozen=True, slots=True)
class NextStep:
    """The step after a run: ``advice`` is a clause without a full stop, ``command`` carries it out."""

    advice: str
    command: str


def next_step(outcome: Outcome, folder: str | Path, reproduce: str, *, is_complete: bool = False) -> NextStep:
    """Return the one thing to do after the run in ``folder``, which has ended.

    Args:
        outcome: The outcome of the run.
        folder: The folder of the run.
        reproduce: The command that repeats the run.
        is_complete: Whether no further server can change an UNDECIDED verdict.
    """
    run = shlex.quote(one_line(str(folder)))
    if outcome.verdict is Verdict.UNDECIDED:
        if is_complete:
            advice = "make a separate test, because more servers cannot change the verdict"
            return NextStep(advice, f"tune verify --fresh {run}")
        if _only_baseline_measured(outcome):
            return NextStep("run again with a larger --budget", reproduce)
        first = "stop other programs on this machine, then " if _is_disturbed(outcome.confirmed) else ""
        return NextStep(f"{first}continue the test", verify_command(folder))
    if outcome.closest is not None:
        if outcome.sla.is_met(outcome.closest.measurement):  # but it was not stable
            return NextStep("stop other programs on this machine, then run again", reproduce)
        if _may_fail_by_disturbance(outcome.closest.measurement, outcome.sla):
            return NextStep("stop other programs on this machine, then run again", reproduce)
        return NextStep("see what would help, or relax the bound", f"tune explain {run}")
    if outcome.recommended is None:
        return NextStep(f"remove the cause (see {run}/logs), then run again", reproduce)
    if outcome.recommended is outcome.baseline:
        return NextStep("keep the current configuration, and see what limits it", f"tune explain {run}")
    files = [path for path in (Path(folder) / "best").rglob("*") if path.is_file()]
    into = " --out tuned_models" if len(files) > 1 else ""  # a single file goes to standard output
    return NextStep("deploy it; --format writes files for Docker, Kubernetes or KServe", f"tune emit {run}{into}")


def nothing_recommended(folder: Path, problem: Problem, action: str) -> BadInputError:
    """Return the error for ``action``, which needs a recommendation, on a run that has none."""
    goal = formatting.bounds(problem.sla) or "the SLA"
    return BadInputError(
        f"{one_line(str(folder))}: no configuration met {goal}, so there is nothing to {action}; "
        "tune again with a wider bound, smaller requests or more hardware"
    )


def figures(outcome: Outcome, point: Point, problem: Problem) -> list[tuple[str, str]]:
    """Return (label, values with units) of a point, including unknown values of objectives and constraints."""
    load, measurement = point.load, point.measurement
    throughput = estimate(outcome, point, "throughput")
    batch = load.request_batch_size
    if batch > 1 and measurement.throughput_infer_per_sec is not None:
        requests = formatting.approximate(measurement.throughput_infer_per_sec / batch)
        size = f"{batch:,} samples each" if problem.request_mix is None else f"{batch:,.4g} samples on average"
        throughput += f" = {requests} req/s of {size}"
    served = f"concurrency {formatting.load(load)} (requests in flight)"
    if load.request_rate:
        served = f"{formatting.load(load)} ({formatting.sending(load.request_rate, problem.request_times)})"
    if measurement.mean_batch_size is not None:
        served += f", mean batch {formatting.number(measurement.mean_batch_size)} samples"
    lines = [("throughput", throughput), *_time_lines(outcome, point), ("load", served)]
    metrics = [*(metric.name for metric in problem.objectives), *(c.metric for c in problem.sla)]
    metrics += [
        name for name in ("goodput", memory_of(measurement), "energy") if METRICS[name].value(measurement) is not None
    ]
    shown = {*_ALWAYS_SHOWN, *_STREAMED_SHOWN} if measurement.is_streamed else _ALWAYS_SHOWN
    rest = [name for name in dict.fromkeys(metrics) if name not in shown]
    lines += [(formatting.metric_label(name), estimate(outcome, point, name)) for name in rest]
    lines += [("failed", text)] if (text := failed_requests(measurement)) else []
    lines += priority_lines(measurement)
    gpu = formatting.gpu(measurement)
    return [*lines, ("GPU", gpu)] if gpu else lines


def priority_lines(measurement: Measurement) -> list[tuple[str, str]]:
    """Return (label, values with units) of each priority; an empty list for a load without priorities."""
    lines = []
    for own in priority_stats.from_text(measurement.by_priority):
        quantiles = " · ".join(f"{name} {_milliseconds(own.latency_ms(level))}" for name, level in QUANTILES.items())
        text = f"{formatting.approximate(own.throughput_infer_per_sec)} infer/s · {quantiles}"
        if measurement.errors is not None:
            total = formatting.count(own.served + own.errors, "request")
            text += f" · {own.errors:,} of {total} failed ({own.rejected:,} rejected, {own.timed_out:,} timed out)"
        lines.append((f"priority {own.priority or 'default'}", text))
    return lines


def _milliseconds(value: float | None) -> str:
    return formatting.UNKNOWN if value is None else f"{formatting.number(value)} ms"


def failed_requests(measurement: Measurement) -> str:
    """Return ``2 of 1,000 requests (1 rejected, 1 timed out, 0 otherwise)``; empty if they were not counted."""
    errors = measurement.errors
    if errors is None:
        return ""
    total = formatting.count((measurement.requests or 0) + errors, "request")
    return (
        f"{errors:,} of {total} ({measurement.rejected_requests or 0:,} rejected, "
        f"{measurement.timed_out_requests or 0:,} timed out, {measurement.failed_requests or 0:,} otherwise)"
    )


def _time_lines(outcome: Outcome, point: Point) -> list[tuple[str, str]]:
    """Return (label, values) of the latency and, for a model that streams, of the output and the other times."""

    def quantiles(timing: Timing) -> str:
        values = (estimate(outcome, point, name) for name in _SHOWN_TIMES[timing])
        return " · ".join(f"{name} {value}" for name, value in zip(QUANTILES, values, strict=True))

    lines = [(formatting.TIMING_NAMES[LATENCY.name], quantiles(LATENCY))]
    if point.measurement.is_streamed:
        responses = f"{formatting.approximate(point.measurement.responses_per_sec)} responses/s"
        lines.insert(0, ("output", f"{estimate(outcome, point, OUTPUT)} in {responses}"))
        lines += [(formatting.TIMING_NAMES[timing.name], quantiles(timing)) for timing in STREAMED_TIMINGS]
    return lines


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
    is_share = any(METRICS[constraint.metric].quantile for constraint in outcome.sla)
    estimated = [("estimand", estimand(outcome.sla))] if outcome.confirmed and is_share else []
    check = [("cross-check", text)] if (text := cross_check(outcome)) else []
    return [("verdict", verdict(outcome)), *estimated, *check]


def confirmed_intervals(confirmed: Confirmed) -> list[str]:
    """Return the known confidence intervals of the throughput, the output tokens and the bounded latencies."""
    throughputs = {"throughput": confirmed.throughput}
    if (tokens := confirmed.interval(OUTPUT)) is not None:
        throughputs[OUTPUT] = tokens
    texts = [formatting.interval(METRICS[metric], own) for metric, own in throughputs.items()]
    latencies = {confirmed.latency: confirmed.latency_ms, **confirmed.streamed}
    return texts + [
        f"{formatting.short_metric(metric)} {formatting.interval(METRICS[metric], own)}"
        for metric, own in latencies.items()
        if metric != OUTPUT and not own.is_unknown
    ]


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


def _compared_metrics(outcome: Outcome, problem: Problem) -> list[str]:
    """Return the metrics in ``comparisons``; for a model that streams, output tokens and all bounded latencies."""
    goals = [*(metric.name for metric in problem.objectives), *(bound.metric for bound in problem.sla)]
    counted = [name for name in ("goodput", "error-rate") if name in goals]
    if not outcome.is_streamed:
        return ["throughput", *counted, problem.sla.judged_latency]
    bounded = [bound.metric for bound in problem.sla.latencies] or [problem.sla.judged_latency]
    return ["throughput", *counted, OUTPUT, *bounded]


def comparison_headers(outcome: Outcome, problem: Problem) -> tuple[str, ...]:
    """Return the headers of ``comparisons``; those of numbers begin with ``>``."""
    metrics = _compared_metrics(outcome, problem)
    return "configuration", *(f">{header(metric)}" for metric in metrics), ">load", "gain"


def header(metric: str) -> str:
    """Return the header of a column with values of ``metric``: ``infer/s``, ``p95 ms`` or ``TTFT p95 ms``."""
    unit, is_rate = METRICS[metric].unit, metric in ("throughput", OUTPUT)
    return unit if is_rate else f"{formatting.short_metric(metric)} {unit}"


def comparisons(outcome: Outcome, problem: Problem) -> list[tuple[str, ...]]:
    """Return the cells below ``comparison_headers`` of the recommendation, the baseline and plain dynamic batching.

    Each is at its best load; the gain is that of the recommendation over it.
    """
    goal, metrics = formatting.bounds(problem.sla), _compared_metrics(outcome, problem)
    missed = f"no measured load meets {goal}" if goal else "not measured"

    def row(name: str, point: Point | None, gain: str, role: str = "") -> tuple[str, ...]:
        if point is None:
            why = "not reached before the run ended" if role in outcome.untried else missed
            return name, *("–" for _ in metrics), "–", why
        values = [
            formatting.estimate(METRICS[metric].value(point.measurement), _interval(outcome, point, metric))
            for metric in metrics
        ]
        if not problem.sla.is_met(point.measurement):
            gain = ", ".join(filter(None, (gain, f"misses {goal} on fresh servers")))
        return name, *values, formatting.load(point.load), gain

    def gain(point: Point | None, ratio: ThroughputRatio | None) -> str:
        return "same" if point is outcome.recommended else formatting.gain(ratio)

    rows = [
        row("recommended", outcome.recommended, ""),
        row("current (baseline)", outcome.baseline, gain(outcome.baseline, outcome.gain), "baseline"),
    ]
    if outcome.can_batch_dynamically:
        dynamic = outcome.dynamic_batching
        ratio = gain(dynamic, outcome.gain_over_dynamic_batching)
        rows.append(row("dynamic_batching {}", dynamic, ratio, "dynamic_batching"))
    return rows


def evidence(outcome: Outcome) -> str:
    """Return the confidence of the intervals and the extent of the test, in one or two sentences."""
    confirmed = outcome.confirmed
    if confirmed is None:
        return "Measured in the search only, which overestimates its best configurations."
    windows, servers = formatting.count(confirmed.windows, "measurement"), confirmed.servers
    confidence = f"{100 * confirmed.judged.confidence:g} % confidence"
    return f"Intervals: {confidence}. Recommended: {windows} on {formatting.count(servers, 'fresh server')}."


def front_title(outcome: Outcome) -> str:
    """Return the axes of the Pareto front: ``Throughput against p95 latency``."""
    throughput, latency = (metric.name for metric in outcome.front_metrics)
    return f"{formatting.metric_label(throughput).capitalize()} against {formatting.latency_label(latency)}"


def front_headers(outcome: Outcome) -> tuple[str, ...]:
    """Return the headers of ``front_rows``; those of numbers begin with ``>``."""
    figures = (f">{header(metric.name)}" for metric in outcome.front_metrics)
    return *figures, ">load", "measured", ">trial", "configuration (batch: max_batch_size)"


def front_rows(outcome: Outcome, points: Sequence[Point]) -> list[tuple[str, ...]]:
    """Return the cells below ``front_headers`` of points of the Pareto front."""
    return [
        (
            *(formatting.number(metric.value(point.measurement)) for metric in outcome.front_metrics),
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
        latency = formatting.latency_label(outcome.front_metrics[1].name)
        return f"The recommendation is not on the front: it was disturbed, or its {latency} is unknown."
    why = why_not_recommended(outcome, better)
    seen = formatting.performance(better, outcome.front_metrics[1].name)
    return f"The recommendation is not on the front: trial {better.trial} had {seen}, but {why}."


def why_not_recommended(outcome: Outcome, point: Point) -> str:
    """Return why ``point`` is not recommended although its throughput is higher, in a clause."""
    confirmed = outcome.confirmation_of(point)
    if confirmed is not None and confirmed.error:
        reason = confirmed.judged.reason
        return f"its test at this load ended {confirmed.judged.verdict.value}{f' ({reason})' if reason else ''}"
    if confirmed is not None:
        return "it was measured there for comparison only"
    if missed := outcome.sla.missed(point.measurement):
        return f"it misses {formatting.bounds(missed)}"
    if not point.measurement.stable:
        return "its windows disagreed"
    if any(entry.point.candidate == point.candidate for entry in outcome.again):
        return "only in the search; this configuration was measured on fresh servers at another load"
    return "only in the search, which overestimates its best configurations"


def evenly_spread(points: Sequence[Point], most: int) -> Sequence[Point]:
    """Return at most ``most`` of ``points`` in even steps, including both ends."""
    if len(points) <= most:
        return points
    return [points[round(i * (len(points) - 1) / (most - 1))] for i in range(most)]


def best_load(trial: Trial, problem: Problem) -> tuple[Point | None, bool]:
    """Return the trial's best point and True; if none meets the SLA, the closest point and False.

    As in the search, a measurement whose windows disagree counts if other processes disturbed it.
    """
    measured = latest_points([trial])
    best = SpeedCorrection().best_point(measured, problem.best_point)
    return best or problem.sla.closest_point(measured), best is not None


_LOAD = ("request_batch_size", "concurrency", "request_rate")
_MEASURED = (
    *(
        "throughput_infer_per_sec",
        "goodput_infer_per_sec",
        "latency_avg_ms",
        "latency_p50_ms",
        "latency_p90_ms",
        "latency_p95_ms",
    ),
    *("latency_p99_ms", "mean_batch_size", "stable", "gpu_utilization", "gpu_memory_bytes", "gpu_power_watts"),
    *("gpu_sm_clock_mhz", "gpu_memory_clock_mhz", "gpu_throttling", "server_memory_bytes", "other_cpu_share"),
    *("kv_cache_utilization", "engine_tokens_per_sec", "engine_preemptions"),
    *("score", "output_deviation", "rejected_requests", "timed_out_requests", "failed_requests"),
)

_STREAMED = (
    *(timing.field_of(statistic) for timing in STREAMED_TIMINGS for statistic in STATISTICS),
    *("responses_per_sec", "output_tokens_per_sec"),
)
ENERGY = "energy_joules_per_1000_infer"


def entry(point: Point) -> dict[str, object]:
    """Return a measured point with the names of trials.csv: settings, trial, load, metrics; None if unknown.

    Throughput is in samples per second, latencies are per request in ms, memory is in bytes and energy in joules per
    1,000 samples. The metrics of streaming follow for a model that streams.
    """
    candidate = point.candidate
    streamed = _STREAMED if point.measurement.is_streamed else ()
    return {
        **{name: getattr(candidate, name) for name in SETTING_COLUMNS},
        "preferred_batch_sizes": list(candidate.preferred_batch_sizes),
        **dict(candidate.fields),
        "trial": point.trial,
        **{name: getattr(point.load, name) for name in _LOAD},
        **{name: _known(getattr(point.measurement, name)) for name in (*_MEASURED, *streamed)},
        ENERGY: _known(METRICS["energy"].value(point.measurement)),
        **({"priorities": _priorities(point.measurement)} if point.measurement.by_priority else {}),
    }


def _priorities(measurement: Measurement) -> list[dict[str, object]]:
    """Return the statistics of each priority for JSON."""
    return [
        {
            "priority": own.priority,
            "throughput_infer_per_sec": own.throughput_infer_per_sec,
            "requests": own.served,
            "rejected_requests": own.rejected,
            "timed_out_requests": own.timed_out,
            "failed_requests": own.failed,
            **{LATENCY.field_of(name): own.latency_ms(level) for name, level in QUANTILES.items()},
        }
        for own in priority_stats.from_text(measurement.by_priority)
    ]


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
        "estimand": estimand(confirmed.sla),
        "slow_share": [_known(judged.slow_share.low), _known(judged.slow_share.high)],
        "disturbed_share": round(judged.disturbed_share, 4),
        "error": confirmed.error,
        "throughput_infer_per_sec": [_known(confirmed.throughput.low), _known(confirmed.throughput.high)],
        "latency": confirmed.latency,
        "latency_ms": [_known(confirmed.latency_ms.low), _known(confirmed.latency_ms.high)],
        **({"streaming": _bounds_of(confirmed.streamed)} if confirmed.streamed else {}),
        "perf_analyzer": _agreement(confirmed.agreement) if confirmed.agreement else None,
    }


def _bounds_of(intervals: Mapping[str, ConfidenceInterval]) -> dict[str, list[object]]:
    return {metric: [_known(own.low), _known(own.high)] for metric, own in intervals.items()}


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
    streamed = _STREAMED if outcome.is_streamed else ()
    columns = ("trial", *SETTING_COLUMNS, *fields, *_LOAD, "confirmed", *_MEASURED, *streamed, ENERGY)
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
