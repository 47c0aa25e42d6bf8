"""The files that only compute can be run apart from those that wait, and give way to exclusive tests."""

from __future__ import annotations

import fcntl
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.command_fixtures import eventually
from tests.file_kinds import COMPUTE, OPTION, WAIT

ROOT = Path(__file__).parents[2]
WAITING = ("contract/test_c.py", "cli/test_e.py")
COMPUTING = ("plan/test_f.py", "plan/test_g.py", "contract/test_searchers.py")
TEST = "def test_it(): pass\n"
START_SECONDS = 3000.0  # at idle priority, the processor serves other processes first


def command(*words: str) -> list[str]:
    return [sys.executable, "-m", "pytest", *words]


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ((), (*WAITING, *COMPUTING)),
        ((OPTION, WAIT), WAITING),
        ((OPTION, COMPUTE), COMPUTING[::-1]),
    ],
)
def test_each_file_runs_in_one_of_the_two_kinds(
    words: tuple[str, ...], expected: tuple[str, ...], tmp_path: Path
) -> None:
    for file in (*WAITING, *COMPUTING):
        (tmp_path / file).parent.mkdir(exist_ok=True)
        (tmp_path / file).write_text(TEST)
    done = subprocess.run(
        command("-q", "--collect-only", "-p", "tests.file_kinds", *words, "contract", "cli", "plan"),
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path])},
        capture_output=True,
        text=True,
        check=True,
    )
    collected = [line.partition("::")[0] for line in done.stdout.splitlines() if "::" in line]
    assert tuple(collected) == expected


def is_locked(path: Path) -> bool:
    if not path.exists():
        return False
    with path.open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
    return False


def test_a_file_that_computes_waits_for_an_exclusive_test(tmp_path: Path) -> None:
    turns = tmp_path / "d" / "turns"
    turns.mkdir(parents=True)
    words = ("-q", "-o", f"cache_dir={tmp_path}", OPTION, COMPUTE, "tests/unit/objectives/test_sequential.py")
    with (turns / "turn").open("w") as turn:
        fcntl.flock(turn, fcntl.LOCK_EX)
        with subprocess.Popen(command(*words), cwd=ROOT, stdout=subprocess.PIPE, text=True) as waiting:
            assert eventually(lambda: is_locked(turns / "gate") or waiting.poll() is not None, START_SECONDS)
            assert waiting.poll() is None
            turn.close()
            assert waiting.stdout is not None
            assert "passed" in waiting.stdout.read()
    assert waiting.returncode == 0
