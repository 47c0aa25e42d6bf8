"""The models of a server that is not ours: brought to what is wanted, and back to what they were.

What Triton does with an ensemble in explicit mode: loading it reads those of its steps again whose files have changed
since they were loaded, or that are not loaded, so that they lose their override; and a step that comes to take
smaller batches than the ensemble makes that unready. So what is served is looked at again after each round of loads.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Mapping

from tritonclient.grpc.model_config_pb2 import ModelConfig

from optimizer import model_config
from optimizer.client.calls import CALL_SECONDS, CallError, answers, open_client
from optimizer.client.connection import Connection
from optimizer.client.reach import trouble
from optimizer.deploy.remote.kept_state import ServerState
from optimizer.errors import DeploymentError, EnvironmentFault, ServerFault
from optimizer.server_health import cause
from optimizer.untrusted import one_line

UNLOAD_SECONDS = 30.0
ROUNDS = 3
NO_MODEL = "tritune-asks-for-the-mode"  # what no repository has
MANAGED_BY_ITSELF = "explicit model load / unload is not allowed"  # what NONE and POLL mode answer


class RemoteServer:
    """Each call raises EnvironmentFault where the server cannot be used (ServerFault where it has gone), and
    DeploymentError where it will not do what is asked. ``timeout_seconds`` is the longest that a load may take."""

    def __init__(self, connection: Connection, timeout_seconds: float = CALL_SECONDS) -> None:
        self.address = connection.address
        self._connection = connection
        self._timeout_seconds = timeout_seconds
        self._client = open_client(connection)
        self._loaded: dict[str, tuple[str, ModelConfig]] = {}  # override, and what the server tells of it

    def close(self) -> None:
        self._client.close()

    def check(self) -> None:
        """Whether models can be loaded and unloaded there. Nothing is changed."""
        try:
            self._client.check()
        except CallError as error:
            raise self._fault(error) from error
        with self._calling():
            self._client.unload(NO_MODEL)  # answered by the mode, before the model is looked for

    def check_has(self, models: list[str]) -> None:
        with self._calling():
            known = self._client.index()
        for model in models:
            if model not in known:
                others = one_line(", ".join(sorted(known)) or "none", 200)
                raise EnvironmentFault(
                    f"the server at {self.address} has no model {model!r} in its repository ({others}); put it there "
                    "under that name"
                )

    def version(self) -> str:
        with self._calling():
            return one_line(self._client.version(), 30)

    def is_there(self) -> bool:
        return answers(self._client)

    def state(self, models: list[str]) -> ServerState:
        with self._calling():
            ready = frozenset(name for name, loaded in self._client.index().items() if loaded)
        return ServerState({name: self.config(name) for name in models}, ready)

    def config(self, model: str) -> ModelConfig | None:
        """As it is served; None where it is not."""
        with self._calling():
            return self._client.config(model) if self._client.is_ready(model) else None

    def load(self, model: str, config: ModelConfig | None = None) -> None:
        """Without ``config`` as the repository has it, where it is not loaded."""
        override = None if config is None else model_config.to_override_json(config)
        self._loaded.pop(model, None)
        with self._calling():
            self._client.load(model, override, self._timeout_seconds)

    def unload(self, model: str) -> None:
        """Returns once it is gone."""
        self._loaded.pop(model, None)
        deadline = time.monotonic() + UNLOAD_SECONDS
        with self._calling():
            self._client.unload(model)
            while self._client.is_ready(model):
                if time.monotonic() > deadline:
                    raise ServerFault(f"{model} on {self.address} was not unloaded within {UNLOAD_SECONDS:g} s")
                time.sleep(0.02)

    def serve(self, wanted: Mapping[str, ModelConfig]) -> None:
        """Loads those of ``wanted`` that are not served so; each stands after those that it is made of."""
        for left in reversed(range(ROUNDS)):
            changed = [name for name, config in wanted.items() if not self._serves(name, config)]
            if not changed:
                return
            for name in changed:
                try:
                    self.load(name, wanted[name])
                    if (told := self.config(name)) is not None:
                        self._loaded[name] = model_config.to_override_json(wanted[name]), told
                except DeploymentError:
                    if not left or not wanted[name].HasField("ensemble_scheduling"):
                        raise  # else a step was read again, with its old batch size
        if lost := [name for name, config in wanted.items() if not self._serves(name, config)]:
            raise DeploymentError(f"{', '.join(lost)}: not ready, or served otherwise, after {ROUNDS} loads")

    def restore(self, state: ServerState) -> None:
        """Raises ServerFault where a model does not come back as it was."""
        before = {name: config for name, config in state.configs.items() if config is not None}
        for name in [*reversed(list(state.configs)), *self._brought(state)]:
            if name not in before:  # whether it is ready or not: an ensemble may have lost its steps
                self.unload(name)
        for left in reversed(range(ROUNDS)):
            if not (changed := [name for name in before if self.config(name) != before[name]]):
                return
            if not left:  # an override may lack what this client does not know: then from the repository
                for name in reversed(list(before)):
                    self.unload(name)
            for name in before if not left else changed:
                with contextlib.suppress(DeploymentError):  # told by the configuration that is served then
                    self.load(name, before[name] if left else None)
        if lost := [name for name in before if self.config(name) != before[name]]:
            raise ServerFault(f"the server at {self.address} does not take {lost[0]}'s own configuration back")

    def _serves(self, model: str, config: ModelConfig) -> bool:
        override, told = self._loaded.get(model, ("", None))
        return override == model_config.to_override_json(config) and self.config(model) == told

    def _brought(self, state: ServerState) -> list[str]:
        """Steps that came with an ensemble of theirs which has others than ours."""
        served = [config for name in state.configs if (config := self.config(name)) is not None]
        found = {step.model_name for config in served for step in config.ensemble_scheduling.step}
        return sorted(found - set(state.configs) - state.ready)

    @contextlib.contextmanager
    def _calling(self) -> Iterator[None]:
        try:
            yield
        except CallError as error:
            raise self._fault(error) from error

    def _fault(self, error: CallError) -> EnvironmentFault | DeploymentError:
        told = cause(str(error))
        if error.failure == "denied":
            return EnvironmentFault(f"the server at {self.address} denies this: {told}; give --header NAME:VALUE")
        if MANAGED_BY_ITSELF in told:
            managed = f"the server at {self.address} manages its models by itself"
            return EnvironmentFault(f"{managed}; start it with --model-control-mode=explicit")
        if not self.is_there():
            return ServerFault(
                trouble(self._connection) or f"the server at {self.address} does not answer ({told}); start it again"
            )
        if error.failure == "overdue":
            return DeploymentError(f"no answer within the time that a load may take ({self._timeout_seconds:g} s)")
        return DeploymentError(told)
