"""``tune --print-completion``, and the words that the shell then gets."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from optimizer.cli.commands import COMMANDS, SHELLS
from optimizer.options.run_options import TARGETS
from tests.command_fixtures import TUNE, Tune


def completions(line: str, folder: Path) -> set[str]:
    """Return the words that ``tune`` proposes at the end of ``line`` in ``folder``."""
    answer = folder / "answer"
    asked = {"_ARGCOMPLETE": "1", "COMP_LINE": line, "COMP_POINT": str(len(line))}
    environment = {**os.environ, **asked, "_ARGCOMPLETE_STDOUT_FILENAME": str(answer)}
    ended = subprocess.run([TUNE], cwd=folder, env=environment, capture_output=True, text=True, check=True)
    assert (ended.stdout, ended.stderr) == ("", "")
    proposed = answer.read_text()
    answer.unlink()
    return {word.rstrip() for word in proposed.split("\013")} - {""}


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("tune ex", {"explain"}),
        ("tune run --target ", set(TARGETS)),
        ("tune --search=g", {"--search=grid", "--search=gp"}),
        ("tune --sla-p95 ", set()),
        ("tune verify --fr", {"--fresh"}),
    ],
)
def test_the_next_words_are_completed(line: str, words: set[str], tmp_path: Path) -> None:
    assert completions(line, tmp_path) == words


def test_the_first_word_may_be_a_command_a_model_or_a_file(tmp_path: Path) -> None:
    (tmp_path / "model.onnx").touch()
    assert {*COMMANDS, "dlrm", "model.onnx"} < completions("tune ", tmp_path)
    assert set(COMMANDS).isdisjoint(completions("tune --sla-p95 20ms ", tmp_path))


@pytest.fixture(scope="module")
def folder_with_runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with three runs and a sweep of three models in ``results``; ``other`` has a run and a batch."""
    folder = tmp_path_factory.mktemp("runs")
    for run in (
        "results/dlrm/20261120-231154",
        "results/dlrm/named",
        "results/bert/20261121-080000",
        "other/mlp/one",
    ):
        (folder / run).mkdir(parents=True)
        (folder / run / "run.json").write_text("{}")
    for record in ("results/mlp/20261122-100000/sweep.json", "other/batches/nightly/20261123-100000/batch.json"):
        (folder / record).parent.mkdir(parents=True)
        (folder / record).write_text("{}")
    (folder / "notes.txt").touch()
    return folder


RUN_COMMANDS = ("verify", "report", "explain", "compare", "emit", "plan", "serve", "watch", "runs --delete")


@pytest.mark.parametrize("command", RUN_COMMANDS)
def test_a_run_is_completed(command: str, folder_with_runs: Path) -> None:
    assert completions(f"tune {command} ", folder_with_runs) == {"latest", "dlrm", "bert", "results/", "other/"}


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("tune verify dl", {"dlrm"}),
        ("tune verify dlrm/", {"dlrm/20261120-231154", "dlrm/named"}),
        ("tune verify results/dlrm/n", {"results/dlrm/named/"}),
        ("tune compare latest b", {"bert"}),
        ("tune report --results other ", {"latest", "mlp", "nightly/", "results/", "other/"}),
        ("tune report --results nothing ", {"results/", "other/"}),
        ("tune report --results other nigh", {"nightly/"}),
        ("tune runs --results other --delete nightly/", {"nightly/20261123-100000"}),
        ("tune verify --results other nigh", set()),
        ("tune --resume ", {"latest", "dlrm", "bert", "results/", "other/"}),
        ("tune run --out other --resume m", {"mlp"}),
        ("tune sweep --resume ", {"latest", "mlp", "results/", "other/"}),
        ("tune sweep --resume mlp/", {"mlp/20261122-100000"}),
        ("tune --warm-start d", {"dlrm"}),
        ("tune --warm-start n", {"notes.txt"}),
        ("tune replay --warm-start dlrm/n", {"dlrm/named"}),
        ("tune batch a.yaml --out other --resume ", {"other/batches/nightly/20261123-100000/", "results/", "other/"}),
        (
            "tune batch a.yaml --out other --against other/batches/nightly/",
            {"other/batches/nightly/20261123-100000/"},
        ),
    ],
)
def test_a_run_is_completed_by_what_is_written(line: str, words: set[str], folder_with_runs: Path) -> None:
    assert completions(line, folder_with_runs) == words


def test_the_script_completes_in_bash(tmp_path: Path) -> None:
    line = "tune emi"
    code = (
        f'eval "$(tune --print-completion bash)"; COMP_LINE="{line}" COMP_POINT={len(line)}; '
        'COMP_WORDS=(tune emi) COMP_CWORD=1; _python_argcomplete tune; echo "${COMPREPLY[@]}"'
    )
    environment = {**os.environ, "PATH": f"{TUNE.parent}{os.pathsep}{os.environ['PATH']}"}
    done = subprocess.run(["bash", "-c", code], cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert (done.stdout.strip(), done.stderr) == ("emit", "")


@pytest.mark.parametrize("shell", SHELLS)
def test_each_shell_gets_a_script(shell: str, called_tune: Tune) -> None:
    for words in (["--print-completion", shell], [f"--print-completion={shell}"]):
        printed = called_tune(*words)
        assert (printed.code, printed.stderr) == (0, "")
        assert "tune" in printed.stdout


@pytest.mark.parametrize(("words", "shown"), [((), "''"), (("ksh",), "ksh"), (("bash", "zsh"), "bash zsh")])
def test_another_shell_is_refused(words: tuple[str, ...], shown: str, called_tune: Tune) -> None:
    refused = called_tune("--print-completion", *words)
    assert (refused.code, refused.stdout) == (2, "")
    assert refused.stderr_lines == [f"tune: --print-completion {shown}: write one of bash, zsh, tcsh, fish"]
