"""A recorded table as target and load generator: the whole program without a server."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence

from objectives.metrics import Measurement
from optimizer.errors import DeploymentError, MeasurementError
from optimizer.interfaces import Endpoint, Samples
from optimizer.trial import Candidate, LoadPoint, Trial


class RecordedTable:
    """Answers with what ``trials`` measured; only recorded candidates and loads can be had.

    A candidate whose recorded deployment failed fails again, with the recorded reason. Where a load was
    recorded more than once, the last recording is the answer.
    """

    def __init__(self, trials: Sequence[Trial], model: str = "recorded") -> None:
        self._model = model
        self._trials = {trial.candidate: trial for trial in trials}
        self._cells = {
            (trial.candidate, load): measurement for trial in trials for load, measurement in trial.measurements
        }

    @contextlib.contextmanager
    def deploy(self, candidate: Candidate) -> Iterator[Endpoint]:
        trial = self._trials.get(candidate)
        if trial is None:
            raise DeploymentError(f"not in the table: {candidate}")
        if trial.status == "failed":
            raise DeploymentError(trial.reason)
        yield Endpoint(self._model, candidate)

    def deploy_as_written(self, candidate: Candidate) -> contextlib.AbstractContextManager[Endpoint]:
        return self.deploy(candidate)

    def close(self) -> None:
        """Nothing to leave behind."""

    def measure(self, endpoint: Endpoint, load: LoadPoint, seconds: float | None = None) -> Measurement:
        measurement = self._cells.get((endpoint.candidate, load))
        if measurement is None:
            raise MeasurementError(f"not in the table: {load} of {endpoint.candidate}")
        return measurement

    def windows(self, endpoint: Endpoint, load: LoadPoint, seconds: float, count: int) -> list[Measurement]:
        return [self.measure(endpoint, load, seconds)]

    def warm_up(self, endpoint: Endpoint, load: LoadPoint) -> None:
        """A table is always warm, and a glance at it is a measurement."""

    @contextlib.contextmanager
    def record(self, endpoint: Endpoint) -> Iterator[Samples]:
        """Telemetry: what was recorded stands in the measurements already."""
        yield Samples()
