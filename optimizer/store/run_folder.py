"""The folder of one run, ``results/<model>/<run>/``: what is kept, and how it is found again."""

from __future__ import annotations

import json
import os
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError

from optimizer.errors import BadInputError
from optimizer.machine.fingerprint import Fingerprint, read
from optimizer.options import RunOptions
from optimizer.profile.safe_paths import is_file
from optimizer.store.disk import cannot_write, write_whole
from optimizer.store.locks import alone_in
from optimizer.store.relative_paths import as_given_in
from optimizer.untrusted import one_line, read_bytes

MAX_INFO_BYTES = 64 << 20
LONGEST_WHY = 200
RUN_OPTIONS = TypeAdapter(RunOptions)


@dataclass(frozen=True, slots=True)
class RunFolder:
    """``run.json`` (the run), ``trials.csv`` (every measurement), ``pareto.csv``, ``best/config.pbtxt``,
    ``baseline/config.pbtxt``, ``report.html``, ``study.journal`` (the Optuna study), ``logs/``."""

    path: Path

    @property
    def info(self) -> Path:
        return self.path / "run.json"

    @property
    def trials(self) -> Path:
        return self.path / "trials.csv"

    @property
    def pareto(self) -> Path:
        return self.path / "pareto.csv"

    @property
    def best(self) -> Path:
        """The folder of what is recommended: ``config.pbtxt``, or a folder with one for each model of several."""
        return self.path / "best"

    @property
    def best_config(self) -> Path:
        """What to load: a file, or the folder of several."""
        single = self.best / "config.pbtxt"
        return single if single.exists() else self.best

    @property
    def report(self) -> Path:
        return self.path / "report.html"

    @property
    def study(self) -> Path:
        return self.path / "study.journal"

    @property
    def baseline(self) -> Path:
        """As ``best``, of the configuration that the run started from."""
        return self.path / "baseline"

    @property
    def reference(self) -> Path:
        return self.path / "reference.npz"

    def reference_of(self, model: str) -> Path:
        """That of a model which gets load beside the run's own."""
        return self.path / f"reference-{model}.npz"

    @property
    def server_log(self) -> Path:
        return self.path / "logs" / "tritonserver.log"

    @property
    def perf_analyzer_log(self) -> Path:
        return self.path / "logs" / "perf_analyzer.log"

    @property
    def study_name(self) -> str:
        return f"{self.path.parent.name}/{self.path.name}"

    @staticmethod
    def check(out: str) -> None:
        """Raises BadInputError where ``create`` would, and leaves nothing behind."""
        folder = Path(out).absolute()
        try:
            there = next(path for path in (folder, *folder.parents) if path.exists())
            Path(tempfile.mkdtemp(prefix=".tune-", dir=there)).rmdir()
        except OSError as error:
            raise _unwritable(out, error) from None

    @classmethod
    def create(cls, out: str, model: str) -> RunFolder:
        """A new folder named by the time. Raises BadInputError where ``out`` cannot be written."""
        stamp = time.strftime("%Y%m%d-%H%M%S")
        parent = Path(out) / model
        try:
            parent.mkdir(parents=True, exist_ok=True)
            for name in (stamp, *(f"{stamp}-{i}" for i in range(2, 100))):
                try:
                    (parent / name).mkdir()
                except FileExistsError:
                    continue
                (parent / name / "logs").mkdir()
                return cls(parent / name)
        except OSError as error:
            raise _unwritable(out, error) from None
        raise BadInputError(f"results folder {parent}: too many runs began this second")

    @classmethod
    def find(cls, run: str, out: str, flag: str = "--resume") -> RunFolder:
        """An existing run, by its path or by ``<model>/<run>`` in ``out``. Raises BadInputError."""
        for path in (Path(run), Path(out) / run):
            if is_file(path / "run.json"):
                return cls(path)
        raise BadInputError(f"{flag} {run}: no run.json there nor in {Path(out) / run}; give a run's folder")

    def locked(self) -> AbstractContextManager[None]:
        """Keep others out of the folder. Raises EnvironmentFault naming the process that is at work in it."""
        return alone_in(self.path, "this run")

    def read_options(self) -> RunOptions:
        """The options that the run was started with; relative paths among them as they are seen from here.

        Raises BadInputError where run.json is not one of ours.
        """
        try:
            info = self.read_info()
            options = info["options"]
            unknown = set(options) - {field.name for field in fields(RunOptions)}
            if unknown:
                raise ValueError(f"unknown option {min(unknown)!r}")
            given = RUN_OPTIONS.validate_json(json.dumps(options), strict=True)
            started_in = Path(os.path.realpath(self.path / info.get("started_in", Path.cwd())))
            return as_given_in(started_in, given)
        except ValidationError as error:
            fault = error.errors()[0]
            key = ".".join(map(str, ("options", *fault["loc"])))
            raise self.no_record(f"{key}: {fault['msg']}") from None
        except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
            raise self.no_record(f"no {error}" if isinstance(error, KeyError) else str(error)) from None

    def read_constraints(self) -> list[str]:
        """The bounds that the run was held to, as they are written. Raises BadInputError."""
        try:
            return [str(bound) for bound in self.read_info()["problem"]["constraints"]]
        except (KeyError, TypeError) as error:
            raise self.no_record(f"no {error}" if isinstance(error, KeyError) else str(error)) from None

    def fingerprint(self) -> Fingerprint | None:
        """Of what it was measured on, where that is told."""
        return read(self.read_info().get("fingerprint")) if self.info.exists() else None

    def refuse_other(self, here: Fingerprint) -> None:
        """Raises BadInputError where the run was measured on another device or server than ``here``; one that has not
        begun, or is of an earlier version, does not tell."""
        there = self.fingerprint()
        if there is not None and there != here:
            raise BadInputError(
                f"{one_line(str(self.path))}: was measured elsewhere ({here.differences(there)}), and the two are "
                f"not ranked together; begin a run here: --warm-start {one_line(str(self.path))} learns from it"
            )

    def read_info(self) -> Mapping[str, Any]:
        """All of run.json. Raises BadInputError where it is not one of ours."""
        try:
            info = json.loads(read_bytes(self.info, MAX_INFO_BYTES, "give the folder of a run"))
        except (OSError, ValueError, RecursionError) as error:
            raise self.no_record(str(error)) from None
        if not isinstance(info, dict):
            raise self.no_record("it holds no names")
        return info

    def no_record(self, why: str) -> BadInputError:
        return BadInputError(f"{one_line(str(self.info))}: not the record of a run ({one_line(why, LONGEST_WHY)})")

    def write_info(self, options: RunOptions, rest: Mapping[str, Any]) -> None:
        """``started_in``, seen from the run's folder, is what the relative paths among ``options`` start from."""
        started_in = os.path.relpath(Path.cwd(), self.path.resolve())
        info = {"options": asdict(options), "started_in": started_in, **rest}
        write_whole(self.info, json.dumps(info, indent=2) + "\n")

    def write_best(self, configs: Mapping[str, str], server_options: Sequence[str] = ()) -> None:
        """What is recommended, by model: each whole or not at all. ``server_options``, one a line, are what the
        server is started with. Raises EnvironmentFault where it cannot be."""
        _write_configs(self.best, configs, server_options)

    def write_baseline(self, configs: Mapping[str, str], server_options: Sequence[str] = ()) -> None:
        """As ``write_best``, of the configuration that was given."""
        _write_configs(self.baseline, configs, server_options)


def _write_configs(folder: Path, configs: Mapping[str, str], server_options: Sequence[str]) -> None:
    beside = folder / "server_options"
    beside.unlink(missing_ok=True)
    if server_options:
        write_whole(beside, "\n".join(server_options) + "\n")
    if len(configs) == 1:
        (text,) = configs.values()
        write_whole(folder / "config.pbtxt", text)
        return
    try:
        folder.mkdir(exist_ok=True)
    except OSError as error:
        raise cannot_write(folder, error) from error
    for name, text in configs.items():
        write_whole(folder / name / "config.pbtxt", text)


def _unwritable(out: str, error: OSError) -> BadInputError:
    return BadInputError(f"results folder {out}: cannot write there ({error.strerror}); choose another with --out")
