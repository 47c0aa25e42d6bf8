"""Tests for ``tune batch`` with missing models: the whole command except its runs."""

from __future__ import annotations

import json
import re
from pathlib import Path
from xml.etree import ElementTree

import pytest

from optimizer.cli.batch import main
from optimizer.core.errors import BadInputError
from tests.repositories import doubler, serialized

SUITE = "budget: 1m\nentries: [{model: [nowhere, nothing], sla: {p95: 20ms}}]\n"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "suite.yaml").write_text(SUITE)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def only_batch(folder: Path) -> Path:
    (batch,) = (folder / "results" / "batches" / "suite").iterdir()
    return batch


def test_failed_runs_are_recorded(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["suite.yaml", "--json"]) == 3
    output = capsys.readouterr()
    document = json.loads(output.out)
    assert [entry["state"] for entry in document["entries"]] == ["failed", "failed"]
    assert all("no model 'no" in entry["reason"] for entry in document["entries"])
    batch = only_batch(folder)
    assert json.loads((batch / "batch.json").read_text()) == document
    assert ElementTree.fromstring((batch / "junit.xml").read_bytes()).get("errors") == "2"
    assert "2 failed" in (batch / "index.html").read_text()
    assert "nowhere · p95 <= 20 ms: failed: no model 'nowhere'" in output.err
    assert output.err.splitlines()[-1].startswith("tune: 2 of 2 runs failed; ")
    again = f"`tune batch suite.yaml --resume {batch.relative_to(folder)}` repeats what failed"
    assert output.err.splitlines()[-1].endswith(f"/batch.json has the reasons, and {again}")
    assert not list(batch.glob(".*"))


def test_the_next_batch_is_compared_with_the_last(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    main(["suite.yaml"])
    first = only_batch(folder)
    record = json.loads((first / "batch.json").read_text())
    (first / "batch.json").write_text(json.dumps({**record, "started": "2026-11-01T04:00:00+0000"}))
    assert main(["suite.yaml", "--fail-on-regression", "5%"]) == 3
    shown = capsys.readouterr().out
    assert "it failed too on 2026-11-01" in shown
    # a path is not broken, so a line with a single word may be longer
    lines = [line for line in shown.splitlines() if not line.startswith("index") and " " in line.strip()]
    assert max(map(len, lines)) <= 80


def test_the_newest_unfinished_batch_is_resumed(folder: Path) -> None:
    main(["suite.yaml"])
    batch = only_batch(folder)
    record = json.loads((batch / "batch.json").read_text())
    (batch / "batch.json").write_text(json.dumps({**record, "status": "running"}))
    assert main(["suite.yaml", "--resume"]) == 3
    assert only_batch(folder) == batch
    assert json.loads((batch / "batch.json").read_text())["status"] == "finished"


def test_a_dry_run_shows_the_runs_and_their_time(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("TRITUNE_CACHE", str(folder / "cache"))
    (folder / "net.onnx").write_bytes(serialized(doubler()))
    (folder / "nets.yaml").write_text("budget: 4m\nentries: [{model: ./net.onnx, sla: {p95: 20ms, p99: 1s}}]\n")
    assert main(["nets.yaml", "--dry-run"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "nets: 1 run in 4 min"
    assert re.fullmatch(r"./net.onnx  p95 <= 20 ms +embedded +[\d,]+", lines[3])
    assert lines[4].strip() == "and p99 <= 1,000 ms"
    shown = " ".join(" ".join(lines).split())
    assert (
        "an equal share is 4 min for each run, of which 1 min 36 s are for tests on fresh servers: enough for"
        in shown
    )
    assert lines[-1] == "No server was started, and nothing was measured."
    assert main(["nets.yaml", "--dry-run", "--budget", "30s", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["sufficient_for_verdicts"] is False
    assert document["sufficient_budget_seconds"] == pytest.approx(225)
    assert document["entries"][0]["run"]["budget_seconds"] == 30
    assert main(["nets.yaml", "--dry-run", "--budget", "30s"]) == 0
    assert "so runs may stay UNDECIDED; --budget 4m is enough" in " ".join(capsys.readouterr().out.split())
    assert not (folder / "results").exists()


def test_a_dry_run_shows_each_entry_that_cannot_run(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["suite.yaml", "--dry-run"]) == 2
    shown = " ".join(capsys.readouterr().out.split())
    for model in ("nowhere", "nothing"):
        assert f"{model} p95 <= 20 ms embedded cannot run" in shown
        assert f"{model} · p95 <= 20 ms: cannot run: no model '{model}'" in shown
    assert main(["suite.yaml", "--dry-run", "--json"]) == 2
    errors = [entry["error"] for entry in json.loads(capsys.readouterr().out)["entries"]]
    assert all(error.startswith("no model 'no") for error in errors)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("", "required: SUITE.yaml; `tune batch --help`"),
        ("nowhere.yaml", "suite nowhere.yaml: no such file; give a YAML file such as the one in docs/batch.md"),
        ("suite.yaml --budget 5", "--budget 5: a unit is missing: 5m?"),
        ("suite.yaml --fail-on-regression much", "--fail-on-regression much: write a share such as 5%"),
        ("suite.yaml --fail-on-regression 5", "--fail-on-regression 5: write a share such as 5%"),
        ("suite.yaml --fail-on-regression -5%", "--fail-on-regression -5%: write a share such as 5%"),
        ("suite.yaml --against nowhere", "--against nowhere: no batch.json there"),
        (
            "suite.yaml --against suite.yaml",
            "--against: give a batch.json, or the folder of a batch; suite.yaml: not the record of a batch",
        ),
        ("suite.yaml --dry-run --resume nowhere", "--dry-run: shows a new batch, which --resume does not begin"),
        ("suite.yaml --dry-run --against nowhere", "--against nowhere: no batch.json there"),
        ("suite.yaml --resume nowhere", "--resume nowhere: no batch.json there"),
        ("suite.yaml --resume", "--resume: no unfinished batch of suite in results"),
    ],
)
def test_bad_input_leaves_nothing_behind(arguments: str, message: str, folder: Path) -> None:
    with pytest.raises(BadInputError, match=message):
        main(arguments.split())
    assert not (folder / "results").exists()


def test_an_empty_name_of_a_suite_is_refused() -> None:
    with pytest.raises(
        BadInputError, match=r"^suite '': is empty; give a YAML file such as the one in docs/batch\.md$"
    ):
        main([""])
