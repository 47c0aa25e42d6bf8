"""The problem that a search solves: the space, the requests and their load, the objectives and the SLA."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import Enum

from objectives.metrics import METRICS, Metric, PointT
from objectives.periodic_queue import LoadPeriod
from objectives.sla import DEFAULT_CONFIDENCE, Sla
from optimizer.config.queue_policy import Fields, may_refuse
from optimizer.config.search_space import SearchSpace
from optimizer.core.candidate import Candidate
from optimizer.core.load_shapes import RequestTimes
from optimizer.core.request_sizes import SizeDistribution, TokenRequests
from optimizer.options.run_options import SIMULATED_OBJECTIVES


class ModelKind(Enum):
    """How a model takes requests and answers them. The values are those of run.json."""

    BATCHED = "batched"  # one response to each request; the requests are independent of each other
    STREAMING = "streaming"  # any number of responses to a request
    STATEFUL = "stateful"  # sequences of requests; the model keeps state between them


@dataclass(frozen=True)
class ConcurrentModel:
    """Another model that gets load at the same time.

    ``share`` is its load as a multiple of that of the tuned model. ``candidate`` is its own configuration, which its
    fields in a candidate of the tuned model change.
    """

    name: str
    share: float
    candidate: Candidate


@dataclass(frozen=True)
class Problem:
    """The problem that a search solves.

    Attributes:
        model: Name of the model.
        space: Search space. With a ``request_mix``, it counts a request of the mix as single samples.
        request_batch_size: Samples of a request; the mean with a ``request_mix``.
        max_concurrency: Largest concurrency of the load search.
        objectives: Metrics to optimize, the most important first.
        sla: The constraints that the recommendation has to meet.
        open_loop: Whether requests are sent at a rate, regardless of the answers, instead of at a concurrency.
        cpu_count: CPUs of the server if it serves on the CPU; None if it does not or that is unknown.
        confidence: Confidence of the verdict on the SLA.
        fixed_shapes: Whether all inputs have one fixed shape. It decides when Triton's batcher checks its queue.
        request_mix: Distribution of the samples of a request; None if all requests have the same number.
        client_shares_cpus: Whether the load generator has no CPUs of its own.
        kind: Kind of the model.
        request_times: When an open loop sends; None for a closed loop.
        tokens: Lengths of the prompts and outputs of a model that generates tokens; None if they are unknown.
        priorities: Shares of the priorities of the requests; None if all have the default one or a trace has them.
        queue: Settings of the batcher's queue in config.pbtxt. Those in the space replace them.
        concurrent: The other models that get load at the same time, to simulate each of them. Empty if there are
            none, or if one of them is an ensemble.
    """

    model: str
    space: SearchSpace
    request_batch_size: float
    max_concurrency: int
    objectives: tuple[Metric, ...] = field(default=(METRICS["throughput"],))
    sla: Sla = field(default_factory=Sla)
    open_loop: bool = False
    cpu_count: int | None = None
    confidence: float = DEFAULT_CONFIDENCE
    fixed_shapes: bool = True
    request_mix: SizeDistribution | None = None
    client_shares_cpus: bool = False
    kind: ModelKind = ModelKind.BATCHED
    request_times: RequestTimes | None = None
    tokens: TokenRequests | None = None
    priorities: SizeDistribution | None = None
    queue: Fields = ()
    concurrent: tuple[ConcurrentModel, ...] = ()

    @property
    def may_refuse(self) -> bool:
        """Whether a choice of the space, or config.pbtxt, limits a queue or rejects late requests."""
        return may_refuse({path: (value,) for path, value in self.queue} | dict(self.space.fields))

    @property
    def is_simulated(self) -> bool:
        """Whether the simulator of the dynamic batcher applies. It does not to models that stream or keep state."""
        return self.kind is ModelKind.BATCHED

    @property
    def has_load_shape(self) -> bool:
        """Whether the load has a shape or is a recording, so that its rate is a mean over bursts."""
        return self.request_times is not None and not self.request_times.is_steady

    @property
    def load_period(self) -> LoadPeriod | None:
        """The load shape or the recording; None if the rate is constant or its shape is unknown."""
        times = self.request_times
        if times is None or not times.shares:
            return None
        return LoadPeriod(times.shares, times.period_seconds, times.recorded_requests)

    @property
    def maximizes_throughput(self) -> bool:
        """Whether served requests or output tokens per second are an objective, so that a high load is sought."""
        return any(metric.name in SIMULATED_OBJECTIVES for metric in self.objectives)

    @property
    def keeps_best_load(self) -> bool:
        """Whether a configuration is confirmed only at its best load in the search.

        A higher load would have a higher latency, which is the first objective, or serve more than needed.
        """
        return self.objectives[0].timing is not None or not self.maximizes_throughput

    @property
    def unreported_goal(self) -> Metric | None:
        """The first goal that perf_analyzer does not report; None if it reports all."""
        metrics = (*(METRICS[bound.metric] for bound in self.sla), *self.objectives)
        return next((metric for metric in metrics if metric.needs_own_client), None)

    @property
    def why_own_client(self) -> str:
        """Why only tune's own client can measure this, for a message to the user; empty if perf_analyzer can too."""
        if self.space.max_server_processes > 1:
            return "server_processes needs tune's own client, which spreads the load"
        if self.priorities is not None:
            return "perf_analyzer does not send several priorities, and tune's own client measures it"
        if goal := self.unreported_goal:
            return f"perf_analyzer does not report {goal.short_name}, and tune's own client measures it"
        return ""

    def best_point(self, points: Iterable[PointT], *, unstable: bool = False) -> PointT | None:
        """Return the best stable point within the SLA, see ``Sla.best_point``."""
        return self.sla.best_point(points, self.objectives, unstable=unstable)
