"""Measurements of different devices and servers: told apart, never ranked together."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from optuna.samplers import RandomSampler

from objectives.sla import Constraint
from optimizer.errors import BadInputError
from optimizer.machine.fingerprint import LENGTH, Fingerprint, fingerprint, read
from optimizer.machine.hardware import Hardware
from optimizer.options import RunOptions
from optimizer.problem import Problem
from optimizer.replay.recording import read_recording, read_recordings
from optimizer.space import Space
from optimizer.stack import Stack
from optimizer.stopwatch import Stopwatch
from optimizer.store.run_folder import RunFolder
from optimizer.store.study import open_study
from optimizer.store.trials_table import TrialsTable
from optimizer.trial import Candidate, LoadPoint, Trial
from tests.command_fixtures import Playground, Tune, forked_tune, playground
from tests.conftest import measurement

__all__ = ["forked_tune", "playground"]

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
)


# -- what they are ------------------------------------------------------------------------------------------------


def test_the_short_form_is_the_same_whenever_and_wherever() -> None:
    assert HERE.id == "79c6a2a2e9aa"
    assert len(THERE.id) == LENGTH
    assert THERE.id != HERE.id


@given(FINGERPRINTS, FINGERPRINTS)
def test_two_are_the_same_exactly_where_their_parts_are(one: Fingerprint, other: Fingerprint) -> None:
    assert (one == other) == (one.id == other.id) == (one.differences(other) == "")


@given(FINGERPRINTS)
def test_what_is_written_is_read_again(one: Fingerprint) -> None:
    assert read(json.loads(json.dumps(one.document()))) == one


@pytest.mark.parametrize("document", [None, 1, [], {}, {"cpu": "x"}, {**HERE.document(), "cpu_count": "many"}])
def test_what_is_none_is_not_read(document: object) -> None:
    assert read(document) is None


def test_how_two_differ_is_said_in_words() -> None:
    assert HERE.differences(THERE) == "cpu count 4 there, 2 here; server 2.50.0 there, 2.51.0 here"
    assert HERE.differences(replace(HERE, gpus=("A100", "A100"))) == "gpus A100, A100 there, none here"


def test_of_tunes_own_backends_the_version_counts() -> None:
    machine = Hardware((), "Some CPU", 2, 8 << 30)
    own = fingerprint(machine, ["python", "onnxruntime"], target="embedded", server="2.51.0", own_backends=True)
    given = fingerprint(machine, ["onnxruntime"], target="local", server="2.51.0", own_backends=False)
    assert own.backends[0].startswith("onnxruntime 1.")
    assert own.backends[1] == "python"
    assert given.backends == ("onnxruntime",)
    assert "Some CPU, 2 cores · embedded server 2.51.0, onnxruntime 1." in str(own)


# -- what is refused ----------------------------------------------------------------------------------------------


def table(path: Path, one: Fingerprint | None) -> TrialsTable:
    return TrialsTable(path, "m", {}, one.id if one else "")


def append(path: Path, one: Fingerprint | None, number: int = 0, concurrency: int = 1) -> None:
    table(path, one).append(
        Trial(number, Candidate(8)), LoadPoint(1, concurrency), measurement(100 * concurrency + number, 1)
    )


def test_a_table_with_rows_of_another_is_not_gone_on_with(tmp_path: Path) -> None:
    path = tmp_path / "trials.csv"
    append(path, THERE)
    append(path, THERE, concurrency=2)
    assert len(table(path, THERE).read()[0].measurements) == 2
    assert len(table(path, None).read()[0].measurements) == 2, "to verify a run elsewhere is no ranking"
    with pytest.raises(BadInputError, match=rf":2: was measured on another device or server \({THERE.id}, this is "):
        table(path, HERE).read()


def test_a_table_from_before_fingerprints_is_gone_on_with_as_it_is(tmp_path: Path) -> None:
    path = tmp_path / "trials.csv"
    append(path, HERE)
    without = [line.rpartition(",")[0] for line in path.read_text().splitlines()]
    path.write_text("".join(f"{line}\n" for line in without))
    again = table(path, HERE)
    again.read()
    again.append(Trial(0, Candidate(8)), LoadPoint(1, 2), measurement(2, 1))
    assert len(table(path, HERE).read()[0].measurements) == 2
    assert "fingerprint" not in path.read_text()


def test_a_run_of_another_is_not_resumed(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    folder.write_info(RunOptions("m"), {"fingerprint": THERE.document()})
    folder.refuse_other(THERE)
    with pytest.raises(BadInputError) as refused:
        folder.refuse_other(HERE)
    assert str(refused.value) == (
        f"{tmp_path}: was measured elsewhere (cpu count 4 there, 2 here; server 2.50.0 there, 2.51.0 here), and the "
        f"two are not ranked together; begin a run here: --warm-start {tmp_path} learns from it"
    )
    folder.write_info(RunOptions("m"), {})
    folder.refuse_other(HERE)  # of an earlier version: it does not tell


@pytest.mark.parametrize("storage", ["study.journal", "sqlite:///{}/s.db"])
def test_a_shared_study_of_another_is_refused(tmp_path: Path, storage: str) -> None:
    where = storage.format(tmp_path) if "://" in storage else str(tmp_path / storage)
    problem = Problem("m", Space((4, 8)), 1, 64, constraints=(Constraint("latency-p95", 20.0),))
    for _ in range(2):
        study = open_study(where, "s", problem, RandomSampler(), THERE)
    assert study.user_attrs["fingerprint"]["id"] == THERE.id
    assert study.user_attrs["fingerprint"]["server"] == "2.50.0"
    with pytest.raises(BadInputError, match=r"study 's' was measured elsewhere \(cpu count 4 there, 2 here; server "):
        open_study(where, "s", problem, RandomSampler(), HERE)


# -- a table that holds several -----------------------------------------------------------------------------------


@pytest.fixture
def both(tmp_path: Path) -> Path:
    """The quicker at concurrency 2 is that of the other machine."""
    path = tmp_path / "both.csv"
    for concurrency in (1, 2):
        append(path, HERE, 0, concurrency)
        append(path, THERE, 7, concurrency)
    return path


def test_each_is_a_recording_of_its_own(both: Path) -> None:
    here, there = read_recordings(both)
    assert (here.fingerprint, there.fingerprint) == (HERE.id, THERE.id)
    bests = [one.best(one.problem([])) for one in (here, there)]
    assert [best and best.measurement.throughput_infer_per_sec for best in bests] == [200, 207]
    assert [best and best.line for best in bests] == [4, 5], "lines are those of the file"
    with pytest.raises(BadInputError, match="has rows of 2 devices or servers; leave those of one"):
        read_recording(both)


def test_they_are_ranked_one_at_a_time(both: Path, playground: Playground, forked_tune: Tune) -> None:
    ended = forked_tune("replay", "--search", "random", "--json", both)
    assert ended.complaints == [f"{both}: measured on 2 devices or servers; each is ranked alone"]
    found = json.loads(ended.stdout)
    assert {name: one["random"]["best_in_table"]["line"] for name, one in found.items()} == {HERE.id: 4, THERE.id: 5}
    text = forked_tune("replay", "--search", "random", both).stdout
    assert f"({HERE.id})" in text
    assert f"({THERE.id})" in text


def test_this_machine_is_not_told_as_the_one_that_serves() -> None:
    elsewhere = RunOptions("m", target="remote", url="192.0.2.1:8001", metrics_url="127.0.0.1:1")
    stack = Stack.detect(elsewhere, Stopwatch(), print)
    assert str(stack.hardware).startswith("CPU of 192.0.2.1:8001 unknown; load from ")
    here = Stack.detect(replace(elsewhere, url="localhost:8001"), Stopwatch(), print)
    assert "unknown" not in str(here.hardware)
