"""SUITE.yaml: models, SLAs and targets, multiplied out to the entries of a batch.

Options of an entry are those of ``tune run``, by their names; the command line's own code reads them. Paths start
from the suite's folder.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any, Final

from pydantic import ValidationError

from objectives.sla import Constraint
from optimizer.arguments import target as target_flags
from optimizer.arguments.run import read_run_arguments
from optimizer.batches.suite_file import DefaultsSection, EntrySection, SuiteFile
from optimizer.command_line import command_line
from optimizer.errors import BadInputError
from optimizer.options import RunOptions
from optimizer.profile import yaml_lines
from optimizer.profile.faults import fault_lines
from optimizer.profile.schema import Section, SlaSection
from optimizer.profile.yaml_lines import Located, fault, show
from optimizer.store.relative_paths import as_given_in
from optimizer.untrusted import read_bytes

MOST_ENTRIES: Final = 1000
STARTS_WITH: Final = "a suite has a line 'entries:' with a list of models"
REPEATED: Final = ("shape", "input-range", *(flag.removeprefix("--") for flag in target_flags.REPEATED))


@dataclass(frozen=True)
class Entry:
    """One run of the batch. ``model``, ``sla`` and ``target`` are what it is known by, from batch to batch."""

    model: str
    sla: str
    target: str
    options: RunOptions
    command: str

    @property
    def label(self) -> str:
        return " · ".join(filter(None, (self.model, self.sla, self.target)))


@dataclass(frozen=True)
class Suite:
    """``budget_seconds``: of all entries together."""

    name: str
    path: Path
    budget_seconds: float
    entries: tuple[Entry, ...]


def read_suite(path: Path) -> Suite:
    """Raises BadInputError, with a line for each fault: ``file:line: key: …``."""
    data = read_bytes(path, yaml_lines.MAX_BYTES, "a suite is a page of YAML")
    source = yaml_lines.parse(data, str(path), hint=STARTS_WITH)
    if not isinstance(source.value, dict):
        raise fault(str(path), source.line, (), f"{show(source.plain())} is not a suite; {STARTS_WITH}")
    try:
        file = SuiteFile.model_validate(source.plain())
    except ValidationError as error:
        raise BadInputError("\n".join(fault_lines(error, source, str(path), known=_known_keys))) from None
    entries = _entries(file, source, path)
    usual = RunOptions("").budget_seconds * len(entries)
    return Suite(file.name or path.stem, path, file.budget or usual, tuple(entries))


def _known_keys(location: Sequence[str | int], keys: Sequence[str]) -> list[str]:
    sections: dict[str | int, type[Section]] = {
        "sla": SlaSection,
        "defaults": DefaultsSection,
        "entries": EntrySection,
    }
    section = next((sections[step] for step in reversed(location) if step in sections), SuiteFile)
    return list(section.model_fields)


def _entries(file: SuiteFile, source: Located, path: Path) -> list[Entry]:
    found: dict[str, Entry] = {}
    for index, given in enumerate(file.entries):
        slas = given.sla or file.defaults.sla or (SlaSection(),)
        targets = given.target or file.defaults.target or ({"target": "embedded"},)
        options = {**(file.defaults.options or {}), **(given.options or {})}
        here = source.at(("entries", index))
        for model, sla, target in product(given.model, slas, targets):
            try:
                entry = _entry(given.name or model, model, sla, target, options, path.parent)
            except BadInputError as error:
                raise _at_its_option(source, index, path, str(error)) from None
            if entry.label in found:
                told = f"{entry.label} is there already; give this entry a name of its own, name: …"
                raise fault(str(path), here.line, here.keys, told)
            found[entry.label] = entry
            if len(found) > MOST_ENTRIES:
                raise fault(str(path), here.line, here.keys, f"more than {MOST_ENTRIES:,} runs; make several suites")
    return list(found.values())


def _entry(
    name: str, model: str, sla: SlaSection, target: Mapping[str, Any], options: Mapping[str, Any], folder: Path
) -> Entry:
    """Raises BadInputError, as the command line would."""
    bounds = sla.constraints()
    words = [f"--sla-{bound.metric.removeprefix('latency-')}={bound.bound!r}ms" for bound in bounds]
    words += _words(target) + _words(options)
    given = read_run_arguments([*words, "--", model]).options
    return Entry(name, _sla(bounds), _served(given), as_given_in(folder or Path(), given), command_line(given))


def _words(options: Mapping[str, Any]) -> list[str]:
    """Each value in one word with its flag: none can pass for a flag of its own."""
    words: list[str] = []
    for name, value in options.items():
        values = value if isinstance(value, tuple) else (value,)
        if value is True:
            words.append(f"--{name}")
        elif name in REPEATED:
            words += [f"--{name}={one}" for one in values]
        elif value is not None and value is not False:
            words.append(f"--{name}={','.join(map(str, values))}")
    return words


def _sla(bounds: Sequence[Constraint]) -> str:
    return " and ".join(map(str, sorted(bounds, key=lambda bound: bound.metric)))


def _served(options: RunOptions) -> str:
    """What is not the embedded server, with what tells it from others of its kind."""
    of = {"local": options.tritonserver, "docker": options.docker_image, "remote": options.url}
    return "" if options.target == "embedded" else " ".join(filter(None, (options.target, of[options.target])))


def _at_its_option(source: Located, index: int, path: Path, message: str) -> BadInputError:
    """At the line of the option that the message names first, where it is in the file."""
    found = re.search("--([a-z][a-z0-9-]*)", message)
    flag = found[1] if found else ""
    entry = source.at(("entries", index))
    for place in (("entries", index, "options"), ("entries", index, "target"), ("defaults", "options")):
        section = source.at(place)
        if isinstance(section.value, dict) and flag in section.value:
            here = section.value[flag]
            return fault(str(path), here.line, here.keys, message)
    return fault(str(path), entry.line, entry.keys, message)
