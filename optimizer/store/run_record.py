"""run.json and the files derived from the trials: what a run leaves besides its table."""

from __future__ import annotations

import contextlib
import platform
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from importlib import metadata
from pathlib import Path
from typing import Any, Protocol

from optimizer import model_config, server_options
from optimizer.command_line import command_line, without_password
from optimizer.deployment import deployment
from optimizer.errors import TuneError
from optimizer.headers import hidden, hidden_in
from optimizer.machine.fingerprint import Fingerprint
from optimizer.machine.hardware import Hardware
from optimizer.machine.notes import Note, machine_notes
from optimizer.options import RunOptions
from optimizer.outcome import Outcome
from optimizer.process import COMMANDS
from optimizer.report import export
from optimizer.stopwatch import Stopwatch
from optimizer.store.finished import FinishedRun, candidate_document
from optimizer.store.run_folder import RunFolder
from optimizer.task import Task
from optimizer.trial import Candidate, Trial

VERSIONS = ("tritune", "numpy", "onnxruntime", "optuna", "protobuf", "tritonclient")


class ToldVersion(Protocol):
    """A target, or whoever else knows the version of the server."""

    @property
    def server_version(self) -> str: ...


def _versions() -> dict[str, str]:
    return {"python": platform.python_version(), **{name: metadata.version(name) for name in VERSIONS}}


def _given() -> list[str]:
    """The words after ``tune``; none where another program's words are none of ours."""
    return sys.argv[1:] if Path(sys.argv[0]).name in ("tune", "__main__.py") else []


@dataclass(frozen=True)
class RunRecord:
    """Writes run.json and what is derived from the trials. ``versions``: the server's is added once it is known."""

    folder: RunFolder
    options: RunOptions
    task: Task
    hardware: Hardware
    notes: tuple[str, ...]
    stopwatch: Stopwatch
    fingerprint: Fingerprint
    at_start: dict[str, Note] = field(default_factory=machine_notes)
    versions: dict[str, str] = field(default_factory=_versions)

    @contextlib.contextmanager
    def naming(self, target: ToldVersion) -> Iterator[None]:
        """Whatever ends it, the version of the server that was measured is known afterwards, if it told it."""
        try:
            yield
        finally:
            with contextlib.suppress(TuneError):
                self.versions["tritonserver"] = target.server_version or "unknown"

    def write(
        self, status: str, outcome: Outcome | None, trials: list[Trial] | None = None, reason: str = ""
    ) -> dict[str, Any]:
        """The document of ``--json``; empty before there is an outcome. ``reason``: what ended a run that failed."""
        document: dict[str, Any] = {}
        if outcome is not None:
            document = export.document(
                outcome,
                wall_seconds=round(self.stopwatch.wall_seconds(), 3),
                results_dir=str(self.folder.path),
                extra={
                    "status": status,
                    "sla": [str(bound) for bound in self.task.problem.constraints],
                    "model": {"name": self.task.source.name, **self.task.source.facts},
                    "hardware": str(self.hardware),
                    "notes": [*self.task.notes, *self.notes],
                },
            )
            self._write_derived(outcome)
        self._write_info(status, reason, document)
        if outcome is not None and trials is not None:
            self._write_page(outcome, trials)
            self._write_info(status, reason, document)  # with the time that the page took
        return document

    def _write_info(self, status: str, reason: str, document: Mapping[str, Any]) -> None:
        options = replace(
            self.options,
            storage=without_password(self.options.storage),
            headers=tuple(map(hidden, self.options.headers)),
        )
        self.folder.write_info(
            options,
            {
                "status": status,
                "reason": reason,
                "command": command_line(options),
                "argv": ["tune", *(without_password(word) or "" for word in hidden_in(_given()))],
                "written": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
                "problem": {
                    "model": self.task.problem.model,
                    "facts": self.task.source.facts,
                    "constraints": [str(bound) for bound in self.task.problem.constraints],
                    "objectives": [metric.name for metric in self.task.problem.objectives],
                    "request_batch_size": self.task.problem.request_batch_size,
                    "space": {k: list(v) for k, v in self.task.problem.space.parameters().items()},
                    "candidates": len(self.task.problem.space),
                    "baseline": candidate_document(self.task.baseline),
                    "dynamic_batching": candidate_document(self.task.dynamic_batching),
                    "input_data": Path(self.task.input_data).name,
                },
                "hardware": {
                    "gpus": list(self.hardware.gpus),
                    "cpu": self.hardware.cpu,
                    "cpu_count": self.hardware.cpu_count,
                    "memory_bytes": self.hardware.memory_bytes,
                    "system": platform.platform(),
                },
                "fingerprint": self.fingerprint.document(),
                "versions": self.versions,
                "notes": [*self.task.notes, *self.notes],
                "machine": {"at_start": self.at_start, "when_written": machine_notes()},
                "commands": f"logs/{COMMANDS}",
                "times": self.stopwatch.report(),
                "result": document,
            },
        )

    def _write_derived(self, outcome: Outcome) -> None:
        export.write_pareto_csv(self.folder.pareto, outcome)
        if outcome.recommended:
            self.folder.write_best(*self._configs(outcome.recommended.candidate))
            self.folder.write_baseline(*self._configs(self.task.baseline))

    def _configs(self, candidate: Candidate) -> tuple[dict[str, str], tuple[str, ...]]:
        """config.pbtxt by model, and the options of the server."""
        configs = deployment(self.task.source, candidate).configs
        texts = {name: model_config.to_text(config) for name, config in configs.items()}
        return texts, server_options.words(candidate.fields)

    def _write_page(self, outcome: Outcome, trials: list[Trial]) -> None:
        from optimizer.pages.write import write

        compared = self.task.baseline, self.task.dynamic_batching
        info = self.folder.read_info()
        run = FinishedRun(self.folder, self.options, info, self.task.problem, *compared, tuple(trials), outcome)
        write([run], ["html"], self.folder.report)
