"""Tests for ``--warm-start`` on the real server, and for a resume on another machine, which is refused."""

from __future__ import annotations

import csv
import json
import shutil
from pathlib import Path

from tests.command_fixtures import FINISHED, Sandbox, Tune

BRIEFLY = ("--budget", "10s", "--max-trials", "2", "--measurement-interval", "100ms", "--no-output-check")


def test_a_warm_start_reads_another_run_and_a_resume_on_another_machine_is_refused(
    sandbox: Sandbox, tune: Tune
) -> None:
    first = tune("--sla-p95", "500ms", *BRIEFLY, "--out", "there", "mlp")
    assert first.code in FINISHED, first.stderr_lines  # in so short a time no load may be steady
    (there,) = (sandbox.working_folder / "there").glob("*/*")
    before = (there / "trials.csv").read_bytes()
    warm = tune("--sla-p95", "500ms", *BRIEFLY, "--warm-start", there, "mlp")
    assert warm.code in FINISHED, warm.stderr_lines
    (run_folder,) = (sandbox.working_folder / "results").glob("*/*")
    info, their_info = (json.loads((folder / "run.json").read_text()) for folder in (run_folder, there))
    (started,) = (note for note in info["notes"] if note.startswith("warm start: "))
    assert f"--warm-start {there}" in info["command"]
    assert info["fingerprint"] == their_info["fingerprint"]
    assert info["fingerprint"]["server"] == info["versions"]["tritonserver"]
    assert {row["fingerprint"] for row in rows(run_folder)} == {info["fingerprint"]["id"]}
    assert (there / "trials.csv").read_bytes() == before

    shutil.copytree(run_folder, sandbox.working_folder / "moved")
    info["fingerprint"]["cpu_count"] += 2  # as if it had been measured on another machine
    (sandbox.working_folder / "moved" / "run.json").write_text(json.dumps(info))
    refused = tune("--resume", "moved")
    assert refused.code == 2
    (line,) = refused.stderr_lines
    assert "moved: was measured with another device, server or perf_analyzer (cpu count " in line
    assert "begin a new run (--warm-start moved learns from that one)" in line

    shutil.rmtree(there)
    assert tune("--resume", run_folder).code in FINISHED
    notes = json.loads((run_folder / "run.json").read_text())["notes"]
    assert notes.count(started) == 1, "it still says how the run began"
    assert sum(note.startswith("continued without the warm start: ") for note in notes) == 1


def rows(folder: Path) -> list[dict[str, str]]:
    with (folder / "trials.csv").open(newline="") as file:
        return list(csv.DictReader(file))
