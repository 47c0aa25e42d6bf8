"""A target of several server processes that serve the same configuration on the same device."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import TypeVar

from optimizer.core.candidate import Candidate
from optimizer.core.endpoint import Endpoint
from optimizer.core.errors import ServerCrashed, TuneError
from optimizer.deploy.managed_target import ManagedTarget


class ServerProcesses:
    """Serves a candidate on the servers of the first ``targets``, as many as it has server processes.

    The servers divide the CPUs, see ``Server.run_for``. Each has its own copy of the repository and its own log.
    Those that a candidate does not need are stopped. The endpoint is that of the first server, and has those of the
    others as replicas. If a server dies, the error names it and all of them stop, since others may hang; the next
    deployment starts them again.
    """

    def __init__(self, targets: Sequence[ManagedTarget]) -> None:
        self._targets = targets

    def start(self) -> None:
        """Launch the first server without waiting for it."""
        self._targets[0].start()

    def forget_vanished(self) -> None:
        """Remove links to files that no longer exist from the copy of each server."""
        for target in self._targets:
            target.forget_vanished()

    @property
    def server_version(self) -> str:
        """The version that the servers report; empty before the first deployment."""
        return self._targets[0].server_version

    @contextlib.contextmanager
    def deploy(self, candidate: Candidate, *, fresh: bool = False) -> Iterator[Endpoint]:
        """Serve ``candidate``, as ``ManagedTarget.deploy`` on each server. Raises the errors of that function."""
        count = candidate.server_processes
        active_targets = self._targets[:count]
        for target in self._targets if fresh else self._targets[count:]:
            target.stop()
        for position, target in enumerate(active_targets):  # they start at the same time
            target.launch(candidate, position)
        endpoints = []
        for number, target in enumerate(active_targets, 1):
            try:
                endpoints.append(target.serve(candidate, from_files=fresh))
            except TuneError as error:
                if count == 1:  # it needs no number
                    raise
                raise _of_process(error, number, count) from error
        try:
            yield replace(endpoints[0], replicas=tuple(endpoints[1:]))
        except ServerCrashed as error:
            raise _stop_after_crash(error, active_targets) from error

    def close(self) -> None:
        """Stop all servers and remove their copies of the repository."""
        with contextlib.ExitStack() as closing:
            for target in self._targets:
                closing.callback(target.close)


def _stop_after_crash(error: ServerCrashed, active_targets: Sequence[ManagedTarget]) -> ServerCrashed:
    """Stop all servers after ``error`` of the load generator; return the error that names the one that caused it.

    That is one that no longer answers, or else the only one that has logged an error.
    """
    numbered = list(enumerate(active_targets, 1))
    suspects = [(number, target) for number, target in numbered if not target.responds()]
    logged = [(number, target) for number, target in numbered if target.has_logged_error()]
    if len(active_targets) == 1:
        crash = active_targets[0].stop_after_crash(error)
    elif suspects or len(logged) == 1:
        number, target = (suspects or logged)[0]
        crash = _of_process(target.stop_after_crash(error), number, len(active_targets))
    else:
        crash = ServerCrashed(str(error), log=(logged or numbered)[0][1].log)
    for target in active_targets:
        target.stop()
    return crash


Error = TypeVar("Error", bound=TuneError)


def _of_process(error: Error, number: int, count: int) -> Error:
    """Return ``error`` with the number of the server process."""
    numbered = copy.copy(error)
    numbered.args = (f"server process {number} of {count}: {error}",)
    return numbered
