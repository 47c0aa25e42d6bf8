"""The command line: the parser that the table of options generates, and the command that reproduces a run."""

from __future__ import annotations

import argparse
import functools
import os
import re
import shlex
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, NoReturn

from objectives.quantiles import parse_percentile
from objectives.units import UNITS
from optimizer.core.errors import BadInputError
from optimizer.core.safe_text import QUOTE_LENGTH, one_line, quote
from optimizer.options.flag_advice import flag_advice
from optimizer.options.option import Option, ValueType
from optimizer.options.option_reader import written_values
from optimizer.options.run_options import DEFAULTS, EXHAUSTIVE_SEARCHES, RunOptions
from optimizer.options.table import OPTIONS, OPTIONS_BY_NAME, SLA
from optimizer.options.values import parse_latency_bound, parse_optional, parse_path, parse_value

_PERCENTILE_FLAG = re.compile(r"--sla-((?:ttft-|itl-)?p(?:-?[0-9.]+)?)", re.ASCII)
_NEGATIVE = re.compile(r"-\.?[0-9]")  # the beginning of a negative number

MIN_PROPOSED_SECONDS = 600.0  # the least budget that is proposed if the first trial took the whole time
COMPLETION_VARIABLE = "_ARGCOMPLETE"  # set by a shell that asks for the words that may come next


class _NoColor(argparse.Action):
    """Set NO_COLOR (see no-color.org) for rich and for child processes."""

    def __call__(self, *_: object) -> None:
        os.environ["NO_COLOR"] = "1"


class _StoreBound(argparse.Action):
    """Store a bound of the SLA, and refuse another value of it. Of other options, the last value counts."""

    def __call__(
        self, parser: argparse.ArgumentParser, namespace: argparse.Namespace, value: Any, flag: str | None = None
    ) -> None:
        before = getattr(namespace, self.dest, self.default)
        if flag is not None and before not in (self.default, value):
            raise BadInputError(f"{flag} {quote(value)}: it was given before as {quote(before)}; leave one out")
        setattr(namespace, self.dest, value)


class Parser(argparse.ArgumentParser):
    """An argparse parser with one-line errors; every command takes ``--no-color``.

    Without ``add_help`` the caller adds ``--help`` itself.
    """

    def __init__(self, prog: str, usage: str, description: str, epilog: str = "", *, add_help: bool = True) -> None:
        super().__init__(
            prog=prog,
            usage=f"{prog} {usage}".strip(),
            description=description,
            epilog=epilog,
            formatter_class=argparse.RawDescriptionHelpFormatter,
            allow_abbrev=False,
            add_help=False,
        )
        if add_help:
            self.add_argument("-h", "--help", action="help", help="Show this help")
        self.add_argument(
            "--no-color",
            action=_NoColor,
            nargs=0,
            dest=argparse.SUPPRESS,
            default=argparse.SUPPRESS,
            help="Disable colors (also: set NO_COLOR)",
        )

    def error(self, message: str) -> NoReturn:
        """Raise BadInputError in place of argparse's exit."""
        raise BadInputError(f"{one_line(message, QUOTE_LENGTH)}; {self._advice()}")

    def read(self, words: list[str]) -> argparse.Namespace:
        """Return the parsed words; negative values may follow their flag as words of their own.

        Raises BadInputError for a wrong word, and if ``--out`` or ``--results`` is no path.
        """
        if COMPLETION_VARIABLE in os.environ:
            import argcomplete

            argcomplete.autocomplete(self, always_complete_options=False)  # ends the process
        words = self._join_percentile_flags(_join_negative_values(words))
        self._refuse_unknown_flags(words)
        self._refuse_separate_units(words)
        namespace = self.parse_args(words)
        for name in ("out", "results"):
            parse_optional(f"--{name}", getattr(namespace, name, None), parse_path)
        return namespace

    def add_options(
        self, names: Collection[str], hidden: Collection[str] = (), defaults: Mapping[str, str] | None = None
    ) -> dict[str, argparse._ArgumentGroup]:
        """Add options of the table and return the groups of the parser by title.

        ``defaults`` replaces defaults in the help. The options in ``hidden`` are not shown in the help.
        """
        groups = {str(group.title): group for group in self._action_groups}
        for option in OPTIONS:
            if option.name in hidden:
                _add_option(self, option, argparse.SUPPRESS)
            elif option.name in names:
                if option.group not in groups:
                    groups[option.group] = self.add_argument_group(option.group)
                text = option.help_text((defaults or {}).get(option.name, ""))
                _add_option(groups[option.group], option, text.replace("%", "%%"))
        return groups

    def shown_arguments(self) -> dict[str, list[argparse.Action]]:
        """Return the arguments that the help shows by the title of their group, without those of every command."""
        groups = {
            str(group.title): [a for a in group._group_actions if argparse.SUPPRESS not in (a.help, a.default)]
            for group in self._action_groups
        }
        return {title: actions for title, actions in groups.items() if actions}

    def has_flag(self, flag: str) -> bool:
        """Return whether the command has the option ``flag``, such as ``--json``."""
        return flag in self._option_string_actions

    def set_completer(self, flag: str, completer: Callable[..., Iterable[str]]) -> None:
        """Let a shell complete the value of ``flag``, if the command has it, by ``completer`` (see argcomplete)."""
        if (action := self._option_string_actions.get(flag)) is not None:
            action.completer = completer  # type: ignore[attr-defined]  # read by argcomplete

    def _refuse_unknown_flags(self, words: Sequence[str]) -> None:
        """Raise BadInputError for the first flag that the command does not have, and for the value ``--``.

        argparse reports such a flag only after missing arguments, and together with the words behind it. It drops the
        value ``--``.
        """
        actions = self._option_string_actions
        previous_flag = ""  # the flag whose value comes next; argparse itself reports a flag in place of a value
        for word in words:
            flag, _, value = word.partition("=")
            if (previous_flag and word == "--") or (value == "--" and flag in actions):
                problem = f"{previous_flag or flag} --: -- only marks the end of the options; write a value"
                raise BadInputError(f"{problem}; {self._advice()}")
            if word == "--":
                return
            is_short = word[:2] in actions and f"-{flag}" not in actions  # with its value, as -b8
            if _is_flag(word) and flag not in actions and not is_short and not previous_flag:
                shown = (name for name, action in actions.items() if action.help != argparse.SUPPRESS)
                advice = flag_advice(flag, shown)
                advice += " " if advice.endswith("?") else "; " if advice else ""
                raise BadInputError(f"{quote(flag)} is not an option of `{self.prog}`; {advice}{self._advice()}")
            action = actions.get(word)
            previous_flag = word if action is not None and action.nargs is None else ""

    def _refuse_separate_units(self, words: Sequence[str]) -> None:
        """Raise BadInputError for a value whose unit is a word of its own, as in ``--sla-p95 20 ms``.

        argparse takes the unit for the model, and then reports the model.
        """
        types = {flag: option.type for option in OPTIONS for flag in option.flags if option.type is not None}
        words = list(words[: words.index("--")] if "--" in words else words)
        for index, unit in enumerate(words[1:], 1):
            flag, equals, value = words[index - 1].partition("=")
            if not equals and index > 1:  # the word before the unit is a value, and the flag is before it
                flag, value = words[index - 2], words[index - 1]
            if flag not in self._option_string_actions or (kind := types.get(flag)) is None:
                continue
            if (
                unit in UNITS
                and value[-1:].isdigit()
                and not _is_valid(kind, value)
                and _is_valid(kind, value + unit)
            ):
                shown = f"{flag} {quote(value)} {unit}"
                raise BadInputError(f"{shown}: write the number and its unit without a blank: {quote(value)}{unit}")

    def _join_percentile_flags(self, words: Sequence[str]) -> list[str]:
        """Return the words with ``--sla-p99.9 30ms`` as ``--sla=p99.9<=30ms``.

        Any percentile may have a bound, so argparse cannot know all of these flags. Words after ``--`` are values.
        """
        actions = self._option_string_actions
        if "--sla" not in actions:
            return [*words]
        end = words.index("--") if "--" in words else len(words)
        joined: list[str] = []
        bounds: list[tuple[str, str, str]] = []  # flag, metric and bound
        remaining_words = iter(words[:end])
        for word in remaining_words:
            flag, equals, bound = word.partition("=")
            match = _PERCENTILE_FLAG.fullmatch(flag)
            if match is None or flag in actions:
                joined.append(word)
                continue
            bound = bound if equals else next(remaining_words, "")
            parse_value(flag, bound, functools.partial(_check_percentile, match[1]))
            if not equals and (not bound or bound.startswith("--")):
                raise BadInputError(f"{quote(flag)}: expected one argument, as in {flag} 20ms; {self._advice()}")
            joined.append(f"--sla={match[1]}<={bound}")
            bounds.append((flag, match[1], bound))
        for flag, metric, bound in bounds:  # last, because a wrong flag is reported before a wrong bound
            parse_value(flag, bound, functools.partial(_check_bound, metric))
        return [*joined, *words[end:]]

    def _advice(self) -> str:
        flag = "--help-all" if "--help-all" in self._option_string_actions else "--help"
        return f"`{self.prog} {flag}` shows the options"


def _check_percentile(metric: str, _: str) -> None:
    percentile = metric.removeprefix("ttft-").removeprefix("itl-")
    if percentile == "p":
        raise ValueError(f"the percentile is missing; write it behind the p, such as --sla-{metric}95 20ms")
    parse_percentile(percentile)


def _check_bound(metric: str, bound: str) -> None:
    parse_latency_bound(f"{metric}<={bound}")


def _is_valid(kind: ValueType, text: str) -> bool:
    try:
        kind.parse(text)
    except ValueError:
        return False
    return True


def _add_option(parser: argparse._ActionsContainer, option: Option, text: str) -> None:
    kind = option.type
    if kind is None:
        parser.add_argument(*option.flags, help=text, action="store_const", const=True)
        return
    once: Any = _StoreBound if option.group == SLA else "store"
    store = "append" if option.repeatable else once
    action = parser.add_argument(*option.flags, help=text, action=store, metavar=kind.metavar)
    if not kind.is_path:
        action.completer = lambda **_: kind.choices  # type: ignore[attr-defined]  # read by argcomplete


def add_results(parser: argparse._ActionsContainer) -> None:
    """Add the option for the folder in which a command looks for runs."""
    text = f"Folder in which RUN is looked for (default: {DEFAULTS.out})"
    parser.add_argument("--results", default=DEFAULTS.out, metavar="DIR", help=text)


def add_json(parser: argparse._ActionsContainer, condition: str = "") -> None:
    """Add the option that prints the result as JSON; ``condition`` is added to its help."""
    text = f"Print one JSON document on standard output{condition}"
    parser.add_argument("--json", action="store_true", help=text)


def add_model_of_run(parser: argparse._ActionsContainer) -> None:
    """Add the argument that repeats the model of a run from someone else (see docs/running.md)."""
    text = "Model of the run; needed only if another user or another machine wrote the run folder"
    parser.add_argument("model", metavar="MODEL", nargs="?", help=text)


def value_of(namespace: argparse.Namespace, flag: str) -> Any:
    """Return the value of ``flag``, such as ``--max-replicas``; None if it was not given and has no default."""
    return getattr(namespace, flag.removeprefix("--").replace("-", "_"))


def values_of(namespace: argparse.Namespace, names: Collection[str] = OPTIONS_BY_NAME) -> dict[str, object]:
    """Return the values of the table's options ``names``, by default of all, that were given, by option name."""
    values = {option.name: getattr(namespace, option.keyword, None) for option in OPTIONS if option.name in names}
    return {name: value for name, value in values.items() if value is not None}


def command_line(options: RunOptions) -> str:
    """Return the ``tune`` command that reproduces ``options``.

    Defaults are left out, except those that a file of Model Analyzer may set. Secrets are replaced.
    """
    words = option_words(written_values(options))
    return shlex.join(["tune", *words, *(["--"] if options.model.startswith("-") else []), options.model])


def command_with_larger_budget(options: RunOptions) -> str:
    """Return ``command_line`` with twice the budget, at least with MIN_PROPOSED_SECONDS, and without other limits.

    A limit of the trials may have ended the run as well, and would end the next one. With --no-confirmation the next
    one would be UNDECIDED too.
    """
    budget_seconds = max(2 * options.budget_seconds, MIN_PROPOSED_SECONDS)
    return command_line(replace(options, budget_seconds=budget_seconds, max_trials=None, confirmation=True))


def search_again_command(options: RunOptions, *, run: str | None = None, **changes: Any) -> str:
    """Return the command of a new search with ``options`` and ``changes``, outside of the shared study of the run.

    It learns from the trials of the folder ``run``. An exhaustive search takes no warm start. The tests on fresh
    servers follow the search, even if ``options`` left them out.
    """
    warm_start = None if options.search in EXHAUSTIVE_SEARCHES else run
    return command_line(
        replace(
            options,
            **{"warm_start": warm_start, "storage": None, "study_name": None, "confirmation": True, **changes},
        )
    )


def option_words(values: Mapping[str, str | list[str] | bool]) -> list[str]:
    """Return the words of a command line that give ``values``, which ``written_values`` has returned."""
    words: list[str] = []
    for name, value in values.items():
        flag = f"--{name}"
        if value is True:
            words.append(flag)
            continue
        for text in value if isinstance(value, list) else [str(value)]:
            words += [f"{flag}={text}"] if text.startswith("-") else [flag, text]
    return words


def _is_flag(word: str) -> bool:
    """Return whether argparse takes ``word`` for a flag."""
    return len(word) > 1 and word.startswith("-") and " " not in word and not _NEGATIVE.match(word)


def _join_negative_values(words: list[str]) -> list[str]:
    """Return ``--budget -5m`` as ``--budget=-5m``, because argparse takes -5m for a flag."""
    joined: list[str] = []
    for word in words:
        if joined and _NEGATIVE.match(word) and re.fullmatch("--[a-z][a-z0-9-]*", joined[-1]):
            joined[-1] += f"={word}"
        else:
            joined.append(word)
    return joined
