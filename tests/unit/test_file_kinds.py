"""The files that wait for servers run apart from those that only compute, and no file is left out."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.file_kinds import COMPUTE, OPTION, WAIT, pytest_ignore_collect

TESTS = Path(__file__).parents[1]


@dataclass(frozen=True)
class Options:
    """The options of a run of pytest with ``--files KIND``."""

    kind: str

    def getoption(self, name: str) -> str:
        assert name == OPTION
        return self.kind


def test_each_file_runs_in_one_of_the_two_kinds() -> None:
    def collected(kind: str) -> set[str]:
        options: Any = Options(kind)
        return {str(path.relative_to(TESTS)) for path in files if not pytest_ignore_collect(path, options)}

    files = list(TESTS.rglob("test_*.py"))
    waiting, computing = collected(WAIT), collected(COMPUTE)
    assert not waiting & computing
    assert len(waiting | computing) == len(files)
    assert {"contract/test_targets.py", "cli/test_output.py"} <= waiting
    assert {"contract/test_searchers.py", "unit/plan/test_planning.py"} <= computing
