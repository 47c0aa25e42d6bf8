"""The step that limits the throughput of several models that serve a request, and the setting that would help."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from optimizer.config.search_space import INSTANCE_COUNT, MAX_BATCH_SIZE, MAX_QUEUE_DELAY, OFF
from optimizer.core.candidate import Candidate, fields_of_model
from optimizer.core.trial import Trial
from optimizer.explain.bottleneck import WORTHWHILE, StageBreakdown
from optimizer.explain.forecaster import ChangeKind, Remedy
from optimizer.results import formatting
from optimizer.results.request_steps import StepTimes, limit_sentence, limiting_step

WORTHWHILE_DELAY = 0.1  # least share of the time in the queue for a delay to be worth a change


@dataclass(frozen=True, slots=True)
class StepAdvice:
    """The step that limits the throughput and the setting that would help, with sentences for people.

    ``setting`` has the form of a name in ``Candidate.fields``: ``<model>/<parameter>``, without the model for the one
    whose batches are tuned. It is empty if no setting is known to help.
    """

    step: StepTimes
    setting: str
    reasons: tuple[str, ...]


def advise(stages: StageBreakdown, remedies: Sequence[Remedy], trials: Sequence[Trial]) -> StepAdvice | None:
    """Return the advice for the steps of ``stages``; None if they were not recorded.

    ``remedies`` are the forecast changes of the tuned model, the largest gain first. The advice for another model
    follows from its settings, and from those that ``trials`` have tried.
    """
    step = limiting_step(stages.steps)
    if step is None:
        return None
    candidate, is_tuned = stages.point.candidate, step.model == stages.tuned_model
    if not step.is_saturated:
        setting, sentence = _shorter_queue(step, candidate, is_tuned=is_tuned)
    elif is_tuned:
        setting, sentence = _forecast_setting(remedies, candidate)
    else:
        setting, sentence = _more_capacity(step, candidate, trials)
    return StepAdvice(step, setting, tuple(filter(None, (limit_sentence(stages.steps), sentence))))


def _shorter_queue(step: StepTimes, candidate: Candidate, *, is_tuned: bool) -> tuple[str, str]:
    """Return the delay of a step whose requests wait more than they are computed, while instances are idle."""
    path = MAX_QUEUE_DELAY if is_tuned else f"{step.model}/{MAX_QUEUE_DELAY}"
    delay_us = candidate.max_queue_delay_us if is_tuned else dict(candidate.fields).get(path, 0)
    if delay_us in (0, OFF) or step.queue_ms <= step.compute_ms:
        return "", ""
    if int(delay_us) / 1e3 < WORTHWHILE_DELAY * step.queue_ms:
        return "", ""
    return path, f"A lower {path} than {delay_us} would shorten its queue."


def _forecast_setting(remedies: Sequence[Remedy], candidate: Candidate) -> tuple[str, str]:
    """Return the setting of the tuned model whose change is expected to gain most."""
    batching = MAX_BATCH_SIZE if candidate.dynamic_batching else MAX_QUEUE_DELAY
    settings: dict[ChangeKind, str] = {"more_instances": INSTANCE_COUNT, "larger_batches": batching}
    for remedy in remedies:
        if remedy.kind in settings and remedy.gain is not None and remedy.gain.estimate >= WORTHWHILE:
            setting = settings[remedy.kind]
            gain = formatting.signed_percent(remedy.gain.estimate)
            return setting, f"Another {setting} would help: {remedy.change} ({gain})."
    return "", ""


def _more_capacity(step: StepTimes, candidate: Candidate, trials: Sequence[Trial]) -> tuple[str, str]:
    """Return the setting with which a saturated step that is not tuned may serve more.

    The requests in progress of a model that calls others are limited by its instances, and not by its batches.
    """
    settings = fields_of_model(candidate.fields, step.model)
    tried = [fields_of_model(trial.candidate.fields, step.model) for trial in trials]
    has_batched = any(other.get(MAX_QUEUE_DELAY, OFF) != OFF for other in tried)
    if settings.get(MAX_QUEUE_DELAY) == OFF and not has_batched and not step.calls_others:
        path = f"{step.model}/{MAX_QUEUE_DELAY}"
        return path, f"Its batcher is off: with {path} 0, it would compute waiting requests together."
    path, count = f"{step.model}/{INSTANCE_COUNT}", settings.get(INSTANCE_COUNT)
    if count is None:  # the instances of a step are those of all groups, GPUs and servers together
        return path, f"A higher {path} would help if the device has room; the run did not vary it."
    most = max((int(other.get(INSTANCE_COUNT, count)) for other in tried), default=0)
    if most > int(count):
        return "", f"The run also tried {formatting.count(most, 'instance')} of it, which is not recommended."
    return path, f"A higher {path} than {count} would help if the device has room; the run tried no higher one."
