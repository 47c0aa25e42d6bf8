"""Test which measurements are repeated."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from objectives.metrics import Measurement
from optimizer.core.endpoint import Endpoint
from optimizer.core.trial import LoadPoint, Trial
from optimizer.measure.measurer import MAX_REPEATED_SECONDS, Measurer
from optimizer.results.progress_observers import QuietObserver
from optimizer.store.trials_table import TrialsTable
from tests.random_server import FAST, RandomServer


class UnstableServer(RandomServer):
    """A server whose windows never agree. ``taken`` are the seconds of each measurement."""

    def __init__(self, taken: float) -> None:
        super().__init__()
        self.taken, self.measurements = taken, 0

    def measure(self, endpoint: Endpoint, load: LoadPoint, seconds: float | None = None) -> Measurement:
        self.measurements += 1
        measured = super().measure(endpoint, replace(load, concurrency=4))
        return replace(measured, stable=False, reason="unstable", measure_seconds=self.taken)


@pytest.mark.parametrize(
    ("load", "taken", "measurements"),
    [
        (LoadPoint(1, request_rate=100.0), 2.0, 2),
        (LoadPoint(1, request_rate=4.0), MAX_REPEATED_SECONDS + 1, 1),
        (LoadPoint(1, 4), MAX_REPEATED_SECONDS + 1, 2),
    ],
)
def test_an_unstable_measurement_is_repeated_unless_it_is_a_long_one_at_a_request_rate(
    load: LoadPoint, taken: float, measurements: int, tmp_path: Path
) -> None:
    server = UnstableServer(taken)
    measurer = Measurer(server, server, TrialsTable(tmp_path / "trials.csv", "drawn", {}), QuietObserver())
    measurer.measure(Trial(0, FAST), Endpoint("drawn", FAST), load)
    assert server.measurements == measurements
