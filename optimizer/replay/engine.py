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
from optimizer.measuring import Measuring
from optimizer.problem import Problem
from optimizer.replay.baselines import baselines
from optimizer.replay.recording import Recording
from optimizer.replay.rows import Row
from optimizer.search import make_searcher
from optimizer.search.elsewhere import Elsewhere
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
    ``regrets``: what the regret would have been, had the search ended after the first deployment, the second, ….
    """

    effort: Effort
    until: Mapping[float, Effort]
    recommended: Row | None
    regret: float
    regrets: tuple[float, ...]

    def regret_after(self, deployments: int) -> float:
        """The regret with no more than so many deployments; where it stopped before, what it ended with."""
        return self.regrets[min(deployments, len(self.regrets)) - 1]


def replay(
    recording: Recording,
    problem: Problem,
    best: Row,
    method: str,
    seed: int,
    max_trials: int,
    elsewhere: Elsewhere | None = None,
) -> Replayed:
    """Search ``recording`` by ``method`` until that stops or ``max_trials`` configurations have been tried.

    As in a real run the baselines are measured first, as far as they were recorded, and count as deployments.
    ``best`` is the table's; ``elsewhere`` is what another study showed. The same arguments give the same result.
    Raises BadInputError for a method that lacks a package.
    """
    most = _throughput(best.measurement)
    meter = _Meter(problem, most)
    tuner = Tuner(
        problem=problem,
        searcher=make_searcher(method, problem, seed, elsewhere=elsewhere),
        target=recording.server,
        measuring=Measuring(recording.server, recording.server, Unkept(), meter),
        budget=Budget(math.inf, max_trials),
    )
    with contextlib.suppress(ServerFault):  # nothing that it tried could be deployed, so it gave up
        tuner.run(baselines(problem.space))
    point = tuner.best()
    row = recording.answers[point.candidate, point.load] if point else None
    return Replayed(
        effort=Effort(len(meter.found), meter.measurements),
        until={tolerance: meter.until.get(tolerance, NEVER) for tolerance in TOLERANCES},
        recommended=row,
        regret=_regret(_throughput(row.measurement) if row else None, most),
        regrets=tuple(_regret(found, most) for found in meter.found),
    )


@dataclass
class _Meter:
    """A watcher that counts what the search takes, until ``best`` (infer/s) is reached and until it stops.

    ``found``: of each deployment, the highest throughput within the bounds that was measured by its end.
    """

    problem: Problem
    best: float
    found: list[float | None] = field(default_factory=list)
    measurements: int = 0
    until: dict[float, Effort] = field(default_factory=dict)

    def trial_started(self, number: int, candidate: Candidate, role: str) -> None:
        self.found.append(self.found[-1] if self.found else None)

    def measured(self, number: int, load: LoadPoint, measurement: Measurement) -> None:
        self.measurements += 1
        if not measurement.stable or worst_violation(self.problem.constraints, measurement) > 0:
            return
        throughput = _throughput(measurement)
        self.found[-1] = max(throughput, self.found[-1] or 0.0)
        for tolerance in TOLERANCES:
            if throughput >= (1 - tolerance) * self.best:
                self.until.setdefault(tolerance, Effort(len(self.found), self.measurements))

    def trial_finished(self, trial: Trial, best: Point | None) -> None:
        """Counted when it began."""


class Unkept:
    """A record of nothing: a replay takes seconds and is never resumed."""

    def append(
        self, trial: Trial, load: LoadPoint, measurement: Measurement, confirmation: int | None = None
    ) -> None: ...

    def append_failure(self, trial: Trial) -> None: ...

    def read(self) -> list[Trial]:
        return []


def _regret(found: float | None, most: float) -> float:
    if found is None:
        return 1.0
    return 1 - found / most if most else 0.0


def _throughput(measurement: Measurement) -> float:
    return measurement.throughput_infer_per_sec or 0.0
