"""The parameter file model.json in the version folders of a model, which Triton's vLLM backend reads.

A candidate sets keys of its top level: the field ``model_json.max_num_seqs`` is the key ``max_num_seqs``. All other
keys of the file are kept.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from optimizer.config.version_folders import version_files, version_folders
from optimizer.core.candidate import MODEL_JSON_PREFIX, FieldValue
from optimizer.core.errors import BadInputError
from optimizer.core.safe_text import one_line, read_bytes, show_path

FILE = "model.json"
MAX_BYTES = 1 << 20
MAX_OVERRIDE_BYTES = 16 << 20  # total of all version folders, which a load request sends
_KEY = re.compile(r"[A-Za-z_][A-Za-z0-9_-]{0,99}")


def check_key(key: str) -> str:
    """Return ``key`` if it can be a key of model.json. Raises ValueError, without ``key`` in its text."""
    if not _KEY.fullmatch(key):
        raise ValueError("not a key of model.json, such as max_num_seqs")
    return key


def versions(model: Path) -> list[Path]:
    """Return the version folders of the folder ``model`` that have a model.json, ascending."""
    return [folder for folder in version_folders(model.iterdir()) if (folder / FILE).exists()]


def values(model: Path, paths: Iterable[str]) -> dict[str, FieldValue]:
    """Return the fields among ``paths`` that the model.json of the newest version has.

    Raises BadInputError if the file cannot be read.
    """
    model_json_paths = [path for path in paths if path.startswith(MODEL_JSON_PREFIX)]
    if not model_json_paths or not (folders := versions(model)):
        return {}
    content = parse(folders[-1] / FILE)
    fields = {path: content.get(path.removeprefix(MODEL_JSON_PREFIX)) for path in model_json_paths}
    return {path: value for path, value in fields.items() if isinstance(value, (str, int, float))}


def files_with(model: Path, settings: Mapping[str, FieldValue]) -> dict[str, bytes]:
    """Return the content of each model.json with the ``settings``, by its path in the folder ``model``.

    A file that has all of them already keeps its content. Raises BadInputError if a file cannot be read, or if there
    are settings and no file.
    """
    folders = versions(model)
    if settings and not folders:
        raise BadInputError(f"{show_path(model)}: no version folder has a {FILE}; leave space.model_json out")
    return {f"{folder.name}/{FILE}": _content_with(folder / FILE, settings) for folder in folders}


def override_files(model: Path, changed_files: Mapping[str, bytes]) -> dict[str, bytes]:
    """Return all files that a load request has to send so that the server uses ``changed_files``, by path.

    A model that is loaded with files of the request gets only these, so that all version folders are sent. The result
    is empty if ``changed_files`` changes nothing. Raises the error of ``check_override_size``.
    """
    if all(model.joinpath(path).read_bytes() == content for path, content in changed_files.items()):
        return {}
    check_override_size(model)
    stored_files = {file.relative_to(model).as_posix(): file.read_bytes() for file in _sent_files(model)}
    return {**stored_files, **changed_files}


def check_override_size(model: Path) -> None:
    """Raise BadInputError if the version folders of the folder ``model`` are too large for a load request."""
    if (size := sum(file.stat().st_size for file in _sent_files(model))) > MAX_OVERRIDE_BYTES:
        raise BadInputError(
            f"{show_path(model)}: its version folders have {size / 1e6:,.0f} MB, and a remote server that gets "
            f"another {FILE} needs all of their files in the request, at most {MAX_OVERRIDE_BYTES >> 20} MiB: leave "
            "space.model_json out, or tune on --target local or docker"
        )


def read(file: Path) -> str:
    """Return the text of a model.json. Raises BadInputError if it is not a JSON object."""
    parse(file)
    return file.read_bytes().decode()


def parse(file: Path) -> dict[str, Any]:
    """Return the content of a model.json. Raises BadInputError."""
    name = show_path(file)
    try:
        content = json.loads(read_bytes(file, MAX_BYTES, "is this the model.json of a model?").decode())
    except (ValueError, RecursionError) as error:
        raise BadInputError(f"{name}: not JSON: {one_line(str(error), 200)}") from None
    if not isinstance(content, dict):
        raise BadInputError(f'{name}: not a JSON object; write the parameters of the engine as {{"key": value}}')
    return content


def _content_with(file: Path, settings: Mapping[str, FieldValue]) -> bytes:
    content = parse(file)
    present = {key: content[key] for key in settings if key in content}
    if present == settings and all(type(present[key]) is type(value) for key, value in settings.items()):
        return file.read_bytes()
    return (json.dumps(content | dict(settings), indent=4) + "\n").encode()


def _sent_files(model: Path) -> list[Path]:
    return [file for version in version_folders(model.iterdir()) for file in version_files(version)]
