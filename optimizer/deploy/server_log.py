"""The log of a tritonserver: why the server did not start, refused a model or crashed."""

from __future__ import annotations

import re
from pathlib import Path

from optimizer.core.safe_text import read_tail, shorten

LOG_BYTES = 2**16  # bytes that are read from the end of the log
# Triton logs as information why the process of a model did not start.
_ERROR = re.compile("error|Failed to preinitialize", re.IGNORECASE)
# A server without a GPU logs these as errors, the second one for each loaded ensemble, and serves nevertheless.
_HARMLESS = re.compile("CudaDriverHelper has not been initialized|unable to create stream for ")
# Lines of the server: its log and tables, and after a crash a signal and a stack trace
_SERVER_OUTPUT = re.compile(r"[IWE]\d{4} |[|+]|Signal \(\d+\) received| *\d+# ")
_UNREADABLE = re.compile("Poll failed for model directory '(.+?)': (.+?)\"?$")


class ServerLog:
    """The log at ``path``. Only the lines since the last ``mark`` count; a text is empty if no line gives it."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._start = 0

    def mark(self) -> None:
        """Remember the end of the log, so that later texts quote only later lines."""
        self._start = self.path.stat().st_size if self.path.exists() else 0

    def last_error(self) -> str:
        """Return the last error. Errors that a server without a GPU logs at each start do not count."""
        errors = [line for line in self._lines() if line.startswith("E") or _ERROR.search(line)]
        errors = [line for line in errors if not _HARMLESS.search(line)]
        return _without_origin(errors[-1]) if errors else ""

    def unreadable_model(self) -> str:
        """Return the last model that the server could not read, and why.

        Only the log has the reason: the answer to the request to load the model, or an ensemble with it, does not.
        """
        failures = [match for line in self._lines() if (match := _UNREADABLE.search(line))]
        return shorten(f"model '{failures[-1][1]}': {failures[-1][2]}") if failures else ""

    def last_output(self) -> str:
        """Return the last line that a model's process or a C++ exception wrote."""
        lines = [line for line in self._lines() if not _SERVER_OUTPUT.match(line)]
        return shorten(lines[-1]) if lines else ""

    def startup_failure(self) -> str:
        """Return the complaint about the command line, otherwise the last error or the last line."""
        lines = self._lines() or ["it printed nothing"]
        return self._command_line_error() or self.last_error() or _without_origin(lines[-1])

    def _command_line_error(self) -> str:
        """Return the line before or after the usage message, which itself contains the word error many times."""
        lines = self._lines()
        if not any(line.startswith("Usage: tritonserver") for line in lines):
            return ""
        messages = [line for line in lines if not line.startswith((" ", "\t", "Usage:")) and not line.endswith(":")]
        return shorten(messages[-1]) if messages else ""

    def _lines(self) -> list[str]:
        try:
            return [line for line in read_tail(self.path, LOG_BYTES, self._start).splitlines() if line.strip()]
        except OSError:
            return []


def _without_origin(line: str) -> str:
    """Return a log line without its time and source location."""
    return shorten(line.partition("] ")[2].strip('"') or line)
