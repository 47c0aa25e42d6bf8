"""Measure the recommendation of a run again in a separate test (``tune verify --fresh``)."""

from __future__ import annotations

import math
import shlex
import shutil
from collections.abc import Sequence
from typing import TYPE_CHECKING

from objectives.sequential import LOOKS
from optimizer.confirmation.confirmer import Confirmer
from optimizer.confirmation.server_plan import COMPARED_SERVERS, ServerPlan
from optimizer.core.budget import Budget, RunMode
from optimizer.core.files import write_json
from optimizer.core.notes import present
from optimizer.core.safe_text import show_path
from optimizer.core.trial import Trial
from optimizer.machine.speed_probe import speed_note
from optimizer.measure.load_client.open_loop import lateness_note
from optimizer.options.command_line import option_words, search_again_command
from optimizer.options.option_reader import written_values
from optimizer.options.run_options import RunOptions
from optimizer.options.table import TARGET_OPTIONS
from optimizer.results import verification
from optimizer.results.finished_run import nothing_recommended, read_run, refuse_missing_rows
from optimizer.results.recommendation import assess
from optimizer.results.verification import Repetition, VerificationResult
from optimizer.store.run_folder import RunFolder
from optimizer.store.trials_table import TrialsTable
from optimizer.study.environment import Environment
from optimizer.study.load_generators import choose_clients
from optimizer.study.run_messages import start_line
from optimizer.study.task import Task
from optimizer.study.trial_runner import take_reference

if TYPE_CHECKING:
    from optimizer.results.progress_observers import Progress

TIME_FACTOR = 2.0  # budget of a verification over its expected time
LONGER_FACTOR = 2.0  # proposed budget after a verification that lacked time, over its budget or expected time


def verify_fresh(
    run: RunFolder,
    options: RunOptions,
    seconds: float | None,
    progress: Progress,
) -> VerificationResult:
    """Measure the recommendation of ``run`` again on fresh servers of the target in ``options``.

    ``seconds`` limits the time of the measurements; None allows twice the expected time.

    Raises BadInputError if the run recommends nothing, or its profile has other bounds or another model by now;
    TuneError as a run.
    """
    environment = Environment.detect(options, progress.on_progress)
    other_runs = environment.other_runs()
    task = environment.make_task()
    problem = task.problem
    trials = read_comparable_trials(run, task, has_same_files=options.target != "remote")
    before = assess(trials, problem, task.baseline, task.dynamic_batching).recommended
    if before is None:
        raise nothing_recommended(read_run(run.path), "verify")
    is_checked = choose_clients(options, task).perf_analyzer_checks
    server_plans = verification.verification_candidates(before, trials, problem, is_cross_checked=is_checked)
    folder = RunFolder.create(str(run.path), verification.FOLDER)
    if run.reference.exists():
        shutil.copyfile(run.reference, folder.reference)  # the requests are the same, so are the outputs
    budget = Budget(TIME_FACTOR * expected_seconds(server_plans) if seconds is None else seconds)
    progress.on_progress(start_line(RunMode.CONFIRM, 0.0, problem, options, budget.seconds, folder.path))
    fingerprint = environment.fingerprint(task)
    table = TrialsTable(folder.trials, problem.model, problem.space.fields, fingerprint.id, problem.cpu_count)
    # the lock tells `tune runs` that a process works on the run
    with (
        folder.locked(),
        environment.open_target(task, folder) as target,
        progress.open_observer(problem, budget, environment.hardware) as observer,
    ):
        measurer = environment.make_measurer(task, folder, table, observer)
        take_reference(target, measurer, task.baseline)
        confirmer = Confirmer(problem, target, measurer, budget, trials)
        measured = confirmer.test_recommendation(before, server_plans[1:])
    verified = verification.judge_verification(measured, server_plans, problem)
    windows = [window.measurement for trial in measured for window in trial.confirmations]
    other_runs += environment.other_runs()
    shown = present(
        [environment.remote_note(), *measurer.notes, lateness_note(windows), speed_note(windows), *other_runs]
    )
    repetition = repetition_of(run, options, max(budget.seconds, expected_seconds(server_plans)))
    result = VerificationResult(verified, before, problem, run, folder, repetition, shown)
    write_json(folder.path / verification.FILE, result.document())
    return result


def repetition_of(run: RunFolder, options: RunOptions, seconds: float) -> Repetition:
    """Return the commands after a verification of ``run`` with ``options``. It had ``seconds``, or it needs them."""
    path, stored, written = show_path(run.path), run.read_options(), written_values(options)
    target_options = {option.name for option in TARGET_OPTIONS}
    stored_values = written_values(stored) if options.target == stored.target else {}
    changed = {
        name: value for name, value in written.items() if name in target_options and value != stored_values.get(name)
    }
    if options.target != stored.target:
        changed["target"] = options.target  # the default one is not written
    words = ["tune", "verify", "--fresh", *option_words(changed)]
    longer = ["--budget", f"{math.ceil(LONGER_FACTOR * seconds)}s"]
    return Repetition(
        command=shlex.join([*words, path]),
        longer_command=shlex.join([*words, *longer, path]),
        search_command=search_again_command(options, run=path),
    )


def read_comparable_trials(run: RunFolder, task: Task, *, has_same_files: bool) -> list[Trial]:
    """Return the trials of ``run``. Raises BadInputError if it had another SLA or model than ``task`` has.

    ``has_same_files`` is False for a remote server, which has files of its own: the model is then not compared.
    """
    run.refuse_other_bounds(list(map(str, task.problem.sla)))
    if has_same_files:
        run.refuse_other_model(task.source.facts)
    with run.locked():
        trials = TrialsTable(
            run.trials,
            task.source.name,
            task.problem.space.fields,
            concurrent_models=[other.name for other in task.problem.concurrent],
        ).read()
    refuse_missing_rows(run, run.read_info(), trials)
    return trials


def expected_seconds(server_plans: Sequence[ServerPlan]) -> float:
    """Return the expected time of a verification; the first plan is that of the recommendation."""
    tested, *compared = server_plans
    return LOOKS[1] * tested.server_seconds + COMPARED_SERVERS * sum(plan.server_seconds for plan in compared)
