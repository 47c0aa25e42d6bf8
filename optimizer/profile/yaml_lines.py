"""YAML that remembers its lines: text -> a tree of values, each with the line and the key path it stands at.

Profiles come from anywhere, so the text is bounded (bytes, nodes, depth) and anchors, aliases and tags of
other types are refused. Words that YAML 1.1 reads as something else (``off``, ``yes``, ``12:30``) stay text,
as in YAML 1.2.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TypeAlias

import yaml

from optimizer.errors import BadInputError
from optimizer.untrusted import one_line as one_line

MAX_BYTES = 1 << 20
MAX_NODES = 10_000
MAX_DEPTH = 24

Scalar: TypeAlias = str | int | float | bool | None
Plain: TypeAlias = "Scalar | tuple[Plain, ...] | dict[str, Plain]"

_LONGEST_KEYS, _LONGEST_WORDS = 120, 400  # of a message

_TAG = "tag:yaml.org,2002:"
_TEXT_TAGS = {_TAG + kind for kind in ("str", "timestamp", "value", "merge")}


@dataclass(frozen=True, slots=True)
class Located:
    """A value, the line on which it is given (from 1) and the keys that lead to it.

    Lists and mappings stand on the line of their key.
    """

    value: Scalar | tuple[Located, ...] | dict[str, Located]
    line: int
    keys: tuple[str, ...] = ()

    def plain(self) -> Plain:
        """The value without lines: scalars, tuples and dicts."""
        if isinstance(self.value, dict):
            return {key: child.plain() for key, child in self.value.items()}
        if isinstance(self.value, tuple):
            return tuple(child.plain() for child in self.value)
        return self.value

    def at(self, location: Sequence[str | int]) -> Located:
        """What stands at ``location``, or the deepest thing on the way to it, under that path."""
        here = self
        for index, step in enumerate(location):
            child: Located | None = None
            if isinstance(here.value, dict):
                child = here.value.get(str(step))
            elif isinstance(here.value, tuple) and isinstance(step, int) and step < len(here.value):
                child = here.value[step]
            if child is None:
                missing = tuple(key for key in location[index:] if isinstance(key, str))
                return replace(here, keys=here.keys + missing)
            here = child
        return here


def show(value: object) -> str:
    """``value`` as one would write it in YAML, short and on one line."""
    if isinstance(value, dict):
        return "a mapping"
    if isinstance(value, tuple):
        text = f"[{', '.join(show(item) for item in value[:8])}{', …' if len(value) > 8 else ''}]"
    elif isinstance(value, str):
        text = repr(value) if value.isprintable() else ascii(value)
    else:
        text = "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)
    return text if len(text) <= 60 else f"{text[:59]}…"


def parse(data: bytes, file: str, *, hint: str = "a profile starts with a line 'model:'") -> Located:
    """The one YAML document in ``data``; ``file`` is how errors call it, ``hint`` what they say of an empty one.

    Raises BadInputError: ``file:line: …``.
    """
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        byte = f"{data[error.start]:#04x}"
        raise BadInputError(f"{one_line(file)}:{line}: byte {byte} is not UTF-8 text") from None
    return _Tree(file).build(_compose(text, file, hint), line=1, keys=())


class _Composer(yaml.SafeLoader):
    """Nodes with marks, of bounded number and depth, without aliases."""

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
        raise BadInputError(f"{one_line(file)}{where}: {one_line(why, _LONGEST_WORDS)}") from None
    except yaml.reader.ReaderError as error:
        before = text[: error.position]
        where = f"{before.count(chr(10)) + 1}:{len(before) - before.rfind(chr(10))}"
        raise BadInputError(f"{one_line(file)}:{where}: a character that YAML does not allow") from None
    except ValueError:  # PyYAML lets chr() of an impossible escape through
        line = composer.get_mark().line + 1 if composer else 1
        raise BadInputError(f"{one_line(file)}:{line}: an escape that names no character") from None
    if node is None:
        raise BadInputError(f"{one_line(file)}: empty; {hint}")
    return node


class _Tree:
    def __init__(self, file: str) -> None:
        self.file = file

    def build(self, node: yaml.Node, line: int, keys: tuple[str, ...]) -> Located:
        if isinstance(node, yaml.ScalarNode):
            own_line = node.start_mark.line + 1
            return Located(self._scalar(node, own_line, keys), own_line, keys)
        if isinstance(node, yaml.SequenceNode) and node.tag == _TAG + "seq":
            return Located(tuple(self.build(item, item.start_mark.line + 1, keys) for item in node.value), line, keys)
        if isinstance(node, yaml.MappingNode) and node.tag == _TAG + "map":
            return Located(self._mapping(node, keys), line, keys)
        raise self._fault(line, keys, f"the tag {node.tag.removeprefix(_TAG)} is not supported; leave it out")

    def _mapping(self, node: yaml.MappingNode, keys: tuple[str, ...]) -> dict[str, Located]:
        children: dict[str, Located] = {}
        first: dict[str, int] = {}
        for key_node, value_node in node.value:
            line = key_node.start_mark.line + 1
            if not isinstance(key_node, yaml.ScalarNode):
                raise self._fault(line, keys, "a key must be one word or a quoted text")
            key = key_node.value
            if key in children:
                raise self._fault(line, (*keys, key), f"given twice (first on line {first[key]})")
            first[key] = line
            children[key] = self.build(value_node, line, (*keys, key))
        return children

    def _scalar(self, node: yaml.ScalarNode, line: int, keys: tuple[str, ...]) -> Scalar:
        text: str = node.value
        word = text.lower()
        kind = node.tag.removeprefix(_TAG)
        if node.tag in _TEXT_TAGS:
            return text
        if kind == "bool" and (word in ("true", "false") or word in yaml.SafeLoader.bool_values):
            return word == "true" if word in ("true", "false") else text
        if kind == "null" and word in ("", "~", "null"):
            return None
        if kind == "int":
            number = _whole(text)
            if number is not None:
                return number
        if kind == "float":
            real = _real(text)
            if real is not None:
                return real
        if kind in ("bool", "null", "int", "float"):
            raise self._fault(line, keys, f"{text[:40]!r} is not a value of the type {kind}")
        raise self._fault(line, keys, f"the tag {kind} is not supported; leave it out")

    def _fault(self, line: int, keys: tuple[str, ...], problem: str) -> BadInputError:
        return fault(self.file, line, keys, problem)


def fault(file: str, line: int, keys: Sequence[str], problem: str) -> BadInputError:
    """``file:line: key.path: problem``, on one line."""
    path = f"{one_line('.'.join(keys), _LONGEST_KEYS)}: " if keys else ""
    return BadInputError(f"{one_line(file)}:{line}: {path}{one_line(problem, _LONGEST_WORDS)}")


def _whole(text: str) -> int | str | None:
    """YAML 1.1's integers; leading zeros are decimal, sexagesimal stays text. None where it is no integer."""
    digits = text.replace("_", "")
    if re.fullmatch(r"[-+]?[0-9]{1,40}", digits):
        return int(digits)
    if re.fullmatch(r"[-+]?0(?:x[0-9a-fA-F]{1,32}|b[01]{1,64})", digits):
        return int(digits, 0)
    return text if ":" in text else None


def _real(text: str) -> float | str | None:
    """YAML 1.1's floats, finite ones: no setting of Triton is anything else."""
    if ":" in text:
        return text
    try:
        value = float(text.replace("_", ""))
    except ValueError:
        return None
    return value if math.isfinite(value) else None
