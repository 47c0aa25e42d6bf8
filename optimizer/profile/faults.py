"""What is wrong in a profile, in the words of who writes YAML: pydantic's errors -> one line each."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Collection, Sequence

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from optimizer.profile.yaml_lines import Located, fault, show


def fault_lines(
    error: ValidationError,
    source: Located,
    file: str,
    *,
    known: Callable[[Sequence[str | int], Sequence[str]], Collection[str]],
    ignore: Collection[str] = (),
) -> list[str]:
    """One line for each fault: ``file:line: key.path: value … what would be right``.

    ``source`` is what was validated. ``known(location, keys)`` are the keys that a section may have: pydantic
    calls it ``location``, the file has it under ``keys``. ``ignore``: steps of locations that are no keys.
    """
    lines = []
    for detail in error.errors(include_url=False):
        here = source.at([step for step in detail["loc"] if step not in ignore])
        if detail["type"] == "extra_forbidden":
            problem = f"unknown key; {meant(here.keys[-1], known(detail['loc'][:-1], here.keys[:-1]))}"
        else:
            problem = _problem(detail)
        lines.append(str(fault(file, here.line, here.keys, problem)))
    return lines


def meant(word: str, known: Collection[str]) -> str:
    """Which of the ``known`` may be meant by ``word``; all of them where none is near."""
    nearest = difflib.get_close_matches(word, known, n=1)
    return f"did you mean {nearest[0]}?" if nearest else f"known: {', '.join(known) or 'none'}"


def _problem(detail: ErrorDetails) -> str:
    kind, value, bounds = detail["type"], detail["input"], detail.get("ctx", {})
    given = show(value)
    match kind:
        case "missing":
            return "missing"
        case "kind_of_model":
            return detail["msg"]
        case "value_error":
            return str(bounds["error"])
        case "int_type" | "int_from_float":
            quoted = isinstance(value, str) and value.isdecimal()
            return f"{given} is not a whole number{f'; write {value} without quotes' if quoted else ''}"
        case "greater_than_equal":
            return f"{given} is not at least {bounds['ge']}"
        case "greater_than":
            return f"{given} is not greater than {bounds['gt']}"
        case "less_than_equal":
            return f"{given} is not at most {bounds['le']}"
        case "literal_error":
            return f"{given} is not {bounds['expected']}"
        case "tuple_type":
            one = value is not None and not isinstance(value, dict)
            return f"{given} is not a list{f'; write [{given}]' if one else ''}"
        case "string_type":
            return f"{given} is not text; write it in quotes"
        case "string_too_long":
            return f"is longer than {bounds['max_length']} characters"
        case "model_type" | "dict_type":
            return f"{given} is not a mapping; leave the key out or fill it"
        case _:
            return f"{given}: {detail['msg']}"
