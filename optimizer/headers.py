"""Headers of requests to a remote server, ``NAME:VALUE``: a value may be a secret, and is then never shown or kept.

What is kept of a value is what names variables of the environment: ``$TOKEN``, ``Bearer ${TOKEN}``.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping, Sequence

from optimizer.errors import BadInputError

HIDDEN = "***"
FLAG = "--header"
NAME = r"[A-Za-z0-9!#$%&'*+.^_|~-]+"  # a token of RFC 9110
_VARIABLE = re.compile(r"\$(?:([A-Za-z_]\w*)|\{([A-Za-z_]\w*)\})", re.ASCII)
_KEPT = re.compile(rf"(?:[A-Za-z]+ +)?(?:{_VARIABLE.pattern})+", re.ASCII)


def hidden(header: str) -> str:
    """As it is shown and kept: a value that is more than variables, with a scheme such as Bearer, is replaced."""
    name, colon, value = header.partition(":")
    return header if colon and _KEPT.fullmatch(value.strip()) else f"{name}{colon}{HIDDEN}" if colon else HIDDEN


def hidden_in(words: Sequence[str]) -> list[str]:
    """The words of a command, each header in them as ``hidden``."""
    found: list[str] = []
    for i, word in enumerate(words):
        flag, equals, value = word.partition("=")
        if i and words[i - 1] == FLAG:
            word = hidden(word)
        elif flag == FLAG and equals:
            word = f"{flag}={hidden(value)}"
        found.append(word)
    return found


def expanded(headers: Iterable[str], environment: Mapping[str, str] = os.environ) -> dict[str, str]:
    """By name, as they are sent. Raises BadInputError for a variable that is not set, a value that was not kept."""
    found: dict[str, str] = {}
    for header in headers:
        name, _, value = header.partition(":")
        if value == HIDDEN:
            raise BadInputError(f"{FLAG} {name}: its value is not kept; give it again, or as $VARIABLE")
        for match in _VARIABLE.finditer(value):
            if (match[1] or match[2]) not in environment:
                raise BadInputError(f"{FLAG} {name}: {match[0]} is not set in the environment; export it")
        sent = _VARIABLE.sub(lambda match: environment[match[1] or match[2]], value).strip()
        if not sent.isprintable():
            raise BadInputError(f"{FLAG} {name}: its value has characters that no header may have; see to it")
        found[name] = sent
    return found
