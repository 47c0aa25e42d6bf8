"""Simulation of Triton's dynamic batcher by discrete events: the performance of a candidate under a load.

The rules are those of ``dynamic_batch_scheduler.cc``, ``instance_queue.cc`` and ``rate_limiter.cc`` of the Triton
core (2.51): which arrivals wake the batcher, how far it forms batches ahead of the instances, preferred sizes, the
queue delay, equal shapes, the queue policy, and the merging of late batches by an idle instance. Simultaneous events
are processed in this order: instances finish, requests arrive, the batcher runs, notified instances take batches.
Equal input gives equal output.

Requests have no timeout of their own. Those of a higher priority level are executed first, also among delayed ones.
Triton rejects an expired request of a lower level when it reaches that level, the simulation at once. One defect of
Triton is left out: with a queue timeout, a batch can mix shapes if an instance takes the last payload while the
batcher waits for more requests.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from objectives.arrays import FloatArray
from optimizer.core.candidate import Candidate
from optimizer.simulator.compilation import CompiledOnce, compile_loop
from optimizer.simulator.packing import PackedScenarios
from optimizer.simulator.scenario import (
    RING_LENGTH,
    ClosedLoopLoad,
    MeasurementInterval,
    Scenario,
    ServiceTimes,
    SimulationResult,
    SimulationTrace,
)

MIN_SCENARIOS_PER_THREAD = 25  # about 2 ms; a thread for fewer takes longer to start than it saves


def lognormal_jitter(relative_std: float, seed: int = 0) -> FloatArray:
    """Return factors [RING_LENGTH] of mean 1 for the service times of successive executions."""
    variance = math.log1p(relative_std**2)
    return np.exp(math.sqrt(variance) * _standard_normal(seed) - variance / 2)


def exponential_gaps(mean_s: float, seed: int = 0) -> FloatArray:
    """Return exponentially distributed distances [RING_LENGTH] between successive arrivals, in seconds."""
    return mean_s * _standard_exponential(seed)


@functools.lru_cache(maxsize=8)
def _standard_normal(seed: int) -> FloatArray:
    """Return standard normal numbers [RING_LENGTH]. A fit needs the same ones for each simulation."""
    return np.random.default_rng(seed).standard_normal(RING_LENGTH)


@functools.lru_cache(maxsize=8)
def _standard_exponential(seed: int) -> FloatArray:
    """Return exponentially distributed numbers [RING_LENGTH] of mean 1, the same ones for each simulation."""
    return np.random.default_rng(seed).standard_exponential(RING_LENGTH)


def simulate_many(
    scenarios: Sequence[Scenario],
    *,
    jitter: FloatArray | None = None,
    gaps_s: FloatArray | None = None,
    interval: MeasurementInterval | None = None,
    threads: int = 1,
) -> list[SimulationResult]:
    """Return the result of each scenario.

    ``jitter`` and ``gaps_s`` are used cyclically and are the same for all scenarios, so that results can be
    compared. Without them clients whose requests once shared a batch would do so forever, while on a real server
    one late request can separate them for good.

    Args:
        scenarios: The inputs, in any order.
        jitter: Factors on the service times of successive executions.
        gaps_s: How much longer than ``Overheads.spacing_s`` successive arrivals are apart at least, in seconds.
        interval: Which requests are measured.
        threads: The most threads to simulate with. Each gets at least MIN_SCENARIOS_PER_THREAD scenarios.

    Raises:
        ValueError: A candidate refuses the requests, or the service times do not cover its batches or instances.
    """
    if not scenarios:
        return []
    interval, threads = (
        interval or MeasurementInterval(),
        max(1, min(threads, len(scenarios) // MIN_SCENARIOS_PER_THREAD)),
    )
    # neighbors cost about the same, so the scenarios are dealt out in turn
    packed = [PackedScenarios(scenarios[i::threads], jitter, gaps_s, interval) for i in range(threads)]
    if len(packed) == 1:
        return packed[0].run()
    with ThreadPoolExecutor(len(packed)) as pool:
        results = list(pool.map(PackedScenarios.run, packed))
    return [results[i % len(packed)][i // len(packed)] for i in range(len(scenarios))]


def trace(
    scenario: Scenario,
    *,
    jitter: FloatArray | None = None,
    gaps_s: FloatArray | None = None,
    interval: MeasurementInterval | None = None,
) -> SimulationTrace:
    """Return each execution and request of a scenario, from its first request to the end of the interval."""
    return PackedScenarios([scenario], jitter, gaps_s, interval or MeasurementInterval()).trace()


def compile_simulator(on_progress: Callable[[str], None]) -> None:
    """Load the compiled simulator; ``on_progress`` gets a line if it has to be compiled first."""
    compile_loop("the simulator of the dynamic batcher", _loop, simulate_smallest, on_progress)


def _loop() -> CompiledOnce[..., None]:
    from optimizer.simulator.dynamic_batcher import event_loop  # imports the compiler

    return event_loop.simulate_scenarios


def simulate_smallest() -> None:
    """Simulate the scenario that takes the least time."""
    simulate_many([Scenario(Candidate(1), ClosedLoopLoad(1), ServiceTimes(np.full((1, 1), 1e-3)))])
