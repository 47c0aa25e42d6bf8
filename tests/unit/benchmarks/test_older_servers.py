"""The command line of ``benchmarks/older_servers.py``."""

from __future__ import annotations

import sys

import pytest

import older_servers


def test_its_help_starts_no_measurement(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["older_servers.py", "--help"])
    with pytest.raises(SystemExit) as ended:
        older_servers.main()
    assert ended.value.code == 0
    assert capsys.readouterr().out.startswith("usage: older_servers.py [-h]\n")
