"""Values as Model Analyzer's YAML spells them: lists with commas, ranges, numbers in quotes."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace
from pathlib import Path

from optimizer.errors import BadInputError
from optimizer.profile.faults import meant
from optimizer.profile.safe_paths import plain_name
from optimizer.profile.values import INT32_MAX
from optimizer.profile.yaml_lines import Located, fault, show

MOST_VALUES = 10_000  # of a range
WORDS = {"true": True, "yes": True, "on": True, "false": False, "no": False, "off": False}  # YAML 1.1's too


@dataclass(frozen=True, slots=True)
class Values:
    """Reads the values of ``file``. Each method raises BadInputError: ``file:line: key.path: …``."""

    file: Path

    def fault(self, where: Located, problem: str) -> BadInputError:
        return fault(str(self.file), where.line, where.keys, problem)

    def mapping(self, where: Located, known: Collection[str] | None = None) -> dict[str, Located]:
        """Its keys that are given (null is not); all of them must be ``known``."""
        if where.value is None:
            return {}
        if not isinstance(where.value, dict):
            raise self.fault(where, f"{show(where.plain())} is not a mapping")
        for key, child in where.value.items():
            if known is not None and key not in known:
                raise self.fault(child, f"unknown key; {meant(key, known)}")
        return {key: child for key, child in where.value.items() if child.value is not None}

    def names(self, where: Located) -> list[Located]:
        """``a, b`` or a list of texts: the texts, each with its line."""
        if isinstance(where.value, str):
            return [replace(where, value=part.strip()) for part in where.value.split(",") if part.strip()]
        if not isinstance(where.value, tuple):
            raise self.fault(where, f"{show(where.plain())} is not a list of names")
        return [replace(one, value=self.text(one)) for one in where.value]

    def name(self, where: Located) -> str:
        """One that can name a folder."""
        try:
            return plain_name(self.text(where))
        except ValueError as error:
            raise self.fault(where, str(error)) from None

    def text(self, where: Located) -> str:
        if isinstance(where.value, dict | tuple) or where.value is None:
            raise self.fault(where, f"{show(where.plain())} is not text")
        return str(where.value).lower() if isinstance(where.value, bool) else str(where.value)

    def one_of(self, where: Located, known: Collection[str]) -> str:
        if (text := self.text(where)) not in known:
            raise self.fault(where, f"{show(text)} is not one of {', '.join(known)}")
        return text

    def boolean(self, where: Located) -> bool:
        found = WORDS.get(str(where.value).lower())
        if found is None:
            raise self.fault(where, f"{show(where.plain())} is neither true nor false")
        return found

    def whole(self, where: Located, least: int = 1) -> int:
        """A whole number, also in quotes, up to what Triton takes."""
        value = where.value
        if isinstance(value, str) and value.strip().isascii() and value.strip().isdecimal() and len(value) < 20:
            value = int(value)
        if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= INT32_MAX:
            raise self.fault(where, f"{show(where.plain())} is not a whole number from {least} to {INT32_MAX}")
        return value

    def positive(self, where: Located) -> float:
        try:
            number = float(self.text(where)) if not isinstance(where.value, bool) else 0.0
        except ValueError:
            number = 0.0
        if not 0 < number <= INT32_MAX:
            raise self.fault(where, f"{show(where.plain())} is not a number above 0 and up to {INT32_MAX}")
        return number

    def numbers(self, where: Located) -> list[int]:
        """``4``, ``1,2,4``, a list, or a range ``{start: 2, stop: 6, step: 2}`` with its end. Not empty."""
        if isinstance(where.value, dict):
            return self._range(where)
        if isinstance(where.value, str):
            found = [self.whole(replace(where, value=part.strip())) for part in where.value.split(",")]
        else:
            each = where.value if isinstance(where.value, tuple) else (where,)
            found = [self.whole(one) for one in each]
        if not found:
            raise self.fault(where, "is empty; give at least one number")
        return found

    def _range(self, where: Located) -> list[int]:
        given = self.mapping(where, ("start", "stop", "step"))
        if not {"start", "stop"} <= given.keys():
            raise self.fault(where, "a range has start, stop and, if not 1, step")
        start, stop = self.whole(given["start"]), self.whole(given["stop"])
        found = range(start, stop + 1, self.whole(given["step"]) if "step" in given else 1)
        if not 0 < len(found) <= MOST_VALUES:
            raise self.fault(where, f"start {start}, stop {stop}: a range has 1 to {MOST_VALUES} numbers")
        return list(found)

    def path(self, where: Located) -> Path:
        """A path that is there: from the current folder, as Model Analyzer takes it, or from the file's."""
        text = self.text(where)
        if not text or not text.isprintable():
            raise self.fault(where, f"{show(text)} is not a path")
        try:
            candidates = [path for path in (Path(text), self.file.parent / text) if path.exists()]
            distinct = {path.resolve() for path in candidates}
        except (OSError, RuntimeError, ValueError):  # too long, a loop of links, no permission
            raise self.fault(where, f"{show(text)} cannot be followed") from None
        if not candidates:
            looked = "" if Path(text).is_absolute() else " in the current folder or beside this file"
            raise self.fault(where, f"{show(text)} does not exist{looked}")
        if len(distinct) > 1:
            raise self.fault(where, f"{show(text)} is both in the current folder and beside this file; write which")
        return candidates[0]
