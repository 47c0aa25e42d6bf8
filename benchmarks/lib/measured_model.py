"""The reference model and the load generators of benchmarks that measure one configuration on this machine."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from lib.output import print_progress
from objectives.sla import Sla
from optimizer.config.model_source import ModelSource
from optimizer.deploy import runtime
from optimizer.machine import hardware
from optimizer.measure.load_client.generators import ClosedLoopGenerator
from optimizer.measure.perf_analyzer import LocalRunner, PerfAnalyzer
from optimizer.model.requests import RequestBatching, RequestOptions, prepare_requests
from optimizer.options.run_options import RunOptions
from optimizer.study.task import Task, prepare_task


def prepare_model(options: RunOptions) -> Task:
    """Return the task of a model that is served on the CPUs."""
    return prepare_task(options, replace(hardware.detect(), gpus=()), print_progress)


def write_requests(source: ModelSource, folder: Path, data: str = "random") -> Path:
    """Return the file of requests that ``--input-data DATA`` gives the model, written below ``folder``."""
    return prepare_requests(RequestOptions(data), source.config, RequestBatching(), folder).input_data


def make_perf_analyzer(prepared: Task, folder: Path) -> PerfAnalyzer:
    """Return the perf_analyzer of this machine for the requests of ``prepared``; its log is in ``folder``."""
    installed = runtime.ensure(print_progress)
    return PerfAnalyzer(
        installed.perf_analyzer,
        LocalRunner(installed.perf_analyzer_libraries),
        folder / "perf_analyzer.log",
        input_data=prepared.input_data,
        shapes=prepared.shapes,
    )


def make_own_client(prepared: Task, folder: Path, sla: Sla | None = None) -> ClosedLoopGenerator:
    """Return the closed loop of the own client for the requests of ``prepared``; it counts misses of ``sla``."""
    bounds = (sla or Sla()).latencies
    return ClosedLoopGenerator(
        log=folder / "closed_loop.log", input_data=prepared.input_data, shapes=prepared.shapes, sla=bounds
    )
