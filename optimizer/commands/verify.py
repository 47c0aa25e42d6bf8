"""``tune verify RUN``: does what a run recommends still hold?"""

from __future__ import annotations

from optimizer.commands.terminal import shown_on, terminal


def main(arguments: list[str]) -> int:
    from optimizer.arguments.verify import read_verify_arguments

    given = read_verify_arguments(arguments)
    from optimizer.confirm.verify import verify
    from optimizer.report.verified import document, print_verified

    result = verify(given.run, given.options, *shown_on(terminal()))
    folder = str(result.folder.path)
    if given.as_json:
        import json

        print(json.dumps(document(result.verified, result.before, folder, result.notes), indent=2))
    else:
        from rich.console import Console

        print_verified(Console(), result.verified, result.before, result.problem, folder, result.notes)
    return 0 if result.verified.holds else 1
