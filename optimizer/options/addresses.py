"""Addresses of servers in options, and the redaction of secrets in headers and URLs."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Final, NamedTuple
from urllib.parse import unquote

from optimizer.core.endpoint import REDACTED, ProtocolName
from optimizer.core.errors import BadInputError

HEADER_FLAG = "--header"
_VARIABLE = re.compile(r"\$(?:([A-Za-z_]\w*)|\{([A-Za-z_]\w*)\})", re.ASCII)
_STORABLE = re.compile(rf"(?:[A-Za-z]+ +)?(?:{_VARIABLE.pattern})+", re.ASCII)
_PASSWORD = re.compile(r"://([^/:]*):(.*)@", re.DOTALL)


def redact_header(header: str) -> str:
    """Return ``header`` with its value replaced, unless the value is a scheme, such as Bearer, and variables."""
    name, colon, value = header.partition(":")
    if colon and _STORABLE.fullmatch(value.strip()):
        return header
    return f"{name}{colon}{REDACTED}" if colon else REDACTED


def redact_words(words: Sequence[str]) -> list[str]:
    """Return the words of a command with each ``--header`` in them redacted."""
    redacted: list[str] = []
    for i, word in enumerate(words):
        flag, equals, value = word.partition("=")
        if i and words[i - 1] == HEADER_FLAG:
            word = redact_header(word)
        elif flag == HEADER_FLAG and equals:
            word = f"{flag}={redact_header(value)}"
        redacted.append(word)
    return redacted


def expand_headers(headers: Iterable[str], environment: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Return the values of ``headers`` by name, with variables replaced by their values in ``environment``.

    Raises:
        BadInputError: A variable is not set, a value was redacted, or it has characters that no header may have.
    """
    values: dict[str, str] = {}
    for header in headers:
        name, _, value = header.partition(":")
        if value == REDACTED:
            raise BadInputError(f"{HEADER_FLAG} {name}: its value is not stored; give it again, or as $VARIABLE")
        for match in _VARIABLE.finditer(value):
            if (match[1] or match[2]) not in environment:
                raise BadInputError(f"{HEADER_FLAG} {name}: {match[0]} is not set in the environment; export it")
        expanded = _VARIABLE.sub(lambda match: environment[match[1] or match[2]], value).strip()
        if not expanded.isprintable():
            raise BadInputError(f"{HEADER_FLAG} {name}: a header's value must be printable characters; correct it")
        values[name] = expanded
    return values


def redact(text: str, url: str = "") -> str:
    """Return ``text`` with the password of each URL in it replaced, and every occurrence of the password of ``url``.

    The password of ``url`` is also replaced where a driver has decoded it. A user name may contain an @, as in
    ``user@tenant:password@host``.
    """
    match = _PASSWORD.search(url)
    for secret in {match[2], unquote(match[2])} if match and match[2] else ():
        text = text.replace(secret, REDACTED)
    text = _PASSWORD.sub(rf"://\1:{REDACTED}@", text)
    return re.sub(r"(?i)(password|passwd|pwd|secret|token)=[^&\s]*", rf"\1={REDACTED}", text)


DEFAULT_URL = "localhost:8001"
SSL_FLAGS: Final[dict[ProtocolName, dict[str, str]]] = {  # perf_analyzer's flags for PEM files, by field of Tls
    "grpc": {
        "ca": "--ssl-grpc-root-certifications-file",
        "cert": "--ssl-grpc-certificate-chain-file",
        "key": "--ssl-grpc-private-key-file",
    },
    "http": {
        "ca": "--ssl-https-ca-certificates-file",
        "cert": "--ssl-https-client-certificate-file",
        "key": "--ssl-https-private-key-file",
    },
}
MAX_PORT = 65535
LOCAL_CLUSTER, RAY_SCHEME, RAY_PORT = "auto", "ray://", 10001
_HOST = r"(?:[A-Za-z0-9._-]+|\[[0-9A-Fa-f:.]+\])"
_URL = re.compile(rf"(?:(grpc|grpcs|http|https)://)?({_HOST}:([0-9]{{1,5}}))/?", re.ASCII)
_METRICS_URL = re.compile(rf"(?:(https?)://)?({_HOST}:([0-9]{{1,5}}))(/[!-~]*)?", re.ASCII)
_RAY_URL = re.compile(rf"ray://({_HOST})(?::([0-9]{{1,5}}))?/?", re.ASCII)


class ServerAddress(NamedTuple):
    """The address of a running Triton server; ``host_port`` is ``host:port``."""

    host_port: str
    protocol: ProtocolName
    tls: bool


def server_address(url: str | None) -> ServerAddress:
    """Return the address that ``--url`` names; None is the default server. Raises ValueError."""
    match = _URL.fullmatch(url or DEFAULT_URL)
    if match is None or not 0 < int(match[3]) <= MAX_PORT:
        raise ValueError(f"write host:port of the server's gRPC, such as {DEFAULT_URL}, or http://host:port")
    scheme = match[1] or "grpc"
    return ServerAddress(match[2], "http" if scheme.startswith("http") else "grpc", scheme.endswith("s"))


def parse_metrics_address(text: str) -> str:
    """Return ``text`` if it is ``host:port``. Raises ValueError."""
    match = _URL.fullmatch(text)
    if match is None or match[2] != text or not 0 < int(match[3]) <= MAX_PORT:
        raise ValueError("write host:port alone, such as triton:8002")
    return text


def parse_metrics_url(text: str) -> str:
    """Return the URL of a metrics page; ``host:port`` stands for ``http://host:port/metrics``. Raises ValueError."""
    match = _METRICS_URL.fullmatch(text)
    if match is None or not 0 < int(match[3]) <= MAX_PORT:
        raise ValueError("write the URL of Triton's metrics, such as http://triton:8002/metrics")
    return f"{match[1] or 'http'}://{match[2]}{match[4] or '/metrics'}"


def parse_cluster_address(text: str) -> str:
    """Return ``auto``, or ``ray://HOST:PORT`` with Ray's default port if ``text`` has none. Raises ValueError."""
    if text == LOCAL_CLUSTER:
        return text
    match = _RAY_URL.fullmatch(text)
    port = int(match[2] or RAY_PORT) if match else 0
    if match is None or not 0 < port <= MAX_PORT:
        raise ValueError("write auto for the cluster that this machine is part of, or ray://HOST:PORT")
    return f"{RAY_SCHEME}{match[1]}:{port}"
