"""A tritonserver of somebody else's that runs already."""

from __future__ import annotations

from pathlib import Path

from tritonclient.grpc import InferenceServerClient
from tritonclient.grpc.model_config_pb2 import ModelConfig

from optimizer import runtime
from optimizer.deploy.installation import embedded
from optimizer.deploy.server_folder import ServerFolder
from optimizer.deploy.tritonserver import TritonServer
from optimizer.model_source import ModelSource


class Production:
    """As its operator sees it: in explicit mode, unless ``options`` say otherwise."""

    def __init__(self, source: ModelSource, log: Path, *options: str) -> None:
        installed = embedded(runtime.ensure(print))
        self.model = source.name
        self.folder = ServerFolder(source, installed)
        self.server = TritonServer(self.folder, installed, log=log, options=options)
        self.client: InferenceServerClient = self.server.client()

    def close(self) -> None:
        self.server.stop()
        self.folder.remove()

    def serving(self) -> ModelConfig | None:
        if not self.client.is_model_ready(self.model):
            return None
        config = self.client.get_model_config(self.model).config
        assert isinstance(config, ModelConfig)
        return config
