"""Run each command of the README and of the pages in docs/, in a folder with the files that the pages name."""

from __future__ import annotations

import os
import re
import shlex
import shutil
from pathlib import Path

import pytest

from optimizer.cli.commands import COMMANDS
from optimizer.deploy import runtime
from tests.command_fixtures import FINISHED, Sandbox, run_tune
from tests.documents import PAGES_WITH_COMMANDS, ROOT, blocks, run_commands
from tests.repositories import doubler, serialized, skip_without_python_models, write_bls, write_model
from tests.user_installation import write_installation

RUN_PAGES = [page for page in PAGES_WITH_COMMANDS if run_commands(page)]
RUNS, TABLE = Path("results/dlrm"), "benchmarks/tables/dlrm.csv"
SHORT_WINDOWS = ("--measurement-interval", "100ms")
BRIEFLY = (*SHORT_WINDOWS, "--budget", "10s", "--max-trials", "1", "--no-output-check", "--no-report")
CONFIG = 'platform: "onnxruntime_onnx"\nmax_batch_size: 8\n'


@pytest.fixture
def playground_with_models(sandbox: Sandbox) -> Sandbox:
    """Return a sandbox with every model, run and table that the pages name."""
    skip_without_python_models()
    models = sandbox.working_folder / "models"
    write_bls(models, milliseconds=2)
    for name in ("doubler", "doubler_int8", "my_model"):
        write_model(models, name, CONFIG, doubler())
    (sandbox.working_folder / "model.onnx").write_bytes(serialized(doubler()))
    for name in ("sample", "20261121-072139", "20261122-091502"):
        shutil.copytree(ROOT / RUNS / "sample", sandbox.working_folder / RUNS / name)
    (sandbox.working_folder / TABLE).parent.mkdir(parents=True)
    shutil.copy(ROOT / TABLE, sandbox.working_folder / TABLE)
    return sandbox


@pytest.mark.long
@pytest.mark.parametrize("page", RUN_PAGES, ids=lambda page: page.stem)
def test_each_command_of_the_page_works(page: Path, playground_with_models: Sandbox) -> None:
    if page.stem == "pytorch":
        pytest.importorskip("torch")
    env = {}
    if page.stem == "targets":
        program = write_installation(playground_with_models.root / "triton", runtime.ensure(print))
        env["PATH"] = f"{program.parent}{os.pathsep}{os.environ['PATH']}"
    for block in blocks(page, "yaml"):
        if named := re.match(r"# (\w+\.yaml)\n", block.text):
            (playground_with_models.working_folder / named[1]).write_text(block.text)
    for command in run_commands(page):
        words, _, output = command.partition(" > ")
        arguments = shlex.split(words, comments=True)[1:]
        more = BRIEFLY if arguments[0] not in COMMANDS else SHORT_WINDOWS if arguments[0] == "sweep" else ()
        ended = run_tune(playground_with_models, *arguments, *more, env=env)
        assert ended.errors == [], command
        assert ended.code in FINISHED, command  # in so short a time no load may be steady on a busy machine
        if output:
            (playground_with_models.working_folder / output).write_text(ended.stdout)


def test_every_page_is_in_the_list_of_pages() -> None:
    listed = (ROOT / "docs" / "README.md").read_text()
    for page in PAGES_WITH_COMMANDS:
        assert page.stem in ("README", "index") or f"({page.name})" in listed
