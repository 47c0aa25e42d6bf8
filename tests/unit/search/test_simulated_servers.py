"""The search on simulated servers: many cores, and one batch of all requests."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from lib.measurement_noise import Noise, NoisyServer
from lib.simulated_tables import THREADS, SimulatedServer, write
from objectives.metrics import METRICS
from optimizer.config.search_space import SearchSpace
from optimizer.replay.replay import recorded_problem, replay
from optimizer.store.recording import read_recording

NOISE = Noise(server=(0.05, 0.01), epoch=(0.0, 0.0), window=(0.04, 0.05))
DELAYS = ("off", 0, 1000, 8000)
MANY_CORES = SimulatedServer(
    "many_cores",
    fixed_s=2e-3,
    per_sample_s=1e-4,
    contention=0.1,
    network_s=2e-4,
    jitter=0.1,
    seed=1,
    thread_speedup=1.8,
    space=SearchSpace((16, 64), DELAYS, ("none", "max/2"), (1, 2), {THREADS: ("1", "2")}, 4),
)
ONE_BATCH = SimulatedServer(
    "one_batch",
    fixed_s=6e-3,
    per_sample_s=2e-5,
    contention=1.0,
    network_s=2e-4,
    jitter=0.1,
    seed=2,
    space=SearchSpace((8, 32), DELAYS, ("none", "max/2"), (1, 2, 3), request_batch_size=4),
)


@pytest.mark.parametrize(("server", "bound_ms"), [(MANY_CORES, 20.0), (ONE_BATCH, 10.0)])
def test_the_best_configuration_is_found_in_few_deployments(
    server: SimulatedServer, bound_ms: float, tmp_path: Path
) -> None:
    write(server, tmp_path / "table.csv")
    recording = read_recording(tmp_path / "table.csv")
    problem = recorded_problem(recording, {"p95": bound_ms})
    noisy = NoisyServer(recording.trials(), NOISE, 0)
    result = replay(recording, problem, "simulated", 0, 30, server=noisy)
    assert result.regret <= 0.05
    assert result.effort.deployments <= 10


def test_the_configuration_with_the_most_goodput_is_found_in_few_deployments(tmp_path: Path) -> None:
    write(ONE_BATCH, tmp_path / "table.csv", deadline_ms=8.0)
    recording = read_recording(tmp_path / "table.csv")
    problem = replace(recorded_problem(recording, {"p50": 8.0}), objectives=(METRICS["goodput"],))
    best = recording.best(problem)
    assert best is not None
    assert 0 < (best.measurement.goodput_infer_per_sec or 0) < (best.measurement.throughput_infer_per_sec or 0)
    result = replay(recording, problem, "simulated", 0, 30)
    assert result.regret <= 0.05
    assert result.effort.deployments <= 12
