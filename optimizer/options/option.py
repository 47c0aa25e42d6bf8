"""The declaration of an option of ``tune run``: its value type, its help text, and the interfaces that take it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeAlias

from optimizer.options.addresses import redact_header
from optimizer.options.run_options import DEFAULTS, SLA_METRICS, TARGETS, RunOptions, TargetName

OptionUser: TypeAlias = Literal["python", "batch", "sweep", "resume"]
MovePath: TypeAlias = Callable[[Path, str, RunOptions], str]


@dataclass(frozen=True, slots=True)
class ValueType:
    """A type of option values.

    Attributes:
        metavar: The value's name in help texts.
        parse: Text to value. Raises ValueError with advice.
        write: Value to the text that reads as the same value. Secrets are replaced.
        annotation: The type of the Python keyword. A value that may be a path is also a ``Path``.
        is_path: Whether the value may be a path.
        move: The value as seen from another working folder, for a value that may be a path.
        choices: The allowed values if there are few.
    """

    metavar: str
    parse: Callable[[str], Any] = str
    write: Callable[[Any], str] = str
    annotation: str = "str"
    is_path: bool = False
    move: MovePath | None = None
    choices: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Option:
    """One option of ``tune run``.

    Attributes:
        name: The flag without dashes.
        type: How its value is read and written; None for a switch, which takes no value.
        help: The help text, without the targets that take it.
        taken_by: The interfaces that take it in addition to ``tune run``: ``optimizer.tune``, the entries of a suite
            of ``tune batch``, ``tune sweep``, and ``tune run --resume``.
        short: The letter of its short flag; empty if it has none.
        stored_as: The field of RunOptions: None if it has the option's name, empty for an option that only the
            command itself uses.
        key: The key in the field if that is a mapping.
        other_keys: The option gives all keys of the field that no other option has, each with its value.
        is_for: Whether this option, rather than another one with the same field, gives options their value.
        default: The default in words if it is not the default of the field.
        repeatable: It may be given several times; the field is a tuple.
        targets: The targets that take it.
        from_model_analyzer: Model Analyzer's file may set it, so the reproduced command always has it.
        always_written: The reproduced command has it even if it is the default.
        group: The heading under which help shows it.
        is_common: ``tune run --help`` shows it, and not only ``tune run --help-all``.
    """

    name: str
    type: ValueType | None
    help: str
    taken_by: tuple[OptionUser, ...] = ("python", "batch", "sweep")
    stored_as: str | None = None
    key: str = ""
    other_keys: bool = False
    is_for: Callable[[RunOptions], bool] = lambda options: True
    short: str = ""
    default: str = ""
    repeatable: bool = False
    targets: tuple[TargetName, ...] = TARGETS
    from_model_analyzer: bool = False
    always_written: bool = False
    group: str = ""
    is_common: bool = False

    @property
    def field(self) -> str:
        """The field of RunOptions; empty if it has none."""
        return self.keyword if self.stored_as is None else self.stored_as

    @property
    def flag(self) -> str:
        """The flag with its dashes."""
        return f"--{self.name}"

    @property
    def flags(self) -> tuple[str, ...]:
        """The flag, and the short one if there is one."""
        return (self.flag, f"-{self.short}") if self.short else (self.flag,)

    @property
    def keyword(self) -> str:
        """The name as an identifier."""
        return self.name.replace("-", "_")

    def help_text(self, default: str = "") -> str:
        """Return the help with the default, or with ``default`` in its place."""
        default = default or self.default
        if not default and self.type is not None and self.field and not self.key and not self.repeatable:
            value = getattr(DEFAULTS, self.field) if self.is_for(DEFAULTS) else None
            default = "" if value in (None, ()) else self.type.write(value)
        targets = "" if self.targets == TARGETS else f"{', '.join(self.targets)}: "
        return f"{targets}{self.help} (default: {default})" if default else f"{targets}{self.help}"

    @property
    def switch_value(self) -> bool:
        """The value of a switch's field if the switch is given."""
        return not self.name.startswith("no-")

    def redact(self, text: str) -> str:
        """Return the text of a value for a message, with secrets replaced."""
        if self.name == "docker-env":
            return text.partition("=")[0]
        return redact_header(text) if self.name == "header" else text

    def value_in(self, options: RunOptions) -> Any:
        """Return the option's value in ``options``."""
        value = getattr(options, self.field)
        if self.other_keys:
            return tuple((key, bound) for key, bound in value.items() if key not in SLA_METRICS)
        return value.get(self.key) if self.key else value
