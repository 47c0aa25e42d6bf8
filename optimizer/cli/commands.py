"""The commands of ``tune``: their table, what --help and --version print, and the error for a misspelt one.

A shell completes command lines by a script that calls ``tune`` with the line in ``COMP_LINE``, and the parser of the
command answers (``Parser.read``).
"""

from __future__ import annotations

import difflib
import os
import shlex
from collections.abc import Sequence
from functools import partial
from importlib import import_module
from itertools import dropwhile
from pathlib import Path
from typing import TYPE_CHECKING, Final, Literal

from optimizer.core.errors import BadInputError
from optimizer.core.safe_text import exists, format_value, one_line, quote

if TYPE_CHECKING:
    import argparse

    from optimizer.options.command_line import Parser


_GROUPS: Final = {  # each command is the module of its name in this package
    "Tune": {
        "run": "find the best configuration of a model; `run` can be left out",
        "verify": "continue the test of a recommendation, or test it again",
        "sweep": "measure given configurations at given loads",
        "batch": "tune several models within one budget",
        "replay": "run the search on a recorded table, without a server",
    },
    "Results": {
        "report": "write runs as one page, as Markdown, as tables and plots",
        "compare": "compare the throughput of two runs, and what else differs",
        "explain": "explain what limits the throughput, and what would help",
        "plan": "compute the replicas for a request rate, and their cost",
        "emit": "write files for Docker, Kubernetes, Helm, KServe",
        "serve": "start the server of a recommendation, without Docker",
        "watch": "say whether a run still fits a server in production",
        "runs": "list the runs in results/, or delete some",
    },
    "Set up": {
        "models": "list the built-in models",
        "init": "write a profile of a model with a comment for each key",
        "setup": "install the embedded server now rather than at the first run",
        "doctor": "check what this machine lacks",
        "cache": "show what is cached on this machine, or remove it",
    },
}
COMMANDS: Final = tuple(name for commands in _GROUPS.values() for name in commands)
_OVERVIEW: Final = """\
Find the Triton configuration with the most throughput within a latency bound.
  tune --sla-p95 20ms dlrm                                a built-in model
  tune --sla-p99 50ms --model-repository models my_model  a model of your own

{commands}
More     tune run --help, tune COMMAND --help; `tune doctor` locates docs/
"""
DISTRIBUTION: Final = "tritune"
_NAMES_A_MODEL: Final = ("--model-repository", "--from-model-analyzer")  # with these, MODEL may be any name
_COMMON_FLAGS: Final = ("--json", "--no-color", "-v", "--verbose")  # none takes a value
_MIN_SIMILARITY: Final = 0.7
COMPLETION_FLAG: Final = "--print-completion"
_RUN_HELP: Final = "Folder of a run, <model>/<run> in --results, a model for its newest run, or latest"
SHELLS: Final = ("bash", "zsh", "tcsh", "fish")


def overview() -> str:
    """Return the page that ``tune --help`` shows. It fits a terminal of 80 columns and 24 lines."""
    lines = []
    for group, commands in _GROUPS.items():
        for name, description in commands.items():
            lines.append(f"{group:<9}{name:<8} {description}")
            group = ""  # only the first line of a group has its name
    return _OVERVIEW.format(commands="\n".join(lines))


def version_line(distribution: str = DISTRIBUTION) -> str:
    """Return ``tritune X.Y.Z``, or a line that says that the package is not installed."""
    from importlib import metadata  # takes long to import

    try:
        return f"{distribution} {metadata.version(distribution)}"
    except metadata.PackageNotFoundError:
        return f"{distribution} of an unknown version: the package is not installed (pip install .)"


def refuse_options_before_command(argv: Sequence[str]) -> None:
    """Raise BadInputError if a command follows options, such as ``--json runs``, and would be taken as a model."""
    words = list(dropwhile(lambda word: word in _COMMON_FLAGS, argv))
    if not words or words[0] not in COMMANDS or words == list(argv):
        return
    command, flags = words[0], argv[: -len(words)]
    parser: Parser = import_module(f"optimizer.cli.{command}").build_parser()
    unknown = [flag for flag in flags if command != "run" and not parser.has_flag(flag)]  # `tune run` has all
    line = shlex.join(["tune", *words, *(flag for flag in flags if flag not in unknown)])
    but = f", and `tune {command}` has no {' or '.join(unknown)}" if unknown else ""
    raise BadInputError(f"{argv[0]} {command}: options follow the command{but}; write `{one_line(line)}`")


def refuse_misspelt_command(argv: Sequence[str]) -> None:
    """Raise BadInputError if the first word of a command line is spelled like a command and is no model."""
    word = argv[0] if argv else ""
    if word in ("help", "version") and not exists(Path(word)):
        raise BadInputError(f"no command {format_value(word)}; did you mean `tune --{word}`?")
    similar = difflib.get_close_matches(word, COMMANDS, 1, _MIN_SIMILARITY)
    if not similar or word.startswith("-") or exists(Path(word)):
        return
    if any(other.partition("=")[0] in _NAMES_A_MODEL for other in argv):
        return
    from optimizer.model.profile_lookup import list_profiles

    models = list_profiles()
    if word in models:
        return
    similar += difflib.get_close_matches(word, models, 1, _MIN_SIMILARITY)
    proposals = " or ".join(f"`tune {name}`" for name in similar)
    raise BadInputError(
        f"no command or model {format_value(word)}; did you mean {proposals}? `tune --help` lists the commands, "
        "`tune models` the models"
    )


def print_completion_script(argv: Sequence[str]) -> int:
    """Print the script for the shell that follows ``COMPLETION_FLAG`` in ``argv``. Return 0. Raises BadInputError."""
    shell = " ".join(argv).removeprefix(COMPLETION_FLAG)[1:]
    if shell not in SHELLS:
        raise BadInputError(f"{COMPLETION_FLAG} {quote(shell)}: write one of {', '.join(SHELLS)}")
    from argcomplete.shell_integration import shellcode

    print(shellcode(["tune"], True, shell), end="")
    return 0


def requested_words() -> list[str]:
    """Return the words before the cursor without ``tune``, and let the parser begin after the command among them."""
    from optimizer.options.command_line import COMPLETION_VARIABLE  # takes long to import

    words = _words_before_cursor()
    if words and words[0] in COMMANDS:
        os.environ[COMPLETION_VARIABLE] = "2"  # the number of the word that names the parser's program
    return words


def add_model(parser: Parser, text: str, nargs: Literal["?"] | None = None) -> None:
    """Add the argument MODEL with the help ``text``, whose words a shell can complete; ``nargs`` as in argparse."""
    argument = parser.add_argument("model", metavar="MODEL", nargs=nargs, help=text)
    argument.completer = complete_model  # type: ignore[attr-defined]  # read by argcomplete


def add_run(
    parser: Parser,
    name: str = "run",
    metavar: str = "RUN",
    text: str = _RUN_HELP,
    nargs: Literal["+"] | None = None,
    *,
    batches: bool = False,
) -> None:
    """Add the argument ``name`` for a run, or also a batch, whose words a shell can complete.

    The other arguments are argparse's.
    """
    argument = parser.add_argument(name, metavar=metavar, nargs=nargs, help=text)
    argument.completer = partial(complete_run, batches=batches)  # type: ignore[attr-defined]  # read by argcomplete


def complete_run(
    prefix: str,
    parsed_args: argparse.Namespace,
    *,
    sweeps: bool = False,
    batches: bool = False,
    with_files: bool = False,
    **_: object,
) -> list[str]:
    """Return the words that RUN may be: ``latest``, models with runs, their runs behind a slash, and folders.

    The runs are those in ``--results``, or in ``--out`` of a command that writes runs. ``sweeps`` names
    sweeps in place of runs, ``batches`` adds suites and their batches, and ``with_files`` adds files.
    """
    from argcomplete.completers import DirectoriesCompleter, FilesCompleter

    from optimizer.options.run_options import DEFAULTS
    from optimizer.store.run_folder import BATCH_FILE, RUN_FILE, SWEEP_FILE
    from optimizer.store.run_lookup import BATCHES, LATEST, runs_in

    results = getattr(parsed_args, "results", None) or getattr(parsed_args, "out", None) or DEFAULTS.out
    paths = [run.path for run in runs_in(results, record=SWEEP_FILE if sweeps else RUN_FILE)]
    models = [LATEST, *dict.fromkeys(path.parent.name for path in paths)] if paths else []
    if batches:
        batch_paths = [batch.path for batch in runs_in(str(Path(results) / BATCHES), record=BATCH_FILE)]
        models += dict.fromkeys(f"{path.parent.name}/" for path in batch_paths)
        paths += batch_paths
    # the runs of all models would hide the models
    names = [f"{path.parent.name}/{path.name}" for path in paths] if "/" in prefix else models
    complete_path = FilesCompleter() if with_files else DirectoriesCompleter()
    return [*names, *complete_path(prefix)]


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
