"""BoTorch's constrained noisy expected improvement as a Searcher.

It learns from every measurement, of a configuration at a load: independent Gaussian processes on log throughput and
on log(latency / bound), over the parameters and the log of the concurrency. The next deployment is the one with the
largest qLogNoisyExpectedImprovement under the constraint, at the load that promises it (Letham et al. 2019, Ament et
al. 2023).
"""

from __future__ import annotations

import math
import random
import warnings
from collections.abc import Sequence

import torch
from botorch.acquisition.logei import qLogNoisyExpectedImprovement
from botorch.acquisition.objective import GenericMCObjective
from botorch.fit import fit_gpytorch_mll
from botorch.models import SingleTaskGP
from botorch.optim import optimize_acqf_discrete
from botorch.sampling import SobolQMCNormalSampler
from gpytorch.mlls import ExactMarginalLogLikelihood
from optuna.distributions import CategoricalDistribution, IntDistribution

from optimizer.config.problem import Problem
from optimizer.core.candidate import Candidate
from optimizer.core.trial import Point, latest_points
from optimizer.search.optuna_encoding import Encoding
from optimizer.search.optuna_samplers import STARTUP_TRIALS
from other_searchers.benchmark_searcher import BenchmarkSearcher

SAMPLES = 128  # of the posterior
AT_ONCE = 1024  # configurations and loads that are evaluated together


class BotorchSearcher(BenchmarkSearcher):
    """A Searcher that draws STARTUP_TRIALS at random, the baselines included, then maximizes the improvement.

    It has no stopping rule.
    """

    def __init__(self, problem: Problem, seed: int = 0) -> None:
        super().__init__(problem)
        torch.set_num_threads(1)  # the benchmark runs a search on each core
        self._seed, self._random = seed, random.Random(seed)
        self._encoding = Encoding(problem.space)

    def choose(self) -> tuple[Candidate, int | None] | None:
        left = self.left()
        if not left:
            return None
        points = [point for point in latest_points(self.trials) if self._targets(point) is not None]
        if len(self.trials) < STARTUP_TRIALS or not points:
            return self._random.choice(left), None
        cells = [(candidate, load) for candidate in left for load in self.loads(candidate)]
        return cells[self._best(points, cells)]

    def _best(self, points: Sequence[Point], cells: Sequence[tuple[Candidate, int]]) -> int:
        """Return the index of the cell with the largest acquisition value."""
        torch.manual_seed(self._seed)
        measured = self._features([(point.candidate, point.load.concurrency) for point in points])
        targets = torch.tensor([self._targets(point) for point in points], dtype=torch.float64)
        model = SingleTaskGP(measured, targets)
        with warnings.catch_warnings():  # a fit of few points may need several attempts
            warnings.simplefilter("ignore")
            fit_gpytorch_mll(ExactMarginalLogLikelihood(model.likelihood, model))
            acquisition = qLogNoisyExpectedImprovement(
                model,
                measured,
                SobolQMCNormalSampler(torch.Size([SAMPLES]), seed=self._seed),
                GenericMCObjective(lambda samples, X=None: samples[..., 0]),
                constraints=[lambda samples: samples[..., 1]],
                prune_baseline=True,
            )
            choices = self._features(cells)
            best, _ = optimize_acqf_discrete(acquisition, 1, choices, max_batch_size=AT_ONCE)
        return int((choices == best).all(dim=1).nonzero()[0, 0])

    def _targets(self, point: Point) -> tuple[float, float] | None:
        """Return log throughput and log(latency / bound), the outputs of the model.

        Points that are unstable, incomplete or outside the space have none.
        """
        throughput, share = point.throughput_infer_per_sec, self.problem.sla.share_of_bound(point.measurement)
        is_outside = self.problem.space.parameter_values(point.candidate) is None
        if is_outside or not point.measurement.stable or throughput <= 0 or math.isinf(share):
            return None
        return math.log(throughput), math.log(share)

    def _features(self, cells: Sequence[tuple[Candidate, int]]) -> torch.Tensor:
        """Return [cells, features] in [0, 1]: ranks of ordered choices, indicators of others, log concurrency."""
        most = math.log(max(2, self.problem.max_concurrency))
        rows = [[*self._parameters(candidate), math.log(load) / most] for candidate, load in cells]
        return torch.tensor(rows, dtype=torch.float64)

    def _parameters(self, candidate: Candidate) -> list[float]:
        values = self._encoding.encode(candidate)
        assert values is not None, candidate
        features: list[float] = []
        for name, distribution in self._encoding.distributions.items():
            if isinstance(distribution, IntDistribution) and distribution.high > 0:
                features.append(values[name] / distribution.high)
            elif isinstance(distribution, CategoricalDistribution) and len(distribution.choices) > 1:
                features.extend(float(values[name] == choice) for choice in distribution.choices)
        return features
