"""The check of the output and the exit code of a command."""

from __future__ import annotations

import re

from lib.fuzz_sections import CommandCase
from tests.command_fixtures import Ended

CODES = (0, 1, 2, 3, 4, 130)
REFUSALS = (2, 3)
STOPPED = -1000  # in place of the exit code of a case that came to the start of a server
MOST_CHARACTERS = 1000  # of a line of error


def check_output(ended: Ended, case: CommandCase, faults: list[str]) -> None:
    """Raise AssertionError unless the command ended as it should; ``faults`` are forbidden things that it did."""
    shown = ended.stderr[-600:]
    assert not faults, faults
    assert "Traceback" not in ended.stderr, shown
    assert not re.search(r"\w+Warning: ", ended.stderr), shown
    lines = ended.stderr.split("\n")
    for line in (*lines, *ended.stdout.split("\n")):
        assert line.isprintable(), ascii(line)
    errors = [line for line in lines if line.startswith("tune: ") and not line.startswith("tune: log: ")]
    assert len(errors) <= case.most_lines, errors
    assert all(len(line) <= MOST_CHARACTERS for line in errors), f"{max(map(len, errors))} characters: {shown}"
    if ended.code == STOPPED:
        return
    assert ended.code in CODES, f"exit code {ended.code}: {shown}"
    if ended.code in REFUSALS:
        assert errors, f"exit code {ended.code} without an error: {shown}"
        assert all(line.removeprefix("tune: ").strip() for line in errors), errors
