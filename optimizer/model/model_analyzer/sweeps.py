"""The search space of a Model Analyzer file: ``model_config_parameters`` and the limits of its search.

``model_config_parameters`` gives fields of ModelConfig. A field with one value is swept if it is given a list. A
field that is a list itself (``instance_group``, ``preferred_batch_size``) is swept if it is given a list of lists.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, Literal, TypeAlias

from google.protobuf.descriptor import FieldDescriptor

from optimizer.config import field_path
from optimizer.config.model_config_proto import ModelConfig
from optimizer.config.search_space import (
    INSTANCE_COUNT,
    MAX_BATCH_SIZE,
    MAX_QUEUE_DELAY,
    PREFERRED_BATCH_SIZE,
    SPACE_KEYS,
)
from optimizer.core.candidate import FieldValue
from optimizer.core.errors import ParameterError
from optimizer.core.safe_text import format_value
from optimizer.core.yaml_lines import LocatedValue
from optimizer.model.model_analyzer.keys import MODEL_CONFIG_PARAMETERS, KeySupport, ignored, unsupported
from optimizer.model.model_analyzer.settings import (
    COMPOSING_MODELS,
    SEARCH_DISABLED,
    ConfiguredValue,
    DimensionChoices,
    ImportedSettings,
    ModelSettings,
    SweepValue,
    ValueReader,
)

MAX_ALTERNATIVES: Final = 1000  # limit of the combinations of one list
KIND: Final = "instance_group.0.kind"
KIND_GPU: Final = "KIND_GPU"
KIND_CPU: Final = "KIND_CPU"
_BATCHING: Final = "dynamic_batching"
_KEYS_BY_PATH: Final = {
    "max_batch_size": MAX_BATCH_SIZE,
    f"{_BATCHING}.max_queue_delay_microseconds": MAX_QUEUE_DELAY,
    f"{_BATCHING}.preferred_batch_size": PREFERRED_BATCH_SIZE,
    "instance_group.0.count": INSTANCE_COUNT,
}
_NOTES: Final = {
    **{path: MODEL_CONFIG_PARAMETERS[path] for path in list(_KEYS_BY_PATH)[:3]},
    "instance_group.0.count": MODEL_CONFIG_PARAMETERS["instance_group.count"],
    KIND: MODEL_CONFIG_PARAMETERS["instance_group.kind"],
}
_OTHER_FIELD: Final = MODEL_CONFIG_PARAMETERS["any other field"]
_PRESENT: Final = KeySupport("mapped", "dynamic batching, without a delay if config.pbtxt has none")
_COMBINED: Final = KeySupport("mapped", "the same values; each is combined with each of the others")
_GROUPS: Final = unsupported("several instance groups; config.pbtxt may have them")
_UNEQUAL: Final = unsupported(
    "choices that set different fields; give each choice the same fields, or use config.pbtxt"
)
_EMPTY: Final = unsupported("an empty field; write it into config.pbtxt")


@dataclass(frozen=True, slots=True)
class _Leaf:
    value: SweepValue | tuple[FieldValue, ...] | Literal["present"]
    where: LocatedValue


_Alternative: TypeAlias = dict[str, _Leaf]  # values by their path in ModelConfig
_Factor: TypeAlias = list[_Alternative]  # one is chosen, independently of the other factors


def read_choices(model_keys: Mapping[str, LocatedValue], reader: ValueReader) -> dict[str, DimensionChoices]:
    """Return the dimensions that the keys of a model give, by SPACE_KEYS or path in ModelConfig.

    ``model_config_parameters`` lists them, and ``cpu_only`` sets the kind of instances if that does not. Raises
    BadInputError.
    """
    listed = model_keys.get("model_config_parameters")
    choices = {} if listed is None else read_sweeps(listed, reader)
    if "cpu_only" in model_keys and reader.boolean(model_keys["cpu_only"]):
        choices.setdefault(KIND, DimensionChoices((KIND_CPU,), model_keys["cpu_only"]))
    return choices


def read_sweeps(where: LocatedValue, reader: ValueReader) -> dict[str, DimensionChoices]:
    """Return the dimensions that ``model_config_parameters`` lists, by SPACE_KEYS or path in ModelConfig.

    Raises BadInputError for fields or values that ModelConfig does not have.
    """
    dimensions: dict[str, DimensionChoices] = {}
    for name, node in reader.mapping(where, list(ModelConfig.DESCRIPTOR.fields_by_name)).items():
        swept = isinstance(node.value, tuple)
        for factor in _field(reader, node, ModelConfig.DESCRIPTOR.fields_by_name[name], name):
            if name == _BATCHING:
                factor = [_with_delay(alternative, node, swept) for alternative in factor]
            dimensions |= _dimensions(factor, node, reader)
        if name == _BATCHING:
            dimensions.setdefault(MAX_QUEUE_DELAY, DimensionChoices((ConfiguredValue(batching=True),), node))
        if name == "instance_group" and KIND in dimensions:
            dimensions.setdefault(INSTANCE_COUNT, DimensionChoices((1,), node))
    return dimensions


# -- the tree of the file -> independent factors ----------------------------------------------------------------


def _field(reader: ValueReader, where: LocatedValue, field: FieldDescriptor, path: str) -> list[_Factor]:
    if where.value is None:
        return []
    if _is_single(where, field):
        return _single(reader, where, field, path)
    if not isinstance(where.value, tuple):
        raise reader.fault(where, f"{format_value(where.plain())} is not {_kind(field)}")
    alternatives: _Factor = []
    for item in where.value:
        if item.value is None:
            alternatives.append({})
        elif _is_single(item, field):
            alternatives += _product(reader, where, _single(reader, item, field, path))
        else:
            raise reader.fault(item, f"{format_value(item.plain())} is not {_kind(field)}")
    if not alternatives:
        raise reader.fault(where, "is empty; give at least one value")
    return [alternatives]


def _is_single(where: LocatedValue, field: FieldDescriptor) -> bool:
    """Return whether this is one value of the field rather than a list of values to try."""
    value = where.value
    if field_path.is_map(field):
        return isinstance(value, dict)
    if not field_path.is_repeated(field):
        return isinstance(value, dict) if field.message_type else not isinstance(value, dict | tuple)
    if not isinstance(value, tuple):
        return False
    if field.message_type:
        return all(isinstance(item.value, dict) for item in value)
    return all(item.value is not None and not isinstance(item.value, dict | tuple) for item in value)


def _kind(field: FieldDescriptor) -> str:
    if field_path.is_map(field) or (field.message_type and not field_path.is_repeated(field)):
        return "a mapping, nor a list of mappings to try"
    if field_path.is_repeated(field):
        return "a list, nor a list of lists to try"
    return "a value, nor a list of values to try"


def _single(reader: ValueReader, where: LocatedValue, field: FieldDescriptor, path: str) -> list[_Factor]:
    if isinstance(where.value, tuple):
        if field.message_type is None:
            return [[{path: _Leaf(tuple(_scalar(item) for item in where.value), where)}]]
        groups = enumerate(where.value)
        return [factor for i, item in groups for factor in _message(reader, item, field, f"{path}.{i}")]
    if isinstance(where.value, dict):
        if not field_path.is_map(field):
            return _message(reader, where, field, path)
        entry = field_path.map_entry_field(field, "value")
        return [
            factor for key, child in where.value.items() for factor in _field(reader, child, entry, f"{path}.{key}")
        ]
    return [[{path: _Leaf(_scalar(where), where)}]]


def _message(reader: ValueReader, where: LocatedValue, field: FieldDescriptor, path: str) -> list[_Factor]:
    assert field.message_type is not None
    fields = field.message_type.fields_by_name
    children = reader.mapping(where, list(fields))
    factors = [
        factor for key, child in children.items() for factor in _field(reader, child, fields[key], f"{path}.{key}")
    ]
    return factors or [[{path: _Leaf("present", where)}]]


def _product(reader: ValueReader, where: LocatedValue, factors: list[_Factor]) -> _Factor:
    if math.prod(map(len, factors)) > MAX_ALTERNATIVES:
        raise reader.fault(where, f"has more than {MAX_ALTERNATIVES} combinations; list fewer")
    return [{path: leaf for part in parts for path, leaf in part.items()} for parts in itertools.product(*factors)]


def _scalar(where: LocatedValue) -> FieldValue:
    assert isinstance(where.value, str | int | float)
    return where.value


# -- factors -> choices -----------------------------------------------------------------------------------------


def _with_delay(alternative: _Alternative, node: LocatedValue, swept: bool) -> _Alternative:
    """Add a delay if all of dynamic_batching is swept; null leaves config.pbtxt's."""
    delay = f"{_BATCHING}.max_queue_delay_microseconds"
    other_fields = {path: leaf for path, leaf in alternative.items() if path != _BATCHING}
    if not swept or delay in other_fields:
        return other_fields or alternative
    return {delay: _Leaf(ConfiguredValue(batching=bool(alternative)), node), **other_fields}


def _dimensions(factor: _Factor, node: LocatedValue, reader: ValueReader) -> dict[str, DimensionChoices]:
    factor = [_flat(alternative) for alternative in factor]
    paths = list(dict.fromkeys(path for alternative in factor for path in alternative))
    if any(path.startswith("instance_group.") and not path.startswith("instance_group.0.") for path in paths):
        reader.note(node, _GROUPS)
        return {}
    if any(path not in alternative for path in paths for alternative in factor):
        reader.note(node, _UNEQUAL)
        return {}
    dimensions: dict[str, DimensionChoices] = {}
    for path in paths:
        leaves = [alternative[path] for alternative in factor]
        if leaves[0].value == "present":
            reader.note(leaves[0].where, _PRESENT if path == _BATCHING else _EMPTY)
            continue
        read = [_checked(path, leaf, reader) for leaf in leaves]
        values = tuple({(type(value), value): value for value in read}.values())
        dimensions[_KEYS_BY_PATH.get(path, path)] = DimensionChoices(values, leaves[0].where)
        reader.note(leaves[0].where, _NOTES.get(path, _OTHER_FIELD))
    distinct = {tuple(map(repr, (alternative[path].value for path in paths))) for alternative in factor}
    if math.prod(len(choices.values) for choices in dimensions.values()) > len(distinct):
        reader.note(node, _COMBINED)
    return dimensions


def _flat(alternative: _Alternative) -> _Alternative:
    """Return the alternative with a path for each entry of a list; the preferred sizes stay one choice."""
    flat: _Alternative = {}
    for path, leaf in alternative.items():
        if isinstance(leaf.value, tuple) and _KEYS_BY_PATH.get(path) != PREFERRED_BATCH_SIZE:
            flat |= {f"{path}.{i}": _Leaf(item, leaf.where) for i, item in enumerate(leaf.value)}
        else:
            flat[path] = leaf
    return flat


def _checked(path: str, leaf: _Leaf, reader: ValueReader) -> SweepValue:
    """Return the value as a profile has it. Raises BadInputError if it does not fit the field."""
    if isinstance(leaf.value, ConfiguredValue):
        return leaf.value
    if isinstance(leaf.value, tuple):
        assert isinstance(leaf.where.value, tuple)
        return ",".join(str(reader.whole(item)) for item in leaf.where.value) or "none"
    if path in _KEYS_BY_PATH:
        return reader.whole(leaf.where, minimum=1 if _KEYS_BY_PATH[path] == INSTANCE_COUNT else 0)
    try:
        field_path.normalize_value(ModelConfig.DESCRIPTOR, path, leaf.value)
    except ParameterError as error:
        raise reader.fault(leaf.where, error.problem) from None
    return leaf.value.upper() if path == KIND and isinstance(leaf.value, str) else leaf.value


SEARCH_MODES: Final = ("brute", "quick", "optuna")
BATCH_LIMITS: Final = ("run_config_search_min_model_batch_size", "run_config_search_max_model_batch_size")
COUNT_LIMITS: Final = ("run_config_search_min_instance_count", "run_config_search_max_instance_count")
DEFAULT_LIMITS: Final = {BATCH_LIMITS: (1, 128), COUNT_LIMITS: (1, 5)}


def import_space(settings: ModelSettings, result: ImportedSettings) -> None:
    """Import the search space and the number of trials. Raises BadInputError."""
    mode = _mode(settings)
    listed = settings.model_keys.get("model_config_parameters")
    result.choices.update(read_choices(settings.model_keys, settings.reader))
    composing = any(name in settings.file_keys for name in COMPOSING_MODELS)  # disables brute force in Model Analyzer
    brute = mode == "brute" and not composing
    if settings.is_true(SEARCH_DISABLED) or (brute and listed is not None and settings.reader.mapping(listed)):
        where = listed or settings.file_keys[SEARCH_DISABLED]
        result.choices.update(
            {name: DimensionChoices((ConfiguredValue(),), where) for name in SPACE_KEYS if name not in result.choices}
        )
    _limit(settings, result, MAX_BATCH_SIZE, BATCH_LIMITS)
    _limit(settings, result, INSTANCE_COUNT, COUNT_LIMITS)
    trials = settings.whole("optuna_max_trials")
    if trials is not None and mode == "optuna":
        result.options["max-trials"] = trials
    elif trials is not None:
        settings.reader.note(settings.file_keys["optuna_max_trials"], ignored(f"the search mode is {mode}"))


def _mode(settings: ModelSettings) -> str:
    where = settings.file_keys.get("run_config_search_mode")
    return SEARCH_MODES[0] if where is None else settings.reader.one_of(where, SEARCH_MODES)


def _limit(settings: ModelSettings, result: ImportedSettings, name: str, limits: tuple[str, str]) -> None:
    places = [settings.file_keys[limit] for limit in limits if limit in settings.file_keys]
    if not places:
        return
    low, high = (
        settings.whole(limit) or default for limit, default in zip(limits, DEFAULT_LIMITS[limits], strict=True)
    )
    if low > high:
        raise settings.reader.fault(places[0], f"the minimum {low} is above the maximum {high}")
    if name in result.choices:
        for where in places:
            settings.reader.note(where, ignored("model_config_parameters or run_config_search_disable decides"))
        return
    if name == INSTANCE_COUNT and high - low >= MAX_ALTERNATIVES:
        raise settings.reader.fault(places[-1], f"{low} to {high} are too many to try")
    doubled = [low << power for power in range((high // low).bit_length())]
    result.choices[name] = DimensionChoices(
        tuple(doubled if name == MAX_BATCH_SIZE else range(low, high + 1)), places[-1]
    )
