"""``from optimizer import load_run, tune``: the command, and its runs, from Python. See docs/python.md."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Unpack

from optimizer.analysis.flags import Flags, command_words
from optimizer.analysis.run import Run


def tune(model: str | Path | None = None, **flags: Unpack[Flags]) -> Run:
    """Search, confirm, and give the run, as ``tune MODEL`` does; ``resume=FOLDER`` goes on with one, without a model.

    ``flags`` are the command's, checked as it checks them. Nothing is printed but what ``log`` asks for. One run at a
    time: two at once would measure each other.

    Raises BadInputError (a value or a file of yours), EnvironmentFault (this machine lacks something); both are
    TuneError. An interrupt, such as a notebook's stop button, ends the run early: its status is ``interrupted``.
    """
    from rich.console import Console

    from optimizer.arguments.run import read_run_arguments
    from optimizer.report.console import watcher
    from optimizer.session import tune as run

    given = read_run_arguments(command_words(model, flags))
    os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")  # as the command does
    log, terminal = given.log or "none", Console(stderr=True)

    def say(line: str) -> None:
        if log != "none":
            terminal.print(line, highlight=False, markup=False)

    result = run(
        given.options,
        given.resumed,
        say,
        lambda problem, budget, hardware: watcher(log, terminal, problem, budget, str(hardware)),
    )
    return load_run(result.folder.path)


def load_run(run: str | Path, out: str | Path = "results") -> Run:
    """The run in the folder ``run``, or ``<model>/<run>`` in ``out``; also one at work, interrupted or killed.

    Raises BadInputError where there is none, or it is damaged.
    """
    return Run.of(run, out)
