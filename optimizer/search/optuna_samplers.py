"""Search by Optuna's samplers: tpe, nsga2, random and gp."""

from __future__ import annotations

import random
from collections.abc import Callable
from importlib.util import find_spec

from optuna.samplers import BaseSampler, GPSampler, NSGAIISampler, RandomSampler, TPESampler

from optimizer.core.candidate import Candidate
from optimizer.core.errors import BadInputError
from optimizer.search.candidate_tracker import CandidateTracker, TrackedSearcher
from optimizer.search.transfer import TransferredStudy

MAX_PROPOSALS = 10  # invalid or repeated proposals of a sampler before a candidate is drawn at random
STARTUP_TRIALS = 5  # Optuna's default of 10 would make a short run entirely random
POPULATION = 10
MAX_TRANSFERRED = 5  # best candidates of a transferred study that are tried first


def gp_is_installed() -> bool:
    """Return whether the package that only the search method gp needs is installed."""
    return find_spec("torch") is not None


SAMPLERS: dict[str, Callable[[int], BaseSampler]] = {  # search method -> function that makes its sampler from a seed
    "tpe": lambda seed: TPESampler(seed=seed, n_startup_trials=STARTUP_TRIALS, multivariate=True, constant_liar=True),
    "nsga2": lambda seed: NSGAIISampler(seed=seed, population_size=POPULATION),
    "random": lambda seed: RandomSampler(seed=seed),
    "gp": lambda seed: GPSampler(seed=seed, n_startup_trials=STARTUP_TRIALS),
}


def sampler_for(name: str, seed: int) -> BaseSampler:
    """Return the sampler of the study of a search method.

    The study of a method that uses none, such as `simulated`, has a random sampler.

    Raises:
        BadInputError: gp lacks a package.
    """
    if name == "gp" and not gp_is_installed():
        raise BadInputError("the search method gp needs torch; pip install 'tritune[gp]'")
    return SAMPLERS.get(name, SAMPLERS["random"])(seed)


class OptunaSearcher(TrackedSearcher):
    """A Searcher that suggests the proposals of its study's sampler.

    If the sampler repeats itself, a candidate is drawn at random. A new study begins with the best candidates of
    ``transferred``.
    """

    def __init__(self, tracker: CandidateTracker, seed: int, transferred: TransferredStudy | None) -> None:
        super().__init__(tracker)
        self._space = tracker.problem.space
        self._random = random.Random(seed)
        self._shuffled: list[Candidate] | None = None
        if transferred is not None and not tracker.study.get_trials(deepcopy=False):
            for candidate in transferred.best(tracker.problem)[:MAX_TRANSFERRED]:
                self._tracker.enqueue(candidate)

    def suggest(self) -> Candidate | None:
        """Return the next candidate, or None if all have been tried."""
        while True:
            tried = self._tracker.tried()
            if self._tracker.is_exhausted(tried):
                return None
            for _ in range(MAX_PROPOSALS):
                candidate = self._tracker.ask(tried)
                if candidate is not None:
                    return candidate
            drawn = self._draw(tried)
            if self._tracker.start(drawn):
                return drawn

    def _draw(self, tried: set[Candidate]) -> Candidate:
        if self._shuffled is None:
            self._shuffled = list(self._space.candidates())
            self._random.shuffle(self._shuffled)
        return next(candidate for candidate in self._shuffled if candidate not in tried)


def new_searcher(tracker: CandidateTracker, seed: int, transferred: TransferredStudy | None) -> OptunaSearcher:
    """Return the search method of the sampler that the study of ``tracker`` has."""
    return OptunaSearcher(tracker, seed, transferred)
