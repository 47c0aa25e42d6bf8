"""What a single value of a profile may be: types that pydantic checks, each with its own words for what is wrong."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Annotated, Final, Literal, NamedTuple, TypeGuard, TypeVar

from pydantic import AfterValidator, Discriminator, Field, PlainValidator, Tag, ValidationInfo

from objectives.sla import parse_duration_ms
from optimizer import placement, server_options
from optimizer.batching import parse_policy
from optimizer.machine import cpus
from optimizer.profile.safe_paths import inside, is_folder, plain_name
from optimizer.profile.yaml_lines import show
from optimizer.requests.sizes import MIX_MARKS, parse_bounds, parse_dim, parse_dims
from optimizer.trial import FieldValue

T = TypeVar("T")

INT32_MAX: Final = 2**31 - 1  # ModelConfig's max_batch_size, preferred_batch_size and count
MAX_TERMS: Final = 32  # of a preferred-size policy
MAX_INPUT_DATA_BYTES: Final = 1 << 30  # perf_analyzer reads all of it at each launch, some 20 MB a second
NUMBER, MIX = "<number>", "<mix>"  # the two kinds of request size, as pydantic calls them in its locations
SCORES: Final = ("accuracy", "auc")  # the metrics of ``optimizer.answers.score`` that need no file


def _whole(value: object) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool)


def _bound_ms(value: object) -> float:
    if not isinstance(value, str) and not _whole(value) and not isinstance(value, float):
        raise ValueError(f"{show(value)} is not a time; write one such as 20ms, 0.02s or 500us")
    try:
        return parse_duration_ms(str(value))
    except ValueError as error:
        raise ValueError(f"{show(value)}: {error}") from None


def _delay(value: object) -> int | str:
    if value is False or (isinstance(value, str) and value.lower() == "off"):
        return "off"
    if _whole(value) and 0 <= value <= INT32_MAX:
        return value
    raise ValueError(f"{show(value)} is neither a number of µs from 0 on nor off (no dynamic batching)")


def _preferred(value: object) -> str:
    terms = value if isinstance(value, tuple) else (value,)
    try:
        if value is None or not all(isinstance(term, str) or _whole(term) for term in terms):
            raise ValueError
        policy = parse_policy(value)
    except ValueError:
        right = "none, max, max/2, a size, or a list of those such as [max/2, max]"
        raise ValueError(f"{show(value)} is not a choice; write {right}") from None
    if policy.count(",") >= MAX_TERMS:
        raise ValueError(f"{show(value)} has more than {MAX_TERMS} sizes")
    return policy


def _scalar(value: object) -> FieldValue:
    if isinstance(value, str | int | float):
        return value
    raise ValueError(f"{show(value)} is not a single value (text, number, true or false)")


def _cpu_list(value: object) -> str:
    try:
        return cpus.show(cpus.parse(str(value)))
    except ValueError as error:
        raise ValueError(f"{show(value)} is no list of CPUs; {error}") from None


def _server_option(value: object) -> str:
    try:
        return server_options.check_name(str(value))
    except ValueError as error:
        raise ValueError(f"{show(value)}: {error}") from None


def _gpu_list(value: object) -> str:
    numbers = value if isinstance(value, tuple) else (value,)
    try:
        return placement.show(placement.parse(",".join(map(str, numbers))))
    except ValueError as error:
        raise ValueError(f"{show(value)}: {error}") from None


def _setting(value: object) -> FieldValue | None:
    return None if value is None else _scalar(value)


def _name(value: object) -> str:
    if not isinstance(value, str):
        raise ValueError(f"{show(value)} is not text; write it in quotes")
    return plain_name(value)


def _inside(value: object, info: ValidationInfo, kind: str) -> Path:
    if not isinstance(value, str):
        raise ValueError(f"{show(value)} is not the path of a {kind}")
    # ``folder`` is where the profile lies: whoever validates gives it as context
    path = inside((info.context or {})["folder"], value)
    if not (path.is_dir() if kind == "folder" else path.is_file()):
        raise ValueError(f"{show(value)} is not a {kind}")
    return path


def _folder(value: object, info: ValidationInfo) -> Path:
    return _inside(value, info, "folder")


def _input_data(value: object, info: ValidationInfo) -> Path | str | None:
    if value is None or value == "random" or value == "zero":
        return value if isinstance(value, str) else None
    kind = "folder" if isinstance(value, str) and is_folder((info.context or {})["folder"] / value) else "file"
    path = _inside(value, info, kind)
    if kind == "file" and path.stat().st_size > MAX_INPUT_DATA_BYTES:
        raise ValueError(f"{show(value)} is larger than {MAX_INPUT_DATA_BYTES >> 20} MiB; write fewer samples")
    return path


def _sizes(value: object) -> str:
    """As ``requests.sizes`` reads them: of [3, 16..128] and the like."""
    text = ",".join(map(str, value)) if isinstance(value, tuple) else str(value)
    try:
        if value == ():
            raise ValueError("is empty; give at least one value")
        parse_dims(text)
    except ValueError as error:
        raise ValueError(f"{show(value)}: {error}" if value != () else str(error)) from None
    return text


def _number_or_mix(value: object) -> str:
    mixed = isinstance(value, str) and any(mark in value for mark in MIX_MARKS)
    return MIX if mixed else NUMBER


def _mix(value: object) -> str:
    """Of requests' sizes, as ``requests.sizes`` reads it."""
    try:
        parse_dim(str(value))
    except ValueError as error:
        raise ValueError(f"{show(value)}: {error}") from None
    return str(value)


def _bounds(value: object) -> str:
    text = "..".join(map(str, value)) if isinstance(value, tuple) else str(value)
    try:
        parse_bounds(text)
    except ValueError as error:
        raise ValueError(f"{show(value)}: {error}") from None
    return text


def _labelled(value: object, info: ValidationInfo) -> Path:
    return _inside(value, info, "file")


def _metric(value: object, info: ValidationInfo) -> str | MetricFunction:
    if isinstance(value, str) and value in SCORES:
        return value
    file, _, function = value.rpartition(":") if isinstance(value, str) else ("", "", "")
    if not file.endswith(".py") or not function.isidentifier():
        right = f"{', '.join(SCORES)}, or a file and its function such as accuracy.py:score"
        raise ValueError(f"{show(value)} is no metric; write {right}")
    return MetricFunction(_inside(file, info, "file"), function)


def _number(value: object) -> float:
    try:  # text too: YAML 1.1 takes 1e-3 for it
        number = float(value) if isinstance(value, str | float) or _whole(value) else math.nan
    except ValueError:
        number = math.nan
    if not math.isfinite(number):
        raise ValueError(f"{show(value)} is not a number")
    return number


def _tolerated(value: object) -> float:
    if (number := _number(value)) < 0:
        raise ValueError(f"{show(value)} is not at least 0")
    return number


def _printable(text: str) -> str:
    if not text.isprintable():
        raise ValueError(f"{show(text)} has control characters")
    return text


def _not_empty(values: tuple[T, ...]) -> tuple[T, ...]:
    if not values:
        raise ValueError("is empty; give at least one value")
    return values


Some = Annotated[tuple[T, ...], AfterValidator(_not_empty)]
Key = Annotated[str, AfterValidator(_printable)]
Positive = Annotated[int, Field(ge=1, le=INT32_MAX)]
Count = Annotated[int, Field(ge=1, le=4096)]
Mode = Literal[0, 1]
GraphLevel = Literal[-1, 0, 1, 2]
Accelerator = Literal["none", "tensorrt"]
BatchSize = Annotated[int, Field(ge=0, le=INT32_MAX)]
Bound = Annotated[float | None, PlainValidator(_bound_ms)]
Delay = Annotated[int | str, PlainValidator(_delay)]
Preferred = Annotated[str, PlainValidator(_preferred)]
GpuList = Annotated[str, PlainValidator(_gpu_list)]
CpuList = Annotated[str, PlainValidator(_cpu_list)]
Name = Annotated[str, PlainValidator(_name)]
ServerOption = Annotated[str, PlainValidator(_server_option)]
Setting = Annotated[FieldValue | None, PlainValidator(_setting)]
Choice = Annotated[FieldValue, PlainValidator(_scalar)]
Number = Annotated[float | None, PlainValidator(_number)]
Tolerated = Annotated[float | None, PlainValidator(_tolerated)]
Folder = Annotated[Path, PlainValidator(_folder)]
Sizes = Annotated[str, PlainValidator(_sizes)]
Bounds = Annotated[str, PlainValidator(_bounds)]
RequestSize = Annotated[
    Annotated[Positive, Tag(NUMBER)] | Annotated[str, PlainValidator(_mix), Tag(MIX)], Discriminator(_number_or_mix)
]
InputData = Annotated[Path | str | None, PlainValidator(_input_data)]

LabelledData = Annotated[Path, PlainValidator(_labelled)]


class MetricFunction(NamedTuple):
    """``function`` of the Python file ``file``."""

    file: Path
    function: str


Metric = Annotated[str | MetricFunction, PlainValidator(_metric)]
