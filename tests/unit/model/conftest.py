"""The fixture of the tests of profiles."""

from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a current folder with one Triton repository."""
    (tmp_path / "models" / "mine").mkdir(parents=True)
    (tmp_path / "data.json").write_text("{}")
    monkeypatch.chdir(tmp_path)
    return tmp_path
