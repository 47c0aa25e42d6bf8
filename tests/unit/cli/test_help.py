"""``tune --help`` fits a screen; ``tune run --help`` shows the common options, ``--help-all`` shows all."""

from __future__ import annotations

import re
from importlib import import_module

import pytest

from optimizer.cli import reference, run
from optimizer.cli.commands import COMMANDS, overview
from optimizer.options.table import GROUPS, OPTIONS

COLUMNS, LINES = 80, 24
PARSER_FLAGS = {"--no-color", "--help-all"}
COMMON_FLAGS = {"--help", "--no-color"}
FLAG = "--[a-z][a-z0-9-]*"


def help_of_run(flag: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setenv("COLUMNS", str(COLUMNS))
    with pytest.raises(SystemExit) as ended:
        run.main([flag])
    assert ended.value.code == 0
    return capsys.readouterr().out


def flags(text: str) -> list[str]:
    shown = re.findall(r"^  (?:-\w \w+, )?(--[a-z0-9-]+)", text, re.MULTILINE)
    return [flag for flag in shown if flag not in PARSER_FLAGS]


def groups(text: str) -> list[str]:
    return [title for title in re.findall(r"^(\w[\w ]*):$", text, re.MULTILINE) if title in GROUPS]


def test_the_overview_fits_a_screen_below_the_command() -> None:
    lines = overview().splitlines()
    assert len(lines) < LINES
    assert max(map(len, lines)) < COLUMNS


def test_the_overview_has_examples_and_each_command_with_a_description() -> None:
    purpose, rest = overview().split("\n\n")
    *commands, more = rest.splitlines()
    assert [line.split()[0] for line in purpose.splitlines()] == ["Find", "tune", "tune"]
    words = [line[9:].split() for line in commands]
    assert [name for name, *_ in words] == list(COMMANDS)
    assert all(description for _, *description in words)
    assert "tune run --help" in more


@pytest.mark.parametrize("flag", ["-h", "--help"])
def test_the_help_of_run_has_the_common_options(
    flag: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    text = help_of_run(flag, capsys, monkeypatch)
    assert flags(text) == [option.flag for option in OPTIONS if option.is_common]
    assert 18 <= len(flags(text)) <= 25
    assert groups(text) == list(GROUPS)
    for line in ("0 PASS", "1 no configuration meets the SLA", "2 bad input", "3 environment", "4 UNDECIDED"):
        assert line in " ".join(text.split()), "a line may break anywhere"


def test_help_all_has_all_options_in_the_same_groups(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    text = help_of_run("--help-all", capsys, monkeypatch)
    assert flags(text) == [option.flag for option in OPTIONS]
    assert groups(text) == list(GROUPS)


@pytest.mark.parametrize("command", [command for command in COMMANDS if command != "run"])
def test_the_reference_has_each_option_and_the_text_of_a_help(command: str) -> None:
    parser = import_module(f"optimizer.cli.{command}").build_parser()
    section = reference.commands_page().partition(f"\n## tune {command}\n")[2].partition("\n## ")[0]
    assert (parser.epilog or "").rstrip() in section
    assert section.count("```") == len(re.findall("^```", section, re.MULTILINE)), "each fence is a line of its own"
    names = " ".join(re.findall(r"^\| (`.*?`) \|", section, re.MULTILINE))
    shown = [
        flag for actions in parser.shown_arguments().values() for action in actions for flag in action.option_strings
    ]
    assert sorted(re.findall(FLAG, names)) == sorted(re.findall(FLAG, " ".join({*shown} - COMMON_FLAGS)))


def test_the_reference_refers_to_the_options_of_run_for_those_with_the_same_help() -> None:
    section = reference.commands_page().partition("\n## tune sweep\n")[2].partition("\n## ")[0]
    assert "`--perf-analyzer-image`, `--server-cpus` | As in [`tune run`](reference-options.md) |" in section
    assert "| `-b, --request-batch-size LIST` | Samples in each request: 1,8" in section, "another help than in run"
