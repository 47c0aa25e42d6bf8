"""The folder of one run, ``results/<model>/<run>/``: what is kept, and how it is found again."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from optimizer.errors import BadInputError, EnvironmentFault
from optimizer.options import RunOptions

MAX_INFO_BYTES = 64 * 2**20


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

    @classmethod
    def create(cls, out: str, model: str) -> RunFolder:
        """A new folder named by the time. Raises BadInputError where ``out`` cannot be written."""
        stamp = time.strftime("%Y%m%d-%H%M%S")
        parent = Path(out).absolute() / model
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
            raise BadInputError(
                f"results folder {out}: cannot write there ({error.strerror}); choose another with --out"
            ) from None
        raise BadInputError(f"results folder {parent}: too many runs began this second")

    @classmethod
    def find(cls, run: str, out: str) -> RunFolder:
        """An existing run, by its path or by ``<model>/<run>`` in ``out``. Raises BadInputError."""
        for path in (Path(run), Path(out) / run):
            if (path / "run.json").is_file():
                return cls(path.absolute())
        raise BadInputError(f"--resume {run}: no run.json there nor in {Path(out) / run}; give a run's folder")

    def read_options(self) -> RunOptions:
        """The options that the run was started with. Raises BadInputError where run.json is not one of ours."""
        try:
            if self.info.stat().st_size > MAX_INFO_BYTES:
                raise ValueError("too large")
            options = json.loads(self.info.read_text())["options"]
            known = {field.name for field in fields(RunOptions)}
            if not isinstance(options, dict) or not set(options) <= known or "model" not in options:
                raise ValueError("its options are not those of a run")
            return RunOptions(**{**options, "objectives": tuple(options["objectives"])})
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise BadInputError(f"{self.info}: not the record of a run ({error})") from None

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
