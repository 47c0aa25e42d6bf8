"""A performance model whose throughput and p95 are functions of the concurrency that a test chooses."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import ClassVar

from optimizer.simulator.predicted_metrics import ConfigurationLoad, ModelErrors


@dataclass(frozen=True)
class CurvePerformance:
    """The performance at one concurrency; the only latency metric is p95."""

    throughput_infer_per_sec: float
    latency_p95_s: float
    mean_batch_size: float = 1.0
    utilization: float = 1.0

    def latency_s(self, metric: str) -> float:
        assert metric == "latency-p95"
        return self.latency_p95_s


@dataclass(frozen=True)
class CurveModel:
    """Predicts the same performance for all candidates."""

    throughput_infer_per_sec: Callable[[int], float]
    latency_p95_s: Callable[[int], float]
    name: ClassVar[str] = "curves"
    errors: ClassVar[ModelErrors] = ModelErrors(throughput=0.1, tail=0.1)

    def simulate(self, cells: Sequence[ConfigurationLoad], threads: int = 1) -> list[CurvePerformance]:
        return [CurvePerformance(self.throughput_infer_per_sec(load), self.latency_p95_s(load)) for _, load in cells]
