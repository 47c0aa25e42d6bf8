"""``tune verify RUN``: measure a run's recommendation and its runners-up again, on fresh servers."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Callable
from dataclasses import dataclass, replace

from optimizer.budget import Budget
from optimizer.confirm import verification
from optimizer.confirm.confirmer import Confirmer
from optimizer.confirm.verification import Verified
from optimizer.errors import BadInputError, DeploymentError
from optimizer.machine.hardware import Hardware
from optimizer.machine.speed import SpeedLog
from optimizer.options import RunOptions
from optimizer.outcome import Outcome, assess
from optimizer.problem import Problem
from optimizer.report import export
from optimizer.report.verified import document
from optimizer.stack import Stack, WatcherMaker
from optimizer.stopwatch import Stopwatch
from optimizer.store.run_folder import RunFolder
from optimizer.store.trials_table import TrialsTable

PATIENCE = 2.0  # times as long as it should take


@dataclass(frozen=True)
class Result:
    """``before`` is what the run had found; ``folder`` holds the new measurements."""

    verified: Verified
    before: Outcome
    problem: Problem
    hardware: Hardware
    folder: RunFolder
    notes: tuple[str, ...]


def verify(run: RunFolder, options: RunOptions, say: Callable[[str], None], watch: WatcherMaker) -> Result:
    """On fresh servers of the target that ``options`` say, or on the one that runs there.

    Raises BadInputError where the run recommends nothing, or its profile has other bounds by now; TuneError as a run
    does.
    """
    stack = Stack.detect(options, Stopwatch(), say)
    what = stack.task()
    asked, then = [str(bound) for bound in what.problem.constraints], run.read_constraints()
    if asked != then:
        raise BadInputError(
            f"{run.path}: it was run for {', '.join(then) or 'no bounds'}, but its profile now asks for "
            f"{', '.join(asked) or 'none'}; undo that, or run `tune` again"
        )
    with run.locked():
        trials = TrialsTable(run.trials, what.source.name, what.problem.space.fields).read()
    before = assess(trials, what.problem, what.baseline, what.dynamic_batching)
    wanted = verification.entrants(before, trials, what.problem)
    if not wanted:
        raise BadInputError(f"{run.path}: the run recommends nothing that could be verified; `tune` finds something")
    folder = RunFolder.create(str(run.path), "verify")
    here = stack.fingerprint(what)
    table = TrialsTable(folder.trials, what.source.name, what.problem.space.fields, here.id)
    if run.reference.exists():
        shutil.copyfile(run.reference, folder.reference)  # the same requests, the same answers
    fresh = [replace(trial, confirmations=()) for trial in trials]
    with contextlib.closing(stack.target(what, folder)) as target:
        budget = Budget(PATIENCE * sum(one.total_seconds for one in wanted))
        with watch(what.problem, budget, stack.hardware) as watcher:
            measuring, speed = stack.measuring(what, folder, table, watcher), SpeedLog()
            if measuring.guard.needs_reference:
                with contextlib.suppress(DeploymentError), target.deploy(what.baseline) as endpoint:
                    measuring.guard.reference(endpoint)
            confirmer = Confirmer(what.problem, target, measuring, budget, fresh, speed.probe)
            confirmer.measure(wanted)
    found = verification.verify(confirmer.trials, wanted, what.problem)
    notes = tuple(note for note in (stack.where(), measuring.guard.note, speed.note()) if note)
    export.write_json(folder.path / "verify.json", document(found, before, str(folder.path), notes))
    return Result(found, before, what.problem, stack.hardware, folder, notes)
