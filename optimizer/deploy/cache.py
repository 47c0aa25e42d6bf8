"""The files that tune keeps in its cache folder: their kinds, their sizes, and their removal."""

from __future__ import annotations

import os
import shutil
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path

from optimizer.core.errors import EnvironmentFault
from optimizer.core.files import stored_bytes
from optimizer.core.locks import file_lock, lock_holder
from optimizer.core.safe_text import is_folder, one_line, show_path
from optimizer.core.signature import KEY_FILE
from optimizer.deploy.remote_server import FOLDER as REMOTE_FOLDER
from optimizer.deploy.server_process import processes_with_servers
from optimizer.deploy.wheels import DRAFT, LOCK


@dataclass(frozen=True, slots=True)
class CacheKind:
    """A kind of cached files: name, description, and the patterns of its folders in the cache folder.

    Files of a kind that is not ``removable`` cannot be fetched or built again.
    """

    name: str
    description: str
    patterns: tuple[str, ...]
    removable: bool = True


KINDS = (
    CacheKind("server", "tritonserver, perf_analyzer", ("runtime-*", "perf_analyzer-*", f"{DRAFT}*")),
    CacheKind("numpy", "numpy of the Python backend", ("numpy-*",)),
    CacheKind("openvino", "ONNX Runtime with OpenVINO", ("openvino-*",)),
    CacheKind("models", "built models", ("models",)),
    CacheKind("onnx", "links to your ONNX files", ("bare",)),
    CacheKind("requests", "requests to the models", ("requests",)),
    CacheKind("simulator", "compiled simulator", ("compiled",)),
    CacheKind("remote", "state to restore; is kept", (REMOTE_FOLDER,), removable=False),
    CacheKind("signature", "key that marks your runs; is kept", (KEY_FILE,), removable=False),
)
REMOVABLE = tuple(kind.name for kind in KINDS if kind.removable)
OTHER_FILES = CacheKind("other", "not tune's; is kept", ("*",), removable=False)
LOCKS = (LOCK, "models/.*.lock", "requests/.lock", f"{REMOTE_FOLDER}/*.lock")  # held by processes that use the cache


@dataclass(frozen=True, slots=True)
class CachedFiles:
    """The files of one kind in the cache: their folders, and their total size."""

    kind: CacheKind
    paths: tuple[Path, ...]
    size_bytes: int

    def document(self) -> dict[str, object]:
        """Return the entry of ``tune cache --json``."""
        return {
            "kind": self.kind.name,
            "description": self.kind.description,
            "removable": self.kind.removable,
            "paths": list(map(str, self.paths)),
            "size_bytes": self.size_bytes,
        }


def read_cache(folder: Path) -> list[CachedFiles]:
    """Return the content of the cache folder by kind. Kinds that are not removable are left out if they are empty."""
    if not is_folder(folder):
        return [CachedFiles(kind, (), 0) for kind in KINDS if kind.removable]
    paths_by_kind = {
        kind: sorted({path for pattern in kind.patterns for path in folder.glob(pattern)}) for kind in KINDS
    }
    tune_paths = {folder / LOCK, *(path for paths in paths_by_kind.values() for path in paths)}
    try:
        paths_by_kind[OTHER_FILES] = sorted(path for path in folder.iterdir() if path not in tune_paths)
    except OSError as error:
        place = show_path(folder)
        raise EnvironmentFault(f"cannot read {place}: {error.strerror}; make it readable") from None
    return [
        CachedFiles(kind, tuple(paths), stored_bytes(*paths))
        for kind, paths in paths_by_kind.items()
        if paths or kind.removable
    ]


def find_removable(folder: Path, names: Collection[str]) -> list[CachedFiles]:
    """Return the files of the kinds ``names`` in the cache folder, without kinds that are not removable."""
    kinds = {kind for kind in KINDS if kind.removable and kind.name in names}
    return [files for files in read_cache(folder) if files.kind in kinds and files.paths]


def remove_cached(folder: Path, cached: Sequence[CachedFiles]) -> None:
    """Remove ``cached`` from the cache folder.

    Raises EnvironmentFault if a process uses the cache (see ``check_unused``), or a file cannot be removed.
    """
    check_unused(folder)
    try:
        with file_lock(folder / LOCK, _refuse):
            for path in (path for files in cached for path in files.paths):
                _remove(path)
    except OSError as error:
        place = one_line(str(error.filename or folder))
        raise EnvironmentFault(f"cannot remove {place}: {error.strerror}; make it writable, then try again") from None


def check_unused(folder: Path) -> None:
    """Raise EnvironmentFault if a process fetches the server, builds a model or has a server, or tunes a remote one.

    A run that is being prepared, or is in another container, is not noticed: a run locks nothing that it only reads.
    """
    locks = (lock for pattern in LOCKS for lock in folder.glob(pattern))
    for holder in filter(None, map(lock_holder, locks)):
        _refuse(holder)
    for process in processes_with_servers():
        _refuse(f"process {process}")


def _refuse(holder: str) -> None:
    raise EnvironmentFault(f"{holder} uses the cache; wait until it ends, or stop it")


def _remove(path: Path) -> None:
    """Remove a file or folder; a folder is renamed first, so that no other process takes half of it for the whole."""
    if path.is_symlink() or not path.is_dir():
        path.unlink()
        return
    draft = path if path.name.startswith(DRAFT) else path.with_name(f"{DRAFT}{os.getpid()}-{path.name}")
    path.rename(draft)
    shutil.rmtree(draft)
