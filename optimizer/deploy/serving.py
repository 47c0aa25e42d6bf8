"""A target with a server of its own on loopback, serving one trial after another."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from optimizer import placement
from optimizer.deploy import leftovers
from optimizer.deploy.loading import Loader
from optimizer.deploy.private_repository import PrivateRepository
from optimizer.deploy.server import Server
from optimizer.deployment import deployment
from optimizer.errors import ServerCrashed
from optimizer.interfaces import Endpoint
from optimizer.model_source import ModelSource
from optimizer.stopwatch import Stopwatch
from optimizer.trial import Candidate

LOAD_SECONDS = 120.0  # the longest that a load may take, unless another is given


class ServingTarget:
    """Serves ``source`` on ``server``, from a private copy of its repository.

    A candidate is deployed by loading the model with the candidate's configuration as override (several models: from
    files, which alone hold for the steps of an ensemble too), and verified by reading the configuration back. The
    server starts with the first deployment, or ahead of it with ``start()``; it is replaced when it has died or no
    longer answers, and where a candidate wants other CPUs or options of it.

    Where a candidate is served, a ServerCrashed that passes through (a load generator's) takes the server with it,
    and comes out with what the server's log says. ``load_timeout_seconds`` is the longest that a load may take;
    once there were some, it is less. ``gpus``: the server sees some.
    """

    def __init__(
        self,
        source: ModelSource,
        server: Server,
        folder: PrivateRepository,
        *,
        stopwatch: Stopwatch | None = None,
        load_timeout_seconds: float = LOAD_SECONDS,
        gpus: bool = True,
    ) -> None:
        self.source = source
        self._gpus = gpus
        self.log = server.log
        self._server = server
        self._folder = folder
        self._stopwatch = stopwatch or Stopwatch()
        self._loader = Loader(server, folder, server.log, load_timeout_seconds)

    @contextlib.contextmanager
    def deploy(self, candidate: Candidate) -> Iterator[Endpoint]:
        with self._serving(candidate, as_written=len(self.source.models) > 1) as endpoint:
            yield endpoint

    @contextlib.contextmanager
    def deploy_as_written(self, candidate: Candidate) -> Iterator[Endpoint]:
        """A fresh server loads config.pbtxt from disk, without an override: the proof that the file loads."""
        with self._stopwatch.server():
            self._server.stop()
        with self._serving(candidate, as_written=True) as endpoint:
            yield endpoint

    def close(self) -> None:
        with self._stopwatch.server():
            self._server.stop()
        self._folder.remove()
        leftovers.remove_environment_folders()

    def start(self) -> None:
        """Launch the server without waiting for it; no effect while one is running."""
        self._server.start()

    @property
    def grpc_address(self) -> str:
        """``host:port`` of the running server."""
        return self._server.grpc

    @property
    def server_version(self) -> str:
        """As the server tells it; empty before the first deployment."""
        return self._server.version

    @contextlib.contextmanager
    def _serving(self, candidate: Candidate, *, as_written: bool) -> Iterator[Endpoint]:
        wanted, server = deployment(self.source, candidate), self._server
        with self._stopwatch.server():
            server.run_for(candidate)
            self._loader.load(wanted, as_written=as_written)
        at = (server.grpc, server.http, server.running.pid if server.running else None)
        endpoint = Endpoint(
            wanted.model,
            candidate,
            *at,
            batcher=wanted.batcher,
            max_batch_size=wanted.configs[wanted.model].max_batch_size,
            beside=tuple(Endpoint(name, wanted.settings[name], *at) for name in self.source.concurrent),
            memory_bytes=server.memory_bytes,
            gpus=placement.named(wanted.configs.values()) if self._gpus else (),
        )
        try:
            yield endpoint
        except ServerCrashed as error:
            raise server.crashed("measuring", str(error) if server.answers() else "") from error


def server_options(source: ModelSource) -> list[str]:
    """Options of a server that serves ``source`` and nothing else."""
    complete = all(config.input and config.output for config in source.models.values())
    # else a model in Python fills them in, at the price of one more stub a load
    return ["--disable-auto-complete-config"] if complete else []
