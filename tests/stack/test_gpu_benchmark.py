"""``benchmarks/gpu/run.py --smoke``: the path of the studies on a GPU, on any machine that has torch."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch", reason="torch is not installed (the extra pytorch)")

ROOT = Path(__file__).parents[2]


@pytest.mark.long
def test_the_smoke_run_writes_both_tables(tmp_path: Path) -> None:
    script = str(ROOT / "benchmarks/gpu/run.py")
    command = [sys.executable, script, "--smoke", "--out", str(tmp_path), "--work", str(tmp_path / "w")]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    dlrm, bert = ((tmp_path / name).read_text() for name in ("dlrm.md", "bert.md"))
    assert "| TorchScript FP16, one request at a time | 64 | 1 | " in dlrm
    assert "| static · 1 instance | 1 | 1 | " in bert
    assert "not measured" not in dlrm.partition("## Ratios")[0]
