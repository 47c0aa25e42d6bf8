"""The types of a profile's values, and pydantic's validation errors as one line each."""

from __future__ import annotations

import difflib
import math
from collections.abc import Callable, Collection, Sequence
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Final, Literal, NamedTuple, TypeGuard, TypeVar

from pydantic import (
    AfterValidator,
    Discriminator,
    Field,
    PlainValidator,
    Tag,
    ValidationError,
    ValidationInfo,
    WithJsonSchema,
)
from pydantic_core import ErrorDetails

from objectives.units import parse_duration_ms
from optimizer.config import gpu_placement, model_json
from optimizer.config.batching import parse_preferred_sizes
from optimizer.core.candidate import FieldValue
from optimizer.core.request_sizes import (
    DISTRIBUTION_MARKS,
    FORMS,
    SizeDistribution,
    names_file,
    parse_bounds,
    parse_priorities,
    parse_size_distribution,
    parse_size_distributions,
    parse_token_lengths,
)
from optimizer.core.safe_text import check_file_name, format_value, is_folder, resolve_inside
from optimizer.core.yaml_lines import LocatedValue, located_error
from optimizer.options import server_options
from optimizer.options.values import MAX_INT32, check_load_share, format_cpus, parse_cpus


def fault_lines(
    error: ValidationError,
    source: LocatedValue,
    file: str,
    *,
    allowed_keys: Callable[[Sequence[str | int], Sequence[str]], Collection[str]],
    ignore: Collection[str] = (),
    section_of: Callable[[Sequence[str]], Sequence[str] | None] = lambda _: None,
) -> list[str]:
    """Return a line for each error: ``file:line: key.path: value, problem and allowed values``.

    ``source`` is the validated tree. ``allowed_keys(location, keys)`` returns the keys that a section may have;
    ``location`` is pydantic's name of the section, ``keys`` its path in the file. ``ignore`` has steps of locations
    that are no keys. ``section_of(keys)`` returns the path of the section that has a key of this name, or None.
    """
    lines = []
    for detail in error.errors(include_url=False):
        node = source.at([step for step in detail["loc"] if step not in ignore])
        if detail["type"] == "extra_forbidden":
            problem = _unknown_key(node.keys, allowed_keys(detail["loc"][:-1], node.keys[:-1]), section_of(node.keys))
        else:
            problem = _problem(detail, node.keys)
        lines.append(str(located_error(file, node.line, node.keys, problem)))
    return lines


def suggest(word: str, allowed: Collection[str]) -> str:
    """Return a hint to the most similar of the ``allowed`` words, or to all of them if none is similar."""
    return _similar(word, allowed) or f"known: {', '.join(allowed) or 'none'}"


def _unknown_key(keys: Sequence[str], allowed: Collection[str], section: Sequence[str] | None) -> str:
    key = keys[-1]
    if section is None:
        return f"unknown key; {suggest(key, allowed)}"
    place = f"in the section {'.'.join(section)}" if section else "at the top level"
    similar = _similar(key, allowed)
    return f"unknown key at this level; {similar}{similar and ' '}{key} belongs {place}"


def _similar(word: str, allowed: Collection[str]) -> str:
    nearest = difflib.get_close_matches(word, allowed, n=1)
    return f"did you mean {nearest[0]}?" if nearest else ""


_PROBLEMS: Final = {  # by pydantic's type of error; ``shown`` is the value
    "missing": "missing",
    "kind_of_model": "{msg}",
    "percentile": "{msg}",
    "value_error": "{error}",
    "greater_than_equal": "{shown} is not at least {ge}",
    "greater_than": "{shown} is not greater than {gt}",
    "less_than_equal": "{shown} is not at most {le}",
    "literal_error": "{shown} is not {expected}",
    "bool_type": "{shown} is not true or false",
    "bool_parsing": "{shown} is not true or false",
    "string_type": "{shown} is not text; write it in quotes",
    "string_too_long": "is longer than {max_length} characters",
}


def _problem(detail: ErrorDetails, keys: Sequence[str]) -> str:
    value, shown = detail["input"], format_value(detail["input"])
    match detail["type"]:
        case "int_type" | "int_from_float":
            quoted = isinstance(value, str) and value.isdecimal()
            return f"{shown} is not a whole number{f'; write {value} without quotes' if quoted else ''}"
        case "tuple_type":
            single = value is not None and not isinstance(value, dict)
            return f"{shown} is not a list{f'; write [{shown}]' if single else ''}"
        case "model_type" | "dict_type":
            if value is None:
                return f"{shown} is not a mapping; leave the key out or fill it"
            example = EXAMPLES.get(keys[-1]) if keys else None
            return f"{shown} is not a mapping of keys to values{f', such as {example}' if example else ''}"
        case kind:
            template = _PROBLEMS.get(kind, "{shown}: {msg}")
            return template.format(shown=shown, msg=detail["msg"], **detail.get("ctx", {}))


T = TypeVar("T")
V = TypeVar("V")

MAX_TERMS: Final = 32  # limit of the terms of a preferred-size policy
MAX_INPUT_DATA_BYTES: Final = 1 << 30  # perf_analyzer reads the file at every start
NUMBER, MIX = "<number>", "<mix>"  # the two types of request size, as pydantic names them in error locations
EXAMPLES: Final = {"model": "{repository: ./models, name: my_model}", "sla": "{p95: 20ms}"}  # examples in errors
SCORES: Final = ("accuracy", "auc")  # the metrics of ``optimizer.measure.score`` that need no file


def _parsed(value: V, parse: Callable[[V], T]) -> T:
    """Return what ``parse`` makes of ``value``, which its ValueErrors then begin with."""
    try:
        return parse(value)
    except ValueError as error:
        raise ValueError(f"{format_value(value)}: {error}") from None


def parsed_by(parse: Callable[[Any], object]) -> PlainValidator:
    """Return a validator that converts with ``parse`` and puts the value in front of its ValueErrors."""
    return PlainValidator(lambda value: _parsed(value, parse))


def _joined(value: object, separator: str) -> str:
    """Return a list of a profile in the syntax of the command line; other values as text."""
    return separator.join(map(str, value)) if isinstance(value, tuple) else str(value)


def _is_whole(value: object) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool)


def _parse_bound_ms(value: object) -> float:
    if not isinstance(value, str) and not _is_whole(value) and not isinstance(value, float):
        raise ValueError(f"{format_value(value)} is not a time; write one such as 20ms, 0.02s or 500us")
    return _parsed(value, lambda time: parse_duration_ms(str(time)))


def _parse_delay(value: object) -> int | str:
    if value is False or (isinstance(value, str) and value.lower() == "off"):
        return "off"
    if _is_whole(value) and 0 <= value <= MAX_INT32:
        return value
    raise ValueError(f"{format_value(value)} is neither a number of µs from 0 on nor off (no dynamic batching)")


def _parse_preferred_sizes(value: object) -> str:
    terms = value if isinstance(value, tuple) else (value,)
    try:
        if value is None or not all(isinstance(term, str) or _is_whole(term) for term in terms):
            raise ValueError
        policy = parse_preferred_sizes(value)
    except ValueError:
        allowed = "none, max, max/2, a size, or a list of those such as [max/2, max]"
        raise ValueError(f"{format_value(value)} is not a choice; write {allowed}") from None
    if policy.count(",") >= MAX_TERMS:
        raise ValueError(f"{format_value(value)} has more than {MAX_TERMS} sizes")
    return policy


def _check_scalar(value: object) -> FieldValue:
    if isinstance(value, str | int | float):
        return value
    raise ValueError(f"{format_value(value)} is not a single value (text, number, true or false)")


def _check_name(value: object) -> str:
    if not isinstance(value, str):
        raise ValueError(f"{format_value(value)} is not text; write it in quotes")
    return check_file_name(value)


def _resolve(value: object, info: ValidationInfo, kind: Literal["file", "folder"]) -> Path:
    """Return the path of a file or folder in the profile's folder, which is the validation context."""
    if not isinstance(value, str):
        raise ValueError(f"{format_value(value)} is not the path of a {kind}")
    path = resolve_inside((info.context or {})["folder"], value)
    if not (path.is_dir() if kind == "folder" else path.is_file()):
        raise ValueError(f"{format_value(value)} is not a {kind}")
    return path


def _resolve_input_data(value: object, info: ValidationInfo) -> Path | str | None:
    if value is None or value == "random" or value == "zero":
        return value if isinstance(value, str) else None
    if isinstance(value, str) and is_folder((info.context or {})["folder"] / value):
        return _resolve(value, info, "folder")
    path = _resolve(value, info, "file")
    if path.stat().st_size > MAX_INPUT_DATA_BYTES:
        raise ValueError(
            f"{format_value(value)} is larger than {MAX_INPUT_DATA_BYTES >> 20} MiB; write fewer samples"
        )
    return path


def _check_sizes(value: object) -> str:
    """Return the sizes of an input, such as [3, 16..128], in the syntax of ``parse_size_distributions``."""
    if value == ():
        raise ValueError("is empty; give at least one value")
    text = _joined(value, ",")
    _parsed(value, lambda _: parse_size_distributions(text))
    return text


def _number_or_mix(value: object) -> str:
    mixed = isinstance(value, str) and any(mark in value for mark in DISTRIBUTION_MARKS)
    return MIX if mixed else NUMBER


def _check_mix(value: object) -> str:
    parse_size_distribution(str(value))
    return str(value)


def _check_priorities(value: object) -> str:
    """Return shares of priorities as text: ``1*20|2*80`` or the mapping ``{1: 20, 2: 80}``."""
    if isinstance(value, dict):
        value = "|".join(f"{priority}*{share}" for priority, share in value.items())
    return str(parse_priorities(str(value)))


def _parse_lengths(value: object, info: ValidationInfo) -> SizeDistribution:
    """Return the lengths of prompts or outputs; a file of them is at or below the profile's folder."""
    if not isinstance(value, str) and not _is_whole(value):
        raise ValueError(f"{format_value(value)} is not a length; {FORMS}")
    text = str(value)
    if names_file(text):
        text = str(_resolve(text, info, "file"))
    return _parsed(value, lambda _: parse_token_lengths(text))


def _check_bounds(value: object) -> str:
    text = _joined(value, "..")
    parse_bounds(text)
    return text


def _parse_metric(value: object, info: ValidationInfo) -> str | MetricFunction:
    if isinstance(value, str) and value in SCORES:
        return value
    file, _, function = value.rpartition(":") if isinstance(value, str) else ("", "", "")
    if not file.endswith(".py") or not function.isidentifier():
        allowed = f"{', '.join(SCORES)}, or a file and its function such as accuracy.py:score"
        raise ValueError(f"{format_value(value)} is not a metric; write {allowed}")
    return MetricFunction(_resolve(file, info, "file"), function)


def _parse_number(value: object) -> float:
    try:  # text too: YAML 1.1 reads 1e-3 as text
        number = float(value) if isinstance(value, str | float) or _is_whole(value) else math.nan
    except ValueError:
        number = math.nan
    if not math.isfinite(number):
        raise ValueError(f"{format_value(value)} is not a number")
    return number


def _parse_non_negative(value: object) -> float:
    if (number := _parse_number(value)) < 0:
        raise ValueError(f"{format_value(value)} is not at least 0")
    return number


def _check_printable(text: str) -> str:
    if not text.isprintable():
        raise ValueError(f"{format_value(text)} has control characters")
    return text


def _check_not_empty(values: tuple[T, ...]) -> tuple[T, ...]:
    if not values:
        raise ValueError("is empty; give at least one value")
    return values


def _in_schema(*alternatives: dict[str, Any]) -> WithJsonSchema:
    """Return how a JSON Schema describes a value that pydantic reads with a function: as one of ``alternatives``."""
    return WithJsonSchema(alternatives[0] if len(alternatives) == 1 else {"anyOf": list(alternatives)})


# The JSON Schemas of the values, which do not follow from the functions that read them.
_TEXT: Final[dict[str, Any]] = {"type": "string", "minLength": 1}
_NUMBER_OR_TEXT: Final[dict[str, Any]] = {"type": ["number", "string"]}
_WHOLE: Final[dict[str, Any]] = {"type": "integer", "minimum": 1, "maximum": MAX_INT32}
_TIME: Final[dict[str, Any]] = {
    "type": "string",
    "pattern": r"^\s*([0-9]+\.?|[0-9]*\.[0-9]+)\s*(us|ms|s|m|min|h)\s*$",
}
_DELAY: Final[dict[str, Any]] = {"type": "integer", "minimum": 0, "maximum": MAX_INT32}
_SIZE_TERM: Final = r"\s*(max(/[1-9][0-9]*)?|[1-9][0-9]*)\s*"
_POLICY: Final[dict[str, Any]] = {"type": "string", "pattern": rf"^(\s*none\s*|{_SIZE_TERM}(,{_SIZE_TERM})*)$"}
_GPUS: Final[dict[str, Any]] = {"type": "string", "pattern": r"^\s*[0-9]+(\s*[,+]\s*[0-9]+)*\s*$"}
_INDEX: Final[dict[str, Any]] = {"type": "integer", "minimum": 0}

NonEmpty = Annotated[tuple[T, ...], AfterValidator(_check_not_empty), Field(json_schema_extra={"minItems": 1})]
Choices = NonEmpty[T] | None  # of a setting of the search space; None if the profile does not have the key
PrintableText = Annotated[str, AfterValidator(_check_printable)]
PositiveInt = Annotated[int, Field(ge=1, le=MAX_INT32)]
NonNegativeInt = Annotated[int, Field(ge=0, le=MAX_INT32)]
ThreadCount = Annotated[int, Field(ge=1, le=4096)]
PriorityLevel = Annotated[str, Field(pattern=r"^[1-9][0-9]{0,8}$")]
LatencyBound = Annotated[float | None, PlainValidator(_parse_bound_ms), _in_schema(_TIME)]
QueueDelay = Annotated[int | str, PlainValidator(_parse_delay), _in_schema({"enum": ["off", False]}, _DELAY)]
PreferredSizes = Annotated[
    str,
    PlainValidator(_parse_preferred_sizes),
    _in_schema(
        {"enum": ["none", "max", "max/2"]}, _POLICY, _WHOLE, {"type": "array", "items": {"anyOf": [_POLICY, _WHOLE]}}
    ),
]
GpuList = Annotated[
    str,
    parsed_by(lambda value: gpu_placement.to_text(gpu_placement.parse(_joined(value, ",")))),
    _in_schema(_GPUS, _INDEX, {"type": "array", "items": _INDEX, "minItems": 1}),
]
CpuList = Annotated[
    str, parsed_by(lambda value: format_cpus(parse_cpus(str(value)))), _in_schema({"type": ["string", "integer"]})
]
PlainName = Annotated[str, PlainValidator(_check_name), _in_schema({"type": "string"})]
NameWithShare = Annotated[
    str, parsed_by(lambda value: check_load_share(_check_name(value))), _in_schema({"type": "string"})
]
ServerOption = Annotated[
    str,
    parsed_by(lambda value: server_options.check_option_name(str(value))),
    _in_schema({"type": "string", "pattern": "^[a-z][a-z0-9-]*$"}),
]
ModelJsonKey = Annotated[
    str,
    parsed_by(lambda value: model_json.check_key(str(value))),
    _in_schema({"type": "string", "pattern": "^[A-Za-z_][A-Za-z0-9_-]*$"}),
]
BuilderSetting = Annotated[
    FieldValue | None,
    PlainValidator(lambda value: None if value is None else _check_scalar(value)),
    _in_schema({"type": ["string", "number", "boolean", "null"]}),
]
FieldChoice = Annotated[
    FieldValue, PlainValidator(_check_scalar), _in_schema({"type": ["string", "number", "boolean"]})
]
FiniteNumber = Annotated[float | None, PlainValidator(_parse_number), _in_schema(_NUMBER_OR_TEXT)]
NonNegative = Annotated[
    float | None,
    PlainValidator(_parse_non_negative),
    _in_schema({"type": "number", "minimum": 0}, {"type": "string"}),
]
ExistingFolder = Annotated[Path, PlainValidator(partial(_resolve, kind="folder")), _in_schema(_TEXT)]
ExistingFile = Annotated[Path, PlainValidator(partial(_resolve, kind="file")), _in_schema(_TEXT)]
DimSizes = Annotated[
    str,
    PlainValidator(_check_sizes),
    _in_schema(_WHOLE, _TEXT, {"type": "array", "items": {"anyOf": [_WHOLE, _TEXT]}, "minItems": 1}),
]
ValueBounds = Annotated[
    str,
    parsed_by(_check_bounds),
    _in_schema(_TEXT, {"type": "array", "items": _NUMBER_OR_TEXT, "minItems": 2, "maxItems": 2}),
]
TokenLengths = Annotated[SizeDistribution | None, PlainValidator(_parse_lengths), _in_schema(_TEXT, _WHOLE)]
_SizeMix = Annotated[str, parsed_by(_check_mix), _in_schema({"type": "string", "pattern": r"[*|]|\.\."}), Tag(MIX)]
RequestSize = Annotated[Annotated[PositiveInt, Tag(NUMBER)] | _SizeMix, Discriminator(_number_or_mix)]
Priorities = Annotated[
    str,
    parsed_by(_check_priorities),
    _in_schema(
        _TEXT,
        {"type": "object", "patternProperties": {"^[1-9][0-9]*$": {"type": "number"}}, "additionalProperties": False},
    ),
]
InputData = Annotated[
    Path | str | None,
    PlainValidator(_resolve_input_data),
    _in_schema({"enum": ["random", "zero"]}, {"type": ["string", "null"]}),
]


class MetricFunction(NamedTuple):
    """The function ``function`` in the Python file ``file``."""

    file: Path
    function: str


ScoreMetric = Annotated[
    str | MetricFunction,
    PlainValidator(_parse_metric),
    _in_schema({"enum": [*SCORES]}, {"type": "string", "pattern": r"^.+\.py:[^:]+$"}),
]
