"""Search methods by name. Optuna is imported only when a searcher is made."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Protocol, cast

from optimizer.options.run_options import SEARCHERS

if TYPE_CHECKING:
    from optimizer.config.problem import Problem
    from optimizer.core.interfaces import Searcher
    from optimizer.machine.hardware import Fingerprint
    from optimizer.search.candidate_tracker import CandidateTracker
    from optimizer.search.transfer import TransferredStudy

# `simulated` ends if the expected gain of another deployment is less than this share of the throughput. That is the
# standard error of the throughput after a confirmation: deployments differ by 5 %, and it has six servers.
MIN_GAIN = 0.02


def installed_methods() -> tuple[str, ...]:
    """Return the search methods whose packages are installed."""
    from optimizer.search.optuna_samplers import gp_is_installed

    return tuple(name for name in SEARCHERS if name != "gp" or gp_is_installed())


def make_searcher(
    name: str,
    problem: Problem,
    seed: int = 0,
    storage: str | None = None,
    study_name: str = "tritune",
    *,
    fingerprint: Fingerprint | None = None,
    transferred: TransferredStudy | None = None,
) -> Searcher:
    """Return the search method ``name`` on a study that is opened or continued.

    The same seed and the same observations give the same suggestions.

    Args:
        name: One of SEARCHERS.
        problem: The space, objectives and constraints.
        seed: Seed of random choices.
        storage: Where the study is stored (see ``open_study``); None keeps it in memory.
        study_name: The name of the study in ``storage``.
        fingerprint: The machine that is measured.
        transferred: The study of another machine to begin with; not for `grid`.

    Raises:
        BadInputError: The method lacks a package, or the study cannot be opened.
    """
    from optimizer.search.candidate_tracker import CandidateTracker
    from optimizer.search.optuna_samplers import sampler_for
    from optimizer.store.optuna_study import open_study

    study = open_study(storage, study_name, problem, sampler_for(name, seed), fingerprint)
    return make_searcher_for_study(CandidateTracker(problem, study), name, seed, transferred)


def make_searcher_for_study(
    tracker: CandidateTracker, name: str, seed: int = 0, transferred: TransferredStudy | None = None
) -> Searcher:
    """Return the search method ``name`` on the open study of ``tracker``; see ``make_searcher``."""
    from optimizer.search import optuna_samplers

    is_sampler = name in optuna_samplers.SAMPLERS
    module = optuna_samplers if is_sampler else importlib.import_module(f"{__name__}.{name}")
    return cast(SearcherModule, module).new_searcher(tracker, seed, transferred)


class SearcherModule(Protocol):
    """The functions of the module ``optimizer/search/NAME.py``, which implements ``--search NAME``."""

    def new_searcher(self, tracker: CandidateTracker, seed: int, transferred: TransferredStudy | None) -> Searcher:
        """Return a searcher on the problem and study of ``tracker``. It may begin with the study ``transferred``."""
