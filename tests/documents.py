"""The README and the pages of docs/ and benchmarks/: their prose and their fenced blocks."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
README = ROOT / "README.md"
PAGES_WITH_COMMANDS = (README, *sorted((ROOT / "docs").glob("*.md")))
SHELLS = ("sh", "bash", "console")
SECTIONS_OF_RUN = (
    *("problem", "hardware", "fingerprint", "confirmation_plan", "times"),
    *("result", "result.confirmation"),
)
_FENCED = re.compile(
    r"^(?:<!-- not run: (?P<reason>[^\n]+) -->\n)?```(?P<language>[\w{}-]*)\n(?P<text>.*?)^```$",
    re.MULTILINE | re.DOTALL,
)


@dataclass(frozen=True)
class Block:
    """A fenced block. ``not_run`` is the reason why no test runs its commands; None if there is no mark above it."""

    language: str
    text: str
    not_run: str | None = None

    @property
    def commands(self) -> list[str]:
        """The lines that are neither empty nor comments."""
        return [line for line in self.text.splitlines() if line.strip() and not line.startswith("#")]


def blocks(page: Path, *languages: str) -> list[Block]:
    """Return the fenced blocks of a page, all or those in ``languages``."""
    found = _FENCED.finditer(page.read_text(encoding="utf-8"))
    every = [Block(match["language"], match["text"], match["reason"]) for match in found]
    return [block for block in every if not languages or block.language in languages]


def prose(page: Path) -> str:
    """Return the text of a page without its fenced blocks."""
    return _FENCED.sub("", page.read_text(encoding="utf-8"))


def run_commands(page: Path) -> list[str]:
    """Return the ``tune`` commands of a page that a test runs."""
    shown = (block for block in blocks(page, "sh") if block.not_run is None)
    return [line for block in shown for line in block.commands if line.startswith("tune ")]


def undocumented_keys(info: Mapping[str, Any]) -> list[str]:
    """Return the keys of a run.json that docs/reference-files.md lacks."""
    page = (ROOT / "docs" / "reference-files.md").read_text(encoding="utf-8")
    return [key for key in _keys(info) if f"\n| `{key}` |" not in page]


def _keys(info: Mapping[str, Any], prefix: str = "") -> Iterator[str]:
    for name, value in info.items():
        yield prefix + name
        if prefix + name in SECTIONS_OF_RUN and isinstance(value, dict):
            yield from _keys(value, f"{prefix}{name}.")
