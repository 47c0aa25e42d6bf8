"""Profiles by name: in ``./configs``, then among those installed with the package."""

from __future__ import annotations

import contextlib
import difflib
from dataclasses import dataclass
from pathlib import Path

from optimizer.errors import BadInputError
from optimizer.profile import yaml_lines
from optimizer.profile.reader import read_profile_bytes
from optimizer.profile.safe_paths import is_file, plain_name
from optimizer.untrusted import one_line


@dataclass(frozen=True, slots=True)
class Listed:
    """A profile that can be asked for by ``name``."""

    name: str
    path: Path

    @property
    def description(self) -> str:
        """Its first line, or why it has none; reads the file."""
        return _description(self.path)


def find_profile(argument: str) -> Path:
    """The file that ``argument`` means: a ``.yaml``/``.yml`` path, else a name (``dlrm``).

    Raises BadInputError, with the nearest names and where it looked.
    """
    if argument.endswith((".yaml", ".yml")):
        path = Path(argument)
        if not is_file(path):
            raise BadInputError(f"{one_line(argument)}: no such file; `tune models` lists what has a name")
        return path
    try:
        name = plain_name(argument)
    except ValueError as error:
        raise BadInputError(f"no model {error}; `tune models` lists the names") from None
    for folder in profile_folders():
        path = folder / f"{name}.yaml"
        if is_file(path):
            return path
    nearest = difflib.get_close_matches(name, [listed.name for listed in list_profiles()], n=3)
    meant = f"did you mean {' or '.join(nearest)}? " if nearest else ""
    looked = " and ".join(str(folder.absolute()) for folder in dict.fromkeys(profile_folders()))
    raise BadInputError(f"no model {name!r} in {looked}: {meant}`tune models` lists them")


def list_profiles() -> list[Listed]:
    """Every profile that can be named, by name; the one found first hides others of its name."""
    found: dict[str, Listed] = {}
    for folder in profile_folders():
        for path in folder.glob("*.yaml"):
            with contextlib.suppress(ValueError):  # of what is no name
                name = plain_name(path.stem)
                if name not in found and is_file(path):
                    found[name] = Listed(name, path)
    return sorted(found.values(), key=lambda listed: listed.name)


def profile_folders() -> tuple[Path, ...]:
    """Where names are looked up, in this order."""
    package = Path(__file__).parents[1]
    installed = package / "configs"
    checkout = package.parent
    if not installed.is_dir() and (checkout / "pyproject.toml").is_file():  # an editable install
        installed = checkout / "configs"
    return Path("configs"), installed


def _description(path: Path) -> str:
    """Leniently: a profile with faults is listed, and says so."""
    try:
        root = yaml_lines.parse(read_profile_bytes(path), str(path)).plain()
    except BadInputError as error:
        return f"(cannot be read: {error})"
    text = root.get("description", "") if isinstance(root, dict) else ""
    return one_line(text.strip().partition("\n")[0]) if isinstance(text, str) else ""
