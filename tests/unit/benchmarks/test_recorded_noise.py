"""The noise of measurements, estimated from recordings with known noise."""

from __future__ import annotations

import math
import sys
from pathlib import Path

import numpy as np
import pytest

from objectives.metrics import Measurement
from optimizer.core.trial import Candidate, LoadPoint, Trial

sys.path.insert(0, str(Path(__file__).parents[3] / "benchmarks"))

from measurement_noise import Noise, perturbed
from recorded_noise import TrialPair, estimate_noise

LOADS = [LoadPoint(1, concurrency) for concurrency in (4, 8, 16, 32)]
TRUE = Noise(server=(0.05, 0.03), epoch=(0.04, 0.02), window=(0.02, 0.06))
NONE = Noise((0.0, 0.0), (0.0, 0.0), (0.0, 0.0))
CELL = Measurement(1000.0, latency_avg_ms=8.0, latency_p50_ms=7.0, latency_p95_ms=12.0)


def recordings(noise: Noise, configurations: int) -> tuple[list[TrialPair], list[TrialPair]]:
    """Return pairs of recordings in different epochs, and in one epoch."""
    rng = np.random.default_rng(0)
    distant, adjacent = [], []
    for number in range(configurations):
        trials = []
        first, second = rng.normal(0, noise.epoch), rng.normal(0, noise.epoch)
        for epoch in (first, second, second):
            shared = epoch + rng.normal(0, noise.server)
            cells = [(load, perturbed(CELL, *(shared + rng.normal(0, noise.window)).tolist())) for load in LOADS]
            trials.append(Trial(number, Candidate(8, True), tuple(cells)))
        distant.append((trials[0], trials[1]))
        adjacent.append((trials[1], trials[2]))
    return distant, adjacent


def test_the_effects_of_servers_epochs_and_windows_are_told_apart() -> None:
    estimated = estimate_noise(*recordings(TRUE, 3000))
    for name in ("server", "epoch", "window"):
        assert getattr(estimated, name) == pytest.approx(getattr(TRUE, name), rel=0.15), name


def test_without_adjacent_recordings_epochs_count_as_servers() -> None:
    estimated = estimate_noise(recordings(TRUE, 3000)[0])
    assert estimated.epoch == (0.0, 0.0)
    assert estimated.server == pytest.approx((math.hypot(0.05, 0.04), math.hypot(0.03, 0.02)), rel=0.1)


def test_recordings_without_noise_have_none() -> None:
    assert estimate_noise(*recordings(NONE, 5)) == NONE


def test_a_failed_recording_shows_no_noise() -> None:
    (ok, _), *_ = recordings(TRUE, 1)[0]
    failed = Trial(0, Candidate(8, True), status="failed", reason="out of memory")
    with pytest.raises(ValueError, match="no configuration was recorded twice"):
        estimate_noise([(ok, failed)])
