"""The runs in a folder of results: how they are found by the names that a user gives, listed, and deleted."""

from __future__ import annotations

import contextlib
import math
import shlex
import shutil
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

from optimizer.core.errors import BadInputError, EnvironmentFault
from optimizer.core.files import stored_bytes
from optimizer.core.locks import LOCK_FILE
from optimizer.core.safe_text import exists, is_file, is_folder, one_line, quote, show_path
from optimizer.options.run_options import DEFAULTS
from optimizer.options.values import parse_path, parse_value
from optimizer.store.run_folder import (
    BATCH_FILE,
    RUN_FILE,
    STAMP,
    STAMP_FORMAT,
    SWEEP_FILE,
    WRITTEN_FORMAT,
    RunFolder,
    read_batch_document,
    read_sweep_record,
)

if TYPE_CHECKING:
    from objectives.intervals import ConfidenceInterval

LATEST = "latest"  # stands for the newest run
MAX_NAME_LENGTH = 100  # characters of a folder in a message that names a run too
DELETE_FLAG = "--delete"
MAX_TEXT_LENGTH = 100
MAX_THROUGHPUT = 1e15
BATCHES = "batches"  # the folder of results that holds the batches of suites
RecordKind: TypeAlias = Literal["run", "sweep", "batch"]
_KINDS: Mapping[str, RecordKind] = {RUN_FILE: "run", SWEEP_FILE: "sweep", BATCH_FILE: "batch"}  # by the record
OTHER_RECORDS = (BATCH_FILE, "verify.json")  # their folders are named by the time too, and are no runs


def find_run(run: str, out: str, flag: str = "--resume", *, or_batch: bool = False) -> RunFolder:
    """Return an existing run, given by its path, as ``<model>/<run>`` in ``out``, or by a name; see ``newest_run``.

    A path takes precedence over a name.

    Raises BadInputError, which begins with ``flag``, if there is no such run. With ``or_batch`` it says that the
    command takes batches too.
    """
    if (found := find_recorded(run, out)) is not None:
        return found
    if run != LATEST and (sweep := find_recorded(run, out, SWEEP_FILE)) is not None:
        raise _sweep_error(sweep.path, flag, run)
    raise not_found_error(run, out, flag, RUN_FILE, or_batch=or_batch)


def find_sweep(sweep: str, out: str, flag: str = "--resume") -> RunFolder:
    """Return an existing sweep, which is given as a run is to ``find_run``.

    Raises BadInputError, which begins with ``flag``, if there is no such sweep.
    """
    if (found := find_recorded(sweep, out, SWEEP_FILE)) is not None:
        return found
    if sweep != LATEST and (run := find_recorded(sweep, out)) is not None:
        raise BadInputError(
            f"{flag} {quote(sweep)}: is a run{_where(run.path, sweep)} and no sweep; `tune --resume "
            f"{shlex.quote(show_path(run.path))}` continues it"
        )
    raise not_found_error(sweep, out, flag, SWEEP_FILE)


def not_found_error(name: str, out: str, flag: str, record: str, *, or_batch: bool = False) -> BadInputError:
    """Return the error for a ``name`` that stands for no run, or for no sweep if ``record`` is ``SWEEP_FILE``."""
    noun, results, shown = _KINDS[record], one_line(out, MAX_NAME_LENGTH), list_command(out)
    if name == LATEST:
        return BadInputError(
            f"{flag} {LATEST}: no {noun} in {results}; give the folder of a {noun} (`{shown}` lists {noun}s)"
        )
    if error := folder_of_runs_error(name, flag, record):
        return error
    in_results = Path(out) / name
    is_inside = in_results == Path(name) or Path(name).is_relative_to(out)
    also = "" if is_inside else f" nor in {quote(str(in_results))}"
    names, listed = f"a model or {LATEST}", f"{noun}s"
    if or_batch:
        names, listed = f"a model, {LATEST} or <suite>/<batch>", "runs and batches"
    return BadInputError(
        f"{flag} {quote(name)}: no {record} there{also}, and {results} has no {noun} of a model with that name; "
        f"give a {noun}'s folder, {names} (`{shown}` lists {listed})"
    )


def folder_of_runs_error(name: str, flag: str, *accepted: str) -> BadInputError | None:
    """Return the error for a folder that holds runs or sweeps, as those of a model and of all results do.

    It is None if the folder ``name`` holds none.

    Args:
        name: The folder that the user gave.
        flag: The beginning of the error.
        accepted: The records that the command takes, ``RUN_FILE`` or ``SWEEP_FILE``, the preferred one first.
    """
    for record in (*accepted, *({RUN_FILE, SWEEP_FILE} - set(accepted))):
        if newest := next(iter(_recorded_inside(name, record)), None):
            held, path = _KINDS[record], show_path(newest)
            if record in accepted:
                advice = f"give one of them, such as the newest: {path}"
            else:
                needed = _KINDS[accepted[0]]
                advice = f"give the folder of a {needed} instead, because it holds none (newest {held}: {path})"
            return BadInputError(f"{flag} {quote(name)}: is a folder of {held}s; {advice}")
    return None


def _recorded_inside(folder: str, record: str) -> list[Path]:
    """Return the runs, or the sweeps if ``record`` is ``SWEEP_FILE``, that ``folder`` holds, the newest first.

    ``folder`` may be that of a model, or one with the folders of several models.
    """
    inside = (*subfolders(Path(folder)), *folders_in(folder)) if folder.strip() else ()
    return newest_first(path for path in inside if is_file(path / record))


def find_recorded(name: str, out: str, record: str = RUN_FILE) -> RunFolder | None:
    """Return the run, or the sweep if ``record`` is ``SWEEP_FILE``, that ``name`` stands for; None without one.

    ``name`` is a path, ``<model>/<run>`` in ``out``, or a name as for ``newest_run``. A path takes precedence.
    """
    for path in (Path(name), Path(out) / name):
        if is_file(path / record):
            return RunFolder(path)
    return newest_run(name, out, record)


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
    parents = subfolders(Path(out)) if model is None else [Path(out) / model]
    return [path for parent in parents for path in subfolders(parent)]


def newest_first(paths: Iterable[Path]) -> list[Path]:
    """Return the folders of runs in the order of their starts, the newest first."""
    return sorted(paths, key=_started, reverse=True)


def list_command(out: str) -> str:
    """Return the command that lists the runs in ``out``."""
    arguments = ["tune", "runs", *([] if out == DEFAULTS.out else ["--results", out])]
    return one_line(shlex.join(arguments), MAX_NAME_LENGTH)


def _sweep_error(sweep: Path, flag: str, run: str) -> BadInputError:
    """Return the error for a folder of a sweep, which the user gave as ``run`` in place of a run."""
    path, where = show_path(sweep), _where(sweep, run)
    tables = [shlex.quote(show_path(table)) for table in sorted(sweep.glob("trials*.csv"))]
    replayed = f"`tune replay {tables[0]}` searches in its measurements, and " if tables else ""
    return BadInputError(
        f"{flag} {quote(run)}: is a sweep{where}, which has no recommendation; {replayed}`tune sweep --resume "
        f"{shlex.quote(path)}` continues it"
    )


def _where(path: Path, name: str) -> str:
    """Return the folder ``path`` in brackets, unless it is the ``name`` that the user gave."""
    return "" if Path(name) == path else f" ({show_path(path)})"


def subfolders(folder: Path) -> list[Path]:
    """Return the folders in ``folder`` that are not hidden; none if it cannot be read."""
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


@dataclass(frozen=True, slots=True)
class ListedRun:
    """A run, sweep or batch in a folder of results. Texts of its record are on one line; unknown ones are empty.

    Attributes:
        folder: Its folder.
        kind: ``run``, or ``sweep`` and ``batch`` for what these commands measured.
        model: The model of a run of a batch; for others the name of the parent folder, which is the model or suite.
        status: ``running`` while a process measures something for it, ``killed`` if its process ended without a
            result, ``damaged`` if its record cannot be read; otherwise the status in its record.
        verdict: ``PASS``, ``UNDECIDED`` or ``FAIL``.
        throughput_infer_per_sec: That of the recommended configuration; None without one.
        throughput_interval: Its interval on fresh servers; None if it was not tested there.
        bounds: The SLA.
        written: When its record was written.
        size_bytes: The size of all its files.
        fault: Why its record cannot be read.
    """

    folder: RunFolder
    kind: RecordKind
    model: str
    status: str
    verdict: str
    throughput_infer_per_sec: float | None
    throughput_interval: ConfidenceInterval | None
    bounds: tuple[str, ...]
    written: str
    size_bytes: int
    fault: str

    @property
    def batch(self) -> str:
        """The name of the batch that the run belongs to; empty for others."""
        return one_line(self.folder.path.parent.name) if is_file(self.folder.path.parent / BATCH_FILE) else ""

    @property
    def name(self) -> str:
        """The name of the run's folder, usually its time."""
        return one_line(self.folder.path.name)

    def document(self) -> dict[str, object]:
        """Return the entry of ``tune runs --json``; unknown values are None."""
        return {
            "model": (self.model or None) if self.kind != "batch" else None,
            "run": self.name,
            "batch": self.batch or None,
            "folder": str(self.folder.path),
            "kind": self.kind,
            "status": self.status,
            "verdict": self.verdict or None,
            "throughput_infer_per_sec": self.throughput_infer_per_sec,
            "sla": list(self.bounds),
            "written": self.written or None,
            "size_bytes": self.size_bytes,
            "fault": self.fault or None,
        }


def list_runs(out: str, model: str | None = None) -> list[ListedRun]:
    """Return the runs and sweeps in ``out``, or those of one model, the newest first.

    What ``tune verify --fresh`` measured is part of its run. Raises BadInputError if ``model`` has no runs there.
    """
    listed = [describe_run(path) for path in newest_first(filter(_is_run, folders_in(out, model)))]
    if model is not None and not listed:
        models = sorted({one_line(path.parent.name) for path in folders_in(out) if _is_run(path)})
        held = f"runs of {', '.join(models)}" if models else "no runs"
        raise BadInputError(f"{quote(model)}: no run of this model; {one_line(out)} has {held}")
    return listed


def list_batches(out: str) -> list[ListedRun]:
    """Return the batches in ``out``, the newest first."""
    folders = folders_in(str(Path(out) / BATCHES))
    return [describe_run(path) for path in newest_first(path for path in folders if is_file(path / BATCH_FILE))]


def find_deletable(run: str, out: str) -> ListedRun:
    """Return the run or batch to delete, given by its path, by its name in ``out``, or as ``latest``.

    The name is ``<model>/<run>`` or ``<suite>/<batch>``. Raises BadInputError if it is a link, is not the folder of
    one run or batch, or leads out of ``out`` without being given by its path; EnvironmentFault if a process uses it.
    """
    parse_value(DELETE_FLAG, run, parse_path)
    named = f"{DELETE_FLAG} {quote(run)}"
    places = (Path(run), Path(out) / run, Path(out) / BATCHES / run)
    path = next((path for path in places if _is_link(path) or exists(path)), None)
    if path is None or (run == LATEST and not _is_run(path)):
        path = find_run(run, out, DELETE_FLAG, or_batch=True).path
    if _is_link(path):
        raise BadInputError(f"{named}: is a link; give the folder that it leads to, or remove the link with rm")
    if path != Path(run) and not path.resolve().is_relative_to(Path(out).resolve()):
        raise BadInputError(f"{named}: leads out of {one_line(out)}; give the path of the folder to delete")
    _check_is_run(named, path, out)
    if holder := _user(path):
        raise _in_use(path, holder)
    return describe_run(path)


def delete_run(run: RunFolder) -> None:
    """Delete the folder of a run, its record last, so that an interrupted deletion can be repeated.

    Raises EnvironmentFault if a process uses the run, or the disk refuses.
    """
    path = run.path.resolve()
    if holder := _user(path):
        raise _in_use(run.path, holder)
    try:
        if _is_link(path / LOCK_FILE):  # to lock the folder would write the file that the link leads to
            (path / LOCK_FILE).unlink()
        with run.locked():
            for entry in path.iterdir():
                if entry.is_dir() and not entry.is_symlink():
                    shutil.rmtree(entry)
                elif entry.name not in (*_KINDS, LOCK_FILE):
                    entry.unlink()
            shutil.rmtree(path)
    except OSError as error:
        place = one_line(str(error.filename or path))
        raise EnvironmentFault(f"cannot delete {place}: {error.strerror}; make it writable, then try again") from None


def _in_use(path: Path, holder: str) -> EnvironmentFault:
    return EnvironmentFault(f"{show_path(path)}: {holder} uses this {_kind(path)}; wait until it ends, or stop it")


def _user(path: Path) -> str | None:
    """Return the name of the process that uses a run, a sweep or a batch, or a run of the batch; None if unused."""
    folders = [path, *(subfolders(path) if _kind(path) == "batch" else ())]
    return next(filter(None, (RunFolder(folder).user() for folder in folders)), None)


def _is_link(path: Path) -> bool:
    try:
        return path.is_symlink()
    except (OSError, ValueError):  # an impossible path
        return False


def _has_record(path: Path) -> bool:
    return is_file(path / RUN_FILE) or is_file(path / SWEEP_FILE)


def _is_run(path: Path) -> bool:
    """Return whether a folder ``<out>/<model>/<run>`` is a run or a sweep, even if that ended before its record."""
    is_started = STAMP.fullmatch(path.name) is not None and is_folder(path / "logs")
    return _has_record(path) or (is_started and not any(exists(path / name) for name in OTHER_RECORDS))


def _check_is_run(named: str, path: Path, out: str) -> None:
    """Raise BadInputError unless ``path`` is certainly the folder of one run, sweep or batch, and of nothing else."""
    if is_file(path / BATCH_FILE):
        _, fault = _read_record(path)
        is_listed = path.resolve().parent.parent == (Path(out) / BATCHES).resolve()
        if not is_listed and (fault or STAMP.fullmatch(path.name) is None):
            raise BadInputError(f"{named}: not recognized as a batch: remove it with rm{fault and f'; {fault}'}")
        return
    if batches := _recorded_inside(str(path), BATCH_FILE):
        raise BadInputError(f"{named}: holds batches; give the folder of each, such as {show_path(batches[0])}")
    if runs := _recorded_inside(str(path), RUN_FILE):
        raise BadInputError(f"{named}: holds runs; give the folder of each, such as {show_path(runs[0])}")
    is_in_out = path.resolve().parent.parent == Path(out).resolve()
    if not _has_record(path) and not (is_in_out and _is_run(path)):
        shown = list_command(out)
        raise BadInputError(f"{named}: no {RUN_FILE} there; give the folder of a run (`{shown}` lists runs)")
    _, fault = _read_record(path)
    if fault and not is_in_out and STAMP.fullmatch(path.name) is None:
        raise BadInputError(f"{named}: not recognized as a run: remove it with rm; {fault}")


def _kind(path: Path) -> RecordKind:
    return next((kind for record, kind in _KINDS.items() if is_file(path / record)), "run")


def describe_run(path: Path) -> ListedRun:
    """Return the run, sweep or batch in a folder, also if its record cannot be read."""
    folder, (info, fault) = RunFolder(path), _read_record(path)
    status = _text(info.get("status")) or "unknown"
    if folder.writer():
        status, fault = "running", ""  # a new run has no record yet
    elif fault:
        status = "damaged"
    elif status == "running":
        status = "killed"
    problem, result = _mapping(info.get("problem")), _mapping(info.get("result"))
    bounds = problem.get("constraints")
    model = path.absolute().parent.name
    if is_file(path.parent / BATCH_FILE):
        model = _text(problem.get("model")) or _text(_mapping(info.get("options")).get("model"))
    return ListedRun(
        folder=folder,
        kind=_kind(path),
        model=one_line(model),
        status=status,
        verdict=_text(info.get("verdict") or result.get("verdict")),
        throughput_infer_per_sec=_throughput(_mapping(result.get("recommended")).get("throughput_infer_per_sec")),
        throughput_interval=_interval(_mapping(result.get("confirmation")).get("throughput_infer_per_sec")),
        bounds=tuple(filter(None, map(_text, bounds))) if isinstance(bounds, list) else (),
        written=_text(info.get("written") or info.get("began")),
        size_bytes=stored_bytes(path),
        fault=fault,
    )


def _read_record(path: Path) -> tuple[Mapping[str, Any], str]:
    """Return the record of a run, sweep or batch, or why it cannot be read."""
    try:
        readers = {"run": _read_run, "sweep": read_sweep_record, "batch": read_batch_document}
        return readers[_kind(path)](path), ""
    except BadInputError as error:
        return {}, str(error)


def _read_run(path: Path) -> Mapping[str, Any]:
    """Return run.json. Raises BadInputError if it is not the record of a run."""
    folder = RunFolder(path)
    info = folder.read_info()
    if not isinstance(info.get("options"), dict):
        raise folder.no_record("no 'options'")
    return info


def _mapping(value: object) -> Mapping[str, Any]:
    return value if isinstance(value, dict) else {}


def _text(value: object) -> str:
    return one_line(value, MAX_TEXT_LENGTH) if isinstance(value, str) else ""


def _throughput(value: object) -> float | None:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= MAX_THROUGHPUT:
        return None  # also for NaN
    return float(value)


def _interval(value: object) -> ConfidenceInterval | None:
    from objectives.intervals import ConfidenceInterval  # imports numpy, which would make help and errors slow

    ends = [_throughput(end) for end in value] if isinstance(value, list) else []
    if len(ends) != 2 or (low := ends[0]) is None:
        return None
    return ConfidenceInterval(low, math.inf if ends[1] is None else ends[1])
