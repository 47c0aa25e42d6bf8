"""The README and the pages of docs/ and benchmarks/: their prose and their fenced blocks."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
README = ROOT / "README.md"
PAGES_WITH_COMMANDS = (README, *sorted((ROOT / "docs").glob("*.md")))
SHELLS = ("sh", "bash", "console")
_FENCED = re.compile(
    r"^(?:<!-- not run: (?P<reason>.+) -->\n)?```(?P<language>[\w{}-]*)\n(?P<text>.*?)^```$", re.MULTILINE | re.DOTALL
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
