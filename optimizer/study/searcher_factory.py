"""Make the searcher of a run on its Optuna study."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from optimizer.core.interfaces import Searcher
from optimizer.machine.hardware import Fingerprint
from optimizer.options.run_options import RunOptions
from optimizer.results.comparison import request_conditions
from optimizer.search import make_searcher, make_searcher_for_study
from optimizer.store.run_folder import HASH_DIGITS, MODEL_HASH, RunFolder
from optimizer.study.scheduler import OtherWorkers
from optimizer.study.task import Task

if TYPE_CHECKING:
    from optimizer.search.transfer import TransferredStudy


def shared_conditions(options: RunOptions, task: Task) -> dict[str, str | None]:
    """Return the conditions that all workers of a shared study have to share; empty for a study of one run.

    An unknown condition is None and agrees with any other.
    """
    if options.study_name is None:
        return {}
    model = task.source.facts.get(MODEL_HASH)  # a Triton repository has none
    return {
        MODEL_HASH: str(model)[:HASH_DIGITS] if model else None,
        **request_conditions(options, Path(task.input_data).name),
    }


def check_stored_study(options: RunOptions, task: Task, folder: RunFolder, fingerprint: Fingerprint) -> None:
    """Raise a TuneError if ``open_searcher`` would refuse the study of the run in ``folder``."""
    from optimizer.search.optuna_samplers import sampler_for  # imports Optuna
    from optimizer.store.optuna_study import check_study

    storage, name = options.storage or str(folder.study), options.study_name or folder.study_name
    sampler = sampler_for(options.search, options.seed)
    check_study(storage, name, task.problem, sampler, fingerprint, shared_conditions(options, task))


@contextlib.contextmanager
def open_searcher(
    options: RunOptions,
    task: Task,
    folder: RunFolder,
    fingerprint: Fingerprint,
    transferred: TransferredStudy | None,
    spent_seconds: float,
    on_progress: Callable[[str], None],
) -> Iterator[tuple[Searcher, OtherWorkers]]:
    """Yield the searcher, and the other workers of its study. Raises TuneError.

    Args:
        options: The search method, its seed, the storage and the name of a shared study.
        task: The model and the problem.
        folder: The folder of the run, which has the study unless ``options`` name a storage.
        fingerprint: The device and the server. A study that was measured on others is refused.
        transferred: The trials of the study that ``--warm-start`` names; None without it.
        spent_seconds: Time of the budget that earlier sessions used; a faulty storage is retried until its end.
        on_progress: Called with one line for each fault of the storage.
    """
    problem = task.problem
    if options.study_name is not None:
        from optimizer.store.optuna_storage import RetryPolicy
        from optimizer.store.optuna_study import StudySharing
        from optimizer.study.distributed.shared_study import join

        retry = RetryPolicy(
            time.monotonic() + options.budget_seconds - spent_seconds, on_progress, str(folder.trials)
        )
        conditions = shared_conditions(options, task)
        with join(options, problem, folder, fingerprint, StudySharing(retry), conditions) as shared:
            yield make_searcher_for_study(shared.tracker, options.search, problem, options.seed, transferred), shared
        return
    searcher = make_searcher(
        options.search,
        problem,
        options.seed,
        options.storage or str(folder.study),
        folder.study_name,
        fingerprint=fingerprint,
        transferred=transferred,
    )
    yield searcher, OtherWorkers()
