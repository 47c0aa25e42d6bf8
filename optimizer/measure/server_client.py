"""The interface of a Triton client, which both protocols implement; its TLS context, its errors and their meaning."""

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


# -- the meaning of error messages, which Triton and its backends send as text only --------------------------------


def model_died(message: str) -> bool:
    """Return whether the message says that the stub process of a Python model died; the server itself is alive."""
    return re.search(r"stub process\b.{0,200}\bis (not healthy|unhealthy)", message, re.IGNORECASE) is not None


def is_rejection(message: str) -> bool:
    """Return whether the message says that Triton rejected a request because its queue was full."""
    return "exceeds maximum queue size" in message.lower()


def is_refused_by_queue(message: str) -> bool:
    """Return whether the message says that Triton refused a request: its queue was full, or it waited there too long.

    Fewer requests in flight may all be served.
    """
    return is_rejection(message) or "request timeout expired" in message.lower()


def lacks_memory(message: str) -> bool:
    """Return whether the message says that the server or one of its backends could not allocate memory.

    A failed allocation inside a Python model does not count, since that is memory of its own process.
    """
    return re.search(r"\b(cannot allocate memory|std::bad_alloc)\b", message, re.IGNORECASE) is not None


def lacks_gpu_memory(message: str) -> bool:
    """Return whether a message of PyTorch, CUDA, cuBLAS or ONNX Runtime says that a GPU has too little free memory.

    All processes of the server share that memory.
    """
    pattern = r"\bCUDA\b.{0,40}\bout of memory\b|\bcudaErrorMemoryAllocation\b|\bCUBLAS_STATUS_ALLOC_FAILED\b"
    return re.search(f"{pattern}|Failed to allocate memory for requested buffer", message, re.IGNORECASE) is not None


def hides_cause(message: str) -> bool:
    """Return whether the message says that Triton cannot read a model, for a reason that only its log has.

    For a step of an ensemble it may say that the model is not available.
    """
    return "failed to poll from model repository" in message or "models that are not available" in message


def without_traceback(message: str) -> str:
    """Return the server's message on one line, without the Python traceback that a backend appends."""
    return shorten(re.split(r"\s+At:\s", message)[0])


def why_request_failed(message: str) -> str:
    """Return the server's message on one line for a measurement in which no request may fail.

    If the queue refused the request, the option that permits this follows. It is shown with its command, because
    `tune sweep` does not take it.
    """
    reason = without_traceback(message)
    if not is_refused_by_queue(message):
        return reason
    return f"{reason}; `tune --max-error-rate SHARE` permits the queue to refuse a share of the requests"


def missing_module(message: str) -> str:
    """Return the top-level name of the module that a Python model could not import; empty for other errors."""
    match = re.search(r"ModuleNotFoundError: No module named '(\w+)", message)
    return match[1] if match else ""
