"""The queue of Triton's dynamic batcher: limits, timeouts and priorities as fields of a search space."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import replace
from typing import Final, TypeAlias

from optimizer.config import field_path
from optimizer.config.model_config_proto import ModelConfig
from optimizer.core.candidate import Candidate, FieldValue
from optimizer.core.errors import ParameterError

BATCHER: Final = "dynamic_batching"
DEFAULT_POLICY: Final = f"{BATCHER}.default_queue_policy"
# the fields of a queue policy
POLICY_FIELDS: Final = ("max_queue_size", "default_timeout_microseconds", "timeout_action", "allow_timeout_override")
MAX_QUEUE_SIZE, TIMEOUT_US, TIMEOUT_ACTION, ALLOW_TIMEOUT_OVERRIDE = (f"{DEFAULT_POLICY}.{n}" for n in POLICY_FIELDS)
PRIORITY_LEVELS: Final = f"{BATCHER}.priority_levels"
DEFAULT_PRIORITY_LEVEL: Final = f"{BATCHER}.default_priority_level"
PRIORITY_POLICY: Final = f"{BATCHER}.priority_queue_policy"  # a map: the level follows
PRESERVE_ORDERING: Final = f"{BATCHER}.preserve_ordering"
QUEUE_PATHS: Final = {  # short names -> paths in ModelConfig
    **{name: f"{DEFAULT_POLICY}.{name}" for name in POLICY_FIELDS},
    "priority_levels": PRIORITY_LEVELS,
    "default_priority_level": DEFAULT_PRIORITY_LEVEL,
}
LIMITS: Final = ("default_timeout_microseconds", "max_queue_size", "priority_levels")  # each turns prefetching off
Fields: TypeAlias = tuple[tuple[str, FieldValue], ...]


def is_queue_field(path: str) -> bool:
    """Return whether a path in ModelConfig is a setting of the dynamic batcher's queue."""
    return path in QUEUE_PATHS.values() or _is_of_level(path)


def _is_of_level(path: str) -> bool:
    """Return whether a path in ModelConfig is a setting in the queue policy of a priority level."""
    return path.startswith(f"{PRIORITY_POLICY}.")


def may_refuse(fields: Mapping[str, Collection[FieldValue]]) -> bool:
    """Return whether any choice of ``fields`` limits a queue or rejects late requests.

    Policies of levels limit nothing without levels, and a timeout whose only action is DELAY refuses nothing.
    """
    return any(int(value) > 0 for path in fields if _may_limit(path, fields) for value in fields[path])


def _may_limit(path: str, fields: Mapping[str, Collection[FieldValue]]) -> bool:
    """Return whether a value above 0 of the setting ``path`` refuses requests, with some of the other choices."""
    if not is_queue_field(path):
        return False
    policy, _, name = path.rpartition(".")
    has_levels = any(int(levels) for levels in fields.get(PRIORITY_LEVELS, (1,)))
    if _is_of_level(path) and not has_levels:
        return False
    if name == "default_timeout_microseconds":
        return set(fields.get(f"{policy}.timeout_action", ("REJECT",))) != {"DELAY"}
    return name == "max_queue_size"


def without_effect(fields: Mapping[str, FieldValue]) -> dict[str, str]:
    """Return the queue settings of ``fields`` that have no effect next to the others, with the reason in words.

    Requests of tune have no timeout that could replace that of the queue. Alone, the permission to do so still
    matters: Triton then forms no batch before an instance is idle, as with any other limit.
    """
    reasons: dict[str, str] = {}
    limit = next((name for name in LIMITS if int(fields.get(QUEUE_PATHS[name], 0))), None)
    for path in filter(is_queue_field, fields):
        head, _, name = path.rpartition(".")
        of_level = _is_of_level(path)
        if name == "timeout_action" and int(fields.get(f"{head}.default_timeout_microseconds", 1)) == 0:
            reasons[path] = "with default_timeout_microseconds 0"
        if name == "allow_timeout_override" and (limit or of_level):
            reasons[path] = f"with {limit or 'priority_levels'}, as no request has a timeout"
        if (of_level or path == DEFAULT_PRIORITY_LEVEL) and int(fields.get(PRIORITY_LEVELS, 1)) == 0:
            reasons[path] = "with priority_levels 0"
    return reasons


def with_default_queue(candidate: Candidate, paths: Iterable[str]) -> Candidate:
    """Return ``candidate`` with Triton's default for each queue setting of ``paths`` that it lacks.

    So a configuration without any is the one of the space that limits nothing.
    """
    return with_queue(candidate, [(path, _default(path)) for path in paths if is_queue_field(path)])


def with_queue(candidate: Candidate, settings: Iterable[tuple[str, FieldValue]]) -> Candidate:
    """Return ``candidate`` with those queue ``settings`` that it lacks. Without dynamic batching it has none."""
    if not candidate.dynamic_batching:
        return candidate
    return replace(candidate, fields=tuple(sorted({**dict(settings), **dict(candidate.fields)}.items())))


def configured_queue(config: ModelConfig) -> Fields:
    """Return the queue settings of ``config`` that are not Triton's defaults.

    The policy of a priority level is returned with all its settings, because it replaces the default policy.
    """
    batching = config.dynamic_batching
    policies = [f"{PRIORITY_POLICY}.{level}" for level in batching.priority_queue_policy]
    paths = [f"{policy}.{name}" for policy in policies for name in POLICY_FIELDS]
    values = {path: field_path.get_value(config, path) for path in (*QUEUE_PATHS.values(), *paths)}
    configured = [(path, value) for path, value in values.items() if value is not None]
    needed_paths = (*paths, PRIORITY_LEVELS) if paths else ()  # with 0 levels their policies have no effect
    return tuple(
        sorted((path, value) for path, value in configured if path in needed_paths or value != _default(path))
    )


def _default(path: str) -> FieldValue:
    name = path.rpartition(".")[2]
    if name == "timeout_action":
        return "REJECT"
    return False if name == "allow_timeout_override" else 0


def check_queue_fields(config: ModelConfig, fields: Mapping[str, Collection[FieldValue]]) -> None:
    """Raise ParameterError if a combination of queue settings has no effect, or if Triton refuses it.

    A setting that is no field has the value of ``config``.
    """
    paths = [path for path in fields if is_queue_field(path)]
    if paths and config.max_batch_size == 0:
        raise ParameterError(paths[0], "needs dynamic batching, which a model of max_batch_size 0 cannot have")
    for path in paths:
        for value in fields[path]:
            _check_value(path, value)
    for path in paths:
        head, _, name = path.rpartition(".")
        timeout = f"{head}.default_timeout_microseconds"
        if name == "timeout_action" and not any(map(int, _choices(config, fields, timeout))):
            raise ParameterError(
                path, "has no effect without a timeout; add default_timeout_microseconds above 0, or leave it out"
            )
    _check_order(config, fields, paths)
    if paths:
        _check_levels(config, fields, paths)


def _choices(config: ModelConfig, fields: Mapping[str, Collection[FieldValue]], path: str) -> Collection[FieldValue]:
    """Return the choices of a setting, or its value in ``config`` if it is no field; empty if neither has it."""
    if path in fields:
        return fields[path]
    value = field_path.get_value(config, path)
    return () if value is None else (value,)


def _check_order(config: ModelConfig, fields: Mapping[str, Collection[FieldValue]], paths: Iterable[str]) -> None:
    """Raise ParameterError if late requests are delayed although the order is preserved, which Triton refuses."""
    if not _preserves_order(config, fields):
        return
    levels = (f"{PRIORITY_POLICY}.{level}" for level in config.dynamic_batching.priority_queue_policy)
    for policy in sorted({DEFAULT_POLICY, *levels, *(path.rpartition(".")[0] for path in paths)} - {BATCHER}):
        action, timeout = f"{policy}.timeout_action", f"{policy}.default_timeout_microseconds"
        delays = "DELAY" in _choices(config, fields, action) and any(map(int, _choices(config, fields, timeout)))
        if delays and fields.keys() & {PRESERVE_ORDERING, action, timeout}:
            raise ParameterError(action, "DELAY excludes preserve_ordering; write REJECT, or leave that field out")


def _preserves_order(config: ModelConfig, fields: Mapping[str, Collection[FieldValue]]) -> bool:
    """Return whether a configuration may send the responses in the order of the requests."""
    return any(str(value).lower() in ("true", "1") for value in _choices(config, fields, PRESERVE_ORDERING))


def _check_levels(config: ModelConfig, fields: Mapping[str, Collection[FieldValue]], paths: Iterable[str]) -> None:
    """Raise ParameterError if the priorities do not fit each other, as Triton's ``ValidateModelConfig`` does."""
    with_levels = [levels for levels in map(int, _choices(config, fields, PRIORITY_LEVELS)) if levels]
    least = min(with_levels, default=0)
    defaults = [int(level) for level in _choices(config, fields, DEFAULT_PRIORITY_LEVEL)]
    if with_levels and not any(defaults):
        raise ParameterError(
            PRIORITY_LEVELS,
            f"{least} needs a default for requests without a priority; add default_priority_level from 1 to {least}",
        )
    if not with_levels:
        for path in paths:
            if path == DEFAULT_PRIORITY_LEVEL or _is_of_level(path):
                raise ParameterError(
                    path, "has no effect without levels; add priority_levels above 0, or leave it out"
                )
        return
    for default in defaults:
        if not 1 <= default <= least:
            raise ParameterError(
                DEFAULT_PRIORITY_LEVEL, f"{default} is not a level from 1 to priority_levels {least}"
            )
    for path in paths:
        if _is_of_level(path):
            level = path.removeprefix(f"{PRIORITY_POLICY}.").partition(".")[0]
            if not 1 <= int(level) <= least:
                raise ParameterError(path, f"{level} is not a level from 1 to priority_levels {least}")
    if _preserves_order(config, fields) and max(with_levels) > 1:
        raise ParameterError(
            PRIORITY_LEVELS, f"{max(with_levels)} excludes preserve_ordering, which Triton permits for one level only"
        )


def _check_value(path: str, value: FieldValue) -> None:
    """Raise ParameterError if the field cannot have ``value``."""
    is_switch = str(value).lower() in ("true", "false")
    if is_switch is not path.endswith("allow_timeout_override"):
        allowed = "true or false" if path.endswith("allow_timeout_override") else "no true or false"
        raise ParameterError(path, f"{value!r} does not fit; it takes {allowed}")
    field_path.normalize_value(ModelConfig.DESCRIPTOR, path, value)
