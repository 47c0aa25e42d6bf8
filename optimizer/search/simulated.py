"""The search guided by simulation."""

from __future__ import annotations

import math
from collections.abc import Set

from objectives.metrics import Forecast
from optimizer.core.candidate import Candidate
from optimizer.core.trial import LoadPoint, Trial
from optimizer.search import MIN_GAIN
from optimizer.search.candidate_selector import CandidateSelector, Decision
from optimizer.search.candidate_tracker import CandidateTracker, TrackedSearcher
from optimizer.search.optuna_encoding import finished_trials
from optimizer.search.transfer import TransferredStudy

MIN_NOISE, MAX_NOISE = 0.25, 1.5  # limits of the relative noise that scales the smallest gain
EXPECTED_NOISE = 1.0  # a search with more noise than this deploys at least CONFIRMED_SERVERS times
WITHOUT_TRANSFER = 4.0  # factor on the smallest gain if only this machine's own measurements predict it
CONFIRMED_SERVERS = 6  # fresh servers of a typical confirmation
# Exponent of the time of the search relative to that of a confirmation. An exponent of 1 has the same regret on the
# training tables and on other simulated servers, with up to 11 instead of 9 deployments in nine of ten searches.
IMPATIENCE = 2


class SimulationGuidedSearcher(TrackedSearcher):
    """A Searcher that is guided by a simulation of Triton's batcher.

    A simulation of the batcher, fitted to the measurements so far, predicts throughput and latency of each
    candidate at each load. Gaussian processes on log(measured / simulated) correct both and quantify the
    uncertainty. The candidate with the largest expected improvement under the latency bound is suggested next. The
    search ends when this is below ``smallest_gain`` (a share of the throughput).
    """

    def __init__(
        self,
        tracker: CandidateTracker,
        smallest_gain: float,
        seed: int = 0,
        transferred: TransferredStudy | None = None,
    ) -> None:
        super().__init__(tracker)
        self._selector = CandidateSelector(tracker.problem, seed, transferred)
        self._selector_without_transfer = None if transferred is None else CandidateSelector(tracker.problem, seed)
        self._smallest_gain = smallest_gain
        self._expected: dict[Candidate, int] = {}
        self._parallel_trials = 1  # the largest number so far

    def suggest(self) -> Candidate | None:
        """Return the next candidate, or None if no other deployment is worth its time."""
        while True:
            finished = finished_trials(self._tracker.study)
            repeatable = self._tracker.repeatable(finished)
            decision = self._decide(finished, repeatable)
            if decision is None:
                return None
            again = decision.candidate in repeatable
            if self._tracker.start(decision.candidate, decision.load, again=again):
                self._expected[decision.candidate] = decision.load
                return decision.candidate

    def _decide(self, finished: list[Trial], repeatable: Set[Candidate]) -> Decision | None:
        """Return the next decision with a sufficient gain, or None.

        A transferred study alone cannot end the search: it ends only if this machine's own measurements do not
        predict a large gain either.
        """
        tried, running = self._tracker.tried(), self._tracker.running()
        self._parallel_trials = max(self._parallel_trials, len(running) + 1)
        for selector, factor in ((self._selector, 1.0), (self._selector_without_transfer, WITHOUT_TRANSFER)):
            decision = selector.decide(finished, tried, running, repeatable) if selector else None
            if decision is None:
                continue
            scale = minimum_gain_factor(decision.noise, len(finished), self._parallel_trials)
            if decision.gain >= factor * self._smallest_gain * scale:
                return decision
        return None

    def expected_load(self, candidate: Candidate) -> int | None:
        """Return the concurrency at which the suggested ``candidate`` is predicted to be best."""
        return self._expected.pop(candidate, None)

    def forecast(self, candidate: Candidate, load: LoadPoint, speed_probe_ms: float | None) -> Forecast | None:
        """Return the forecast of the surrogate that made the last suggestion, or of one after the first trials.

        Return None before the first measurement, and for a request rate, which the surrogate does not predict.
        """
        if not load.concurrency:
            return None
        if not self._selector.is_fitted:  # a comparison, or the trial with which a resumed run continues
            self._selector.fit(finished_trials(self._tracker.study))
        return self._selector.forecast(candidate, load.concurrency, speed_probe_ms)


def new_searcher(
    tracker: CandidateTracker, seed: int, transferred: TransferredStudy | None
) -> SimulationGuidedSearcher:
    """Return the search method simulated."""
    return SimulationGuidedSearcher(tracker, MIN_GAIN, seed, transferred)


def minimum_gain_factor(noise: float, deployments: int, parallel_trials: int = 1) -> float:
    """Return the factor on the gain that makes another deployment worth its time.

    It grows with the noise, as smaller gains cannot be confirmed, and once the search has deployed as often as the
    confirmation will. Before that, any gain suffices in a search with more noise than expected: the gain after a few
    measurements next to other programs is often far too small. Parallel trials take the time of one, and the best of
    them counts, so a smaller expected gain suffices for each.
    """
    length = deployments / parallel_trials / CONFIRMED_SERVERS
    if noise > EXPECTED_NOISE and length < 1:
        return 0.0
    longer = max(1.0, length)
    return min(max(noise, MIN_NOISE), MAX_NOISE) * longer**IMPATIENCE / math.sqrt(parallel_trials)
