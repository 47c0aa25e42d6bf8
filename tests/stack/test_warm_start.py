"""A run begun with another one, on the real server; and what is not gone on with on another machine."""

from __future__ import annotations

import csv
import json
import shutil
from pathlib import Path

from tests.command_fixtures import Playground, Tune

BRIEFLY = ("--budget", "4s", "--max-trials", "2", "--measurement-interval", "100ms", "--no-output-check")


def test_a_run_begins_with_what_another_showed_and_neither_goes_on_elsewhere(
    playground: Playground, tune: Tune
) -> None:
    first = tune("--sla-p95", "500ms", *BRIEFLY, "--out", "there", "mlp")
    assert first.code in (0, 1), first.complaints  # 1: no load was steady in so short a time
    (there,) = (playground.here / "there").glob("*/*")
    before = (there / "trials.csv").read_bytes()
    warm = tune("--sla-p95", "500ms", *BRIEFLY, "--warm-start", there, "mlp")
    assert warm.code in (0, 1), warm.complaints
    (here,) = (playground.here / "results").glob("*/*")
    info, their_info = (json.loads((folder / "run.json").read_text()) for folder in (here, there))
    assert [note for note in info["notes"] if note.startswith("began with what ")], info["notes"]
    assert f"--warm-start {there}" in info["command"]
    assert info["fingerprint"] == their_info["fingerprint"]
    assert info["fingerprint"]["server"] == info["versions"]["tritonserver"]
    assert {row["fingerprint"] for row in rows(here)} == {info["fingerprint"]["id"]}
    assert (there / "trials.csv").read_bytes() == before

    shutil.copytree(here, playground.here / "moved")
    info["fingerprint"]["cpu_count"] += 2  # as if it had been measured on another machine
    (playground.here / "moved" / "run.json").write_text(json.dumps(info))
    refused = tune("--resume", "moved")
    assert refused.code == 2
    (line,) = refused.complaints
    assert "moved: was measured elsewhere (cpu count " in line
    assert line.endswith("begin a run here: --warm-start moved learns from it")


def rows(folder: Path) -> list[dict[str, str]]:
    with (folder / "trials.csv").open(newline="") as file:
        return list(csv.DictReader(file))
