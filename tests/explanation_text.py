"""The text that ``tune explain`` prints."""

from __future__ import annotations

import io

from rich.console import Console

from optimizer.explain.explain_report import print_explanation
from optimizer.explain.explanation import Explanation


def explanation_text(explanation: Explanation, width: int = 80) -> str:
    text = io.StringIO()
    print_explanation(Console(file=text, width=width), explanation)
    return text.getvalue()
