"""Who tries the trials of a study, and who of them still lives."""

from __future__ import annotations

import os
import socket
from datetime import datetime, timedelta
from typing import Protocol

import psutil
from optuna.trial import FrozenTrial

WORKER = "worker"  # user attribute of a trial: the name of who tries it
ABANDONED_AFTER = timedelta(hours=1)  # a trial of another host that has run this long has lost its worker


class Workers(Protocol):
    """``name`` is this process's own. ``are_many``: others come and go while the study is open."""

    @property
    def name(self) -> str: ...

    @property
    def are_many(self) -> bool: ...

    def is_alive(self, trial: FrozenTrial) -> bool:
        """Whether the worker of a running trial still lives, as far as is known."""
        ...


class OneAtATime:
    """A study that is gone on with, not shared: only killed processes leave trials running."""

    are_many = False

    def __init__(self) -> None:
        self.name = f"{socket.gethostname()}:{os.getpid()}"

    def is_alive(self, trial: FrozenTrial) -> bool:
        """As far as this host can tell."""
        host, _, pid = trial.user_attrs.get(WORKER, "").rpartition(":")
        if host == socket.gethostname():
            return psutil.pid_exists(int(pid))
        started = trial.datetime_start
        return bool(host) and started is not None and datetime.now() - started < ABANDONED_AFTER
