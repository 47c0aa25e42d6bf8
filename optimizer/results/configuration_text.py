"""Shows a configuration in one line, as lines of config.pbtxt, or as the lines that change."""

from __future__ import annotations

import json
import re
import textwrap
from collections.abc import Iterable, Iterator, Sequence

from optimizer.config import field_path, ort_settings
from optimizer.config.batching import (
    SEQUENCE_PREFERRED,
    is_batcher_field,
    is_sequence_field,
    parse_preferred_sizes,
    resolve_preferred_sizes,
)
from optimizer.config.model_config_proto import ModelConfig
from optimizer.core.candidate import (
    INSTANCE_GPUS,
    MODEL_JSON_PREFIX,
    SERVER_PROCESSES,
    VARIANT,
    Candidate,
    FieldValue,
    model_of_field,
    short_path,
)
from optimizer.core.safe_text import one_line, scalar_text
from optimizer.options import server_options
from optimizer.results.formatting import count

BATCHER_PREFIX = "dynamic_batching."  # the fields of the dynamic batcher begin with it
NO_BATCHING = "# no dynamic_batching"


def configuration(candidate: Candidate) -> str:
    """Return one line such as ``batch 128 · 2 instances · delay 500 µs``, where batch is max_batch_size.

    Fields of the batcher with their default are left out: there may be many, and most of them are rarely changed.
    """
    parts = [f"batch {candidate.max_batch_size:,}", count(candidate.instance_count, "instance")]
    if candidate.instance_gpus is not None:
        parts[-1] += f" on GPU {candidate.instance_gpus.replace(',', ', ')}"
    if candidate.dynamic_batching:
        parts.append(f"delay {candidate.max_queue_delay_us:,} µs")
    else:
        parts.append("sequence batching" if candidate.is_stateful else "no dynamic batching")
    if candidate.preferred_batch_sizes:
        parts.append(f"preferred {', '.join(map(str, candidate.preferred_batch_sizes))}")
    if (processes := candidate.server_processes) > 1:
        parts.append(f"{processes} server processes")
    fields = [(path, value) for path, value in candidate.fields if path not in (INSTANCE_GPUS, SERVER_PROCESSES)]
    parts += [
        f"{short_path(path)}={_literal(value)}" for path, value in fields if not _is_batcher_default(path, value)
    ]
    return " · ".join(parts)


def triton_lines(candidate: Candidate) -> list[str]:
    """Return the tuned settings as lines of a config.pbtxt; settings of the server as comments."""
    return [line for lines in _triton_fields(candidate).values() for line in lines]


def _triton_fields(candidate: Candidate) -> dict[str, list[str]]:
    """Return the lines of ``triton_lines`` by the field that they set, in their order."""
    fields = {"max_batch_size": [f"max_batch_size: {candidate.max_batch_size}"]}
    if candidate.dynamic_batching:
        fields["batching"] = _batching_lines(candidate)
    else:
        fields["batching"] = [_sequence_line(candidate) or NO_BATCHING]
    group = f"count: {candidate.instance_count}"
    if candidate.instance_gpus is not None:
        group += f" kind: KIND_GPU gpus: [ {candidate.instance_gpus.replace(',', ', ')} ]"
    fields["instance_group"] = [f"instance_group [ {{ {group} }} ]"]
    plain_fields = []
    for path, value in candidate.proto_fields:
        if is_sequence_field(path) or ort_settings.is_accelerator_field(path) or is_batcher_field(path):
            continue
        parts = path.split(".")
        if parts[0] == "parameters" and len(parts) > 2:
            text = json.dumps(str(value), ensure_ascii=False)
            fields[path] = [f'parameters {{ key: "{".".join(parts[1:-1])}" value {{ {parts[-1]}: {text} }} }}']
        else:
            plain_fields.append((path, value))
    fields |= _by_name(_proto_lines(plain_fields))
    if accelerators := ort_settings.accelerator_text(dict(candidate.proto_fields)):
        fields["accelerators"] = [accelerators]
    return fields | _comments(candidate)


def _comments(candidate: Candidate) -> dict[str, list[str]]:
    """Return comments on the settings outside config.pbtxt: of other models, of model.json and of the server."""
    fields = {}
    for path, value in candidate.fields:
        if path == VARIANT or model_of_field(path):
            fields[path] = [f"# {path.replace('/', ': ')} {_literal(value)}"]
    for key, value in candidate.model_json.items():
        fields[f"{MODEL_JSON_PREFIX}{key}"] = [f"# model.json: {json.dumps({key: value})[1:-1]}"]
    if options := server_options.to_arguments(candidate.fields):
        fields["server_options"] = [f"# server_options: {' '.join(options)}"]
    cpus, processes = candidate.server_cpus, candidate.server_processes
    if cpus and processes == 1:
        fields["server"] = [f"# server on CPUs {cpus} (taskset -c, docker run --cpuset-cpus)"]
    if processes > 1:
        shared = f"the load; CPUs {cpus} are divided among them" if cpus else "the load and the CPUs"
        fields["server"] = [f"# {processes} server processes share {shared}"]
    return fields


def _by_name(lines: Sequence[str]) -> dict[str, list[str]]:
    """Return lines of config.pbtxt by the name at their beginning, which is unique."""
    return {re.split(r"[:{]", line)[0].strip(): [line] for line in lines}


def _sequence_line(candidate: Candidate) -> str:
    """Return the tuned settings of the sequence batcher; an empty string if there are none."""
    strategies: dict[str, list[str]] = {}
    for path, value in candidate.proto_fields:
        if not is_sequence_field(path):
            continue
        strategy, _, name = path.removeprefix("sequence_batching.").rpartition(".")
        text = _literal(value)
        if path == SEQUENCE_PREFERRED:
            sizes = resolve_preferred_sizes(parse_preferred_sizes(value), candidate.max_batch_size)
            text = f"[ {', '.join(map(str, sizes))} ]" if sizes else ""
        if text:
            strategies.setdefault(strategy, []).append(f"{name}: {text}")
    parts = [
        f"{strategy} {{ {' '.join(settings)} }}" if strategy else " ".join(settings)
        for strategy, settings in strategies.items()
    ]
    return f"sequence_batching {{ {' '.join(parts)} }}" if parts else ""


def change_lines(before: Candidate, after: Candidate) -> list[str]:
    """Return the lines of config.pbtxt that change, a removed one as ``- max_batch_size: 256``.

    The lines of a field are together: those that are removed stand above those that replace them.
    """
    old, new = (_triton_fields(candidate) for candidate in (before, after))
    for fields in (old, new):
        if fields["batching"] == [NO_BATCHING]:
            del fields["batching"]
    return [f"{line[:2]}{one_line(line[2:])}" for line in _changes(old, new)]


def _changes(old: dict[str, list[str]], new: dict[str, list[str]]) -> Iterator[str]:
    """Yield the lines of the fields that differ, with ``- `` or ``+ `` before them."""
    for name in _merge_order(old, new):
        removed, added = old.get(name, []), new.get(name, [])
        if removed == added:
            continue
        if len(removed) > 1 and len(added) > 1:  # two blocks, whose first and last lines are the same
            yield from _changes(_by_name(removed[1:-1]), _by_name(added[1:-1]))
            continue
        yield from (f"- {line}" for line in removed)
        yield from (f"+ {line}" for line in added)


def _merge_order(old: Iterable[str], new: Iterable[str]) -> list[str]:
    """Return the names in the order of ``old``, with each other one of ``new`` behind its predecessor there."""
    merged, position = list(old), 0
    for name in new:
        if name in merged:
            position = merged.index(name) + 1
        else:
            merged.insert(position, name)
            position += 1
    return merged


def wrap_change(line: str, width: int) -> list[str]:
    """Return a line of ``change_lines`` as indented lines of at most ``width`` characters.

    A string is not broken, because Triton reads none that goes over two lines, and a word is not broken either.
    """
    space = "\0"  # stands for a blank in a string; the lines have no such character
    kept = re.sub(r'"(?:\\.|[^"\\])*"', lambda string: string[0].replace(" ", space), line)
    parts = textwrap.wrap(
        f"  {kept}",
        width,
        subsequent_indent=f"  {line[0]}     ",  # each part can be copied without its sign
        break_long_words=False,
        break_on_hyphens=False,
    )
    return [part.replace(space, " ") for part in parts]


def _proto_lines(fields: Sequence[tuple[str, FieldValue]]) -> list[str]:
    """Return fields of ModelConfig as lines of config.pbtxt, or as plain lines if a value does not fit."""
    try:
        return field_path.to_lines(fields, ModelConfig()) if fields else []
    except ValueError:
        return _plain_lines(fields)


def _batcher_lines(fields: Sequence[tuple[str, FieldValue]]) -> list[str]:
    """Return fields of the batcher as lines inside ``dynamic_batching``, or as plain lines if a value does not fit.

    A default value is the same as none there.
    """
    config = ModelConfig()
    effective = [
        (path.removeprefix(BATCHER_PREFIX), value) for path, value in fields if not _is_batcher_default(path, value)
    ]
    try:
        return field_path.to_lines(effective, config.dynamic_batching)
    except ValueError:
        return _plain_lines(fields)


def _plain_lines(fields: Sequence[tuple[str, FieldValue]]) -> list[str]:
    return [f"{path}: {_literal(value)}" for path, value in fields]


def _is_batcher_default(path: str, value: FieldValue) -> bool:
    """Return whether ``path`` is inside ``dynamic_batching`` and ``value`` is the same there as none."""
    if not is_batcher_field(path):
        return False
    try:
        batcher = ModelConfig().dynamic_batching.DESCRIPTOR
        return field_path.is_default(batcher, path.removeprefix(BATCHER_PREFIX), value)
    except ValueError:  # this version of Triton does not have the field
        return False


def _batching_lines(candidate: Candidate) -> list[str]:
    """Return the lines of ``dynamic_batching``: one line for a single setting, else one for each."""
    inside = []
    if candidate.max_queue_delay_us:
        inside.append(f"max_queue_delay_microseconds: {candidate.max_queue_delay_us}")
    if candidate.preferred_batch_sizes:
        inside.append(f"preferred_batch_size: [ {', '.join(map(str, candidate.preferred_batch_sizes))} ]")
    fields = [field for field in candidate.proto_fields if is_batcher_field(field[0])]
    inside += _batcher_lines(fields)
    if len(inside) < 2:
        return [f"dynamic_batching {{ {''.join(f'{setting} ' for setting in inside)}}}"]
    return ["dynamic_batching {", *(f"  {setting}" for setting in inside), "}"]


def _literal(value: object) -> str:
    return one_line(scalar_text(value))
