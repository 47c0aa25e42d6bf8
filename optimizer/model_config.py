"""Candidate <-> ModelConfig: read config.pbtxt, set what is tuned, tell whether it is being served."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from google.protobuf import json_format, text_format
from google.protobuf.descriptor import Descriptor, FieldDescriptor
from tritonclient.grpc.model_config_pb2 import ModelConfig

from optimizer import placement, proto_path
from optimizer.batching import of_batcher, tidy
from optimizer.errors import BadInputError
from optimizer.trial import INSTANCE_GPUS, Candidate, FieldValue, of_server
from optimizer.untrusted import one_line, read_bytes

MAX_BYTES = 1 << 20
MOST_BACKSLASHES = 100  # in a row: protobuf's reader takes their square
NO_ACCELERATOR = "none"
_ACCELERATOR = re.compile(r"optimization\.execution_accelerators\.[cg]pu_execution_accelerator\.0\.name")
_LONGEST_CAUSE = 200
_64_BITS = (FieldDescriptor.CPPTYPE_INT64, FieldDescriptor.CPPTYPE_UINT64)
# backends for which Triton starts two instances on a CPU where no count is given (model_config_utils.cc)
_TWO_ON_CPU = {
    "onnxruntime",
    "onnxruntime_onnx",
    "tensorflow",
    "tensorflow_graphdef",
    "tensorflow_savedmodel",
}


def read(path: Path) -> ModelConfig:
    """config.pbtxt, as written. Raises BadInputError naming the file, and the line that cannot be parsed."""
    data, name = read_bytes(path, MAX_BYTES, "is this a config.pbtxt?"), one_line(str(path))
    try:
        text = data.decode()
        if "\\" * MOST_BACKSLASHES in text:
            raise BadInputError(f"{name}: has {MOST_BACKSLASHES} backslashes in a row; is this a config.pbtxt?")
        return text_format.Parse(text, ModelConfig())
    except UnicodeDecodeError as error:
        raise BadInputError(f"{name}: no text at byte {error.start}; is this a config.pbtxt?") from None
    except text_format.ParseError as error:
        line = error.GetLine()
        where = f"{name}:{line}" if line is not None else name
        cause = one_line(" ".join(str(error).split(" : ", 1)[-1].split()), _LONGEST_CAUSE)
        raise BadInputError(f"{where}: not a model configuration of Triton: {cause}") from None
    except (ValueError, OverflowError) as error:  # protobuf does not catch all of its own, as a number of no enum
        cause = one_line(str(error), _LONGEST_CAUSE)
        raise BadInputError(f"{name}: not a model configuration of Triton: {cause}") from None


def explicit(config: ModelConfig, *, gpu: bool) -> ModelConfig:
    """A copy in which the instance count that Triton chooses where none is given is written down.

    That is 1, but 2 for ONNX Runtime and TensorFlow on a CPU. ``gpu``: Triton will see a GPU. The kind stays
    automatic. Ensembles have no instances and are returned as they are.
    """
    result = _copy(config)
    if config.HasField("ensemble_scheduling"):
        return result
    if not result.instance_group:
        result.instance_group.add()
    for group in result.instance_group:
        if group.count < 1:
            on_cpu = group.kind == group.KIND_CPU or (group.kind == group.KIND_AUTO and not gpu)
            two = on_cpu and (config.backend in _TWO_ON_CPU or config.platform in _TWO_ON_CPU)
            group.count = 2 if two else 1
    return result


def candidate_of(config: ModelConfig, field_paths: Iterable[str] = ()) -> Candidate:
    """What the configuration says now, sizes ascending; of ``field_paths`` those that are present in it.

    ``instance_count`` is the count of each instance group (1 where none is given, see ``explicit``). Raises
    BadInputError where the groups have different counts, ValueError for an unknown path.
    """
    counts = _counts(config)
    if len(set(counts)) > 1:
        raise BadInputError(
            f"{config.name or 'config.pbtxt'}: the instance groups have different counts "
            f"({', '.join(map(str, counts))}); give them one count, which is what is tuned"
        )
    return _candidate(config, counts[0], field_paths)


def apply(candidate: Candidate, base: ModelConfig) -> ModelConfig:
    """A new configuration: ``base`` with exactly the settings of ``candidate``; everything else as it was.

    The count goes to every instance group and keeps kind, gpus and the rest; without a group one is added.
    Without dynamic batching the whole message goes, its queue policies too; else they stay.
    ``apply(candidate_of(base), base) == base``. Raises BadInputError where the model's scheduler excludes the
    setting, ValueError for a field that does not exist or a value that does not fit it.
    """
    config = _copy(base)
    config.max_batch_size = candidate.max_batch_size
    scheduler = base.WhichOneof("scheduling_choice")
    if candidate.dynamic_batching:
        if scheduler not in (None, "dynamic_batching"):
            raise BadInputError(f'{base.name}: has {scheduler}, which excludes dynamic batching; tune it "off"')
        batching = config.dynamic_batching
        batching.SetInParent()
        batching.max_queue_delay_microseconds = candidate.max_queue_delay_us
        if tuple(sorted(set(batching.preferred_batch_size))) != candidate.preferred_batch_sizes:
            batching.preferred_batch_size[:] = candidate.preferred_batch_sizes
    else:
        config.ClearField("dynamic_batching")
    for path, value in candidate.proto_fields:
        if _ACCELERATOR.fullmatch(path) and value == NO_ACCELERATOR:
            config.optimization.execution_accelerators.ClearField(path.split(".")[2])
        elif candidate.dynamic_batching or not of_batcher(path):
            proto_path.put(config, path, value)
    if set(_counts(config)) != {candidate.instance_count}:
        if scheduler == "ensemble_scheduling":
            raise BadInputError(f"{base.name}: an ensemble has no instances; tune the models it is made of")
        if not config.instance_group:
            config.instance_group.add()
        for group in config.instance_group:
            if not group.passive:
                group.count = candidate.instance_count
    if candidate.instance_gpus is not None:
        placement.put(config, candidate.instance_count, placement.parse(candidate.instance_gpus))
    return config


def has_fixed_shapes(config: ModelConfig) -> bool:
    """Whether every request of a batch must be of one shape because there is but one; where not, Triton compares the
    shapes of each request that comes."""
    return not any(
        (-1 in tensor.dims and not tensor.allow_ragged_batch) or tensor.is_shape_tensor for tensor in config.input
    )


def to_text(config: ModelConfig) -> str:
    """config.pbtxt. In its texts whatever is not printable is escaped, marks that turn the direction too."""
    text = str(text_format.MessageToString(config, as_utf8=True))
    return re.sub(r"[^\x20-\x7e\n]", lambda found: _escaped(found[0]), text)


def to_override_json(config: ModelConfig) -> str:
    """The ``config`` of Triton's load request, which replaces config.pbtxt: proto names, plain integers."""
    plain = json_format.MessageToDict(config, preserving_proto_field_name=True)
    return json.dumps(_integers(plain, config.DESCRIPTOR))


def differences(wanted: Candidate, serving: ModelConfig, field_paths: Iterable[str] | None = None) -> list[str]:
    """In words, each setting of ``wanted`` that ``serving`` (from GET config) has otherwise; empty if none.

    What Triton adds of its own (names, kinds, preferred size {max_batch_size}, defaults) is no difference.
    ``field_paths``: which of the candidate's other fields are compared; all by default.
    """
    counts = _counts(serving)
    want, have = tidy(wanted), tidy(_candidate(serving, counts[0]))
    pairs: list[tuple[str, object, object]] = [
        ("max_batch_size", want.max_batch_size, have.max_batch_size),
        ("dynamic_batching", _on(want.dynamic_batching), _on(have.dynamic_batching)),
    ]
    if want.dynamic_batching and have.dynamic_batching:
        sizes = _sizes(want.preferred_batch_sizes), _sizes(have.preferred_batch_sizes)
        pairs.append(("max_queue_delay_microseconds", want.max_queue_delay_us, have.max_queue_delay_us))
        pairs.append(("preferred_batch_size", *sizes))
    pairs.extend(("instance_count", want.instance_count, count) for count in dict.fromkeys(counts))
    fields = dict(want.proto_fields)
    compared = {*fields, INSTANCE_GPUS} if field_paths is None else set(field_paths)
    if want.instance_gpus is not None and INSTANCE_GPUS in compared:
        pairs.append((INSTANCE_GPUS, want.instance_gpus, _served(serving, INSTANCE_GPUS) or "none"))
    for path, value in fields.items():
        if path not in compared:
            continue
        normal = proto_path.normal(serving.DESCRIPTOR, path, value)
        if normal == "KIND_AUTO":  # Triton writes down the kind that it chose
            continue
        served = _served(serving, path)
        if served is not None or normal:  # an absent field is its default: empty, zero or false
            pairs.append((path, normal, "absent" if served is None else served))
    return [f"{name} is {has}, wanted {wants}" for name, wants, has in pairs if wants != has]


def for_trials(config: ModelConfig) -> ModelConfig:
    """A copy without the response cache, which would answer perf_analyzer's few different requests by itself."""
    result = _copy(config)
    result.ClearField("response_cache")
    return result


def warmed_up(config: ModelConfig, dims: Mapping[str, Sequence[int]]) -> ModelConfig:
    """A copy whose ``model_warmup`` runs the batch sizes that its batcher aims at, on zeros, which every model takes.

    ``dims`` are those of inputs whose own are open; 1 where they are not known. What it had under other names stays.
    """
    result = _copy(config)
    aimed = [size for size in config.dynamic_batching.preferred_batch_size if size <= config.max_batch_size]
    sizes = sorted({1, *aimed, config.max_batch_size} if config.max_batch_size else {0})
    names = {size: f"tritune: batch of {size}" for size in sizes}
    kept = [one for one in config.model_warmup if not one.name.startswith("tritune: ")]
    result.ClearField("model_warmup")
    result.model_warmup.extend(kept)
    for size in sizes:
        sample = result.model_warmup.add(name=names[size], batch_size=size)
        for tensor in config.input:
            entry = sample.inputs[tensor.name]
            entry.data_type, entry.zero_data = tensor.data_type, True
            entry.dims.extend(dims.get(tensor.name) or [max(1, dim) for dim in tensor.dims])
    return result


def _served(config: ModelConfig, path: str) -> FieldValue | None:
    """None where it is absent, unless that is a choice of its own."""
    if path == INSTANCE_GPUS:
        return placement.get(config)
    value = proto_path.get(config, path)
    return NO_ACCELERATOR if value is None and _ACCELERATOR.fullmatch(path) else value


def _escaped(character: str) -> str:
    return character if character.isprintable() else "".join(f"\\{byte:03o}" for byte in character.encode())


def _candidate(config: ModelConfig, count: int, field_paths: Iterable[str] = ()) -> Candidate:
    batching = config.dynamic_batching
    on = config.HasField("dynamic_batching")
    values: dict[str, FieldValue] = {}
    for path in field_paths:
        value = None if of_server(path) else _served(config, path)
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
    """The count of each group that runs requests; 0 in the text means that Triton's default applies."""
    return [group.count or 1 for group in config.instance_group if not group.passive] or [1]


def _copy(config: ModelConfig) -> ModelConfig:
    result = ModelConfig()
    result.CopyFrom(config)
    return result


def _integers(value: dict[str, Any], message: Descriptor) -> dict[str, Any]:
    """JSON of ``message`` with 64-bit integers as numbers: protobuf writes them as strings."""

    def plain(item: Any, field: FieldDescriptor) -> Any:
        if field.message_type is not None:
            return _integers(item, field.message_type)
        return int(item) if field.cpp_type in _64_BITS else item

    def whole(item: Any, field: FieldDescriptor) -> Any:
        if proto_path.is_map(field):
            return {key: plain(one, proto_path.entry(field, "value")) for key, one in item.items()}
        return [plain(one, field) for one in item] if proto_path.is_repeated(field) else plain(item, field)

    return {name: whole(item, message.fields_by_name[name]) for name, item in value.items()}


def _on(on: bool) -> str:
    return "on" if on else "off"


def _sizes(sizes: tuple[int, ...]) -> str:
    return " ".join(map(str, sizes)) or "none"
