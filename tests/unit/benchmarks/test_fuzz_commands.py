"""The first of the thousands of cases of ``benchmarks/fuzz_commands.py``, and the faults that it must report."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import fuzz_commands
from fuzz_commands import SMOKE_CASES, AuditHook, CaseFolders, OutOfTime, State, Stopped, attempt, fuzz, limited
from lib.command_check import check_output
from lib.fuzz_sections import CommandCase, ReaderCase
from optimizer.core.errors import BadInputError
from tests.command_fixtures import Ended


@pytest.fixture
def place(tmp_path: Path) -> CaseFolders:
    return CaseFolders(tmp_path / "root")


def test_the_first_cases_find_no_fault(place: CaseFolders) -> None:
    state = State.read(None, 0)
    fuzz(state, SMOKE_CASES, place)
    assert state.faults == []
    for name, tally in state.sections.items():
        assert tally.tried == tally.right > 0, name
        assert tally.accepted > 0, name  # the valid words and files, before they are mutated
    assert sum(tally.commands for tally in state.sections.values()) > 0


def _unprintable(content: bytes) -> None:
    raise BadInputError("no\x1b[31m")


def _other(content: bytes) -> None:
    raise KeyError(content)


def _of_python(content: bytes) -> None:
    raise UnicodeDecodeError("utf-8", b"", 0, 1, "no error that a user is to see")


def _talkative(content: bytes) -> None:
    print("hello")


@pytest.mark.parametrize(
    ("read", "error"),
    [(_unprintable, BadInputError), (_other, BadInputError), (_of_python, ValueError), (_talkative, BadInputError)],
)
def test_a_wrong_reader_is_noticed(read: Any, error: type[Exception], place: CaseFolders) -> None:
    with pytest.raises(AssertionError):
        attempt(ReaderCase(read, b"x", error), place)


@pytest.mark.parametrize(
    ("code", "stderr"),
    [
        (5, ""),
        (2, ""),
        (2, "tune: one\ntune: two\n"),
        (2, "tune: \x1b[31m\n"),
        (2, f"tune: {'long' * 1000}\n"),
        (3, "Traceback (most recent call last):\ntune: this is a bug in tune\n"),
        (0, "module.py:3: UserWarning: beware\n"),
    ],
)
def test_wrong_output_is_noticed(code: int, stderr: str) -> None:
    with pytest.raises(AssertionError):
        check_output(Ended(code, "", stderr, 1), CommandCase(()), [])


@pytest.mark.parametrize(
    ("words", "file", "is_right"),
    [
        (("explain", "run"), "results/m/1/run.json", True),
        (("explain", "run"), "p.yaml", False),
        (("report", "run"), "run/report.html", True),
        (("report", "run"), "../../elsewhere", False),
        (("init", "./p.yaml"), "p.yaml", False),
        (("init", "--force", "./p.yaml"), "p.yaml", True),
        (("runs", "--delete", "run"), "run/run.json", True),
        (("cache", "--clean"), "p.yaml", False),
    ],
)
def test_a_file_in_a_wrong_place_is_noticed(
    words: tuple[str, ...], file: str, is_right: bool, place: CaseFolders
) -> None:
    case = CommandCase(words, {"p.yaml": b"valid", "run/run.json": b"{}"})

    def write() -> None:
        with place.folder(case) as folder:
            (folder / file).parent.mkdir(parents=True, exist_ok=True)
            (folder / file).write_bytes(b"changed")

    if is_right:
        write()
    else:
        with pytest.raises(AssertionError, match="wrote"):
            write()


def test_writes_outside_and_programs_are_prevented_and_recorded(tmp_path: Path) -> None:
    watch = AuditHook(tmp_path / "inside")
    with fuzz_commands.watched(watch):
        with pytest.raises(PermissionError):
            (tmp_path / "file").write_text("")
        with pytest.raises(PermissionError):
            (tmp_path / "folder").mkdir()
    assert len(watch.faults) == 2
    with pytest.raises(Stopped):
        watch.see("os.system", (b"true",))
    assert watch.faults[2] == "starts os.system"
    assert list(tmp_path.iterdir()) == []


def test_a_case_that_takes_too_long_is_ended() -> None:
    def compute() -> None:
        with limited(2, cpu_seconds=0.05):
            while True:
                pass

    with pytest.raises(OutOfTime):
        compute()
