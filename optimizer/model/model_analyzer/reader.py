"""Read Triton Model Analyzer's profile YAML: for one of its models, tune's options, a profile, and notes."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final, NamedTuple

import yaml

from optimizer.config import model_config
from optimizer.config.model_source import ModelSource
from optimizer.config.search_space import (
    INSTANCE_COUNT,
    MAX_BATCH_SIZE,
    MAX_QUEUE_DELAY,
    PREFERRED_BATCH_SIZE,
    SPACE_KEYS,
)
from optimizer.core import yaml_lines
from optimizer.core.candidate import Candidate, FieldValue
from optimizer.core.errors import BadInputError
from optimizer.core.safe_text import one_line, read_bytes, show_path
from optimizer.core.yaml_lines import LocatedValue
from optimizer.model.model_analyzer.keys import FILE, MODEL, KeySupport, ignored
from optimizer.model.model_analyzer.sections import import_goals, import_other_models, import_requests
from optimizer.model.model_analyzer.settings import (
    PROFILE_CONCURRENTLY,
    ConfiguredValue,
    DimensionChoices,
    ImportedSettings,
    ImportNote,
    ModelSettings,
    SweepValue,
    ValueReader,
)
from optimizer.model.model_analyzer.sweeps import KIND, KIND_GPU, import_space
from optimizer.model.profile import Profile, parse_profile_tree
from optimizer.model.repository import read_source
from optimizer.options.command_line import command_line
from optimizer.options.run_options import GENERATED_DATA, RunOptions

MAX_LIST_CHARACTERS = 300  # limit for a list in an error
ROOT: Final = Path("/")  # the file is the user's own: the paths in it may lead anywhere
_GPUS: Final = "instance_group.0.gpus."
_BATCHING: Final = (MAX_BATCH_SIZE, MAX_QUEUE_DELAY, PREFERRED_BATCH_SIZE)
_EMPTY: Final = ignored("nothing is given")
_CONCURRENT: Final = KeySupport(
    "mapped", "`model.concurrent_models`: its load; its other settings are not taken over"
)


@dataclass(frozen=True)
class ModelAnalyzerImport:
    """One model of a file in tune's terms.

    ``name`` is the model's, with its place in the file; ``repository`` is None if the file has none.
    """

    file: Path
    name: LocatedValue
    repository: LocatedValue | None
    settings: ImportedSettings
    notes: tuple[ImportNote, ...]

    @property
    def model(self) -> str:
        """The name of the model."""
        return str(self.name.value)

    def options(self, repository: str | None) -> dict[str, str | int]:
        """Return tune's options that the file sets, by name; ``repository`` replaces the file's own.

        Raises BadInputError if there is no repository or it does not exist.
        """
        if repository is None:
            if self.repository is None:
                file = show_path(self.file)
                raise BadInputError(f"{file}: model_repository: missing; give --model-repository DIR")
            try:
                repository = str(ValueReader(self.file).path(self.repository))
            except BadInputError as error:
                raise BadInputError(f"{error}; give another with --model-repository DIR") from None
        return {**self.settings.options, "model-repository": repository}


def read_model_analyzer(file: Path, model: str | None) -> ModelAnalyzerImport:
    """Return the settings of ``model`` in the file; None means the only model.

    Raises BadInputError: ``file:line: key.path: …``.
    """
    data = read_bytes(file, yaml_lines.MAX_BYTES, "a configuration of Model Analyzer is a page of YAML")
    root = yaml_lines.parse(data, str(file), hint="a configuration of Model Analyzer has a line 'profile_models:'")
    reader = ValueReader(file)
    if isinstance(root.value, dict) and "model" in root.value and "profile_models" not in root.value:
        raise reader.fault(root, "this is the profile of a model; tune it with `tune FILE`")
    common = reader.mapping(root, list(FILE))
    for key, where in root.value.items() if isinstance(root.value, dict) else ():
        reader.note(where, FILE[key] if key in common else _EMPTY)
    concurrently = PROFILE_CONCURRENTLY in common and reader.boolean(common[PROFILE_CONCURRENTLY])
    choice = _choose(common.get("profile_models"), model, reader, concurrently=concurrently)
    model_settings = {} if choice.section is None else reader.section(choice.section, MODEL)
    settings = ModelSettings(reader, common, model_settings)
    result = ImportedSettings()
    import_goals(settings, result)
    import_other_models(settings, choice.other_models, result)
    import_requests(settings, result)
    import_space(settings, result)
    return ModelAnalyzerImport(file, choice.name, common.get("model_repository"), result, reader.notes())


def build_profile(imported: ModelAnalyzerImport, options: RunOptions, read: Callable[[str], ModelSource]) -> Profile:
    """Return a profile of the model; its errors name lines of Model Analyzer's file.

    ``options``: the file's options, overridden by the command line's. ``read`` reads a model of their repository.
    Raises BadInputError, and the errors of ``read``.
    """
    return parse_profile_tree(_profile_tree(imported, options, read, ROOT), imported.file, ROOT)


def render_imported_profile(
    imported: ModelAnalyzerImport, options: RunOptions, read: Callable[[str], ModelSource]
) -> str:
    """Return the profile as YAML; comments list the keys that a profile cannot express.

    The arguments and errors are those of ``build_profile``.
    """
    build_profile(imported, options, read)  # to report errors now instead of when the text is read
    repository = _repository(options).resolve()
    data = imported.settings.sections.get(("request", "input_data"))
    paths = [repository.parent, *([Path(str(data.value)).resolve()] if data and _is_path(data) else [])]
    folder = Path(os.path.commonpath(paths))
    name = f"{imported.model}.yaml"
    command = command_line(replace(options, model=name, model_repository=None, from_model_analyzer=None))
    omitted = [note for note in imported.notes if not note.is_mapped]
    comments = [
        f"{imported.file.name} of Model Analyzer, as a profile of tune. Keep it in {folder}, where its paths begin:",
        f"  {command}",
        *(["Not in this profile:"] if omitted else []),
        *(f"  line {note.line}, {'.'.join(note.keys)}: {note.key}" for note in omitted),
    ]
    tree = _profile_tree(imported, options, read, folder).plain()
    body = yaml.safe_dump(tree, sort_keys=False, default_flow_style=None, width=110, allow_unicode=True)
    return "".join(f"# {one_line(comment)}\n" for comment in comments) + body


class _ModelChoice(NamedTuple):
    """The model to tune: its name and the section with its settings, and the names of the other models."""

    name: LocatedValue
    section: LocatedValue | None
    other_models: list[LocatedValue]


def _choose(
    where: LocatedValue | None, model: str | None, reader: ValueReader, *, concurrently: bool
) -> _ModelChoice:
    """Return the model to tune: ``model``, or the only one. Raises BadInputError if there is none or several."""
    models: dict[str, tuple[LocatedValue, LocatedValue | None]] = {}
    for key, section in _models(where, reader):
        name = reader.name(key)
        if name in models:
            raise reader.fault(key, f"{name} is given twice")
        models[name] = key, section
    listed, file = one_line(", ".join(models), MAX_LIST_CHARACTERS), show_path(reader.file)
    if model is None and len(models) != 1 and not (concurrently and models):
        problem = f"has several models; add the one to tune: {listed}" if models else "names no model; add MODEL"
        raise BadInputError(f"{file}: {problem}")
    if model is not None and models and model not in models:
        raise BadInputError(f"{file}: no model {one_line(repr(model), MAX_LIST_CHARACTERS)} in it; it has {listed}")
    tuned = next(iter(models)) if model is None else model
    other_models = [key for name, (key, _) in models.items() if name != tuned]
    for key in other_models:
        support = _CONCURRENT if concurrently else ignored(f"{tuned} is tuned; MODEL chooses another")
        reader.note(replace(key, keys=("profile_models", str(key.value))), support)
    key, section = models.get(tuned, (LocatedValue(tuned, 1, ("profile_models",)), None))
    return _ModelChoice(key, section, other_models)


def _models(where: LocatedValue | None, reader: ValueReader) -> list[tuple[LocatedValue, LocatedValue | None]]:
    """Return the names in ``profile_models`` and the settings of each: from a mapping, names, or a list of both."""
    if where is None:
        return []
    if isinstance(where.value, dict):
        return [(replace(child, value=name), child) for name, child in where.value.items()]
    if isinstance(where.value, tuple):
        return [model for item in where.value for model in _models(item, reader)]
    return [(name, None) for name in reader.names(where)]


def _is_path(where: LocatedValue) -> bool:
    return where.value not in GENERATED_DATA


def _repository(options: RunOptions) -> Path:
    return Path(options.model_repository or ".")


def _model_names(imported: ModelAnalyzerImport, key: str) -> tuple[str, ...]:
    """Return the other models that the file names; ``key`` is that of the profile."""
    where = imported.settings.sections.get(("model", key))
    names = None if where is None else where.plain()
    return tuple(map(str, names)) if isinstance(names, tuple) else ()


def _profile_tree(
    imported: ModelAnalyzerImport, options: RunOptions, read: Callable[[str], ModelSource], folder: Path
) -> LocatedValue:
    """Return a profile with paths relative to ``folder``; each value has the line and keys that it comes from."""
    line = imported.repository.line if imported.repository else 1
    model = {
        "repository": LocatedValue(_relative(_repository(options), folder), line, ("model_repository",)),
        "name": imported.name,
    }
    sections: dict[str, dict[str, LocatedValue]] = {"model": model}
    for (section, key), where in imported.settings.sections.items():
        is_data = key == "input_data" and _is_path(where)
        value = _relative(Path(str(where.value)), folder) if is_data else where.value
        sections.setdefault(section, {})[key] = replace(where, value=value)
    space, gpu_space = _space_sections(imported, options, read)
    if space:
        sections["space"] = space
    if gpu_space:
        sections["gpu"] = {"space": _mapping(gpu_space, ("space",))}
    return _mapping({name: _mapping(keys, (name,)) for name, keys in sections.items()}, ())


def _space_sections(
    imported: ModelAnalyzerImport, options: RunOptions, read: Callable[[str], ModelSource]
) -> tuple[dict[str, LocatedValue], dict[str, LocatedValue]]:
    """Return the sections ``space`` and ``gpu.space``; the latter has the choices for a GPU."""
    choices, composing = imported.settings.choices, dict(imported.settings.composing)
    values = [value for dimension in choices.values() for value in dimension.values]
    if not (composing or MAX_BATCH_SIZE in choices or any(isinstance(value, ConfiguredValue) for value in values)):
        return _space_of_model(choices, Candidate(1))
    source = read_source(
        read,
        imported.model,
        composing=options.bls_composing_models or _model_names(imported, "bls_composing_models"),
        concurrent=options.concurrent_models or _model_names(imported, "concurrent_models"),
    )
    own_choices = {**choices, **composing.pop(source.tuned_model, {})}  # the space is about the tuned step
    space, gpu_space = _space_of_model(own_choices, model_config.candidate_of(source.tuned_config))
    models: dict[str, LocatedValue] = {}
    gpu_models: dict[str, LocatedValue] = {}
    for name, dimensions in composing.items():
        origin = next(iter(dimensions.values())).where.keys[0], name
        config = source.models.get(name)
        configured = Candidate(1) if config is None else model_config.candidate_of(config)
        if config is not None and configured.max_batch_size == 0:  # Model Analyzer batches only where it is legal
            dimensions = {key: choices for key, choices in dimensions.items() if key not in _BATCHING}
        keys, gpu_keys = _space_of_model(dimensions, configured)
        if keys:
            models[name] = _mapping(keys, origin)
        if gpu_keys:  # they replace all keys of the model
            gpu_models[name] = _mapping(keys | gpu_keys, origin)
    if models:
        space["models"] = _mapping(models, ("space", "models"))
    if gpu_models:
        gpu_space["models"] = _mapping(models | gpu_models, ("space", "models"))
    return space, gpu_space


def _space_of_model(
    dimensions: Mapping[str, DimensionChoices], configured: Candidate
) -> tuple[dict[str, LocatedValue], dict[str, LocatedValue]]:
    """Return the choices of a model that has the settings ``configured``, and those that a GPU changes."""
    space: dict[str, LocatedValue] = {}
    config: dict[str, LocatedValue] = {}
    for name, choices in dimensions.items():
        if name == MAX_BATCH_SIZE and configured.max_batch_size == 0:
            continue  # the limits may be for all models of the file, also for those without a batch dimension
        resolved = dict.fromkeys(_resolve(name, value, configured) for value in choices.values)
        (space if name in SPACE_KEYS else config)[name] = _list(resolved, choices)
    cpu_config = {path: where for path, where in config.items() if path != KIND and not path.startswith(_GPUS)}
    kinds = dimensions.get(KIND)
    if kinds and (other_kinds := [str(kind) for kind in kinds.values if kind != KIND_GPU]):
        cpu_config[KIND] = _list(other_kinds, kinds)
    if cpu_config:
        space["config"] = _mapping(cpu_config, ("model_config_parameters",))
    differs = _plain(cpu_config) != _plain(config)
    return space, {"config": _mapping(config, ("model_config_parameters",))} if differs else {}


def _resolve(name: str, value: SweepValue, configured: Candidate) -> FieldValue:
    if not isinstance(value, ConfiguredValue):
        return value
    if name == MAX_BATCH_SIZE:
        return configured.max_batch_size
    if name == INSTANCE_COUNT:
        return configured.instance_count
    if name == MAX_QUEUE_DELAY:
        return configured.max_queue_delay_us if configured.dynamic_batching or value.batching else "off"
    return ",".join(map(str, configured.preferred_batch_sizes)) or "none"


def _list(values: Iterable[FieldValue], choices: DimensionChoices) -> LocatedValue:
    return replace(choices.where, value=tuple(replace(choices.where, value=value) for value in values))


def _mapping(children: dict[str, LocatedValue], keys: tuple[str, ...]) -> LocatedValue:
    return LocatedValue(children, min(child.line for child in children.values()), keys)


def _plain(children: dict[str, LocatedValue]) -> dict[str, Any]:
    return {key: child.plain() for key, child in children.items()}


def _relative(path: Path, folder: Path) -> str:
    return os.path.relpath(path.resolve(), folder)
