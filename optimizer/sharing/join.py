"""``--join STUDY``: the study that this worker shares with others."""

from __future__ import annotations

from optimizer.machine.fingerprint import Fingerprint
from optimizer.options import RunOptions
from optimizer.problem import Problem
from optimizer.search import sampler_of
from optimizer.sharing.shared_study import SharedStudy
from optimizer.store.run_folder import RunFolder
from optimizer.store.study import Shared, open_study
from optimizer.store.study_faults import dialect_of


def join(
    options: RunOptions, problem: Problem, folder: RunFolder, here: Fingerprint | None, shared: Shared
) -> SharedStudy:
    """Raises BadInputError where the study cannot be opened, is another problem's, or was measured elsewhere than
    ``here``."""
    assert options.storage is not None
    assert options.join is not None
    sampler = sampler_of(options.search, options.seed)
    study = open_study(options.storage, options.join, problem, sampler, here, shared)
    joined = SharedStudy(study, problem, shared, folder.path, one_host=is_of_one_host(options.storage))
    study.sampler = sampler_of(options.search, options.seed + joined.number)  # else all would propose the same
    return joined


def is_of_one_host(storage: str) -> bool:
    """Whether ``storage`` is a file: no database server that other hosts reach."""
    return "://" not in storage or dialect_of(storage).startswith("sqlite")
