"""Whether a server still answers, and what it and its log say of why something failed, in one line."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING

from optimizer.untrusted import one_line, read_tail

if TYPE_CHECKING:
    from tritonclient.grpc import InferenceServerClient

PROBE_SECONDS = 5.0  # a server under the heaviest load answers within a fraction of this
LOG_BYTES = 2**16
LONGEST = 300


def answers(client: InferenceServerClient) -> bool:
    """Whether the server says, within PROBE_SECONDS, that it lives."""
    from tritonclient.utils import InferenceServerException

    try:
        return bool(client.is_server_live(client_timeout=PROBE_SECONDS))
    except InferenceServerException:
        return False


def model_died(message: str) -> bool:
    """Whether the server says that the process of a model in Python is gone; the server itself lives on."""
    return re.search(r"stub process\b.{0,200}\bis (not healthy|unhealthy)", message, re.IGNORECASE) is not None


def lacks_memory(message: str) -> bool:
    """Whether the server says that it got no memory from the system, a backend's share of it included.

    An array that a model could not allocate is another matter: that memory is its own process's.
    """
    return re.search(r"\b(cannot allocate memory|std::bad_alloc)\b", message, re.IGNORECASE) is not None


def cause(message: str) -> str:
    """The server's message without the Python frames that a backend adds."""
    return shortened(re.split(r"\s+At:\s", message)[0])


def last_error(log: Path, start: int = 0) -> str:
    """The last line of the server's log from byte ``start`` on that tells of an error; empty where none does."""
    told = [line for line in _lines(log, start) if line.startswith("E") or "error" in line.lower()]
    return _without_origin(told[-1]) if told else ""


def last_words(log: Path, start: int = 0) -> str:
    """What it says of its command line, else the last error, else the last line."""
    return (
        _refusal(log, start)
        or last_error(log, start)
        or _without_origin((_lines(log, start) or ["it printed nothing"])[-1])
    )


def _refusal(log: Path, start: int) -> str:
    """Why it printed how it is used: that stands before or after, and what it prints is full of the word error."""
    lines = _lines(log, start)
    if not any(line.startswith("Usage: tritonserver") for line in lines):
        return ""
    told = [line for line in lines if not line.startswith((" ", "\t", "Usage:")) and not line.endswith(":")]
    return shortened(told[-1]) if told else ""


def _lines(log: Path, start: int) -> list[str]:
    try:
        return [line for line in read_tail(log, LOG_BYTES, start).splitlines() if line.strip()]
    except OSError:
        return []


def _without_origin(line: str) -> str:
    """A line of the log without time and place in the source."""
    return shortened(line.partition("] ")[2].strip('"') or line)


def shortened(text: str, most: int = LONGEST) -> str:
    """On one line, printable, spaces run together."""
    return one_line(" ".join(text.split()), most)
