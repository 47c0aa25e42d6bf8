"""A PyTorch file of the user's, told by what is in its archive: torch is not needed for that."""

from __future__ import annotations

import importlib.util
import zipfile
from pathlib import Path

from optimizer.errors import BadInputError, EnvironmentFault
from optimizer.sources.onnx_file import shown

TORCH = "torch==2.13.0"  # as the extra has it
# what an archive of each kind has inside its one folder
MEMBERS = {".pt": ("/code/",), ".pt2": ("/models/", "/data/aotinductor/")}
NEEDED = {
    ".pt": "no TorchScript; write it with torch.jit.save (what torch.save writes, Triton cannot serve)",
    ".pt2": "no torch.export archive and no AOTInductor package; write it with torch.export.save",
}
OLDER_EXPORT = "serialized_exported_program.json"


def check_torch() -> None:
    """Raises EnvironmentFault where torch is not installed."""
    if importlib.util.find_spec("torch") is None:
        raise EnvironmentFault(
            f"PyTorch models need torch, which is not installed here: pip install {TORCH} (tritune's extra pytorch)"
        )


def check_torch_file(path: Path) -> None:
    """Raises BadInputError where the file is none that the server can load."""
    kind = ".pt2" if path.suffix == ".pt2" else ".pt"
    try:
        if not path.is_file():  # a pipe would block
            raise BadInputError(f"{shown(path)}: not a file")
        with zipfile.ZipFile(path) as archive:
            names = archive.namelist()
    except (OSError, zipfile.BadZipFile, ValueError, NotImplementedError):
        names = []
    if not any(member in name for name in names for member in MEMBERS[kind]) and OLDER_EXPORT not in names:
        raise BadInputError(f"{shown(path)}: {NEEDED[kind]}")
