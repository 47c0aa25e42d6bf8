"""The remote target: a tritonserver that runs already, in explicit mode, reached over gRPC or HTTP.

What it served before is put back at the end. It is written to a file before anything is changed: should this process
be killed, the next target for the same server puts it back first.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

from tritonclient.grpc.model_config_pb2 import ModelConfig

from optimizer import interrupts, model_config
from optimizer.client.connection import Connection
from optimizer.deploy.listener import listener_pid
from optimizer.deploy.remote.kept_state import KeptState, ServerState
from optimizer.deploy.remote.server import RemoteServer
from optimizer.deployment import Deployment, deployment
from optimizer.errors import DeploymentError, EnvironmentFault, ServerCrashed, ServerFault, TuneError
from optimizer.interfaces import Endpoint
from optimizer.model_source import ModelSource
from optimizer.stopwatch import Stopwatch
from optimizer.trial import VARIANT, Candidate


class RemoteTarget:
    """Serves candidates on the server at ``connection``, from its own repository: of ``source`` only the names count
    there, and how its models belong together.

    Only what is tuned changes: the override is the configuration that the server had, with the candidate's settings.
    ``keep`` is the folder of what is to be put back; ``say`` is told where a killed process left something there.
    ``metrics`` is where it tells of its GPUs, if it does.

    Raises EnvironmentFault where the server does not answer, denies what is asked, lacks a model or cannot load it,
    or manages its models itself, or where another process tunes on it. Then nothing there is changed.
    """

    def __init__(
        self,
        connection: Connection,
        source: ModelSource,
        *,
        keep: Path,
        metrics: str = "",
        say: Callable[[str], None] = lambda _: None,
        stopwatch: Stopwatch | None = None,
        load_timeout_seconds: float = 120.0,
    ) -> None:
        self.connection, self.source = connection, source
        self._metrics = metrics
        self._stopwatch = stopwatch or Stopwatch()
        self._kept = KeptState(keep, connection.address)
        self._bases: dict[str, ModelConfig] = {}
        self._before: ServerState | None = None  # once something is changed: what is to be put back
        with contextlib.ExitStack() as undo:
            undo.enter_context(self._kept.alone())
            self._server = RemoteServer(connection, load_timeout_seconds)
            undo.callback(self._server.close)
            self._open = undo.pop_all()
        try:
            with self._stopwatch.server(), _no_candidates_fault():
                self._server.check()
                self._before = self._kept.read()
                if self._before is not None:
                    say(f"putting back what a run that was killed has changed on the server at {connection.address}")
                self._put_back()
                self._server.check_has(list(source.models))
                self._found = self._server.state(list(source.models))
                for name in (*source.composing, source.name):
                    self._check_steps(name, self._base(name))
        except BaseException:
            self.close()
            raise

    def start(self) -> None:
        """It runs already."""

    @property
    def server_version(self) -> str:
        return self._server.version()

    @contextlib.contextmanager
    def deploy(self, candidate: Candidate) -> Iterator[Endpoint]:
        if candidate.server_cpus is not None:
            raise DeploymentError(f"the CPUs of the server at {self.connection.address} cannot be chosen from here")
        with self._stopwatch.server():
            wanted = self._deployment(candidate)
            self._serve(wanted)
        try:
            yield self._endpoint(wanted, candidate)
        except ServerCrashed as error:
            if self._server.is_there():
                raise
            raise ServerFault(
                f"the server at {self.connection.address} no longer answers ({error}); start it again"
            ) from error

    @contextlib.contextmanager
    def deploy_as_written(self, candidate: Candidate) -> Iterator[Endpoint]:
        """The models are unloaded first; the server runs on."""
        with self._stopwatch.server(), _no_candidates_fault():
            self._unload([*self.source.models])
        with self.deploy(candidate) as endpoint:
            yield endpoint

    def close(self) -> None:
        """Puts back what the server had. Raises ServerFault where that fails."""
        with self._open, self._stopwatch.server():
            self._put_back()

    # -- what the server had ------------------------------------------------------------------------------------

    def _change(self) -> None:
        """To be called before each change: on disk before the first one."""
        if self._before is None:
            self._kept.write(self._found)
            self._before = self._found

    def _put_back(self) -> None:
        before, self._before = self._before, None  # what fails here is for the next target to put right
        if before is None:
            return
        with interrupts.deferred():  # a model may take longer to load than a second interrupt takes to come
            try:
                self._server.restore(before)
            except TuneError as error:
                raise ServerFault(
                    f"{', '.join(before.configs)} on {self.connection.address}: not as it was: {error}; what it "
                    f"served is kept in {self._kept.path}, and the next run there puts it back; remove that file to "
                    "leave it as it is now"
                ) from error
            self._kept.remove()

    def _base(self, name: str) -> ModelConfig:
        """The configuration that the server has for it; a model that is not loaded is, to be asked."""
        if name not in self._bases:
            found = self._found.configs[name]
            if found is None:
                self._change()
                try:
                    self._server.load(name)
                    found = self._server.config(name)
                except DeploymentError as error:
                    raise DeploymentError(
                        f"the server cannot load its {name}: {error}; its log may say more: mend the model there"
                    ) from error
            if found is None:
                raise DeploymentError(f"the server's {name} is not ready once it is loaded")
            self._bases[name] = _as_written(found)
        return self._bases[name]

    def _check_steps(self, name: str, served: ModelConfig) -> None:
        both = (self.source.models[name], served)
        ours, theirs = ({step.model_name for step in one.ensemble_scheduling.step} for one in both)
        if ours != theirs:
            raise EnvironmentFault(
                f"{name} on {self.connection.address} is made of {_listed(theirs)}, here of {_listed(ours)}; "
                "tune the one that is served there"
            )

    # -- serving ------------------------------------------------------------------------------------------------

    def _deployment(self, candidate: Candidate) -> Deployment:
        """Of the models as the server has them."""
        model = str(dict(candidate.fields).get(VARIANT, self.source.name))
        composing = {name: self._base(name) for name in self.source.composing}
        return deployment(replace(self.source, composing=composing, variants={model: self._base(model)}), candidate)

    def _serve(self, wanted: Deployment) -> None:
        self._unload([name for name in self.source.models if name not in wanted.configs])
        self._change()
        self._server.serve({name: model_config.for_trials(config) for name, config in wanted.configs.items()})
        serving = {name: self._server.config(name) for name in wanted.configs}
        ready = {name: config for name, config in serving.items() if config is not None}
        wrong = wanted.differences(ready) if len(ready) == len(serving) else ["not ready"]
        if wrong:
            raise DeploymentError(f"the server serves another configuration: {'; '.join(wrong)}")

    def _unload(self, models: list[str]) -> None:
        """Those first that are made of others."""
        for name in reversed(models):
            if self._server.config(name) is not None:
                self._change()
                self._server.unload(name)

    def _endpoint(self, wanted: Deployment, candidate: Candidate) -> Endpoint:
        pid = listener_pid(self.connection.address)
        beside = self.source.concurrent
        return Endpoint(
            wanted.model,
            candidate,
            server_pid=pid,
            batcher=wanted.batcher,
            max_batch_size=wanted.configs[wanted.model].max_batch_size,
            beside=tuple(
                Endpoint(name, wanted.settings[name], server_pid=pid, remote=self.connection) for name in beside
            ),
            remote=self.connection,
            metrics=self._metrics,
        )


def _as_written(config: ModelConfig) -> ModelConfig:
    """Without the preferred size that Triton writes where none is given."""
    result = ModelConfig()
    result.CopyFrom(config)
    if list(config.dynamic_batching.preferred_batch_size) == [config.max_batch_size]:
        result.dynamic_batching.ClearField("preferred_batch_size")
    return result


def _listed(names: set[str]) -> str:
    return ", ".join(sorted(names)) or "nothing else"


@contextlib.contextmanager
def _no_candidates_fault() -> Iterator[None]:
    """Where it is not a candidate that is refused, the server is at fault."""
    try:
        yield
    except DeploymentError as error:
        raise ServerFault(str(error)) from error
