"""Find profiles by their path or name, and the models and profiles with similar names.

It imports little, because the shell's completion lists the profiles.
"""

from __future__ import annotations

import contextlib
import difflib
from collections.abc import Collection
from pathlib import Path

from optimizer.core.errors import BadInputError
from optimizer.core.files import shipped_folder
from optimizer.core.safe_text import check_file_name, exists, format_value, is_file, one_line, show_path

TORCH_ENDINGS = (".pt", ".pt2", ".pth")
MODEL_ENDINGS = (".onnx", *TORCH_ENDINGS)
PROFILE_ENDINGS = (".yaml", ".yml")


def find_profile(argument: str) -> Path:
    """Return the file of a profile given by its path (``.yaml``, ``.yml``) or by name (``dlrm``).

    Raises BadInputError with the most similar names and the folders searched.
    """
    if argument.endswith(PROFILE_ENDINGS):
        path = Path(argument)
        if not is_file(path):
            raise BadInputError(
                f"{one_line(argument)}: no such file; {_hint(argument)}`tune models` lists the profiles with a name"
            )
        return path
    if "/" in argument:
        raise _no_model(argument, "no such file or folder")
    try:
        name = check_file_name(argument)
    except ValueError as error:
        raise BadInputError(f"{error}; `tune models` lists the names") from None
    for folder in profile_folders():
        path = folder / f"{name}.yaml"
        if is_file(path):
            return path
    if exists(Path(argument)):
        raise _no_model(argument)
    hint = _hint(name, list_profiles())
    searched = " and ".join(dict.fromkeys(str(folder.absolute()) for folder in profile_folders()))
    raise BadInputError(f"no model {format_value(name)} in {searched}: {hint}`tune models` lists them")


def _no_model(argument: str, problem: str = "is no profile, ONNX file or model folder") -> BadInputError:
    """Return the error about a path that is none of a model; ``problem`` is for one that does not exist."""
    path = Path(argument)
    if exists(path):
        problem = "is no profile, ONNX file or model folder"
    kinds = "give a .yaml or .onnx file, the folder of a Triton model, or a name from `tune models`"
    if path.name == "config.pbtxt" and exists(path):
        kinds = f"give the folder of the model, {show_path(path.parent)}"
    return BadInputError(f"{one_line(argument)}: {problem}; {_hint(argument)}{kinds}")


def _hint(argument: str, names: Collection[str] = ()) -> str:
    """Return a question with the ``names`` and the files similar to ``argument``, and a blank; empty without any."""
    similar = [*difflib.get_close_matches(argument, names, n=3), *similar_models(Path(argument))]
    return f"did you mean {' or '.join(similar)}? " if similar else ""


def list_profiles() -> dict[str, Path]:
    """Return the file of every profile that has a name, ordered by name; earlier folders come first."""
    profiles: dict[str, Path] = {}
    for folder in profile_folders():
        for path in folder.glob("*.yaml"):
            with contextlib.suppress(ValueError):  # the file name cannot be a profile's name
                name = check_file_name(path.stem)
                if name not in profiles and is_file(path):
                    profiles[name] = path
    return dict(sorted(profiles.items()))


def profile_folders() -> tuple[Path, ...]:
    """Return the folders that are searched for a name, in this order."""
    return Path("configs"), shipped_folder("configs")


def similar_models(missing: Path) -> list[str]:
    """Return the paths of the models and profiles whose names are the most similar to ``missing``, in its folder."""
    try:
        names = [path.name for path in missing.parent.iterdir() if _may_be_model(path) and path != missing]
    except (OSError, ValueError):  # no such folder, or an impossible path
        return []
    return [show_path(missing.parent / name) for name in difflib.get_close_matches(missing.name, names, n=2)]


def _may_be_model(path: Path) -> bool:
    return is_file(path / "config.pbtxt") or (path.suffix in (*MODEL_ENDINGS, *PROFILE_ENDINGS) and is_file(path))
