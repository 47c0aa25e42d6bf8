"""A tritonserver of this machine on loopback: its command line, one process."""

from __future__ import annotations

import secrets
import socket
from collections.abc import Callable, Sequence
from pathlib import Path

from optimizer.deploy.installation import Installation
from optimizer.deploy.server import Server
from optimizer.deploy.server_folder import ServerFolder
from optimizer.machine.gpu_attribution import CHOSEN
from optimizer.process import SupervisedProcess


def free_port() -> int:
    """A port of 127.0.0.1 that nobody listens at; by the time that it is used somebody may."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class TritonServer(Server):
    """Serves from ``folder``; ``options`` are further ones of its command line. Over HTTP models are loaded with the
    header ``tritune: <http_secret>`` only. Without ``gpus`` it sees none."""

    def __init__(
        self,
        folder: ServerFolder,
        installation: Installation,
        *,
        log: Path,
        options: Sequence[str] = (),
        choose_port: Callable[[], int] = free_port,
        cpus: frozenset[int] | None = None,
        gpus: bool = True,
    ) -> None:
        program = str(installation.tritonserver)
        super().__init__(folder.path.name, program, "--tritonserver", log=log, cpus=cpus)
        self.http_secret = secrets.token_hex(16)
        self._folder = folder
        self._installation = installation
        self._environment = {**installation.environment, **({} if gpus else {CHOSEN: ""})}
        self._options = options
        self._choose_port = choose_port

    def _launch(self) -> SupervisedProcess:
        http_port, grpc_port = self._choose_port(), self._choose_port()
        self.http, self.grpc = "", f"127.0.0.1:{grpc_port}"
        # a web page can send requests to loopback, and a load request can bring code: that now takes a header
        http = [f"--http-restricted-api=model-repository:tritune={self.http_secret}"]
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
        return SupervisedProcess(
            command,
            log=self.log,
            env=self._environment,
            cwd=self._folder.packages,
            cpus=self._cpus,
            shm_prefix=self._folder.shared_memory_prefix,
        )
