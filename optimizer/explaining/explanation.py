"""All that can be said of why a run ended as it did."""

from __future__ import annotations

import math
from dataclasses import dataclass

from optimizer.errors import BadInputError
from optimizer.explaining.binding import Binding, binding
from optimizer.explaining.bottleneck import Bottleneck, Seen, bottleneck, seen
from optimizer.explaining.forecast import Forecaster, bound_ms
from optimizer.explaining.remedies import FP16_FACTOR, OtherSla, Remedy, other_slas, remedies
from optimizer.explaining.runner_up import RunnerUp, runner_up
from optimizer.outcome import Outcome
from optimizer.search.figures import is_known, judged_latency
from optimizer.store.finished import FinishedRun
from optimizer.trial import Candidate, latest_points

MOST_CANDIDATES = 12  # of the front, that another SLA is simulated with


@dataclass(frozen=True, slots=True)
class Simulation:
    """``latency`` is what the bound is on. ``error``: median relative error in throughput over ``points`` points.
    ``quickest_ms``: the lowest latency expected of anything that is near the front."""

    latency: str
    bound_ms: float
    error: float
    points: int
    remedies: tuple[Remedy, ...]
    other_slas: tuple[OtherSla, ...]
    quickest_ms: float


@dataclass(frozen=True, slots=True)
class Explanation:
    """``subject`` is the recommendation, where there is none what came closest to the bounds. ``simulation`` is None
    where no measurement has both a throughput and a latency; ``unfinished`` says that the run is not at its end."""

    run: FinishedRun
    subject: Seen
    recommended: bool
    holds_back: str
    unfinished: str
    bottleneck: Bottleneck
    binding: Binding
    simulation: Simulation | None
    runner_up: RunnerUp | None


def explain(run: FinishedRun, fp16_factor: float = FP16_FACTOR) -> Explanation:
    """``fp16_factor``: what share of its time an inference is assumed to take in FP16.

    Raises BadInputError where the run has measured nothing.
    """
    outcome = run.outcome
    point = (outcome.recommended or outcome.closest) if outcome else None
    if outcome is None or point is None:
        why = (outcome.holds_back if outcome else "") or run.info.get("reason") or "nothing was measured"
        raise BadInputError(f"{run.folder.path}: there is nothing to explain yet: {why} (the run is {run.status})")
    subject = seen(point, run.trials)
    simulation = _simulation(run, outcome, subject, fp16_factor)
    gains = {one.name: one.gain for one in simulation.remedies} if simulation else {}
    recommended = outcome.recommended is not None
    measured = [*latest_points(run.trials), *(one.point for one in outcome.again)]
    return Explanation(
        run,
        subject,
        recommended,
        outcome.holds_back,
        _unfinished(run),
        bottleneck(subject, gains.get("more instances")),
        binding(point, measured, run.problem.constraints, met=recommended),
        simulation,
        runner_up(run),
    )


def _simulation(run: FinishedRun, outcome: Outcome, subject: Seen, fp16_factor: float) -> Simulation | None:
    measured = latest_points(run.trials)
    if not any(is_known(point, judged_latency(run.problem, measured)) for point in measured):
        return None
    forecaster = Forecaster(measured, subject.point, run.problem, run.options.seed)
    bound = bound_ms(run.problem, forecaster.latency)
    tried = _spread(list(dict.fromkeys([subject.point.candidate, *(point.candidate for point in outcome.front)])))
    on_gpu = bool(run.info["hardware"]["gpus"])
    return Simulation(
        forecaster.latency,
        bound,
        forecaster.error,
        forecaster.points,
        remedies(forecaster, subject, bound, fp16_factor, on_gpu=on_gpu),
        other_slas(forecaster, tried, bound) if math.isfinite(bound) else (),
        forecaster.quickest_ms(tried),
    )


def _spread(candidates: list[Candidate]) -> list[Candidate]:
    step = max(1, math.ceil(len(candidates) / MOST_CANDIDATES))
    return candidates[::step]


def _unfinished(run: FinishedRun) -> str:
    if run.status in ("found", "none"):
        return ""
    how = {
        "running": "is at work or was killed",
        "interrupted": "was interrupted",
        "failed": "failed",
        "left": "left its study to other workers",
    }
    why = str(run.info.get("reason") or "")
    return f"The run {how.get(run.status, run.status)}{f': {why}' if why else ''}. This is from what it measured."
