"""``tune --resume`` refuses a finished run whose profile, model or trials have changed, and keeps its files."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from objectives.sequential import LOOKS
from optimizer.confirmation.plan import ConfirmationPlan
from optimizer.core.errors import DeploymentError
from optimizer.core.trial import FreshServer, LoadPoint, Trial
from optimizer.options.run_options import RunOptions
from optimizer.results.finished_run import read_run, why_unfinished
from optimizer.results.recommendation import assess
from optimizer.search import make_searcher
from optimizer.store.run_folder import RunFolder
from optimizer.store.trials_table import TrialsTable
from optimizer.study.environment import Environment
from optimizer.study.run_record import RunRecord
from tests.bad_input import assert_says
from tests.command_fixtures import Sandbox, Tune
from tests.conftest import measurement
from tests.repositories import doubler, onnx_model, serialized
from tests.run_folders import change_info

PROFILE = """\
model: {onnx: ./net.onnx}
request: {batch_size: 2}
space: {instance_group_count: [1, 2]}
sla: {p95: 20ms}
"""


@dataclass(frozen=True)
class FinishedFolder:
    """A finished run with PASS of the profile ``p.yaml`` in ``working_folder``."""

    run: RunFolder
    working_folder: Path
    record: RunRecord
    table: TrialsTable

    def write_profile(self, replaced: str, replacement: str) -> None:
        text = PROFILE.replace(replaced, replacement)
        assert text != PROFILE
        (self.working_folder / "p.yaml").write_text(text)

    def files(self) -> dict[Path, bytes]:
        """Return the content of each file, without the lock."""
        return {path: path.read_bytes() for path in self.run.path.rglob("[!.]*") if path.is_file()}


@pytest.fixture
def finished(sandbox: Sandbox, monkeypatch: pytest.MonkeyPatch) -> FinishedFolder:
    here = sandbox.working_folder
    (here / "net.onnx").write_bytes(serialized(doubler()))
    (here / "p.yaml").write_text(PROFILE)
    monkeypatch.chdir(here)
    options = RunOptions("p.yaml")
    environment = Environment.detect(options, print)
    task = environment.make_task()
    problem, fingerprint = task.problem, environment.fingerprint(task)
    run = RunFolder.create("results", task.source.name)
    table = TrialsTable(run.trials, problem.model, problem.space.fields, fingerprint.id, problem.cpu_count)
    trial, load = Trial(0, task.baseline, deploy_seconds=1.0), LoadPoint(2, concurrency=4)
    table.append(trial, load, measurement(1000, 10))
    for server in range(1, LOOKS[0] + 1):
        for _ in range(3):
            table.append(trial, load, measurement(1000, 10), FreshServer(server, 0.01))
    make_searcher("tpe", problem, 0, str(run.study), run.study_name, fingerprint=fingerprint)
    outcome = assess(table.read(), problem, task.baseline, task.dynamic_batching)
    record = RunRecord(run, environment, task, fingerprint, ())
    record.write("found", outcome)
    assert json.loads(run.info.read_text())["verdict"] == "PASS"
    return FinishedFolder(RunFolder(here / run.path), here, record, table)


def other_model(finished: FinishedFolder) -> None:
    other = onnx_model([*doubler().graph.node], {"x": (1, ("batch", 4))}, {"y": (1, ("batch", 4))})
    other.producer_name = "another"
    (finished.working_folder / "net.onnx").write_bytes(serialized(other))


def cut_table(finished: FinishedFolder) -> None:
    content = finished.run.trials.read_bytes()
    finished.run.trials.write_bytes(content[: len(content) // 2])


def damage_study(finished: FinishedFolder) -> None:
    finished.run.study.write_text("not a journal\n" * 2)


CHANGES: dict[str, tuple[Callable[[FinishedFolder], None], tuple[str, ...]]] = {
    "no bound": (
        lambda finished: finished.write_profile("sla: {p95: 20ms}\n", ""),
        (": the run had p95 <= 20 ms, but its profile now has none; restore the profile",),
    ),
    "another bound": (
        lambda finished: finished.write_profile("20ms", "10ms"),
        (": the run had p95 <= 20 ms, but its profile now has p95 <= 10 ms; restore the profile",),
    ),
    "another space": (
        lambda finished: finished.write_profile("[1, 2]", "[1, 2, 3]"),
        ("study.journal: study ", " differs in parameters (instance_count)"),
    ),
    "another parameter": (
        lambda finished: finished.write_profile("[1, 2]", "[1, 2], max_queue_size: [0, 8]"),
        ("trials.csv: its columns are not those of this run's parameters",),
    ),
    "another model file": (
        other_model,
        (": the files of the model have changed since the run (SHA-256 ", "restore the files, or run `tune` again"),
    ),
    "fewer trials": (
        cut_table,
        (
            "trials.csv: lacks measurements that the result in run.json has (",
            " of 12 on fresh servers",
            "restore the file",
        ),
    ),
    "another study": (damage_study, ("study.journal: is not an intact study",)),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_changed_run_is_not_continued_and_keeps_its_result(
    change: str, finished: FinishedFolder, called_tune: Tune
) -> None:
    apply, words = CHANGES[change]
    apply(finished)
    before = finished.files()
    ended = called_tune("--resume", finished.run.path, "--log", "none")
    assert_says(ended, words)
    assert finished.files() == before


def test_a_changed_model_is_not_verified_separately(finished: FinishedFolder, called_tune: Tune) -> None:
    other_model(finished)
    before = finished.files()
    ended = called_tune("verify", "--fresh", finished.run.path)
    assert_says(ended, CHANGES["another model file"][1])
    assert finished.files() == before


def test_a_session_without_a_recommendation_removes_that_of_an_earlier_one(finished: FinishedFolder) -> None:
    best, task = finished.run.best, finished.record.task
    (best / "server_options").write_text("--rate-limit=off\n")
    (best / "notes.txt").write_text("of the user")
    assert (best / "config.pbtxt").exists()
    slow = Trial(0, task.baseline, ((LoadPoint(2, concurrency=4), measurement(1000, 100)),))
    outcome = assess([slow], task.problem, task.baseline, task.dynamic_batching)
    assert outcome.recommended is None
    finished.record.write("none", outcome)
    assert [path.name for path in best.iterdir()] == ["notes.txt"]


def test_a_planned_confirmation_keeps_the_result_of_the_run(finished: FinishedFolder) -> None:
    before = finished.run.read_info()
    finished.record.write_plan(ConfirmationPlan(0.01, (2,)))
    after = finished.run.read_info()
    assert after["confirmation_plan"]["finalists"] == [2]
    changed = dict.fromkeys(("written", "confirmation_plan", "times"))
    assert {**after, **changed} == {**before, **changed}


@pytest.mark.parametrize("status", ["found", "none", "interrupted", "failed", "left", "running"])
def test_a_continued_search_that_is_killed_leaves_the_run_unfinished(status: str, finished: FinishedFolder) -> None:
    """The trials are no longer those of the result: the last one may have failed, which drops its measurements."""
    change_info(finished.run.path, status=status)
    finished.record.write_start()
    last = finished.table.read()[-1]
    finished.table.append_failure(last.with_failure(DeploymentError("the model does not load")))
    killed = read_run(finished.run.path)
    assert why_unfinished(killed) == "the run was killed"
    assert killed.info["result"] == {}


def test_a_run_is_read_with_the_cpus_that_its_search_had(finished: FinishedFolder) -> None:
    outcome = read_run(finished.run.path).outcome
    assert outcome is not None
    for count in (None, 5):
        task = finished.record.task
        record = replace(finished.record, task=replace(task, problem=replace(task.problem, cpu_count=count)))
        record.write("interrupted", outcome)
        assert read_run(finished.run.path).problem.cpu_count == count


def test_a_run_keeps_no_secret_of_its_options(finished: FinishedFolder) -> None:
    secret = "3f9c-geheim"
    options = replace(
        finished.record.environment.options,
        storage=f"postgresql://me:{secret}@host/studies",
        study_name="s",
        headers=(f"Authorization:Bearer {secret}", "key:$TOKEN"),
    )
    record = replace(finished.record, environment=replace(finished.record.environment, options=options))
    outcome = read_run(finished.run.path).outcome
    assert outcome is not None
    record.write("found", outcome)
    assert not [path for path, content in finished.files().items() if secret.encode() in content]
    stored = finished.run.read_info()["options"]
    assert stored["storage"] == "postgresql://me:***@host/studies"
    assert stored["headers"] == ["Authorization:***", "key:$TOKEN"]
