"""``tune batch`` with models that are not there: all of the command but the runs, without a server."""

from __future__ import annotations

import json
from pathlib import Path
from xml.etree import ElementTree

import pytest

from optimizer.commands.batch import main
from optimizer.errors import BadInputError

SUITE = "budget: 1m\nentries: [{model: [nowhere, nothing], sla: {p95: 20ms}}]\n"


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "suite.yaml").write_text(SUITE)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def only_batch(here: Path) -> Path:
    (folder,) = (here / "results" / "batches" / "suite").iterdir()
    return folder


def test_all_fail_and_all_is_written(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["suite.yaml", "--json"]) == 3
    told = capsys.readouterr()
    document = json.loads(told.out)
    assert [entry["state"] for entry in document["entries"]] == ["failed", "failed"]
    assert all("no model 'no" in entry["reason"] for entry in document["entries"])
    folder = only_batch(here)
    assert json.loads((folder / "batch.json").read_text()) == document
    assert ElementTree.fromstring((folder / "junit.xml").read_bytes()).get("errors") == "2"
    assert "2 failed" in (folder / "index.html").read_text()
    assert "nowhere · p95 <= 20 ms: failed: no model 'nowhere'" in told.err
    assert not list(folder.glob(".*"))


def test_the_next_batch_is_compared_with_it(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    main(["suite.yaml"])
    first = only_batch(here)
    told = json.loads((first / "batch.json").read_text())
    (first / "batch.json").write_text(json.dumps({**told, "started": "2026-11-01T04:00:00+0000"}))
    assert main(["suite.yaml", "--fail-on-regression", "5%"]) == 3
    shown = capsys.readouterr().out
    assert "failed on 2026-11-01" in shown
    assert max(len(line) for line in shown.splitlines() if not line.startswith("index")) <= 80


def test_the_newest_unfinished_batch_is_gone_on_with(here: Path) -> None:
    main(["suite.yaml"])
    folder = only_batch(here)
    told = json.loads((folder / "batch.json").read_text())
    (folder / "batch.json").write_text(json.dumps({**told, "status": "running"}))
    assert main(["suite.yaml", "--resume"]) == 3
    assert only_batch(here) == folder
    assert json.loads((folder / "batch.json").read_text())["status"] == "finished"


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ("", "required: SUITE.yaml; `tune batch --help`"),
        ("nowhere.yaml", "nowhere.yaml: cannot be read: No such file"),
        ("suite.yaml --budget 5", "--budget 5: a unit is missing: 5m?"),
        ("suite.yaml --fail-on-regression much", "--fail-on-regression much: write a share such as 5%"),
        ("suite.yaml --fail-on-regression 5", "--fail-on-regression 5: write a share such as 5%"),
        ("suite.yaml --fail-on-regression -5%", "--fail-on-regression -5%: write a share such as 5%"),
        ("suite.yaml --against nowhere", "--against nowhere: no batch.json there"),
        ("suite.yaml --resume nowhere", "--resume nowhere: no batch.json there"),
        ("suite.yaml --resume", "--resume: no unfinished batch of suite in results"),
    ],
)
def test_bad_input_leaves_nothing_behind(arguments: str, told: str, here: Path) -> None:
    with pytest.raises(BadInputError, match=told):
        main(arguments.split())
    assert not (here / "results").exists()
