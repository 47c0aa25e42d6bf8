"""Line breaks of texts for a terminal, which keep a number with its unit and a bound or a setting in one piece."""

from __future__ import annotations

import re
import textwrap

_UNITS = "|".join(
    (
        *("ms", "µs", "s", "%", "MB", "GB", "MiB", "GiB", "infer/s", "req/s", "tokens/s"),
        *("instances?", "requests?", "samples?", "servers?", "measurements?", "trials?"),
    )
)
_LABELS = "|".join(("batch", "delay", "preferred", "concurrency", "trial", "p[0-9.]+", "CPUs"))
_PHRASES = "|".join(("in the search", "misses the bound", "no dynamic batching", "(?:TTFT|inter-token) p"))
_JOINED = re.compile(
    rf"\b(?:{_PHRASES})|(?<=[0-9]) (?=(?:{_UNITS})(?![\w/]))"  # a number and its unit
    rf"| (?=±)|(?<=±) | (?=[<>]=)|(?<=[<>]=) | (?=·)"
    rf"|\b(?:{_LABELS}) (?=[0-9])"
)
_KEPT = "\ue000"  # stands for a blank at which no line ends; texts for a terminal have no private characters


def wrap(text: str, width: int, *, first_indent: str = "", indent: str = "") -> list[str]:
    """Return ``text`` as lines of at most ``width`` characters; a part that is longer is broken at any blank.

    A word that is longer than a line, such as a path, is kept whole.
    """
    lines = textwrap.wrap(
        _JOINED.sub(lambda found: found[0].replace(" ", _KEPT), text),
        width,
        initial_indent=first_indent,
        subsequent_indent=indent,
        break_long_words=False,
        break_on_hyphens=False,
    )
    whole = [line.replace(_KEPT, " ") for line in lines]
    return [part for line in whole for part in _fitting(line, width, indent)]


def _fitting(line: str, width: int, indent: str) -> list[str]:
    if len(line) <= width:
        return [line]
    at = len(line) - len(line.lstrip())
    return textwrap.wrap(
        line.lstrip(),
        width,
        initial_indent=line[:at],
        subsequent_indent=indent,
        break_long_words=False,
        break_on_hyphens=False,
    )
