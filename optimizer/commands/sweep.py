"""``tune sweep MODEL``: given configurations at given loads."""

from __future__ import annotations

from optimizer.commands.terminal import INTERRUPTED, shown_on, terminal


def main(arguments: list[str]) -> int:
    from optimizer.arguments.sweep import read_sweep_arguments

    given = read_sweep_arguments(arguments)
    from optimizer.sweeping.console import Progress, print_sweep
    from optimizer.sweeping.document import write_csv
    from optimizer.sweeping.sweeper import sweep

    say, _ = shown_on(terminal())
    result = sweep(given.options, given.asked, given.resumed, say, lambda plan: Progress(say, plan))
    if given.csv is not None:
        write_csv(given.csv, result.cells)
    if given.as_json:
        import json

        print(json.dumps(result.document, indent=2))
    else:
        from rich.console import Console

        print_sweep(Console(), result.cells, result.document)
    if result.status == "interrupted":
        return INTERRUPTED
    return 0 if any(cell.has_figures for cell in result.cells) else 1
