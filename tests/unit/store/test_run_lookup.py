"""The list of runs, the names that commands take for a run, and the deletion of runs."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from objectives.intervals import ConfidenceInterval
from optimizer.core.errors import BadInputError, EnvironmentFault
from optimizer.core.locks import LOCK_FILE, file_lock
from optimizer.options.run_options import RunOptions
from optimizer.store.run_folder import SWEEP_FILE, RunFolder
from optimizer.store.run_lookup import (
    delete_run,
    find_deletable,
    find_run,
    find_sweep,
    list_batches,
    list_runs,
    newest_run,
    runs_in,
)
from optimizer.study.run_request import read_run_request
from optimizer.study.warm_start import read_warm_start
from tests.run_folders import write_run

RESULT = {"recommended": {"throughput_infer_per_sec": 15984.0}}
PROBLEM = {"constraints": ["p95 <= 20 ms"]}


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the current folder, in which the results are. Its parent has no runs of other tests."""
    folder = tmp_path / "here"
    folder.mkdir()
    monkeypatch.chdir(folder)
    return folder


def record(run: str, status: str = "found", **rest: object) -> RunFolder:
    """Write the record of ``<model>/<run>`` in results/."""
    folder = RunFolder(Path("results", run))
    (folder.path / "logs").mkdir(parents=True)
    folder.write_info(RunOptions(folder.path.parent.name), {"status": status, **rest})
    return folder


def unexpected(holder: str) -> None:
    raise AssertionError(f"held by {holder}")


# -- names --------------------------------------------------------------------------------------------------------


def record_sweep(sweep: str) -> RunFolder:
    """Write the record of the sweep ``<model>/<run>`` in results/."""
    folder = RunFolder(Path("results", sweep))
    folder.path.mkdir(parents=True)
    (folder.path / SWEEP_FILE).write_text('{"options": {"model": "dlrm"}}')
    return folder


def take_run(name: str) -> object:
    return find_run(name, "results", "RUN")


def take_sweep(name: str) -> object:
    return find_sweep(name, "results", "RUN")


def take_study(name: str) -> object:
    return read_warm_start(name, "results", 1)


@pytest.mark.parametrize("name", ["results/dlrm", "results/dlrm/", "results", "../here/results"])
@pytest.mark.parametrize("take", [take_run, take_sweep, take_study])
def test_a_folder_of_runs_is_refused_with_its_newest_run(name: str, take: Callable[[str], object]) -> None:
    newest = "20261122-091502"
    for run in ("20261121-072139", newest):
        (record_sweep if take is take_sweep else record)(f"dlrm/{run}")
    with pytest.raises(BadInputError) as caught:
        take(name)
    about, kind = ("--warm-start" if take is take_study else "RUN"), ("sweep" if take is take_sweep else "run")
    path = Path(name) / newest if "dlrm" in name else Path(name) / "dlrm" / newest
    start, _, shown = str(caught.value).partition(": is a folder of ")
    assert (start.rstrip("/"), shown) == (
        f"{about} {name}".rstrip("/"),
        f"{kind}s; give one of them, such as the newest: {path}",
    )


def test_a_folder_that_holds_only_sweeps_or_only_runs_is_refused_with_what_it_holds() -> None:
    record("mlp/20261121-072139")
    record_sweep("dlrm/20261122-091502")
    with pytest.raises(BadInputError) as caught:
        take_run("results/dlrm")
    assert str(caught.value) == (
        "RUN results/dlrm: is a folder of sweeps; give the folder of a run instead, because it holds none (newest "
        "sweep: results/dlrm/20261122-091502)"
    )
    with pytest.raises(BadInputError, match=r"mlp: is a folder of runs; give the folder of a sweep instead, because"):
        take_sweep("results/mlp")
    with pytest.raises(BadInputError, match=r"dlrm: is a folder of sweeps; give one of them, such as the newest"):
        take_study("results/dlrm")


def test_a_run_is_no_sweep_to_resume() -> None:
    record("dlrm/20261121-072139")
    for name, where in (("results/dlrm/20261121-072139", ""), ("dlrm", " (results/dlrm/20261121-072139)")):
        with pytest.raises(BadInputError) as caught:
            take_sweep(name)
        assert str(caught.value) == (
            f"RUN {name}: is a run{where} and no sweep; `tune --resume results/dlrm/20261121-072139` continues it"
        )


def test_latest_and_a_model_stand_for_the_newest_run() -> None:
    for run in ("dlrm/20261121-072139", "dlrm/20261122-091502-2", "dlrm/20261122-091502-10", "mlp/20261123-010000"):
        record(run)
    record("dlrm/20261122-091502-9").info.unlink()
    assert find_run("latest", "results").study_name == "mlp/20261123-010000"
    for name in ("dlrm", "dlrm/"):
        assert find_run(name, "results").study_name == "dlrm/20261122-091502-10"
    assert [run.path.name for run in runs_in("results", "dlrm")] == [
        "20261122-091502-10",
        "20261122-091502-2",
        "20261121-072139",
    ]


def test_a_run_with_another_name_counts_from_its_record_not_from_its_file() -> None:
    record("dlrm/sample", written="2001-01-01T10:00:00+0000")
    record("dlrm/20020101-100000")
    assert find_run("latest", "results").path.name == "20020101-100000"
    record("dlrm/copy", written="2003-01-01T10:00:00+0000")
    assert find_run("latest", "results").path.name == "copy"


@pytest.mark.parametrize("written", [None, 5, "soon"])
def test_a_record_without_a_valid_time_counts_from_its_file(written: object) -> None:
    old = record("dlrm/sample", written=written)
    os.utime(old.info, (0, 0))
    record("dlrm/20020101-100000")
    record("dlrm/20269999-999999").info.write_text("{")
    assert [run.path.name for run in runs_in("results")][1:] == ["20020101-100000", "sample"]


def test_a_path_takes_precedence_over_a_name() -> None:
    record("dlrm/20261121-072139")
    record("other/run")
    Path("results/other/run").rename("dlrm")
    Path("results/dlrm/20261121-072139").rename("results/latest")
    assert find_run("dlrm", "results").path == Path("dlrm")
    assert find_run("latest", "results").path == Path("results/latest")


def test_a_folder_that_is_no_run_does_not_hide_a_model() -> None:
    record("dlrm/20261121-072139")
    Path("dlrm").mkdir()
    assert find_run("dlrm", "results").study_name == "dlrm/20261121-072139"


def test_verifications_and_batches_are_no_runs_of_a_model() -> None:
    record("dlrm/20261121-072139")
    record("batches/nightly/20261122-091502/dlrm")
    Path("results/dlrm/20261121-072139/verify/20261123-010000/logs").mkdir(parents=True)
    assert find_run("latest", "results").study_name == "dlrm/20261121-072139"
    assert newest_run("batches", "results") is None
    assert [run.name for run in list_runs("results")] == ["20261121-072139"]
    (entry,) = list_runs("results/batches/nightly")
    assert (entry.model, entry.name) == ("20261122-091502", "dlrm")


@pytest.mark.parametrize("name", ["nowhere", "latest", "..", "dlrm/..", "a\0b", "x" * 5000, ""])
def test_a_run_that_is_not_found_is_reported_with_the_command_that_lists_runs(name: str) -> None:
    with pytest.raises(BadInputError) as caught:
        find_run(name, "my results", "RUN")
    message = str(caught.value)
    assert message.isprintable()
    assert len(message) < 1000
    assert message.startswith("RUN ")
    assert "my results" in message
    assert message.endswith("(`tune runs --results 'my results'` lists runs)")


def test_the_run_that_a_warm_start_names_is_stored_by_its_folder(here: Path) -> None:
    old = write_run(here / "results" / "dlrm")
    old.rename(old.with_name("20261121-072139"))
    for name in ("latest", "dlrm"):
        options = read_run_request("mlp", {"warm-start": name}).options
        assert options.warm_start == "results/dlrm/20261121-072139"
        assert read_warm_start(name, "results", 2).trials == read_warm_start(options.warm_start, "results", 2).trials
    Path("dlrm").touch()
    assert read_run_request("mlp", {"warm-start": "dlrm"}).options.warm_start == "dlrm"


def test_the_newest_run_is_continued_by_its_name(here: Path) -> None:
    write_run(here / "results" / "dlrm")
    for name in ("latest", "dlrm"):
        request = read_run_request(None, {"resume": name})
        assert request.resumed == RunFolder(Path("results/dlrm/run"))
        assert request.options.sla_ms == {"p95": 20.0}


# -- the list -----------------------------------------------------------------------------------------------------


def test_a_run_is_listed_with_verdict_throughput_bound_and_size() -> None:
    run = record("dlrm/20261121-072139", verdict="PASS", result=RESULT, problem=PROBLEM, written="2026-11-21")
    (run.path / "logs" / "server.log").write_bytes(bytes(1000))
    (run.path / "verify" / "20261122-010000").mkdir(parents=True)
    (run.path / "verify" / "20261122-010000" / "trials.csv").write_bytes(bytes(2000))
    (listed,) = list_runs("results")
    assert listed.document() == {
        "model": "dlrm",
        "run": "20261121-072139",
        "batch": None,
        "folder": "results/dlrm/20261121-072139",
        "kind": "run",
        "status": "found",
        "verdict": "PASS",
        "throughput_infer_per_sec": 15984.0,
        "sla": ["p95 <= 20 ms"],
        "written": "2026-11-21",
        "size_bytes": run.info.stat().st_size + 3000,
        "fault": None,
    }


@pytest.mark.parametrize(
    ("stored", "interval"),
    [
        ([15500.0, 16400.0], ConfidenceInterval(15500.0, 16400.0)),
        ([15500.0, None], ConfidenceInterval(15500.0, math.inf)),
        ([None, 16400.0], None),
        ([15500.0], None),
    ],
)
def test_a_run_is_listed_with_the_interval_of_its_confirmation(
    stored: list[float], interval: ConfidenceInterval | None
) -> None:
    record("dlrm/20261121-072139", result=RESULT | {"confirmation": {"throughput_infer_per_sec": stored}})
    (listed,) = list_runs("results")
    assert listed.throughput_interval == interval


def test_runs_of_one_model_are_listed_and_a_model_without_runs_is_refused() -> None:
    for run in ("dlrm/20261121-072139", "mlp/20261123-010000", "dlrm/20261122-091502"):
        record(run)
    assert [(run.model, run.name) for run in list_runs("results", "dlrm")] == [
        ("dlrm", "20261122-091502"),
        ("dlrm", "20261121-072139"),
    ]
    with pytest.raises(BadInputError, match="bert: no run of this model; results has runs of dlrm, mlp"):
        list_runs("results", "bert")
    assert list_runs("nowhere") == []


def test_a_run_without_a_result_is_running_or_killed() -> None:
    run = record("dlrm/20261121-072139", "running")
    assert [listed.status for listed in list_runs("results")] == ["killed"]
    with run.locked():
        assert [listed.status for listed in list_runs("results")] == ["running"]
        run.info.unlink()  # a new run, before its first record
        assert [(listed.status, listed.fault) for listed in list_runs("results")] == [("running", "")]


def test_a_verified_run_is_running() -> None:
    run = record("dlrm/20261121-072139")
    again = run.path / "verify" / "20261122-010000"
    again.mkdir(parents=True)
    with RunFolder(again).locked():
        assert [listed.status for listed in list_runs("results")] == ["running"]


def test_a_run_that_is_served_keeps_its_status_and_is_not_deleted() -> None:
    run = record("dlrm/20261121-072139")
    (before,) = list_runs("results")
    served = run.path / "serve" / "20261122-010000"
    served.mkdir(parents=True)
    with RunFolder(served).locked():
        assert [listed.status for listed in list_runs("results")] == [before.status]
        with pytest.raises(EnvironmentFault, match=f"process {os.getpid()} on .* uses this run; wait until it ends"):
            find_deletable("dlrm/20261121-072139", "results")
        with pytest.raises(EnvironmentFault, match="uses this run"):
            delete_run(run)
    delete_run(run)
    assert not run.path.exists()


FAULTS: dict[str, tuple[str | bytes | None, str]] = {
    "cut": ('{"schema_version": 1, "opt', "not the record of a run ("),
    "empty": ("", "not the record of a run ("),
    "no object": ("[]", "not the record of a run (not a JSON object)"),
    "deep": ("[" * 100_000, "not the record of a run ("),
    "another program's": ('{"schema_version": 1}', "not the record of a run (no 'options')"),
    "newer": ('{"schema_version": 99}', "schema_version 99, but this version of tune reads"),
    "no text": (b"\xff\xfe", "not the record of a run ("),
    "missing": (None, "no such file; check the path"),
}


@pytest.mark.parametrize("case", FAULTS)
def test_a_damaged_run_is_listed_with_its_fault_in_one_line(case: str) -> None:
    content, fault = FAULTS[case]
    run = record("dlrm/20261121-072139")
    run.info.unlink()
    if content is not None:
        run.info.write_bytes(content if isinstance(content, bytes) else content.encode())
    (listed,) = list_runs("results")
    assert listed.status == "damaged"
    assert fault in listed.fault
    assert listed.fault.isprintable()
    assert json.dumps(listed.document())


@pytest.mark.parametrize("value", [None, True, "a\x1b[31mb\nc", [], {}, 1e300, float("nan"), -1, 10**400, ["\x1b"]])
def test_a_record_with_any_values_is_listed_on_one_line(value: object) -> None:
    record("dlrm/1", verdict=value, result=value, problem=value, written=value)
    record("dlrm/2", result={"recommended": value}, problem={"constraints": value})
    of_point = {"throughput_infer_per_sec": value}
    record("dlrm/3", result={"recommended": of_point, "confirmation": of_point}, problem={"constraints": [value]})
    (record("dlrm/4").path / "run.json").write_text(json.dumps({"schema_version": 1, "options": {}, "status": value}))
    listed = list_runs("results")
    assert len(listed) == 4
    for run in listed:
        assert run.throughput_infer_per_sec is None
        assert all(text.isprintable() for text in (run.status, run.verdict, run.written, *run.bounds))
        assert json.dumps(run.document(), allow_nan=False)


def test_a_sweep_is_listed_and_can_be_deleted() -> None:
    sweep = Path("results/dlrm/20261121-072139")
    sweep.mkdir(parents=True)
    (sweep / "sweep.json").write_text(
        '{"status": "interrupted", "options": {"model": "dlrm"}, "began": "2026-11-21"}'
    )
    (listed,) = list_runs("results")
    assert (listed.kind, listed.status, listed.written) == ("sweep", "interrupted", "2026-11-21")
    found = newest_run("dlrm", "results", "sweep.json")
    assert found is not None
    assert found.path == sweep
    assert newest_run("dlrm", "results") is None
    (sweep / "sweep.json").write_text("[]")
    assert [(run.status, "not the record of a sweep" in run.fault) for run in list_runs("results")] == [
        ("damaged", True)
    ]
    delete_run(find_deletable("dlrm/20261121-072139", "results").folder)
    assert not sweep.exists()


# -- deletion -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["dlrm/20261121-072139", "results/dlrm/20261121-072139", "latest"])
def test_a_run_is_deleted_by_its_name_or_path(name: str) -> None:
    run, other = record("dlrm/20261121-072139"), record("dlrm/20261120-072139")
    (run.path / "verify" / "1").mkdir(parents=True)
    (run.path / "link").symlink_to(other.path)
    found = find_deletable(name, "results")
    assert found.folder == run
    delete_run(found.folder)
    assert not run.path.exists()
    assert [path.name for path in other.path.iterdir()] != []


def test_a_run_elsewhere_is_deleted_by_its_path_only(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = record("dlrm/sample")
    (here / "project" / "results").mkdir(parents=True)
    (here / "project" / "results" / "moved").symlink_to(here / "results" / "dlrm")
    monkeypatch.chdir(here / "project")
    for name in ("../../results/dlrm/sample", "moved/sample"):
        with pytest.raises(BadInputError, match=r"^--delete .*: leads out of results; give the path of the folder"):
            find_deletable(name, "results")
    found = find_deletable("../results/dlrm/sample", "results")
    delete_run(found.folder)
    assert not (here / run.path).exists()


@pytest.mark.parametrize("content", ["{", None])
def test_a_damaged_run_in_the_results_can_be_deleted(content: str | None) -> None:
    run = record("dlrm/20261121-072139")
    run.info.unlink()
    if content is not None:
        run.info.write_text(content)
    delete_run(find_deletable("dlrm/20261121-072139", "results").folder)
    assert list(Path("results/dlrm").iterdir()) == []


def test_what_is_not_certainly_one_run_is_not_deleted(here: Path) -> None:
    run = record("dlrm/20261121-072139")
    (run.path / "best").mkdir()
    verified = run.path / "verify" / "20261122-010000"
    (verified / "logs").mkdir(parents=True)
    (verified / "verify.json").write_text("{}")
    record("batches/nightly/20261122-091502/dlrm")
    Path("results/batches/nightly/20261122-091502/batch.json").write_text("{}")
    for kept, content in {"release": '{"entries": []}', "20261101-010000": "{}"}.items():
        Path("ci", kept).mkdir(parents=True)
        Path("ci", kept, "batch.json").write_text(content)
    Path("results/dlrm/link").symlink_to(run.path.resolve())
    Path("other").mkdir()
    Path("other/run.json").write_text('{"name": "another program"}')
    record("mixed/run")
    record("mixed/run/dlrm/20261121-072139")
    refused = {
        "": "write a path",
        "nowhere": "no run.json there nor in results/nowhere",
        "dlrm": "holds runs; give the folder of each, such as results/dlrm/",
        "results": "holds runs; give the folder of each",
        "nightly": "holds batches; give the folder of each, such as results/batches/nightly/20261122-091502",
        "results/batches": "holds batches; give the folder of each",
        "ci/release": "not recognized as a batch: remove it with rm",
        "ci/20261101-010000": "not recognized as a batch: remove it with rm; ci/20261101-010000/batch.json: not the",
        "mixed/run": "holds runs; give the folder of each",
        "results/dlrm/20261121-072139/best": "no run.json there",
        "results/dlrm/20261121-072139/run.json": "no run.json there",
        str(verified): "no run.json there",
        "/nowhere": "/nowhere: no run.json there, and results",
        "dlrm/link": "is a link; give the folder that it leads to",
        "other": "not recognized as a run: remove it with rm; other/run.json: not the record of a run",
        "x" * 5000: "no run.json there nor in",
    }
    before = sorted(here.rglob("*"))
    for name, message in refused.items():
        with pytest.raises(BadInputError) as caught:
            find_deletable(name, "results")
        assert str(caught.value).startswith("--delete ")
        assert message in str(caught.value)
        assert "\n" not in str(caught.value)
    assert sorted(here.rglob("*")) == before


@pytest.mark.parametrize("name", ["nightly/20261122-091502", "results/batches/nightly/20261122-091502"])
@pytest.mark.parametrize("content", ['{"entries": []}', "{"])
def test_a_batch_is_deleted_with_its_runs(name: str, content: str) -> None:
    run, other = record("batches/nightly/20261122-091502/dlrm"), record("batches/nightly/20261123-091502/dlrm")
    (run.path.parent / "batch.json").write_text(content)
    assert [(batch.kind, batch.model, batch.name) for batch in list_batches("results")] == [
        ("batch", "nightly", "20261122-091502")
    ]
    with file_lock(run.path / LOCK_FILE, unexpected), pytest.raises(EnvironmentFault, match="uses this batch; wait"):
        find_deletable(name, "results")
    delete_run(find_deletable(name, "results").folder)
    assert not run.path.parent.exists()
    assert other.info.exists()


@pytest.mark.parametrize("place", ["", "verify/20261122-010000", ".."])
def test_a_run_that_a_process_uses_is_not_deleted(place: str) -> None:
    """A run is used by a process that continues it, verifies it, or runs its batch."""
    run = record("dlrm/20261121-072139")
    used = run.path / place
    used.mkdir(parents=True, exist_ok=True)
    with file_lock(used / LOCK_FILE, unexpected):
        for attempt in (lambda: find_deletable("latest", "results"), lambda: delete_run(run)):
            with pytest.raises(EnvironmentFault) as caught:
                attempt()
            assert str(caught.value).startswith(f"results/dlrm/20261121-072139: process {os.getpid()} on ")
            assert str(caught.value).endswith(" uses this run; wait until it ends, or stop it")
    assert run.info.exists()
    delete_run(run)
    assert not run.path.exists()


def test_a_lock_that_is_a_link_is_not_written(here: Path) -> None:
    run = record("dlrm/20261121-072139")
    (here / "mine").write_text("mine")
    (run.path / LOCK_FILE).symlink_to(here / "mine")
    delete_run(find_deletable("latest", "results").folder)
    assert not run.path.exists()
    assert (here / "mine").read_text() == "mine"
