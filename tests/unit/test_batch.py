"""The loop of a batch, on runs played from the sample in results/: what is done, kept, told, gone on with."""

from __future__ import annotations

import csv
import json
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from xml.etree import ElementTree

import pytest
from rich.console import Console

from optimizer.batches.batch import Batch
from optimizer.batches.console import print_batch
from optimizer.batches.folder import BatchFolder
from optimizer.batches.index import write_index
from optimizer.batches.junit import junit
from optimizer.batches.promise import promise
from optimizer.batches.record import BatchRecord, Change, begun, gone_on
from optimizer.batches.standing import described
from optimizer.batches.suite import Suite, read_suite
from optimizer.commands.batch import exit_code
from optimizer.errors import BadInputError, ServerFault
from optimizer.options import RunOptions
from optimizer.session import SATISFIED
from optimizer.store.finished import FinishedRun, read_run
from optimizer.store.run_folder import RunFolder

SAMPLE = Path("results/dlrm/sample")
SUITE = "name: nightly\nbudget: {budget}s\nentries: [{{model: [{models}], sla: {{p95: 20ms}}}}]\n"


@dataclass
class Played:
    """A ``GoOn`` that writes the sample's rows into the run's folder, as many as the granted time pays for; ``now``
    goes on with them. A model in ``broken`` raises, the one in ``interrupts`` is interrupted after its first rows."""

    broken: dict[str, Exception] = field(default_factory=dict)
    interrupts: str = ""
    now: float = 0.0
    calls: list[tuple[str, float, float]] = field(default_factory=list)

    def __call__(self, options: RunOptions, folder: RunFolder, confirm_share: float) -> str:
        started = self.now
        self.calls.append((options.model, options.budget_seconds, confirm_share))
        if options.model in self.broken:
            raise self.broken[options.model]
        rows = list(csv.DictReader((SAMPLE / "trials.csv").read_text().splitlines()))
        had = list(csv.DictReader(folder.trials.read_text().splitlines())) if folder.trials.exists() else []
        spent = _seconds(had)
        left = [row for row in rows if row not in had and bool(row["confirmation"]) == (confirm_share > 0)]
        for row in left:
            new = row["trial"] not in {one["trial"] for one in had}
            if new and len({one["trial"] for one in had}) == options.max_trials:
                break
            had.append(row)
            self.now = started + _seconds(had) - spent
            if _seconds(had) >= options.budget_seconds or options.model == self.interrupts:
                break
        searched = all(row in had for row in rows if not row["confirmation"])
        interrupted = options.model == self.interrupts
        status = "interrupted" if interrupted else "found"
        self._write(folder, had, options, status, [SATISFIED] if searched else [])
        return status

    def _write(
        self, folder: RunFolder, rows: list[dict[str, str]], options: RunOptions, status: str, notes: list[str]
    ) -> None:
        with folder.trials.open("w", newline="") as file:
            writer = csv.DictWriter(file, list(rows[0]), lineterminator="\n")
            writer.writeheader()
            writer.writerows(rows)
        told = json.loads((SAMPLE / "run.json").read_text())
        folder.write_info(options, {**told, "options": None, "status": status, "notes": notes, "times": {}})
        info = json.loads(folder.info.read_text())
        info["options"] = {**json.loads((SAMPLE / "run.json").read_text())["options"], "model": options.model}
        folder.info.write_text(json.dumps(info))
        folder.report.write_text("the run's own page")


def _seconds(rows: list[dict[str, str]]) -> float:
    deployed = {row["trial"]: float(row["deploy_seconds"] or 0) for row in rows}
    return sum(deployed.values()) + sum(float(row["measure_seconds"] or 0) for row in rows)


def suite_of(folder: Path, *models: str, budget: float = 600) -> Suite:
    path = folder / "nightly.yaml"
    path.write_text(SUITE.format(budget=budget, models=", ".join(models)))
    return read_suite(path)


def by_model(promises: dict[str, float]) -> Callable[[FinishedRun], float]:
    return lambda run: promises[run.options.model]


def run(suite: Suite, played: Played, folder: BatchFolder, record: BatchRecord | None = None) -> BatchRecord:
    record = record or begun(suite, suite.budget_seconds)
    lines: list[str] = []
    promised = by_model({entry.options.model: 0.1 for entry in suite.entries})
    return Batch(suite, folder, record, played, lines.append, promised, lambda: played.now).run()


@pytest.fixture
def folder(tmp_path: Path) -> BatchFolder:
    return BatchFolder.create(str(tmp_path / "results"), "nightly")


def test_all_are_searched_and_confirmed(tmp_path: Path, folder: BatchFolder) -> None:
    played = Played()
    found = run(suite_of(tmp_path, "a", "b"), played, folder)
    assert found.status == "finished"
    assert [entry.state for entry in found.entries] == ["found", "found"]
    told = json.loads((SAMPLE / "run.json").read_text())["result"]
    (first, _) = found.entries
    assert first.figure is not None
    assert first.figure.value == pytest.approx(told["recommended"]["throughput_infer_per_sec"])
    assert [first.figure.low, first.figure.high] == pytest.approx(told["confirmation"]["throughput_infer_per_sec"])
    assert first.verdict == "PASS"
    assert first.speedup == pytest.approx(told["speedup"])
    assert first.trials == told["trials"]
    assert folder.read() == found
    assert exit_code(found) == 0


def test_a_confirmation_that_was_disturbed_gives_no_interval(tmp_path: Path, folder: BatchFolder) -> None:
    (entry,) = run(suite_of(tmp_path, "a"), Played(), folder).entries
    assert entry.figure is not None
    assert entry.figure.low is not None
    table = folder.path / entry.folder / "trials.csv"
    rows = list(csv.DictReader(table.read_text().splitlines()))
    for row in rows:
        row |= {"stable": "false", "reason": "others took 40 % of the CPUs"} if row["confirmation"] else {}
    with table.open("w", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
    figure = described(entry, read_run(folder.path / entry.folder)).figure
    assert figure is not None
    assert (figure.low, figure.high) == (None, None)
    assert "others took 40 % of the CPUs" in figure.unsure


def test_the_minimums_come_first_and_the_confirmations_last(tmp_path: Path, folder: BatchFolder) -> None:
    played = Played()
    run(suite_of(tmp_path, "a", "b"), played, folder)
    assert [model for model, _, _ in played.calls[:2]] == ["a", "b"]
    shares = [share for _, _, share in played.calls]
    assert shares == sorted(shares)
    assert shares.count(1.0) == 2


def test_the_rest_goes_to_what_promises_most(tmp_path: Path, folder: BatchFolder) -> None:
    suite, played = suite_of(tmp_path, "a", "b", budget=150), Played()
    record = begun(suite, suite.budget_seconds)
    promised = by_model({"a": 0.01, "b": 0.2})
    found = Batch(suite, folder, record, played, lambda _: None, promised, lambda: played.now).run()
    assert [model for model, _, share in played.calls if share == 0] == ["a", "b", "b"]
    assert found.spent_seconds <= 150 + 3 * 5  # the last measurement of each slice


def test_a_failing_entry_stops_no_other(tmp_path: Path, folder: BatchFolder) -> None:
    broken = {"b": ServerFault("the server is gone"), "c": RuntimeError("a bug")}
    found = run(suite_of(tmp_path, "a", "b", "c", "d"), Played(broken), folder)
    assert [entry.state for entry in found.entries] == ["found", "failed", "failed", "found"]
    assert found.entries[1].reason == "the server is gone"
    assert found.entries[2].reason == "a fault of tune itself: RuntimeError: a bug"
    assert exit_code(found) == 3


def test_what_failed_is_tried_again_and_what_is_done_is_not(tmp_path: Path, folder: BatchFolder) -> None:
    suite = suite_of(tmp_path, "a", "b")
    before = run(suite, Played({"b": BadInputError("no model b")}), folder)
    played = Played()
    after = run(suite, played, folder, gone_on(folder.read(), suite, None))
    assert {model for model, _, _ in played.calls} == {"b"}
    assert [entry.state for entry in after.entries] == ["found", "found"]
    assert after.entries[0] == before.entries[0]


def test_an_interrupt_keeps_what_is_done_and_goes_on_there(tmp_path: Path, folder: BatchFolder) -> None:
    suite = suite_of(tmp_path, "a", "b", "c")
    found = run(suite, Played(interrupts="b"), folder)
    assert found.status == "interrupted"
    assert [entry.state for entry in found.entries] == ["searched", "waiting", "waiting"]
    assert found.entries[1].trials == 1
    assert exit_code(found) == 130
    measured = (folder.path / found.entries[1].folder / "trials.csv").read_text()
    after = run(suite, Played(), folder, gone_on(folder.read(), suite, None))
    assert [entry.state for entry in after.entries] == ["found"] * 3
    assert (folder.path / found.entries[1].folder / "trials.csv").read_text().startswith(measured)


def test_nothing_that_meets_the_bounds_or_a_regression_is_exit_code_1(tmp_path: Path) -> None:
    record = begun(suite_of(tmp_path, "a"), 60.0)
    for changed in ({"state": "none"}, {"state": "found", "regressed": True}):
        entries = tuple(replace(entry, **changed) for entry in record.entries)
        assert exit_code(replace(record, status="finished", entries=entries)) == 1


def test_a_suite_that_is_another_by_now_is_refused(tmp_path: Path, folder: BatchFolder) -> None:
    record = begun(suite_of(tmp_path, "a", "b"), 60.0)
    with pytest.raises(BadInputError, match=r"nightly\.yaml: b · p95 <= 20 ms has gone from it"):
        gone_on(record, suite_of(tmp_path, "a"), None)
    with pytest.raises(BadInputError, match="c · p95 <= 20 ms is new in it"):
        gone_on(record, suite_of(tmp_path, "a", "b", "c"), None)


@pytest.mark.parametrize(
    "text",
    ["", "[]", "{}", '{"suite": "a", "started": "", "budget_seconds": "x", "entries": []}'],
)
def test_a_broken_record_is_told_in_one_line(text: str, folder: BatchFolder) -> None:
    folder.record.write_text(text)
    with pytest.raises(BadInputError, match=r"batch\.json: not the record of a batch") as caught:
        folder.read()
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(("name", "value"), [("folder", "../up"), ("figure", {"metric": "speed", "value": 1.0})])
def test_a_record_that_leads_astray_is_none(name: str, value: object, tmp_path: Path, folder: BatchFolder) -> None:
    folder.write(begun(suite_of(tmp_path, "a"), 60.0))
    told = json.loads(folder.record.read_text())
    told["entries"][0][name] = value
    folder.record.write_text(json.dumps(told))
    with pytest.raises(BadInputError, match="not the record of a batch"):
        folder.read()


# -- what is told -----------------------------------------------------------------------------------------------


@pytest.fixture
def mixed(tmp_path: Path, folder: BatchFolder) -> BatchRecord:
    """One of each state."""
    found = run(suite_of(tmp_path, "a", "b"), Played({"b": ServerFault("gone \x00 & <away>")}), folder)
    one, failed = found.entries
    none = replace(one, model="c", state="none", figure=None, headline="no configuration meets p95 <= 20 ms")
    lost = Change("lost", "2026-11-01", "lost 6% since 2026-11-01", -0.06)
    regressed = replace(one, model="d", change=lost, regressed=True)
    waiting = replace(one, model="<i>e</i>", state="waiting", figure=None, speedup=None)
    return replace(found, entries=(one, failed, none, regressed, waiting), gone=("old",))


def test_junit_has_a_case_for_each(mixed: BatchRecord) -> None:
    """Elements, attributes and counts as the schema of Jenkins (junit-10.xsd) has them."""
    root = ElementTree.fromstring(junit(mixed))
    assert root.tag == "testsuites"
    (suite,) = root
    assert suite.tag == "testsuite"
    counts = {name: suite.get(name) for name in ("tests", "failures", "errors", "skipped")}
    assert counts == {"tests": "5", "failures": "2", "errors": "1", "skipped": "1"}
    assert set(suite.attrib) <= {"name", "tests", "failures", "errors", "skipped", "time", "timestamp"}
    assert [case.tag for case in suite] == ["testcase"] * 5
    kinds = [[child.tag for child in case if child.tag != "system-out"] for case in suite]
    assert kinds == [[], ["error"], ["failure"], ["failure"], ["skipped"]]
    for case in suite:
        assert set(case.attrib) == {"classname", "name", "time"}
        assert float(case.get("time", "")) >= 0
        assert all(set(child.attrib) <= {"type", "message"} for child in case)
    assert suite[1][0].get("message") == "gone \\x00 & <away>"


def test_the_page_links_to_each_report_and_needs_nothing_else(mixed: BatchRecord, folder: BatchFolder) -> None:
    write_index(folder, mixed)
    page = folder.index.read_text()
    assert f'href="{mixed.entries[0].folder}/report.html"' in page
    assert (folder.path / mixed.entries[0].folder / "report.html").exists()
    assert mixed.entries[1].folder not in page
    assert "&lt;i&gt;e&lt;/i&gt;" in page
    assert "<script" not in page
    assert "http" not in page.replace("http-equiv", "")
    assert "prefers-color-scheme: dark" in page


def test_the_table_fits_80_columns(mixed: BatchRecord, folder: BatchFolder) -> None:
    console = Console(width=80, record=True)
    with console.capture() as captured:
        print_batch(console, mixed, folder)
    lines = captured.get().splitlines()
    assert all(len(line) <= 80 for line in lines if not line.startswith("index"))
    assert lines[0] == "nightly: 2 of 5 runs found a configuration, 1 found none, 1 failed, 1 regressed"
    assert any("13,315 infer/s" in line and "PASS" in line for line in lines)


# -- what another deployment promises ---------------------------------------------------------------------------


def sample(search: str, trials: int) -> FinishedRun:
    found = read_run(SAMPLE)
    return replace(found, options=replace(found.options, search=search), trials=found.trials[:trials])


def test_other_methods_promise_what_they_gained_of_late() -> None:
    assert promise(sample("tpe", 2)) > 0.5  # plain dynamic batching over the baseline
    assert 0 <= promise(sample("tpe", 11)) < 0.02


def test_while_nothing_meets_the_bound_the_odds_fall() -> None:
    run = sample("tpe", 4)
    none = replace(run, problem=replace(run.problem, constraints=(replace(run.problem.constraints[0], bound=0.1),)))
    assert promise(none) == pytest.approx(1 / 5)
    assert promise(replace(none, trials=())) == 1.0


def test_the_simulated_search_tells_its_own_estimate() -> None:
    """It had ended there: less than it goes on for. Fewer candidates, so that they are ranked sooner."""
    run = sample("simulated", 11)
    few = replace(run.problem.space, max_queue_delay_us=(0,), preferred_batch_sizes=("none",))
    assert 0 < promise(replace(run, problem=replace(run.problem, space=few))) < 0.02
