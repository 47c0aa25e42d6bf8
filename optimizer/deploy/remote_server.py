"""The server of the remote target: its models are loaded and restored, and its state is saved to a file."""

from __future__ import annotations

import contextlib
import json
import re
import time
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from google.protobuf import json_format

from optimizer.config import model_config
from optimizer.config.backends import has_llm_engine
from optimizer.config.model_config_proto import ModelConfig
from optimizer.core.endpoint import Connection
from optimizer.core.errors import BadInputError, DeploymentError, EnvironmentFault, ModelRefused, ServerFault
from optimizer.core.files import write_atomically
from optimizer.core.locks import file_lock
from optimizer.core.safe_text import is_folder, one_line, read_bytes
from optimizer.measure.connection_diagnosis import diagnose_connection
from optimizer.measure.server_calls import open_client, responds
from optimizer.measure.server_client import CALL_SECONDS, CallError
from optimizer.measure.server_errors import lacks_gpu_memory, without_traceback

FOLDER = "remote"  # name of the folder in tune's cache
MAX_BYTES = 16 << 20
_UNREADABLE = (
    BadInputError,
    ValueError,
    KeyError,
    TypeError,
    AttributeError,
    RecursionError,
    json_format.ParseError,
)


@dataclass(frozen=True)
class ServerState:
    """The models that a server had loaded before tuning.

    ``configs`` has the models that may be changed, by name, each after its composing models; the value is None if
    the model was not loaded. ``ready`` are the names of all loaded models. ``replaced`` are the models that tuning
    has loaded with other files since then.
    """

    configs: Mapping[str, ModelConfig | None]
    ready: frozenset[str]
    replaced: frozenset[str] = frozenset()


class ServerStateFile:
    """The file in ``folder`` with the state to restore on the server at ``address``.

    A process that is killed leaves it for the next one, which restores the state first.
    """

    def __init__(self, folder: Path, address: str) -> None:
        self._address = address
        self.path = folder / f"{re.sub(r'[^A-Za-z0-9.-]', '_', address)}.json"

    @contextlib.contextmanager
    def lock_server(self) -> Iterator[None]:
        """Keep other processes from tuning on the server. Raises EnvironmentFault if one does already."""
        lock = self.path.with_suffix(".lock")
        with contextlib.ExitStack() as stack:
            try:
                lock.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
                stack.enter_context(file_lock(lock, self._refuse))
            except OSError as error:
                raise EnvironmentFault(f"cannot write {lock}: {error.strerror}; check that disk") from error
            yield

    def _refuse(self, holder: str) -> None:
        raise EnvironmentFault(
            f"the server at {self._address}: {holder} is tuning on it; wait until it ends, or stop it"
        )

    def write(self, state: ServerState) -> None:
        """Save ``state``. Raises EnvironmentFault if the file cannot be written."""
        configs = {
            name: None if config is None else json_format.MessageToDict(config)
            for name, config in state.configs.items()
        }
        document = {
            "address": self._address,
            "configs": configs,
            "ready": sorted(state.ready),
            "replaced": sorted(state.replaced),
        }
        write_atomically(self.path, json.dumps(document))

    def read(self) -> ServerState | None:
        """Return the saved state; None if there is none. Raises EnvironmentFault if the file is damaged."""
        if not self.path.exists():
            return None
        try:
            document = json.loads(read_bytes(self.path, MAX_BYTES, "remove it"))
            configs = {
                str(name): None if config is None else json_format.ParseDict(config, ModelConfig())
                for name, config in document["configs"].items()
            }
            ready, replaced = (frozenset(map(str, document[key])) for key in ("ready", "replaced"))
            return ServerState(configs, ready, replaced)
        except _UNREADABLE as error:
            raise EnvironmentFault(
                f"{self.path}: cannot be read ({one_line(str(error), 200)}); check what the server at "
                f"{self._address} serves, then remove that file"
            ) from None

    def remove(self) -> None:
        """Remove the file; no effect if there is none."""
        self.path.unlink(missing_ok=True)


def unrestored_servers(folder: Path) -> list[str]:
    """Return the address of each server whose state is saved in ``folder``; of a damaged file, its name."""
    addresses = []
    for path in sorted(folder.glob("*.json")) if is_folder(folder) else ():
        try:
            addresses.append(one_line(str(json.loads(read_bytes(path, MAX_BYTES, "remove it"))["address"]), 200))
        except _UNREADABLE:
            addresses.append(path.name)
    return addresses


UNLOAD_POLL_SECONDS = 0.05
OBSERVED_SECONDS = 1.0  # the time in which requests of other clients are counted
ROUNDS = 3  # attempts to load: an ensemble may fail while a step still has its old batch size
NO_MODEL = "tritune-asks-for-the-mode"  # a name that no repository has
MANAGED_BY_ITSELF = "explicit model load / unload is not allowed"  # the answer in the modes NONE and POLL


@dataclass(frozen=True)
class LoadedModel:
    """How ``RemoteServer.serve`` has loaded a model: the ``override`` (JSON) and the ``files`` of the load request.

    ``reported`` is the configuration that the server reported after it.
    """

    override: str
    files: Mapping[str, bytes]
    reported: ModelConfig


class RemoteServer:
    """A tritonserver in explicit mode, whose models can be loaded with other configurations and restored.

    ``timeout_seconds`` limits a load and an unload. Every method raises EnvironmentFault if the server cannot be
    used, and ModelRefused if it refuses a request. A server that no longer responds, or an unload that takes too
    long, raises ServerFault. A load that takes too long raises DeploymentError.
    """

    def __init__(self, connection: Connection, timeout_seconds: float = CALL_SECONDS) -> None:
        self.address = connection.address
        self._connection = connection
        self._timeout_seconds = timeout_seconds
        self._client = open_client(connection)
        self._loaded: dict[str, LoadedModel] = {}
        self._replaced: frozenset[str] = frozenset()  # models that are loaded with other files than the repository's

    def close(self) -> None:
        self._client.close()

    def check(self) -> None:
        """Raise EnvironmentFault unless models can be loaded and unloaded on the server; nothing is changed."""
        with self._calling():
            self._client.check()
            self._client.unload(NO_MODEL)  # the server checks its mode before it looks for the model

    def check_has(self, models: list[str]) -> None:
        """Raise EnvironmentFault unless the server's repository has ``models``."""
        with self._calling():
            repository_models = self._client.index()
        for model in models:
            if model not in repository_models:
                names = one_line(", ".join(sorted(repository_models)) or "none", 200)
                raise EnvironmentFault(
                    f"the server at {self.address} has no model {model!r} in its repository ({names}); put it there "
                    "under that name"
                )

    def version(self) -> str:
        """Return the version of the server."""
        with self._calling():
            return one_line(self._client.identity()[1], 30)

    def responds(self) -> bool:
        """Return whether the server responds."""
        return responds(self._client)

    def state(self, models: list[str]) -> ServerState:
        """Return which models are loaded, and the configurations of ``models``."""
        with self._calling():
            ready = frozenset(name for name, loaded in self._client.index().items() if loaded)
        return ServerState({name: self.config(name) for name in models}, ready)

    def requests_per_second(self, models: Collection[str]) -> float:
        """Return the rate of requests to the one of ``models`` that gets most of them. It takes OBSERVED_SECONDS.

        It is 0 if no model is loaded, or if the server does not give its statistics.
        """
        try:
            before = {model: self._requests(model) for model in models if self._client.is_ready(model)}
            if not before:
                return 0.0
            began = time.monotonic()
            time.sleep(OBSERVED_SECONDS)
            added = max(self._requests(model) - count for model, count in before.items())
        except CallError:
            return 0.0
        return max(0, added) / (time.monotonic() - began)

    def _requests(self, model: str) -> int:
        counts = [version.inference_stats for version in self._client.statistics(model)]
        return sum(count.success.count + count.fail.count for count in counts)

    def config(self, model: str) -> ModelConfig | None:
        """Return the configuration that ``model`` is served with; None if it is not loaded."""
        with self._calling():
            return self._client.config(model) if self._client.is_ready(model) else None

    def load(self, model: str, config: ModelConfig | None = None, files: Mapping[str, bytes] | None = None) -> None:
        """Load ``model`` with ``config``, or as its repository has it.

        With ``files`` it has only these files, by path in its folder, instead of those in the repository.
        """
        override = None if config is None else model_config.to_override_json(config)
        self._loaded.pop(model, None)
        with self._calling():
            self._client.load(model, override, self._timeout_seconds, files)

    def unload(self, model: str) -> None:
        """Unload ``model`` and wait until it is unloaded.

        The server completes the requests in the queue of the model first, even if their client has gone. After an
        overload they may take minutes.
        """
        self._loaded.pop(model, None)
        deadline = time.monotonic() + self._timeout_seconds
        with self._calling():
            self._client.unload(model)
            while self._client.holds(model):
                if time.monotonic() > deadline:
                    raise ServerFault(
                        f"{model} on {self.address} was not unloaded within {self._timeout_seconds:g} s; if it still "
                        "answers requests in its queue, wait until it has, otherwise start the server again"
                    )
                time.sleep(UNLOAD_POLL_SECONDS)

    def serve(self, configs: Mapping[str, ModelConfig], files: Mapping[str, Mapping[str, bytes]]) -> None:
        """Load the models of ``configs`` that are served with another configuration; composing models come first.

        ``files`` are the files of models that do not use those of the repository, by model.
        """

        def unserved() -> list[str]:
            return [name for name in configs if not self._serves(name, configs[name], files.get(name))]

        for attempt in range(1, ROUNDS + 1):
            if not (changed := unserved()):
                return
            for name in changed:
                try:
                    self._reload(name, configs[name], files.get(name))
                except DeploymentError:
                    if attempt == ROUNDS or not configs[name].HasField("ensemble_scheduling"):
                        raise
        if lost := unserved():
            raise DeploymentError(
                f"{', '.join(lost)}: not ready, or another configuration is served, after {ROUNDS} loads"
            )

    def _serves(self, model: str, config: ModelConfig, files: Mapping[str, bytes] | None) -> bool:
        """Return whether ``_reload`` has loaded ``model`` with these arguments, and it is still served like that."""
        loaded = self._loaded.get(model)
        return (
            loaded is not None
            and loaded.override == model_config.to_override_json(config)
            and loaded.files == (files or {})
            and loaded.reported == self.config(model)
        )

    def _reload(self, model: str, config: ModelConfig, files: Mapping[str, bytes] | None) -> None:
        """Load ``model`` as ``load`` does, and note how it is served."""
        if files is not None or model in self._replaced or has_llm_engine(config):
            self.unload(model)  # the server keeps the instances if only files change; see has_llm_engine
        self.load(model, config, files)
        self._replaced = self._replaced - {model} if files is None else self._replaced | {model}
        if (reported := self.config(model)) is not None:
            self._loaded[model] = LoadedModel(model_config.to_override_json(config), files or {}, reported)

    def restore(self, state: ServerState) -> None:
        """Load the models of ``state`` as they were. Raises ServerFault if one is not restored."""
        before = {name: config for name, config in state.configs.items() if config is not None}
        for name in [*reversed(list(state.configs)), *self._added_steps(state)]:
            if name not in before:  # even if it is not ready: an ensemble may have lost its steps
                self.unload(name)
        replaced = set(state.replaced)

        def unrestored() -> list[str]:
            return [name for name in before if name in replaced or self.config(name) != before[name]]

        for attempt in range(1, ROUNDS + 1):
            if not (changed := unrestored()):
                return
            from_repository = attempt == ROUNDS  # an override lacks the fields that this client does not know
            if from_repository:
                for name in reversed(list(before)):
                    self.unload(name)
            for name in before if from_repository else changed:
                with contextlib.suppress(DeploymentError):  # the check below reports it
                    if name in replaced or has_llm_engine(before[name]):
                        self.unload(name)
                    self.load(name, None if from_repository else before[name])
                    replaced.discard(name)
        if lost := unrestored():
            raise ServerFault(
                f"the server at {self.address} does not restore the original configuration of {lost[0]}"
            )

    def _added_steps(self, state: ServerState) -> list[str]:
        """Return the steps that were loaded with the server's ensemble and are not among the models of ``state``."""
        served = [config for name in state.configs if (config := self.config(name)) is not None]
        steps = {step.model_name for config in served for step in config.ensemble_scheduling.step}
        return sorted(steps - set(state.configs) - state.ready)

    @contextlib.contextmanager
    def _calling(self) -> Iterator[None]:
        try:
            yield
        except CallError as error:
            raise self._fault(error) from error

    def _fault(self, error: CallError) -> EnvironmentFault | DeploymentError:
        message = without_traceback(str(error))
        if error.failure == "denied":
            return EnvironmentFault(f"the server at {self.address} denies this: {message}; give --header NAME:VALUE")
        if MANAGED_BY_ITSELF in message:
            managed = f"the server at {self.address} manages its models by itself"
            return EnvironmentFault(f"{managed}; start it with --model-control-mode=explicit")
        if not self.responds():
            return ServerFault(
                diagnose_connection(self._connection)
                or f"the server at {self.address} does not answer ({message}); start it again"
            )
        if error.failure == "overdue":
            return DeploymentError(f"no answer within the time that a load may take ({self._timeout_seconds:g} s)")
        return ModelRefused(message, lacks_gpu_memory=lacks_gpu_memory(message))
