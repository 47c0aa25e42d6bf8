"""The pinned tritonserver on loopback: one process, replaced once it has died or no longer answers."""

from __future__ import annotations

import contextlib
import os
import secrets
import socket
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from optimizer import runtime
from optimizer.deploy.server_folder import ServerFolder
from optimizer.errors import EnvironmentFault, ServerCrashed, ServerFault
from optimizer.machine import cpus as cpu_lists
from optimizer.machine.gpu_attribution import CHOSEN
from optimizer.process import SupervisedProcess, ending
from optimizer.runtime import Runtime
from optimizer.server_health import answers, last_error, last_words

if TYPE_CHECKING:
    from tritonclient.grpc import InferenceServerClient

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

    ``grpc`` and ``http`` are ``host:port`` of the running server. ``cpus`` as in SupervisedProcess, where
    ``run_on`` says nothing else. Without ``gpus`` none is seen.
    """

    def __init__(
        self,
        folder: ServerFolder,
        installed: Runtime,
        *,
        log: Path,
        options: Sequence[str] = (),
        choose_port: Callable[[], int] = free_port,
        cpus: frozenset[int] | None = None,
        gpus: bool = True,
    ) -> None:
        self.log = log
        self.grpc = self.http = ""
        self._folder = folder
        self._installed = installed
        self._environment = environment(installed) | ({} if gpus else {CHOSEN: ""})
        self._options = options
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
        self.http, self.grpc = f"127.0.0.1:{http_port}", f"127.0.0.1:{grpc_port}"
        command: list[str | Path] = [
            self._installed.tritonserver,
            f"--id={self._folder.path.name}",
            f"--model-repository={self._folder.repository}",
            "--model-control-mode=explicit",
            "--http-address=127.0.0.1",
            f"--http-port={http_port}",
            # a web page can send requests to loopback, and a load request can bring code: that now takes a header
            f"--http-restricted-api=model-repository:tritune={secrets.token_hex(16)}",
            "--grpc-address=127.0.0.1",
            f"--grpc-port={grpc_port}",
            "--allow-metrics=false",
            f"--backend-directory={self._folder.backends}",
            # Python-based backends take their settings from the Python backend's
            f"--backend-config=python,shm-region-prefix-name={self._folder.shared_memory_prefix}",
            *self._options,
        ]
        self._process = SupervisedProcess(
            command,
            log=self.log,
            env=self._environment,
            cwd=self._folder.packages,
            cpus=self._cpus,
            shm_prefix=self._folder.shared_memory_prefix,
        )

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
                    return bool(client.get_server_metadata(client_timeout=2).name == self._folder.path.name)
            time.sleep(0.02)
        return False


def environment(installed: Runtime) -> dict[str, str]:
    """What the server and its stubs are started with. Raises EnvironmentFault where Python has no shared library."""
    libpython = runtime.libpython_folder()
    if libpython is None:
        raise EnvironmentFault(runtime.libpython_mend())
    packages = [path for path in sys.path if path.endswith("site-packages")]
    return {
        "ORT_DISABLE_TELEMETRY": "1",  # a thread and requests to its maker beside what is measured
        **os.environ,  # models in Python may need it, and they run with the user's rights as it is
        "LD_LIBRARY_PATH": f"{installed.libraries}{os.pathsep}{libpython}",
        # the stub embeds this Python; it finds this environment's packages by these two
        "PYTHONPATH": os.pathsep.join(packages),
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}",
    }
