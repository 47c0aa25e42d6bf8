"""The connection to a server: its address, protocol, headers and TLS files."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, TypeAlias

from optimizer.core.errors import BadInputError

ProtocolName: TypeAlias = Literal["grpc", "http"]

REDACTED = "***"
MAX_HEADER_CHARACTERS = 8192  # limit for all header values together, which tritonserver has over HTTP
_NAME = re.compile(r"[A-Za-z0-9!#$%&'*+.^_`|~-]{1,100}")


@dataclass(frozen=True)
class Tls:
    """PEM files for TLS.

    ``ca`` verifies the server's certificate (None: the certificates that this machine trusts). ``cert`` and ``key``
    are the client's own; set both or neither.
    """

    ca: Path | None = None
    cert: Path | None = None
    key: Path | None = None


@dataclass(frozen=True)
class Connection:
    """How to reach a server.

    Attributes:
        address: ``host:port`` of gRPC or HTTP.
        protocol: The protocol that is spoken at the address.
        headers: Headers of every request. Their values are secrets: no message, log or file contains them.
        tls: Certificates; None for an unencrypted connection.

    Raises BadInputError for a header that cannot be sent.
    """

    address: str
    protocol: ProtocolName = "grpc"
    headers: Mapping[str, str] = field(default_factory=dict, repr=False, hash=False)
    tls: Tls | None = None

    def __post_init__(self) -> None:
        for name, value in self.headers.items():
            if not _NAME.fullmatch(name):
                raise BadInputError(f"header {ascii(name)[1:-1]:.60}: not a header name; write NAME:VALUE")
            if not (value.isascii() and value.isprintable()):
                raise BadInputError(f"header {name}: the value has control or non-ASCII characters; remove them")
        if sum(map(len, self.headers.values())) > MAX_HEADER_CHARACTERS:
            raise BadInputError(
                f"headers of more than {MAX_HEADER_CHARACTERS:,} characters: no tritonserver takes them"
            )

    @property
    def host(self) -> str:
        """The host without the brackets of an IPv6 address."""
        return self.address.rpartition(":")[0].strip("[]")

    @property
    def port(self) -> int:
        """The port of the address."""
        return int(self.address.rpartition(":")[2])

    @property
    def sent_headers(self) -> dict[str, str]:
        """The headers with lower-case names: gRPC accepts no others, and HTTP ignores the case."""
        return {name.lower(): value for name, value in self.headers.items()}

    def redact(self, text: str) -> str:
        """Return ``text`` with ``***`` in place of each header value."""
        for value in sorted(filter(None, self.headers.values()), key=len, reverse=True):
            text = text.replace(value, REDACTED)
        return text
