"""One run from options to result: wires the parts together and keeps what they gave."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
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
from optimizer.search import SMALLEST_GAIN, make_searcher, searcher_on
from optimizer.search.elsewhere import Elsewhere
from optimizer.sharing.others import Nobody
from optimizer.stack import Stack, WatcherMaker
from optimizer.stopwatch import Stopwatch
from optimizer.store.run_folder import RunFolder
from optimizer.store.run_record import RunRecord
from optimizer.store.trials_table import TrialsTable
from optimizer.task import Task
from optimizer.trial import Trial
from optimizer.tuner import Tuner

if TYPE_CHECKING:
    from optimizer.sharing.shared_study import SharedStudy

SATISFIED = f"the search ended early: another deployment promised less than about {SMALLEST_GAIN:.0%} more throughput"
Status = Literal["found", "none", "left", "interrupted"]


@dataclass(frozen=True)
class Result:
    """How a run ended. ``document`` is what ``--json`` prints. ``handed_on``: to whom, where it has ``left`` its
    study to other workers."""

    status: Status
    outcome: Outcome
    task: Task
    hardware: Hardware
    notes: tuple[str, ...]
    folder: RunFolder
    command: str
    document: dict[str, Any]
    handed_on: str = ""


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
    stack = Stack.detect(options, stopwatch, say)
    if resumed is None:
        RunFolder.check(options.out)
    if options.storage is not None:
        from optimizer.store.study import check_storage

        check_storage(options.storage)
    what = stack.task()
    here = stack.fingerprint(what)
    if resumed is not None:
        resumed.refuse_other(here)
    elsewhere, begun = _elsewhere(options, what, resumed)
    folder = resumed or RunFolder.create(options.out, what.source.name)
    with folder.locked():
        table = TrialsTable(folder.trials, what.source.name, what.problem.space.fields, here.id)
        spent = spent_seconds(table.read())
        record = RunRecord(folder, options, what, stack.hardware, stack.notes(what) + begun, stopwatch, here)
        record.write("running", None)
        interrupted, handed_on = False, ""
        try:
            search = partial(_search, options, what.problem, folder, here, elsewhere, spent, say)
            trials, notes, handed_on = _study(stack, what, record, table, search, spent, watch, confirm_share)
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
        ended: Status = "left" if handed_on else "found" if outcome.recommended else "none"
        status: Status = "interrupted" if interrupted else ended
        document = record.write(status, outcome, trials if report else None)
    told = record.notes, folder, command_line(options), document, handed_on
    return Result(status, outcome, what, stack.hardware, *told)


def _study(
    stack: Stack,
    what: Task,
    record: RunRecord,
    table: TrialsTable,
    search: Callable[[], AbstractContextManager[tuple[Searcher, SharedStudy | None]]],
    spent: float,
    watch: WatcherMaker,
    confirm_share: float,
) -> tuple[list[Trial], tuple[str, ...], str]:
    """Search, then confirm: all trials, what the user should know of how they came about, and who confirms where
    others go on with the study."""
    options, stopwatch, folder = stack.options, stack.stopwatch, record.folder
    with contextlib.closing(stack.target(what, folder)) as target, record.naming(target):
        target.start()  # while the simulator and Optuna are loaded
        if options.search == "simulated":
            with stopwatch.set_up():
                compile_ahead(stack.say)
        budget = Budget(options.budget_seconds, options.max_trials, spent, confirm_share)
        with watch(what.problem, budget, stack.hardware) as watcher, contextlib.ExitStack() as joined:
            measuring = stack.measuring(what, folder, table, watcher)
            with stopwatch.searching():
                searcher, shared = joined.enter_context(search())
            tuner = Tuner(what.problem, searcher, target, measuring, budget, stopwatch, shared or Nobody())
            trials, speed = tuner.run(what.comparisons()), SpeedLog()
            handed_on = shared.hand_on() if shared else ""
            if shared and not handed_on:
                trials = shared.gathered(trials, table)
            if confirm_share > 0 and not handed_on:
                with stopwatch.confirming():
                    confirmer = Confirmer(what.problem, target, measuring, budget, trials, speed.probe)
                    trials = confirmer.run(what.baseline)
    satisfied = SATISFIED if tuner.satisfied and len(trials) < len(what.problem.space) else ""
    throttled = throttle_note([one.gpu_throttling for one in _measured(trials)])
    notes = (measuring.guard.note, speed.note(), throttled, satisfied)
    return trials, tuple(note for note in notes if note), handed_on


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


@contextlib.contextmanager
def _search(
    options: RunOptions,
    problem: Problem,
    folder: RunFolder,
    here: Fingerprint,
    elsewhere: Elsewhere | None,
    spent: float,
    say: Callable[[str], None],
) -> Iterator[tuple[Searcher, SharedStudy | None]]:
    """What proposes the trials, and the study where it is shared with other workers."""
    if options.join is not None:
        from optimizer.sharing.join import join
        from optimizer.store.patience import Patience
        from optimizer.store.study import Shared

        patience = Patience(time.monotonic() + options.budget_seconds - spent, say, str(folder.trials))
        with join(options, problem, folder, here, Shared(patience)) as shared:
            yield searcher_on(shared.ledger, options.search, problem, options.seed, elsewhere), shared
        return
    storage, name = options.storage or str(folder.study), folder.study_name
    yield (
        make_searcher(options.search, problem, options.seed, storage, name, fingerprint=here, elsewhere=elsewhere),
        None,
    )


def _measured(trials: list[Trial]) -> list[Measurement]:
    """To search and to confirm."""
    found = [measurement for trial in trials for _, measurement in trial.measurements]
    return found + [again.measurement for trial in trials for again in trial.confirmations]
