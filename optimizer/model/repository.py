"""Read models from Triton repositories: their configuration, checked, and the models that belong together."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from optimizer.config import field_path, model_config, model_json
from optimizer.config.backends import ONNXRUNTIME, VLLM, backend_of, complete_vllm, is_ensemble
from optimizer.config.model_config_proto import TYPE_STRING, ModelConfig, ModelSequenceBatching
from optimizer.config.model_source import ModelSource
from optimizer.config.version_folders import version_files, version_folders
from optimizer.core.errors import BadInputError, EnvironmentFault
from optimizer.core.safe_text import (
    check_shell_word,
    format_value,
    is_file,
    is_folder,
    one_line,
    show_path,
)
from optimizer.model.onnx_file import (
    batch_obstacle,
    check_loadable,
    complete,
    derive,
    digest_files,
    external_files,
    index_ranges,
    read_onnx,
)
from optimizer.model.torch_file import check_pytorch_model
from optimizer.options.values import load_shares

if TYPE_CHECKING:
    from onnx import ModelProto

MODEL_FILES = {"onnxruntime": ("model.onnx",), "python": ("model.py",), "pytorch": ("model.pt", "model.pt2")}
PYTHON_BACKEND_VERSIONS = ("3.11", "3.12")  # Pythons with numpy 1, which the embedded Python backend needs
NATIVE_FILES = {"tensorrt": ("model.plan",), "tensorflow": ("model.savedmodel", "model.graphdef")}
_EXPORT = ", or export the model to ONNX"
ALTERNATIVES = {  # to a server that has the backend
    **dict.fromkeys(("tensorrt", "tensorflow", "openvino", "fil"), _EXPORT),
    "torch_aoti": ', or in a copy write backend: "pytorch" instead of the platform',
}
MAX_LIST = 300  # limit for the characters of a list in an error
MAX_ENSEMBLE_DEPTH = 8
MAX_HASHED_BYTES = 4 << 30  # limit for the files of a model from a repository; hashing them takes seconds


def read_repository_model(
    repository: Path, name: str, *, gpu: bool, largest_batch: int = 64, is_embedded: bool = True
) -> ModelSource:
    """Return the model ``repository/name`` with an explicit instance count where Triton would choose one.

    A model without config.pbtxt gets the one that Triton derives: from an ONNX file, its inputs and outputs too.

    ``gpu``: the server sees a GPU. ``largest_batch``: max_batch_size of an ONNX model whose graph takes batches, if
    it has no config.pbtxt, or one without max_batch_size, inputs and outputs. ``is_embedded``: the embedded server
    serves, which lacks some backends. Raises BadInputError if the model cannot be served, EnvironmentFault if this
    machine lacks something that serves it.
    """
    try:
        check_shell_word(name)
    except ValueError as error:
        raise BadInputError(f"model name: {error}") from None
    if not is_folder(repository):
        raise BadInputError(f"{show_path(repository)}: no such folder; give the one that contains the models")
    folder = repository / name
    if not is_folder(folder):
        if _is_model(repository):
            parent = show_path(repository.absolute().parent)
            problem = f"is the folder of a model; give the repository, which contains that folder: {parent}"
            raise BadInputError(f"{show_path(repository)}: {problem}")
        has = list_models(repository) or "none"
        raise BadInputError(f"{show_path(repository)}: no model {format_value(name)} there; it has {has}")
    versions = _versions(folder)
    path = folder / "config.pbtxt"
    if path.exists() or _backend_by_file(versions) not in ("", ONNXRUNTIME):
        config, model = _read_config(path, folder, versions, largest_batch, is_embedded=is_embedded)
    else:
        config, model = _derived_config(folder, versions, largest_batch)
    files = [file for version in _served_versions(config, versions) for file in version_files(version)]
    facts: dict[str, str | int | float] = {"model_bytes": _size(files)}
    return ModelSource(
        repository,
        name,
        model_config.with_explicit_counts(config, gpu=gpu),
        facts=facts,
        batch_obstacle=batch_obstacle(model) if model and not config.max_batch_size else None,
        index_ranges={name: index_ranges(model)} if model else {},
    )


def refuse_unmeasurable(config: ModelConfig, path: Path) -> None:
    """Raise BadInputError if tune cannot send requests to the model. ``path`` is the file of ``config``.

    A sequence has a number, which Triton cannot pass to a model that takes texts.
    """
    kind = ModelSequenceBatching.Control.CONTROL_SEQUENCE_CORRID
    for control_input in config.sequence_batching.control_input:
        if any(control.kind == kind and control.data_type == TYPE_STRING for control in control_input.control):
            raise BadInputError(
                f"{show_path(path)}: control input {format_value(control_input.name)} is TYPE_STRING, but tune and "
                "perf_analyzer number the sequences; make it TYPE_UINT64"
            )


def list_models(repository: Path) -> str:
    """Return the names of the models of a repository, separated by commas and of limited length; empty if none.

    Raises BadInputError if the folder cannot be read.
    """
    names = sorted(entry.name for entry in _entries(repository) if entry.is_dir() and _is_model(entry))
    return one_line(", ".join(names), MAX_LIST)


def _is_model(folder: Path) -> bool:
    return (folder / "config.pbtxt").exists() or bool(_backend_by_file(_versions(folder)))


def _versions(folder: Path) -> list[Path]:
    return version_folders(_entries(folder))


def _served_versions(config: ModelConfig, versions: list[Path]) -> list[Path]:
    """Return those of the ascending ``versions`` that Triton loads: by default the one with the largest number."""
    policy = config.version_policy
    if policy.HasField("all"):
        return versions
    if policy.HasField("specific"):
        return [version for version in versions if int(version.name) in policy.specific.versions]
    return versions[-max(1, policy.latest.num_versions) :]


def _read_config(
    path: Path, folder: Path, versions: list[Path], largest_batch: int, *, is_embedded: bool
) -> tuple[ModelConfig, ModelProto | None]:
    """Return the configuration in ``path``, and the ONNX model if its file can be read here.

    Without that file the configuration is one that Triton completes.
    """
    config = model_config.read(path) if path.exists() else ModelConfig()
    if config.name and config.name != folder.name:
        problem = f"its name {format_value(config.name)} is not that of its folder {folder.name!r}; make them equal"
        raise BadInputError(f"{show_path(path)}: {problem}")
    config.name = folder.name
    model_config.check_config(config, path, [int(version.name) for version in versions])
    if is_ensemble(config):
        return config, None
    _check_shell_words(config, path, is_embedded=is_embedded)
    if not config.backend and not config.platform:
        config.backend = _backend_by_file(versions)
    if is_embedded:
        return config, _prepare_for_embedded_server(config, path, versions, largest_batch)
    backend = backend_of(config)
    if backend == VLLM:
        complete_vllm(config)
    refuse_unmeasurable(config, path)
    if backend != ONNXRUNTIME:
        return config, None
    is_complete = config.input and config.output
    try:
        file = _newest(config, backend, path, versions)
        model = read_onnx(file)
    except BadInputError:
        if is_complete:  # perhaps only the server has the file
            return config, None
        raise
    if not is_complete:
        _complete(config, model, path, file, largest_batch)
    return config, model


def _complete(config: ModelConfig, model: ModelProto, path: Path, file: Path, largest_batch: int) -> None:
    """Add what ``config`` lacks, as Triton's backend does: also max_batch_size, if it has no inputs and outputs."""
    if not (config.input or config.output or config.max_batch_size or batch_obstacle(model)):
        config.max_batch_size = largest_batch
    complete(config, model, path, file)


def _prepare_for_embedded_server(
    config: ModelConfig, path: Path, versions: list[Path], largest_batch: int
) -> ModelProto | None:
    """Complete the ``config`` of an ONNX model and return the model; None for other models.

    Raises BadInputError and EnvironmentFault if the embedded server does not have all that the model needs.
    """
    backend = backend_of(config)
    if not backend:
        files = ", ".join(name for names in MODEL_FILES.values() for name in names)
        raise BadInputError(
            f"{show_path(path)}: has no backend, and no version folder has a file that tells it ({files}); write "
            f"backend (the embedded server has {', '.join(MODEL_FILES)})"
        )
    if backend not in MODEL_FILES:
        raise BadInputError(
            f"{show_path(path)}: backend {format_value(backend)} is not in the embedded server, which has "
            f"{', '.join(MODEL_FILES)}; use --target local, docker or remote with a server that has it"
            f"{ALTERNATIVES.get(backend, '')}"
        )
    refuse_unmeasurable(config, path)
    if config.sequence_batching.state:
        raise BadInputError(
            f"{show_path(path)}: sequence_batching.state: the backends of the embedded server are based on Python, "
            "which has no implicit state; use --target local, docker or remote, or keep the state in a Python model"
        )
    file = _newest(config, backend, path, versions)
    if backend == "onnxruntime":
        file = file / "model.onnx" if file.is_dir() else file
        model = _read_onnx_and_weights(file)
        _complete(config, model, path, file, largest_batch)
        check_loadable(model, file)
        return model
    if backend == "pytorch":
        check_pytorch_model(config, path, file)
    environment = model_config.environment_of(config)
    if environment and not Path(environment.replace(model_config.MODEL_FOLDER, str(path.parent))).exists():
        raise BadInputError(
            f"{show_path(path)}: {model_config.ENVIRONMENT}: {format_value(environment)} does not exist; put the "
            "packed environment there, or leave the parameter out to use the packages of tune's environment"
        )
    if backend == "python" and "{}.{}".format(*sys.version_info) not in PYTHON_BACKEND_VERSIONS:
        raise EnvironmentFault(
            f"{show_path(path)}: models in Python need numpy 1 in the embedded server: run tune under "
            f"Python {' or '.join(PYTHON_BACKEND_VERSIONS)}"
        )
    return None


def _read_onnx_and_weights(file: Path) -> ModelProto:
    model = read_onnx(file)
    external_files(model, file)
    return model


def _derived_config(folder: Path, versions: list[Path], largest_batch: int) -> tuple[ModelConfig, ModelProto]:
    """Return the configuration of an ONNX model without config.pbtxt, as Triton's own backend derives it."""
    if not any((version / "model.onnx").exists() for version in versions):
        problem = "config.pbtxt is missing; a Triton model folder has one next to its version folders"
        if misplaced := [version / "config.pbtxt" for version in versions if (version / "config.pbtxt").exists()]:
            problem += f": move {show_path(misplaced[0])} there"
        elif loose := sorted(file.name for file in folder.glob("*.onnx")):
            problem += f" (to tune {format_value(loose[0])}, name that file)"
        elif is_file(folder / "run.json"):
            problem = "this is the folder of a run; continue it with --resume, or explain it with `tune explain`"
        elif models := list_models(folder):
            problem = f"this is a model repository with {models}; give --model-repository FOLDER and one of them"
        raise BadInputError(f"{show_path(folder)}: {problem}")
    file = _newest(ModelConfig(), ONNXRUNTIME, folder / "config.pbtxt", versions)
    model = _read_onnx_and_weights(file)
    config = derive(model, file, folder.name, largest_batch)
    check_loadable(model, file)
    return config, model


def _newest(config: ModelConfig, backend: str, path: Path, versions: list[Path]) -> Path:
    """Return the model file of the newest version that Triton loads and that has one."""
    served = _served_versions(config, versions)
    filenames = (config.default_model_filename,) if config.default_model_filename else MODEL_FILES[backend]
    files = [version / filename for version in served for filename in filenames if (version / filename).exists()]
    if not files:
        where = show_path(path.parent / (served[-1].name if served else "1") / filenames[0])
        missing = one_line(" or ".join(filenames))
        problem = "no version folder with" if len(versions) < 2 else "the version that Triton loads has no"
        raise BadInputError(f"{show_path(path.parent)}: {problem} {missing}; it belongs at {where}")
    return max(files, key=lambda file: (int(file.parent.name), -filenames.index(file.name)))


def _backend_by_file(versions: list[Path]) -> str:
    """Return the backend that Triton derives from the model's files, or empty if none fits."""
    for backend, filenames in {**MODEL_FILES, **NATIVE_FILES}.items():
        if any((version / filename).exists() for version in versions for filename in filenames):
            return backend
    return ""


def _check_shell_words(config: ModelConfig, path: Path, *, is_embedded: bool) -> None:
    """Raise BadInputError if a text that Triton's Python backend passes through a shell could run a command."""
    for field in (model_config.FILENAME, model_config.ENVIRONMENT):
        value = field_path.get_value(config, field)
        where = f"{show_path(path)}: {field}"
        if value and field == model_config.ENVIRONMENT and backend_of(config) != "python" and is_embedded:
            raise BadInputError(f"{where}: only models of the backend python have an environment; remove it")
        try:
            model_config.check_shell_value(field, str(value or ""))
        except ValueError as error:
            raise BadInputError(f"{where}: {error}") from None


def _entries(folder: Path) -> list[Path]:
    try:
        return list(folder.iterdir())
    except OSError as error:
        raise BadInputError(f"{show_path(folder)}: cannot be read: {error.strerror}") from None


def _size(files: Iterable[Path]) -> int:
    return sum(file.stat().st_size for file in files)


def hash_model_files(source: ModelSource, *, needs_permission: bool) -> str:
    """Return the SHA-256 of the files in the versions that Triton loads of each model of ``source``.

    It is empty if there are none, or more than MAX_HASHED_BYTES. A model.json is left out, as config.pbtxt is: a user
    replaces both with the recommended ones. Without ``needs_permission`` it is empty too if this user may not read a
    file, which only a server with more rights reads. Raises BadInputError if a file cannot be read otherwise.
    """
    versions = [
        version
        for name, config in sorted(source.models.items())
        for version in sorted(_served_versions(config, _versions(source.folder(name))))
    ]
    try:
        files = [
            file for version in versions for file in sorted(version_files(version)) if file.name != model_json.FILE
        ]
        if not files or _size(files) > MAX_HASHED_BYTES:
            return ""
        return digest_files(files)
    except OSError as error:
        if isinstance(error, PermissionError) and not needs_permission:
            return ""
        where = Path(error.filename or source.folder(source.name))  # an error of read() names no file
        raise BadInputError(f"{show_path(where)}: cannot be read: {error.strerror}") from None


def read_source(
    read: Callable[[str], ModelSource],
    name: str,
    *,
    composing: Sequence[str] = (),
    variants: Sequence[str] = (),
    concurrent: Sequence[str] = (),
    batcher: str | None = None,
) -> ModelSource:
    """Return the model ``name`` with the other models of its repository that belong to it; ``read`` reads one.

    These are the steps of an ensemble, the models that a Python model calls (``composing``), the ``variants`` that
    can replace it and the ``concurrent`` models that share its device (texts of ``load_shares``). ``batcher`` is the
    model whose settings are tuned, by default the largest step that batches; with ``concurrent`` models the model
    itself, unless it is an ensemble. Raises BadInputError if a model is missing or they do not fit together.
    """
    shares = load_shares(concurrent)
    names_by_flag = {"bls-composing-models": composing, "variants": variants, "concurrent-models": concurrent}
    _refuse_tuned_model(name, names_by_flag)
    top = read(name)
    if len(shares) < len(concurrent):
        raise BadInputError(
            f"--concurrent-models {one_line(','.join(concurrent))}: a model is named twice; give it one share"
        )
    if concurrent and top.is_streaming:
        raise BadInputError(
            f"--concurrent-models {one_line(concurrent[0])}: {name} is decoupled, and only models with one "
            "response to a request get load at the same time; tune the models one after another"
        )
    parts: dict[str, ModelSource] = {}
    for step in (*_steps(top.config), *composing):
        _gather(step, read, parts, path=(name,))
    own_parts = dict(parts)
    has_shared_models = False
    for other in shares:
        own: dict[str, ModelSource] = {}
        _gather(other, read, own, path=(), flag="--concurrent-models")
        has_shared_models |= not parts.keys().isdisjoint(own)
        parts |= own
        if name in parts:
            raise BadInputError(
                f"--concurrent-models {one_line(other)}: {one_line(name)}, the tuned model, is a step of it; tune "
                f"{one_line(other)} with --concurrent-models {one_line(name)}"
            )
    _check_decoupled_parts(top, parts)
    _check_stateful(top, parts, names_by_flag)
    if variants and parts:
        raise BadInputError(
            f"{name}: only a single model can have variants, and this one is served with {', '.join(parts)}"
        )
    variant_sources = _read_variants(top, read, variants)
    facts = dict(top.facts)
    if parts:
        facts["model_bytes"] = sum(int(part.facts.get("model_bytes", 0)) for part in (top, *parts.values()))
    tuned = top.name if concurrent and batcher is None and not is_ensemble(top.config) else batcher
    return replace(
        top,
        facts=facts,
        composing={name: part.config for name, part in parts.items()},
        batcher=_batcher(top, own_parts if is_ensemble(top.config) else parts, tuned),
        concurrent=shares,
        has_shared_models=has_shared_models,
        variants={name: variant.config for name, variant in variant_sources.items()},
        index_ranges={
            key: value
            for part in (top, *parts.values(), *variant_sources.values())
            for key, value in part.index_ranges.items()
        },
    )


def _refuse_tuned_model(name: str, names_by_flag: Mapping[str, Sequence[str]]) -> None:
    """Raise BadInputError if an option for other models names the tuned model ``name``.

    Only ``--variants`` may name it, next to others.
    """
    for flag, names in names_by_flag.items():
        for text in names if flag != "variants" else ():
            if name in load_shares([text]):
                raise BadInputError(f"--{flag} {text}: {name} is the tuned model itself; leave it out")
    if set(names_by_flag["variants"]) == {name}:
        raise BadInputError(f"--variants {name}: {name} is the tuned model itself; name models that can replace it")


def _read_variants(
    top: ModelSource, read: Callable[[str], ModelSource], variants: Sequence[str]
) -> dict[str, ModelSource]:
    """Return ``top`` and its ``variants`` by name; empty if there are none. Raises BadInputError."""
    names = dict.fromkeys((top.name, *variants)) if variants else ()
    sources = {name: top if name == top.name else read(name) for name in names}
    for name, source in sources.items():
        _check_variant(top.name, top.config, name, source.config)
    return sources


def _check_stateful(
    top: ModelSource, parts: Mapping[str, ModelSource], names_by_flag: Mapping[str, Sequence[str]]
) -> None:
    """Raise BadInputError if a stateful model is not the only one: ``tune`` sends sequences to one model."""
    for name, part in parts.items():
        if part.is_stateful:
            is_concurrent = name in load_shares(names_by_flag["concurrent-models"])
            role = "a concurrent model" if is_concurrent else f"a part of {top.name}"
            raise BadInputError(
                f"{one_line(name)}: sequence_batching: a stateful model is measured alone, not as {role}; "
                "tune it itself"
            )
    for flag, names in names_by_flag.items():
        if names and top.is_stateful:
            raise BadInputError(
                f"--{flag} {one_line(','.join(names))}: {one_line(top.name)} is stateful (sequence_batching) and is "
                "measured alone; leave the option out"
            )


def _steps(config: ModelConfig) -> list[str]:
    return list(dict.fromkeys(step.model_name for step in config.ensemble_scheduling.step))


def _check_decoupled_parts(top: ModelSource, parts: Mapping[str, ModelSource]) -> None:
    """Raise BadInputError for decoupled models behind another model than a decoupled Python model (BLS)."""
    decoupled = [name for name, part in parts.items() if part.is_streaming]
    if is_ensemble(top.config) and top.is_streaming and not decoupled:
        raise BadInputError(
            f"{one_line(top.name)}: decoupled: an ensemble that sends any number of responses to a request is not "
            "measured; remove model_transaction_policy from its config.pbtxt, or tune its steps"
        )
    if decoupled and (is_ensemble(top.config) or not top.is_streaming):
        raise BadInputError(
            f"{one_line(top.name)}: decoupled: {format_value(decoupled[0])} sends any number of responses to a "
            "request, and such a model is measured only on its own, or behind a decoupled Python model that calls it "
            "(such as tensorrt_llm_bls, with its models in bls_composing_models): tune that one, or use a copy that "
            "responds once"
        )


def _gather(
    name: str,
    read: Callable[[str], ModelSource],
    parts: dict[str, ModelSource],
    path: tuple[str, ...],
    flag: str = "",
) -> None:
    """Add ``name`` to ``parts``, after the steps that it consists of.

    It is a step of the last model in ``path``, unless ``flag`` is the option that names it.
    """
    if name in path or len(path) > MAX_ENSEMBLE_DEPTH:
        steps = " > ".join((*path, name))
        raise BadInputError(
            f"{one_line(path[0])}: its ensembles call one another ({steps}); remove one of these steps"
        )
    if name in parts:
        return
    try:
        part = read(name)
    except BadInputError as error:
        named_by = f"{flag} {one_line(name)}" if flag else f"{one_line(path[-1])} consists of {format_value(name)}"
        raise BadInputError(f"{named_by}: {error}") from None
    for step in _steps(part.config):
        _gather(step, read, parts, (*path, name))
    parts[name] = part


def _batcher(top: ModelSource, parts: dict[str, ModelSource], name: str | None) -> str:
    """Return the part with the given ``name``, by default the largest one that batches; empty for ``top`` itself."""
    models = {part_name: part for part_name, part in parts.items() if not is_ensemble(part.config)}
    if name == top.name:
        return ""
    if name is not None and name not in models:
        if not models:
            raise BadInputError(
                f"model.batcher: {top.name} calls no other model, so the space is about itself; leave the key out"
            )
        raise BadInputError(
            f"model.batcher: {format_value(name)} is not a model of {top.name}, which has {', '.join(models)}"
        )
    if name is not None or not models:
        return name or ""
    batching = {part_name: part for part_name, part in models.items() if part.config.max_batch_size > 1} or models
    return max(batching, key=lambda part_name: int(batching[part_name].facts.get("model_bytes", 0)))


def _check_variant(name: str, config: ModelConfig, variant_name: str, variant: ModelConfig) -> None:
    """Raise BadInputError if requests to the model are not valid requests to the variant."""
    if is_ensemble(variant):
        raise BadInputError(f"{variant_name}: an ensemble cannot be a variant; give the variants to its own steps")
    if variant.HasField("sequence_batching"):
        raise BadInputError(
            f"{variant_name}: sequence_batching: a stateful model cannot be a variant; tune it itself"
        )
    if _input_types(config) != _input_types(variant):
        raise BadInputError(
            f"{variant_name}: its inputs differ from those of {name}, so one load cannot measure both; tune them "
            "separately"
        )
    if config.model_transaction_policy.decoupled != variant.model_transaction_policy.decoupled:
        raise BadInputError(
            f"{variant_name}: only one of {name} and {variant_name} is decoupled; tune them separately"
        )
    if (config.max_batch_size > 0) != (variant.max_batch_size > 0):
        raise BadInputError(
            f"{variant_name}: only one of {name} and {variant_name} takes batches; give both a max_batch_size"
        )


def _input_types(config: ModelConfig) -> dict[str, tuple[int, tuple[int, ...]]]:
    """Return the data type and the dims of each input."""
    return {tensor.name: (tensor.data_type, tuple(tensor.dims)) for tensor in config.input}
