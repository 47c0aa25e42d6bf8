"""Paths among the options of a run, so that it can be continued from another folder than it was started in."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

from optimizer.options import RunOptions
from optimizer.profile.safe_paths import is_file, is_folder

_SQLITE_FILE = re.compile(r"(sqlite(?:\+\w+)?:///)(?!/|:memory:|file:)(.+)", re.DOTALL)


def as_given_in(folder: Path, options: RunOptions) -> RunOptions:
    """``options`` that were given in ``folder``, as they mean the same in the current one; unchanged where
    ``folder`` is the current one, or is gone."""
    if not is_folder(folder) or folder.samefile(Path.cwd()):
        return options
    repository, arrivals = options.model_repository, folder / options.arrivals
    return replace(
        options,
        model=_model(folder, options.model) if repository is None else options.model,
        model_repository=None if repository is None else str(folder / repository),
        from_model_analyzer=None
        if options.from_model_analyzer is None
        else str(folder / options.from_model_analyzer),
        input_data=_samples(folder, options.input_data),
        warm_start=None if options.warm_start is None else _run(folder, options),
        arrivals=str(arrivals) if is_file(arrivals) else options.arrivals,
        tritonserver=_file(folder, options.tritonserver),
        backend_directory=_file(folder, options.backend_directory),
        tls_ca=_file(folder, options.tls_ca),
        tls_cert=_file(folder, options.tls_cert),
        tls_key=_file(folder, options.tls_key),
        storage=None if options.storage is None else _storage(folder, options.storage),
    )


def _model(folder: Path, model: str) -> str:
    """A profile's or a model's path, or the name of a profile, which may lie in ``folder``."""
    if model.endswith((".yaml", ".yml", ".onnx")) or is_folder(folder / model):
        return str(folder / model)
    profile = folder / "configs" / f"{model}.yaml"
    return str(profile) if is_file(profile) else model


def _file(folder: Path, given: str | None) -> str | None:
    """A path; the plain name of a program is looked for elsewhere."""
    return given if given is None or not ("/" in given or (folder / given).exists()) else str(folder / given)


def _run(folder: Path, options: RunOptions) -> str:
    """As it is given: a path, or a name in the folder of results."""
    run = Path(options.warm_start or "")
    return str(folder / (run if (folder / run).exists() else Path(options.out) / run))


def _samples(folder: Path, input_data: str | None) -> str | None:
    return input_data if input_data in (None, "random", "zero") else str(folder / input_data)


def _storage(folder: Path, storage: str) -> str:
    if "://" not in storage:
        return str(folder / storage)
    file = _SQLITE_FILE.fullmatch(storage)
    return f"{file[1]}{folder / file[2]}" if file else storage
