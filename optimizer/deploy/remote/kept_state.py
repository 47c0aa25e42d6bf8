"""What a server served before it was tuned on: on disk, until it serves that again."""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from google.protobuf import json_format
from tritonclient.grpc.model_config_pb2 import ModelConfig

from optimizer.errors import BadInputError, EnvironmentFault
from optimizer.store.disk import write_whole
from optimizer.store.locks import locked
from optimizer.untrusted import one_line, read_bytes

FOLDER = "remote"  # in tune's cache
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
    """``configs`` are those of the models that may be changed, by name, each after those that it is made of; None
    is one that was not loaded. ``ready`` are all that were."""

    configs: Mapping[str, ModelConfig | None]
    ready: frozenset[str]


class KeptState:
    """The file of the server at ``address``, in ``folder``. A process that was killed leaves it to the next one."""

    def __init__(self, folder: Path, address: str) -> None:
        self._address = address
        self.path = folder / f"{re.sub(r'[^A-Za-z0-9.-]', '_', address)}.json"

    @contextlib.contextmanager
    def alone(self) -> Iterator[None]:
        """Keeps other processes off the server. Raises EnvironmentFault naming the one that is at work on it."""

        def busy(holder: str) -> None:
            raise EnvironmentFault(
                f"the server at {self._address}: {holder} is at work on it; wait for its end, or end it"
            )

        lock = self.path.with_suffix(".lock")
        with contextlib.ExitStack() as held:
            try:
                lock.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
                held.enter_context(locked(lock, busy))
            except OSError as error:
                raise EnvironmentFault(f"cannot write {lock}: {error.strerror}; see to that disk") from error
            yield

    def write(self, state: ServerState) -> None:
        """Raises EnvironmentFault where the disk refuses it."""
        configs = {
            name: None if config is None else json_format.MessageToDict(config)
            for name, config in state.configs.items()
        }
        kept = {"address": self._address, "configs": configs, "ready": sorted(state.ready)}
        write_whole(self.path, json.dumps(kept))

    def read(self) -> ServerState | None:
        """None where nothing is kept. Raises EnvironmentFault where the file cannot be read."""
        if not self.path.exists():
            return None
        try:
            kept = json.loads(read_bytes(self.path, MAX_BYTES, "remove it"))
            configs = {
                str(name): None if config is None else json_format.ParseDict(config, ModelConfig())
                for name, config in kept["configs"].items()
            }
            return ServerState(configs, frozenset(map(str, kept["ready"])))
        except _UNREADABLE as error:
            raise EnvironmentFault(
                f"{self.path}: cannot be read ({one_line(str(error), 200)}); see to what the server at "
                f"{self._address} serves, then remove that file"
            ) from None

    def remove(self) -> None:
        self.path.unlink(missing_ok=True)
