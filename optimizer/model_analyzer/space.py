"""``model_config_parameters`` and the limits of Model Analyzer's search: what may vary.

Its brute force changes what is listed and leaves the rest as config.pbtxt has it. Without a list, and in its other
modes, the rest is searched too.
"""

from __future__ import annotations

from typing import Final

from optimizer.deployment import COUNT
from optimizer.deployment import SIZE as BATCH
from optimizer.model_analyzer.beside import COMPOSING
from optimizer.model_analyzer.keys import ignored
from optimizer.model_analyzer.requests import DISABLED
from optimizer.model_analyzer.source import Part, Source
from optimizer.model_analyzer.sweeps import KIND, MOST_ALTERNATIVES, OWN, AsGiven, Choices, read_sweeps

MODES: Final = ("brute", "quick", "optuna")
BATCH_LIMITS: Final = ("run_config_search_min_model_batch_size", "run_config_search_max_model_batch_size")
COUNT_LIMITS: Final = ("run_config_search_min_instance_count", "run_config_search_max_instance_count")
USUAL: Final = {BATCH_LIMITS: (1, 128), COUNT_LIMITS: (1, 5)}


def space(source: Source) -> Part:
    """Raises BadInputError."""
    part, mode = Part(), _mode(source)
    listed = source.own.get("model_config_parameters")
    if listed is not None:
        part.choices.update(read_sweeps(listed, source.values, source.notes))
    if "cpu_only" in source.own and source.values.boolean(source.own["cpu_only"]):
        part.choices.setdefault(KIND, Choices(("KIND_CPU",), source.own["cpu_only"]))
    with_parts = any(name in source.given for name in COMPOSING)  # then it never is brute force
    brute = mode == "brute" and not with_parts
    if source.is_true(DISABLED) or (brute and listed is not None and source.values.mapping(listed)):
        where = listed or source.given[DISABLED]
        part.choices.update({name: Choices((AsGiven(),), where) for name in OWN if name not in part.choices})
    _limit(source, part, BATCH, BATCH_LIMITS)
    _limit(source, part, COUNT, COUNT_LIMITS)
    trials = source.whole("optuna_max_trials")
    if trials is not None and mode == "optuna":
        part.flags.append(f"--max-trials={trials}")
    elif trials is not None:
        source.notes.say(source.given["optuna_max_trials"], ignored(f"the search mode is {mode}"))
    return part


def _mode(source: Source) -> str:
    where = source.given.get("run_config_search_mode")
    return MODES[0] if where is None else source.values.one_of(where, MODES)


def _limit(source: Source, part: Part, name: str, limits: tuple[str, str]) -> None:
    given = [source.given[limit] for limit in limits if limit in source.given]
    if not given:
        return
    low, high = (source.whole(limit) or usual for limit, usual in zip(limits, USUAL[limits], strict=True))
    if low > high:
        raise source.values.fault(given[0], f"the least, {low}, is above the most, {high}")
    if name in part.choices:
        for where in given:
            source.notes.say(where, ignored("model_config_parameters or run_config_search_disable decides"))
        return
    if name == COUNT and high - low >= MOST_ALTERNATIVES:
        raise source.values.fault(given[-1], f"{low} to {high} are too many to try")
    doubled = [low << power for power in range((high // low).bit_length())]
    part.choices[name] = Choices(tuple(doubled if name == BATCH else range(low, high + 1)), given[-1])
