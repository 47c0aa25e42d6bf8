"""Tests for `tune report BATCH` and `tune batch --against` on batches whose runs are copies of the sample."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from optimizer.cli import batch as batch_command
from optimizer.cli import report as report_command
from optimizer.core.errors import BadInputError, EnvironmentFault
from optimizer.study.batch.finished_batch import finish, refresh
from optimizer.study.batch.record import BatchFolder, StoredBatch
from tests.csv_tables import read_rows, write_rows
from tests.run_folders import change_info
from tests.sample_batches import SampleRuns, run, suite_of

NAME = "20261123-010000"


@pytest.fixture(scope="module")
def first_batch(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with a finished batch. It is made once, because the verdicts on its runs take 0.2 s."""
    made = tmp_path_factory.mktemp("first")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(made)
        batch_of(made, NAME, "2026-11-23T01:00:00+0000")
    return made


@pytest.fixture
def folder(first_batch: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> BatchFolder:
    """Return a finished batch of two entries in the folder of results of the current folder."""
    shutil.copytree(first_batch, tmp_path, dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path)
    return BatchFolder(Path("results/batches/nightly") / NAME)


def batch_of(
    tmp_path: Path, name: str, started: str, against: StoredBatch | None = None, share: float | None = None
) -> BatchFolder:
    folder = BatchFolder(Path("results/batches/nightly") / name)
    (tmp_path / folder.path).mkdir(parents=True)
    batch = run(suite_of(tmp_path, "a", "b"), SampleRuns(), folder)
    finish(folder, replace(batch, started=started, regression_share=share), against)
    return folder


def change_throughput(folder: BatchFolder, model: str, factor: float) -> None:
    """Multiply the throughput on fresh servers, as if `tune verify` had continued the test of the run."""
    (table,) = folder.path.glob(f"{model}-*/trials.csv")
    rows = read_rows(table)
    for row in rows:
        if row["confirmation"]:
            row["throughput_infer_per_sec"] = str(factor * float(row["throughput_infer_per_sec"]))
    write_rows(table, rows)
    change_info(table.parent, confirmation_complete=True)


def unexpected(line: str) -> None:
    raise AssertionError(line)


def test_an_unchanged_batch_is_written_as_it_was(folder: BatchFolder) -> None:
    before = folder.read()
    assert [entry.verdict for entry in before.entries] == ["PASS", "PASS"]
    assert refresh(folder, unexpected) == before


def test_a_later_test_of_a_run_is_in_the_page_and_in_the_comparison(tmp_path: Path, folder: BatchFolder) -> None:
    later = batch_of(tmp_path, "20261124-010000", "2026-11-24T01:00:00+0000", share=0.05)
    assert later.read().previous == "../20261123-010000/batch.json"
    assert [entry.change and entry.change.kind for entry in later.read().entries] == ["noise", "noise"]
    change_throughput(later, "a", 0.5)
    assert report_command.main(["nightly"]) == 0
    record, other = later.read().entries
    assert record.change is not None
    assert (record.change.kind, record.regressed) == ("lost", True)
    assert (other.change and other.change.kind, other.regressed) == ("noise", False)
    for file in (later.index, later.markdown, later.junit):
        assert "lost 50 %" in file.read_text()
    assert "1 regressed" in later.index.read_text()
    shutil.rmtree(folder.path)
    change_throughput(later, "a", 1.5)
    assert [entry.change and entry.change.kind for entry in refresh(later, unexpected).entries] == [None, "noise"]


def test_a_batch_stays_compared_with_the_one_that_was_given(tmp_path: Path, folder: BatchFolder) -> None:
    release = tmp_path / "ci" / "release.json"
    release.parent.mkdir()
    shutil.copy(folder.record, release)
    change_throughput(folder, "a", 2.0)
    report_command.main([str(folder.path)])
    later = batch_of(
        tmp_path,
        "20261124-010000",
        "2026-11-24T01:00:00+0000",
        StoredBatch(release, BatchFolder(folder.path).read()),
    )
    assert (later.path / later.read().previous).resolve() == release
    assert [entry.change and entry.change.kind for entry in refresh(later, unexpected).entries] == ["noise", "noise"]
    assert "compared with release.json" in later.markdown.read_text()


def test_an_entry_whose_run_is_not_there_is_shown_as_recorded(folder: BatchFolder) -> None:
    (run_folder,) = folder.path.glob("a-*")
    shutil.rmtree(run_folder)
    lines: list[str] = []
    before = folder.read()
    assert refresh(folder, lines.append) == before
    (line,) = lines
    assert line.startswith("a · p95 <= 20 ms: shown as in batch.json: ")


@pytest.mark.parametrize("previous", ["\0", "/", "x" * 5000])
def test_an_earlier_batch_that_cannot_be_read_changes_nothing(previous: str, folder: BatchFolder) -> None:
    before = replace(folder.read(), previous=previous)
    folder.write(before)
    assert refresh(folder, unexpected) == before


def test_a_failed_entry_stays_failed(folder: BatchFolder) -> None:
    first, second = folder.read().entries
    failed = replace(first, state="failed", recommended=None, reason="gone")
    folder.write(replace(folder.read(), entries=(failed, second)))
    assert refresh(folder, unexpected).entries[0] == failed


def test_an_exported_page_links_to_the_reports_from_its_folder(folder: BatchFolder, tmp_path: Path) -> None:
    before = folder.record.read_bytes(), folder.index.read_bytes()
    formats = "html,markdown,csv"
    assert report_command.main([str(folder.path), "--format", formats, "--out", "night", "--results", "nowhere"]) == 0
    assert {path.name for path in Path("night").iterdir()} == {"index.html", "index.md", "measurements.csv"}
    (run_folder,) = folder.path.glob("a-*")
    link = f"../{run_folder}/report.html"
    assert f'href="{link}"' in Path("night/index.html").read_text()
    assert (Path("night") / link).is_file()
    assert Path("night/index.md").read_text() == folder.markdown.read_text()
    assert {row["run"].rpartition("/")[0] for row in read_rows(Path("night/measurements.csv"))} == {folder.path.name}
    assert (folder.record.read_bytes(), folder.index.read_bytes()) == before


def test_the_page_of_a_killed_batch_says_that_it_is_not_finished(folder: BatchFolder) -> None:
    folder.write(replace(folder.read(), status="running"))
    report_command.main([str(folder.record), "--format", "markdown", "--out", "page.md"])
    assert Path("page.md").read_text().startswith("## nightly: 2 of 2 runs passed, not finished\n")


def test_a_batch_that_runs_is_not_overwritten(folder: BatchFolder) -> None:
    with folder.locked(), pytest.raises(EnvironmentFault, match="uses this batch; wait until it ends"):
        report_command.main([str(folder.path)])


def test_a_batch_is_reported_alone(folder: BatchFolder) -> None:
    with pytest.raises(BadInputError, match=r"^nightly: is a batch, which has a page of its own; give it alone, or "):
        report_command.main(["nightly", "a"])


# -- --against ----------------------------------------------------------------------------------------------------


def suite_file(tmp_path: Path, *models: str) -> str:
    return str(suite_of(tmp_path, *models).path)


@pytest.mark.parametrize(
    "against",
    [
        "results/batches/nightly/20261123-010000",
        "results/batches/nightly/20261123-010000/batch.json",
        "nightly/20261123-010000",
        "nightly",
        "artifact",
        "release.json",
    ],
)
def test_an_earlier_batch_is_a_file_or_a_folder(against: str, folder: BatchFolder, tmp_path: Path) -> None:
    shutil.copy(folder.record, "release.json")
    shutil.copytree(folder.path.parent, "artifact")
    shutil.copytree(folder.path, "artifact/20261101-010000")
    assert batch_command.main([suite_file(tmp_path, "a", "b", "c"), "--against", against, "--json"]) == 3
    newest = BatchFolder.all_in(folder.path.parent)[0]
    assert newest.path != folder.path
    compared = (newest.path / newest.read().previous).resolve()
    assert json.loads(compared.read_text())["started"] == folder.read().started
    assert "20261101" not in str(compared)


def test_an_unsuitable_earlier_batch_is_refused_in_one_line(folder: BatchFolder, tmp_path: Path) -> None:
    suite = suite_file(tmp_path, "x")
    refused = {
        "nowhere": "--against nowhere: no batch.json there; give the folder of a batch, such as those in ",
        "": "--against '': no batch.json there; give the folder of a batch",
        suite: f"--against: give a batch.json, or the folder of a batch; {suite}: not the record of a batch",
        str(folder.path): "nightly.yaml; give a batch of this suite",
    }
    before = sorted(tmp_path.rglob("*"))
    for against, message in refused.items():
        with pytest.raises(BadInputError) as caught:
            batch_command.main([suite, "--against", against])
        assert message in str(caught.value)
        assert "\n" not in str(caught.value)
    assert sorted(tmp_path.rglob("*")) == before
