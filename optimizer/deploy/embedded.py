"""The embedded target: the pinned tritonserver on loopback, one process serving one trial after another."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path

from optimizer import placement, runtime
from optimizer.deploy import leftovers
from optimizer.deploy.loading import Loader
from optimizer.deploy.server_folder import ServerFolder
from optimizer.deploy.tritonserver import TritonServer, free_port
from optimizer.deployment import deployment
from optimizer.errors import ServerCrashed
from optimizer.interfaces import Endpoint
from optimizer.model_source import ModelSource
from optimizer.stopwatch import Stopwatch
from optimizer.trial import Candidate


class EmbeddedTarget:
    """Serves ``source`` from a private copy of its repository.

    A candidate is deployed by loading the model with the candidate's configuration as override (several models: from
    files, which alone hold for the steps of an ensemble too), and verified by reading the configuration back. The
    server starts with the first deployment, or ahead of it with ``start()``, and is replaced when it has died or no
    longer answers. ``log`` collects what it prints.

    Where a candidate is served, a ServerCrashed that passes through (a load generator's) takes the server with it,
    and comes out with what the server's log says. ``load_timeout_seconds`` is the longest that a load may take;
    once there were some, it is less. ``gpus``: the server sees those that this process does; else none, and a model
    that leaves its device open is served on the CPU. Its own metrics stay off: of GPUs they have what NVML tells this
    process as well.
    """

    def __init__(
        self,
        source: ModelSource,
        *,
        log: Path,
        say: Callable[[str], None],
        stopwatch: Stopwatch | None = None,
        load_timeout_seconds: float = 120.0,
        choose_port: Callable[[], int] = free_port,
        cpus: frozenset[int] | None = None,
        gpus: bool = True,
    ) -> None:
        self.source = source
        self.log = log
        self._gpus = gpus
        self._stopwatch = stopwatch or Stopwatch()
        installed = runtime.ensure(say)
        leftovers.remove_leftovers()
        complete = all(config.input and config.output for config in source.models.values())
        self._folder = ServerFolder(source, installed)
        with contextlib.ExitStack() as undo:
            undo.callback(self._folder.remove)
            self._server = TritonServer(
                self._folder,
                installed,
                log=log,
                # else a model in Python fills them in, at the price of one more stub a load
                options=["--disable-auto-complete-config"] if complete else [],
                choose_port=choose_port,
                cpus=cpus,
                gpus=gpus,
            )
            self._loader = Loader(self._server, self._folder, log, load_timeout_seconds)
            undo.pop_all()

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

    @contextlib.contextmanager
    def _serving(self, candidate: Candidate, *, as_written: bool) -> Iterator[Endpoint]:
        wanted, server = deployment(self.source, candidate), self._server
        with self._stopwatch.server():
            server.run_on(candidate.server_cpus)
            self._loader.load(wanted, as_written=as_written)
        at = (server.grpc, server.http, server.supervisor_pid)
        endpoint = Endpoint(
            wanted.model,
            candidate,
            *at,
            batcher=wanted.batcher,
            max_batch_size=wanted.configs[wanted.model].max_batch_size,
            beside=tuple(Endpoint(name, wanted.settings[name], *at) for name in self.source.concurrent),
            gpus=placement.named(wanted.configs.values()) if self._gpus else (),
        )
        try:
            yield endpoint
        except ServerCrashed as error:
            raise server.crashed("measuring", str(error) if server.answers() else "") from error
