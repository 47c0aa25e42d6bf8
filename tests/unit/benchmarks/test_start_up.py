"""The commands that ``benchmarks/start_up.py`` measures."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path

from start_up import commands


def test_the_commands_take_the_timed_options(tmp_path: Path) -> None:
    for command in commands(Path("results/dlrm/sample"), tmp_path)[3:]:
        name, *words = command.words
        import_module(f"optimizer.cli.{name}").build_parser().read(words)
