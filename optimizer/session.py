"""One run from options to result: wires the parts together and keeps what they gave."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

from optimizer import interrupts
from optimizer.budget import CONFIRM_SHARE, spent_seconds
from optimizer.command_line import command_line
from optimizer.errors import TuneError
from optimizer.machine.gpu_figures import throttle_note
from optimizer.machine.hardware import Hardware
from optimizer.options import RunOptions
from optimizer.outcome import Outcome, assess
from optimizer.search import SMALLEST_GAIN
from optimizer.searching import opened, shown_elsewhere
from optimizer.stack import Stack, WatcherMaker
from optimizer.stopwatch import Stopwatch
from optimizer.store.run_folder import RunFolder
from optimizer.store.run_record import RunRecord
from optimizer.store.trials_table import TrialsTable
from optimizer.study import Found, Study, run_here
from optimizer.task import Task

if TYPE_CHECKING:
    from optimizer.cluster.study import ClusterStudy

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
    elsewhere, begun = shown_elsewhere(options, what, resumed)
    folder = resumed or RunFolder.create(options.out, what.source.name)
    with folder.locked():
        table = TrialsTable(folder.trials, what.source.name, what.problem.space.fields, here.id)
        spent = spent_seconds(table.read())
        record = RunRecord(folder, options, what, stack.hardware, stack.notes(what) + begun, stopwatch, here)
        record.write("running", None)
        found, handed_on = None, ""
        try:
            search = partial(opened, options, what.problem, folder, here, elsewhere, spent, stack.say)
            study = Study(what, record, table, search, watch, spent, confirm_share)
            found = cluster.run(study) if cluster else run_here(stack, study)
            trials, handed_on = found.trials, found.handed_on
            record = replace(record, notes=record.notes + _notes(what, found))
        except KeyboardInterrupt:
            interrupts.acknowledge()
            trials = table.read()
        except BaseException as error:
            with contextlib.suppress(TuneError):  # of a full disk: what ended the run is what is told
                outcome = assess(table.read(), what.problem, what.baseline, what.dynamic_batching)
                record.write("failed", outcome, reason=str(error))
            raise
        outcome = assess(trials, what.problem, what.baseline, what.dynamic_batching)
        ended: Status = "left" if handed_on else "found" if outcome.recommended else "none"
        status: Status = ended if found else "interrupted"
        document = record.write(status, outcome, trials if report else None)
    told = record.notes, folder, command_line(options), document, handed_on
    return Result(status, outcome, what, stack.hardware, *told)


def _notes(what: Task, found: Found) -> tuple[str, ...]:
    """What the user should know of how the trials came about."""
    measured = [measurement for trial in found.trials for _, measurement in trial.measurements]
    measured += [again.measurement for trial in found.trials for again in trial.confirmations]
    throttled = throttle_note([one.gpu_throttling for one in measured])
    early = SATISFIED if found.satisfied and len(found.trials) < len(what.problem.space) else ""
    return tuple(note for note in (*found.notes, throttled, early) if note)
