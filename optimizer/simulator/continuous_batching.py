"""A simulator of continuous batching by iterations: the performance of a server in a closed loop.

Each instance has slots for sequences. It computes the prompts of newly admitted requests in one pass, and then one
token of each running sequence in another. A sequence that ends frees its slot. Triton hands the requests to the
instances in turn, after the queue delay. Then they wait in the queue of their instance for a slot.

The prompts of a pass are filled up to the same length. A pass takes a fixed time, and a time that grows with the
running sequences or with the tokens of the prompts. Equal input gives equal output.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from objectives.arrays import FloatArray, IntArray
from objectives.metrics import METRICS, QUANTILES, STATISTICS
from objectives.quantiles import quantile_at
from optimizer.core.request_sizes import TokenRequests
from optimizer.simulator.compilation import CompiledOnce, Records, compile_loop

if TYPE_CHECKING:
    from optimizer.simulator import iteration_loop

RING = 1024  # random lengths that successive requests use in turn
# A simulation is as long as a measurement of the load client in the search, because the order in which requests of
# equal length began affects it to its end: it begins when as many requests have ended as are in flight.
MIN_REQUESTS, REQUESTS_IN_FLIGHT = 60, 3
# A simulation is repeated with other requests until it has ENOUGH_REQUESTS or ENOUGH_TOKENS.
MAX_REPEATS, ENOUGH_REQUESTS, ENOUGH_TOKENS = 5, 320, 8000
# Responses of a pass are sent one after another, so requests that end together begin their successors one by one.
SEND_SHARE = 0.5  # share of the time of a sequence
RANDOM_SHARE = 0.1  # share of the requests that instances do not take in turn, because other threads wake first
LATENCY_METRICS = tuple(f"{kind}-{statistic}" for kind in ("ttft", "itl", "latency") for statistic in STATISTICS)
# columns of the results, as in ``iteration_loop``, whose import loads the compiler
TOKENS_PER_S, TOGETHER, OCCUPIED = range(3)
LATENCY_COLUMNS = slice(3, 3 + len(LATENCY_METRICS))


@dataclass(frozen=True, slots=True)
class PassTimes:
    """The times of an instance.

    Attributes:
        fixed_s: Time of any pass.
        sequence_s: Further time of a pass for one running sequence.
        prompt_s: Further time of a pass for each token of the prompts that it computes, with the filling.
        round_trip_s: Mean time of a request outside of its instance, half of it before the request is queued.
        power: Exponent of the number of running sequences, by which ``sequence_s`` grows.
        prompt_limit: The most tokens of several prompts in a pass, with the filling; 0: no limit.
        kv_tokens: The most tokens of the prompts and outputs of the running sequences; 0: no limit.
    """

    fixed_s: float
    sequence_s: float
    prompt_s: float
    round_trip_s: float = 0.0
    power: float = 1.0
    prompt_limit: int = 0
    kv_tokens: int = 0


@dataclass(frozen=True, slots=True)
class ContinuousBatchingScenario:
    """A configuration under a load.

    Attributes:
        slots: The most running sequences of an instance.
        concurrency: Requests in flight.
        times: The times of an instance while no other one is busy, before ``factors``.
        factors: Factors [instances] on the time of a pass that begins while 1, 2, … instances are busy.
        delay_s: Time that a prompt waits in Triton's batcher for others.
        full_batch: Number of prompts at which they wait no longer.
    """

    slots: int
    concurrency: int
    times: PassTimes
    factors: tuple[float, ...] = (1.0,)
    delay_s: float = 0.0
    full_batch: int = 1


@dataclass(frozen=True, eq=False)
class RequestLengths:
    """Tokens of the prompts and outputs of successive requests, and ``delays`` of mean 1 on their way to the server.

    Each array [RING] is used cyclically.
    """

    prompts: IntArray
    outputs: IntArray
    delays: FloatArray

    @classmethod
    def from_tokens(cls, tokens: TokenRequests, seed: int = 0) -> RequestLengths:
        """Return random lengths of the distributions of ``tokens``, and exponentially distributed delays."""
        rng = np.random.default_rng(seed)
        return cls(tokens.prompt.draw(RING, rng), tokens.output.draw(RING, rng), rng.exponential(1.0, RING))


@dataclass(frozen=True, slots=True)
class ContinuousBatchingPerformance:
    """The performance of a configuration at a load.

    ``mean_batch_size`` is the mean number of running sequences of a pass, ``utilization`` the share of the slots that
    run a sequence. ``latencies_s`` are those of LATENCY_METRICS, before ``factors`` on some latencies by metric.
    """

    throughput_infer_per_sec: float
    tokens_per_s: float
    mean_batch_size: float
    utilization: float
    latencies_s: tuple[float, ...]
    factors: Mapping[str, float] = field(default_factory=dict)

    def latency_s(self, metric: str) -> float:
        """Return the latency of a metric; NaN if no output has several tokens and it is between two.

        A percentile that is not in LATENCY_METRICS is estimated from those that are.
        """
        return estimated_latency(self.latencies_s, metric) * self.factors.get(metric, 1.0)


def estimated_latency(latencies: Sequence[float], metric: str) -> float:
    """Return the latency of a metric from those of LATENCY_METRICS."""
    if metric in LATENCY_METRICS:
        return latencies[LATENCY_METRICS.index(metric)]
    metric_level, timing = METRICS[metric].quantile, METRICS[metric].timing
    assert metric_level is not None, "averages are in LATENCY_METRICS"
    assert timing is not None, "only latencies are predicted"
    quantiles = {level: latencies[LATENCY_METRICS.index(timing.metric(name))] for name, level in QUANTILES.items()}
    return quantile_at(quantiles, metric_level)


def simulate_continuous_batching(
    scenarios: Sequence[ContinuousBatchingScenario], lengths: RequestLengths, threads: int = 1
) -> list[ContinuousBatchingPerformance]:
    """Return the performance of each scenario, simulated in ``threads``."""
    if not scenarios:
        return []
    mean_output = float(lengths.outputs.mean())
    return [
        ContinuousBatchingPerformance(tokens / mean_output, tokens, together, occupied, tuple(latencies_s))
        for tokens, together, occupied, *latencies_s in simulated_rows(scenarios, lengths, threads).tolist()
    ]


def simulated_rows(
    scenarios: Sequence[ContinuousBatchingScenario], lengths: RequestLengths, threads: int = 1
) -> FloatArray:
    """Return the results [scenarios, columns] of one or more: TOKENS_PER_S, … and LATENCY_COLUMNS."""
    # this imports the compiler, so only when something is simulated
    from optimizer.simulator.iteration_loop import SCENARIO_RECORD

    mean_output = float(lengths.outputs.mean())
    rows = np.array([_row(scenario, mean_output) for scenario in scenarios], SCENARIO_RECORD)
    factors = np.ones((len(scenarios), max(len(scenario.factors) for scenario in scenarios)))
    for row, scenario in zip(factors, scenarios, strict=True):
        row[: len(scenario.factors)] = scenario.factors
    if threads == 1:
        return _simulate_rows(rows, factors, lengths)
    # neighbors take about the same time, so the scenarios are dealt out in turn
    parts = [slice(start, None, threads) for start in range(threads)]
    with ThreadPoolExecutor(threads) as pool:
        part_results = list(pool.map(lambda part: _simulate_rows(rows[part], factors[part], lengths), parts))
    results = np.empty((len(scenarios), part_results[0].shape[1]))
    for part, part_result in zip(parts, part_results, strict=True):
        results[part] = part_result
    return results


def _simulate_rows(rows: Records, factors: FloatArray, lengths: RequestLengths) -> FloatArray:
    """Return the results [rows, columns] of ``rows`` with the ``factors`` [rows, instances] on their times."""
    from optimizer.simulator import iteration_loop

    results = np.empty((len(rows), iteration_loop.RESULTS))
    iteration_loop.simulate_scenarios(
        np.ascontiguousarray(rows),
        np.ascontiguousarray(factors),
        lengths.prompts,
        lengths.outputs,
        lengths.delays,
        results,
    )
    return results


def compile_continuous_batching(on_progress: Callable[[str], None]) -> None:
    """Load the compiled simulator; ``on_progress`` gets a line if it has to be compiled first."""
    compile_loop("the simulator of continuous batching", _loop, simulate_smallest, on_progress)


def _loop() -> CompiledOnce[..., None]:
    from optimizer.simulator import iteration_loop  # imports the compiler

    return iteration_loop.simulate_scenarios


def simulate_smallest() -> None:
    """Simulate the scenario that takes the least time."""
    one = np.ones(1, np.int64)
    simulated_rows(
        [ContinuousBatchingScenario(1, 1, PassTimes(1e-3, 0.0, 0.0))], RequestLengths(one, one, np.ones(1))
    )


def _row(scenario: ContinuousBatchingScenario, mean_output: float) -> iteration_loop.ScenarioRow:
    """Return the record of a scenario, whose outputs have ``mean_output`` tokens on average."""
    from optimizer.simulator.iteration_loop import ScenarioRow

    times, concurrency = scenario.times, scenario.concurrency
    measured_requests = max(MIN_REQUESTS, REQUESTS_IN_FLIGHT * concurrency)
    enough = min(ENOUGH_REQUESTS, ENOUGH_TOKENS / mean_output)
    running = min(scenario.slots, concurrency)
    pass_s = times.fixed_s + times.sequence_s * running**times.power
    return ScenarioRow(
        slots=scenario.slots,
        instances=len(scenario.factors),
        concurrency=concurrency,
        delay=scenario.delay_s,
        full_batch=scenario.full_batch,
        fixed=times.fixed_s,
        sequence=times.sequence_s,
        power=times.power,
        prompt=times.prompt_s,
        round_trip=times.round_trip_s,
        prompt_limit=times.prompt_limit,
        kv_tokens=times.kv_tokens,
        send=min(SEND_SHARE * times.sequence_s, pass_s / running),  # sending is a part of the pass
        random_share=RANDOM_SHARE,
        warm_up_requests=concurrency,
        measured_requests=measured_requests,
        repeats=min(MAX_REPEATS, math.ceil(enough / (concurrency + measured_requests))),
    )
