"""Tests for ``--warm-start`` on the real server, and for a resume on another machine, which is refused."""

from __future__ import annotations

import json
import shutil

from tests.command_fixtures import FINISHED, Sandbox, Tune
from tests.csv_tables import read_rows
from tests.repositories import write_steady

BRIEFLY = ("--budget", "10s", "--max-trials", "2", "--measurement-interval", "100ms", "--no-output-check")


def test_a_warm_start_reads_another_run_and_a_resume_on_another_machine_is_refused(
    sandbox: Sandbox, tune: Tune
) -> None:
    write_steady(sandbox.working_folder)
    first = tune("--sla-p95", "500ms", *BRIEFLY, "--out", "there", "steady.yaml")
    assert first.code in FINISHED, first.stderr_lines  # in so short a time no load may be steady
    (there,) = (sandbox.working_folder / "there").glob("*/*")
    before = (there / "trials.csv").read_bytes()
    warm = tune("--sla-p95", "500ms", *BRIEFLY, "--warm-start", there, "steady.yaml")
    assert warm.code in FINISHED, warm.stderr_lines
    (run_folder,) = (sandbox.working_folder / "results").glob("*/*")
    info, their_info = (json.loads((folder / "run.json").read_text()) for folder in (run_folder, there))
    (started,) = (note for note in info["notes"] if note.startswith("warm start: "))
    assert f"--warm-start {there}" in info["command"]
    assert info["fingerprint"] == their_info["fingerprint"]
    assert info["fingerprint"]["server"] == info["versions"]["tritonserver"]
    assert {row["fingerprint"] for row in read_rows(run_folder / "trials.csv")} == {info["fingerprint"]["id"]}
    assert (there / "trials.csv").read_bytes() == before

    moved = run_folder.with_name("moved")  # at the same depth, because it names the profile by a relative path
    shutil.copytree(run_folder, moved)
    info["fingerprint"]["cpu_count"] += 2  # as if it had been measured on another machine
    (moved / "run.json").write_text(json.dumps(info))
    refused = tune("--resume", moved)
    assert refused.code == 2
    (line,) = refused.stderr_lines
    assert f"{moved}: was measured with another device, server or perf_analyzer (cpu count " in line
    assert f"begin a new run (--warm-start {moved} learns from that one)" in line

    shutil.rmtree(there)
    assert tune("--resume", run_folder).code in FINISHED
    notes = json.loads((run_folder / "run.json").read_text())["notes"]
    assert notes.count(started) == 1, "it still says how the run began"
    assert sum(note.startswith("continued without the warm start: ") for note in notes) == 1
