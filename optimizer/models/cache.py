"""Models are built once: a folder a model, checked before use and never seen half-built.

    <cache>/models/<name>-<hash of settings and builder version>-<cpu|gpu>-<max_batch_size>/
        <name>/config.pbtxt     the folder is a Triton repository
        <name>/1/model.onnx     and the files that it refers to
        ...                     an ensemble's models, each in a folder of its own
        input_data.json         request data for perf_analyzer, where the builder writes any
        built.json              facts and file sizes; written last

A model is built in a hidden folder beside and renamed. A lock per hash makes other processes wait for the one
that builds. The kernel drops the lock of a killed process, and the next one clears away what it left.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from google.protobuf import text_format
from tritonclient.grpc.model_config_pb2 import ModelConfig

from optimizer.errors import EnvironmentFault
from optimizer.model_source import ModelSource
from optimizer.models.builder import Builder, Draft, Facts, Kind, Say, Settings
from optimizer.models.serving import configs

CONFIG_FILE, BUILT_FILE = "config.pbtxt", "built.json"
_NOT_SHARED = (CONFIG_FILE, BUILT_FILE)  # by models of the same weights


def obtain(
    builder: Builder, settings: Settings, *, cache: Path, max_batch_size: int, kind: Kind, say: Say
) -> ModelSource:
    """The model from the cache, built first where it is not there or damaged.

    Raises EnvironmentFault where the cache cannot be written (full disk, no permission).
    """
    models = cache / "models"
    weights = f"{builder.name}-{_digest(builder, settings)}"
    home = models / f"{weights}-{kind.removeprefix('KIND_').lower()}-{max_batch_size}"
    waiting = f"waiting: another process is building {builder.name}"
    try:
        models.mkdir(parents=True, exist_ok=True)
        if not _intact(home):
            with _lock(models / f".{weights}.lock", lambda: say(waiting)):
                if not _intact(home):  # it may just have been built by the process that had the lock
                    _replace(home, builder, settings, max_batch_size, kind, say)
    except OSError as error:
        cause = error.strerror or str(error)
        raise EnvironmentFault(
            f"cannot build {builder.name} in {models}: {cause}; make room there or choose another cache"
        ) from error
    return _source(home, builder.name)


def _digest(builder: Builder, settings: Settings) -> str:
    identity = json.dumps([builder.name, builder.version, settings.model_dump(mode="json")], sort_keys=True)
    return hashlib.sha256(identity.encode()).hexdigest()[:16]


def _replace(home: Path, builder: Builder, settings: Settings, max_batch_size: int, kind: Kind, say: Say) -> None:
    """Put a complete model at ``home``. The caller holds the lock."""
    draft = home.with_name(f".{home.name}.partial")
    retired = home.with_name(f".{home.name}.old")
    for leftover in (draft, retired):
        _remove(leftover)
    try:
        weights = home.name.rsplit("-", 2)[0]
        same_weights = sorted(home.parent.glob(f"{weights}-*"))
        twin = next((other for other in same_weights if _intact(other)), None)
        if twin:  # for another max_batch_size or kind: only config.pbtxt differs
            shutil.copytree(twin, draft, copy_function=_link, ignore=shutil.ignore_patterns(*_NOT_SHARED))
            facts = _read_facts(twin)
        else:
            facts = _write(builder, settings, Draft(draft, builder.name), say)
        for config in configs(builder, settings, max_batch_size, kind):
            text = text_format.MessageToString(config)
            draft.joinpath(config.name, CONFIG_FILE).write_text(text, encoding="utf-8")
        built = {"files": _sizes(draft), "facts": facts}
        (draft / BUILT_FILE).write_text(json.dumps(built, indent=2) + "\n", encoding="utf-8")
        if home.exists():
            home.rename(retired)  # not deleted in place: a server may be reading it
        draft.rename(home)
    finally:
        for leftover in (draft, retired):
            _remove(leftover)


def _write(builder: Builder, settings: Settings, draft: Draft, say: Say) -> Facts:
    draft.version.mkdir(parents=True)
    facts = builder.write(settings, draft, say)
    files = sorted(p for p in draft.repository.glob("*/1/**/*") if p.is_file())
    return {
        "builder": f"{builder.name} v{builder.version}",
        **facts,
        "model_bytes": sum(p.stat().st_size for p in files),
        "sha256": _content_hash(draft, files),
    }


def _content_hash(draft: Draft, files: list[Path]) -> str:
    """SHA-256 of what ``sha256sum`` prints for the files: lines of ``<sha256>  <path>``, sorted by path.

    Paths are those in the version folder; of the models beside an ensemble, those in the repository.
    """
    listing = hashlib.sha256()
    for path in files:
        folder = draft.version if path.is_relative_to(draft.version) else draft.repository
        with path.open("rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
        listing.update(f"{digest}  {path.relative_to(folder).as_posix()}\n".encode())
    return listing.hexdigest()


def _intact(home: Path) -> bool:
    """Whether built.json is there and each file in it has its size.

    Contents are not read again. A file that somebody added (a server's own cache, say) does no harm.
    """
    try:
        built = json.loads((home / BUILT_FILE).read_text(encoding="utf-8"))
        files = built["files"].items()
        return isinstance(built["facts"], dict) and all((home / p).stat().st_size == n for p, n in files)
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return False


def _sizes(folder: Path) -> dict[str, int]:
    return {
        path.relative_to(folder).as_posix(): path.stat().st_size
        for path in sorted(folder.rglob("*"))
        if path.is_file() and path.name != BUILT_FILE
    }


def _source(home: Path, name: str) -> ModelSource:
    input_data = home / "input_data.json"
    return ModelSource(
        repository=home,
        name=name,
        config=_read_config(home / name / CONFIG_FILE),
        input_data=input_data if input_data.exists() else None,
        facts=_read_facts(home),
    )


def _read_facts(home: Path) -> Facts:
    facts: Facts = json.loads((home / BUILT_FILE).read_text(encoding="utf-8"))["facts"]
    return facts


def _read_config(path: Path) -> ModelConfig:
    return text_format.Parse(path.read_text(encoding="utf-8"), ModelConfig())


def _link(source: str, target: str) -> None:
    try:
        os.link(source, target)
    except OSError:  # a file system without hard links
        shutil.copyfile(source, target)


def _remove(folder: Path) -> None:
    if folder.exists():
        shutil.rmtree(folder)


@contextmanager
def _lock(path: Path, waiting: Callable[[], None]) -> Iterator[None]:
    """Hold an exclusive lock on ``path``; ``waiting`` is called once where another process has it."""
    with path.open("a") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            waiting()
            fcntl.flock(file, fcntl.LOCK_EX)
        yield
