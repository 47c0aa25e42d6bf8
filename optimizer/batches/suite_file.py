"""The sections of SUITE.yaml. ``optimizer.batches.suite`` multiplies them out."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Final, TypeVar

from pydantic import BeforeValidator, PlainValidator

from optimizer.arguments import target as target_flags
from optimizer.arguments.values import budget_ms
from optimizer.profile.faults import meant
from optimizer.profile.schema import Section, SlaSection
from optimizer.profile.values import Key, Name, Some
from optimizer.profile.yaml_lines import show

T = TypeVar("T")

OPTIONS: Final = (
    *("min-throughput", "max-memory", "min-score", "confidence", "no-output-check", "objective"),
    *("model-repository", "bls-composing-models", "concurrent-models", "variants", "model-warmup", "protocol"),
    *("load", "arrivals", "measurement-interval", "server-cpus", "client-cpus"),
    *("request-batch-size", "input-data", "shape", "input-range", "string-data", "string-length"),
    *("max-trials", "search", "seed", "warm-start", "storage"),
)
TARGET_OPTIONS: Final = ("target", *(flag.removeprefix("--") for flag in target_flags.FLAGS))


def _listed(value: object) -> object:
    return value if isinstance(value, tuple) else (value,)


def _target(value: object) -> dict[str, Any]:
    """``docker`` as ``{target: docker}``."""
    return _options({"target": value} if isinstance(value, str) else value, TARGET_OPTIONS)


def _run_options(value: object) -> dict[str, Any]:
    return _options(value, OPTIONS)


def _options(value: object, known: Sequence[str]) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise ValueError(f"{show(value)} is not a mapping of options of `tune run`")
    for name, given in value.items():
        if name not in known:
            raise ValueError(f"{show(name)} is no option of an entry; {meant(name, known)}")
        if isinstance(given, dict) or (isinstance(given, tuple) and any(isinstance(v, tuple | dict) for v in given)):
            raise ValueError(f"{name}: {show(given)} is neither a value nor a list of values")
    return value


def _budget(value: object) -> float:
    """In seconds."""
    try:
        return budget_ms(str(value)) / 1000
    except ValueError as error:
        raise ValueError(f"{show(value)}: {error}") from None


OneOrMore = Annotated[Some[T], BeforeValidator(_listed)]
Target = Annotated[dict[str, Any], PlainValidator(_target)]
Options = Annotated[dict[str, Any], PlainValidator(_run_options)]


class DefaultsSection(Section):
    """What entries have that do not say otherwise; each option counts by itself."""

    sla: OneOrMore[SlaSection] | None = None
    target: OneOrMore[Target] | None = None
    options: Options | None = None


class EntrySection(DefaultsSection):
    """One or several models, SLAs and targets, of which every combination is a run. ``name`` is what tells it from
    another entry of the same model, SLA and target."""

    model: OneOrMore[Key]
    name: Key | None = None


class SuiteFile(Section):
    name: Name | None = None
    budget: Annotated[float | None, PlainValidator(_budget)] = None
    defaults: DefaultsSection = DefaultsSection()
    entries: Some[EntrySection]
