"""Search by Optuna's samplers: tpe, nsga2, random, gp."""

from __future__ import annotations

import random
from importlib.util import find_spec

import optuna
from optuna.samplers import BaseSampler, GPSampler, NSGAIISampler, RandomSampler, TPESampler

from optimizer.errors import BadInputError
from optimizer.problem import Problem
from optimizer.search.elsewhere import Elsewhere
from optimizer.search.ledger import Ledger
from optimizer.trial import Candidate, Trial

ASKS = 10  # proposals that may be invalid or tried before, until one is drawn from what is left
STARTUP_TRIALS = 5  # Optuna's default of 10 would make a short run all random
POPULATION = 10
FIRST = 5  # of what was best elsewhere


def gp_is_installed() -> bool:
    return bool(find_spec("torch") and find_spec("scipy"))


def sampler_for(name: str, seed: int) -> BaseSampler:
    """The sampler called ``name``: tpe, nsga2, random or gp. Raises BadInputError where gp lacks torch."""
    if name == "tpe":
        return TPESampler(seed=seed, n_startup_trials=STARTUP_TRIALS, multivariate=True, constant_liar=True)
    if name == "nsga2":
        return NSGAIISampler(seed=seed, population_size=POPULATION)
    if name == "random":
        return RandomSampler(seed=seed)
    if name == "gp":
        if not gp_is_installed():
            raise BadInputError("the search method gp needs torch and scipy; pip install 'tritune[gp]'")
        return GPSampler(seed=seed, n_startup_trials=STARTUP_TRIALS)
    raise BadInputError(f"unknown search method {name!r}; take tpe, nsga2, random or gp")


class OptunaSearcher:
    """A Searcher that asks the sampler of ``study``, and draws from the rest where that repeats itself.

    A new study begins with the best of ``elsewhere``.
    """

    is_exhaustive = False

    def __init__(
        self,
        problem: Problem,
        study: optuna.Study,
        seed: int = 0,
        elsewhere: Elsewhere | None = None,
        ledger: Ledger | None = None,
    ) -> None:
        """``ledger`` is that of ``study``, where it is kept already."""
        self._ledger = ledger or Ledger(problem, study)
        self._space = problem.space
        self._random = random.Random(seed)
        self._rest: list[Candidate] | None = None
        if elsewhere is not None and not study.get_trials(deepcopy=False):
            for candidate in elsewhere.best(problem)[:FIRST]:
                self._ledger.enqueue(candidate)

    def suggest(self) -> Candidate | None:
        while True:
            tried = self._ledger.tried()
            if self._ledger.is_exhausted(tried):
                return None
            for _ in range(ASKS):
                candidate = self._ledger.ask(tried)
                if candidate is not None:
                    return candidate
            drawn = self._ledger.start(self._draw(tried))
            if drawn is not None:
                return drawn

    def expected_load(self, candidate: Candidate) -> int | None:
        """Nothing is expected."""
        return None

    def observe(self, trial: Trial) -> None:
        self._ledger.record(trial)

    def _draw(self, tried: set[Candidate]) -> Candidate:
        if self._rest is None:
            self._rest = list(self._space.candidates())
            self._random.shuffle(self._rest)
        return next(candidate for candidate in self._rest if candidate not in tried)
