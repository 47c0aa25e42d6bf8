"""What bounds a configuration's throughput, from where the time of its requests and of its instances goes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from objectives.metrics import Measurement
from optimizer.batcher.observations import observation
from optimizer.machine.telemetry import disturbance
from optimizer.trial import Candidate, Point, Trial

Kind = Literal["compute", "instances", "copying", "queue", "client", "unknown"]

STAGES = {  # of a request, from the client's send to its receive
    "client send": "client_send_ms",
    "network": "network_ms",
    "queue": "queue_ms",
    "compute input": "compute_input_ms",
    "compute infer": "compute_infer_ms",
    "compute output": "compute_output_ms",
    "client receive": "client_recv_ms",
}
PARTS: dict[Kind, tuple[str, ...]] = {
    "client": ("client send", "network", "client receive"),
    "queue": ("queue",),
    "copying": ("compute input", "compute output"),
    "compute": ("compute infer",),
}
SATURATED = 0.8  # of the time that instances compute: the rest goes to hand-overs between batches
WORTHWHILE = 0.05  # more throughput by more instances: then they are what lacks


@dataclass(frozen=True, slots=True)
class Seen:
    """One measured point as the server saw it. ``stages_ms``: mean time of a request in each stage that is known.

    ``busy_share``: executions x compute time / (instances x wall time), None where the server told nothing.
    """

    point: Point
    stages_ms: dict[str, float]
    busy_share: float | None

    @property
    def measurement(self) -> Measurement:
        return self.point.measurement

    def part_ms(self, kind: Kind) -> float:
        return sum(self.stages_ms.get(stage, 0.0) for stage in PARTS[kind])

    @property
    def copied_share(self) -> float:
        """Of the time that an instance takes for a batch, what goes to copying inputs and outputs."""
        computed = self.part_ms("compute") + self.part_ms("copying")
        return self.part_ms("copying") / computed if computed else 0.0


@dataclass(frozen=True, slots=True)
class Bottleneck:
    """``reasons`` are whole sentences."""

    kind: Kind
    reasons: tuple[str, ...]


def seen(point: Point, trials: Sequence[Trial]) -> Seen:
    """``point`` with what was counted in all its windows: those of its confirmation, or of the search."""
    known = {name: getattr(point.measurement, field) for name, field in STAGES.items()}
    stages_ms = {name: value for name, value in known.items() if value is not None}
    return Seen(point, stages_ms, _busy_share(_windows(point, trials)))


def bottleneck(one: Seen, instances_gain: float | None) -> Bottleneck:
    """``instances_gain``: by how much more instances are expected to raise the throughput, relative; None unknown."""
    if not one.stages_ms:
        why = "the trials tell no stage times, only throughput and latency"
        return Bottleneck("unknown", (f"That cannot be told: {why}.", *_disturbed(one)))
    kind = _kind(one, instances_gain)
    return Bottleneck(kind, (*_reasons(kind, one, instances_gain), *_device(one), *_disturbed(one)))


def _kind(one: Seen, instances_gain: float | None) -> Kind:
    if one.busy_share is None or one.busy_share < SATURATED:
        return max(PARTS, key=one.part_ms)
    # instances that never rest are what requests wait for in the queue
    if one.part_ms("copying") > one.part_ms("compute"):
        return "copying"
    return "instances" if (instances_gain or 0.0) >= WORTHWHILE else "compute"


def _reasons(kind: Kind, one: Seen, instances_gain: float | None) -> tuple[str, ...]:
    total_ms = sum(one.stages_ms.values())
    share = f"{one.part_ms(kind) / total_ms:.0%}" if kind in PARTS and total_ms else ""
    busy = _busy(one)
    if kind == "client":
        return (f"{share} of a request's time passes outside the server, on the way and in the client.", *busy)
    if kind == "queue":
        return (f"{share} of a request's time passes in the queue. {_why_queued(one.point.candidate)}", *busy)
    if kind == "copying":
        told = f"{one.copied_share:.0%} of the time of a batch goes to copying its inputs and outputs."
        return (*busy, told)
    if kind == "instances":
        return (*busy, "Another instance would find room on the device, so the instances are what lacks.")
    if one.busy_share is not None and one.busy_share < SATURATED:
        return (*busy, f"{share} of a request's time is computing: with so few in flight that is what counts.")
    if instances_gain is None:
        return busy
    return (*busy, "More instances would hardly serve more: the device computes as fast as it can.")


def _busy(one: Seen) -> tuple[str, ...]:
    if one.busy_share is None:
        return ()
    count, size = one.point.candidate.instance_count, one.measurement.mean_batch_size
    who = "The instance" if count == 1 else f"The {count} instances"
    batches = f", on batches of {size:,.3g} samples" if size else ""
    return (f"{who} computed {one.busy_share:.0%} of the time{batches}.",)


def _why_queued(candidate: Candidate) -> str:
    if candidate.max_queue_delay_us or candidate.preferred_batch_sizes:
        return "The batcher holds them back for larger batches while instances are idle."
    return "They come in bursts, between which instances are idle."


def _device(one: Seen) -> tuple[str, ...]:
    used = one.measurement.gpu_utilization
    return () if used is None else (f"The GPU was at work {used:.0%} of the time.",)


def _disturbed(one: Seen) -> tuple[str, ...]:
    told = disturbance(one.measurement)
    return (f"{told[0].upper()}{told[1:]}: a quieter machine may give more.",) if told else ()


def _windows(point: Point, trials: Sequence[Trial]) -> list[Point]:
    trial = next(trial for trial in trials if trial.number == point.trial)
    again = [Point(point.trial, point.candidate, one.load, one.measurement) for one in trial.confirmations]
    own = [one for one in again if one.load == point.load]
    return own if own and point.measurement not in [m for _, m in trial.measurements] else [point]


def _busy_share(windows: Sequence[Point]) -> float | None:
    observed = [found for one in windows if (found := observation(one)) is not None]
    wall_s = sum(found.instance_count * found.wall_s for found in observed)
    computed_s = sum(batch.compute_ns for found in observed for batch in found.batches) / 1e9
    return min(1.0, computed_s / wall_s) if wall_s else None
