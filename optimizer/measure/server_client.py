"""The interface of a Triton client, which both protocols implement, its errors, and its TLS context."""

from __future__ import annotations

import contextlib
import re
import ssl
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol, TypeAlias, TypeVar

from optimizer.core.endpoint import Connection, Tls
from optimizer.core.errors import BadInputError
from optimizer.core.safe_text import one_line, read_bytes, shorten, show_path

if TYPE_CHECKING:
    from tritonclient.grpc.service_pb2 import ModelMetadataResponse, ModelStatistics

    from optimizer.config.model_config_proto import ModelConfig

CALL_SECONDS = 10.0
_MAX_CHARACTERS = 2000
_RESTRICTED = re.compile(r"restricted, expecting header '([^']{1,200})'")

CallFailure: TypeAlias = Literal["unreachable", "overdue", "denied", "refused"]


class CallError(Exception):
    """A call that failed; the message is the server's if it sent one. ``failure`` is the kind of the failure.

    - ``unreachable``: no server was reached, or (over gRPC, which has one status for both) the model is not ready
    - ``overdue``: the server did not answer in time
    - ``denied``: the headers or the client certificate were not accepted
    - ``refused``: any other error
    """

    def __init__(self, connection: Connection, failure: CallFailure, message: str | None) -> None:
        message = message or "the server gave no reason"
        if header := _RESTRICTED.search(message):
            failure = "denied"
            message = f"the server expects the header {header[1]} with the value that it was started with"
        super().__init__(shorten(connection.redact(message), _MAX_CHARACTERS))
        self.failure = failure


_Received = TypeVar("_Received")


def send_all(
    messages: Iterable[bytes], send: Callable[[bytes], Any], receive: Callable[[Any], _Received], in_flight: int
) -> list[_Received]:
    """Send ``messages``, at most ``in_flight`` at a time, and return the responses in the same order.

    ``send`` starts a call, and ``receive`` waits for the response of a call. If one fails, the error is raised when
    the others have ended: a cancelled call may crash the server (see ``LoadClient._drain``), and would still be in
    its queue at the next attempt.
    """
    pending: deque[Any] = deque()
    responses: list[_Received] = []
    try:
        for message in messages:
            if len(pending) == in_flight:
                responses.append(receive(pending.popleft()))
            pending.append(send(message))
        while pending:
            responses.append(receive(pending.popleft()))
    except Exception:
        for call in pending:
            with contextlib.suppress(Exception):
                receive(call)
        raise
    return responses


STATES_WITH_INSTANCES = ("READY", "UNLOADING")  # a model keeps its instances until the end of an unload


class ServerClient(Protocol):
    """A client of one server. Each call raises CallError; without a time limit of its own it takes CALL_SECONDS."""

    def check(self, timeout_seconds: float = CALL_SECONDS) -> None:
        """Raise CallError unless the server reports that it is live."""

    def identity(self, timeout_seconds: float = CALL_SECONDS) -> tuple[str, str]:
        """Return the server's id and its version as it reports them."""

    def is_ready(self, model: str) -> bool: ...

    def config(self, model: str) -> ModelConfig: ...

    def metadata(self, model: str) -> ModelMetadataResponse: ...

    def statistics(self, model: str, timeout_seconds: float = CALL_SECONDS) -> list[ModelStatistics]:
        """Return the statistics of each loaded version of ``model``."""

    def index(self) -> dict[str, bool]:
        """Return the names of the models in the repository and whether any version of each is loaded."""

    def holds(self, model: str, timeout_seconds: float = CALL_SECONDS) -> bool:
        """Return whether the server has instances of ``model``, which it also has until an unload has ended."""

    def load(
        self, model: str, override: str | None, timeout_seconds: float, files: Mapping[str, bytes] | None = None
    ) -> None:
        """Load ``model`` with the configuration ``override`` (JSON).

        None loads it with the last override, or with the configuration in the repository. With ``files``, by path in
        the folder of the model, the server uses only these, not those in the repository; this needs an override.
        """

    def unload(self, model: str, timeout_seconds: float = CALL_SECONDS) -> None:
        """Start to unload ``model`` without waiting for the end."""

    def infer(self, messages: Iterable[bytes], *, in_flight: int, timeout_seconds: float) -> list[bytes]:
        """Send ``messages``, at most ``in_flight`` at a time, and return the responses in the same order.

        Both are serialized: ModelInferRequest and ModelInferResponse.
        """

    def stream(self, messages: Iterable[bytes], *, in_flight: int, timeout_seconds: float) -> list[list[bytes]]:
        """Send ``messages`` to a decoupled model as ``infer`` does, and return all responses with outputs to each."""

    def register_shared_memory(self, name: str, size: int) -> None:
        """Let the server map the ``size`` bytes of /dev/shm/NAME under the same name."""

    def unregister_shared_memory(self, name: str) -> None:
        """Let the server unmap a region."""

    def shared_memory(self) -> list[str]:
        """Return the names of the regions of system shared memory that the server maps."""

    def close(self) -> None: ...


# -- TLS --------------------------------------------------------------------------------------------------------

MAX_PEM_BYTES = 4 << 20
_PEM_HINT = "give a file with PEM certificates"


def tls_context(tls: Tls, create: Callable[..., Any] = ssl.create_default_context) -> ssl.SSLContext:
    """Return a TLS context that checks the server's certificate and host name.

    ``create`` makes the empty context; gevent has its own. Raises BadInputError if a file cannot be used.
    """
    context: ssl.SSLContext = create(cadata=None if tls.ca is None else _read_pem(tls.ca))
    if tls.cert is not None and tls.key is not None:
        for file in (tls.cert, tls.key):
            _read_pem(file)
        try:
            context.load_cert_chain(tls.cert, tls.key, password=lambda: _reject_password(tls.key))
        except (ssl.SSLError, OSError) as error:
            reason = getattr(error, "reason", None) or error.strerror or "it cannot be read"
            names = f"{show_path(tls.cert)} with the key {show_path(tls.key)}"
            raise BadInputError(f"{names}: not a certificate and its private key ({reason})") from None
    elif tls.cert is not None or tls.key is not None:
        name = one_line(str(tls.cert or tls.key))
        raise BadInputError(f"{name}: a client certificate needs its private key; give both")
    return context


def ca_file(tls: Tls) -> Path | None:
    """Return the file of trusted CAs, for clients whose own default differs from OpenSSL's."""
    if tls.ca is not None:
        return tls.ca
    default = ssl.get_default_verify_paths().cafile
    return None if default is None else Path(default)


def _read_pem(path: Path) -> str:
    """Return the text of a PEM file. Raises BadInputError if it is none, or has a damaged certificate."""
    try:
        text = read_bytes(path, MAX_PEM_BYTES, _PEM_HINT).decode("ascii", errors="replace")
        if "-----BEGIN " not in text:
            raise ValueError
        if "CERTIFICATE-----" in text:
            ssl.create_default_context(cadata=text)
    except (ValueError, ssl.SSLError):
        raise BadInputError(f"{show_path(path)}: not a valid PEM file; {_PEM_HINT}") from None
    return text


def _reject_password(key: Path | None) -> str:
    raise BadInputError(f"{one_line(str(key))}: the private key has a password; give a key without a password")
