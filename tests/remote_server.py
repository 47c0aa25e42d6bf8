"""A running tritonserver that tune did not start, as a remote target."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Mapping
from pathlib import Path

import psutil
from tritonclient.grpc.model_config_pb2 import ModelConfig

from optimizer.config import model_config
from optimizer.config.model_source import ModelSource
from optimizer.core.endpoint import Connection, Tls
from optimizer.deploy import runtime
from optimizer.deploy.embedded_target import embedded_installation
from optimizer.deploy.installed_server import ServerFolder, TritonServer
from optimizer.deploy.remote_address import listener_pid
from optimizer.deploy.target_settings import TargetSettings
from optimizer.measure.server_calls import open_client
from optimizer.measure.server_client import CallError
from tests.certificates import Certificates

START_SECONDS = 600.0
ATTEMPTS = 3  # another process may take a port between the probe and the bind
LOAD_SECONDS = 600.0


class RunningServer:
    """A production server in explicit mode, unless ``options`` say otherwise.

    ``headers`` and ``tls`` are required by its gRPC endpoint, ``http_headers`` by its HTTP endpoint."""

    def __init__(
        self,
        source: ModelSource,
        log: Path,
        *options: str,
        headers: Mapping[str, str] | None = None,
        http_headers: Mapping[str, str] | None = None,
        tls: Tls | None = None,
    ) -> None:
        installed = embedded_installation(runtime.ensure(print))
        self.source, self.model = source, source.name
        self.folder = ServerFolder(source, installed)
        self.server = TritonServer(self.folder, installed, TargetSettings(log, arguments=options))
        deadline = time.monotonic() + START_SECONDS
        for _ in range(ATTEMPTS):
            self.server.start()
            self.grpc = Connection(self.server.grpc, headers=headers or {}, tls=tls)
            self._client = open_client(self.grpc)
            if self._comes_up(deadline):
                break
            self._client.close()
            self.server.stop()
        else:
            self.folder.remove()
            raise AssertionError(log.read_text())
        self.http = Connection(self.server.http, "http", {"tritune": self.server.http_secret, **(http_headers or {})})

    def _comes_up(self, deadline: float) -> bool:
        """Return whether the server answers; false if it has ended or another process has its port."""
        while time.monotonic() < deadline:
            running = self.server.running
            if running is None or running.exit_code() is not None:
                return False
            with contextlib.suppress(CallError):
                self._client.check(1)
                listener = listener_pid(self.grpc.address)
                return listener is not None and psutil.Process(listener).ppid() == running.pid
            time.sleep(0.05)
        return False

    def close(self) -> None:
        self._client.close()
        self.server.stop()
        self.folder.remove()

    def load(self, model: str, override: ModelConfig | None = None) -> None:
        config = None if override is None else model_config.to_override_json(override)
        self._client.load(model, config, LOAD_SECONDS)

    def unload(self, model: str) -> None:
        self._client.unload(model)
        while self._client.is_ready(model):
            time.sleep(0.02)

    def serving(self, model: str | None = None) -> ModelConfig | None:
        name = model or self.model
        return self._client.config(name) if self._client.is_ready(name) else None

    def all_serving(self) -> dict[str, ModelConfig | None]:
        return {name: self.serving(name) for name in self.source.models}


SECRET = "open-sesame-1f5c"
APIS = "health,metadata,inference,shared-memory,model-config,model-repository,statistics,trace,logging"


def secured(source: ModelSource, log: Path, certificates: Certificates) -> RunningServer:
    """Return a server that requires SECRET for every gRPC call, with TLS, and for all HTTP calls except loading."""
    return RunningServer(
        source,
        log,
        "--grpc-use-ssl=true",
        f"--grpc-server-cert={certificates.own}",
        f"--grpc-server-key={certificates.own}",
        f"--grpc-restricted-protocol={APIS}:key={SECRET}",
        f"--http-restricted-api={APIS.replace('model-repository,', '')}:key={SECRET}",
        headers={"triton-grpc-protocol-key": SECRET},
        http_headers={"key": SECRET},
        tls=certificates.tls,
    )
