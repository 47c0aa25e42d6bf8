"""A capacity plan as text and as JSON, with results that NVIDIA published about the same model."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from rich.console import Console

from objectives.sla import Sla, Verdict
from optimizer.core.trial import Point
from optimizer.plan.autoscaler import AutoscalerTest
from optimizer.plan.capacity_plan import (
    FURTHER_SECONDS,
    CapacityPlan,
    FleetPlan,
    FurtherMeasuring,
    LoadForecast,
    SimulatedFleet,
)
from optimizer.plan.evidence import PlannedConfiguration
from optimizer.plan.fleet import HOURS_A_MONTH, MAX_REPLICAS
from optimizer.plan.measured_capacity import LengthSummary, MeasuredCapacity
from optimizer.plan.slowness import SAFE
from optimizer.plan.traffic import BALANCER_SPLITS, RecordedTraffic
from optimizer.results import configuration_text, formatting
from optimizer.results.finished_run import candidate_document
from optimizer.results.terminal_output import plain_table, print_line, print_table, print_unwrapped, print_wrapped

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

SAFE_CONFIDENCE = f"{100 * SAFE:g} %"


@dataclass(frozen=True, slots=True)
class Published:
    """A ``quotation`` from the document ``title``."""

    quotation: str
    title: str


PUBLISHED = {  # by kind of built-in model
    "dlrm": Published(
        "if we have a 20ms upper bound on latency, then a single GPU can handle up to 8 concurrent requests. This "
        "leads to total throughput of 1.776.030 recommendations/sec.",
        "Deploying the DLRM model using Triton Inference Server (requests of 4096, one V100-32G)",
    ),
    "bert": Published(
        "the throughput at BS=1, Client Concurrent Requests = 64 is 119 and in Figure 4, the throughput at BS=8, "
        "Client Concurrent Requests = 8 is 517",
        "Deploying the BERT model using Triton Inference Server (BERT Base, one V100-32G)",
    ),
    "resnext": Published(
        "|256 | 1312 | 195.87 | 196.87 | 197.75 | 199.06|",
        "Deploying the ResNeXt101-32x4d model using Triton Inference Server (FP16, one V100-16G: concurrent "
        "requests, img/s, average, 90%, 95% and 99% latency in ms)",
    ),
    "text_recognition": Published(
        "Concurrency: 16, throughput: 3187.76 infer/sec, latency 10567 usec",
        "Triton Conceptual Guide, part 2 (requests of 2, p95, one A100)",
    ),
    "minilm": Published(
        "batch size 1, seq len 16 tokens -> `1.7ms`/query", "transformer-deploy, demo scripts (one query at a time)"
    ),
}


def capacity_sentence(configuration: PlannedConfiguration, point: Point) -> str:
    """Return ``with a 20 ms bound on p95 one machine (…) handles 47 concurrent requests of 4 samples, …``."""
    load, device = point.load, configuration.device
    subject = f"one {device}" if configuration.devices == 1 else f"{configuration.devices} {device}s"
    handles = f"handle{'s' if configuration.devices == 1 else ''}"
    served = formatting.count(load.concurrency, "concurrent request")
    if load.request_rate:
        served = f"{formatting.load(load)}, each"
    samples = load.request_batch_size
    size = f" of {formatting.exact(samples)} sample{'' if samples == 1 else 's'}"
    rate = formatting.estimate(point.throughput_infer_per_sec, configuration.throughput, "infer/s")
    return f"{_bounds_text(configuration.sla)} {subject} ({configuration.hardware}) {handles} {served}{size}, {rate}"


def _bounds_text(sla: Sla) -> str:
    listed = " and ".join(
        f"a {formatting.exact(bound.bound)} ms bound on {formatting.short_metric(bound.metric)}" for bound in sla
    )
    return f"with {listed}"


def document(plan: CapacityPlan) -> dict[str, Any]:
    """Return the document of ``--json``."""
    question = plan.question
    return {
        "found": plan.feasible,
        "verdict": plan.verdict.value,
        "traffic": question.traffic.name,
        "peak_factor": question.day.peak_factor,
        "balancer": question.balancer,
        "balancer_split": BALANCER_SPLITS[question.balancer],
        "note": question.traffic.note,
        "answers": [_answer_document(answer) for answer in plan.answers],
    }


def _answer_document(answer: FleetPlan) -> dict[str, Any]:
    configuration, measured = answer.configuration, answer.configuration.measured
    size, simulated = configuration.request_batch_size, answer.simulated
    published = PUBLISHED.get(configuration.builder)
    gpus = configuration.gpus * answer.replicas
    return {
        "found": answer.feasible,
        "verdict": (configuration.verdict if answer.feasible else Verdict.FAIL).value,
        "undecided_cause": configuration.undecided_cause or None,
        "next_command": configuration.next_command or None,
        "model": configuration.model,
        "hardware": configuration.hardware,
        "runs": list(configuration.runs),
        "deployments": len(configuration.evidence.deployments),
        "configuration": candidate_document(configuration.candidate),
        "sla": list(map(str, configuration.sla)),
        "capacity_sentence": capacity_sentence(configuration, measured) if measured else None,
        "published": _fields(published),
        "replicas": answer.replicas,
        "gpus": gpus or None,
        "gpus_per_replica": configuration.gpus,
        "count": _fields(answer.count),
        **_rate_fields(answer.rate, size),
        "sustainable_requests_per_sec": _fields(answer.sustainable_rate),
        "at_rate": simulated and _load_document(simulated.at_rate, size),
        "tightest_bound_ms": simulated and _finite(simulated.tightest_bound_ms),
        "unloaded_latency_ms": answer.unloaded_latency_ms or None,
        "n_plus_1_replicas": answer.n_plus_1_replicas,
        "one_lost": simulated and _load_document(simulated.one_lost, size),
        "burst": simulated and _load_document(simulated.burst, size),
        "burst_replicas": simulated and simulated.burst_replicas,
        "headroom": [_load_document(load, size) for load in simulated.headroom] if simulated else [],
        "replicas_by_hour": list(answer.replicas_by_hour) or None,
        "cost": _fields(answer.cost),
        "power": _fields(answer.power),
        "measured_capacity": _fields(answer.measured_capacity),
        "forecast_errors": simulated and _fields(simulated.forecast_errors),
        "further_measuring": simulated and _fields(simulated.further_measuring),
        "autoscaler_test": simulated and _fields(simulated.autoscaler_test),
    }


def _fields(part: DataclassInstance | None) -> dict[str, Any] | None:
    return None if part is None else asdict(part)


def _load_document(load: LoadForecast | None, size: float) -> dict[str, Any] | None:
    if load is None:
        return None
    return {
        **_rate_fields(load.rate, size),
        "latency_ms": _finite(load.latency_ms),
        "utilization": round(load.utilization, 4),
        "busy": round(load.busy, 4),
        "meets_sla": load.meets,
        "meets_sla_safely": load.meets_safely,
        "refused_share": None if load.refused is None else round(load.refused, 6),
    }


def _rate_fields(rate: float, size: float) -> dict[str, float]:
    return {"rate_requests_per_sec": round(rate, 3), "rate_infer_per_sec": round(rate * size, 3)}


def _finite(value: float) -> float | None:
    return round(value, 4) if math.isfinite(value) else None


def print_plan(console: Console, plan: CapacityPlan) -> None:
    """Print all answers, and a comparison of them if there are several."""
    for number, answer in enumerate(plan.answers):
        if number:
            print_line(console)
        _print_answer(console, plan, answer)
    if len(plan.answers) > 1:
        print_line(console)
        _print_side_by_side(console, plan)
    configuration = plan.answers[0].configuration
    if configuration.builder in PUBLISHED:
        print_line(console)
        published = PUBLISHED[configuration.builder]
        print_wrapped(console, "published", f'"{published.quotation}" ({published.title})')


def headline(plan: CapacityPlan, answer: FleetPlan) -> str:
    """Return an answer in one sentence."""
    configuration, goal = answer.configuration, formatting.bounds(answer.configuration.sla)
    replicas, is_one = _replicas_text(configuration, answer.replicas), answer.replicas == 1
    if answer.count is not None:
        return f"{configuration.model}: {replicas} for {_rate_text(answer, answer.rate)} within {goal}"
    if answer.sustainable_rate is None:
        if plan.question.devices is not None:
            needed = formatting.count(configuration.devices, configuration.device)
            return f"{configuration.model}: a replica needs {needed}, more than --gpus {plan.question.devices}"
        if plan.question.limits_replicas:
            return f"{configuration.model}: the budget is too small for one replica of {configuration.hardware}"
        return f"{configuration.model}: no number of replicas meets {goal} safely{_reason_without_load(answer)}"
    if not answer.rate:
        return f"{configuration.model}: {replicas} {'meets' if is_one else 'meet'} {goal} safely at no rate"
    if plan.question.rate is None or answer.simulated is None:
        return f"{configuration.model}: {replicas} for {_rate_text(answer, answer.rate)} within {goal}"
    latency = formatting.short_metric(configuration.sla.judged_latency)
    rate = _rate_text(answer, answer.rate)
    if answer.is_overloaded:
        safe = answer.sustainable_rate.safe
        less = f", but {_rate_text(answer, safe)} within {goal}" if safe else ""
        return f"{configuration.model}: {replicas} cannot safely serve {rate} within any bound{less}"
    bound = f"{latency} <= {formatting.number(answer.simulated.tightest_bound_ms)} ms"
    return f"{configuration.model}: {replicas} {'serves' if is_one else 'serve'} {rate} within {bound}"


def _reason_without_load(answer: FleetPlan) -> str:
    """Return the latency without load as the reason why no number of replicas is enough; empty if unknown."""
    if not answer.unloaded_latency_ms:
        return ""
    latency_ms, sla = formatting.number(answer.unloaded_latency_ms), answer.configuration.sla
    if answer.unloaded_latency_ms <= sla.latency_bound_ms(sla.judged_latency):
        return f": {latency_ms} ms is expected without load, but the measured deployments differ too much"
    return f": its latency is {latency_ms} ms without load"


def _print_answer(console: Console, plan: CapacityPlan, answer: FleetPlan) -> None:
    configuration = answer.configuration
    is_undecided = configuration.verdict is Verdict.UNDECIDED
    style = formatting.VERDICT_STYLES[Verdict.UNDECIDED] if is_undecided else "bold"
    print_line(console, headline(plan, answer), style)
    if is_undecided:
        print_line(console, f"the run is UNDECIDED: {configuration.undecided_cause}")
        if configuration.next_command:
            print_unwrapped(console, "next", configuration.next_command)
    print_line(console)
    for label, text in (*_planned_lines(answer), *_configuration_lines(plan, answer)):
        print_wrapped(console, label, text)
    if answer.simulated is not None:
        print_line(console)
        _print_headroom(console, answer, answer.simulated)


def _planned_lines(answer: FleetPlan) -> Iterator[tuple[str, str]]:
    """Yield (label, text) of the answer: replicas or rate, their load, cost and autoscaler."""
    count, rates, simulated = answer.count, answer.sustainable_rate, answer.simulated
    if count is not None:
        interval = f"{count.low:,} to {count.safe:,}, most likely {count.likely:,}; "
        interval = "" if count.low == count.safe else interval
        yield "replicas", f"{interval}{count.safe:,} with {_confidence_text(answer)} confidence"
    if rates is not None and rates.likely:
        safe, likely, high = (_infer_rate(answer, rate) for rate in (rates.safe, rates.likely, rates.high))
        yield "rate", f"{safe} with {_confidence_text(answer)} confidence, most likely {likely}, at most {high}"
    if simulated is not None:
        at_rate = simulated.at_rate
        latency = formatting.short_metric(answer.configuration.sla.judged_latency)
        expected = "" if answer.is_overloaded else f", {latency} {_latency_text(answer, at_rate)} ms"
        each = _infer_rate(answer, answer.rate / answer.replicas)
        yield "each", f"{formatting.percent(at_rate.utilization)} of its capacity{expected}, {each}"
        if at_rate.refused is not None:
            yield "refused", f"{formatting.percent(at_rate.refused, 2)} of the requests, by the limited queue"
        if not answer.is_overloaded:
            yield "one lost", _one_lost_text(answer, simulated.one_lost)
            yield "burst, 2x", _burst_text(answer, simulated)
    if answer.measured_capacity is not None:
        yield from _measured_capacity_lines(answer, answer.measured_capacity)
    yield from _cost_and_power_lines(answer)
    if simulated is not None and simulated.further_measuring is not None:
        yield "measure more", _further_measuring_text(answer, simulated.further_measuring)
    if simulated is not None and simulated.autoscaler_test is not None:
        yield from _autoscaler_lines(answer, simulated.autoscaler_test)


def _configuration_lines(plan: CapacityPlan, answer: FleetPlan) -> Iterator[tuple[str, str]]:
    """Yield (label, text) of the inputs of the plan: traffic, configuration, hardware and measurements."""
    configuration, balancer = answer.configuration, plan.question.balancer
    yield "traffic", f"{_traffic_text(plan)}; {balancer}: {BALANCER_SPLITS[balancer]}"
    yield "server", configuration_text.configuration(configuration.candidate)
    yield "hardware", configuration.hardware
    deployments = formatting.count(len(configuration.evidence.deployments), "deployment")
    yield "based on", f"{deployments} of {', '.join(configuration.runs)}"
    if answer.simulated is not None:
        errors = asdict(answer.simulated.forecast_errors)
        listed = ", ".join(f"{name} {formatting.percent(error, 1)}" for name, error in errors.items())
        yield "forecasts", f"typical error at the measured loads: {listed}"
    if configuration.measured is not None:
        yield "measured", capacity_sentence(configuration, configuration.measured)
        if answer.feasible and answer.replicas:
            yield "planned", _planned_share_text(answer, configuration.measured)


def _planned_share_text(answer: FleetPlan, measured: Point) -> str:
    """Return how the planned rate of a replica compares with the measured throughput, and why it differs."""
    configuration, replica_rate = answer.configuration, answer.rate / answer.replicas
    share = configuration.request_batch_size * replica_rate / measured.throughput_infer_per_sec
    text = f"each replica gets {formatting.percent(share)} of the measured throughput"
    if share <= 1 and measured.load.request_rate:
        return f"{text}, at a request rate. The plan allows for slow servers and for the traffic above."
    if share <= 1:
        return (
            f"{text}. The measurement kept a fixed number of requests in flight. With the traffic above, this number "
            "varies, and the plan allows for slow servers."
        )
    within = [
        point
        for point in configuration.evidence.points
        if point.candidate == configuration.candidate and configuration.sla.is_met(point.measurement)
    ]
    fastest = max(within, key=lambda point: point.throughput_infer_per_sec, default=measured)
    shown = formatting.performance(fastest, configuration.sla.judged_latency)
    return f"{text}. This is a forecast from other loads of the same servers, where one server had {shown}."


def _print_headroom(console: Console, answer: FleetPlan, simulated: SimulatedFleet) -> None:
    latency = formatting.short_metric(answer.configuration.sla.judged_latency)
    numbers = (">of the rate", ">infer/s", f">{latency} ms", ">of capacity", ">computing")
    table = plain_table(*numbers, "within the bound")
    for load in simulated.headroom:
        within = "yes" if load.meets_safely else "likely" if load.meets else "no"
        cells = (formatting.percent(load.rate / answer.rate), formatting.number(_request_size(answer) * load.rate))
        table.add_row(
            *cells, _latency_text(answer, load), *map(formatting.percent, (load.utilization, load.busy)), within
        )
    print_table(console, table)
    print_wrapped(console, "of capacity", "share of the highest rate that the replicas can serve")
    print_wrapped(console, "computing", "share of the time in which their instances compute")


def _latency_text(answer: FleetPlan, load: LoadForecast) -> str:
    """Return the expected latency in ms; a dash for an overload of replicas that cannot serve the rate."""
    is_unlimited = answer.is_overloaded and load.utilization > 1
    return "–" if is_unlimited else formatting.number(load.latency_ms)


def _print_side_by_side(console: Console, plan: CapacityPlan) -> None:
    table = plain_table("hardware", ">replicas", ">interval", ">infer/s", ">per hour", ">per million")
    for answer in plan.answers:
        count = "" if answer.count is None else f"{answer.count.low:,}–{answer.count.safe:,}"
        cost = answer.cost
        per_million = "" if cost is None or cost.per_million is None else _cost_text(cost.per_million)
        money = ("" if cost is None else _cost_text(cost.per_hour), per_million)
        replicas = f"{answer.replicas:,}" if answer.feasible else "none"
        infer_per_s = formatting.number(_request_size(answer) * answer.rate)
        table.add_row(answer.configuration.hardware, replicas, count, infer_per_s, *money)
    print_table(console, table)


def _one_lost_text(answer: FleetPlan, lost: LoadForecast | None) -> str:
    spare = answer.n_plus_1_replicas
    needed = "" if spare is None else f"; {_replicas_text(answer.configuration, spare)} tolerate it (N+1)"
    return f"no replica is left{needed}" if lost is None else f"{_outcome_text(answer, lost)}{needed}"


def _burst_text(answer: FleetPlan, simulated: SimulatedFleet) -> str:
    more = f"no number up to {MAX_REPLICAS:,} is enough"
    if simulated.burst_replicas is not None:
        more = f"{_replicas_text(answer.configuration, simulated.burst_replicas)} are enough"
    return _outcome_text(answer, simulated.burst) + ("" if simulated.burst.meets_safely else f"; {more}")


def _outcome_text(answer: FleetPlan, load: LoadForecast) -> str:
    latency = formatting.short_metric(answer.configuration.sla.judged_latency)
    verdict = "within the bound" if load.meets_safely else "likely within" if load.meets else "misses the bound"
    return f"{verdict} ({latency} {formatting.number(load.latency_ms)} ms)"


def _cost_and_power_lines(answer: FleetPlan) -> Iterator[tuple[str, str]]:
    if (cost := answer.cost) is not None:
        text = f"{_cost_text(cost.per_hour)} per hour, {_cost_text(cost.per_month)} per month (730 hours)"
        if cost.per_million is not None:
            text += f", {_cost_text(cost.per_million)} per million inferences"
        yield "cost", text
        if cost.scaled_per_hour is not None and cost.scaled_per_million is not None:
            scaled = f"{_cost_text(cost.scaled_per_hour)} per hour, {_cost_text(cost.scaled_per_million)} per million"
            range_ = f"{min(answer.replicas_by_hour):,} to {max(answer.replicas_by_hour):,} replicas"
            yield "scaled hourly", f"{scaled}, with {range_} over the day"
    if answer.power is not None:
        watts, joules = answer.power.watts, answer.power.joules_per_1000
        text = f"{formatting.number(watts)} W of all GPUs at the measured load"
        if joules is not None:
            text += f", {formatting.number(joules)} J per 1,000 inferences"
        yield "power", formatting.UNKNOWN if watts is None else text


def _measured_capacity_lines(answer: FleetPlan, capacity: MeasuredCapacity) -> Iterator[tuple[str, str]]:
    """Yield the lines of a plan that follows from measurements alone: the load of a replica, and the assumptions."""
    confirmed = f"{_infer_rate(answer, capacity.confirmed)} were confirmed"
    to_model = f" to {capacity.limiting_model}" if capacity.limiting_model else ""
    if capacity.concurrency:
        confirmed += (
            f" with {capacity.concurrency:,} in flight{to_model} in a closed loop, "
            f"{formatting.count(capacity.loads, 'load')} measured"
        )
    yield "method", f"measured capacity of a replica, not a simulation; {confirmed}"
    if to_model:
        yield "limit", f"the requests{to_model}, which has its part of the rate of all models"
    if answer.feasible and capacity.mean_in_flight is not None and capacity.full_share is not None:
        rate, safe_rate = answer.rate / answer.replicas, _infer_rate(answer, capacity.safe)
        share = formatting.percent(rate / capacity.confirmed)
        yield "each", f"{_infer_rate(answer, rate)}, {share} of the confirmed throughput"
        in_flight = (
            f"{formatting.number(capacity.mean_in_flight)} on average if each gets {safe_rate}, the most that is "
            f"safe; {formatting.percent(capacity.full_share, 2)} of the requests find {capacity.concurrency:,} or "
            "more"
        )
        yield "in flight", in_flight
    if answer.n_plus_1_replicas is not None:
        yield "one lost", f"{_replicas_text(answer.configuration, answer.n_plus_1_replicas)} tolerate it (N+1)"
    yield "requests", _lengths_text(capacity.lengths)
    yield from (("" if number else "assumed", text) for number, text in enumerate(capacity.assumptions))


def _lengths_text(lengths: LengthSummary) -> str:
    """Return the lengths of the requests of a run in words."""
    texts = [f"{name}s of {tokens}" for name, tokens in lengths.tokens.items()]
    if lengths.sequence:
        texts.append(f"sequences of {lengths.sequence} steps")
    return " and ".join(texts) or "the input data of the run, whose lengths it did not record"


def _confidence_text(answer: FleetPlan) -> str:
    return SAFE_CONFIDENCE if answer.measured_capacity is None else f"{100 * answer.measured_capacity.confidence:g} %"


def _further_measuring_text(answer: FleetPlan, further: FurtherMeasuring) -> str:
    deployments = formatting.count(further.deployments, "deployment")
    after = f"after {FURTHER_SECONDS / 60:g} more minutes of measurements ({deployments})"
    if further.sustainable_rate is not None:
        rate = _infer_rate(answer, further.sustainable_rate.safe)
        return f"{after}, {rate} would be the expected answer at {SAFE_CONFIDENCE} confidence"
    assert further.count is not None, "a further answer is one of the two"
    saved = answer.replicas - further.count.safe
    if saved <= 0:
        return f"{after}, the expected answer is the same number of replicas"
    replicas = _replicas_text(answer.configuration, further.count.safe)
    text = f"{after}, {replicas} would be the expected answer at {SAFE_CONFIDENCE} confidence, {saved:,} fewer"
    if further.saved_per_hour is not None:
        monthly = HOURS_A_MONTH * further.saved_per_hour
        text += f", which saves {_cost_text(further.saved_per_hour)} per hour, {_cost_text(monthly)} per month"
    return text


def _autoscaler_lines(answer: FleetPlan, test: AutoscalerTest) -> Iterator[tuple[str, str]]:
    scaler = test.autoscaler
    each = "each" if test.pods_per_replica == 1 else "each server process"
    yield (
        "autoscaler",
        f"{scaler.min_replicas:,} to {formatting.count(scaler.max_replicas, 'replica')}, {each} with "
        f"{formatting.request_load(test.target, is_rate=test.is_rate)} "
        f"({formatting.percent(scaler.target_utilization)}), metric {scaler.metric_delay_s:g} s old, "
        f"cool-down {scaler.cool_down_s:g} s, start {test.start_s:g} s",
    )
    yield (
        "tested",
        f"too few replicas for {formatting.duration(test.too_few_seconds)} of {formatting.duration(test.seconds)}, "
        f"{formatting.percent(test.over_bound_share, 2)} of the requests over the bound, "
        f"{test.mean_replicas:.1f} replicas on average, at most {formatting.exact(test.most_replicas)}",
    )
    if answer.count is not None and scaler.max_replicas < answer.count.safe:
        yield "", f"the peak needs {answer.count.safe:,}: give --max-replicas here and to `tune emit`"


def _traffic_text(plan: CapacityPlan) -> str:
    traffic, day = plan.question.traffic, plan.question.day
    if isinstance(traffic, RecordedTraffic):
        return f"as recorded ({formatting.number(traffic.rate)} req/s), stretched to the rate"
    if day.peak_factor > 1:
        return f"diurnal (sine), Poisson at its peak of {formatting.exact(day.peak_factor)} times the mean"
    return traffic.name.capitalize()


def _replicas_text(configuration: PlannedConfiguration, count: int) -> str:
    replicas = formatting.count(count, "replica")
    return f"{replicas} ({formatting.count(count * configuration.gpus, 'GPU')})" if configuration.gpus else replicas


def _rate_text(answer: FleetPlan, rate: float) -> str:
    """Return a rate in inferences and, if requests have several samples, in requests."""
    size = _request_size(answer)
    requests = f" ({formatting.number(rate)} req/s of {formatting.exact(size)})" if size != 1 else ""
    return f"{_infer_rate(answer, rate)}{requests}"


def _infer_rate(answer: FleetPlan, rate: float) -> str:
    return f"{formatting.number(_request_size(answer) * rate)} infer/s"


def _request_size(answer: FleetPlan) -> float:
    return answer.configuration.request_batch_size


def _cost_text(value: float) -> str:
    return f"{value:,.2f}" if value >= 1 else f"{value:.3g}"
