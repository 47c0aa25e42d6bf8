"""The commands of ``tune``: their table, what --help and --version print, and the error for a misspelt one."""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from optimizer.core.errors import BadInputError
from optimizer.core.safe_text import exists, format_value

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
_MIN_SIMILARITY: Final = 0.7


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


def refuse_misspelt_command(argv: Sequence[str]) -> None:
    """Raise BadInputError if the first word of a command line is spelled like a command and is no model."""
    word = argv[0] if argv else ""
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
