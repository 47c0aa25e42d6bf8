"""A tritonserver of somebody else's that runs already."""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path

from tritonclient.grpc.model_config_pb2 import ModelConfig

from optimizer import model_config, runtime
from optimizer.client.calls import CallError, open_client
from optimizer.client.connection import Connection, Tls
from optimizer.deploy.installation import embedded
from optimizer.deploy.server_folder import ServerFolder
from optimizer.deploy.tritonserver import TritonServer
from optimizer.model_source import ModelSource
from tests.certificates import Certificates

START_SECONDS = 60.0
LOAD_SECONDS = 60.0


class Production:
    """As its operator sees it: in explicit mode, unless ``options`` say otherwise. ``headers``, ``tls`` and
    ``http_headers`` are what its gRPC and HTTP take by those."""

    def __init__(
        self,
        source: ModelSource,
        log: Path,
        *options: str,
        headers: Mapping[str, str] | None = None,
        http_headers: Mapping[str, str] | None = None,
        tls: Tls | None = None,
    ) -> None:
        installed = embedded(runtime.ensure(print))
        self.source, self.model = source, source.name
        self.folder = ServerFolder(source, installed)
        self.server = TritonServer(self.folder, installed, log=log, options=options)
        self.server.start()
        self.grpc = Connection(self.server.grpc, headers=headers or {}, tls=tls)
        self.http = Connection(self.server.http, "http", {"tritune": self.server.http_secret, **(http_headers or {})})
        self._client = open_client(self.grpc)
        deadline = time.monotonic() + START_SECONDS
        while True:
            try:
                self._client.check(1)
                return
            except CallError:
                if time.monotonic() > deadline:
                    self.close()
                    raise
                time.sleep(0.05)

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


def secured(source: ModelSource, log: Path, certificates: Certificates) -> Production:
    """Over gRPC with TLS, every call takes SECRET; over HTTP all but loading does."""
    return Production(
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
