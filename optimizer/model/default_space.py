"""The search space of a model: the choices of its profile, and those that its configuration and the hardware give."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal

from optimizer.config import model_config, ort_settings
from optimizer.config.backends import ONNXRUNTIME, backend_of, has_llm_engine, is_ensemble
from optimizer.config.batching import (
    CANDIDATE_SEQUENCES,
    SEQUENCE_PREFERRED,
    SLOT_UTILIZATION,
    format_preferred_sizes,
    is_batcher_field,
    is_sequence_field,
)
from optimizer.config.model_config_proto import ModelConfig
from optimizer.config.model_source import ModelSource
from optimizer.config.queue_policy import check_queue_fields, is_queue_field
from optimizer.config.search_space import INSTANCE_COUNT, MAX_QUEUE_DELAY, OFF, SearchSpace
from optimizer.core.candidate import VARIANT, FieldValue, model_of_field
from optimizer.core.errors import ParameterError
from optimizer.core.request_sizes import SizeDistribution
from optimizer.core.safe_text import one_line
from optimizer.machine.hardware import Hardware
from optimizer.model.profile_schema import DEFAULT_DELAYS_US, DEFAULT_PREFERRED_SIZES, SpaceSection, keys_of_parameter

MAX_THREADS = 16
MAX_DERIVED_CONFIGURATIONS = 5_000  # limit with derived choices of other models: the search compares all
# choices of the sequence batcher, in addition to the configured one
SEQUENCE_DELAYS_US = (0, 500, 2000)
CANDIDATE_SEQUENCE_COUNTS = (16, 64, 256)
SLOT_UTILIZATIONS = (0.5, 1.0)  # with 0, Triton's default, the delay has no effect


def build_space(
    section: SpaceSection,
    source: ModelSource,
    batch: SizeDistribution,
    hardware: Hardware,
    *,
    is_embedded: bool = False,
) -> SearchSpace:
    """Return the search space for requests of ``batch`` samples.

    Choices missing from ``section`` are derived from the model's configuration and the hardware. ``is_embedded`` is
    whether the embedded server serves, with tune's own backends. Raises ValueError if no configuration is valid.
    """
    space = _tuned_space(section, source, batch, hardware, is_embedded=is_embedded)
    derived = {p: choices for p, choices in _other_models(source, hardware).items() if p not in space.fields}
    limited = limit_choices(derived, MAX_DERIVED_CONFIGURATIONS // len(space)) if derived else {}
    return replace(space, fields={**space.fields, **limited})


def _tuned_space(
    section: SpaceSection, source: ModelSource, batch: SizeDistribution, hardware: Hardware, *, is_embedded: bool
) -> SearchSpace:
    """Return the search space without the derived choices of models other than the tuned one."""
    fields = _fields(section, source, hardware, is_embedded=is_embedded)
    least = batch.largest  # a smaller max_batch_size would refuse requests
    largest = source.tuned_config.max_batch_size
    if source.is_stateful:
        sizes = (0,) if largest == 0 else section.max_batch_size or _powers_of_two(1, largest)
        fields |= sequence_fields(section, source.config, sizes)
        return SearchSpace(sizes, instance_count=section.instance_group_count or _counts(hardware), fields=fields)
    counts = section.instance_group_count or _counts(hardware)
    if section.instance_group_count is None and has_llm_engine(source.tuned_config):
        present_count = model_config.candidate_of(source.tuned_config).instance_count
        counts = (present_count,)  # each engine fills the GPU's memory
    if largest == 0:
        return SearchSpace((0,), instance_count=counts, fields=fields)
    sizes = section.max_batch_size or _powers_of_two(least, max(largest, least))
    delays = section.max_queue_delay_microseconds or DEFAULT_DELAYS_US
    if all(delay == OFF for delay in delays) and (path := next(filter(is_queue_field, fields), None)):
        raise ParameterError(
            path, "has no effect without dynamic batching; add a delay from 0 to max_queue_delay_microseconds"
        )
    return SearchSpace(
        max_batch_size=tuple(size for size in sizes if size >= least) or (least,),
        max_queue_delay_us=delays,
        preferred_batch_sizes=section.preferred_batch_size or DEFAULT_PREFERRED_SIZES,
        instance_count=counts,
        fields=fields,
        request_batch_size=batch.fixed or 1,
        is_streaming=source.is_streaming,
    )


def _fields(
    section: SpaceSection, source: ModelSource, hardware: Hardware, *, is_embedded: bool
) -> dict[str, tuple[FieldValue, ...]]:
    """Return the choices of all settings but the batcher and the instances of the tuned model.

    Those of other models are in it only if ``section`` has them. Raises ParameterError if ``section`` does not fit
    the model.
    """
    config, backend = source.tuned_config, backend_of(source.tuned_config)
    fields = dict(section.fields())
    _check_backend(section, backend)
    if section == SpaceSection() and not hardware.gpus and backend == ONNXRUNTIME:
        fields |= _execution_fields(source, hardware, is_embedded=is_embedded)
    check_sequence_fields(section, config, fields)
    check_queue_fields(config, fields)
    if config.max_batch_size == 0 and any(section.max_batch_size or ()):
        name = one_line(source.tuned_model)
        raise ParameterError("max_batch_size", f"{name} has no batch dimension; write [0] or leave it out")
    if config.max_batch_size and 0 in (section.max_batch_size or ()):
        raise ParameterError("max_batch_size", without_batch_dimension(source.tuned_model))
    if source.variants:
        fields[VARIANT] = tuple(source.variants)
    return fields


def _execution_fields(
    source: ModelSource, hardware: Hardware, *, is_embedded: bool
) -> dict[str, tuple[FieldValue, ...]]:
    """Return the choices of ONNX Runtime's settings on a CPU that the machine suggests.

    Other settings gained nothing in benchmarks/execution.md, and each costs deployments.
    """
    has_openvino = ort_settings.has_openvino(source.tuned_config)
    if has_openvino and not is_embedded:  # Triton's own backend does not pass it the number of threads
        return {}
    # by default each instance uses every core, which is too many threads for several instances
    threads = _powers_of_two(1, min(hardware.cpu_count, MAX_THREADS))
    fields: dict[str, tuple[FieldValue, ...]] = {ort_settings.INTRA_OP_THREADS: tuple(map(str, threads))}
    if is_embedded and len(threads) > 1 and not has_openvino:
        fields[ort_settings.SPINNING] = ("1", "0")  # idle threads of an instance would take the cores of another one
    return fields


def space_keys(space: SearchSpace) -> dict[str, Any]:
    """Return the ``space`` section of a profile that gives ``space``, which ``build_space`` has derived."""
    keys: dict[str, Any] = {"max_batch_size": [*space.max_batch_size]}
    if space.max_batch_size != (0,) and not space.is_stateful:
        keys["max_queue_delay_microseconds"] = [*space.max_queue_delay_us]
        keys["preferred_batch_size"] = [*space.preferred_batch_sizes]
    keys["instance_group_count"] = [*space.instance_count]
    for path, values in space.fields.items():
        if path == VARIANT:  # it follows from the variants of the model section
            continue
        *sections, key = _keys_of_field(path)
        section = keys
        for name in sections:
            section = section.setdefault(name, {})
        section[key] = [*values]
        if sections == ["onnxruntime"]:
            section[key] = [bool(int(value)) if path == ort_settings.SPINNING else int(value) for value in values]
    return keys


def _keys_of_field(path: str) -> tuple[str, ...]:
    """Return the keys below ``space`` that lead to the choices of a field."""
    if model := model_of_field(path):
        return "models", model, path.removeprefix(f"{model}/")
    if is_sequence_field(path) and path.endswith(".max_queue_delay_microseconds"):
        return ("max_queue_delay_microseconds",)
    return keys_of_parameter(path) or ("config", path)


def _check_backend(section: SpaceSection, backend: str) -> None:
    """Raise ParameterError if the section sets threads of ONNX Runtime for a model of another backend.

    Its other settings are checked with ``check_ort_settings``, because other backends read some of them.
    """
    for path in section.onnxruntime.fields() if backend not in ("", ONNXRUNTIME) else ():
        if path.startswith("parameters."):
            raise ParameterError(path, f"only ONNX models have it, and the backend is {backend}; leave it out")


def without_batch_dimension(model: str) -> str:
    """Return the fault of max_batch_size 0 for a model with a batch dimension."""
    return f"0 is for a model without a batch dimension, and {one_line(model)} has one; write sizes from 1"


def _other_models(source: ModelSource, hardware: Hardware) -> dict[str, tuple[FieldValue, ...]]:
    """Return default choices for the models other than the tuned one, by preference: the present value first."""
    counts: dict[str, tuple[FieldValue, ...]] = {}
    delays: dict[str, tuple[FieldValue, ...]] = {}
    for name, config in {**source.composing, source.name: source.config}.items():
        if name == source.tuned_model or is_ensemble(config):
            continue
        configured = model_config.candidate_of(config, keep_counts=True)
        if (count := configured.instance_count) and not has_llm_engine(config):
            other_counts = sorted(_counts(hardware), key=lambda other: other != 2 * count)
            counts[f"{name}/{INSTANCE_COUNT}"] = tuple(dict.fromkeys((count, *other_counts)))
        if configured.max_batch_size > 1:
            delay = configured.max_queue_delay_us if configured.dynamic_batching else OFF
            delays[f"{name}/{MAX_QUEUE_DELAY}"] = tuple(dict.fromkeys((delay, OFF, 0)))
    return counts | delays


def limit_choices(choices: Mapping[str, Sequence[FieldValue]], limit: int) -> dict[str, tuple[FieldValue, ...]]:
    """Return choices with at most ``limit`` combinations, ascending after ``OFF``.

    The last choices of the settings with most choices are left out. A setting with only its first choice is not
    varied.
    """
    limited = {path: tuple(values) for path, values in choices.items()}
    while math.prod(map(len, limited.values())) > max(1, limit):
        path = max(reversed(limited), key=lambda path: len(limited[path]))  # of several, the last
        limited[path] = limited[path][:-1]
    return {
        path: tuple(sorted(values, key=lambda value: -1.0 if value == OFF else float(value)))
        for path, values in limited.items()
        if len(values) > 1
    }


def _powers_of_two(minimum: int, maximum: int) -> tuple[int, ...]:
    """Return ``minimum`` doubled up to ``maximum``, and ``maximum`` itself."""
    sizes = [minimum]
    while sizes[-1] * 2 <= maximum:
        sizes.append(sizes[-1] * 2)
    return tuple(dict.fromkeys([*sizes, maximum]))


def _counts(hardware: Hardware) -> tuple[int, ...]:
    return (1, 2, 3, 4) if hardware.gpus else tuple(range(1, min(4, max(2, hardware.cpu_count)) + 1))


def strategy_of(config: ModelConfig) -> Literal["direct", "oldest"]:
    """Return the strategy of the sequence batcher; Triton's default is ``direct``."""
    return "oldest" if config.sequence_batching.HasField("oldest") else "direct"


def delay_path(config: ModelConfig) -> str:
    """Return the path of the delay of the model's strategy."""
    return f"sequence_batching.{strategy_of(config)}.max_queue_delay_microseconds"


def check_sequence_fields(
    section: SpaceSection, config: ModelConfig, fields: Mapping[str, Sequence[FieldValue]]
) -> None:
    """Raise ParameterError if the choices do not fit the batcher of the model of ``config``."""
    name = one_line(config.name)
    if not config.HasField("sequence_batching"):
        if path := next(filter(is_sequence_field, fields), None):
            raise ParameterError(path, f"{name} is not stateful: its config.pbtxt has no sequence_batching")
        return
    strategy = strategy_of(config)
    for path in fields:
        if is_batcher_field(path):
            raise ParameterError(
                path, f"{name} is stateful, and Triton allows no dynamic_batching with it; leave it out"
            )
        if is_sequence_field(path) and path.split(".")[1] in {"direct", "oldest"} - {strategy}:
            raise ParameterError(path, f"the strategy of {name} is {strategy}; choose settings of {strategy}")
    if OFF in (section.max_queue_delay_microseconds or ()):
        raise ParameterError(
            "max_queue_delay_us", f'{name} is stateful, so its batcher cannot be "off"; write microseconds from 0'
        )
    if strategy == "direct" and section.preferred_batch_size:
        raise ParameterError(
            "preferred_batch_sizes", f"the strategy of {name} is direct, which has no preferred sizes; leave them out"
        )
    if not all(str(value).isdecimal() and int(value) >= 1 for value in fields.get(CANDIDATE_SEQUENCES, ())):
        raise ParameterError(CANDIDATE_SEQUENCES, "write whole numbers from 1: an instance needs a sequence to batch")
    if SEQUENCE_PREFERRED in fields:
        raise ParameterError(SEQUENCE_PREFERRED, "write the sizes under the key preferred_batch_size of the space")


def sequence_fields(
    section: SpaceSection, config: ModelConfig, sizes: Sequence[int]
) -> dict[str, tuple[FieldValue, ...]]:
    """Return the choices of the sequence batcher that are not in ``section.fields()``.

    ``max_queue_delay_microseconds`` and ``preferred_batch_size`` of ``section`` are those of the sequence batcher.
    Other missing choices are derived from the model; there is at least one. ``sizes`` are the largest batches.
    """
    profile_fields = section.fields()
    batches = max(sizes) > 1
    oldest, direct = config.sequence_batching.oldest, config.sequence_batching.direct
    is_oldest = strategy_of(config) == "oldest"
    present_delay = int((oldest if is_oldest else direct).max_queue_delay_microseconds)
    delays: tuple[FieldValue, ...] = (
        tuple(sorted({present_delay, *SEQUENCE_DELAYS_US})) if batches else (present_delay,)
    )
    fields = {delay_path(config): section.max_queue_delay_microseconds or delays}
    if is_oldest:
        present_sequences = int(oldest.max_candidate_sequences)
        fields[CANDIDATE_SEQUENCES] = tuple(sorted({present_sequences, *CANDIDATE_SEQUENCE_COUNTS}))
        present_sizes = format_preferred_sizes(oldest.preferred_batch_size, config.max_batch_size)
        derived_sizes = dict.fromkeys(("none", "max/2", present_sizes) if batches else ("none",))
        fields[SEQUENCE_PREFERRED] = section.preferred_batch_size or tuple(derived_sizes)
    else:
        present_share = float(direct.minimum_slot_utilization)
        fields[SLOT_UTILIZATION] = (
            tuple(sorted({*SLOT_UTILIZATIONS, present_share} - {0.0})) if batches else (present_share,)
        )
    return {path: choices for path, choices in fields.items() if path not in profile_fields}
