"""Sessions of a run without a server: those whose test cannot continue, and the versions that they keep."""

from __future__ import annotations

from pathlib import Path

import pytest

from optimizer.core.errors import BadInputError
from optimizer.core.trial import FreshServer, Trial
from optimizer.results.progress_observers import Progress, QuietObserver
from optimizer.store.run_folder import RunFolder
from optimizer.store.trials_table import TrialsTable
from optimizer.study.run_record import RunRecord, current_versions
from optimizer.study.tuning_run import continue_confirmation
from tests.run_folders import CANDIDATE, CLOSED, MEASURED, write_run


def refusal(path: Path) -> str:
    run = RunFolder(path)
    with pytest.raises(BadInputError) as refused:
        continue_confirmation(run, run.read_options(), 1.0, Progress(print, lambda *_: QuietObserver()))
    assert "\n" not in str(refused.value)
    return str(refused.value)


def test_confirmations_without_a_plan_are_not_continued(tmp_path: Path) -> None:
    path = write_run(tmp_path)
    TrialsTable(path / "trials.csv", "doubler", {}).append(
        Trial(0, CANDIDATE), CLOSED, MEASURED, FreshServer(1, 0.005)
    )
    assert refusal(path) == (
        f"{path}: run.json has no confirmation_plan, so the test cannot continue; make a separate one: "
        f"`tune verify --fresh {path}`"
    )


def test_a_run_without_trials_is_not_continued(tmp_path: Path) -> None:
    path = write_run(tmp_path, status="interrupted")
    (path / "trials.csv").unlink()
    assert refusal(path) == f"{path}: nothing was measured yet; continue the search: `tune --resume {path}`"


def test_a_run_that_found_nothing_is_not_continued(tmp_path: Path) -> None:
    path = write_run(tmp_path, status="none", is_confirmed=False)
    assert refusal(path) == (
        f"{path}: no configuration met p95 <= 20 ms, so there is nothing to verify; tune again with a wider bound, "
        "smaller requests or more hardware"
    )


def test_a_changed_bound_is_refused(tmp_path: Path) -> None:
    run = RunFolder(write_run(tmp_path))
    run.refuse_other_bounds(["p95 <= 20 ms"])
    with pytest.raises(BadInputError, match="the run had p95 <= 20 ms, but its profile now has none; restore the"):
        run.refuse_other_bounds([])


@pytest.mark.parametrize(
    ("before", "now", "recorded"),
    [
        ({"versions": {"tritonserver": "2.51.0"}}, "", "2.51.0"),
        ({"versions": {"tritonserver": "unknown"}}, "2.51.0", "2.51.0"),
        ({"versions": ["2.51.0"]}, "", "unknown"),
        ({}, "2.51.0", "2.51.0"),
        ({}, "", "unknown"),
    ],
)
def test_a_session_without_a_server_keeps_the_version_of_the_run(
    before: dict[str, object], now: str, recorded: str, tmp_path: Path
) -> None:
    versions = current_versions(before)
    record = RunRecord(RunFolder(tmp_path), None, None, None, (), versions=versions)  # type: ignore[arg-type]
    with record.recording_server_version(lambda: now):
        pass
    assert record.versions["tritonserver"] == recorded
    assert record.versions["tritune"]
