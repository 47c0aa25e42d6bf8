"""Tests of the notes: the list is closed, and each note is one line that a worker of a cluster can send."""

from __future__ import annotations

import json
import pickle

import pytest

from optimizer.core import notes
from optimizer.core.notes import LASTING, Note, lasting_documents, present, read_lasting

EXAMPLES: tuple[Note, ...] = (
    notes.SeparateCpus("0-2", "3"),
    notes.SharedCpus("0-3"),
    notes.SharedQuota(2.5),
    notes.SharedMachine(4, 2),
    notes.ShareOfNode("4 CPUs", 1),
    notes.OwnBackend("onnxruntime"),
    notes.WithoutBatches("the first dimension of 'ids' is fixed"),
    notes.WithoutBatches(""),
    notes.RemoteServerUsed("triton:8001"),
    notes.SharedMemoryUsed("system"),
    notes.SettingsUnread(("session.intra_op.allow_spinning 0",)),
    notes.ServerProcessesVaried(),
    notes.ServedOnCpu("onnxruntime_without_cuda"),
    notes.ServedOnCpu("server_sees_no_gpu"),
    notes.MigInstanceUsed(),
    notes.GpusNotRead("NVML does not answer"),
    notes.BatcherTuned("dlrm"),
    notes.SeveralModelsLoaded("dlrm", (("ranker", 3.0), ("encoder", 0.5))),
    notes.ConfirmedByPerfAnalyzer("the load is sent over HTTP"),
    notes.PerfAnalyzerSampleLimit(128, 1000, 4096),
    notes.OpenLoopSampleLimit(65_536, 100_000),
    notes.OutputsNotCompared("the baseline was not measured"),
    notes.NanOutputs("y", 0.25),
    notes.ModelNotes((("a", notes.OutputsNotCompared()),)),
    notes.LateRequests(0.01, 1.0, 21.0),
    notes.ClocksLowered(2, 4, ("power limit",)),
    notes.SpeedVaried(1.6),
    notes.OtherRun(4711, "/home/a/results/dlrm/20261130-081015"),
    notes.DisturbedWindowsCounted(0.3),
    notes.UsualStatesJudged(0.2),
    notes.DisturbedWindowsLeftOut(0.12, ("p95 31.2 ms",)),
    notes.ServerCrashes(1, "tritonserver died (SIGSEGV)"),
    notes.UnstableCells(1, 8),
    notes.DisturbedCells(1, 8, 0.2),
    notes.CombinationsLeftOut(3, ("timeout_action with default_timeout_microseconds 0",)),
    notes.SearchConverged(0.02),
    notes.SearchedWithoutSimulator(),
    notes.ContinuousBatchingSimulated(),
    notes.RefusalsSimulated(9, 3, is_trusted=False),
    notes.WarmStarted(12, "an earlier run", "another machine"),
    notes.OtherModelTransferred("an earlier run", "dlrm"),
    notes.TransferLeftOut(1, "measurement", "an earlier run"),
    notes.WarmStartMissing("no such run"),
    notes.NodeLeftOut("node1", "it has another GPU"),
    notes.FewerCpusThanRayCounts("node1", 8, 4),
    notes.CpusUsedByOthers("node1"),
    notes.ConfirmationIncomplete(3),
    notes.HighestConcurrency(64),
    notes.LessThanInSearch(1597.0, 405.0),
    notes.UntestedServedMore(3, 2597.0),
    notes.ConfirmationComplete(),
    notes.ConfirmationLeftOut(),
    notes.NextVerdictNeeds(2, 14.0, -0.5),
    notes.NextVerdictNeeds(2, 14.0, 5.0),
    notes.NextVerdictNeeds(2, 14.0, 20.0),
)


def test_every_note_has_an_example() -> None:
    assert {type(note).__name__ for note in EXAMPLES} == {cls.__name__ for cls in Note.__subclasses__()}


@pytest.mark.parametrize("note", EXAMPLES, ids=lambda note: type(note).__name__)
def test_a_note_is_one_printable_line_and_survives_pickling(note: Note) -> None:
    assert str(note)
    assert str(note).isprintable()
    assert pickle.loads(pickle.dumps(note)) == note


def test_the_noun_of_a_count_is_singular_for_one_and_plural_for_more() -> None:
    assert str(notes.TransferLeftOut(1, "configuration", "r")) == (
        "1 configuration of r was left out: not in this space"
    )
    assert str(notes.TransferLeftOut(2, "measurement", "r")) == (
        "2 measurements of r were left out: other request batch sizes"
    )


@pytest.mark.parametrize(
    ("seconds_left", "begin", "end"),
    [
        (-0.5, "the time ended before the tests were complete: ", ", about 14 s"),
        (5.0, "the tests are not complete: ", ", about 14 s, and 5 s were left"),
        (20.0, "the tests are not complete: ", ", about 14 s"),
    ],
)
def test_the_time_has_ended_only_if_none_was_left(seconds_left: float, begin: str, end: str) -> None:
    assert str(notes.NextVerdictNeeds(2, 14.0, seconds_left)) == (
        f"{begin}the next verdict needs 2 more fresh servers{end}"
    )


def test_notes_that_last_come_back_from_a_record_as_they_were() -> None:
    record = json.loads(json.dumps(lasting_documents(EXAMPLES)))
    assert read_lasting(record) == tuple(note for note in EXAMPLES if isinstance(note, LASTING))


@pytest.mark.parametrize(
    "record",
    [
        None,
        {},
        [3],
        [{}],
        [{"note": "SearchConverged", "smallest_gain": 0.02}],
        [{"note": ["ServedOnCpu"]}],
        [{"note": "ServedOnCpu", "cause": "unknown"}],
        [{"note": "ServedOnCpu", "cause": {}}],
        [{"note": "WarmStarted", "configurations": "many", "study": "a run", "machine": ""}],
        [{"note": "WarmStarted", "configurations": 3, "study": ["a run"], "machine": ""}],
        [{"note": "CpusUsedByOthers", "host": "node1", "port": 3}],
    ],
)
def test_a_record_that_is_no_lasting_note_is_left_out(record: object) -> None:
    assert read_lasting(record) == ()


def test_a_note_of_an_earlier_session_that_occurs_again_is_shown_once() -> None:
    note, other = notes.ServedOnCpu("server_sees_no_gpu"), notes.WarmStarted(12, "an earlier run", "")
    assert present([note, None, other, *read_lasting(lasting_documents([note]))]) == (note, other)
