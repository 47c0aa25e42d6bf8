"""Search methods by name. Optuna is imported only when one is made."""

from __future__ import annotations

from typing import TYPE_CHECKING

from optimizer.errors import BadInputError

if TYPE_CHECKING:
    from optuna.samplers import BaseSampler

    from optimizer.interfaces import Searcher
    from optimizer.machine.fingerprint import Fingerprint
    from optimizer.problem import Problem
    from optimizer.search.elsewhere import Elsewhere
    from optimizer.search.ledger import Ledger

SMALLEST_GAIN = 0.02  # of throughput: `simulated` ends where another deployment promises less
SEARCHERS = ("simulated", "tpe", "nsga2", "random", "grid", "gp")


def installed() -> tuple[str, ...]:
    """The methods whose packages are there."""
    from optimizer.search.optuna import gp_is_installed

    return tuple(name for name in SEARCHERS if name != "gp" or gp_is_installed())


def make_searcher(
    name: str,
    problem: Problem,
    seed: int = 0,
    storage: str | None = None,
    study_name: str = "tritune",
    *,
    fingerprint: Fingerprint | None = None,
    elsewhere: Elsewhere | None = None,
) -> Searcher:
    """The search method ``name``, its study kept in ``storage`` (see ``study.open_study``; None: in memory).

    ``fingerprint`` is that of what is measured on; ``elsewhere`` what a study on another machine showed. The same
    seed and the same observations give the same suggestions. Raises BadInputError for an unknown method, one that
    lacks a package or has no use for ``elsewhere``, or a study that cannot be opened.
    """
    check(name, problem, elsewhere)
    from optimizer.search.ledger import Ledger
    from optimizer.store.study import open_study

    study = open_study(storage, study_name, problem, sampler_of(name, seed), fingerprint)
    return searcher_on(Ledger(problem, study), name, problem, seed, elsewhere)


def check(name: str, problem: Problem, elsewhere: Elsewhere | None) -> None:
    """Raises BadInputError as ``make_searcher``, before a study is opened."""
    if name not in SEARCHERS:
        raise BadInputError(f"unknown search method {name!r}; take one of {', '.join(SEARCHERS)}")
    if name == "simulated" and problem.objectives[0].name != "throughput":
        raise BadInputError(
            f"the search method simulated ranks by throughput; for {problem.objectives[0].name} take "
            f"{', '.join(other for other in SEARCHERS if other != name)}"
        )
    if name == "grid" and elsewhere is not None:
        raise BadInputError("--warm-start: the search method grid measures every configuration anyway; leave one out")


def sampler_of(name: str, seed: int) -> BaseSampler:
    """Of the study of the search method ``name``. Raises BadInputError where it lacks a package."""
    from optimizer.search.optuna import sampler_for

    return sampler_for("random" if name in ("simulated", "grid") else name, seed)


def searcher_on(
    ledger: Ledger, name: str, problem: Problem, seed: int = 0, elsewhere: Elsewhere | None = None
) -> Searcher:
    """The search method ``name`` on a study that is open; see ``make_searcher``."""
    if name == "simulated":
        from optimizer.search.simulated import SimulatedSearcher

        return SimulatedSearcher(problem, ledger.study, SMALLEST_GAIN, seed, elsewhere, ledger)
    if name == "grid":
        from optimizer.search.grid import GridSearcher

        return GridSearcher(problem, ledger.study, seed, ledger)
    from optimizer.search.optuna import OptunaSearcher

    return OptunaSearcher(problem, ledger.study, seed, elsewhere, ledger)
