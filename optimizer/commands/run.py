"""``tune run``, or without a name: find the best configuration."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from optimizer.commands.terminal import INTERRUPTED, shown_on, terminal

if TYPE_CHECKING:
    from optimizer.session import Result


def main(arguments: list[str]) -> int:
    from optimizer.arguments.run import read_run_arguments

    given = read_run_arguments(arguments)
    if given.mapped is not None and given.print_profile:
        from pathlib import Path

        from optimizer.deploy.seen_gpus import seen
        from optimizer.model_analyzer.profile import profile_text
        from optimizer.serving import Serving

        serving = Serving.of(given.options, seen(given.options).names)
        gpu = serving.stored_on_gpu(Path(given.options.model_repository or "."), given.mapped.model)
        print(profile_text(given.mapped, given.options, gpu=gpu), end="")
        return 0
    for note in given.mapped.notes if given.mapped is not None and not given.as_json else ():
        print(note, file=sys.stderr, flush=True)
    from optimizer.session import tune

    result = tune(given.options, given.resumed, *shown_on(terminal(), given.log), report=given.report)
    _print(result, as_json=given.as_json)
    return {"found": 0, "none": 1, "left": 0, "interrupted": INTERRUPTED}[result.status]


def _print(result: Result, *, as_json: bool) -> None:
    if as_json:
        import json

        print(json.dumps(result.document, indent=2))
        return
    if result.status == "left":
        print(f"{result.handed_on}; what this one measured is in {result.folder.path}")
        return
    from rich.console import Console

    from optimizer.report.console import print_best_so_far, print_outcome

    if result.status == "interrupted":
        print_best_so_far(Console(), result.outcome, result.task.problem, results_dir=result.folder.path)
        return
    print_outcome(
        Console(),
        result.outcome,
        result.task.problem,
        hardware=str(result.hardware),
        notes=result.notes,
        facts=result.task.source.facts,
        results_dir=result.folder.path,
        command=result.command,
        config_path=result.folder.best_config if result.outcome.recommended else None,
    )
