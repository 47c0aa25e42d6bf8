"""The confirmation on a cluster: all of it on one worker, so that a drift hits all alike."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from optimizer.budget import Budget
from optimizer.cluster.events import Broken, Confirmed, Failed, Measured
from optimizer.cluster.jobs import ConfirmJob
from optimizer.cluster.keeper import Keeper
from optimizer.cluster.place import Crew, Lost, Place
from optimizer.crashes import CRASHES
from optimizer.trial import Confirmation, Trial


@dataclass
class Confirming:
    """``notes``: what the user should know of how it went."""

    workers: Crew
    keeper: Keeper
    budget: Budget
    notes: list[str] = field(default_factory=list)

    def run(self, trials: Sequence[Trial]) -> list[Trial]:
        """The trials with their confirmations. Where its worker is lost, another goes on."""
        known = {trial.number: trial for trial in trials}
        for _ in range(CRASHES):
            while not (free := self.workers.ready()):
                self.workers.happened()
            place, seconds_left = free[0], self.budget.left_seconds()
            job = ConfirmJob(tuple(known.values()), seconds_left, self.keeper.references(place))
            self.workers.send(place, job)
            if self._is_done(place, known):
                return list(known.values())
        self.notes.append(f"the confirmation lost its worker {CRASHES} times, and is not complete")
        return list(known.values())

    def _is_done(self, at: Place, known: dict[int, Trial]) -> bool:
        """False where the worker was lost. What it measured is in ``known``."""
        while True:
            for place, happening in self.workers.happened():
                if place is not at:
                    continue
                match happening:
                    case Confirmed(trials, notes):
                        known.update({trial.number: trial for trial in trials})
                        self.notes += notes
                        return True
                    case Broken() | Lost():
                        return False
                    case Measured(trial, load, measurement, int(server)):
                        again = Confirmation(server, load, measurement)
                        known[trial.number] = known[trial.number].confirmed_by(again)
                    case Failed(trial):
                        known[trial.number] = trial
                self.keeper.keep(place.host, happening)
