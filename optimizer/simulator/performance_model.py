"""The models of a server that the search corrects: a simulator of its batching, or a queueing network without one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol, TypeAlias

from optimizer.config.problem import Problem
from optimizer.core.trial import Point
from optimizer.simulator import closed_network, concurrent_models, continuous_batching_model, dynamic_batching_model
from optimizer.simulator.closed_network import ClosedNetwork
from optimizer.simulator.concurrent_models import ConcurrentServerModel
from optimizer.simulator.continuous_batching import compile_continuous_batching
from optimizer.simulator.continuous_batching_model import ContinuousBatchingModel
from optimizer.simulator.dynamic_batching_model import DynamicBatchingModel
from optimizer.simulator.predicted_metrics import ConfigurationLoad, ModelErrors, Performance
from optimizer.simulator.simulate import compile_simulator


class PerformanceModel(Protocol):
    """Predicts the performance of any candidate at any load, with the expected ``errors``."""

    @property
    def name(self) -> str:
        """The name of the kind of model, for people, such as ``closed queueing network``."""

    @property
    def errors(self) -> ModelErrors:
        """The expected errors, which a Gaussian process learns."""

    def simulate(self, loads: Sequence[ConfigurationLoad], threads: int = 1) -> Sequence[Performance]:
        """Return the performance of each (candidate, concurrency)."""


# Returns the model that is closest to the points. None means that they are predicted without a model.
ModelFitter: TypeAlias = Callable[[Sequence[Point]], PerformanceModel | None]


ModelType: TypeAlias = (
    type[DynamicBatchingModel] | type[ConcurrentServerModel] | type[ContinuousBatchingModel] | type[ClosedNetwork]
)


def model_type(problem: Problem) -> ModelType:
    """Return the kind of model that describes the server of ``problem`` best."""
    if concurrent_models.applies(problem):
        return ConcurrentServerModel
    if problem.is_simulated:
        return DynamicBatchingModel
    return ContinuousBatchingModel if continuous_batching_model.applies(problem) else ClosedNetwork


def compile_model(problem: Problem, on_progress: Callable[[str], None]) -> None:
    """Load the compiled simulator that the model of ``problem`` needs.

    ``on_progress`` gets a line if it has to be compiled first.
    """
    if problem.is_simulated:
        compile_simulator(on_progress)
    elif model_type(problem) is ContinuousBatchingModel:
        compile_continuous_batching(on_progress)


def fit_model(points: Sequence[Point], problem: Problem, latencies: Sequence[str], seed: int) -> PerformanceModel:
    """Return the model that is closest to ``points``, which are complete for the metrics ``latencies``.

    Raises:
        ValueError: ``points`` is empty.
    """
    if problem.is_simulated:
        return fit_simulator(points, problem, latencies[0], seed)
    if model_type(problem) is ContinuousBatchingModel:
        return continuous_batching_model.fit(points, problem, latencies, seed)
    return closed_network.fit(points, problem, latencies, seed)


def fit_simulator(
    points: Sequence[Point], problem: Problem, latency: str, seed: int = 0
) -> DynamicBatchingModel | ConcurrentServerModel:
    """Return the simulator of dynamic batching that is closest to ``points``; see ``dynamic_batching_model.fit``."""
    if concurrent_models.applies(problem):
        return concurrent_models.fit(points, problem, latency, seed)
    return dynamic_batching_model.fit(points, problem, latency, seed)


def sample_models(
    model: PerformanceModel, points: Sequence[Point], problem: Problem, latencies: Sequence[str], count: int
) -> Sequence[PerformanceModel]:
    """Return ``count`` samples of the posterior of ``model``, which was fitted to ``points`` and ``latencies``."""
    if isinstance(model, ClosedNetwork | ContinuousBatchingModel):
        return model.samples(count)
    if isinstance(model, ConcurrentServerModel):
        return concurrent_models.sample_models(model, points, problem, latencies[0], count)
    assert isinstance(model, DynamicBatchingModel), "fit_model returns one of them"
    return dynamic_batching_model.sample_models(model, points, problem, latencies[0], count)
