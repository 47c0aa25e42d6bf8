"""How the time of a request divides among the models that serve parts of it, and which one limits the throughput."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from objectives import model_stats, step_stats
from objectives.step_stats import StepStatistic
from optimizer.core.trial import Point
from optimizer.results import formatting

SATURATED = 0.8  # share of time computing above which instances count as saturated; batches have gaps between them
MIN_WAIT_SHARE = 0.1  # wait relative to the time of computing below which few requests wait
HEADERS = ("model", ">instances", ">computing", ">queue ms", ">compute ms")


@dataclass(frozen=True, slots=True)
class StepTimes:
    """A model that serves a part of each request: a step of an ensemble, a model that calls others, or one of these.

    Attributes:
        model: Name of the model.
        instances: Number of its instances on all servers.
        queue_ms: Mean time of a request in its queue, summed over all uses of the model.
        compute_ms: Mean time of a request in its executions, summed in the same way.
        own_ms: The sum of both, without the time of the models that it calls.
        busy_share: Share of the time in which its instances execute, 0 to 1.
        calls_others: Whether it calls the other models, so that ``compute_ms`` and ``busy_share`` include their time.
    """

    model: str
    instances: int
    queue_ms: float
    compute_ms: float
    own_ms: float
    busy_share: float
    calls_others: bool

    @property
    def is_saturated(self) -> bool:
        """Whether its instances always execute and requests wait for them; a single request never waits."""
        return self.busy_share >= SATURATED and self.queue_ms >= MIN_WAIT_SHARE * self.compute_ms


def step_times(point: Point) -> tuple[StepTimes, ...]:
    """Return the times of each model that serves a part of the requests; an empty tuple if they were not recorded.

    If several models get load at the same time, the times of each are those of a request to it.
    """
    measurement = point.measurement
    loaded = model_stats.from_text(measurement.by_model)
    groups: list[list[StepStatistic]] = []
    for step in step_stats.from_text(measurement.step_stats):
        if not groups or step.model in loaded:
            groups.append([])
        groups[-1].append(step)
    times = []
    for counted in groups:
        throughput, requests = model_stats.throughput_of(counted[0].model, measurement), counted[0].requests
        if not throughput or not requests:
            return ()
        times += _step_times(counted, 1e9 * requests * point.load.request_batch_size / throughput)
    return tuple(times)


def _step_times(counted: Sequence[StepStatistic], wall_ns: float) -> list[StepTimes]:
    """Return the times of the models in ``counted``, the first of which gets the requests.

    The counters include the time before and after the measured windows, so the wall time ``wall_ns`` is that of the
    counted requests at the measured throughput.
    """
    requests = counted[0].requests
    called_ns = sum(step.queue_ns + step.compute_ns for step in counted[1:])
    steps = []
    for step in counted:
        if not step.instances:
            continue
        calls_others = step is counted[0] and len(counted) > 1  # an ensemble has no instances
        own_ns = step.queue_ns + max(0, step.compute_ns - (called_ns if calls_others else 0))
        times = StepTimes(
            step.model,
            step.instances,
            queue_ms=step.queue_ns / requests / 1e6,
            compute_ms=step.compute_ns / requests / 1e6,
            own_ms=own_ns / requests / 1e6,
            busy_share=min(1.0, step.busy_ns / (step.instances * wall_ns)),
            calls_others=calls_others,
        )
        steps.append(times)
    return steps


def limiting_step(steps: Sequence[StepTimes]) -> StepTimes | None:
    """Return the step that limits the throughput; None without steps.

    It is the saturated one with the longest queue. If none is saturated, it is the one in which a request spends the
    most time. The instances of a model that calls others are busy while they wait, so it limits only if no model that
    it calls is saturated.
    """
    if saturated := [step for step in steps if step.is_saturated]:
        called = [step for step in saturated if not step.calls_others]
        return max(called or saturated, key=lambda step: step.queue_ms)
    return max(steps, key=lambda step: step.own_ms, default=None)


def limit_sentence(steps: Sequence[StepTimes]) -> str:
    """Return which step limits the throughput and why; empty without steps."""
    step = limiting_step(steps)
    if step is None:
        return ""
    if not step.is_saturated:
        return (
            "At this load, no model has instances that always compute while requests wait. Requests spend most time "
            f"in {step.model}: {formatting.number(step.own_ms)} ms."
        )
    instances = "instance" if step.instances == 1 else f"{step.instances:,} instances"
    waiting = " or waited for the models that it calls" if step.calls_others else ""
    busy = formatting.percent(step.busy_share)
    return f"{step.model} limits the throughput: its {instances} computed{waiting} {busy} of the time."


def step_rows(steps: Sequence[StepTimes]) -> list[tuple[str, ...]]:
    """Return a row of a table for each step, below HEADERS."""
    return [
        (
            f"{step.model} (with its calls)" if step.calls_others else step.model,
            f"{step.instances:,}",
            formatting.percent(step.busy_share),
            f"{step.queue_ms:,.3f}",
            f"{step.compute_ms:,.3f}",
        )
        for step in steps
    ]
