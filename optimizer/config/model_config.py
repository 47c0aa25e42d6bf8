"""Read and check config.pbtxt, convert between ModelConfig and Candidate, and compare a served configuration."""

from __future__ import annotations

import codecs
import json
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from google.protobuf import json_format, text_format
from google.protobuf.descriptor import Descriptor, FieldDescriptor

from optimizer.config import field_path, gpu_placement, ort_settings
from optimizer.config.backends import ONNXRUNTIME, backend_of
from optimizer.config.batching import (
    SEQUENCE_PREFERRED,
    format_preferred_sizes,
    is_batcher_field,
    normalize,
    parse_preferred_sizes,
    resolve_preferred_sizes,
)
from optimizer.config.model_config_proto import ModelConfig
from optimizer.core.candidate import INSTANCE_GPUS, Candidate, FieldValue, is_server_field
from optimizer.core.errors import BadInputError, ParameterError
from optimizer.core.safe_text import check_shell_word, format_value, is_shell_path, one_line, read_bytes, show_path

FILENAME = "default_model_filename"
ENVIRONMENT = "parameters.EXECUTION_ENV_PATH.string_value"  # Triton's Python backend sources its bin/activate
MAX_BYTES = 1 << 20
MAX_BACKSLASHES = 100  # consecutive ones, for which protobuf's parser takes quadratic time
MODEL_FOLDER = "$$TRITON_MODEL_DIRECTORY"  # prefix of the environment's path
_MAX_CAUSE_LENGTH = 200
_64_BITS = (FieldDescriptor.CPPTYPE_INT64, FieldDescriptor.CPPTYPE_UINT64)
# backends with two instances on a CPU by default (Triton's model_config_utils.cc)
_TWO_ON_CPU = (ONNXRUNTIME, "tensorflow")

NO_SCALARS = (
    "it is a scalar, which Triton passes only to a model with batches; give it the shape [1] in the model, or a "
    "batch dimension"
)


def read(path: Path) -> ModelConfig:
    """Return the content of a config.pbtxt. Raises BadInputError naming the file and the faulty line."""
    data, name = read_bytes(path, MAX_BYTES, "is this a config.pbtxt?"), show_path(path)
    if data.startswith(codecs.BOM_UTF8):
        raise BadInputError(f"{name}:1: begins with a byte order mark, which Triton does not read; save it without")
    try:
        text = data.decode()
        if "\\" * MAX_BACKSLASHES in text:
            raise BadInputError(f"{name}: has {MAX_BACKSLASHES} backslashes in a row; is this a config.pbtxt?")
        return text_format.Parse(text, ModelConfig())
    except UnicodeDecodeError as error:
        is_utf16 = data.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE))
        advice = "save it as UTF-8" if is_utf16 else "is this a config.pbtxt?"
        raise BadInputError(f"{name}: not UTF-8 text at byte {error.start}; {advice}") from None
    except text_format.ParseError as error:
        line = error.GetLine()
        where = f"{name}:{line}" if line is not None else name
        cause = one_line(" ".join(str(error).split(" : ", 1)[-1].split()), _MAX_CAUSE_LENGTH)
        raise BadInputError(f"{where}: not a model configuration of Triton: {cause}") from None
    except (ValueError, OverflowError) as error:  # such as an unknown enum number, which protobuf does not convert
        cause = one_line(str(error), _MAX_CAUSE_LENGTH)
        raise BadInputError(f"{name}: not a model configuration of Triton: {cause}") from None


def check_config(config: ModelConfig, path: Path, versions: Sequence[int]) -> None:
    """Raise BadInputError if Triton refuses ``config``, the content of ``path``, on every server.

    ``versions`` are the numbers of the model's version folders.
    """
    if problem := _batching_problem(config) or _tensor_problem(config) or _version_problem(config, versions):
        raise BadInputError(f"{show_path(path)}: {problem}")


def _batching_problem(config: ModelConfig) -> str:
    if config.max_batch_size < 0:
        return f"max_batch_size {config.max_batch_size} is below 0; write the largest batch, or 0 for no batches"
    sizes = config.dynamic_batching.preferred_batch_size
    if any(size < 1 for size in sizes):
        return f"preferred_batch_size {min(sizes)} is below 1, which Triton refuses; leave it out"
    largest = max(sizes, default=0)
    if largest > config.max_batch_size:
        return (
            f"preferred_batch_size {largest} is above max_batch_size {config.max_batch_size}, which Triton refuses; "
            "lower it or raise max_batch_size"
        )
    if problem := _sequence_problem(config):
        return problem
    counts = [group.count for group in config.instance_group]
    if any(count < 0 for count in counts):
        return f"instance_group: count {min(counts)} is below 0; write the number of instances"
    return ""


def _sequence_problem(config: ModelConfig) -> str:
    if not config.HasField("sequence_batching"):
        return ""
    if config.model_transaction_policy.decoupled:
        return (
            "sequence_batching and decoupled: tune measures models that keep state or that stream, not both in one; "
            "tune a copy with one of them"
        )
    oldest = config.sequence_batching.oldest
    largest = max(oldest.preferred_batch_size, default=0)
    if largest > config.max_batch_size:
        return (
            f"sequence_batching.oldest: preferred_batch_size {largest} is above max_batch_size "
            f"{config.max_batch_size}; lower it or raise max_batch_size"
        )
    if config.sequence_batching.HasField("oldest") and oldest.max_candidate_sequences < 1:
        return (
            "sequence_batching.oldest: max_candidate_sequences is missing; write how many sequences an instance may "
            "have in progress"
        )
    return ""


def _tensor_problem(config: ModelConfig) -> str:
    for kind, tensors in (("input", config.input), ("output", config.output)):
        name, times = Counter(tensor.name for tensor in tensors).most_common(1)[0] if tensors else ("", 0)
        if times > 1:
            return f"{kind} {format_value(name)} is there {times} times; keep one"
        for tensor in tensors:
            which = f"{kind} {format_value(tensor.name)}"
            if any(dim < 1 and dim != -1 for dim in tensor.dims):
                dims = format_value(tuple(tensor.dims))
                return f"{which}: dims {dims}: write sizes from 1, or -1 for a variable size"
            if tensor.HasField("reshape") and not tensor.reshape.shape and not config.max_batch_size:
                return f"{which}: {NO_SCALARS}"
    return ""


def _version_problem(config: ModelConfig, versions: Sequence[int]) -> str:
    specific = config.version_policy.specific.versions
    if not specific or not versions or set(specific) & set(versions):  # a copy for a remote server may have no files
        return ""
    available = ", ".join(map(str, sorted(versions)))
    return f"version_policy: there is no version {', '.join(map(str, specific[:8]))}; the model has {available}"


def check_shell_value(path: str, value: str) -> None:
    """Raise ValueError if the field at ``path`` is passed through a shell that would not take ``value`` literally.

    Triton's Python backend does that. In the embedded server all backends are based on it, so this is checked for
    every model.
    """
    if path == FILENAME:
        check_shell_word(value or "model")
    elif path == ENVIRONMENT and not is_shell_path(value.removeprefix(MODEL_FOLDER)):
        raise ValueError(
            f"{format_value(value)} has characters that the shell which starts the model would not take literally; "
            "rename it with letters, digits and / . _ -"
        )


def environment_of(config: ModelConfig) -> str:
    """Return the path of the Python environment that the model brings along; empty if it has none."""
    return str(field_path.get_value(config, ENVIRONMENT) or "")


def with_explicit_counts(config: ModelConfig, *, gpu: bool) -> ModelConfig:
    """Return a copy in which instance counts that Triton would choose are set explicitly.

    The default count is 1, but 2 for ONNX Runtime and TensorFlow on a CPU. An ensemble has no instances and stays as
    it is.

    Args:
        config: Configuration as in config.pbtxt.
        gpu: Whether the server will see a GPU.
    """
    result = copy(config)
    if config.HasField("ensemble_scheduling"):
        return result
    if not result.instance_group:
        result.instance_group.add()
    for group in result.instance_group:
        if group.count < 1:
            on_cpu = group.kind == group.KIND_CPU or (group.kind == group.KIND_AUTO and not gpu)
            group.count = 2 if on_cpu and backend_of(config) in _TWO_ON_CPU else 1
    return result


def candidate_of(config: ModelConfig, field_paths: Iterable[str] = (), *, keep_counts: bool = False) -> Candidate:
    """Return the candidate that a configuration describes.

    Its fields are those of ``field_paths`` that exist in ``config``. ``instance_count`` is the count of each instance
    group (1 if none is set, see ``with_explicit_counts``). With ``keep_counts`` it is 0 if the groups have different
    counts, so that ``apply`` does not change them.

    Raises:
        BadInputError: The instance groups have different counts.
        ValueError: A path does not exist in ModelConfig.
    """
    counts = _counts(config)
    if len(set(counts)) > 1:
        if keep_counts:
            return _candidate(config, 0, field_paths)
        raise BadInputError(
            f"{config.name or 'config.pbtxt'}: the instance groups have different counts "
            f"({', '.join(map(str, counts))}); give all of them the same count, because tune sets one count"
        )
    return _candidate(config, counts[0], field_paths)


def apply(candidate: Candidate, base: ModelConfig) -> ModelConfig:
    """Return a copy of ``base`` with exactly the settings of ``candidate``.

    The count is set for every instance group, unless it is 0; without a group, one is added. Without dynamic batching
    the whole message is removed, including its queue policies. Warm-up samples that are larger than
    ``max_batch_size``, with which Triton would not load the model, get this size. All other settings are kept:
    ``apply(candidate_of(base), base) == base``.

    Raises:
        BadInputError: The scheduler of the model does not allow the setting.
        ValueError: A field does not exist, or a value has the wrong type.
    """
    config = copy(base)
    config.max_batch_size = candidate.max_batch_size
    for sample in config.model_warmup:
        sample.batch_size = min(sample.batch_size, max(1, candidate.max_batch_size))
    _set_batching(config, candidate)
    _set_fields(config, candidate)
    _set_instances(config, candidate)
    return config


def _set_batching(config: ModelConfig, candidate: Candidate) -> None:
    if candidate.dynamic_batching:
        scheduler = config.WhichOneof("scheduling_choice")
        if scheduler not in (None, "dynamic_batching"):
            raise BadInputError(f'{config.name}: has {scheduler}, which excludes dynamic batching; tune it "off"')
        batching = config.dynamic_batching
        batching.SetInParent()
        batching.max_queue_delay_microseconds = candidate.max_queue_delay_us
        if tuple(sorted(set(batching.preferred_batch_size))) != candidate.preferred_batch_sizes:
            batching.preferred_batch_size[:] = candidate.preferred_batch_sizes
    else:
        config.ClearField("dynamic_batching")


def _set_fields(config: ModelConfig, candidate: Candidate) -> None:
    absent = ort_settings.absent_accelerators(dict(candidate.fields))
    for path, value in candidate.proto_fields:
        if path.startswith(absent):
            ort_settings.remove_accelerators(config, path.split(".")[2])
        elif path == SEQUENCE_PREFERRED:
            config.sequence_batching.oldest.preferred_batch_size[:] = _preferred_sizes(value, candidate)
        elif candidate.dynamic_batching or not is_batcher_field(path):
            field_path.set_value(config, path, value)


def _set_instances(config: ModelConfig, candidate: Candidate) -> None:
    if candidate.instance_count and set(_counts(config)) != {candidate.instance_count}:
        if config.WhichOneof("scheduling_choice") == "ensemble_scheduling":
            raise BadInputError(f"{config.name}: an ensemble has no instances; tune the models that it calls")
        if not config.instance_group:
            config.instance_group.add()
        for group in config.instance_group:
            if not group.passive:
                group.count = candidate.instance_count
    if candidate.instance_gpus is not None:
        gpu_placement.set_gpus(config, candidate.instance_count, gpu_placement.parse(candidate.instance_gpus))


def has_fixed_shapes(config: ModelConfig) -> bool:
    """Return whether all inputs have one fixed shape. If not, Triton compares the shapes of incoming requests."""
    return not any(
        (-1 in tensor.dims and not tensor.allow_ragged_batch) or tensor.is_shape_tensor for tensor in config.input
    )


def to_text(config: ModelConfig) -> str:
    """Return the text of config.pbtxt, with characters escaped that are not printable (bidirectional marks too)."""
    text = str(text_format.MessageToString(config, as_utf8=True))
    return re.sub(r"[^\x20-\x7e\n]", lambda match: _escaped(match[0]), text)


def to_override_json(config: ModelConfig) -> str:
    """Return the parameter ``config`` of Triton's load request, which replaces config.pbtxt, as JSON."""
    plain = json_format.MessageToDict(config, preserving_proto_field_name=True)
    return json.dumps(_with_numbers(plain, config.DESCRIPTOR))


def differences(candidate: Candidate, serving: ModelConfig) -> list[str]:
    """Return descriptions of the settings of ``candidate`` that ``serving`` lacks; an empty list if it has all.

    Settings that Triton adds (names, kinds, preferred size {max_batch_size}, defaults) do not count as differences.

    Args:
        candidate: Candidate that should be served.
        serving: Configuration that the server reports.
    """
    counts = _counts(serving)
    want, have = normalize(candidate), normalize(_candidate(serving, counts[0]))
    settings: list[tuple[str, object, object]] = [  # name, value of the candidate, value that the server has
        ("max_batch_size", want.max_batch_size, have.max_batch_size),
        ("dynamic_batching", _on_or_off(want), _on_or_off(have)),
    ]
    if want.dynamic_batching and have.dynamic_batching:
        settings.append(("max_queue_delay_microseconds", want.max_queue_delay_us, have.max_queue_delay_us))
        sizes = _sizes(want.preferred_batch_sizes), _sizes(have.preferred_batch_sizes)
        settings.append(("preferred_batch_size", *sizes))
    if want.instance_count:
        settings.extend(("instance_count", want.instance_count, count) for count in dict.fromkeys(counts))
    if want.instance_gpus is not None:
        settings.append((INSTANCE_GPUS, want.instance_gpus, _field_value(serving, INSTANCE_GPUS) or "none"))
    without_effect = ort_settings.without_effect(dict(want.proto_fields))
    for path, value in want.proto_fields:
        if path in without_effect:
            continue
        normal = _normal_value(candidate, path, value)
        if normal == "KIND_AUTO":  # Triton reports the kind that it chose
            continue
        served = _field_value(serving, path)
        if served is not None or normal:  # an absent field is its default: empty, zero or false
            settings.append((path, normal, "absent" if served is None else served))
    return [f"{name} is {has}, wanted {wants}" for name, wants, has in settings if wants != has]


def _normal_value(candidate: Candidate, path: str, value: FieldValue) -> FieldValue:
    """Return the ``value`` of a field of ``candidate`` as ``_field_value`` returns it."""
    if path == SEQUENCE_PREFERRED:
        return format_preferred_sizes(_preferred_sizes(value, candidate), candidate.max_batch_size)
    return field_path.normalize_value(ModelConfig.DESCRIPTOR, path, value)


def without_response_cache(config: ModelConfig) -> ModelConfig:
    """Return a copy without the response cache, which would answer repeated requests without the model."""
    result = copy(config)
    result.ClearField("response_cache")
    return result


def without_default_preferred_size(config: ModelConfig) -> ModelConfig:
    """Return a copy without the preferred size that Triton adds to dynamic batching if none is set."""
    result = copy(config)
    if list(config.dynamic_batching.preferred_batch_size) == [config.max_batch_size]:
        result.dynamic_batching.ClearField("preferred_batch_size")
    return result


def with_warmup(config: ModelConfig, dims: Mapping[str, Sequence[int]]) -> ModelConfig:
    """Return a copy whose ``model_warmup`` runs the preferred and the largest batch size on zeros.

    A model without a batch dimension runs one request, because Triton skips samples of size 0. ``dims`` are sizes for
    inputs with variable dimensions, by name; 1 for others. Other warm-up samples are kept.
    """
    result = copy(config)
    preferred = [size for size in config.dynamic_batching.preferred_batch_size if size <= config.max_batch_size]
    sizes = sorted({1, *preferred, max(1, config.max_batch_size)})
    other_samples = [sample for sample in config.model_warmup if not sample.name.startswith("tritune: ")]
    result.ClearField("model_warmup")
    result.model_warmup.extend(other_samples)
    for size in sizes:
        sample = result.model_warmup.add(name=f"tritune: batch of {size}", batch_size=size)
        for tensor in config.input:
            entry = sample.inputs[tensor.name]
            entry.data_type, entry.zero_data = tensor.data_type, True
            entry.dims.extend(dims.get(tensor.name) or [max(1, dim) for dim in tensor.dims])
    return result


def _field_value(config: ModelConfig, path: str) -> FieldValue | None:
    """Return the value at ``path``; None if it is absent. An absent accelerator is ``none``."""
    if path == INSTANCE_GPUS:
        return gpu_placement.get_gpus(config)
    if path == SEQUENCE_PREFERRED:
        return format_preferred_sizes(config.sequence_batching.oldest.preferred_batch_size, config.max_batch_size)
    value = field_path.get_value(config, path)
    return ort_settings.NO_ACCELERATOR if value is None and ort_settings.is_accelerator_name(path) else value


def _preferred_sizes(policy: FieldValue, candidate: Candidate) -> tuple[int, ...]:
    """Return the preferred sizes of the sequence batcher. Raises ParameterError if they are no whole numbers."""
    sizes = resolve_preferred_sizes(parse_preferred_sizes(policy), candidate.max_batch_size)
    if sizes is None:
        raise ParameterError(SEQUENCE_PREFERRED, f"{policy} does not fit max_batch_size {candidate.max_batch_size}")
    return sizes


def _escaped(character: str) -> str:
    return character if character.isprintable() else "".join(f"\\{byte:03o}" for byte in character.encode())


def _candidate(config: ModelConfig, count: int, field_paths: Iterable[str] = ()) -> Candidate:
    batching = config.dynamic_batching
    on = config.HasField("dynamic_batching")
    values: dict[str, FieldValue] = {}
    for path in field_paths:
        value = None if is_server_field(path) else _field_value(config, path)
        if value is not None:
            values[path] = value
    return Candidate(
        max_batch_size=config.max_batch_size,
        dynamic_batching=on,
        max_queue_delay_us=batching.max_queue_delay_microseconds if on else 0,
        preferred_batch_sizes=tuple(sorted(set(batching.preferred_batch_size))) if on else (),
        instance_count=count,
        fields=tuple(sorted(values.items())),
    )


def _counts(config: ModelConfig) -> list[int]:
    """Return the count of each instance group that is not passive; 0 in the file means Triton's default."""
    return [group.count or 1 for group in config.instance_group if not group.passive] or [1]


def copy(config: ModelConfig) -> ModelConfig:
    """Return a copy that can be changed."""
    result = ModelConfig()
    result.CopyFrom(config)
    return result


def _with_numbers(document: dict[str, Any], message: Descriptor) -> dict[str, Any]:
    """Return the JSON of ``message`` with 64-bit integers as numbers, which protobuf writes as strings."""
    result: dict[str, Any] = {}
    for name, value in document.items():
        field = message.fields_by_name[name]
        if field_path.is_map(field):
            entry = field_path.map_entry_field(field, "value")
            result[name] = {key: _with_number(item, entry) for key, item in value.items()}
        elif field_path.is_repeated(field):
            result[name] = [_with_number(item, field) for item in value]
        else:
            result[name] = _with_number(value, field)
    return result


def _with_number(value: Any, field: FieldDescriptor) -> Any:
    """Return the JSON of one value of ``field``, as ``_with_numbers`` does."""
    if field.message_type is not None:
        return _with_numbers(value, field.message_type)
    return int(value) if field.cpp_type in _64_BITS else value


def _on_or_off(candidate: Candidate) -> str:
    return "on" if candidate.dynamic_batching else "off"


def _sizes(sizes: tuple[int, ...]) -> str:
    return " ".join(map(str, sizes)) or "none"
