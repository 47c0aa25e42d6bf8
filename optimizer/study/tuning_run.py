"""One run of `tune`, from the request to its result."""

from __future__ import annotations

import contextlib
import shlex
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from optimizer.core import interrupts
from optimizer.core.budget import RunMode, read_spent_time
from optimizer.core.errors import BadInputError, TuneError
from optimizer.core.notes import (
    ConfirmedByPerfAnalyzer,
    Note,
    present,
    read_lasting,
)
from optimizer.core.safe_text import is_file, show_path
from optimizer.core.stopwatch import Stopwatch
from optimizer.machine.hardware import Fingerprint
from optimizer.options.run_options import RunOptions
from optimizer.results.finished_run import nothing_recommended, read_run, refuse_missing_rows
from optimizer.results.recommendation import Outcome, assess
from optimizer.results.summary import UNKNOWN_TESTS, RemainingTests
from optimizer.store.run_folder import RunFolder
from optimizer.store.trials_table import TrialsTable
from optimizer.study.environment import Environment
from optimizer.study.load_generators import choose_clients
from optimizer.study.run_messages import (
    note_on_tests,
    notes_on_measurements,
    notes_on_outcome,
    notes_on_search,
    start_line,
)
from optimizer.study.run_record import RunRecord, current_versions
from optimizer.study.study import StudyResult, StudySetup, check_stored_study, run_locally
from optimizer.study.task import Task
from optimizer.study.warm_start import load_warm_start

if TYPE_CHECKING:
    from optimizer.results.progress_observers import Progress
    from optimizer.study.distributed.ray_study import ClusterStudy


RunStatus = Literal["found", "none", "left", "interrupted"]


@dataclass(frozen=True)
class RunResult:
    """How a session of a run ended.

    Attributes:
        status: ``found`` if there is a recommendation, and ``none`` if there is not; ``left`` if other workers
            continue a shared study, and ``interrupted`` after an interrupt.
        outcome: The recommendation with its verdict, and the comparisons; also of an interrupted session.
        record: It has the folder, the environment, the task and the notes of the run.
        document: The document that ``--json`` prints.
        continue_command: The command that continues an interrupted session.
        report_path: The report page; None if there is none.
        continued_by: Names the workers that continue a study that this run has ``left``; otherwise empty.
    """

    status: RunStatus
    outcome: Outcome
    record: RunRecord
    document: dict[str, Any]
    continue_command: str
    report_path: Path | None = None
    continued_by: str = ""


@contextlib.contextmanager
def tune(
    options: RunOptions,
    resumed: RunFolder | None,
    progress: Progress,
    mode: RunMode | None = None,
    *,
    report: bool = True,
    session_seconds: float | None = None,
) -> Iterator[RunResult]:
    """Run a study, or continue the one in ``resumed``, and yield its result. The folder of the run stays locked.

    The report page is written when the context ends, because it takes a second or more.

    Args:
        options: What to tune, and how.
        resumed: The folder of the run to continue.
        progress: It shows the progress.
        mode: Whether to search, to confirm, or both; by default as ``options`` say.
        report: Whether to write the report page.
        session_seconds: Time of this session; None for what earlier ones left of the budget of ``options``.

    An interrupt (KeyboardInterrupt) ends the run early with the best result so far. Raises TuneError.
    """
    stopwatch = Stopwatch()
    if mode is None:
        mode = RunMode.SEARCH_AND_CONFIRM if options.confirmation else RunMode.SEARCH
    with contextlib.ExitStack() as opened:
        cluster = None
        if options.cluster is None:
            environment = Environment.detect(options, progress.on_progress, stopwatch)
        else:
            from optimizer.study.distributed.ray_study import open_cluster

            preferred = resumed.fingerprint() if resumed else None
            cluster = opened.enter_context(open_cluster(options, stopwatch, progress.on_progress, preferred))
            environment = cluster.environment
        session = _Session(environment, cluster, resumed, mode, session_seconds)
        yield opened.enter_context(session.run(progress, report=report))


def continue_confirmation(
    run: RunFolder,
    options: RunOptions,
    seconds: float,
    progress: Progress,
) -> AbstractContextManager[RunResult]:
    """Return a context that continues the confirmation of ``run`` for ``seconds`` and yields its result, as ``tune``.

    The tests continue with all their windows, so repeating this until PASS makes no more errors than one session. The
    confirmation of a run that has none begins. The other arguments are those of ``tune``.

    Raises BadInputError if the run has no trial or found nothing, its confirmation was not planned in run.json, or
    its profile has other bounds by now; TuneError as ``tune``.
    """
    path, recorded = show_path(run.path), read_run(run.path)
    if not recorded.trials:
        raise BadInputError(f"{path}: nothing was measured yet; continue the search: `tune --resume {path}`")
    is_tested = any(trial.confirmations for trial in recorded.trials)
    if recorded.status == "none" and not is_tested:
        raise nothing_recommended(recorded, "verify")
    is_planned = isinstance(recorded.info.get("confirmation_plan"), dict)
    if not is_planned and is_tested:
        raise BadInputError(
            f"{path}: run.json has no confirmation_plan, so the test cannot continue; make a separate one: "
            f"`tune verify --fresh {path}`"
        )
    return tune(options, run, progress, RunMode.CONFIRM, session_seconds=seconds)


@dataclass(frozen=True)
class _Session:
    """One session of a run. ``cluster`` is None if it runs on this machine, and ``resumed`` for a new run."""

    environment: Environment
    cluster: ClusterStudy | None
    resumed: RunFolder | None
    mode: RunMode
    session_seconds: float | None

    @contextlib.contextmanager
    def run(self, progress: Progress, *, report: bool) -> Iterator[RunResult]:
        """Measure, and yield the result; ``report`` as for ``tune``."""
        environment, options = self.environment, self.environment.options
        _check_folders(options, self.resumed)
        task = environment.make_task()
        fingerprint = self._fingerprint(task)
        transferred, transfer_notes = load_warm_start(options, task, self.resumed)
        folder, problem = self.resumed or RunFolder.create(options.out, task.source.name), task.problem
        with folder.locked():
            table = TrialsTable(
                folder.trials,
                problem.model,
                problem.space.fields,
                fingerprint.id,
                problem.cpu_count,
                [other.name for other in problem.concurrent],
            )
            if self.resumed is not None:
                self._check_unchanged(self.resumed, task, fingerprint, table)  # before anything is written
            record = self._make_record(folder, task, fingerprint, transfer_notes)
            record.spent = record.spent.next_session(table.read(), self.cluster.worker_count if self.cluster else 1)
            if self.mode is not RunMode.CONFIRM or not folder.info.exists():
                record.write_start()  # a continued confirmation keeps the status, also if it is killed
            setup = StudySetup(record, table, transferred, progress, self.mode, self.session_seconds)
            result = self._measure(setup)
            trials = result.trials if result else table.read()
            outcome = assess(trials, problem, task.baseline, task.dynamic_batching)
            record.add_notes([*notes_on_measurements(trials), *notes_on_outcome(outcome, trials, task, options)])
            record.add_notes(environment.other_runs())  # those that began after this one
            if result is not None and not result.continued_by:
                only_confirms = self.mode is RunMode.CONFIRM
                record.add_notes([note_on_tests(result, record, outcome, only_confirms=only_confirms)])
            status = _status(result, outcome)
            recorded = self._recorded_status(status, outcome)
            ended = RunResult(
                status=status,
                outcome=outcome,
                record=record,
                document=record.write(recorded, outcome),
                continue_command=self._continue_command(folder),
                report_path=folder.report if report or is_file(folder.report) else None,
                continued_by=result.continued_by if result else "",
            )
            write_page = partial(record.write_page, recorded, outcome, trials, ended.document)
            with _called_at_end(write_page) if report else contextlib.nullcontext():
                yield ended

    def _fingerprint(self, task: Task) -> Fingerprint:
        """Return the fingerprint of the machine. Raises BadInputError if the resumed run has another one."""
        fingerprint = self.cluster.prepare_workers(task) if self.cluster else self.environment.fingerprint(task)
        if self.resumed is not None:
            self.resumed.refuse_other(fingerprint)
        return fingerprint

    def _check_unchanged(self, run: RunFolder, task: Task, fingerprint: Fingerprint, table: TrialsTable) -> None:
        """Raise BadInputError if the profile, model, study or trials of ``run`` have changed, or trials are missing.

        A refused run keeps its run.json, with its verdict. A run without run.json has only a trials table to check.
        Raises EnvironmentFault if the disk of the study is full or faulty.
        """
        trials = table.read(cut_torn_line=False)
        if not run.info.exists():
            return
        run.refuse_other_bounds(list(map(str, task.problem.sla)))
        run.refuse_other_model(task.source.facts)
        refuse_missing_rows(run, run.read_info(), trials)
        check_stored_study(self.environment.options, task, run, fingerprint)

    def _make_record(
        self, folder: RunFolder, task: Task, fingerprint: Fingerprint, transfer_notes: Sequence[Note]
    ) -> RunRecord:
        """Return the record of the run, which continues that of its earlier sessions."""
        earlier = self.resumed.read_info() if self.resumed and self.resumed.info.exists() else {}
        reason = choose_clients(self.environment.options, task).perf_analyzer_reason
        planned = earlier.get("confirmation_plan")
        notes = [*self.environment.notes(task), reason and ConfirmedByPerfAnalyzer(reason.value), *transfer_notes]
        notes += self.environment.other_runs()
        return RunRecord(
            folder=folder,
            environment=self.environment,
            task=task,
            fingerprint=fingerprint,
            notes=present([*notes, *read_lasting(earlier.get("lasting_notes"))]),
            search_ended=earlier.get("search_ended") if self.mode is RunMode.CONFIRM else None,
            perf_analyzer_reason=reason,
            versions=current_versions(earlier),
            planned=dict(planned) if isinstance(planned, dict) else {},
            earlier_times=earlier.get("times"),
            spent=read_spent_time(earlier.get("spent")),
            remaining_tests=RemainingTests.read(earlier) if self.mode is RunMode.CONFIRM else UNKNOWN_TESTS,
        )

    def _measure(self, setup: StudySetup) -> StudyResult | None:
        """Run the study and record how it ended. Return its result; None if it was interrupted."""
        record, only_confirms = setup.record, self.mode is RunMode.CONFIRM
        try:
            self._announce(setup)
            result = self.cluster.run(setup) if self.cluster else run_locally(setup)
            if not (only_confirms and record.search_ended):
                record.search_ended = result.search_ended
            record.add_notes(notes_on_search(result, record))
            return result
        except KeyboardInterrupt:
            interrupts.acknowledge()
            if not only_confirms:
                record.search_ended = "interrupted"
            return None
        except BaseException as error:
            self._record_failure(setup, error)
            raise

    def _announce(self, setup: StudySetup) -> None:
        """Say what begins and how long it takes."""
        record = setup.record
        line = start_line(
            self.mode,
            record.spent.seconds,
            record.task.problem,
            self.environment.options,
            setup.remaining_seconds,
            record.folder.path,
        )
        self.environment.on_progress(line)

    def _record_failure(self, setup: StudySetup, error: BaseException) -> None:
        """Write the results before ``error``, and add the command that continues the run to it."""
        task, folder = setup.record.task, setup.record.folder
        with contextlib.suppress(TuneError):  # a full disk must not hide the first error
            trials = setup.table.read()
            outcome = assess(trials, task.problem, task.baseline, task.dynamic_batching)
            recorded = self._recorded_status("failed", outcome)
            setup.record.write(recorded, outcome, reason=str(error) if recorded == "failed" else "")
            if any(trial.measurements for trial in trials):
                error.add_note(f"the measurements are kept; to continue: {self._continue_command(folder)}")

    def _recorded_status(self, status: RunStatus | Literal["failed"], outcome: Outcome) -> str:
        """Return the status for run.json. A confirmation that does not end leaves the run as usable as before."""
        if self.mode is RunMode.CONFIRM and status in ("interrupted", "failed"):
            return "found" if outcome.recommended else "none"
        return status

    def _continue_command(self, folder: RunFolder) -> str:
        action = "verify" if self.mode is RunMode.CONFIRM else "--resume"
        return f"tune {action} {shlex.quote(show_path(folder.path))}"


@contextlib.contextmanager
def _called_at_end(write_page: Callable[[], object]) -> Iterator[None]:
    """Call ``write_page`` when the context ends: the folder gets its page even if nothing can be shown."""
    is_written = False
    try:
        yield
    finally:
        try:
            with interrupts.deferred():
                write_page()
                is_written = True
        except KeyboardInterrupt:
            if not is_written:  # it came just before interrupts were deferred
                write_page()
            raise


def _status(result: StudyResult | None, outcome: Outcome) -> RunStatus:
    """Return the status of a run with this ``result``, None if it was interrupted."""
    if result is None:
        return "interrupted"
    if result.continued_by:
        return "left"
    return "found" if outcome.recommended else "none"


def _check_folders(options: RunOptions, resumed: RunFolder | None) -> None:
    """Raise a TuneError if the results folder or the storage cannot be written, before anything is measured."""
    if resumed is None:
        RunFolder.check(options.out)
    if options.storage is not None:
        from optimizer.store.optuna_study import check_storage

        check_storage(options.storage)
