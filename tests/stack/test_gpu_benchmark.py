"""The studies on a GPU: a step that fails leaves the others' figures, and ``run.py --smoke`` where torch is."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks" / "seeds"))
sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

from gpu import run
from gpu.steps import BERT, GpuStep

ROOT = Path(__file__).parents[2]
GOOD = "--max-queue-delay off -b 1 --concurrency 1 --measurement-interval 100ms"


def test_a_failed_step_leaves_the_figures_of_the_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    work = tmp_path / "work"

    def write_mlp(model: str, *_: Any, **__: Any) -> None:  # torch is not needed
        work.mkdir()
        (work / f"{model}.yaml").write_text("model: {builder: mlp}\n")

    monkeypatch.setattr(run, "_write_model", write_mlp)
    good = GpuStep("", GOOD, lambda cell: f"requests of {cell['request_batch_size']}")
    failing = replace(good, smoke=f"{GOOD} --shape no_such_input:4")
    study = replace(BERT, steps=(good, failing, replace(good, smoke=GOOD.replace("-b 1", "-b 4"))))
    results = run.measure(study, tmp_path, work, run.Clock(time.monotonic() + 120, 4), smoke=True)
    assert [cell["request_batch_size"] for cell in results.cells] == [1, 4]
    assert [failure.count("no_such_input") for failure in results.failures] == [2]
    kept = [json.loads(line) for line in (tmp_path / "bert.jsonl").read_text().splitlines()]
    assert all(cell["throughput_infer_per_sec"] > 0 for cell in kept)
    table = (tmp_path / "bert.md").read_text()
    assert "| requests of 1 | 1 | 1 | " in table
    assert "| requests of 4 | 4 | 1 | " in table
    assert "- Not measured: `tune sweep" in table


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
