"""The pure parts of ``benchmarks/start_up.py``."""

from __future__ import annotations

import sys
from importlib import import_module
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[3] / "benchmarks"))

from start_up import Start, TimedCommand, commands, measure, table


def test_the_commands_are_those_that_people_wait_for(tmp_path: Path) -> None:
    timed = commands(Path("results/dlrm/sample"), tmp_path)
    assert [command.words[0] for command in timed] == [
        *("--help", "--version", "--slap95", "emit", "explain", "plan", "report"),
    ]
    assert [command.target_seconds for command in timed] == [0.2, 0.2, 0.2, 1, 1, 2, 2]


def test_the_commands_take_the_timed_options(tmp_path: Path) -> None:
    for command in commands(Path("results/dlrm/sample"), tmp_path)[3:]:
        name, *words = command.words
        import_module(f"optimizer.cli.{name}").build_parser().read(words)


def test_the_table_has_medians_and_says_which_targets_are_missed() -> None:
    help_page, plan = TimedCommand(("--help",), 0.2), TimedCommand(("plan", "a b"), 2.0)
    starts = {
        help_page: [Start(0.1, 0.09), Start(0.5, 0.1), Start(0.12, 0.11)],
        plan: [Start(2.5, 3.0)],
    }
    assert table(starts)[2:] == [
        "| `tune --help` | 0.12 | 0.10 | 0.50 | 0.10 | 0.2 | met |",
        "| `tune plan 'a b'` | 2.50 | 2.50 | 2.50 | 3.00 | 2 | **missed** |",
    ]


def test_a_command_that_ends_otherwise_is_not_timed() -> None:
    assert measure(TimedCommand(("--version",), 0.2)).cpu_seconds > 0
    with pytest.raises(SystemExit, match="ended with exit code 0"):
        measure(TimedCommand(("--version",), 0.2, exit_code=2))
