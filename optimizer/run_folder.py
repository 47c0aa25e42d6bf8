"""The folder of one run, ``results/<model>/<run>/``: what is kept, and how it is found again."""

from __future__ import annotations

import json
import os
import tempfile
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError

from optimizer.errors import BadInputError, EnvironmentFault
from optimizer.options import RunOptions
from optimizer.profile.safe_paths import is_file

MAX_INFO_BYTES = 64 * 2**20
RUN_OPTIONS = TypeAdapter(RunOptions)


@dataclass(frozen=True, slots=True)
class RunFolder:
    """``run.json`` (the run), ``trials.csv`` (every measurement), ``pareto.csv``, ``best/config.pbtxt``,
    ``report.html``, ``study.journal`` (the Optuna study), ``logs/``."""

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
    def best_config(self) -> Path:
        return self.path / "best" / "config.pbtxt"

    @property
    def report(self) -> Path:
        return self.path / "report.html"

    @property
    def study(self) -> Path:
        return self.path / "study.journal"

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
    def find(cls, run: str, out: str) -> RunFolder:
        """An existing run, by its path or by ``<model>/<run>`` in ``out``. Raises BadInputError."""
        for path in (Path(run), Path(out) / run):
            if is_file(path / "run.json"):
                return cls(path)
        raise BadInputError(f"--resume {run}: no run.json there nor in {Path(out) / run}; give a run's folder")

    def read_options(self) -> RunOptions:
        """The options that the run was started with. Raises BadInputError where run.json is not one of ours."""
        try:
            if self.info.stat().st_size > MAX_INFO_BYTES:
                raise ValueError("too large")
            options = json.loads(self.info.read_bytes())["options"]
            unknown = set(options) - {field.name for field in fields(RunOptions)}
            if unknown:
                raise ValueError(f"unknown option {min(unknown)!r}")
            return RUN_OPTIONS.validate_json(json.dumps(options), strict=True)
        except ValidationError as error:
            fault = error.errors()[0]
            key = ".".join(map(str, ("options", *fault["loc"])))
            raise BadInputError(f"{self.info}: not the record of a run ({key}: {fault['msg']})") from None
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise BadInputError(f"{self.info}: not the record of a run ({_one_line(error)})") from None

    def write_info(self, options: RunOptions, rest: Mapping[str, Any]) -> None:
        self.write(self.info, json.dumps({"options": asdict(options), **rest}, indent=2) + "\n")

    def write(self, path: Path, text: str) -> None:
        """Whole or not at all. Raises EnvironmentFault where the disk refuses it."""
        try:
            path.parent.mkdir(exist_ok=True)
            scratch = path.with_name(f".{path.name}.new")
            with scratch.open("w") as file:
                file.write(text)
                file.flush()
                os.fsync(file.fileno())
            scratch.replace(path)
        except OSError as error:
            raise EnvironmentFault(f"cannot write {path}: {error.strerror}") from error


def _unwritable(out: str, error: OSError) -> BadInputError:
    return BadInputError(f"results folder {out}: cannot write there ({error.strerror}); choose another with --out")


def _one_line(error: Exception) -> str:
    return f"no {error}" if isinstance(error, KeyError) else " ".join(str(error).split())
