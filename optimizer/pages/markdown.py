"""The answer and the tables of runs as Markdown, to be pasted into documents."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from optimizer.pages.content import Section
from optimizer.report.templates import environment
from optimizer.untrusted import one_line

TEMPLATE = "report.md.j2"
_SPECIAL = re.compile(r"[\\`*_\[\]<>|~&$!#]|(?<=[a-z]):(?=//)")  # what Markdown or HTML within it could read


def markdown(sections: Sequence[Section]) -> str:
    """GitHub's dialect, which has tables."""
    templates = environment(Path(__file__).parent, html=False)  # `plain` escapes
    templates.filters |= {"plain": _plain, "fence": _fence}
    return templates.get_template(TEMPLATE).render(sections=sections).strip() + "\n"


def _plain(text: str) -> str:
    """On one line, and read as nothing but text."""
    return _SPECIAL.sub(lambda found: f"\\{found[0]}", one_line(text))


def _fence(text: str) -> str:
    """Longer than any row of backticks in ``text``."""
    longest = max(map(len, re.findall("`+", text)), default=0)
    return "`" * max(3, longest + 1)
