"""The reasons of a failure in the log of a server."""

from __future__ import annotations

import re
from pathlib import Path

from optimizer.core.safe_text import read_tail, shorten

LOG_BYTES = 2**16  # of the end of the log that are read


def last_error(log: Path, start: int = 0) -> str:
    """Return the last error in the server's log from byte ``start`` on; an empty string if there is none."""
    errors = [line for line in _lines(log, start) if line.startswith("E") or "error" in line.lower()]
    return _without_origin(errors[-1]) if errors else ""


def last_output(log: Path, start: int = 0) -> str:
    """Return the last line of the log from byte ``start`` on that a model's process wrote; empty if there is none."""
    lines = [line for line in _lines(log, start) if not re.match(r"[IWE]\d{4} |[|+]", line)]
    return shorten(lines[-1]) if lines else ""


def startup_failure(log: Path, start: int = 0) -> str:
    """Return the log's complaint about the command line, otherwise its last error or its last line."""
    return (
        _command_line_error(log, start)
        or last_error(log, start)
        or _without_origin((_lines(log, start) or ["it printed nothing"])[-1])
    )


def _command_line_error(log: Path, start: int) -> str:
    """Return the line before or after the usage message, which itself contains the word error many times."""
    lines = _lines(log, start)
    if not any(line.startswith("Usage: tritonserver") for line in lines):
        return ""
    messages = [line for line in lines if not line.startswith((" ", "\t", "Usage:")) and not line.endswith(":")]
    return shorten(messages[-1]) if messages else ""


def _lines(log: Path, start: int) -> list[str]:
    try:
        return [line for line in read_tail(log, LOG_BYTES, start).splitlines() if line.strip()]
    except OSError:
        return []


def _without_origin(line: str) -> str:
    """Return a log line without its time and source location."""
    return shorten(line.partition("] ")[2].strip('"') or line)
