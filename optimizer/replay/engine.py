"""One search replayed: the engine of ``tune run`` with a table in place of server and load generator."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from objectives.metrics import Measurement
from objectives.sla import worst_violation
from optimizer.budget import Budget
from optimizer.errors import ServerFault
from optimizer.problem import Problem
from optimizer.replay.recording import Recording
from optimizer.replay.rows import Row
from optimizer.search import make_searcher
from optimizer.trial import Candidate, LoadPoint, Point, Trial
from optimizer.tuner import Tuner

TOLERANCES = (0.05, 0.01)  # shares of the table's best by which a search may fall short of it


@dataclass(frozen=True)
class Effort:
    """A deployment is one load of one configuration, a measurement one load point of it."""

    deployments: float
    measurements: float


NEVER = Effort(math.inf, math.inf)


@dataclass(frozen=True)
class Replayed:
    """What one search took until it stopped, the confirmation apart, and what it recommended.

    ``regret``: the share of the table's best throughput that the recommendation lacks; 1 without one.
    ``until``: by tolerance, what it took until something that good had been measured; ``NEVER`` if it never was.
    """

    effort: Effort
    until: Mapping[float, Effort]
    recommended: Row | None
    regret: float


def replay(recording: Recording, problem: Problem, best: Row, method: str, seed: int, max_trials: int) -> Replayed:
    """Search ``recording`` by ``method`` until that stops or ``max_trials`` configurations have been tried.

    ``best`` is the table's. The same arguments give the same result. Raises BadInputError for a method that
    lacks a package.
    """
    meter = _Meter(problem, _throughput(best.measurement))
    tuner = Tuner(
        problem=problem,
        searcher=make_searcher(method, problem, seed),
        target=recording.server,
        load_generator=recording.server,
        telemetry=recording.server,
        table=_Unkept(),
        budget=Budget(math.inf, max_trials),
        watcher=meter,
    )
    with contextlib.suppress(ServerFault):  # nothing that it tried could be deployed, so it gave up
        tuner.run(())
    point = tuner.best()
    row = recording.answers[point.candidate, point.load] if point else None
    return Replayed(
        effort=Effort(meter.deployments, meter.measurements),
        until={tolerance: meter.until.get(tolerance, NEVER) for tolerance in TOLERANCES},
        recommended=row,
        regret=_regret(row, best),
    )


@dataclass
class _Meter:
    """A watcher that counts what the search takes, until ``best`` (infer/s) is reached and until it stops."""

    problem: Problem
    best: float
    deployments: int = 0
    measurements: int = 0
    until: dict[float, Effort] = field(default_factory=dict)
    _confirming: bool = False

    def trial_started(self, number: int, candidate: Candidate, role: str) -> None:
        self._confirming = role == "confirm"
        self.deployments += not self._confirming

    def measured(self, number: int, load: LoadPoint, measurement: Measurement) -> None:
        if self._confirming:
            return
        self.measurements += 1
        if not measurement.stable or worst_violation(self.problem.constraints, measurement) > 0:
            return
        for tolerance in TOLERANCES:
            if _throughput(measurement) >= (1 - tolerance) * self.best:
                self.until.setdefault(tolerance, Effort(self.deployments, self.measurements))

    def trial_finished(self, trial: Trial, best: Point | None) -> None:
        """Counted when it began."""


class _Unkept:
    """A record of nothing: a replay takes seconds and is never resumed."""

    def append(self, trial: Trial, load: LoadPoint, measurement: Measurement) -> None: ...

    def append_failure(self, trial: Trial) -> None: ...

    def read(self) -> list[Trial]:
        return []


def _regret(recommended: Row | None, best: Row) -> float:
    if recommended is None:
        return 1.0
    most = _throughput(best.measurement)
    return 1 - _throughput(recommended.measurement) / most if most else 0.0


def _throughput(measurement: Measurement) -> float:
    return measurement.throughput_infer_per_sec or 0.0
