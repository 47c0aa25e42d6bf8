"""Read and set a field of a protobuf message by its path, as a plain value.

    optimization.graph.level                          dots separate nested messages
    parameters.intra_op_thread_count.string_value     a key follows a map (it may contain dots)
    instance_group.0.host_policy                      an index follows a repeated field

Enums are read and set by name. A path that does not exist, or a value of another type, raises ParameterError.
"""

from __future__ import annotations

import difflib
import struct
from collections.abc import Iterable
from typing import Any, Literal, TypeAlias

from google.protobuf import text_format
from google.protobuf.descriptor import Descriptor, EnumDescriptor, FieldDescriptor

from optimizer.core.candidate import FieldValue
from optimizer.core.errors import ParameterError
from optimizer.core.safe_text import scalar_text

PathStep: TypeAlias = tuple[FieldDescriptor, "str | int | None"]  # a field, and the key or index in it

_INTEGERS = {
    FieldDescriptor.CPPTYPE_INT32: range(-(2**31), 2**31),
    FieldDescriptor.CPPTYPE_INT64: range(-(2**63), 2**63),
    FieldDescriptor.CPPTYPE_UINT32: range(2**32),
    FieldDescriptor.CPPTYPE_UINT64: range(2**64),
}
_FLOATS = {FieldDescriptor.CPPTYPE_FLOAT, FieldDescriptor.CPPTYPE_DOUBLE}
_FLOAT32_DIGITS = range(6, 10)  # 6 are exact in every 32-bit number, and 9 identify each one


def get_value(message: Any, path: str) -> FieldValue | None:
    """Return the value at ``path``; None if a message, key or index on the way is missing.

    A scalar field in an existing message has at least its default value. A number of 32 bits has no more digits than
    it needs, as in the text format: 0.3, and not 0.30000001192092896.
    """
    steps = _steps(message.DESCRIPTOR, path)
    value: Any = message
    for field, key in steps:
        if key is None and field.has_presence and not value.HasField(field.name):
            return None
        value = getattr(value, field.name)
        if key is None:
            continue
        if (key >= len(value)) if isinstance(key, int) and not is_map(field) else (key not in value):
            return None
        value = value[key]
    return _read(_leaf(steps), value)


def set_value(message: Any, path: str, value: FieldValue) -> None:
    """Set the field at ``path``, and create missing messages on the way. An index may be the next free one."""
    steps = _steps(message.DESCRIPTOR, path)
    leaf = _leaf(steps)
    plain = _convert(path, leaf, value)
    for field, key in steps[:-1]:
        message = getattr(message, field.name)
        if isinstance(key, int) and not is_map(field):
            _check_index(path, key, len(message))
            message = message[key] if key < len(message) else message.add()
        elif key is not None:
            message = message[key]
    field, key = steps[-1]
    if key is None:
        setattr(message, field.name, plain)
        return
    values = getattr(message, field.name)
    if isinstance(key, int) and not is_map(field):
        _check_index(path, key, len(values))
        if key == len(values):
            values.append(plain)
            return
    values[key] = plain


def normalize_value(descriptor: Descriptor, path: str, value: FieldValue) -> FieldValue:
    """Return ``value`` as ``get_value`` would return it after ``set_value``. Raises the errors of ``set_value``."""
    leaf = _leaf(_steps(descriptor, path))
    return _read(leaf, _convert(path, leaf, value))


def to_lines(fields: Iterable[tuple[str, FieldValue]], message: Any) -> list[str]:
    """Return ``fields``, which are paths in ``message``, as one line of text format for each field at its top.

    ``message`` is changed. Raises the errors of ``set_value``.
    """
    for path, value in fields:
        set_value(message, path, value)
    lines = []
    for field, value in message.ListFields():
        part = type(message)()  # with this field alone
        if field.message_type is None and not is_repeated(field):
            setattr(part, field.name, value)
        else:
            getattr(part, field.name).MergeFrom(value)
        lines.append(str(text_format.MessageToString(part, as_one_line=True, as_utf8=True)).strip())
    return lines


def is_default(descriptor: Descriptor, path: str, value: FieldValue) -> bool:
    """Return whether ``value`` is that of an absent field. Raises the errors of ``set_value``."""
    leaf = _leaf(_steps(descriptor, path))
    return bool(_convert(path, leaf, value) == leaf.default_value)


def is_repeated(field: FieldDescriptor) -> bool:
    """Return whether the field is a list or a map."""
    if hasattr(field, "is_repeated"):
        return bool(field.is_repeated)
    old: Any = field  # protobuf < 6.31
    return bool(old.label == old.LABEL_REPEATED)


def is_map(field: FieldDescriptor) -> bool:
    """Return whether the field is a map."""
    return field.message_type is not None and bool(field.message_type.GetOptions().map_entry)


def map_entry_field(field: FieldDescriptor, part: Literal["key", "value"]) -> FieldDescriptor:
    """Return the field that describes the keys or the values of a map."""
    assert field.message_type is not None
    return field.message_type.fields_by_name[part]


def _steps(descriptor: Descriptor, path: str) -> list[PathStep]:
    """Return the fields of a path, resolved against the schema alone.

    Raises ParameterError with the most similar field name.
    """
    names = path.split(".")
    steps: list[PathStep] = []
    current: Descriptor | None = descriptor
    while names:
        if current is None:
            raise ParameterError(path, f"{steps[-1][0].name} is a plain value and has no fields")
        field = current.fields_by_name.get(names[0])
        if field is None:
            similar = difflib.get_close_matches(names[0], current.fields_by_name, n=1, cutoff=0.5)
            hint = f"did you mean {similar[0]}?" if similar else f"it has {', '.join(current.fields_by_name)}"
            raise ParameterError(path, f"{current.name} has no field {names[0]!r}; {hint}")
        names = names[1:]
        if not is_repeated(field):
            steps.append((field, None))
            current = field.message_type
        elif is_map(field):
            key, names = _split_key(path, field, names)
            steps.append((field, _convert(path, map_entry_field(field, "key"), key)))
            current = map_entry_field(field, "value").message_type
        else:
            if not names or not names[0].isdecimal():
                raise ParameterError(path, f"{field.name} is a list; write an index, such as {field.name}.0")
            steps.append((field, int(names[0])))
            names, current = names[1:], field.message_type
    if current is not None:
        names = list(current.fields_by_name)
        raise ParameterError(path, f"{current.name} is a message; name a field in it: {', '.join(names)}")
    return steps


def _split_key(path: str, field: FieldDescriptor, names: list[str]) -> tuple[str, list[str]]:
    """Return the key of a map entry, as long as possible, and the rest of the path."""
    value = map_entry_field(field, "value").message_type
    if value is None and names:
        return ".".join(names), []
    for at in range(len(names) - 1, 0, -1):
        if value is not None and names[at] in value.fields_by_name:
            return ".".join(names[:at]), names[at:]
    example = "" if value is None else f".{next(iter(value.fields_by_name))}"
    raise ParameterError(path, f"{field.name} is a map; write {field.name}.<key>{example}")


def _leaf(steps: list[PathStep]) -> FieldDescriptor:
    field = steps[-1][0]
    return map_entry_field(field, "value") if is_map(field) else field


def _read(leaf: FieldDescriptor, value: Any) -> FieldValue:
    enum: EnumDescriptor | None = leaf.enum_type
    if enum is not None:
        enum_value = enum.values_by_number.get(value)
        return enum_value.name if enum_value is not None else int(value)
    if leaf.cpp_type == FieldDescriptor.CPPTYPE_FLOAT:
        shorter = (float(f"{value:.{digits}g}") for digits in _FLOAT32_DIGITS)
        return next((number for number in shorter if _float32(number) == value), float(value))
    result: FieldValue = value
    return result


def _float32(number: float) -> float:
    """Return the nearest number of 32 bits. Raises OverflowError if it is too large."""
    return float(struct.unpack("<f", struct.pack("<f", number))[0])


def _convert(path: str, leaf: FieldDescriptor, value: FieldValue) -> Any:
    """Return ``value`` in the type of the field; a text is parsed."""
    text = scalar_text(value).strip()
    kind = leaf.cpp_type
    try:
        if kind == FieldDescriptor.CPPTYPE_STRING:
            return text if isinstance(value, bool) else str(value)
        if kind == FieldDescriptor.CPPTYPE_BOOL:
            return {"true": True, "1": True, "false": False, "0": False}[text.lower()]
        if leaf.enum_type is not None:
            return leaf.enum_type.values_by_name[text.upper()].number
        if isinstance(value, bool):
            raise ValueError
        if kind in _FLOATS:
            return _float32(float(text)) if kind == FieldDescriptor.CPPTYPE_FLOAT else float(text)
        if kind in _INTEGERS:
            number = int(value) if isinstance(value, float) else int(text)
            if (isinstance(value, float) and number != value) or number not in _INTEGERS[kind]:
                raise ValueError
            return number
    except (ValueError, KeyError, OverflowError):
        allowed = ", ".join(v.name for v in leaf.enum_type.values) if leaf.enum_type else _KINDS[kind]
        raise ParameterError(path, f"{value!r} does not fit; it takes {allowed}") from None
    raise ParameterError(path, "fields of this type cannot be set")


_KINDS = {
    FieldDescriptor.CPPTYPE_BOOL: "true or false",
    FieldDescriptor.CPPTYPE_FLOAT: "a number",
    FieldDescriptor.CPPTYPE_DOUBLE: "a number",
    FieldDescriptor.CPPTYPE_INT32: "a whole number of 32 bits",
    FieldDescriptor.CPPTYPE_INT64: "a whole number of 64 bits",
    FieldDescriptor.CPPTYPE_UINT32: "a whole number of 32 bits, not negative",
    FieldDescriptor.CPPTYPE_UINT64: "a whole number of 64 bits, not negative",
}


def _check_index(path: str, index: int, length: int) -> None:
    if index > length:
        raise ParameterError(path, f"index {index} of a list of {length}; the next free one is {length}")
