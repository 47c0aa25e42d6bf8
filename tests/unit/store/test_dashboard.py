"""Optuna's dashboard opens the study of a run."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from optimizer.core.budget import Budget
from optimizer.core.stopwatch import Stopwatch
from optimizer.measure.measurer import Measurer
from optimizer.replay.replay import recorded_problem
from optimizer.results.progress_observers import QuietObserver
from optimizer.search import make_searcher
from optimizer.store.recording import baselines, read_recording
from optimizer.store.run_folder import RunFolder
from optimizer.store.trials_table import TrialsTable
from optimizer.study.scheduler import Scheduler
from optimizer.study.trial_runner import run_trials
from tests.storage_fixtures import reserved_port

pytest.importorskip("optuna_dashboard")

TABLE = Path("benchmarks/tables/mlp.csv")
TRIALS = 5
START_SECONDS = 600.0


@pytest.fixture
def kept(tmp_path: Path) -> RunFolder:
    """Run a short search on a recorded table and return its folder."""
    folder = RunFolder(tmp_path / "mlp" / "1")
    folder.path.mkdir(parents=True)
    recording = read_recording(TABLE)
    problem = recorded_problem(recording, {"p95": 5.0})
    searcher = make_searcher("random", problem, 0, str(folder.study), folder.study_name)
    table = TrialsTable(folder.trials, problem.model, problem.space.fields)
    measuring = Measurer(recording.server, recording.server, table, QuietObserver())
    scheduler = Scheduler(problem, searcher, Budget(60.0, TRIALS), Stopwatch(), baselines(problem.space))
    run_trials(scheduler, recording.server, measuring)
    return folder


@pytest.fixture
def dashboard(kept: RunFolder) -> Iterator[str]:
    """Start the dashboard as docs/python.md describes, and yield its address."""
    program = shutil.which("optuna-dashboard", path=str(Path(sys.executable).parent)) or "optuna-dashboard"
    with reserved_port() as port:
        command = [program, str(kept.study), "--host", "127.0.0.1", "--port", str(port)]
        with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
            try:
                yield f"http://127.0.0.1:{port}"
            finally:
                process.terminate()


def test_the_dashboard_opens_the_study_of_a_run(kept: RunFolder, dashboard: str) -> None:
    studies = json.loads(fetched(f"{dashboard}/api/studies", START_SECONDS))["study_summaries"]
    (study,) = studies
    assert study["study_name"] == kept.study_name
    assert b"<html" in fetched(f"{dashboard}/dashboard/").lower()
    detail: dict[str, Any] = json.loads(fetched(f"{dashboard}/api/studies/{study['study_id']}?after=0"))
    assert len(detail["trials"]) == TRIALS
    assert detail["trials"][-1]["state"] == "Complete"
    assert "preferred_batch_sizes" in {parameter["name"] for parameter in detail["union_search_space"]}


def fetched(url: str, seconds: float = 0) -> bytes:
    """Return the response; requests are repeated until the dashboard answers."""
    deadline = time.monotonic() + seconds
    while True:
        try:
            with urllib.request.urlopen(url, timeout=60) as answer:
                return bytes(answer.read())
        except urllib.error.URLError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.1)
