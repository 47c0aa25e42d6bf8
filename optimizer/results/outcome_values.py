"""The values of an outcome as text: of a point with its intervals, of the baselines, and of the Pareto front."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from objectives import model_stats, priority_stats
from objectives.metrics import LATENCY, METRICS, QUANTILES, TIMINGS, Measurement
from optimizer.core.safe_text import one_line, shorten
from optimizer.results import configuration_text, formatting
from optimizer.results.request_steps import step_times

if TYPE_CHECKING:
    from objectives.intervals import ConfidenceInterval
    from objectives.metrics import Metric, Timing
    from optimizer.config.problem import Problem
    from optimizer.core.trial import Point
    from optimizer.results.recommendation import BaselineResult, Outcome

# stages of a request in their order, with the names of perf_analyzer; OTHER_MODELS comes after them
STAGES = {
    "client_send_ms": "client send",
    "network_ms": "network",
    "queue_ms": "server queue",
    "compute_input_ms": "compute input",
    "compute_infer_ms": "compute infer",
    "compute_output_ms": "compute output",
    "client_recv_ms": "client receive",
}
OTHER_MODELS = "other_models_ms"  # if other models serve a part of the request
STREAMED_TIMINGS = tuple(timing for timing in TIMINGS if timing.needs_streaming)
_SHOWN_TIMES = {timing: [timing.metric(name) for name in QUANTILES] for timing in TIMINGS}
MAX_FAILURE_LENGTH = 80  # characters of the reason why a configuration failed, in a cell of a table
_ALWAYS_SHOWN = {"throughput", *_SHOWN_TIMES[LATENCY]}
_STREAMED_SHOWN = {
    formatting.OUTPUT_THROUGHPUT,
    *(name for timing in STREAMED_TIMINGS for name in _SHOWN_TIMES[timing]),
}


def stage_times_ms(point: Point, *, has_other_models: bool, tuned_model: str = "") -> dict[str, float]:
    """Return the mean time of a request in each known stage in their order, by the name of its field.

    tune's own client does not measure its stages. What remains of the latency, in the network and in the client, is
    then ``network_ms``. ``has_other_models``: the server's times are those of ``tuned_model``, which the model of the
    requests calls. What remains is divided into ``network_ms`` and OTHER_MODELS by the times of the other models.
    If these were not recorded, all of it is OTHER_MODELS.
    """
    measurement = point.measurement
    stages_ms = {name: getattr(measurement, name) for name in STAGES}
    known_ms: dict[str, float] = {name: value for name, value in stages_ms.items() if value is not None}
    if has_other_models:
        known_ms.pop("network_ms", None)
    if known_ms and "network_ms" not in known_ms and measurement.latency_avg_ms is not None:
        rest_ms = max(0.0, measurement.latency_avg_ms - sum(known_ms.values()))
        if not has_other_models:
            known_ms["network_ms"] = rest_ms
        elif others := [step.own_ms for step in step_times(point) if step.model != tuned_model]:
            known_ms[OTHER_MODELS] = min(rest_ms, sum(others))
            known_ms["network_ms"] = rest_ms - known_ms[OTHER_MODELS]
        else:
            known_ms[OTHER_MODELS] = rest_ms
    order = (*STAGES, OTHER_MODELS)
    return dict(sorted(known_ms.items(), key=lambda stage: order.index(stage[0])))


def estimate(outcome: Outcome, point: Point, metric: str) -> str:
    """Return a value at ``point`` with the digits that its interval allows: ``13,800 ± 400 infer/s``."""
    measured = METRICS[metric]
    value = measured.value(point.measurement)
    if measured.unit == "bytes":
        return formatting.quantity(measured, value)
    return formatting.estimate(value, interval(outcome, point, metric), measured.unit)


def shown_metrics(problem: Problem) -> list[str]:
    """Return the metrics that follow the throughput of a point: bounded latencies, goodput and first objective.

    A goodput is shown if it is one of the objectives. Throughput and output tokens are shown in any case.
    """
    first, goodput = problem.objectives[0], METRICS["goodput"]
    goals = [metric.name for metric in problem.objectives if metric in (first, goodput)]
    shown = dict.fromkeys((*problem.sla.bounded_latencies, *goals))
    return [name for name in shown if name not in ("throughput", formatting.OUTPUT_THROUGHPUT)]


def measured_performance(outcome: Outcome, point: Point, *metrics: str) -> str:
    """Return a measurement with its confidence intervals, such as ``18,400 ± 2,000 infer/s, p95 18.3 ± 1.1 ms, …``.

    A measurement of the search has no intervals.
    """
    if outcome.confirmation_of(point) is None:
        return formatting.performance(point, *metrics)
    tokens = formatting.OUTPUT_THROUGHPUT if point.measurement.output_tokens_per_sec is not None else ""
    values = [estimate(outcome, point, metric) for metric in ("throughput", tokens) if metric]
    values += [f"{formatting.goal_label(metric)} {estimate(outcome, point, metric)}" for metric in metrics]
    return ", ".join([*values, formatting.at_load(point.load)])


def interval(outcome: Outcome, point: Point, metric: str) -> ConfidenceInterval | None:
    """Return the confidence interval of a value at ``point``; None if fresh servers give none."""
    confirmed = outcome.confirmation_of(point)
    return confirmed.interval(metric) if confirmed else None


def point_lines(outcome: Outcome, point: Point, problem: Problem) -> list[tuple[str, str]]:
    """Return (label, values with units) of a point, including unknown values of objectives and constraints."""
    load, measurement = point.load, point.measurement
    throughput = estimate(outcome, point, "throughput")
    batch = load.request_batch_size
    if batch > 1 and measurement.throughput_infer_per_sec is not None:
        requests = formatting.approximate(measurement.throughput_infer_per_sec / batch)
        throughput += (
            f" = {requests} req/s of {formatting.request_size(batch, is_mix=problem.request_mix is not None)}"
        )
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
    further_metrics = [name for name in dict.fromkeys(metrics) if name not in shown]
    lines += [(formatting.metric_label(name), estimate(outcome, point, name)) for name in further_metrics]
    lines += [("failed", text)] if (text := failed_requests(measurement)) else []
    lines += part_lines(measurement)
    gpu = formatting.gpu(measurement)
    return [*lines, ("GPU", gpu)] if gpu else lines


def _time_lines(outcome: Outcome, point: Point) -> list[tuple[str, str]]:
    """Return (label, values) of the latency and, for a model that streams, of the output and the other times."""
    lines = [(formatting.TIMING_NAMES[LATENCY.name], _quantiles(outcome, point, LATENCY))]
    if point.measurement.is_streamed:
        responses = f"{formatting.approximate(point.measurement.responses_per_sec)} responses/s"
        lines.insert(0, ("output", f"{estimate(outcome, point, formatting.OUTPUT_THROUGHPUT)} in {responses}"))
        lines += [
            (formatting.TIMING_NAMES[timing.name], _quantiles(outcome, point, timing)) for timing in STREAMED_TIMINGS
        ]
    return lines


def _quantiles(outcome: Outcome, point: Point, timing: Timing) -> str:
    """Return the values of ``timing`` at ``point``, such as ``p50 9 ms · p90 14 ms``."""
    values = (estimate(outcome, point, name) for name in _SHOWN_TIMES[timing])
    return " · ".join(f"{name} {value}" for name, value in zip(QUANTILES, values, strict=True))


def part_lines(measurement: Measurement) -> list[tuple[str, str]]:
    """Return (label, values with units) of each model if several get load, or of each priority of the requests."""
    return [*_model_lines(measurement), *_priority_lines(measurement)]


def _model_lines(measurement: Measurement) -> list[tuple[str, str]]:
    lines = []
    for name, values in model_stats.from_text(measurement.by_model).items():
        latencies_ms = {level: getattr(values, LATENCY.field_of(level)) for level in QUANTILES}
        lines.append((one_line(name), _part_text(values.throughput_infer_per_sec, latencies_ms)))
    return lines


def _priority_lines(measurement: Measurement) -> list[tuple[str, str]]:
    lines = []
    for stats in priority_stats.from_text(measurement.by_priority):
        latencies_ms = {name: stats.latency_ms(level) for name, level in QUANTILES.items()}
        text = _part_text(stats.throughput_infer_per_sec, latencies_ms)
        if measurement.errors is not None:
            total = formatting.count(stats.served + stats.errors, "request")
            text += (
                f" · {stats.errors:,} of {total} failed ({stats.rejected:,} rejected, {stats.timed_out:,} timed out)"
            )
        lines.append((f"priority {stats.priority or 'default'}", text))
    return lines


def _part_text(infer_per_sec: float | None, latencies_ms: Mapping[str, float | None]) -> str:
    """Return throughput and latencies of a part of the load: ``30.5 infer/s · p50 1.00 ms · p95 unknown``."""
    latencies = (
        f"{name} {formatting.UNKNOWN if value is None else f'{formatting.number(value)} ms'}"
        for name, value in latencies_ms.items()
    )
    return " · ".join([f"{formatting.approximate(infer_per_sec)} infer/s", *latencies])


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


def memory_of(measurement: Measurement) -> str:
    """Return the name of the memory metric: the GPU's if it was measured, otherwise the server's."""
    return "memory" if measurement.gpu_memory_bytes is None else "gpu-memory"


def header(metric: str) -> str:
    """Return the header of a column with values of ``metric``: ``infer/s``, ``p95 ms`` or ``TTFT p95 ms``."""
    unit, is_rate = METRICS[metric].unit, metric in ("throughput", formatting.OUTPUT_THROUGHPUT)
    if unit in ("", "bytes"):  # its values have their own units
        return formatting.metric_label(metric)
    return unit if is_rate else f"{formatting.short_metric(metric)} {unit}"


# -- tables: the comparison with the baselines, and the Pareto front ------------------------------------------------


def compared_metrics(outcome: Outcome, problem: Problem) -> list[str]:
    """Return the compared metrics: throughput, bounded latencies, the objective and, if it streams, output tokens."""
    tokens = [formatting.OUTPUT_THROUGHPUT] if outcome.is_streamed else []
    metrics = ("throughput", *counted_goals(problem), *tokens, *problem.sla.bounded_latencies, outcome.objective.name)
    return list(dict.fromkeys(metrics))


def counted_goals(problem: Problem) -> list[str]:
    """Return the objectives and bounded metrics that only tune's own client counts; perf_analyzer has no counts."""
    goals = [*(metric.name for metric in problem.objectives), *(bound.metric for bound in problem.sla)]
    return [name for name in ("goodput", "error-rate") if name in goals]


def comparison_headers(outcome: Outcome, problem: Problem) -> tuple[str, ...]:
    """Return the headers of ``comparisons``; those of numbers begin with ``>``."""
    metrics = compared_metrics(outcome, problem)
    return "configuration", *(f">{header(metric)}" for metric in metrics), ">load", "gain"


def comparisons(outcome: Outcome, problem: Problem) -> list[tuple[str, ...]]:
    """Return the cells below ``comparison_headers`` of the recommendation, the baseline and plain dynamic batching.

    Each is at its best load; the gain is that of the recommendation over it.
    """
    rows = [
        _comparison_row(outcome, problem, "recommended", outcome.recommended, "", _never_met(problem)),
        _baseline_row(outcome, problem, "current (baseline)", outcome.baseline),
    ]
    if outcome.dynamic_batching is not None:
        rows.append(_baseline_row(outcome, problem, "dynamic_batching {}", outcome.dynamic_batching))
    return rows


def _never_met(problem: Problem) -> str:
    """Return that no measured load of a configuration meets the SLA."""
    goal = formatting.bounds(problem.sla)
    return f"no measured load meets {goal}" if goal else "not measured"


def _baseline_row(outcome: Outcome, problem: Problem, name: str, compared: BaselineResult) -> tuple[str, ...]:
    reason = _never_met(problem) if compared.is_tried else "not reached before the run ended"
    if compared.failure:
        reason = f"failed: {shorten(compared.failure, MAX_FAILURE_LENGTH)}"
    return _comparison_row(outcome, problem, name, compared.point, gain_over(outcome, compared), reason)


def compared_loads(problem: Problem) -> str:
    """Return at which load each configuration is compared, as a sentence."""
    floor = problem.sla.throughput_floor
    if not problem.keeps_best_load:
        load = "its highest load that met the SLA" if problem.sla else "its best load"
    elif problem.maximizes_throughput:
        load = f"the load with its best {formatting.goal_label(problem.objectives[0].name)} in the search"
    elif floor:
        load = f"the lowest load that served {formatting.quantity(METRICS['throughput'], floor)} in the search"
    else:
        load = "one request rate" if problem.open_loop else "the lowest load, because latency rises with it"
    return f"Each at {load}."


def gain_over(outcome: Outcome, compared: BaselineResult) -> str:
    """Return the gain over ``compared``; ``same`` if that is the recommendation.

    Without a gain, name the one of the two that meets the SLA as measured, but not in the usual states of the run.
    """
    if compared.point is outcome.recommended:
        return "same"
    return formatting.gain(compared.gain, outcome.missed_in_usual_states(compared))


def _comparison_row(
    outcome: Outcome, problem: Problem, name: str, point: Point | None, gain: str, reason: str
) -> tuple[str, ...]:
    """Return the cells of ``point``; ``reason`` takes the place of the gain if there is no point."""
    metrics = compared_metrics(outcome, problem)
    if point is None:
        return name, *("–" for _ in metrics), "–", reason
    values = [
        estimate(outcome, point, metric)
        if METRICS[metric].unit == "bytes"
        else formatting.estimate(METRICS[metric].value(point.measurement), interval(outcome, point, metric))
        for metric in metrics
    ]
    if not problem.sla.is_met(point.measurement):
        where = " on fresh servers" if outcome.confirmation_of(point) else ""
        gain = ", ".join(filter(None, (gain, f"misses {formatting.bounds(problem.sla)}{where}")))
    return name, *values, formatting.load(point.load), gain


def front_title(outcome: Outcome) -> str:
    """Return the axes of the Pareto front: ``Throughput against p95 latency``."""
    throughput, latency = (metric.name for metric in outcome.front.metrics)
    return f"{formatting.metric_label(throughput).capitalize()} against {formatting.latency_label(latency)}"


def front_headers(outcome: Outcome) -> tuple[str, ...]:
    """Return the headers of ``front_rows``; those of numbers begin with ``>``."""
    metric_headers = (f">{header(metric.name)}" for metric in outcome.front.metrics)
    return *metric_headers, ">load", "measured", ">trial", "configuration (batch: max_batch_size)"


def front_rows(outcome: Outcome, points: Sequence[Point]) -> list[tuple[str, ...]]:
    """Return the cells below ``front_headers`` of points of the Pareto front."""
    return [
        (
            *(formatting.number(metric.value(point.measurement)) for metric in outcome.front.metrics),
            formatting.load(point.load),
            "fresh" if outcome.confirmation_of(point) else "search",
            str(point.trial),
            configuration_text.configuration(point.candidate),
        )
        for point in points
    ]


def shown_front(outcome: Outcome, max_points: int) -> list[Point]:
    """Return at most ``max_points`` points, evenly spread over the Pareto front, with the recommendation if on it."""
    shown = list(evenly_spread(outcome.front.points, max_points))
    best = next((index for index, point in enumerate(outcome.front.points) if point is outcome.recommended), None)
    if best is not None and not any(point is outcome.recommended for point in shown):
        shown[round(best * (len(shown) - 1) / (len(outcome.front.points) - 1))] = outcome.front.points[best]
    return shown


def front_remark(outcome: Outcome) -> str:
    """Return why the recommendation is not on the Pareto front; empty if it is on it or there is none."""
    best, better = outcome.recommended, outcome.front.dominating
    if best is None or any(point is best for point in outcome.front.points):
        return ""
    if better is None:
        latency = formatting.latency_label(outcome.front.metrics.latency.name)
        is_stable = best.measurement.stable
        cause = f"its {latency} is unknown" if is_stable else "its measurement was unstable or disturbed"
        return f"The recommendation is not on the front: {cause}."
    why = why_not_recommended(outcome, better)
    seen = formatting.performance(better, outcome.front.metrics.latency.name)
    return f"The recommendation is not on the front: trial {better.trial} had {seen}, but {why}."


def why_not_recommended(outcome: Outcome, point: Point) -> str:
    """Return why ``point`` is not recommended although one of its metrics is better, in a clause."""
    confirmed = outcome.confirmation_of(point)
    if confirmed is not None and confirmed.error:
        reason = confirmed.judged.reason
        return f"its test at this load ended {confirmed.judged.verdict.value}{f': {reason}' if reason else ''}"
    if confirmed is not None:
        return "it was measured there for comparison only"
    if missed := outcome.sla.missed(point.measurement):
        return f"it misses {formatting.bounds(missed)}"
    if point.measurement.overloaded:
        return "the server fell behind the rate"
    if not point.measurement.stable:
        return "its windows disagreed"
    if outcome.recommended is not None and (worse := _worse_objective(outcome.objective, point, outcome.recommended)):
        return f"{worse}, and that is the objective"
    if outcome.confirmed is None:
        return "it ranks lower after the correction for disturbances and the speed of the machine"
    if any(entry.point.candidate == point.candidate for entry in outcome.confirmed_loads):
        return "it was measured in the search only; fresh servers of this configuration were measured at another load"
    return "it was measured in the search only, which overestimates its best configurations"


def _worse_objective(objective: Metric, point: Point, best: Point) -> str:
    """Return that another objective than the throughput is worse than at ``best``, as a clause; otherwise nothing."""
    value, best_value = (objective.value(one.measurement) for one in (point, best))
    if objective.name == "throughput" or value is None or best_value is None or value == best_value:
        return ""
    is_higher = value > best_value
    if is_higher is not (objective.better == "lower"):
        return ""
    return f"its {formatting.goal_label(objective.name)} is {'higher' if is_higher else 'lower'}"


def evenly_spread(points: Sequence[Point], max_points: int) -> Sequence[Point]:
    """Return at most ``max_points`` of ``points`` in even steps, including both ends."""
    if len(points) <= max_points:
        return points
    return [points[round(i * (len(points) - 1) / (max_points - 1))] for i in range(max_points)]
