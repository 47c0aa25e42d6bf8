"""The folder of a run: write errors lose no data, and options hold in another current folder."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from optimizer.core.candidate import Candidate
from optimizer.core.errors import BadInputError, EnvironmentFault
from optimizer.core.files import write_atomically
from optimizer.core.trial import LoadPoint, Trial
from optimizer.options.option_reader import external_values, move_options
from optimizer.options.run_options import RunOptions
from optimizer.store.run_folder import RunFolder
from optimizer.store.run_lookup import find_run
from optimizer.store.trials_table import TrialsTable
from tests.conftest import measurement
from tests.run_folders import change_info
from tests.storage_fixtures import file_size_limit

# -- write errors -----------------------------------------------------------------------------------------------


def append_a_row(path: Path) -> None:
    table(path).append(Trial(0, Candidate(8)), LoadPoint(1, 2), measurement(1, 1))


def table(path: Path) -> TrialsTable:
    return TrialsTable(path, "m", {})


def test_a_run_in_the_current_folder_has_the_study_that_it_began(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = RunFolder.create(str(tmp_path), "dlrm")
    monkeypatch.chdir(folder.path)
    assert RunFolder(Path()).study_name == folder.study_name


def test_a_file_that_cannot_be_written_whole_stays_as_it_was(tmp_path: Path) -> None:
    path = tmp_path / "run.json"
    write_atomically(path, "old")
    message = f"^cannot write {path}: File too large; check that disk, then continue with `tune --resume`$"
    with file_size_limit(50_000), pytest.raises(EnvironmentFault, match=message):
        write_atomically(path, 100_000 * "x")
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


def test_a_row_of_which_half_was_written_is_cut_off_and_written_again(tmp_path: Path) -> None:
    path = tmp_path / "trials.csv"
    table(path).append(Trial(0, Candidate(8)), LoadPoint(1, 1), measurement(1, 1))
    before = path.read_bytes()
    message = f"^cannot write {path}: File too large"
    with file_size_limit(len(before) + 20), pytest.raises(EnvironmentFault, match=message):
        append_a_row(path)
    assert len(path.read_bytes()) == len(before) + 20
    (trial,) = table(path).read()
    assert [load.concurrency for load, _ in trial.measurements] == [1]
    assert path.read_bytes() == before
    append_a_row(path)
    (trial,) = table(path).read()
    assert [load.concurrency for load, _ in trial.measurements] == [1, 2]


def test_a_full_disk_is_named_with_the_remedy() -> None:
    full = Path("/dev/full")
    if not full.exists():
        pytest.skip("no /dev/full here")
    with pytest.raises(EnvironmentFault) as caught:
        append_a_row(full)
    assert str(caught.value) == (
        "cannot write /dev/full: No space left on device; free space there, then continue with `tune --resume`"
    )


def test_a_file_is_replaced_although_a_link_has_the_name_of_its_draft(tmp_path: Path) -> None:
    """In a folder from someone else the link may lead to a file of the user."""
    (tmp_path / "mine").write_text("keep")
    (tmp_path / ".run.json.new").symlink_to(tmp_path / "mine")
    write_atomically(tmp_path / "run.json", "new")
    assert [(tmp_path / name).read_text() for name in ("mine", "run.json")] == ["keep", "new"]
    assert not (tmp_path / "run.json").is_symlink()


# -- options in another folder ----------------------------------------------------------------------------------

GIVEN = RunOptions("models/mine", {"p95": 10.0})


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the current folder of a run, with a model, a profile, and a profile that is given by its name."""
    project = tmp_path / "project"
    for folder in ("models/mine", "configs", "results/mine/run"):
        (project / folder).mkdir(parents=True)
    for file in ("mine.yaml", "recorded.txt"):
        (project / file).touch()
    (project / "configs" / "named.yaml").touch()
    monkeypatch.chdir(project)
    return project


def started(project: Path, options: RunOptions) -> RunFolder:
    folder = RunFolder(Path("results/mine/run"))
    folder.write_info(options, {"status": "running"})
    assert folder.read_options() == options
    return RunFolder(project / folder.path)


SEEN_FROM_ANOTHER_FOLDER: dict[str, tuple[dict[str, str], dict[str, str]]] = {
    "a model's folder": ({}, {"model": "{project}/models/mine"}),
    "a profile": ({"model": "./mine.yaml"}, {"model": "{project}/mine.yaml"}),
    "a profile's name": ({"model": "named"}, {"model": "{project}/configs/named.yaml"}),
    "a name that comes with tune": ({"model": "dlrm"}, {"model": "dlrm"}),
    "a repository": (
        {"model": "mine", "model_repository": "models"},
        {"model": "mine", "model_repository": "{project}/models"},
    ),
    "recorded arrivals": (
        {"model": "dlrm", "request_times": "recorded.txt"},
        {"model": "dlrm", "request_times": "{project}/recorded.txt"},
    ),
    "samples": ({"model": "dlrm", "input_data": "a.npz"}, {"model": "dlrm", "input_data": "{project}/a.npz"}),
    "random requests": ({"model": "dlrm", "input_data": "random"}, {"model": "dlrm", "input_data": "random"}),
    "a journal": ({"model": "dlrm", "storage": "a/study"}, {"model": "dlrm", "storage": "{project}/a/study"}),
    "sqlite": (
        {"model": "dlrm", "storage": "sqlite:///study.db"},
        {"model": "dlrm", "storage": "sqlite:///{project}/study.db"},
    ),
    "a database of a server": (
        {"model": "dlrm", "storage": "postgresql://u@h/db"},
        {"model": "dlrm", "storage": "postgresql://u@h/db"},
    ),
    "absolute": (
        {"model": "/models/mine", "storage": "sqlite:////study.db"},
        {"model": "/models/mine", "storage": "sqlite:////study.db"},
    ),
}


@pytest.mark.parametrize("case", SEEN_FROM_ANOTHER_FOLDER)
def test_paths_are_seen_from_where_the_run_was_started(
    case: str, project: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options, expected = (
        {name: text.format(project=project) for name, text in side.items()} for side in SEEN_FROM_ANOTHER_FOLDER[case]
    )
    folder = started(project, replace(GIVEN, **options))  # type: ignore[arg-type]
    monkeypatch.chdir(tmp_path)
    assert folder.read_options() == replace(GIVEN, **expected)  # type: ignore[arg-type]


def test_a_project_that_was_moved_takes_its_runs_along(
    project: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    started(project, GIVEN)
    monkeypatch.chdir(tmp_path)
    moved = project.rename(tmp_path / "moved")
    options = RunFolder(moved / "results/mine/run").read_options()
    assert options == replace(GIVEN, model=f"{moved}/models/mine")


def test_a_run_of_an_earlier_version_has_paths_from_here(project: Path) -> None:
    folder = started(project, GIVEN)
    info = json.loads(folder.info.read_text())
    del info["started_in"]
    folder.info.write_text(json.dumps(info))
    assert folder.read_options() == GIVEN


@pytest.mark.parametrize("started_in", [5, ["a"], "a\0b"])
def test_an_invalid_starting_folder_is_reported_on_one_line(started_in: object, project: Path) -> None:
    folder = started(project, GIVEN)
    change_info(folder.path, started_in=started_in)
    with pytest.raises(BadInputError, match=r"run\.json: not the record of a run") as caught:
        folder.read_options()
    assert "\n" not in str(caught.value)


def test_the_inputs_of_a_run_are_found_from_another_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "began/results/m/1").mkdir(parents=True)
    (tmp_path / "began/other").mkdir()
    monkeypatch.chdir(tmp_path)
    for name, path in (("other", "began/other"), ("m/1", "began/results/m/1")):
        assert move_options(Path("began"), RunOptions("m", warm_start=name)).warm_start == path
    assert move_options(Path("began"), RunOptions("m")).warm_start is None


def test_folders_for_the_container_are_found_from_another_folder(
    project: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mounts = ("./weights:/weights:ro", "/data:/data", "~/plugins:/plugins")
    folder = started(project, replace(GIVEN, docker_mounts=mounts))
    monkeypatch.chdir(tmp_path)
    options = folder.read_options()
    assert options.docker_mounts == (f"{project}/weights:/weights:ro", *mounts[1:])
    assert external_values(options)["docker-mount"][0] == f"{project}/weights:/weights:ro"


def test_a_run_that_is_not_there_is_named_on_one_short_line(project: Path) -> None:
    with pytest.raises(BadInputError) as caught:
        find_run("a\x85b\nc" + "d" * 5000, "results")
    assert str(caught.value).isprintable()
    assert len(str(caught.value)) < 1000


@pytest.mark.parametrize("run", ["results/mine/sweep", "mine/sweep", "mine"])
def test_a_sweep_is_named_with_the_commands_that_take_it(run: str, project: Path) -> None:
    (project / "results/mine/sweep").mkdir()
    (project / "results/mine/sweep/sweep.json").write_text("{}")
    where = "" if run.startswith("results") else " (results/mine/sweep)"
    said = f"run {run}: is a sweep{where}, which has no recommendation; "
    continued = "`tune sweep --resume results/mine/sweep` continues it"
    with pytest.raises(BadInputError) as caught:
        find_run(run, "results", "run")
    assert str(caught.value) == said + continued
    (project / "results/mine/sweep/trials-b8.csv").touch()
    with pytest.raises(BadInputError) as caught:
        find_run(run, "results", "run")
    replayed = "`tune replay results/mine/sweep/trials-b8.csv` searches in its measurements, and "
    assert str(caught.value) == said + replayed + continued


def test_a_run_is_found_although_its_model_has_a_sweep(project: Path) -> None:
    (project / "results/mine/sweep").mkdir()
    (project / "results/mine/sweep/sweep.json").write_text("{}")
    started(project, GIVEN)
    assert find_run("mine", "results").path == Path("results/mine/run")
