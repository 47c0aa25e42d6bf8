"""Loads models into a server started here, and tells whose fault it is where one is refused, hangs or ends it."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import wait as wait_for
from pathlib import Path
from typing import TYPE_CHECKING

from optimizer import model_config
from optimizer.deploy.private_repository import PrivateRepository
from optimizer.deploy.server import Server
from optimizer.deployment import Deployment
from optimizer.errors import DeploymentError
from optimizer.process import Running
from optimizer.server_health import cause, lacks_memory, model_died

if TYPE_CHECKING:
    from tritonclient.grpc import InferenceServerClient
    from tritonclient.utils import InferenceServerException

CHECK_SECONDS = 2.0  # between looks at a server that loads
LONGER_THAN_BEFORE = 20.0  # times the slowest load so far: it hangs
LEAST_LOAD_SECONDS = 20.0  # before that is said
CALL_SECONDS = 10.0


class Loader:
    """Brings ``server`` to serve a deployment. ``timeout_seconds`` is the longest that a load may take; once there
    were some, it is less."""

    def __init__(self, server: Server, folder: PrivateRepository, log: Path, timeout_seconds: float) -> None:
        self._server = server
        self._folder = folder
        self._log = log
        self._timeout_seconds = timeout_seconds
        self._slowest_seconds: float | None = None
        self._loaded: dict[str, str] = {}  # model -> its config.pbtxt
        self._loaded_by: Running | None = None

    def load(self, wanted: Deployment, *, as_written: bool) -> None:
        """Models that the server has as they are wanted stay, others that it has go. ``as_written``: from
        config.pbtxt, not as an override. Raises DeploymentError, ServerCrashed, ServerFault."""
        client = self._server.client()
        if self._server.running is not self._loaded_by:
            self._loaded, self._loaded_by = {}, self._server.running
        self._server.mark_log()
        for name in [name for name in self._loaded if name not in wanted.configs]:
            self._unload(name, client)
        configs = {name: model_config.for_trials(config) for name, config in wanted.configs.items()}
        texts = {name: model_config.to_text(config) for name, config in configs.items()}
        changed = [name for name in texts if self._loaded.get(name) != texts[name]]
        if as_written:
            for name in changed:
                self._folder.write_config(name, configs[name])
            if not self._loaded and configs[wanted.model].HasField("ensemble_scheduling"):
                changed = [wanted.model]  # which loads its steps, again if they were there
        for name in changed:
            self._loaded.pop(name, None)
            config = None if as_written else model_config.to_override_json(configs[name])
            self._load(client, name, config)
        self._loaded = texts
        self._check(wanted, client)

    def _load(self, client: InferenceServerClient, name: str, config: str | None) -> None:
        from tritonclient.utils import InferenceServerException

        limit_seconds, started = self._limit_seconds(), time.monotonic()
        loading = _in_background(lambda: client.load_model(name, config=config, client_timeout=limit_seconds))
        while not wait_for([loading], CHECK_SECONDS).done:
            if not self._server.answers():
                raise self._server.crashed("loading")
        try:
            loading.result()
        except InferenceServerException as error:
            if "DEADLINE" in str(error.status()):
                self._server.stop()  # the load cannot be called off
                raise DeploymentError(f"loading took longer than {limit_seconds:g} s", log=self._log) from error
            raise self._fault(error) from error
        self._slowest_seconds = max(self._slowest_seconds or 0.0, time.monotonic() - started)

    def _unload(self, name: str, client: InferenceServerClient) -> None:
        """What is unloaded goes on for a moment: until it is gone."""
        from tritonclient.utils import InferenceServerException

        self._loaded.pop(name)
        deadline = time.monotonic() + self._limit_seconds()
        try:
            client.unload_model(name, client_timeout=CALL_SECONDS)
            while client.is_model_ready(name, client_timeout=CALL_SECONDS):
                if time.monotonic() > deadline:
                    raise self._server.crashed("unloading", f"{name} was not unloaded")
                time.sleep(0.02)
        except InferenceServerException as error:
            raise self._fault(error) from error

    def _limit_seconds(self) -> float:
        if self._slowest_seconds is None:
            return self._timeout_seconds
        hangs = max(LEAST_LOAD_SECONDS, round(LONGER_THAN_BEFORE * self._slowest_seconds))
        return min(self._timeout_seconds, hangs)

    def _check(self, wanted: Deployment, client: InferenceServerClient) -> None:
        """A failed reload can leave the old model ready: only what GET config says counts."""
        from tritonclient.utils import InferenceServerException

        try:
            serving = {
                name: client.get_model_config(name, client_timeout=CALL_SECONDS).config for name in wanted.configs
            }
            ready = all(client.is_model_ready(name, client_timeout=CALL_SECONDS) for name in wanted.configs)
        except InferenceServerException as error:
            raise self._fault(error) from error
        wrong = wanted.differences(serving)
        if wrong or not ready:
            self._loaded = {}
            raise DeploymentError(
                f"the server serves another configuration: {'; '.join(wrong) or 'not ready'}", log=self._log
            )

    def _fault(self, error: InferenceServerException) -> DeploymentError:
        """What the server's refusal means: of this configuration, or the end of the server."""
        if model_died(error.message()):
            return self._server.crashed("loading", "the model's process died while loading")
        if not self._server.answers():
            return self._server.crashed("loading")
        if lacks_memory(error.message()):
            self._server.stop()  # it would refuse the next candidate too; a new one has its memory back
        return DeploymentError(cause(error.message()), log=self._log)


def _in_background(call: Callable[[], None]) -> Future[None]:
    pool = ThreadPoolExecutor(1)
    future = pool.submit(call)
    pool.shutdown(wait=False)
    return future
