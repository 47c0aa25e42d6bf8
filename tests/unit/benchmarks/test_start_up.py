"""The commands that ``benchmarks/start_up.py`` measures."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path

from start_up import commands


def test_the_commands_take_the_timed_options(tmp_path: Path) -> None:
    run = Path("results/dlrm/sample")
    timed = [command.words for command in commands(run, tmp_path) if not command.words[0].startswith("-")]
    assert len(timed) == 4
    for name, *words in timed:
        arguments = import_module(f"optimizer.cli.{name}").build_parser().read(words)
        assert repr(str(run)) in repr(arguments)
