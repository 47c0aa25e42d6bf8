"""The simulated batcher against the real server, in small; in full it is ``benchmarks/simulator_proof.py``."""

from __future__ import annotations

import pytest

import simulator_proof as proof
from simulator_proof import batching, cells, unbatched
from tests.repositories import skip_without_python_models

pytestmark = [pytest.mark.alone, pytest.mark.long]

CALIBRATION = [
    *cells(batching(20, 0), 1, 9, 40),
    *cells(batching(6, 0, instances=2), 5),
]
HELD_OUT = [
    *cells(unbatched(1, 2), 5, constant=0.5),
    *cells(batching(8, 0), 4, 16, poisson=0.7),
    *cells(batching(8, 4000, instances=2), 6, 24, constant=0.6),
]
ATTEMPTS = 2  # a busy machine may spoil one


def test_predictions_hold_on_the_server() -> None:
    skip_without_python_models()
    reports = []
    for _ in range(ATTEMPTS):
        with proof.bench() as (target, load_generator):
            recorded = proof.record_once(target, load_generator, [*CALIBRATION, *HELD_OUT])
        compared = proof.compare(recorded, proof.calibrate(recorded, CALIBRATION, steps=60), HELD_OUT)
        summary = proof.Summary.of(compared)
        if summary.throughput <= 0.08 and summary.p95 <= 0.12:
            return
        reports.append(f"{summary}\n{proof.table(compared)}")
    pytest.fail("\n".join(reports))
