"""A suite: the file that lists the runs of ``tune batch``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import product
from pathlib import Path
from typing import Annotated, Any, Final, TypeVar

from pydantic import BeforeValidator, PlainValidator, ValidationError

from objectives.sla import Sla
from optimizer.core import yaml_lines
from optimizer.core.errors import BadInputError
from optimizer.core.safe_text import format_value, read_bytes
from optimizer.core.yaml_lines import LocatedValue, located_error
from optimizer.model.profile_schema import ProfileSection, SlaSection
from optimizer.model.profile_types import NonEmpty, PlainName, PrintableText, fault_lines, parsed_by, suggest
from optimizer.options.command_line import command_line
from optimizer.options.option_reader import move_options, run_options
from optimizer.options.run_options import DEFAULTS, RunOptions
from optimizer.options.table import OPTIONS, TARGET_OPTIONS
from optimizer.options.values import OptionError, format_number, parse_budget_seconds
from optimizer.study.run_request import resolve_warm_start

T = TypeVar("T")

TARGET_OPTION_NAMES: Final = tuple(option.name for option in TARGET_OPTIONS)
ENTRY_OPTIONS: Final = tuple(
    option.name for option in OPTIONS if "batch" in option.taken_by and option not in TARGET_OPTIONS
)
MAX_ENTRIES: Final = 1000
HINT: Final = "a suite has a line 'entries:' with a list of models"


def _read_target(value: object) -> dict[str, Any]:
    """Return the options of a target; the text ``docker`` stands for ``{target: docker}``."""
    return _read_options({"target": value} if isinstance(value, str) else value, TARGET_OPTION_NAMES)


def _read_options(value: object, allowed: Sequence[str]) -> dict[str, Any]:
    """Return ``value``, a mapping of options. Raises ValueError for another value, or an option not ``allowed``."""
    if not isinstance(value, dict):
        raise ValueError(f"{format_value(value)} is not a mapping of options of `tune run`")
    for name, setting in value.items():
        if name not in allowed:
            raise ValueError(f"{format_value(name)} is not an option of an entry; {suggest(name, allowed)}")
        elements = setting if isinstance(setting, tuple) else (setting,)
        if any(isinstance(element, tuple | dict) for element in elements):
            raise ValueError(f"{name}: {format_value(setting)} is neither a value nor a list of values")
    return value


OneOrMore = Annotated[NonEmpty[T], BeforeValidator(lambda value: value if isinstance(value, tuple) else (value,))]
TargetOptions = Annotated[dict[str, Any], PlainValidator(_read_target)]
EntryOptions = Annotated[dict[str, Any], PlainValidator(partial(_read_options, allowed=ENTRY_OPTIONS))]


class DefaultsSection(ProfileSection):
    """Defaults of the entries; an entry overrides single options."""

    sla: OneOrMore[SlaSection] | None = None
    target: OneOrMore[TargetOptions] | None = None
    options: EntryOptions | None = None


class EntrySection(DefaultsSection):
    """One or several models, SLAs and targets; every combination of them is a run.

    ``name`` distinguishes the entry from another one of the same model, SLA and target.
    """

    model: OneOrMore[PrintableText]
    name: PrintableText | None = None


class SuiteFile(ProfileSection):
    """The content of a suite's file."""

    name: PlainName | None = None
    budget: Annotated[float | None, parsed_by(lambda value: parse_budget_seconds(str(value)))] = None
    defaults: DefaultsSection = DefaultsSection()
    entries: NonEmpty[EntrySection]


@dataclass(frozen=True)
class SuiteEntry:
    """One run of a batch; ``model``, ``sla`` and ``target`` identify it from batch to batch."""

    model: str
    sla: str
    target: str
    options: RunOptions
    command: str

    @property
    def label(self) -> str:
        """The name of the entry in tables."""
        return " · ".join(filter(None, (self.model, self.sla, self.target)))


@dataclass(frozen=True)
class Suite:
    """The runs of a batch; ``budget_seconds`` is shared by all of them."""

    name: str
    path: Path
    budget_seconds: float
    entries: tuple[SuiteEntry, ...]


def read_suite(path: Path) -> Suite:
    """Return the suite in a file. Raises BadInputError, with a line ``file:line: key: …`` for each fault."""
    data = read_bytes(path, yaml_lines.MAX_BYTES, "a suite is a page of YAML")
    source = yaml_lines.parse(data, str(path), hint=HINT)
    if not isinstance(source.value, dict):
        raise located_error(str(path), source.line, (), f"{format_value(source.plain())} is not a suite; {HINT}")
    if "model" in source.value and "entries" not in source.value:
        problem = "this is the profile of a model; tune it with `tune FILE`, or name it in the entries of a suite"
        raise located_error(str(path), source.line, (), problem)
    if "profile_models" in source.value:
        problem = (
            "this is a configuration of Model Analyzer; tune its models with `tune --from-model-analyzer FILE`, or "
            "name their folders in the entries of a suite"
        )
        raise located_error(str(path), source.line, (), problem)
    try:
        file = SuiteFile.model_validate(source.plain())
    except ValidationError as error:
        raise BadInputError("\n".join(fault_lines(error, source, str(path), allowed_keys=_allowed_keys))) from None
    entries = _read_entries(file, source, path)
    budget_seconds = file.budget or DEFAULTS.budget_seconds * len(entries)
    return Suite(file.name or path.stem, path, budget_seconds, tuple(entries))


def _allowed_keys(location: Sequence[str | int], keys: Sequence[str]) -> list[str]:
    """Return the keys of the section at ``location``, for the message about an unknown key."""
    sections: dict[str | int, type[ProfileSection]] = {
        "sla": SlaSection,
        "defaults": DefaultsSection,
        "entries": EntrySection,
    }
    section = next((sections[step] for step in reversed(location) if step in sections), SuiteFile)
    return list(section.model_fields)


def _read_entries(file: SuiteFile, source: LocatedValue, path: Path) -> list[SuiteEntry]:
    """Return a run for each combination of model, SLA and target of each section. Raises BadInputError."""
    entries: dict[str, SuiteEntry] = {}
    for index, section in enumerate(file.entries):
        slas = section.sla or file.defaults.sla or (SlaSection(),)
        targets = section.target or file.defaults.target or ({"target": "embedded"},)
        options = {**(file.defaults.options or {}), **(section.options or {})}
        place = source.at(("entries", index))
        for model, sla, target in product(section.model, slas, targets):
            try:
                entry = _read_entry(section.name or model, model, sla, {**target, **options}, path.parent)
            except OptionError as error:
                raise _at_option(source, index, path, error) from None
            if entry.label in entries:
                problem = f"{entry.label} is in the suite already; give this entry a name of its own, name: …"
                raise located_error(str(path), place.line, place.keys, problem)
            entries[entry.label] = entry
            if len(entries) > MAX_ENTRIES:
                problem = f"more than {MAX_ENTRIES:,} runs; make several suites"
                raise located_error(str(path), place.line, place.keys, problem)
    return list(entries.values())


def _read_entry(name: str, model: str, sla: SlaSection, values: Mapping[str, Any], folder: Path) -> SuiteEntry:
    """Return one run. Relative paths in ``values``, its options, start from ``folder``. Raises OptionError."""
    bounds_ms = dict(sorted(sla.latency_bounds_ms().items()))
    latencies = [f"{name}<={format_number(bound_ms)}ms" for name, bound_ms in bounds_ms.items()]
    options = run_options(model, {"sla": latencies, **values})
    return SuiteEntry(
        model=name,
        sla=str(Sla.from_bounds(bounds_ms)),
        target=_target_label(options),
        options=resolve_warm_start(move_options(folder, options), options.warm_start, folder),
        command=command_line(options),
    )


def _target_label(options: RunOptions) -> str:
    """Return the target with what identifies it; empty for the embedded server."""
    values = (options.tritonserver, options.docker_image, options.url)  # each is an option of one target
    return "" if options.target == "embedded" else " ".join(filter(None, (options.target, *values)))


def _at_option(source: LocatedValue, index: int, path: Path, error: OptionError) -> BadInputError:
    """Return the error at the line of its option if that is in the file, else at the line of the entry."""
    entry = source.at(("entries", index))
    for place in (("entries", index, "options"), ("entries", index, "target"), ("defaults", "options")):
        section = source.at(place)
        if isinstance(section.value, dict) and error.option in section.value:
            option = section.value[error.option]
            return located_error(str(path), option.line, option.keys, str(error))
    return located_error(str(path), entry.line, entry.keys, str(error))
