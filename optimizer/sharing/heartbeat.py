"""A thread that tells a database again and again that this process lives."""

from __future__ import annotations

import contextlib
import threading
import time

import sqlalchemy.exc
from optuna.exceptions import StorageInternalError
from optuna.storages._heartbeat import BaseHeartbeat

JOIN_SECONDS = 1.0  # it may be waiting for a database that does not answer


class Heartbeat:
    """Of the trial ``trial_id``, from now on until it is stopped. A beat that fails is left out."""

    def __init__(self, storage: BaseHeartbeat, trial_id: int, every_seconds: float, grace_seconds: float) -> None:
        """Raises what the database does where the first beat fails."""
        self._storage = storage
        self._trial_id = trial_id
        self._every_seconds = every_seconds
        self._grace_seconds = grace_seconds
        self._stopped = threading.Event()
        self._storage.record_heartbeat(trial_id)
        self._steady_since = self._last = time.monotonic()
        self._thread = threading.Thread(target=self._beat, name="heartbeat", daemon=True)
        self._thread.start()

    @property
    def is_steady(self) -> bool:
        """Whether there was no gap for as long as others may be silent. Who could not beat for a while, as while the
        database was gone, must not judge others by theirs."""
        return time.monotonic() - self._steady_since > self._grace_seconds

    def stop(self) -> None:
        self._stopped.set()
        self._thread.join(JOIN_SECONDS)

    def _beat(self) -> None:
        while not self._stopped.wait(self._every_seconds):
            with contextlib.suppress(sqlalchemy.exc.SQLAlchemyError, StorageInternalError, OSError):
                self._storage.record_heartbeat(self._trial_id)
                now = time.monotonic()
                if now - self._last > self._grace_seconds / 2:
                    self._steady_since = now
                self._last = now
