"""Search guided by simulation: as a Searcher, and as a sampler for any Optuna study."""

from __future__ import annotations

import math
from typing import Any

import optuna
from optuna.distributions import BaseDistribution
from optuna.samplers import BaseSampler, RandomSampler
from optuna.study import Study
from optuna.trial import FrozenTrial

from optimizer.problem import Problem
from optimizer.search.elsewhere import Elsewhere
from optimizer.search.encoding import Encoding
from optimizer.search.guide import Decision, Guide
from optimizer.search.ledger import Ledger
from optimizer.search.result import finished_trials
from optimizer.trial import Candidate, Trial

LEAST_NOISE, MOST_NOISE = 0.25, 1.5  # of the usual: gains smaller than the noise cannot be told from it
MUCH = 4.0  # times the gain that ends a search
FREE = 6  # deployments: where more were needed promises have not been kept, and another must be the larger


class SimulatedSearcher:
    """A Searcher that knows Triton's batcher.

    A simulation of the batcher, fitted to what was measured so far, predicts throughput and latency of every
    candidate at every load. Gaussian processes on log(measured / simulated) correct both and say how sure they
    are. Next comes the candidate with the largest expected improvement under the latency bound; the search ends
    when that is below ``smallest_gain`` (a share of the throughput).
    """

    is_exhaustive = False

    def __init__(
        self,
        problem: Problem,
        study: optuna.Study,
        smallest_gain: float,
        seed: int = 0,
        elsewhere: Elsewhere | None = None,
        ledger: Ledger | None = None,
    ) -> None:
        """``ledger`` is that of ``study``, where it is kept already."""
        self._study = study
        self._ledger = ledger or Ledger(problem, study)
        self._guide = Guide(problem, seed, elsewhere)
        self._alone = None if elsewhere is None else Guide(problem, seed)
        self._smallest_gain = smallest_gain
        self._expected: dict[Candidate, int] = {}
        self._at_once = 1  # the most that were tried at the same time

    def suggest(self) -> Candidate | None:
        while (decision := self._decided(finished_trials(self._study))) is not None:
            if self._ledger.start(decision.candidate, decision.load) is not None:
                self._expected[decision.candidate] = decision.load
                return decision.candidate
        return None

    def _decided(self, finished: list[Trial]) -> Decision | None:
        """What is worth a deployment more, if anything. Another machine may say where to look; that nothing is left
        it may say only where this machine's own measurements do not promise MUCH either."""
        tried, running = self._ledger.tried(), self._ledger.running()
        self._at_once = max(self._at_once, len(running) + 1)
        for guide, times in ((self._guide, 1.0), (self._alone, MUCH)):
            decision = guide.decide(finished, tried, running) if guide else None
            if decision is None:
                continue
            enough = times * self._smallest_gain * tolerance(decision.noise, len(finished), self._at_once)
            if decision.gain >= enough:
                return decision
        return None

    def expected_load(self, candidate: Candidate) -> int | None:
        """The concurrency at which ``candidate`` is predicted to be at its best."""
        return self._expected.get(candidate)

    def observe(self, trial: Trial) -> None:
        self._ledger.record(trial)


class SimulatedSampler(BaseSampler):
    """The same choices for a study that is driven by ``study.ask`` or ``study.optimize``.

    Learns from the trials that a ``Ledger`` recorded in the study; the objective's own value is not enough, since
    it does not tell the load and the latency.
    """

    def __init__(self, problem: Problem, seed: int = 0) -> None:
        self._problem = problem
        self._guide = Guide(problem, seed)
        self._encoding = Encoding(problem.space)
        self._independent = RandomSampler(seed)

    def infer_relative_search_space(self, study: Study, trial: FrozenTrial) -> dict[str, BaseDistribution]:
        return dict(self._encoding.distributions)

    def sample_relative(
        self, study: Study, trial: FrozenTrial, search_space: dict[str, BaseDistribution]
    ) -> dict[str, Any]:
        """Optuna's parameters of the next candidate; none where all have been tried, which draws one at random."""
        finished = finished_trials(study)
        tried = {self._problem.space.canonical(one.candidate) for one in finished}
        others = [self._encoding.decode(one.params) for one in study.get_trials(deepcopy=False)]
        decision = self._guide.decide(finished, tried.union(one for one in others if one is not None))
        return self._encoding.encode(decision.candidate) or {} if decision else {}

    def sample_independent(
        self, study: Study, trial: FrozenTrial, param_name: str, param_distribution: BaseDistribution
    ) -> Any:
        return self._independent.sample_independent(study, trial, param_name, param_distribution)

    def reseed_rng(self) -> None:
        self._independent.reseed_rng()


def tolerance(noise: float, deployments: int, at_once: int = 1) -> float:
    """The gain that is worth a deployment more, as a multiple of its usual value.

    Those made ``at_once`` take the time of one, and each need promise less: the best of them counts, and a worker
    that waits for the others gains nothing.
    """
    rounds = deployments / at_once
    return min(max(noise, LEAST_NOISE), MOST_NOISE) * max(1.0, rounds / FREE) ** 2 / math.sqrt(at_once)
