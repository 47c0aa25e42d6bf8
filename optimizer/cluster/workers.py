"""The pool as a study sees it: who is ready, what happens, and when there is nobody left to wait for."""

from __future__ import annotations

import time
from dataclasses import dataclass

from optimizer.cluster.events import Broken, Confirmed, Ended
from optimizer.cluster.jobs import Job
from optimizer.cluster.place import Happening, Place
from optimizer.cluster.pool import Pool
from optimizer.errors import BadInputError, EnvironmentFault
from optimizer.stopwatch import Stopwatch

WAIT_SECONDS = 0.5  # for something to happen
NOBODY_SECONDS = 120.0  # without any worker, before the run ends


@dataclass
class Workers:
    """``server_version`` is what their servers tell; empty before the first trial has ended."""

    pool: Pool
    stopwatch: Stopwatch
    server_version: str = ""
    _nobody_since: float | None = None

    def ready(self) -> list[Place]:
        return self.pool.ready()

    def send(self, place: Place, job: Job) -> None:
        self.pool.send(place, job)

    def happened(self) -> list[tuple[Place, Happening]]:
        """What has, within WAIT_SECONDS. A worker that is broken is left out.

        Raises EnvironmentFault where nobody is left, BadInputError where a worker found what no other could do.
        """
        with self.stopwatch.cluster():
            found = self.pool.happened(WAIT_SECONDS)
        for place, happening in found:
            if isinstance(happening, Broken):
                if happening.everywhere:
                    raise BadInputError(happening.reason)
                self.pool.leave_out(place, happening.reason)
            if isinstance(happening, Ended | Confirmed):
                self.server_version = happening.server_version
        self._check_anybody()
        return found

    def _check_anybody(self) -> None:
        if self.pool.ready():
            self._nobody_since = None
            return
        now = time.monotonic()
        self._nobody_since = now if self._nobody_since is None else self._nobody_since
        if self.pool.is_hopeless or now - self._nobody_since > NOBODY_SECONDS:
            raise EnvironmentFault(f"--cluster: no worker is left: {self.pool.why_none()}; `tune --resume` goes on")
