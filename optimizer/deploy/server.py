"""The life of a tritonserver that is started here, wherever it runs: replaced once it has died or hangs."""

from __future__ import annotations

import contextlib
import time
from abc import ABC, abstractmethod
from pathlib import Path
from typing import TYPE_CHECKING

from optimizer.errors import ServerCrashed, ServerFault
from optimizer.machine import cpus as cpu_lists
from optimizer.process import Running, ending
from optimizer.server_health import answers, last_error, last_words

if TYPE_CHECKING:
    from tritonclient.grpc import InferenceServerClient

START_SECONDS = 60.0
START_ATTEMPTS = 3  # a port may be taken between the probe and the bind
ENDING_SECONDS = 1.0  # that it takes at most to be told how a server ended


class Server(ABC):
    """``name`` is its ``--id``. ``log`` collects what it prints. It runs on ``cpus`` (None: any) where ``run_on``
    says nothing else.

    ``grpc`` and ``http`` are ``host:port`` of the running server; ``running`` is another object with each start.
    """

    def __init__(self, name: str, *, log: Path, cpus: frozenset[int] | None = None) -> None:
        self.log = log
        self.grpc = self.http = ""
        self._name = name
        self._usual_cpus = self._cpus = cpus
        self._log_start = 0
        self.running: Running | None = None
        self._client: InferenceServerClient | None = None

    @abstractmethod
    def _launch(self) -> Running:
        """Start it without waiting, and say in ``grpc`` and ``http`` where."""

    def start(self) -> None:
        """Launch it without waiting; no effect while it runs."""
        if self._is_running():
            return
        self.stop()
        self.mark_log()
        self.running = self._launch()

    def run_on(self, chosen: str | None) -> None:
        """From the next start on, on these CPUs (None: the usual ones); what runs on others is stopped."""
        wanted = self._usual_cpus if chosen is None else cpu_lists.parse(chosen)
        if wanted != self._cpus:
            self.stop()
            self._cpus = wanted

    def client(self) -> InferenceServerClient:
        """A client of a server that answers; starts or replaces the server where needed. Raises ServerFault."""
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
                return self._client
            self.stop()
            if time.monotonic() > deadline:
                break
        raise ServerFault(f"tritonserver did not start: {last_words(self.log, self._log_start)}", log=self.log)

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
                    return bool(client.get_server_metadata(client_timeout=2).name == self._name)
            time.sleep(0.02)
        return False
