"""What a plan is made from: the runs of one model on one hardware, the configuration, and the bounds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from objectives.sla import Constraint
from optimizer.errors import BadInputError
from optimizer.open_loop import arrivals
from optimizer.outcome import Outcome, assess
from optimizer.planning.evidence import Evidence, collect
from optimizer.store.finished import FinishedRun
from optimizer.trial import Candidate, Point


@dataclass(frozen=True)
class Source:
    """``point`` is what the newest run measured of the configuration; ``devices``: GPUs of a replica, or 1 where it
    has none; ``watts`` of its GPUs, None where unknown."""

    hardware: str
    gpus: int
    runs: tuple[str, ...]
    model: str
    builder: str
    point: Point
    evidence: Evidence
    bounds: tuple[Constraint, ...]

    @property
    def candidate(self) -> Candidate:
        return self.point.candidate

    @property
    def devices(self) -> int:
        return max(1, self.gpus)

    @property
    def device(self) -> str:
        return "GPU" if self.gpus else "machine"

    @property
    def watts(self) -> float | None:
        return self.point.measurement.gpu_power_watts


def sources(runs: Sequence[FinishedRun], asked: Sequence[Constraint]) -> list[list[Source]]:
    """For each hardware, in the order of ``runs``, one or two: of the configuration that its newest run recommends,
    and of the best one within the bounds where those are others. ``asked``: bounds on latencies in place of the runs'
    own.

    Raises BadInputError where the runs are of several models, or one recommends nothing.
    """
    models = dict.fromkeys(run.problem.model for run in runs)
    if len(models) > 1:
        raise BadInputError(f"the runs are of different models ({', '.join(models)}): plan one at a time")
    by_hardware: dict[str, list[FinishedRun]] = {}
    for run in runs:
        by_hardware.setdefault(hardware_of(run), []).append(run)
    return [_sources(hardware, alike, asked) for hardware, alike in by_hardware.items()]


def hardware_of(run: FinishedRun) -> str:
    told = run.info["hardware"]
    gpus = list(told["gpus"])
    names = [f"{gpus.count(name)}x {name}" if gpus.count(name) > 1 else name for name in dict.fromkeys(gpus)]
    return ", ".join(names) or f"{told['cpu']}, {told['cpu_count']} cores"


def _sources(hardware: str, runs: Sequence[FinishedRun], asked: Sequence[Constraint]) -> list[Source]:
    newest = max(runs, key=lambda run: str(run.info.get("written", "")))
    for run in runs:
        if run.outcome is None or run.outcome.recommended is None:
            raise BadInputError(
                f"{run.folder.path}: it recommends no configuration; run `tune` again, with a looser bound or a "
                "longer --budget, or give another run"
            )
    own = [bound for bound in newest.problem.constraints if bound.metric.startswith("latency-")]
    bounds = tuple(asked) or tuple(own)
    if not bounds:
        raise BadInputError(f"{newest.folder.path} has no bound on a latency: give one, such as --sla-p95 20ms")
    batch = newest.problem.request_batch_size
    others = [run.folder.path for run in runs if run.problem.request_batch_size != batch]
    if others:
        raise BadInputError(
            f"{others[0]} and {newest.folder.path} sent requests of different sizes: plan one of them"
        )
    how = arrivals.arrivals(newest.options.arrivals)
    facts = newest.info["problem"].get("facts", {})
    return [
        Source(
            hardware,
            len(newest.info["hardware"]["gpus"]),
            tuple(run.name for run in runs),
            newest.problem.model,
            str(facts.get("builder", "")).partition(" ")[0],
            point,
            collect(point.candidate, newest.problem, [run.trials for run in runs], how),
            bounds,
        )
        for point in _points(newest, bounds)
    ]


def _points(run: FinishedRun, bounds: Sequence[Constraint]) -> list[Point]:
    """What the run recommends, then what is best or nearest within other bounds than its own. Where requests come by
    themselves either may be the better one."""
    others = [bound for bound in run.problem.constraints if not bound.metric.startswith("latency-")]
    problem = replace(run.problem, constraints=(*bounds, *others))
    outcome: Outcome = assess(run.trials, problem, run.baseline, run.dynamic_batching)
    own = run.outcome.recommended if run.outcome is not None else None
    found = [point for point in (own, outcome.recommended or outcome.closest) if point is not None]
    return list({point.candidate: point for point in reversed(found)}.values())[::-1]
