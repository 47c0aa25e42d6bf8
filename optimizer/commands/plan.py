"""``tune plan``: capacity from measured runs; a model without any is searched first."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from optimizer.arguments.plan import PlanArguments, read_plan_arguments
from optimizer.errors import BadInputError
from optimizer.profile.safe_paths import is_file, is_folder
from optimizer.store.finished import FinishedRun, read_run
from optimizer.untrusted import one_line


def main(arguments: list[str]) -> int:
    """The exit code: 0 where some hardware does, 1 where none does. Raises TuneError."""
    given = read_plan_arguments(arguments)
    runs = _runs(given)
    from optimizer.batcher.ahead import compile_ahead
    from optimizer.planning.plan import plan

    compile_ahead(_say)
    if given.note:
        _say(given.note)
    found = plan(given.question, runs)
    if given.as_json:
        from optimizer.planning.document import document

        print(json.dumps(document(found, given.note), indent=2))
    else:
        from rich.console import Console

        from optimizer.planning.console import print_plan

        print_plan(Console(), found)
    return 0 if found.found else 1


def _runs(given: PlanArguments) -> list[FinishedRun]:
    """Those that can be read; of several, the others are told in a line each."""
    found, fault = [], BadInputError("no runs")
    for name in given.of:
        try:
            found.append(_run(name, given))
        except BadInputError as error:
            fault = error
            if len(given.of) > 1:
                _say(f"left out: {error}")
    if not found:
        raise fault
    return found


def _run(name: str, given: PlanArguments) -> FinishedRun:
    """A run by its folder; else the newest one of the model that recommends something; else one that is made now."""
    if is_file(Path(name) / "run.json") or is_file(Path(given.out) / name / "run.json"):
        return read_run(name, given.out)
    if _looks_like_a_run(name, given.out):
        raise BadInputError(f"{one_line(name)}: no run.json there nor in {given.out}; give the folder of a run")
    records = list((Path(given.out) / Path(name).stem).glob("*/run.json"))
    first: FinishedRun | None = None
    for record in sorted(records, key=lambda info: info.stat().st_mtime, reverse=True):
        try:
            run = read_run(record.parent, given.out)
        except BadInputError as error:
            _say(f"left out: {error}")
            continue
        if run.outcome is not None and run.outcome.recommended is not None:
            return run
        first = first or run
    return first or _searched(name, given)


def _looks_like_a_run(name: str, out: str) -> bool:
    """``<model>/<run>``, and no folder or file of a model."""
    path = Path(name)
    return ("/" in name and not path.exists() and not path.suffix) or (is_folder(path) and _inside(path, Path(out)))


def _inside(path: Path, folder: Path) -> bool:
    return path.resolve().is_relative_to(folder.resolve())


def _searched(model: str, given: PlanArguments) -> FinishedRun:
    from optimizer.arguments.run import read_run_arguments
    from optimizer.commands.terminal import shown_on, terminal
    from optimizer.session import tune

    asked = read_run_arguments([*given.sla_words, "--out", given.out, model])
    _say(f"{model} has no run in {given.out} yet: searching first")
    result = tune(asked.options, None, *shown_on(terminal()))
    if result.status == "interrupted":
        raise KeyboardInterrupt
    return read_run(result.folder.path, given.out)


def _say(line: str) -> None:
    print(one_line(line), file=sys.stderr, flush=True)
