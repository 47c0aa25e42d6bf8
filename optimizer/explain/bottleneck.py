"""The constraint that binds, and the bottleneck of the server: which stage or resource limits the throughput."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from objectives.metrics import METRICS, Measurement
from objectives.sla import Constraint, Sla
from optimizer.core.trial import Candidate, Point, Trial
from optimizer.machine.conditions import describe_disturbance
from optimizer.simulator.calibration import observe_point


@dataclass(frozen=True, slots=True)
class BindingConstraint:
    """The constraint that prevents a higher throughput.

    ``constraint`` is None if no measurement beyond a bound had more throughput. ``beyond`` is the point with the
    highest throughput that misses only this constraint, ``gain`` its relative gain. ``used`` is the share of each
    bound that the subject uses, by the text of the constraint: 1 is all of an upper bound, or exactly a lower bound.
    """

    constraint: Constraint | None
    beyond: Point | None
    gain: float | None
    used: dict[str, float]


def binding(subject: Point, measured: Sequence[Point], sla: Sla, *, met: bool) -> BindingConstraint:
    """Return the constraint that binds ``subject``, among all ``measured`` points.

    If the bounds are not ``met``, it is the one with the largest violation.
    """
    used = {str(constraint): _used(constraint, subject) for constraint in sla}
    known = {text: share for text, share in used.items() if share is not None}
    if not met:
        missed = max(sla, key=lambda bound: bound.violation(subject.measurement), default=None)
        return BindingConstraint(missed, None, None, known)
    best: tuple[float, Constraint, Point] | None = None
    for point in measured:
        missed_here = sla.missed(point.measurement).constraints
        more = point.throughput_infer_per_sec / subject.throughput_infer_per_sec - 1
        if len(missed_here) == 1 and point.measurement.stable and more > (best[0] if best else 0.0):
            best = (more, missed_here[0], point)
    if best is None:
        return BindingConstraint(None, None, None, known)
    return BindingConstraint(best[1], best[2], best[0], known)


def _used(constraint: Constraint, subject: Point) -> float | None:
    metric = METRICS[constraint.metric]
    value = metric.value(subject.measurement)
    if not value or not constraint.bound:
        return None
    return constraint.bound / value if metric.better == "higher" else value / constraint.bound


BottleneckKind = Literal["compute", "instances", "copying", "queue", "client", "unknown"]

STAGES = {  # stages of a request in their order
    "client send": "client_send_ms",
    "network": "network_ms",
    "queue": "queue_ms",
    "compute input": "compute_input_ms",
    "compute infer": "compute_infer_ms",
    "compute output": "compute_output_ms",
    "client receive": "client_recv_ms",
}
PARTS: dict[BottleneckKind, tuple[str, ...]] = {
    "client": ("client send", "network", "client receive"),
    "queue": ("queue",),
    "copying": ("compute input", "compute output"),
    "compute": ("compute infer",),
}
SATURATED = 0.8  # share of time computing above which instances count as saturated; batches have gaps between them
WORTHWHILE = 0.05  # gain by more instances above which too few instances are the bottleneck


@dataclass(frozen=True, slots=True)
class StageBreakdown:
    """Mean time of a request in each stage at one point, and how busy the instances are.

    ``stages_ms`` is the mean time in each known stage. ``busy_share`` is executions x compute time / (instances x
    wall time), None without statistics of the server.
    """

    point: Point
    stages_ms: dict[str, float]
    busy_share: float | None

    @property
    def measurement(self) -> Measurement:
        return self.point.measurement

    def part_ms(self, kind: BottleneckKind) -> float:
        """Return the mean time in the stages that belong to ``kind``."""
        return sum(self.stages_ms.get(stage, 0.0) for stage in PARTS[kind])

    @property
    def copied_share(self) -> float:
        """Return the share of a batch's time that copying of inputs and outputs takes."""
        computed = self.part_ms("compute") + self.part_ms("copying")
        return self.part_ms("copying") / computed if computed else 0.0


@dataclass(frozen=True, slots=True)
class Bottleneck:
    """The stage or resource that limits the throughput; ``reasons`` are sentences for people."""

    kind: BottleneckKind
    reasons: tuple[str, ...]


def stage_breakdown(point: Point, trials: Sequence[Trial]) -> StageBreakdown:
    """Return the stages of ``point``, with server statistics of all windows of its confirmation or search."""
    known = {name: getattr(point.measurement, field) for name, field in STAGES.items()}
    stages_ms = {name: value for name, value in known.items() if value is not None}
    return StageBreakdown(point, stages_ms, _busy_share(_windows(point, trials)))


def bottleneck(stages: StageBreakdown, instances_gain: float | None) -> Bottleneck:
    """Return the bottleneck. ``instances_gain`` is the expected relative gain by more instances, None if unknown."""
    if not stages.stages_ms:
        reason = "The bottleneck is unknown, because the trials have no stage times."
        return Bottleneck("unknown", (reason, *_disturbed(stages)))
    kind = _kind(stages, instances_gain)
    return Bottleneck(kind, (*_reasons(kind, stages, instances_gain), *_device(stages), *_disturbed(stages)))


def _kind(stages: StageBreakdown, instances_gain: float | None) -> BottleneckKind:
    if stages.busy_share is None or stages.busy_share < SATURATED:
        return max(PARTS, key=stages.part_ms)
    # if instances always compute, requests in the queue wait for them
    if stages.part_ms("copying") > stages.part_ms("compute"):
        return "copying"
    return "instances" if (instances_gain or 0.0) >= WORTHWHILE else "compute"


def _reasons(kind: BottleneckKind, stages: StageBreakdown, instances_gain: float | None) -> tuple[str, ...]:
    total_ms = sum(stages.stages_ms.values())
    share = f"{stages.part_ms(kind) / total_ms:.0%}" if kind in PARTS and total_ms else ""
    busy = _busy(stages)
    if kind == "client":
        return (f"{share} of a request's time is spent outside the server, in the network and the client.", *busy)
    if kind == "queue":
        return (f"{share} of a request's time is spent in the queue. {_why_queued(stages.point.candidate)}", *busy)
    if kind == "copying":
        return (*busy, f"Copying inputs and outputs takes {stages.copied_share:.0%} of the time of a batch.")
    if kind == "instances":
        return (*busy, "The device has room for another instance, so there are too few instances.")
    if stages.busy_share is not None and stages.busy_share < SATURATED:
        return (*busy, f"Computing takes {share} of a request's time, and few requests are in flight.")
    if instances_gain is None:
        return busy
    return (*busy, "More instances would hardly raise the throughput: the device is saturated.")


def _busy(stages: StageBreakdown) -> tuple[str, ...]:
    if stages.busy_share is None:
        return ()
    count, size = stages.point.candidate.instance_count, stages.measurement.mean_batch_size
    subject = "The instance" if count == 1 else f"The {count} instances"
    batches = f", on batches of {size:,.3g} samples" if size else ""
    return (f"{subject} computed {stages.busy_share:.0%} of the time{batches}.",)


def _why_queued(candidate: Candidate) -> str:
    if candidate.max_queue_delay_us or candidate.preferred_batch_sizes:
        return "The batcher delays requests to form larger batches while instances are idle."
    return "Requests arrive in bursts; instances are idle between them."


def _device(stages: StageBreakdown) -> tuple[str, ...]:
    used = stages.measurement.gpu_utilization
    return () if used is None else (f"The GPU was busy {used:.0%} of the time.",)


def _disturbed(stages: StageBreakdown) -> tuple[str, ...]:
    text = describe_disturbance(stages.measurement)
    return (f"{text[0].upper()}{text[1:]}: an idle machine may serve more.",) if text else ()


def _windows(point: Point, trials: Sequence[Trial]) -> list[Point]:
    trial = next(trial for trial in trials if trial.number == point.trial)
    confirmations = [window for window in trial.confirmations if window.load == point.load]
    own = [Point(point.trial, point.candidate, window.load, window.measurement) for window in confirmations]
    return own if own and point.measurement not in [m for _, m in trial.measurements] else [point]


def _busy_share(windows: Sequence[Point]) -> float | None:
    observed = [known for window in windows if (known := observe_point(window)) is not None]
    wall_s = sum(known.instance_count * known.wall_s for known in observed)
    computed_s = sum(batch.compute_ns for known in observed for batch in known.batches) / 1e9
    return min(1.0, computed_s / wall_s) if wall_s else None
