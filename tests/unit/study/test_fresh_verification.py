"""Tests of the rows that a separate test of a recommendation reads, and of the commands that it proposes."""

from __future__ import annotations

import shlex
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest

from objectives.sla import Sla
from optimizer.cli.run import read_run_arguments
from optimizer.cli.verify import read_verify_arguments
from optimizer.config.problem import ConcurrentModel
from optimizer.core.errors import BadInputError
from optimizer.options.run_options import RunOptions
from optimizer.results.finished_run import read_run
from optimizer.store.run_folder import RunFolder
from optimizer.study.fresh_verification import read_comparable_trials, repetition_of
from optimizer.study.task import Task
from tests.run_folders import CANDIDATE, write_run

EMBEDDED = RunOptions("dlrm", sla_ms={"p95": 20.0})
REMOTE = RunOptions("dlrm", sla_ms={"p95": 20.0}, target="remote", url="other:8001")


@pytest.mark.parametrize(
    ("stored", "given", "repeated"),
    [
        (EMBEDDED, "", ""),
        (EMBEDDED, "--target remote --url triton:8001", "--target remote --url triton:8001"),
        (REMOTE, "", ""),
        (REMOTE, "--url other:8001", ""),
        (REMOTE, "--url triton:8001", "--url triton:8001"),
        (REMOTE, "--target embedded", "--target embedded"),
    ],
)
def test_the_proposed_commands_measure_the_same_server(
    stored: RunOptions, given: str, repeated: str, tmp_path: Path
) -> None:
    folder = write_run(tmp_path / "my runs", options=stored)
    options = read_verify_arguments(["--fresh", *given.split(), str(folder)]).options
    proposed = repetition_of(RunFolder(folder), options, 44.6)
    start = " ".join(filter(None, ("tune verify --fresh", repeated)))
    assert proposed.command == f"{start} '{folder}'"
    assert proposed.longer_command == f"{start} --budget 90s '{folder}'"
    for command in (proposed.command, proposed.longer_command):
        assert read_verify_arguments(shlex.split(command)[2:]).options == options
    _, *words = shlex.split(proposed.search_command)
    assert words[-1] == options.model
    assert words[words.index("--warm-start") + 1] == str(folder)
    assert ("--url triton:8001" in proposed.search_command) is (options.url == "triton:8001")


@pytest.mark.parametrize(
    ("stored", "has_warm_start"),
    [
        (replace(EMBEDDED, search="grid"), False),
        (replace(EMBEDDED, storage="postgresql://user:secret@host/studies", study_name="shared"), True),
    ],
    ids=["exhaustive search", "shared study"],
)
def test_the_proposed_search_is_one_that_tune_accepts(
    stored: RunOptions, has_warm_start: bool, tmp_path: Path
) -> None:
    """An exhaustive search refuses --warm-start, and the shared study of the run has ended."""
    folder = write_run(tmp_path / "run", options=stored)
    proposed = repetition_of(RunFolder(folder), RunFolder(folder).read_options(), 44.6)
    options = read_run_arguments(shlex.split(proposed.search_command)[1:]).options
    assert (options.warm_start == str(folder)) is has_warm_start
    assert options == replace(
        stored, warm_start=options.warm_start, model=options.model, storage=None, study_name=None
    )


def test_a_run_with_other_bounds_than_its_profile_is_refused(tmp_path: Path) -> None:
    folder = write_run(tmp_path, "m")
    problem = replace(read_run(folder).problem, sla=Sla.from_bounds({"p95": 5.0}))
    task = cast("Task", SimpleNamespace(problem=problem, source=SimpleNamespace(name="m")))
    with pytest.raises(BadInputError, match="the run had p95 <= 20 ms, but its profile now has p95 <= 5 ms"):
        read_comparable_trials(RunFolder(folder), task, has_same_files=False)


def test_a_row_that_was_edited_to_lack_a_model_under_load_is_refused(tmp_path: Path) -> None:
    """The values of each model decide which of its requests are independent."""
    folder = write_run(tmp_path, "m")
    problem = replace(read_run(folder).problem, concurrent=(ConcurrentModel("second", 1.0, CANDIDATE),))
    task = cast("Task", SimpleNamespace(problem=problem, source=SimpleNamespace(name="m")))
    with pytest.raises(BadInputError, match=r"trials\.csv:2: by_model: lacks values of second"):
        read_comparable_trials(RunFolder(folder), task, has_same_files=False)
