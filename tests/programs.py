"""Executable files that stand in for programs such as tritonserver and perf_analyzer."""

from __future__ import annotations

from pathlib import Path


def write_program(path: Path, text: str) -> Path:
    """Write the script ``text``, whose first line names its interpreter, and return its path."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    path.chmod(0o755)
    return path
