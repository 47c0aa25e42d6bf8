"""A tritonserver on loopback: one process, replaced once it has died or no longer answers."""

from __future__ import annotations

import contextlib
import re
import secrets
import socket
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from optimizer import server_options
from optimizer.deploy.installation import Installation
from optimizer.deploy.server_folder import ServerFolder
from optimizer.errors import DeploymentError, EnvironmentFault, ServerCrashed, ServerFault
from optimizer.machine import cpus as cpu_lists
from optimizer.process import SupervisedProcess, ending
from optimizer.server_health import answers, last_error, last_words
from optimizer.trial import Candidate
from optimizer.untrusted import one_line

if TYPE_CHECKING:
    from tritonclient.grpc import InferenceServerClient

OLDEST = (2, 30)  # whose protocol, statistics and options are those that tune relies on
START_SECONDS = 60.0
START_ATTEMPTS = 3  # a port may be taken between the probe and the bind
ENDING_SECONDS = 1.0  # that the supervisor takes at most to tell how its server ended


def free_port() -> int:
    """A port of 127.0.0.1 that nobody listens at; by the time that it is used somebody may."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class TritonServer:
    """Serves from ``folder``; ``options`` are further ones of its command line. ``log`` collects what it prints.

    ``grpc`` and ``http`` are ``host:port`` of the running server; ``http`` is empty where this version cannot keep
    others from loading models over it. ``version`` is what it tells. ``cpus`` as in SupervisedProcess, where
    ``run_for`` says nothing else.
    """

    def __init__(
        self,
        folder: ServerFolder,
        installation: Installation,
        *,
        log: Path,
        options: Sequence[str] = (),
        choose_port: Callable[[], int] = free_port,
        cpus: frozenset[int] | None = None,
    ) -> None:
        self.log = log
        self.grpc = self.http = self.version = ""
        self._folder = folder
        self._installation = installation
        self._options = options
        self._chosen: tuple[str, ...] = ()
        self._choose_port = choose_port
        self._usual_cpus = self._cpus = cpus
        self._log_start = 0
        self._process: SupervisedProcess | None = None
        self._client: InferenceServerClient | None = None

    @property
    def supervisor_pid(self) -> int | None:
        return None if self._process is None else self._process.supervisor_pid

    def start(self) -> None:
        """Launch it without waiting; no effect while it runs."""
        if self._is_running():
            return
        self.stop()
        self.mark_log()
        http_port, grpc_port = self._choose_port(), self._choose_port()
        self.http, self.grpc = "", f"127.0.0.1:{grpc_port}"
        # a web page can send requests to loopback, and a load request can bring code: that now takes a header
        http = [f"--http-restricted-api=model-repository:tritune={secrets.token_hex(16)}"]
        if self._installation.knows(http[0]):
            self.http = f"127.0.0.1:{http_port}"
            http += ["--http-address=127.0.0.1", f"--http-port={http_port}"]
        else:
            http = ["--allow-http=false"]
        command: list[str | Path] = [
            self._installation.tritonserver,
            f"--id={self._folder.path.name}",
            f"--model-repository={self._folder.repository}",
            "--model-control-mode=explicit",
            *http,
            "--grpc-address=127.0.0.1",
            f"--grpc-port={grpc_port}",
            "--allow-metrics=false",
            f"--backend-directory={self._folder.backends}",
            # Python-based backends take their settings from the Python backend's
            f"--backend-config=python,shm-region-prefix-name={self._folder.shared_memory_prefix}",
            *filter(self._installation.knows, self._options),
            *self._installation.arguments,
            *self._chosen,
        ]
        self._process = SupervisedProcess(
            command,
            log=self.log,
            env=self._installation.environment,
            cwd=self._folder.packages,
            cpus=self._cpus,
            shm_prefix=self._folder.shared_memory_prefix,
        )

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
        assert self._process is not None
        if not what:
            exit_code = self._process.wait(ENDING_SECONDS)
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
        if self._process is not None:
            self._process.stop()
            self._process = None

    def _is_running(self) -> bool:
        return self._process is not None and self._process.exit_code() is None

    def _comes_up(self, client: InferenceServerClient, deadline: float) -> bool:
        """Whether this server gets ready. Another one that got the port first may answer in its place."""
        from tritonclient.utils import InferenceServerException

        while time.monotonic() < deadline and self._is_running():
            with contextlib.suppress(InferenceServerException):
                if client.is_server_ready(client_timeout=2):
                    told = client.get_server_metadata(client_timeout=2)
                    self.version = one_line(str(told.version), 30)
                    return bool(told.name == self._folder.path.name)
            time.sleep(0.02)
        return False

    def _check_version(self) -> None:
        if is_too_old(self.version):
            self.stop()
            raise EnvironmentFault(
                f"{self._installation.tritonserver}: this is Triton {self.version}, and tune needs "
                f"{'.'.join(map(str, OLDEST))} or newer: name another with --tritonserver"
            )


def is_too_old(version: str) -> bool:
    """Whether the server that tells this version is older than OLDEST; one that tells none is not."""
    found = re.match(r"(\d+)\.(\d+)", version)
    return found is not None and (int(found[1]), int(found[2])) < OLDEST
