"""Measurements of different devices and servers are distinguished and never ranked together."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from optuna.samplers import RandomSampler

from objectives.sla import Sla
from optimizer.config.problem import Problem
from optimizer.config.search_space import SearchSpace
from optimizer.core.candidate import Candidate
from optimizer.core.errors import BadInputError
from optimizer.core.trial import LoadPoint, Trial
from optimizer.machine.hardware import ID_LENGTH, Fingerprint, backend_identities, parse_fingerprint
from optimizer.options.run_options import RunOptions
from optimizer.replay.replay import recorded_problem
from optimizer.store.optuna_study import open_study
from optimizer.store.recording import read_recording, read_recordings
from optimizer.store.run_folder import RunFolder
from optimizer.store.trials_table import TrialsTable
from optimizer.study.environment import Environment
from tests.command_fixtures import Sandbox, Tune, called_tune, sandbox
from tests.conftest import measurement

__all__ = ["called_tune", "sandbox"]

HERE = Fingerprint("Some CPU @ 2.50GHz", 2, (), "embedded", "2.51.0", ("onnxruntime 1.20.1",))
THERE = replace(HERE, cpu_count=4, server="2.50.0")
TEXTS = st.text(max_size=8)
FINGERPRINTS = st.builds(
    Fingerprint,
    TEXTS,
    st.integers(0, 999),
    st.lists(TEXTS, max_size=2).map(tuple),
    TEXTS,
    TEXTS,
    st.lists(TEXTS, max_size=2).map(tuple),
    TEXTS,
    TEXTS,
)


# -- the fingerprint ----------------------------------------------------------------------------------------------


def test_the_id_of_a_fingerprint_is_the_same_on_all_machines() -> None:
    assert HERE.id == "d8f5fd368206"
    assert len(THERE.id) == ID_LENGTH
    assert THERE.id != HERE.id


@given(FINGERPRINTS, FINGERPRINTS)
def test_fingerprints_are_equal_exactly_if_all_parts_are(first: Fingerprint, second: Fingerprint) -> None:
    assert (first == second) == (first.id == second.id) == (first.differences(second) == "")


@given(FINGERPRINTS)
def test_a_written_fingerprint_is_read_back(fingerprint: Fingerprint) -> None:
    assert parse_fingerprint(json.loads(json.dumps(fingerprint.to_document()))) == fingerprint


@pytest.mark.parametrize("document", [None, 1, [], {}, {"cpu": "x"}, {**HERE.to_document(), "cpu_count": "many"}])
def test_text_that_is_no_fingerprint_is_refused(document: object) -> None:
    assert parse_fingerprint(document) is None


def test_the_difference_of_two_fingerprints_is_described() -> None:
    assert HERE.differences(THERE) == "cpu count 4 there, 2 here; server 2.50.0 there, 2.51.0 here"
    assert HERE.differences(replace(HERE, gpus=("A100", "A100"))) == "gpus A100, A100 there, none here"
    measured = replace(HERE, perf_analyzer="2.60.0")
    assert measured.differences(replace(HERE, perf_analyzer="2.51.0")) == "perf analyzer 2.51.0 there, 2.60.0 here"


def test_the_versions_of_tritunes_own_backends_are_part_of_the_fingerprint() -> None:
    onnxruntime, python = backend_identities(["python", "onnxruntime"], "embedded")
    assert onnxruntime.startswith("onnxruntime 1.")
    assert python == "python"
    assert backend_identities(["onnxruntime"], "local") == ("onnxruntime",)
    assert str(HERE) == "Some CPU @ 2.50GHz, 2 CPUs · embedded server 2.51.0, onnxruntime 1.20.1"


# -- refused resumes ----------------------------------------------------------------------------------------------


def open_table(path: Path, fingerprint: Fingerprint | None) -> TrialsTable:
    return TrialsTable(
        path, "m", {}, fingerprint.id if fingerprint else "", fingerprint.cpu_count if fingerprint else None
    )


def append_measurement(path: Path, fingerprint: Fingerprint | None, number: int = 0, concurrency: int = 1) -> None:
    open_table(path, fingerprint).append(
        Trial(number, Candidate(8)), LoadPoint(1, concurrency), measurement(100 * concurrency + number, 1)
    )


def test_a_table_with_another_fingerprint_is_not_continued(tmp_path: Path) -> None:
    path = tmp_path / "trials.csv"
    append_measurement(path, THERE)
    append_measurement(path, THERE, concurrency=2)
    assert len(open_table(path, THERE).read()[0].measurements) == 2
    assert len(open_table(path, None).read()[0].measurements) == 2, "to verify a run elsewhere is no ranking"
    refused = rf":2: was measured with another device, server or perf_analyzer \({THERE.id}, this is "
    with pytest.raises(BadInputError, match=refused):
        open_table(path, HERE).read()


def test_a_table_without_fingerprints_is_continued_unchanged(tmp_path: Path) -> None:
    path = tmp_path / "trials.csv"
    append_measurement(path, HERE)
    lines = [line.rsplit(",", 2)[0] for line in path.read_text().splitlines()]
    path.write_text("".join(f"{line}\n" for line in lines))
    continued = open_table(path, HERE)
    continued.read()
    continued.append(Trial(0, Candidate(8)), LoadPoint(1, 2), measurement(2, 1))
    assert len(open_table(path, HERE).read()[0].measurements) == 2
    assert "fingerprint" not in path.read_text()
    assert "cpu_count" not in path.read_text()


def test_a_run_with_another_fingerprint_is_not_resumed(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    folder.write_info(RunOptions("m"), {"fingerprint": THERE.to_document()})
    folder.refuse_other(THERE)
    with pytest.raises(BadInputError) as refused:
        folder.refuse_other(HERE)
    assert str(refused.value) == (
        f"{tmp_path}: was measured with another device, server or perf_analyzer (cpu count 4 there, 2 here; "
        "server 2.50.0 there, 2.51.0 here), and the two are not ranked together; begin a new run (--warm-start "
        f"{tmp_path} learns from that one), or measure its recommendation here: `tune verify --fresh {tmp_path}`"
    )
    folder.write_info(RunOptions("m"), {})
    folder.refuse_other(HERE)  # a run without a fingerprint


@pytest.mark.parametrize("storage", ["study.journal", "sqlite:///{}/s.db"])
def test_a_shared_study_with_another_fingerprint_is_refused(tmp_path: Path, storage: str) -> None:
    where = storage.format(tmp_path) if "://" in storage else str(tmp_path / storage)
    problem = Problem("m", SearchSpace((4, 8)), 1, 64, sla=Sla.from_bounds({"p95": 20.0}))
    for _ in range(2):
        study = open_study(where, "s", problem, RandomSampler(), THERE)
    assert study.user_attrs["fingerprint"]["id"] == THERE.id
    assert study.user_attrs["fingerprint"]["server"] == "2.50.0"
    refused = r"study 's' was measured with another device, server or perf_analyzer \(cpu count 4 there, 2 here; "
    with pytest.raises(BadInputError, match=refused):
        open_study(where, "s", problem, RandomSampler(), HERE)


# -- a table with two fingerprints ---------------------------------------------------------------------------------


@pytest.fixture
def table_of_two_machines(tmp_path: Path) -> Path:
    """Return a table of two machines; the second one is faster at concurrency 2."""
    path = tmp_path / "both.csv"
    for concurrency in (1, 2):
        append_measurement(path, HERE, 0, concurrency)
        append_measurement(path, THERE, 7, concurrency)
    return path


def test_each_fingerprint_of_a_table_is_a_recording_of_its_own(table_of_two_machines: Path) -> None:
    first, second = read_recordings(table_of_two_machines)
    assert (first.fingerprint, second.fingerprint) == (HERE.id, THERE.id)
    assert (first.cpu_count, second.cpu_count) == (2, 4)
    best_points = [recording.best(recorded_problem(recording, {})) for recording in (first, second)]
    assert [best_point and best_point.measurement.throughput_infer_per_sec for best_point in best_points] == [
        200,
        207,
    ]
    assert [best_point and best_point.line for best_point in best_points] == [4, 5], "lines are those of the file"
    with pytest.raises(BadInputError, match="has rows of 2 devices or servers; keep only those of one"):
        read_recording(table_of_two_machines)


def test_replay_searches_each_fingerprint_separately(
    table_of_two_machines: Path, sandbox: Sandbox, called_tune: Tune
) -> None:
    ended = called_tune("replay", "--search", "random", "--json", table_of_two_machines)
    assert ended.stderr_lines == [
        f"tune: note: {table_of_two_machines}: measured on 2 devices or servers, which are searched separately"
    ]
    documents = json.loads(ended.stdout)
    lines = {name: document["random"]["best_in_table"]["line"] for name, document in documents.items()}
    assert lines == {HERE.id: 4, THERE.id: 5}
    text = called_tune("replay", "--search", "random", table_of_two_machines).stdout
    assert f"({HERE.id})" in text
    assert f"({THERE.id})" in text


def test_this_machine_is_not_shown_as_the_server() -> None:
    options = RunOptions("m", target="remote", url="192.0.2.1:8001", metrics_url="127.0.0.1:1")
    stack = Environment.detect(options, print)
    assert str(stack.hardware).startswith("CPU of 192.0.2.1:8001 unknown; load from ")
    local_stack = Environment.detect(replace(options, url="localhost:8001"), print)
    assert "unknown" not in str(local_stack.hardware)
