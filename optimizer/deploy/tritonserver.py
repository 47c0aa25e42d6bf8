"""The pinned tritonserver on loopback: its command line, its environment, one process."""

from __future__ import annotations

import os
import secrets
import socket
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from optimizer import runtime
from optimizer.deploy.server import Server
from optimizer.deploy.server_folder import ServerFolder
from optimizer.errors import EnvironmentFault
from optimizer.process import SupervisedProcess
from optimizer.runtime import Runtime


def free_port() -> int:
    """A port of 127.0.0.1 that nobody listens at; by the time that it is used somebody may."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class TritonServer(Server):
    """Serves from ``folder``; ``options`` are further ones of its command line."""

    def __init__(
        self,
        folder: ServerFolder,
        installed: Runtime,
        *,
        log: Path,
        options: Sequence[str] = (),
        choose_port: Callable[[], int] = free_port,
        cpus: frozenset[int] | None = None,
    ) -> None:
        super().__init__(folder.path.name, log=log, cpus=cpus)
        self._folder = folder
        self._installed = installed
        self._environment = environment(installed)
        self._options = options
        self._choose_port = choose_port

    def _launch(self) -> SupervisedProcess:
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
        return SupervisedProcess(
            command,
            log=self.log,
            env=self._environment,
            cwd=self._folder.packages,
            cpus=self._cpus,
            shm_prefix=self._folder.shared_memory_prefix,
        )


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
