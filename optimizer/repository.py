"""A model of the user's own Triton repository, checked before anything is started."""

from __future__ import annotations

from pathlib import Path

from tritonclient.grpc.model_config_pb2 import ModelConfig

from optimizer import model_config
from optimizer.errors import BadInputError
from optimizer.model_source import ModelSource
from optimizer.profile.safe_paths import is_folder, plain_name

MODEL_FILES = {"onnxruntime": "model.onnx", "python": "model.py"}


def read_repository_model(repository: Path, name: str, *, gpu: bool) -> ModelSource:
    """The model ``repository/name``, its instance count written down where Triton would choose one.

    ``gpu``: the server will see a GPU. Raises BadInputError where it cannot be served."""
    try:
        plain_name(name)
    except ValueError as error:
        raise BadInputError(f"model name: {error}") from None
    if not is_folder(repository):
        raise BadInputError(f"{repository}: no such model repository")
    folder = repository / name
    if not is_folder(folder):
        there = sorted(path.name for path in repository.iterdir() if (path / "config.pbtxt").exists())
        raise BadInputError(f"{repository}: no model {name!r} there; it has {', '.join(there) or 'none'}")
    path = folder / "config.pbtxt"
    if not path.is_file():
        raise BadInputError(f"{folder}: config.pbtxt is missing; a Triton model folder has one beside its versions")
    config = model_config.read(path)
    if config.name and config.name != name:
        raise BadInputError(f"{path}: its name {config.name!r} is not that of its folder {name!r}; make them equal")
    config.name = name
    backend = backend_of(config)
    if backend not in MODEL_FILES:
        raise BadInputError(
            f"{path}: backend {backend!r} is not in the embedded server, which has {', '.join(MODEL_FILES)}"
        )
    versions = [entry for entry in folder.iterdir() if entry.is_dir() and entry.name.isdigit()]
    filename = config.default_model_filename or MODEL_FILES[backend]
    files = [version / filename for version in versions if (version / filename).exists()]
    if not files:
        raise BadInputError(f"{folder}: no version folder with {filename}; it belongs at {folder / '1' / filename}")
    if backend == "onnxruntime":
        newest = max(files, key=lambda file: int(file.parent.name))
        check_onnx(newest / "model.onnx" if newest.is_dir() else newest)
    config = model_config.explicit(config, gpu=gpu)
    return ModelSource(repository, name, config, facts={"model_bytes": sum(_size(version) for version in versions)})


def backend_of(config: ModelConfig) -> str:
    """The backend that serves it; the older ``platform: "onnxruntime_onnx"`` names one too."""
    return str(config.backend) or {"onnxruntime_onnx": "onnxruntime"}.get(str(config.platform), str(config.platform))


def check_onnx(path: Path) -> None:
    """Raises BadInputError where the file is no ONNX model. Weights in external files are not read."""
    import onnx
    from google.protobuf.message import DecodeError

    try:
        model = onnx.load(str(path), load_external_data=False)
    except (DecodeError, OSError, ValueError) as error:
        raise BadInputError(f"{path}: not an ONNX model ({' '.join(str(error).split())[:120]})") from None
    if not model.graph.node:
        raise BadInputError(f"{path}: not an ONNX model (its graph is empty)")


def _size(folder: Path) -> int:
    return sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())
