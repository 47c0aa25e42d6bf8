"""The models of a server that the search corrects: the simulator of the batcher, or a queueing network without it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from optimizer.config.search_space import Problem
from optimizer.core.trial import Point
from optimizer.simulator import closed_network, server_model
from optimizer.simulator.closed_network import ClosedNetwork
from optimizer.simulator.metrics import ConfigurationLoad, ModelErrors, Performance
from optimizer.simulator.server_model import ServerModel


class PerformanceModel(Protocol):
    """Predicts the performance of any candidate at any load, with the expected ``errors``."""

    @property
    def name(self) -> str:
        """The name of the kind of model, for people, such as ``closed queueing network``."""

    @property
    def errors(self) -> ModelErrors:
        """The expected errors, which a Gaussian process learns."""

    def simulate(self, cells: Sequence[ConfigurationLoad], threads: int = 1) -> Sequence[Performance]:
        """Return the performance of each (candidate, concurrency)."""


def fit_model(points: Sequence[Point], problem: Problem, latencies: Sequence[str], seed: int) -> PerformanceModel:
    """Return the model that is closest to ``points``, which are complete for the metrics ``latencies``.

    Raises:
        ValueError: ``points`` is empty.
    """
    if problem.is_simulated:
        return server_model.fit(points, problem, latencies[0], seed)
    return closed_network.fit(points, problem, latencies, seed)


def sample_models(
    model: PerformanceModel, points: Sequence[Point], problem: Problem, latencies: Sequence[str], count: int
) -> Sequence[PerformanceModel]:
    """Return ``count`` samples of the posterior of ``model``, which was fitted to ``points`` and ``latencies``."""
    if isinstance(model, ClosedNetwork):
        return model.samples(count)
    assert isinstance(model, ServerModel), "fit_model returns one of both"
    return server_model.sample_models(model, points, problem, latencies[0], count)
