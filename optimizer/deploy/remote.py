"""The remote target: a tritonserver that runs already, in explicit mode, reached over gRPC.

What it served before is put back at the end. It is written to a file before anything is changed: should this process
be killed, the next target for the same server and model puts it back first.
"""

from __future__ import annotations

import contextlib
import json
import re
import time
from collections.abc import Iterator
from pathlib import Path

from google.protobuf import json_format
from tritonclient.grpc import InferenceServerClient
from tritonclient.grpc.model_config_pb2 import ModelConfig
from tritonclient.utils import InferenceServerException

from optimizer import model_config
from optimizer.deploy.listener import listener_pid
from optimizer.errors import DeploymentError, EnvironmentFault, ServerCrashed, ServerFault
from optimizer.interfaces import Endpoint
from optimizer.server_health import answers, cause
from optimizer.stopwatch import Stopwatch
from optimizer.store.disk import write_whole
from optimizer.store.locks import locked
from optimizer.trial import Candidate
from optimizer.untrusted import one_line, read_bytes

CALL_SECONDS = 10.0
UNLOAD_SECONDS = 30.0
MAX_KEPT_BYTES = 1 << 20
MANAGED_BY_ITSELF = "explicit model load / unload is not allowed"  # what NONE and POLL mode answer


class RemoteTarget:
    """Serves candidates as ``model`` of the server at ``address`` (``host:port`` of gRPC).

    Only what is tuned changes: the override is the configuration that the server had, with the candidate's settings.
    ``keep`` is the folder of what is to be put back.

    Raises EnvironmentFault where the server does not answer, has no such model, manages its models itself, or where
    another process tunes it.
    """

    def __init__(
        self,
        address: str,
        model: str,
        *,
        keep: Path,
        stopwatch: Stopwatch | None = None,
        load_timeout_seconds: float = 120.0,
    ) -> None:
        self.address, self.model = address, model
        self._stopwatch = stopwatch or Stopwatch()
        self._timeout_seconds = load_timeout_seconds
        self._kept = keep / f"{re.sub(r'[^A-Za-z0-9.-]', '_', address)}-{model}.json"
        self._changed = False
        with contextlib.ExitStack() as undo:
            undo.enter_context(self._alone())
            self._client = undo.enter_context(contextlib.closing(InferenceServerClient(address)))
            with self._stopwatch.server(), self._telling_faults():
                self._check_server()
                if self._kept.exists():
                    self._changed = True
                    self._put_back()
                self._original = self._serving()
                if self._original is None:
                    self._remember()
                    self._client.load_model(model, client_timeout=load_timeout_seconds)
                self._base = self._original or self._serving() or ModelConfig()
            self._open = undo.pop_all()

    def start(self) -> None:
        """It runs already."""

    @property
    def server_version(self) -> str:
        with self._telling_faults():
            return str(self._client.get_server_metadata(client_timeout=CALL_SECONDS).version)

    @contextlib.contextmanager
    def deploy(self, candidate: Candidate) -> Iterator[Endpoint]:
        if candidate.server_cpus is not None:
            raise DeploymentError(f"the CPUs of the server at {self.address} cannot be chosen from here")
        wanted = model_config.for_trials(model_config.apply(candidate, self._base))
        with self._stopwatch.server():
            self._load(wanted)
            self._check(candidate)
        try:
            pid = listener_pid(self.address)
            yield Endpoint(self.model, candidate, grpc=self.address, server_pid=pid)
        except ServerCrashed as error:
            if answers(self._client):
                raise
            raise self._gone() from error

    @contextlib.contextmanager
    def deploy_as_written(self, candidate: Candidate) -> Iterator[Endpoint]:
        """The model is unloaded first; the server runs on."""
        with self._stopwatch.server(), self._telling_faults():
            self._remember()
            self._unload()
        with self.deploy(candidate) as endpoint:
            yield endpoint

    def close(self) -> None:
        """Puts back what the server had. Raises ServerFault where that fails."""
        with self._open:
            if not self._changed:
                return
            self._changed = False  # what fails here is for the next target to put right
            try:
                with self._stopwatch.server(), self._telling_faults():
                    self._put_back()
            except EnvironmentFault as error:
                raise ServerFault(
                    f"{self.model} on {self.address} is not as it was: {error}; what it served is kept in "
                    f"{self._kept}, and the next `tune verify` there puts it back"
                ) from error

    # -- what the server had ------------------------------------------------------------------------------------

    def _remember(self) -> None:
        """On disk before the first change."""
        if not self._changed:
            original = None if self._original is None else json_format.MessageToDict(self._original)
            write_whole(self._kept, json.dumps({"address": self.address, "model": self.model, "config": original}))
            self._changed = True

    def _put_back(self) -> None:
        """The configuration of its repository where that is what it had, else the same override."""
        original = self._read_kept()
        if original is None:
            self._unload()
        elif self._serving() != original:
            self._client.load_model(self.model, client_timeout=self._timeout_seconds)
            if self._serving() != original:
                override = model_config.to_override_json(original)
                self._client.load_model(self.model, config=override, client_timeout=self._timeout_seconds)
            if self._serving() != original:
                raise ServerFault(f"the server at {self.address} does not take {self.model}'s own configuration back")
        self._kept.unlink(missing_ok=True)
        self._changed = False

    def _read_kept(self) -> ModelConfig | None:
        try:
            config = json.loads(read_bytes(self._kept, MAX_KEPT_BYTES, "remove it"))["config"]
            return None if config is None else json_format.ParseDict(config, ModelConfig())
        except (OSError, ValueError, KeyError, TypeError, json_format.ParseError) as error:
            raise EnvironmentFault(
                f"{self._kept}: cannot be read ({one_line(str(error), 200)}); see to {self.model} on {self.address}, "
                "then remove that file"
            ) from None

    def _serving(self) -> ModelConfig | None:
        """None where the model is not loaded."""
        if not self._client.is_model_ready(self.model, client_timeout=CALL_SECONDS):
            return None
        config = self._client.get_model_config(self.model, client_timeout=CALL_SECONDS).config
        assert isinstance(config, ModelConfig)
        return config

    # -- loading ------------------------------------------------------------------------------------------------

    def _load(self, wanted: ModelConfig) -> None:
        self._remember()
        override = model_config.to_override_json(wanted)
        try:
            self._client.load_model(self.model, config=override, client_timeout=self._timeout_seconds)
        except InferenceServerException as error:
            if "DEADLINE" in str(error.status()):
                raise DeploymentError(f"loading took longer than {self._timeout_seconds:g} s") from error
            raise self._fault(error) from error

    def _check(self, candidate: Candidate) -> None:
        with self._telling_faults():
            serving = self._serving()
        wrong = ["not ready"] if serving is None else model_config.differences(candidate, serving)
        if wrong:
            raise DeploymentError(f"the server serves another configuration: {'; '.join(wrong)}")

    def _unload(self) -> None:
        self._client.unload_model(self.model, client_timeout=CALL_SECONDS)
        deadline = time.monotonic() + UNLOAD_SECONDS
        while self._client.is_model_ready(self.model, client_timeout=CALL_SECONDS):
            if time.monotonic() > deadline:
                raise ServerFault(f"{self.model} on {self.address} was not unloaded within {UNLOAD_SECONDS:g} s")
            time.sleep(0.02)

    # -- faults -------------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def _alone(self) -> Iterator[None]:
        def busy(holder: str) -> None:
            raise EnvironmentFault(
                f"{self.model} on {self.address}: {holder} is at work on it; wait for its end, or end it"
            )

        lock = self._kept.with_suffix(".lock")
        with contextlib.ExitStack() as held:
            try:
                lock.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
                held.enter_context(locked(lock, busy))
            except OSError as error:
                raise EnvironmentFault(f"cannot write {lock}: {error.strerror}; see to that disk") from error
            yield

    def _check_server(self) -> None:
        if not answers(self._client):
            raise ServerFault(
                f"no tritonserver answers at {self.address}; start it, or name the address of its gRPC port"
            )
        models = {one.name for one in self._client.get_model_repository_index(client_timeout=CALL_SECONDS).models}
        if self.model not in models:
            others = one_line(", ".join(sorted(models)) or "none", 200)
            raise EnvironmentFault(
                f"the server at {self.address} has no model {self.model!r} in its repository ({others})"
            )

    @contextlib.contextmanager
    def _telling_faults(self) -> Iterator[None]:
        """Where it is not a candidate that is refused, the server is at fault."""
        try:
            yield
        except InferenceServerException as error:
            fault = self._fault(error)
            raise fault if isinstance(fault, EnvironmentFault) else ServerFault(str(fault)) from error

    def _fault(self, error: InferenceServerException) -> EnvironmentFault | DeploymentError:
        message = error.message() or ""
        if MANAGED_BY_ITSELF in message:
            told = f"the server at {self.address} manages its models by itself"
            return EnvironmentFault(f"{told}; start it with --model-control-mode=explicit")
        if not answers(self._client):
            return self._gone()
        return DeploymentError(cause(message))

    def _gone(self) -> ServerFault:
        return ServerFault(f"the server at {self.address} no longer answers; start it again")
