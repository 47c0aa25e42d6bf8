"""What became of each key of a file, told by the line that it stands on."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from optimizer.model_analyzer.keys import KEY_BY_KEY, Key, Keys
from optimizer.profile.yaml_lines import Located
from optimizer.untrusted import one_line

LONGEST_KEYS = 120  # characters


@dataclass(frozen=True, slots=True)
class Note:
    """``keys``: the path of a key in the file."""

    file: Path
    line: int
    keys: tuple[str, ...]
    key: Key

    @property
    def is_mapped(self) -> bool:
        return self.key.fate == "mapped to"

    def __str__(self) -> str:
        path = one_line(".".join(self.keys), LONGEST_KEYS)
        return f"{one_line(str(self.file))}:{self.line}: {path}: {self.key}"


@dataclass(frozen=True)
class Notes:
    """Collects them: one for each place, the last that was said of it."""

    file: Path
    _said: dict[tuple[tuple[str, ...], int], Key] = field(default_factory=dict)

    def say(self, where: Located, key: Key) -> None:
        if key != KEY_BY_KEY:
            self._said[where.keys, where.line] = key

    def say_each(self, given: dict[str, Located], known: Keys) -> None:
        for name, where in given.items():
            self.say(where, known[name])

    def __iter__(self) -> Iterator[Note]:
        """By line."""
        for (keys, line), key in sorted(self._said.items(), key=lambda said: said[0][1]):
            yield Note(self.file, line, keys, key)
