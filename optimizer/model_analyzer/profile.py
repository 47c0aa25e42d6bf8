"""What a file of Model Analyzer asks for, as a profile of tune: to be run, and as text to keep."""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import yaml

from optimizer import model_config
from optimizer.command_line import command_line
from optimizer.deployment import COUNT, DELAY
from optimizer.deployment import SIZE as BATCH
from optimizer.model_analyzer.reader import Mapped
from optimizer.model_analyzer.sweeps import KIND, KIND_GPU, OWN, AsGiven, Choices, Value
from optimizer.options import RunOptions
from optimizer.profile.reader import Profile, located_profile
from optimizer.profile.yaml_lines import Located
from optimizer.sources.repository import read_repository_model
from optimizer.trial import Candidate, FieldValue
from optimizer.untrusted import one_line

ROOT: Final = Path("/")  # the file is the user's own: what it names may lie anywhere
_GPUS: Final = "instance_group.0.gpus."


def profile_of(mapped: Mapped, repository: Path, *, gpu: bool) -> Profile:
    """The model in ``repository``, and its study; faults are told by the lines of Model Analyzer's file.

    ``gpu``: the model is served on one. Raises BadInputError.
    """
    return located_profile(_tree(mapped, repository, ROOT, gpu=gpu), mapped.file, ROOT)


def profile_text(mapped: Mapped, options: RunOptions, *, gpu: bool) -> str:
    """The same as YAML for a file; the comments have what a profile does not. Raises BadInputError.

    ``options``: the file's flags with those of the command line.
    """
    repository = Path(options.model_repository or ".").resolve()
    profile_of(mapped, repository, gpu=gpu)  # refused here rather than when the text is read
    data = mapped.sections.get(("request", "input_data"))
    paths = [repository.parent, *([Path(str(data.value)).resolve()] if data and _is_path(data) else [])]
    folder = Path(os.path.commonpath(paths))
    name = f"{mapped.model}.yaml"
    command = command_line(replace(options, model=name, model_repository=None, from_model_analyzer=None))
    left_out = [note for note in mapped.notes if not note.is_mapped]
    comments = [
        f"{mapped.file.name} of Model Analyzer, as a profile of tune. Keep it in {folder}, where its paths begin:",
        f"  {command}",
        *(["What is not in it:"] if left_out else []),
        *(f"  line {note.line}, {'.'.join(note.keys)}: {note.key}" for note in left_out),
    ]
    tree = _lists(_tree(mapped, repository, folder, gpu=gpu).plain())
    body = yaml.safe_dump(tree, sort_keys=False, default_flow_style=None, width=110, allow_unicode=True)
    return "".join(f"# {one_line(comment)}\n" for comment in comments) + body


def _is_path(where: Located) -> bool:
    return where.value not in ("random", "zero")


def _tree(mapped: Mapped, repository: Path, folder: Path, *, gpu: bool) -> Located:
    """A profile in ``folder``. Each value stands on the line, and under the keys, that it comes from."""
    line = mapped.repository.line if mapped.repository else 1
    model = {
        "repository": Located(_relative(repository, folder), line, ("model_repository",)),
        "name": mapped.name,
    }
    sections: dict[str, dict[str, Located]] = {"model": model}
    for (section, key), where in mapped.sections.items():
        is_data = key == "input_data" and _is_path(where)
        value = _relative(Path(str(where.value)), folder) if is_data else where.value
        sections.setdefault(section, {})[key] = replace(where, value=value)
    space, on_gpu = _space(mapped, repository, gpu=gpu)
    if space:
        sections["space"] = space
    if on_gpu:
        sections["gpu"] = {"space": _mapping({"config": on_gpu}, ("model_config_parameters",))}
    return _mapping({name: _mapping(keys, (name,)) for name, keys in sections.items()}, ())


def _space(mapped: Mapped, repository: Path, *, gpu: bool) -> tuple[dict[str, Located], Located | None]:
    """The space, and its ``config`` where a GPU serves, if that is another."""
    given = Candidate(1)
    if any(isinstance(value, AsGiven) for choices in mapped.choices.values() for value in choices.values):
        given = model_config.candidate_of(read_repository_model(repository, mapped.model, gpu=gpu).config)
    space: dict[str, Located] = {}
    config: dict[str, Located] = {}
    for name, choices in mapped.choices.items():
        values = dict.fromkeys(_resolved(name, value, given) for value in choices.values)
        (space if name in OWN else config)[name] = _listed(values, choices)
    anywhere = {path: where for path, where in config.items() if path != KIND and not path.startswith(_GPUS)}
    kinds = mapped.choices.get(KIND)
    if kinds and (others := [str(kind) for kind in kinds.values if kind != KIND_GPU]):
        anywhere[KIND] = _listed(others, kinds)
    if anywhere:
        space["config"] = _mapping(anywhere, ("model_config_parameters",))
    on_gpu = None if _plain(anywhere) == _plain(config) else _mapping(config, ("model_config_parameters",))
    return space, on_gpu


def _resolved(name: str, value: Value, given: Candidate) -> FieldValue:
    if not isinstance(value, AsGiven):
        return value
    if name == BATCH:
        return given.max_batch_size
    if name == COUNT:
        return given.instance_count
    if name == DELAY:
        return given.max_queue_delay_us if given.dynamic_batching or value.batching else "off"
    return ",".join(map(str, given.preferred_batch_sizes)) or "none"


def _listed(values: Iterable[FieldValue], choices: Choices) -> Located:
    return replace(choices.where, value=tuple(replace(choices.where, value=value) for value in values))


def _mapping(children: dict[str, Located], keys: tuple[str, ...]) -> Located:
    return Located(children, min(child.line for child in children.values()), keys)


def _plain(children: dict[str, Located]) -> dict[str, Any]:
    return {key: child.plain() for key, child in children.items()}


def _relative(path: Path, folder: Path) -> str:
    return os.path.relpath(path.resolve(), folder)


def _lists(value: Any) -> Any:
    """Tuples as lists, which is what YAML has."""
    if isinstance(value, dict):
        return {key: _lists(child) for key, child in value.items()}
    return [_lists(child) for child in value] if isinstance(value, tuple) else value
