"""The embedded target: the pinned tritonserver on loopback, one process serving one trial after another."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import wait as wait_for
from pathlib import Path
from typing import TYPE_CHECKING

from optimizer import model_config, runtime
from optimizer.deploy import leftovers
from optimizer.deploy.server_folder import ServerFolder
from optimizer.deploy.tritonserver import TritonServer, free_port
from optimizer.errors import DeploymentError, ServerCrashed
from optimizer.interfaces import Endpoint
from optimizer.model_source import ModelSource
from optimizer.server_health import cause, lacks_memory, model_died
from optimizer.stopwatch import Stopwatch
from optimizer.trial import Candidate

if TYPE_CHECKING:
    from tritonclient.grpc import InferenceServerClient
    from tritonclient.utils import InferenceServerException

CHECK_SECONDS = 2.0  # between looks at a server that loads
LONGER_THAN_BEFORE = 20.0  # times the slowest load so far: it hangs
LEAST_LOAD_SECONDS = 20.0  # before that is said


class EmbeddedTarget:
    """Serves ``source`` from a private copy of its repository.

    A candidate is deployed by loading the model with the candidate's configuration as override, and verified
    by reading the configuration back. The server starts with the first deployment, or ahead of it with
    ``start()``, and is replaced when it has died or no longer answers. ``log`` collects what it prints.

    Where a candidate is served, a ServerCrashed that passes through (a load generator's) takes the server with it,
    and comes out with what the server's log says. ``load_timeout_seconds`` is the longest that a load may take;
    once there were some, it is less.
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
    ) -> None:
        self.source = source
        self.log = log
        self._load_timeout_seconds = load_timeout_seconds
        self._slowest_load_seconds: float | None = None
        self._stopwatch = stopwatch or Stopwatch()
        installed = runtime.ensure(say)
        leftovers.remove_leftovers()
        complete = source.config.input and source.config.output
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
            )
            undo.pop_all()

    @contextlib.contextmanager
    def deploy(self, candidate: Candidate) -> Iterator[Endpoint]:
        wanted = model_config.apply(candidate, self.source.config)
        with self._stopwatch.server():
            self._server.run_on(candidate.server_cpus)
        with self._serving(candidate, self._load(model_config.to_override_json(wanted))) as endpoint:
            yield endpoint

    @contextlib.contextmanager
    def deploy_as_written(self, candidate: Candidate) -> Iterator[Endpoint]:
        """A fresh server loads config.pbtxt from disk, without an override: the proof that the file loads."""
        self._folder.write_config(model_config.apply(candidate, self.source.config))
        with self._stopwatch.server():
            self._server.stop()
            self._server.run_on(candidate.server_cpus)
        with self._serving(candidate, self._load(None)) as endpoint:
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

    def _load(self, override: str | None) -> InferenceServerClient:
        from tritonclient.utils import InferenceServerException

        with self._stopwatch.server():
            client = self._server.client()
            self._server.mark_log()
            limit_seconds = self._load_limit_seconds()
            started = time.monotonic()
            loading = _in_background(
                lambda: client.load_model(self.source.name, config=override, client_timeout=limit_seconds)
            )
            while not wait_for([loading], CHECK_SECONDS).done:
                if not self._server.answers():
                    raise self._server.crashed("loading")
            try:
                loading.result()
            except InferenceServerException as error:
                if "DEADLINE" in str(error.status()):
                    self._server.stop()  # the load cannot be called off
                    raise DeploymentError(f"loading took longer than {limit_seconds:g} s", log=self.log) from error
                raise self._fault(error) from error
            self._slowest_load_seconds = max(self._slowest_load_seconds or 0.0, time.monotonic() - started)
            return client

    def _load_limit_seconds(self) -> float:
        if self._slowest_load_seconds is None:
            return self._load_timeout_seconds
        hangs = max(LEAST_LOAD_SECONDS, round(LONGER_THAN_BEFORE * self._slowest_load_seconds))
        return min(self._load_timeout_seconds, hangs)

    def _check_serving(self, candidate: Candidate, client: InferenceServerClient) -> None:
        """A failed reload can leave the old model ready: only what GET config says counts."""
        from tritonclient.utils import InferenceServerException

        try:
            with self._stopwatch.server():
                serving = client.get_model_config(self.source.name, client_timeout=10).config
                ready = client.is_model_ready(self.source.name, client_timeout=10)
        except InferenceServerException as error:
            raise self._fault(error) from error
        wrong = model_config.differences(candidate, serving)
        if wrong or not ready:
            raise DeploymentError(
                f"the server serves another configuration: {'; '.join(wrong) or 'not ready'}", log=self.log
            )

    def _fault(self, error: InferenceServerException) -> DeploymentError:
        """What the server's refusal means: of this configuration, or the end of the server."""
        if model_died(error.message()):
            return self._server.crashed("loading", "the model's process died while loading")
        if not self._server.answers():
            return self._server.crashed("loading")
        if lacks_memory(error.message()):
            self._server.stop()  # it would refuse the next candidate too; a new one has its memory back
        return DeploymentError(cause(error.message()), log=self.log)

    @contextlib.contextmanager
    def _serving(self, candidate: Candidate, client: InferenceServerClient) -> Iterator[Endpoint]:
        self._check_serving(candidate, client)
        server = self._server
        try:
            yield Endpoint(self.source.name, candidate, server.grpc, server.http, server.supervisor_pid)
        except ServerCrashed as error:
            raise server.crashed("measuring", str(error) if server.answers() else "") from error


def _in_background(call: Callable[[], None]) -> Future[None]:
    pool = ThreadPoolExecutor(1)
    future = pool.submit(call)
    pool.shutdown(wait=False)
    return future
