"""A model of the user's own Triton repository, checked before anything is started.

Links in it are followed, as Triton does: weights often lie elsewhere. A name is never a path.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING

from tritonclient.grpc.model_config_pb2 import ModelConfig

from optimizer import model_config, runtime
from optimizer.errors import BadInputError, EnvironmentFault
from optimizer.model_source import ModelSource
from optimizer.profile.safe_paths import is_folder, plain_name
from optimizer.profile.yaml_lines import show
from optimizer.untrusted import one_line

if TYPE_CHECKING:
    from onnx import ModelProto

MODEL_FILES = {"onnxruntime": "model.onnx", "python": "model.py"}
MAX_ONNX_BYTES = 1 << 31  # protobuf's own bound: larger models have their weights beside
MOST_WORDS = 300  # characters of a list in an error
DATA_TYPES = {"FLOAT": "TYPE_FP32", "DOUBLE": "TYPE_FP64", "FLOAT16": "TYPE_FP16", "BFLOAT16": "TYPE_BF16"}


def read_model_config(repository: Path, name: str) -> ModelConfig:
    """config.pbtxt of ``repository/name``, with its name. Raises BadInputError where it cannot be that model's."""
    try:
        plain_name(name)
    except ValueError as error:
        raise BadInputError(f"model name: {error}") from None
    if not is_folder(repository):
        raise BadInputError(f"{_shown(repository)}: no such model repository")
    folder = repository / name
    if not is_folder(folder):
        there = sorted(path.name for path in _entries(repository) if (path / "config.pbtxt").exists())
        has = one_line(", ".join(there), MOST_WORDS) or "none"
        raise BadInputError(f"{_shown(repository)}: no model {name!r} there; it has {has}")
    path = folder / "config.pbtxt"
    if not path.exists():
        problem = "config.pbtxt is missing; a Triton model folder has one beside its versions"
        raise BadInputError(f"{_shown(folder)}: {problem}")
    config = model_config.read(path)
    if config.name and config.name != name:
        problem = f"its name {show(config.name)} is not that of its folder {name!r}; make them equal"
        raise BadInputError(f"{_shown(path)}: {problem}")
    config.name = name
    return config


def is_ensemble(config: ModelConfig) -> bool:
    return bool(config.HasField("ensemble_scheduling"))


def read_repository_model(repository: Path, name: str, *, gpu: bool) -> ModelSource:
    """The model ``repository/name``, its instance count written down where Triton would choose one.

    ``gpu``: the server will see a GPU. Raises BadInputError where it cannot be served."""
    config, folder = read_model_config(repository, name), repository / name
    path = folder / "config.pbtxt"
    backend = backend_of(config)
    if backend not in MODEL_FILES:
        problem = f"backend {show(backend)} is not in the embedded server, which has {', '.join(MODEL_FILES)}"
        raise BadInputError(f"{_shown(path)}: {problem}")
    versions = [entry for entry in _entries(folder) if entry.is_dir() and re.fullmatch("[0-9]{1,18}", entry.name)]
    try:
        filename = plain_name(config.default_model_filename or MODEL_FILES[backend])
    except ValueError as error:
        raise BadInputError(f"{_shown(path)}: default_model_filename: {error}") from None
    files = [version / filename for version in versions if (version / filename).exists()]
    if not files:
        problem = f"no version folder with {filename}; it belongs at {_shown(folder / '1' / filename)}"
        raise BadInputError(f"{_shown(folder)}: {problem}")
    if backend == "onnxruntime":
        newest = max(files, key=lambda file: int(file.parent.name))
        file = newest / "model.onnx" if newest.is_dir() else newest
        _complete(config, read_onnx(file), path, file)
    elif runtime.running_python() not in runtime.NUMPY_WHEELS:
        raise EnvironmentFault(
            f"{_shown(path)}: models in Python need numpy 1 in the embedded server: run tune under "
            f"Python {' or '.join(runtime.NUMPY_WHEELS)}"
        )
    config = model_config.explicit(config, gpu=gpu)
    return ModelSource(repository, name, config, facts={"model_bytes": sum(_size(version) for version in versions)})


def backend_of(config: ModelConfig) -> str:
    """The backend that serves it; the older ``platform: "onnxruntime_onnx"`` names one too."""
    return str(config.backend) or {"onnxruntime_onnx": "onnxruntime"}.get(str(config.platform), str(config.platform))


def read_onnx(path: Path) -> ModelProto:
    """The model without weights in external files. Raises BadInputError where the file is no ONNX model."""
    import onnx
    from google.protobuf.message import DecodeError

    try:
        if path.exists() and not path.is_file():  # a pipe would block
            raise BadInputError(f"{_shown(path)}: not a file")
        if path.stat().st_size > MAX_ONNX_BYTES:
            raise BadInputError(f"{_shown(path)}: larger than {MAX_ONNX_BYTES >> 30} GiB, which no ONNX model can be")
        model = onnx.load(str(path), load_external_data=False)
    except (DecodeError, OSError, ValueError) as error:
        problem = f"not an ONNX model ({one_line(' '.join(str(error).split()), 120)})"
        raise BadInputError(f"{_shown(path)}: {problem}") from None
    if not model.graph.node:
        raise BadInputError(f"{_shown(path)}: not an ONNX model (its graph is empty)")
    return model


def _complete(config: ModelConfig, model: ModelProto, path: Path, file: Path) -> None:
    """Fill inputs and outputs in where ``config`` has none, as Triton's own backend does; check them where it has.

    Unlike there, a dynamic batcher is never added.
    """
    from onnx import helper

    weights = {tensor.name for tensor in model.graph.initializer}
    batched = config.max_batch_size > 0
    for kind, tensors, given in (
        ("input", [tensor for tensor in model.graph.input if tensor.name not in weights], config.input),
        ("output", list(model.graph.output), config.output),
    ):
        known = {tensor.name for tensor in tensors}
        for wrong in (tensor.name for tensor in given if tensor.name not in known):
            has = one_line(", ".join(sorted(known)), MOST_WORDS)
            raise BadInputError(f"{_shown(path)}: {kind} {show(wrong)} is not in {_shown(file)}, which has {has}")
        for tensor in tensors if not given else ():
            which = f"{kind} {show(tensor.name)} of {_shown(file)}"
            shape = [d.dim_value if d.HasField("dim_value") else -1 for d in tensor.type.tensor_type.shape.dim]
            if batched and (not shape or shape[0] != -1):
                raise BadInputError(
                    f"{_shown(path)}: max_batch_size is {config.max_batch_size}, but {which} has no "
                    f"batch dimension (its shape is {show(tuple(shape))}); write max_batch_size: 0"
                )
            try:
                name = helper.tensor_dtype_to_string(tensor.type.tensor_type.elem_type).removeprefix("TensorProto.")
                added = given.add(name=tensor.name, data_type=DATA_TYPES.get(name, f"TYPE_{name}"))
            except (KeyError, ValueError):
                raise BadInputError(
                    f"{which} has a type that Triton does not know; write it into {path.name}"
                ) from None
            dims = shape[1:] if batched else shape
            added.dims.extend(dims or [1])
            if not dims:
                added.reshape.SetInParent()  # a scalar for each sample


def _entries(folder: Path) -> list[Path]:
    try:
        return list(folder.iterdir())
    except OSError as error:
        raise BadInputError(f"{_shown(folder)}: cannot be read: {error.strerror}") from None


def _shown(path: Path) -> str:
    return one_line(str(path))


def _size(folder: Path) -> int:
    return sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())
