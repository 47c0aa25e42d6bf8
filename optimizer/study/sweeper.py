"""Measure a sweep: every listed configuration at every listed load."""

from __future__ import annotations

import contextlib
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from objectives.metrics import Measurement
from optimizer.config import gpu_placement, model_config
from optimizer.config.model_source import ModelSource, served_models
from optimizer.config.queue_policy import check_queue_fields
from optimizer.config.search_space import SearchSpace
from optimizer.core import interrupts
from optimizer.core.candidate import VARIANT, Candidate
from optimizer.core.endpoint import Endpoint
from optimizer.core.errors import BadInputError, TuneError
from optimizer.core.files import cache_folder, write_json
from optimizer.core.interfaces import Target
from optimizer.core.notes import CombinationsLeftOut, ServedOnCpu, present
from optimizer.core.signature import sign
from optimizer.core.stopwatch import with_earlier_times
from optimizer.core.trial import FreshServer, LoadPoint, Trial
from optimizer.deploy.target_factory import describe_server
from optimizer.machine.conditions import machine_conditions
from optimizer.machine.hardware import Fingerprint
from optimizer.measure.measurer import CandidateMeasurer, Measurer
from optimizer.model.default_space import check_sequence_fields, without_batch_dimension
from optimizer.model.instances import too_many_instances
from optimizer.model.profile_schema import SpaceSection
from optimizer.model.requests import RequestBatching, Requests
from optimizer.options.option_reader import external_values
from optimizer.options.run_options import RunOptions
from optimizer.options.values import write_load_shares
from optimizer.results import formatting
from optimizer.store.run_folder import SWEEP_FILE, WRITTEN_FORMAT, RunFolder
from optimizer.store.trials_table import TrialsTable
from optimizer.study import sweep_output
from optimizer.study.environment import Environment
from optimizer.study.model_finder import sizes_given_twice, trace_sizes
from optimizer.study.option_check import check_server_settings
from optimizer.study.sweep_plan import SweepCell, SweepPlan, SweepRequest, config_errors, configurations, sweep_cells
from optimizer.study.task import Task, check_settings


class SweepTables:
    """A TrialStore with one table for each request batch size: trials.csv, or trials-b1.csv and trials-b8.csv."""

    def __init__(self, folder: RunFolder, plan: SweepPlan, make_table: Callable[[Path], TrialsTable]) -> None:
        self._plan = plan
        sizes, file = plan.request_batch_sizes, folder.trials
        files = {size: file if len(sizes) == 1 else file.with_name(f"trials-b{size}.csv") for size in sizes}
        self._tables = {size: make_table(files[size]) for size in sizes}

    def append(
        self, trial: Trial, load: LoadPoint, measurement: Measurement, fresh: FreshServer | None = None
    ) -> None:
        """Append a row to the table of the load's request batch size."""
        self._tables[load.request_batch_size].append(trial, load, measurement, fresh)

    def append_failure(self, trial: Trial) -> None:
        """Append a failure to each table in which the candidate has loads."""
        for size in {load.request_batch_size for load in self._plan.loads_of(trial.candidate)}:
            self._tables[size].append_failure(trial)

    def read(self) -> list[Trial]:
        """Return the trials of all tables, merged. Raises BadInputError if they belong to another sweep."""
        trials: dict[int, Trial] = {}
        for table in self._tables.values():
            for trial in table.read():
                if self._plan.configurations[trial.number : trial.number + 1] != (trial.candidate,):
                    raise BadInputError(
                        f"{table.path}: trial {trial.number} belongs to another sweep; start a new one"
                    )
                earlier = trials.get(trial.number)
                merged = (*earlier.measurements, *trial.measurements) if earlier else trial.measurements
                trials[trial.number] = replace(trial, measurements=merged)
        return [trials[number] for number in sorted(trials)]


SweepStatus = Literal["done", "interrupted"]


@dataclass(frozen=True)
class SweepResult:
    """The cells of a sweep. ``document`` is what ``--json`` prints."""

    status: SweepStatus
    cells: list[SweepCell]
    document: dict[str, Any]


class _PendingLoads:
    """The MeasurementSteps of a configuration: the loads that are still to be measured, without an output check."""

    def __init__(self, measurer: Measurer, loads: Sequence[LoadPoint]) -> None:
        self._measurer, self._pending = measurer, deque(loads)
        self._pending_at_start = len(loads)  # of the latest deployment

    def prepare(self, endpoint: Endpoint) -> None:
        """Remember whether the server has put the model on the CPU; outputs are not compared."""
        self._measurer.note_device(endpoint)

    def next_load(self, trial: Trial) -> LoadPoint | None:
        """Return the load to measure next; None if there is none left."""
        return self._pending[0] if self._pending else None

    def is_hopeless(self, window: Measurement) -> bool:
        """Return False, because a sweep measures every load."""
        return False

    def measure(self, trial: Trial, endpoint: Endpoint, load: LoadPoint) -> Trial:
        """Return ``trial`` with the measurement of ``load``. Raises ServerCrashed; the load then is skipped."""
        self._pending.popleft()
        return self._measurer.measure(trial, endpoint, load)

    def is_worth_retrying(self) -> bool:
        """Return whether the deployment that crashed has begun a load, so that another one has fewer left."""
        is_progress = len(self._pending) < self._pending_at_start
        self._pending_at_start = len(self._pending)
        return is_progress


@dataclass
class Sweeper:
    """Measures the loads of ``plan`` that are missing in the table.

    ``failures`` gets the reason of each configuration whose deployment failed, by its number.
    """

    plan: SweepPlan
    target: Target
    measurer: Measurer
    failures: dict[int, str]

    def run(self) -> None:
        """Measure all configurations in turn, ``repeat`` times, so that a drift of the machine affects all alike."""
        trials = {trial.number: trial for trial in self.measurer.table.read()}
        for rounds in range(1, self.plan.repeat + 1):
            for number, candidate in enumerate(self.plan.configurations):
                trial = trials.get(number, Trial(number, candidate))
                trials[number] = self._measure(trial, self.plan.missing(trial, rounds))

    def _measure(self, trial: Trial, pending: Sequence[LoadPoint]) -> Trial:
        """Return ``trial`` with the ``pending`` loads measured. A load that crashes the server is skipped.

        The trial fails only if it has no measurements, because readers of the table drop those before a failure.
        """
        if not pending:
            return trial
        observer = self.measurer.observer
        observer.trial_started(trial.number, trial.candidate, "sweep")
        loads = _PendingLoads(self.measurer, pending)
        trial, error = CandidateMeasurer(self.target, self.measurer, loads, max_crashes=None).run(trial)
        if error is None:
            return trial
        failed = trial.with_failure(error)
        self.failures[trial.number] = failed.reason
        observer.trial_finished(failed, None)
        if trial.measurements:
            return trial
        self.measurer.table.append_failure(failed)
        return failed


def sweep(
    options: RunOptions,
    request: SweepRequest,
    resumed: RunFolder | None,
    on_progress: Callable[[str], None],
) -> SweepResult:
    """Measure the loads of ``request``, or those missing in the sweep in ``resumed``. Raises TuneError.

    An interrupt (KeyboardInterrupt) ends it early; its measurements are kept. A resumed sweep whose model, plan or
    fingerprint has changed is refused and not changed.
    """
    environment = Environment.detect(options, on_progress)
    if resumed is None:
        RunFolder.check(options.out)
    task = environment.make_task(swept=request.choices.fields)
    plan, task = _make_plan(task, request, options, len(environment.hardware.gpus))
    fingerprint = environment.fingerprint(task)
    folder = resumed or RunFolder.create(options.out, task.source.name)
    with folder.locked():
        earlier = sweep_output.read_document(folder.path) if resumed else {}
        sweep_output.refuse_other_model(folder, earlier, task.source.facts)
        return _SweepSession(environment, task, request, plan, fingerprint, folder, earlier).run()


class _SweepSession:
    """One session of a sweep in its locked ``folder``. ``earlier`` is sweep.json of the sessions before it."""

    def __init__(
        self,
        environment: Environment,
        task: Task,
        request: SweepRequest,
        plan: SweepPlan,
        fingerprint: Fingerprint,
        folder: RunFolder,
        earlier: Mapping[str, Any],
    ) -> None:
        problem, began = task.problem, earlier.get("began")
        self._environment, self._task, self._plan = environment, task, plan
        self._folder, self._earlier = folder, earlier
        self._table = SweepTables(
            folder,
            plan,
            lambda file: TrialsTable(file, problem.model, problem.space.fields, fingerprint.id, problem.cpu_count),
        )
        self._failures: dict[int, str] = {}
        self._notes = (*environment.notes(task), *present([plan.left_out]))
        self._facts = {
            "command": request.command,
            "options": request.given,
            "signature": sign(external_values(environment.options)),
            "model": {"name": task.source.name, **task.source.facts},
            "concurrent_models": write_load_shares(task.source.concurrent) or None,
            "hardware": str(environment.hardware),
            "fingerprint": fingerprint.to_document(),
            "machine": machine_conditions(),
            "began": began if isinstance(began, str) else time.strftime(WRITTEN_FORMAT),
            "results_dir": str(folder.path),
        }

    def run(self) -> SweepResult:
        """Measure the missing loads and return the result; after an interrupt that of the loads so far."""
        status: SweepStatus = "done"
        self._record("running")
        try:
            self._measure()
        except KeyboardInterrupt:
            interrupts.acknowledge()
            status = "interrupted"
        except BaseException:
            with contextlib.suppress(TuneError):  # a full disk must not hide the first error
                self._record("failed")
            raise
        cells, document = self._record(status)
        return SweepResult(status, cells, document)

    def _measure(self) -> None:
        """Start the server and measure the missing loads. The notes on its deployments are kept if this fails."""
        environment, task, plan, folder = self._environment, self._task, self._plan, self._folder
        server, loads = describe_server(environment.options), formatting.count(len(plan), "measurement")
        environment.on_progress(f"sweeping {task.problem.model} on {server}: {loads}; results in {folder.path}")
        with environment.open_target(task, folder) as target:
            target.start()
            observer = sweep_output.SweepProgress(environment.on_progress, plan)
            measurer = environment.make_measurer(task, folder, self._table, observer)
            try:
                Sweeper(plan, target, measurer, self._failures).run()
            finally:
                self._notes += tuple(note for note in measurer.notes if isinstance(note, ServedOnCpu))

    def _record(self, status: str) -> tuple[list[SweepCell], dict[str, Any]]:
        """Write sweep.json with the cells so far, and return the cells and its document.

        Raises BadInputError, before it writes, if the table is of another sweep.
        """
        cells = sweep_cells(self._plan, self._table.read(), self._failures)
        wall_seconds = round(self._environment.stopwatch.wall_seconds(), 3)
        times = with_earlier_times({"wall_seconds": wall_seconds}, self._earlier)
        self._notes = present([*self._notes, *self._environment.other_runs()])
        notes = (*self._notes, *sweep_output.notes_on_cells(cells))
        document = sweep_output.sweep_document(status, self._facts, cells, notes, times)
        write_json(self._folder.path / SWEEP_FILE, document)
        return cells, document


def _make_plan(task: Task, request: SweepRequest, options: RunOptions, gpu_count: int) -> tuple[SweepPlan, Task]:
    """Return the plan, and the task with the swept fields as its only parameters. Raises BadInputError."""
    choices = request.choices
    if 0 in choices.max_batch_size and task.source.tuned_config.max_batch_size:
        raise BadInputError(f"--max-batch-size: {without_batch_dimension(task.source.tuned_model)}")
    candidates, left_out = _configurations(task, request, options, gpu_count)
    sizes = request.request_batch_size or (task.problem.request_batch_size,)
    if task.sequence_length is not None and max(sizes) > 1:
        raise BadInputError(
            f"--request-batch-size {max(sizes)}: {task.source.name} is stateful, and Triton takes one sample in a "
            "request; leave it out"
        )
    if request.request_batch_size and trace_sizes(options) is not None:
        raise sizes_given_twice(request.request_batch_size[0], options)
    mix = None if request.request_batch_size else task.problem.request_mix
    plan = SweepPlan(
        configurations=candidates,
        loads=_loads(request, sizes),
        repeat=request.repeat,
        largest_mixed=mix.largest if mix else 0,
        left_out=left_out,
    )
    largest = max(candidate.max_batch_size for candidate in candidates)
    if not len(plan):
        smallest = mix.largest if mix else min(sizes)
        raise BadInputError(
            f"--request-batch-size {smallest} is above every max_batch_size ({largest}); lower it, or raise that"
        )
    requests = Requests(task.input_data, note=task.request_note)
    if request.concurrency:  # one input file serves requests of any size
        requests = requests.limited(RequestBatching(round(max(sizes))), cache_folder())
    fields = dict(choices.fields)
    if task.source.variants:
        fields[VARIANT] = tuple(task.source.variants)
    problem = replace(task.problem, space=SearchSpace((largest,), fields=fields), request_mix=mix)
    with config_errors():
        check_server_settings(task.source, options, problem)
    return plan, replace(task, problem=problem, input_data=requests.input_data, request_note=requests.note)


def _configurations(
    task: Task, request: SweepRequest, options: RunOptions, gpu_count: int
) -> tuple[tuple[Candidate, ...], CombinationsLeftOut | None]:
    """Return the configurations to measure, and a note on those that are left out. Raises BadInputError."""
    choices = request.choices
    configured = model_config.candidate_of(task.source.tuned_config, choices.fields)
    if too_many := too_many_instances(choices.instance_count, task.source, options, on_gpu=task.on_gpu):
        raise BadInputError(f"--instance-count: {too_many}")
    without_variants, left_out = configurations(configured, choices)
    candidates = _add_variants(without_variants, task.source)
    for path, value in dict.fromkeys(field for candidate in candidates for field in candidate.fields):
        if path in choices.fields and (missing := gpu_placement.missing_gpu(path, value, gpu_count)):
            raise BadInputError(f"--config {path}: {missing}")
    with config_errors():
        for candidate in candidates:
            served_models(task.source, candidate)
        check_sequence_fields(SpaceSection(), task.source.tuned_config, choices.fields)
        check_queue_fields(task.source.tuned_config, choices.fields)
        check_settings(choices.fields, task.source, options, on_gpu=task.on_gpu)
    return candidates, left_out


def _loads(request: SweepRequest, sizes: Sequence[float]) -> tuple[LoadPoint, ...]:
    """Return each load of each request size."""
    return tuple(
        [LoadPoint(size, concurrency) for size in sizes for concurrency in request.concurrency]
        + [LoadPoint(size, request_rate=rate) for size in sizes for rate in request.request_rate]
    )


def _add_variants(candidates: tuple[Candidate, ...], source: ModelSource) -> tuple[Candidate, ...]:
    """Return each candidate once for each model that can serve in place of the tuned one."""
    if not source.variants:
        return candidates
    return tuple(
        replace(candidate, fields=tuple(sorted((*candidate.fields, (VARIANT, name)))))
        for candidate in candidates
        for name in source.variants
    )
