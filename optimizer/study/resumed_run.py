"""Refuses to continue a run whose profile, model, study or trials have changed, before its files are written."""

from __future__ import annotations

from optimizer.machine.hardware import Fingerprint
from optimizer.options.run_options import RunOptions
from optimizer.results.finished_run import refuse_missing_rows
from optimizer.store.run_folder import RunFolder
from optimizer.store.trials_table import TrialsTable
from optimizer.study.searcher_factory import check_stored_study
from optimizer.study.task import Task


def check_unchanged(
    run: RunFolder, options: RunOptions, task: Task, fingerprint: Fingerprint, table: TrialsTable
) -> None:
    """Raise BadInputError if the measurements of ``run`` do not belong to ``task``, or some of them are missing.

    A refused run keeps its run.json, with its verdict. A run without run.json has only a trials table to check.

    Args:
        run: The folder of the run to continue.
        options: The options of the run.
        task: The task that the run would continue with.
        fingerprint: Fingerprint of this machine and server.
        table: The trials table of the run.

    Raises EnvironmentFault if the disk of the study is full or faulty.
    """
    trials = table.read(cut_torn_line=False)
    if not run.info.exists():
        return
    run.refuse_other_bounds(list(map(str, task.problem.sla)))
    run.refuse_other_model(task.source.facts)
    refuse_missing_rows(run, run.read_info(), trials)
    check_stored_study(options, task.problem, run, fingerprint)
