"""A YAML parser whose values know their line and their key path, for error messages.

The input is untrusted: its bytes, nodes and depth are limited, and anchors, aliases and custom tags are refused.
Words that YAML 1.1 reads as other types (``off``, ``yes``, ``12:30``) stay text, as in YAML 1.2.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TypeAlias

import yaml

from optimizer.core.errors import BadInputError
from optimizer.core.safe_text import decode_utf8, one_line

MAX_BYTES = 1 << 20
MAX_NODES = 10_000
MAX_DEPTH = 24

Scalar: TypeAlias = str | int | float | bool | None
PlainValue: TypeAlias = "Scalar | tuple[PlainValue, ...] | dict[str, PlainValue]"

_MAX_PATH_CHARACTERS, _MAX_PROBLEM_CHARACTERS = 120, 400  # limits in a message

_TAG = "tag:yaml.org,2002:"
_TEXT_TAGS = {_TAG + kind for kind in ("str", "timestamp", "value", "merge")}


@dataclass(frozen=True, slots=True)
class LocatedValue:
    """A value with its line (from 1) and the keys that lead to it. A list or mapping has the line of its key."""

    value: Scalar | tuple[LocatedValue, ...] | dict[str, LocatedValue]
    line: int
    keys: tuple[str, ...] = ()

    def plain(self) -> PlainValue:
        """Return the value without lines: scalars, tuples and dicts."""
        if isinstance(self.value, dict):
            return {key: child.plain() for key, child in self.value.items()}
        if isinstance(self.value, tuple):
            return tuple(child.plain() for child in self.value)
        return self.value

    def at(self, location: Sequence[str | int]) -> LocatedValue:
        """Return the value at ``location``.

        If it does not exist, return the deepest existing ancestor under the keys of ``location``: an error about a
        missing value then names its full path and the nearest line.
        """
        node = self
        for index, step in enumerate(location):
            child: LocatedValue | None = None
            if isinstance(node.value, dict):
                child = node.value.get(str(step))
            elif isinstance(node.value, tuple) and isinstance(step, int) and step < len(node.value):
                child = node.value[step]
            if child is None:
                missing = tuple(key for key in location[index:] if isinstance(key, str))
                return replace(node, keys=node.keys + missing)
            node = child
        return node


def parse(data: bytes, file: str, *, hint: str) -> LocatedValue:
    """Return the YAML document in ``data``.

    ``file`` is the name for error messages, and ``hint`` ends the message about an empty file. Raises BadInputError
    with ``file:line: problem``.
    """
    return _TreeBuilder(file).build(_compose(decode_utf8(data, one_line(file)), file, hint), line=1, keys=())


class _Composer(yaml.SafeLoader):
    """Composes nodes with marks; limits their number and depth and refuses aliases."""

    nodes = 0
    depth = 0

    def compose_node(self, parent: yaml.Node | None, index: int) -> yaml.Node | None:
        event = self.peek_event()  # type: ignore[no-untyped-call]
        self.nodes += 1
        problem = ""
        if isinstance(event, yaml.AliasEvent) or getattr(event, "anchor", None) is not None:
            problem = "anchors and aliases are not supported; write the value out"
        elif self.nodes > MAX_NODES:
            problem = f"more than {MAX_NODES} values"
        elif self.depth >= MAX_DEPTH:
            problem = f"nested deeper than {MAX_DEPTH} levels"
        if problem:
            raise yaml.MarkedYAMLError(problem=problem, problem_mark=event.start_mark)
        self.depth += 1
        node = super().compose_node(parent, index)
        self.depth -= 1
        return node


def _compose(text: str, file: str, hint: str) -> yaml.Node:
    composer: _Composer | None = None
    try:
        composer = _Composer(text)
        node: yaml.Node | None = composer.get_single_node()
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        where = f":{mark.line + 1}:{mark.column + 1}" if mark else ""
        why = ", ".join(part for part in (error.context, error.problem) if part)
        if error.problem and "'\\t'" in error.problem:
            why = "YAML allows no tab here; write spaces"
        elif (
            error.context == "while parsing a block mapping" or error.problem == "mapping values are not allowed here"
        ):
            why += "; check the indentation and the quotation marks"
        raise BadInputError(f"{one_line(file)}{where}: {one_line(why, _MAX_PROBLEM_CHARACTERS)}") from None
    except yaml.reader.ReaderError as error:
        before = text[: error.position]
        where = f"{before.count(chr(10)) + 1}:{len(before) - before.rfind(chr(10))}"
        raise BadInputError(f"{one_line(file)}:{where}: YAML does not allow this character") from None
    except ValueError:  # PyYAML does not catch chr() of an impossible escape
        line = composer.get_mark().line + 1 if composer else 1
        raise BadInputError(f"{one_line(file)}:{line}: an escape sequence does not encode a character") from None
    if node is None:
        raise BadInputError(f"{one_line(file)}: empty; {hint}")
    return node


class _TreeBuilder:
    def __init__(self, file: str) -> None:
        self.file = file

    def build(self, node: yaml.Node, line: int, keys: tuple[str, ...]) -> LocatedValue:
        if isinstance(node, yaml.ScalarNode):
            own_line = node.start_mark.line + 1
            return LocatedValue(self._scalar(node, own_line, keys), own_line, keys)
        if isinstance(node, yaml.SequenceNode) and node.tag == _TAG + "seq":
            return LocatedValue(
                tuple(self.build(item, item.start_mark.line + 1, keys) for item in node.value), line, keys
            )
        if isinstance(node, yaml.MappingNode) and node.tag == _TAG + "map":
            return LocatedValue(self._mapping(node, keys), line, keys)
        raise self._fault(line, keys, f"the tag {node.tag.removeprefix(_TAG)} is not supported; leave it out")

    def _mapping(self, node: yaml.MappingNode, keys: tuple[str, ...]) -> dict[str, LocatedValue]:
        children: dict[str, LocatedValue] = {}
        first: dict[str, int] = {}
        for key_node, value_node in node.value:
            line = key_node.start_mark.line + 1
            if not isinstance(key_node, yaml.ScalarNode):
                raise self._fault(line, keys, "a key must be one word or a quoted text")
            key = key_node.value
            if key_node.tag == _TAG + "merge":
                raise self._fault(line, keys, "the merge key << is not supported; write its keys out")
            if key in children:
                raise self._fault(line, (*keys, key), f"set twice (first on line {first[key]})")
            first[key] = line
            children[key] = self.build(value_node, line, (*keys, key))
        return children

    def _scalar(self, node: yaml.ScalarNode, line: int, keys: tuple[str, ...]) -> Scalar:
        text: str = node.value
        if node.tag in _TEXT_TAGS:
            return text
        kind = node.tag.removeprefix(_TAG)
        if kind == "null" and text.lower() in ("", "~", "null"):
            return None
        value: Scalar = None
        if kind == "bool":
            value = _parse_bool(text)
        elif kind == "int":
            value = _parse_int(text)
        elif kind == "float":
            value = _parse_float(text)
        elif kind != "null":
            raise self._fault(line, keys, f"the tag {kind} is not supported; leave it out")
        if value is None:
            raise self._fault(line, keys, f"{text[:40]!r} is not a value of the type {kind}")
        return value

    def _fault(self, line: int, keys: tuple[str, ...], problem: str) -> BadInputError:
        return located_error(self.file, line, keys, problem)


def located_error(file: str, line: int, keys: Sequence[str], problem: str) -> BadInputError:
    """Return the error ``file:line: key.path: problem``, on one line."""
    path = f"{one_line('.'.join(keys), _MAX_PATH_CHARACTERS)}: " if keys else ""
    return BadInputError(f"{one_line(file)}:{line}: {path}{one_line(problem, _MAX_PROBLEM_CHARACTERS)}")


def _parse_bool(text: str) -> bool | str | None:
    """Return the value of ``true`` or ``false``, or the text of another boolean of YAML 1.1; None for other texts."""
    word = text.lower()
    if word in ("true", "false"):
        return word == "true"
    return text if word in yaml.SafeLoader.bool_values else None


def _parse_int(text: str) -> int | str | None:
    """Return the value of an integer of YAML 1.1, or the text of a sexagesimal one; None for other texts.

    Leading zeros are decimal.
    """
    digits = text.replace("_", "")
    if re.fullmatch(r"[-+]?[0-9]{1,40}", digits):
        return int(digits)
    if re.fullmatch(r"[-+]?0(?:x[0-9a-fA-F]{1,32}|b[01]{1,64})", digits):
        return int(digits, 0)
    return text if ":" in text else None


def _parse_float(text: str) -> float | str | None:
    """Return the value of a finite float of YAML 1.1, or the text of a sexagesimal one; None for other texts.

    No setting of Triton is infinite or nan.
    """
    if ":" in text:
        return text
    try:
        value = float(text.replace("_", ""))
    except ValueError:
        return None
    return value if math.isfinite(value) else None
