"""Expert defaults: a short list of configurations that the documentation of Triton recommends, without learning."""

from __future__ import annotations

from optimizer.config.problem import Problem
from optimizer.core.candidate import Candidate
from other_searchers.benchmark_searcher import BenchmarkSearcher

INSTANCES = (1, 2)
DELAY_US = 100


class ExpertSearcher(BenchmarkSearcher):
    """A Searcher that suggests INSTANCES and one instance for each core, with dynamic batching, then ends.

    The delay is DELAY_US, the preferred sizes are the default ones, max_batch_size is the largest, and other fields
    have their first choice. If a space lacks a value, the closest configuration stands for it.
    """

    def __init__(self, problem: Problem, seed: int = 0) -> None:
        super().__init__(problem)
        candidates = problem.space.candidates()
        counts = dict.fromkeys((*INSTANCES, problem.cpu_count or INSTANCES[-1]))
        self._list = [min(candidates, key=lambda one: self._distance(one, count)) for count in counts]

    def choose(self) -> tuple[Candidate, int | None] | None:
        return next(((candidate, None) for candidate in self._list if candidate not in self.tried), None)

    def _distance(self, candidate: Candidate, instances: int) -> tuple[float, ...]:
        first = tuple((path, choices[0]) for path, choices in self.problem.space.fields.items())
        return (
            not candidate.dynamic_batching,
            abs(candidate.instance_count - instances),
            sum(field not in first for field in candidate.fields),
            len(candidate.preferred_batch_sizes),
            -candidate.max_batch_size,
            abs(candidate.max_queue_delay_us - DELAY_US),
            -candidate.max_queue_delay_us,
        )
