"""Tests for the batch runner with runs copied from the sample in results/, and for its reports."""

from __future__ import annotations

import io
import json
import re
from dataclasses import dataclass, field, replace
from pathlib import Path
from xml.etree import ElementTree

import pytest
from rich.console import Console

from objectives.intervals import ConfidenceInterval, GainRatio, ObjectiveGain
from objectives.metrics import Measurement
from objectives.sla import Sla
from optimizer.cli.batch import exit_code
from optimizer.confirmation.choice import RATIO_TO_ITSELF
from optimizer.core.budget import RunMode
from optimizer.core.errors import BadInputError, ChangedRunError, ServerFault
from optimizer.core.trial import Trial
from optimizer.options.run_options import RunOptions
from optimizer.results.finished_run import FinishedRun, read_run
from optimizer.results.progress_observers import make_progress
from optimizer.store.run_folder import MODEL_HASH, RunFolder
from optimizer.study.batch.batch_runner import BatchRunner, describe_entry, expected_improvement
from optimizer.study.batch.changes import compare_entries
from optimizer.study.batch.record import BatchFolder, BatchRecord, Change, new_record, resumed_record
from optimizer.study.batch.reports import estimate_words, gain_words, junit, markdown, print_batch, write_batch
from optimizer.study.batch.suite import read_suite
from tests.csv_tables import read_rows, write_rows
from tests.run_folders import change_info
from tests.sample_batches import SAMPLE, SampleRuns, by_model, run, suite_of


def printed(batch: BatchRecord, folder: BatchFolder, width: int = 80) -> str:
    console = Console(width=width)
    with console.capture() as captured:
        print_batch(console, batch, folder)
    return captured.get()


@pytest.fixture
def folder(tmp_path: Path) -> BatchFolder:
    return BatchFolder.create(str(tmp_path / "results"), "nightly")


def test_all_are_searched_and_confirmed(tmp_path: Path, folder: BatchFolder) -> None:
    sample_runs = SampleRuns()
    batch = run(suite_of(tmp_path, "a", "b"), sample_runs, folder)
    assert batch.status == "finished"
    assert [entry.state for entry in batch.entries] == ["found", "found"]
    result = json.loads((SAMPLE / "run.json").read_text())["result"]
    (first, _) = batch.entries
    assert first.recommended is not None
    assert first.recommended.value == pytest.approx(result["recommended"]["throughput_infer_per_sec"])
    assert [first.recommended.low, first.recommended.high] == pytest.approx(
        result["confirmation"]["throughput_infer_per_sec"]
    )
    (bounded,) = first.bounded
    assert (bounded.metric, bounded.value) == ("latency-p95", result["recommended"]["latency_p95_ms"])
    assert [bounded.low, bounded.high] == pytest.approx(result["confirmation"]["latency_ms"])
    assert (first.concurrency, first.request_rate) == (result["recommended"]["concurrency"], None)
    assert first.verdict == "PASS"
    assert first.gain is not None
    assert first.gain.ratio is not None
    assert first.gain.ratio.estimate == pytest.approx(result["speedup"])
    assert first.trials == result["trials"]
    assert folder.read() == batch
    assert exit_code(batch) == 0


def test_downloads_and_builds_are_no_part_of_the_budget(tmp_path: Path) -> None:
    suite = suite_of(tmp_path, "a", "b")
    at_once, later = (
        run(suite, SampleRuns(set_up_seconds=seconds), BatchFolder.create(str(tmp_path), f"after-{seconds:g}"))
        for seconds in (0.0, 500.0)
    )
    assert [entry.seconds for entry in later.entries] == pytest.approx([entry.seconds for entry in at_once.entries])
    assert [entry.verdict for entry in later.entries] == ["PASS", "PASS"]


@pytest.mark.parametrize("has_measured", [True, False])
def test_only_a_run_that_measured_nothing_begins_again(
    has_measured: bool, tmp_path: Path, folder: BatchFolder
) -> None:
    """Its model may have been corrected."""
    suite = suite_of(tmp_path, "a")
    batch = run(suite, SampleRuns(), folder)
    table = folder.path / batch.entries[0].folder / "trials.csv"
    log = table.with_name("logs") / "of-the-first-session.log"
    log.touch()
    if not has_measured:
        table.write_text(table.read_text().splitlines(keepends=True)[0])
        change_info(table.parent, status="failed")
        assert not read_run(table.parent).trials
    waiting = replace(batch, entries=(replace(batch.entries[0], state="waiting"),))
    assert exit_code(run(suite, SampleRuns(), folder, waiting)) == 0
    assert log.exists() is has_measured


def test_a_search_that_measures_nothing_more_is_over(tmp_path: Path, folder: BatchFolder) -> None:
    sample_runs = SampleRuns(stalls="a")
    assert exit_code(run(suite_of(tmp_path, "a", "b"), sample_runs, folder)) == 0
    steps = [mode for model, _, mode in sample_runs.calls if model == "a"]
    assert steps == [RunMode.SEARCH, RunMode.SEARCH, RunMode.CONFIRM], "the other entry gets its time"


def test_a_confirmation_that_was_disturbed_has_its_interval_and_the_reason_not_to_compare_it(
    tmp_path: Path, folder: BatchFolder
) -> None:
    (entry,) = run(suite_of(tmp_path, "a"), SampleRuns(), folder).entries
    assert entry.recommended is not None
    assert entry.recommended.low is not None
    table = folder.path / entry.folder / "trials.csv"
    rows = read_rows(table)
    for row in rows:
        row |= {"stable": "false", "reason": "others took 40 % of the CPUs"} if row["confirmation"] else {}
    write_rows(table, rows)
    disturbed = describe_entry(entry, read_run(folder.path / entry.folder))
    estimate = disturbed.recommended
    assert estimate is not None
    assert estimate.unsure == "100 % of its windows were disturbed"
    assert f" at {estimate_words(estimate)}, " in disturbed.headline, "the table has the number of the first line"
    assert "±" in estimate_words(estimate)
    assert compare_entries(entry, disturbed, "2026-11-01").kind == "undecided"


def test_a_gain_that_is_missing_in_the_usual_states_has_its_reason(tmp_path: Path, folder: BatchFolder) -> None:
    """Other programs were active in two of five measurements of the search, and never on a fresh server."""
    batch = run(suite_of(tmp_path, "a"), SampleRuns(), folder)
    (entry,) = batch.entries
    table = folder.path / entry.folder / "trials.csv"
    rows = read_rows(table)
    for number, row in enumerate(rows):
        is_busy = number % 5 < 2 and not row["confirmation"]
        row |= {"other_cpu_share": "0.8" if is_busy else "0.0"}
        row |= {"confirmation_latency_slope": "1.5"} if row["confirmation"] else {}
    write_rows(table, rows)
    entry = describe_entry(entry, read_run(folder.path / entry.folder))
    assert (entry.verdict, entry.gain, gain_words(entry)) == ("UNDECIDED", None, "not confirmed")
    batch = replace(batch, entries=(entry,))
    folder.write(batch)
    assert folder.read() == batch
    reason = "gain not confirmed: the recommendation misses the bound in the usual states of the machine"
    write_batch(folder, batch)
    assert reason in folder.index.read_text()
    assert reason in junit(batch).decode()
    shown = printed(batch, folder, width=200)
    assert f"{entry.label}: {reason}" in shown


def test_a_passed_entry_has_the_reason_of_its_missing_gain(mixed: BatchRecord, folder: BatchFolder) -> None:
    passed = replace(mixed.entries[0], gain=None, missed_in_usual_states="compared")
    shown = printed(replace(mixed, entries=(passed,)), folder, width=200)
    reason = "gain not confirmed: the current configuration misses the bound in the usual states of the machine"
    assert f"{passed.label}: {reason}" in shown


def test_an_entry_that_passed_with_less_than_the_search_measured_has_a_note(
    mixed: BatchRecord, folder: BatchFolder
) -> None:
    passed = mixed.entries[0]
    assert not passed.throughput_notes
    finished = read_run(folder.path / passed.folder)
    number, fastest = len(finished.trials), max(finished.trials, key=lambda trial: len(trial.confirmations))
    within_bound = Measurement(90_000.0, latency_p95_ms=10.0, stable=True)
    candidate = replace(fastest.candidate, max_queue_delay_us=7)
    untested = Trial(number, candidate, ((fastest.measurements[0][0], within_bound),))
    finished = replace(finished, trials=(*finished.trials, untested))
    complete = {**finished.info, "confirmation_complete": True}
    for info, unsure in ((finished.info, "its test ended before a higher load passed"), (complete, "")):
        passed = describe_entry(passed, replace(finished, info=info))
        assert passed.recommended is not None
        assert passed.recommended.unsure == unsure
        estimate = replace(passed.recommended, value=1e6, low=9e5, high=1.1e6, unsure="")
        change = compare_entries(replace(passed, recommended=estimate), passed, "2026-11-01")
        assert change.kind == ("undecided" if unsure else "lost")
        assert unsure in change.description
    passed = describe_entry(passed, finished)
    (note,) = passed.throughput_notes
    assert note.startswith(f"in the search, trial {number} served 90,000 infer/s within the bound, but it was not")
    batch = replace(mixed, entries=(passed,))
    folder.write(batch)
    assert folder.read() == batch
    write_batch(folder, batch)
    shown = printed(batch, folder, width=200)
    assert f"{passed.label}: {note}" in shown.replace("\n", " ")
    for text in (shown, folder.index.read_text()):
        assert f"tune verify {folder.path / passed.folder}" in text
    for text in (junit(batch).decode(), folder.index.read_text()):
        assert note in text


def test_the_minimums_come_first_and_the_confirmations_last(tmp_path: Path, folder: BatchFolder) -> None:
    sample_runs = SampleRuns()
    run(suite_of(tmp_path, "a", "b"), sample_runs, folder)
    assert [model for model, _, _ in sample_runs.calls[:2]] == ["a", "b"]
    modes = [mode for _, _, mode in sample_runs.calls]
    assert modes == [*(len(modes) - 2) * [RunMode.SEARCH], *2 * [RunMode.CONFIRM]]
    first_seconds, last_seconds = (seconds for _, seconds, mode in sample_runs.calls if mode is RunMode.CONFIRM)
    assert last_seconds > first_seconds, "the last one gets the time that the first one has left"


def test_the_rest_goes_to_the_largest_expected_improvement(tmp_path: Path, folder: BatchFolder) -> None:
    suite, sample_runs = suite_of(tmp_path, "a", "b", budget=150), SampleRuns()
    record = new_record(suite, suite.budget_seconds)
    improvement = by_model({"a": 0.01, "b": 0.2})
    batch = BatchRunner(
        suite, folder, record, sample_runs, lambda _: None, improvement, lambda: sample_runs.now
    ).run()
    assert [model for model, _, mode in sample_runs.calls if mode is RunMode.SEARCH] == ["a", "b", "b"]
    assert batch.spent_seconds <= 150 + 3 * 5  # the last measurement of each slice


def test_a_failing_entry_does_not_stop_others(tmp_path: Path, folder: BatchFolder) -> None:
    broken = {"b": ServerFault("the server is gone"), "c": RuntimeError("a bug")}
    suite = suite_of(tmp_path, "a", "b", "c", "d")
    record = new_record(suite, suite.budget_seconds)
    first, noted, *others = record.entries
    noted = replace(noted, throughput_notes=("it served less",), missed_in_usual_states="compared")
    batch = run(suite, SampleRuns(broken), folder, replace(record, entries=(first, noted, *others)))
    assert [entry.state for entry in batch.entries] == ["found", "failed", "failed", "found"]
    assert not batch.entries[1].throughput_notes, "nothing is recommended"
    assert batch.entries[1].missed_in_usual_states is None
    assert batch.entries[1].reason == "the server is gone"
    assert batch.entries[2].reason == "a fault of tune itself: RuntimeError: a bug"
    assert exit_code(batch) == 3


@dataclass
class RewritingRuns(SampleRuns):
    """Sample runs of which ``model`` gets other values in ``problem`` of its run.json after each step."""

    model: str = "b"
    problem: dict[str, object] = field(default_factory=dict)

    def __call__(self, options: RunOptions, folder: RunFolder, mode: RunMode, seconds: float) -> str:
        status = super().__call__(options, folder, mode, seconds)
        if options.model == self.model:
            change_info(folder.path, "problem", **self.problem)
        return status


def test_an_error_rate_of_zero_is_a_result(tmp_path: Path, folder: BatchFolder) -> None:
    batch = run(suite_of(tmp_path, "a"), SampleRuns(), folder)
    (entry,) = batch.entries
    path = folder.path / entry.folder
    rows = read_rows(path / "trials.csv")
    write_rows(path / "trials.csv", ({**row, "failed_requests": "0"} for row in rows))
    change_info(path, "problem", objectives=["error-rate"])
    described = describe_entry(entry, read_run(path))
    assert described.recommended is not None
    assert (described.recommended.metric, described.recommended.value) == ("error-rate", 0.0)
    batch = replace(batch, entries=(described,))
    folder.write(batch)
    assert folder.read() == batch
    write_batch(folder, batch)
    assert "0.00 %" in folder.index.read_text()


@pytest.mark.parametrize(
    ("problem", "reason"),
    [
        ({"max_concurrency": 100_000}, "concurrency 100000 is not a whole number from 1 to 65536"),
        ({"objectives": []}, "a fault of tune itself: "),
    ],
)
def test_an_entry_whose_run_cannot_be_read_has_failed(
    tmp_path: Path, folder: BatchFolder, problem: dict[str, object], reason: str
) -> None:
    batch = run(suite_of(tmp_path, "a", "b", "c"), RewritingRuns(problem=problem), folder)
    assert [entry.state for entry in batch.entries] == ["found", "failed", "found"]
    assert reason in batch.entries[1].reason
    assert (batch.status, folder.read()) == ("finished", batch)
    assert exit_code(batch) == 3


def test_each_step_has_an_equal_share_as_the_budget_of_its_run(tmp_path: Path, folder: BatchFolder) -> None:
    """A tenth of that budget limits the loading of a model, which must not fail in a later, shorter step."""
    sample_runs = SampleRuns()
    run(suite_of(tmp_path, "a", "b", "c", budget=7200), sample_runs, folder)
    assert len(sample_runs.budgets) > 3
    assert set(sample_runs.budgets) == {2400.0}


class FailAfterMeasuring(SampleRuns):
    def __call__(self, options: RunOptions, folder: RunFolder, mode: RunMode, seconds: float) -> str:
        super().__call__(options, folder, mode, seconds)
        raise ServerFault("the server is gone")


def test_an_entry_that_fails_after_measuring_has_no_verdict(tmp_path: Path, folder: BatchFolder) -> None:
    (entry,) = run(suite_of(tmp_path, "a"), FailAfterMeasuring(), folder).entries
    assert (entry.state, entry.trials > 0, entry.verdict, entry.headline) == ("failed", True, "", "")


def test_a_resume_repeats_failed_entries_only(tmp_path: Path, folder: BatchFolder) -> None:
    suite = suite_of(tmp_path, "a", "b")
    before = run(suite, SampleRuns({"b": BadInputError("no model b")}), folder)
    sample_runs = SampleRuns()
    after = run(suite, sample_runs, folder, resumed_record(folder.read(), suite, None))
    assert {model for model, _, _ in sample_runs.calls} == {"b"}
    assert [entry.state for entry in after.entries] == ["found", "found"]
    assert after.entries[0] == before.entries[0]


@dataclass
class ChangedModels(SampleRuns):
    """The models differ from those of the runs in the folders ``stale``."""

    stale: tuple[str, ...] = ()

    def __call__(self, options: RunOptions, folder: RunFolder, mode: RunMode, seconds: float) -> str:
        if folder.path.name in self.stale:
            folder.refuse_other_model({MODEL_HASH: "b" * 64})
        return super().__call__(options, folder, mode, seconds)


def test_a_failed_entry_whose_model_has_changed_is_measured_in_a_new_run(tmp_path: Path, folder: BatchFolder) -> None:
    suite = suite_of(tmp_path, "a", "b")
    first = run(suite, FailAfterMeasuring(), folder)
    failed = replace(first.entries[0], seconds=500.0)  # more than its share of the time
    (folder.path / f"{failed.folder}-2").mkdir()
    before = {path.name: path.read_bytes() for path in (folder.path / failed.folder).iterdir() if path.is_file()}
    resumed = resumed_record(replace(first, entries=(failed, first.entries[1])), suite, None)
    sample_runs = ChangedModels(stale=tuple(entry.folder for entry in first.entries))
    again = run(suite, sample_runs, folder, resumed)
    assert [entry.state for entry in again.entries] == ["found", "found"]
    assert [entry.folder for entry in again.entries] == [f"{failed.folder}-3", f"{first.entries[1].folder}-2"]
    assert sample_runs.calls[0][:2] == ("a", 180.0), "the time of the earlier run does not count"
    assert again.entries[0].seconds < 500
    after = {path.name: path.read_bytes() for path in (folder.path / failed.folder).iterdir() if path.is_file()}
    assert after == before


def test_an_entry_whose_new_run_does_not_fit_its_storage_fails(tmp_path: Path, folder: BatchFolder) -> None:
    """The storage of the suite holds a study with the name of the run, and another run would not fit either."""
    refused = ChangedRunError("study.db: study differs in constraints")
    batch = run(suite_of(tmp_path, "a", "b"), SampleRuns({"a": refused}), folder)
    assert [(entry.state, entry.reason) for entry in batch.entries] == [("failed", str(refused)), ("found", "")]


def test_an_interrupted_batch_is_resumed_where_it_stopped(tmp_path: Path, folder: BatchFolder) -> None:
    suite = suite_of(tmp_path, "a", "b", "c")
    batch = run(suite, SampleRuns(interrupts="b"), folder)
    assert batch.status == "interrupted"
    assert [entry.state for entry in batch.entries] == ["searched", "waiting", "waiting"]
    assert batch.entries[1].trials == 1
    assert exit_code(batch) == 130
    measured = (folder.path / batch.entries[1].folder / "trials.csv").read_text()
    after = run(suite, SampleRuns(), folder, resumed_record(folder.read(), suite, None))
    assert [entry.state for entry in after.entries] == ["found"] * 3
    assert (folder.path / batch.entries[1].folder / "trials.csv").read_text().startswith(measured)


def test_a_larger_budget_continues_the_tests_of_undecided_entries(tmp_path: Path, folder: BatchFolder) -> None:
    suite = suite_of(tmp_path, "a", "b")
    batch = run(suite, SampleRuns(), folder)
    undecided, passed = replace(batch.entries[0], verdict="UNDECIDED"), batch.entries[1]
    complete = replace(undecided, remaining_tests=replace(undecided.remaining_tests, is_complete=True))
    for first, more_seconds, is_continued in ((undecided, 60, True), (undecided, 0, False), (complete, 60, False)):
        record = replace(batch, entries=(first, passed))
        resumed = resumed_record(record, suite, batch.budget_seconds + more_seconds)
        assert [entry.state for entry in resumed.entries] == ["searched" if is_continued else "found", "found"]
    unsearched = replace(batch, entries=(replace(undecided, trials=1), passed))
    (first, _) = resumed_record(unsearched, suite, batch.budget_seconds + 60).entries
    assert (first.state, first.search_is_over) == ("waiting", False)
    assert "tune verify" not in printed(unsearched, folder), (
        "a test of the baseline alone says nothing of other settings"
    )
    folder.write(replace(batch, entries=(undecided, passed)))
    sample_runs = SampleRuns()
    after = run(suite, sample_runs, folder, resumed_record(folder.read(), suite, batch.budget_seconds + 60))
    assert [(model, mode) for model, _, mode in sample_runs.calls] == [("a", RunMode.CONFIRM)]
    assert [entry.state for entry in after.entries] == ["found", "found"]


def test_a_missed_sla_or_a_regression_is_exit_code_1(tmp_path: Path) -> None:
    record = new_record(suite_of(tmp_path, "a"), 60.0)
    for changed in ({"state": "none"}, {"state": "found", "verdict": "PASS", "regressed": True}):
        entries = tuple(replace(entry, **changed) for entry in record.entries)
        assert exit_code(replace(record, status="finished", entries=entries)) == 1


def test_the_exit_code_is_that_of_the_worst_entry(tmp_path: Path) -> None:
    record = replace(new_record(suite_of(tmp_path, "a"), 60.0), status="finished")
    (entry,) = record.entries
    entries = {
        3: replace(entry, state="failed"),
        1: replace(entry, state="none", verdict="FAIL"),
        4: replace(entry, state="found", verdict="UNDECIDED"),
        0: replace(entry, state="found", verdict="PASS"),
    }
    assert [
        exit_code(replace(record, entries=(replace(entry, state=state),))) for state in ("waiting", "searched")
    ] == [3, 3]
    for place, code in enumerate(entries):
        no_worse = list(entries.values())[place:]
        assert exit_code(replace(record, entries=tuple(no_worse))) == code
        assert exit_code(replace(record, entries=tuple(reversed(no_worse)))) == code
    assert exit_code(replace(record, status="interrupted", entries=tuple(entries.values()))) == 130


def test_an_entry_without_a_confirmation_is_undecided(tmp_path: Path, folder: BatchFolder) -> None:
    (entry,) = run(suite_of(tmp_path, "a"), SampleRuns(), folder).entries
    table = folder.path / entry.folder / "trials.csv"
    write_rows(table, (row for row in read_rows(table) if not row["confirmation"]))
    described = describe_entry(entry, read_run(folder.path / entry.folder))
    assert (described.verdict, described.is_undecided) == ("UNDECIDED", True)
    assert described.headline.startswith("UNDECIDED at ")


def test_a_changed_suite_is_refused(tmp_path: Path, folder: BatchFolder) -> None:
    record = new_record(suite_of(tmp_path, "a", "b"), 60.0)
    with pytest.raises(BadInputError, match=r"nightly\.yaml: b · p95 <= 20 ms was removed since"):
        resumed_record(record, suite_of(tmp_path, "a"), None)
    with pytest.raises(BadInputError, match="c · p95 <= 20 ms is new since"):
        resumed_record(record, suite_of(tmp_path, "a", "b", "c"), None)


@pytest.mark.parametrize(
    "text",
    ["", "[]", "{}", '{"suite": "a", "started": "", "budget_seconds": "x", "entries": []}'],
)
def test_a_damaged_record_is_refused_in_one_line(text: str, folder: BatchFolder) -> None:
    folder.record.write_text(text)
    with pytest.raises(BadInputError, match=r"batch\.json: not the record of a batch") as caught:
        folder.read()
    assert "\n" not in str(caught.value)


def test_each_entry_has_a_folder_of_its_own(tmp_path: Path) -> None:
    path = tmp_path / "suite.yaml"
    path.write_text("entries: [{model: [a-3, a, a_]}]\n")
    record = new_record(read_suite(path), 60.0)
    folders = [entry.folder for entry in record.entries]
    assert len(set(folders)) == len(folders), folders


def test_batches_of_one_second_are_listed_by_their_numbers(tmp_path: Path) -> None:
    record = new_record(suite_of(tmp_path, "a"), 60.0)
    names = ("20261123-010000", "20261123-010000-2", "20261123-010000-10", "20261122-235959")
    for name in names:
        (tmp_path / "batches/nightly" / name).mkdir(parents=True)
        BatchFolder(tmp_path / "batches/nightly" / name).write(record)
    listed = [folder.path.name for folder in BatchFolder.all_in(tmp_path / "batches/nightly")]
    assert listed == [names[2], names[1], names[0], names[3]]


@pytest.mark.parametrize(("name", "value"), [("folder", "../up"), ("recommended", {"metric": "speed", "value": 1.0})])
def test_a_record_with_impossible_values_is_refused(
    name: str, value: object, tmp_path: Path, folder: BatchFolder
) -> None:
    folder.write(new_record(suite_of(tmp_path, "a"), 60.0))
    record = json.loads(folder.record.read_text())
    record["entries"][0][name] = value
    folder.record.write_text(json.dumps(record))
    with pytest.raises(BadInputError, match="not the record of a batch"):
        folder.read()


# -- reports -----------------------------------------------------------------------------------------------


@pytest.fixture
def mixed(tmp_path: Path, folder: BatchFolder) -> BatchRecord:
    """Return a batch with an entry in each state."""
    batch = run(suite_of(tmp_path, "a", "b"), SampleRuns({"b": ServerFault("gone \x00 & <away>")}), folder)
    found_entry, failed_entry = batch.entries
    unmet_entry = replace(
        found_entry, model="c", state="none", recommended=None, headline="no configuration meets p95 <= 20 ms"
    )
    lost = Change("lost", "2026-11-01", "lost 6 % since 2026-11-01", -0.06)
    regressed_entry = replace(found_entry, model="d", change=lost, regressed=True)
    waiting_entry = replace(found_entry, model="<i>e</i>", state="waiting", recommended=None, gain=None)
    undecided_entry = replace(
        found_entry, model="f", verdict="UNDECIDED", headline="UNDECIDED at 9 infer/s: the servers <differ>"
    )
    return replace(
        batch,
        entries=(found_entry, failed_entry, unmet_entry, regressed_entry, waiting_entry, undecided_entry),
        gone=("old",),
    )


def test_junit_has_a_case_for_each_entry(mixed: BatchRecord) -> None:
    """Elements, attributes and counts follow the schema of Jenkins (junit-10.xsd)."""
    root = ElementTree.fromstring(junit(mixed))
    assert root.tag == "testsuites"
    (suite,) = root
    assert suite.tag == "testsuite"
    counts = {name: suite.get(name) for name in ("tests", "failures", "errors", "skipped")}
    assert counts == {"tests": "6", "failures": "2", "errors": "1", "skipped": "2"}
    assert set(suite.attrib) <= {"name", "tests", "failures", "errors", "skipped", "time", "timestamp"}
    assert [case.tag for case in suite] == ["testcase"] * 6
    kinds = [[child.tag for child in case if child.tag != "system-out"] for case in suite]
    assert kinds == [[], ["error"], ["failure"], ["failure"], ["skipped"], ["skipped"]]
    for case in suite:
        assert set(case.attrib) == {"classname", "name", "time"}
        assert float(case.get("time", "")) >= 0
        assert all(set(child.attrib) <= {"type", "message"} for child in case)
    assert suite[5][0].get("message") == "UNDECIDED at 9 infer/s: the servers <differ>"
    assert suite[1][0].get("message") == "gone \\x00 & <away>"


def test_an_undecided_entry_that_regressed_is_a_failure_in_junit_and_not_skipped(mixed: BatchRecord) -> None:
    regressed = replace(mixed.entries[3], verdict="UNDECIDED")
    assert regressed.is_undecided
    (suite,) = ElementTree.fromstring(junit(replace(mixed, entries=(regressed,))))
    assert (suite.get("failures"), suite.get("skipped")) == ("1", "0")
    assert [child.tag for child in suite[0]] == ["failure", "system-out"]


def test_a_recommended_baseline_has_no_gain_and_an_interrupted_run_no_verdict(mixed: BatchRecord) -> None:
    gain = ObjectiveGain("throughput", 1000.0, 1000.0, RATIO_TO_ITSELF)
    measured = replace(mixed.entries[0], state="searched", gain=gain)
    assert gain_words(measured) == "same"
    noise = replace(gain, ratio=GainRatio(1.01, ConfidenceInterval(0.97, 1.05)))
    assert gain_words(replace(measured, gain=noise)) == "none (0.97 to 1.05)"
    lower = replace(gain, metric="latency-p95", ratio=GainRatio(4.3, ConfidenceInterval(3.8, 4.9)))
    assert gain_words(replace(measured, gain=lower)) == "p95 4.3x lower (3.8 to 4.9)"
    ((case,),) = ElementTree.fromstring(junit(replace(mixed, status="interrupted", entries=(measured,))))
    assert case[0].get("message") == "the batch was interrupted before this run had ended"


def test_the_page_links_to_each_report_and_loads_nothing(mixed: BatchRecord, folder: BatchFolder) -> None:
    write_batch(folder, mixed)
    page = folder.index.read_text()
    assert f'href="{mixed.entries[0].folder}/report.html"' in page
    assert (folder.path / mixed.entries[0].folder / "report.html").exists()
    assert mixed.entries[1].folder not in page
    assert "&lt;i&gt;e&lt;/i&gt;" in page
    assert '<td class="undecided">UNDECIDED</td>' in page
    assert page.count("<code>") == 1
    assert f"<code>tune verify {folder.path / mixed.entries[-1].folder} --budget 3m</code>" in page
    assert page.count("UNDECIDED at 9 infer/s: the servers &lt;differ&gt;") == 1
    assert "<script" not in page
    assert "http" not in page.replace("http-equiv", "")
    assert "prefers-color-scheme: dark" in page


def test_markdown_has_the_table_and_the_remarks_of_the_terminal(mixed: BatchRecord) -> None:
    heading, _, totals, _, *table = markdown(mixed).splitlines()
    assert heading == "## nightly: 2 of 6 runs passed, 1 undecided, 1 found none, 1 failed, 1 regressed"
    assert totals.endswith("no earlier batch to compare with")
    assert table[0] == "| model | bound | best | measured | load | gain | verdict | before |"
    rows, remarks = table[2:8], table[9:]
    assert rows[0].startswith("| a | p95 \\<= 20 ms | 13,400 ± ")
    assert re.search(r" \| p95 [\d.]+ ± [\d.]+ ms \| concurrency \d+ \| ", rows[0])
    assert {row.count(" | ") for row in rows} == {7}
    assert [row.split(" | ")[6] for row in rows] == ["PASS", "failed", "found none", "PASS", "not begun", "UNDECIDED"]
    assert rows[4].startswith(r"| \<i\>e\</i\> |")
    assert "- d · p95 \\<= 20 ms: lost 6 % since 2026-11-01" in remarks
    assert remarks[-1] == "- old: in the earlier batch, and no longer in the suite"
    assert all(line.startswith("- ") for line in remarks)


def test_an_undecided_entry_whose_test_is_complete_has_a_separate_test_as_the_next_step(
    mixed: BatchRecord, folder: BatchFolder
) -> None:
    path = change_info(folder.path / mixed.entries[-1].folder, confirmation_complete=True)
    described = describe_entry(mixed.entries[-1], read_run(path))
    batch = replace(mixed, entries=(replace(described, verdict="UNDECIDED"),), gone=())
    command = f"tune verify --fresh {path}"
    assert f"next    {command}" in printed(batch, folder).splitlines()
    write_batch(folder, batch)
    assert f"<code>{command}</code>" in folder.index.read_text()


def test_an_entry_without_a_recommendation_is_undecided_if_its_run_is(
    mixed: BatchRecord, folder: BatchFolder
) -> None:
    missed = replace(mixed.entries[2], verdict="FAIL")
    disturbed = replace(missed, model="g", verdict="UNDECIDED", headline="UNDECIDED, other processes took the CPUs")
    batch = replace(mixed, entries=(disturbed,), gone=())
    assert (missed.is_undecided, disturbed.is_undecided) == (False, True)
    assert (exit_code(replace(batch, entries=(missed,))), exit_code(batch)) == (1, 4)
    (suite,) = ElementTree.fromstring(junit(batch))
    assert (suite.get("failures"), suite.get("skipped")) == ("0", "1")
    write_batch(folder, batch)
    assert '<td class="undecided">UNDECIDED</td>' in folder.index.read_text()
    assert folder.index.read_text().count("UNDECIDED, other processes took the CPUs") == 1
    text = printed(batch, folder)
    assert text.startswith("nightly: 0 of 1 run passed, 1 undecided")
    assert "other processes took the CPUs" in text
    assert "tune verify" not in text, "there is no test to continue"
    before = replace(mixed.entries[0], state="found", verdict="PASS")
    assert compare_entries(before, disturbed, "2026-11-01").kind == "undecided"
    assert compare_entries(before, missed, "2026-11-01").kind == "missed"


def test_the_table_fits_80_columns(mixed: BatchRecord, folder: BatchFolder) -> None:
    lines = printed(mixed, folder).splitlines()
    assert all(len(line) <= 80 for line in lines if not line.startswith(("index", "next")))
    assert lines[0] == "nightly: 2 of 6 runs passed, 1 undecided, 1 found none, 1 failed, 1 regressed"
    assert any("UNDECIDED" in line for line in lines)
    assert f"next    tune verify {folder.path / mixed.entries[-1].folder} --budget 3m" in lines
    assert any("13,400 ± 500 infer/s" in line and "PASS" in line for line in lines)
    assert lines[3].split() == ["model", "bound", "best", "gain", "verdict", "before"]


def test_the_table_breaks_no_word_and_has_no_column_of_changes_without_an_earlier_batch(
    mixed: BatchRecord, folder: BatchFolder
) -> None:
    found_entry, _, unmet_entry, *_ = mixed.entries
    long_named = replace(found_entry, model="./models/scaler", gain=None)
    long_named_unmet = replace(unmet_entry, model="./models/scaler", sla="p95 <= 0.5 ms")
    batch = replace(mixed, entries=(long_named, long_named_unmet), gone=())
    assert printed(batch, folder).splitlines()[3:6] == [
        "model            bound                          best  gain           verdict",
        "./models/scaler  p95 <= 20 ms   13,400 ± 500 infer/s  not confirmed  PASS",
        "./models/scaler  p95 <= 0.5 ms                                       found none",
    ]
    write_batch(folder, batch)
    assert ">before<" not in folder.index.read_text()
    write_batch(folder, mixed)
    assert ">before<" in folder.index.read_text()


def test_the_bounds_of_a_profile_are_shown(mixed: BatchRecord, folder: BatchFolder) -> None:
    entry = mixed.entries[0]
    profile = replace(entry, sla="", conditions={**entry.conditions, "bounds": "p95 <= 30 ms and p99 <= 60 ms"})
    batch = replace(mixed, entries=(profile,), gone=())
    first, second = printed(batch, folder).splitlines()[4:6]
    assert "  p95 <= 30 ms  " in first
    assert second.strip() == "and p99 <= 60 ms"
    write_batch(folder, batch)
    assert "p95 &lt;= 30 ms and p99 &lt;= 60 ms" in folder.index.read_text()


def test_lines_of_several_bounds_and_values_without_an_interval(mixed: BatchRecord, folder: BatchFolder) -> None:
    found_entry = mixed.entries[0]
    assert found_entry.recommended is not None
    without_interval = replace(
        found_entry,
        sla="p95 <= 20 ms and memory <= 2 GB",
        recommended=replace(found_entry.recommended, low=None, high=None),
    )
    first, second = printed(replace(mixed, entries=(without_interval,), gone=()), folder).splitlines()[4:6]
    assert re.search(r"p95 <= 20 ms +13,444 infer/s", first)
    assert second.strip() == "and memory <= 2 GB"


@pytest.mark.parametrize(
    ("is_terminal", "shown"),
    [
        (True, "tuning ranker on the embedded server, for at most\n12 s: highest throughput\n"),
        (
            False,
            r"\d\d:\d\d:\d\d tuning ranker on the embedded server, for at most 12 s: highest throughput\n",
        ),
    ],
)
def test_lines_are_wrapped_on_a_terminal_only(is_terminal: bool, shown: str) -> None:
    text = io.StringIO()
    console = Console(width=50, file=text, force_terminal=is_terminal, color_system=None)
    on_progress, _ = make_progress(console, with_time=True)
    on_progress("tuning ranker on the embedded server, for at most 12 s: highest throughput")
    assert re.fullmatch(shown, text.getvalue())


def test_a_long_name_breaks_in_the_table_and_the_path_of_a_log_does_not(
    mixed: BatchRecord, folder: BatchFolder
) -> None:
    log = "/var/" + 30 * "long/" + "tritonserver.log"
    failed = replace(mixed.entries[1], model=60 * "x", reason=f"the server died (log: {log})")
    lines = printed(replace(mixed, entries=(failed,)), folder).splitlines()
    assert lines[3].startswith("model ")
    assert any(line.endswith(f"{log})") for line in lines)
    assert not any(line.endswith(" ") for line in lines)


# -- expected improvement ---------------------------------------------------------------------------


def sample(search: str, trials: int) -> FinishedRun:
    run = read_run(SAMPLE)
    return replace(run, options=replace(run.options, search=search), trials=run.trials[:trials])


def test_other_methods_expect_their_recent_gains() -> None:
    assert expected_improvement(sample("tpe", 2)) > 0.5  # default dynamic batching over the baseline
    assert 0 <= expected_improvement(sample("tpe", 11)) < 0.02


def test_expectation_falls_while_nothing_meets_the_bounds() -> None:
    run = sample("tpe", 4)
    none = replace(run, problem=replace(run.problem, sla=Sla.from_bounds({"p95": 0.1})))
    assert expected_improvement(none) == pytest.approx(1 / 5)
    assert expected_improvement(replace(none, trials=())) == 1.0


def test_the_simulated_search_has_its_own_estimate() -> None:
    """The third trial gained 2 %, and the search expected more. It has converged after eleven trials."""
    assert expected_improvement(sample("simulated", 3)) > 0.1
    assert 0 < expected_improvement(sample("simulated", 11)) < 0.02
