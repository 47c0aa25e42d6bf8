"""Search methods by name. Optuna is imported only when one is made."""

from __future__ import annotations

from typing import TYPE_CHECKING

from optimizer.errors import BadInputError

if TYPE_CHECKING:
    from optimizer.interfaces import Searcher
    from optimizer.machine.fingerprint import Fingerprint
    from optimizer.problem import Problem
    from optimizer.search.elsewhere import Elsewhere

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
    if name not in SEARCHERS:
        raise BadInputError(f"unknown search method {name!r}; take one of {', '.join(SEARCHERS)}")
    if name == "simulated" and problem.objectives[0].name != "throughput":
        raise BadInputError(
            f"the search method simulated ranks by throughput; for {problem.objectives[0].name} take "
            f"{', '.join(other for other in SEARCHERS if other != name)}"
        )
    if name == "grid" and elsewhere is not None:
        raise BadInputError("--warm-start: the search method grid measures every configuration anyway; leave one out")
    from optimizer.search.optuna import OptunaSearcher, sampler_for
    from optimizer.store.study import open_study

    sampler = sampler_for("random" if name in ("simulated", "grid") else name, seed)
    study = open_study(storage, study_name, problem, sampler, fingerprint)
    if name == "simulated":
        from optimizer.search.simulated import SimulatedSearcher

        return SimulatedSearcher(problem, study, SMALLEST_GAIN, seed, elsewhere)
    if name == "grid":
        from optimizer.search.grid import GridSearcher

        return GridSearcher(problem, study, seed)
    return OptunaSearcher(problem, study, seed, elsewhere)
