"""What the recommendation changes in config.pbtxt, as a patch of the baseline's."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from pathlib import Path

from optimizer.errors import BadInputError
from optimizer.model_config import MAX_BYTES
from optimizer.profile.safe_paths import inside, is_folder, plain_name
from optimizer.report import words
from optimizer.store.finished import FinishedRun
from optimizer.untrusted import read_bytes

CONFIG = "config.pbtxt"
MOST_MODELS = 64  # of an ensemble


def recommended_configs(run: FinishedRun) -> dict[str, str]:
    """The files in best/ by their path there; empty where nothing is recommended, or they are gone."""
    recommends = run.outcome is not None and run.outcome.recommended is not None
    return _configs(run, run.folder.best) if recommends else {}


def config_diff(run: FinishedRun) -> str:
    """A patch in the unified format, empty where nothing changes; of the tuned settings alone where the run is one of
    an earlier version, which did not keep the baseline's file."""
    best = run.outcome.recommended if run.outcome else None
    if best is None:
        return ""
    before, after = _configs(run, run.folder.baseline), recommended_configs(run)
    if not before or not after:
        before = {"settings": "\n".join(words.triton_lines(run.baseline)) + "\n"}
        after = {"settings": "\n".join(words.triton_lines(best.candidate)) + "\n"}
    names = dict.fromkeys([*before, *after])
    return "".join(_patch(name, before.get(name, ""), after.get(name, "")) for name in names)


def _patch(name: str, before: str, after: str) -> str:
    patch = difflib.unified_diff(
        before.splitlines(), after.splitlines(), f"baseline/{name}", f"best/{name}", lineterm=""
    )
    return "".join(f"{line}\n" for line in patch)


def _configs(run: FinishedRun, folder: Path) -> dict[str, str]:
    """config.pbtxt of ``folder``, or those of its models; links that lead out of the run are not followed."""
    found = [CONFIG]
    if is_folder(folder):
        found += [f"{one.name}/{CONFIG}" for one in sorted(folder.iterdir())[:MOST_MODELS] if _is_model(one)]
    texts: Mapping[str, str | None] = {name: _text(run.folder.path, f"{folder.name}/{name}") for name in found}
    return {name: text for name, text in texts.items() if text is not None}


def _is_model(folder: Path) -> bool:
    try:
        return bool(plain_name(folder.name)) and is_folder(folder)
    except ValueError:
        return False


def _text(run: Path, name: str) -> str | None:
    try:
        return read_bytes(inside(run, name), MAX_BYTES, "is this a config.pbtxt?").decode(errors="replace")
    except (BadInputError, ValueError):
        return None
