"""One run from options to result: wires the parts together and keeps what they gave."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

from objectives.metrics import Measurement
from optimizer import interrupts
from optimizer.batcher.ahead import compile_ahead
from optimizer.budget import CONFIRM_SHARE, Budget, spent_seconds
from optimizer.command_line import command_line
from optimizer.confirm.confirmer import Confirmer
from optimizer.errors import BadInputError, TuneError
from optimizer.interfaces import Searcher
from optimizer.machine.fingerprint import Fingerprint
from optimizer.machine.gpu_figures import throttle_note
from optimizer.machine.hardware import Hardware
from optimizer.machine.speed import SpeedLog
from optimizer.options import RunOptions
from optimizer.outcome import Outcome, assess
from optimizer.problem import Problem
from optimizer.search import SMALLEST_GAIN, make_searcher
from optimizer.search.elsewhere import Elsewhere
from optimizer.stack import Stack, WatcherMaker
from optimizer.stopwatch import Stopwatch
from optimizer.store.run_folder import RunFolder
from optimizer.store.run_record import RunRecord
from optimizer.store.trials_table import TrialsTable
from optimizer.task import Task
from optimizer.trial import Trial
from optimizer.tuner import Tuner

if TYPE_CHECKING:
    from optimizer.cluster.study import ClusterStudy

SATISFIED = f"the search ended early: another deployment promised less than about {SMALLEST_GAIN:.0%} more throughput"
Status = Literal["found", "none", "interrupted"]


@dataclass(frozen=True)
class Result:
    """How a run ended. ``document`` is what ``--json`` prints."""

    status: Status
    outcome: Outcome
    task: Task
    hardware: Hardware
    notes: tuple[str, ...]
    folder: RunFolder
    command: str
    document: dict[str, Any]


def tune(
    options: RunOptions,
    resumed: RunFolder | None,
    say: Callable[[str], None],
    watch: WatcherMaker,
    confirm_share: float = CONFIRM_SHARE,
    *,
    report: bool = True,
) -> Result:
    """Run the study, or continue the one in ``resumed``. ``say`` gets a line for each slow preparation.

    ``confirm_share`` of the budget is kept for the confirmation: with 0 there is none, with 1 nothing else. Without
    ``report`` the page is left out.
    An interrupt (KeyboardInterrupt) ends it early with the best so far. Raises TuneError.
    """
    stopwatch = Stopwatch()
    if options.cluster is None:
        return _tune(Stack.detect(options, stopwatch, say), None, resumed, watch, confirm_share, report=report)
    from optimizer.cluster.study import on_cluster

    wanted = resumed.fingerprint() if resumed else None
    with on_cluster(options, stopwatch, say, wanted) as cluster:
        return _tune(cluster.stack, cluster, resumed, watch, confirm_share, report=report)


def _tune(
    stack: Stack,
    cluster: ClusterStudy | None,
    resumed: RunFolder | None,
    watch: WatcherMaker,
    confirm_share: float,
    *,
    report: bool,
) -> Result:
    """``stack`` and ``cluster`` are of one kind of machine."""
    options, stopwatch = stack.options, stack.stopwatch
    if resumed is None:
        RunFolder.check(options.out)
    if options.storage is not None:
        from optimizer.store.study import check_storage

        check_storage(options.storage)
    what = stack.task()
    here = cluster.furnish(what) if cluster else stack.fingerprint(what)
    if resumed is not None:
        resumed.refuse_other(here)
    elsewhere, begun = _elsewhere(options, what, resumed)
    folder = resumed or RunFolder.create(options.out, what.source.name)
    with folder.locked():
        table = TrialsTable(folder.trials, what.source.name, what.problem.space.fields, here.id)
        spent = spent_seconds(table.read())
        record = RunRecord(folder, options, what, stack.hardware, stack.notes(what) + begun, stopwatch, here)
        record.write("running", None)
        interrupted = False
        try:
            search = partial(_searcher, options, what.problem, folder, here, elsewhere)
            if cluster:
                trials, notes = _study_on(cluster, what, record, table, search, spent, watch, confirm_share)
            else:
                trials, notes = _study(stack, what, record, table, search, spent, watch, confirm_share)
            record = replace(record, notes=record.notes + notes)
        except KeyboardInterrupt:
            interrupts.acknowledge()
            trials, interrupted = table.read(), True
        except BaseException as error:
            with contextlib.suppress(TuneError):  # of a full disk: what ended the run is what is told
                outcome = assess(table.read(), what.problem, what.baseline, what.dynamic_batching)
                record.write("failed", outcome, reason=str(error))
            raise
        outcome = assess(trials, what.problem, what.baseline, what.dynamic_batching)
        status: Status = "interrupted" if interrupted else "found" if outcome.recommended else "none"
        document = record.write(status, outcome, trials if report else None)
    return Result(status, outcome, what, stack.hardware, record.notes, folder, command_line(options), document)


def _study(
    stack: Stack,
    what: Task,
    record: RunRecord,
    table: TrialsTable,
    search: Callable[[], Searcher],
    spent: float,
    watch: WatcherMaker,
    confirm_share: float,
) -> tuple[list[Trial], tuple[str, ...]]:
    """Search, then confirm: all trials, and what the user should know of how they came about."""
    options, stopwatch, folder = stack.options, stack.stopwatch, record.folder
    with contextlib.closing(stack.target(what, folder)) as target, record.naming(target):
        target.start()  # while the simulator and Optuna are loaded
        if options.search == "simulated":
            with stopwatch.set_up():
                compile_ahead(stack.say)
        budget = Budget(options.budget_seconds, options.max_trials, spent, confirm_share)
        with watch(what.problem, budget, stack.hardware) as watcher:
            measuring = stack.measuring(what, folder, table, watcher)
            with stopwatch.searching():
                searcher = search()
            tuner = Tuner(what.problem, searcher, target, measuring, budget, stopwatch)
            trials, speed = tuner.run(what.comparisons()), SpeedLog()
            if confirm_share > 0:
                with stopwatch.confirming():
                    confirmer = Confirmer(what.problem, target, measuring, budget, trials, speed.probe)
                    trials = confirmer.run(what.baseline)
    satisfied = SATISFIED if tuner.satisfied and len(trials) < len(what.problem.space) else ""
    throttled = throttle_note([one.gpu_throttling for one in _measured(trials)])
    notes = (measuring.guard.note, speed.note(), throttled, satisfied)
    return trials, tuple(note for note in notes if note)


def _study_on(
    cluster: ClusterStudy,
    what: Task,
    record: RunRecord,
    table: TrialsTable,
    search: Callable[[], Searcher],
    spent: float,
    watch: WatcherMaker,
    confirm_share: float,
) -> tuple[list[Trial], tuple[str, ...]]:
    """As ``_study``, on the workers of a cluster."""
    found = cluster.run(what, record, table, search, spent, watch, confirm_share)
    early = SATISFIED if found.satisfied and len(found.trials) < len(what.problem.space) else ""
    throttled = throttle_note([one.gpu_throttling for one in _measured(found.trials)])
    return found.trials, tuple(note for note in (*found.notes, throttled, early) if note)


def _elsewhere(
    options: RunOptions, what: Task, resumed: RunFolder | None
) -> tuple[Elsewhere | None, tuple[str, ...]]:
    """What ``--warm-start`` showed, and what to say of it. A run that is continued goes on without, if need be."""
    if options.warm_start is None:
        return None, ()
    from optimizer.replay.source import fitting, read_source

    compared = [candidate for _, candidate in what.comparisons()]
    try:
        source = read_source(options.warm_start, options.out, what.problem.request_batch_size)
        return fitting(source, what.problem, compared)
    except BadInputError as error:
        if resumed is None:
            raise
        return None, (f"went on without what it began with: {error}",)


def _searcher(
    options: RunOptions, problem: Problem, folder: RunFolder, here: Fingerprint, elsewhere: Elsewhere | None
) -> Searcher:
    return make_searcher(
        options.search,
        problem,
        options.seed,
        options.storage or str(folder.study),
        folder.study_name,
        fingerprint=here,
        elsewhere=elsewhere,
    )


def _measured(trials: list[Trial]) -> list[Measurement]:
    """To search and to confirm."""
    found = [measurement for trial in trials for _, measurement in trial.measurements]
    return found + [again.measurement for trial in trials for again in trial.confirmations]
