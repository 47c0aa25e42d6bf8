"""One measurement: the load, the server's resources meanwhile, and the row on disk before anything else happens."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Protocol

from objectives.metrics import Measurement
from optimizer.answers.guard import Unguarded
from optimizer.answers.score import Scorer
from optimizer.errors import MeasurementError, ServerCrashed
from optimizer.interfaces import Endpoint, Guard, LoadGenerator, Telemetry
from optimizer.machine.telemetry import disturbance
from optimizer.stopwatch import Stopwatch
from optimizer.trial import Candidate, Confirmation, LoadPoint, Point, Trial


class Watcher(Protocol):
    """Is told what happens, as it happens."""

    def trial_started(self, number: int, candidate: Candidate, role: str) -> None: ...

    def measured(self, number: int, load: LoadPoint, measurement: Measurement) -> None: ...

    def trial_finished(self, trial: Trial, best: Point | None) -> None: ...


class Record(Protocol):
    """Keeps what is measured, each measurement before the next begins; see ``TrialsTable``."""

    def append(
        self, trial: Trial, load: LoadPoint, measurement: Measurement, confirmation: int | None = None
    ) -> None: ...

    def append_failure(self, trial: Trial) -> None: ...

    def read(self) -> list[Trial]: ...


@dataclass
class Measuring:
    """What the search and the confirmation share: they differ in where a measurement is kept."""

    load_generator: LoadGenerator
    telemetry: Telemetry
    table: Record
    watcher: Watcher
    guard: Guard = field(default_factory=Unguarded)
    scorer: Scorer | None = None
    stopwatch: Stopwatch = field(default_factory=Stopwatch)

    def __post_init__(self) -> None:
        self._score: float | None = None

    def begin(self, endpoint: Endpoint) -> None:
        """Once a deployment, before its first load. Raises DeploymentError where its answers are wrong."""
        self._score = None
        with self.stopwatch.server():
            self.guard.check(endpoint)
            if self.scorer is not None:
                self._score = self.scorer.measure(endpoint)

    def measure(self, trial: Trial, endpoint: Endpoint, load: LoadPoint) -> Trial:
        """``trial`` with one more measurement. One that fails is recorded with its reason. Raises ServerCrashed."""
        (measurement,) = self._take(trial, endpoint, load, lambda: [self.load_generator.measure(endpoint, load)])
        return self.keep(trial, load, measurement)

    def keep(self, trial: Trial, load: LoadPoint, measurement: Measurement) -> Trial:
        measurement = replace(measurement, score=self._score)
        self.table.append(trial, load, measurement)
        self.watcher.measured(trial.number, load, measurement)
        return replace(trial, measurements=(*trial.measurements, (load, measurement)))

    def confirm(
        self, trial: Trial, endpoint: Endpoint, load: LoadPoint, server: int, seconds: float, count: int = 1
    ) -> Trial:
        """``trial`` with one to ``count`` more confirmations, measured on the ``server``-th fresh server for about
        ``seconds`` each.

        One that was disturbed is never a PASS. Raises ServerCrashed.
        """
        taken = self._take(
            trial, endpoint, load, lambda: self.load_generator.windows(endpoint, load, seconds, count), server
        )
        for measurement in taken:
            measurement = replace(measurement, score=self._score)
            if reason := disturbance(measurement):
                measurement = replace(measurement, stable=False, reason=reason)
            self.table.append(trial, load, measurement, confirmation=server)
            self.watcher.measured(trial.number, load, measurement)
            trial = trial.confirmed_by(Confirmation(server, load, measurement))
        return trial

    def _take(
        self,
        trial: Trial,
        endpoint: Endpoint,
        load: LoadPoint,
        measure: Callable[[], list[Measurement]],
        confirmation: int | None = None,
    ) -> list[Measurement]:
        """Once more where something else was at work on the CPUs; what was less disturbed counts."""
        try:
            found = self._once(endpoint, measure)
            again = self._once(endpoint, measure) if any(map(disturbance, found)) else found
        except ServerCrashed as error:
            self.table.append(trial, load, Measurement(reason=str(error)), confirmation)
            raise
        return min(found, again, key=_badness)

    def _once(self, endpoint: Endpoint, measure: Callable[[], list[Measurement]]) -> list[Measurement]:
        try:
            with self.telemetry.record(endpoint) as samples:
                found = measure()
        except ServerCrashed:
            raise
        except MeasurementError as error:
            return [Measurement(reason=str(error))]
        known = {name: value for name, value in asdict(samples).items() if value is not None}
        return [replace(measurement, **known) for measurement in found]


def _badness(found: Sequence[Measurement]) -> tuple[bool, float]:
    lost = any(one.throughput_infer_per_sec is None for one in found)
    return lost, max(one.other_cpu_share or 0.0 for one in found)
