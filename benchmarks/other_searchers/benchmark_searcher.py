"""The base class of the compared searchers: a Searcher in memory that runs one trial at a time."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

from objectives.metrics import Forecast
from optimizer.config.problem import Problem
from optimizer.core.candidate import Candidate
from optimizer.core.trial import LoadPoint, Trial
from optimizer.measure.load_search import doubling_loads


class BenchmarkSearcher(ABC):
    """A Searcher without a stored study. Each suggestion has to be observed before the next call of ``suggest``.

    ``trials`` are the observed trials, ``tried`` the canonical candidates that were suggested or observed.
    """

    is_exhaustive = False

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        self.trials: list[Trial] = []
        self.tried: set[Candidate] = set()
        self._loads: dict[Candidate, int | None] = {}

    @abstractmethod
    def choose(self) -> tuple[Candidate, int | None] | None:
        """Return a candidate that is not in ``tried``, and the concurrency at which its load search starts.

        The concurrency may be None, for the default. None instead of both ends the search.
        """

    def suggest(self) -> Candidate | None:
        chosen = self.choose()
        if chosen is None:
            return None
        candidate, load = chosen
        self.tried.add(candidate)
        self._loads[candidate] = load
        return candidate

    def expected_load(self, candidate: Candidate) -> int | None:
        return self._loads.get(candidate)

    def forecast(self, candidate: Candidate, load: LoadPoint, speed_probe_ms: float | None) -> Forecast | None:
        return None

    def observe(self, trial: Trial) -> None:
        self.trials.append(trial)
        self.tried.add(self.problem.space.canonical(trial.candidate))

    def left(self) -> list[Candidate]:
        """Return the candidates that are not in ``tried``, in the order of the space."""
        return [candidate for candidate in self.problem.space.candidates() if candidate not in self.tried]

    def loads(self, candidate: Candidate) -> Sequence[int]:
        """Return the concurrencies at which ``candidate`` is predicted; 1 if its deployment failed when recorded."""
        possible = self.problem.space.allowed_concurrencies(candidate)
        return doubling_loads(self.problem.max_concurrency) if possible is None else possible or (1,)
