"""Read values from a Model Analyzer file: a setting of all models or of one, and notes on every key."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TypeAlias

from optimizer.core.candidate import FieldValue
from optimizer.core.errors import BadInputError
from optimizer.core.safe_text import check_file_name, format_value, one_line, scalar_text, show_path
from optimizer.core.yaml_lines import LocatedValue, located_error
from optimizer.model.model_analyzer.keys import NESTED_KEYS, KeySupport, KeyTable, ignored
from optimizer.model.profile_types import suggest
from optimizer.options.values import MAX_INT32

MAX_VALUES = 10_000  # limit of the numbers in a range
BOOLEANS = {"true": True, "yes": True, "on": True, "false": False, "no": False, "off": False}  # as in YAML 1.1
MAX_PATH_CHARACTERS = 120  # limit for a key's path in a note
SEARCH_DISABLED = "run_config_search_disable"
BLS_MODELS = "bls_composing_models"
COMPOSING_MODELS = (BLS_MODELS, "ensemble_composing_models")
CPU_ONLY_MODELS = "cpu_only_composing_models"
PROFILE_CONCURRENTLY = "run_config_profile_models_concurrently_enable"
_OVERRIDDEN = ignored("the model has its own")


@dataclass(frozen=True, slots=True)
class ImportNote:
    """How a key of the file is imported. ``keys``: the path of the key."""

    file: Path
    line: int
    keys: tuple[str, ...]
    key: KeySupport

    @property
    def is_mapped(self) -> bool:
        """Whether the key has an equivalent in tune."""
        return self.key.support == "mapped"

    def __str__(self) -> str:
        path = one_line(".".join(self.keys), MAX_PATH_CHARACTERS)
        return f"{show_path(self.file)}:{self.line}: {path}: {self.key}"


@dataclass(frozen=True, slots=True)
class ValueReader:
    """Reads the values of ``file``, and notes how each key is imported.

    Each method that reads raises BadInputError: ``file:line: key.path: …``. A later note on the same key and line
    replaces an earlier one.
    """

    file: Path
    _support_by_place: dict[tuple[tuple[str, ...], int], KeySupport] = field(default_factory=dict)

    def note(self, where: LocatedValue, support: KeySupport) -> None:
        """Record how the key at ``where`` is imported; nested keys have their own notes."""
        if support != NESTED_KEYS:
            self._support_by_place[where.keys, where.line] = support

    def notes(self) -> tuple[ImportNote, ...]:
        """Return the notes in the order of lines."""
        ordered = sorted(self._support_by_place.items(), key=lambda item: item[0][1])
        return tuple(ImportNote(self.file, line, keys, support) for (keys, line), support in ordered)

    def section(self, where: LocatedValue, support_by_key: KeyTable) -> dict[str, LocatedValue]:
        """Return the keys of a section whose value is not null, and note each as listed in ``support_by_key``."""
        section = self.mapping(where, list(support_by_key))
        for name, child in section.items():
            self.note(child, support_by_key[name])
        return section

    def fault(self, where: LocatedValue, problem: str) -> BadInputError:
        """Return an error at the line of ``where``; the caller raises it."""
        return located_error(str(self.file), where.line, where.keys, problem)

    def mapping(self, where: LocatedValue, allowed_keys: Collection[str] | None = None) -> dict[str, LocatedValue]:
        """Return the keys whose value is not null; all keys must be among ``allowed_keys``."""
        if where.value is None:
            return {}
        if not isinstance(where.value, dict):
            raise self.fault(where, f"{format_value(where.plain())} is not a mapping")
        for key, child in where.value.items():
            if allowed_keys is not None and key not in allowed_keys:
                raise self.fault(child, f"unknown key; {suggest(key, allowed_keys)}")
        return {key: child for key, child in where.value.items() if child.value is not None}

    def names(self, where: LocatedValue) -> list[LocatedValue]:
        """Return the names in a list, or in a text such as ``a, b``, each with its line."""
        if isinstance(where.value, str):
            return [replace(where, value=part.strip()) for part in where.value.split(",") if part.strip()]
        if not isinstance(where.value, tuple):
            raise self.fault(where, f"{format_value(where.plain())} is not a list of names")
        return [replace(item, value=self.text(item)) for item in where.value]

    def name(self, where: LocatedValue) -> str:
        """Return a text that can be the name of a folder."""
        try:
            return check_file_name(self.text(where))
        except ValueError as error:
            raise self.fault(where, str(error)) from None

    def text(self, where: LocatedValue) -> str:
        """Return a scalar as text."""
        if isinstance(where.value, dict | tuple) or where.value is None:
            raise self.fault(where, f"{format_value(where.plain())} is not text")
        return scalar_text(where.value)

    def one_of(self, where: LocatedValue, allowed: Collection[str]) -> str:
        """Return one of the ``allowed`` words."""
        if (text := self.text(where)) not in allowed:
            raise self.fault(where, f"{format_value(text)} is not one of {', '.join(allowed)}")
        return text

    def boolean(self, where: LocatedValue) -> bool:
        """Return true or false."""
        value = BOOLEANS.get(str(where.value).lower())
        if value is None:
            raise self.fault(where, f"{format_value(where.plain())} is neither true nor false")
        return value

    def whole(self, where: LocatedValue, minimum: int = 1) -> int:
        """Return a whole number, which may be quoted, up to the largest that Triton accepts."""
        value = where.value
        if isinstance(value, str) and value.strip().isascii() and value.strip().isdecimal() and len(value) < 20:
            value = int(value)
        if not isinstance(value, int) or isinstance(value, bool) or not minimum <= value <= MAX_INT32:
            problem = f"{format_value(where.plain())} is not a whole number from {minimum} to {MAX_INT32}"
            raise self.fault(where, problem)
        return value

    def positive(self, where: LocatedValue) -> float:
        """Return a number above 0."""
        try:
            number = float(self.text(where)) if not isinstance(where.value, bool) else 0.0
        except ValueError:
            number = 0.0
        if not 0 < number <= MAX_INT32:
            raise self.fault(where, f"{format_value(where.plain())} is not a number above 0 and up to {MAX_INT32}")
        return number

    def numbers(self, where: LocatedValue) -> list[int]:
        """Return one or more whole numbers: ``4``, ``1,2,4``, a list, or ``{start: 2, stop: 6, step: 2}``."""
        if isinstance(where.value, dict):
            return self._range(where)
        if isinstance(where.value, str):
            numbers = [self.whole(replace(where, value=part.strip())) for part in where.value.split(",")]
        else:
            items = where.value if isinstance(where.value, tuple) else (where,)
            numbers = [self.whole(item) for item in items]
        if not numbers:
            raise self.fault(where, "is empty; give at least one number")
        return numbers

    def _range(self, where: LocatedValue) -> list[int]:
        limits = self.mapping(where, ("start", "stop", "step"))
        if not {"start", "stop"} <= limits.keys():
            raise self.fault(where, "a range has start, stop and, if not 1, step")
        start, stop = self.whole(limits["start"]), self.whole(limits["stop"])
        numbers = range(start, stop + 1, self.whole(limits["step"]) if "step" in limits else 1)
        if not 0 < len(numbers) <= MAX_VALUES:
            raise self.fault(where, f"start {start}, stop {stop}: a range has 1 to {MAX_VALUES} numbers")
        return list(numbers)

    def path(self, where: LocatedValue) -> Path:
        """Return a path that exists in the current folder, as for Model Analyzer, or in the file's folder."""
        text = self.text(where)
        if not text or not text.isprintable():
            raise self.fault(where, f"{format_value(text)} is not a path")
        try:
            candidates = [path for path in (Path(text), self.file.parent / text) if path.exists()]
            distinct = {path.resolve() for path in candidates}
        except (OSError, RuntimeError, ValueError):  # too long, a loop of links, no permission
            raise self.fault(where, f"{format_value(text)} cannot be followed") from None
        if not candidates:
            searched = "" if Path(text).is_absolute() else " in the current folder or in this file's folder"
            raise self.fault(where, f"{format_value(text)} does not exist{searched}")
        if len(distinct) > 1:
            problem = f"{format_value(text)} exists in the current folder and in this file's folder; write which"
            raise self.fault(where, problem)
        return candidates[0]


@dataclass(frozen=True)
class ModelSettings:
    """The settings for one model: those at the top of the file for all models, and those of the model itself."""

    reader: ValueReader
    file_keys: Mapping[str, LocatedValue]
    model_keys: Mapping[str, LocatedValue]

    def find(self, name: str) -> LocatedValue | None:
        """Return the model's own setting if it is not empty, else the common one."""
        of_model, of_file = self.model_keys.get(name), self.file_keys.get(name)
        if of_model is None or of_model.value in ((), {}):
            return of_file
        if of_file is not None:
            self.reader.note(of_file, _OVERRIDDEN)
        return of_model

    def section(self, name: str, support_by_key: KeyTable) -> dict[str, LocatedValue]:
        """Return the keys of the section that ``find`` returns, and note each."""
        where = self.find(name)
        return {} if where is None else self.reader.section(where, support_by_key)

    def parameters(self, support_by_key: KeyTable) -> dict[str, LocatedValue]:
        """Return the model's own parameters, completed by common ones.

        A model with its own request rate does not take a common concurrency.
        """
        of_model: Mapping[str, LocatedValue] = {}
        if "parameters" in self.model_keys:
            of_model = self.reader.section(self.model_keys["parameters"], support_by_key)
        parameters = {
            name: where
            for name in support_by_key
            if (where := of_model.get(name, self.file_keys.get(name))) is not None
        }
        overridden = of_model.keys() & self.file_keys.keys()
        if "request_rate" in of_model and "concurrency" not in of_model and "concurrency" in parameters:
            del parameters["concurrency"]
            overridden |= {"concurrency"}
        for name in overridden:
            self.reader.note(self.file_keys[name], _OVERRIDDEN)
        return parameters

    def whole(self, name: str) -> int | None:
        """Return a common setting as a whole number, or None if it is missing."""
        return self.reader.whole(self.file_keys[name]) if name in self.file_keys else None

    def is_true(self, name: str) -> bool:
        """Return whether a common setting is true; a missing one is not."""
        return name in self.file_keys and self.reader.boolean(self.file_keys[name])


@dataclass(frozen=True, slots=True)
class ConfiguredValue:
    """A placeholder for the value in config.pbtxt.

    With ``batching``, dynamic batching is on even if config.pbtxt has none.
    """

    batching: bool = False


SweepValue: TypeAlias = "FieldValue | ConfiguredValue"


@dataclass(frozen=True, slots=True)
class DimensionChoices:
    """The values of one dimension of the space and the place in the file that lists them."""

    values: tuple[SweepValue, ...]
    where: LocatedValue


@dataclass(frozen=True)
class ImportedSettings:
    """The settings of a file in tune's terms, which the functions ``import_…`` fill in.

    ``options``: tune's options by name. ``sections``: values of a profile by section and key, such as
    ``("sla", "p99")``. ``choices``: dimensions of the search space by ``SPACE_KEYS`` or path in ModelConfig.
    ``composing``: those of composing models, by the name of the model.
    """

    options: dict[str, str | int] = field(default_factory=dict)
    sections: dict[tuple[str, str], LocatedValue] = field(default_factory=dict)
    choices: dict[str, DimensionChoices] = field(default_factory=dict)
    composing: dict[str, dict[str, DimensionChoices]] = field(default_factory=dict)
