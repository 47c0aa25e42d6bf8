"""Completion of command lines in a shell: the script for the shell, and the words that it asks for.

The script calls ``tune`` with the line in ``COMP_LINE``, and the parser of the command answers (``Parser.read``).
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Literal

from optimizer.cli.commands import COMMANDS
from optimizer.core.errors import BadInputError
from optimizer.core.safe_text import quote
from optimizer.options.command_line import COMPLETION_VARIABLE, Parser

FLAG = "--print-completion"
SHELLS = ("bash", "zsh", "tcsh", "fish")


def print_script(argv: Sequence[str]) -> int:
    """Print the script for the shell that follows ``FLAG`` in ``argv``. Return 0. Raises BadInputError."""
    shell = " ".join(argv).removeprefix(FLAG)[1:]
    if shell not in SHELLS:
        raise BadInputError(f"{FLAG} {quote(shell)}: write one of {', '.join(SHELLS)}")
    from argcomplete.shell_integration import shellcode

    print(shellcode(["tune"], True, shell), end="")
    return 0


def requested_words() -> list[str]:
    """Return the words before the cursor without ``tune``, and let the parser begin after the command among them."""
    words = _words_before_cursor()
    if words and words[0] in COMMANDS:
        os.environ[COMPLETION_VARIABLE] = "2"  # the number of the word that names the parser's program
    return words


def add_model(parser: Parser, text: str, nargs: Literal["?"] | None = None) -> None:
    """Add the argument MODEL with the help ``text``, whose words a shell can complete; ``nargs`` as in argparse."""
    argument = parser.add_argument("model", metavar="MODEL", nargs=nargs, help=text)
    argument.completer = complete_model  # type: ignore[attr-defined]  # read by argcomplete


def complete_model(prefix: str, **_: object) -> list[str]:
    """Return the words that MODEL may be. The first word of a line may also be a command."""
    from argcomplete.completers import FilesCompleter

    from optimizer.model.profile_lookup import list_profiles

    commands = () if _words_before_cursor() else COMMANDS
    return [*commands, *list_profiles(), *FilesCompleter()(prefix)]


def _words_before_cursor() -> list[str]:
    from argcomplete.lexers import split_line

    *_, words, _ = split_line(os.environ["COMP_LINE"], int(os.environ["COMP_POINT"]))
    return list(words[1:])
