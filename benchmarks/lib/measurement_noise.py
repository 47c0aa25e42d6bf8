"""The noise of measurements, and a recorded server whose measurements have it.

The logarithms of a measurement's throughput and tail ratio (the latency divided by the mean latency) are those of its
cell plus three random effects. One is shared by all measurements of a deployment (``server``), one by all
measurements of the same minutes (``epoch``), and one is the measurement's own (``window``).
"""

from __future__ import annotations

import contextlib
import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import numpy as np

from objectives import batch_stats
from objectives.arrays import FloatArray
from objectives.metrics import RATES, STATISTICS, TIMINGS, Measurement
from optimizer.core.candidate import Candidate
from optimizer.core.endpoint import Endpoint
from optimizer.core.trial import LoadPoint, Trial
from optimizer.store.recording import RecordedServer

Effects: TypeAlias = tuple[float, float]  # on log throughput and log tail ratio

STAGES = (
    "client_send_ms", "network_ms", "queue_ms", "compute_input_ms", "compute_infer_ms", "compute_output_ms",
    "client_recv_ms",
)  # fmt: skip


@dataclass(frozen=True)
class Noise:
    """Standard deviations of the effects of a server, of an epoch and of a window."""

    server: Effects
    epoch: Effects
    window: Effects


# about that of the recorded tables
TYPICAL_NOISE = Noise(server=(0.05, 0.01), epoch=(0.0, 0.0), window=(0.04, 0.05))


class NoisyServer(RecordedServer):
    """A recorded server whose measurements have ``noise``. All of its measurements are in one epoch.

    The recorded measurement is the mean. Each deployment draws an effect of its server, and each measurement one of
    its own. They are functions of the seed, the candidate, the load and the numbers of the deployment and of the
    measurement. Other candidates do not change them. So searches with the same seed see the same noise (common
    random numbers), which makes their difference more precise.
    """

    def __init__(self, trials: Sequence[Trial], noise: Noise, seed: int) -> None:
        super().__init__(trials)
        self.noise = noise
        self._seed = seed
        self._numbers = {candidate: number for number, candidate in enumerate(self._trials, 1)}
        self._loads = {cell: number for number, cell in enumerate(self._cells, 1)}
        self._deployments = Counter[Candidate]()
        self._measured = Counter[LoadPoint]()  # in the present deployment
        self._epoch = self._draw(noise.epoch)
        self._server = np.zeros(2)

    @contextlib.contextmanager
    def deploy(self, candidate: Candidate, *, fresh: bool = False) -> Iterator[Endpoint]:
        with super().deploy(candidate) as endpoint:
            self._deployments[candidate] += 1
            self._measured.clear()
            self._server = self._draw(self.noise.server, *self._place(candidate))
            yield endpoint

    def measure(self, endpoint: Endpoint, load: LoadPoint, seconds: float | None = None) -> Measurement:
        measurement = super().measure(endpoint, load, seconds)
        self._measured[load] += 1
        place = *self._place(endpoint.candidate), self._loads[endpoint.candidate, load], self._measured[load]
        throughput, tail = self._epoch + self._server + self._draw(self.noise.window, *place)
        return perturbed(measurement, float(throughput), float(tail))

    def _place(self, candidate: Candidate) -> tuple[int, int]:
        return self._numbers[candidate], self._deployments[candidate]

    def _draw(self, deviations: Effects, *place: int) -> FloatArray:
        """Return the effects of ``place``, whose numbers are positive, because NumPy ignores zeros at the end."""
        return np.random.default_rng([self._seed, *place]).normal(0.0, deviations)


def perturbed(measurement: Measurement, throughput: float, tail: float) -> Measurement:
    """Return ``measurement`` with effects on its log throughput and its log tail ratio.

    In a closed loop the mean latency is the load divided by the throughput. So all times change by the inverse factor
    of the throughput, and the percentiles also by that of the tail. Exact counts of times are left out.
    """
    slower, longer = math.exp(-throughput), math.exp(tail)
    values: dict[str, Any] = {
        timing.field_of(statistic): slower * (1.0 if statistic == "avg" else longer)
        for timing in TIMINGS
        for statistic in STATISTICS
    }
    factors = {**values, **dict.fromkeys(STAGES, slower), **dict.fromkeys(RATES, 1 / slower)}
    changed = {
        name: factor * value for name, factor in factors.items() if (value := getattr(measurement, name)) is not None
    }
    batches = [
        batch._replace(compute_ns=round(slower * batch.compute_ns))
        for batch in batch_stats.from_text(measurement.batch_stats)
    ]
    counts: dict[str, Any] = {name: "" for timing in TIMINGS for name in (timing.over_field, timing.sketch_field)}
    return replace(measurement, **changed, **counts, batch_stats=batch_stats.to_text(batches))
