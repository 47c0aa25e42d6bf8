"""SMAC3 as a Searcher: a random forest with expected improvement, and the constraint as a penalty.

SMAC minimizes the mean time of an inference. A configuration that misses the bounds costs more, in proportion to its
violation.
"""

from __future__ import annotations

import random
import tempfile
from collections.abc import Sequence
from itertools import product
from pathlib import Path

from ConfigSpace import (
    CategoricalHyperparameter,
    Configuration,
    ConfigurationSpace,
    ForbiddenAndConjunction,
    ForbiddenEqualsClause,
    UniformIntegerHyperparameter,
)
from optuna.distributions import BaseDistribution, CategoricalDistribution, IntDistribution
from smac import HyperparameterOptimizationFacade as Facade
from smac import Scenario
from smac.main.exceptions import ConfigurationSpaceExhaustedException
from smac.runhistory import StatusType, TrialInfo, TrialValue

from optimizer.config.problem import Problem
from optimizer.core.candidate import Candidate
from optimizer.core.trial import Trial
from optimizer.search.optuna_encoding import Encoding, TrialScore, score_trial
from optimizer.search.optuna_samplers import STARTUP_TRIALS
from other_searchers.benchmark_searcher import BenchmarkSearcher

PENALTY = 10.0  # factor on a cost for each bound's worth of violation
FAILED = 2.0  # cost of a failed deployment relative to the worst one so far
UNLIMITED = 10**6  # trials: the replay ends the search


class SmacSearcher(BenchmarkSearcher):
    """A Searcher that draws STARTUP_TRIALS at random, the recorded baselines included, then asks SMAC.

    These replace SMAC's own initial design. Its forest is fitted after every trial instead of every eighth. It has no
    stopping rule.
    """

    def __init__(self, problem: Problem, seed: int = 0) -> None:
        super().__init__(problem)
        self._seed, self._random = seed, random.Random(seed)
        self._encoding = Encoding(problem.space)
        self._configurations = _Configurations(problem, self._encoding, seed)
        self._facade: Facade | None = None
        self._folder = tempfile.TemporaryDirectory()
        self._costs: list[float] = []

    def choose(self) -> tuple[Candidate, int | None] | None:
        left = self.left()
        if not left:
            return None
        if len(self.trials) >= STARTUP_TRIALS:
            candidate = self._ask()
            if candidate is not None:
                return candidate, None
        return self._random.choice(left), None

    def observe(self, trial: Trial) -> None:
        super().observe(trial)
        if self._facade is not None:
            self._tell(self._facade, trial)

    def _ask(self) -> Candidate | None:
        """Return SMAC's next configuration; None if it repeats itself."""
        if self._facade is None:
            self._facade = self._make_facade()
            for trial in self.trials:
                self._tell(self._facade, trial)
        try:
            candidate = self._configurations.candidate(self._facade.ask().config)
        except (ConfigurationSpaceExhaustedException, StopIteration):  # the second one at each later call
            return None
        return None if candidate in self.tried else candidate

    def _make_facade(self) -> Facade:
        scenario = Scenario(
            self._configurations.space,
            output_directory=Path(self._folder.name),
            deterministic=True,
            n_trials=UNLIMITED,
            seed=self._seed,
        )
        first = self._configurations.of(self.trials[0].candidate)
        return Facade(
            scenario,
            initial_design=Facade.get_initial_design(scenario, n_configs=0, additional_configs=[first]),
            config_selector=Facade.get_config_selector(scenario, retrain_after=1),
            logging_level=False,
            overwrite=True,
        )

    def _tell(self, facade: Facade, trial: Trial) -> None:
        score = score_trial(trial, self.problem)
        if isinstance(score, TrialScore) and score.values[0] > 0:
            violation = max(0.0, *score.constraints.values()) if score.constraints else 0.0
            self._costs.append((1 + PENALTY * violation) * 1e6 / score.values[0])
            value = TrialValue(self._costs[-1])
        else:
            value = TrialValue(FAILED * max(self._costs, default=1.0), status=StatusType.CRASHED)
        info = TrialInfo(self._configurations.of(trial.candidate), seed=0)
        facade.tell(info, value, save=False)


class _Configurations:
    """The candidates of a space as ConfigSpace's configurations, in which a parameter is the rank of its choice.

    Combinations that are invalid, or another spelling of a candidate, are forbidden.
    """

    def __init__(self, problem: Problem, encoding: Encoding, seed: int) -> None:
        self._space, self._encoding = problem.space, encoding
        self.space = ConfigurationSpace(seed=seed)
        choices = {name: _choices(distribution) for name, distribution in encoding.distributions.items()}
        self._choices = {name: values for name, values in choices.items() if len(values) > 1}
        for name, values in self._choices.items():
            if isinstance(encoding.distributions[name], IntDistribution):
                self.space.add(UniformIntegerHyperparameter(name, 0, len(values) - 1))
            else:
                self.space.add(CategoricalHyperparameter(name, list(range(len(values)))))
        self._candidates = {self._ranks(candidate): candidate for candidate in problem.space.candidates()}
        for ranks in product(*(range(len(values)) for values in self._choices.values())):
            if ranks not in self._candidates:
                pairs = zip(self._choices, ranks, strict=True)
                clauses = [ForbiddenEqualsClause(self.space[name], rank) for name, rank in pairs]
                self.space.add(ForbiddenAndConjunction(*clauses))

    def of(self, candidate: Candidate) -> Configuration:
        """Return the configuration of a candidate of the space."""
        return Configuration(self.space, values=dict(zip(self._choices, self._ranks(candidate), strict=True)))

    def candidate(self, configuration: Configuration) -> Candidate:
        """Return the candidate of a configuration."""
        return self._candidates[tuple(int(configuration[name]) for name in self._choices)]

    def _ranks(self, candidate: Candidate) -> tuple[int, ...]:
        values = self._encoding.encode(self._space.canonical(candidate))
        assert values is not None, candidate
        return tuple(choices.index(values[name]) for name, choices in self._choices.items())


def _choices(distribution: BaseDistribution) -> Sequence[object]:
    if isinstance(distribution, IntDistribution):
        return range(distribution.high + 1)
    assert isinstance(distribution, CategoricalDistribution)
    return distribution.choices
