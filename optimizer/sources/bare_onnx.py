"""A bare ``model.onnx``: configured as its graph implies, served from a private repository of links."""

from __future__ import annotations

import contextlib
import hashlib
import re
from pathlib import Path

from optimizer import model_config
from optimizer.errors import BadInputError, EnvironmentFault
from optimizer.model_source import ModelSource
from optimizer.sources.onnx_file import check_versions, external_files, read_onnx, shown
from optimizer.sources.onnx_interface import derive

TORCH_ENDINGS = (".pt", ".pt2", ".pth")
ENDINGS = (".onnx", *TORCH_ENDINGS)
NO_NAMES = {"", "model"}  # that tell one model from another


def read_bare_onnx(file: Path, *, gpu: bool, largest_batch: int, cache: Path) -> ModelSource:
    """The model in ``file``, whose folder is left as it is; the repository lies in ``cache``.

    ``largest_batch`` is its max_batch_size where it has a batch dimension. Raises BadInputError where the file is
    none that can be served, EnvironmentFault where the disk refuses the repository.
    """
    if file.suffix in TORCH_ENDINGS:
        raise BadInputError(
            f"{shown(file)}: a PyTorch file says nothing of its tensors' dims; make it the model.pt (or model.pt2) "
            "of a folder NAME/1, write NAME/config.pbtxt and name that folder (see docs/pytorch.md)"
        )
    if not file.exists():
        raise BadInputError(f"{shown(file)}: no such file")
    model = read_onnx(file)
    weights = external_files(model, file)
    check_versions(model, file)
    name = model_name(file)
    config = model_config.explicit(derive(model, file, name, largest_batch), gpu=gpu)
    parts = [file, *(file.parent / weight for weight in weights)]
    digest = hashlib.sha256()
    for part in parts:
        with part.open("rb") as opened:
            digest.update(hashlib.file_digest(opened, "sha256").digest())
    try:
        repository = _link(file.absolute(), [str(weight) for weight in weights], name, cache)
    except OSError as error:
        raise EnvironmentFault(
            f"cannot write into {cache}: {error.strerror}; free space there or set TRITUNE_CACHE"
        ) from error
    return ModelSource(
        repository,
        name,
        config,
        facts={
            "batch_dimension": "open" if config.max_batch_size else "none",
            "model_bytes": sum(part.stat().st_size for part in parts),
            "sha256": digest.hexdigest(),
        },
    )


def model_name(file: Path) -> str:
    """Of the file, or of the folder that it lies in where it is called ``model.onnx``; as Triton takes it."""
    parents = [parent.name for parent in file.absolute().parents if not parent.name.isdecimal()]
    for text in (file.stem, *parents[:1]):
        name = re.sub(r"\.{2,}", ".", re.sub(r"[^A-Za-z0-9_.-]+", "_", text)).strip("._-")
        if name not in NO_NAMES:
            return name
    return "model"


def _link(file: Path, weights: list[str], name: str, cache: Path) -> Path:
    """The same for the same files, so that runs at the same time, or one after the other, share it."""
    key = hashlib.sha256("\0".join([str(file), *weights]).encode(errors="surrogateescape")).hexdigest()[:16]
    repository = cache / "bare" / key
    version = repository / name / "1"
    cache.mkdir(mode=0o700, parents=True, exist_ok=True)  # what lies in it is run
    for link, target in (("model.onnx", file), *((weight, file.parent / weight) for weight in weights)):
        path = version / link
        path.parent.mkdir(parents=True, exist_ok=True)
        with contextlib.suppress(FileExistsError):
            path.symlink_to(target)
    return repository
