"""The studies on a GPU: ``run.py --smoke`` writes both tables where torch is installed."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.long
@pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="torch is not installed (the extra pytorch)")
def test_the_smoke_run_writes_both_tables(tmp_path: Path) -> None:
    script = str(ROOT / "benchmarks/gpu/run.py")
    command = [sys.executable, script, "--smoke", "--out", str(tmp_path), "--work", str(tmp_path / "w")]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    dlrm, bert = ((tmp_path / name).read_text() for name in ("dlrm.md", "bert.md"))
    assert "| TorchScript FP16, one request at a time | 64 | 1 | " in dlrm
    assert "| tune: as given | 64 | " in dlrm
    assert "| static · 1 instance | 1 | 1 | " in bert
    assert "Not measured" not in dlrm
