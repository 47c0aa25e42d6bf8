"""``model_config_parameters``: fields of ModelConfig, each a value or a list of values to try -> choices of a space.

A field that takes one value sweeps where it is given a list. A field that is a list itself (``instance_group``,
``preferred_batch_size``) sweeps where it is given a list of lists.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Literal, TypeAlias

from google.protobuf.descriptor import FieldDescriptor
from tritonclient.grpc.model_config_pb2 import ModelConfig

from optimizer import proto_path
from optimizer.deployment import COUNT, DELAY, PREFERRED
from optimizer.deployment import SIZE as BATCH
from optimizer.model_analyzer.keys import MODEL_CONFIG_PARAMETERS, Key, unsupported
from optimizer.model_analyzer.notes import Notes
from optimizer.model_analyzer.values import Values
from optimizer.profile.yaml_lines import Located, show
from optimizer.trial import FieldValue

MOST_ALTERNATIVES: Final = 1000  # of one list
OWN = (BATCH, DELAY, PREFERRED, COUNT)  # of a space, as a profile calls them
KIND: Final = "instance_group.0.kind"
KIND_GPU: Final = "KIND_GPU"
_BATCHING: Final = "dynamic_batching"
_NAMES: Final = {
    "max_batch_size": BATCH,
    f"{_BATCHING}.max_queue_delay_microseconds": DELAY,
    f"{_BATCHING}.preferred_batch_size": PREFERRED,
    "instance_group.0.count": COUNT,
}
_NOTES: Final = {
    **{path: MODEL_CONFIG_PARAMETERS[path] for path in list(_NAMES)[:3]},
    "instance_group.0.count": MODEL_CONFIG_PARAMETERS["instance_group.count"],
    KIND: MODEL_CONFIG_PARAMETERS["instance_group.kind"],
}
_OTHER: Final = MODEL_CONFIG_PARAMETERS["any other field"]
_PRESENT: Final = Key("mapped to", "dynamic batching, without a delay if config.pbtxt has none")
_COMBINED: Final = Key("mapped to", "the same values; each is tried with each of the others")
_GROUPS: Final = unsupported("of several instance groups side by side; config.pbtxt may have them")
_UNEQUAL: Final = unsupported("choices that set different fields; write them out, or into config.pbtxt")
_EMPTY: Final = unsupported("an empty field; write it into config.pbtxt")


@dataclass(frozen=True, slots=True)
class AsGiven:
    """What config.pbtxt has; ``batching``: with dynamic batching, even if it has none."""

    batching: bool = False


Value: TypeAlias = "FieldValue | AsGiven"


@dataclass(frozen=True, slots=True)
class Choices:
    """The values of one dimension, and where they are listed."""

    values: tuple[Value, ...]
    where: Located


@dataclass(frozen=True, slots=True)
class _Leaf:
    value: Value | tuple[FieldValue, ...] | Literal["present"]
    where: Located


_Alternative: TypeAlias = dict[str, _Leaf]  # by proto path
_Factor: TypeAlias = list[_Alternative]  # one of them is chosen, whatever is chosen of the other factors


def read_sweeps(where: Located, values: Values, notes: Notes) -> dict[str, Choices]:
    """The dimensions that ``model_config_parameters`` lists: OWN by name, other fields by proto path.

    Raises BadInputError for what ModelConfig does not have.
    """
    found: dict[str, Choices] = {}
    for name, node in values.mapping(where, list(ModelConfig.DESCRIPTOR.fields_by_name)).items():
        swept = isinstance(node.value, tuple)
        for factor in _field(values, node, ModelConfig.DESCRIPTOR.fields_by_name[name], name):
            spelled = [_batching(one, node, swept) if name == _BATCHING else one for one in factor]
            found |= _choices(spelled, node, values, notes)
        if name == _BATCHING:
            found.setdefault(DELAY, Choices((AsGiven(batching=True),), node))
        if name == "instance_group" and KIND in found:
            found.setdefault(COUNT, Choices((1,), node))
    return found


# -- the file's tree -> independent factors ---------------------------------------------------------------------


def _field(values: Values, where: Located, field: FieldDescriptor, path: str) -> list[_Factor]:
    if where.value is None:
        return []
    if _is_one(where, field):
        return _one(values, where, field, path)
    if not isinstance(where.value, tuple):
        raise values.fault(where, f"{show(where.plain())} is not {_kind(field)}")
    alternatives: _Factor = []
    for item in where.value:
        if item.value is None:
            alternatives.append({})
        elif _is_one(item, field):
            alternatives += _product(values, where, _one(values, item, field, path))
        else:
            raise values.fault(item, f"{show(item.plain())} is not {_kind(field)}")
    if not alternatives:
        raise values.fault(where, "is empty; give at least one value")
    return [alternatives]


def _is_one(where: Located, field: FieldDescriptor) -> bool:
    """Whether it is one value of the field, rather than a list of values to try."""
    value = where.value
    if proto_path.is_map(field):
        return isinstance(value, dict)
    if not proto_path.is_repeated(field):
        return isinstance(value, dict) if field.message_type else not isinstance(value, dict | tuple)
    if not isinstance(value, tuple):
        return False
    if field.message_type:
        return all(isinstance(item.value, dict) for item in value)
    return all(item.value is not None and not isinstance(item.value, dict | tuple) for item in value)


def _kind(field: FieldDescriptor) -> str:
    if proto_path.is_map(field) or (field.message_type and not proto_path.is_repeated(field)):
        return "a mapping, nor a list of mappings to try"
    if proto_path.is_repeated(field):
        return "a list, nor a list of lists to try"
    return "a value, nor a list of values to try"


def _one(values: Values, where: Located, field: FieldDescriptor, path: str) -> list[_Factor]:
    if isinstance(where.value, tuple):
        if field.message_type is None:
            return [[{path: _Leaf(tuple(_scalar(item) for item in where.value), where)}]]
        groups = enumerate(where.value)
        return [factor for i, item in groups for factor in _message(values, item, field, f"{path}.{i}")]
    if isinstance(where.value, dict):
        if not proto_path.is_map(field):
            return _message(values, where, field, path)
        each = proto_path.entry(field, "value")
        return [
            factor for key, child in where.value.items() for factor in _field(values, child, each, f"{path}.{key}")
        ]
    return [[{path: _Leaf(_scalar(where), where)}]]


def _message(values: Values, where: Located, field: FieldDescriptor, path: str) -> list[_Factor]:
    assert field.message_type is not None
    fields = field.message_type.fields_by_name
    given = values.mapping(where, list(fields))
    factors = [
        factor for key, child in given.items() for factor in _field(values, child, fields[key], f"{path}.{key}")
    ]
    return factors or [[{path: _Leaf("present", where)}]]


def _product(values: Values, where: Located, factors: list[_Factor]) -> _Factor:
    if math.prod(map(len, factors)) > MOST_ALTERNATIVES:
        raise values.fault(where, f"has more than {MOST_ALTERNATIVES} combinations; list fewer")
    return [{path: leaf for part in parts for path, leaf in part.items()} for parts in itertools.product(*factors)]


def _scalar(where: Located) -> FieldValue:
    assert isinstance(where.value, str | int | float)
    return where.value


# -- factors -> choices -----------------------------------------------------------------------------------------


def _batching(alternative: _Alternative, node: Located, swept: bool) -> _Alternative:
    """With a delay, where the whole of dynamic_batching is swept: null leaves it as it is."""
    delay = f"{_BATCHING}.max_queue_delay_microseconds"
    rest = {path: leaf for path, leaf in alternative.items() if path != _BATCHING}
    if not swept or delay in rest:
        return rest or alternative
    return {delay: _Leaf(AsGiven(batching=bool(alternative)), node), **rest}


def _choices(factor: _Factor, node: Located, values: Values, notes: Notes) -> dict[str, Choices]:
    factor = [_flat(alternative) for alternative in factor]
    paths = list(dict.fromkeys(path for alternative in factor for path in alternative))
    if any(path.startswith("instance_group.") and not path.startswith("instance_group.0.") for path in paths):
        notes.say(node, _GROUPS)
        return {}
    if any(path not in alternative for path in paths for alternative in factor):
        notes.say(node, _UNEQUAL)
        return {}
    found: dict[str, Choices] = {}
    for path in paths:
        leaves = [alternative[path] for alternative in factor]
        if leaves[0].value == "present":
            notes.say(leaves[0].where, _PRESENT if path == _BATCHING else _EMPTY)
            continue
        read = [_checked(path, leaf, values) for leaf in leaves]
        found[_NAMES.get(path, path)] = Choices(_distinct(read), leaves[0].where)
        notes.say(leaves[0].where, _NOTES.get(path, _OTHER))
    distinct = {tuple(map(repr, (alternative[path].value for path in paths))) for alternative in factor}
    if math.prod(len(one.values) for one in found.values()) > len(distinct):
        notes.say(node, _COMBINED)
    return found


def _flat(alternative: _Alternative) -> _Alternative:
    """Each entry of a list by its own path; the preferred sizes are one choice together."""
    flat: _Alternative = {}
    for path, leaf in alternative.items():
        if isinstance(leaf.value, tuple) and _NAMES.get(path) != PREFERRED:
            flat |= {f"{path}.{i}": _Leaf(item, leaf.where) for i, item in enumerate(leaf.value)}
        else:
            flat[path] = leaf
    return flat


def _checked(path: str, leaf: _Leaf, values: Values) -> Value:
    """As a profile has it. Raises BadInputError where the field does not take it."""
    if isinstance(leaf.value, AsGiven):
        return leaf.value
    if isinstance(leaf.value, tuple):
        assert isinstance(leaf.where.value, tuple)
        return ",".join(str(values.whole(item)) for item in leaf.where.value) or "none"
    if path in _NAMES:
        return values.whole(leaf.where, least=1 if _NAMES[path] == COUNT else 0)
    try:
        proto_path.normal(ModelConfig.DESCRIPTOR, path, leaf.value)
    except ValueError as error:
        raise values.fault(leaf.where, str(error).removeprefix(f"{path}: ")) from None
    return leaf.value.upper() if path == KIND and isinstance(leaf.value, str) else leaf.value


def _distinct(values: Sequence[Value]) -> tuple[Value, ...]:
    return tuple({(type(value), value): value for value in values}.values())
