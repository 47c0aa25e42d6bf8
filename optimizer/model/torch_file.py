"""Files of PyTorch models: whether the embedded server can load and serve them."""

from __future__ import annotations

import importlib.util
import zipfile
from pathlib import Path

from optimizer.config.model_config_proto import TYPE_STRING, ModelConfig
from optimizer.core.errors import BadInputError, EnvironmentFault
from optimizer.core.safe_text import check_file, format_value, show_path

TORCH = "torch==2.13.0"  # as in the extra ``pytorch``
# members of a valid archive, inside its one folder
ARCHIVE_MEMBERS = {".pt": ("/code/",), ".pt2": ("/models/", "/data/aotinductor/")}
INVALID_ARCHIVES = {  # the error for a file without these members
    ".pt": "not TorchScript; write it with torch.jit.save (Triton cannot serve files of torch.save)",
    ".pt2": "neither a torch.export archive nor an AOTInductor package; write it with torch.export.save",
}
OLDER_EXPORT = "serialized_exported_program.json"


def check_torch() -> None:
    """Raise EnvironmentFault if torch is not installed."""
    if importlib.util.find_spec("torch") is None:
        raise EnvironmentFault(
            f"PyTorch models need torch, which is not installed here: pip install {TORCH} (tritune's extra pytorch)"
        )


def check_torch_file(path: Path) -> None:
    """Raise BadInputError if the server cannot load the file."""
    kind = ".pt2" if path.suffix == ".pt2" else ".pt"
    check_file(path)  # a pipe would block
    try:
        with zipfile.ZipFile(path) as archive:
            names = archive.namelist()
    except (OSError, zipfile.BadZipFile, ValueError, NotImplementedError):
        names = []
    if not any(member in name for name in names for member in ARCHIVE_MEMBERS[kind]) and OLDER_EXPORT not in names:
        raise BadInputError(f"{show_path(path)}: {INVALID_ARCHIVES[kind]}")


def check_pytorch_model(config: ModelConfig, path: Path, file: Path) -> None:
    """Raise an error if the embedded server cannot serve ``file`` with ``config``, which was read from ``path``.

    It is BadInputError, or EnvironmentFault if torch is not installed.
    """
    if not config.input or not config.output:
        raise BadInputError(
            f"{show_path(path)}: a PyTorch file does not contain its tensors' dims; write input and output, each "
            "with name, data_type and dims"
        )
    for tensor in (*config.input, *config.output):
        if tensor.data_type == TYPE_STRING:
            raise BadInputError(
                f"{show_path(path)}: {format_value(tensor.name)} is TYPE_STRING, which tune's PyTorch backend "
                "does not pass"
            )
    check_torch_file(file)
    check_torch()
