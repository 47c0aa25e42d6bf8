"""``tune batch`` on the real server: an entry that fails stops no other, and is all that is done again."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.command_fixtures import Ended, Playground, Tune
from tests.repositories import write_sleeper
from tests.stack.test_main_job import write_steady

pytestmark = pytest.mark.alone

SUITE = """\
budget: 6s
defaults: {options: {max-trials: 1}}
entries:
  - {model: steady.yaml, sla: {p95: 500ms}}
  - {model: ./late/sleeper, sla: {p95: 500ms}}
"""


def batch(ended: Ended) -> dict[str, Any]:
    document = json.loads(ended.stdout)
    assert isinstance(document, dict)
    return document


def test_one_fails_and_the_batch_goes_on(tune: Tune, playground: Playground) -> None:
    write_steady(playground.here)
    (playground.here / "suite.yaml").write_text(SUITE)
    first = tune("batch", "suite.yaml", "--json")
    assert first.code == 3, first.stderr
    assert [entry["state"] for entry in batch(first)["entries"]] == ["found", "failed"]
    (folder,) = (playground.here / "results" / "batches" / "suite").iterdir()
    assert {path.name for path in folder.iterdir()} >= {"batch.json", "index.html", "junit.xml"}
    (run,) = folder.glob("*/run.json")
    measured = (run.parent / "trials.csv").read_bytes()

    write_sleeper(playground.here / "late", milliseconds=8)
    again = tune("batch", "suite.yaml", "--resume", folder, "--budget", "10s", "--json")
    assert again.code == 0, again.stderr
    found = batch(again)
    assert found["status"] == "finished"
    assert [entry["state"] for entry in found["entries"]] == ["found", "found"]
    assert (run.parent / "trials.csv").read_bytes() == measured
    assert json.loads((folder / "batch.json").read_text()) == found
    assert "2 of 2 runs found a configuration" in Path(folder / "index.html").read_text()
