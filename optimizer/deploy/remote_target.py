"""The remote target: a running tritonserver in explicit mode, reached over gRPC or HTTP.

The models that it served before are restored at the end. Their state is saved to a file before anything is changed:
if this process is killed, the next target for the same server restores it first.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

from optimizer.config import gpu_placement, model_config, model_json
from optimizer.config.model_config_proto import ModelConfig
from optimizer.config.model_source import ModelSource, ServedModels, served_models
from optimizer.core import interrupts
from optimizer.core.candidate import Candidate
from optimizer.core.endpoint import Connection, Endpoint, Tls
from optimizer.core.errors import DeploymentError, EnvironmentFault, ServerCrashed, ServerFault, TuneError
from optimizer.core.files import cache_folder
from optimizer.core.stopwatch import Stopwatch
from optimizer.deploy.remote_address import listener_pid
from optimizer.deploy.remote_server import FOLDER, RemoteServer, ServerState, ServerStateFile
from optimizer.deploy.target_settings import MODEL_LOAD_TIMEOUT_SECONDS, TargetSettings
from optimizer.options.addresses import expand_headers, server_address
from optimizer.options.run_options import RunOptions


class RemoteTarget:
    """Serves candidates on the server at ``connection``, from its own model repository.

    ``source`` gives only the names of the models and how they are composed. A candidate is loaded with the
    configuration that the server had, changed by the candidate's settings. If a candidate changes model.json, the
    load request sends all files of the version folder as ``source`` has them, with the changed one. ``state_folder``
    has the saved states; ``on_progress`` gets a line if a killed process left one for this server, and if other
    clients use the server. ``metrics`` is the address of the server's metrics, empty if it has none.
    ``load_timeout_seconds`` limits the loading and the unloading of a model, also when the models are restored.

    Raises EnvironmentFault if the server does not answer, denies a request, lacks a model or cannot load it, manages
    its models itself, or if another process tunes on it. Then nothing is changed on the server.
    """

    def __init__(
        self,
        connection: Connection,
        source: ModelSource,
        *,
        state_folder: Path,
        metrics: str = "",
        on_progress: Callable[[str], None] = lambda _: None,
        stopwatch: Stopwatch | None = None,
        load_timeout_seconds: float = MODEL_LOAD_TIMEOUT_SECONDS,
    ) -> None:
        self.connection, self.source = connection, source
        self._metrics, self._on_progress, self._has_compared = metrics, on_progress, False
        self._stopwatch = stopwatch or Stopwatch()
        self._state_file = ServerStateFile(state_folder, connection.address)
        self._bases: dict[str, ModelConfig] = {}
        self._before: ServerState | None = None  # the state to restore, once something is changed
        with contextlib.ExitStack() as undo:
            undo.enter_context(self._state_file.lock_server())
            self._server = RemoteServer(connection, load_timeout_seconds)
            undo.callback(self._server.close)
            self._open = undo.pop_all()
        try:
            with self._stopwatch.count("server"), _as_server_fault():
                self._server.check()
                self._restore_earlier_run()
                self._server.check_has(list(source.models))
                self._initial = self._server.state(list(source.models))
                self._warn_of_other_clients()
                for name in (*source.composing, source.name):
                    self._check_steps(name, self._base(name))
        except BaseException:
            self.close()
            raise

    def start(self) -> None:
        """Do nothing: the server is running."""

    def forget_vanished(self) -> None:
        """Do nothing: the server has a model repository of its own."""

    @property
    def server_version(self) -> str:
        """The version that the server reports."""
        return self._server.version()

    @contextlib.contextmanager
    def deploy(self, candidate: Candidate, *, fresh: bool = False) -> Iterator[Endpoint]:
        """Serve ``candidate`` and yield where it is reached. Raises DeploymentError or ServerFault.

        With ``fresh`` the models are unloaded first; the server itself is not restarted.
        """
        if fresh:
            with self._stopwatch.count("server"), _as_server_fault():
                self._unload([*self.source.models])
        if candidate.server_cpus is not None:
            raise DeploymentError(f"the CPUs of the server at {self.connection.address} cannot be changed")
        with self._stopwatch.count("server"):
            models = self._deployment(candidate)
            self._warn_of_other_baseline(models)
            serving = self._serve(models)
        try:
            endpoint = Endpoint(
                models.model, candidate, server_pid=listener_pid(self.connection.address), remote=self.connection
            )
            yield replace(
                models.served_by(endpoint, self.source, serving),
                gpus=gpu_placement.used_gpus(serving.values()),
                metrics=self._metrics,
            )
        except ServerCrashed as error:
            if self._server.responds():
                raise
            raise ServerFault(
                f"the server at {self.connection.address} no longer answers ({error}); start it again"
            ) from error

    def close(self) -> None:
        """Restore the models that the server had. Raises ServerFault if that fails."""
        with self._open, self._stopwatch.count("server"):
            self._restore()

    # -- the state of the server ------------------------------------------------------------------------------------

    def _change(self) -> None:
        """Save the state of the server before its first change; called before each change."""
        if self._before is None:
            self._state_file.write(self._initial)
            self._before = self._initial

    def _note_replaced(self, model: str) -> None:
        """Save that ``model`` is loaded with other files, which its configuration does not show."""
        assert self._before is not None
        if model not in self._before.replaced:
            self._before = replace(self._before, replaced=self._before.replaced | {model})
            self._state_file.write(self._before)

    def _restore_earlier_run(self) -> None:
        """Restore the models that a killed run has changed, if there are any."""
        self._before = self._state_file.read()
        if self._before is not None:
            address = self.connection.address
            self._on_progress(f"restoring what an earlier run has changed on the server at {address}")
        self._restore()

    def _restore(self) -> None:
        before, self._before = self._before, None  # if this fails, the next target restores it
        if before is None:
            return
        with interrupts.deferred():  # loading may take longer than an impatient user waits
            try:
                self._server.restore(before)
            except TuneError as error:
                raise ServerFault(
                    f"{', '.join(before.configs)} on {self.connection.address}: not restored: {error}; its state "
                    f"is saved in {self._state_file.path}, and the next run on it restores it; remove that file to "
                    "leave the server as it is"
                ) from error
            self._state_file.remove()

    def _base(self, name: str) -> ModelConfig:
        """Return the configuration that the server has for a model, which is loaded if necessary."""
        if name not in self._bases:
            config = self._initial.configs[name]
            if config is None:
                self._change()
                try:
                    self._server.load(name)
                    config = self._server.config(name)
                except DeploymentError as error:
                    raise type(error)(
                        f"the server cannot load its {name}: {error}; see its log, and fix the model there"
                    ) from error
            if config is None:
                raise DeploymentError(f"the server's {name} is not ready after it was loaded")
            self._bases[name] = model_config.without_default_preferred_size(config)
        return self._bases[name]

    def _check_steps(self, name: str, served: ModelConfig) -> None:
        local_steps = {step.model_name for step in self.source.models[name].ensemble_scheduling.step}
        served_steps = {step.model_name for step in served.ensemble_scheduling.step}
        if local_steps != served_steps:
            raise EnvironmentFault(
                f"{name} on {self.connection.address} consists of {_listed(served_steps)}, but here of "
                f"{_listed(local_steps)}; tune the model that is served there"
            )

    def _warn_of_other_clients(self) -> None:
        if (rate := self._server.requests_per_second(self.source.models)) > 0:
            self._on_progress(
                f"WARNING: the server at {self.connection.address} gets {rate:,.0f} requests/s of other clients, "
                "which are part of each measurement and get the configurations that are tried; stop them, or "
                "tune on another server"
            )

    def _warn_of_other_baseline(self, models: ServedModels) -> None:
        """Warn once if ``models`` is the configuration of the files here and the server had another one."""
        if self._has_compared or models.differences(self.source.models):
            return
        self._has_compared = True
        if differences := models.differences(self._bases):
            self._on_progress(
                f"WARNING: the server at {self.connection.address} had other settings than the config.pbtxt here, "
                f"which is the baseline: {'; '.join(differences)}; give --model-repository a copy of what is served"
            )

    # -- serving ------------------------------------------------------------------------------------------------

    def _deployment(self, candidate: Candidate) -> ServedModels:
        """Return the configurations of ``candidate``, based on those of the server."""
        model = candidate.served_model(self.source.name)
        composing = {name: self._base(name) for name in self.source.composing}
        return served_models(
            replace(self.source, composing=composing, variants={model: self._base(model)}), candidate
        )

    def _serve(self, models: ServedModels) -> dict[str, ModelConfig]:
        """Serve ``models`` and return the configurations that the server reports."""
        self._unload([name for name in self.source.models if name not in models.configs])
        self._change()
        files = model_json.override_files(self.source.folder(models.batcher), models.files)
        if files:
            self._note_replaced(models.batcher)
        self._server.serve(
            {name: model_config.without_response_cache(config) for name, config in models.configs.items()},
            {models.batcher: files} if files else {},
        )
        serving = {name: self._server.config(name) for name in models.configs}
        ready = {name: config for name, config in serving.items() if config is not None}
        differences = models.differences(ready) if len(ready) == len(serving) else ["not ready"]
        if differences:
            raise DeploymentError(f"the server serves another configuration: {'; '.join(differences)}")
        return ready

    def _unload(self, models: list[str]) -> None:
        """Unload models, ensembles before their steps."""
        for name in reversed(models):
            if self._server.config(name) is not None:
                self._change()
                self._server.unload(name)


def check_options(options: RunOptions, on_progress: Callable[[str], None]) -> None:
    """Accept all options: the server is asked when it is needed."""


def describe_server(options: RunOptions) -> str:
    """Return the server in words."""
    return f"the server at {server_address(options.url).host_port}"


def server_identity(options: RunOptions, on_progress: Callable[[str], None]) -> str:
    """Return the version that the server reports. Raises EnvironmentFault if it does not answer."""
    with contextlib.closing(RemoteServer(_connection(options))) as server:
        return server.version()


def make_target(source: ModelSource, options: RunOptions, settings: TargetSettings) -> RemoteTarget:
    """Return the target on the server at ``--url``."""
    return RemoteTarget(
        _connection(options),
        source,
        state_folder=cache_folder() / FOLDER,
        metrics=settings.metrics,
        on_progress=settings.on_progress,
        stopwatch=settings.stopwatch,
        # a short budget must not keep the models from being restored
        load_timeout_seconds=max(MODEL_LOAD_TIMEOUT_SECONDS, settings.model_load_timeout_seconds),
    )


def _connection(options: RunOptions) -> Connection:
    """Return the connection to the server, from ``--url`` and the options for headers and TLS."""
    at = server_address(options.url)
    tls = Tls(
        *(
            None if file is None else Path(file).absolute()
            for file in (options.tls_ca, options.tls_cert, options.tls_key)
        )
    )
    return Connection(at.host_port, at.protocol, expand_headers(options.headers), tls if at.tls else None)


def _listed(names: set[str]) -> str:
    return ", ".join(sorted(names)) or "nothing else"


@contextlib.contextmanager
def _as_server_fault() -> Iterator[None]:
    """Turn a DeploymentError into a ServerFault, because no candidate is involved."""
    try:
        yield
    except DeploymentError as error:
        raise ServerFault(str(error)) from error
