"""A run is read back from its folder alone."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from objectives.metrics import METRICS
from objectives.sla import Constraint, parse_constraint
from optimizer.errors import BadInputError
from optimizer.store.finished import read_run

SAMPLE = Path("results/dlrm/sample")


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return Path(shutil.copytree(SAMPLE, tmp_path / "dlrm" / "sample"))


def test_it_amounts_to_what_the_run_said(run: Path) -> None:
    found = read_run(run)
    told = json.loads((run / "run.json").read_text())
    assert found.outcome is not None
    assert found.outcome.recommended is not None
    assert found.status == told["status"]
    assert found.name == "dlrm/sample"
    assert found.outcome.speedup == pytest.approx(told["result"]["speedup"])
    assert found.outcome.recommended.trial == told["result"]["recommended"]["trial"]
    assert found.problem.constraints == (Constraint("latency-p95", 20.0),)
    assert len(found.problem.space) == told["problem"]["candidates"]


def test_the_results_folder_is_looked_in(run: Path) -> None:
    assert read_run("dlrm/sample", str(run.parent.parent)).folder.path == run


def test_a_torn_line_is_left_out_and_left_there(run: Path) -> None:
    whole = read_run(run).trials
    with (run / "trials.csv").open("a") as table:
        table.write("dlrm,99,4")
    before = (run / "trials.csv").read_bytes()
    assert read_run(run).trials == whole
    assert (run / "trials.csv").read_bytes() == before


def test_a_run_that_measured_nothing_has_no_outcome(run: Path) -> None:
    (run / "trials.csv").unlink()
    assert read_run(run).outcome is None


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("", "not the record of a run"),
        ("[]", "not the record of a run"),
        ('{"options": {}}', "not the record of a run"),
        ('{"options": {"model": "dlrm"}}', "not the record of a run"),
        ('{"options": {"model": "dlrm"}, "problem": {}, "hardware": {}}', "no 'request_batch_size'"),
    ],
)
def test_what_is_no_record_is_told_in_one_line(run: Path, text: str, told: str) -> None:
    (run / "run.json").write_text(text)
    with pytest.raises(BadInputError, match=told) as caught:
        read_run(run)
    assert "\n" not in str(caught.value)


def test_a_folder_without_a_run(tmp_path: Path) -> None:
    with pytest.raises(BadInputError, match=r"no run\.json there"):
        read_run(tmp_path)


@pytest.mark.parametrize("metric", sorted(METRICS))
@pytest.mark.parametrize("bound", [20.0, 0.5, 4294967296.0])
def test_a_bound_is_read_as_it_is_written(metric: str, bound: float) -> None:
    assert parse_constraint(str(Constraint(metric, bound))) == Constraint(metric, bound)
