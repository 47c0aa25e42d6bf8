"""The folder of a run: its files, its record ``run.json``, and the options it was started with."""

from __future__ import annotations

import contextlib
import json
import os
import re
import tempfile
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, Final

from objectives.sla import Sla
from optimizer.core.errors import BadInputError, ChangedRunError, TuneError
from optimizer.core.files import DISK_FAULTS, write_atomically, write_error
from optimizer.core.locks import LOCK_FILE, folder_lock, lock_holder
from optimizer.core.safe_text import one_line, printable, read_bytes, show_path
from optimizer.core.signature import is_signed, sign
from optimizer.machine.hardware import Fingerprint, parse_fingerprint
from optimizer.options.option_reader import external_values, move_options
from optimizer.options.run_options import RunOptions

SCHEMA_VERSION = 1  # raised with every change of run.json that an older or newer tune would misread
MAX_INFO_BYTES = 64 << 20  # limit for a record, which may come from anywhere
MAX_REASON_LENGTH = 200  # characters of a fault in a message
RUN_FILE, SWEEP_FILE, BATCH_FILE = "run.json", "sweep.json", "batch.json"  # the records of a run, sweep and batch
ENDED: Final = ("found", "none")  # the states of a run that ended normally
MODEL_HASH, HASH_DIGITS = "sha256", 12  # fact of a model whose files were hashed, and how much of it is shown
STAMP = re.compile(r"([0-9]{8}-[0-9]{6})(?:-([0-9]{1,2}))?")  # the name of a folder that new_folder makes
STAMP_FORMAT = "%Y%m%d-%H%M%S"
WRITTEN_FORMAT = "%Y-%m-%dT%H:%M:%S%z"  # form of the times in a record


class FileIn:
    """An attribute of a folder's class: the path of the file ``name`` in the folder."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __get__(self, folder: Any, owner: type) -> Path:
        return Path(folder.path, self._name)


def new_folder(out: str, parent: str, inner: str = "") -> Path:
    """Create a folder named after the time in the folder ``parent`` of ``out``, with a folder ``inner``. Return it.

    Raises BadInputError if ``out`` cannot be written, EnvironmentFault if its disk is full or faulty.
    """
    stamp = time.strftime(STAMP_FORMAT)
    path = Path(out) / parent
    try:
        path.mkdir(parents=True, exist_ok=True)
        for name in (stamp, *(f"{stamp}-{i}" for i in range(2, 100))):
            with contextlib.suppress(FileExistsError):
                (path / name).mkdir()
                (path / name / inner).mkdir(exist_ok=True)
                return path / name
    except OSError as error:
        raise _unwritable(out, error) from None
    raise BadInputError(f"results folder {path}: too many runs started in this second; try again")


def describe_model_change(recorded: object, facts: Mapping[str, object]) -> str:
    """Return both SHA-256 of a model's files if those with the ``recorded`` facts differ; empty if one is unknown."""
    before = recorded.get(MODEL_HASH) if isinstance(recorded, dict) else None
    now = facts.get(MODEL_HASH)
    if not before or not now or before == now:
        return ""
    return f"SHA-256 {one_line(str(before)[:HASH_DIGITS])}, now {str(now)[:HASH_DIGITS]}"


@dataclass(frozen=True, slots=True)
class RunFolder:
    """The files of a run below ``path``.

    These are ``run.json`` (the record of the run), ``trials.csv`` (every measurement), ``pareto.csv``,
    ``best/config.pbtxt``, ``baseline/config.pbtxt``, ``report.html``, ``study.journal`` (the Optuna study) and
    ``logs/``.
    """

    path: Path

    info = FileIn(RUN_FILE)
    trials = FileIn("trials.csv")
    pareto = FileIn("pareto.csv")
    best = FileIn("best")  # the folder of the recommendation: config.pbtxt, or with several models a folder for each
    report = FileIn("report.html")
    study = FileIn("study.journal")
    baseline = FileIn("baseline")  # the configuration that the run started from, with files as in best/
    reference = FileIn("reference.npz")
    server_log = FileIn("logs/tritonserver.log")
    perf_analyzer_log = FileIn("logs/perf_analyzer.log")

    @property
    def best_config(self) -> Path:
        """The recommended ``config.pbtxt``, or the folder of several."""
        single = self.best / "config.pbtxt"
        return single if single.exists() else self.best

    def reference_of(self, model: str) -> Path:
        """Return the file of reference outputs of ``model``, which gets load at the same time as the tuned one."""
        return self.path / f"reference-{model}.npz"

    @property
    def study_name(self) -> str:
        """Return ``<model>/<run>``, the last two names of the absolute path."""
        path = self.path.resolve()
        return f"{path.parent.name}/{path.name}"

    @staticmethod
    def check(out: str) -> None:
        """Raise BadInputError if ``create`` would; nothing is left on disk."""
        folder = Path(out).absolute()
        try:
            existing = next(path for path in (folder, *folder.parents) if path.exists())
            Path(tempfile.mkdtemp(prefix=".tune-", dir=existing)).rmdir()
        except OSError as error:
            raise _unwritable(out, error) from None

    @classmethod
    def create(cls, out: str, model: str) -> RunFolder:
        """Create and return a folder named after the time. Raises BadInputError if ``out`` cannot be written."""
        return cls(new_folder(out, model, "logs"))

    def writer(self) -> str | None:
        """Return the name of the process that measures something for the run now; None if there is none.

        It continues the run, verifies it, or is the batch that the run belongs to.
        """
        folders = (self.path, self.path.parent, *self.path.glob("verify/*"))
        return _first_holder(folders)

    def user(self) -> str | None:
        """Return the name of the process that uses the run now: its writer, or one that serves it; None if unused."""
        return self.writer() or _first_holder(self.path.glob("serve/*"))

    def refuse_links(self) -> None:
        """Raise BadInputError if the folder has links: it may come from anywhere, and a continued run writes them."""
        for path in sorted((*self.path.glob("*"), *self.path.glob("*/*"))):
            if path.is_symlink():
                raise BadInputError(
                    f"{show_path(path)}: is a link, and the run would write the file that it leads to; replace "
                    "it by that file"
                )

    def locked(self) -> AbstractContextManager[None]:
        """Return a lock of the folder. Entering it raises EnvironmentFault if another process holds it."""
        return folder_lock(self.path, "this run")

    def read_options(self) -> RunOptions:
        """Return the options of the run, with relative paths rewritten so that they hold in the current folder.

        Raises BadInputError if run.json is not the record of a run, or has another schema_version.
        """
        from pydantic import TypeAdapter, ValidationError  # imported late, so that a wrong flag is reported at once

        try:
            info = self._read_document()
            options = info["options"]
            unknown = set(options) - {field.name for field in fields(RunOptions)}
            if unknown:
                raise ValueError(f"unknown option {min(unknown)!r}")
            parsed = TypeAdapter(RunOptions).validate_json(json.dumps(options), strict=True)
            Sla.from_bounds(parsed.sla_ms)  # a name that is not a metric is a ValueError
            started_in = Path(os.path.realpath(self.path / info.get("started_in", Path.cwd())))
            return move_options(started_in, parsed)
        except ValidationError as error:
            fault = error.errors()[0]
            key = ".".join(map(str, ("options", *fault["loc"])))
            raise self.no_record(f"{key}: {fault['msg']}") from None
        except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
            raise self.no_record(error) from None

    def is_own(self, options: RunOptions) -> bool:
        """Return whether tune wrote the external values of ``options`` into run.json for this user on this machine.

        The options are those that ``read_options`` returns. Raises BadInputError as ``read_options``.
        """
        return is_signed(external_values(options), self._read_document().get("signature"))

    def refuse_other_bounds(self, bounds: list[str]) -> None:
        """Raise ChangedRunError if the SLA of the run is not ``bounds``, in text form; also as ``read_info``."""
        try:
            recorded = [str(bound) for bound in self.read_info()["problem"]["constraints"]]
        except (KeyError, TypeError) as error:
            raise self.no_record(error) from None
        if bounds != recorded:
            before = one_line(", ".join(recorded) or "no bounds", MAX_REASON_LENGTH)
            raise ChangedRunError(
                f"{show_path(self.path)}: the run had {before}, but its profile now has "
                f"{', '.join(bounds) or 'none'}; restore the profile, or run `tune` again"
            )

    def refuse_other_model(self, facts: Mapping[str, object]) -> None:
        """Raise ChangedRunError if the run measured other model files than those with ``facts`` of ModelSource."""
        problem = self.read_info().get("problem")
        if change := describe_model_change(problem.get("facts") if isinstance(problem, dict) else None, facts):
            raise ChangedRunError(
                f"{show_path(self.path)}: the files of the model have changed since the run ({change}), and the "
                "measurements of both are not ranked together; restore the files, or run `tune` again"
            )

    def fingerprint(self) -> Fingerprint | None:
        """Return the fingerprint of the device and server of the run; None if it is not known."""
        return parse_fingerprint(self.read_info().get("fingerprint")) if self.info.exists() else None

    def refuse_other(self, fingerprint: Fingerprint) -> None:
        """Raise ChangedRunError if the run was measured with another fingerprint."""
        measured_on = self.fingerprint()
        if measured_on is not None and measured_on != fingerprint:
            path = show_path(self.path)
            raise ChangedRunError(
                f"{path}: was measured with another device, server or perf_analyzer "
                f"({fingerprint.differences(measured_on)}), and the two are not ranked together; begin a new run "
                f"(--warm-start {path} learns from that one), or measure its recommendation here: "
                f"`tune verify --fresh {path}`"
            )

    def read_info(self) -> Mapping[str, Any]:
        """Return run.json, with its texts as ``one_line`` returns them: the file may come from anywhere.

        Raises BadInputError if it is not the record of a run, or has another schema_version.
        """
        try:
            info: Mapping[str, Any] = printable(self._read_document())
        except RecursionError as error:
            raise self.no_record(error) from None
        return info

    def _read_document(self) -> Mapping[str, Any]:
        try:
            info = json.loads(read_bytes(self.info, MAX_INFO_BYTES, "give the folder of a run"))
        except (OSError, ValueError, RecursionError) as error:
            raise self.no_record(error) from None
        if not isinstance(info, dict):
            raise self.no_record("not a JSON object")
        if "schema_version" not in info:
            raise self.no_record("no 'schema_version'")
        if info["schema_version"] != SCHEMA_VERSION:
            version = one_line(repr(info["schema_version"]), MAX_REASON_LENGTH)
            raise BadInputError(
                f"{show_path(self.info)}: schema_version {version}, but this version of tune reads "
                f"{SCHEMA_VERSION}; use the version that wrote it, or begin a new run"
            )
        return info

    def no_record(self, fault: str | Exception) -> BadInputError:
        """Return the error for a run.json that is damaged or belongs to another program.

        A KeyError as ``fault`` names a key that is missing.
        """
        return damaged_record(self.info, "run", fault)

    def write_info(self, options: RunOptions, facts: Mapping[str, Any]) -> None:
        """Write run.json: ``options``, the folder that their relative paths start from, a signature, and ``facts``.

        Raises EnvironmentFault if it cannot be written.
        """
        started_in = os.path.relpath(Path.cwd(), self.path.resolve())
        head = {"schema_version": SCHEMA_VERSION, "options": asdict(options), "started_in": started_in}
        info = {**head, "signature": sign(external_values(options)), **facts}
        write_atomically(self.info, json.dumps(info, indent=2) + "\n")

    def update_info(self, facts: Mapping[str, Any]) -> None:
        """Replace the keys of ``facts`` in run.json. All other keys keep their values.

        Raises BadInputError as ``read_info``, and EnvironmentFault if it cannot be written.
        """
        write_atomically(self.info, json.dumps({**self._read_document(), **facts}, indent=2) + "\n")


def damaged_record(path: Path, kind: str, fault: str | Exception) -> BadInputError:
    """Return the error for the record of a run, a sweep or a batch that is damaged or belongs to another program.

    A KeyError as ``fault`` names a key that is missing.
    """
    why = one_line(f"no {fault}" if isinstance(fault, KeyError) else str(fault), MAX_REASON_LENGTH)
    return BadInputError(
        f"{show_path(path)}: not the record of a {kind} ({why}); restore the file, or begin a new {kind}"
    )


def read_sweep_record(folder: Path) -> dict[str, Any]:
    """Return sweep.json in ``folder``, whose ``options`` are a mapping; other keys are not checked.

    Raises BadInputError if it is not the record of a sweep.
    """
    return _read_record(folder / SWEEP_FILE, "sweep", "options", dict)


def read_batch_document(folder: Path) -> dict[str, Any]:
    """Return batch.json in ``folder``, whose ``entries`` are a list; other keys are not checked.

    Raises BadInputError if it is not the record of a batch.
    """
    return _read_record(folder / BATCH_FILE, "batch", "entries", list)


def _read_record(path: Path, noun: str, key: str, key_type: type) -> dict[str, Any]:
    try:
        record = json.loads(read_bytes(path, MAX_INFO_BYTES, f"give the folder of a {noun}"))
        if not isinstance(record[key], key_type):
            raise ValueError(f"{key} has another type")
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise damaged_record(path, noun, error) from None
    return dict(record)


def _first_holder(folders: Iterable[Path]) -> str | None:
    return next(filter(None, (lock_holder(folder / LOCK_FILE) for folder in folders)), None)


def model_files(folder: Path) -> list[Path]:
    """Return each model.json below ``best/`` or ``baseline/``: in a version folder, or in one of a model's folder."""
    return sorted([*folder.glob("*/model.json"), *folder.glob("*/*/model.json")])


def write_configs(
    folder: Path, configs: Mapping[str, str], server_options: Sequence[str], files: Mapping[str, str]
) -> None:
    """Write config.pbtxt texts, by model, and the options of the server, one a line, to ``best/`` or ``baseline/``.

    ``files`` are the texts of each changed model.json, by path below the model repository. Each file is written
    atomically. Raises EnvironmentFault if it cannot be.
    """
    for old in model_files(folder):
        old.unlink()
    options_file = folder / "server_options"
    options_file.unlink(missing_ok=True)
    if server_options:
        write_atomically(options_file, "\n".join(server_options) + "\n")
    if len(configs) == 1:
        (text,) = configs.values()
        write_atomically(folder / "config.pbtxt", text)
    else:
        try:
            folder.mkdir(exist_ok=True)
        except OSError as error:
            raise write_error(folder, error) from error
        for name, text in configs.items():
            write_atomically(folder / name / "config.pbtxt", text)
    for path, text in files.items():
        write_atomically(folder / (path.partition("/")[2] if len(configs) == 1 else path), text)


def remove_configs(folder: Path) -> None:
    """Remove the files that ``write_configs`` wrote to ``best/``. Raises EnvironmentFault."""
    configs = (*folder.glob("config.pbtxt"), *folder.glob("*/config.pbtxt"))
    for old in (*configs, *model_files(folder), folder / "server_options"):
        try:
            old.unlink(missing_ok=True)
        except OSError as error:
            raise write_error(old, error) from error


def _unwritable(out: str, error: OSError) -> TuneError:
    if error.errno in DISK_FAULTS:
        return write_error(Path(out), error, "run the command again")
    return BadInputError(f"results folder {out}: cannot write there ({error.strerror}); choose another with --out")
