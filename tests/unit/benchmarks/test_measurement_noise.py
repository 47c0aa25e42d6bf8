"""The noise of measurements, applied to a recorded table."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest

from lib.measurement_noise import Noise, NoisyServer, perturbed
from objectives.metrics import Measurement
from optimizer.core.candidate import Candidate
from optimizer.core.trial import LoadPoint, Trial
from optimizer.replay.replay import recorded_problem, replay
from optimizer.store.recording import read_recording

LOADS = [LoadPoint(1, concurrency) for concurrency in (4, 8, 16, 32)]
TRUE = Noise(server=(0.05, 0.03), epoch=(0.04, 0.02), window=(0.02, 0.06))
CELL = Measurement(
    1000.0,
    latency_avg_ms=8.0,
    latency_p50_ms=7.0,
    latency_p95_ms=12.0,
    queue_ms=2.0,
    batch_stats="4:100:52000000",
    requests_over_ms="20:13",
)


def test_effects_keep_littles_law_and_the_time_of_a_batch() -> None:
    slow = perturbed(replace(CELL, output_tokens_per_sec=300.0), -math.log(2), math.log(1.5))
    times_ms = [slow.latency_avg_ms, slow.latency_p50_ms, slow.latency_p95_ms, slow.queue_ms]
    assert times_ms == pytest.approx([16.0, 21.0, 36.0, 4.0])
    assert slow.throughput_infer_per_sec == pytest.approx(500.0)
    assert slow.output_tokens_per_sec == pytest.approx(150.0)
    assert slow.batch_stats == "4:100:104000000"
    assert slow.requests_over_ms == "", "the counts are those of other latencies"


def throughputs(noise: Noise, seed: int, deployments: int) -> list[list[float]]:
    server = NoisyServer([Trial(0, Candidate(8, True), tuple((load, CELL) for load in LOADS))], noise, seed)
    result = []
    for _ in range(deployments):
        with server.deploy(Candidate(8, True)) as endpoint:
            measured = [server.measure(endpoint, load).throughput_infer_per_sec for load in LOADS]
        result.append([math.log(value / 1000) for value in measured if value])
    return result


def test_a_seed_gives_the_same_measurements_and_another_seed_others() -> None:
    assert throughputs(TRUE, 1, 3) == throughputs(TRUE, 1, 3)
    assert throughputs(TRUE, 1, 3) != throughputs(TRUE, 2, 3)


def test_the_noise_does_not_depend_on_the_order_of_deployments() -> None:
    """Searches that try other candidates and loads first still see the same measurements."""
    candidates = Candidate(8, True), Candidate(16, True)
    trials = [Trial(i, candidate, tuple((load, CELL) for load in LOADS)) for i, candidate in enumerate(candidates)]

    def measured(order: Sequence[tuple[int, int]]) -> dict[tuple[int, int], Measurement]:
        server, result = NoisyServer(trials, TRUE, 0), {}
        for candidate, load in order:
            with server.deploy(candidates[candidate]) as endpoint:
                result[candidate, load] = server.measure(endpoint, LOADS[load])
        return result

    order = [(0, 0), (1, 3)]
    assert measured(order) == measured(order[::-1])
    assert len({measurement.throughput_infer_per_sec for measurement in measured(order).values()}) == 2


def test_with_noise_each_regret_is_that_of_a_recommendation() -> None:
    """A later deployment may mislead the search, although the best configuration measured so far stays."""
    recording = read_recording(Path(__file__).parents[2] / "data" / "known.csv")
    problem = recorded_problem(recording, {"p95": 20})
    best = recording.best(problem)
    assert best is not None
    noise = Noise(server=(0.4, 0.0), epoch=(0.0, 0.0), window=(0.0, 0.0))
    servers = [NoisyServer(recording.trials(), noise, seed) for seed in range(4)]
    runs = [replay(recording, problem, "random", seed, 99, server=server) for seed, server in enumerate(servers)]
    assert [run.regrets[-1] for run in runs] == [run.regret for run in runs]
    assert any(later > earlier for run in runs for earlier, later in pairwise(run.regrets))
