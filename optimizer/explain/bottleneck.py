"""The constraint that binds, and the bottleneck of the server: which stage or resource limits the throughput."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from objectives.metrics import METRICS, Measurement, Metric
from objectives.sla import Constraint, Sla
from optimizer.config.batching import CANDIDATE_SEQUENCES
from optimizer.core.candidate import Candidate
from optimizer.core.trial import Point, Trial, latest_points, trial_of
from optimizer.explain.forecaster import Gain
from optimizer.machine.cpu_usage import describe_disturbance
from optimizer.results import formatting, outcome_values
from optimizer.results.request_steps import SATURATED, StepTimes, limiting_step, step_times
from optimizer.simulator.calibration import observe_point


@dataclass(frozen=True, slots=True)
class BindingConstraint:
    """The constraint that prevents a better value of the first objective.

    ``beyond`` is the best point that misses only this constraint, ``gain`` its relative gain (``Metric.worth``), None
    if ratios of the objective have no meaning.
    """

    constraint: Constraint
    beyond: Point
    gain: float | None


def find_binding_constraint(
    subject: Point, measured: Sequence[Point], sla: Sla, objective: Metric
) -> BindingConstraint | None:
    """Return the constraint that binds ``subject``; None if no ``measured`` point beyond one has a better value."""
    beyond = [point for point in measured if len(sla.missed(point.measurement)) == 1]
    better = [point for point in beyond if objective.is_better(point.measurement, subject.measurement)]
    best = Sla().best_point(better, [objective])
    if best is None:
        return None
    worths = objective.worth(best.measurement), objective.worth(subject.measurement)
    gain = worths[0] / worths[1] - 1 if worths[0] and worths[1] else None
    return BindingConstraint(sla.missed(best.measurement).constraints[0], best, gain)


def worst_missed(subject: Point, sla: Sla) -> Constraint | None:
    """Return the constraint that ``subject`` violates most; None if it meets all."""
    missed = sla.missed(subject.measurement)
    return max(missed, key=lambda bound: bound.violation(subject.measurement), default=None)


def used_shares(subject: Point, sla: Sla) -> dict[str, float]:
    """Return the known shares of the bounds that ``subject`` uses, by the text of the constraint.

    1 is all of an upper bound, or exactly a lower bound.
    """
    values = {constraint: METRICS[constraint.metric].value(subject.measurement) for constraint in sla}
    return {
        str(constraint): constraint.bound / value
        if METRICS[constraint.metric].better == "higher"
        else value / constraint.bound
        for constraint, value in values.items()
        if value and constraint.bound
    }


BottleneckKind = Literal[
    "compute",
    "instances",
    "copying",
    "queue",
    "client",
    "other models",
    "waiting",
    "first response",
    "generation",
    "unknown",
]

STAGES_OF_KIND: dict[BottleneckKind, tuple[str, ...]] = {
    "client": ("client_send_ms", "network_ms", "client_recv_ms"),
    "other models": (outcome_values.OTHER_MODELS,),
    "queue": ("queue_ms",),
    "copying": ("compute_input_ms", "compute_output_ms"),
    "compute": ("compute_infer_ms",),
    "waiting": ("waiting_ms",),
    "first response": ("first_response_ms",),
    "generation": ("further_responses_ms",),
}
NO_BOTTLENECK_REASONS: dict[BottleneckKind, str] = {  # ends of a sentence about a long stage that limits nothing
    "client": "is spent outside the server, but a faster network is not expected to raise the throughput",
    "copying": "is spent copying inputs and outputs, but shared memory is not expected to raise the throughput",
}
DIRECT_PREFIX = "sequence_batching.direct."
WORTHWHILE = 0.05  # gain by more instances above which too few instances are the bottleneck


@dataclass(frozen=True, slots=True)
class StageBreakdown:
    """Mean time of a request in each stage at one point, and how busy the instances are.

    Attributes:
        point: The point.
        stages_ms: The mean time in each known stage, by its field, see ``outcome_values.stage_times_ms``. A stream
            has the stages that the client sees instead: ``waiting_ms``, ``first_response_ms`` and
            ``further_responses_ms``.
        busy_share: Executions x compute time / (instances x wall time); None without statistics of the server, and
            for a model that streams, whose compute time in them is that of handing requests over.
        lowest_ttft: The measurement of the run with the lowest mean time to first response; None without such a time.
        tuned_model: The model that the server's times describe; empty if no other one is served.
        steps: The times of each model that serves a part of a request; empty if they were not recorded.
    """

    point: Point
    stages_ms: dict[str, float]
    busy_share: float | None
    lowest_ttft: Point | None = None
    tuned_model: str = ""
    steps: tuple[StepTimes, ...] = ()

    @property
    def measurement(self) -> Measurement:
        return self.point.measurement

    @property
    def is_limited_by_another(self) -> bool:
        """Return whether the instances of a model other than the tuned one limit the throughput."""
        limit = limiting_step(self.steps)
        return limit is not None and limit.is_saturated and limit.model != self.tuned_model

    def part_ms(self, kind: BottleneckKind) -> float:
        """Return the mean time in the stages that belong to ``kind``."""
        return sum(self.stages_ms.get(stage, 0.0) for stage in STAGES_OF_KIND[kind])

    @property
    def copied_share(self) -> float:
        """Return the share of a batch's time that copying of inputs and outputs takes."""
        computed = self.part_ms("compute") + self.part_ms("copying")
        return self.part_ms("copying") / computed if computed else 0.0


@dataclass(frozen=True, slots=True)
class Bottleneck:
    """The stage or resource that limits the throughput; ``reasons`` are sentences for people.

    The kinds are:

    - ``compute``: computing on a device that is saturated, or that has few requests in flight
    - ``instances``: too few instances, although the device has room for more
    - ``copying``: copying inputs and outputs on the server
    - ``queue``: requests wait in Triton's queue while instances are idle
    - ``client``: the network and the client
    - ``other models``: the other steps of an ensemble or the models that a model calls; if their times were not
      recorded, also the network and the client
    - ``waiting``, ``first response``, ``generation``: of a model that streams, the time before the model begins with
      a request, the time until its first response, and the time between its first and its last response
    - ``unknown``: no stage times were measured
    """

    kind: BottleneckKind
    reasons: tuple[str, ...]


def break_down_stages(
    point: Point, trials: Sequence[Trial], *, has_other_models: bool = False, tuned_model: str = ""
) -> StageBreakdown:
    """Return the stages of ``point``, with server statistics of all windows of its confirmation or search.

    For ``has_other_models`` and ``tuned_model`` see ``outcome_values.stage_times_ms``.
    """
    if point.measurement.is_streamed:
        return _streamed_breakdown(point, trials)
    stages_ms = outcome_values.stage_times_ms(point, has_other_models=has_other_models, tuned_model=tuned_model)
    busy_share = _busy_share(_windows(point, trials))
    return StageBreakdown(point, stages_ms, busy_share, tuned_model=tuned_model, steps=step_times(point))


def _streamed_breakdown(point: Point, trials: Sequence[Trial]) -> StageBreakdown:
    """Return the stages of a request that is answered by a stream, as the client sees them.

    The server's compute time ends when the model has accepted the request. The shortest mean time to first
    response of the run is an upper bound of the time of a prompt alone, so waiting takes at least the rest.
    """
    # the times of an overload are lower bounds only
    stable = [other for other in latest_points(trials) if other.measurement.stable]
    with_ttft = [other for other in (*stable, point) if _first_response_ms(other) is not None]
    first_ms, total_ms = _first_response_ms(point), point.measurement.latency_avg_ms
    if first_ms is None or total_ms is None:
        return StageBreakdown(point, {}, None)
    lowest = min(with_ttft, key=lambda other: _first_response_ms(other) or 0.0)
    lowest_ms = _first_response_ms(lowest) or 0.0
    queue_ms = point.measurement.queue_ms
    stages_ms = {} if queue_ms is None else {"queue_ms": queue_ms}
    stages_ms |= {
        "waiting_ms": first_ms - lowest_ms,
        "first_response_ms": lowest_ms,
        "further_responses_ms": max(0.0, total_ms - first_ms - (queue_ms or 0.0)),
    }
    return StageBreakdown(point, stages_ms, None, lowest_ttft=lowest)


def _first_response_ms(point: Point) -> float | None:
    """Return the mean time from the end of Triton's queue to the first response; None if it is unknown."""
    first_ms = point.measurement.ttft_avg_ms
    return None if first_ms is None else max(0.0, first_ms - (point.measurement.queue_ms or 0.0))


def find_bottleneck(
    stages: StageBreakdown,
    instances_gain: Gain | None,
    removal_gains: Mapping[BottleneckKind, Gain | None] | None = None,
    step_reasons: Sequence[str] = (),
) -> Bottleneck:
    """Return the bottleneck.

    ``instances_gain`` is the expected gain by more instances, None if unknown. ``removal_gains`` are those by the
    removal of stages: a stage without which no more would be served is not the bottleneck. ``step_reasons`` are
    sentences about the step that limits the throughput.
    """
    if not stages.stages_ms:
        limit = limiting_step(stages.steps)  # of models that get load at the same time
        kind: BottleneckKind = "unknown"
        if limit is not None:
            kind = "compute" if limit.model == stages.tuned_model else "other models"
        unknown = "" if limit else "The bottleneck is unknown, because the trials have no stage times."
        reasons = (unknown, *step_reasons, _sequence_reason(stages), _disturbance_reason(stages))
        return Bottleneck(kind, tuple(filter(None, reasons)))
    instances_help = _instances_help(instances_gain)
    gainless = frozenset(kind for kind, gain in (removal_gains or {}).items() if gain and not gain.is_possible)
    kind = _limiting_kind(stages, instances_help, gainless)
    reasons = (
        *step_reasons,
        *_reasons(kind, stages, instances_help),
        *_longer_stage_reasons(kind, stages, gainless),
        _sequence_reason(stages),
        _gpu_reason(stages),
        _disturbance_reason(stages),
    )
    return Bottleneck(kind, tuple(filter(None, reasons)))


def _instances_help(instances_gain: Gain | None) -> bool | None:
    """Return whether more instances serve clearly more; None if that is unknown."""
    if instances_gain is None:
        return None
    interval = instances_gain.interval
    if interval is not None and interval.low < WORTHWHILE <= interval.high:
        return None
    return instances_gain.estimate >= WORTHWHILE


def _limiting_kind(
    stages: StageBreakdown, instances_help: bool | None, gainless: frozenset[BottleneckKind]
) -> BottleneckKind:
    """Return the kind of bottleneck; ``gainless`` are those whose removal is not expected to gain anything."""
    if stages.is_limited_by_another:
        return "other models"
    if stages.busy_share is None or stages.busy_share < SATURATED:
        limiting = [kind for kind in STAGES_OF_KIND if kind not in gainless and stages.part_ms(kind)]
        return max(limiting or STAGES_OF_KIND, key=stages.part_ms)
    # if instances always compute, requests in the queue wait for them
    if stages.part_ms("copying") > stages.part_ms("compute"):
        return "copying"
    return "instances" if instances_help else "compute"


def _longer_stage_reasons(
    kind: BottleneckKind, stages: StageBreakdown, gainless: frozenset[BottleneckKind]
) -> tuple[str, ...]:
    """Return sentences about the stages that take longer than those of ``kind``, but do not limit the throughput."""
    if kind not in STAGES_OF_KIND:
        return ()
    return tuple(
        f"{_time_share(other, stages)} of a request's time {text}."
        for other, text in NO_BOTTLENECK_REASONS.items()
        if other in gainless and stages.part_ms(other) > stages.part_ms(kind)
    )


def _time_share(kind: BottleneckKind, stages: StageBreakdown) -> str:
    """Return the share of a request's time in the stages of ``kind``; empty if it has none."""
    total_ms = sum(stages.stages_ms.values())
    return formatting.percent(stages.part_ms(kind) / total_ms) if kind in STAGES_OF_KIND and total_ms else ""


def _reasons(kind: BottleneckKind, stages: StageBreakdown, instances_help: bool | None) -> tuple[str, ...]:
    """Return sentences that explain why ``kind`` is the bottleneck; some may be empty."""
    share = _time_share(kind, stages)
    if stages.lowest_ttft is not None:
        return _streamed_reasons(kind, share, stages, stages.lowest_ttft)
    busy = _busy_reason(stages)
    if kind == "client":
        return (f"{share} of a request's time is spent outside the server, in the network and the client.", busy)
    if kind == "other models" and stages.steps:
        return (f"{share} of a request's time is spent in the other models.",) if stages.part_ms(kind) else ()
    if kind == "other models":
        return (
            f"{share} of a request's time is spent outside the model whose batches are tuned: in the other models, "
            "the network and the client.",
            busy,
            "A run of another model alone shows how much it can serve.",
        )
    if kind == "queue":
        return (f"{share} of a request's time is spent in the queue. {_why_queued(stages.point)}", busy)
    if kind == "copying":
        return (
            busy,
            f"Copying inputs and outputs takes {formatting.percent(stages.copied_share)} of the time of a batch.",
        )
    if kind == "instances":
        return (busy, "The device has room for another instance, so there are too few instances.")
    if stages.busy_share is not None and stages.busy_share < SATURATED:
        return (busy, f"Computing takes {share} of a request's time, and few requests are in flight.")
    if instances_help is None:
        return (busy,)
    return (busy, "More instances are expected to serve hardly more: the device is saturated.")


def _streamed_reasons(
    kind: BottleneckKind, share: str, stages: StageBreakdown, lowest_ttft: Point
) -> tuple[str, ...]:
    """Return sentences about the times of requests that run together."""
    m, in_flight = stages.measurement, _in_flight(stages.point)
    lowest = f"{formatting.number(_first_response_ms(lowest_ttft))} ms, {_where(lowest_ttft)}"
    is_delayed = stages.point.candidate.max_queue_delay_us > 0
    cause = "The batcher delays requests to form batches." if is_delayed else "The model accepts requests late."
    subjects: dict[BottleneckKind, str] = {
        "queue": f"in Triton's queue. {cause}",
        "waiting": "waiting in the model: for a place, or for passes of other requests.",
        "first response": f"until the first response, which takes as long in the quickest measurement ({lowest}).",
        "generation": "between its first and its last response.",
    }
    reasons = [f"{share} of a request's time is spent {subjects[kind]}"]
    if kind == "waiting":
        reasons.append(f"The rest until the first response takes as long in the quickest measurement ({lowest}).")
    if in_flight and m.latency_avg_ms:
        generating = in_flight * stages.part_ms("generation") / m.latency_avg_ms
        candidate = stages.point.candidate
        places = candidate.max_batch_size * candidate.total_instances
        factors = "max_batch_size x instances" + (" x server processes" if candidate.server_processes > 1 else "")
        limit = f" ({factors}: {places:,})" if places else ""
        reasons.append(
            f"On average {formatting.number(generating, 2)} of {formatting.number(in_flight, 2)} requests in flight "
            f"were between their first and their last response{limit}."
        )
    if m.itl_avg_ms and lowest_ttft.measurement.itl_avg_ms:
        reasons.append(
            f"The mean time between two responses was {formatting.number(m.itl_avg_ms)} ms, and "
            f"{formatting.number(lowest_ttft.measurement.itl_avg_ms)} ms {_where(lowest_ttft)}."
        )
    return (*reasons, _kv_cache_reason(stages))


def _kv_cache_reason(stages: StageBreakdown) -> str:
    """Return a sentence about the engine's KV cache; empty if the engine does not report it."""
    utilization, preemptions = stages.measurement.kv_cache_utilization, stages.measurement.engine_preemptions
    if utilization is None:
        return ""
    lost = f", and {formatting.count(round(preemptions), 'request')} lost their place in it" if preemptions else ""
    return f"The KV cache was filled up to {formatting.percent(utilization)}{lost}."


def _in_flight(point: Point) -> float | None:
    """Return the mean number of requests in flight (Little's law in an open loop)."""
    latency_ms = point.measurement.latency_avg_ms
    if point.load.concurrency or latency_ms is None:
        return point.load.concurrency or None
    return point.throughput_infer_per_sec / point.load.request_batch_size * latency_ms / 1e3


def _where(point: Point) -> str:
    """Return the trial and the load of ``point``: ``in trial 3 with 8 in flight``."""
    load = formatting.load(point.load)
    return f"in trial {point.trial} {f'at {load}' if point.load.request_rate else f'with {load} in flight'}"


def _busy_reason(stages: StageBreakdown) -> str:
    """Return a sentence about the time that instances computed; empty if that is unknown or shown for each step."""
    if stages.busy_share is None or stages.steps:
        return ""
    candidate, size = stages.point.candidate, stages.measurement.mean_batch_size
    count = candidate.total_instances
    subject = "The instance" if count == 1 else f"The {count} instances"
    if candidate.server_processes > 1:
        subject += f" of {candidate.server_processes} server processes"
    batches = f", on batches of {size:,.3g} sample{'' if f'{size:.3g}' == '1' else 's'}" if size else ""
    return f"{subject} computed {formatting.percent(stages.busy_share)} of the time{batches}."


def _sequence_reason(stages: StageBreakdown) -> str:
    """Return a sentence about the places of the sequence batcher; empty if their number is unknown."""
    places, sequences = _sequence_places(stages.point.candidate), stages.point.load.concurrency
    if not places or not sequences:
        return ""
    effect = "each has a place" if sequences <= places else "some wait for a place before their first step"
    return f"{sequences:,} sequences were in flight, and the instances have places for {places:,}: {effect}."


def _sequence_places(candidate: Candidate) -> int | None:
    """Return how many sequences the instances process at a time; None if that is unknown or there are none."""
    fields = dict(candidate.fields)
    if CANDIDATE_SEQUENCES in fields:
        return int(fields[CANDIDATE_SEQUENCES]) * candidate.instances
    is_direct = any(path.startswith(DIRECT_PREFIX) for path in fields)
    return max(1, candidate.max_batch_size) * candidate.instances if is_direct else None


def _why_queued(point: Point) -> str:
    """Return why requests wait in the queue while instances are idle."""
    candidate = point.candidate
    if candidate.is_stateful:
        has_waiting = point.load.concurrency > (_sequence_places(candidate) or math.inf)
        return "Sequences wait for a place." if has_waiting else "Steps wait for others to form a batch."
    if candidate.max_queue_delay_us or candidate.preferred_batch_sizes:
        return "The batcher delays requests to form larger batches while instances are idle."
    return "Requests arrive in bursts; instances are idle between them."


def _gpu_reason(stages: StageBreakdown) -> str:
    utilization = stages.measurement.gpu_utilization
    return "" if utilization is None else f"The GPU was busy {formatting.percent(utilization)} of the time."


def _disturbance_reason(stages: StageBreakdown) -> str:
    text = describe_disturbance(stages.measurement)
    return f"{text[0].upper()}{text[1:]}: an idle machine may serve more." if text else ""


def _windows(point: Point, trials: Sequence[Trial]) -> list[Point]:
    """Return the windows of the confirmation that ``point`` sums up; ``point`` itself if the search measured it."""
    trial = trial_of(point, trials)
    confirmations = trial.windows_at(point.load)
    if not confirmations or any(measurement == point.measurement for _, measurement in trial.measurements):
        return [point]
    return [trial.point(window.load, window.measurement) for window in confirmations]


def _busy_share(windows: Sequence[Point]) -> float | None:
    """Return the share of the time in which instances computed, over all ``windows``; None without statistics."""
    observations = [observation for observation in map(observe_point, windows) if observation is not None]
    wall_s = sum(observation.instance_count * observation.wall_s for observation in observations)
    computed_s = sum(batch.compute_ns for observation in observations for batch in observation.batches) / 1e9
    return min(1.0, computed_s / wall_s) if wall_s else None
