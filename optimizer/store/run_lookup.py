"""Finds the folders of runs and sweeps by the names that a user gives."""

from __future__ import annotations

import contextlib
import shlex
import time
from collections.abc import Iterable
from datetime import datetime
from pathlib import Path

from optimizer.core.errors import BadInputError
from optimizer.core.safe_text import is_file, is_folder, one_line, quote, show_path
from optimizer.options.option import DEFAULTS
from optimizer.store.run_folder import RUN_FILE, STAMP, STAMP_FORMAT, SWEEP_FILE, WRITTEN_FORMAT, RunFolder

LATEST = "latest"  # stands for the newest run
MAX_NAME_LENGTH = 100  # characters of a folder in a message that names a run too


def find_run(run: str, out: str, flag: str = "--resume") -> RunFolder:
    """Return an existing run, given by its path, as ``<model>/<run>`` in ``out``, or by a name; see ``newest_run``.

    A path takes precedence over a name.

    Raises BadInputError, which begins with ``flag``, if there is no such run.
    """
    in_results = Path(out) / run
    for path in (Path(run), in_results):
        if is_file(path / RUN_FILE):
            return RunFolder(path)
    if (newest := newest_run(run, out)) is not None:
        return newest
    if (sweep := _find_sweep(run, out)) is not None:
        raise _sweep_error(sweep, flag, run)
    results, shown = one_line(out, MAX_NAME_LENGTH), list_command(out)
    if run == LATEST:
        raise BadInputError(f"{flag} {LATEST}: no run in {results}; give the folder of a run (`{shown}` lists runs)")
    also = "" if in_results == Path(run) or Path(run).is_relative_to(out) else f" nor in {quote(str(in_results))}"
    raise BadInputError(
        f"{flag} {quote(run)}: no {RUN_FILE} there{also}, and {results} has no run of such a model; "
        f"give a run's folder, a model or {LATEST} (`{shown}` lists runs)"
    )


def newest_run(name: str, out: str, record: str = RUN_FILE) -> RunFolder | None:
    """Return the newest run in ``out`` that ``name`` stands for; None if there is none.

    ``latest`` stands for the newest run, and the name of a model for its newest run. With ``SWEEP_FILE`` as
    ``record`` it is a sweep.
    """
    is_name = Path(name).name == name.rstrip("/") and name not in ("", "..")
    model = None if name == LATEST else name
    return next(iter(runs_in(out, model, record)), None) if is_name else None


def runs_in(out: str, model: str | None = None, record: str = RUN_FILE) -> list[RunFolder]:
    """Return the runs in ``out``, or those of one model, the newest first. Runs of batches are not among them."""
    return [RunFolder(path) for path in newest_first(p for p in folders_in(out, model) if is_file(p / record))]


def folders_in(out: str, model: str | None = None) -> list[Path]:
    """Return the folders in which the runs of ``model``, or of all models, may be: ``<out>/<model>/<run>``."""
    parents = _subfolders(Path(out)) if model is None else [Path(out) / model]
    return [path for parent in parents for path in _subfolders(parent)]


def newest_first(paths: Iterable[Path]) -> list[Path]:
    """Return the folders of runs in the order of their starts, the newest first."""
    return sorted(paths, key=_started, reverse=True)


def list_command(out: str) -> str:
    """Return the command that lists the runs in ``out``."""
    arguments = ["tune", "runs", *([] if out == DEFAULTS.out else ["--results", out])]
    return one_line(shlex.join(arguments), MAX_NAME_LENGTH)


def _find_sweep(run: str, out: str) -> Path | None:
    """Return the folder of the sweep that ``run`` stands for as in ``find_run``; None if there is none."""
    for path in (Path(run), Path(out) / run):
        if is_file(path / SWEEP_FILE):
            return path
    newest = None if run == LATEST else newest_run(run, out, SWEEP_FILE)
    return newest.path if newest else None


def _sweep_error(sweep: Path, flag: str, run: str) -> BadInputError:
    """Return the error for a folder of a sweep, which the user gave as ``run`` in place of a run."""
    path = show_path(sweep)
    where = "" if Path(run) == sweep else f" ({path})"
    tables = [shlex.quote(show_path(table)) for table in sorted(sweep.glob("trials*.csv"))]
    replayed = f"`tune replay {tables[0]}` searches in its measurements, and " if tables else ""
    return BadInputError(
        f"{flag} {quote(run)}: is a sweep{where}, which has no recommendation; {replayed}`tune sweep --resume "
        f"{shlex.quote(path)}` continues it"
    )


def _subfolders(folder: Path) -> list[Path]:
    try:
        return [path for path in folder.iterdir() if is_folder(path) and not path.name.startswith(".")]
    except (OSError, ValueError):
        return []


def _started(path: Path) -> tuple[float, int, float]:
    """Return when a run started: the time in its name, else that in its record; then when the record was written."""
    modified = 0.0
    for file in (path, path / RUN_FILE):
        with contextlib.suppress(OSError):
            modified = file.stat().st_mtime
    match = STAMP.fullmatch(path.name)
    with contextlib.suppress(BadInputError, ValueError, OverflowError):
        if match:
            return time.mktime(time.strptime(match[1], STAMP_FORMAT)), int(match[2] or 1), modified
        written = str(RunFolder(path).read_info().get("written"))
        return datetime.strptime(written, WRITTEN_FORMAT).timestamp(), 1, modified
    return modified, 1, modified
