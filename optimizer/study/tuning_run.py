"""One run of `tune`, from the request to its result."""

from __future__ import annotations

import contextlib
import shlex
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

from optimizer.core import interrupts
from optimizer.core.budget import RunMode, spent_seconds
from optimizer.core.errors import BadInputError, TuneError
from optimizer.core.notes import (
    ConfirmedByPerfAnalyzer,
    Note,
    present,
    read_lasting,
)
from optimizer.core.safe_text import is_file, one_line
from optimizer.core.stopwatch import Stopwatch
from optimizer.machine.hardware import Fingerprint, Hardware
from optimizer.options.command_line import command_line
from optimizer.options.run_options import RunOptions
from optimizer.results import summary
from optimizer.results.finished_run import read_run
from optimizer.results.recommendation import Outcome, assess
from optimizer.store.run_folder import RunFolder
from optimizer.store.trials_table import TrialsTable
from optimizer.study.environment import Environment, ObserverFactory
from optimizer.study.load_generators import why_perf_analyzer
from optimizer.study.run_notes import notes_on_end, notes_on_measurements, notes_on_outcome
from optimizer.study.run_record import RunRecord, current_versions
from optimizer.study.searcher_factory import load_warm_start, open_searcher
from optimizer.study.start_line import start_line
from optimizer.study.study import StudySetup, run_locally
from optimizer.study.task import Task

if TYPE_CHECKING:
    from optimizer.study.distributed.ray_study import ClusterStudy


RunStatus = Literal["found", "none", "left", "interrupted"]


@dataclass(frozen=True)
class RunResult:
    """How a run ended.

    ``status`` is ``found`` if there is a recommendation, whose verdict ``outcome`` has, and ``none`` otherwise.
    ``document`` is what ``--json`` prints. ``report_path`` is the report page; None if there is none.
    ``continued_by`` names the workers that continue a study that this run has ``left``.
    """

    status: RunStatus
    outcome: Outcome
    task: Task
    hardware: Hardware
    notes: tuple[Note, ...]
    folder: RunFolder
    command: str
    document: dict[str, Any]
    report_path: Path | None = None
    continued_by: str = ""


ShowResult: TypeAlias = Callable[[RunResult], None]


def show_nothing(_: RunResult) -> None:
    """Leave the result to the caller of ``tune``."""


def tune(
    options: RunOptions,
    resumed: RunFolder | None,
    say: Callable[[str], None],
    open_observer: ObserverFactory,
    mode: RunMode | None = None,
    *,
    report: bool = True,
    show: ShowResult = show_nothing,
    confirm_seconds: float | None = None,
) -> RunResult:
    """Run a study, or continue the one in ``resumed``, and return its result.

    Args:
        options: What to tune, and how.
        resumed: The folder of the run to continue.
        say: Called with one line for each slow preparation.
        open_observer: Opens the display of progress.
        mode: Whether to search, to confirm, or both; by default as ``options`` say.
        report: Whether to write the report page.
        show: Called with the result before the report page is written, which takes a second or more.
        confirm_seconds: Time of a session in the mode CONFIRM; None for the budget of ``options``.

    An interrupt (KeyboardInterrupt) ends the run early with the best result so far. Raises TuneError.
    """
    stopwatch = Stopwatch()
    if mode is None:
        mode = RunMode.SEARCH_AND_CONFIRM if options.confirmation else RunMode.SEARCH
    if options.cluster is None:
        environment = Environment.detect(options, stopwatch, say)
        return _run(environment, None, resumed, open_observer, mode, confirm_seconds, report=report, show=show)
    from optimizer.study.distributed.ray_study import open_cluster

    preferred = resumed.fingerprint() if resumed else None
    with open_cluster(options, stopwatch, say, preferred) as cluster:
        environment = cluster.environment
        return _run(environment, cluster, resumed, open_observer, mode, confirm_seconds, report=report, show=show)


def continue_confirmation(
    run: RunFolder,
    options: RunOptions,
    seconds: float,
    say: Callable[[str], None],
    open_observer: ObserverFactory,
    show: ShowResult = show_nothing,
) -> RunResult:
    """Continue the confirmation of ``run`` where it ended, for ``seconds``, and return the result of the run.

    The tests go on with all their windows, so repeating this until PASS makes no more errors than one session. The
    confirmation of a run that has none begins.

    Args:
        run: The folder of the run, which gets the new measurements.
        options: The options of the run.
        seconds: Time of the measurements.
        say: Called with one line for each slow preparation.
        open_observer: Opens the display of progress.
        show: As for ``tune``.

    Raises BadInputError if the run has no trial or found nothing, its confirmation was not planned in run.json, or
    its profile has other bounds by now; TuneError as ``tune``.
    """
    path, recorded = one_line(str(run.path)), read_run(run.path)
    if not recorded.trials:
        raise BadInputError(f"{path}: nothing was measured yet; continue the search: `tune --resume {path}`")
    is_tested = any(trial.confirmations for trial in recorded.trials)
    if recorded.status == "none" and not is_tested:
        raise summary.nothing_recommended(run.path, recorded.problem, "verify", recorded.outcome)
    is_planned = isinstance(recorded.info.get("confirmation_plan"), dict)
    if not is_planned and is_tested:
        raise BadInputError(
            f"{path}: run.json has no confirmation_plan, so the test cannot continue; make a separate one: "
            f"`tune verify --fresh {path}`"
        )
    return tune(options, run, say, open_observer, RunMode.CONFIRM, show=show, confirm_seconds=seconds)


def _run(
    environment: Environment,
    cluster: ClusterStudy | None,
    resumed: RunFolder | None,
    open_observer: ObserverFactory,
    mode: RunMode,
    confirm_seconds: float | None,
    *,
    report: bool,
    show: ShowResult,
) -> RunResult:
    options = environment.options
    _check_folders(options, resumed)
    task = environment.prepare_task()
    fingerprint = cluster.prepare_workers(task) if cluster else environment.fingerprint(task)
    if resumed is not None:
        resumed.refuse_other(fingerprint)
        if confirm_seconds is not None:
            resumed.refuse_other_bounds(list(map(str, task.problem.sla)))
    transfer, transfer_notes = load_warm_start(options, task, resumed)
    folder, only_confirms = resumed or RunFolder.create(options.out, task.source.name), mode is RunMode.CONFIRM
    with folder.locked():
        problem = task.problem
        table = TrialsTable(folder.trials, problem.model, problem.space.fields, fingerprint.id, problem.cpu_count)
        spent = spent_seconds(table.read())
        before = resumed.read_info() if resumed and resumed.info.exists() else {}
        record = _make_record(folder, environment, task, fingerprint, before, only_confirms=only_confirms)
        record = record.with_notes([*transfer_notes, *read_lasting(before.get("lasting_notes"))])
        record.write("running", None)
        searcher = partial(
            open_searcher, options, task.problem, folder, fingerprint, transfer, spent, environment.say
        )
        setup = StudySetup(task, record, table, searcher, open_observer, spent, mode, confirm_seconds)
        result = None
        try:
            action = "testing the recommendation for" if only_confirms else "continuing" if resumed else "tuning"
            budget = setup.budget(cluster.worker_count if cluster else 1)
            seconds = max(budget.seconds - budget.spent_seconds, 0.0)
            environment.say(start_line(action, problem, options, seconds, folder.path))
            result = cluster.run(setup) if cluster else run_locally(setup)
            trials = result.trials
            if not (only_confirms and record.search_ended):
                record = replace(record, search_ended=result.search_ended)
            record = record.with_notes([*setup.notes, *notes_on_end(result, record, confirm_seconds)])
        except KeyboardInterrupt:
            interrupts.acknowledge()
            record = record if only_confirms else replace(record, search_ended="interrupted")
            record = record.with_notes(setup.notes)
            trials = table.read()
        except BaseException as error:
            with contextlib.suppress(TuneError):  # a full disk must not hide the first error
                outcome = assess(table.read(), task.problem, task.baseline, task.dynamic_batching)
                record.with_notes(setup.notes).write("failed", outcome, reason=str(error))
                if any(trial.measurements for trial in table.read()):
                    error.add_note(_how_to_continue(folder, only_confirms=only_confirms))
            raise
        outcome = assess(trials, task.problem, task.baseline, task.dynamic_batching)
        record = record.with_notes(
            [*notes_on_measurements(trials), *notes_on_outcome(outcome, trials, task, options)]
        )
        continued_by = result.continued_by if result else ""
        status: RunStatus = "found" if outcome.recommended else "none"
        if result is None:
            status = "interrupted"
        elif continued_by:
            status = "left"
        document = record.write(status, outcome)
        ended = RunResult(
            status,
            outcome,
            task,
            environment.hardware,
            record.notes,
            folder,
            command_line(options),
            document,
            folder.report if report or is_file(folder.report) else None,
            continued_by,
        )
        try:
            show(ended)
        finally:  # the folder gets its page even if nothing can be shown
            if report:
                record.write_page(status, outcome, trials, document)
    return ended


def _how_to_continue(folder: RunFolder, *, only_confirms: bool) -> str:
    """Return where the measurements of a failed run are, and the command that continues it."""
    path = shlex.quote(one_line(str(folder.path)))
    return f"the measurements are kept; to continue: tune {'verify' if only_confirms else '--resume'} {path}"


def _check_folders(options: RunOptions, resumed: RunFolder | None) -> None:
    """Raise a TuneError if the results folder or the storage cannot be written, before anything is measured."""
    if resumed is None:
        RunFolder.check(options.out)
    if options.storage is not None:
        from optimizer.store.optuna_study import check_storage

        check_storage(options.storage)


def _make_record(
    folder: RunFolder,
    environment: Environment,
    task: Task,
    fingerprint: Fingerprint,
    before: Mapping[str, Any],
    *,
    only_confirms: bool,
) -> RunRecord:
    """Return the record of a run, which continues ``before``, the run.json of its earlier sessions (empty if new)."""
    reason, planned = why_perf_analyzer(environment.options, task), before.get("confirmation_plan")
    return RunRecord(
        folder,
        environment,
        task,
        fingerprint,
        present([*environment.notes(task), reason and ConfirmedByPerfAnalyzer(reason.value)]),
        before.get("search_ended") if only_confirms else None,
        reason,
        versions=current_versions(before),
        planned=dict(planned) if isinstance(planned, dict) else {},
        earlier_times=before.get("times"),
    )
