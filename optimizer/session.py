"""One run from options to result: wires the parts together and keeps what they gave."""

from __future__ import annotations

import contextlib
import platform
import sys
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from importlib import metadata
from pathlib import Path
from typing import Any, Literal

from optimizer import hardware as machine
from optimizer import interrupts, model_config, runtime, task
from optimizer.batcher.ahead import compile_ahead
from optimizer.budget import Budget
from optimizer.command_line import command_line, without_password
from optimizer.deploy.embedded import EmbeddedTarget
from optimizer.errors import EnvironmentFault
from optimizer.hardware import Hardware
from optimizer.options import RunOptions
from optimizer.outcome import Outcome, assess
from optimizer.perf_analyzer import FIRST_WINDOW_MS, MAX_THREADS, PerfAnalyzer
from optimizer.problem import Problem
from optimizer.report import export
from optimizer.run_folder import RunFolder
from optimizer.search import SMALLEST_GAIN
from optimizer.stopwatch import Stopwatch
from optimizer.task import Task
from optimizer.telemetry import GpuTelemetry, ProcessTelemetry
from optimizer.trial import Trial
from optimizer.trials_table import TrialsTable
from optimizer.tuner import Tuner, Watcher

VERSIONS = ("tritune", "numpy", "onnxruntime", "optuna", "protobuf", "tritonclient")
UNCONFIRMED = "not confirmed: measured again it missed the bounds, or the budget ended; is the machine quiet?"
SATISFIED = f"the search ended early: another deployment promised less than {SMALLEST_GAIN:.0%} more throughput"
WatcherMaker = Callable[[Problem, Budget, Hardware], AbstractContextManager[Watcher]]


@dataclass(frozen=True)
class Result:
    """How a run ended. ``document`` is what ``--json`` prints."""

    status: Literal["found", "none", "interrupted"]
    outcome: Outcome
    task: Task
    hardware: Hardware
    notes: tuple[str, ...]
    folder: RunFolder
    command: str
    document: dict[str, Any]


def tune(options: RunOptions, resumed: RunFolder | None, say: Callable[[str], None], watch: WatcherMaker) -> Result:
    """Run the study, or continue the one in ``resumed``. ``say`` gets a line for each slow preparation.

    An interrupt (KeyboardInterrupt) ends it early with the best so far. Raises TuneError.
    """
    if reason := runtime.unsupported():
        raise EnvironmentFault(reason)
    stopwatch = Stopwatch()
    hardware = machine.detect()
    on_gpu = bool(hardware.gpus) and machine.onnxruntime_on_gpu()
    _check_objectives(options, on_gpu)
    if resumed is None:
        RunFolder.check(options.out)
    if options.storage is not None:
        from optimizer.study import check_storage

        check_storage(options.storage)
    with stopwatch.set_up():
        what = task.prepare(options, hardware if on_gpu else replace(hardware, gpus=()), say)
        runtime.ensure(say)
    folder = resumed or RunFolder.create(options.out, what.source.name)
    table = TrialsTable(folder.trials, what.source.name, what.problem.space.fields)
    spent_seconds = _spent_seconds(table.read())
    notes = _notes(hardware, on_gpu)
    record = _Record(folder, options, what, hardware, notes, stopwatch)
    record.write("running", None)
    with contextlib.closing(
        EmbeddedTarget(what.source, log=folder.server_log, say=say, stopwatch=stopwatch)
    ) as target:
        status: Literal["found", "none", "interrupted"]
        try:
            target.start()  # while the simulator and Optuna are loaded
            if options.search == "simulated":
                with stopwatch.set_up():
                    compile_ahead(say)
            budget = Budget(options.budget_seconds, options.max_trials, spent_seconds=spent_seconds)
            tuner = _tuner(options, what, folder, target, table, budget, on_gpu, stopwatch)
            with watch(what.problem, budget, hardware) as watcher:
                tuner.watcher = watcher
                trials = tuner.run(what.comparisons())
            interrupted = False
            if tuner.satisfied and len(trials) < len(what.problem.space):
                notes += (SATISFIED,)
            if (best := tuner.best()) and (best.trial, best.load) not in tuner.confirmed:
                notes += (UNCONFIRMED,)
            record = replace(record, notes=notes)
        except KeyboardInterrupt:
            interrupts.acknowledge()
            trials, interrupted = table.read(), True
        except BaseException:
            record.write("failed", assess(table.read(), what.problem, what.baseline, what.dynamic_batching))
            raise
    outcome = assess(trials, what.problem, what.baseline, what.dynamic_batching)
    status = "interrupted" if interrupted else "found" if outcome.recommended else "none"
    document = record.write(status, outcome, trials)
    return Result(status, outcome, what, hardware, notes, folder, command_line(options), document)


def _tuner(
    options: RunOptions,
    what: Task,
    folder: RunFolder,
    target: EmbeddedTarget,
    table: TrialsTable,
    budget: Budget,
    on_gpu: bool,
    stopwatch: Stopwatch,
) -> Tuner:
    from optimizer.search import make_searcher

    installed = runtime.ensure(lambda _: None)
    storage = options.storage or str(folder.study)
    with stopwatch.searching():
        searcher = make_searcher(options.search, what.problem, options.seed, storage, folder.study_name)
    return Tuner(
        problem=what.problem,
        searcher=searcher,
        target=target,
        load_generator=PerfAnalyzer(
            installed.perf_analyzer,
            installed.perf_analyzer_libraries,
            folder.perf_analyzer_log,
            protocol=options.protocol,
            input_data=what.input_data,
            shapes=what.shapes,
            stopwatch=stopwatch,
            window_ms=round(options.measurement_interval_ms or FIRST_WINDOW_MS),
        ),
        telemetry=GpuTelemetry() if on_gpu else ProcessTelemetry(),
        table=table,
        budget=budget,
        watcher=_Unwatched(),
        stopwatch=stopwatch,
    )


class _Unwatched:
    def trial_started(self, *_: object) -> None: ...
    def measured(self, *_: object) -> None: ...
    def trial_finished(self, *_: object) -> None: ...


def _spent_seconds(trials: list[Trial]) -> float:
    """What a resumed run has used of its budget."""
    return sum(
        (trial.deploy_seconds or 0) + sum(m.measure_seconds or 0 for _, m in trial.measurements) for trial in trials
    )


def _check_objectives(options: RunOptions, on_gpu: bool) -> None:
    if "energy" in options.objectives and not on_gpu:
        raise EnvironmentFault(
            "--objective energy: power is read from an NVIDIA GPU, and this machine serves on its CPU; "
            "choose throughput, latency-p95 or memory"
        )


def _notes(hardware: Hardware, on_gpu: bool) -> tuple[str, ...]:
    backend = "served by tritune's own Python-based onnxruntime backend: a production build's native one is faster"
    if on_gpu:
        return (backend,)
    notes: tuple[str, ...] = (
        backend,
        f"the load generator ({MAX_THREADS} threads) shares the {hardware.cpu_count} CPU cores with the server",
    )
    if hardware.gpus:
        notes += ("a GPU is there but onnxruntime-gpu is not installed: served on the CPU",)
    return notes


@dataclass(frozen=True)
class _Record:
    """Writes run.json and what is derived from the trials."""

    folder: RunFolder
    options: RunOptions
    task: Task
    hardware: Hardware
    notes: tuple[str, ...]
    stopwatch: Stopwatch

    def write(self, status: str, outcome: Outcome | None, trials: list[Trial] | None = None) -> dict[str, Any]:
        """The document of ``--json``; empty before there is an outcome."""
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
                    "notes": list(self.notes),
                },
            )
            self._write_derived(outcome, trials)
        options = replace(self.options, storage=without_password(self.options.storage))
        self.folder.write_info(
            options,
            {
                "status": status,
                "command": command_line(options),
                "argv": ["tune", *(without_password(word) or "" for word in sys.argv[1:])],
                "written": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
                "problem": {
                    "model": self.task.problem.model,
                    "facts": self.task.source.facts,
                    "constraints": [str(bound) for bound in self.task.problem.constraints],
                    "objectives": [metric.name for metric in self.task.problem.objectives],
                    "request_batch_size": self.task.problem.request_batch_size,
                    "space": {k: list(v) for k, v in self.task.problem.space.parameters().items()},
                    "candidates": len(self.task.problem.space),
                    "input_data": Path(self.task.input_data).name,
                },
                "hardware": {
                    "gpus": list(self.hardware.gpus),
                    "cpu": self.hardware.cpu,
                    "cpu_count": self.hardware.cpu_count,
                    "memory_bytes": self.hardware.memory_bytes,
                    "system": platform.platform(),
                },
                "versions": {
                    "python": platform.python_version(),
                    "tritonserver": runtime.TRITON_VERSION,
                    **{name: metadata.version(name) for name in VERSIONS},
                },
                "notes": list(self.notes),
                "times": self.stopwatch.report(),
                "result": document,
            },
        )
        return document

    def _write_derived(self, outcome: Outcome, trials: list[Trial] | None) -> None:
        export.write_pareto_csv(self.folder.pareto, outcome)
        if outcome.recommended:
            config = model_config.apply(outcome.recommended.candidate, self.task.source.config)
            self.folder.write(self.folder.best_config, model_config.to_text(config))
        if trials is not None:
            from optimizer.report.html import write_report

            write_report(
                self.folder.report,
                outcome=outcome,
                trials=trials,
                problem=self.task.problem,
                facts=self.task.source.facts,
                hardware=str(self.hardware),
                notes=self.notes,
                command=command_line(self.options),
            )
