"""A model of the user's own Triton repository, checked before anything is started.

Links in it are followed, as Triton does: weights often lie elsewhere. A name is never a path.
"""

from __future__ import annotations

import re
from pathlib import Path

from tritonclient.grpc.model_config_pb2 import ModelConfig

from optimizer import model_config, runtime
from optimizer.errors import BadInputError, EnvironmentFault
from optimizer.model_source import ModelSource
from optimizer.profile.safe_paths import is_folder, plain_name
from optimizer.profile.yaml_lines import show
from optimizer.sources.backends import MODEL_FILES, NATIVE_FILES
from optimizer.sources.backends import backend_of as backend_of
from optimizer.sources.onnx_file import check_versions, external_files, read_onnx, shown
from optimizer.sources.onnx_interface import complete, derive
from optimizer.sources.torch_file import check_torch, check_torch_file
from optimizer.untrusted import one_line

HERE = {
    "torch_aoti": 'in a copy write backend: "pytorch" in place of the platform'
}  # how it can be tuned all the same
MOST_WORDS = 300  # characters of a list in an error


def read_repository_model(
    repository: Path, name: str, *, gpu: bool, largest_batch: int = 64, any_backend: bool = False
) -> ModelSource:
    """The model ``repository/name``, its instance count written down where Triton would choose one.

    ``gpu``: the server will see a GPU. ``largest_batch`` is the max_batch_size of an ONNX model without config.pbtxt
    whose graph takes batches. ``any_backend``: a server of the user's own serves it, and knows what it can. Raises
    BadInputError where it cannot be served, EnvironmentFault where this machine lacks what serves it."""
    try:
        plain_name(name)
    except ValueError as error:
        raise BadInputError(f"model name: {error}") from None
    if not is_folder(repository):
        raise BadInputError(f"{shown(repository)}: no such model repository")
    folder = repository / name
    if not is_folder(folder):
        there = sorted(path.name for path in _entries(repository) if (path / "config.pbtxt").exists())
        has = one_line(", ".join(there), MOST_WORDS) or "none"
        raise BadInputError(f"{shown(repository)}: no model {name!r} there; it has {has}")
    versions = [entry for entry in _entries(folder) if entry.is_dir() and re.fullmatch("[0-9]{1,18}", entry.name)]
    facts: dict[str, str | int | float] = {"model_bytes": sum(_size(version) for version in versions)}
    path = folder / "config.pbtxt"
    if path.exists():
        config = _read_config(path, folder, versions, any_backend=any_backend)
    else:
        config = _derived_config(folder, versions, largest_batch)
    return ModelSource(repository, name, model_config.explicit(config, gpu=gpu), facts=facts)


def is_ensemble(config: ModelConfig) -> bool:
    """Whether it is made of others alone; they are checked one by one."""
    return bool(config.HasField("ensemble_scheduling"))


def refuse_unmeasurable(config: ModelConfig, path: Path) -> None:
    """Raises BadInputError where requests of ``config``, which stands in ``path``, cannot be sent one by one."""
    if config.HasField("sequence_batching"):
        raise BadInputError(
            f"{shown(path)}: sequence_batching: a stateful model takes sequences of requests, and tune sends single "
            "ones; tune a copy without it if the state does not matter to its speed, or measure it with "
            "perf_analyzer's --sequence-length"
        )
    if config.model_transaction_policy.decoupled:
        raise BadInputError(
            f"{shown(path)}: decoupled: such a model sends any number of answers to a request, and tune counts one; "
            "tune a copy that answers once, or measure it with perf_analyzer's --streaming"
        )


def _read_config(path: Path, folder: Path, versions: list[Path], *, any_backend: bool) -> ModelConfig:
    config = model_config.read(path)
    if config.name and config.name != folder.name:
        problem = f"its name {show(config.name)} is not that of its folder {folder.name!r}; make them equal"
        raise BadInputError(f"{shown(path)}: {problem}")
    config.name = folder.name
    if is_ensemble(config):
        return config
    if not config.backend and not config.platform:
        config.backend = _backend_by_file(versions)
    backend = backend_of(config)
    if any_backend:
        refuse_unmeasurable(config, path)
        _check_preferred_sizes(config, path)
        if backend == "onnxruntime" and not (config.input and config.output):
            file = _newest(config, backend, path, versions)
            complete(config, read_onnx(file), path, file)
        return config
    if backend not in MODEL_FILES:
        raise BadInputError(
            f"{shown(path)}: backend {show(backend)} is not in the embedded server, which has "
            f"{', '.join(MODEL_FILES)}; only a server of your own that has it can serve this model: to tune it here, "
            f"{HERE.get(backend, 'export it to ONNX')}"
        )
    refuse_unmeasurable(config, path)
    file = _newest(config, backend, path, versions)
    if backend == "onnxruntime":
        file = file / "model.onnx" if file.is_dir() else file
        model = read_onnx(file)
        external_files(model, file)
        check_versions(model, file)
        complete(config, model, path, file)
    elif backend == "pytorch":
        _check_pytorch(config, path, file)
    elif runtime.running_python() not in runtime.NUMPY_WHEELS:
        raise EnvironmentFault(
            f"{shown(path)}: models in Python need numpy 1 in the embedded server: run tune under "
            f"Python {' or '.join(runtime.NUMPY_WHEELS)}"
        )
    _check_preferred_sizes(config, path)
    return config


def _derived_config(folder: Path, versions: list[Path], largest_batch: int) -> ModelConfig:
    """Of an ONNX model, as Triton's own backend does."""
    files = [version / "model.onnx" for version in versions if (version / "model.onnx").exists()]
    if not files:
        problem = "config.pbtxt is missing; a Triton model folder has one beside its versions"
        if loose := sorted(file.name for file in folder.glob("*.onnx")):
            problem += f" (to tune {show(loose[0])}, name that file)"
        raise BadInputError(f"{shown(folder)}: {problem}")
    file = max(files, key=lambda found: int(found.parent.name))
    model = read_onnx(file)
    external_files(model, file)
    check_versions(model, file)
    return derive(model, file, folder.name, largest_batch)


def _newest(config: ModelConfig, backend: str, path: Path, versions: list[Path]) -> Path:
    """The model file of the newest version that has one."""
    try:
        own = (plain_name(config.default_model_filename),) if config.default_model_filename else MODEL_FILES[backend]
    except ValueError as error:
        raise BadInputError(f"{shown(path)}: default_model_filename: {error}") from None
    files = [version / filename for version in versions for filename in own if (version / filename).exists()]
    if not files:
        where = shown(path.parent / "1" / own[0])
        raise BadInputError(
            f"{shown(path.parent)}: no version folder with {one_line(' or '.join(own))}; it belongs at {where}"
        )
    return max(files, key=lambda file: (int(file.parent.name), -own.index(file.name)))


def _backend_by_file(versions: list[Path]) -> str:
    """The one that Triton takes where the configuration names none; empty where no file tells."""
    for backend, filenames in {**MODEL_FILES, **NATIVE_FILES}.items():
        if any((version / filename).exists() for version in versions for filename in filenames):
            return backend
    return ""


def _check_pytorch(config: ModelConfig, path: Path, file: Path) -> None:
    if not config.input or not config.output:
        raise BadInputError(
            f"{shown(path)}: a PyTorch file says nothing of its tensors' dims; write input and output, each with "
            "name, data_type and dims"
        )
    for tensor in (*config.input, *config.output):
        if tensor.data_type == ModelConfig().input.add(data_type="TYPE_STRING").data_type:
            raise BadInputError(
                f"{shown(path)}: {show(tensor.name)} is TYPE_STRING, which tune's PyTorch backend does not pass"
            )
    check_torch_file(file)
    check_torch()


def _check_preferred_sizes(config: ModelConfig, path: Path) -> None:
    """Triton itself loads no such model; later, max_batch_size and these sizes are chosen together."""
    largest = max(config.dynamic_batching.preferred_batch_size, default=0)
    if largest > config.max_batch_size:
        raise BadInputError(
            f"{shown(path)}: preferred_batch_size {largest} is above max_batch_size {config.max_batch_size}, which "
            "Triton refuses; lower it or raise max_batch_size"
        )


def _entries(folder: Path) -> list[Path]:
    try:
        return list(folder.iterdir())
    except OSError as error:
        raise BadInputError(f"{shown(folder)}: cannot be read: {error.strerror}") from None


def _size(folder: Path) -> int:
    files = (file for file in folder.rglob("*") if file.is_file() and file.parent.name != "__pycache__")
    return sum(file.stat().st_size for file in files)
