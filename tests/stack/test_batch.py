"""Tests for ``tune batch`` on the real server: a failed entry stops no other, and only it is repeated."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from objectives.sla import Verdict
from optimizer.cli.exit_codes import EXIT_CODES
from tests.command_fixtures import Ended, Sandbox, Tune
from tests.repositories import sleeper_program, write_python_model, write_sleeper, write_steady

SUITE = """\
budget: 20s
defaults: {options: {max-trials: 1}}
entries:
  - {model: steady.yaml, sla: {p95: 500ms}}
  - {model: ./late/sleeper, sla: {p95: 500ms}}
  - {model: ./broken/sleeper, sla: {p95: 500ms}}
"""
SLOW_MS = 40.0  # a batch of the models whose load no profile limits: fewer requests take less CPU time


def batch(ended: Ended) -> dict[str, Any]:
    document = json.loads(ended.stdout)
    assert isinstance(document, dict)
    return document


def test_a_failed_entry_does_not_stop_the_batch(tune: Tune, sandbox: Sandbox) -> None:
    write_steady(sandbox.working_folder)
    broken = write_python_model(sandbox.working_folder / "broken", "sleeper", "raise RuntimeError('no weights')\n")
    (sandbox.working_folder / "suite.yaml").write_text(SUITE)
    first = tune("batch", "suite.yaml", "--json")
    assert first.code == 3, first.stderr
    assert [entry["state"] for entry in batch(first)["entries"]] == ["found", "failed", "failed"]
    (folder,) = (sandbox.working_folder / "results" / "batches" / "suite").iterdir()
    assert {path.name for path in folder.iterdir()} >= {"batch.json", "index.html", "index.md", "junit.xml"}
    (run,) = folder.glob("steady*/run.json")
    measured = (run.parent / "trials.csv").read_bytes()

    write_sleeper(sandbox.working_folder / "late", SLOW_MS)
    (broken / "1" / "model.py").write_text(sleeper_program(SLOW_MS))
    again = tune("batch", "suite.yaml", "--resume", folder, "--budget", "15s", "--json")
    resumed = batch(again)
    verdicts = [entry["verdict"] for entry in resumed["entries"]]
    assert all(verdicts), again.stderr
    assert again.code == max(EXIT_CODES[Verdict(verdict)] for verdict in verdicts), again.stderr
    assert resumed["status"] == "finished"
    assert [entry["state"] for entry in resumed["entries"]] == ["found", "found", "found"]
    assert (run.parent / "trials.csv").read_bytes() == measured
    assert json.loads((folder / "batch.json").read_text()) == resumed
    assert f"{verdicts.count('PASS')} of 3 runs passed" in Path(folder / "index.html").read_text()

    record = json.loads((folder / "batch.json").read_text())
    record["entries"][0]["state"] = "failed"
    (folder / "batch.json").write_text(json.dumps(record))
    program = sandbox.working_folder / "models" / "sleeper" / "1" / "model.py"
    program.write_text(sleeper_program(milliseconds=9))
    corrected = tune("batch", "suite.yaml", "--resume", folder, "--json")
    (entry, *_) = batch(corrected)["entries"]
    assert (entry["state"], entry["folder"]) == ("found", f"{run.parent.name}-2"), corrected.stderr
    assert (
        f"a new run in {entry['folder']} measures it; {run.parent.name} keeps the earlier measurements"
        in corrected.stderr
    )
    assert (run.parent / "trials.csv").read_bytes() == measured
    assert entry["earlier_folder"] == run.parent.name
    assert f'href="{run.parent.name}/">earlier measurements</a>' in (folder / "index.html").read_text()
    verified = tune("verify", folder / entry["folder"], "--budget", "1s")
    assert f"tune: note: the run belongs to a batch; `tune report {folder}` writes its page again" in verified.stderr
