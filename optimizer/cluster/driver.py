"""The loop for many: whoever is free gets the next trial, and a trial whose worker is lost runs again."""

from __future__ import annotations

from collections import Counter, deque
from dataclasses import dataclass, replace
from pathlib import Path

from optimizer.cluster.events import Broken, Ended, Measured
from optimizer.cluster.jobs import SearchJob
from optimizer.cluster.keeper import Keeper
from optimizer.cluster.place import Crew, Happening, Joined, Lost, Place
from optimizer.cluster.unfinished import Unfinished
from optimizer.course import Course
from optimizer.crashes import CRASHES
from optimizer.trial import Trial


@dataclass
class Driver:
    """Drives the search of one study over ``workers``."""

    workers: Crew
    course: Course
    keeper: Keeper

    def __post_init__(self) -> None:
        self._unfinished = Unfinished(self.keeper.folder.path)
        self._running: dict[Place, tuple[str, Trial]] = {}
        self._waiting: deque[tuple[str, Trial]] = deque()
        self._losses: Counter[int] = Counter()

    def run(self) -> list[Trial]:
        """All trials by number, once the search is over: those in the table, finished where they were not."""
        before, begun = self.keeper.table.read(), self._unfinished.read()
        again = [trial for trial in before if trial.number in begun and trial.status == "ok"]
        self.course.resume([trial for trial in before if trial not in again])
        self._waiting.extend(("resumed", trial) for trial in again)
        while self._send_all() or self._running or self._waiting:
            news = False
            while not news:
                for place, happening in self.workers.happened():
                    news |= self._take(place, happening)
        return sorted(self.course.trials, key=lambda trial: trial.number)

    def _send_all(self) -> bool:
        """Give work to all who are free. Whether more may come although nobody works."""
        for place in self.workers.ready():
            if place in self._running:
                continue
            following = self._next()
            if following is None:
                return False
            self._send(place, *following)
        return True

    def _next(self) -> tuple[str, Trial] | None:
        while self._waiting:
            role, trial = self._waiting.popleft()
            if trial.candidate == self.course.baseline or self.course.budget.search_seconds_left() > 0:
                return role, trial
            if trial.measurements:  # they count; there is no time for more
                self._finish(trial)
        return self.course.next([trial for _, trial in self._running.values()])

    def _send(self, place: Place, role: str, trial: Trial) -> None:
        self._running[place] = role, trial
        self._note_running()
        seconds_left = self.course.budget.search_seconds_left()
        rules, references = self.course.rules(trial.candidate), self.keeper.references(place)
        self.workers.send(place, SearchJob(trial, role, rules, seconds_left, references))

    def _take(self, place: Place, happening: Happening) -> bool:
        """Whether there is reason to ask anew what is next."""
        match happening:
            case Joined():
                return True
            case Ended(trial, log, references):
                del self._running[place]
                self.keeper.keep_references(place, references)
                self._finish(trial, self.keeper.log(trial.number, log))
                return True
            case Broken() | Lost():
                if place in self._running:
                    self._lose(*self._running.pop(place), happening.reason)
                return True
        self.keeper.keep(place.host, happening)
        if isinstance(happening, Measured) and place in self._running:
            role, known = self._running[place]
            measured = (*known.measurements, (happening.load, happening.measurement))
            known = replace(known, measurements=measured, deploy_seconds=happening.trial.deploy_seconds)
            self._running[place] = role, known
        return False

    def _lose(self, role: str, trial: Trial, reason: str) -> None:
        """It runs again, unless it may be what kills its workers."""
        self._losses[trial.number] += 1
        if self._losses[trial.number] < CRASHES:
            self._waiting.append((role, trial))
            return
        told = f"its worker was lost {CRASHES} times: {reason}"
        trial = replace(trial, status="failed", reason=told, measurements=())
        self.keeper.table.append_failure(trial)
        self._finish(trial)

    def _finish(self, trial: Trial, log: Path | None = None) -> None:
        self.course.finished(trial, log)
        self._note_running()
        self.keeper.watcher.trial_finished(trial, self.course.best())

    def _note_running(self) -> None:
        self._unfinished.write(trial.number for _, trial in (*self._running.values(), *self._waiting))
