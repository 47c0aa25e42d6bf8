"""The models beside MODEL: those that it is made of, and those that are profiled at the same time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Final

from optimizer.model_analyzer.keys import PERF_ANALYZER_FLAGS, unsupported
from optimizer.model_analyzer.source import Part, Source
from optimizer.profile.yaml_lines import Located

COMPOSING: Final = ("bls_composing_models", "ensemble_composing_models")
CONCURRENTLY: Final = "run_config_profile_models_concurrently_enable"
_BLS_FLAG: Final = "bls-composing-models"
_SETTINGS: Final = unsupported("what may vary of it: write `space.models` into the printed profile")


def beside(source: Source, others: Sequence[Located]) -> Part:
    """``others``: the names of the file's other models. Raises BadInputError."""
    part = Part()
    for key in COMPOSING:
        if (where := source.given.get(key)) is None:
            continue
        names = _names(source, where)
        if key == COMPOSING[0] and names:  # an ensemble's own are read from it
            part.sections["model", key] = replace(where, value=tuple(names))
    section = source.section("perf_analyzer_flags", PERF_ANALYZER_FLAGS)
    if (where := section.get(_BLS_FLAG)) is not None and ("model", COMPOSING[0]) not in part.sections:
        part.sections["model", COMPOSING[0]] = replace(where, value=tuple(source.values.names(where)))
    if source.is_true(CONCURRENTLY) and others:
        part.sections["model", "concurrent_models"] = replace(source.given[CONCURRENTLY], value=tuple(others))
    return part


def _names(source: Source, where: Located) -> list[Located]:
    """In a mapping by name, a list, or a list of such mappings; what is said of one of them is told."""
    if isinstance(where.value, dict):
        for name, child in where.value.items():
            if child.value not in (None, (), {}):
                source.notes.say(child, _SETTINGS)
            source.values.name(replace(child, value=name))
        return [replace(child, value=name) for name, child in where.value.items()]
    if isinstance(where.value, tuple):
        return [name for item in where.value for name in _names(source, item)]
    return source.values.names(where)
