"""The life of a tritonserver that is started here, wherever it runs: replaced once it has died or hangs."""

from __future__ import annotations

import contextlib
import re
import time
from abc import ABC, abstractmethod
from pathlib import Path
from typing import TYPE_CHECKING

from optimizer import server_options
from optimizer.errors import DeploymentError, EnvironmentFault, ServerCrashed, ServerFault
from optimizer.machine import cpus as cpu_lists
from optimizer.process import Running, ending
from optimizer.server_health import answers, last_error, last_words
from optimizer.trial import Candidate
from optimizer.untrusted import one_line

if TYPE_CHECKING:
    from tritonclient.grpc import InferenceServerClient

OLDEST = (2, 30)  # whose protocol, statistics and options are those that tune relies on
START_SECONDS = 60.0
START_ATTEMPTS = 3  # a port may be taken between the probe and the bind
ENDING_SECONDS = 1.0  # that it takes at most to be told how a server ended


class Server(ABC):
    """``name`` is its ``--id``, ``what`` the program or image, ``flag`` that which names another. ``log`` collects
    what it prints. It runs on ``cpus`` (None: any) where ``run_for`` says nothing else.

    ``grpc`` and ``http`` are ``host:port`` of the running server; ``http`` is empty where this version cannot keep
    others from loading models over it. ``version`` is what it tells; ``running`` is another object with each start.
    """

    def __init__(self, name: str, what: str, flag: str, *, log: Path, cpus: frozenset[int] | None = None) -> None:
        self.log = log
        self.grpc = self.http = self.version = ""
        self._name, self._what, self._flag = name, what, flag
        self._chosen: tuple[str, ...] = ()
        self._usual_cpus = self._cpus = cpus
        self._log_start = 0
        self.running: Running | None = None
        self._client: InferenceServerClient | None = None

    @abstractmethod
    def _launch(self) -> Running:
        """Start it without waiting, and say in ``grpc`` and ``http`` where."""

    def memory_bytes(self) -> float | None:
        """Where somebody else than this machine's kernel keeps count of it, and says."""
        return None

    def start(self) -> None:
        """Launch it without waiting; no effect while it runs."""
        if self._is_running():
            return
        self.stop()
        self.mark_log()
        self.running = self._launch()

    def run_for(self, candidate: Candidate) -> None:
        """From the next start on, on the CPUs and with the options that the candidate says (none: the usual ones);
        what runs otherwise is stopped."""
        chosen = candidate.server_cpus
        cpus = self._usual_cpus if chosen is None else cpu_lists.parse(chosen)
        options = server_options.words(candidate.fields)
        if (cpus, options) != (self._cpus, self._chosen):
            self.stop()
            self._cpus, self._chosen = cpus, options

    def client(self) -> InferenceServerClient:
        """A client of a server that answers; starts or replaces the server where needed. Raises ServerFault,
        DeploymentError where it does not start with the options of a candidate."""
        if self._client is not None:
            if self.answers():
                return self._client
            self.stop()
        deadline = time.monotonic() + START_SECONDS
        for _ in range(START_ATTEMPTS):
            self.start()
            from tritonclient.grpc import InferenceServerClient  # 0.4 s, while the server starts

            self._client = InferenceServerClient(self.grpc)
            if self._comes_up(self._client, deadline):
                self._check_version()
                return self._client
            self.stop()
            if time.monotonic() > deadline:
                break
        told = last_words(self.log, self._log_start)
        if self._chosen:  # others may do
            raise DeploymentError(f"tritonserver did not start with {' '.join(self._chosen)}: {told}", log=self.log)
        raise ServerFault(f"tritonserver did not start: {told}", log=self.log)

    def answers(self) -> bool:
        return self._client is not None and self._is_running() and answers(self._client)

    def mark_log(self) -> None:
        """What the log says from here on belongs to what is done next."""
        self._log_start = self.log.stat().st_size if self.log.exists() else 0

    def crashed(self, doing: str, what: str = "") -> ServerCrashed:
        """The error to raise where the server died or hangs while ``doing``, or ``what`` happened; what is left of
        the server is killed."""
        assert self.running is not None
        if not what:
            exit_code = self.running.wait(ENDING_SECONDS)
            ended = "no longer answers" if exit_code is None else f"died ({ending(exit_code)})"
            what = f"tritonserver {ended} while {doing}"
        self.stop()
        told = last_error(self.log, self._log_start)
        return ServerCrashed(f"{what}: {told}" if told else what, log=self.log)

    def stop(self) -> None:
        """Leaves no process, port or shared memory. May be called twice."""
        if self._client is not None:
            self._client.close()
            self._client = None
        if self.running is not None:
            self.running.stop()
            self.running = None

    def _is_running(self) -> bool:
        return self.running is not None and self.running.exit_code() is None

    def _comes_up(self, client: InferenceServerClient, deadline: float) -> bool:
        """Whether this server gets ready. Another one that got the port first may answer in its place."""
        from tritonclient.utils import InferenceServerException

        while time.monotonic() < deadline and self._is_running():
            with contextlib.suppress(InferenceServerException):
                if client.is_server_ready(client_timeout=2):
                    told = client.get_server_metadata(client_timeout=2)
                    self.version = one_line(str(told.version), 30)
                    return bool(told.name == self._name)
            time.sleep(0.02)
        return False

    def _check_version(self) -> None:
        if is_too_old(self.version):
            self.stop()
            raise EnvironmentFault(
                f"{self._what}: this is Triton {self.version}, and tune needs {'.'.join(map(str, OLDEST))} or newer: "
                f"name another with {self._flag}"
            )


def is_too_old(version: str) -> bool:
    """Whether the server that tells this version is older than OLDEST; one that tells none is not."""
    found = re.match(r"(\d+)\.(\d+)", version)
    return found is not None and (int(found[1]), int(found[2])) < OLDEST
